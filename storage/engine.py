"""Make the SQLAlchemy engine for a storage URL, with the settings a tuner needs.

The defaults of the drivers lose reports: SQLite waits five seconds and upgrades read locks, and a
PostgreSQL pool hands out sessions that the server has dropped.
"""

from __future__ import annotations

import os
import re
import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, OperationalError

from hpo.errors import InputError
from storage.network import refuse_network_path

BUSY_TIMEOUT_S = 30
# One session for the trial and one for the thread that renews its lease.
POSTGRES_SESSIONS = 2
LOCK_TIMEOUT_S = 5.0
ACCEPTED = "sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE"
WRITES = "hpo_writes"


def mask(url: str | URL) -> str:
    """Return the URL without its password, for messages and logs."""
    text = url.render_as_string(hide_password=True) if isinstance(url, URL) else url
    text = re.sub(r"(://[^:/@\s]*):[^/\s]*@", r"\1:***@", text)
    return re.sub(r"([?&][^=&]*passw[^=&]*=)[^&]*", r"\1***", text, flags=re.IGNORECASE)


def parse_url(url: str) -> URL:
    """Return a storage URL in SQLAlchemy's form, with its driver named.

    Raises:
        InputError: not a URL, or not of SQLite or PostgreSQL.
    """
    try:
        parsed = make_url(re.sub(r"^postgres(?=[:+])", "postgresql", url))
    except (ArgumentError, ValueError):
        raise InputError(f"storage '{mask(url)}' is not a URL; give {ACCEPTED}") from None
    if parsed.drivername in ("postgresql", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise InputError(
            f"storage '{mask(url)}': '{parsed.drivername}' is not supported; give {ACCEPTED}"
        )
    if parsed.database in (None, "", ":memory:") or "mode=memory" in str(parsed.database):
        raise InputError(
            f"storage '{mask(url)}' keeps a database in memory, which workers cannot share; "
            "give sqlite:///FILE"
        )
    return parsed


def sqlite_path(url: URL) -> Path | None:
    """Return the file of a SQLite URL, and None for another database."""
    if url.get_backend_name() != "sqlite" or str(url.database).startswith("file:"):
        return None
    return Path(str(url.database))


def make_engine(url: str, timeout_s: float = 60) -> Engine:
    """Make the engine for a URL; connects to nothing yet.

    `timeout_s` bounds the wait for a free session, and for SQLite's lock.

    Raises:
        InputError: a bad URL, a missing driver, or a place where SQLite cannot work.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite_engine(parsed, timeout_s)
    return _postgres_engine(parsed, timeout_s)


def _sqlite_engine(url: URL, timeout_s: float) -> Engine:
    path = sqlite_path(url)
    if path is not None:
        _check_place(path)
    engine = create_engine(url, connect_args={"timeout": min(BUSY_TIMEOUT_S, timeout_s)})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _check_place(path: Path) -> None:
    refuse_network_path(path)
    if path.is_dir():
        raise InputError(f"storage '{path}' is a folder; give sqlite:///FILE")
    target = path if path.exists() else path.parent
    if target.exists() and not os.access(target, os.W_OK):
        raise InputError(
            f"storage '{path}': '{target}' cannot be written; choose a place you own with --home "
            "or --storage sqlite:///FILE"
        )


def _prepare_sqlite(connection: sqlite3.Connection, _record: Any) -> None:
    # The driver's own transactions begin deferred, and a read lock that must become a write lock
    # fails at once instead of waiting; so it begins none and `_begin_sqlite` does.
    connection.isolation_level = None
    # In WAL mode NORMAL can lose the last commits at a power cut but never damages the file.
    connection.execute("PRAGMA synchronous=NORMAL")


def _begin_sqlite(connection: Connection) -> None:
    if connection.get_execution_options().get(WRITES):
        _begin_immediate(connection)


def _begin_immediate(connection: Connection) -> None:
    # Straight to the driver: SQLAlchemy's way costs as much as the report that follows.
    driver: Any = connection.connection.driver_connection
    try:
        driver.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        raise OperationalError("BEGIN IMMEDIATE", None, error) from error


def _postgres_engine(url: URL, timeout_s: float) -> Engine:
    options: dict[str, Any] = {"connect_timeout": max(2, min(10, int(timeout_s)))}
    try:
        engine = create_engine(
            url,
            pool_pre_ping=True,
            pool_size=POSTGRES_SESSIONS,
            max_overflow=0,
            pool_timeout=timeout_s,
            connect_args={} if "connect_timeout" in url.query else options,
        )
        lock_s = min(LOCK_TIMEOUT_S, timeout_s / 4)
        event.listen(engine, "connect", lambda c, _record: _prepare_postgres(c, lock_s))
        return engine
    except ImportError as error:
        raise InputError(
            f"storage '{mask(url)}' needs the package psycopg, which is not installed: "
            "pip install 'psycopg[binary]'"
        ) from error


def _prepare_postgres(connection: Any, lock_s: float) -> None:
    # A row that somebody locks must not hold a session for ever: there are two, and the leases
    # need one. What waited too long is tried again.
    connection.execute(f"SET lock_timeout = {max(1, int(1000 * lock_s))}")
    connection.commit()
