"""Claims: waiting tickets become one worker's, and their Optuna trials are made, or neither."""

from __future__ import annotations

import uuid
from typing import Any

from optuna.trial import FrozenTrial
from sqlalchemy import Connection, Integer, Row, bindparam, select, update

from hpo.errors import StorageError
from storage import rows
from storage.columns import now_s, utc_now
from storage.leases import RUNNING, in_state
from storage.schema import tickets
from storage.studies import StudyStorage
from storage.ticket import TRIAL, Claim, ClaimOrder, Ticket
from storage.ticket_ends import WAITING


def _first_waiting(*, of_one_study: bool) -> Any:
    """Return the compare-and-set that takes the first waiting tickets, `most` of them."""
    queue = tickets.alias("queue")
    wanted = (queue.c.name == bindparam("study_name")) & in_state(queue, WAITING)
    if of_one_study:
        wanted &= queue.c.study == bindparam("only")
    first = (
        select(queue.c.id)
        .where(wanted)
        .order_by(queue.c.id)
        .limit(bindparam("most", type_=Integer))
        .with_for_update(skip_locked=True)
        # Else PostgreSQL may look for the first ones again for each row that it updates.
        .cte("first_waiting")
        .prefix_with("MATERIALIZED", dialect="postgresql")
    )
    taken = {
        "state": RUNNING,
        "lease_until": now_s() + bindparam("lease_s"),
        **{name: bindparam("new_" + name) for name in ("owner", "host", "pid", "claim_token")},
        "taken_at": bindparam("now"),
    }
    where = tickets.c.id.in_(select(first.c.id)) & (tickets.c.state == WAITING)
    return update(tickets).where(where).values(taken).returning(*tickets.c)


CLAIM = _first_waiting(of_one_study=False)
CLAIM_OF = _first_waiting(of_one_study=True)
NOTE_TRIAL = (
    update(tickets)
    .where(tickets.c.id == bindparam("ticket"))
    .values(trial_id=bindparam("trial"), trial_number=bindparam("number"))
)


class Claiming:
    """The taking of up to `most` tickets, as work within a transaction.

    `work` does it, `done` finds it done where the answer to a COMMIT was lost, and `adopt` follows
    the commit.
    """

    def __init__(self, studies: StudyStorage, order: ClaimOrder, most: int = 1) -> None:
        self._studies = studies
        self._token = uuid.uuid4().hex
        self._statement = CLAIM if order.only is None else CLAIM_OF
        self._fields: dict[str, Any] = {
            "study_name": order.name,
            "lease_s": order.lease_s,
            "new_owner": order.owner,
            "new_host": order.host,
            "new_pid": order.pid,
            "new_claim_token": self._token,
            "most": most,
            **({} if order.only is None else {"only": order.only}),
        }
        self._made: list[tuple[int, FrozenTrial]] = []

    def work(self, connection: Connection) -> list[Claim]:
        """Take the tickets and make their trials.

        Raises:
            StorageError: the Optuna study of a ticket does not exist.
        """
        self._made.clear()
        found = connection.execute(self._statement, {**self._fields, "now": utc_now()})
        return [self._claimed(connection, row) for row in sorted(found.all(), key=_by_id)]

    def done(self, connection: Connection) -> list[Claim]:
        """Return what was taken before."""
        mine = select(tickets).where(tickets.c.claim_token == self._token)
        found = sorted(connection.execute(mine), key=_by_id)
        return [Claim(ticket_of(row), row.trial_id, row.trial_number) for row in found]

    def adopt(self) -> None:
        """Take the trials that were made into this process's memory."""
        for study_id, trial in self._made:
            self._studies.adopt(study_id, trial)

    def _claimed(self, connection: Connection, row: Row[Any]) -> Claim:
        if row.kind != TRIAL:
            return Claim(ticket_of(row), None, None)
        start = rows.utc_naive()
        try:
            study_id, trial = self._studies.insert_running(connection, start, study=row.study)
        except KeyError:
            raise StorageError(
                f"ticket {row.id}: its study '{row.study}' does not exist"
            ) from None
        self._made.append((study_id, trial))
        note = {"ticket": row.id, "trial": trial._trial_id, "number": trial.number}
        connection.execute(NOTE_TRIAL, note)
        ticket = ticket_of(row, trial_id=trial._trial_id, trial_number=trial.number)
        return Claim(ticket, trial._trial_id, trial.number)


def ticket_of(row: Row[Any], **changes: Any) -> Ticket:
    """Return the ticket of a row."""
    fields = dict(row._mapping)
    fields["payload"] = fields["payload"] or {}
    return Ticket(**fields | changes)


def _by_id(row: Row[Any]) -> int:
    return row.id
