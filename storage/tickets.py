"""Tickets: one row a unit of work, taken by exactly one worker.

Optuna's own waiting trials are taken twice on SQLite and are read again by every ask and prune;
a ticket is taken with one compare-and-set, and its Optuna trial is made in the same transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from hpo.errors import StorageError
from storage.claiming import Claiming, ticket_of
from storage.columns import now_s, utc_now
from storage.leases import RUNNING, has_passed, in_state, renew
from storage.link import Link
from storage.schema import tickets
from storage.studies import StudyStorage
from storage.ticket import Claim, ClaimOrder, NewTicket, Ticket
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

        before: list[int] = []

        def work(connection: Connection) -> int:
            # The answer to an earlier attempt's COMMIT may be lost: the first count holds.
            before.append(connection.execute(count).scalar_one())
            connection.execute(
                upsert(tickets).on_conflict_do_nothing(index_elements=["study", "idx"]), new
            )
            return connection.execute(count).scalar_one() - before[0]

        return self._link.write(work)

    def trim(self, study: str, n: int) -> int:
        """Delete the last waiting tickets until `n` are left in all; return how many those were.

        Tickets that run or have ended stay, though they be more.
        """
        mine = tickets.c.study == study
        ordered = select(tickets.c.id, tickets.c.state).where(mine).order_by(tickets.c.idx)
        n_gone: list[int] = []

        def work(connection: Connection) -> None:
            found = connection.execute(ordered).all()
            waiting = [row.id for row in found if row.state == WAITING]
            extra = waiting[max(0, n - (len(found) - len(waiting))) :]
            still = tickets.c.id.in_(extra) & (tickets.c.state == WAITING)
            n_gone.append(connection.execute(delete(tickets).where(still)).rowcount)

        self._link.write(work)
        # An attempt whose COMMIT was not answered has left nothing to the one after it.
        return max(n_gone)

    def reopen(self, study: str, idxs: Sequence[int]) -> int:
        """Let failed tickets wait again, as often tried as before, and return how many."""
        chosen = (
            (tickets.c.study == study)
            & tickets.c.idx.in_(list(idxs))
            & (tickets.c.state == FAILED)
        )
        change = update(tickets).where(chosen).values(**free(), state=WAITING, ended_at=None)
        n_reopened: list[int] = []
        self._link.write(lambda c: n_reopened.append(c.execute(change).rowcount))
        return max(n_reopened)

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
        found = self.claim_many(ClaimOrder(name, owner, host, pid, lease_s, only), 1)
        return found[0] if found else None

    def claim_many(self, order: ClaimOrder, most: int) -> Sequence[Claim]:
        """Take the study's first waiting tickets, up to `most`, all at once, like `claim`."""
        claiming = Claiming(self._studies, order, most)
        claims = self._link.write(
            claiming.work, again=lambda c: claiming.done(c) or None, prepared=True)
        claiming.adopt()
        return claims

    def any_waits(self, name: str, only: str | None = None) -> bool:
        """Say whether a ticket waits, without the lock that a claim takes."""
        where = (tickets.c.name == name) & in_state(tickets, WAITING)
        if only is not None:
            where &= tickets.c.study == only
        query = select(tickets.c.id).where(where).limit(1)
        return self._link.read(lambda c: c.execute(query).first()) is not None

    def reserve(self, ticket_id: int, owner: str, params_key: str) -> bool:
        """Book a point of the space for a ticket; False if another one of the study has it.

        Nothing is booked for an owner who has lost the ticket: its end will be refused.
        """
        change = (
            update(tickets).where(held(ticket_id, owner, False)).values(params_key=params_key)
        )
        try:
            self._link.write(lambda c: c.execute(change))
        except StorageError as error:
            if not isinstance(error.__cause__, IntegrityError):
                raise
            return False
        return True

    def renew(self, owner: str, lease_s: float) -> Sequence[int]:
        """Prolong all leases of an owner and return the tickets that are still its own."""
        return self._link.write(lambda c: [row.id for row in renew(c, owner, lease_s).all()])

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
            mine = row is not None and owner in (None, row.owner) and row.state == state
            return True if mine else None

        fields = (ticket_id, owner, state, cause, result)
        return self._link.write(lambda c: bool(close_ticket(c, *fields).rowcount), again=done)

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
        back: list[bool] = []
        fields = (ticket_id, owner, cause, params, count, expired_only)
        self._link.write(lambda c: back.append(return_ticket(c, *fields)))
        # An attempt whose COMMIT was not answered has left nothing to the one after it.
        return any(back)

    def get(self, ticket_id: int) -> Ticket | None:
        """Return one ticket."""
        found = self._read(tickets.c.id == ticket_id)
        return found[0] if found else None

    def expired(self) -> Sequence[Ticket]:
        """Return the running tickets whose lease has passed."""
        return self._read(in_state(tickets, RUNNING) & has_passed(tickets))

    def running(self, name: str) -> Sequence[Ticket]:
        """Return the running tickets of a study and its phases."""
        return self._read((tickets.c.name == name) & in_state(tickets, RUNNING))

    def leases(self, name: str) -> Sequence[tuple[Ticket, float]]:
        """Return the running tickets of a study and its phases, and how long their leases last.

        Units: seconds by the database's clock, below 0 for a lease that has run out.
        """
        now = self._link.read(lambda c: c.execute(select(now_s())).scalar_one())
        found = sorted(self.running(name), key=lambda ticket: ticket.id)
        return [(ticket, (ticket.lease_until or 0.0) - now) for ticket in found]

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
        return [ticket_of(row) for row in found]


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
