"""Random states that belong to one trial: what others draw does not change it, nor it them."""

from __future__ import annotations

import torch
from torch import Tensor


class PrivateRandom:
    """torch's global random state of one trial, put in place only while the trial computes.

    Dropout and initial weights draw from the global state; what others draw between two epochs
    must not change a trial, nor a trial what others draw.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        self._outer = self._get()
        torch.manual_seed(seed % 2**63)
        self._own = self._get()
        self._set(self._outer)

    def _get(self) -> list[Tensor]:
        cuda = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *cuda]

    def _set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.cuda.set_rng_state(state, self._device)

    def __enter__(self) -> None:
        self._outer = self._get()
        self._set(self._own)

    def __exit__(self, *exc: object) -> None:
        self._own = self._get()
        self._set(self._outer)


def generator(device: torch.device, seed: int) -> torch.Generator:
    """Return a generator of its own, seeded."""
    return torch.Generator(device=device).manual_seed(seed % 2**63)
