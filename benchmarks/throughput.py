"""Many workers, short trials: does a worker wait for the tuner, and is every trial there once?

    python benchmarks/throughput.py [--database sqlite|postgresql|both]
                                    [--part sleep|gap|exact|all]

sleep: `hpo run` with 64 workers whose trials sleep one second, and with 16 whose trials sleep 100
       ms; the trials' times in the database against the ideal, in which each worker sleeps without
       a break. Starting and ending apart: counted from the moment when all workers have ended
       their first trial to the last begin of one.
gap:   one warm worker: from the last step of a trial to the first of the next, as the objective
       sees them.
exact: eight processes, 500 trials each, once as workers of one `hpo run` and once as eight
       scripts that call `study.optimize` on `storage.open`: numbers dense, values exact, no error.

Prints a table and FAIL where a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from databases import KINDS, Databases, databases

GOAL_SHARE, GOAL_GAP_MS = 0.95, 5.0
N_PROCESSES, N_EACH = 8, 500

STUDY = '''
import time
from hpo import Float, StudySpec

SPACE = {"x": Float(0.0, 1.0)}

def objective(run, *, x):
    began = time.monotonic()
    time.sleep(SLEEP)
    yield {"loss": x}
    if LOG:
        with open(LOG, "a") as file:
            file.write(f"{began} {time.monotonic()}\\n")

STUDY = StudySpec(space=SPACE, objective=objective, minimize="loss", epochs=1)
'''

SCRIPT = '''
import sys
import optuna, storage
optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.load_study(study_name="s", storage=storage.open(sys.argv[1]),
                          sampler=optuna.samplers.RandomSampler())
def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    trial.report(x, 0)
    return x
study.optimize(objective, n_trials=int(sys.argv[2]))
'''


def run(url: str, folder: Path, n_workers: int, n_trials: int, sleep_s: float,
        log: Path | None = None) -> str:
    """Run a study of sleeping trials; return what the command printed."""
    spaces = folder / "search_spaces"
    spaces.mkdir(exist_ok=True)
    text = STUDY.replace("SLEEP", str(sleep_s)).replace("LOG", repr(str(log)) if log else "None")
    (spaces / "s.py").write_text(text)
    command = [sys.executable, "-m", "hpo", "run", "--study", "s", "--storage", url, "--phases",
               "search", "--workers", str(n_workers), "--devices", "cpu", "--n-trials",
               str(n_trials), "--sampler", "random", "--pruner", "none"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True,
                          stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise SystemExit(f"FAIL: hpo run ended with {done.returncode}:\\n{done.stdout}")
    return done.stdout


def trials_of(url: str) -> list[Any]:
    """Return all trials of the study, read anew."""
    import optuna

    import storage

    opened = storage.StudyStorage(url)
    trials = optuna.load_study(study_name="s", storage=opened).trials
    opened.close()
    return trials


def sleeping(made: Databases, kind: str, n_workers: int, sleep_s: float, n_each: int) -> bool:
    """Measure the share of the ideal throughput, print it and return whether it is enough."""
    url = made.new(kind)
    with tempfile.TemporaryDirectory(prefix="hpo-throughput-") as folder:
        run(url, Path(folder), n_workers, n_workers * n_each, sleep_s)
    trials = trials_of(url)
    first: dict[str, float] = {}
    begins = []
    for trial in sorted(trials, key=lambda t: t.datetime_start):
        first.setdefault(trial.user_attrs["worker"], trial.datetime_complete.timestamp())
        begins.append(trial.datetime_start.timestamp())
    # A worker's first trial is claimed while 63 others still start, and share two cores with it.
    all_on, last = max(first.values()), begins[-1]
    n_begun = sum(all_on < begun <= last for begun in begins)
    share = n_begun * sleep_s / ((last - all_on) * n_workers)
    good = share >= GOAL_SHARE and len(first) == n_workers and len(trials) == n_workers * n_each
    print(f"  {'ok  ' if good else 'FAIL'} {kind:<11} {n_workers} workers, trials of "
          f"{1000 * sleep_s:.0f} ms: {n_begun} begun in {last - all_on:.2f} s, {share:.3f} of the "
          f"ideal (goal {GOAL_SHARE})")
    return good


def gaps(made: Databases, kind: str, n_trials: int = 200) -> bool:
    """Measure the time between two trials of a warm worker, print it, return if it is enough."""
    url = made.new(kind)
    with tempfile.TemporaryDirectory(prefix="hpo-throughput-") as folder:
        log = Path(folder, "log")
        run(url, Path(folder), 1, n_trials, 0.05, log)
        rows = [tuple(map(float, line.split())) for line in log.read_text().splitlines()]
    found = sorted(1000 * (begin - end) for (_, end), (begin, _)
                   in zip(rows[10:], rows[11:], strict=False))
    median = statistics.median(found)
    good = median <= GOAL_GAP_MS and len(rows) == n_trials
    print(f"  {'ok  ' if good else 'FAIL'} {kind:<11} from one trial's last step to the next "
          f"one's first: median {median:.2f} ms, 90 % within "
          f"{found[int(0.9 * len(found))]:.2f} ms (goal: median {GOAL_GAP_MS})")
    return good


def exact(made: Databases, kind: str, how: str) -> bool:
    """Run trials in eight processes and return whether each is there once, whole."""
    n = N_PROCESSES * N_EACH
    url = made.new(kind)
    printed = ""
    if how == "hpo run":
        with tempfile.TemporaryDirectory(prefix="hpo-throughput-") as folder:
            printed = run(url, Path(folder), N_PROCESSES, n, 0.0)
    else:
        import optuna

        import storage

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        optuna.create_study(study_name="s", storage=storage.open(url))
        command = [sys.executable, "-c", SCRIPT, url, str(N_EACH)]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                    text=True) for _ in range(N_PROCESSES)]
        printed = "".join(process.communicate()[0] for process in started)
        if any(process.returncode for process in started):
            raise SystemExit(f"FAIL: a process failed:\\n{printed}")
    trials = trials_of(url)
    good = ([trial.number for trial in trials] == list(range(n)) and "locked" not in printed
            and all(trial.values == [trial.params["x"]] == list(trial.intermediate_values.values())
                    for trial in trials))
    took = (max(t.datetime_complete for t in trials) - min(t.datetime_start for t in trials))
    print(f"  {'ok  ' if good else 'FAIL'} {kind:<11} {N_PROCESSES} processes of {N_EACH} trials, "
          f"{how}: {len(trials)} trials, numbers dense, values exact, no lock told: {good}; "
          f"{n / took.total_seconds():.0f} trials/s")
    return good


def main() -> int:
    """Run the parts; exit code 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=(*KINDS, "both"), default="both")
    parser.add_argument("--part", choices=("sleep", "gap", "exact", "all"), default="all")
    args = parser.parse_args()
    good = []
    with databases() as made:
        for kind in KINDS if args.database == "both" else (args.database,):
            if args.part in ("gap", "all"):
                good.append(gaps(made, kind))
            if args.part in ("sleep", "all"):
                good.append(sleeping(made, kind, 64, 1.0, 15))
                good.append(sleeping(made, kind, 16, 0.1, 100))
            if args.part in ("exact", "all"):
                good += [exact(made, kind, how) for how in ("hpo run", "study.optimize")]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
