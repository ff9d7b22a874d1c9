"""`hpo status`: where a study stands, why trials ended early, and who is alive, from any host."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import study_samples as samples
from commands import (
    TIMEOUT_S,
    finish,
    hpo,
    search,
    search_words,
    start,
    strict_json,
    trials,
    url,
    write,
    write_text,
)

import storage
from hpo import alive
from hpo.queue import LEASE_S, owner_token
from hpo.results import Phase
from hpo.status import ended_early
from storage import Database, NewTicket

SLOW = 'for i in range(200):\n    time.sleep(0.1)\n    yield {"loss": x + i}'


def asked(folder: Path, *words: object) -> Any:
    return strict_json(hpo(folder, "status", "--study", "s", *words, "--json").stdout)


def until(folder: Path, wanted, *words: object) -> Any:
    """Return the first answer that is as wanted."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            said = asked(folder, *words)
        except AssertionError:
            # The run has not made the study yet.
            continue
        if wanted(said):
            return said
    raise AssertionError("status never said so")


def queued(db: Database, n: int = 1) -> None:
    """Set up the study `s` with n search tickets."""
    from hpo.studies import ensure_study

    db.runs.save_study("s", module="s", metric="loss", direction="minimize", epochs=3,
                       settings={}, space={}, data={})
    ensure_study(db, "s", "minimize", "loss")
    db.tickets.write("s", "s", "trial", [NewTicket(i) for i in range(n)])


def test_who_is_at_work_is_seen_from_the_database_alone_and_is_lost_once_killed(
    tmp_path: Path
) -> None:
    """From another folder with --storage alone, as on another host."""
    write(tmp_path, "s", body=SLOW, epochs=200)
    other = tmp_path / "elsewhere"
    other.mkdir()
    running = start(tmp_path, *search_words("s", "--n-trials", 3))
    try:
        at = ("--storage", url(tmp_path))
        said = until(other, lambda s: any(w["epoch"] for w in s["workers"]), *at)
        [worker] = said["workers"]
        assert (worker["state"], worker["phase"], worker["trial"]) == ("at work", "search", 0)
        assert (worker["host"], worker["device"]) == (socket.gethostname(), "cpu")
        assert worker["epoch"] >= 1 and 0 <= worker["last_sign_s"] < LEASE_S
        text = hpo(other, "status", "--study", "s", *at).stdout
        assert "1 RUNNING, 2 waiting" in text and "1 worker is alive" in text
        row = next(line for line in text.splitlines() if "search trial 0" in line)
        assert row.split()[:3] == [socket.gethostname(), str(worker["pid"]), "cpu"]
        assert " of 200 " in row
        running.kill()
        subprocess.run(["kill", "-9", str(worker["pid"])], check=True)
        said = until(other, lambda s: s["workers"][0]["state"] == "lost", *at)
        text = hpo(other, "status", "--study", "s", *at).stdout
        assert "no worker is alive; `hpo run --study s` goes on with the 2 waiting" in text
        assert f"lost: search trial 0 ({socket.gethostname()} pid {worker['pid']}), its process " \
               f"is gone: closed at the next run" in text
    finally:
        running.kill()
        finish(running)


def test_a_study_at_rest_says_that_nobody_is_alive(tmp_path: Path) -> None:
    write(tmp_path, "s")
    search(tmp_path, "s", "--n-trials", 2)
    assert hpo(tmp_path, "status", "--study", "s").stdout.splitlines()[-1] == "no worker is alive"
    assert asked(tmp_path)["workers"] == []


def test_trials_that_ended_early_are_counted_by_the_kind_of_their_reason(tmp_path: Path) -> None:
    write(tmp_path, "s", body="""
        k = len(list(HERE.glob("seen-*")))
        (HERE / f"seen-{k}").touch()
        if k in (1, 2):
            raise ValueError(f"x is {x}")
        if k == 3:
            yield {"loss": math.nan}
        yield {"loss": x}
        if k == 4:
            yield {"loss": math.inf}
    """, epochs=2)
    search(tmp_path, "s", "--n-trials", 6, "--max-failures", 0, "--pruner", "none")
    reasons = asked(tmp_path)["phases"]["search"]["reasons"]
    found = trials(tmp_path, "s")
    assert [(r["state"], r["kind"], r["n"], r["epochs"], r["last_trial"]) for r in reasons] == [
        ("FAIL", "error: ValueError", 2, [], 2), ("PRUNED", "diverged", 2, [0, 1], 4)]
    assert reasons[0]["reason"] == found[2].user_attrs["reason"]
    lines = hpo(tmp_path, "status", "--study", "s").stdout.splitlines()
    assert lines[1].split(";")[0] == "  search    2 COMPLETE, 2 FAIL, 2 PRUNED"
    assert lines[2:4] == [
        f"            2 x FAIL error: ValueError, last trial 2: x is {found[2].params['x']}",
        "            2 x PRUNED diverged, at epochs 0 to 1"]


def test_reasons_of_one_kind_are_one_line_whatever_their_details() -> None:
    texts = ["worker lost: its process was killed by signal 9", "median at epoch 3",
             "worker lost: its process is gone", "oom: CUDA out of memory", "median at epoch 1"]
    states = ["FAIL", "PRUNED", "FAIL", "FAIL", "PRUNED"]
    phase = Phase("search", "s", tuple(
        samples.Trial(i, state, reason=text)
        for i, (state, text) in enumerate(zip(states, texts, strict=True))))
    assert [(e.state, e.kind, e.n, e.epochs) for e in ended_early(phase)] == [
        ("FAIL", "worker lost", 2, ()), ("PRUNED", "median", 2, (1, 3)), ("FAIL", "oom", 1, ())]


def test_a_lease_that_has_run_out_is_lost_and_one_that_runs_is_not(db: Database) -> None:
    """By the database's clock, on SQLite and PostgreSQL, also for workers of other hosts."""
    queued(db, 2)
    db.runs.beat("far|1|1", "s", "far", 1, "gpu 3")
    db.tickets.claim("s", "far|1|1", "far", 1, LEASE_S)
    db.tickets.claim("s", "gone|2|2", "gone", 2, -5.0)
    far, gone = alive.workers(db, "s")
    assert (far.state, far.device, far.what) == ("at work", "gpu 3", "search trial 0")
    assert 0 <= far.last_sign_s < 5 and far.epoch is None
    assert (gone.state, gone.device, gone.host) == ("lost", None, "gone")
    assert LEASE_S + 4 < gone.last_sign_s < LEASE_S + 30


def test_the_last_epoch_of_a_running_trial_is_told(db: Database) -> None:
    queued(db)
    claim = db.tickets.claim("s", "far|1|1", "far", 1, LEASE_S)
    assert claim is not None and claim.trial_id is not None
    for epoch in range(3):
        db.report(claim.trial_id, "s", 0, epoch, 1.0, {"loss": 1.0})
    [worker] = alive.workers(db, "s")
    assert worker.epoch == 2 and worker.epoch_at is not None


def test_a_ticket_that_is_taken_ahead_is_no_second_worker(db: Database) -> None:
    queued(db, 2)
    for _ in range(2):
        db.tickets.claim("s", "far|1|1", "far", 1, LEASE_S)
    [worker] = alive.workers(db, "s")
    assert (worker.trial, worker.n_ahead) == (0, 1)


def test_an_idle_worker_is_alive_until_it_ends_or_falls_silent(db: Database) -> None:
    queued(db)
    db.runs.beat("far|1|1", "s", "far", 1, "cpu")
    db.runs.beat("gone|2|2", "s", "gone", 2, "cpu")
    db.runs.left("gone|2|2")
    # Its process on this host does not live, whatever its row says.
    db.runs.beat(f"{owner_token().split('|')[0]}|{2**22 + 1}|5", "s", "here", 2**22 + 1, "cpu")
    [worker] = alive.workers(db, "s")
    assert (worker.host, worker.state, worker.what) == ("far", "idle", "")


def test_a_worker_that_waits_for_a_run_is_shown_as_idle(tmp_path: Path) -> None:
    write(tmp_path, "s")
    search(tmp_path, "s", "--n-trials", 1)
    waiting = start(tmp_path, "worker", "--study", "s", "--workers", 1)
    try:
        [worker] = until(tmp_path, lambda s: s["workers"])["workers"]
        assert (worker["state"], worker["trial"]) == ("idle", None)
        row = hpo(tmp_path, "status", "--study", "s").stdout.splitlines()[-1]
        assert row.split()[2:4] == ["cpu", "idle"]
    finally:
        waiting.terminate()
        finish(waiting)
    assert asked(tmp_path)["workers"] == []


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_gets_no_line_wider_than_it_is(
    tmp_path: Path, width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    from hpo.status import status

    at = f"sqlite:///{tmp_path / 'hpo.db'}"
    storage.init(at)
    db = Database(at)
    queued(db, 2)
    db.runs.beat("a|1|1", "s", "node-with-a-long-name.cluster.example.com", 1, "gpu 0")
    db.tickets.claim("s", "a|1|1", "node-with-a-long-name.cluster.example.com", 123456, LEASE_S)
    db.close()
    console = Console(width=width, force_terminal=True, no_color=True)
    assert status("s", tmp_path, at, console, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert "search trial 0" in lines[-1] and "ago" in lines[-1]
    assert ("example.com" in lines[-1]) == (width == 120)


def test_the_module_of_a_named_study_is_in_the_command_that_goes_on(tmp_path: Path) -> None:
    write_text(tmp_path, "m", """
        from hpo import Float, StudySpec
        def objective(run, *, x):
            yield {"loss": x}
        STUDY = StudySpec(space={"x": Float(0, 1)}, objective=objective, minimize="loss", epochs=1)
        """)
    search(tmp_path, "m", "--n-trials", 1, "--name", "second try")
    db = Database(url(tmp_path))
    db.tickets.write("second try", "second try", "trial", [NewTicket(7)])
    db.close()
    text = hpo(tmp_path, "status", "--study", "second try").stdout
    assert "`hpo run --study m --name 'second try'` goes on with the 1 waiting" in text
