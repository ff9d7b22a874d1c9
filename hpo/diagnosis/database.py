"""The database that trials would report to: where it lies, how it is set up, how fast it answers.

Nothing is written into it: what a commit costs is measured on a file beside it, which is removed.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from hpo.diagnosis.finding import Finding, look, ok, wrong
from hpo.errors import HpoError
from hpo.versions import versions

PART = "storage"
# A report waits for nobody, but a trial's end and the next ticket wait for one answer each.
SLOW_MS = 50.0
# Checkpoints, logs and the database of a middle-sized study.
_ENOUGH_BYTES = 2 * 2**30
_N_TRIPS = 20


def database_findings(url: str, home: Path) -> Iterator[Finding]:
    """Yield what is to be said of a storage URL and of the folder that files go to."""
    from storage import mask
    from storage.engine import parse_url, sqlite_path

    try:
        path = sqlite_path(parse_url(url))
        if path is not None:
            yield from sqlite_findings(path)
        else:
            yield from _server_findings(url)
    except HpoError as error:
        yield wrong(PART, "database", str(error))
    except (OSError, sqlite3.Error) as error:
        yield wrong(PART, "database", f"{mask(url)}: {error}",
                    "choose another --home or --storage")
    try:
        yield disk_finding(home)
    except OSError as error:
        yield wrong(PART, "home", str(error), "choose another --home")
    told = versions()
    yield ok(PART, "versions", ", ".join(
        [f"{name} {told[name]}" for name in ("hpo", "torch", "optuna", "python") if name in told]
        + [f"SQLite {sqlite3.sqlite_version}"]))


def existing(path: Path) -> Path:
    """Return a folder, or the nearest one above it that is there.

    Raises:
        NotADirectoryError: where a file is in the way.
    """
    nearest = next(there for there in (path, *path.absolute().parents) if there.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(f"{nearest} is a file, not a folder")
    return nearest


def sqlite_findings(path: Path) -> Iterator[Finding]:
    """Yield what is to be said of a SQLite file, whether it is there already or not.

    Raises:
        InputError: on a network file system, or where it cannot be set up.
        OSError: where nothing can be written.
    """
    from storage.network import refuse_network_path

    refuse_network_path(path)
    there = path.exists()
    if there:
        yield _journal_finding(path)
    with tempfile.TemporaryDirectory(prefix=".hpo-doctor-", dir=existing(path.parent)) as folder:
        mode, took = _commits(Path(folder) / "trial.db")
    if not there:
        yield (ok(PART, "database", f"{path}: `hpo run` makes it, on a local file system")
               if mode == "wal" else
               wrong(PART, "database", f"{path}: its file system gives no write-ahead log, but "
                                       f"{mode}", "choose a local disk with --home or --storage"))
    yield trip_finding("commit", took)


def _journal_finding(path: Path) -> Finding:
    from storage.creation import revision
    from storage.link import Link

    link = Link(f"sqlite:///{path}", timeout_s=10)
    try:
        # One of a newer version is refused here; an older one `hpo run` brings up to date.
        revision(link)
    finally:
        link.close()
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as reader:
        mode = reader.execute("PRAGMA journal_mode").fetchone()[0]
    if mode == "wal":
        return ok(PART, "database", f"{path}: local, with a write-ahead log")
    return look(PART, "database", f"{path}: its journal_mode is {mode}, so that readers hold up "
                                  f"writers", f"sqlite3 {path} 'PRAGMA journal_mode=WAL'")


def _commits(path: Path) -> tuple[str, list[float]]:
    """Return the journal that a new file gets, and the milliseconds of some commits into it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        mode = writer.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        writer.execute("PRAGMA synchronous=NORMAL")
        writer.execute("CREATE TABLE t (k INTEGER)")
        return mode, timed(lambda: writer.execute("INSERT INTO t VALUES (1)"))


def timed(work: Callable[[], object]) -> list[float]:
    """Return the milliseconds of some calls."""
    took = []
    for _ in range(_N_TRIPS):
        start = time.perf_counter()
        work()
        took.append(1000 * (time.perf_counter() - start))
    return took


def trip_finding(what: str, took: list[float]) -> Finding:
    """Return whether the database answers fast enough that trials need not wait for it."""
    middle = statistics.median(took)
    text = f"a {what} takes {middle:.2f} ms (the slowest of {len(took)}: {max(took):.2f} ms)"
    if middle > SLOW_MS:
        return look(PART, "round trip", text, "short trials will wait for it: choose a faster "
                                              "disk or a nearer server")
    return ok(PART, "round trip", text)


def _server_findings(url: str) -> Iterator[Finding]:
    from storage import mask
    from storage.creation import revision
    from storage.link import Link

    link = Link(url, timeout_s=10)
    try:
        version = link.read(
            lambda c: c.exec_driver_sql("SHOW server_version").scalar_one())
        made = "set up" if revision(link) is not None else "`hpo run` sets it up"
        yield ok(PART, "database", f"{mask(url)}: PostgreSQL {version}, {made}")
        yield trip_finding("question", timed(lambda: link.read(
            lambda c: c.exec_driver_sql("SELECT 1").scalar_one())))
    finally:
        link.close()


def disk_finding(home: Path) -> Finding:
    """Return whether the home folder can take checkpoints and logs."""
    folder = existing(home)
    free = shutil.disk_usage(folder).free
    text = f"{home}: {free / 2**30:.1f} GB free"
    if not os.access(folder, os.W_OK | os.X_OK):
        return wrong(PART, "home", f"{home}: no leave to write in {folder}",
                     "choose another --home")
    if free < _ENOUGH_BYTES:
        return look(PART, "home", text, "checkpoints and logs may fill it: choose another --home")
    return ok(PART, "home", text)
