"""Setting a database up: once, by many at the same moment, and with alembic beside Optuna's."""

from __future__ import annotations

import traceback
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from optuna.storages import RDBStorage
from sqlalchemy import Engine, event, inspect, text

import storage
from hpo.errors import InputError
from storage import creation, schema
from storage.engine import make_engine
from storage.link import Link

N_STARTS = 30


def _start(url: str, barrier: Any, ends: Any) -> None:
    barrier.wait(120)
    try:
        storage.init(url)
        storage.Database(url).close()
        ends.put("")
    except BaseException:
        ends.put(traceback.format_exc())


def _stock(url: str) -> RDBStorage:
    return RDBStorage(url.replace("postgresql://", "postgresql+psycopg://"))


def test_thirty_processes_set_up_one_new_database_at_once(
    storage_url: str, tmp_path: Path, processes: ForkServerContext
) -> None:
    """C01: no error, whoever comes first."""
    barrier, ends = processes.Barrier(N_STARTS), processes.Queue()
    starts = [
        processes.Process(target=_start, args=(storage_url, barrier, ends))
        for _ in range(N_STARTS)
    ]
    for start in starts:
        start.start()
    assert [ends.get(timeout=120) for _ in starts] == [""] * N_STARTS
    for start in starts:
        start.join()
    assert not list(tmp_path.glob("*.init"))


def test_nobody_sees_a_database_that_is_half_set_up(storage_url: str) -> None:
    """Else a run that begins beside the first one of all takes it for an older version's."""
    seen: set[str | None] = set()
    watcher = Link(storage_url, 60)

    def look(connection: Any, *_: Any) -> None:
        if connection.engine.url == watcher.engine.url and connection.engine not in watched:
            seen.add(creation.revision(watcher))

    watched = {watcher.engine, watcher._reads}
    event.listen(Engine, "before_cursor_execute", look)
    event.listen(Engine, "commit", look)
    try:
        storage.init(storage_url)
    finally:
        event.remove(Engine, "before_cursor_execute", look)
        event.remove(Engine, "commit", look)
    seen.add(creation.revision(watcher))
    watcher.close()
    assert seen == {None, schema.REVISION}


def test_setting_up_again_changes_nothing(storage_url: str) -> None:
    """Idempotent, and what is in it stays."""
    storage.init(storage_url)
    db = storage.Database(storage_url)
    db.registry.add({"study": "s", "phase": "search", "rank": 1})
    storage.init(storage_url)
    assert len(db.registry.rows("s")) == 1
    db.close()


def test_the_tables_are_those_of_the_schema_and_no_drift_is_found(ready_url: str) -> None:
    """`alembic check` finds nothing: neither ours to change nor Optuna's to drop."""
    assert _differences(ready_url, schema.is_ours) == []


def test_without_the_filter_alembic_would_drop_optunas_tables(ready_url: str) -> None:
    """The reason for the filter, so that nobody removes it."""
    dropped = [item for item in _differences(ready_url, None) if item[0] == "remove_table"]
    assert "trials" in {table.name for _, table in dropped}


def _differences(url: str, filter_: Any) -> list[Any]:
    engine = make_engine(url)
    options = {"version_table": schema.VERSION_TABLE, "include_name": filter_}
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts=options)
        found = compare_metadata(context, schema.metadata)
    engine.dispose()
    return found


def test_the_newest_migration_is_the_one_the_code_asks_for() -> None:
    """`init` looks at the constant, to be quick."""
    config = Config()
    config.set_main_option("script_location", str(creation.MIGRATIONS))
    assert ScriptDirectory.from_config(config).get_current_head() == schema.REVISION


def test_a_database_of_the_first_version_is_brought_up_with_its_rows(ready_url: str) -> None:
    """0002: epochs spent may be a fraction; 0003: indices of the queue; 0004: names, sources."""
    db = storage.Database(ready_url)
    db.registry.add({"study": "s", "phase": "search", "rank": 1, "epochs_spent": 3})
    db.close()
    engine = make_engine(ready_url)
    with engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(creation.MIGRATIONS))
        config.attributes["connection"] = connection
        command.downgrade(config, "0001")
    engine.dispose()
    storage.init(ready_url)
    db = storage.Database(ready_url)
    assert [row["epochs_spent"] for row in db.registry.rows("s")] == [3]
    db.registry.add({"study": "s", "phase": "lr-range", "rank": 1, "epochs_spent": 2.8})
    assert [row["epochs_spent"] for row in db.registry.rows("s")] == [2.8, 3]
    db.aliases.give("s", "loss", "champion", db.registry.rows("s")[1]["id"], "")
    assert db.sources.get(db.sources.put({"s.py": "x = 1"})) == {"s.py": "x = 1"}
    assert db.aliases.holder("s", "champion") == db.registry.rows("s")[1]["id"]
    db.close()


def test_a_database_of_a_newer_version_is_refused(sqlite_url: str) -> None:
    """An old hpo must not write into tables it does not know."""
    storage.init(sqlite_url)
    engine = make_engine(sqlite_url)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {schema.VERSION_TABLE} SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(InputError, match="newer hpo"):
        storage.init(sqlite_url)


def test_optunas_upgrade_and_ours_keep_to_their_own_version_tables(ready_url: str) -> None:
    """Neither alembic history sees the other."""
    stock = _stock(ready_url)
    stock.upgrade()
    assert stock.get_current_version() == stock.get_head_version()
    tables = set(inspect(stock.engine).get_table_names())
    stock.engine.dispose()
    assert {"alembic_version", "hpo_alembic_version", "trials", "hpo_ticket"} <= tables
    storage.Database(ready_url).close()


def test_a_folder_with_odd_characters_holds_a_database(tmp_path: Path) -> None:
    """Braces and percent signs mean something to Optuna and alembic."""
    folder = tmp_path / "50% {x} ü"
    storage.init(f"sqlite:///{folder / 'hpo.db'}")
    storage.Database(f"sqlite:///{folder / 'hpo.db'}").close()
    assert (folder / "hpo.db").exists()
