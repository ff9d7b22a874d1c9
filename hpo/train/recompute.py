"""Activation checkpointing: a block's inner values are computed again when its gradient is taken.

A training step then holds the inputs of the blocks only, for about a third more of computing.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpo.errors import InputError

FIELD = "Recipe.checkpoint_activations"


def recomputed(model: nn.Module, *, nested: bool) -> nn.Module:
    """Return the model, changed so that the blocks of its `nn.Sequential`s are computed again.

    A block begins at each child with a weight matrix, and takes along the norms, activations and
    so on that follow. `nested` looks for the outermost `nn.Sequential`s within any module, which
    suits those that are known to call them; else the model itself must be one. Random draws are
    the same the second time, and buffers such as the means of batch norm are updated once; names
    and weights stay. Gradients are those of the same model without it, to the last bit on the CPU.

    Raises:
        InputError: if there is no block to compute again.
    Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, algorithm 1.
    """
    chains = _outermost(model) if nested else [model] if _is_chain(model) else []
    blocks = {chain: _blocks(chain) for chain in chains}
    if not any(_has_weight(layer) for chain in chains for layer in chain.children()):
        wanted = ("nn.Sequential of layers with weights within it" if nested
                  else "nn.Sequential of layers with weights")
        raise InputError(f"{FIELD}: {type(model).__name__} is no {wanted}, so there are no blocks "
                         f"to compute again; set it to False, or give the model as nn.Sequential")
    for chain, parts in blocks.items():
        # On the instance, so that parameters keep their names and a copy has blocks of its own.
        chain.forward = partial(_run, parts)  # type: ignore[method-assign]
    return model


def _is_chain(module: nn.Module) -> bool:
    # A class of its own may do more than to call its layers in turn.
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _outermost(module: nn.Module) -> list[nn.Module]:
    if _is_chain(module):
        return [module]
    return [chain for child in module.children() for chain in _outermost(child)]


def _has_weight(layer: nn.Module) -> bool:
    return any(param.ndim > 1 for param in layer.parameters())


def _blocks(chain: nn.Module) -> list[list[nn.Module]]:
    """Return the chain's layers in blocks; those before the first weight go with it."""
    blocks: list[list[nn.Module]] = [[]]
    for layer in chain.children():
        if _has_weight(layer) and any(map(_has_weight, blocks[-1])):
            blocks.append([])
        blocks[-1].append(layer)
    return blocks


def _run(blocks: list[list[nn.Module]], x: Any) -> Any:
    for block in blocks:
        x = _run_block(block, x)
    return x


def _run_block(block: list[nn.Module], x: Any) -> Any:
    if not torch.is_grad_enabled():
        return _through(block, x)
    if torch.compiler.is_compiling():
        # The compiler knows itself how to update a buffer once, and takes no context of Python's.
        return checkpoint(partial(_through, block), x, use_reentrant=False)
    version = x._version if isinstance(x, Tensor) else 0
    out = checkpoint(partial(_through, block), x, use_reentrant=False,
                     context_fn=partial(_contexts, block))
    if isinstance(x, Tensor) and x._version != version:
        raise InputError(f"{FIELD}: {type(block[0]).__name__} changes its input in place, so it "
                         f"cannot be computed again; set it to False, or use inplace=False")
    return out


def _through(block: list[nn.Module], x: Any) -> Any:
    for layer in block:
        x = layer(x)
    return x


def _contexts(block: list[nn.Module]) -> tuple[Any, Any]:
    """Return what the first and the second computation of a block run in."""
    places = [(part._buffers, name) for layer in block for part in layer.modules()
              for name, buffer in part._buffers.items() if buffer is not None]
    if not places:
        return nullcontext(), nullcontext()
    before = _Before(places)
    return before, _Again(before)


class _Before:
    """Keeps the buffers of a block as they were before the first computation.

    All of them: batch norm writes into its own without raising their version.
    """

    def __init__(self, places: list[tuple[dict[str, Any], str]]) -> None:
        self.places = places
        self.copies: list[Tensor] = []

    def __enter__(self) -> None:
        self.copies = [buffers[name].clone() for buffers, name in self.places]

    def __exit__(self, *exc: object) -> None:
        """Do nothing: the block's buffers are as the first computation left them."""


class _Again:
    """Lends the second computation those buffers, and puts the live ones back after it."""

    def __init__(self, before: _Before) -> None:
        self._before = before
        self._live: list[Tensor] = []

    def __enter__(self) -> None:
        self._live = [buffers[name] for buffers, name in self._before.places]
        rows = zip(self._before.places, self._before.copies, strict=True)
        for (buffers, name), copy in rows:
            buffers[name] = copy.clone()

    def __exit__(self, *exc: object) -> None:
        for (buffers, name), value in zip(self._before.places, self._live, strict=True):
            buffers[name] = value
