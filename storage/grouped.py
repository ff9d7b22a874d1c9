"""Grouped writes: what running trials gather goes into the database together, in the background.

One transaction every quarter of a second at most, whatever number of trials, params and reports;
it renews the leases of the process's tickets as well.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from hpo.errors import HpoError
from storage import processes, rows
from storage.leases import Leases, renew
from storage.link import Link, may_pass
from storage.loading import local
from storage.running import Gathered, RunningTrial, write_news
from storage.trial_reads import TrialReads
from storage.writer import Writer

_log = logging.getLogger("hpo.storage")
# What a running trial gathers is in the database within 250 ms; the rest is the commit's.
GATHER_S = 0.2
# Its params sooner: somebody else may tell its result.
PARAMS_S = 0.02
# After a write that failed although it was tried again for the whole of its time.
_RETRY_S = 1.0


class GroupedWrites(TrialReads):
    """The trials that this process drives, their leases, and the thread that writes for them."""

    def __init__(self, link: Link, *, grouped: bool) -> None:
        super().__init__(link)
        self.leases = Leases()
        self._grouped = grouped
        self._known = rows.statements(link.engine.dialect.name)
        # The first is for whoever reports next, the second stays until a write succeeds.
        self._failure: Exception | None = None
        self._last_failure: Exception | None = None
        self._writer = Writer(self._write_due)
        processes.watch(self)

    def close(self) -> None:
        """Write what is gathered and close all sessions.

        Raises:
            StorageError: it could not be written; what was tried in vain for its whole time
                before is not tried again.
        """
        processes.unwatch(self)
        self._writer.close()
        try:
            if self._last_failure is None:
                self.flush()
            elif any(own.has_news for own in self._running.values()):
                raise self._last_failure
        finally:
            self._link.close()

    def after_fork(self) -> None:
        """Leave running trials, sessions and the thread to the parent."""
        super().after_fork()
        self.leases, self._failure, self._last_failure = Leases(), None, None
        self._writer = Writer(self._write_due)
        self._link.engine.dispose(close=False)

    def adopt(self, study_id: int, trial: FrozenTrial, *, is_new: bool = True) -> None:
        """Take a RUNNING trial of this process into memory, if writes are grouped."""
        if self._grouped:
            with self._lock:
                own = RunningTrial(study_id, trial, is_new=is_new)
                self._running[trial._trial_id] = own

    def keep_lease(self, ticket_id: int, owner: str, lease_s: float) -> None:
        """Renew the lease of a claimed ticket for as long as it is open, or until it is lost."""
        self.leases.take(ticket_id, owner, lease_s)
        self._writer.within(self.leases.next_s())

    def drop_lease(self, ticket_id: int) -> None:
        """Renew a lease no more: its ticket is closed or lost."""
        self.leases.drop(ticket_id)

    def has_lost(self, ticket_id: int) -> bool:
        """Say whether others have the ticket by now, as far as this process knows."""
        return self.leases.is_lost(ticket_id)

    def gathered(self, own: RunningTrial, within_s: float = GATHER_S) -> None:
        """Have what a trial gathered written soon.

        Raises:
            HpoError: the last attempt to write failed.
        """
        failure, self._failure = self._failure or own.failure, None
        if self._writer.is_closed:
            self.flush(own.trial._trial_id)
        else:
            self._writer.within(within_s)
        if failure is not None:
            raise failure

    def flush(self, trial_id: int | None = None) -> None:
        """Write what one trial has gathered, or all of this process.

        Raises:
            UpdateFinishedTrialError: somebody else has ended the trial that is named.
            StorageError: the database stayed away or refused.
        """
        found = list(self._running.values())
        if trial_id is not None:
            found = [own for own in found if own.trial._trial_id == trial_id]
        # Of one that a writer is at, this waits for its commit.
        gone = self._write([own for own in found if own.is_behind])
        if trial_id in gone:
            raise UpdateFinishedTrialError(f"trial {trial_id} has been ended by somebody else")

    def _write(self, chosen: Sequence[RunningTrial]) -> set[int]:
        """Write what trials have gathered, and renew leases; return those that others ended."""
        due = self.leases.due(within_write=bool(chosen))
        if not chosen and not due:
            return set()
        with ExitStack() as stack:
            # In one order, so that two who write never wait for each other.
            ordered = sorted(chosen, key=lambda own: own.trial._trial_id)
            news = {own.trial._trial_id: stack.enter_context(own.taken()) for own in ordered}
            at = time.monotonic()
            gone, held = self._link.write(
                lambda c: self._write_all(c, news, due), prepared=True)
        for own in chosen:
            own.is_new = False
            own.failure = None
        for owner, ticket_ids in held.items():
            self.leases.renewed(owner, ticket_ids, at)
        for one in gone:
            self.forget(one)
            if n_late := len(news[one].reports):
                _log.warning("trial %s has been ended by somebody else: %s late reports of it "
                             "are dropped", one, n_late)
        return gone

    def _write_all(
        self, connection: Connection, news: dict[int, Gathered], due: list[tuple[str, float]]
    ) -> tuple[set[int], dict[str, list[int]]]:
        """Write what is gathered; return the trials that others have ended, and tickets held.

        Of a trial that has ended the params are written still: they were drawn before.
        """
        renewed = {owner: renew(connection, owner, lease_s) for owner, lease_s in due}
        touched = [self._known.touch_trial.run(connection, {"trial": one}) for one in news]
        found = [row for answer in touched for row in answer.all()]
        states = {row.trial_id: row.state.is_finished() for row in found}
        gone = {trial_id for trial_id in news if states.get(trial_id, True)}
        drawn = {one: Gathered(params=news[one].params) for one in gone if one in states}
        write_news(connection, drawn | {one: news[one] for one in set(news) - gone})
        return gone, {owner: [row.id for row in answer.all()] for owner, answer in renewed.items()}

    def _write_due(self) -> float:
        chosen = [own for own in list(self._running.values()) if own.has_news]
        try:
            self._write(chosen)
        except Exception as error:
            if _is_final(error) and chosen:
                return self._write_each(chosen)
            # Whoever reports next is told; until then the rows wait.
            self._failure = self._last_failure = error
            return _RETRY_S
        self._failure = self._last_failure = None
        return self.leases.next_s()

    def _write_each(self, chosen: Sequence[RunningTrial]) -> float:
        """Write trial by trial, so that one which the database refuses costs no other its rows."""
        for own in chosen:
            try:
                self._write([own])
            except Exception as error:
                own.failure = error
        return _RETRY_S

    def ended(
        self,
        own: RunningTrial,
        state: TrialState,
        values: Sequence[float] | None,
        at: Any,
        *,
        n_rows: int,
    ) -> None:
        """Give up a trial that this process has ended, and keep it as ended.

        `n_rows` is how many rows it had before its end. If some were there, somebody else may have
        written to it, and it is read when the next one asks.
        """
        trial = own.trial
        with self._lock:
            self._running.pop(trial._trial_id, None)
            memory = self._memory.get(own.study_id)
            if memory is None:
                return
            if n_rows or not own.is_new:
                self._stale(own.study_id)
                return
            own.as_stored()
            trial.state, trial.datetime_complete = state, local(at)
            trial._values = None if not values else [float(value) for value in values]
            memory.keep(trial)


def _is_final(error: Exception) -> bool:
    """Say whether a write failed in a way that no waiting repairs."""
    cause = error.__cause__ if isinstance(error, HpoError) else error
    return not isinstance(cause, SQLAlchemyError) or not may_pass(cause)
