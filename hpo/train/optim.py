"""The optimizers a recipe can name: plain values now, torch optimizers when a trial starts.

They use torch's fused step where torch has one, on the CPU as on CUDA: measured on one CPU thread,
an epoch of a small CNN takes 25 % less time than with torch's default loop over the parameters, of
a small MLP 30 %.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hpo.errors import InputError
from hpo.train.checks import number, whole
from hpo.train.named import make_named

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hpo.train.groups import Place

LOG = logging.getLogger("hpo.train")
MUON_SCALES = ("match_rms_adamw", "original")


@dataclass(frozen=True)
class OptimizerSpec(abc.ABC):
    """What every optimizer has beside its own fields.

    `weight_decay` and `l1` act on weights: not on biases, norms and other parameters of one axis,
    unless `decay_all`. `l1` adds that part of each weight's sign to its gradient, after clipping,
    as l1 * sum(|w|) in the loss does. The head, the last layer, learns `head_lr_factor` times as
    fast as it would; what does not decay, `bias_lr_factor` times; each layer `layer_decay` times
    as fast as the one after it. Layers are counted as the model registers them.

    Source: `layer_decay`: Clark et al., ELECTRA, appendix A.
    """

    # The rates between which the range test sweeps.
    sweep_bounds: ClassVar[tuple[float, float]] = (1e-6, 1.0)

    lr: float = 1e-3
    _: KW_ONLY
    weight_decay: float = 0.0
    l1: float = 0.0
    decay_all: bool = False
    head_lr_factor: float = 1.0
    bias_lr_factor: float = 1.0
    layer_decay: float = 1.0

    def __post_init__(self) -> None:
        name = type(self).__name__
        number(f"{name}.lr", self.lr, low=0.0, open_low=True)
        number(f"{name}.weight_decay", self.weight_decay, low=0.0)
        number(f"{name}.l1", self.l1, low=0.0)
        number(f"{name}.head_lr_factor", self.head_lr_factor, low=0.0, open_low=True)
        number(f"{name}.bias_lr_factor", self.bias_lr_factor, low=0.0, open_low=True)
        number(f"{name}.layer_decay", self.layer_decay, low=0.0, high=1.0, open_low=True)
        self._flags("decay_all")

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the torch optimizer of a model's parameters, in groups.

        Each group's `lr_scale` is the factor between the recipe's rate and its own.

        Raises:
            InputError: if the model has no parameters.
        """
        from hpo.train.groups import add_penalties, param_groups

        made = self._torch(param_groups(model, self._options))
        if any(group.get("l1") or group.get("decoupled_decay") for group in made.param_groups):
            add_penalties(made)
        # A grid's numpy numbers would make the state one that only numpy can read.
        for group in made.param_groups:
            group.update({name: value.item() for name, value in group.items()
                          if type(value).__module__ == "numpy"})
        return made

    @abc.abstractmethod
    def _torch(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return the torch optimizer of ready groups."""

    def _options(self, place: Place) -> dict[str, Any]:
        """Return the options of the group that a parameter belongs to."""
        scale = self.layer_decay ** (place.n_layers - 1 - place.layer)
        if place.layer == place.n_layers - 1:
            scale *= self.head_lr_factor
        if not place.is_weight:
            scale *= self.bias_lr_factor
        decays = self.decay_all or place.is_weight
        options = {"lr": float(self.lr * scale), "lr_scale": float(scale),
                   "weight_decay": float(self.weight_decay) if decays else 0.0}
        if self.l1 and decays:
            options["l1"] = float(self.l1)
        return options

    def _flags(self, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{type(self).__name__}.{name}: must be True or False, got "
                                 f"{getattr(self, name)!r}")

    def _pair(self, name: str) -> None:
        value, where = getattr(self, name), f"{type(self).__name__}.{name}"
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise InputError(f"{where}: must be a pair of numbers, got {value!r}")
        for one in value:
            number(where, one, low=0.0, high=1.0, open_high=True)
        object.__setattr__(self, name, tuple(map(float, value)))

    def _part(self, name: str) -> None:
        number(f"{type(self).__name__}.{name}", getattr(self, name),
               low=0.0, high=1.0, open_high=True)

    def _eps(self, eps: float) -> None:
        number(f"{type(self).__name__}.eps", eps, low=0.0)


@dataclass(frozen=True)
class _WithL2(OptimizerSpec):
    """An optimizer whose weight decay is L2's, added to the gradient, as torch's.

    With `decoupled_decay` it shrinks the weights by lr * weight_decay before the step instead, as
    AdamW's does: then its best value does not move with the gradients' size.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 1.
    """

    _: KW_ONLY
    decoupled_decay: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._flags("decoupled_decay")

    def _options(self, place: Place) -> dict[str, Any]:
        options = super()._options(place)
        if self.decoupled_decay:
            options.update(weight_decay=0.0, decoupled_decay=options["weight_decay"])
        return options


@dataclass(frozen=True)
class SGD(_WithL2):
    """Stochastic gradient descent with (Nesterov) momentum, as torch's.

    Usual rates: 0.01 to 0.1.
    """

    sweep_bounds: ClassVar[tuple[float, float]] = (1e-5, 10.0)

    lr: float = 0.1
    _: KW_ONLY
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._part("momentum")
        self._flags("nesterov")

    def _torch(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        import torch

        # Nesterov's step needs momentum: with momentum 0 both are plain gradient descent.
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, fused=True,
                               nesterov=self.nesterov and self.momentum > 0)


@dataclass(frozen=True)
class _AdamLike(OptimizerSpec):
    """What Adam and AdamW have in common."""

    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pair("betas")
        self._eps(self.eps)
        self._flags("amsgrad")

    def _fields(self) -> dict[str, Any]:
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps, "amsgrad": self.amsgrad,
                "fused": True}


@dataclass(frozen=True)
class Adam(_AdamLike):
    """Adam, and AMSGrad with `amsgrad`, as torch's; AdamW is the one with decoupled decay.

    Usual rates: 1e-4 to 1e-3.

    Source: Kingma and Ba, Adam, algorithm 1; Reddi et al., On the Convergence of Adam and Beyond.
    """

    def _torch(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        import torch

        return torch.optim.Adam(groups, **self._fields())


@dataclass(frozen=True)
class AdamW(_AdamLike):
    """AdamW, with decoupled weight decay, as torch's.

    Usual rates: 1e-4 to 1e-2 for small networks, 1e-5 to 5e-4 for transformers.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2.
    """

    _: KW_ONLY
    weight_decay: float = 1e-2

    def _torch(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        import torch

        return torch.optim.AdamW(groups, **self._fields())


@dataclass(frozen=True)
class RMSprop(_WithL2):
    """RMSprop, as torch's. Usual rates: 1e-4 to 1e-2."""

    lr: float = 1e-2
    _: KW_ONLY
    alpha: float = 0.99
    momentum: float = 0.0
    centered: bool = False
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._part("alpha")
        self._part("momentum")
        self._flags("centered")
        self._eps(self.eps)

    def _torch(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        import torch

        return torch.optim.RMSprop(groups, lr=self.lr, alpha=self.alpha, eps=self.eps,
                                   momentum=self.momentum, centered=self.centered)


@dataclass(frozen=True)
class Adagrad(_WithL2):
    """Adagrad, as torch's. Usual rates: 1e-3 to 1e-1."""

    sweep_bounds: ClassVar[tuple[float, float]] = (1e-5, 10.0)

    lr: float = 1e-2
    _: KW_ONLY
    eps: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._eps(self.eps)

    def _torch(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        import torch

        # Older torch has a fused Adagrad on the CPU only.
        on_cpu = all(p.device.type == "cpu" for group in groups for p in group["params"])
        return torch.optim.Adagrad(groups, lr=self.lr, eps=self.eps, fused=on_cpu or None)


@dataclass(frozen=True)
class Adadelta(_WithL2):
    """Adadelta, as torch's. Usual rates: 0.1 to 1."""

    sweep_bounds: ClassVar[tuple[float, float]] = (1e-4, 100.0)

    lr: float = 1.0
    _: KW_ONLY
    rho: float = 0.9
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        self._part("rho")
        self._eps(self.eps)

    def _torch(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        import torch

        return torch.optim.Adadelta(groups, lr=self.lr, rho=self.rho, eps=self.eps)


@dataclass(frozen=True)
class LAMB(OptimizerSpec):
    """LAMB, for large batches: Adam's step scaled to the size of each layer's weights.

    Biases and norms, which do not decay, are not scaled either; with `decay_all` they are.
    Usual rates: 1e-3 to 1e-2.

    Source: You et al., Large Batch Optimization for Deep Learning, algorithm 2.
    """

    lr: float = 2e-3
    _: KW_ONLY
    weight_decay: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pair("betas")
        self._eps(self.eps)

    def _options(self, place: Place) -> dict[str, Any]:
        return {**super()._options(place), "adapts": self.decay_all or place.is_weight}

    def _torch(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        from hpo.train.steps import Lamb

        return Lamb(groups, self.lr, self.betas, self.eps, self.weight_decay)


@dataclass(frozen=True)
class Muon(OptimizerSpec):
    """Muon for hidden weights, AdamW for the rest: first weight, head, embeddings, biases, norms.

    `scale` "match_rms_adamw" makes Muon's steps as large as AdamW's, so that one `lr` and one
    `weight_decay` suit both: usual rates 1e-4 to 1e-2. With "original" Muon's usual rate is 0.02,
    and AdamW's is `adamw_lr_factor` times it: 0.015 is usual. Its decay is decoupled. `momentum`
    and `nesterov` are Muon's, `betas` and `eps` are AdamW's.

    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024); Liu et
    al., Muon is Scalable for LLM Training, equation 4.
    """

    _: KW_ONLY
    weight_decay: float = 1e-2
    momentum: float = 0.95
    nesterov: bool = True
    n_iterations: int = 5
    scale: str = "match_rms_adamw"
    adamw_lr_factor: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._part("momentum")
        self._flags("nesterov")
        whole("Muon.n_iterations", self.n_iterations, low=1)
        if self.scale not in MUON_SCALES:
            raise InputError(f"Muon.scale: must be {' or '.join(map(repr, MUON_SCALES))}, got "
                             f"{self.scale!r}")
        number("Muon.adamw_lr_factor", self.adamw_lr_factor, low=0.0, open_low=True)
        self._pair("betas")
        self._eps(self.eps)

    def _options(self, place: Place) -> dict[str, Any]:
        options = {**super()._options(place), "hidden": place.is_hidden}
        if not place.is_hidden:
            options["lr_scale"] *= float(self.adamw_lr_factor)
            options["lr"] = float(self.lr * options["lr_scale"])
        return options

    def _torch(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        from hpo.train.steps import MuonWithAdamW

        if not any(group["hidden"] for group in groups):
            LOG.warning("Muon: the model has no weight between its first and its head, so AdamW "
                        "trains all of it")
        return MuonWithAdamW(groups, lr=self.lr, weight_decay=self.weight_decay,
                             momentum=self.momentum, nesterov=self.nesterov, scale=self.scale,
                             n_iterations=self.n_iterations, betas=self.betas, eps=self.eps)


OPTIMIZERS: dict[str, tuple[type[OptimizerSpec], Mapping[str, Any]]] = {
    "sgd": (SGD, {}), "adam": (Adam, {}), "amsgrad": (Adam, {"amsgrad": True}),
    "adamw": (AdamW, {}), "rmsprop": (RMSprop, {}), "adagrad": (Adagrad, {}),
    "adadelta": (Adadelta, {}), "lamb": (LAMB, {}), "muon": (Muon, {})}


def optimizer(name: str, *, lr: float | None = None, weight_decay: float | None = None,
              **fields: Any) -> OptimizerSpec:
    """Return the optimizer of a name, as `Categorical("sgd", "adamw", ...)` gives it.

    The names: sgd, adam, amsgrad, adamw, rmsprop, adagrad, adadelta, lamb, muon. None is the
    optimizer's own default.

    Raises:
        InputError: if there is no such optimizer, or it has no such field.
    """
    given = {"lr": lr, "weight_decay": weight_decay}
    return make_named("optimizer", name, OPTIMIZERS, {
        **{field: value for field, value in given.items() if value is not None}, **fields})
