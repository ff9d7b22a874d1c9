"""Tickets: exact claims, leases, the fence, and the way back into the queue."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.study import StudyDirection
from optuna.trial import TrialState
from sqlalchemy import Connection, event, insert, text

from hpo.errors import StorageError
from storage import ClaimOrder, Database, NewTicket, Ticket
from storage.claiming import ADD_NOTED, CLAIM, CLAIM_OF, HAS_TRIAL
from storage.engine import make_engine
from storage.leases import RENEW
from storage.prepared import refusing_unless
from storage.schema import tickets
from storage.ticket_ends import close_statement

N_PROCESSES = 8
ROOT = Path(__file__).parent.parent
ME = ("me", "host", 1, 30.0)


@pytest.fixture
def study(db: Database) -> Iterator[Database]:
    """Give a database with a study `s` of three waiting tickets."""
    db.studies.create_new_study([StudyDirection.MAXIMIZE], "s")
    db.tickets.write("s", "s", "trial", [NewTicket(idx) for idx in range(3)])
    yield db


def _take_all(url: str, owner: str, most: int) -> list[tuple[int, int | None]]:
    """Claim tickets, so many at once, until none is left; each has one report and an end."""
    db = Database(url)
    taken = []
    order = ClaimOrder("s", owner, "host", os.getpid(), 30)
    while claims := db.tickets.claim_many(order, most):
        assert len(claims) <= most
        for claim in claims:
            assert claim.trial_id is not None and claim.number is not None
            assert db.report(claim.trial_id, "s", claim.number, 0, 0.5, {"a": 0.5})
            assert db.end_trial(claim.ticket.id, owner, claim.trial_id, TrialState.COMPLETE, 0.5,
                                {"worker": owner})
            taken.append((claim.ticket.id, claim.number))
    db.close()
    return taken


def _only(db: Database, idx: int = 0) -> Ticket:
    return next(ticket for ticket in db.tickets.list("s") if ticket.idx == idx)


@pytest.mark.parametrize("most", [1, 5])
def test_eight_processes_take_each_of_400_tickets_once_and_number_densely(
    db: Database, processes: ForkServerContext, most: int
) -> None:
    """C11, C15 at the level of SQL."""
    db.studies.create_new_study([StudyDirection.MAXIMIZE], "s")
    db.tickets.write("s", "s", "trial", [NewTicket(idx) for idx in range(400)])
    with ProcessPoolExecutor(N_PROCESSES, mp_context=processes) as pool:
        jobs = [pool.submit(_take_all, db.url, f"w{n}", most) for n in range(N_PROCESSES)]
        taken = [pair for job in jobs for pair in job.result()]
    assert len({ticket for ticket, _ in taken}) == len(taken) == 400
    assert sorted(number for _, number in taken if number is not None) == list(range(400))
    assert db.tickets.counts("s") == {"waiting": 0, "running": 0, "done": 400, "failed": 0}
    trials = optuna.load_study(study_name="s", storage=db.studies).trials
    assert [trial.number for trial in trials] == list(range(400))
    assert all(trial.state == TrialState.COMPLETE for trial in trials)


def test_writing_tickets_again_adds_only_those_that_lack(study: Database) -> None:
    """A restart adds none."""
    assert study.tickets.write("s", "s", "trial", [NewTicket(idx) for idx in range(5)]) == 2
    assert [ticket.idx for ticket in study.tickets.list("s")] == list(range(5))


def test_trim_deletes_waiting_tickets_only(study: Database) -> None:
    """A smaller N leaves what runs."""
    study.tickets.claim("s", *ME)
    assert study.tickets.trim("s", 0) == 2
    assert [ticket.state for ticket in study.tickets.list("s")] == ["running"]


def test_trim_leaves_n_in_all_whatever_their_places(db: Database) -> None:
    """Retries and several workers end tickets out of order: 0 and 2 of five, then N is 3."""
    ensured = db.studies.create_new_study([StudyDirection.MINIMIZE], "s")
    assert ensured
    db.tickets.write("s", "s", "trial", [NewTicket(idx) for idx in range(5)])
    claims = [db.tickets.claim("s", *ME) for _ in range(3)]
    for claim in claims:
        assert claim is not None
    assert claims[1] is not None
    db.tickets.give_back(claims[1].ticket.id, ME[0], "interrupted", count=False)
    assert db.tickets.trim("s", 3) == 2
    assert [(t.idx, t.state) for t in db.tickets.list("s")] == [
        (0, "running"), (1, "waiting"), (2, "running")]
    assert db.tickets.trim("s", 2) == 1 and db.tickets.trim("s", 1) == 0


def test_only_the_tickets_of_one_phase_are_taken_when_one_is_named(study: Database) -> None:
    """What an interrupted search left waits for the next search."""
    study.studies.create_new_study([StudyDirection.MINIMIZE], "s/grid")
    study.tickets.write("s", "s/grid", "trial", [NewTicket(0)])
    assert study.tickets.claim("s", *ME, only="") is None
    claim = study.tickets.claim("s", *ME, only="s/grid")
    assert claim is not None and claim.ticket.study == "s/grid"
    assert study.tickets.claim("s", *ME, only="s/grid") is None
    assert study.tickets.counts("s")["waiting"] == 3


def test_the_lowest_ticket_is_taken_first_with_its_trial(study: Database) -> None:
    """Ticket and trial are one transaction."""
    claim = study.tickets.claim("s", *ME)
    assert claim is not None and claim.ticket.idx == 0 and claim.number == 0
    assert claim.trial_id is not None
    trial = study.studies.get_trial(claim.trial_id)
    assert (trial.state, trial.number) == (TrialState.RUNNING, 0)
    assert _only(study).trial_id == claim.trial_id


def test_whether_a_ticket_waits_is_known_without_taking_it(study: Database) -> None:
    """Of a study, and of one of its phases."""
    assert study.tickets.any_waits("s") and study.tickets.any_waits("s", "s")
    assert not study.tickets.any_waits("s", "s/grid") and not study.tickets.any_waits("t")
    assert study.tickets.counts("s")["waiting"] == 3
    while study.tickets.claim("s", *ME):
        pass
    assert not study.tickets.any_waits("s")


def test_an_empty_queue_gives_none(db: Database) -> None:
    """Nothing waits."""
    assert db.tickets.claim("s", *ME) is None


def test_a_ticket_without_its_optuna_study_stays_waiting(db: Database) -> None:
    """The claim is undone as a whole."""
    db.tickets.write("s", "s", "trial", [NewTicket(0)])
    with pytest.raises(StorageError, match="its study 's' does not exist"):
        db.tickets.claim("s", *ME)
    assert db.tickets.counts("s")["waiting"] == 1


def test_a_sweep_has_no_trial(db: Database) -> None:
    """Only tickets of kind 'trial' make one."""
    db.tickets.write("s", "s/lr-range", "sweep", [NewTicket(0, payload={"low": 1e-7})])
    claim = db.tickets.claim("s", *ME)
    assert claim is not None and claim.trial_id is None
    assert claim.ticket.payload == {"low": 1e-7}
    assert db.tickets.finish(claim.ticket.id, "me", "done", result={"pick": 1e-3})
    assert db.tickets.list("s/lr-range")[0].result == {"pick": 1e-3}


def test_an_owner_that_lost_its_ticket_writes_nothing(study: Database) -> None:
    """The fence: a late end of a trial that another worker has retried."""
    claim = study.tickets.claim("s", *ME)
    assert claim is not None and claim.trial_id is not None
    lost = ("worker lost", {"x": 1.0}, True)
    assert study.end_trial(
        claim.ticket.id, None, claim.trial_id, TrialState.FAIL, None, {}, back=lost
    )
    late = study.end_trial(
        claim.ticket.id, "me", claim.trial_id, TrialState.COMPLETE, 0.9, {"late": 1}
    )
    assert not late
    assert not study.report(claim.trial_id, "s", 0, 3, 0.9, {})
    assert not study.tickets.finish(claim.ticket.id, "me", "done")
    trial = study.studies.get_trial(claim.trial_id)
    assert (trial.state, trial.value, trial.user_attrs) == (TrialState.FAIL, None, {})
    assert trial.intermediate_values == {} and study.epochs("s") == []


def test_a_lost_ticket_waits_again_with_its_params_and_names_the_lost_trial(
    study: Database,
) -> None:
    """Decision 1: a retry repeats the point."""
    claim = study.tickets.claim("s", *ME)
    assert claim is not None and claim.trial_id is not None
    study.end_trial(
        claim.ticket.id,
        "me",
        claim.trial_id,
        TrialState.FAIL,
        None,
        {"reason": "oom"},
        back=("oom", {"lr": 0.1}, True),
    )
    again = study.tickets.claim("s", *ME)
    assert again is not None and again.ticket.idx == 0 and again.number == 1
    assert again.ticket.params == {"lr": 0.1} and again.ticket.attempt == 1
    assert again.ticket.payload == {"retry_of": 0} and again.ticket.cause == "oom"


def test_a_ticket_given_back_without_counting_keeps_its_attempts(study: Database) -> None:
    """An interrupted trial is no failed attempt."""
    claim = study.tickets.claim("s", *ME)
    assert claim is not None
    assert study.tickets.give_back(claim.ticket.id, "me", "interrupted", count=False)
    assert (_only(study).state, _only(study).attempt) == ("waiting", 0)


def test_a_lease_passes_and_a_renewed_one_does_not(study: Database) -> None:
    """The database's clock decides."""
    claim = study.tickets.claim("s", "me", "host", 1, 0.05)
    assert claim is not None
    time.sleep(0.1)
    assert [ticket.id for ticket in study.tickets.expired()] == [claim.ticket.id]
    assert study.tickets.renew("me", 30) == [claim.ticket.id]
    assert study.tickets.expired() == []


def test_a_reaper_leaves_a_ticket_alone_whose_lease_was_renewed_meanwhile(
    study: Database,
) -> None:
    """Between looking and acting the owner may have come back."""
    claim = study.tickets.claim("s", *ME)
    assert claim is not None and claim.trial_id is not None
    assert not study.tickets.give_back(claim.ticket.id, None, "hung", expired_only=True)
    assert not study.end_trial(
        claim.ticket.id, None, claim.trial_id, TrialState.FAIL, None, {}, expired_only=True
    )
    assert study.studies.get_trial(claim.trial_id).state == TrialState.RUNNING


def test_a_point_is_reserved_once_in_a_study(study: Database) -> None:
    """Two workers never evaluate the same params."""
    first, second = study.tickets.claim("s", *ME), study.tickets.claim("s", *ME)
    assert first is not None and second is not None
    assert study.tickets.reserve(first.ticket.id, "me", "lr=0.1")
    assert not study.tickets.reserve(second.ticket.id, "me", "lr=0.1")
    assert study.tickets.reserve(second.ticket.id, "me", "lr=0.2")
    assert study.tickets.reserve(second.ticket.id, "other", "lr=0.3"), "no other one has it"
    assert [ticket.params_key for ticket in study.tickets.list("s")][:2] == ["lr=0.1", "lr=0.2"]


def test_a_reopened_ticket_waits_and_keeps_its_attempts(study: Database) -> None:
    """Only failed tickets are reopened."""
    claim = study.tickets.claim("s", *ME)
    assert claim is not None
    study.tickets.finish(claim.ticket.id, "me", "failed", "error")
    assert study.tickets.reopen("s", [0, 1]) == 1
    assert (_only(study).state, _only(study).ended_at) == ("waiting", None)


def test_a_trial_that_somebody_else_told_keeps_its_end(study: Database) -> None:
    """The dashboard or a script may tell a RUNNING trial."""
    claim = study.tickets.claim("s", *ME)
    assert claim is not None and claim.trial_id is not None
    stock = optuna.storages.RDBStorage(study.url.replace("postgresql://", "postgresql+psycopg://"))
    optuna.load_study(study_name="s", storage=stock).tell(0, 0.25)
    stock.engine.dispose()
    assert study.end_trial(
        claim.ticket.id, "me", claim.trial_id, TrialState.COMPLETE, 0.9, {"late": 1}
    )
    trial = study.studies.get_trial(claim.trial_id)
    assert (trial.value, trial.user_attrs) == (0.25, {})
    assert _only(study).state == "done"


def test_a_process_killed_right_after_a_claim_leaves_a_ticket_and_its_trial(
    study: Database,
) -> None:
    """kill -9 between taking a ticket and driving its trial."""
    script = (
        "import os, signal, sys\nfrom storage import Database\n"
        "db = Database(sys.argv[1])\ndb.tickets.claim('s', 'gone', 'h', 1, 30)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script, study.url], check=False, cwd=ROOT)
    ticket = _only(study)
    assert (ticket.state, ticket.owner) == ("running", "gone")
    assert ticket.trial_id is not None
    assert study.studies.get_trial(ticket.trial_id).state == TrialState.RUNNING


def test_a_claim_does_not_walk_over_the_tickets_that_are_done(study: Database) -> None:
    """Also where the planner knows that nearly all are: PostgreSQL finds that out by itself."""
    with study.engine.begin() as connection:
        connection.execute(insert(tickets), [
            {"name": "s", "study": "s", "idx": 100 + k, "kind": "trial", "state": "done",
             "attempt": 0, "created_at": datetime.now(UTC)} for k in range(3000)])
        connection.execute(text("ANALYZE"))
    values = {"study_name": "s", "only": "s", "most": 1, "lease_s": 1.0, "new_owner": "me",
              "new_host": "h", "new_pid": 1, "new_claim_token": "t", "now": datetime.now(UTC)}
    with study.engine.begin() as connection:
        dialect = connection.dialect
        explain = "EXPLAIN QUERY PLAN " if dialect.name == "sqlite" else "EXPLAIN "
        asked = [(CLAIM_OF, values), (CLAIM, values), (RENEW, {"holder": "me", "lease_s": 1.0})]
        if dialect.name == "postgresql":
            mine = {"study_name": "s", "token": "t"}
            trial = {"study": "s", "state": TrialState.RUNNING, "start": None, "complete": None}
            asked += [(ADD_NOTED, mine | trial), (refusing_unless(HAS_TRIAL), mine)]
        for statement, fields in asked:
            plan = _plan(connection, statement, fields, explain)
            assert "ix_hpo_ticket_" in plan and "SCAN queue\n" not in plan, plan
            assert "Seq Scan on hpo_ticket" not in plan, plan


def test_sqlite_need_not_plan_a_claim_or_an_end_anew_each_time() -> None:
    """A bound state leaves open whether a partial index holds the row, so it would."""
    dialect = make_engine("sqlite:///unused.db").dialect
    for statement in (CLAIM, CLAIM_OF, RENEW, close_statement(True, False, True)):
        core: Any = statement.statement
        _, where = str(core.compile(dialect=dialect)).rsplit("WHERE", 1)
        assert "state = 'waiting'" in where or "state = 'running'" in where
        assert "state = ?" not in where


def _plan(connection: Connection, statement: Any, fields: dict[str, Any], explain: str) -> str:
    plans: list[str] = []

    def explained(_c: Any, cursor: Any, sql: str, values: Any, *_: Any) -> None:
        asking = cursor.connection.cursor()
        asking.execute(explain + sql, values)
        plans.append("\n".join(str(row[-1]) for row in asking.fetchall()) + "\n")

    event.listen(connection, "before_cursor_execute", explained)
    statement.run(connection, fields)
    event.remove(connection, "before_cursor_execute", explained)
    return plans[0]
