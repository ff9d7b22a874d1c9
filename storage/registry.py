"""The registry: what was found, with everything that is needed to believe and to rebuild it.

A row holds copies, never a key of Optuna's: SQLite gives the ids of a deleted study to the next.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, select, update

from storage.columns import utc_now
from storage.link import Link
from storage.schema import registry

CURRENT, DELETED, REPLACED = "current", "study deleted", "replaced"
COLUMNS = frozenset(column.name for column in registry.columns)


class Registry:
    """The registered rows of all studies in a database."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def add(self, row: Mapping[str, Any]) -> str:
        """Register a row and return its id; one of the same study, phase and rank is replaced.

        A row with the same params and scores stays as it was made, but for the epochs spent.
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
    same = (
        (registry.c.study == fields["study"])
        & (registry.c.phase == fields["phase"])
        & (registry.c.rank == fields["rank"])
        & (registry.c.state == CURRENT)
    )
    old = connection.execute(select(registry).where(same).with_for_update()).one_or_none()
    if old is not None:
        found = fields.get("scores")
        if found and (old.params, old.scores) == (fields.get("params"), found):
            fields = {"epochs_spent": fields.get("epochs_spent")}
        else:
            fields = _blank() | fields
        connection.execute(update(registry).where(registry.c.id == old.id).values(fields))
        return old.id
    connection.execute(registry.insert(), {**fields, "id": new_id})
    return new_id


def _blank() -> dict[str, None]:
    """Return empty fields, so that nothing of a replaced row shines through."""
    needed = {"id", "study", "phase", "rank", "state", "created_at"}
    return dict.fromkeys(COLUMNS - needed)


def _row(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row with the fields of `data` beside the others."""
    row = dict(mapping)
    return {**(row.pop("data") or {}), **row}
