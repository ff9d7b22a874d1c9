"""Samplers of our own making, each one of Optuna's with a single thing changed.

Optuna's take the next point of a sequence by reading and writing a counter, which two workers may
read alike; ours are told their place, so each trial has its own point whoever draws it. Optuna's
TPE weighs every trial of a study for each new one; ours weighs the best and a part of the rest.
"""

from __future__ import annotations

import copy
import random
from bisect import insort
from collections.abc import Container
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from numpy.random import RandomState
from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.pruners import HyperbandPruner
from optuna.samplers import QMCSampler, RandomSampler, TPESampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

# How many ended trials a draw weighs. A study of fewer is drawn from exactly as by Optuna.
N_WEIGHED = 500
# Trials that others ended this long ago at most may be missing.
FRESH_S = 0.25
# The most that TPE takes for good ones, however many trials there are: `default_gamma`.
N_BEST = 25
ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


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


class BoundedTPESampler(TPESampler):
    """Optuna's TPE over the best trials and a random part of the others.

    The density of good params is that of Optuna's own, from the same trials; that of the others
    is estimated from a sample, drawn anew for each trial. Its cost does not grow with the study.
    Studies on other storages than ours, of several objectives, with constraints or under Hyperband
    are drawn from as by Optuna.

    Source: Bergstra et al., Algorithms for Hyper-Parameter Optimization, section 4.
    """

    def __init__(
        self, *, n_weighed: int = N_WEIGHED, announces: bool = True, **kwargs: Any
    ) -> None:
        """Take TPESampler's own arguments, and how many ended trials a draw weighs.

        With `announces`, as Optuna has it, what is drawn is written to the trial before it is
        suggested, for other processes to see; without, the caller stores the params at once.
        """
        super().__init__(**kwargs)
        self._n_weighed = max(n_weighed, 10 * N_BEST)
        self._announces = announces

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the params that all trials of the study have, with equal distributions."""
        ranked = None if self._group else _ranked(study)
        if ranked is None or not self._is_multivariate(study):
            return super().infer_relative_search_space(study, trial)
        return ranked.common_space()

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return a value of each param that all trials have."""
        bounded = self._bounded(study)
        if self._announces or self._group:
            return super().sample_relative(bounded, trial, search_space)
        return self._sample_relative(bounded, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Return a value of one param."""
        bounded = self._bounded(study)
        return super().sample_independent(bounded, trial, param_name, param_distribution)

    def _bounded(self, study: Study) -> Study:
        """Return the study as if it held only the trials to weigh."""
        if not _is_ours(study):
            return study
        # They are read in any case, and with them comes in what has ended meanwhile.
        running = study._get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        ranked = _ranked(study)
        if ranked is None:
            return study
        weighed = ranked.weighed(self._n_weighed, self._rng.rng)
        bounded = copy.copy(study)

        def get_trials(
            deepcopy: bool = True, states: Container[TrialState] | None = None,
            use_cache: bool = False,
        ) -> list[FrozenTrial]:
            wanted = ENDED if states is None else states
            found = [trial for trial in weighed if trial.state in wanted]
            if TrialState.RUNNING in wanted and running:
                found = sorted([*found, *running], key=lambda trial: trial.number)
            return found

        bounded._get_trials = get_trials
        return bounded


def _is_ours(study: Study) -> bool:
    return (len(study.directions) == 1 and hasattr(study._storage, "ended_since")
            and not isinstance(study.pruner, HyperbandPruner))


class _Ranked:
    """The ended trials of a study as TPE ranks them: COMPLETE by value, then PRUNED by step."""

    def __init__(self) -> None:
        self.trials: list[tuple[tuple[float, ...], int, FrozenTrial]] = []
        self.space: dict[str, BaseDistribution] | None = None
        self.has_constraints = False
        self._seen: Any = None
        self._lock = Lock()

    def take_in(self, study: Study) -> None:
        """Add the trials that have ended since the last time."""
        storage: Any = study._storage
        sign = -1 if study.direction == StudyDirection.MAXIMIZE else 1
        with self._lock:
            new, self._seen, anew = storage.ended_since(study._study_id, self._seen, FRESH_S)
            if anew:
                self.trials, self.space, self.has_constraints = [], None, False
            for trial in new:
                if trial.state in ENDED:
                    self.has_constraints = self.has_constraints or bool(trial.constraints)
                    self.space = _intersection(self.space, trial.distributions)
                    insort(self.trials, (_rank(trial, sign), trial.number, trial))

    def common_space(self) -> dict[str, BaseDistribution]:
        """Return the params that all trials have and that can vary, by name."""
        return {name: kind for name, kind in sorted((self.space or {}).items())
                if not kind.single()}

    def weighed(self, n: int, rng: RandomState) -> list[FrozenTrial]:
        """Return the best trials and some of the others, at most n in all, by number."""
        with self._lock:
            chosen = self.trials[:N_BEST]
            rest = range(N_BEST, len(self.trials))
            if len(self.trials) > n:
                rest = random.Random(int(rng.randint(2**31))).sample(rest, n - N_BEST)
            chosen += [self.trials[i] for i in rest]
        return sorted((trial for _, _, trial in chosen), key=lambda trial: trial.number)


def _intersection(
    space: dict[str, BaseDistribution] | None, other: dict[str, BaseDistribution]
) -> dict[str, BaseDistribution]:
    if space is None:
        return dict(other)
    # The storage gives the trials it has read equal distributions as the same object.
    if all(other.get(name) is kind for name, kind in space.items()):
        return space
    return {name: kind for name, kind in space.items() if other.get(name) == kind}


def _rank(trial: FrozenTrial, sign: int) -> tuple[float, ...]:
    if trial.state == TrialState.COMPLETE:
        return (0.0, sign * float(trial.value or 0.0))
    if not trial.intermediate_values:
        return (1.0, 1.0, 0.0)
    step, value = max(trial.intermediate_values.items())
    return (1.0, -float(step), float("inf") if value != value else sign * value)


_KNOWN: WeakKeyDictionary[Any, dict[int, _Ranked]] = WeakKeyDictionary()


def _ranked(study: Study) -> _Ranked | None:
    """Return the ranking of a study: one for all samplers, of which each trial has its own.

    None for a study that is drawn from as by Optuna.
    """
    if not _is_ours(study):
        return None
    storage: Any = study._storage
    ranked = _KNOWN.setdefault(storage, {}).setdefault(study._study_id, _Ranked())
    ranked.take_in(study)
    return None if ranked.has_constraints else ranked
