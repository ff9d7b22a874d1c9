"""The weights of a trial's best epoch, which are what it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpo.train.resume import on_host
from hpo.train.sharded import local, parted, whole


class Best:
    """The weights of the best epoch, copied into the same buffers at each improvement."""

    def __init__(self, model: nn.Module) -> None:
        self._model = {name: value for name, value in model.state_dict().items()
                       if isinstance(value, Tensor)}
        # A rank keeps its own part of weights that are in parts.
        self._live = {name: local(value) for name, value in self._model.items()}
        self._kept: dict[str, Tensor] | None = None
        self.epoch = -1
        self.metrics: dict[str, float] = {}

    def keep(self, epoch: int, metrics: dict[str, float]) -> None:
        """Copy the weights as they are now."""
        if self._kept is None:
            self._kept = {name: value.clone() for name, value in self._live.items()}
        else:
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                list(self._kept.values()), list(self._live.values()))
        self.epoch, self.metrics = epoch, dict(metrics)

    def weights(self) -> dict[str, Tensor]:
        """Return the kept weights, or the initial ones before the first epoch, on the host."""
        return {name: whole(value, self._model[name]).detach().cpu().contiguous()
                for name, value in (self._kept or self._live).items()}

    def state_dict(self) -> dict[str, Any]:
        """Return all that is kept."""
        weights = None if self._kept is None else {
            name: on_host(whole(value, self._model[name])) for name, value in self._kept.items()}
        return {"weights": weights, "epoch": self.epoch, "metrics": dict(self.metrics)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep what a `state_dict` held."""
        self.epoch, self.metrics = state["epoch"], dict(state["metrics"])
        self._kept = None if state["weights"] is None else {
            name: local(parted(state["weights"][name].to(live.device), self._model[name]))
            for name, live in self._live.items()}
