"""The pick of several sweeps: so far below the rate at which the loss is back where it began.

That rate, the edge, is what stands out of the noise of a short sweep, whatever the net. How far
below it a training goes best depends on the optimizer, and is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hpo.baselines.lr_pick import LRSuggestion, suggest

# The loss before anything is learnt is the mean of so many first points.
N_FIRST = 4
# The least points of which an edge is looked for; fewer are read by their steepest fall.
LEAST_POINTS = 10
# A rise by this part of the first loss, or of the fall where that is more, is no noise of a batch.
_RISE = 0.15
# How far the best rate lies from the pick, in decades: the standard deviation in the cells of
# `benchmarks/lr_range.py` that the factors of the optimizers were not tuned on.
SPREAD_DECADES = 0.3
# Nine tenths of a normal variable lie within so many standard deviations.
_NINE_TENTHS = 1.645


def suggest_below(rates: Sequence[float], by_seed: Sequence[Sequence[float]],
                  factor: float) -> LRSuggestion:
    """Return `factor` times the edge of some seeds' sweeps, or no pick with the reason.

    The interval is to hold the best rate of a training in nine of ten cases: it has the error over
    the seeds in it, and how far the best rate was from the pick in the benchmark.
    """
    mean = mean_losses(rates, by_seed)
    # Of the mean curve: its smoothed line, its fall, and all reasons for which it tells nothing.
    fall = replace(suggest(rates, mean), by_seed=tuple(map(tuple, by_seed)))
    if len(rates) < LEAST_POINTS or not np.isfinite(mean).all():
        return fall
    if not has_risen(mean):
        # Where no rate is too high, the steepest fall is all there is to see.
        return fall
    at = edge_of(rates, mean)
    if at is None:
        return replace(fall, pick=None, low=None, high=None, reason=(
            f"the loss rises from the first rate, {rates[0]:g}: lower the start (--low)"))
    pick, error = at + math.log10(factor), _error(rates, by_seed)
    reach = _NINE_TENTHS * math.hypot(error, SPREAD_DECADES)
    over = f", the mean of {len(by_seed)} seeds," if len(by_seed) > 1 else ""
    return replace(fall, pick=10 ** pick, low=10 ** (pick - reach), high=10 ** (pick + reach),
                   edge=10 ** at, error=error, reason=(
                       f"{factor:g} of the rate at which the loss{over} is back where it began"))


def mean_losses(rates: Sequence[float], by_seed: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean over the seeds at each rate that any of them came to.

    A seed that has left its curve, or is far above where it began, counts as twice its start
    there: how far it leaps says nothing.
    """
    n = max(map(len, by_seed), default=0)
    if not n or any(not len(one) or not math.isfinite(one[0]) for one in by_seed):
        return [math.nan] * min(n, 1)
    start = float(np.mean([one[0] for one in by_seed]))
    lowest = min(value for one in by_seed for value in one if math.isfinite(value))
    cap = start + max(abs(start), start - lowest)
    rows = np.full((len(by_seed), n), cap)
    for row, one in zip(rows, by_seed, strict=True):
        row[:len(one)] = one
    return np.where(np.isfinite(rows), np.minimum(rows, cap), cap).mean(0).tolist()


def has_risen(losses: Sequence[float]) -> bool:
    """Return whether the loss comes to lie above where it began by more than a batch's noise."""
    return _first_risen(np.asarray(losses, float)) < len(losses)


def _first_risen(y: np.ndarray) -> int:
    start = float(y[:N_FIRST].mean())
    scale = max(abs(start), start - float(y.min()))
    risen = np.flatnonzero(y > start + _RISE * scale)
    return int(risen[0]) if len(risen) else len(y)


def edge_of(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return the log10 of the edge, or None where the loss rises from the first rates on.

    It is between the last rate at which the loss is at most the first ones, before it has risen,
    and the next. A loss that does not rise has its edge at the last rate.
    """
    x, y = np.log10(np.asarray(rates[:len(losses)], float)), np.asarray(losses, float)
    top, start = _first_risen(y), float(y[:N_FIRST].mean())
    if top == len(y):
        return float(x[-1])
    low = np.flatnonzero(y[:top] <= start)
    if not len(low) or low[-1] < N_FIRST:
        return None
    below = int(low[-1])
    part = (start - y[below]) / (y[below + 1] - y[below])
    return float(x[below] + part * (x[below + 1] - x[below]))


def _error(rates: Sequence[float], by_seed: Sequence[Sequence[float]]) -> float:
    """Return the standard error of the edge over the seeds, in decades, by the jackknife.

    Source: Efron and Stein, The Jackknife Estimate of Variance, equation 1.2. It is at least what
    the distance of two rates leaves open.
    """
    n = len(by_seed)
    x = np.log10(np.asarray(rates, float))
    grain = float(np.diff(x).mean()) / math.sqrt(12.0 * n)
    edges = []
    for i in range(n if n > 1 else 0):
        losses = mean_losses(rates, [one for k, one in enumerate(by_seed) if k != i])
        found = edge_of(rates, losses)
        edges.append(float(x[0]) if found is None else found)
    spread = math.sqrt((n - 1) * float(np.var(edges))) if edges else 0.0
    return max(grain, spread)
