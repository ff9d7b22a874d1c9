"""Random states that belong to one trial: what others draw does not change it, nor it them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
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

    def get_state(self) -> list[Tensor]:
        """Return the trial's state, to be given to `set_state` of another process's."""
        return [state.clone() for state in self._own]

    def set_state(self, states: list[Tensor]) -> None:
        """Go on from a state; one of CUDA is left out where the trial runs on the CPU now."""
        self._own = [state.clone() for state in states[:len(self._own)]]

    def __enter__(self) -> None:
        self._outer = self._get()
        self._set(self._own)

    def __exit__(self, *exc: object) -> None:
        self._own = self._get()
        self._set(self._outer)


def global_state() -> dict[str, Any]:
    """Return the states of `random` and `numpy.random`, which items of a dataset may draw from."""
    version, words, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=True)
    kind, keys, *rest = numpy
    return {"python": [version, list(words), gauss],
            "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest]}


def set_global_state(state: Mapping[str, Any]) -> None:
    """Have `random` and `numpy.random` go on from a `global_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))


@contextmanager
def same_draws(seed: int = 0) -> Iterator[None]:
    """Have everything that draws from the global states draw the same each time, for the while."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    # That of the CPU alone: torch.manual_seed would change those of all GPUs, and keep none.
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def generator(device: torch.device, seed: int) -> torch.Generator:
    """Return a generator of its own, seeded."""
    return torch.Generator(device=device).manual_seed(seed % 2**63)
