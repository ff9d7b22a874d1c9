"""A worker's turns: it ends one trial and takes the ticket of the next.

Both are one transaction, for which the worker waits. Of short trials that would be a part of their
time that counts, so there the transaction runs beside the next trial: its ticket was taken while
this one ran, one ahead.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpo.queue import LEASE_S, NOT_BEGUN, retry_attrs

if TYPE_CHECKING:
    from storage.database import Database
    from storage.ending import TrialEnd
    from storage.ticket import Claim, ClaimOrder

# A trial that is shorter has the next one's ticket taken while it runs.
SHORT_S = 0.25
# A ticket that was taken goes back if the trial before it turns out to be this long.
_HOLD_S = 3.0
# Else this thread and the one that begins the next trial share one interpreter right then.
_AFTER_BEGIN_S = 0.002


class Turns:
    """Takes tickets of a study for one worker and ends their trials.

    `order` is the parent's, which may change; `told` of `end` is called with whether the trial was
    still this worker's, once its end is stored.
    """

    def __init__(self, db: Database, order: dict[str, Any], owner: str) -> None:
        self._db, self._order, self._owner = db, order, owner
        # Taken with the end of the trial before it.
        self._next: Claim | None = None
        self._ahead = _Ahead(self._return)

    def close(self) -> None:
        """Give back the tickets that were taken but not begun.

        Raises:
            HpoError: the database stayed away; whoever looks after lost workers gives them back.
        """
        left, self._next = [self._next, self._ahead.close()], None
        for claim in left:
            if claim is not None:
                self._return(claim)
        self._ahead.check()

    def next(self) -> Claim | None:
        """Return the next ticket, of the phase under way if one is named; None if none waits.

        Raises:
            HpoError: the database stayed away.
        """
        claim, self._next = self._next or self._ahead.take(), None
        if claim is not None and self._db.studies.has_lost(claim.ticket.id):
            # It waited for longer than its lease.
            self._db.studies.drop_lease(claim.ticket.id)
            claim = None
        if claim is None:
            self._ahead.check()
            # An idle worker asks often, and must not keep the database from those at work.
            if not self._db.tickets.any_waits(self._order["name"], self._order["only"]):
                return None
            claim = self._take()
        return claim

    def end(self, end: TrialEnd, told: Callable[[bool], None], *, last: bool) -> None:
        """End a trial, and take the next ticket unless this is the `last` of this worker.

        Raises:
            HpoError: the database stayed away.
        """
        self._next = self._ahead.take()
        if self._next is None and not last:
            self._next = self._end_and_take(end, told)
        else:
            told(self._db.end(end))
        # Not before: the database may be back by now.
        self._ahead.check()

    def end_beside(self, end: TrialEnd, told: Callable[[bool], None]) -> None:
        """End a trial while the next one runs.

        Raises:
            HpoError: the database stayed away, maybe as an earlier trial was ended.
        """
        self._next = self._ahead.take()
        self._ahead.do(lambda: self._end_and_take(end, told))
        if self._next is None:
            # The first one of its kind, or the last.
            self._next = self._ahead.take()
            if self._next is not None:
                self._ahead.do(self._take)
        self._ahead.check()

    def settle(self) -> None:
        """Wait until the ends of earlier trials are stored; the next turn tells of a failure."""
        self._ahead.settle()

    def _end_and_take(self, end: TrialEnd, told: Callable[[bool], None]) -> Claim | None:
        is_ours, claim = self._db.end_and_claim(end, self._claim_order())
        self._kept(claim)
        try:
            told(is_ours)
        except Exception:
            if claim is not None:
                self._return(claim)
            raise
        return claim

    def _take(self) -> Claim | None:
        return self._kept(next(iter(self._db.tickets.claim_many(self._claim_order(), 1)), None))

    def _kept(self, claim: Claim | None) -> Claim | None:
        if claim is not None:
            self._db.studies.keep_lease(claim.ticket.id, self._owner, LEASE_S)
        return claim

    def _claim_order(self) -> ClaimOrder:
        from storage.ticket import ClaimOrder

        return ClaimOrder(self._order["name"], self._owner, socket.gethostname(), os.getpid(),
                          LEASE_S, self._order["only"])

    def _return(self, claim: Claim) -> None:
        """Give a ticket back that was not begun."""
        from optuna.trial import TrialState

        ticket, owner = claim.ticket, self._owner
        self._db.studies.drop_lease(ticket.id)
        if claim.trial_id is None:
            self._db.tickets.give_back(ticket.id, owner, NOT_BEGUN, count=False)
            return
        attrs = {"reason": NOT_BEGUN, "ticket": ticket.idx, **retry_attrs(self._db, ticket)}
        self._db.end_trial(ticket.id, owner, claim.trial_id, TrialState.FAIL, None, attrs,
                           back=(NOT_BEGUN, None, False))


class _Ahead:
    """A thread that does one job after another, and holds the ticket that the last one took."""

    def __init__(self, give_back: Callable[[Claim], None]) -> None:
        self._give_back = give_back
        self._turn = threading.Condition()
        self._jobs: deque[Callable[[], Claim | None]] = deque()
        self._held: Claim | None = None
        self._held_until = 0.0
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def do(self, job: Callable[[], Claim | None]) -> None:
        """Have a job done that may take a ticket."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, daemon=True, name="ahead")
            # It may fail where processes are limited; then nothing waits for it.
            thread.start()
            self._thread = thread
        with self._turn:
            self._jobs.append(job)
            self._turn.notify_all()

    def settle(self) -> None:
        """Wait until all jobs are done."""
        with self._turn:
            self._turn.wait_for(lambda: not self._jobs)

    def check(self) -> None:
        """Raise the error of a job that failed, once."""
        with self._turn:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def take(self) -> Claim | None:
        """Hand over the ticket that is held, once all jobs are done."""
        with self._turn:
            self.settle()
            held, self._held = self._held, None
        return held

    def close(self) -> Claim | None:
        """End the thread, and hand over the ticket that is held."""
        held = self.take()
        with self._turn:
            self._is_closed = True
            self._turn.notify_all()
        return held

    def _run(self) -> None:
        while (job := self._wait()) is not None:
            held, error = None, None
            time.sleep(_AFTER_BEGIN_S)
            try:
                held = job()
            except Exception as failed:
                error = failed
            with self._turn:
                if held is not None:
                    self._held, self._held_until = held, time.monotonic() + _HOLD_S
                self._error = self._error or error
                self._jobs.popleft()
                self._turn.notify_all()

    def _wait(self) -> Callable[[], Claim | None] | None:
        """Return the next job; None to end. A ticket held too long is given back as one."""
        with self._turn:
            while not self._jobs:
                if self._is_closed:
                    return None
                left = self._held_until - time.monotonic() if self._held is not None else None
                if left is not None and left <= 0:
                    self._jobs.append(self._back)
                    break
                self._turn.wait(left)
            return self._jobs[0]

    def _back(self) -> None:
        with self._turn:
            claim, self._held = self._held, None
        if claim is not None:
            self._give_back(claim)
