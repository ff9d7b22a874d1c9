"""Set up a database once, however many processes start at the same moment.

Optuna's own first open is a race: two processes that meet a new file both create its tables, and
one of them dies.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sqlalchemy import Connection, select, table, text
from sqlalchemy import column as sql_column
from sqlalchemy.engine import URL

from hpo.errors import InputError, StorageError
from storage.engine import WRITES, mask, sqlite_path
from storage.link import Link
from storage.schema import REVISION, VERSION_TABLE

MIGRATIONS = Path(__file__).parent / "migrations"
# "hpo" in ASCII: the key under which PostgreSQL keeps this lock of ours.
ADVISORY_KEY = 0x68706F
_version = table(VERSION_TABLE, sql_column("version_num"))


def init(
    url: str, timeout_s: float = 60,
    waits: Callable[[StorageError | InputError], None] = lambda _error: None,
) -> None:
    """Create Optuna's tables and ours, or bring ours up to date; safe to repeat and to race.

    `waits` is called before each wait for a database that is away, as in `Link`.

    Raises:
        InputError: the place cannot hold a database, or a newer version made it.
        StorageError: the database did not answer.
    """
    link = Link(url, timeout_s, waits)
    try:
        path = sqlite_path(link.engine.url)
        if path is not None:
            _make_folder(path.parent)
        if revision(link) != REVISION:
            # All over again where the server goes away in the middle.
            link.insist(lambda _again: _set_up(link, path))
    finally:
        link.close()


def _set_up(link: Link, path: Path | None) -> None:
    with _only_one(link, path):
        if revision(link) != REVISION:
            _create(link)


def require(link: Link) -> None:
    """Check that a database is set up, without creating anything.

    Raises:
        InputError: it is not there, not set up, or made by a newer version.
    """
    path = sqlite_path(link.engine.url)
    if path is not None and not path.exists():
        raise InputError(f"storage '{mask(link.url)}': no such file; `hpo init` makes it")
    if revision(link) != REVISION:
        raise InputError(
            f"storage '{mask(link.url)}' is not set up for this version; run "
            f"`hpo init --storage {mask(link.url)}`"
        )


def revision(link: Link) -> str | None:
    """Return the step of our own tables, and None in a database without them.

    Raises:
        InputError: a newer version of hpo made them.
    """
    found = link.read(_read_revision)
    if found is not None and found > REVISION:
        raise InputError(
            f"storage '{mask(link.url)}' was set up by a newer hpo (step {found}, this one knows "
            f"{REVISION}); upgrade hpo"
        )
    return found


def _read_revision(connection: Connection) -> str | None:
    if not connection.dialect.has_table(connection, VERSION_TABLE):
        return None
    return connection.execute(select(_version.c.version_num)).scalar_one_or_none()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"storage folder '{folder}' cannot be made ({error.strerror}); choose another with "
            "--home or --storage"
        ) from error


@contextmanager
def _only_one(link: Link, path: Path | None) -> Iterator[None]:
    if path is not None:
        with _lock_file(path.with_name(path.name + ".init")):
            yield
        return
    with link.engine.connect() as connection:
        # Thirty processes may wait for the one that creates the tables.
        connection.execute(text("SET lock_timeout = 0"))
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": ADVISORY_KEY})
        connection.commit()
        try:
            yield
        finally:
            connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": ADVISORY_KEY})


@contextmanager
def _lock_file(path: Path) -> Iterator[None]:
    """Hold a lock file and remove it afterwards; whoever waited looks whether it is still it."""
    while True:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(handle).st_ino:
                break
        os.close(handle)
    try:
        yield
    finally:
        path.unlink()
        os.close(handle)


def _create(link: Link) -> None:
    if link.is_sqlite:
        link.read(_switch_to_wal)
    _create_optuna_tables(link.engine.url)
    _upgrade_own_tables(link)


def _switch_to_wal(connection: Connection) -> None:
    mode = connection.exec_driver_sql("PRAGMA journal_mode=WAL").scalar_one()
    if mode != "wal":
        url = mask(str(connection.engine.url))
        raise StorageError(f"storage '{url}': SQLite keeps journal mode '{mode}', not 'wal'")


def _create_optuna_tables(url: URL) -> None:
    from optuna.storages import RDBStorage

    # Optuna reads its URL as a template in which braces have a meaning.
    plain = url.render_as_string(hide_password=False)
    template = plain.replace("{", "{{").replace("}", "}}")
    try:
        RDBStorage(template).engine.dispose()
    except RuntimeError as error:
        raise InputError(f"storage '{mask(url)}': {error}") from error


def _upgrade_own_tables(link: Link) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    # All steps at once: nobody sees half of them, and a kill leaves none.
    with link.engine.connect().execution_options(**{WRITES: True}) as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.commit()
