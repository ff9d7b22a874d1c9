"""Leases: a ticket is its owner's for so many seconds, and his again each time he writes.

Whoever lets a lease run out, be he dead, stopped or cut off, loses the ticket to the others.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    bindparam,
    literal_column,
    update,
)

from storage.columns import now_s
from storage.prepared import Answer, Prepared
from storage.schema import tickets

RUNNING = "running"


def in_state(table: FromClause, state: str) -> ColumnElement[bool]:
    """Return the condition of a ticket's state in the words of its partial index.

    A bound value would leave open whether the index holds the row: PostgreSQL's planner would
    scan, and SQLite would plan anew at each execution, which costs four times the claim itself.
    """
    return table.c.state == literal_column(f"'{state}'")


# Renewed this often in the time of a lease, so that it outlives two failures.
_PER_LEASE = 3
# A write that happens anyway renews a lease earlier than it must; not each of them.
_PER_LEASE_AT_MOST = 10
RENEW = Prepared(
    update(tickets)
    .where(tickets.c.owner == bindparam("holder"), in_state(tickets, RUNNING))
    .values(lease_until=now_s() + bindparam("lease_s"))
    .returning(tickets.c.id)
)


# No lease is this long: one that ends later was written before the clock was set back.
_FAR_S = 900.0


def has_passed(table: FromClause) -> ColumnElement[bool]:
    """Return the condition that a ticket's lease has run out, by the database's clock."""
    now = now_s()
    return (table.c.lease_until < now) | (table.c.lease_until > now + _FAR_S)


@dataclass
class Lease:
    """The lease of one ticket, as its owner knows it."""

    owner: str
    lease_s: float
    renewed_at: float = field(default_factory=time.monotonic)
    lost: bool = False


class Leases:
    """The leases that this process holds."""

    def __init__(self) -> None:
        self._held: dict[int, Lease] = {}

    def take(self, ticket_id: int, owner: str, lease_s: float) -> None:
        """Take note of a ticket that was claimed a moment ago."""
        self._held[ticket_id] = Lease(owner, lease_s)

    def is_lost(self, ticket_id: int) -> bool:
        """Say whether a lease was found to be another's, or nobody's."""
        return ticket_id in self._held and self._held[ticket_id].lost

    def drop(self, ticket_id: int) -> None:
        """Let a lease go; the ticket is closed or lost."""
        self._held.pop(ticket_id, None)

    def due(self, *, within_write: bool) -> list[tuple[str, float]]:
        """Return the owners whose leases are to be renewed, with their length."""
        parts, now = _PER_LEASE_AT_MOST if within_write else _PER_LEASE, time.monotonic()
        return list({(lease.owner, lease.lease_s) for lease in list(self._held.values())
                     if not lease.lost and now - lease.renewed_at >= lease.lease_s / parts})

    def renewed(self, owner: str, ticket_ids: Collection[int], at: float) -> None:
        """Take note of the tickets that an owner still had at a time of `time.monotonic`."""
        for ticket_id, lease in list(self._held.items()):
            # One that was taken after the renewal began is none of its tickets.
            if lease.owner == owner and lease.renewed_at <= at:
                lease.lost = lease.lost or ticket_id not in ticket_ids
                lease.renewed_at = at

    def next_s(self) -> float:
        """Return in how many seconds a lease must be renewed; infinity without one."""
        now, held = time.monotonic(), [x for x in list(self._held.values()) if not x.lost]
        left = (lease.renewed_at + lease.lease_s / _PER_LEASE - now for lease in held)
        return max(0.0, min(left, default=inf))


def renew(connection: Connection, owner: str, lease_s: float) -> Answer:
    """Prolong all leases of an owner; the answer holds the ids of the tickets still his."""
    return RENEW.run(connection, {"holder": owner, "lease_s": lease_s})
