"""Make the SQLAlchemy engine for a storage URL, with the settings a tuner needs.

The defaults of the drivers lose reports: SQLite waits five seconds and upgrades read locks, and a
PostgreSQL pool hands out sessions that the server has dropped.
"""

from __future__ import annotations

import os
import random
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError

from hpo.errors import InputError
from storage.network import refuse_network_path

BUSY_TIMEOUT_S = 30
# One session for the trial and one for the thread that renews its lease.
POSTGRES_SESSIONS = 2
LOCK_TIMEOUT_S = 5.0
# Between two looks at SQLite's write lock. A transaction of ours takes about a millisecond.
FIRST_LOOK_S, LONGEST_LOOK_S = 0.0003, 0.005
ACCEPTED = "sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE"
WRITES = "hpo_writes"
# What was dropped in so short a time is noticed by the use itself, which is tried again then.
PING_AFTER_S = 1.0
_USED = "hpo_used_at"
# A peer that vanished without a word, as a host that lost its power or network does, is taken for
# gone after these four lost questions: some 30 s, where the systems' own defaults wait two hours.
PEER_IDLE_S, PEER_PAUSE_S, PEER_ASKS = 10, 5, 4
PEER_TIMEOUT_MS = 1000 * (PEER_IDLE_S + PEER_PAUSE_S * PEER_ASKS)


class _Deadline(threading.local):
    """Until when this thread's piece of work may wait, on the monotonic clock."""

    at = inf


_DEADLINE = _Deadline()


@contextmanager
def wait_until(at: float) -> Iterator[None]:
    """Have no wait for SQLite's write lock go on after a moment of the monotonic clock."""
    was, _DEADLINE.at = _DEADLINE.at, at
    try:
        yield
    finally:
        _DEADLINE.at = was


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
    wait_s = min(BUSY_TIMEOUT_S, timeout_s)
    engine = create_engine(url, connect_args={"timeout": wait_s})
    event.listen(engine, "connect", _prepare_sqlite)
    if path is not None:
        same = _SameFile(path)
        event.listen(engine, "do_connect", lambda *_: same.check())
        event.listen(engine, "checkout", lambda *_: same.check())
    event.listen(engine, "begin", lambda connection: _begin_sqlite(connection, wait_s))
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


class _SameFile:
    """Refuses to work on where the file was deleted: what is written then would go nowhere.

    SQLite itself goes on with a file that has no name any more, or makes a new one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._was: tuple[int, int] | None = None

    def check(self) -> None:
        """Raise unless the file is the one that was there first."""
        now = self._now()
        if self._was is None:
            self._was = now
        elif now != self._was:
            gone = sqlite3.OperationalError("unable to open database file: it was deleted or "
                                            "replaced while it was in use")
            raise DBAPIError.instance("", None, gone, sqlite3.Error)

    def _now(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino


def _begin_sqlite(connection: Connection, wait_s: float) -> None:
    if not connection.get_execution_options().get(WRITES):
        return
    # Straight to the driver: SQLAlchemy's way costs as much as the report that follows.
    driver: Any = connection.connection.driver_connection
    try:
        _take_write_lock(driver, wait_s)
    except sqlite3.Error as error:
        raise DBAPIError.instance("BEGIN IMMEDIATE", None, error, sqlite3.Error) from error


def _take_write_lock(driver: sqlite3.Connection, wait_s: float) -> None:
    """Begin a transaction as soon as no other writes.

    SQLite itself looks again after 1, 2, 5, 10 ... milliseconds, several times as long as those
    who write need. Here whoever has waited long looks nearly as often as one who has just come.
    """
    try:
        driver.execute("PRAGMA busy_timeout = 0")
        deadline = min(time.monotonic() + wait_s, _DEADLINE.at)
        pause_s = FIRST_LOOK_S
        while True:
            try:
                driver.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 1.2, LONGEST_LOOK_S)
    finally:
        driver.execute(f"PRAGMA busy_timeout = {int(1000 * wait_s)}")


def _postgres_engine(url: URL, timeout_s: float) -> Engine:
    options: dict[str, Any] = {
        "connect_timeout": max(2, min(10, int(timeout_s))),
        # Our own sessions are known by it, unless the URL names them.
        "application_name": "hpo",
        "keepalives_idle": PEER_IDLE_S, "keepalives_interval": PEER_PAUSE_S,
        "keepalives_count": PEER_ASKS, "tcp_user_timeout": PEER_TIMEOUT_MS,
    }
    try:
        engine = create_engine(
            url,
            pool_size=POSTGRES_SESSIONS,
            max_overflow=0,
            pool_timeout=timeout_s,
            connect_args={name: value for name, value in options.items()
                          if name not in url.query},
        )
        lock_s = min(LOCK_TIMEOUT_S, timeout_s / 4)
        event.listen(engine, "connect", lambda c, _record: _prepare_postgres(c, lock_s))
        event.listen(engine, "connect", _note_use)
        event.listen(engine, "checkin", _note_use)
        event.listen(engine, "checkout", _ping_idle)
        return engine
    except ImportError as error:
        raise InputError(
            f"storage '{mask(url)}' needs the package psycopg, which is not installed: "
            "pip install 'psycopg[binary]'"
        ) from error


def _prepare_postgres(connection: Any, lock_s: float) -> None:
    # A row that somebody locks must not hold a session for ever: there are two, and the leases
    # need one. What waited too long is tried again. And the server too must notice that we are
    # gone: until then it keeps our locks.
    connection.execute(
        f"SET lock_timeout = {max(1, int(1000 * lock_s))}; "
        f"SET tcp_keepalives_idle = {PEER_IDLE_S}; SET tcp_keepalives_interval = {PEER_PAUSE_S}; "
        f"SET tcp_keepalives_count = {PEER_ASKS}; SET tcp_user_timeout = {PEER_TIMEOUT_MS}")
    connection.commit()


def _note_use(_connection: Any, record: Any) -> None:
    record.info[_USED] = time.monotonic()


def _ping_idle(connection: Any, record: Any, _proxy: Any) -> None:
    """Have a session that a server dropped meanwhile replaced before it is used.

    SQLAlchemy's own pre-ping asks each time; a session in steady use need not be asked.
    """
    if time.monotonic() - record.info.get(_USED, -inf) < PING_AFTER_S:
        return
    # In a transaction of its own, the question would leave the session in it.
    was, connection.autocommit = connection.autocommit, True
    try:
        connection.execute("SELECT 1")
        connection.autocommit = was
    except Exception as error:
        # The pool opens another one, and tries that.
        raise DisconnectionError from error
