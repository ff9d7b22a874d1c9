"""The reading side of the Optuna storage: what a process knows stays, what is new comes in."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from math import inf
from threading import RLock
from typing import Any

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Connection, select

from storage import rows
from storage.link import Link
from storage.loading import ONE, heads, load, same_trial
from storage.memory import StudyMemory, copy_trial
from storage.running import RunningTrial
from storage.study_rows import StudyRows

# What others write to a trial of this process, and that they ended theirs, is seen within this.
FRESH_S = 0.25


class TrialReads(StudyRows):
    """Trials as they are in the database, in this process's memory, and in its own hands."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._lock = RLock()
        self._memory: dict[int, StudyMemory] = {}
        self._running: dict[int, RunningTrial] = {}

    def after_fork(self) -> None:
        """Leave running trials to the parent, and what another thread may have been at."""
        self._lock = RLock()
        self._running, self._memory = {}, {}

    def running(self, trial_id: int) -> RunningTrial | None:
        """Return a trial of this process that has not ended."""
        return self._running.get(trial_id)

    def forget(self, trial_id: int) -> None:
        """Give up a trial of this process; what of it is not written is dropped."""
        own = self._running.pop(trial_id, None)
        if own is not None:
            self._stale(own.study_id)

    def _stale(self, study_id: int) -> None:
        """Have the next question about ended trials ask the database: this process changed it."""
        if study_id in self._memory:
            self._memory[study_id].refreshed_at = -inf

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Read one trial; an ended one that memory holds costs a look at its times.

        One of this process is known; whether others wrote to it is looked up every 250 ms at most.
        """
        own = self._running.get(trial_id)
        if own is not None and not _is_stale(own):
            return own.snapshot()
        found = self._link.read(lambda c: self._read_one(c, trial_id))[0]
        if own is None:
            return found
        if found.state.is_finished():
            self.forget(trial_id)
            return found
        own.merge(found)
        return own.snapshot()

    def known_trial(self, trial_id: int) -> FrozenTrial:
        """Return a trial of this process as it is known here, without a look at the database."""
        own = self._running.get(trial_id)
        return self.get_trial(trial_id) if own is None else own.snapshot()

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        """Return the COMPLETE trial with the best value, without a look at each.

        Raises:
            KeyError: there is no such study.
            RuntimeError: it has several objectives.
            ValueError: no trial is COMPLETE.
        """
        directions = self.get_study_directions(study_id)
        with self._lock:
            memory = self._memory.setdefault(study_id, StudyMemory())
            self._link.read(lambda c: self._refresh(c, memory, study_id, set()))
            maximize = directions[0] == StudyDirection.MAXIMIZE
            best = memory.best(maximize=maximize) if len(directions) == 1 else None
            if best is None and not memory.in_order((TrialState.COMPLETE,)):
                raise ValueError("no trial is COMPLETE yet")
        if best is None:
            raise RuntimeError("a study of several objectives has no single best trial")
        return best

    def get_trial_system_attrs(self, trial_id: int) -> dict[str, Any]:
        """Read Optuna's own attributes of a trial."""
        return self.get_trial(trial_id).system_attrs

    def get_all_trials(
        self,
        study_id: int,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
    ) -> list[FrozenTrial]:
        """Return the trials of a study by number.

        Without `deepcopy` the ended ones are those of the memory: look, and change nothing.
        """
        wanted = {s.name for s in rows.UNFINISHED if states is None or s in states}
        with self._lock:
            memory = self._memory.setdefault(study_id, StudyMemory())
            trials = self._link.read(lambda c: self._refresh(c, memory, study_id, wanted))
            trials = _merge(memory.in_order(states), trials)
        return [copy_trial(trial) for trial in trials] if deepcopy else trials

    def ended_since(
        self, study_id: int, seen: Any, max_age_s: float = FRESH_S
    ) -> tuple[Sequence[FrozenTrial], Any, bool]:
        """Return the trials that have ended since `seen`, in the order in which word came.

        `seen` is what an earlier call returned in second place, or None. The database is asked if
        it was not within `max_age_s`, or if this process has ended a trial since.

        Returns: the trials, the new `seen`, and whether the study was made anew meanwhile, so
            that the trials are all that there are.
        Raises:
            KeyError: there is no such study.
        """
        with self._lock:
            memory = self._memory.setdefault(study_id, StudyMemory())
            if time.monotonic() - memory.refreshed_at > max_age_s:
                self._link.read(lambda c: self._refresh(c, memory, study_id, set()))
            arrived = memory.arrived
            anew = seen is not None and seen[0] is not arrived
            begin = 0 if seen is None or anew else seen[1]
            return arrived[begin:], (arrived, len(arrived)), anew

    def get_trial_id_from_study_id_trial_number(self, study_id: int, trial_number: int) -> int:
        """Return the id of a trial of a study."""
        columns = rows.trials.c
        query = select(columns.trial_id).where(
            columns.study_id == study_id, columns.number == trial_number
        )
        found = self._link.read(lambda c: c.execute(query).scalar_one_or_none())
        if found is None:
            raise KeyError(f"no trial {trial_number} in the study with id {study_id}")
        return found

    def get_study_id_of_trial(self, trial_id: int) -> int:
        """Return the id of the study that a trial belongs to; a KeyError where there is none."""
        found = self._link.read(lambda c: heads(c, ONE, trial=trial_id))
        if not found:
            raise KeyError(f"no trial with id {trial_id}")
        return found[0].study_id

    def drop(self, study_ids: Sequence[int]) -> None:
        """Forget studies that are deleted, and what their running trials gathered."""
        with self._lock:
            for study_id in study_ids:
                self._memory.pop(study_id, None)
            for trial_id, own in list(self._running.items()):
                if own.study_id in study_ids:
                    del self._running[trial_id]

    def _refresh(
        self, connection: Connection, memory: StudyMemory, study_id: int, wanted: set[str]
    ) -> list[FrozenTrial]:
        own = {t: o for t, o in list(self._running.items()) if o.study_id == study_id}
        known = {trial_id for trial_id, running in own.items() if not _is_stale(running)}
        found = memory.refresh(connection, study_id, wanted=wanted, skip=known)
        # One that is ours and no longer open was ended by somebody else.
        for trial_id in set(own) - memory.open_ids():
            self.forget(trial_id)
            own.pop(trial_id)
        others = []
        for trial in found:
            if trial._trial_id in own:
                own[trial._trial_id].merge(trial)
            else:
                others.append(trial)
        return others + [o.snapshot() for o in own.values() if o.trial.state.name in wanted]

    def _read_one(self, connection: Connection, trial_id: int) -> tuple[FrozenTrial, int]:
        found = heads(connection, ONE, trial=trial_id)
        if not found:
            raise KeyError(f"no trial with id {trial_id}")
        [head] = found
        memory = self._memory.get(head.study_id)
        kept = None if memory is None else memory.ended.get(trial_id)
        if kept is not None and same_trial(kept, head):
            return kept, head.study_id
        return load(connection, head.study_id, [head])[0], head.study_id


def _is_stale(own: RunningTrial) -> bool:
    """Say whether others may have written to a trial of ours for a while, unseen."""
    return time.monotonic() - own.looked_at > FRESH_S


def _merge(ended: list[FrozenTrial], others: list[FrozenTrial]) -> list[FrozenTrial]:
    return sorted([*ended, *others], key=lambda trial: trial.number) if others else list(ended)
