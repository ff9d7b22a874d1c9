"""The running mean of a model's weights, in a module of its own that is evaluated and kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpo.train.regularize import EMA
from hpo.train.resume import on_host
from hpo.train.sharded import load_model, local


class Averaged:
    """A copy of a model, `mean`, whose floating weights and buffers follow those of the model.

    torch's AveragedModel averages whole numbers too, where batch norm counts, and names its
    weights differently.
    """

    def __init__(self, model: nn.Module, mean: nn.Module, spec: EMA) -> None:
        self.model = mean
        self._spec = spec
        self._n_steps = 0
        pairs = list(zip(_tensors(self.model), _tensors(model), strict=True))
        floats = [pair for pair in pairs if pair[0].is_floating_point()]
        self._means, self._live = [mean for mean, _ in floats], [live for _, live in floats]
        self._others = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def follow(self) -> None:
        """Take in the model's weights after an optimizer step."""
        self._n_steps += 1
        part = 1.0 - self._spec.decay_at(self._n_steps)
        if self._means:
            torch._foreach_lerp_(  # pyright: ignore[reportPrivateImportUsage]
                self._means, self._live, part)
        for copied, live in self._others:
            copied.copy_(live)

    def state_dict(self) -> dict[str, Any]:
        """Return the mean on the host, and how many steps are in it."""
        return {"model": on_host(self.model.state_dict()), "n_steps": self._n_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        load_model(self.model, state["model"])
        self._n_steps = state["n_steps"]


def _tensors(model: nn.Module) -> list[Tensor]:
    return [local(value) for value in (*model.parameters(), *model.buffers())]
