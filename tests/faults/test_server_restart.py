"""A PostgreSQL server that crashes and comes back in the middle of a run, or does not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from commands import TIMEOUT_S, finish, search_words, start, write

import storage
from storage import Database

pytestmark = pytest.mark.faults

BODY = """
for epoch in range(6):
    time.sleep(0.25)
    yield {"loss": x + epoch}
"""


def prepared(folder: Path, url: str, *words: object) -> list[object]:
    """Write the module, set the database up, and return the words that search with two workers."""
    write(folder, "s", body=BODY)
    storage.init(url)
    return search_words("s", "--workers", 2, "--storage", url, *words)


def wait_for_trials(url: str, n: int) -> None:
    """Wait until a study has begun so many trials."""
    deadline = time.monotonic() + TIMEOUT_S
    db = Database(url)
    while sum(t.trial_number is not None for t in db.tickets.list("s")) < n:
        assert time.monotonic() < deadline, "no trial has begun"
        time.sleep(0.1)
    db.close()


def test_a_server_that_crashes_twice_and_comes_back_costs_no_report(
    tmp_path: Path, own_server: Any
) -> None:
    """C04: with 2 seconds of outage each; no trial is tried again, and nobody is told of it."""
    process = start(tmp_path, *prepared(tmp_path, own_server.url, "--n-trials", 8,
                                        "--pruner", "none"))
    wait_for_trials(own_server.url, 2)
    for _ in range(2):
        own_server.crash()
        time.sleep(2)
        own_server.start()
        time.sleep(1)
    code, output = finish(process)
    assert code == 0, output
    db = Database(own_server.url)
    trials = db.studies.get_all_trials(db.studies.get_study_id_from_name("s"))
    assert [trial.number for trial in trials] == list(range(8))
    for trial in trials:
        assert trial.state.name == "COMPLETE" and "retry_of" not in trial.user_attrs
        assert list(trial.intermediate_values.items()) == [
            (epoch, trial.params["x"] + epoch) for epoch in range(6)]
    assert db.n_epochs("s") == 48
    db.close()


def test_a_server_that_stays_away_ends_the_run_after_the_storage_timeout(
    tmp_path: Path, own_server: Any
) -> None:
    """In one line without a traceback; when it is back, the same command goes on."""
    words = prepared(tmp_path, own_server.url, "--n-trials", 4, "--storage-timeout", 2)
    process = start(tmp_path, *words)
    wait_for_trials(own_server.url, 2)
    own_server.crash()
    began = time.monotonic()
    code, output = finish(process)
    assert time.monotonic() - began < 30 and code != 0
    assert "Traceback" not in output and "storage 'postgresql://" in output, output
    own_server.start()
    code, output = finish(start(tmp_path, *words))
    assert code == 0, output
    db = Database(own_server.url)
    trials = db.studies.get_all_trials(db.studies.get_study_id_from_name("s"))
    assert sum(trial.state.name in ("COMPLETE", "PRUNED") for trial in trials) == 4
    assert not any(trial.state.name == "RUNNING" for trial in trials)
    assert db.tickets.counts("s")["done"] == 4
    db.close()


def test_a_run_keeps_few_sessions_and_none_of_them_in_a_transaction(
    tmp_path: Path, own_server: Any
) -> None:
    """At most two a worker and two for the parent, looked at every 20 ms."""
    import psycopg

    process = start(tmp_path, *prepared(tmp_path, own_server.url, "--n-trials", 6,
                                        "--pruner", "none"))
    most, idle = 0, 0
    query = ("SELECT count(*), count(*) FILTER (WHERE state LIKE 'idle in transaction%' "
             "AND state_change < now() - interval '100 ms') FROM pg_stat_activity "
             "WHERE datname = current_database() AND pid <> pg_backend_pid()")
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        while process.poll() is None:
            row = connection.execute(query).fetchone()
            assert row is not None
            most, idle = max(most, row[0]), max(idle, row[1])
            time.sleep(0.02)
    code, output = finish(process)
    assert code == 0, output
    assert 2 <= most <= 6 and idle == 0
