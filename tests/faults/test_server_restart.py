"""A PostgreSQL server that crashes and comes back in the middle of a run, or does not."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from commands import TIMEOUT_S, finish, search_words, start, write

import storage
from storage import Database
from storage.link import Link, alone
from storage.schema import marks, tickets

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


def test_a_run_that_begins_while_the_server_is_away_waits_for_it(
    tmp_path: Path, own_server: Any
) -> None:
    """It says once what it waits for, and a signal ends the wait."""
    words = prepared(tmp_path, own_server.url, "--n-trials", 2)
    own_server.crash()
    stopped, going = start(tmp_path, *words), start(tmp_path, *words)
    lines = [process.stdout.readline() for process in (stopped, going) if process.stdout]
    assert all("it has 60 s to answer (--storage-timeout)" in line for line in lines), lines
    stopped.send_signal(signal.SIGINT)
    code, output = finish(stopped)
    assert code == 130 and "stopped by a signal" in output, output
    own_server.start()
    code, output = finish(going)
    assert code == 0 and "to answer" not in output, output
    db = Database(own_server.url)
    assert db.tickets.counts("s")["done"] == 2
    db.close()


def test_a_process_that_was_halted_in_a_transaction_holds_nobody_up(
    tmp_path: Path, own_server: Any
) -> None:
    """Its session is ended, and it begins again where it goes on."""
    storage.init(own_server.url)
    processes = multiprocessing.get_context("forkserver")
    ours, theirs = processes.Pipe(duplex=False)
    halted = processes.Process(target=hold_tickets, args=(own_server.url, theirs))
    halted.start()
    assert ours.recv() == "inside"
    assert halted.pid is not None
    os.kill(halted.pid, signal.SIGSTOP)
    try:
        db = Database(own_server.url, timeout_s=20)
        began = time.monotonic()
        db.tickets.write("s", "s", "trial", [storage.NewTicket(0)])
        assert time.monotonic() - began < 20
    finally:
        os.kill(halted.pid, signal.SIGCONT)
    assert ours.recv() == "done"
    halted.join(60)
    assert halted.exitcode == 0
    assert [ticket.idx for ticket in db.tickets.list("s")] == [0]
    db.close()


def hold_tickets(url: str, told: Connection) -> None:
    """Lock the tickets in a transaction that lasts as long as this process is halted."""
    link = Link(url)
    first = True

    def work(connection: sqlalchemy.Connection) -> None:
        nonlocal first
        alone(connection, tickets)
        if first:
            first = False
            told.send("inside")
            # Halted in here, it finds its session gone when it wakes.
            time.sleep(1)
        connection.execute(sqlalchemy.insert(marks).values(name="woke", value=1))

    link.write(work)
    link.close()
    told.send("done")


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
