"""A study whose workers, parents, files and database are broken on purpose, again and again.

    python benchmarks/chaos.py [--database sqlite|postgresql|both] [--minutes 10] [--trials 200]
                               [--workers 4] [--seed 0] [--small-disk]

The same study is run twice: undisturbed, and while a killer, every few seconds, kills (-9),
interrupts (-TERM) or stops for a while (-STOP, -CONT) a random worker or the parent, crashes and
restarts PostgreSQL or holds SQLite's lock, and damages the newest training state. Whenever the
command ends before the study does, the same command is started again.

Then it must hold: as many ended tickets as trials, none RUNNING, no COMPLETE value lost that was
ever seen, each epoch of a trial once, and each result equal to the undisturbed one's. FAIL where
it does not. `--small-disk` mounts a file system of 48 MB for the study's files (as root), which
the killer fills.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from databases import KINDS, Databases, databases

N_EPOCHS, EPOCH_S = 6, 0.4
# Between two faults; and how long a process is stopped, a lock held or a disk full at most.
PAUSE_S, HOLD_S = (1.0, 5.0), 12.0
DISK_MB = 48

STUDY = '''
import time
from torch import nn
from hpo import Float, StudySpec
from hpo.train import MLP, AdamW, Recipe, digits

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.2),
                                 nn.Linear(16, 10))

    def forward(self, x):
        if not self.training:
            time.sleep(EPOCH_S)
        return self.net(x)

def build(run, *, lr):
    return Recipe(data=digits(run), model=Net, optimizer=AdamW(lr=lr), batch_size=128)

STUDY = StudySpec(space=dict(lr=Float(1e-4, 1e-1, log=True)), build=build,
                  maximize="val_accuracy", epochs=N_EPOCHS)
'''


class Running:
    """The command, started again whenever it ends before the study does."""

    def __init__(self, folder: Path, url: str, args: argparse.Namespace, epoch_s: float) -> None:
        spaces = folder / "search_spaces"
        spaces.mkdir(parents=True, exist_ok=True)
        text = STUDY.replace("N_EPOCHS", str(N_EPOCHS)).replace("EPOCH_S", str(epoch_s))
        (spaces / "s.py").write_text(text)
        self.folder, self.url = folder, url
        self._words = [
            sys.executable, "-m", "hpo", "run", "--study", "s", "--storage", url, "--phases",
            "search", "--workers", str(args.workers), "--devices", "cpu", "--n-trials",
            str(args.trials), "--sampler", "random", "--pruner", "none", "--max-retries", "999",
            "--max-failures", "0", "--epoch-timeout", "20"]
        self.codes: Counter[int] = Counter()
        self._log = (folder / "output.txt").open("ab")
        # Why the command ended with a 1, in its own words.
        self.why: Counter[str] = Counter()
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._begin = os.fstat(self._log.fileno()).st_size
        return subprocess.Popen(self._words, cwd=self.folder, env=env, stdin=subprocess.DEVNULL,
                                stdout=self._log, stderr=self._log, start_new_session=True)

    def look(self) -> None:
        """Start the command again if it has ended."""
        code = self.process.poll()
        if code is not None:
            self._count(code)
            self.process = self._start()

    def _count(self, code: int) -> None:
        self.codes[code] += 1
        if code == 1:
            with (self.folder / "output.txt").open("rb") as log:
                log.seek(self._begin)
                lines = log.read().decode(errors="replace").split("\n")
            told = [line for line in lines if line.startswith("hpo: ")]
            self.why[(told or lines[-2:-1] or ["nothing"])[-1]] += 1

    def workers(self) -> list[int]:
        """Return the pids of the parent's children."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                rest = stat.read_text().rsplit(")", 1)[1].split()
                if int(rest[1]) == self.process.pid and rest[0] != "Z":
                    found.append(int(stat.parent.name))
        return found

    def finish(self) -> None:
        """Let the command come to its end, undisturbed."""
        while (code := self.process.wait()) != 0:
            self._count(code)
            if sum(self.codes.values()) > 1000:
                raise SystemExit(f"FAIL: the command ends with {code} without an end; "
                                 f"see {self.folder}/output.txt")
            self.process = self._start()
        self.codes[0] += 1


class Killer:
    """Does one random fault after another, and counts them."""

    def __init__(self, running: Running, kind: str, made: Databases, seed: int,
                 disk: Path | None) -> None:
        self._running, self._kind, self._made = running, kind, made
        self._random = random.Random(seed)
        self._disk = disk
        self.done: Counter[str] = Counter()
        self.faults: dict[str, Callable[[], bool]] = {
            "kill -9 worker": lambda: self._signal(self._worker(), signal.SIGKILL),
            "kill -TERM worker": lambda: self._signal(self._worker(), signal.SIGTERM),
            "kill -STOP/-CONT worker": lambda: self._freeze(self._worker()),
            "kill -9 parent": lambda: self._signal(running.process.pid, signal.SIGKILL),
            "kill -TERM parent": lambda: self._signal(running.process.pid, signal.SIGTERM),
            "kill -STOP/-CONT parent": lambda: self._freeze(running.process.pid),
            "newest state damaged": self._damage,
        }
        if kind == "sqlite":
            self.faults["SQLite's lock held"] = self._hold
        elif made.can_crash:
            self.faults["PostgreSQL crashed"] = self._crash
        if disk is not None:
            self.faults["disk full"] = self._fill

    def strike(self) -> None:
        """Do one fault."""
        name = self._random.choice(list(self.faults))
        if self.faults[name]():
            self.done[name] += 1

    def pause_s(self) -> float:
        """Return how long to wait before the next fault."""
        return self._random.uniform(*PAUSE_S)

    def _worker(self) -> int | None:
        found = self._running.workers()
        return self._random.choice(found) if found else None

    def _signal(self, pid: int | None, number: int) -> bool:
        with suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, number)
                return True
        return False

    def _freeze(self, pid: int | None) -> bool:
        if not self._signal(pid, signal.SIGSTOP):
            return False
        time.sleep(self._random.uniform(0.5, HOLD_S))
        self._signal(pid, signal.SIGCONT)
        return True

    def _damage(self) -> bool:
        states = list((self._running.folder / "hpo-runs").rglob("epoch-*.state"))
        if not states:
            return False
        with suppress(OSError):
            newest = max(states, key=lambda path: path.stat().st_mtime)
            os.truncate(newest, newest.stat().st_size // 2)
            return True
        return False

    def _hold(self) -> bool:
        path = self._running.url.removeprefix("sqlite:///")
        connection = sqlite3.connect(path, timeout=10, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(self._random.uniform(0.5, HOLD_S))
            connection.execute("ROLLBACK")
            return True
        except sqlite3.OperationalError:
            return False
        finally:
            connection.close()

    def _crash(self) -> bool:
        self._made.crash()
        time.sleep(self._random.uniform(0.5, HOLD_S))
        self._made.restart()
        return True

    def _fill(self) -> bool:
        assert self._disk is not None
        filler = self._disk / "filler"
        try:
            with suppress(OSError), filler.open("wb") as file:
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()
            time.sleep(self._random.uniform(0.5, HOLD_S))
        finally:
            filler.unlink(missing_ok=True)
        return True


def read(url: str) -> tuple[dict[int, Any], dict[str, int]]:
    """Return a study's trials by number, and how many tickets are in each state."""
    from storage import Database

    db = Database(url)
    try:
        study_id = db.studies.get_study_id_from_name("s")
        trials = {trial.number: trial for trial in db.studies.get_all_trials(study_id)}
        return trials, dict(db.tickets.counts("s"))
    finally:
        db.close()


def complete(trials: dict[int, Any]) -> dict[int, tuple[Any, ...]]:
    """Return each COMPLETE trial's ticket, value and curve by its number."""
    return {number: (trial.user_attrs["ticket"], trial.value, *trial.intermediate_values.items())
            for number, trial in trials.items() if trial.state.name == "COMPLETE"}


def disturb(running: Running, killer: Killer, minutes: float) -> dict[int, tuple[Any, ...]]:
    """Break things until the time or the study is over; return all COMPLETE trials ever seen."""
    seen: dict[int, tuple[Any, ...]] = {}
    end = time.monotonic() + 60 * minutes
    n_trials = None
    while time.monotonic() < end:
        time.sleep(killer.pause_s())
        killer.strike()
        running.look()
        with suppress(Exception):
            # It is not there yet, or may be down at this very moment.
            trials, counts = read(running.url)
            seen.update(complete(trials))
            n_trials = sum(counts.values())
            if n_trials and counts.get("done", 0) == n_trials:
                break
    return seen


def costs(trials: dict[int, Any]) -> dict[str, tuple[int, int]]:
    """Return by reason of failure how many trials it ended, and the epochs trained in vain."""
    taken = {trial.user_attrs["retry_of"]: int(trial.user_attrs.get("n_epochs_taken_over", 0))
             for trial in trials.values() if "retry_of" in trial.user_attrs}
    found: dict[str, list[int]] = defaultdict(list)
    for number, trial in trials.items():
        if trial.state.name == "FAIL":
            reason = str(trial.user_attrs.get("reason", "?"))
            kind = ": ".join(reason.split(" after epoch")[0].split(" in ")[0].split(": ")[:2])
            n_lost = len(trial.intermediate_values) - taken.get(number, 0)
            found[kind.rstrip(":")].append(max(0, n_lost))
    return {kind: (len(lost), sum(lost)) for kind, lost in found.items()}


def faults_of(
    trials: dict[int, Any], counts: dict[str, int], seen: dict[int, tuple[Any, ...]],
    expected: dict[int, tuple[Any, ...]], n_trials: int,
) -> list[str]:
    """Return what is not as it must be."""
    found = []
    if {state: n for state, n in counts.items() if n} != {"done": n_trials}:
        found.append(f"tickets are {counts}, not {n_trials} done")
    if running := [n for n, trial in trials.items() if not trial.state.is_finished()]:
        found.append(f"trials {running} have not ended")
    ended = complete(trials)
    if len(ended) != n_trials:
        found.append(f"{len(ended)} trials are COMPLETE, not {n_trials}")
    for number, result in seen.items():
        if ended.get(number) != result:
            found.append(f"trial {number} was COMPLETE with {result[:2]}, and is not now")
    if sorted(trials) != list(range(len(trials))):
        found.append("the numbers of trials have gaps")
    for number, (ticket, value, *curve) in ended.items():
        if [epoch for epoch, _ in curve] != list(range(N_EPOCHS)):
            found.append(f"trial {number} has epochs {[epoch for epoch, _ in curve]}")
        if (value, *curve) != expected.get(ticket):
            found.append(f"trial {number} of ticket {ticket} is not what it is undisturbed")
    return found


@contextmanager
def place(small_disk: bool) -> Iterator[tuple[Path, Path | None]]:
    """Give a folder for the study's files, and the small disk that it is on, if it is."""
    with tempfile.TemporaryDirectory(prefix="hpo-chaos-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        if not small_disk:
            yield folder, None
            return
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", folder],
                       check=True)
        try:
            yield folder, folder
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def chaos(made: Databases, kind: str, args: argparse.Namespace) -> bool:
    """Run one study undisturbed and one disturbed, print what came of it; True if all is well."""
    with place(False) as (folder, _):
        calm = Running(folder, made.new(kind), args, 0.0)
        calm.finish()
        expected = {ticket: tuple(result)
                    for ticket, *result in complete(read(calm.url)[0]).values()}
    with place(args.small_disk) as (folder, disk):
        url = made.new(kind) if disk is None or kind != "sqlite" else f"sqlite:///{folder}/s.db"
        running = Running(folder, url, args, EPOCH_S)
        killer = Killer(running, kind, made, args.seed, disk)
        began = time.monotonic()
        seen = disturb(running, killer, args.minutes)
        disturbed_s = time.monotonic() - began
        running.finish()
        trials, counts = read(url)
        found = faults_of(trials, counts, seen, expected, args.trials)
        left = list((folder / "hpo-runs").rglob("*.state"))
    print(f"{kind}: {args.trials} trials of {N_EPOCHS} epochs on {args.workers} workers, "
          f"{disturbed_s:.0f} s of faults (seed {args.seed})")
    for name, n in killer.done.most_common():
        print(f"  {n:5d}  {name}")
    print("  the command ended with: "
          + ", ".join(f"{code} ({n}x)" for code, n in sorted(running.codes.items())))
    for text, n in running.why.most_common():
        print(f"    {n}x {text.replace(str(folder), 'FOLDER')[:180]}")
    print(f"  {'trials that failed and were tried again':<58}{'trials':>8}{'epochs lost':>13}")
    spent = costs(trials)
    for reason, (n, lost) in sorted(spent.items()):
        print(f"  {reason[:58]:<58}{n:>8}{lost:>13}")
    total = sum(lost for _, lost in spent.values())
    print(f"  {total} epochs were trained in vain, of {args.trials * N_EPOCHS} that count")
    for text in found[:20]:
        print(f"  FAIL: {text}")
    if left:
        print(f"  note: {len(left)} training states are left behind")
    print(f"  {'FAIL' if found else 'ok'}: {len(complete(trials))} COMPLETE, each as undisturbed: "
          f"{'no' if found else 'yes'}")
    return not found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=[*KINDS, "both"], default="both")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small-disk", action="store_true")
    args = parser.parse_args()
    kinds = KINDS if args.database == "both" else (args.database,)
    with databases() as made:
        # One after the other, whatever comes of the first.
        well = [chaos(made, kind, args) for kind in kinds]
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
