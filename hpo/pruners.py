"""Pruning without reading the study again at every epoch: rungs, median and percentile.

Optuna's look at every COMPLETE trial for each question; ours keep the values of each step sorted,
and take in the trials that have ended since the last question. Median and percentile decide
exactly as Optuna's.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from optuna import Study
from optuna.pruners import BasePruner, PercentilePruner
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.rungs import REDUCTION, best_of, goes_on, marks

ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


class RunningPercentilePruner(PercentilePruner):
    """Optuna's PercentilePruner over running order statistics.

    On `storage.StudyStorage` a question costs no look at earlier trials, and the database is asked
    at most once in 250 ms; on any other storage it is Optuna's own.

    Source: Golovin et al., Google Vizier, section 3.2 (the median stopping rule).
    """

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Return whether the trial's best value is worse than the percentile at its step."""
        if not hasattr(study._storage, "ended_since"):
            return bool(super().prune(study, trial))
        step = trial.last_step
        if step is None or step < self._n_warmup_steps:
            return False
        storage: Any = study._storage
        known = _KNOWN.setdefault(storage, {}).setdefault(study._study_id, _History())
        known.take_in(storage, study._study_id)
        if not known.n_complete or known.n_complete < self._n_startup_trials:
            return False
        if not self._is_due(step, trial):
            return False
        values = [value for value in trial.intermediate_values.values() if value == value]
        if not values:
            return True
        at = known.steps.get(step)
        if at is None or at.n_reports < self._n_min_trials:
            return False
        maximize = study.direction == StudyDirection.MAXIMIZE
        bound = at.percentile(100 - self._percentile if maximize else self._percentile)
        return max(values) < bound if maximize else min(values) > bound

    def _is_due(self, step: int, trial: FrozenTrial) -> bool:
        """Return whether this is the first report in its interval of steps."""
        since = step - (step - self._n_warmup_steps) % self._interval_steps
        return all(other == step or other < since for other in trial.intermediate_values)


class _History:
    """What the COMPLETE trials of one study have reported, step by step."""

    def __init__(self) -> None:
        self.steps: dict[int, _Step] = {}
        self.n_complete = 0
        self._seen: Any = None
        self._lock = Lock()

    def take_in(self, storage: Any, study_id: int) -> None:
        """Add the trials that have ended since the last time."""
        with self._lock:
            trials, self._seen, anew = storage.ended_since(study_id, self._seen)
            if anew:
                self.steps, self.n_complete = {}, 0
            for trial in trials:
                if trial.state == TrialState.COMPLETE:
                    self.n_complete += 1
                    for step, value in trial.intermediate_values.items():
                        self.steps.setdefault(step, _Step()).add(value)


class _Step:
    """The values that COMPLETE trials have reported at one step."""

    def __init__(self) -> None:
        self.n_reports = 0
        self.values: list[float] = []

    def add(self, value: float) -> None:
        """Take in one value; NaN counts as a report and takes no part in the order."""
        self.n_reports += 1
        if value == value:
            insort(self.values, value)

    def percentile(self, percentile: float) -> float:
        """Return what `numpy.nanpercentile` does, to the last bit; NaN of no values."""
        if not self.values:
            return math.nan
        place = (len(self.values) - 1) * (percentile / 100)
        low = math.floor(place)
        if low >= len(self.values) - 1:
            low_value = high_value = self.values[-1]
        else:
            low_value, high_value = self.values[low], self.values[low + 1]
        weight, gap = place - low, high_value - low_value
        # numpy's interpolation comes from the nearer end.
        return low_value + gap * weight if weight < 0.5 else high_value - gap * (1 - weight)


class RunningMedianPruner(RunningPercentilePruner):
    """Optuna's MedianPruner over running order statistics: the percentile of 50."""

    def __init__(self, n_startup_trials: int = 5, n_warmup_steps: int = 0,
                 interval_steps: int = 1, *, n_min_trials: int = 1) -> None:
        super().__init__(50.0, n_startup_trials, n_warmup_steps, interval_steps,
                         n_min_trials=n_min_trials)


class RungPruner(BasePruner):
    """Go on at each rung with the best part of all trials that have reached it.

    A trial's mark at a rung is its best value up to its first report there. It is pruned where at
    least 1 / `reduction` of the trials at the rung, itself among them, have a better mark; never
    where fewer than `n_startup` others have one. A COMPLETE trial that ended before a rung stands
    there with its best. On `storage.StudyStorage` a question costs no look at earlier trials.

    Source: Li et al., A System for Massively Parallel Hyperparameter Tuning, section 3 (ASHA, in
        the variant that stops trials and never takes one up again).
    """

    def __init__(
        self, rungs: Sequence[int], *, reduction: float = REDUCTION, n_startup: int = 2
    ) -> None:
        self.rungs = tuple(rungs)
        self._reduction, self._n_startup = reduction, n_startup

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Return whether too many trials were better when they were as old."""
        step = trial.last_step
        rung = -1 if step is None else bisect_right(self.rungs, step + 1) - 1
        if rung < 0 or any(self.rungs[rung] - 1 <= other < step  # type: ignore[operator]
                           for other in trial.intermediate_values):
            return False
        sign = 1.0 if study.direction == StudyDirection.MAXIMIZE else -1.0
        mine = best_of(trial.intermediate_values.values(), sign)
        others = self._history(study, sign).marks[rung]
        if len(others) < self._n_startup:
            return False
        n_better = len(others) - bisect_right(others, mine)
        return mine == -math.inf or not goes_on(n_better, len(others), self._reduction)

    def _history(self, study: Study, sign: float) -> _Marks:
        storage: Any = study._storage
        if not hasattr(storage, "ended_since"):
            plain = _Marks(self.rungs, sign)
            plain.add(study.get_trials(deepcopy=False, states=ENDED))
            return plain
        known = _MARKS.setdefault(storage, {})
        found = known.setdefault((study._study_id, self.rungs), _Marks(self.rungs, sign))
        found.take_in(storage, study._study_id)
        return found


class _Marks:
    """The marks of a study's ended trials at each rung, sorted; higher ones are better."""

    def __init__(self, rungs: tuple[int, ...], sign: float) -> None:
        self._rungs, self._sign = rungs, sign
        self.marks: list[list[float]] = [[] for _ in rungs]
        self._seen: Any = None
        self._lock = Lock()

    def take_in(self, storage: Any, study_id: int) -> None:
        """Add the trials that have ended since the last time."""
        with self._lock:
            trials, self._seen, anew = storage.ended_since(study_id, self._seen)
            if anew:
                self.marks = [[] for _ in self._rungs]
            self.add(trials)

    def add(self, trials: Iterable[FrozenTrial]) -> None:
        """Add the marks of those that are COMPLETE or PRUNED."""
        for trial in trials:
            if trial.state in ENDED:
                found = marks(trial.intermediate_values, self._rungs, self._sign,
                              pruned=trial.state == TrialState.PRUNED)
                for known, mark in zip(self.marks, found, strict=False):
                    insort(known, mark)


# What is known of each study: the same for all pruners, and of rungs for each list of them.
_KNOWN: WeakKeyDictionary[Any, dict[int, _History]] = WeakKeyDictionary()
_MARKS: WeakKeyDictionary[Any, dict[tuple[int, tuple[int, ...]], _Marks]] = WeakKeyDictionary()

if hasattr(os, "register_at_fork"):
    # A child must not wait for a lock that another thread of its parent held.
    os.register_at_fork(after_in_child=_KNOWN.clear)
    os.register_at_fork(after_in_child=_MARKS.clear)
