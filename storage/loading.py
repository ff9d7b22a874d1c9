"""Read whole trials: one query a table however many there are, and no work a row that SQL can do.

A study of ten thousand trials is two hundred thousand rows. They come straight from the driver,
and become Optuna's trials in one pass over each table.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from math import inf, nan
from typing import Any, NamedTuple

from optuna.distributions import (
    BaseDistribution,
    FloatDistribution,
    IntDistribution,
    json_to_distribution,
)
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import (
    Connection,
    String,
    Table,
    bindparam,
    cast,
    func,
    literal,
    null,
    select,
    type_coerce,
)

from storage import rows

# Beyond these, a lookup by id costs more than reading a range.
MOST_IDS = 300
# From here on the garbage collector costs more than the rows: nothing made here is garbage.
_MANY_TRIALS = 100
SPECIAL = {"INF_POS": inf, "INF_NEG": -inf, "NAN": nan}
STATES = {state.name: state for state in TrialState}
_MINUTE = len("2026-01-31 23:59")


class Head(NamedTuple):
    """What the table of trials says of one: times as the driver gives them, in UTC."""

    trial_id: int
    number: int
    state: str
    start: Any
    complete: Any
    study_id: int


def _heads(where: Any) -> Any:
    columns = rows.trials.c
    # As texts or times of the driver's own making: a type of SQLAlchemy's would convert each.
    plain = [type_coerce(columns[name], null().type)
             for name in ("datetime_start", "datetime_complete")]
    return select(columns.trial_id, columns.number, cast(columns.state, String), *plain,
                  columns.study_id).where(where)


_in_study = rows.trials.c.study_id == bindparam("study")
_exists = select(literal(-1), *[null()] * 5).where(rows.studies.c.study_id == bindparam("study"))
NEWS = _heads(_in_study & (rows.trials.c.trial_id > bindparam("seen"))).union_all(
    _heads(_in_study & rows.trials.c.trial_id.in_(bindparam("known", expanding=True))), _exists
)
ONE = _heads(rows.trials.c.trial_id == bindparam("trial"))


def heads(connection: Connection, query: Any, **fields: Any) -> list[Head]:
    """Return the heads that NEWS or ONE finds."""
    return [Head(*row) for row in _raw(connection, query, fields)]


def _raw(connection: Connection, query: Any, fields: dict[str, Any]) -> Sequence[Any]:
    """Return a query's rows as the driver makes them: tuples, unconverted."""
    result = connection.execute(query, fields)
    found = result.cursor.fetchall() if result.cursor is not None else []
    result.close()
    return found


def same_trial(trial: FrozenTrial, head: Head | None) -> bool:
    """Say whether a remembered trial is the one that the database holds under its id now."""
    return head is not None and (
        trial.number == head.number
        and trial.state.name == head.state
        and trial.datetime_start == local(head.start)
        and trial.datetime_complete == local(head.complete)
    )


def load(connection: Connection, study_id: int, found: Sequence[Head]) -> list[FrozenTrial]:
    """Return the whole trials of these heads, in their order."""
    if not found:
        return []
    with _no_collection(len(found) > _MANY_TRIALS):
        trials = {head.trial_id: _blank(head) for head in found}
        source = _Source(connection, study_id, [head.trial_id for head in found])
        source.fill_params(trials)
        source.fill_values(trials)
        for trial_id, step, number, special in source.rows(
            rows.reports, "step", "intermediate_value", "intermediate_value_type",
            order=("trial_id", "step"),
        ):
            # Of a range, another study's trial may have come in since its trials were counted.
            if trial_id in trials:
                number = SPECIAL[special] if number is None else number
                trials[trial_id].intermediate_values[step] = number
        for trial_id, key, text in source.rows(rows.user_attrs, "key", "value_json"):
            if trial_id in trials:
                trials[trial_id]._user_attrs[key] = json.loads(text)
        for trial_id, key, text in source.rows(rows.system_attrs, "key", "value_json"):
            if trial_id in trials:
                trials[trial_id]._system_attrs[key] = json.loads(text)
        return list(trials.values())


@contextmanager
def _no_collection(wanted: bool) -> Iterator[None]:
    """Keep the garbage collector from walking over what is only being made."""
    wanted = wanted and gc.isenabled()
    if wanted:
        gc.disable()
    try:
        yield
    finally:
        if wanted:
            gc.enable()


def _blank(head: Head) -> FrozenTrial:
    return FrozenTrial(
        number=head.number,
        state=STATES[head.state],
        value=None,
        datetime_start=local(head.start),
        datetime_complete=local(head.complete),
        params={},
        distributions={},
        user_attrs={},
        system_attrs={},
        intermediate_values={},
        trial_id=head.trial_id,
    )


class _Source:
    """The rows of some trials of one study."""

    def __init__(self, connection: Connection, study_id: int, trial_ids: list[int]) -> None:
        self._connection = connection
        self._study_id = study_id
        self._ids = trial_ids
        self._bounds = {"first": min(trial_ids), "last": max(trial_ids)}
        # A range of ids that no other trial lies in needs no join, which costs as much again.
        self._alone = len(trial_ids) > MOST_IDS and (
            connection.execute(COUNT, self._bounds).scalar_one() == len(trial_ids))

    def fill_params(self, trials: dict[int, FrozenTrial]) -> None:
        # Optuna keeps the order in which the params were suggested.
        found = self.rows(rows.params, "param_name", "param_value", "distribution_json",
                          order=("param_id",))
        kinds: dict[str, tuple[BaseDistribution, Callable[[float], Any] | None]] = {}
        for trial_id, name, value, text in found:
            known = kinds.get(text)
            if known is None:
                kind = distribution(text)
                known = kinds[text] = (kind, converter(kind))
            trial = trials.get(trial_id)
            if trial is None:
                continue
            trial._params[name] = value if known[1] is None else known[1](value)
            trial._distributions[name] = known[0]

    def fill_values(self, trials: dict[int, FrozenTrial]) -> None:
        found = self.rows(rows.values, "value", "value_type", order=("objective",))
        for trial_id, number, special in found:
            trial = trials.get(trial_id)
            if trial is None:
                continue
            number = SPECIAL[special] if number is None else number
            if trial._values is None:
                trial._values = [number]
            else:
                trial._values.append(number)

    def rows(self, table: Table, *names: str, order: tuple[str, ...] = ()) -> Sequence[Any]:
        """Return the trial ids and the named columns of a table's rows."""
        if len(self._ids) <= MOST_IDS:
            return _raw(self._connection, _by_ids(table, names, order), {"ids": self._ids})
        query = _by_range(table, names, order, self._alone)
        if self._alone:
            return _raw(self._connection, query, self._bounds)
        found = _raw(self._connection, query, {**self._bounds, "study": self._study_id})
        wanted = set(self._ids)
        # Between the first and the last lie those that are still running.
        return [row for row in found if row[0] in wanted]


@lru_cache
def _by_ids(table: Table, names: tuple[str, ...], order: tuple[str, ...]) -> Any:
    ids = table.c.trial_id.in_(bindparam("ids", expanding=True))
    return _of_trials(table, names, order).where(ids)


@lru_cache
def _by_range(table: Table, names: tuple[str, ...], order: tuple[str, ...], alone: bool) -> Any:
    query = _of_trials(table, names, order).where(_between(table))
    if alone:
        return query
    return query.join(rows.trials, rows.trials.c.trial_id == table.c.trial_id).where(_in_study)


def _of_trials(table: Table, names: tuple[str, ...], order: tuple[str, ...]) -> Any:
    columns = [type_coerce(table.c[name], null().type) for name in names]
    query = select(table.c.trial_id, *columns)
    # A row that was written again may lie behind later ones.
    return query.order_by(*(table.c[name] for name in order)) if order else query


def _between(table: Table) -> Any:
    return table.c.trial_id.between(bindparam("first"), bindparam("last"))


COUNT = select(func.count()).select_from(rows.trials).where(_between(rows.trials))


def converter(kind: BaseDistribution) -> Callable[[float], Any] | None:
    """Return what makes a stored number a param's value; None where it is that already."""
    if isinstance(kind, FloatDistribution):
        return None
    return int if isinstance(kind, IntDistribution) else kind.to_external_repr


@lru_cache(maxsize=4096)
def distribution(text: str) -> BaseDistribution:
    """Return the distribution of its JSON; the same texts come thousands of times."""
    return json_to_distribution(text)


def local(at: Any) -> datetime | None:
    """Return a stored time, a text on SQLite, as Optuna shows it: naive, local."""
    if at is None:
        return None
    text = at if isinstance(at, str) else str(at)
    return datetime.fromisoformat(text) + _offset(text[:_MINUTE])


@lru_cache(maxsize=4096)
def _offset(minute: str) -> timedelta:
    """Return local time less UTC in a minute of UTC; no zone changes it within one."""
    at = datetime.fromisoformat(minute).replace(tzinfo=UTC)
    return at.astimezone().replace(tzinfo=None) - at.replace(tzinfo=None)
