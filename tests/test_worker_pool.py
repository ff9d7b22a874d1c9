"""Parent and workers: questions, faults, deaths, replacements and a stop in order."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from commands import TIMEOUT_S, write, write_text

import storage
from hpo.channel import Channel, LineBuffer
from hpo.devices import slots
from hpo.errors import HpoError, InputError
from hpo.pool import Pool
from hpo.queue import search_items
from hpo.studies import ensure_study
from storage import Database

DIGITS = """
    from hpo import Float, StudySpec
    from hpo.train import MLP, AdamW, Recipe, digits

    def build(run, *, lr):
        return Recipe(data=digits(run), model=MLP(hidden=16), optimizer=AdamW(lr=lr))

    STUDY = StudySpec(space={"lr": Float(1e-3, 1e-2)}, build=build, minimize="val_loss",
                      epochs=1)
    """


@pytest.fixture
def new_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Pool]]:
    """Give a function that makes a pool in an empty folder; all of them are killed at the end."""
    monkeypatch.chdir(tmp_path)
    pools: list[Pool] = []

    def make(study: str = "s", n: int = 1) -> Pool:
        pools.append(Pool(study, slots("cpu", n)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.kill()
        pool.stop()


def order(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"name": "s", "module": "s", "metric": "loss", "direction": "minimize", "epochs": 1,
            "seed": 0, "data_fraction": 1.0, "sampler": "random", "pruner": "none",
            "prune_startup": 5, "prune_warmup": 1, "allow_duplicates": False,
            "max_retries": None, "top_k": 3, "home": str(folder), "data_dir": None, "only": None,
            "storage": f"sqlite:///{folder / 'hpo.db'}", "storage_timeout_s": 60, **changes}


def queued(folder: Path, n: int) -> Database:
    """Set up a database with n tickets of the study `s`."""
    url = f"sqlite:///{folder / 'hpo.db'}"
    storage.init(url)
    db = Database(url)
    ensure_study(db, "s", "minimize", "loss")
    db.tickets.write("s", "s", "trial", search_items(n, 0))
    return db


# Events that came together with one that was waited for.
UNREAD: WeakKeyDictionary[Pool, deque[dict[str, Any]]] = WeakKeyDictionary()


def until(pool: Pool, wanted: Callable[[dict[str, Any]], bool]) -> list:
    """Return the events up to the first that is wanted; those after it are for the next call."""
    seen, deadline = [], time.monotonic() + TIMEOUT_S
    unread = UNREAD.setdefault(pool, deque())
    while unread or time.monotonic() < deadline:
        while unread:
            seen.append(unread.popleft())
            if wanted(seen[-1]):
                return seen
        unread.extend(event for _, event in pool.poll(0.2))
    raise AssertionError(f"no such event in {TIMEOUT_S} s: {seen}")


def named(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda event: event["event"] == name


def test_a_worker_describes_its_module(tmp_path: Path, new_pool: Callable[..., Pool]) -> None:
    write(tmp_path, "s", "x=Int(0, 1), y=Float(0.0, 1.0)", 'yield {"loss": y}',
          more="defaults={'x': 1, 'y': 0.5}, grid={'x': [0, 1]}")
    found = new_pool().describe()
    assert found["spec"]["metric"] == "loss"
    assert found["grid"] == [{"x": 0, "y": 0.5}, {"x": 1, "y": 0.5}]
    assert found["defaults"] == {"x": 1, "y": 0.5}
    assert found["path"] == str(tmp_path / "search_spaces" / "s.py")


def test_the_module_s_faults_come_to_the_parent(
    tmp_path: Path, new_pool: Callable[..., Pool]
) -> None:
    """C28: exit code 2, since it is bad input."""
    write(tmp_path, "s", "x=Float(2.0, 1.0)")
    with pytest.raises(InputError, match="study 's', param 'x': low must be below high"):
        new_pool().describe()


def test_a_module_that_kills_its_process_is_told_with_what_it_printed(
    tmp_path: Path, new_pool: Callable[..., Pool]
) -> None:
    write_text(tmp_path, "s", "import os\nprint('last words', flush=True)\nos._exit(9)")
    with pytest.raises(HpoError, match="(?s)ended with code 9 before any trial:.*last words"):
        new_pool().describe()


@pytest.mark.parametrize("where", ["the module is loaded", "the model is built"])
@pytest.mark.parametrize("n_killed", [2, 3])
def test_a_first_worker_that_is_killed_is_asked_again_twice(
    tmp_path: Path, new_pool: Callable[..., Pool], where: str, n_killed: int
) -> None:
    """By the kernel, say, where the memory is scarce for a moment."""
    dies = f"""
    import os, signal
    from pathlib import Path
    DEATHS = Path({str(tmp_path / 'deaths')!r})
    def die(place):
        n = len(DEATHS.read_text()) if DEATHS.exists() else 0
        if place == {where!r} and n < {n_killed}:
            DEATHS.write_text("x" * (n + 1))
            os.kill(os.getpid(), signal.SIGKILL)
    die("the module is loaded")
    """
    write_text(tmp_path, "s", dies + DIGITS.replace(
        "        return Recipe", '        die("the model is built")\n        return Recipe'))
    pool = new_pool()

    def prepared() -> dict[str, Any]:
        pool.describe()
        return pool.prepare(order(tmp_path, metric="val_loss"))

    if n_killed == 2:
        assert prepared()["n_classes"] == 10
    else:
        with pytest.raises(HpoError, match="first worker ended with code -9 before any trial"):
            prepared()
    assert len((tmp_path / "deaths").read_text()) == n_killed


def test_a_worker_that_is_lost_before_there_is_work_is_replaced(
    tmp_path: Path, new_pool: Callable[..., Pool]
) -> None:
    write(tmp_path, "s", body='(HERE / f"at-{run.dir.name}").touch()\n'
                              'while len(list(HERE.glob("at-*"))) < 2:\n    time.sleep(0.01)\n'
                              'yield {"loss": x}')
    db = queued(tmp_path, 2)
    pool = new_pool(n=2)
    pool.describe()
    lost = pool.members[1].process
    lost.kill()
    until(pool, lambda event: event["event"] == "exit")
    pool.work(order(tmp_path))
    assert pool.members[1].process.pid != lost.pid
    # Each of the two trials waits for the other one to begin.
    until(pool, named("end"))
    db.close()


def test_what_a_module_prints_is_no_event(tmp_path: Path, new_pool: Callable[..., Pool]) -> None:
    path = write(tmp_path, "s")
    path.write_text('print("hello")\n' + path.read_text())
    assert new_pool().describe()["event"] == "spec"


def test_workers_take_the_tickets_and_tell_each_trial(
    tmp_path: Path, new_pool: Callable[..., Pool]
) -> None:
    write(tmp_path, "s")
    db = queued(tmp_path, 3)
    pool = new_pool()
    pool.describe()
    assert pool.prepare(order(tmp_path)) == {}
    pool.work(order(tmp_path))
    events = until(pool, named("idle"))
    assert [e["event"] for e in events] == [
        "draw", "begin", "epoch", "ending", "end"] * 3 + ["idle"]
    assert [e["number"] for e in events if e["event"] == "end"] == [0, 1, 2]
    assert not pool.busy()
    db.close()


def test_a_worker_that_dies_is_replaced_and_its_trial_is_named(
    tmp_path: Path, new_pool: Callable[..., Pool]
) -> None:
    """C40.2: the slot is in use again."""
    write(tmp_path, "s", body='if run.dir.name == "0":\n    os._exit(7)\nyield {"loss": x}')
    db = queued(tmp_path, 2)
    pool = new_pool()
    pool.describe()
    pool.prepare(order(tmp_path))
    first = pool.members[0].process.pid
    pool.work(order(tmp_path))
    events = until(pool, named("end"))
    gone = next(event for event in events if event["event"] == "exit")
    assert (gone["code"], [number for _, number in gone["heard"]][0], gone["pid"]) == (7, 0, first)
    assert events[-1]["number"] == 1
    assert pool.members[0].process.pid != first
    db.close()


def test_workers_that_only_die_end_the_run(tmp_path: Path, new_pool: Callable[..., Pool]) -> None:
    write(tmp_path, "s", body='os.write(2, b"no luck")\nos._exit(7)\nyield {}')
    db = queued(tmp_path, 20)
    pool = new_pool()
    pool.describe()
    pool.prepare(order(tmp_path))
    pool.work(order(tmp_path))
    with pytest.raises(HpoError, match="5 workers died one after another, the last with code 7"):
        until(pool, named("end"))
    db.close()


def test_a_stop_lets_the_epoch_end_and_puts_the_trial_back(
    tmp_path: Path, new_pool: Callable[..., Pool]
) -> None:
    """No trial is left RUNNING; the ticket waits with the trial's params."""
    write(tmp_path, "s", body="for _ in range(99):\n    time.sleep(0.2)\n    yield {'loss': x}",
          epochs=99)
    db = queued(tmp_path, 1)
    pool = new_pool()
    pool.describe()
    pool.prepare(order(tmp_path))
    pool.work(order(tmp_path))
    until(pool, named("epoch"))
    ends = [event for _, event in pool.stop() if event["event"] == "end"]
    assert [(e["state"], e["back"]) for e in ends] == [("FAIL", True)]
    assert ends[0]["reason"].startswith("interrupted: after epoch")
    ticket = db.tickets.list("s")[0]
    assert (ticket.state, ticket.attempt) == ("waiting", 0)
    assert set(ticket.params or {}) == {"x"}
    db.close()


def test_an_objective_s_own_random_numbers_depend_on_the_seed_alone(
    tmp_path: Path, new_pool: Callable[..., Pool]
) -> None:
    """Each trial of one warm worker is seeded anew, in Python, numpy and torch."""
    write_text(tmp_path, "s", """
        import random
        import numpy
        import torch
        from hpo import Float, StudySpec

        def objective(run, x):
            yield {"loss": random.random() + numpy.random.rand() + torch.rand(()).item()}

        STUDY = StudySpec(space={"x": Float(0.0, 1.0)}, objective=objective,
                          minimize="loss", epochs=1)
        """)
    db = queued(tmp_path, 3)
    pool = new_pool()
    pool.describe()
    pool.work(order(tmp_path))
    ends = [until(pool, named("end"))[-1] for _ in range(3)]
    assert len({end["value"] for end in ends}) == 1
    db.close()


def test_a_checkpoint_that_cannot_be_written_costs_no_result(
    tmp_path: Path, new_pool: Callable[..., Pool]
) -> None:
    """A file stands where the folder of the weights should be, as a full disk would refuse it."""
    write_text(tmp_path, "s", DIGITS)
    db = queued(tmp_path, 1)
    (tmp_path / "artifacts/s/search/0.pt").mkdir(parents=True)
    pool = new_pool()
    pool.describe()
    pool.work(order(tmp_path, data_fraction=0.1))
    events = until(pool, named("end"))
    note = next(event for event in events if event["event"] == "note")
    assert "its checkpoint could not be written" in note["text"]
    assert events[-1]["state"] == "COMPLETE"
    db.close()


def test_a_killed_pool_leaves_no_process(tmp_path: Path, new_pool: Callable[..., Pool]) -> None:
    write(tmp_path, "s", body="time.sleep(60)\nyield {'loss': x}")
    db = queued(tmp_path, 2)
    pool = new_pool(n=2)
    pool.describe()
    pool.prepare(order(tmp_path))
    pool.work(order(tmp_path))
    until(pool, named("begin"))
    pids = [member.process.pid for member in pool.members.values()]
    pool.kill()
    pool.stop()
    assert pool.members == {}
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    db.close()


def test_a_worker_ends_itself_when_its_parent_is_gone(
    tmp_path: Path, new_pool: Callable[..., Pool]
) -> None:
    write(tmp_path, "s")
    pool = new_pool()
    pool.describe()
    process = pool.members[0].process
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=30) == 0


def test_lines_are_put_together_from_any_pieces() -> None:
    buffer = LineBuffer()
    data = b'{"event": "a"}\n{"event": "b", "t": "\xc3\xa4"}\n'
    found = [message for i in range(len(data)) for message in buffer.feed(data[i:i + 1])]
    assert [message["event"] for message in found] == ["a", "b"]


def test_a_reader_that_is_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    Channel(writer).send("epoch", number=1)
    os.close(writer)
