"""Trials in memory: the ended ones for good, the rest as often as somebody asks.

An ended trial never changes, so a process reads it once; what it has not seen comes in with one
small query. Only a study that was deleted and made again can bring an old id back with another
trial, which the times of the last known trial give away.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from math import inf, nan
from typing import Any

from optuna.distributions import BaseDistribution, json_to_distribution
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import (
    Connection,
    Row,
    String,
    Table,
    bindparam,
    cast,
    literal,
    null,
    select,
    type_coerce,
)

from storage import rows

# Beyond these, a lookup by id costs more than reading a range.
MOST_IDS = 300
MOST_OPEN = 2000
SPECIAL = {"INF_POS": inf, "INF_NEG": -inf, "NAN": nan}
STATES = {state.name: state for state in TrialState}


def _heads(where: Any) -> Any:
    state = cast(rows.trials.c.state, String).label("state")
    columns = rows.trials.c
    head = (columns.trial_id, columns.number, state, columns.datetime_start)
    return select(*head, columns.datetime_complete).where(where)


_in_study = rows.trials.c.study_id == bindparam("study")
_exists = select(literal(-1), null(), null(), null(), null()).where(
    rows.studies.c.study_id == bindparam("study")
)
NEWS = _heads(_in_study & (rows.trials.c.trial_id > bindparam("seen"))).union_all(
    _heads(_in_study & rows.trials.c.trial_id.in_(bindparam("known", expanding=True))), _exists
)
ONE = _heads(rows.trials.c.trial_id == bindparam("trial")).add_columns(rows.trials.c.study_id)


class StudyMemory:
    """What this process knows of one study."""

    def __init__(self) -> None:
        self.ended: dict[int, FrozenTrial] = {}
        self.distributions: dict[str, BaseDistribution] = {}
        self._in_order: list[FrozenTrial] | None = []
        self._open: set[int] = set()
        self._seen = -1
        self._anchor = -1

    def refresh(
        self, connection: Connection, study_id: int, *, with_open: bool, skip: set[int]
    ) -> list[FrozenTrial]:
        """Bring in what is new and return the unfinished trials, where they are wanted.

        `skip` are unfinished trials that the caller knows better himself.

        Raises:
            KeyError: there is no such study.
        """
        heads = self._news(connection, study_id)
        if heads is None:
            self.__init__()
            heads = self._news(connection, study_id) or []
        fresh = [head for head in heads if head.trial_id not in self.ended]
        still_open = {head.trial_id for head in fresh if head.state in ("RUNNING", "WAITING")}
        wanted = [
            head
            for head in fresh
            if head.trial_id not in still_open or (with_open and head.trial_id not in skip)
        ]
        found = load(connection, study_id, wanted)
        for trial in found:
            if trial.state.is_finished():
                self._keep(trial)
        self._open = still_open
        self._seen = max([self._seen, *(head.trial_id for head in heads)])
        return [trial for trial in found if not trial.state.is_finished()]

    def open_ids(self) -> set[int]:
        """Return the unfinished trials as of the last refresh."""
        return self._open

    def in_order(self) -> list[FrozenTrial]:
        """Return the ended trials by number; the list belongs to the memory."""
        if self._in_order is None:
            self._in_order = sorted(self.ended.values(), key=lambda trial: trial.number)
        return self._in_order

    def _news(self, connection: Connection, study_id: int) -> list[Row[Any]] | None:
        """Return the heads of new and unfinished trials; None if the study is another one now."""
        seen, known = self._seen, [self._anchor, *self._open]
        if len(known) > MOST_OPEN:
            seen, known = min(known) - 1, [self._anchor]
        found = connection.execute(NEWS, {"study": study_id, "seen": seen, "known": known}).all()
        if not found:
            raise KeyError(f"no study with id {study_id}")
        heads = {head.trial_id: head for head in found if head.trial_id >= 0}
        anchor = self.ended.get(self._anchor)
        if anchor is not None and not same_trial(anchor, heads.get(self._anchor)):
            return None
        return sorted(heads.values(), key=lambda head: head.trial_id)

    def _keep(self, trial: FrozenTrial) -> None:
        self.ended[trial._trial_id] = trial
        self._anchor = trial._trial_id
        for name, distribution in trial.distributions.items():
            self.distributions.setdefault(name, distribution)
        last = self._in_order[-1].number if self._in_order else -1
        if self._in_order is not None and trial.number > last:
            self._in_order.append(trial)
        else:
            self._in_order = None


def same_trial(trial: FrozenTrial, head: Row[Any] | None) -> bool:
    """Say whether a remembered trial is the one that the database holds under its id now."""
    return head is not None and (
        trial.number == head.number
        and trial.state.name == head.state
        and trial.datetime_start == rows.to_local(head.datetime_start)
        and trial.datetime_complete == rows.to_local(head.datetime_complete)
    )


def load(connection: Connection, study_id: int, heads: Sequence[Row[Any]]) -> list[FrozenTrial]:
    """Read whole trials, with one query a table however many there are."""
    if not heads:
        return []
    source = _Source(connection, study_id, [head.trial_id for head in heads])
    params = source.params()
    values = source.numbers(rows.values, "objective", "value", "value_type")
    reports = source.numbers(rows.reports, "step", "intermediate_value", "intermediate_value_type")
    users, systems = source.attrs(rows.user_attrs), source.attrs(rows.system_attrs)
    return [
        FrozenTrial(
            number=head.number,
            state=STATES[head.state],
            value=None,
            values=[n for _, n in sorted(values[head.trial_id].items())] or None,
            datetime_start=rows.to_local(head.datetime_start),
            datetime_complete=rows.to_local(head.datetime_complete),
            params={name: value for name, value, _ in params[head.trial_id]},
            distributions={name: kind for name, _, kind in params[head.trial_id]},
            user_attrs=users[head.trial_id],
            system_attrs=systems[head.trial_id],
            intermediate_values=reports[head.trial_id],
            trial_id=head.trial_id,
        )
        for head in heads
    ]


class _Source:
    """The rows of some trials of one study."""

    def __init__(self, connection: Connection, study_id: int, trial_ids: list[int]) -> None:
        self._connection = connection
        self._study_id = study_id
        self._ids = trial_ids

    def params(self) -> dict[int, list[tuple[str, Any, BaseDistribution]]]:
        table = rows.params.c
        found = self._select(
            rows.params,
            table.param_name,
            table.param_value,
            table.distribution_json,
            table.param_id,
        )
        kept = defaultdict(list)
        # Optuna keeps the order in which the params were suggested.
        for trial_id, name, value, kind_json, _ in sorted(found, key=lambda row: row[4]):
            kind = distribution(kind_json)
            kept[trial_id].append((name, kind.to_external_repr(value), kind))
        return kept

    def numbers(
        self, table: Table, key: str, value: str, kind: str
    ) -> dict[int, dict[int, float]]:
        kept = defaultdict(dict)
        found = self._select(
            table, table.c[key], table.c[value], type_coerce(table.c[kind], String)
        )
        for trial_id, place, number, special in found:
            kept[trial_id][place] = SPECIAL[special] if number is None else number
        return kept

    def attrs(self, table: Table) -> dict[int, dict[str, Any]]:
        kept = defaultdict(dict)
        for trial_id, key, text in self._select(table, table.c.key, table.c.value_json):
            kept[trial_id][key] = json.loads(text)
        return kept

    def _select(self, table: Table, *columns: Any) -> Sequence[Any]:
        query = select(table.c.trial_id, *columns)
        if len(self._ids) <= MOST_IDS:
            ids = bindparam("ids", expanding=True)
            query = query.where(table.c.trial_id.in_(ids))
            return self._connection.execute(query, {"ids": self._ids}).all()
        query = query.join(rows.trials, rows.trials.c.trial_id == table.c.trial_id).where(
            _in_study,
            table.c.trial_id >= bindparam("first"),
            table.c.trial_id <= bindparam("last"),
        )
        bounds = {"study": self._study_id, "first": self._ids[0], "last": self._ids[-1]}
        return self._connection.execute(query, bounds).all()


@lru_cache(maxsize=4096)
def distribution(text: str) -> BaseDistribution:
    """Return the distribution of its JSON; the same texts come thousands of times."""
    return json_to_distribution(text)


def copy_trial(trial: FrozenTrial) -> FrozenTrial:
    """Return a copy that shares nothing which can change, at a tenth of deepcopy's cost."""
    return FrozenTrial(
        number=trial.number,
        state=trial.state,
        value=None,
        values=trial._values,
        datetime_start=trial.datetime_start,
        datetime_complete=trial.datetime_complete,
        params=dict(trial.params),
        distributions=dict(trial.distributions),
        user_attrs=_copy_json(trial.user_attrs),
        system_attrs=_copy_json(trial.system_attrs),
        intermediate_values=dict(trial.intermediate_values),
        trial_id=trial._trial_id,
    )


def _copy_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy_json(item) for key, item in value.items()}
    return [_copy_json(item) for item in value] if isinstance(value, list) else value
