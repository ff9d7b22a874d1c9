"""Optuna's QMC sampler, told the place of each trial.

Optuna's own takes the next point of its sequence by reading and writing a counter, which two
workers may read alike; here each trial has its own point, whoever draws it.
"""

from __future__ import annotations

from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.samplers import QMCSampler, RandomSampler
from optuna.trial import FrozenTrial


class PlacedQMCSampler(QMCSampler):
    """One point of a study's scrambled Sobol sequence.

    `sequence_seed` makes the sequence, the same for all trials; `place` is the point's index,
    from 0. A param that the sequence does not hold is drawn at random from `seed`.
    """

    def __init__(
        self, space: dict[str, BaseDistribution], place: int, *, sequence_seed: int, seed: int
    ) -> None:
        super().__init__(seed=sequence_seed, scramble=True, warn_independent_sampling=False,
                         independent_sampler=RandomSampler(seed=seed))
        self._space, self._place = space, place

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the study's space: it is known from the first trial on."""
        return {name: kind for name, kind in self._space.items() if not kind.single()}

    def _find_sample_id(self, study: Study, search_space: dict[str, BaseDistribution]) -> int:
        return self._place
