"""Trials over two processes: what goes wrong in one is one trial's trouble, and hangs nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from commands import (
    TIMEOUT_S,
    arguments,
    environment,
    finish,
    hpo,
    reasons,
    states,
    trials,
    write_text,
)

from hpo.queue import NOT_BEGUN

pytestmark = pytest.mark.faults

# `how` says what goes wrong in the second epoch of a cell's first try, and in which rank.
MODULE = '''
import os, signal, time
from pathlib import Path
import torch
from torch import nn
from hpo import Categorical, Run, StudySpec
from hpo.train import SGD, Recipe, digits

HERE = Path({folder!r})
RANK = int(os.environ.get("HPO_RANK", 0))
CELLS = {cells!r}

def trouble(how):
    what, _, rank = how.partition(" ")
    marker = HERE / "done" / how
    if rank != str(RANK) or marker.exists():
        return
    marker.touch()
    if what == "raise":
        raise ValueError("no such luck")
    if what == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        time.sleep(10_000)

class Net(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.n, self.inside = how, 0, nn.Linear(64, 10)
        self.drop = nn.Dropout(0.2)
    def forward(self, x):
        self.n += self.training
        if self.training:
            time.sleep({step_s})
        if self.n == 8:
            trouble(self.how)
        return self.inside(self.drop(x.flatten(1)))

def build(run: Run, *, how: str) -> Recipe:
    (HERE / "begun" / str(os.getpid())).touch()
    return Recipe(data=digits(run), model=lambda: Net(how), optimizer=SGD(lr=0.1),
                  batch_size=300)

STUDY = StudySpec(space={{"how": Categorical(*CELLS)}}, build=build, maximize="val_accuracy",
                  epochs={epochs}, grid={{"how": CELLS}}, defaults={{"how": CELLS[0]}})
'''
# With 1437 rows in batches of 300 an epoch has 4 or 5 steps.
PAIR = ("--devices", "cpu", "--workers", 1, "--gpus-per-trial", 2)


def write(folder: Path, cells: list[str], *, epochs: int = 4, step_s: float = 0.0) -> None:
    for name in ("done", "begun"):
        (folder / name).mkdir(exist_ok=True)
    write_text(folder, "s", MODULE.format(folder=str(folder), cells=cells, epochs=epochs,
                                          step_s=step_s))


def left(folder: Path) -> list[str]:
    """Return the processes that made a trainer and still live."""
    return [path.name for path in (folder / "begun").iterdir()
            if Path("/proc", path.name).exists()
            and b"hpo" in Path("/proc", path.name, "cmdline").read_bytes()]


def none_left(folder: Path, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while left(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def curve(trial: Any) -> list[float]:
    return [trial.intermediate_values[epoch] for epoch in sorted(trial.intermediate_values)]


def test_what_goes_wrong_in_one_rank_is_one_trials_trouble(tmp_path: Path) -> None:
    """Each cell trains what the same trial does undisturbed, once its trouble is over."""
    cells = ["fine", "raise 1", "oom 1", "kill 1", "raise 0", "hang 1", "kill 0"]
    write(tmp_path, cells)
    hpo(tmp_path, "run", "--study", "s", "--sampler", "grid", *PAIR, "--epoch-timeout", 8)
    # A cell that is taken ahead of the end of its worker goes back before it has begun.
    found = [trial for trial in trials(tmp_path, "s/grid")
             if not trial.user_attrs["reason"].startswith(NOT_BEGUN)]
    by_cell: dict[str, list[Any]] = {}
    for trial in found:
        by_cell.setdefault(trial.params["how"], []).append(trial)
    ends = {cell: states(of) for cell, of in by_cell.items()}
    assert ends == {
        "fine": ["COMPLETE"], "raise 1": ["FAIL"], "oom 1": ["FAIL", "COMPLETE"],
        "kill 1": ["FAIL", "COMPLETE"], "raise 0": ["FAIL"], "hang 1": ["FAIL"],
        "kill 0": ["FAIL", "COMPLETE"]}
    why = {cell: reasons(of)[0] for cell, of in by_cell.items()}
    assert why["raise 1"] == "error: RuntimeError: rank 1: ValueError: no such luck"
    assert why["raise 0"] == "error: ValueError: no such luck"
    assert why["oom 1"].startswith("oom: MemoryError: rank 1: OutOfMemoryError: CUDA out of")
    assert "tried again with 75 rows at once" in why["oom 1"]
    assert why["kill 1"].startswith("worker lost") and why["kill 0"].startswith("worker lost")
    assert why["hang 1"].startswith("hung")
    # One batch of 300 rows is 150 a rank, then 75.
    assert by_cell["oom 1"][1].user_attrs["micro_batch_size"] == 75
    assert {trial.user_attrs["n_devices"] for trial in found
            if trial.state.name == "COMPLETE"} == {2}
    whole = curve(by_cell["fine"][0])
    assert len(whole) == 4
    for cell in ("kill 1", "kill 0"):
        assert len(curve(by_cell[cell][1])) == 4
    log = (tmp_path / "hpo-runs" / by_cell["raise 1"][0].user_attrs["log"]).read_text()
    assert "trouble(self.how)" in log and "no such luck" in log
    log = (tmp_path / "hpo-runs/logs/s/grid" / f"{by_cell['hang 1'][0].number}.log").read_text()
    assert "in trouble" in log and "hpo/rank.py" in log
    assert none_left(tmp_path, 10)


def begun(folder: Path, sign: str) -> subprocess.Popen[str]:
    """Start a run as a terminal does, and return once a file is there."""
    process = subprocess.Popen(
        arguments("run", "--study", "s", "--sampler", "grid", *PAIR), cwd=folder,
        env=environment(), text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + TIMEOUT_S
    while not list(folder.glob(sign)):
        assert process.poll() is None and time.monotonic() < deadline, finish(process)
        time.sleep(0.05)
    return process


def test_a_stopped_trial_goes_on_with_both_ranks_and_ends_as_undisturbed(tmp_path: Path) -> None:
    write(tmp_path, ["fine"], epochs=8, step_s=0.1)
    process = begun(tmp_path, "hpo-runs/artifacts/s/grid/0/epoch-*.state")
    assert len(left(tmp_path)) == 2
    os.killpg(process.pid, signal.SIGINT)
    code, output = finish(process)
    assert code == 130 and "goes on from here" in output, output
    assert none_left(tmp_path, 10)
    hpo(tmp_path, "run", "--study", "s", "--sampler", "grid", *PAIR)
    found = trials(tmp_path, "s/grid")
    assert states(found) == ["FAIL", "COMPLETE"]
    assert 1 <= found[1].user_attrs["n_epochs_taken_over"] < 8
    other = tmp_path / "other"
    other.mkdir()
    write(other, ["fine"], epochs=8)
    hpo(other, "run", "--study", "s", "--sampler", "grid", *PAIR)
    assert curve(found[1]) == curve(trials(other, "s/grid")[0])
    # And a trial of two ranks can be run again as it was.
    assert "the same" in hpo(other, "replay", "grid/0", "--study", "s").stdout


def test_a_rank_that_cannot_import_the_module_is_told_before_any_trial(tmp_path: Path) -> None:
    write(tmp_path, ["fine"])
    path = tmp_path / "search_spaces" / "s.py"
    path.write_text(path.read_text() + '\nif RANK:\n    raise OSError("no such disk")\n')
    done = hpo(tmp_path, "run", "--study", "s", "--sampler", "grid", *PAIR, code=2)
    assert "rank 1 of a trial's 2 processes did not begin" in done.stderr
    assert "OSError: no such disk" in done.stderr
    assert not (tmp_path / "hpo-runs" / "hpo.db").exists()


def test_a_module_that_is_edited_in_mid_run_trains_no_trial_of_two_recipes(
    tmp_path: Path
) -> None:
    """Rank 1 is started anew after a failure, and would load what rank 0 has not."""
    write(tmp_path, ["raise 1", "fine"])
    path = tmp_path / "search_spaces" / "s.py"
    path.write_text(path.read_text().replace("def trouble(how):", "def trouble(how):\n"
                    "    global HERE\n    if how == 'raise 1' and RANK == 1:\n"
                    "        me = Path(__file__)\n"
                    "        me.write_text(me.read_text().replace('lr=0.1', 'lr=0.3'))"))
    hpo(tmp_path, "run", "--study", "s", "--sampler", "grid", *PAIR)
    fine = [t for t in trials(tmp_path, "s/grid") if t.params.get("how") == "fine"][-1]
    other = tmp_path / "other"
    other.mkdir()
    write(other, ["fine"])
    path = other / "search_spaces" / "s.py"
    path.write_text(path.read_text().replace("lr=0.1", "lr=0.3"))
    hpo(other, "run", "--study", "s", "--sampler", "grid", *PAIR)
    assert curve(fine) == curve(trials(other, "s/grid")[0])


def test_to_start_ranks_anew_is_no_part_of_the_next_trial_s_epochs(tmp_path: Path) -> None:
    """A good trial after a bad one is not taken for hung while the module is imported."""
    write(tmp_path, ["raise 1", "fine"])
    path = tmp_path / "search_spaces" / "s.py"
    path.write_text(path.read_text() + "\nif RANK:\n    time.sleep(4)\n")
    hpo(tmp_path, "run", "--study", "s", "--sampler", "grid", *PAIR, "--epoch-timeout", 4)
    found = [trial for trial in trials(tmp_path, "s/grid") if trial.params]
    assert {trial.params["how"]: trial.state.name for trial in found} == {
        "raise 1": "FAIL", "fine": "COMPLETE"}


@pytest.mark.parametrize("victim", ["run", "worker"])
def test_ranks_end_with_the_worker_and_the_run(tmp_path: Path, victim: str) -> None:
    write(tmp_path, ["hang 1"], epochs=8, step_s=0.1)
    process = begun(tmp_path, "done/hang 1")
    if victim == "run":
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        # The worker has its 8 s to store what it has; rank 1 is stuck and has no say in it.
        assert none_left(tmp_path, 12)
        return
    ranks = {int(pid) for pid in left(tmp_path)}
    worker = next(pid for pid in ranks if b"hpo.worker" in Path(
        f"/proc/{pid}/cmdline").read_bytes())
    os.kill(worker, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < deadline, "a rank outlives its worker"
        time.sleep(0.02)
    code, output = finish(process)
    assert code == 0, output
    assert states(trials(tmp_path, "s/grid")) == ["FAIL", "COMPLETE"]
