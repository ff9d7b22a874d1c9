"""The end of a trial and of its ticket, in one transaction: no crash can come between."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from optuna.trial import TrialState
from sqlalchemy import Connection, bindparam, select

from storage import rows
from storage.columns import clip
from storage.loading import local
from storage.running import Gathered
from storage.schema import tickets
from storage.studies import UNKNOWN, StudyStorage
from storage.ticket_ends import DONE, FAILED, close_ticket, return_ticket

# Whether this very end has closed the ticket and the trial.
IS_ENDED = (
    select(tickets.c.id)
    .join(rows.trials, rows.trials.c.trial_id == tickets.c.trial_id)
    .where(
        tickets.c.id == bindparam("ended_ticket"),
        tickets.c.ended_at == bindparam("ended_at"),
        tickets.c.trial_id == bindparam("ended_trial"),
        rows.trials.c.datetime_complete == bindparam("at"),
    )
    .exists()
)
TICKET_STATES = {TrialState.COMPLETE: DONE, TrialState.PRUNED: DONE, TrialState.FAIL: FAILED}
# The attribute that a person reads in a table; the whole text is in the trial's log file.
REASON = "reason"


class TicketLost(Exception):  # noqa: N818 - no fault: others went on with the trial
    """The ticket that should end is not its owner's any more."""


@dataclass(frozen=True)
class Back:
    """How a ticket goes back to the queue when its trial is lost, and what its payload gains."""

    cause: str
    params: Mapping[str, Any] | None = None
    count: bool = True
    payload: Mapping[str, Any] | None = None


@dataclass
class TrialEnd:
    """How a trial and its ticket end, as work within a transaction.

    With `back` the ticket waits again. `owner` None stands for whoever has the ticket, and
    `expired_only` leaves it alone if its lease was renewed meanwhile: for those who close the
    trials of lost workers. A trial that somebody else has ended keeps its end. `began_at` is for
    one that was taken before it was begun.
    """

    ticket_id: int
    owner: str | None
    trial_id: int
    state: TrialState
    value: float | None
    user_attrs: Mapping[str, Any]
    back: Back | None = None
    expired_only: bool = False
    began_at: datetime | None = None

    def __post_init__(self) -> None:
        self._began_at = None if self.began_at is None else rows.utc_naive(self.began_at)
        # A clock that was set back meanwhile must not give a trial that ended before it began.
        self._at = max(rows.utc_naive(), self._began_at or datetime.min)
        # The same time as our own tables take it.
        self._ended_at = self._at.replace(tzinfo=UTC)
        self._texts = _texts(self.user_attrs)
        self._news = Gathered()
        # Whether the owner had the ticket, and how many rows the trial had before its end.
        self._result: tuple[bool, int | None] = (False, None)

    @property
    def values(self) -> list[float] | None:
        """The trial's values, as Optuna has them."""
        return None if self.value is None or math.isnan(self.value) else [self.value]

    @contextmanager
    def within(self, studies: StudyStorage) -> Iterator[None]:
        """Hand over what the trial has gathered, and keep the trial once it is ended."""
        own = studies.running(self.trial_id)
        if own is None:
            self._news = Gathered(users=dict(self._texts))
            yield
        else:
            with own.taken(ending=True) as gathered:
                # Its own attributes go back to nobody, should this end fail.
                self._news = gathered.before(Gathered(users=dict(self._texts)))
                yield
        held, n_rows = self._result
        studies.drop_lease(self.ticket_id)
        if own is None or not held or n_rows is None:
            studies.forget(self.trial_id)
            return
        if self._began_at is not None:
            own.trial.datetime_start = local(self._began_at)
        own.trial._user_attrs.update({key: json.loads(t) for key, t in self._texts.items()})
        studies.ended(own, self.state, self.values, self._at, n_rows=n_rows)

    def work(self, connection: Connection, studies: StudyStorage) -> bool:
        """End both, looking at each step whether it may be done.

        Raises:
            TicketLost: by the owner; the transaction must not be committed.
        """
        self._result = (False, None)
        held = self._close_ticket(connection)
        moved = studies.move(connection, self.trial_id, self.state, self._at, self._began_at)
        if not held():
            raise TicketLost
        n_rows = moved.scalar()
        if n_rows is not None:
            studies.write_rest(connection, self.trial_id, self._news, self.values)
        self._result = (True, n_rows)
        return True

    @property
    def proof(self) -> dict[str, Any]:
        """The fields of IS_ENDED."""
        return {"ended_ticket": self.ticket_id, "ended_trial": self.trial_id, "at": self._at,
                "ended_at": self._ended_at}

    def say(self, connection: Connection, studies: StudyStorage) -> Callable[[], bool]:
        """End both without a look, for a transaction that is refused unless IS_ENDED follows.

        Returns: what reads the answers, after the commit.
        """
        self._result = (False, None)
        self._close_ticket(connection)
        moved = studies.move(connection, self.trial_id, self.state, self._at, self._began_at)
        studies.write_rest(connection, self.trial_id, self._news, self.values)

        def read() -> bool:
            self._result = (True, moved.scalar())
            return True

        return read

    def done(self, connection: Connection) -> bool | None:
        """Return True if this very end has closed the trial or, where others had, the ticket."""
        trial, ticket = rows.trials.c, tickets.c
        ended = select(trial.trial_id).where(
            trial.trial_id == self.trial_id, trial.datetime_complete == self._at)
        closed = select(ticket.id).where(
            ticket.id == self.ticket_id, ticket.ended_at == self._ended_at)
        if connection.execute(ended).first() is not None:
            self._result = (True, UNKNOWN)
        elif connection.execute(closed).first() is not None:
            self._result = (True, None)
        else:
            return None
        return True

    def _close_ticket(self, connection: Connection) -> Callable[[], bool]:
        """Close the ticket, or give it back; what is returned says whether the owner had it."""
        if self.back is not None:
            parts = (self.back.cause, self.back.params, self.back.count)
            is_back = return_ticket(
                connection, self.ticket_id, self.owner, *parts, self.expired_only, self.trial_id,
                self.back.payload,
            )
            return lambda: is_back
        cause = str(self.user_attrs.get(REASON) or "") or None
        state = TICKET_STATES[self.state]
        fence = (self.expired_only, self.trial_id, self._ended_at)
        closed = close_ticket(connection, self.ticket_id, self.owner, state, cause, None, *fence)
        return lambda: bool(closed.rowcount)


def _texts(attrs: Mapping[str, Any]) -> dict[str, str]:
    cut = {k: clip(v) if k == REASON and isinstance(v, str) else v for k, v in attrs.items()}
    return {key: json.dumps(value) for key, value in cut.items()}
