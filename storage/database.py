"""The database of hpo: Optuna's studies, our tickets, epochs and registry, on one connection pool.

What belongs together is one transaction: a report and its metrics, a trial's end and its ticket's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState
from sqlalchemy import Connection, Engine, Row, and_, delete, func, select

from storage import creation, rows, schema
from storage.aliases import Aliases, take_all
from storage.claiming import HAS_TRIAL, Claiming
from storage.columns import utc_now
from storage.ending import IS_ENDED, Back, TicketLost, TrialEnd
from storage.engine import mask
from storage.link import Link
from storage.names import belongs_to
from storage.prepared import refusing_unless
from storage.registry import Registry, mark_deleted
from storage.runs import Runs
from storage.sources import Sources
from storage.studies import StudyStorage
from storage.study_rows import delete_studies
from storage.ticket import Claim, ClaimOrder
from storage.tickets import Tickets

_ENDED = refusing_unless(IS_ENDED)
_ENDED_AND_CLAIMED = refusing_unless(and_(IS_ENDED, HAS_TRIAL))


@dataclass(frozen=True)
class EpochRow:
    """All metrics of one epoch of one trial."""

    study: str
    trial_number: int
    epoch: int
    metrics: dict[str, float]
    at: datetime


class Database:
    """An opened database; `storage.init` has set it up before."""

    def __init__(self, url: str, timeout_s: float = 60) -> None:
        """Open a database.

        Raises:
            InputError: it is not set up, or made by a newer version.
            StorageError: it did not answer within `timeout_s`.
        """
        self._link = Link(url, timeout_s)
        creation.require(self._link)
        self.studies = StudyStorage(url, timeout_s, link=self._link)
        self.tickets = Tickets(self._link, self.studies)
        self.registry = Registry(self._link)
        self.aliases = Aliases(self._link)
        self.sources = Sources(self._link)
        self.runs = Runs(self._link)

    @property
    def url(self) -> str:
        """The URL with its password, to open the database again."""
        return self._link.url

    @property
    def shown_url(self) -> str:
        """The URL without its password, to print."""
        return mask(self._link.url)

    @property
    def engine(self) -> Engine:
        """The SQLAlchemy engine."""
        return self._link.engine

    def close(self) -> None:
        """Write what is gathered and close all sessions."""
        self.studies.close()

    def report(
        self,
        trial_id: int,
        study: str,
        number: int,
        epoch: int,
        value: float,
        metrics: Mapping[str, float],
    ) -> bool:
        """Store an epoch of a trial: the value that Optuna prunes by, and all metrics.

        Like all that a trial gathers, it is written within 250 ms.

        Returns: False if somebody else has ended the trial, as far as is known by now.
        """
        row = {
            "study": study,
            "trial_number": number,
            "epoch": epoch,
            "metrics": {name: float(metric) for name, metric in metrics.items()},
            "at": utc_now(),
        }
        try:
            self.studies.report(trial_id, epoch, value, row)
        except UpdateFinishedTrialError:
            return False
        return True

    def end_trial(
        self,
        ticket_id: int,
        owner: str | None,
        trial_id: int,
        state: TrialState,
        value: float | None,
        user_attrs: Mapping[str, Any],
        *,
        back: Back | tuple[str, Mapping[str, Any] | None, bool] | None = None,
        expired_only: bool = False,
    ) -> bool:
        """End a trial and its ticket in one transaction; the fields are those of `TrialEnd`.

        Returns: False, and nothing written, if the owner has lost the ticket.
        """
        again = Back(*back) if isinstance(back, tuple) else back
        return self.end(
            TrialEnd(ticket_id, owner, trial_id, state, value, user_attrs, again, expired_only)
        )

    def end(self, end: TrialEnd) -> bool:
        """End a trial and its ticket in one transaction; False if the owner has lost it."""

        def hopeful(connection: Connection) -> Callable[[], bool]:
            read = end.say(connection, self.studies)
            _ENDED.run(connection, end.proof)
            return read

        with end.within(self.studies), suppress(TicketLost):
            return self._link.write(
                lambda c: end.work(c, self.studies),
                again=end.done,
                prepared=True,
                hopeful=None if end.back else hopeful,
            )
        return False

    def end_and_claim(self, end: TrialEnd, order: ClaimOrder) -> tuple[bool, Claim | None]:
        """End a trial and take the next ticket in one transaction: a worker waits once for both.

        Returns: whether the owner still had the ticket that ends, and the claim of the next one.
        """
        claiming = Claiming(self.studies, order)

        def hopeful(connection: Connection) -> Callable[[], tuple[bool, list[Claim]]]:
            ended, claims = end.say(connection, self.studies), claiming.say(connection)
            _ENDED_AND_CLAIMED.run(connection, {**end.proof, **claiming.proof})
            return lambda: (ended(), claims())

        def work(connection: Connection) -> tuple[bool, list[Claim]]:
            return end.work(connection, self.studies), claiming.work(connection)

        def done(connection: Connection) -> tuple[bool, list[Claim]] | None:
            # Either shows that both were committed: others may have ended the trial, and a queue
            # may have been empty.
            ended, claims = bool(end.done(connection)), claiming.done(connection)
            return (ended, claims) if ended or claims else None

        with end.within(self.studies), suppress(TicketLost):
            held, claims = self._link.write(
                work, again=done, prepared=True,
                hopeful=None if end.back or order.only is None else hopeful)
            claiming.adopt()
            return held, claims[0] if claims else None
        return False, next(iter(self.tickets.claim_many(order, 1)), None)

    def epochs(self, study: str, number: int | None = None) -> Sequence[EpochRow]:
        """Return the stored epochs of an Optuna study, or of one trial of it, in their order."""
        table = schema.epochs
        where = table.c.study == study
        if number is not None:
            where &= table.c.trial_number == number
        query = select(table).where(where).order_by(table.c.trial_number, table.c.epoch)
        self.studies.flush()
        return self._link.read(lambda c: [_epoch(row) for row in c.execute(query)])

    def last_epochs(self, study: str, numbers: Sequence[int]) -> dict[int, tuple[int, datetime]]:
        """Return the last stored epoch of some trials, and when it was told; none has none."""
        table = schema.epochs
        where = (table.c.study == study) & table.c.trial_number.in_(list(numbers))
        last = (table.c.trial_number, func.max(table.c.epoch), func.max(table.c.at))
        query = select(*last).where(where).group_by(table.c.trial_number)
        self.studies.flush()
        found = self._link.read(lambda c: c.execute(query).all())
        return {number: (epoch, at) for number, epoch, at in found}

    def n_epochs(self, study: str) -> int:
        """Return how many epochs an Optuna study has stored."""
        table = schema.epochs
        query = select(func.count()).select_from(table).where(table.c.study == study)
        self.studies.flush()
        return self._link.read(lambda c: c.execute(query).scalar_one())

    def delete(self, name: str) -> bool:
        """Delete a study with all its phases, tickets and epochs; mark its registry rows.

        Returns: False if there was nothing of this name.
        """
        self.studies.flush()
        found: list[tuple[bool, list[int]]] = []

        def work(connection: Connection) -> None:
            # Of a repetition after a lost answer, the first attempt saw what there was.
            found.append(_delete(connection, name))

        self._link.write(work)
        self.studies.drop([study_id for _, study_ids in found for study_id in study_ids])
        return any(gone for gone, _ in found)


def _delete(connection: Connection, name: str) -> tuple[bool, list[int]]:
    query = select(rows.studies.c.study_id, rows.studies.c.study_name)
    found = [row for row in connection.execute(query) if belongs_to(row.study_name, name)]
    study_ids = [row.study_id for row in found]
    delete_studies(connection, study_ids)
    epoch_studies = connection.execute(select(schema.epochs.c.study).distinct()).scalars()
    for study in [study for study in epoch_studies if belongs_to(study, name)]:
        connection.execute(delete(schema.epochs).where(schema.epochs.c.study == study))
    n_ours = 0
    for table in (schema.tickets, schema.studies, schema.workers):
        n_ours += connection.execute(delete(table).where(table.c.name == name)).rowcount
    take_all(connection, name)
    return bool(mark_deleted(connection, name) or found or n_ours), study_ids


def _epoch(row: Row[Any]) -> EpochRow:
    return EpochRow(**row._mapping)
