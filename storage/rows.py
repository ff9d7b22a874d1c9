"""Optuna's tables, and the statements of the hot path, built once for each database.

They are Optuna's own table objects, so a column that changes there changes here.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, reduce
from operator import add
from typing import Any

from optuna.storages._rdb import models
from optuna.trial import TrialState
from sqlalchemy import Executable, Table, bindparam, func, insert, or_, select, update

from storage import schema
from storage.prepared import Prepared, PreparedRows

studies: Table = models.StudyModel.__table__
directions: Table = models.StudyDirectionModel.__table__
study_user_attrs: Table = models.StudyUserAttributeModel.__table__
study_system_attrs: Table = models.StudySystemAttributeModel.__table__
trials: Table = models.TrialModel.__table__
params: Table = models.TrialParamModel.__table__
values: Table = models.TrialValueModel.__table__
reports: Table = models.TrialIntermediateValueModel.__table__
user_attrs: Table = models.TrialUserAttributeModel.__table__
system_attrs: Table = models.TrialSystemAttributeModel.__table__
heartbeats: Table = models.TrialHeartbeatModel.__table__

# Everything that hangs on a trial, in an order in which it may be deleted before the trial.
OF_A_TRIAL = (params, values, reports, user_attrs, system_attrs, heartbeats)
OF_A_STUDY = (directions, study_user_attrs, study_system_attrs)
UNFINISHED = (TrialState.RUNNING, TrialState.WAITING)


@dataclass(frozen=True)
class Statements:
    """The statements that a trial needs, in one dialect."""

    lock_study: Prepared
    lock_study_named: Prepared
    add_trial: Prepared
    add_trial_named: Prepared
    touch_trial: Prepared
    report: PreparedRows
    epoch: PreparedRows
    param: PreparedRows
    value: PreparedRows
    user_attr: PreparedRows
    system_attr: PreparedRows


@cache
def statements(dialect: str) -> Statements:
    """Return the statements of `sqlite` or `postgresql`."""
    return Statements(
        lock_study=_lock(studies.c.study_id == bindparam("study")),
        lock_study_named=_lock(studies.c.study_name == bindparam("study")),
        add_trial=_add_trial(studies.c.study_id == bindparam("study")),
        add_trial_named=_add_trial(studies.c.study_name == bindparam("study")),
        touch_trial=_touch_trial(),
        report=_overwrite(dialect, reports, ("trial_id", "step")),
        epoch=_overwrite(dialect, schema.epochs, ("study", "trial_number", "epoch")),
        param=_add_new(dialect, params, ("trial_id", "param_name")),
        value=_overwrite(dialect, values, ("trial_id", "objective")),
        user_attr=_overwrite(dialect, user_attrs, ("trial_id", "key")),
        system_attr=_overwrite(dialect, system_attrs, ("trial_id", "key")),
    )


def _lock(where: Any) -> Prepared:
    # FOR NO KEY UPDATE: it serialises the numbering, and does not wait for foreign-key checks.
    return Prepared(select(studies.c.study_id).where(where).with_for_update(key_share=True))


def _add_trial(where: Any) -> Prepared:
    return Prepared(
        adding_trial(where).returning(trials.c.trial_id, trials.c.number, trials.c.study_id)
    )


def adding_trial(where: Any) -> Any:
    """Return the INSERT of a trial in the study of `where`, if there is one.

    It is numbered one above the study's last.
    """
    earlier = trials.alias("earlier")
    last = (
        select(earlier.c.number)
        .where(earlier.c.study_id == studies.c.study_id)
        .order_by(earlier.c.trial_id.desc())
        .limit(1)
        .scalar_subquery()
    )
    fields = {
        "number": func.coalesce(last, -1) + 1,
        "study_id": studies.c.study_id,
        "state": bindparam("state", type_=trials.c.state.type),
        "datetime_start": bindparam("start", type_=trials.c.datetime_start.type),
        "datetime_complete": bindparam("complete", type_=trials.c.datetime_complete.type),
    }
    return insert(trials).from_select(
        list(fields), select(*fields.values()).where(where), include_defaults=False
    )


def _touch_trial() -> Prepared:
    """Read a trial's state so that it cannot end before this transaction does."""
    return Prepared(
        select(trials.c.trial_id, trials.c.study_id, trials.c.number, trials.c.state)
        .where(trials.c.trial_id == bindparam("trial"))
        .with_for_update(read=True)
    )


def is_unfinished() -> Any:
    """Return the condition of an unfinished trial; an IN would be expanded at each execution."""
    return or_(*(trials.c.state == state for state in UNFINISHED))


def _overwrite(dialect: str, table: Table, keys: tuple[str, ...]) -> PreparedRows:
    names = _names(table, keys)

    def conflict(new: Any) -> Executable:
        rest = {name: new.excluded[name] for name in names if name not in keys}
        return new.on_conflict_do_update(index_elements=list(keys), set_=rest)

    return PreparedRows(dialect, table, names, conflict)


def _add_new(dialect: str, table: Table, keys: tuple[str, ...]) -> PreparedRows:
    def conflict(new: Any) -> Executable:
        return new.on_conflict_do_nothing(index_elements=list(keys))

    return PreparedRows(dialect, table, _names(table, keys), conflict)


def _names(table: Table, keys: tuple[str, ...]) -> list[str]:
    """Return a table's columns without the number that the database gives each row."""
    given = [column.name for column in table.primary_key if column.name not in keys]
    return [column.name for column in table.columns if column.name not in given]


@cache
def move_trial(state: TrialState, anew: bool = False) -> Prepared:
    """Return the compare-and-set that moves one unfinished trial to `state` at the time `at`.

    With `anew` its start becomes `start`. It returns how many rows the trial had in its other
    tables, if it moved.
    """
    change = update(trials).where(trials.c.trial_id == bindparam("trial"))
    at = bindparam("at", type_=trials.c.datetime_start.type)
    if state == TrialState.RUNNING:
        taken = change.where(trials.c.state == TrialState.WAITING)
        change = taken.values(state=state, datetime_start=at)
    else:
        change = change.where(is_unfinished()).values(state=state)
        change = change.values(datetime_complete=at) if state.is_finished() else change
    if anew:
        start = bindparam("start", type_=trials.c.datetime_start.type)
        change = change.values(datetime_start=start)
    tables = (params, reports, user_attrs, system_attrs, values)
    return Prepared(change.returning(reduce(add, map(_count, tables)).label("n_rows")))


def _count(table: Table) -> Any:
    mine = table.c.trial_id == bindparam("trial")
    return select(func.count()).select_from(table).where(mine).scalar_subquery()


def value_rows(trial_id: int, numbers: Any) -> list[dict[str, Any]]:
    """Return the rows of a trial's objective values."""
    rows = []
    for objective, number in enumerate(numbers):
        stored, kind = models.TrialValueModel.value_to_stored_repr(float(number))
        rows.append(
            {"trial_id": trial_id, "objective": objective, "value": stored, "value_type": kind}
        )
    return rows


def report_row(trial_id: int, step: int, value: float) -> dict[str, Any]:
    """Return the row of one report."""
    stored, kind = models.TrialIntermediateValueModel.intermediate_value_to_stored_repr(
        float(value)
    )
    return {
        "trial_id": trial_id,
        "step": int(step),
        "intermediate_value": stored,
        "intermediate_value_type": kind,
    }


def utc_naive(at: datetime | None = None) -> datetime:
    """Return a time (now by default; a naive one is local) as Optuna stores it."""
    return (at or datetime.now(UTC)).astimezone(UTC).replace(tzinfo=None)
