"""Which parameters decay, and how fast each layer learns: a model's parameters in groups.

Works on any module: what a layer is follows from how modules contain each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hpo.errors import InputError

# Modules that only hold others in order. A subclass has a meaning of its own, and is one layer.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True, eq=False)
class Place:
    """Where a parameter stands in its model.

    `layer` counts from 0 at the input to `n_layers` - 1, the head. `is_weight` is False of biases,
    of norms' parameters and of all others with one axis. `is_hidden` is True of the weights
    between the first weight of the model and its head, embeddings and lone rows apart.
    """

    param: nn.Parameter
    layer: int
    n_layers: int
    is_weight: bool
    is_hidden: bool


def param_groups(model: nn.Module, options: Callable[[Place], dict[str, Any]]
                 ) -> list[dict[str, Any]]:
    """Return a model's parameters in groups of the same options, in the model's order.

    Raises:
        InputError: if the model has no parameters.
    """
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for place in places(model):
        fields = options(place)
        group = groups.setdefault(tuple(fields.items()), {"params": [], **fields})
        group["params"].append(place.param)
    if not groups:
        raise InputError(f"Recipe.model: {type(model).__name__} has no parameters to train")
    return list(groups.values())


def places(model: nn.Module) -> list[Place]:
    """Return the place of each parameter, in the order of `model.parameters()`.

    A layer is a member of a Sequential or a ModuleList, or a module that holds neither of several
    layers; what has no weights (a norm) belongs to the layer before it. Parameters beside the
    layers, as a class token, count to the first.
    """
    layer_of: dict[int, int] = {}
    n_layers = 0
    first: nn.Module | None = None
    for unit in layers(model):
        heavy = [part for part in unit.modules() if _has_weight(part)]
        first = first or next(iter(heavy), None)
        if heavy or not n_layers:
            n_layers += 1
        for param in unit.parameters():
            layer_of.setdefault(id(param), n_layers - 1)
    n_layers = max(1, n_layers)
    found: dict[int, Place] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            layer = layer_of.get(id(param), 0)
            weight = _is_weight(module, name, param)
            hidden = (weight and id(param) in layer_of and layer < n_layers - 1
                      and module is not first and not isinstance(module, nn.Embedding)
                      and len(param) > 1 and param[0].numel() > 1)
            found.setdefault(id(param), Place(param, layer, n_layers, weight, hidden))
    return list(found.values())


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give each group the rate times its own factor, `lr_scale`, where it has one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def add_penalties(optimizer: torch.optim.Optimizer) -> None:
    """Let each step add the groups' `l1`, and their `decoupled_decay`, that torch's step lacks."""
    optimizer.register_step_pre_hook(_penalise)


@torch.no_grad()
def _penalise(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    # A fused step unscales gradients itself and leaves the parameters where one overflowed: a
    # GradScaler hands it both, as tensors on the device.
    scale = getattr(optimizer, "grad_scale", None)
    overflowed = getattr(optimizer, "found_inf", None)
    for group in optimizer.param_groups:
        params = [p for p in group["params"] if p.grad is not None]
        l1, decay = group.get("l1", 0.0), group.get("decoupled_decay", 0.0)
        for param in params if l1 else ():
            slope = param.sign() if scale is None else param.sign() * scale.to(param.device)
            param.grad.add_(slope.to(param.grad.dtype), alpha=l1)
        for param in params if decay else ():
            if overflowed is None:
                param.mul_(1.0 - group["lr"] * decay)
            else:
                stays = overflowed.to(param.device).clamp(max=1.0)
                param.mul_(1.0 - group["lr"] * decay * (1.0 - stays))


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules with parameters that are a layer each, or a part of one, in order."""
    member = type(module) in _CONTAINERS
    for child in module.children():
        if type(child) in _CONTAINERS or not member and _holds_layers(child):
            yield from layers(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _holds_layers(module: nn.Module) -> bool:
    """Return whether a container inside has several members with weights."""
    return any(type(part) in _CONTAINERS and sum(
        any(map(_has_weight, child.modules())) for child in part.children()) > 1
        for part in module.modules())


def _has_weight(module: nn.Module) -> bool:
    return any(_is_weight(module, name, param)
               for name, param in module.named_parameters(recurse=False))


def _is_weight(module: nn.Module, name: str, param: nn.Parameter) -> bool:
    return param.ndim > 1 and not isinstance(module, _NORMS) and not name.endswith("bias")
