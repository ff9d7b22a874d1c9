"""URLs, network folders, names, pragmas, and what happens when the database goes away."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from optuna.study import StudyDirection
from optuna.trial import TrialState
from sqlalchemy import text

import storage
from hpo.errors import InputError, StorageError
from storage.engine import make_engine, mask
from storage.names import validate_name
from storage.network import refuse_network_path

TABLE = "nas:/x /mnt/nas nfs4 rw 0 0\n/dev/sda1 / ext4 rw 0 0\n"
LOCAL = TABLE + "/dev/sdb1 /mnt/nas/local ext4\n"


def test_a_path_on_nfs_is_refused_with_its_mount_point_and_a_way_out() -> None:
    """C03.2."""
    with pytest.raises(InputError) as caught:
        refuse_network_path("/mnt/nas/a/b.db", TABLE)
    assert all(word in str(caught.value) for word in ("/mnt/nas", "nfs4", "postgresql"))


@pytest.mark.parametrize("path", ["/home/u/b.db", "/mnt/nasty/b.db"])
def test_a_local_path_is_allowed(path: str) -> None:
    """C03.2."""
    refuse_network_path(path, TABLE)


def test_a_link_that_leads_to_nfs_is_refused(tmp_path: Path) -> None:
    """C03.2."""
    (tmp_path / "link").symlink_to("/mnt/nas")
    with pytest.raises(InputError, match="nfs4"):
        refuse_network_path(tmp_path / "link" / "b.db", TABLE)


def test_the_longest_mount_point_wins() -> None:
    """C03.3."""
    refuse_network_path("/mnt/nas/local/b.db", LOCAL)
    with pytest.raises(InputError):
        refuse_network_path("/mnt/nas/b.db", LOCAL)


def test_a_mount_point_with_a_blank_is_understood() -> None:
    """The table writes a blank as an octal number."""
    with pytest.raises(InputError, match="/mnt/my nas"):
        refuse_network_path("/mnt/my nas/b.db", "h:/ /mnt/my\\040nas nfs rw 0 0\n/ / ext4")


def test_this_machines_own_mount_table_is_read(tmp_path: Path) -> None:
    """C03: the real table lets a temporary folder pass."""
    refuse_network_path(tmp_path / "b.db")


def test_a_new_sqlite_file_has_a_write_ahead_log(sqlite_url: str) -> None:
    """C03.4."""
    storage.init(sqlite_url)
    with sqlite3.connect(sqlite_url.removeprefix("sqlite:///")) as connection:
        mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
    connection.close()
    assert mode == "wal"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("hpo.db", "is not a URL"),
        ("mysql://u:secret@h/d", "'mysql' is not supported"),
        ("postgresql+psycopg2://u:secret@h/d", "'postgresql+psycopg2' is not supported"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
    ],
)
def test_a_url_that_cannot_serve_is_refused_without_its_password(url: str, words: str) -> None:
    """One clear line, and no secret in it."""
    with pytest.raises(InputError, match=words.replace("+", r"\+")) as caught:
        make_engine(url)
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["postgres://u:p@h/d", "postgresql://u:p@h/d"])
def test_a_plain_postgres_url_uses_psycopg_3(url: str) -> None:
    """C04, note."""
    engine = make_engine(url)
    assert engine.dialect.driver == "psycopg"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:secret@h/d",
        "postgresql://u:se:cr@et@h/d",
        "postgresql://:secret@h/d",
        "postgresql://h/d?user=u&password=secret",
    ],
)
def test_a_password_never_shows(url: str) -> None:
    """Errors and logs carry masked URLs."""
    assert "***" in mask(url) and "secret" not in mask(url) and "cr@et" not in mask(url)


@pytest.mark.parametrize("name", ["naive-学習", "a b'\"", "x" * 200, "cifar-2.1_b"])
def test_a_name_in_any_script_is_accepted(name: str) -> None:
    """C08."""
    assert validate_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "   ", "x" * 201, "x" * 600, "a\nb", "a\0b", "x/y", "../../x", "..", "a\\b"]
)
def test_a_name_that_breaks_folders_or_databases_is_refused(name: str) -> None:
    """C08."""
    with pytest.raises(InputError, match="1 to 200 printable characters") as caught:
        validate_name(name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    """No traceback for a wrong file."""
    (tmp_path / "hpo.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(InputError, match="is not a SQLite database"):
        storage.init(f"sqlite:///{tmp_path / 'hpo.db'}")


def test_a_missing_file_is_not_made_by_reading(sqlite_url: str) -> None:
    """`hpo status` in a wrong folder leaves nothing behind."""
    with pytest.raises(InputError, match="no such file"):
        storage.Database(sqlite_url)
    assert not Path(sqlite_url.removeprefix("sqlite:///")).exists()


def test_a_database_of_stock_optuna_is_refused_until_it_is_set_up(storage_url: str) -> None:
    """The message names the command."""
    from optuna.storages import RDBStorage

    stock = RDBStorage(storage_url.replace("postgresql://", "postgresql+psycopg://"))
    study_id = stock.create_new_study([StudyDirection.MINIMIZE], "theirs")
    stock.engine.dispose()
    with pytest.raises(InputError, match="`hpo init"):
        storage.Database(storage_url)
    storage.init(storage_url)
    opened = storage.Database(storage_url)
    assert opened.studies.get_study_id_from_name("theirs") == study_id
    opened.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    """Before anything is spent."""
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="cannot be written"):
        storage.init(f"sqlite:///{tmp_path / 'hpo.db'}")


def test_a_server_that_is_not_there_is_an_error_within_the_time(tmp_path: Path) -> None:
    """The wait has an end, and the message no password."""
    begun = time.monotonic()
    with pytest.raises(StorageError) as caught:
        storage.init(f"postgresql://u:secret@/d?host={tmp_path}", timeout_s=1)
    assert time.monotonic() - begun < 10 and "secret" not in str(caught.value)


def test_a_database_that_does_not_exist_is_told_at_once(postgres_url: str) -> None:
    """What waiting does not repair is not waited for."""
    begun = time.monotonic()
    with pytest.raises(StorageError, match="does not exist"):
        storage.init(postgres_url.replace("/t_", "/no_"))
    assert time.monotonic() - begun < 10


def test_a_held_write_lock_delays_a_report_and_does_not_lose_it(sqlite_url: str) -> None:
    """Another program holds SQLite's lock for a while."""
    storage.init(sqlite_url)
    db = storage.Database(sqlite_url)
    study_id = db.studies.create_new_study([StudyDirection.MINIMIZE], "s")
    trial_id = db.studies.create_new_trial(study_id)
    blocker = sqlite3.connect(
        sqlite_url.removeprefix("sqlite:///"), isolation_level=None, check_same_thread=False
    )
    blocker.execute("BEGIN IMMEDIATE")
    # Who trains does not wait for the lock, which nobody gives back before this returns.
    assert db.report(trial_id, "s", 0, 0, 0.5, {"a": 0.5})
    timer = threading.Timer(0.5, blocker.execute, ["COMMIT"])
    timer.start()
    assert len(db.epochs("s")) == 1
    timer.join()
    blocker.close()
    db.close()


def test_a_write_lock_that_nobody_gives_back_is_waited_for_until_the_timeout(
    sqlite_url: str,
) -> None:
    """And no longer, however long SQLite's own wait is."""
    storage.init(sqlite_url)
    blocker = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    db = storage.Database(sqlite_url, timeout_s=1)
    begun = time.monotonic()
    with pytest.raises(StorageError, match="database is locked"):
        db.tickets.write("s", "s", "trial", [storage.NewTicket(0)])
    assert 0.9 < time.monotonic() - begun < 4
    blocker.close()
    db.close()


def test_who_waits_is_told_before_each_wait_and_may_give_up(tmp_path: Path) -> None:
    told: list[StorageError | InputError] = []

    def waits(error: StorageError | InputError) -> None:
        told.append(error)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        storage.init(f"postgresql://u:secret@/d?host={tmp_path}", waits=waits)
    assert all("No such file or directory" in str(error) for error in told), told


def test_only_sessions_of_ours_are_ended_for_a_lock_that_they_keep(postgres_url: str) -> None:
    """One that somebody else left open is waited for; one of ours belongs to a halted process."""
    import psycopg

    storage.init(postgres_url)
    db = storage.Database(postgres_url, timeout_s=4)
    tickets = [storage.NewTicket(0)]
    with psycopg.connect(postgres_url, application_name="psql") as other:
        other.execute("LOCK TABLE hpo_ticket")
        with pytest.raises(StorageError, match="lock timeout"):
            db.tickets.write("s", "s", "trial", tickets)
    with psycopg.connect(postgres_url, application_name="hpo") as halted:
        halted.execute("LOCK TABLE hpo_ticket")
        db.tickets.write("s", "s", "trial", tickets)
        with pytest.raises(psycopg.OperationalError, match="terminat"):
            halted.execute("SELECT 1")
    db.close()


def test_a_peer_that_vanished_is_noticed_in_half_a_minute_unless_the_url_differs(
    postgres_url: str,
) -> None:
    """The systems' own defaults are two hours."""
    for more, idle_s in ("", "10"), ("keepalives_idle=77", "77"):
        engine = make_engine(f"{postgres_url}{'&' if '?' in postgres_url else '?'}{more}")
        with engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            params = driver.info.get_parameters()
        engine.dispose()
        assert params["application_name"] == "hpo" and params["keepalives_idle"] == idle_s
        assert params["keepalives_interval"] == "5" and params["keepalives_count"] == "4"
        assert params["tcp_user_timeout"] == "30000"


def _drop_other_sessions(url: str) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def test_sessions_dropped_between_reports_cost_no_report(postgres_url: str) -> None:
    """C04: also between a claim and the first report, and before the end."""
    storage.init(postgres_url)
    db = storage.Database(postgres_url)
    db.studies.create_new_study([StudyDirection.MAXIMIZE], "s")
    db.tickets.write("s", "s", "trial", [storage.NewTicket(0)])
    claim = db.tickets.claim("s", "me", "h", 1, 30)
    assert claim is not None and claim.trial_id is not None
    for epoch in range(4):
        _drop_other_sessions(postgres_url)
        assert db.report(claim.trial_id, "s", 0, epoch, 0.1 * epoch, {"a": 1.0})
        db.studies.flush()
    _drop_other_sessions(postgres_url)
    assert db.end_trial(claim.ticket.id, "me", claim.trial_id, TrialState.COMPLETE, 0.3, {})
    trial = db.studies.get_all_trials(db.studies.get_study_id_from_name("s"))[0]
    assert list(trial.intermediate_values) == [0, 1, 2, 3] and trial.state == TrialState.COMPLETE
    db.close()


def test_sessions_dropped_during_transactions_cost_no_report(postgres_url: str) -> None:
    """C04: an assassin ends all sessions ten times a second."""
    storage.init(postgres_url)
    db = storage.Database(postgres_url)
    study_id = db.studies.create_new_study([StudyDirection.MAXIMIZE], "s")
    db.tickets.write("s", "s", "trial", [storage.NewTicket(idx) for idx in range(5)])
    stop = threading.Event()

    def assassinate() -> None:
        while not stop.wait(0.08):
            _drop_other_sessions(postgres_url)

    thread = threading.Thread(target=assassinate)
    thread.start()
    try:
        while claim := db.tickets.claim("s", "me", "h", 1, 300):
            assert claim.trial_id is not None and claim.number is not None
            for epoch in range(10):
                assert db.report(claim.trial_id, "s", claim.number, epoch, 0.5, {"a": 0.5})
                db.studies.flush()
            assert db.end_trial(
                claim.ticket.id, "me", claim.trial_id, TrialState.COMPLETE, 0.5, {"x": 1}
            )
    finally:
        stop.set()
        thread.join()
    trials = db.studies.get_all_trials(study_id)
    assert [trial.number for trial in trials] == list(range(5))
    assert all(list(trial.intermediate_values) == list(range(10)) for trial in trials)
    assert db.n_epochs("s") == 50 and db.tickets.counts("s")["done"] == 5
    db.close()


def test_a_session_that_read_is_not_left_in_a_transaction(postgres_url: str) -> None:
    """An open transaction would keep the server from cleaning up."""
    storage.init(postgres_url)
    db = storage.Database(postgres_url)
    db.tickets.counts("s")
    db.tickets.claim("s", "me", "h", 1, 30)
    watcher = make_engine(postgres_url)
    with watcher.connect() as connection:
        states = connection.execute(
            text(
                "SELECT state FROM pg_stat_activity WHERE datname = current_database() "
                "AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )
        ).scalars()
        found = list(states)
    assert found and set(found) == {"idle"} and len(found) <= 2
    watcher.dispose()
    db.close()
