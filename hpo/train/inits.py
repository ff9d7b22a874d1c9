"""Initial weights by name, for the models that ship and for a user's own module.

Weights are drawn from torch's global random state, which is the trial's own while the loop makes
its model; so the same seed gives the same weights. Loads no torch before a module is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from hpo.errors import InputError
from hpo.train.checks import one_of

if TYPE_CHECKING:
    from torch import Tensor, nn

INITS = ("default", "kaiming", "lecun", "xavier", "orthogonal", "truncated_normal",
         "zero_residual")
# As BERT and ViT have it; cut off at two deviations.
TRUNCATED_STD = 0.02

Module = TypeVar("Module", bound="nn.Module")


def initialise(module: Module, init: str) -> Module:
    """Set the weights of a module's linear, convolution and attention layers by name; return it.

    Call it in the function that makes the model (`model=lambda: initialise(Net(), "kaiming")`), so
    that the trial's seed decides. Biases of these layers become 0; all other layers, norms too,
    stay as they are. `default` changes nothing. `kaiming` has variance 2 / inputs, for ReLU and
    its kin; `lecun` 1 / inputs, for SELU; `xavier` 2 / (inputs + outputs); `orthogonal` has
    orthogonal rows or columns; `truncated_normal` has deviation 0.02. `zero_residual` starts the
    residual blocks of a shipped model as the identity: the last layer of each branch is 0, and all
    else is as by default.

    Raises:
        InputError: if there is no such name, or the module has no layer that it acts on.
    Source: He et al. 2015, equation 10 (kaiming); Klambauer et al. 2017, section 3 (lecun); Glorot
        and Bengio 2010, equation 12 (xavier, its normal form); Saxe et al. 2014 (orthogonal);
        Goyal et al. 2017, section 5.1 (zero_residual).
    """
    one_of("init", init, INITS)
    if init == "default":
        return module
    n_set = _zero_branches(module) if init == "zero_residual" else _set_weights(module, init)
    if not n_set:
        wanted = ("residual block of hpo's own" if init == "zero_residual"
                  else "linear, convolution or attention layer")
        raise InputError(f"init '{init}': {type(module).__name__} has no {wanted}")
    return module


def _set_weights(module: nn.Module, init: str) -> int:
    from torch import nn
    from torch.nn.modules.conv import _ConvNd

    n_set = 0
    for part in module.modules():
        if isinstance(part, (nn.Linear, _ConvNd)):
            weights, biases = [part.weight], [part.bias]
        elif isinstance(part, nn.MultiheadAttention):
            weights, biases = _projections(part), [part.in_proj_bias, part.bias_k, part.bias_v]
        else:
            continue
        for weight in weights:
            _draw(weight, init)
        for bias in biases:
            if bias is not None:
                nn.init.zeros_(bias)
        n_set += 1
    return n_set


def _projections(part: Any) -> list[Tensor]:
    """Return the weights of queries, keys and values, which torch may keep in one parameter."""
    if part.in_proj_weight is not None:
        return list(part.in_proj_weight.chunk(3))
    return [part.q_proj_weight, part.k_proj_weight, part.v_proj_weight]


def _draw(weight: Tensor, init: str) -> None:
    from torch import nn

    if init == "kaiming":
        nn.init.kaiming_normal_(weight, nonlinearity="relu")
    elif init == "lecun":
        nn.init.kaiming_normal_(weight, nonlinearity="linear")
    elif init == "xavier":
        nn.init.xavier_normal_(weight)
    elif init == "orthogonal":
        nn.init.orthogonal_(weight)
    else:
        nn.init.trunc_normal_(weight, std=TRUNCATED_STD, a=-2 * TRUNCATED_STD,
                              b=2 * TRUNCATED_STD)


def _zero_branches(module: nn.Module) -> int:
    from torch import Tensor, nn

    from hpo.train.layers import Residual

    blocks = [part for part in module.modules() if isinstance(part, Residual)]
    for block in blocks:
        last = [part for part in block.branch.modules()
                if isinstance(getattr(part, "weight", None), nn.Parameter)][-1]
        for value in (last.weight, getattr(last, "bias", None)):
            if isinstance(value, Tensor):
                nn.init.zeros_(value)
    return len(blocks)
