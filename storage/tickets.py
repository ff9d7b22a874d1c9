"""Tickets: one row a unit of work, taken by exactly one worker.

Optuna's own waiting trials are taken twice on SQLite and are read again by every ask and prune;
a ticket is taken with one compare-and-set, and its Optuna trial is made in the same transaction.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial
from sqlalchemy import Connection, Integer, Row, bindparam, delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from hpo.errors import StorageError
from storage import rows
from storage.columns import now_s, utc_now
from storage.leases import RUNNING, renew
from storage.link import Link
from storage.schema import tickets
from storage.studies import StudyStorage
from storage.ticket import Claim, NewTicket, Ticket
from storage.ticket_ends import (
    DONE,
    FAILED,
    WAITING,
    close_ticket,
    free,
    held,
    return_ticket,
)

STATES = (WAITING, RUNNING, DONE, FAILED)
TRIAL, SWEEP, SCORE = "trial", "sweep", "score"


def _first_waiting(*, of_one_study: bool) -> Any:
    """Return the compare-and-set that takes the first waiting tickets, `most` of them."""
    queue = tickets.alias("queue")
    wanted = (queue.c.name == bindparam("study_name")) & (queue.c.state == WAITING)
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

class Tickets:
    """The tickets of all studies in a database."""

    def __init__(self, link: Link, studies: StudyStorage) -> None:
        self._link = link
        self._studies = studies

    def write(self, name: str, study: str, kind: str, items: Iterable[NewTicket]) -> int:
        """Write the tickets that the study lacks and return how many those were.

        A ticket is known by its `idx`: one that exists stays as it is.
        """
        new = [_new_row(name, study, kind, item) for item in items]
        if not new:
            return 0
        upsert = sqlite.insert if self._link.is_sqlite else postgresql.insert
        count = select(func.count()).select_from(tickets).where(tickets.c.study == study)

        def work(connection: Connection) -> int:
            before = connection.execute(count).scalar_one()
            connection.execute(
                upsert(tickets).on_conflict_do_nothing(index_elements=["study", "idx"]), new
            )
            return connection.execute(count).scalar_one() - before

        return self._link.write(work)

    def trim(self, study: str, n: int) -> int:
        """Delete the last waiting tickets until `n` are left in all; return how many those were.

        Tickets that run or have ended stay, though they be more.
        """
        mine = tickets.c.study == study
        ordered = select(tickets.c.id, tickets.c.state).where(mine).order_by(tickets.c.idx)

        def work(connection: Connection) -> int:
            found = connection.execute(ordered).all()
            waiting = [row.id for row in found if row.state == WAITING]
            extra = waiting[max(0, n - (len(found) - len(waiting))) :]
            still = tickets.c.id.in_(extra) & (tickets.c.state == WAITING)
            return connection.execute(delete(tickets).where(still)).rowcount

        return self._link.write(work)

    def reopen(self, study: str, idxs: Sequence[int]) -> int:
        """Let failed tickets wait again, as often tried as before, and return how many."""
        chosen = (
            (tickets.c.study == study)
            & tickets.c.idx.in_(list(idxs))
            & (tickets.c.state == FAILED)
        )
        change = update(tickets).where(chosen).values(**free(), state=WAITING, ended_at=None)
        return self._link.write(lambda c: c.execute(change).rowcount)

    def claim(
        self,
        name: str,
        owner: str,
        host: str,
        pid: int,
        lease_s: float,
        *,
        only: str | None = None,
    ) -> Claim | None:
        """Take the study's first waiting ticket, and make its Optuna trial if it is for one.

        `only` names the Optuna study of a phase, whose tickets alone are taken then. Both happen
        in one transaction, so a ticket that runs has its trial, whatever dies when.

        Raises:
            StorageError: the Optuna study of the ticket does not exist.
        """
        found = self.claim_many(name, owner, host, pid, lease_s, 1, only=only)
        return found[0] if found else None

    def claim_many(
        self,
        name: str,
        owner: str,
        host: str,
        pid: int,
        lease_s: float,
        most: int,
        *,
        only: str | None = None,
    ) -> Sequence[Claim]:
        """Take the study's first waiting tickets, up to `most`, all at once, like `claim`."""
        token = uuid.uuid4().hex
        fields = {
            "study_name": name,
            "lease_s": lease_s,
            "new_owner": owner,
            "new_host": host,
            "new_pid": pid,
            "new_claim_token": token,
            "now": utc_now(),
            "most": most,
            **({} if only is None else {"only": only}),
        }
        made: list[tuple[int, FrozenTrial]] = []

        def take(connection: Connection) -> list[Claim]:
            made.clear()
            found = connection.execute(CLAIM if only is None else CLAIM_OF, fields).all()
            return [self._claimed(connection, row, made) for row in sorted(found, key=_by_id)]

        def taken(connection: Connection) -> list[Claim] | None:
            mine = select(tickets).where(tickets.c.claim_token == token)
            found = sorted(connection.execute(mine), key=_by_id)
            return [Claim(_ticket(row), row.trial_id, row.trial_number) for row in found] or None

        claims = self._link.write(take, again=taken)
        for study_id, trial in made:
            self._studies.adopt(study_id, trial)
        return claims

    def _claimed(
        self, connection: Connection, row: Row[Any], made: list[tuple[int, FrozenTrial]]
    ) -> Claim:
        """Return the claim of a ticket that was taken, with the trial that is made for it."""
        if row.kind != TRIAL:
            return Claim(_ticket(row), None, None)
        start = rows.utc_naive()
        try:
            study_id, trial = self._studies.insert_running(connection, start, study=row.study)
        except KeyError:
            raise StorageError(
                f"ticket {row.id}: its study '{row.study}' does not exist"
            ) from None
        made.append((study_id, trial))
        note = {"ticket": row.id, "trial": trial._trial_id, "number": trial.number}
        connection.execute(NOTE_TRIAL, note)
        ticket = _ticket(row, trial_id=trial._trial_id, trial_number=trial.number)
        return Claim(ticket, trial._trial_id, trial.number)

    def reserve(self, ticket_id: int, owner: str, params_key: str) -> bool:
        """Book a point of the space for a ticket; False if another one of the study has it."""
        change = (
            update(tickets).where(held(ticket_id, owner, False)).values(params_key=params_key)
        )
        try:
            return bool(self._link.write(lambda c: c.execute(change).rowcount))
        except StorageError as error:
            if isinstance(error.__cause__, IntegrityError):
                return False
            raise

    def renew(self, owner: str, lease_s: float) -> Sequence[int]:
        """Prolong all leases of an owner and return the tickets that are still its own."""
        return self._link.write(lambda c: renew(c, owner, lease_s))

    def finish(
        self,
        ticket_id: int,
        owner: str | None,
        state: str,
        cause: str | None = None,
        result: Any = None,
    ) -> bool:
        """End a running ticket; False, and nothing written, if the owner has lost it."""

        def done(connection: Connection) -> bool | None:
            row = connection.execute(select(tickets).where(tickets.c.id == ticket_id)).first()
            return True if row and row.state == state and row.owner == owner else None

        return self._link.write(
            lambda c: close_ticket(c, ticket_id, owner, state, cause, result), again=done
        )

    def give_back(
        self,
        ticket_id: int,
        owner: str | None,
        cause: str,
        params: Mapping[str, Any] | None = None,
        count: bool = True,
        *,
        expired_only: bool = False,
    ) -> bool:
        """Let a running ticket wait again, with the lost trial's params.

        `owner` None stands for whoever has it; `expired_only` leaves a ticket alone whose lease
        was renewed meanwhile. False if there was nothing to give back.
        """
        return self._link.write(
            lambda c: return_ticket(c, ticket_id, owner, cause, params, count, expired_only)
        )

    def get(self, ticket_id: int) -> Ticket | None:
        """Return one ticket."""
        found = self._read(tickets.c.id == ticket_id)
        return found[0] if found else None

    def expired(self) -> Sequence[Ticket]:
        """Return the running tickets whose lease has passed."""
        return self._read((tickets.c.state == RUNNING) & (tickets.c.lease_until < now_s()))

    def running(self, name: str) -> Sequence[Ticket]:
        """Return the running tickets of a study and its phases."""
        return self._read((tickets.c.name == name) & (tickets.c.state == RUNNING))

    def list(self, study: str) -> Sequence[Ticket]:
        """Return the tickets of one Optuna study in their order."""
        return self._read(tickets.c.study == study)

    def counts(self, study: str) -> dict[str, int]:
        """Return how many tickets of one Optuna study are in each state."""
        query = (
            select(tickets.c.state, func.count())
            .where(tickets.c.study == study)
            .group_by(tickets.c.state)
        )
        found = self._link.read(lambda c: c.execute(query).all())
        return dict.fromkeys(STATES, 0) | {state: n for state, n in found}

    def _read(self, where: Any) -> Any:
        query = select(tickets).where(where).order_by(tickets.c.study, tickets.c.idx)
        found = self._link.read(lambda c: c.execute(query).all())
        return [_ticket(row) for row in found]


def _new_row(name: str, study: str, kind: str, item: NewTicket) -> dict[str, Any]:
    return {
        "name": name,
        "study": study,
        "idx": item.idx,
        "kind": kind,
        "params": None if item.params is None else dict(item.params),
        "params_key": item.params_key,
        "payload": dict(item.payload or {}),
        "state": WAITING,
        "attempt": 0,
        "created_at": utc_now(),
    }


def _by_id(row: Row[Any]) -> int:
    return row.id


def _ticket(row: Row[Any], **changes: Any) -> Ticket:
    fields = dict(row._mapping)
    fields["payload"] = fields["payload"] or {}
    return Ticket(**fields | changes)
