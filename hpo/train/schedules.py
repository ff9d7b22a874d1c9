"""Learning-rate schedules as plain numbers: the rate of every step, known before the first one.

A list of floats needs no scheduler object in the loop and nothing but the step to be resumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from hpo.train.checks import number


class Schedule(Protocol):
    """What the loop asks of a schedule."""

    def rates(self, n_steps: int, peak: float) -> list[float]:
        """Return the learning rate of each of `n_steps` steps; `peak` is the optimizer's rate."""
        ...


def _cosine(start: float, end: float, part: float) -> float:
    return end + (start - end) / 2.0 * (math.cos(math.pi * part) + 1.0)


@dataclass(frozen=True)
class OneCycle:
    """Rise by a cosine to the optimizer's rate, then fall by a cosine to nearly nothing.

    The rates equal torch's `OneCycleLR` with the same arguments. Momentum is not cycled: a
    searched momentum or beta would otherwise be overwritten without a word.

    Source: Smith and Topin, Super-Convergence, with cosine arms.
    """

    warmup_fraction: float = 0.3
    div_factor: float = 25.0
    final_div_factor: float = 1e4

    def __post_init__(self) -> None:
        number("OneCycle.warmup_fraction", self.warmup_fraction, low=0.0, high=1.0)
        number("OneCycle.div_factor", self.div_factor, low=1.0)
        number("OneCycle.final_div_factor", self.final_div_factor, low=1.0)

    def rates(self, n_steps: int, peak: float) -> list[float]:
        """Return the learning rate of each step."""
        start = peak / self.div_factor
        end = start / self.final_div_factor
        top = float(self.warmup_fraction * n_steps) - 1.0
        last = n_steps - 1.0
        return [
            _cosine(start, peak, step / top) if step <= top and top > 0
            else _cosine(peak, end, (step - top) / (last - top)) if last > top
            else peak
            for step in range(n_steps)
        ]


@dataclass(frozen=True)
class WarmupCosine:
    """Rise in a line to the optimizer's rate, then fall by a half cosine to a part of it.

    Source: Loshchilov and Hutter, SGDR, equation 5, with one period and a linear warm-up.
    """

    warmup_fraction: float = 0.1
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        number("WarmupCosine.warmup_fraction", self.warmup_fraction,
               low=0.0, high=1.0, open_high=True)
        number("WarmupCosine.final_fraction", self.final_fraction, low=0.0, high=1.0)

    def rates(self, n_steps: int, peak: float) -> list[float]:
        """Return the learning rate of each step: step i of w warm-up steps has peak * (i+1)/(w+1).

        No step has rate 0 at the start, where it would be spent for nothing.
        """
        warm = round(self.warmup_fraction * n_steps)
        span = max(1, n_steps - 1 - warm)
        floor = peak * self.final_fraction
        return [
            peak * (step + 1) / (warm + 1) if step < warm
            else _cosine(peak, floor, (step - warm) / span)
            for step in range(n_steps)
        ]


@dataclass(frozen=True)
class Constant:
    """Keep the optimizer's rate."""

    def rates(self, n_steps: int, peak: float) -> list[float]:
        """Return the learning rate of each step."""
        return [peak] * n_steps
