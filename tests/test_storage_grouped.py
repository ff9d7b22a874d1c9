"""Grouped writes: soon, together, before the trial's end, and by nobody but their owner."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.study import StudyDirection
from optuna.trial import TrialState
from sqlalchemy import event

import storage
from hpo.errors import StorageError
from hpo.pruners import RunningMedianPruner
from hpo.tpe import BoundedTPESampler
from storage import Database, StudyStorage
from storage.memory import StudyMemory

UNIT = FloatDistribution(0.0, 1.0)


class Count:
    """The statements and commits of a database from now on."""

    def __init__(self, opened: StudyStorage) -> None:
        self.statements: list[str] = []
        self.n_commits = 0
        engine = opened._link.engine
        event.listen(engine, "before_cursor_execute", self._statement)
        event.listen(engine, "commit", self._commit)

    def _statement(self, _c: Any, _k: Any, statement: str, *_: Any) -> None:
        self.statements.append(statement)

    def _commit(self, _connection: Any) -> None:
        self.n_commits += 1


def until(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait until something is true."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def running(opened: StudyStorage, name: str = "s") -> tuple[int, int]:
    """Return the ids of a new study and of a trial of it."""
    study_id = opened.create_new_study([StudyDirection.MAXIMIZE], name)
    return study_id, opened.create_new_trial(study_id)


def test_what_a_trial_gathers_is_there_soon_without_being_asked(
    db: Database, ready_url: str
) -> None:
    """Params, reports, attributes and epochs, while the thread that trains is busy."""
    _, trial_id = running(db.studies)
    db.studies.set_trial_param(trial_id, "x", 0.5, UNIT)
    db.studies.set_trial_user_attr(trial_id, "a", [1])
    db.studies.set_trial_system_attr(trial_id, "b", {"c": None})
    for epoch in range(3):
        assert db.report(trial_id, "s", 0, epoch, epoch / 3, {"loss": 0.1})
    other = Database(ready_url)
    # The first param of its name is there at once: nobody may take another kind for it.
    assert other.studies.get_trial(trial_id).params == {"x": 0.5}
    began = time.monotonic()
    assert until(lambda: other.n_epochs("s") == 3)
    assert time.monotonic() - began < 5
    trial = other.studies.get_trial(trial_id)
    assert trial == db.studies.get_trial(trial_id)
    assert trial.params == {"x": 0.5} and list(trial.intermediate_values.values())[2] == 2 / 3
    other.close()


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_short_trial_costs_two_commits_and_a_dozen_statements(
    ready_url: str, sampler: str
) -> None:
    """Asked, drawn, reported, questioned and told, whatever the study holds."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    opened = StudyStorage(ready_url)
    kind = optuna.samplers.RandomSampler if sampler == "random" else BoundedTPESampler
    study = optuna.create_study(storage=opened, study_name="s", sampler=kind(seed=0),
                                pruner=RunningMedianPruner())

    def one_trial() -> None:
        trial = study.ask({f"x{i}": UNIT for i in range(6)})
        for step in range(10):
            trial.report(0.5, step)
            trial.should_prune()
        study.tell(trial, 0.5)

    for _ in range(15):
        one_trial()
    count = Count(opened)
    one_trial()
    assert count.n_commits == 2 and len(count.statements) <= 12
    opened.close()


def test_trials_that_a_process_has_ended_itself_are_not_read_again(ready_url: str) -> None:
    """And are equal to what a fresh process reads, to the last bit."""
    opened = StudyStorage(ready_url)
    study = optuna.create_study(storage=opened, study_name="s")
    study.get_trials()
    for k in range(12):
        trial = study.ask({"x": UNIT, "kind": CategoricalDistribution(["a", None, 3])})
        trial.set_user_attr("where", {"k": k, "t": (1, 2)})
        for step in range(k % 4):
            trial.report([0.1 + 0.2, float("nan"), float("inf"), -1e-300][step], step)
        if k % 5 == 4:
            study.tell(trial, state=TrialState.PRUNED)
        elif k % 5 == 3:
            study.tell(trial, state=TrialState.FAIL)
        else:
            study.tell(trial, 1 / 3 * k)
    count = Count(opened)
    ours = study.get_trials(deepcopy=False)
    assert len(count.statements) == 1
    fresh = StudyStorage(ready_url)
    theirs = fresh.get_all_trials(study._study_id, deepcopy=False)
    assert [repr(trial) for trial in ours] == [repr(trial) for trial in theirs]
    assert len(ours) == 12
    opened.close()
    fresh.close()


def test_a_trial_that_others_wrote_to_is_read_after_its_end(ready_url: str) -> None:
    """As optuna-dashboard does with a note on a running trial."""
    opened, other = StudyStorage(ready_url), StudyStorage(ready_url)
    study_id, trial_id = running(opened)
    opened.get_all_trials(study_id)
    other.set_trial_user_attr(trial_id, "note", "look at this")
    opened.set_trial_user_attr(trial_id, "mine", 1)
    opened.set_trial_state_values(trial_id, TrialState.COMPLETE, [0.5])
    assert opened.get_trial(trial_id).user_attrs == {"note": "look at this", "mine": 1}
    assert opened.get_all_trials(study_id)[0].user_attrs == {"note": "look at this", "mine": 1}
    opened.close()
    other.close()


def test_late_reports_of_a_trial_that_others_ended_are_refused(ready_url: str) -> None:
    """Its end stays as it is, and its owner is told at the next report or two."""
    db, other = Database(ready_url), Database(ready_url)
    _, trial_id = running(db.studies)
    assert db.report(trial_id, "s", 0, 0, 0.5, {"a": 0.5})
    db.studies.flush()
    other.studies.set_trial_state_values(trial_id, TrialState.FAIL)
    assert db.report(trial_id, "s", 0, 1, 0.6, {"a": 0.6}), "nobody can know it yet"
    with pytest.raises(UpdateFinishedTrialError):
        db.studies.flush(trial_id)
    assert not db.report(trial_id, "s", 0, 2, 0.7, {"a": 0.7})
    with pytest.raises(UpdateFinishedTrialError):
        db.studies.set_trial_user_attr(trial_id, "a", 1)
    assert other.studies.get_trial(trial_id).intermediate_values == {0: 0.5}
    assert other.n_epochs("s") == 1
    db.close()
    other.close()


def test_a_lease_is_renewed_as_long_as_its_ticket_is_open(db: Database, ready_url: str) -> None:
    """Without a report, by the thread that writes; with them, in their own transactions."""
    db.studies.create_new_study([StudyDirection.MAXIMIZE], "s")
    db.tickets.write("s", "s", "trial", [storage.NewTicket(0)])
    claim = db.tickets.claim("s", "me", "h", 1, 0.6)
    assert claim is not None and claim.trial_id is not None
    db.studies.keep_lease(claim.ticket.id, "me", 0.6)
    ends = time.monotonic() + 2
    while time.monotonic() < ends:
        assert not db.tickets.expired() and not db.studies.has_lost(claim.ticket.id)
        time.sleep(0.05)
    assert db.end_trial(claim.ticket.id, "me", claim.trial_id, TrialState.COMPLETE, 0.5, {})
    assert db.studies.leases.next_s() == float("inf")


def test_a_lost_lease_is_noticed_and_its_late_end_refused(db: Database, ready_url: str) -> None:
    """Others took the ticket while this process was stopped, say."""
    study_id = db.studies.create_new_study([StudyDirection.MAXIMIZE], "s")
    db.tickets.write("s", "s", "trial", [storage.NewTicket(0)])
    claim = db.tickets.claim("s", "me", "h", 1, 0.3)
    assert claim is not None and claim.trial_id is not None
    db.studies.keep_lease(claim.ticket.id, "me", 0.3)
    other = Database(ready_url)
    assert other.end_trial(claim.ticket.id, None, claim.trial_id, TrialState.FAIL, None, {},
                           back=("worker lost", None, True))
    assert until(lambda: db.studies.has_lost(claim.ticket.id))
    assert not db.report(claim.trial_id, "s", 0, 0, 0.5, {"a": 0.5}) or not db.end_trial(
        claim.ticket.id, "me", claim.trial_id, TrialState.COMPLETE, 0.5, {})
    assert [t.state for t in other.studies.get_all_trials(study_id)] == [TrialState.FAIL]
    other.close()


def test_several_threads_may_drive_trials_of_one_storage(ready_url: str) -> None:
    """`study.optimize(n_jobs=4)`: nothing is lost between them."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    opened = StudyStorage(ready_url)
    study = optuna.create_study(storage=opened, study_name="s")

    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", 0, 1)
        for step in range(5):
            trial.report(x, step)
            trial.set_user_attr(f"step {step}", x)
        return x

    study.optimize(objective, n_trials=80, n_jobs=4)
    fresh = StudyStorage(ready_url)
    trials = fresh.get_all_trials(study._study_id)
    assert [trial.number for trial in trials] == list(range(80))
    assert all(trial.values == [trial.params["x"]] for trial in trials)
    assert all(list(trial.intermediate_values.values()) == trial.values * 5 for trial in trials)
    assert all(len(trial.user_attrs) == 5 for trial in trials)
    assert sorted(map(repr, opened.get_all_trials(study._study_id))) == sorted(map(repr, trials))
    opened.close()
    fresh.close()


def test_a_name_that_no_database_holds_is_refused_where_it_is_given(db: Database) -> None:
    """Later, one bad name would keep all that is written with it from being stored."""
    _, trial_id = running(db.studies)
    for name in ("a\x00b", "\udc80", "n" * 513):
        with pytest.raises(StorageError, match="a name of"):
            db.studies.set_trial_user_attr(trial_id, name, 1)
        with pytest.raises(StorageError, match="a name of"):
            db.studies.set_trial_param(trial_id, name, 0.5, UNIT)
    db.studies.set_trial_user_attr(trial_id, "学" * 512, 1)
    db.studies.flush()
    assert list(db.studies.get_trial(trial_id).user_attrs) == ["学" * 512]


def test_a_failed_write_is_told_to_the_next_report_and_nothing_of_it_is_lost(
    sqlite_url: str
) -> None:
    """The lock is held for longer than the storage waits."""
    import sqlite3

    storage.init(sqlite_url)
    db = Database(sqlite_url, timeout_s=0.2)
    _, trial_id = running(db.studies)
    blocker = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    assert db.report(trial_id, "s", 0, 0, 0.5, {"a": 0.5})
    assert until(lambda: db.studies._failure is not None)
    with pytest.raises(StorageError, match="locked"):
        db.report(trial_id, "s", 0, 1, 0.6, {"a": 0.6})
    blocker.execute("COMMIT")
    blocker.close()
    assert until(lambda: len(db.epochs("s")) == 2)
    db.close()


def test_closing_does_not_wait_again_for_a_database_that_was_away(sqlite_url: str) -> None:
    """It says what could not be written, within the time of one attempt."""
    import sqlite3

    storage.init(sqlite_url)
    db = Database(sqlite_url, timeout_s=1.0)
    _, trial_id = running(db.studies)
    blocker = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    db.report(trial_id, "s", 0, 0, 0.5, {"a": 0.5})
    assert until(lambda: db.studies._last_failure is not None)
    began = time.monotonic()
    with pytest.raises(StorageError, match="locked"):
        db.close()
    assert time.monotonic() - began < 4
    blocker.execute("COMMIT")
    blocker.close()


SCRIPT = """
import os, sys, threading
import optuna, storage
opened = storage.open(sys.argv[1])
study = optuna.create_study(storage=opened, study_name="s")
trial = study.ask()
trial.report(0.25, 0)
if sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        # It has no thread of its own, and what is gathered is its parent's.
        assert opened.running(trial._trial_id) is None
        assert study.ask().number == 1
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
if sys.argv[2] == "error":
    raise SystemExit(7)
"""


@pytest.mark.parametrize("how", ["end", "error", "fork"])
def test_a_script_that_ends_has_written_its_last_report(ready_url: str, how: str) -> None:
    """It need not close the storage; a forked child writes nothing of its parent's."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT),
                           ready_url, how], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "Traceback" in done.stderr) == (7 if how == "error" else 0, False)
    trials = optuna.load_study(study_name="s", storage=StudyStorage(ready_url)).trials
    assert trials[0].intermediate_values == {0: 0.25}
    assert len(trials) == 1 + (how == "fork")


def test_the_thread_ends_with_the_storage_and_with_its_work(ready_url: str) -> None:
    """A process that opens many storages does not collect threads."""
    def ours() -> int:
        return sum(thread.name == "hpo-storage" for thread in threading.enumerate())

    before = ours()
    opened = StudyStorage(ready_url)
    _, trial_id = running(opened)
    assert ours() == before, "nothing is gathered yet"
    opened.set_trial_user_attr(trial_id, "a", 1)
    assert ours() == before + 1
    opened.close()
    assert ours() == before


def test_memory_lists_ended_trials_by_state_and_number() -> None:
    """Whatever the order in which they come."""
    memory = StudyMemory()
    states = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL]
    every = memory.in_order(None)
    complete = memory.in_order((TrialState.COMPLETE, TrialState.RUNNING))
    assert (every, complete, memory.in_order((TrialState.WAITING,))) == ([], [], [])
    for number in (0, 1, 2, 5, 3, 4, 8, 6):
        trial = optuna.trial.create_trial(
            state=states[number % 3], value=0.5 if number % 3 == 0 else None)
        trial.number, trial._trial_id = number, number + 100
        memory.keep(trial)
        memory.keep(trial)
    assert [t.number for t in memory.in_order(None)] == [0, 1, 2, 3, 4, 5, 6, 8]
    assert [t.number for t in memory.in_order((TrialState.COMPLETE,))] == [0, 3, 6]
    assert [t.number for t in memory.in_order((TrialState.PRUNED, TrialState.FAIL))] == [
        1, 2, 4, 5, 8]


def test_a_storage_used_after_a_fork_by_both_sides_keeps_them_apart(sqlite_url: str) -> None:
    """The child opens sessions of its own."""
    opened = storage.open(sqlite_url)
    study_id, trial_id = running(opened)
    opened.set_trial_user_attr(trial_id, "of", "parent")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            own = opened.create_new_trial(study_id)
            opened.set_trial_user_attr(own, "of", "child")
            opened.flush()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    opened.flush()
    fresh = StudyStorage(sqlite_url)
    found = [trial.user_attrs for trial in fresh.get_all_trials(study_id)]
    assert found == [{"of": "parent"}, {"of": "child"}]
    opened.close()
    fresh.close()
