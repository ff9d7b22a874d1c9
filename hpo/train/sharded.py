"""A model's weights in parts, one a rank (FSDP2), and whole again where they are written.

What is stored of a trial is the same whether its weights were in parts or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpo.train.groups import layers
from hpo.train.team import Team

# torch.distributed.tensor takes 0.4 s to load, so those alone load it who have parts.


def is_part(value: Any) -> bool:
    """Return whether a tensor is in parts (a DTensor)."""
    return hasattr(value, "full_tensor")


def shard(model: nn.Module, team: Team, device: torch.device) -> None:
    """Have each rank keep its part of a model's weights, and gather those of a layer to use it.

    Source: torch's FSDP2, `torch.distributed.fsdp.fully_shard`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (team.size,))
    # It takes no channels-last weights; inputs stay what they are.
    model.to(memory_format=torch.contiguous_format)
    for part in model.modules():
        # Written into, a view that a layer returns would lose what gathers its weights again.
        if getattr(part, "inplace", False):
            part.inplace = False  # type: ignore[assignment]
    for layer in layers(model):
        # Norms by themselves are gathered with the rest, once a step.
        if layer is not model and any(param.ndim > 1 for param in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    # By itself torch keeps the rest whole until a backward pass: of a mean of the weights, which
    # has none, it would go on using the first one.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def local(value: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory; of a whole one, itself."""
    value = value.detach()
    return value.to_local() if is_part(value) else value  # type: ignore[attr-defined]


def whole(value: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a tensor with the parts of all ranks, which must all ask for it.

    `value` may be a rank's part of a tensor that is in parts as `like` is.
    """
    given: Any = value
    if is_part(like) and not is_part(value):
        from torch.distributed.tensor import DTensor

        shape: Any = like
        given = DTensor.from_local(value, shape.device_mesh, shape.placements, run_check=False,
                                   shape=shape.shape, stride=shape.stride())
    return given.full_tensor() if is_part(given) else given


def parted(value: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor in parts as `like` is; every rank must have the same."""
    shape: Any = like
    if not is_part(like) or value.shape != shape.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(shape.device), shape.device_mesh, shape.placements,
                             src_data_rank=None)


def load_model(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a model the weights of a whole state."""
    parts = model.state_dict()
    if any(map(is_part, parts.values())):
        state = {name: parted(value, parts[name]) for name, value in state.items()}
    model.load_state_dict(state)


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Give an optimizer the moments of a whole state."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(map(is_part, params)):
        parts = {index: {name: parted(value, params[index]) if isinstance(value, Tensor) else value
                         for name, value in moments.items()}
                 for index, moments in state["state"].items()}
        state = {**state, "state": parts}
    optimizer.load_state_dict(dict(state))
