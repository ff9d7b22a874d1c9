"""The confirmation as a race: who gets more seeds, and when the order is settled.

All candidates are trained on the same first seeds. Those that these cannot tell from the leader
are trained on more, until each is told from it, or is known to differ by less than matters, or
the budget is used.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from hpo.paired import ALPHA, Difference, differences, level_means, shared

# A pair whose p falls below this before the end is told apart. Each such look may be wrong by
# chance, and the looks together take their part of the 5 %: see `level`.
LOOK_ALPHA = 0.005
# 3, 5, 8, 12, 18, 27 seeds: few looks, and none that adds less than it may change.
_GROWTH = 1.5
# The level at the end never falls below half of what it is without a look.
_LEAST_ALPHA = ALPHA / 2


@dataclass(frozen=True)
class Standing:
    """How the candidates stand: the leader, and leader minus each other, above zero ahead.

    `undecided` names those that are neither told from the leader nor known to be within
    `resolution` of it.
    """

    leader: str
    ahead: Mapping[str, Difference]
    undecided: tuple[str, ...]
    resolution: float

    @property
    def contenders(self) -> tuple[str, ...]:
        """The leader and those that may be as good, or nobody where the order is settled."""
        return (self.leader, *self.undecided) if self.undecided else ()


def standing(
    scores: Mapping[str, Mapping[int, float]], *, of_search: frozenset[str], maximize: bool,
    resolution: float | None = None, grain: float = 0.0,
) -> Standing | None:
    """Return how candidates with validation scores by seed stand, or None without a score.

    The leader is the best of `of_search`, as the registry ranks them; where none of those has a
    score, the best of all. `resolution` is the difference that matters; by itself it is the sd of
    one training: what is smaller cannot be noticed by whoever trains once.
    """
    scores = {name: by_seed for name, by_seed in scores.items() if by_seed}
    if not scores:
        return None
    sign = 1.0 if maximize else -1.0
    turned = {name: {seed: sign * value for seed, value in by_seed.items()}
              for name, by_seed in scores.items()}
    means = level_means(turned)
    leader = max((name for name in turned if name in of_search or not of_search & set(turned)),
                 key=means.__getitem__)
    ahead = differences({name: shared(turned[leader], by_seed)
                         for name, by_seed in turned.items() if name != leader}, grain)
    matters = seed_sd(scores) if resolution is None else resolution
    undecided = tuple(name for name, one in ahead.items() if not _told(one, matters))
    return Standing(leader, ahead, undecided, matters)


def _told(one: Difference, resolution: float) -> bool:
    if one.p is None:
        return False
    return one.p < LOOK_ALPHA or one.half_width <= resolution


def seed_sd(scores: Mapping[str, Mapping[int, float]]) -> float:
    """Return the median candidate's sd over seeds; 0 where none has two."""
    sds = [statistics.stdev(by_seed.values()) for by_seed in scores.values() if len(by_seed) > 1]
    return statistics.median(sds) if sds else 0.0


def grown(n_seeds: int) -> int:
    """Return how many seeds the next round goes up to."""
    return math.ceil(n_seeds * _GROWTH)


def level(n_rounds: int) -> float:
    """Return what a p at the end of a race is held against, where without a look it is 0.05.

    Each look before the last may end a race by chance in 0.5 % of the cases; what is left of the
    5 % is for the end (the union of the two is bounded by their sum). So a race that looked often
    claims no more by chance than one that never did.

    Source: Haybittle 1971 and Peto et al. 1976, for looks at a far stricter level than the end's.
    """
    return max(_LEAST_ALPHA, ALPHA - LOOK_ALPHA * max(0, n_rounds - 1))
