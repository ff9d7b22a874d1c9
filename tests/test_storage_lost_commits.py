"""The answer to a COMMIT is lost: what was done is found done, and nothing is done twice.

The driver commits and then fails, once, as where a server dies in between.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

import optuna
import psycopg
import pytest
from optuna.distributions import FloatDistribution
from optuna.study import StudyDirection
from optuna.trial import TrialState

import storage
from storage import ClaimOrder, Database, TrialEnd

ORDER = ClaimOrder("s", "me", "host", 1, 60.0, "s")
UNIT = FloatDistribution(0.0, 1.0)


@pytest.fixture
def study(db: Database) -> Database:
    """Give a database with a study and three tickets in it."""
    db.studies.create_new_study([StudyDirection.MINIMIZE], "s")
    db.tickets.write("s", "s", "trial", [storage.NewTicket(idx) for idx in range(3)])
    return db


@pytest.fixture
def lose_answer(db: Database, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Give a function after which the next COMMIT succeeds and seems not to."""
    dialect: Any = db.engine.dialect
    commit = dialect.do_commit
    armed: list[bool] = []

    def do_commit(connection: Any) -> None:
        commit(connection)
        if armed:
            armed.clear()
            raise (sqlite3.OperationalError("database is locked") if dialect.name == "sqlite"
                   else psycopg.OperationalError("server closed the connection unexpectedly"))

    monkeypatch.setattr(dialect, "do_commit", do_commit)
    return lambda: armed.append(True)


def trials(db: Database) -> list[tuple[int, str, list[float] | None]]:
    """Return number, state and values of the trials, as a fresh process reads them."""
    fresh = Database(db.url)
    study_id = fresh.studies.get_study_id_from_name("s")
    found = [(t.number, t.state.name, t.values) for t in fresh.studies.get_all_trials(study_id)]
    fresh.close()
    return found


def test_a_claim_is_not_made_twice(study: Database, lose_answer: Callable[[], None]) -> None:
    lose_answer()
    claims = study.tickets.claim_many(ORDER, 2)
    assert [claim.number for claim in claims] == [0, 1]
    assert [state for _, state, _ in trials(study)] == ["RUNNING"] * 2
    assert study.tickets.counts("s") == {"waiting": 1, "running": 2, "done": 0, "failed": 0}
    # They are this process's own: what they gather is written.
    assert claims[1].trial_id is not None
    study.studies.set_trial_param(claims[1].trial_id, "x", 0.5, UNIT)
    study.studies.flush()
    assert Database(study.url).studies.get_trial(claims[1].trial_id).params == {"x": 0.5}


def test_an_end_and_the_next_claim_are_not_made_twice(
    study: Database, lose_answer: Callable[[], None]
) -> None:
    [claim] = study.tickets.claim_many(ORDER, 1)
    assert claim.trial_id is not None
    study.report(claim.trial_id, "s", 0, 0, 0.25, {"loss": 0.25})
    lose_answer()
    end = TrialEnd(claim.ticket.id, "me", claim.trial_id, TrialState.COMPLETE, 0.25, {"a": 1})
    held, following = study.end_and_claim(end, ORDER)
    assert held and following is not None and following.number == 1
    assert trials(study) == [(0, "COMPLETE", [0.25]), (1, "RUNNING", None)]
    assert study.tickets.counts("s") == {"waiting": 1, "running": 1, "done": 1, "failed": 0}
    first = study.studies.get_all_trials(1)[0]
    assert (first.intermediate_values, first.user_attrs) == ({0: 0.25}, {"a": 1})


def test_the_last_end_finds_no_ticket_more(study: Database) -> None:
    """And an owner that has lost its ticket writes no end, but goes on with the next."""
    [one, two, three] = study.tickets.claim_many(ORDER, 5)
    ends = [TrialEnd(claim.ticket.id, "me", claim.trial_id or 0, TrialState.COMPLETE, 0.5, {})
            for claim in (one, two, three)]
    assert study.end_and_claim(ends[0], ORDER) == (True, None)
    assert study.end_trial(two.ticket.id, None, two.trial_id or 0, TrialState.FAIL, None, {},
                           back=("worker lost", {"x": 0.5}, True))
    held, again = study.end_and_claim(ends[1], ORDER)
    assert not held and again is not None
    assert (again.ticket.id, again.ticket.attempt, again.number) == (two.ticket.id, 1, 3)
    assert trials(study)[1] == (1, "FAIL", None)


def test_a_trial_is_not_made_twice(study: Database, lose_answer: Callable[[], None]) -> None:
    lose_answer()
    trial_id = study.studies.create_new_trial(1)
    assert trials(study) == [(0, "RUNNING", None)]
    lose_answer()
    assert study.studies.set_trial_state_values(trial_id, TrialState.COMPLETE, [0.5])
    assert trials(study) == [(0, "COMPLETE", [0.5])]


def test_gathered_reports_are_not_lost_and_not_doubled(
    study: Database, lose_answer: Callable[[], None]
) -> None:
    trial_id = study.studies.create_new_trial(1)
    for step in range(3):
        study.report(trial_id, "s", 0, step, step / 2, {"loss": step / 2})
    lose_answer()
    study.studies.flush()
    fresh = Database(study.url)
    assert fresh.studies.get_trial(trial_id).intermediate_values == {0: 0.0, 1: 0.5, 2: 1.0}
    assert [row.epoch for row in fresh.epochs("s")] == [0, 1, 2]
    fresh.close()


def test_a_trial_that_is_added_or_enqueued_is_not_there_twice(
    study: Database, lose_answer: Callable[[], None]
) -> None:
    for state, value in ((TrialState.COMPLETE, 1.0), (TrialState.WAITING, None)):
        lose_answer()
        study.studies.create_new_trial(1, optuna.create_trial(
            state=state, value=value, params={"x": 0.5}, distributions={"x": UNIT}))
    assert trials(study) == [(0, "COMPLETE", [1.0]), (1, "WAITING", None)]


def test_a_study_is_made_and_deleted_once(
    db: Database, lose_answer: Callable[[], None]
) -> None:
    lose_answer()
    study_id = db.studies.create_new_study([StudyDirection.MINIMIZE], "t")
    with pytest.raises(optuna.exceptions.DuplicatedStudyError):
        db.studies.create_new_study([StudyDirection.MINIMIZE], "t")
    lose_answer()
    db.studies.delete_study(study_id)
    with pytest.raises(KeyError):
        db.studies.get_all_trials(study_id)


@pytest.mark.parametrize("retaken", [True, False])
def test_a_refused_end_and_its_claim_are_told_as_they_were(
    study: Database, lose_answer: Callable[[], None], retaken: bool
) -> None:
    """The ticket was reaped, and its owner may get it again: the old end ends no new trial."""
    [claim] = study.tickets.claim_many(ORDER, 1)
    assert study.end_trial(claim.ticket.id, None, claim.trial_id or 0, TrialState.FAIL, None, {},
                           back=("worker lost", None, True))
    if retaken:
        study.tickets.claim("s", "other", "host", 2, 60)
    lose_answer()
    end = TrialEnd(claim.ticket.id, "me", claim.trial_id or 0, TrialState.COMPLETE, 0.5, {})
    held, following = study.end_and_claim(end, ORDER)
    assert not held and following is not None
    counts = study.tickets.counts("s")
    assert (counts["running"], counts["done"]) == (1 + retaken, 0)
    assert (following.ticket.id == claim.ticket.id) != retaken
    assert [state for _, state, _ in trials(study)] == ["FAIL", "RUNNING", "RUNNING"][:2 + retaken]


def test_counts_and_answers_of_tickets_are_those_of_the_first_attempt(
    study: Database, lose_answer: Callable[[], None]
) -> None:
    tickets = study.tickets
    lose_answer()
    assert tickets.write("s", "s", "trial", [storage.NewTicket(idx) for idx in range(8)]) == 5
    lose_answer()
    assert tickets.trim("s", 4) == 4
    tickets.write("s", "s", "sweep", [storage.NewTicket(idx) for idx in (90, 91)])
    for _ in range(4):
        tickets.claim("s", "me", "h", 1, 60)
    one, two = (tickets.claim("s", "me", "h", 1, 60) for _ in range(2))
    assert one is not None and two is not None
    lose_answer()
    assert tickets.give_back(one.ticket.id, None, "why")
    lose_answer()
    assert tickets.finish(two.ticket.id, None, "failed", "why")
    lose_answer()
    assert tickets.reopen("s", [91]) == 1
    lose_answer()
    assert study.delete("s") and not study.delete("s")


def test_a_trial_claimed_with_a_lost_answer_is_the_process_s_own(
    study: Database, lose_answer: Callable[[], None]
) -> None:
    """Else each of its reports would be a transaction of its own."""
    [claim] = study.tickets.claim_many(ORDER, 1)
    assert claim.trial_id is not None
    lose_answer()
    end = TrialEnd(claim.ticket.id, "me", claim.trial_id, TrialState.COMPLETE, 0.5, {})
    held, following = study.end_and_claim(end, ORDER)
    assert held and following is not None and following.trial_id is not None
    own = study.studies.running(following.trial_id)
    assert own is not None and own.snapshot() == study.studies.get_trial(following.trial_id)


def test_a_ticket_closed_with_a_lost_answer_is_closed_though_others_ended_the_trial(
    study: Database, lose_answer: Callable[[], None]
) -> None:
    [claim] = study.tickets.claim_many(ORDER, 1)
    assert claim.trial_id is not None
    other = Database(study.url)
    other.studies.set_trial_state_values(claim.trial_id, TrialState.COMPLETE, [0.9])
    other.close()
    lose_answer()
    assert study.end(TrialEnd(claim.ticket.id, "me", claim.trial_id, TrialState.COMPLETE, 0.5, {}))
    assert trials(study) == [(0, "COMPLETE", [0.9])]
    assert study.tickets.counts("s")["done"] == 1
