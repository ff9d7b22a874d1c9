"""What a run says of itself: the settings of its study, and the workers that are alive.

Optuna stores neither a study's sampler nor its pruner, and a process on another host is seen only
in the database.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Table, select, update
from sqlalchemy.dialects import postgresql, sqlite

from storage.columns import now_s, utc_now
from storage.link import Link
from storage.schema import studies, workers

# The characters of the column `owner`, and where the data keep one that is longer.
_N_KEY, _OWNER = 64, "owner"


class Runs:
    """The studies that hpo runs and the workers that run them."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def save_study(self, name: str, **fields: Any) -> None:
        """Write a study's row, or the given fields of it if it exists.

        The fields are module, metric, direction, epochs, settings, space and data.
        """
        self._upsert(studies, {"name": name, "created_at": utc_now()}, fields)

    def study(self, name: str) -> dict[str, Any] | None:
        """Return the row of a study."""
        found = self._read(studies, studies.c.name == name)
        return found[0] if found else None

    def studies(self) -> Sequence[dict[str, Any]]:
        """Return the rows of all studies, oldest first."""
        return self._read(studies, studies.c.created_at.is_not(None), studies.c.created_at)

    def beat(
        self,
        owner: str,
        name: str,
        host: str,
        pid: int,
        device: str | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Say that a worker is alive; `data` is what it runs with."""
        key = _key(owner)
        row = {"owner": key, "started_at": utc_now()}
        if key != owner:
            data = {**(data or {}), _OWNER: owner}
        seen = {"name": name, "host": host, "pid": pid, "device": device, "seen_s": now_s()}
        self._upsert(workers, row, {**seen, "data": dict(data or {})})

    def seen(self, name: str, within_s: float) -> Sequence[tuple[dict[str, Any], float]]:
        """Return the workers of a study that told of themselves within the last seconds.

        Returns: the row of each, and how many seconds ago that was by the database's clock.
        """
        ago_s = (now_s() - workers.c.seen_s).label("ago_s")
        where = (workers.c.name == name) & (workers.c.seen_s >= now_s() - within_s)
        query = select(ago_s, *workers.c).where(where).order_by(workers.c.started_at)
        found = self._link.read(lambda c: [dict(row._mapping) for row in c.execute(query)])
        return [(_whole({k: v for k, v in row.items() if k != "ago_s"}), row["ago_s"])
                for row in found]

    def worker(self, owner: str) -> dict[str, Any] | None:
        """Return the row of one worker, also of one that has ended."""
        return self.workers([owner]).get(owner)

    def workers(self, owners: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the rows of those of these workers that have one, by owner."""
        keys = {_key(owner): owner for owner in owners}
        return {keys[row["owner"]]: _whole(row)
                for row in self._read(workers, workers.c.owner.in_(keys))}

    def left(self, owner: str) -> None:
        """Say that a worker has ended; its row stays, for what its trials were run with."""
        change = update(workers).where(workers.c.owner == _key(owner)).values(seen_s=0.0)
        self._link.write(lambda c: c.execute(change))

    def _upsert(self, table: Table, first: dict[str, Any], fields: dict[str, Any]) -> None:
        """Insert `first` and `fields`; where the row exists, overwrite `fields` only."""
        upsert = sqlite.insert if self._link.is_sqlite else postgresql.insert
        new = upsert(table).values({**first, **fields})
        keys = [column.name for column in table.primary_key]
        if fields:
            again = new.on_conflict_do_update(
                index_elements=keys, set_={name: new.excluded[name] for name in fields}
            )
        else:
            again = new.on_conflict_do_nothing(index_elements=keys)
        self._link.write(lambda c: c.execute(again))

    def _read(self, table: Table, where: Any, *order: Any) -> list[dict[str, Any]]:
        query = select(table).where(where).order_by(*order)
        return self._link.read(lambda c: [dict(row._mapping) for row in c.execute(query)])


def _key(owner: str) -> str:
    """Return an owner as its column holds it: a digest of one with a long host's name."""
    return owner if len(owner) <= _N_KEY else hashlib.sha256(owner.encode()).hexdigest()[:_N_KEY]


def _whole(row: dict[str, Any]) -> dict[str, Any]:
    data = dict(row["data"] or {})
    return {**row, "owner": data.pop(_OWNER, row["owner"]), "data": data}
