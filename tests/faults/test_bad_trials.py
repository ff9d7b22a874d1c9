"""Trials that do their process harm: each is one bad trial, and the next one starts clean."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from commands import (
    arguments,
    environment,
    grid,
    grid_words,
    hpo,
    search_words,
    trials,
    write_text,
)

from storage import Database

pytestmark = pytest.mark.faults

# Each kind is one cell of a grid, trained by one worker in this order, with good ones between.
KINDS = ("good", "torch oom", "good 1", "older oom", "good 2", "host oom", "good 3", "assert",
         "good 4", "label", "negative label", "killed loader", "bus error", "raising loader",
         "nan", "no dict", "raises", "interrupt", "exit", "own base class", "no text", "odd text",
         "open files", "good 5", "hidden open files", "good 6", "leak", "good 7", "child",
         "good 8", "other folder", "good 9", "closed output", "good 10", "os exit", "good 11",
         "segfault", "good 12", "loader too late")
ZOO = f"""
    import ctypes, os, resource, signal, subprocess, sys, time
    from pathlib import Path
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset
    from hpo import Categorical, StudySpec

    KEPT = []
    KINDS = {KINDS!r}
    HERE = Path(os.getcwd())

    class Items(Dataset):
        def __init__(self, n, harm):
            self.n, self.harm = n, harm
        def __len__(self):
            return self.n
        def __getitem__(self, i):
            if i == 2:
                self.harm()
            return torch.zeros(300, 300)

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    def bus():
        os.kill(os.getpid(), signal.SIGBUS)

    def bad_item():
        raise ValueError("item two is bad")

    def kill_later():
        # By now the batches before are on their way.
        time.sleep(0.5)
        kill()

    def read(harm, wait_s=0.0):
        batches = iter(DataLoader(Items(8, harm), batch_size=1, num_workers=1, prefetch_factor=4))
        time.sleep(wait_s)
        for _ in batches:
            pass

    def labels(*given):
        nn.CrossEntropyLoss()(torch.zeros(len(given), 3), torch.tensor(given))

    def open_all():
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        while True:
            KEPT.append(open("/dev/null"))

    class Own(BaseException):
        pass

    class Dumb(Exception):
        def __str__(self):
            return self.missing

    def harm(kind):
        if "oom" in kind:
            KEPT.append(torch.ones(50_000_000))
        if kind == "torch oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        if kind == "older oom":
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        if kind == "host oom":
            raise MemoryError
        if kind == "assert":
            raise RuntimeError("CUDA error: device-side assert triggered\\nand many more lines")
        if kind == "label":
            labels(0, 1, 2, 3)
        if kind == "negative label":
            labels(0, -1)
        if kind == "killed loader":
            read(kill)
        if kind == "bus error":
            read(bus)
        if kind == "raising loader":
            read(bad_item)
        if kind == "loader too late":
            read(kill_later, 3.0)
        if kind == "raises":
            raise ValueError("no such luck")
        if kind == "interrupt":
            raise KeyboardInterrupt
        if kind == "exit":
            sys.exit(4)
        if kind == "own base class":
            raise Own("mine")
        if kind == "no text":
            raise Dumb
        if kind == "odd text":
            raise ValueError("a file \\udcff, \\0 and \\33[31m")
        if kind == "open files":
            open_all()
        if kind == "hidden open files":
            try:
                open_all()
            except OSError:
                return
        if kind == "leak":
            KEPT.append(torch.ones(60_000_000))
            raise ValueError("and keeps it")
        if kind == "child":
            KEPT.append(subprocess.Popen(["sleep", "1000"]))
        if kind == "other folder":
            os.chdir("/")
        if kind == "closed output":
            os.close(1)
            os.close(2)
        if kind == "os exit":
            os._exit(3)
        if kind == "segfault":
            ctypes.string_at(0)

    def objective(run, kind):
        began = HERE / "begun"
        pages = int(open("/proc/self/statm").read().split()[1])
        mb = pages * resource.getpagesize() >> 20
        n_files = len(os.listdir("/proc/self/fd"))
        with open(began, "a") as file:
            file.write(f"{{kind}}|{{os.getpid()}}|{{mb}}|{{n_files}}|{{os.getcwd()}}\\n")
        yield {{"loss": 1.0}}
        harm(kind)
        print("still here")
        loss = float("nan") if kind == "nan" else 0.5
        yield "nothing" if kind == "no dict" else {{"loss": loss}}

    STUDY = StudySpec(space={{"kind": Categorical(*KINDS)}}, objective=objective,
                      minimize="loss", epochs=2)
"""


class Zoo:
    """A run of all kinds: its folder, what it said, and what each trial saw as it began."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_text(folder, "zoo", ZOO)
        self.output = grid(folder, "zoo", "--max-retries", 0).stdout
        self.trials = {trial.params["kind"]: trial for trial in trials(folder, "zoo/grid")
                       if trial.params}
        rows = [line.split("|") for line in (folder / "begun").read_text().splitlines()]
        self.kinds = [row[0] for row in rows]
        self.pids = {row[0]: int(row[1]) for row in rows}
        self.mb = {row[0]: int(row[2]) for row in rows}
        self.n_files = {row[0]: int(row[3]) for row in rows}
        self.folders = {row[4] for row in rows}

    def reason(self, kind: str) -> str:
        """Return how the trial of a kind ended, and that nothing of it is left open."""
        trial = self.trials[kind]
        return f"{trial.state.name} {trial.user_attrs['reason']}".strip()

    def log(self, kind: str) -> str:
        """Return the log of the trial of a kind."""
        return (self.folder / "hpo-runs" / self.trials[kind].user_attrs["log"]).read_text()

    def next_to(self, kind: str) -> str:
        """Return the kind of the trial after one."""
        return self.kinds[self.kinds.index(kind) + 1]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Give a run of all kinds."""
    return Zoo(tmp_path_factory.mktemp("zoo"))


def test_every_trial_ends_and_the_good_ones_are_complete(zoo: Zoo) -> None:
    assert zoo.kinds == list(KINDS)
    for kind in KINDS:
        state = zoo.trials[kind].state.name
        assert state != "RUNNING" and (not kind.startswith("good") or state == "COMPLETE"), kind


@pytest.mark.parametrize(("kind", "reason"), [
    ("torch oom", "FAIL oom: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB "
                  "(params {'kind': 'torch oom'})"),
    ("older oom", "FAIL oom: RuntimeError: CUDA out of memory. Tried to allocate 2 GiB "
                  "(params {'kind': 'older oom'})"),
    ("host oom", "FAIL oom: MemoryError (params {'kind': 'host oom'})"),
    ("label", "FAIL error: IndexError: Target 3 is out of bounds. (labels from 0 to 3 in a batch "
              "of 4, for 3 classes, which are 0 to 2)"),
    ("negative label", "FAIL error: IndexError: Target -1 is out of bounds. (labels from -1 to 0 "
                       "in a batch of 2, for 3 classes, which are 0 to 2)"),
    ("raising loader", "FAIL error: ValueError: item two is bad (in DataLoader worker process 0)"),
    ("nan", "PRUNED diverged at epoch 1"),
    ("no dict", "FAIL error: epoch 1: expected a dict with 'loss', got str"),
    ("raises", "FAIL error: ValueError: no such luck"),
    ("interrupt", "FAIL error: KeyboardInterrupt"),
    ("exit", "FAIL error: SystemExit: 4"),
    ("own base class", "FAIL error: Own: mine"),
    ("no text", "FAIL error: Dumb: its text cannot be made, AttributeError"),
    ("odd text", r"FAIL error: ValueError: a file \udcff, \x00 and \x1b[31m"),
    ("open files", "FAIL error: OSError: [Errno 24] Too many open files: '/dev/null'"),
    ("leak", "FAIL error: ValueError: and keeps it"),
    ("os exit", "FAIL worker lost: its process was ended with code 3"),
    ("segfault", "FAIL worker lost: its process was killed by signal 11"),
    *((kind, "COMPLETE") for kind in ("hidden open files", "child", "other folder",
                                      "closed output")),
])
def test_the_reason_tells_the_cause_in_one_line(zoo: Zoo, kind: str, reason: str) -> None:
    """C35: also in the older form, with the params."""
    assert zoo.reason(kind) == reason


def test_an_assert_on_the_device_is_told_with_what_it_mostly_means(zoo: Zoo) -> None:
    found = zoo.reason("assert")
    assert found.startswith("FAIL error: RuntimeError: CUDA error: device-side assert triggered (")
    assert "a label or an index out of its range" in found and "\n" not in found


@pytest.mark.parametrize(("kind", "words"), [
    ("killed loader", ("DataLoader", "SIGKILL")),
    ("bus error", ("DataLoader", "SIGBUS", "shared memory")),
    ("loader too late", ("DataLoader", "SIGKILL")),
])
def test_a_loader_process_that_is_killed_is_named(
    zoo: Zoo, kind: str, words: tuple[str, ...]
) -> None:
    """C41: also where it had sent a batch that nobody had taken by then."""
    assert zoo.reason(kind).startswith("FAIL error: ")
    assert all(word in zoo.reason(kind) for word in words), zoo.reason(kind)


@pytest.mark.parametrize("kind", ["torch oom", "label", "killed loader", "raising loader",
                                  "raises", "interrupt", "no text", "odd text"])
def test_the_whole_text_is_in_the_trial_s_log(zoo: Zoo, kind: str) -> None:
    assert "Traceback" in zoo.log(kind) and "in harm" in zoo.log(kind)


@pytest.mark.parametrize("kind", ["torch oom", "older oom", "host oom", "assert", "open files",
                                  "hidden open files", "leak", "child", "os exit", "segfault"])
def test_a_process_that_may_be_spoiled_trains_no_other_trial(zoo: Zoo, kind: str) -> None:
    """C35: the trial after it has another pid."""
    assert zoo.pids[kind] != zoo.pids[zoo.next_to(kind)]


@pytest.mark.parametrize("kind", ["label", "negative label", "killed loader", "bus error",
                                  "raising loader", "nan", "no dict", "raises", "interrupt",
                                  "exit", "own base class", "no text", "odd text", "other folder",
                                  "closed output"])
def test_a_process_that_took_no_harm_goes_on(zoo: Zoo, kind: str) -> None:
    assert zoo.pids[kind] == zoo.pids[zoo.next_to(kind)]


def test_each_trial_begins_with_the_memory_the_files_and_the_folder_of_the_first(
    zoo: Zoo
) -> None:
    """C35: within 50 MB here; and few files, though two trials open all they may."""
    assert max(zoo.mb.values()) <= zoo.mb["good"] + 50, zoo.mb
    assert max(zoo.n_files.values()) <= zoo.n_files["good"] + 10, zoo.n_files
    assert zoo.folders == {str(zoo.folder)}


def test_nothing_that_a_trial_started_outlives_the_run(zoo: Zoo) -> None:
    assert left_in(zoo.folder) == []


def left_in(folder: Path) -> list[str]:
    """Return the processes that work in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if os.readlink(entry / "cwd") == str(folder):
                    found.append((entry / "cmdline").read_text())
            except OSError:
                # It is gone, or another user's.
                continue
    return found


KEEPS = """
    import os
    from pathlib import Path
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from hpo import Float, StudySpec

    HERE = Path(os.getcwd())
    KEPT = [DataLoader(TensorDataset(torch.arange(8.0)), num_workers=1, persistent_workers=True)]

    def objective(run, x):
        with open(HERE / f"files-{run.epochs}", "a") as file:
            file.write(f"{os.getpid()} {len(os.listdir('/proc/self/fd'))}\\n")
        for _ in KEPT[0]:
            pass
        for _ in range(2):
            KEPT.append(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, num_workers=2,
                                   persistent_workers=True))
            for _ in KEPT[-1]:
                pass
        # Of each two trials the second is pruned at its first epoch.
        k = int(run.dir.name)
        for _ in range(run.epochs):
            yield {"loss": 9.0 if run.epochs == 3 and k % 2 else 1.0 - k / 100}

    STUDY = StudySpec(space={"x": Float(0.0, 1.0)}, objective=objective, minimize="loss", epochs=2)
"""


@pytest.mark.parametrize("epochs", [2, 3], ids=["complete", "each second pruned"])
def test_loaders_that_a_module_keeps_do_not_pile_up(tmp_path: Path, epochs: int) -> None:
    """C37: 20 trials with two persistent loaders each, kept for ever, and at most 256 files.

    They share one more, which was made when the module was imported.
    """
    write_text(tmp_path, "s", KEEPS)
    words = search_words("s", "--n-trials", 20, "--epochs", epochs, "--pruner", "median",
                         "--prune-startup", 1, "--prune-warmup", 0)
    done = subprocess.run(
        ["bash", "-c", 'ulimit -n 256; exec "$@"', "bash", *arguments(*words)], cwd=tmp_path,
        env=environment(), text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    states = [trial.state.name for trial in trials(tmp_path, "s")]
    assert states == (["COMPLETE"] * 20 if epochs == 2 else ["COMPLETE", "PRUNED"] * 10)
    numbers = [int(word) for word in (tmp_path / f"files-{epochs}").read_text().split()]
    pids, counts = numbers[::2], numbers[1::2]
    # Their files alone make a worker unfit, after several trials; a process would after each.
    assert len(set(pids)) <= 5, pids
    assert len(counts) == 20 and max(counts) - min(counts) <= 12, counts
    assert left_in(tmp_path) == []


DEADLY = """
    import os
    from hpo import Int, StudySpec

    def objective(run, x):
        if 1 <= x <= int(os.environ.get("TEST_DEADLY", "4")):
            os._exit(9)
        for _ in range(run.epochs):
            yield {"loss": float(x)}

    STUDY = StudySpec(space={"x": Int(0, 6)}, objective=objective, minimize="loss", epochs=2)
"""


def test_a_retry_that_dies_like_the_trial_before_it_is_no_second_bad_trial(
    ready_url: str, tmp_path: Path
) -> None:
    """Four cells kill their worker, each twice: eight deaths in a row, and the grid goes on."""
    write_text(tmp_path, "s", DEADLY)
    hpo(tmp_path, *grid_words("s", "--storage", ready_url))
    db = Database(ready_url)
    found = db.studies.get_all_trials(db.studies.get_study_id_from_name("s/grid"))
    lost = [trial.params["x"] for trial in found if trial.user_attrs["reason"].startswith(
        "worker lost: its process was ended with code 9")]
    assert sorted(lost) == [1, 1, 2, 2, 3, 3, 4, 4]
    assert {trial.params["x"] for trial in found if trial.state.name == "COMPLETE"} == {0, 5, 6}
    db.close()


def test_a_trial_that_has_its_own_process_told_to_end_is_tried_again_once(tmp_path: Path) -> None:
    """As a guard over the host's memory does to the largest process: before, for ever."""
    write_text(tmp_path, "s", DEADLY.replace("os._exit(9)", "os.kill(os.getpid(), 15)"))
    hpo(tmp_path, *grid_words("s"), env={"TEST_DEADLY": "1"})
    found = trials(tmp_path, "s/grid")
    failed = [t for t in found if t.state.name == "FAIL" and t.params]
    assert [t.params["x"] for t in failed] == [1, 1]
    assert all(t.user_attrs["reason"].startswith("worker lost: its process alone was told to end")
               for t in failed)
    assert {t.params["x"] for t in found if t.state.name == "COMPLETE"} == {0, 2, 3, 4, 5, 6}


def test_five_trials_in_a_row_that_kill_their_worker_end_the_run_unless_told_otherwise(
    tmp_path: Path
) -> None:
    write_text(tmp_path, "s", DEADLY)
    words = grid_words("s", "--max-retries", 0)
    done = hpo(tmp_path, *words, code=1, env={"TEST_DEADLY": "5"})
    assert "5 workers died one after another, the last with code 9" in done.stderr
    hpo(tmp_path, *words, "--max-failures", 0, env={"TEST_DEADLY": "5"})
    found = trials(tmp_path, "s/grid")
    assert {t.params["x"] for t in found if t.state.name == "COMPLETE"} == {0, 6}
    assert not any(trial.state.name == "RUNNING" for trial in found)
