"""Statements that go to the driver itself, and ends of trials that are said all at once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.study import StudyDirection
from optuna.trial import TrialState
from sqlalchemy import Connection, bindparam, event, insert, select, text
from sqlalchemy.exc import DBAPIError, DisconnectionError

from hpo.errors import StorageError
from storage import Claim, ClaimOrder, Database, NewTicket, TrialEnd, prepared, rows
from storage.prepared import Prepared, refusing_unless
from storage.schema import marks
from storage.ticket_ends import close_ticket

# SQLite has nobody to wait for, no sessions to lose, and divides by zero.
on_a_server = pytest.mark.parametrize("ready_url", ["postgresql"], indirect=True)
ORDER = ClaimOrder("s", "me", "host", 1, 60.0, "s")
NAMED = Prepared(select(marks.c.value).where(marks.c.name == bindparam("wanted")))
ALL = Prepared(select(marks.c.name, marks.c.value))
ADD = Prepared(insert(marks).values(name=bindparam("new"), value=bindparam("number")))


@pytest.fixture
def claim(db: Database) -> Claim:
    """Give the claim of the first of three tickets."""
    db.studies.create_new_study([StudyDirection.MAXIMIZE], "s")
    db.tickets.write("s", "s", "trial", [NewTicket(idx) for idx in range(3)])
    return db.tickets.claim_many(ORDER, 1)[0]


@pytest.fixture
def fresh(db: Database) -> Iterator[Database]:
    """Give the same database as another process has it."""
    opened = Database(db.url)
    yield opened
    opened.close()


def end(claim: Claim, value: float = 0.5, owner: str = "me") -> TrialEnd:
    assert claim.trial_id is not None
    return TrialEnd(claim.ticket.id, owner, claim.trial_id, TrialState.COMPLETE, value, {"a": 1})


def test_it_answers_as_sqlalchemy_does(db: Database) -> None:
    def work(connection: Connection) -> list[Any]:
        ADD.run(connection, {"new": "ä'\"%s", "number": 7})
        added = ADD.run(connection, {"new": "b", "number": 8})
        found = NAMED.run(connection, {"wanted": "ä'\"%s"})
        return [added.rowcount, found.scalar(), NAMED.run(connection, {"wanted": "no"}).scalar(),
                [(row.name, row.value) for row in ALL.run(connection, {}).all()]]

    for at_once in (True, False):
        assert db._link.write(work, prepared=at_once) == [
            1, 7, None, [("ä'\"%s", 7), ("b", 8)]]
        with pytest.raises(StorageError, match="2 rows where one was expected"):
            db._link.write(lambda c: ALL.run(c, {}).scalar(), prepared=at_once)
        db._link.write(lambda c: c.execute(text("DELETE FROM hpo_mark")))


def test_an_error_is_sqlalchemy_s_and_undoes_its_transaction(db: Database) -> None:
    def work(connection: Connection) -> None:
        ADD.run(connection, {"new": "a", "number": 1})
        ADD.run(connection, {"new": "a", "number": 2})

    for at_once in (True, False):
        with pytest.raises(StorageError, match="UNIQUE|duplicate key") as caught:
            db._link.write(work, prepared=at_once)
        assert isinstance(caught.value.__cause__, DBAPIError)
        assert db._link.read(lambda c: ALL.run(c, {}).all()) == []


def test_a_value_that_is_missing_is_told_and_not_taken_for_null(db: Database) -> None:
    with pytest.raises((KeyError, StorageError), match="number"):
        db._link.write(lambda c: ADD.run(c, {"new": "a"}), prepared=True)


def test_after_a_transaction_that_failed_others_of_the_session_are_undone_still(
    db: Database
) -> None:
    """The driver's way to begin is set aside for a while; each path must bring it back."""
    def fails(connection: Connection) -> None:
        ADD.run(connection, {"new": "a", "number": 1})
        raise ZeroDivisionError

    for at_once in (True, False, True, False):
        with pytest.raises(ZeroDivisionError):
            db._link.write(fails, prepared=at_once)
    assert db._link.read(lambda c: ALL.run(c, {}).all()) == []


def test_many_rows_are_written_as_few_are(db: Database, fresh: Database, claim: Claim) -> None:
    """PostgreSQL gets them as arrays: NaN, infinities and any text come back the same."""
    assert claim.trial_id is not None
    numbers = [float("nan"), float("inf"), -float("inf"), 0.1, 5e-324, -1.0, 2.0, 3.0]
    for step, number in enumerate(numbers):
        db.report(claim.trial_id, "s", 0, step, number, {"ä,{}": number})
        db.studies.set_trial_user_attr(claim.trial_id, f"k,{{}}\"'{step}", "ä \\ {NULL} \u2028")
        db.studies.set_trial_param(claim.trial_id, f"x{step}", 0.1 * step,
                                   FloatDistribution(0.0, 1.0))
    db.studies.flush()
    [found] = fresh.studies.get_all_trials(1)
    mine = db.studies.get_trial(claim.trial_id)
    assert repr(found.intermediate_values) == repr(dict(enumerate(numbers)))
    assert found.user_attrs == mine.user_attrs and len(found.user_attrs) == 8
    assert found.params == mine.params == {f"x{step}": 0.1 * step for step in range(8)}
    assert [repr(row.metrics["ä,{}"]) for row in fresh.epochs("s", 0)] == list(map(repr, numbers))


def test_the_end_of_a_trial_that_others_ended_closes_the_ticket_alone(
    db: Database, fresh: Database, claim: Claim
) -> None:
    """Said all at once, PostgreSQL refuses it; then it is done step by step."""
    assert claim.trial_id is not None
    fresh.studies.set_trial_state_values(claim.trial_id, TrialState.COMPLETE, [0.9])
    db.report(claim.trial_id, "s", 0, 5, 0.1, {"a": 0.1})
    held, following = db.end_and_claim(end(claim), ORDER)
    assert held and following is not None and following.number == 1
    trial = fresh.studies.get_trial(claim.trial_id)
    assert (trial.values, trial.user_attrs, trial.intermediate_values) == ([0.9], {}, {})
    assert [ticket.state for ticket in db.tickets.list("s")] == ["done", "running", "waiting"]


@pytest.mark.parametrize("with_claim", [True, False])
def test_an_end_by_whoever_has_lost_the_ticket_changes_nothing(
    db: Database, fresh: Database, claim: Claim, with_claim: bool
) -> None:
    late = end(claim, owner="somebody else")
    if with_claim:
        held, following = db.end_and_claim(late, ORDER)
        assert following is not None and following.number == 1
    else:
        held = db.end(late)
    assert not held
    assert fresh.studies.get_trial(late.trial_id).state == TrialState.RUNNING
    assert fresh.tickets.list("s")[0].state == "running"
    assert len(fresh.studies.get_all_trials(1)) == 1 + with_claim


def test_the_end_of_a_trial_that_was_deleted_is_no_error(
    db: Database, fresh: Database, claim: Claim
) -> None:
    """Stock Optuna may delete the study; the tickets are ours and stay."""
    db.report(end(claim).trial_id, "s", 0, 0, 0.5, {"a": 0.5})
    stock = optuna.storages.RDBStorage(fresh._link.engine.url.render_as_string(False))
    optuna.delete_study(study_name="s", storage=stock)
    stock.engine.dispose()
    assert db.end(end(claim))
    assert fresh.tickets.list("s")[0].state == "done"


def test_a_claim_for_a_study_that_is_gone_is_told_and_leaves_its_ticket(
    db: Database, fresh: Database, claim: Claim
) -> None:
    """Refused as a whole: the trial before it has not ended either."""
    with fresh.engine.begin() as connection:
        connection.execute(rows.studies.update().values(study_name="renamed"))
    with pytest.raises(StorageError, match="ticket 2: its study 's' does not exist"):
        db.end_and_claim(end(claim), ORDER)
    assert [ticket.state for ticket in fresh.tickets.list("s")] == [
        "running", "waiting", "waiting"]
    assert fresh.studies.get_trial(end(claim).trial_id).state == TrialState.RUNNING


@on_a_server
def test_an_end_with_the_next_claim_waits_once_for_a_server(
    db: Database, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer that is waited for costs more than PostgreSQL's work."""
    db.end_and_claim(end(claim), ORDER)
    from psycopg import Pipeline

    following = db.tickets.claim_many(ORDER, 1)[0]
    # Each Sync ends a batch, and is waited for.
    waits: list[object] = []
    enqueue = Pipeline._enqueue_sync
    monkeypatch.setattr(
        Pipeline, "_enqueue_sync", lambda pipe: (waits.append(pipe), enqueue(pipe)))
    held, last = db.end_and_claim(end(following), ORDER)
    assert held and last is None and len(waits) == 1


@on_a_server
def test_a_session_lost_in_the_middle_is_replaced_without_a_word(
    db: Database, fresh: Database, claim: Claim, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver would log the errors that follow the first."""
    lost: list[object] = []

    def work(connection: Connection) -> int:
        ADD.run(connection, {"new": "a", "number": 1})
        if not lost:
            lost.append(_kill(fresh, connection))
        return NAMED.run(connection, {"wanted": "a"}).scalar()

    with caplog.at_level(logging.INFO, logger="psycopg"):
        assert db._link.write(work, prepared=True) == 1
        assert db.end_and_claim(end(claim), ORDER)[0]
    assert lost and not [record for record in caplog.records if record.name == "psycopg"]


def _kill(other: Database, connection: Connection) -> object:
    driver: Any = connection.connection.driver_connection
    with other.engine.begin() as session:
        return session.execute(
            text("SELECT pg_terminate_backend(:pid)"), {"pid": driver.info.backend_pid}).scalar()


@on_a_server
def test_a_condition_that_does_not_hold_is_refused_by_postgresql(db: Database) -> None:
    there = refusing_unless(select(marks.c.name).where(marks.c.name == bindparam("n")).exists())

    def work(connection: Connection) -> None:
        ADD.run(connection, {"new": "a", "number": 1})
        there.run(connection, {"n": "a"})
        there.run(connection, {"n": "b"})

    with pytest.raises(StorageError, match="division by zero"):
        db._link.write(work, prepared=True)
    assert db._link.read(lambda c: ALL.run(c, {}).all()) == []


def test_params_set_together_are_stored_as_if_one_by_one(
    db: Database, fresh: Database, claim: Claim
) -> None:
    assert claim.trial_id is not None
    unit = FloatDistribution(0.0, 1.0)
    db.studies.set_trial_params(claim.trial_id, {"x": (0.25, unit), "y": (0.75, unit)})
    assert db.studies.get_trial(claim.trial_id).params == {"x": 0.25, "y": 0.75}
    # The first of the study are there at once, so that no other kind is given to their names.
    assert fresh.studies.get_trial(claim.trial_id).params == {"x": 0.25, "y": 0.75}
    with pytest.raises(ValueError, match="different distribution kind"):
        fresh.studies.set_trial_params(
            claim.trial_id, {"x": (1.0, optuna.distributions.IntDistribution(0, 2))})


def test_a_driver_without_pipelines_does_the_same(
    db: Database, fresh: Database, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A psycopg that was built upon an old library of the system."""
    from psycopg import Pipeline

    monkeypatch.setattr(Pipeline, "is_supported", lambda: False)
    monkeypatch.setattr("psycopg.Connection.pipeline", None)
    db.report(end(claim).trial_id, "s", 0, 0, 0.5, {"a": 0.5})
    held, following = db.end_and_claim(end(claim), ORDER)
    assert held and following is not None
    assert not db.end(end(following, owner="somebody else"))
    assert [trial.values for trial in fresh.studies.get_all_trials(1)] == [[0.5], None]


@on_a_server
def test_an_interrupt_leaves_no_session_that_commits_by_itself(
    db: Database, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C right after the driver's own way to begin was set aside."""
    from psycopg import Connection as Session

    set_autocommit, calls = Session.set_autocommit, []

    def interrupted(session: Session, value: bool) -> None:
        set_autocommit(session, value)
        calls.append(value)
        if calls == [True]:
            raise KeyboardInterrupt

    def fails(connection: Connection) -> None:
        connection.execute(insert(marks).values(name="a", value=1))
        raise ZeroDivisionError

    db._link.write(lambda c: None)
    monkeypatch.setattr(Session, "set_autocommit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        db.end(end(claim))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            db._link.write(fails)
    assert db._link.read(lambda c: ALL.run(c, {}).all()) == []


@on_a_server
def test_a_thread_that_lost_its_session_does_not_disturb_the_one_that_got_it_anew(
    db: Database, fresh: Database, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool hands the place of a lost session on before the loser has cleaned up."""
    lost, anew = threading.Event(), threading.Event()
    drain = prepared._drain

    def slow_drain(pipeline: Any) -> None:
        lost.set()
        anew.wait(10)
        drain(pipeline)

    monkeypatch.setattr(prepared, "_drain", slow_drain)
    tried: list[int] = []

    def loses(connection: Connection) -> None:
        tried.append(1)
        if len(tried) == 1:
            _kill(fresh, connection)
        NAMED.run(connection, {"wanted": "a"}).scalar()

    def asks(connection: Connection) -> int:
        refused = close_ticket(connection, claim.ticket.id, "somebody else", "done")
        anew.set()
        # The loser cleans up meanwhile.
        time.sleep(0.2)
        return refused.rowcount

    with db.engine.connect() as other:
        # So that there is one session for both.
        other.execute(text("SELECT 1"))
        loser = threading.Thread(target=db._link.write, args=(loses,), kwargs={"prepared": True})
        loser.start()
        assert lost.wait(10)
        assert db._link.write(asks, prepared=True) == 0
        loser.join()
    assert len(tried) == 2


def test_sessions_that_are_lost_as_soon_as_they_open_are_tried_again(
    db: Database, claim: Claim
) -> None:
    """A pooler before the server, or a server that is still starting."""
    left = [None] * 4

    def lose(*_: object) -> None:
        if left:
            left.pop()
            raise DisconnectionError

    event.listen(db.engine, "checkout", lose)
    assert db.end(end(claim)) and not left
