"""What a trial costs beside its training: Optuna's own SQLite storage, ours, and hpo's worker.

    python benchmarks/bookkeeping.py [--sizes 100,10000] [--trials 40] [--rounds 3]
                                     [--database sqlite|postgresql|both]

A trial has 6 params, 10 epochs and a look at the pruner after each, and trains nothing; the study
holds 100 or 10,000 ended trials before. Each side runs in a process of its own: CPU time is the
median over trials after a warm-up, statements are cursor calls (an executemany is one) and
commits those of the engine, both the median of ten trials that follow. "open" is the CPU time in
which a new process that has done its imports has all trials of the study. The sides take turns,
and the table holds medians over the rounds. FAIL where ours misses a goal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from databases import KINDS, databases
from history import N_EPOCHS, SPACE, curve, fill

SIDES = {"stock": "Optuna's storage", "ours": "storage.open", "worker": "hpo's worker"}
SAMPLERS = ("random", "tpe")
N_WARM, N_COUNTED = 10, 10
GOAL_STATEMENTS, GOAL_COMMITS, GOAL_OPEN_S, GOAL_GROWTH = 12, 2, 0.5, 1.3
GOAL_MS = {"random": 5.0, "tpe": 15.0}


class Counter:
    """Statements and commits of an engine, once it is told to count."""

    def __init__(self, engine: Any) -> None:
        from sqlalchemy import event

        self.statements = self.commits = 0
        event.listen(engine, "before_cursor_execute", self._statement)
        event.listen(engine, "commit", self._commit)

    def _statement(self, *_: Any) -> None:
        self.statements += 1

    def _commit(self, *_: Any) -> None:
        self.commits += 1


def measured(one_trial: Callable[[], None], engine: Any, n_trials: int) -> dict[str, float]:
    """Run trials and return what one costs."""
    for _ in range(N_WARM):
        one_trial()
    times = []
    for _ in range(n_trials):
        started = time.process_time()
        one_trial()
        times.append(time.process_time() - started)
    counter, counts = Counter(engine), []
    for _ in range(N_COUNTED):
        counter.statements = counter.commits = 0
        one_trial()
        counts.append((counter.statements, counter.commits))
    return {"ms": 1000 * statistics.median(times), "statements": statistics.median(
        n for n, _ in counts), "commits": statistics.median(n for _, n in counts)}


def by_optuna(url: str, side: str, sampler: str, n_trials: int) -> dict[str, float]:
    """Measure trials that are asked, reported and told with Optuna's own calls."""
    import optuna

    import storage
    from hpo.search import make_pruner
    from hpo.tpe import BoundedTPESampler

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    kinds: dict[str, Any] = {"random": optuna.samplers.RandomSampler,
                             "tpe": optuna.samplers.TPESampler}
    if side == "stock":
        opened: Any = optuna.storages.RDBStorage(url)
        study = optuna.load_study(study_name="s", storage=opened, sampler=kinds[sampler](seed=1),
                                  pruner=optuna.pruners.MedianPruner())
        engine = opened.engine
    else:
        kinds["tpe"] = BoundedTPESampler
        opened = storage.open(url)
        study = optuna.load_study(
            study_name="s", storage=opened, sampler=kinds[sampler](seed=1),
            pruner=make_pruner("median", n_startup=5, n_warmup=0, epochs=N_EPOCHS))
        engine = opened._link.engine

    def one_trial() -> None:
        trial = study.ask()
        params = {name: trial._suggest(name, kind) for name, kind in SPACE.items()}
        for epoch, value in enumerate(curve(params)):
            trial.report(value, epoch)
            if trial.should_prune() and epoch == N_EPOCHS:
                raise AssertionError("every trial shall run to its end, so that all cost alike")
        study.tell(trial, value)

    return measured(one_trial, engine, n_trials)


def by_worker(url: str, sampler: str, n_trials: int, folder: Path) -> dict[str, float]:
    """Measure tickets that a worker of hpo claims, drives and closes."""
    from hpo import Epochs, Float, StudySpec
    from hpo.channel import Channel
    from hpo.stop import Stop
    from hpo.tasks import Tasks
    from storage import Database, NewTicket

    def objective(run: Any, **params: float) -> Epochs:
        for value in curve(params):
            yield {"score": value}

    spec = StudySpec(space={name: Float(kind.low, kind.high, log=kind.log)
                            for name, kind in SPACE.items()},
                     objective=objective, maximize="score", epochs=N_EPOCHS)
    db = Database(url)
    first = max((ticket.idx for ticket in db.tickets.list("s")), default=-1) + 1
    items = [NewTicket(idx=first + i, payload={"seed": 0})
             for i in range(N_WARM + n_trials + N_COUNTED)]
    db.tickets.write("s", "s", "trial", items)
    db.close()
    order = {"name": "s", "storage": url, "storage_timeout_s": 60, "home": str(folder),
             "data_dir": None, "only": "s",
             "sampler": sampler, "pruner": "median", "prune_startup": 5, "prune_warmup": N_EPOCHS,
             "epochs": N_EPOCHS, "seed": 1, "allow_duplicates": False, "max_retries": None,
             "top_k": 0, "device": "cpu", "worker": 0, "data_fraction": 1.0}
    tasks = Tasks(spec, order, Channel(os.open(os.devnull, os.O_WRONLY)), Stop())

    def one_trial() -> None:
        claim = tasks.turns.next()
        assert claim is not None
        tasks.run(claim)

    try:
        return measured(one_trial, tasks.db.engine, n_trials)
    finally:
        tasks.close()


def opening(url: str, side: str) -> dict[str, float]:
    """Measure how long a new process takes until it has all trials of the study."""
    import optuna

    import storage

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    started = time.process_time()
    opened: Any = optuna.storages.RDBStorage(url) if side == "stock" else storage.open(url)
    study = optuna.load_study(study_name="s", storage=opened)
    n_trials = len(study.get_trials(deepcopy=False))
    return {"open_s": time.process_time() - started, "n_trials": n_trials}


def one(url: str, side: str, sampler: str, n_trials: int) -> dict[str, float]:
    """Measure one side in a process of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, "--side", side, "--sampler", sampler, "--url", url,
               "--trials", str(n_trials)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(kind: str, sizes: list[int], n_trials: int, n_rounds: int) -> dict[Any, Any]:
    """Measure all sides at all sizes, in turns, and return the medians over the rounds."""
    found: dict[tuple[str, int, str], list[dict[str, float]]] = {}
    urls: dict[tuple[str, int], str] = {}
    with databases() as made:
        for n in sizes:
            for side in _sides(kind):
                url = urls[side, n] = made.new(kind)
                fill(url, "s", n)
        for _ in range(n_rounds):
            for side in _sides(kind):
                for what in ("open", *SAMPLERS):
                    for n in sizes:
                        result = one(urls[side, n], side, what, n_trials)
                        found.setdefault((side, n, what), []).append(result)
    return {key: {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
            for key, rounds in found.items()}


def table(kind: str, sizes: list[int], n_trials: int, n_rounds: int) -> bool:
    """Print the table of one kind of database and return whether goals are met."""
    found = measure(kind, sizes, n_trials, n_rounds)
    print(f"\n{kind}: one trial of {len(SPACE)} params and {N_EPOCHS} epochs, median of "
          f"{n_trials}, {n_rounds} rounds")
    print(f"  {'':<18}{'trials':>8}{'statements':>12}{'commits':>9}{'CPU-ms random':>15}"
          f"{'CPU-ms tpe':>12}{'open CPU-s':>12}")
    for side in _sides(kind):
        for n in sizes:
            random_, tpe = (found[side, n, sampler] for sampler in SAMPLERS)
            print(f"  {SIDES[side]:<18}{n:>8}"
                  f"{max(random_['statements'], tpe['statements']):>12.1f}"
                  f"{max(random_['commits'], tpe['commits']):>9.1f}{random_['ms']:>15.2f}"
                  f"{tpe['ms']:>12.2f}{found[side, n, 'open']['open_s']:>12.2f}")
    return all([judged(side, sizes, found) for side in _sides(kind) if side != "stock"])


def _sides(kind: str) -> list[str]:
    """Return the sides that are measured: Optuna's own on SQLite, its default."""
    return [side for side in SIDES if kind == "sqlite" or side != "stock"]


def judged(side: str, sizes: list[int], found: dict[tuple[str, int, str], Any]) -> bool:
    """Print each goal of one of our sides with what was reached."""
    big, small = max(sizes), min(sizes)
    reached = [("statements", max(found[side, n, s]["statements"] for n in sizes
                                  for s in SAMPLERS), GOAL_STATEMENTS),
               ("commits", max(found[side, n, s]["commits"] for n in sizes for s in SAMPLERS),
                GOAL_COMMITS)]
    reached += [(f"CPU-ms, {s}, {big} trials", found[side, big, s]["ms"], GOAL_MS[s])
                for s in SAMPLERS]
    reached += [(f"growth {small} -> {big}, random",
                 found[side, big, "random"]["ms"] / found[side, small, "random"]["ms"],
                 GOAL_GROWTH)]
    reached += [(f"open {big} trials, CPU-s", found[side, big, "open"]["open_s"], GOAL_OPEN_S)]
    for what, value, goal in reached:
        print(f"  {'ok  ' if value <= goal else 'FAIL'} {SIDES[side]}: {what} {value:.2f} "
              f"(goal {goal})")
    return all(value <= goal for _, value, goal in reached)


def main() -> int:
    """Print the table; exit code 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="100,10000")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--database", choices=(*KINDS, "both"), default="both")
    parser.add_argument("--side", choices=tuple(SIDES))
    parser.add_argument("--sampler", choices=(*SAMPLERS, "open"))
    parser.add_argument("--url")
    args = parser.parse_args()
    if args.side is None:
        sizes = [int(n) for n in args.sizes.split(",")]
        kinds = KINDS if args.database == "both" else (args.database,)
        return 0 if all([table(kind, sizes, args.trials, args.rounds) for kind in kinds]) else 1
    random.seed(0)
    if args.sampler == "open":
        result = opening(args.url, args.side)
    elif args.side == "worker":
        with tempfile.TemporaryDirectory(prefix="hpo-bookkeeping-") as folder:
            result = by_worker(args.url, args.sampler, args.trials, Path(folder))
    else:
        result = by_optuna(args.url, args.side, args.sampler, args.trials)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
