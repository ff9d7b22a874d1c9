"""Column types and texts that are equal on SQLite and PostgreSQL.

Each database has its own idea of JSON, of time zones and of the character NUL; ours is the same
on both, and floats come back bit for bit.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import DateTime, Dialect, Double, Text
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator

# A reason is read in a table; the whole text is in the trial's log file.
LONGEST_REASON_BYTES = 4096


class Json(TypeDecorator[Any]):
    """JSON in a text column.

    PostgreSQL's own JSON type refuses NaN, which a diverged epoch reports.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """Write a value as JSON; None stays NULL."""
        return None if value is None else json.dumps(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        """Read a value back."""
        return None if value is None else json.loads(value)


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC time, kept without its zone since SQLite has none."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Store the time in UTC."""
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        """Return the time aware."""
        return None if value is None else value.replace(tzinfo=UTC)


class now_s(FunctionElement[float]):  # noqa: N801 - it reads as an SQL function
    """The database's clock in Unix seconds, one clock for workers on many hosts."""

    type = Double()
    inherit_cache = True


@compiles(now_s, "sqlite")
def _sqlite_now(element: now_s, compiler: Any, **kw: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now_s, "postgresql")
def _postgres_now(element: now_s, compiler: Any, **kw: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"


def utc_now() -> datetime:
    """Return the time, aware, in UTC."""
    return datetime.now(UTC)


def clip(text: str | None, n_bytes: int = LONGEST_REASON_BYTES) -> str | None:
    """Return a text that every database takes, at most `n_bytes` long in UTF-8."""
    if text is None:
        return None
    encoded = text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace")
    if len(encoded) <= n_bytes:
        return encoded.decode()
    return encoded[: n_bytes - 4].decode("utf-8", "ignore") + " ..."
