"""Grouped writes: what running trials gather goes into the database together, in the background.

One transaction every quarter of a second at most, whatever number of trials, params and reports;
it renews the leases of the process's tickets as well.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Connection

from storage import processes, rows
from storage.leases import Leases, renew
from storage.link import Link
from storage.loading import local
from storage.running import Gathered, RunningTrial, write_news
from storage.trial_reads import TrialReads
from storage.writer import Writer

# What a running trial gathers is in the database within 250 ms; the rest is the commit's.
GATHER_S = 0.2
# After a write that failed although it was tried again for the whole of its time.
_RETRY_S = 1.0


class GroupedWrites(TrialReads):
    """The trials that this process drives, their leases, and the thread that writes for them."""

    def __init__(self, link: Link, *, grouped: bool) -> None:
        super().__init__(link)
        self.leases = Leases()
        self._grouped = grouped
        self._known = rows.statements(link.engine.dialect.name)
        self._failure: Exception | None = None
        self._writer = Writer(self._write_due)
        processes.watch(self)

    def close(self) -> None:
        """Write what is gathered and close all sessions."""
        processes.unwatch(self)
        self._writer.close()
        try:
            self.flush()
        finally:
            self._link.close()

    def after_fork(self) -> None:
        """Leave running trials, sessions and the thread to the parent."""
        super().after_fork()
        self.leases, self._failure = Leases(), None
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

    def gathered(self) -> None:
        """Have what a trial gathered written soon.

        Raises:
            HpoError: the last attempt to write failed.
        """
        failure, self._failure = self._failure, None
        self._writer.within(GATHER_S)
        if failure is not None:
            raise failure

    def flush(self, trial_id: int | None = None) -> None:
        """Write what one trial has gathered, or all of this process.

        Raises:
            UpdateFinishedTrialError: somebody else has ended the trial that is named.
            StorageError: the database stayed away or refused.
        """
        found = self._running.get(trial_id) if trial_id is not None else None
        chosen = [found] if found is not None else []
        if trial_id is None:
            chosen = sorted(list(self._running.values()), key=lambda own: own.trial._trial_id)
        chosen = [own for own in chosen if own.has_news]
        due = self.leases.due(within_write=bool(chosen))
        if not chosen and not due:
            return
        with ExitStack() as stack:
            news = {own.trial._trial_id: stack.enter_context(own.taken()) for own in chosen}
            at = time.monotonic()
            gone, held = self._link.write(lambda c: self._write_all(c, news, due))
        for own in chosen:
            own.is_new = False
        for owner, ticket_ids in held.items():
            self.leases.renewed(owner, ticket_ids, at)
        for one in gone:
            self.forget(one)
        if trial_id in gone:
            raise UpdateFinishedTrialError(f"trial {trial_id} has been ended by somebody else")

    def _write_all(
        self, connection: Connection, news: dict[int, Gathered], due: list[tuple[str, float]]
    ) -> tuple[set[int], dict[str, list[int]]]:
        """Write what is gathered; return the trials that others have ended, and tickets held."""
        held = {owner: renew(connection, owner, lease_s) for owner, lease_s in due}
        alive: set[int] = set()
        if news:
            found = connection.execute(self._known.touch_trials, {"trials": list(news)})
            alive = {row.trial_id for row in found if not row.state.is_finished()}
        write_news(connection, {trial_id: news[trial_id] for trial_id in alive})
        return set(news) - alive, held

    def _write_due(self) -> float:
        try:
            self.flush()
        except Exception as error:
            # Whoever reports next is told; until then the rows wait.
            self._failure = error
            return _RETRY_S
        self._failure = None
        return self.leases.next_s()

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
            trial.state, trial.datetime_complete = state, local(at)
            trial._values = None if not values else [float(value) for value in values]
            memory.keep(trial)
