"""Learning-rate schedules as plain numbers: the rate of every step, known before the first one.

A list of floats needs no scheduler object in the loop and nothing but the step to be resumed. All
lengths are fractions of the training, not epochs, so that a schedule keeps its shape when a trial
has more or fewer of them; `Plateau` alone counts epochs and looks at what they gave.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hpo.errors import InputError
from hpo.train.checks import number, whole
from hpo.train.named import make_named


class Schedule(Protocol):
    """What the loop asks of a schedule."""

    def rates(self, n_steps: int, peak: float) -> list[float]:
        """Return the learning rate of each of `n_steps` steps; `peak` is the optimizer's rate."""
        ...


def _cosine(start: float, end: float, part: float) -> float:
    return end + (start - end) / 2.0 * (math.cos(math.pi * part) + 1.0)


def _n_warm(warmup_fraction: float, n_steps: int) -> int:
    return round(warmup_fraction * n_steps)


def _warmed(rates: list[float], n_warm: int) -> list[float]:
    """Return rates whose first ones rise in a line: step i of w has (i + 1) / (w + 1) of its own.

    No step has rate 0 at the start, where it would be spent for nothing.
    """
    return [rate * (step + 1) / (n_warm + 1) if step < n_warm else rate
            for step, rate in enumerate(rates)]


def _check_warmup(spec: Any) -> None:
    number(f"{type(spec).__name__}.warmup_fraction", spec.warmup_fraction,
           low=0.0, high=1.0, open_high=True)


def _check_final(spec: Any, *, open_low: bool = False) -> None:
    number(f"{type(spec).__name__}.final_fraction", spec.final_fraction,
           low=0.0, high=1.0, open_low=open_low)


def _check_gamma(where: str, gamma: Any) -> None:
    number(where, gamma, low=0.0, high=1.0, open_low=True)


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
        _check_warmup(self)
        _check_final(self)

    def rates(self, n_steps: int, peak: float) -> list[float]:
        """Return the learning rate of each step; the last has the final part of the rate."""
        warm = _n_warm(self.warmup_fraction, n_steps)
        span = max(1, n_steps - 1 - warm)
        floor = peak * self.final_fraction
        return _warmed([_cosine(peak, floor, max(0, step - warm) / span)
                        for step in range(n_steps)], warm)


@dataclass(frozen=True)
class Constant:
    """Keep the optimizer's rate, after a warm-up in a line if there is one."""

    warmup_fraction: float = 0.0

    def __post_init__(self) -> None:
        _check_warmup(self)

    def rates(self, n_steps: int, peak: float) -> list[float]:
        """Return the learning rate of each step."""
        return _warmed([peak] * n_steps, _n_warm(self.warmup_fraction, n_steps))


@dataclass(frozen=True)
class Step:
    """Multiply the rate by `gamma` after each `step_fraction` of the training.

    The rates equal torch's `StepLR`, stepped per optimizer step, with `step_size` that part of the
    steps. Where torch is told 30 of 90 epochs, `step_fraction` is 1/3, a warm-up included.
    """

    step_fraction: float = 1.0 / 3.0
    gamma: float = 0.1
    warmup_fraction: float = 0.0

    def __post_init__(self) -> None:
        number("Step.step_fraction", self.step_fraction, low=0.0, high=1.0, open_low=True)
        _check_gamma("Step.gamma", self.gamma)
        _check_warmup(self)

    def rates(self, n_steps: int, peak: float) -> list[float]:
        """Return the learning rate of each step."""
        size = max(1, round(self.step_fraction * n_steps))
        return _warmed([peak * self.gamma ** (step // size) for step in range(n_steps)],
                       _n_warm(self.warmup_fraction, n_steps))


@dataclass(frozen=True)
class MultiStep:
    """Multiply the rate by `gamma` at each of some fractions of the training.

    The rates equal torch's `MultiStepLR`, stepped per optimizer step. Where torch is told epochs
    30 and 60 of 90, `milestone_fractions` are (1/3, 2/3), a warm-up included.
    """

    milestone_fractions: tuple[float, ...] = (0.5, 0.75)
    gamma: float = 0.1
    warmup_fraction: float = 0.0

    def __post_init__(self) -> None:
        where, given = "MultiStep.milestone_fractions", self.milestone_fractions
        if not isinstance(given, (tuple, list)) or not given:
            raise InputError(f"{where}: must be some fractions of the training such as "
                             f"(0.5, 0.75), got {given!r}")
        for one in given:
            number(where, one, low=0.0, high=1.0, open_low=True, open_high=True)
        if any(a >= b for a, b in zip(given, given[1:], strict=False)):
            raise InputError(f"{where}: must rise, got {given!r}")
        object.__setattr__(self, "milestone_fractions", tuple(given))
        _check_gamma("MultiStep.gamma", self.gamma)
        _check_warmup(self)

    def rates(self, n_steps: int, peak: float) -> list[float]:
        """Return the learning rate of each step."""
        at = [round(part * n_steps) for part in self.milestone_fractions]
        return _warmed([peak * self.gamma ** sum(step >= one for one in at)
                        for step in range(n_steps)], _n_warm(self.warmup_fraction, n_steps))


@dataclass(frozen=True)
class Exponential:
    """Let the rate fall by the same factor each step, to `final_fraction` of it at the end.

    The rates equal torch's `ExponentialLR`, stepped per optimizer step, whose gamma to the power
    of all steps after the warm-up is `final_fraction`. Where torch is told a gamma per epoch,
    `final_fraction` is gamma to the power of the epochs.
    """

    final_fraction: float = 0.01
    warmup_fraction: float = 0.0

    def __post_init__(self) -> None:
        _check_final(self, open_low=True)
        _check_warmup(self)

    def rates(self, n_steps: int, peak: float) -> list[float]:
        """Return the learning rate of each step."""
        warm = _n_warm(self.warmup_fraction, n_steps)
        span = max(1, n_steps - warm)
        return _warmed([peak * self.final_fraction ** (max(0, step - warm) / span)
                        for step in range(n_steps)], warm)


@dataclass(frozen=True)
class Cosine:
    """Fall by a half cosine to a part of the rate; `WarmupCosine` has a warm-up before it.

    The rates equal torch's `CosineAnnealingLR` with `T_max` all steps, where the step after the
    last would have the final rate.

    Source: Loshchilov and Hutter, SGDR, equation 5, with one period.
    """

    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        _check_final(self)

    def rates(self, n_steps: int, peak: float) -> list[float]:
        """Return the learning rate of each step."""
        floor = peak * self.final_fraction
        return [_cosine(peak, floor, step / n_steps) for step in range(n_steps)]


@dataclass(frozen=True)
class CosineRestarts:
    """Fall by half cosines, each from the whole rate; a cycle has `mult` times the steps before.

    The cycles fill the training after the warm-up: the last one ends with it. Where their steps
    are whole numbers the rates equal torch's `CosineAnnealingWarmRestarts` with `T_0` the first
    cycle and `T_mult` `mult`.

    Source: Loshchilov and Hutter, SGDR, equation 5.
    """

    n_cycles: int = 3
    mult: int = 2
    final_fraction: float = 0.0
    warmup_fraction: float = 0.0

    def __post_init__(self) -> None:
        whole("CosineRestarts.n_cycles", self.n_cycles, low=1)
        whole("CosineRestarts.mult", self.mult, low=1)
        _check_final(self)
        _check_warmup(self)

    def rates(self, n_steps: int, peak: float) -> list[float]:
        """Return the learning rate of each step."""
        warm = _n_warm(self.warmup_fraction, n_steps)
        lengths = [self.mult ** cycle for cycle in range(self.n_cycles)]
        bounds = [round((n_steps - warm) * sum(lengths[:cycle]) / sum(lengths))
                  for cycle in range(self.n_cycles + 1)]
        falling = [_cosine(peak, peak * self.final_fraction, step / (end - start))
                   for start, end in zip(bounds, bounds[1:], strict=False)
                   for step in range(end - start)]
        return _warmed([peak] * warm + falling, warm)


@dataclass(frozen=True)
class Linear:
    """Rise in a line to the optimizer's rate, then fall in a line to a part of it: a triangle.

    The fall equals torch's `LinearLR` from 1 to `final_fraction` over the steps after the warm-up,
    where the step after the last would have the final rate.
    """

    warmup_fraction: float = 0.1
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        _check_warmup(self)
        _check_final(self)

    def rates(self, n_steps: int, peak: float) -> list[float]:
        """Return the learning rate of each step."""
        warm = _n_warm(self.warmup_fraction, n_steps)
        span = max(1, n_steps - warm)
        return _warmed([peak * (1.0 + (self.final_fraction - 1.0) * max(0, step - warm) / span)
                        for step in range(n_steps)], warm)


@dataclass(frozen=True)
class Plateau:
    """Multiply the rate by `factor` when the study's metric is no better for `patience` epochs.

    Decided after each epoch, with torch's `ReduceLROnPlateau`: better is by more than `min_delta`
    (its `threshold`), a part of the best one if `relative`. After a cut `cooldown` epochs are not
    counted. The rate stays at `final_fraction` of the optimizer's or above.
    """

    factor: float = 0.1
    patience: int = 3
    min_delta: float = 1e-4
    relative: bool = True
    cooldown: int = 0
    final_fraction: float = 0.0
    warmup_fraction: float = 0.0

    def __post_init__(self) -> None:
        number("Plateau.factor", self.factor, low=0.0, high=1.0, open_low=True, open_high=True)
        whole("Plateau.patience", self.patience, low=0)
        number("Plateau.min_delta", self.min_delta, low=0.0)
        if not isinstance(self.relative, bool):
            raise InputError(f"Plateau.relative: must be True or False, got {self.relative!r}")
        whole("Plateau.cooldown", self.cooldown, low=0)
        _check_final(self)
        _check_warmup(self)

    def rate(self, peak: float, history: Sequence[float], maximize: bool) -> float:
        """Return the rate after epochs whose metric was `history`.

        All of it follows from the metrics: a resumed trial needs nothing else.
        """
        rate, best = peak, -math.inf if maximize else math.inf
        n_bad = n_cooling = 0
        for value in history:
            if self._better(value, best, maximize):
                best, n_bad = value, 0
            else:
                n_bad += 1
            if n_cooling:
                n_cooling, n_bad = n_cooling - 1, 0
            if n_bad > self.patience:
                lower = max(rate * self.factor, peak * self.final_fraction)
                # Torch's `eps`: a smaller cut than this is none.
                rate = lower if rate - lower > 1e-8 else rate
                n_cooling, n_bad = self.cooldown, 0
        return rate

    def _better(self, value: float, best: float, maximize: bool) -> bool:
        if maximize:
            return value > (best * (1.0 + self.min_delta) if self.relative
                            else best + self.min_delta)
        return value < (best * (1.0 - self.min_delta) if self.relative else best - self.min_delta)

    def epoch_rates(self, epoch: int, per_epoch: int, n_epochs: int, peak: float,
                    history: Sequence[float], maximize: bool) -> list[float]:
        """Return the rate of each step of an epoch, after `history`."""
        warm = _n_warm(self.warmup_fraction, n_epochs * per_epoch)
        rate, begun = self.rate(peak, history, maximize), epoch * per_epoch
        return [rate * min(1.0, (begun + step + 1) / (warm + 1)) for step in range(per_epoch)]


SCHEDULES: dict[str, tuple[type, Mapping[str, Any]]] = {
    "constant": (Constant, {}), "step": (Step, {}), "multi_step": (MultiStep, {}),
    "exponential": (Exponential, {}), "cosine": (Cosine, {}),
    "cosine_restarts": (CosineRestarts, {}), "plateau": (Plateau, {}),
    "one_cycle": (OneCycle, {}), "warmup_cosine": (WarmupCosine, {}), "linear": (Linear, {})}


def schedule(name: str, **fields: Any) -> Schedule | Plateau:
    """Return the schedule of a name, as `Categorical("one_cycle", "cosine", ...)` gives it.

    The names: constant, step, multi_step, exponential, cosine, cosine_restarts, plateau,
    one_cycle, warmup_cosine, linear.

    Raises:
        InputError: if there is no such schedule, or it has no such field.
    """
    return make_named("schedule", name, SCHEDULES, fields)
