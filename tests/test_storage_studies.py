"""The Optuna storage: its memory, its neighbours in the same database, and exact values."""

from __future__ import annotations

import math
import pickle
import random
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import optuna
import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.study import StudyDirection
from optuna.trial import TrialState
from sqlalchemy import event

import storage
from storage import Database, StudyStorage
from storage.loading import _offset, local

UNIT = FloatDistribution(0.0, 1.0)


@pytest.fixture
def stock(ready_url: str) -> Iterator[optuna.storages.RDBStorage]:
    """Give Optuna's own storage on the same database as `ours`."""
    opened = optuna.storages.RDBStorage(
        ready_url.replace("postgresql://", "postgresql+psycopg://")
    )
    yield opened
    opened.remove_session()
    opened.engine.dispose()


@pytest.fixture
def ours(ready_url: str) -> Iterator[StudyStorage]:
    """Give our storage, with writes at once."""
    opened = StudyStorage(ready_url)
    yield opened
    opened.close()


def _objective(trial: optuna.Trial) -> float:
    x = trial.suggest_float("x", 1e-7, 1e-1, log=True)
    n = trial.suggest_int("n", 1, 9)
    kind = trial.suggest_categorical("kind", ["a", "b", None])
    trial.set_user_attr("kind", kind)
    for step in range(3):
        trial.report(x * n + step / 3, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    if trial.number % 7 == 6:
        raise ValueError("on purpose")
    return x * n + 1 / 3


def _optimize(study: optuna.Study, n_trials: int) -> None:
    study.optimize(_objective, n_trials=n_trials, catch=(ValueError,))


def _count(db: Database | StudyStorage, what: list[str]) -> None:
    engine = db.engine if isinstance(db, Database) else db._link.engine

    @event.listens_for(engine, "before_cursor_execute")
    def _note(_c: object, _k: object, statement: str, *_rest: object) -> None:
        what.append(statement)


def test_anybody_may_create_and_load_a_study_on_it(storage_url: str) -> None:
    """The two lines of the documentation."""
    study = optuna.create_study(storage=storage.open(storage_url), study_name="s")
    _optimize(study, 10)
    again = storage.open(storage_url)
    assert optuna.load_study(study_name="s", storage=again).trials == study.trials
    assert len(study.trials) == 10


def test_optuna_does_not_wrap_it_in_a_cache_of_its_own(ours: StudyStorage) -> None:
    """It would keep every trial twice."""
    assert optuna.storages.get_storage(ours) is ours


def test_stock_optuna_reads_equal_trials(
    ours: StudyStorage, stock: optuna.storages.RDBStorage
) -> None:
    """What we write, Optuna's own storage reads, to the last bit and microsecond."""
    study = optuna.create_study(storage=ours, study_name="s", direction="maximize")
    _optimize(study, 15)
    assert optuna.load_study(study_name="s", storage=stock).trials == study.trials


def test_a_study_of_stock_optuna_is_read_equal_and_continued(
    ours: StudyStorage, stock: optuna.storages.RDBStorage
) -> None:
    """The other way round, with both writing in turn."""
    theirs = optuna.create_study(storage=stock, study_name="s")
    mine = optuna.load_study(study_name="s", storage=ours)
    for _ in range(3):
        _optimize(theirs, 4)
        _optimize(mine, 4)
        assert mine.trials == theirs.trials
    assert [trial.number for trial in mine.trials] == list(range(24))


def test_trials_of_two_studies_that_took_turns_are_not_mixed(
    ready_url: str, stock: optuna.storages.RDBStorage
) -> None:
    """A range of ids then holds trials of both, and one of each still runs within it."""
    first = StudyStorage(ready_url)
    studies = [optuna.create_study(storage=first, study_name=name) for name in "ab"]
    rng = random.Random(2)
    for study in studies:
        study.ask()
    for _ in range(350):
        for study in studies:
            study.add_trial(_ended(rng))
    for study in studies:
        study.ask()
    fresh = StudyStorage(ready_url)
    for study in studies:
        found = fresh.get_all_trials(study._study_id, deepcopy=False)
        assert found == stock.get_all_trials(study._study_id) and len(found) == 352
    first.close()
    fresh.close()


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Australia/Lord_Howe"])
def test_times_are_local_to_the_minute_of_a_change_of_the_clock(
    zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lord Howe Island puts its clocks forward at half past an hour of UTC."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    _offset.cache_clear()
    try:
        begin = datetime(2026, 10, 3, 15, 0, tzinfo=UTC)
        for minutes in range(0, 24 * 60 * 30, 10):
            at = begin + timedelta(minutes=minutes, microseconds=7)
            stored = str(at.replace(tzinfo=None))
            assert local(stored) == at.astimezone().replace(tzinfo=None)
    finally:
        monkeypatch.undo()
        time.tzset()
        _offset.cache_clear()


def test_waiting_trials_of_optuna_are_taken_once(ours: StudyStorage, ready_url: str) -> None:
    """The change of state is a compare-and-set with one winner."""
    optuna.create_study(storage=ours, study_name="s").enqueue_trial({"x": 1e-3})
    other = StudyStorage(ready_url)
    assert other.set_trial_state_values(1, TrialState.RUNNING)
    assert not ours.set_trial_state_values(1, TrialState.RUNNING)
    other.close()


def test_a_second_look_at_ended_trials_costs_one_statement(ours: StudyStorage) -> None:
    """Ended trials are read once."""
    study = optuna.create_study(storage=ours, study_name="s")
    _optimize(study, 30)
    study.get_trials(deepcopy=False)
    seen: list[str] = []
    _count(ours, seen)
    assert len(study.get_trials(deepcopy=False)) == 30
    assert len(seen) == 1


def test_a_fresh_process_reads_a_study_with_a_query_a_table(ready_url: str) -> None:
    """However many trials there are; the seventh counts the trials of the range."""
    first = StudyStorage(ready_url)
    study = optuna.create_study(storage=first, study_name="s")
    rng = random.Random(1)
    for _ in range(400):
        study.add_trial(_ended(rng))
    fresh = StudyStorage(ready_url)
    seen: list[str] = []
    _count(fresh, seen)
    trials = fresh.get_all_trials(study._study_id, deepcopy=False)
    assert trials == study.trials and len(seen) == 7
    first.close()
    fresh.close()


def _ended(rng: random.Random) -> optuna.trial.FrozenTrial:
    return optuna.trial.create_trial(
        value=rng.random(),
        params={"x": rng.random(), "n": rng.randint(1, 9)},
        distributions={"x": UNIT, "n": IntDistribution(1, 9)},
        intermediate_values={step: rng.random() for step in range(3)},
        user_attrs={"a": [1, {"b": 2}]},
    )


def test_a_copy_of_a_trial_may_be_changed_without_harm(ours: StudyStorage) -> None:
    """The memory is not touched by whoever got a copy."""
    study = optuna.create_study(storage=ours, study_name="s")
    study.add_trial(_ended(random.Random(1)))
    copy = study.trials[0]
    copy.user_attrs["a"][1]["b"] = 3
    copy.params["x"] = 9.0
    assert study.trials[0].user_attrs == {"a": [1, {"b": 2}]} and study.trials[0].params["x"] < 1


def test_floats_come_back_bit_for_bit(db: Database, ready_url: str) -> None:
    """C06: params, reports, values and metrics, through a second connection."""
    rng = random.Random(3)
    special = [5e-324, sys.float_info.max, 0.1 + 0.2, 1 / 3]
    numbers = [*special, *(10 ** rng.uniform(-300, 300) for _ in range(50))]
    study_id = db.studies.create_new_study([StudyDirection.MAXIMIZE], "s")
    wide = FloatDistribution(-math.inf, math.inf)
    for number, value in enumerate(numbers):
        trial_id = db.studies.create_new_trial(study_id)
        db.studies.set_trial_param(trial_id, "x", value, wide)
        db.report(trial_id, "s", number, 0, value, {"loss": value})
        db.studies.set_trial_state_values(trial_id, TrialState.COMPLETE, [value])
    other = Database(ready_url)
    for trial, row, value in zip(
        other.studies.get_all_trials(study_id), other.epochs("s"), numbers, strict=True
    ):
        stored = (*trial.params.values(), *trial.values, trial.intermediate_values[0])
        assert {x.hex() for x in (*stored, row.metrics["loss"])} == {value.hex()}
    other.close()


def test_diverged_metrics_are_stored_as_they_are(db: Database) -> None:
    """C48: NaN and infinities, which PostgreSQL's JSON would refuse."""
    study_id = db.studies.create_new_study([StudyDirection.MAXIMIZE], "s")
    trial_id = db.studies.create_new_trial(study_id)
    assert db.report(trial_id, "s", 0, 0, math.nan, {"a": math.nan, "b": math.inf, "c": -math.inf})
    metrics = db.epochs("s")[0].metrics
    assert math.isnan(metrics["a"]) and (metrics["b"], metrics["c"]) == (math.inf, -math.inf)
    assert math.isnan(db.studies.get_trial(trial_id).intermediate_values[0])


def test_an_epoch_reported_again_is_stored_once(db: Database) -> None:
    """A retry after a lost answer must not double it."""
    study_id = db.studies.create_new_study([StudyDirection.MAXIMIZE], "s")
    trial_id = db.studies.create_new_trial(study_id)
    for value in (0.1, 0.2):
        assert db.report(trial_id, "s", 0, 0, value, {"a": value})
    assert [row.metrics for row in db.epochs("s")] == [{"a": 0.2}]
    assert db.studies.get_trial(trial_id).intermediate_values == {0: 0.2}


def test_flush_brings_params_and_attributes_to_the_others(db: Database, ready_url: str) -> None:
    """A worker flushes once it has drawn all params."""
    study_id = db.studies.create_new_study([StudyDirection.MAXIMIZE], "s")
    trial_id = db.studies.create_new_trial(study_id)
    db.studies.set_trial_param(trial_id, "x", 0.5, UNIT)
    db.studies.set_trial_user_attr(trial_id, "a", [1])
    db.studies.flush()
    other = Database(ready_url)
    trial = other.studies.get_all_trials(study_id)[0]
    assert (trial.params, trial.user_attrs) == ({"x": 0.5}, {"a": [1]})
    other.close()


def test_a_trial_ended_by_somebody_else_is_noticed(db: Database, ready_url: str) -> None:
    """Its owner's memory does not hide it."""
    study_id = db.studies.create_new_study([StudyDirection.MAXIMIZE], "s")
    trial_id = db.studies.create_new_trial(study_id)
    other = Database(ready_url)
    other.studies.set_trial_state_values(trial_id, TrialState.FAIL)
    other.close()
    assert db.studies.get_all_trials(study_id)[0].state == TrialState.FAIL
    with pytest.raises(UpdateFinishedTrialError):
        db.studies.set_trial_user_attr(trial_id, "a", 1)


def test_a_study_made_again_by_another_process_shows_no_old_trial(
    ours: StudyStorage, ready_url: str
) -> None:
    """C43: the new study has another id, so no cache by id can mistake it."""
    old_id = ours.create_new_study([StudyDirection.MINIMIZE], "s")
    for _ in range(3):
        ours.set_trial_state_values(ours.create_new_trial(old_id), TrialState.COMPLETE, [1.0])
    assert len(ours.get_all_trials(old_id)) == 3
    other = Database(ready_url)
    assert other.delete("s")
    new_id = other.studies.create_new_study([StudyDirection.MINIMIZE], "s")
    assert new_id != old_id
    other.studies.create_new_trial(new_id)
    assert len(ours.get_all_trials(ours.get_study_id_from_name("s"))) == 1
    with pytest.raises(KeyError):
        ours.get_all_trials(old_id)
    other.close()


@pytest.mark.parametrize("n_new", [1, 3, 5])
def test_a_study_made_again_by_stock_optuna_under_the_old_id_shows_no_old_trial(
    ours: StudyStorage, stock: optuna.storages.RDBStorage, n_new: int
) -> None:
    """C43: stock Optuna on SQLite gives the ids of study and trials again."""
    for n_trials in (3, n_new):
        study_id = stock.create_new_study([StudyDirection.MINIMIZE], "s")
        for number in range(n_trials):
            trial_id = stock.create_new_trial(study_id)
            stock.set_trial_user_attr(trial_id, "of", n_trials)
            stock.set_trial_state_values(trial_id, TrialState.COMPLETE, [float(number)])
        trials = ours.get_all_trials(study_id, deepcopy=False)
        assert [trial.user_attrs["of"] for trial in trials] == [n_trials] * n_trials
        assert ours.get_trial(trials[0]._trial_id).user_attrs["of"] == n_trials
        stock.delete_study(study_id)


def test_reports_come_in_the_order_of_their_steps_although_one_was_written_again(
    db: Database, ready_url: str
) -> None:
    """What a server's crash left unclear is written again, and lies behind later rows then."""
    study_id = db.studies.create_new_study([StudyDirection.MAXIMIZE], "s")
    trial_id = db.studies.create_new_trial(study_id)
    for step in range(4):
        db.studies.set_trial_intermediate_value(trial_id, step, float(step))
    db.studies.flush()
    db.studies.set_trial_intermediate_value(trial_id, 0, 0.0)
    db.studies.flush()
    with db.engine.begin() as connection:
        # A server that knows how few rows there are takes them as they lie.
        connection.exec_driver_sql("ANALYZE trial_intermediate_values")
    other = Database(ready_url)
    assert list(other.studies.get_trial(trial_id).intermediate_values) == [0, 1, 2, 3]
    other.close()


def test_study_names_of_200_characters_and_any_script_are_found_again(db: Database) -> None:
    """C08, with the longest phase behind it."""
    for name in ("naive-学習", "a b'\"", "学" * 200):
        study_id = db.studies.create_new_study([StudyDirection.MINIMIZE], name + "/lr-range")
        assert db.studies.get_study_id_from_name(name + "/lr-range") == study_id


def test_a_reason_of_two_megabytes_is_cut_and_odd_characters_are_kept_readable(
    db: Database,
) -> None:
    """C08.3: at most 4 KB; PostgreSQL takes no NUL and no half of a character."""
    db.studies.create_new_study([StudyDirection.MINIMIZE], "s")
    db.tickets.write("s", "s", "trial", [storage.NewTicket(0)])
    claim = db.tickets.claim("s", "me", "h", 1, 30)
    assert claim is not None and claim.trial_id is not None
    reason = "error: \x00 \udc80 学" + "学" * 700_000
    db.end_trial(claim.ticket.id, "me", claim.trial_id, TrialState.FAIL, None, {"reason": reason})
    stored = db.studies.get_trial(claim.trial_id).user_attrs["reason"]
    assert stored.startswith("error: \\x00 \\udc80 学") and len(stored.encode()) <= 4096
    assert db.tickets.list("s")[0].cause == stored


def test_a_storage_can_be_pickled(ours: StudyStorage) -> None:
    """For whoever sends it to a process."""
    ours.create_new_study([StudyDirection.MINIMIZE], "s")
    assert [s.study_name for s in pickle.loads(pickle.dumps(ours)).get_all_studies()] == ["s"]


def test_a_trial_with_known_params_costs_at_most_12_statements_and_2_commits(
    db: Database,
) -> None:
    """10 epochs, 6 params: the hot path does not grow unseen."""
    db.studies.create_new_study([StudyDirection.MAXIMIZE], "s")
    db.tickets.write("s", "s", "trial", [storage.NewTicket(idx) for idx in range(2)])
    _whole_trial(db)
    seen: list[str] = []
    commits: list[object] = []
    _count(db, seen)
    event.listen(db.engine, "commit", commits.append)
    _whole_trial(db)
    assert len(seen) <= 12 and len(commits) == 2


def test_a_question_to_the_pruner_in_a_long_trial_needs_no_look_at_the_database(
    db: Database,
) -> None:
    """A worker's epochs take seconds; each would be a look at what others wrote, else."""
    study_id = db.studies.create_new_study([StudyDirection.MAXIMIZE], "s")
    trial_id = db.studies.create_new_trial(study_id)
    db.report(trial_id, "s", 0, 0, 0.5, {"a": 0.5})
    db.studies.flush()
    time.sleep(0.3)
    seen: list[str] = []
    _count(db, seen)
    assert db.studies.known_trial(trial_id).intermediate_values == {0: 0.5} and seen == []
    assert db.studies.get_trial(trial_id).intermediate_values == {0: 0.5} and len(seen) == 6


def _whole_trial(db: Database) -> None:
    claim = db.tickets.claim("s", "me", "h", 1, 30)
    assert claim is not None and claim.trial_id is not None and claim.number is not None
    for name in "abcdef":
        db.studies.set_trial_param(claim.trial_id, name, 0.5, UNIT)
    for epoch in range(10):
        db.report(claim.trial_id, "s", claim.number, epoch, 0.5, {"loss": 0.5})
    attrs = {"reason": "", "best": {"loss": 0.5}}
    db.end_trial(claim.ticket.id, "me", claim.trial_id, TrialState.COMPLETE, 0.5, attrs)
