"""The registry: what was found, with everything that is needed to believe and to rebuild it.

A row holds copies, never a key of Optuna's: SQLite gives the ids of a deleted study to the next.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, select, update

from storage.columns import utc_now
from storage.link import Link, alone
from storage.schema import registry

CURRENT, DELETED, REPLACED = "current", "study deleted", "replaced"
COLUMNS = frozenset(column.name for column in registry.columns)
# What a confirmation that goes on tells anew of a result.
SCORED = ("rank", "trial", "state", "seeds", "scores", "val_mean", "val_sd", "test_mean",
          "test_sd", "epochs_spent", "duration_s")


class Registry:
    """The registered rows of all studies in a database."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def add(self, row: Mapping[str, Any]) -> str:
        """Register a row and return its id.

        An id stands for one result for ever: a row that had the place of study, phase and rank
        before is marked as replaced. The same params confirmed again on the same seeds, and on
        more, are the same result: its scores grow, its weights and all else of its making stay.
        Fields that the table has no column for are kept in `data`.
        """
        fields = {name: value for name, value in row.items() if name in COLUMNS - {"data"}}
        extra = {name: value for name, value in row.items() if name not in COLUMNS}
        fields["data"] = {**(row.get("data") or {}), **extra}
        fields["state"] = CURRENT
        fields.setdefault("created_at", utc_now())
        new_id = str(fields.pop("id", None) or uuid.uuid4())
        return self._link.write(lambda c: _place(c, fields, new_id))

    def rows(
        self, study: str | None = None, *, with_deleted: bool = False
    ) -> Sequence[dict[str, Any]]:
        """Return the rows of a study (of all by default), by phase and rank."""
        query = select(registry).order_by(
            registry.c.study, registry.c.phase, registry.c.rank, registry.c.created_at
        )
        if study is not None:
            query = query.where(registry.c.study == study)
        if not with_deleted:
            query = query.where(registry.c.state == CURRENT)
        return self._link.read(lambda c: [_row(row._mapping) for row in c.execute(query)])

    def get(self, id: str) -> dict[str, Any] | None:
        """Return one row by its id, or by a beginning of it that only one row has."""
        pattern = id.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        query = select(registry).where(registry.c.id.like(pattern, escape="\\")).limit(2)
        found = self._link.read(lambda c: [_row(row._mapping) for row in c.execute(query)])
        return found[0] if len(found) == 1 and id else None

    def retire(self, study: str, kept: Sequence[str]) -> int:
        """Mark the current rows of a study but those kept as replaced; return how many."""
        old = (registry.c.study == study) & (registry.c.state == CURRENT)
        change = update(registry).where(old, registry.c.id.not_in(kept)).values(state=REPLACED)
        return self._link.write(lambda c: c.execute(change).rowcount)

    def mark_deleted(self, study: str) -> int:
        """Mark the rows of a study that was deleted, and return how many those were."""
        return self._link.write(lambda c: mark_deleted(c, study))


def mark_deleted(connection: Connection, study: str) -> int:
    """Mark the rows of a deleted study within a transaction."""
    current = (registry.c.study == study) & (registry.c.state == CURRENT)
    return connection.execute(update(registry).where(current).values(state=DELETED)).rowcount


def _place(connection: Connection, fields: dict[str, Any], new_id: str) -> str:
    alone(connection, registry)
    mine = (registry.c.study == fields["study"]) & (registry.c.phase == fields["phase"])
    query = select(registry).where(mine, registry.c.state != DELETED).order_by(
        registry.c.created_at.desc())
    there = connection.execute(query).all()
    same = next((row for row in there if _is_same(row, fields)), None)
    for row in there:
        if row.state == CURRENT and row.rank == fields["rank"] and row is not same:
            old = update(registry).where(registry.c.id == row.id).values(state=REPLACED)
            connection.execute(old)
    if same is None:
        connection.execute(registry.insert(), {**fields, "id": new_id})
        return new_id
    change = update(registry).where(registry.c.id == same.id).values(_grown(same, fields))
    connection.execute(change)
    return same.id


def _is_same(old: Row[Any], fields: Mapping[str, Any]) -> bool:
    """Return whether a row is of the same params, and all that it scored is scored so again."""
    if (old.params, old.metric) != (fields.get("params"), fields.get("metric")):
        return False
    again = [_run(run) for run in fields.get("scores") or ()]
    return all(_run(run) in again for run in old.scores or ())


def _run(run: Mapping[str, Any]) -> tuple[Any, ...]:
    return run.get("seed"), run.get("trial"), run.get("val")


def _grown(old: Row[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's fields with the scores of a confirmation that went on."""
    grown = {name: fields.get(name) for name in SCORED}
    lost = {name: fields["data"][name] for name in ("lost_seeds",) if name in fields["data"]}
    grown["data"] = {**fields["data"], **(old.data or {}), **lost}
    for name in ("checkpoint", "device"):
        if getattr(old, name) is None:
            grown[name] = fields.get(name)
    return grown


def _row(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row with the fields of `data` beside the others."""
    row = dict(mapping)
    return {**(row.pop("data") or {}), **row}
