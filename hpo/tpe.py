"""Optuna's TPE at a cost that does not grow with the study.

Optuna's own weighs every trial of a study for each new one, and walks over all of them in Python
several times. Here what a draw needs of a trial is kept as rows of numbers, taken in once; and of
a large study a draw weighs the best trials and a part of the others.
"""

from __future__ import annotations

import copy
import os
from bisect import insort
from collections.abc import Container, Sequence
from itertools import islice
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.pruners import HyperbandPruner
from optuna.samplers import TPESampler
from optuna.samplers._tpe.sampler import default_gamma
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

# How many ended trials a draw weighs. A study of fewer is drawn from exactly as by Optuna.
N_WEIGHED = 1000
# Rank, trial number, row.
_Ranked = tuple[tuple[float, ...], int, int]
ENDED = (TrialState.COMPLETE, TrialState.PRUNED)
_FIRST_ROWS = 256


class BoundedTPESampler(TPESampler):
    """Optuna's TPE over the best trials and a part of the others.

    A study of at most `n_weighed` ended trials is drawn from exactly as by TPESampler. Beyond, the
    density of good params is still that of Optuna's own, from the same trials. Studies on other
    storages than ours, of several objectives, with constraints, in groups or under Hyperband are
    drawn from as by Optuna.

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
        self._n_weighed = n_weighed
        self._announces = announces

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the params that all trials of the study have, with equal distributions."""
        history = self._history(study)
        if history is None or not self._is_multivariate(study):
            return super().infer_relative_search_space(study, trial)
        return history.common_space()

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return a value of each param that all trials have."""
        if self._announces or self._history(study) is None:
            return super().sample_relative(study, trial, search_space)
        return self._sample_relative(study, trial, search_space)

    def _sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        history = self._history(study)
        if history is None:
            return super()._sample_relative(study, trial, search_space)
        if not search_space or len(history) < self._n_startup_trials:
            return {}
        return self._sample(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Return a value of one param."""
        history = self._history(study)
        if history is not None:
            study = _stand_in(study, history)
        return super().sample_independent(study, trial, param_name, param_distribution)

    def _sample(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        history = self._history(study)
        if history is None:
            return super()._sample(study, trial, search_space)
        running = self._running(study, trial, search_space)
        gamma = self._gamma or default_gamma
        below, above = history.split(gamma(len(history)), self._n_weighed, search_space, running)
        good, rest = (self._parzen_estimator_cls(
            found, search_space, self._parzen_estimator_parameters) for found in (below, above))
        samples = good.sample(self._rng.rng, self._n_ei_candidates)
        chosen = TPESampler._compare(samples, self._compute_acquisition_func(samples, good, rest))
        return {name: kind.to_external_repr(chosen[name]) for name, kind in search_space.items()}

    def _running(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> list[tuple[int, list[float]]]:
        """Return number and params of the trials that run, which count as bad ones."""
        if not self._constant_liar:
            return []
        found = []
        for other in study._get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            params = self._get_params(other, study)
            if other.number != trial.number and search_space.keys() <= params.keys():
                found.append((other.number, [kind.to_internal_repr(params[name])
                                             for name, kind in search_space.items()]))
        return found

    def _history(self, study: Study) -> _History | None:
        """Return what is known of a study; None for one that is drawn from as by Optuna."""
        if (self._group or len(study.directions) > 1 or not hasattr(study._storage, "ended_since")
                or isinstance(study.pruner, HyperbandPruner)):
            return None
        storage: Any = study._storage
        history = _KNOWN.setdefault(storage, {}).setdefault(study._study_id, _History())
        history.take_in(study)
        return None if history.has_constraints else history


def _stand_in(study: Study, history: _History) -> Study:
    """Return the study with its ended trials at hand, where Optuna only counts them."""
    known = copy.copy(study)

    def get_trials(
        deepcopy: bool = True, states: Container[TrialState] | None = None,
        use_cache: bool = False,
    ) -> Sequence[FrozenTrial]:
        if states == ENDED:
            return history.ended
        return study._get_trials(deepcopy, states, use_cache)

    known._get_trials = get_trials  # type: ignore[assignment]
    return known


class _History:
    """The ended trials of a study as TPE ranks them: COMPLETE by value, then PRUNED by step."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._seen: Any = None
        self._empty()

    def _empty(self) -> None:
        self.ended: list[FrozenTrial] = []
        self.space: dict[str, BaseDistribution] | None = None
        self.has_constraints = False
        # (rank, trial number, row): the best come first.
        self._ranked: list[_Ranked] = []
        # (trial number, row)
        self._in_order: list[tuple[int, int]] = []
        self._numbers = np.empty(_FIRST_ROWS, dtype=np.int64)
        # What each param was, as Optuna stores it; NaN where a trial has no such param.
        self._columns: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.ended)

    def take_in(self, study: Study) -> None:
        """Add the trials that have ended since the last time."""
        storage: Any = study._storage
        sign = -1 if study.direction == StudyDirection.MAXIMIZE else 1
        with self._lock:
            new, self._seen, anew = storage.ended_since(study._study_id, self._seen)
            if anew:
                self._empty()
            for trial in new:
                if trial.state in ENDED:
                    self._add(trial, sign)

    def _add(self, trial: FrozenTrial, sign: int) -> None:
        row = len(self.ended)
        if row == len(self._numbers):
            self._numbers = _longer(self._numbers)
            self._columns = {name: _longer(column) for name, column in self._columns.items()}
        self._numbers[row] = trial.number
        for name, kind in trial.distributions.items():
            if name not in self._columns:
                self._columns[name] = np.full(len(self._numbers), np.nan)
            self._columns[name][row] = kind.to_internal_repr(trial.params[name])
        self.has_constraints = self.has_constraints or bool(trial.constraints)
        self.space = _intersection(self.space, trial.distributions)
        insort(self._ranked, (_rank(trial, sign), trial.number, row))
        insort(self._in_order, (trial.number, row))
        self.ended.append(trial)

    def common_space(self) -> dict[str, BaseDistribution]:
        """Return the params that all trials have and that can vary, by name."""
        return {name: kind for name, kind in sorted((self.space or {}).items())
                if not kind.single()}

    def split(
        self, n_below: int, n_weighed: int, search_space: dict[str, BaseDistribution],
        running: Sequence[tuple[int, list[float]]],
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return the params of the best trials and of the others, in the order of the trials."""
        with self._lock:
            chosen = self._ranked
            if len(chosen) > n_weighed:
                chosen = self._weighed(n_below, n_weighed)
            below, above = (self._rows(part, search_space)
                            for part in (chosen[:n_below], chosen[n_below:]))
        if running:
            numbers = np.array([number for number, _ in running])
            above = (np.concatenate([above[0], numbers]),
                     np.concatenate([above[1], np.array([params for _, params in running])]))
        return _by_number(below, search_space), _by_number(above, search_space)

    def _weighed(self, n_below: int, n_weighed: int) -> list[_Ranked]:
        """Return the best half of the trials to weigh by rank, then the latest of the others.

        The former hold the ground around the good params, the latter what the search has tried
        of late: Optuna gives later trials more weight. `benchmarks/sampling.py` has the proof.
        """
        n_best = n_below + (n_weighed - n_below) // 2
        best = self._ranked[:n_best]
        rows = {row for _, _, row in best}
        latest = (((), number, row) for number, row in reversed(self._in_order)
                  if row not in rows)
        return [*best, *islice(latest, max(0, n_weighed - n_best))]

    def _rows(
        self, part: Sequence[_Ranked],
        search_space: dict[str, BaseDistribution],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of some trials and their params, of those that have all params."""
        rows = np.array([row for _, _, row in part], dtype=np.int64)
        missing = np.full(len(self._numbers), np.nan)
        params = np.stack([self._columns.get(name, missing)[rows] for name in search_space], 1)
        whole = ~np.isnan(params).any(axis=1)
        return self._numbers[rows[whole]], params[whole]


def _by_number(
    found: tuple[np.ndarray, np.ndarray], search_space: dict[str, BaseDistribution]
) -> dict[str, np.ndarray]:
    """Return params in the order of the trials: Optuna gives the later ones more weight."""
    numbers, params = found
    params = params[np.argsort(numbers, kind="stable")]
    return {name: params[:, i] for i, name in enumerate(search_space)}


def _longer(column: np.ndarray) -> np.ndarray:
    grown = np.full(2 * len(column), np.nan) if column.dtype == float else np.empty(
        2 * len(column), dtype=column.dtype)
    grown[:len(column)] = column
    return grown


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


# One history for all samplers of a study, of which each trial may have its own.
_KNOWN: WeakKeyDictionary[Any, dict[int, _History]] = WeakKeyDictionary()


if hasattr(os, "register_at_fork"):
    # A child must not wait for a lock that another thread of its parent held.
    os.register_at_fork(after_in_child=_KNOWN.clear)
