"""A study of 100,000 trials of 10 epochs: how long its questions take, and how much memory.

    python benchmarks/large.py [--trials 100000] [--database sqlite|postgresql|both]

Opening is a new process that has all trials in memory; the commands are run as a user types them.
Wall time with imports, and the peak of resident memory. FAIL where one takes more than 10 s or
1 GB. Optuna's own storage is opened once beside ours, on SQLite, with --stock: it takes minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from databases import KINDS, databases
from history import N_EPOCHS, SPACE, fill

GOAL_S, GOAL_GB = 10.0, 1.0

OPEN = '''
import sys, optuna, storage
study = optuna.load_study(study_name="s", storage=MAKE(sys.argv[1]))
assert len(study.get_trials(deepcopy=False)) == int(sys.argv[2])
'''


def save_study(url: str) -> None:
    """Give the study the row that `hpo run` makes."""
    from hpo import Float, StudySpec
    from storage import Database

    def objective(run: Any, **params: float) -> Any:
        yield {}

    spec = StudySpec(space={name: Float(kind.low, kind.high, log=kind.log)
                            for name, kind in SPACE.items()},
                     objective=objective, maximize="score", epochs=N_EPOCHS).to_json()
    db = Database(url)
    db.runs.save_study("s", module="s", metric="score", direction="maximize", epochs=N_EPOCHS,
                       settings={"seed": 0, "epochs": N_EPOCHS}, space=spec["space"], data={})
    db.close()


def timed(command: Sequence[str], folder: str) -> tuple[float, float, int]:
    """Run a command and return its seconds, its peak of memory in GB, and its exit code."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env, cwd=folder)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return time.perf_counter() - started, usage.ru_maxrss / 2**20, process.returncode


def questions(url: str, n_trials: int, stock: bool) -> dict[str, list[str]]:
    """Return the commands that are measured."""
    hpo = [sys.executable, "-m", "hpo"]
    ours = OPEN.replace("MAKE", "storage.open")
    found = {"open": [sys.executable, "-c", ours, url, str(n_trials)],
             "hpo status": [*hpo, "status", "--study", "s", "--storage", url],
             "hpo best": [*hpo, "best", "--study", "s", "--storage", url]}
    if stock:
        theirs = OPEN.replace("MAKE", "optuna.storages.RDBStorage")
        found["open, Optuna's own"] = [sys.executable, "-c", theirs, url, str(n_trials)]
    return found


def main() -> int:
    """Print the table; exit code 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100_000)
    parser.add_argument("--database", choices=(*KINDS, "both"), default="both")
    parser.add_argument("--stock", action="store_true")
    args = parser.parse_args()
    good = True
    with databases() as made, tempfile.TemporaryDirectory(prefix="hpo-large-") as folder:
        for kind in KINDS if args.database == "both" else (args.database,):
            url = made.new(kind)
            fill(url, "s", args.trials)
            save_study(url)
            print(f"{kind}: {args.trials} trials of {len(SPACE)} params and {N_EPOCHS} epochs")
            stock = args.stock and kind == "sqlite"
            for what, command in questions(url, args.trials, stock).items():
                seconds, gigabytes, code = timed(command, folder)
                within = code == 0 and seconds <= GOAL_S and gigabytes <= GOAL_GB
                is_goal = "Optuna" not in what
                good = good and (within or not is_goal)
                mark = ("ok  " if within else "FAIL") if is_goal else "    "
                print(f"  {mark} {what:<20}{seconds:>8.2f} s{gigabytes:>8.2f} GB"
                      f"{'' if code == 0 else f', exit code {code}'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
