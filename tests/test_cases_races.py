"""The races between workers, as often as the cases say, without a start of processes each time.

A whole command is mostly imports, and by the time its last worker has them the first may have
emptied the queue. So a few processes are started once; in each round all open the database at one
instant and take their first tickets at another: the tightest races there are. What they do is a
worker's own work, from the claim to the stored end of the trial. Whole commands race in
test_cases_counts and test_cases_grid.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import optuna
import pytest
from commands import states, write
from optuna.trial import FrozenTrial

from hpo import Categorical, Int, discover
from hpo.baselines.grid import cells
from hpo.channel import Channel
from hpo.queue import fixed_items, search_items
from hpo.stop import Stop
from hpo.studies import ensure_study
from hpo.tasks import Tasks
from storage import Database

# A process that dies breaks the others' wait instead of hanging the test.
LIMIT_S = 60


def order(folder: Path, url: str, name: str, study: str, **changes: Any) -> dict[str, Any]:
    """Return what a worker is told of a run that is at the phase of this Optuna study."""
    return {"name": name, "only": study, "module": "s", "metric": "loss", "epochs": 1, "seed": 0,
            "direction": "minimize", "data_fraction": 1.0, "sampler": "random", "pruner": "none",
            "prune_startup": 5, "prune_warmup": 1, "allow_duplicates": False, "device": "cpu",
            "max_retries": None, "top_k": 3, "home": str(folder), "data_dir": None,
            "storage": url, "storage_timeout_s": 60, **changes}


def work(folder: Path, orders: Sequence[Mapping[str, Any]], worker: int) -> list[int]:
    """Be one worker: in each round claim and train until no ticket waits; return how many each."""
    os.chdir(folder)
    events = os.open(os.devnull, os.O_WRONLY)
    done = []
    for each in orders:
        spec, count = discover.load(each["module"]), 0
        BARRIER.wait(LIMIT_S)
        tasks = Tasks(spec, {**each, "worker": worker}, Channel(events), Stop())
        BARRIER.wait(LIMIT_S)
        while claim := tasks.turns.next():
            assert not tasks.run(claim)
            count += 1
        tasks.close()
        done.append(count)
    return done


def _share(barrier: Any) -> None:
    global BARRIER
    BARRIER = barrier


def race(folder: Path, processes: ForkServerContext, n_workers: int,
         orders: Sequence[Mapping[str, Any]]) -> list[tuple[int, ...]]:
    """Run each order's tickets by this many processes; return each round's trials by worker."""
    barrier = processes.Barrier(n_workers)
    with ProcessPoolExecutor(n_workers, processes, _share, (barrier,)) as pool:
        jobs = [pool.submit(work, folder, orders, i) for i in range(n_workers)]
        return list(zip(*(job.result() for job in jobs), strict=True))


def fresh(db: Database, name: str, study: str, items: Sequence[Any]) -> None:
    """Make a study and write its tickets, as a phase of `hpo run` does."""
    ensure_study(db, study, "minimize", "loss")
    assert db.tickets.write(name, study, "trial", list(items)) == len(items)


def stored(url: str, names: Iterable[str]) -> dict[str, list[FrozenTrial]]:
    """Return the trials of several studies as stock Optuna reads them, all of them COMPLETE."""
    stock = optuna.storages.RDBStorage(url)
    try:
        found = {name: optuna.load_study(study_name=name, storage=stock).trials for name in names}
    finally:
        stock.remove_session()
        stock.engine.dispose()
    assert {state for rows in found.values() for state in states(rows)} == {"COMPLETE"}
    return found


def took_part(rounds: Sequence[Sequence[int]]) -> bool:
    """Return whether every worker trained in some round, and several in each of many trials."""
    return all(map(sum, zip(*rounds, strict=True))) and all(
        sum(count > 0 for count in counts) > 1 for counts in rounds if sum(counts) > 4)


def test_ten_fresh_studies_have_ten_trials_each(
    tmp_path: Path, db: Database, ready_url: str, processes: ForkServerContext
) -> None:
    """C11.3: 10 trials by 4 workers, ten times, on SQLite and on PostgreSQL."""
    write(tmp_path, "s", body='time.sleep(0.05)\nyield {"loss": (x - 0.3) ** 2}')
    names = [f"s{k}" for k in range(10)]
    for name in names:
        fresh(db, name, name, search_items(10, 0))
    rounds = race(tmp_path, processes, 4, [order(tmp_path, ready_url, n, n) for n in names])
    assert [sum(counts) for counts in rounds] == [10] * 10
    assert took_part(rounds)
    for found in stored(ready_url, names).values():
        assert [trial.number for trial in found] == list(range(10))


def test_eight_workers_on_five_fresh_files_have_forty_trials_each(
    tmp_path: Path, sqlite_template: Path, processes: ForkServerContext
) -> None:
    """C01.1: five files that no worker has opened before, numbers without a gap."""
    write(tmp_path, "s")
    urls = [f"sqlite:///{shutil.copy(sqlite_template, tmp_path / f'{k}.db')}" for k in range(5)]
    for url in urls:
        db = Database(url)
        fresh(db, "s", "s", search_items(40, 0))
        db.close()
    rounds = race(tmp_path, processes, 8, [order(tmp_path, url, "s", "s") for url in urls])
    assert [sum(counts) for counts in rounds] == [40] * 5
    assert took_part(rounds)
    for url in urls:
        assert [trial.number for trial in stored(url, ["s"])["s"]] == list(range(40))


@pytest.mark.parametrize("ready_url", ["sqlite"], indirect=True)
def test_no_cell_of_ten_fresh_grids_runs_twice(
    tmp_path: Path, db: Database, ready_url: str, processes: ForkServerContext
) -> None:
    """C15.1, C15.2: 8 cells, 1 and 3 by 4 workers, ten times each."""
    grids = {"eight": ("x=Int(0, 3), y=Categorical('a', 'b')", None),
             "one": ("x=Int(0, 0)", None), "three": ("x=Int(0, 9)", {"x": [1, 5, 7]})}
    spaces = {"eight": {"x": Int(0, 3), "y": Categorical("a", "b")}, "one": {"x": Int(0, 0)},
              "three": {"x": Int(0, 9)}}
    orders, expected = [], {}
    for study, (space, values) in grids.items():
        write(tmp_path, study, space, "time.sleep(0.05)\nyield {'loss': 1.0}")
        wanted = cells(spaces[study], values, {})
        for k in range(10):
            name = f"{study}{k}"
            fresh(db, name, f"{name}/grid", fixed_items(wanted, 0))
            orders.append(order(tmp_path, ready_url, name, f"{name}/grid", module=study))
            expected[f"{name}/grid"] = sorted(tuple(cell.values()) for cell in wanted)
    rounds = race(tmp_path, processes, 4, orders)
    assert [sum(counts) for counts in rounds] == [8] * 10 + [1] * 10 + [3] * 10
    assert took_part(rounds)
    for study, found in stored(ready_url, expected).items():
        assert sorted(tuple(trial.params.values()) for trial in found) == expected[study]


@pytest.mark.parametrize("ready_url", ["sqlite"], indirect=True)
def test_workers_with_one_seed_draw_nine_params_in_each_of_five_fresh_studies(
    tmp_path: Path, db: Database, ready_url: str, processes: ForkServerContext
) -> None:
    """C32.1: 9 different x by 3 workers with --seed 7, five times each with random and tpe."""
    write(tmp_path, "s", body='time.sleep(0.1)\nyield {"loss": x}')
    orders = []
    for sampler in ("random", "tpe"):
        for name in (f"{sampler}{k}" for k in range(5)):
            fresh(db, name, name, search_items(9, 7))
            orders.append(order(tmp_path, ready_url, name, name, sampler=sampler, seed=7))
    rounds = race(tmp_path, processes, 3, orders)
    assert took_part(rounds)
    for found in stored(ready_url, [each["name"] for each in orders]).values():
        assert len({trial.params["x"] for trial in found}) == len(found) == 9
