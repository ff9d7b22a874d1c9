"""Names that point at registered results: who holds each now, and who held it before.

A name is of one study and one metric. Its holders are never overwritten: each has the time from
and until which it held the name, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, select, update

from storage.columns import utc_now
from storage.link import Link, alone
from storage.schema import aliases

CHAMPION, CHALLENGER = "champion", "challenger"
ALIASES = (CHAMPION, CHALLENGER)


class Aliases:
    """The holders of the names of all studies."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def held(self, study: str | None = None) -> list[dict[str, Any]]:
        """Return the present holders, of one study or of all."""
        return [row for row in self.history(study) if row["until_at"] is None]

    def history(self, study: str | None = None) -> list[dict[str, Any]]:
        """Return all holders there ever were, the first one first."""
        query = select(aliases).order_by(aliases.c.id)
        if study is not None:
            query = query.where(aliases.c.study == study)
        return self._link.read(lambda c: [dict(row._mapping) for row in c.execute(query)])

    def holder(self, study: str, alias: str, metric: str | None = None) -> str | None:
        """Return the id of the row that holds a name now."""
        found = [row for row in self.held(study)
                 if row["alias"] == alias and metric in (None, row["metric"])]
        return found[0]["row_id"] if found else None

    def give(self, study: str, metric: str, alias: str, row_id: str, why: str) -> None:
        """Give a name to a row; who held it goes into the history.

        A row has one name: the one that it had before is nobody's then.
        """
        now = utc_now()

        def work(connection: Connection) -> None:
            alone(connection, aliases)
            held = _held(connection, study, metric)
            if any(row.alias == alias and row.row_id == row_id for row in held):
                return
            over = [row.id for row in held if row.alias == alias or row.row_id == row_id]
            connection.execute(update(aliases).where(aliases.c.id.in_(over)).values(until_at=now))
            connection.execute(aliases.insert(), {
                "study": study, "metric": metric, "alias": alias, "row_id": row_id, "why": why,
                "since_at": now})

        self._link.write(work)

    def take(self, study: str, metric: str, alias: str) -> None:
        """Take a name from whoever holds it."""
        mine = (aliases.c.study == study) & (aliases.c.metric == metric)
        change = update(aliases).where(mine, aliases.c.alias == alias,
                                       aliases.c.until_at.is_(None)).values(until_at=utc_now())
        self._link.write(lambda c: c.execute(change))


def _held(connection: Connection, study: str, metric: str) -> Sequence[Row[Any]]:
    query = select(aliases).where(aliases.c.study == study, aliases.c.metric == metric,
                                  aliases.c.until_at.is_(None))
    return connection.execute(query).all()


def take_all(connection: Connection, study: str) -> None:
    """Take the names of a deleted study within a transaction; the history stays."""
    mine = (aliases.c.study == study) & aliases.c.until_at.is_(None)
    connection.execute(update(aliases).where(mine).values(until_at=utc_now()))
