"""Run short pieces of database work, again where the connection was lost or the file was locked.

A server's restart in the middle of a night's run should cost a delay, not a trial.
"""

from __future__ import annotations

import os
import random
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from sqlalchemy import Connection, Engine, Table, text
from sqlalchemy.exc import (
    DBAPIError,
    InterfaceError,
    InvalidRequestError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

from hpo.errors import InputError, StorageError
from storage.engine import WRITES, make_engine, mask, wait_until
from storage.prepared import is_refusal, transaction

Result = TypeVar("Result")
FIRST_WAIT_S = 0.02
LONGEST_WAIT_S = 2.0
# A transaction of ours takes milliseconds: a session of ours that has left one open for so long
# is that of a process which was stopped, or of a host that is gone.
HALTED_AFTER_S = 4.0
_LOCK_NOT_AVAILABLE = "55P03"
# What no waiting repairs, in the words of SQLite and PostgreSQL.
HOPELESS = (
    "authentication failed",
    "does not exist",
    "no such table",
    "no such column",
    "disk is full",
    "readonly database",
    "unable to open database",
    "no password supplied",
    "permission denied",
    "could not translate host name",
    "failed to resolve host",
    "no pg_hba.conf entry",
)


class Link:
    """An engine and the time it may take to come back.

    `read` runs without a transaction of its own, `write` in one that takes SQLite's write lock at
    its start. `waits` is called before each wait for a database that is away, with why it is; it
    may raise to give up.
    """

    def __init__(
        self, url: str, timeout_s: float = 60,
        waits: Callable[[StorageError | InputError], None] = lambda _error: None,
    ) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self._waits = waits
        self.engine = make_engine(url, timeout_s)
        self._reads: Engine = self.engine
        if self.engine.dialect.name == "postgresql":
            # Else a session that only read would stay "idle in transaction" until it is returned.
            self._reads = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self._writes = self.engine.execution_options(**{WRITES: True})
        # A storage that nobody closed must not leave its sessions to the garbage collector.
        weakref.finalize(self, _dispose, self.engine, os.getpid())

    @property
    def is_sqlite(self) -> bool:
        """Whether the database is a SQLite file."""
        return self.engine.dialect.name == "sqlite"

    def read(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` with a connection, until it succeeds or the time is over.

        Raises:
            StorageError: the database stayed away or refused.
        """

        def once(_again: bool) -> Result:
            with self._reads.connect() as connection:
                return work(connection)

        return self.insist(once)

    def write(
        self,
        work: Callable[[Connection], Result],
        *,
        again: Callable[[Connection], Result | None] | None = None,
        prepared: bool = False,
        hopeful: Callable[[Connection], Callable[[], Result]] | None = None,
    ) -> Result:
        """Run `work` in one transaction, until it succeeds or the time is over.

        Work of `prepared` statements alone waits for no answer that it does not read. `hopeful`
        is the same work for PostgreSQL without any such wait: it returns what reads the answers
        after the commit; where the database refuses it, `work` is done instead.

        A lost answer to a COMMIT leaves open whether it happened. Work that may be done twice
        needs nothing more; other work gives `again`, which runs first in every repetition and
        returns the result if the work is found done.

        Raises:
            StorageError: the database stayed away or refused.
        """

        def once(repeated: bool) -> Result:
            if hopeful is not None and not repeated and not self.is_sqlite:
                with self._writes.connect() as connection:
                    try:
                        with transaction(connection):
                            read = hopeful(connection)
                        return read()
                    except DBAPIError as error:
                        if not is_refusal(error):
                            raise
            if prepared and not repeated:
                with self._writes.connect() as connection, transaction(connection):
                    return work(connection)
            with self._writes.begin() as connection:
                done = again(connection) if repeated and again is not None else None
                return work(connection) if done is None else done

        return self.insist(once)

    def close(self) -> None:
        """Close all sessions."""
        self.engine.dispose()

    def insist(self, once: Callable[[bool], Result]) -> Result:
        """Call `once` until it succeeds or the time is over, and say whether it was called before.

        Raises:
            StorageError: the database stayed away or refused.
        """
        deadline = time.monotonic() + self.timeout_s
        wait_s = FIRST_WAIT_S
        repeated = False
        while True:
            try:
                with wait_until(deadline):
                    return once(repeated)
            except SQLAlchemyError as error:
                if not may_pass(error) or time.monotonic() + wait_s > deadline:
                    raise explain(error, self.url) from error
                self._waits(explain(error, self.url))
                self._end_halted(error)
            repeated = True
            # Spread, so that workers which lost one server do not return in one instant.
            time.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(wait_s * 2, LONGEST_WAIT_S)

    def _end_halted(self, error: SQLAlchemyError) -> None:
        """After a wait for a lock in vain, end the sessions of ours that may hold it for ever.

        A stopped process keeps its locks: what it was in the middle of is rolled back, and it
        begins again where it goes on.
        """
        if getattr(getattr(error, "orig", None), "sqlstate", None) != _LOCK_NOT_AVAILABLE:
            return
        # The next wait for the lock asks again.
        with suppress(SQLAlchemyError), self._reads.connect() as connection:
            after_s = max(1.0, min(HALTED_AFTER_S, self.timeout_s / 8))
            connection.execute(_END_HALTED, {"after_s": after_s}).all()


# A session in a transaction for whose next word the server waits: between two statements, or in
# the middle of a pipeline, which the server calls active.
_END_HALTED = text("""
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND usename = current_user
    AND application_name = current_setting('application_name')
    AND wait_event = 'ClientRead' AND pid <> pg_backend_pid()
    AND xact_start < clock_timestamp() - make_interval(secs => :after_s)
    AND state_change < clock_timestamp() - make_interval(secs => :after_s)
""")


def alone(connection: Connection, table: Table) -> None:
    """Have no other transaction change a table until this one ends, of a few short ones a study.

    A row that is not there yet cannot be locked. SQLite has one writer anyhow.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"LOCK TABLE {table.name} IN SHARE ROW EXCLUSIVE MODE"))


def _dispose(engine: Engine, pid: int) -> None:
    # A forked child shares the parent's sockets, and closing a session would end the parent's.
    if os.getpid() == pid:
        engine.dispose()


def may_pass(error: SQLAlchemyError) -> bool:
    """Say whether waiting may cure an error: a lost session, a lock, a restarting server."""
    if isinstance(error, PoolTimeout):
        return False
    if not isinstance(error, DBAPIError):
        # What the pool says when a session that it has just opened is gone again.
        return isinstance(error, InvalidRequestError) and "connection is closed" in str(error)
    said = str(error.orig).lower()
    if any(words in said for words in HOPELESS):
        return False
    if "sqlite" in type(error.orig).__module__:
        return "locked" in said or "busy" in said
    return error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)


def explain(error: SQLAlchemyError, url: str) -> StorageError | InputError:
    """Turn a database error into one line without secrets."""
    first_lines = str(getattr(error, "orig", None) or error).strip().splitlines() or ["no reason"]
    cause = mask(first_lines[0])
    if "file is not a database" in cause:
        return InputError(f"storage '{mask(url)}': the file is not a SQLite database")
    if "no such table" in cause or ('relation "' in cause and "does not exist" in cause):
        return InputError(
            f"storage '{mask(url)}' has not been set up ({cause}); `hpo init` does that"
        )
    if "disk I/O error" in cause:
        # What SQLite says where its files cannot grow while they are written.
        cause += ", as of a disk that is full or broken"
    full = "; make room there, and run the same command again" if is_full(cause) else ""
    return StorageError(f"storage '{mask(url)}': {cause}{full}")


def is_full(cause: str) -> bool:
    """Say whether a database's words mean that its disk is full."""
    said = ("disk is full", "No space left on device", "disk that is full")
    return any(words in cause for words in said)
