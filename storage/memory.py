"""Trials in memory: the ended ones for good, the rest as often as somebody asks.

An ended trial never changes, so a process reads it once; what it has not seen comes in with one
small query. Only a study that was deleted and made again can bring an old id back with another
trial, which the times of the last known trial give away.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Container
from math import inf
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Connection

from storage.loading import NEWS, Head, heads, load, same_trial

FINISHED = tuple(state for state in TrialState if state.is_finished())
# Beyond these, reading all heads from the first open one on costs less than naming each.
MOST_OPEN = 2000


class StudyMemory:
    """What this process knows of one study."""

    def __init__(self) -> None:
        self.ended: dict[int, FrozenTrial] = {}
        self.distributions: dict[str, BaseDistribution] = {}
        # In the order in which this process heard of their ends.
        self.arrived: list[FrozenTrial] = []
        self.refreshed_at = -inf
        # The ended trials of each set of states that was asked for, by number.
        self._views: dict[frozenset[TrialState], list[FrozenTrial]] = {}
        # The best trial by direction, and of how many that have arrived.
        self._best: dict[bool, tuple[int, FrozenTrial | None]] = {}
        self._open: set[int] = set()
        self._seen = -1
        self._anchor = -1

    def refresh(
        self, connection: Connection, study_id: int, *, wanted: Container[str], skip: set[int]
    ) -> list[FrozenTrial]:
        """Bring in what is new and return the unfinished trials in the states that are wanted.

        `skip` are unfinished trials that the caller knows better himself.

        Raises:
            KeyError: there is no such study.
        """
        news = self._news(connection, study_id)
        if news is None:
            self.__init__()
            news = self._news(connection, study_id) or []
        fresh = [head for head in news if head.trial_id not in self.ended]
        still_open = {head.trial_id for head in fresh if head.state in ("RUNNING", "WAITING")}
        to_load = [
            head
            for head in fresh
            if head.trial_id not in still_open
            or (head.state in wanted and head.trial_id not in skip)
        ]
        found = load(connection, study_id, to_load)
        for trial in found:
            if trial.state.is_finished():
                self.keep(trial)
        self._open = still_open
        self.refreshed_at = time.monotonic()
        self._seen = max([self._seen, *(head.trial_id for head in news)])
        return [trial for trial in found if not trial.state.is_finished()]

    def open_ids(self) -> set[int]:
        """Return the unfinished trials as of the last refresh."""
        return self._open

    def in_order(self, states: Container[TrialState] | None) -> list[FrozenTrial]:
        """Return the ended trials of these states by number; the list belongs to the memory."""
        wanted = frozenset(s for s in FINISHED if states is None or s in states)
        if not wanted:
            return []
        view = self._views.get(wanted)
        if view is None:
            found = (trial for trial in self.ended.values() if trial.state in wanted)
            view = self._views[wanted] = sorted(found, key=_number)
        return view

    def best(self, *, maximize: bool) -> FrozenTrial | None:
        """Return the best COMPLETE trial of a single objective, the first of equal ones."""
        seen, best = self._best.get(maximize, (0, None))
        for trial in self.arrived[seen:]:
            if trial.state == TrialState.COMPLETE:
                best = trial if best is None else _better(best, trial, maximize)
        self._best[maximize] = (len(self.arrived), best)
        return best

    def _news(self, connection: Connection, study_id: int) -> list[Head] | None:
        """Return the heads of new and unfinished trials; None if the study is another one now."""
        seen, known = self._seen, [self._anchor, *self._open]
        if len(known) > MOST_OPEN:
            seen, known = min(known) - 1, [self._anchor]
        found = heads(connection, NEWS, study=study_id, seen=seen, known=known)
        if not found:
            raise KeyError(f"no study with id {study_id}")
        by_id = {head.trial_id: head for head in found if head.trial_id >= 0}
        anchor = self.ended.get(self._anchor)
        if anchor is not None and not same_trial(anchor, by_id.get(self._anchor)):
            return None
        return sorted(by_id.values(), key=lambda head: head.trial_id)

    def keep(self, trial: FrozenTrial) -> None:
        """Take in an ended trial, as the database has it."""
        if trial._trial_id in self.ended:
            return
        self.ended[trial._trial_id] = trial
        self.arrived.append(trial)
        self._anchor = trial._trial_id
        for name, distribution in trial.distributions.items():
            self.distributions.setdefault(name, distribution)
        for states, view in self._views.items():
            if trial.state in states:
                insort(view, trial, key=_number)


def _better(one: FrozenTrial, other: FrozenTrial, maximize: bool) -> FrozenTrial:
    first, second = (one, other) if one.number < other.number else (other, one)
    a, b = (float(first.value or 0), float(second.value or 0))
    return second if (b > a if maximize else b < a) else first


def _number(trial: FrozenTrial) -> int:
    return trial.number


def copy_trial(trial: FrozenTrial) -> FrozenTrial:
    """Return a copy that shares nothing which can change, at a tenth of deepcopy's cost."""
    return FrozenTrial(
        number=trial.number,
        state=trial.state,
        value=None,
        values=trial._values,
        datetime_start=trial.datetime_start,
        datetime_complete=trial.datetime_complete,
        params=dict(trial.params),
        distributions=dict(trial.distributions),
        user_attrs=_copy_json(trial.user_attrs),
        system_attrs=_copy_json(trial.system_attrs),
        intermediate_values=dict(trial.intermediate_values),
        trial_id=trial._trial_id,
    )


def _copy_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy_json(item) for key, item in value.items()}
    return [_copy_json(item) for item in value] if isinstance(value, list) else value
