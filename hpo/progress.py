"""How far a phase had come after how many epochs: what two ways of searching are compared by.

The end of two searches that cost unequally says nothing of which is the better way; their best
after the same number of epochs does.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hpo.results import Results, Trial

# Resampled courses of a baseline.
_N_COURSES = 500
_BAND = (0.1, 0.5, 0.9)


def best_so_far(results: Results, phase: str) -> list[tuple[float, float]]:
    """Return (epochs spent, best value) at each improvement, in the order in which trials ended.

    A sweep's epochs are spent before its phase's first trial.
    """
    ended = [_outcome(trial) for trial in results.phase(phase).by_end()]
    return _course(results, ended, results.phase(phase).sweep_epochs)


def _outcome(trial: Trial) -> tuple[int, float | None]:
    """Return what a trial cost and scored; asked once, for thousands are gone through often."""
    return trial.n_epochs, trial.score


def _course(
    results: Results, outcomes: Iterable[tuple[int, float | None]], spent: float
) -> list[tuple[float, float]]:
    best: float | None = None
    steps = []
    for n_epochs, score in outcomes:
        spent += n_epochs
        if score is not None and results.better(score, best):
            best = score
            steps.append((spent, best))
    return steps


def best_after(steps: Sequence[tuple[float, float]], epochs: float) -> float | None:
    """Return the best value of a course after so many epochs; None before its first value."""
    n = bisect_right([spent for spent, _ in steps], epochs)
    return steps[n - 1][1] if n else None


def epochs_to_pass(results: Results, baseline: str, phase: str = "search") -> float | None:
    """Return the epochs a phase spent until its best value passed a baseline's best, or None."""
    bar = results.best(baseline)
    return next((spent for spent, value in best_so_far(results, phase)
                 if bar and results.better(value, bar.score)), None)


def epochs_to_reach(results: Results, baseline: str, phase: str = "search") -> float | None:
    """Return the epochs a phase spent until a baseline's best was equalled or passed, or None."""
    bar = results.best(baseline)
    return next((spent for spent, value in best_so_far(results, phase)
                 if bar and (results.better(value, bar.score) or value == bar.score)), None)


def at_equal_epochs(results: Results, baseline: str) -> float | None:
    """Return the search's best value after as many epochs as a baseline spent in all, or None."""
    spent = results.phase(baseline).n_epochs
    return best_after(best_so_far(results, "search"), spent) if spent else None


@dataclass(frozen=True)
class Band:
    """Where a baseline's best stands after so many epochs in 80 % of its courses, and the median.

    Each has one value for each of `epochs`, None while too few courses have a value at all.
    """

    epochs: tuple[float, ...]
    low: tuple[float | None, ...]
    median: tuple[float | None, ...]
    high: tuple[float | None, ...]


def has_band(results: Results, phase: str) -> bool:
    """Return whether a phase has a band: `band` says which have."""
    scored = [t for t in results.phase(phase).trials if t.score is not None and t.n_epochs]
    return phase in ("grid", "random") and len(scored) > 1


def band(results: Results, phase: str, n_points: int = 60) -> Band | None:
    """Return the band of a baseline whose trials might have come in any order, or None.

    That holds for the grid and for random search: their trials know nothing of each other, so
    that other trials of the same kind might as well have been drawn. A search's own trials depend
    on those before them; one run of it tells nothing of how another would have gone, so it has
    none.

    Source: the bootstrap (Efron 1979): trials drawn with replacement, 500 times, seeded.
    """
    if not has_band(results, phase):
        return None
    trials = [_outcome(t) for t in results.phase(phase).trials if t.ended and t.n_epochs]
    total = sum(n_epochs for n_epochs, _ in trials)
    rng = random.Random(f"{results.name}/{phase}")
    courses = [_course(results, _drawn(trials, total, rng), 0.0) for _ in range(_N_COURSES)]
    at = tuple(total * (i + 1) / n_points for i in range(n_points))
    rows = [_quantiles(results, [best_after(course, epochs) for course in courses])
            for epochs in at]
    low, median, high = zip(*rows, strict=True)
    return Band(at, low, median, high)


def _drawn(
    trials: Sequence[tuple[int, float | None]], total: float, rng: random.Random
) -> Iterator[tuple[int, float | None]]:
    """Yield a course as long as the phase itself, whatever its trials cost."""
    spent, n = 0.0, len(trials)
    while spent < total:
        outcome = trials[int(rng.random() * n)]
        spent += outcome[0]
        yield outcome


def _quantiles(results: Results, values: Sequence[float | None]) -> tuple[float | None, ...]:
    """Return the band's quantiles; a course without a value yet stands behind all others."""
    found = sorted((v for v in values if v is not None), reverse=not results.maximize)
    n_missing = len(values) - len(found)
    ranked: list[float | None] = [*([None] * n_missing), *found]
    picked = tuple(ranked[int(q * (len(ranked) - 1))] for q in _BAND)
    return picked if results.maximize else tuple(reversed(picked))
