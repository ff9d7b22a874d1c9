"""Differences between candidates that were trained on the same seeds, and how sure they are.

A seed sets initial weights, data order and validation split for every candidate alike; so they
are held against each other seed by seed, and what the seeds have in common drops out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Two-sided; the usual 95 % interval of a difference then leaves out zero.
ALPHA = 0.05
POWER = 0.8
# With three seeds a pair alone tells its noise badly, and the other pairs tell it too: they count
# as this many degrees of freedom. More than two claim too often where the sd of the candidates
# differ threefold (tests/test_verdict.py).
_OTHERS_DF = 2
# Beyond this nobody will train so many.
MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Difference:
    """The mean of one candidate minus another over `n` shared seeds.

    `sd` is the noise of one seed's difference; it, `p` (two-sided, of this pair alone), `low` and
    `high` (95 %) are None for a single seed. No `sd` counts as less than the `grain` allows.
    """

    mean: float
    n: int
    sd: float | None = None
    df: int = 0
    p: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def half_width(self) -> float:
        """Half of the 95 % interval; infinite for a single seed."""
        return math.inf if self.high is None else self.high - self.mean


def shared(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Return ours minus theirs on each seed that both have, in the order of the seeds."""
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def differences(
    pairs: Mapping[str, Sequence[float]], grain: float = 0.0
) -> dict[str, Difference]:
    """Return each pair's mean difference with its noise; `pairs` all have one side in common.

    The variance of a pair is the larger of its own and of its own pooled with that of the other
    pairs, which count as two degrees of freedom. Scores that come in steps of `grain` hide noise
    below one step on either side. Pairs without a shared seed are left out.

    Source: the t-test of paired differences, its variance moderated as by Smyth 2004, Linear
    models and empirical Bayes methods, with a fixed prior weight and never below the pair's own.
    """
    own = {name: (statistics.variance(ds), len(ds) - 1) for name, ds in pairs.items()
           if len(ds) > 1}
    return {name: _difference(name, ds, own, grain) for name, ds in pairs.items() if ds}


def _difference(
    name: str, ds: Sequence[float], own: Mapping[str, tuple[float, int]], grain: float
) -> Difference:
    mean = math.fsum(ds) / len(ds)
    if name not in own:
        return Difference(mean, len(ds))
    variance, df = own[name]
    # A pair without any noise is of one set of params, trained once for both.
    others = [value for other, value in own.items() if other != name and value[0] > 0]
    if others:
        pooled = math.fsum(v * n for v, n in others) / sum(n for _, n in others)
        variance = max(variance, (_OTHERS_DF * pooled + df * variance) / (_OTHERS_DF + df))
        df += _OTHERS_DF
    # Rounding of either side to a step.
    variance = max(variance, 2 * grain**2)
    # Differences of equal floats vary by their rounding; that is no noise.
    if variance <= (1e-12 * max(map(abs, ds))) ** 2 or variance == 0:
        return Difference(mean, len(ds), 0.0, df, 0.0 if mean else 1.0, mean, mean)
    from scipy.special import stdtr, stdtrit

    error = math.sqrt(variance / len(ds))
    half = float(stdtrit(df, 1 - ALPHA / 2)) * error
    return Difference(mean, len(ds), math.sqrt(variance), df,
                      2.0 * float(stdtr(df, -abs(mean) / error)), mean - half, mean + half)


def seeds_to_show(difference: float, sd: float) -> int | None:
    """Return how many seeds show a true difference four times out of five, or None for too many.

    `sd` is the noise of one seed's paired difference. Two-sided at 5 %, alone.
    """
    if not difference or not _shows(MOST_SEEDS, difference, sd):
        return None
    low, high = 2, MOST_SEEDS
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _shows(middle, difference, sd) else (middle + 1, high)
    return low


def _shows(n: int, difference: float, sd: float) -> bool:
    from scipy.special import stdtrit

    needed = float(stdtrit(n - 1, 1 - ALPHA / 2)) + float(stdtrit(n - 1, POWER))
    return n >= (needed * sd / difference) ** 2


def holm(ps: Sequence[float]) -> list[float]:
    """Return each p corrected for all of them: below 0.05 by chance in 5 % of such sets at most.

    Source: Holm 1979, A simple sequentially rejective multiple test procedure.
    """
    order = sorted(range(len(ps)), key=ps.__getitem__)
    corrected, largest = [0.0] * len(ps), 0.0
    for n_before, i in enumerate(order):
        largest = max(largest, min(1.0, ps[i] * (len(ps) - n_before)))
        corrected[i] = largest
    return corrected


def level_means(scores: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Return the candidates' means as if all had been trained on all of the seeds.

    Where they have been, these are their plain means. Else a score is taken as the sum of what is
    the candidate's and what is the seed's (least squares): a candidate that was trained on an easy
    seed more gets nothing for it.
    """
    seeds = sorted({seed for by_seed in scores.values() for seed in by_seed})
    means = {name: math.fsum(by_seed.values()) / len(by_seed)
             for name, by_seed in scores.items() if by_seed}
    if all(len(scores[name]) == len(seeds) for name in means):
        return means
    overall = math.fsum(means.values()) / len(means)
    of_seed = dict.fromkeys(seeds, 0.0)
    for _ in range(1000):
        of_seed = {seed: _mean([by_seed[seed] - means[name] for name, by_seed in scores.items()
                                if seed in by_seed]) for seed in seeds}
        level = _mean(list(of_seed.values()))
        before, means = means, {
            name: _mean([value - of_seed[seed] + level for seed, value in scores[name].items()])
            for name in means}
        if max(abs(means[name] - before[name]) for name in means) <= 1e-13 * (1 + abs(overall)):
            break
    return means


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
