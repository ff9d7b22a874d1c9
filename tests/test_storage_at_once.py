"""Other writers of a running trial, and other threads at the same moment."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.study import StudyDirection
from optuna.trial import TrialState

import storage
from hpo.errors import StorageError
from hpo.pruners import RunningMedianPruner
from hpo.tpe import BoundedTPESampler
from storage import Database, StudyStorage
from storage.leases import Leases
from storage.trial_reads import FRESH_S

UNIT = FloatDistribution(0.0, 1.0)


@pytest.fixture
def pair(ready_url: str) -> Any:
    """Give two storages on one database, and the ids of a study and a trial of the first."""
    ours, theirs = StudyStorage(ready_url), StudyStorage(ready_url)
    study_id = ours.create_new_study([StudyDirection.MINIMIZE], "s")
    yield ours, theirs, study_id, ours.create_new_trial(study_id)
    ours.close()
    theirs.close()


def test_what_others_write_to_a_running_trial_is_seen_and_counts(pair: Any) -> None:
    """A subprocess reports for the process that asked: PRUNED takes the last report as value."""
    ours, theirs, study_id, trial_id = pair
    ours.set_trial_user_attr(trial_id, "mine", 1)
    theirs.set_trial_intermediate_value(trial_id, 3, 0.7)
    theirs.set_trial_user_attr(trial_id, "theirs", 2)
    time.sleep(FRESH_S)
    ours.set_trial_user_attr(trial_id, "late", 3)
    trial = ours.get_trial(trial_id)
    assert trial.intermediate_values == {3: 0.7}
    assert trial.user_attrs == {"mine": 1, "theirs": 2, "late": 3}
    theirs.set_trial_intermediate_value(trial_id, 4, 0.6)
    time.sleep(FRESH_S)
    assert ours.get_all_trials(study_id)[0].intermediate_values == {3: 0.7, 4: 0.6}
    study = optuna.load_study(study_name="s", storage=ours)
    assert study.tell(trial.number, state=TrialState.PRUNED).value == 0.6


def test_telling_a_trial_that_others_told_may_be_skipped(pair: Any) -> None:
    """As `skip_if_finished` promises."""
    ours, theirs, _, trial_id = pair
    theirs.set_trial_state_values(trial_id, TrialState.COMPLETE, [0.5])
    time.sleep(FRESH_S)
    study = optuna.load_study(study_name="s", storage=ours)
    assert study.tell(0, 0.9, skip_if_finished=True).value == 0.5


def test_params_are_kept_though_another_process_tells_at_once(
    ready_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Drawn here and computed there; a late report is dropped, and told of."""
    ours, theirs = StudyStorage(ready_url), StudyStorage(ready_url)
    study = optuna.create_study(storage=ours, study_name="s")
    study.tell(study.ask({"x": UNIT}), 0.5)
    there = optuna.load_study(study_name="s", storage=theirs)
    trial = study.ask({"x": UNIT})
    trial.report(0.5, 0)
    there.tell(1, 0.25)
    ours.flush()
    stored = StudyStorage(ready_url).get_trial(trial._trial_id)
    assert (stored.params, stored.values) == (trial.params, [0.25])
    # The report came in time or was told of, never neither.
    assert (stored.intermediate_values == {0: 0.5}) != ("1 late reports" in caplog.text)
    ours.close()
    theirs.close()


def test_a_step_that_the_database_cannot_hold_is_refused_and_costs_no_other_trial(
    ready_url: str
) -> None:
    """A count of tokens, say: stock Optuna refuses that one report too."""
    db = Database(ready_url)
    study_id = db.studies.create_new_study([StudyDirection.MINIMIZE], "s")
    first, second = (db.studies.create_new_trial(study_id) for _ in range(2))
    most = 2**31 if db.engine.dialect.name == "postgresql" else 2**63
    with pytest.raises(StorageError, match=f"step {most} of a report"):
        db.studies.set_trial_intermediate_value(first, most, 0.5)
    db.studies.set_trial_intermediate_value(first, most - 1, 0.5)
    db.studies.set_trial_intermediate_value(second, 0, 0.5)
    db.studies.flush()
    assert Database(ready_url).studies.get_trial(first).intermediate_values == {most - 1: 0.5}
    db.close()


def test_rows_that_the_database_refuses_stop_their_own_trial_alone(
    db: Database, ready_url: str
) -> None:
    """The database itself is asked for the impossible: a row without its epoch."""
    study_id = db.studies.create_new_study([StudyDirection.MINIMIZE], "s")
    good, bad = (db.studies.create_new_trial(study_id) for _ in range(2))
    db.studies.report(bad, 0, 0.5, {"study": "s", "trial_number": 1, "epoch": None,
                                    "metrics": {}, "at": None})
    assert db.report(good, "s", 0, 0, 0.5, {"a": 0.5})
    own = db.studies.running(bad)
    assert own is not None
    deadline = time.monotonic() + 10
    while own.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Database(ready_url).studies.get_trial(good).intermediate_values == {0: 0.5}
    with pytest.raises(StorageError):
        db.studies.set_trial_user_attr(bad, "a", 1)
    db.studies.set_trial_user_attr(good, "a", 1)
    db.studies.forget(bad)


def test_nothing_is_added_to_a_trial_that_another_thread_ends(pair: Any) -> None:
    """Whoever reports at that moment is refused, and memory holds what the database has."""
    ours, _, study_id, trial_id = pair
    ours.get_all_trials(study_id)
    refused: list[bool] = []
    stop = threading.Event()

    def report() -> None:
        step = 0
        while not stop.is_set() and not refused:
            try:
                ours.set_trial_intermediate_value(trial_id, step, 0.5)
                step += 1
            except UpdateFinishedTrialError:
                refused.append(True)

    thread = threading.Thread(target=report)
    thread.start()
    time.sleep(0.05)
    ours.set_trial_state_values(trial_id, TrialState.COMPLETE, [1.0])
    thread.join(10)
    stop.set()
    assert refused
    fresh = StudyStorage(ours._link.url)
    assert repr(ours.get_all_trials(study_id)) == repr(fresh.get_all_trials(study_id))
    fresh.close()


def test_a_trial_may_be_copied_while_another_thread_adds_to_it(pair: Any) -> None:
    ours, _, study_id, trial_id = pair
    failed: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                ours.get_trial(trial_id)
                ours.get_all_trials(study_id)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for k in range(3000):
        ours.set_trial_user_attr(trial_id, f"key {k}", k)
    stop.set()
    for thread in threads:
        thread.join(20)
    assert failed == []


def test_a_lease_taken_while_the_others_are_renewed_is_not_lost() -> None:
    """The renewal's answer knows nothing of it."""
    leases = Leases()
    leases.take(1, "me", 0.0)
    [(owner, _)] = leases.due(within_write=False)
    began = time.monotonic()
    leases.take(2, "me", 30.0)
    leases.renewed(owner, [1], began)
    assert not leases.is_lost(1) and not leases.is_lost(2)
    leases.renewed(owner, [1], time.monotonic())
    assert leases.is_lost(2)


def test_flush_returns_when_what_a_writer_is_at_is_written(sqlite_url: str) -> None:
    """Another program holds the lock meanwhile."""
    import sqlite3

    storage.init(sqlite_url)
    db = Database(sqlite_url)
    trial_id = db.studies.create_new_trial(
        db.studies.create_new_study([StudyDirection.MINIMIZE], "s"))
    blocker = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None,
                              check_same_thread=False)
    blocker.execute("BEGIN IMMEDIATE")
    db.report(trial_id, "s", 0, 0, 0.5, {"a": 0.5})
    time.sleep(0.4)
    threading.Timer(0.4, blocker.execute, ["COMMIT"]).start()
    assert db.n_epochs("s") == 1
    blocker.close()
    db.close()


def test_a_report_after_closing_is_written_at_once(ready_url: str) -> None:
    """Nobody writes in the background any more."""
    opened = StudyStorage(ready_url)
    trial_id = opened.create_new_trial(
        opened.create_new_study([StudyDirection.MINIMIZE], "s"))
    opened.close()
    opened.set_trial_intermediate_value(trial_id, 0, 0.5)
    assert StudyStorage(ready_url).get_trial(trial_id).intermediate_values == {0: 0.5}
    opened.close()


def _ask(url: str) -> None:
    study = optuna.load_study(study_name="s", storage=storage.open(url))
    trial = study.ask({"x": UNIT})
    trial.set_user_attr("of", "child")


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_child_of_multiprocessing_has_written_its_last_attributes(
    ready_url: str, how: str
) -> None:
    """It leaves without the functions of atexit."""
    StudyStorage(ready_url).create_new_study([StudyDirection.MINIMIZE], "s")
    context: Any = multiprocessing.get_context(how)
    process = context.Process(target=_ask, args=(ready_url,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    [trial] = StudyStorage(ready_url).get_all_trials(1)
    assert list(trial.params) == ["x"] and trial.user_attrs == {"of": "child"}


def test_a_forked_child_draws_and_prunes_though_a_thread_of_its_parent_held_the_locks(
    sqlite_url: str
) -> None:
    study = optuna.create_study(storage=storage.open(sqlite_url), study_name="s",
                                sampler=BoundedTPESampler(seed=0, n_startup_trials=1),
                                pruner=RunningMedianPruner())
    for _ in range(3):
        study.tell(study.ask({"x": UNIT}), 0.5)
    trial = study.ask({"x": UNIT})
    trial.report(0.5, 0)
    trial.should_prune()
    sampler: Any = study.sampler
    history = sampler._history(study)
    with history._lock:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                study.ask({"x": UNIT})
                code = 0
            finally:
                os._exit(code)
    deadline = time.monotonic() + 20
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.02)
    assert found[1] == 0


def test_two_processes_cannot_give_a_param_two_kinds(pair: Any) -> None:
    """However quickly one follows the other; a refused trial leaves no kind behind."""
    ours, theirs, study_id, trial_id = pair
    other_id = theirs.create_new_trial(study_id)
    ours.set_trial_param(trial_id, "x", 0.5, UNIT)
    with pytest.raises(ValueError, match="kind"):
        theirs.set_trial_param(other_id, "x", 3, IntDistribution(1, 9))
    with pytest.raises(ValueError, match="kind"):
        theirs.create_new_trial(study_id, optuna.create_trial(
            value=0.0, params={"y": 1, "x": 3},
            distributions={"y": IntDistribution(1, 9), "x": IntDistribution(1, 9)}))
    ours.set_trial_param(trial_id, "y", 0.5, UNIT)


def test_a_kind_of_a_study_that_was_made_anew_is_not_remembered(
    sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C43: under the id that stock Optuna gives again, and without any trial that had ended."""
    ours = storage.open(sqlite_url)
    stock = optuna.storages.RDBStorage(sqlite_url)
    study_id = ours.create_new_study([StudyDirection.MINIMIZE], "s")
    ours.set_trial_param(ours.create_new_trial(study_id), "x", 0.5, UNIT)
    stock.delete_study(study_id)
    assert stock.create_new_study([StudyDirection.MINIMIZE], "s") == study_id
    trial_id = ours.create_new_trial(study_id)
    ours.set_trial_param(trial_id, "x", 3, IntDistribution(1, 9))
    assert ours.get_trial(trial_id).params == {"x": 3}
    stock.remove_session()
    stock.engine.dispose()
    ours.close()


@pytest.mark.filterwarnings("ignore:Choices for a categorical distribution")
def test_a_trial_kept_in_memory_has_the_choices_that_the_database_gives_back(
    ready_url: str
) -> None:
    """JSON knows no tuples."""
    opened = StudyStorage(ready_url)
    study = optuna.create_study(storage=opened, study_name="s")
    study.get_trials()
    pairs: Any = [(1, 2), (3, 4)]
    kinds: Any = {"k": CategoricalDistribution(pairs), "x": UNIT,
                  "n": IntDistribution(1, 9)}
    study.tell(study.ask(kinds), 0.5)
    fresh = StudyStorage(ready_url)
    ours, theirs = (s.get_all_trials(study._study_id) for s in (opened, fresh))
    assert repr(ours) == repr(theirs)
    opened.close()
    fresh.close()


def test_the_best_trial_is_known_without_a_look_at_each(ready_url: str) -> None:
    """The first of equal ones, in both directions; as Optuna's own finds it."""
    directions: Any = (("a", "minimize", min), ("b", "maximize", max))
    for name, direction, pick in directions:
        opened = StudyStorage(ready_url)
        study = optuna.create_study(storage=opened, study_name=name, direction=direction)
        with pytest.raises(ValueError, match="COMPLETE"):
            _ = study.best_trial
        for value in (0.5, 0.25, 0.75, 0.25, 0.75, 0.5):
            study.tell(study.ask(), value)
            done = study.get_trials(deepcopy=False)
            chosen: Callable[..., Any] = pick
            assert study.best_trial.number == chosen(done, key=lambda t: t.value).number
        study.tell(study.ask(), state=TrialState.FAIL)
        assert study.best_trial.number == (1 if direction == "minimize" else 2)
        opened.close()
    several = optuna.create_study(storage=StudyStorage(ready_url), study_name="c",
                                  directions=["minimize", "maximize"])
    several.tell(several.ask(), [0.5, 0.5])
    with pytest.raises(RuntimeError):
        _ = several.best_trial
