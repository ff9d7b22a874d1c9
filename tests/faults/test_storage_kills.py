"""Kill -9 of a process that writes, at any moment: what was ended stays, and little else is lost.

HPO_N_KILLS sets the number of kills on each database; by default 10, to keep the suite short.
"""

from __future__ import annotations

import multiprocessing.context
import os
import random
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

import storage
from storage import Database, NewTicket, StudyStorage, Ticket

pytestmark = pytest.mark.faults

N_KILLS = int(os.environ.get("HPO_N_KILLS", "10"))
N_REPORTS = 8
# Of a killed process at most so many seconds of reports are missing; where other tests share the
# cores, its writing thread may be late.
MAY_MISS_S, LATE_S = 0.25, 0.5
SPACE = {"x": FloatDistribution(0.0, 1.0), "kind": CategoricalDistribution(["a", None, 3])}


def write(url: str, told: Connection, seed: int, n_trials: int) -> None:
    """Claim tickets and drive their trials, and tell each thing when it is done."""
    rng = random.Random(seed)
    db = Database(url)
    for _ in range(n_trials):
        claim = db.tickets.claim("s", f"owner {seed}", "host", os.getpid(), 600)
        if claim is None:
            break
        trial_id, number = claim.trial_id, claim.number
        assert trial_id is not None and number is not None
        told.send(("claim", number, None, time.monotonic()))
        params = {"x": rng.random(), "kind": rng.choice(["a", None, 3])}
        for name, kind in SPACE.items():
            db.studies.set_trial_param(trial_id, name, kind.to_internal_repr(params[name]), kind)
        for step in range(N_REPORTS):
            time.sleep(rng.choice((0.0, 0.001, 0.03, 0.1)))
            value = params["x"] + step
            assert db.report(trial_id, "s", number, step, value, {"loss": value})
            told.send(("report", number, (step, value), time.monotonic()))
        value = params["x"]
        assert db.end_trial(claim.ticket.id, f"owner {seed}", trial_id, TrialState.COMPLETE,
                            value, {"n_epochs": N_REPORTS})
        told.send(("end", number, value, time.monotonic()))
    db.close()
    told.send(("done", None, None, time.monotonic()))


@contextmanager
def writer(
    processes: multiprocessing.context.ForkServerContext, url: str, seed: int, n_trials: int = 999
) -> Iterator[tuple[Any, Connection]]:
    """Start a process that writes, and give it with what it tells."""
    ours, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=write, args=(url, theirs, seed, n_trials))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


def heard(told: Connection) -> list[tuple[str, Any, Any, float]]:
    """Return what was told before the other end closed."""
    found = []
    try:
        while True:
            found.append(told.recv())
    except EOFError:
        return found


def check_whole(trial: FrozenTrial, ticket: Ticket, epochs: list[dict[str, float]]) -> None:
    """Assert that an ended trial has all that it was given."""
    x = trial.params["x"]
    values = [x + step for step in range(N_REPORTS)]
    assert list(trial.params) == list(SPACE) and trial.values == [x]
    assert list(trial.intermediate_values.items()) == list(enumerate(values))
    assert trial.user_attrs == {"n_epochs": N_REPORTS}
    assert epochs == [{"loss": value} for value in values]
    assert (ticket.state, ticket.trial_number) == ("done", trial.number)


def check(url: str, said: list[tuple[str, Any, Any, float]], killed_at: float) -> float:
    """Assert that the database holds what was told; return the age of the oldest lost report."""
    if url.startswith("sqlite"):
        file = sqlite3.connect(url.removeprefix("sqlite:///"))
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        file.close()
    db = Database(url)
    study_id = db.studies.get_study_id_from_name("s")
    trials = db.studies.get_all_trials(study_id)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    tickets = {t.trial_number: t for t in db.tickets.list("s") if t.trial_number is not None}
    rows = db.epochs("s")
    still = {number for what, number, *_ in said if what == "claim"}
    oldest = 0.0
    for trial in trials:
        epochs = [row.metrics for row in rows if row.trial_number == trial.number]
        if trial.state == TrialState.COMPLETE:
            check_whole(trial, tickets[trial.number], epochs)
            still.add(trial.number)
        elif trial.number in still:
            assert trial.state == TrialState.RUNNING
            assert tickets[trial.number].state == "running"
            assert len(epochs) == len(trial.intermediate_values)
    for what, number, data, at in said:
        if what == "claim":
            assert tickets[number].state in ("running", "done")
        elif what == "end":
            assert (trials[number].state, trials[number].values) == (TrialState.COMPLETE, [data])
        elif what == "report" and data[0] not in trials[number].intermediate_values:
            oldest = max(oldest, killed_at - at)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    plain = url.replace("postgresql://", "postgresql+psycopg://")
    stock = optuna.storages.RDBStorage(plain)
    theirs = optuna.load_study(study_name="s", storage=stock).trials
    assert [theirs[number] for number in still] == [trials[number] for number in still]
    stock.remove_session()
    stock.engine.dispose()
    db.close()
    return oldest


def close_lost(url: str) -> int:
    """End the trials of the killed, as a reaper does; return how many there were."""
    db = Database(url)
    lost = [ticket for ticket in db.tickets.running("s") if ticket.owner != "owner 0"]
    for ticket in lost:
        assert ticket.trial_id is not None
        assert db.end_trial(ticket.id, ticket.owner, ticket.trial_id, TrialState.FAIL, None, {},
                            back=("worker lost", None, True))
    db.close()
    return len(lost)


def test_a_killed_writer_loses_at_most_a_moment_of_reports_and_no_ended_trial(
    ready_url: str, processes: multiprocessing.context.ForkServerContext,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A second process, which nobody kills, writes to the same study all the time."""
    db = Database(ready_url)
    db.studies.create_new_study([StudyDirection.MINIMIZE], "s")
    db.tickets.write("s", "s", "trial", [NewTicket(idx) for idx in range(60 * N_KILLS + 100)])
    db.close()
    rng = random.Random(1)
    oldest, n_ended, n_lost = 0.0, 0, 0
    with writer(processes, ready_url, 0) as (bystander, aside):
        for kill in range(1, N_KILLS + 1):
            with writer(processes, ready_url, kill) as (victim, told):
                assert told.poll(60)
                time.sleep(rng.uniform(0.0, 0.8))
                killed_at = time.monotonic()
                os.kill(victim.pid, signal.SIGKILL)
                said = heard(told)
            # Whatever the killed one has sent to the server is done by then, or never.
            time.sleep(0.05)
            oldest = max(oldest, check(ready_url, said, killed_at))
            n_ended += sum(what == "end" for what, *_ in said)
            n_lost += close_lost(ready_url)
        assert bystander.is_alive()
        os.kill(bystander.pid, signal.SIGKILL)
        said = heard(aside)
    assert len([1 for what, *_ in said if what == "end"]) > N_KILLS / 4
    check(ready_url, said, time.monotonic())
    with capsys.disabled():
        print(f"\n{ready_url.split(':')[0]}: {N_KILLS} kills, {n_lost} trials cut off, {n_ended} "
              f"ended, the oldest lost report {1000 * oldest:.0f} ms old", end=" ")
    assert oldest <= MAY_MISS_S + LATE_S


ENQUEUED = 200


def take_waiting(url: str, told: Connection) -> None:
    """Ask for trials until none waits, and tell which they were."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    opened = storage.open(url)
    study = optuna.load_study(study_name="s", storage=opened)
    told.send("ready")
    told.recv()
    taken: list[int] = []
    while True:
        trial = study.ask()
        if "fixed_params" not in opened.get_trial_system_attrs(trial._trial_id):
            # None waited; this one is new, and no part of the question.
            study.tell(trial, state=TrialState.FAIL)
            break
        taken.append(trial.number)
        study.tell(trial, trial.suggest_float("x", 0, 1))
    opened.close()
    told.send(taken)


def test_enqueued_trials_are_taken_once_by_eight_processes(
    ready_url: str, processes: multiprocessing.context.ForkServerContext
) -> None:
    """Stock Optuna on SQLite gives 35 of 200 to two processes."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    opened = StudyStorage(ready_url)
    study = optuna.create_study(study_name="s", storage=opened)
    for k in range(ENQUEUED):
        study.enqueue_trial({"x": k / ENQUEUED})
    started = []
    for _ in range(8):
        ours, theirs = processes.Pipe()
        process = processes.Process(target=take_waiting, args=(ready_url, theirs))
        process.start()
        started.append((process, ours))
    for _, told in started:
        assert told.recv() == "ready"
    for _, told in started:
        told.send("go")
    taken = [number for _, told in started for number in told.recv()]
    for process, _ in started:
        process.join(60)
        assert process.exitcode == 0
    assert sorted(taken) == list(range(ENQUEUED))
    trials = opened.get_all_trials(study._study_id)
    done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    assert [trial.params["x"] for trial in done] == [k / ENQUEUED for k in range(ENQUEUED)]
    opened.close()
