"""Closes the trials of workers that are gone, so that none stays RUNNING and no result is lost."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpo import queue
from hpo.pool import Heard
from hpo.space import Param

if TYPE_CHECKING:
    from storage.database import Database
    from storage.ticket import Ticket

# A reason is one line of a table; a worker's last line may be any length.
_MAX_LAST_LINE = 300
# A lease that has run out is watched for as long as its owner takes to renew it, and a bit: where
# the database's clock is set on or back, all leases look as if they had.
_WATCH_S = queue.LEASE_S / 3 + 2.0


@dataclass(frozen=True)
class Reaper:
    """Looks after the tickets of one study; `say` tells the user of each trial that was lost."""

    db: Database
    name: str
    space: Mapping[str, Param]
    metric: str
    max_retries: int | None
    say: Callable[[str], None]
    watch_s: float = _WATCH_S
    # By ticket: its lease as it was seen first, and when.
    _watched: dict[int, tuple[float | None, float]] = field(default_factory=dict)

    def bury(self, gone: Mapping[str, Any]) -> None:
        """Close the trials of a worker by the event with which the pool told of its end."""
        self.reap(gone["why"] or _exit_text(gone), gone)

    def reap(self, reason: str = "worker lost: its process is gone",
             gone: Mapping[str, Any] | None = None) -> None:
        """Close the trials of workers that are gone, and give their params back to the queue.

        `gone` is the event by which the pool told of one worker's end: of the trials that it had
        begun it may not have stored the params, the last epochs and the end, and one that it had
        taken and not begun is none the worse.
        """
        heard: Mapping[Any, Heard] = gone["heard"] if gone else {}
        for ticket in queue.abandoned(self.db, self.name):
            if gone and (ticket.host, ticket.pid) != (socket.gethostname(), gone["pid"]):
                # What is known of another's trials comes with its own end.
                continue
            if not self._is_lost(ticket):
                continue
            known, why = heard.get((ticket.study, ticket.trial_number)), reason
            if known is not None:
                queue.store_params(self.db, ticket, self.space, known.params)
                self._store_epochs(ticket, known)
                # Else others have ended it meanwhile.
                if known.ending is not None and self.db.end(queue.end_from_json(known.ending)):
                    continue
            elif gone or not queue.was_begun(self.db, ticket):
                why = f"{queue.NOT_BEGUN}: {reason}"
            self._close(ticket, why)

    def _is_lost(self, ticket: Ticket) -> bool:
        """Return whether a ticket's worker is dead, or did not renew its lease under our eyes."""
        if queue.is_gone(ticket.owner or ""):
            return True
        now = time.monotonic()
        lease, since = self._watched.setdefault(ticket.id, (ticket.lease_until, now))
        if lease != ticket.lease_until:
            self._watched[ticket.id] = ticket.lease_until, now
            return False
        return now - since >= self.watch_s

    def _close(self, ticket: Ticket, why: str) -> None:
        params = queue.stored_params(self.db, ticket, self.space)
        if queue.close_lost(self.db, ticket, why, self.max_retries, params):
            what = "" if ticket.trial_number is None else f" trial {ticket.trial_number}"
            self.say(f"{queue.phase_of(ticket.study)}{what}: FAIL {why}")

    def _store_epochs(self, ticket: Ticket, heard: Heard) -> None:
        """Store the epochs that a worker told of and had not stored: the last 250 ms of them."""
        trial_id, number = ticket.trial_id, ticket.trial_number
        if trial_id is None or number is None or not heard.epochs:
            return
        stored = {row.epoch for row in self.db.epochs(ticket.study, number)}
        for event in heard.epochs:
            if event["epoch"] not in stored:
                # JSON has no NaN.
                metrics = {name: math.nan if value is None else value
                           for name, value in event["metrics"].items()}
                self.db.report(trial_id, ticket.study, number, event["epoch"],
                               metrics[self.metric], metrics)


def _exit_text(event: Mapping[str, Any]) -> str:
    code = event["code"]
    how = f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
    last = (event["tail"].splitlines() or [""])[-1][:_MAX_LAST_LINE]
    return f"worker lost: its process was {how}" + (f": {last}" if last else "")
