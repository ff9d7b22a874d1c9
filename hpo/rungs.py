"""The epochs at which trials are compared, and what each is compared by.

A trial is held at a few epochs only against all trials that came as far, the pruned ones too: so
the bar at an early epoch does not rise with every trial that survives it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

# The better half goes on at each rung. Of what was tried in `benchmarks/search.py` these few early
# and mild ones train the most good params to their end an epoch: each comparison more, of numbers
# this noisy, costs good trials. docs/search.md has the figures.
REDUCTION, RUNGS = 2.0, (1 / 8, 1 / 4)


def rungs_of(epochs: int, n_warmup: int = 0) -> tuple[int, ...]:
    """Return the epochs, counted from 1, after which a trial of that many is compared.

    An eighth of them and a quarter, rounded; none in the first `n_warmup`, in which no trial is
    pruned, and not the last one, where nothing is left to save.

    Units: epochs.
    """
    found = {max(1, round(epochs * part)) for part in RUNGS}
    return tuple(sorted(rung for rung in found if n_warmup < rung < epochs))


def marks(
    reports: Mapping[int, float], rungs: Sequence[int], sign: float, *, pruned: bool
) -> list[float]:
    """Return an ended trial's marks from the first rung on, higher ones better.

    A pruned trial has none at a rung that it did not reach.
    """
    left = sorted(reports.items(), reverse=True)
    found, best, at = [], -math.inf, -1
    for rung in rungs:
        while left and at < rung - 1:
            at, value = left.pop()
            best = max(best, best_of([value], sign))
        if pruned and at < rung - 1:
            break
        found.append(best)
    return found


def goes_on(n_better: int, n_others: int, reduction: float = REDUCTION) -> bool:
    """Return whether a trial is among the best part of those at a rung, itself counted."""
    return n_better * reduction < n_others + 1


def best_of(values: Iterable[float], sign: float) -> float:
    """Return the highest of the signed values that are numbers; -inf of none."""
    return max((sign * value for value in values if value == value), default=-math.inf)
