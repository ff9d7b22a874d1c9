"""Turns of a worker: each trial ends once, and short ones do not wait for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from commands import TIMEOUT_S, finish, search, search_words, start, states, trials, url, write
from optuna.study import StudyDirection
from optuna.trial import TrialState

from hpo import turns
from hpo.errors import StorageError
from hpo.queue import NOT_BEGUN, end_from_json, end_to_json
from hpo.turns import Turns
from storage import Claim, Database, NewTicket, TrialEnd
from storage.ending import Back

ME = "me|1|2"


@pytest.fixture
def queued(db: Database) -> Database:
    """Give a database with six tickets of a study."""
    db.studies.create_new_study([StudyDirection.MAXIMIZE], "s")
    db.tickets.write("s", "s", "trial", [NewTicket(idx) for idx in range(6)])
    return db


def taking(db: Database) -> Turns:
    return Turns(db, {"name": "s", "only": "s"}, ME)


def ended(claim: Claim, value: float, began_at: datetime | None = None) -> TrialEnd:
    assert claim.trial_id is not None
    return TrialEnd(claim.ticket.id, ME, claim.trial_id, TrialState.COMPLETE, value, {"a": 1},
                    began_at=began_at)


def stored(db: Database) -> list[Any]:
    """Return the trials as another process reads them."""
    fresh = Database(db.url)
    found = fresh.studies.get_all_trials(fresh.studies.get_study_id_from_name("s"))
    fresh.close()
    return found


def running(db: Database) -> int:
    return db.tickets.counts("s")["running"]


def soon(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_short_trials_are_taken_in_order_and_each_ends_once(queued: Database) -> None:
    worker, told, numbers = taking(queued), [], []
    while (claim := worker.next()) is not None:
        numbers.append(claim.number)
        worker.end_beside(ended(claim, float(len(numbers))), told.append)
    worker.close()
    assert numbers == list(range(6)) and told == [True] * 6
    found = stored(queued)
    assert [trial.value for trial in found] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert queued.tickets.counts("s")["done"] == 6


def test_one_ticket_is_held_ahead_and_no_more(queued: Database) -> None:
    worker = taking(queued)
    first = worker.next()
    assert first is not None and running(queued) == 1
    worker.end_beside(ended(first, 1.0), lambda _: None)
    soon(lambda: running(queued) == 2)
    second = worker.next()
    assert second is not None and second.number == 1
    worker.end_beside(ended(second, 1.0), lambda _: None)
    worker.settle()
    assert running(queued) == 2 and queued.tickets.counts("s")["done"] == 2
    worker.close()


def test_the_end_of_a_long_trial_takes_the_ticket_that_is_held(queued: Database) -> None:
    worker, told = taking(queued), []
    for short in (True, False, False):
        claim = worker.next()
        assert claim is not None
        (worker.end_beside if short else later(worker))(ended(claim, 1.0), told.append)
    assert told == [True] * 3 and running(queued) == 1
    following = worker.next()
    assert following is not None and following.number == 3
    worker.close()


def later(worker: Turns) -> Callable[..., None]:
    return lambda end, told: worker.end(end, told, last=False)


def test_tickets_that_were_not_begun_go_back_uncounted(queued: Database) -> None:
    worker = taking(queued)
    first = worker.next()
    assert first is not None
    worker.end_beside(ended(first, 1.0), lambda _: None)
    worker.close()
    assert queued.tickets.counts("s") == {"waiting": 5, "running": 0, "done": 1, "failed": 0}
    assert {ticket.attempt for ticket in queued.tickets.list("s")} == {0}
    given = stored(queued)[1:]
    assert [trial.state for trial in given] == [TrialState.FAIL] * 2
    assert {trial.user_attrs["reason"] for trial in given} == {
        "interrupted: before its first epoch"}


def test_a_ticket_does_not_wait_behind_a_trial_that_turns_out_long(
    queued: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_HOLD_S", 0.2)
    worker = taking(queued)
    first = worker.next()
    assert first is not None
    worker.end_beside(ended(first, 1.0), lambda _: None)
    long = worker.next()
    assert long is not None
    soon(lambda: running(queued) == 2)
    soon(lambda: running(queued) == 1)
    assert queued.tickets.counts("s")["waiting"] == 4
    worker.end_beside(ended(long, 2.0), lambda _: None)
    again = worker.next()
    assert again is not None and again.number == 3
    assert again.ticket.idx == 2, "the ticket that went back is the first that waits"
    worker.close()


def test_a_lost_trial_is_told_of_and_the_next_ticket_taken_all_the_same(queued: Database) -> None:
    worker, told = taking(queued), []
    claim = worker.next()
    assert claim is not None and claim.trial_id is not None
    other = Database(queued.url)
    assert other.end_trial(claim.ticket.id, ME, claim.trial_id, TrialState.FAIL, None, {},
                           back=("worker lost", None, True))
    other.close()
    worker.end_beside(ended(claim, 1.0), told.append)
    assert told == [False]
    following = worker.next()
    assert following is not None and following.number == 1
    worker.close()
    assert stored(queued)[0].state == TrialState.FAIL


def test_a_trial_starts_when_it_is_begun_not_when_its_ticket_was_taken(queued: Database) -> None:
    worker, at = taking(queued), datetime.now(UTC) + timedelta(seconds=5)
    claim = worker.next()
    assert claim is not None
    worker.end_beside(ended(claim, 1.0, at), lambda _: None)
    worker.settle()
    [mine] = [t for t in queued.studies.get_all_trials(
        queued.studies.get_study_id_from_name("s")) if t.number == 0]
    worker.close()
    local = at.astimezone().replace(tzinfo=None)
    assert mine.datetime_start == stored(queued)[0].datetime_start == local


def test_an_end_that_could_not_be_stored_is_told_at_the_next_turn(
    queued: Database, tmp_path: Path
) -> None:
    """The database stays away for longer than it may."""
    impatient = Database(queued.url, 0.3)
    worker = taking(impatient)
    claim = worker.next()
    assert claim is not None
    following, locked, free = [], threading.Event(), threading.Event()
    holder = threading.Thread(target=_hold, args=(queued, locked, free))
    holder.start()
    try:
        assert locked.wait(20)
        with pytest.raises(StorageError):
            worker.end_beside(ended(claim, 1.0), following.append)
        assert following == []
    finally:
        free.set()
        holder.join()
    impatient.close()


def _hold(db: Database, locked: threading.Event, free: threading.Event) -> None:
    """Keep everybody from writing."""
    from sqlalchemy import text

    with db.engine.connect() as connection:
        if connection.dialect.name == "sqlite":
            connection.execute(text("BEGIN IMMEDIATE"))
        else:
            connection.execute(text("LOCK TABLE hpo_ticket IN ACCESS EXCLUSIVE MODE"))
        locked.set()
        free.wait(30)
        connection.rollback()


def test_the_end_of_a_trial_is_the_same_after_a_way_through_json() -> None:
    end = TrialEnd(3, ME, 7, TrialState.FAIL, None, {"reason": "error: ä", "n": 1},
                   Back("error", {"x": 0.1}, False), began_at=datetime.now(UTC))
    assert end_from_json(end_to_json(end)) == end


CRASHING = """
    if run.dir.name == "{number}" and not (HERE / "killed").exists():
        (HERE / "killed").touch()
        os.kill(os.getpid(), 9)
    yield {{"loss": x}}
"""


@pytest.mark.parametrize("number", [1, 4])
def test_a_worker_killed_as_a_trial_begins_loses_no_trial_that_had_ended(
    tmp_path: Path, number: int
) -> None:
    """The end of the trial before is still to be stored, and one ahead is not begun."""
    write(tmp_path, "s", body=CRASHING.format(number=number))
    search(tmp_path, "s", "--n-trials", 9, "--workers", 1, "--sampler", "random")
    found = trials(tmp_path, "s")
    assert states(found).count("COMPLETE") == 9
    reasons = {trial.number: trial.user_attrs["reason"] for trial in found
               if trial.state == TrialState.FAIL}
    assert reasons.pop(number).startswith("worker lost: its process was killed by signal 9")
    assert all(reason.startswith("interrupted: before its first epoch")
               for reason in reasons.values()) and len(reasons) <= 1
    assert [trial.number for trial in found] == list(range(len(found)))
    before = found[number - 1]
    assert before.state == TrialState.COMPLETE and before.value == before.params["x"]
    assert before.intermediate_values == {0: before.value}
    assert before.user_attrs["best"] == {"loss": before.value}


LOGGING = """
    with open(HERE / "log", "a") as file:
        file.write(f"{os.getpid()} {run.dir.name}\\n")
    time.sleep(0.1)
    yield {"loss": x}
"""


def pids(folder: Path, n_trials: int) -> list[int]:
    """Wait until so many trials have begun; return the pids of the workers that ran the last."""
    log = folder / "log"
    soon(lambda: log.exists() and len(log.read_text().splitlines()) >= n_trials)
    return sorted({int(line.split()[0]) for line in log.read_text().splitlines()})


def check_only_begun_trials_are_lost(folder: Path, n_trials: int) -> None:
    """With --max-retries 0 a trial that had begun is lost, and no ticket that had not."""
    found = trials(folder, "s")
    failed = [trial for trial in found if trial.state == TrialState.FAIL]
    lost = [trial for trial in failed if trial.user_attrs["reason"].startswith("worker lost")]
    assert states(found).count("COMPLETE") == n_trials - len(lost)
    assert len(lost) <= 2 and all(trial.params for trial in lost)
    assert all(trial.user_attrs["reason"].startswith(NOT_BEGUN) for trial in failed
               if trial not in lost)
    db = Database(url(folder))
    assert {ticket.idx for ticket in db.tickets.list("s")} == set(range(n_trials))
    assert db.tickets.counts("s") == {"waiting": 0, "running": 0, "done": n_trials - len(lost),
                                      "failed": len(lost)}
    db.close()


def test_two_workers_that_are_killed_at_once_lose_what_they_had_begun_alone(
    tmp_path: Path
) -> None:
    write(tmp_path, "s", body=LOGGING)
    process = start(tmp_path, *search_words("s", "--n-trials", 30, "--workers", 2, "--sampler",
                                            "random", "--max-retries", 0))
    for pid in pids(tmp_path, 8):
        os.kill(pid, signal.SIGKILL)
    code, output = finish(process)
    assert code == 0, output
    check_only_begun_trials_are_lost(tmp_path, 30)


def test_a_run_that_is_killed_with_its_workers_loses_what_they_had_begun_alone(
    tmp_path: Path
) -> None:
    write(tmp_path, "s", body=LOGGING)
    words = search_words("s", "--n-trials", 20, "--workers", 2, "--sampler", "random",
                         "--max-retries", 0)
    process = start(tmp_path, *words)
    workers = pids(tmp_path, 8)
    for pid in (process.pid, *workers):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    code, output = finish(start(tmp_path, *words))
    assert code == 0, output
    check_only_begun_trials_are_lost(tmp_path, 20)


def test_a_process_that_dies_while_it_draws_is_tried_again_once_and_not_for_ever(
    tmp_path: Path
) -> None:
    """A sampler may crash as well as an objective."""
    path = write(tmp_path, "s", body='yield {"loss": x}')
    path.write_text("""
import os
import hpo.search
drawn = hpo.search.draw
def draw(study, trial, *others):
    if trial.number in (3, 4):
        os.kill(os.getpid(), 9)
    return drawn(study, trial, *others)
hpo.search.draw = draw
""" + path.read_text())
    search(tmp_path, "s", "--n-trials", 8, "--workers", 1)
    found = trials(tmp_path, "s")
    assert states(found) == ["COMPLETE"] * 3 + ["FAIL"] * 2 + ["COMPLETE"] * 4
    assert all(trial.user_attrs["reason"].startswith("worker lost") for trial in found[3:5])


def test_a_worker_that_is_told_to_end_ends_in_order(tmp_path: Path) -> None:
    """SIGTERM to a worker alone, while another thread of it waits for commands."""
    write(tmp_path, "s", body=LOGGING)
    process = start(tmp_path, *search_words("s", "--n-trials", 20, "--workers", 1))
    os.kill(pids(tmp_path, 4)[0], signal.SIGTERM)
    code, output = finish(process)
    assert code == 0, output
    found = trials(tmp_path, "s")
    assert states(found).count("COMPLETE") == 20
    assert not any("signal" in trial.user_attrs["reason"] for trial in found)


def test_no_ticket_is_left_by_a_worker_whose_own_news_failed(queued: Database) -> None:
    """What follows an end may fail; the claim that came with it is given back all the same."""
    def fails(_: bool) -> None:
        raise PermissionError("no")

    worker = taking(queued)
    first = worker.next()
    assert first is not None
    with pytest.raises(PermissionError):
        worker.end_beside(ended(first, 1.0), fails)
    worker.close()
    assert running(queued) == 0 and queued.tickets.counts("s")["done"] == 1


def test_short_trials_leave_no_thread_or_file_behind(tmp_path: Path) -> None:
    write(tmp_path, "s", body='yield {"loss": x}')
    search(tmp_path, "s", "--n-trials", 20, "--workers", 2, "--sampler", "random")
    logs = tmp_path / "hpo-runs" / "logs" / "s"
    assert sorted(os.listdir(logs)) == ["search"]
    assert sorted(os.listdir(logs / "search"), key=lambda name: int(name[:-4])) == [
        f"{n}.log" for n in range(20)]
