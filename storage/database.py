"""The database of hpo: Optuna's studies, our tickets, epochs and registry, on one connection pool.

What belongs together is one transaction: a report and its metrics, a trial's end and its ticket's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState
from sqlalchemy import Connection, Engine, Row, delete, func, select

from storage import creation, rows, schema
from storage.columns import clip, utc_now
from storage.engine import mask
from storage.link import Link
from storage.names import belongs_to
from storage.registry import Registry, mark_deleted
from storage.running import Gathered
from storage.runs import Runs
from storage.studies import UNKNOWN, StudyStorage
from storage.study_rows import delete_studies
from storage.ticket_ends import DONE, FAILED, close_ticket, return_ticket
from storage.tickets import Tickets

TICKET_STATES = {TrialState.COMPLETE: DONE, TrialState.PRUNED: DONE, TrialState.FAIL: FAILED}
# The attribute that a person reads in a table; the whole text is in the trial's log file.
REASON = "reason"


@dataclass(frozen=True)
class Back:
    """How a ticket goes back to the queue when its trial is lost."""

    cause: str
    params: Mapping[str, Any] | None = None
    count: bool = True


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
        """End a trial and its ticket in one transaction.

        With `back` the ticket waits again. `owner` None stands for whoever has the ticket, and
        `expired_only` leaves it alone if its lease was renewed meanwhile: for those who close the
        trials of lost workers. A trial that somebody else has ended keeps its end.

        Returns: False, and nothing written, if the owner has lost the ticket.
        """
        again = Back(*back) if isinstance(back, tuple) else back
        values = None if value is None or math.isnan(value) else [value]
        own = self.studies.running(trial_id)
        texts = _texts(user_attrs)
        at = rows.utc_naive()

        def close(connection: Connection) -> bool:
            if again is None:
                cause = str(user_attrs.get(REASON) or "") or None
                ticket_state = TICKET_STATES[state]
                return close_ticket(
                    connection, ticket_id, owner, ticket_state, cause, None, expired_only
                )
            parts = (again.cause, again.params, again.count)
            return return_ticket(connection, ticket_id, owner, *parts, expired_only)

        def work(connection: Connection) -> tuple[bool, int | None]:
            if not close(connection):
                return False, None
            n_rows = self.studies.move(connection, trial_id, state, at)
            if n_rows is not None:
                self.studies.write_rest(connection, trial_id, news, values)
            return True, n_rows

        def done(connection: Connection) -> tuple[bool, int | None] | None:
            ended = select(rows.trials.c.datetime_complete).where(
                rows.trials.c.trial_id == trial_id
            )
            return (True, UNKNOWN) if connection.execute(ended).scalar() == at else None

        with nullcontext(Gathered()) if own is None else own.taken() as news:
            news.users.update(texts)
            held, n_rows = self._link.write(work, again=done)
        self.studies.drop_lease(ticket_id)
        if own is not None and n_rows is not None:
            own.trial._user_attrs.update({key: json.loads(text) for key, text in texts.items()})
            self.studies.ended(own, state, values, at, n_rows=n_rows)
        else:
            self.studies.forget(trial_id)
        return held

    def epochs(self, study: str, number: int | None = None) -> Sequence[EpochRow]:
        """Return the stored epochs of an Optuna study, or of one trial of it, in their order."""
        table = schema.epochs
        where = table.c.study == study
        if number is not None:
            where &= table.c.trial_number == number
        query = select(table).where(where).order_by(table.c.trial_number, table.c.epoch)
        self.studies.flush()
        return self._link.read(lambda c: [_epoch(row) for row in c.execute(query)])

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
        gone, study_ids = self._link.write(lambda c: _delete(c, name))
        self.studies.drop(study_ids)
        return gone


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
    return bool(mark_deleted(connection, name) or found or n_ours), study_ids


def _texts(attrs: Mapping[str, Any]) -> dict[str, str]:
    cut = {k: clip(v) if k == REASON and isinstance(v, str) else v for k, v in attrs.items()}
    return {key: json.dumps(value) for key, value in cut.items()}


def _epoch(row: Row[Any]) -> EpochRow:
    return EpochRow(**row._mapping)
