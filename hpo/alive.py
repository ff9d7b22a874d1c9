"""Who works for a study now, on whatever host, as the database alone can tell.

A worker at a trial holds a lease and renews it; an idle one writes its own row now and then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from hpo.queue import LEASE_S, is_gone, phase_of

if TYPE_CHECKING:
    from storage.database import Database
    from storage.ticket import Ticket

# By Optuna study and trial: the last epoch and when it was told.
LastEpochs: TypeAlias = dict[tuple[str, int | None], tuple[int, datetime]]
# What a ticket that is no trial is called.
_WORK = {"sweep": "LR range sweep", "score": "test split"}


@dataclass(frozen=True)
class Worker:
    """A worker as its tickets and its row tell of it.

    `state` is `at work`, `idle`, or `lost`: of a lost one the lease has run out or, on this host,
    the process is gone; the next run closes its trial. `last_sign_s` is how many seconds ago it
    last renewed its lease, or wrote its row. `n_ahead` tickets are taken and not begun.
    """

    owner: str
    host: str
    pid: int
    device: str | None
    state: str
    last_sign_s: float
    phase: str | None = None
    work: str | None = None
    trial: int | None = None
    epoch: int | None = None
    epoch_at: datetime | None = None
    since_at: datetime | None = None
    lease_left_s: float | None = None
    n_ahead: int = 0

    @property
    def what(self) -> str:
        """What it is at, in a few words."""
        if self.phase is None:
            return ""
        return f"{self.phase} trial {self.trial}" if self.trial is not None else str(self.work)

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name."""
        return asdict(self)


def workers(db: Database, name: str) -> list[Worker]:
    """Return the workers of a study: those at a ticket, those that are lost, and the idle."""
    by_owner: dict[str, list[tuple[Ticket, float]]] = {}
    for ticket, left_s in db.tickets.leases(name):
        by_owner.setdefault(ticket.owner or "", []).append((ticket, left_s))
    # A short trial's worker takes the next ticket while it trains: the first one is what it is at.
    current = {owner: min(held, key=lambda one: (one[0].taken_at is None, one[0].taken_at,
                                                 one[0].id))
               for owner, held in by_owner.items()}
    last = _last_epochs(db, [ticket for ticket, _ in current.values()])
    rows = db.runs.workers(current)
    at_work = [_at_ticket(*one, last, len(by_owner[owner]) - 1, rows.get(owner, {}))
               for owner, one in current.items()]
    return [*at_work, *_idle(db, name, set(by_owner))]


def _last_epochs(db: Database, tickets: Sequence[Ticket]) -> LastEpochs:
    numbers: dict[str, list[int]] = {}
    for ticket in tickets:
        if ticket.trial_number is not None:
            numbers.setdefault(ticket.study, []).append(ticket.trial_number)
    return {(study, number): said for study, of_study in numbers.items()
            for number, said in db.last_epochs(study, of_study).items()}


def _at_ticket(
    ticket: Ticket, left_s: float, last: LastEpochs, n_ahead: int, row: Mapping[str, Any]
) -> Worker:
    owner = ticket.owner or ""
    lost = left_s < 0 or is_gone(owner)
    epoch, epoch_at = last.get((ticket.study, ticket.trial_number), (None, None))
    return Worker(
        owner=owner, host=ticket.host or "", pid=ticket.pid or 0, device=row.get("device"),
        state="lost" if lost else "at work", last_sign_s=max(0.0, LEASE_S - left_s),
        phase=phase_of(ticket.study), work=_WORK.get(ticket.kind, ticket.kind),
        trial=ticket.trial_number, epoch=epoch, epoch_at=epoch_at, since_at=ticket.taken_at,
        lease_left_s=left_s, n_ahead=n_ahead)


def _idle(db: Database, name: str, busy: set[str]) -> Iterator[Worker]:
    for row, ago_s in db.runs.seen(name, LEASE_S):
        if row["owner"] not in busy and not is_gone(row["owner"]):
            yield Worker(row["owner"], row["host"], row["pid"], row["device"], "idle",
                         max(0.0, ago_s), since_at=row["started_at"])
