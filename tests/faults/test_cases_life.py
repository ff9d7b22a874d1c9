"""A run that is killed or stopped leaves no trial RUNNING and no process, and goes on later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import (
    TIMEOUT_S,
    arguments,
    environment,
    finish,
    hpo,
    reasons,
    search_words,
    states,
    trials,
    url,
    write,
    write_text,
)
from optuna.trial import FrozenTrial

from hpo.errors import HpoError
from storage import Database

pytestmark = pytest.mark.faults

BODY = """
(HERE / "begun" / str(os.getpid())).touch()
for epoch in range(8):
    time.sleep(0.2)
    yield {"loss": x + epoch}
"""


def started(folder: Path, *words: object) -> subprocess.Popen[str]:
    """Start a command as a terminal does, in a process group of its own."""
    return subprocess.Popen(arguments(*words), cwd=folder, env=environment(), text=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, start_new_session=True)


def begun(folder: Path, *words: object) -> tuple[subprocess.Popen[str], list[object]]:
    """Start a search by two workers and return once both have stored an epoch of a trial."""
    write(folder, "s", body=BODY, epochs=8)
    (folder / "begun").mkdir(exist_ok=True)
    command = search_words("s", "--workers", 2, "--pruner", "none", *words)
    process = started(folder, *command)
    deadline = time.monotonic() + TIMEOUT_S
    while n_at_work(folder) < 2:
        assert process.poll() is None and time.monotonic() < deadline, "no two trials have begun"
        time.sleep(0.05)
    return process, command


def n_at_work(folder: Path) -> int:
    try:
        db = Database(url(folder))
        try:
            study_id = db.studies.get_study_id_from_name("s")
            return sum(t.state.name == "RUNNING" and bool(t.intermediate_values)
                       for t in db.studies.get_all_trials(study_id))
        finally:
            db.close()
    except (HpoError, KeyError):
        return 0


def left(folder: Path) -> list[str]:
    """Return the processes of trials that still live."""
    return [pid.name for pid in (folder / "begun").iterdir() if Path("/proc", pid.name).exists()]


def without_any_left(folder: Path, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while left(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not left(folder)


def chain(found: list[FrozenTrial], reason: str) -> list[tuple[FrozenTrial, FrozenTrial]]:
    """Return each trial that ended for a reason with the one that went on with its params."""
    lost = [t for t in found if t.user_attrs["reason"].startswith(reason)]
    by_link = {t.user_attrs["retry_of"]: t for t in found if "retry_of" in t.user_attrs}
    return [(one, by_link[one.number]) for one in lost]


def test_trials_of_a_killed_run_are_lost_and_tried_again(tmp_path: Path) -> None:
    """C09.1, C09.2: kill -9 of parent and workers at once, then the same command."""
    process, words = begun(tmp_path, "--n-trials", 4)
    for pid in (process.pid, *map(int, left(tmp_path))):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert states(trials(tmp_path, "s")) == ["RUNNING"] * 2
    hpo(tmp_path, *words)
    found = trials(tmp_path, "s")
    assert sorted(states(found)) == ["COMPLETE"] * 4 + ["FAIL"] * 2
    pairs = chain(found, "worker lost")
    assert len(pairs) == 2
    for lost, again in pairs:
        assert again.params == lost.params and again.state.name == "COMPLETE"


def test_workers_end_by_themselves_when_their_parent_is_killed(tmp_path: Path) -> None:
    """What they had begun is tried again, with its params."""
    process, words = begun(tmp_path, "--n-trials", 3)
    process.kill()
    process.communicate(timeout=60)
    assert without_any_left(tmp_path, 30)
    hpo(tmp_path, *words)
    found = trials(tmp_path, "s")
    assert states(found).count("COMPLETE") == 3 and "RUNNING" not in states(found)
    assert all(again.params == lost.params for lost, again in chain(found, "interrupted"))


@pytest.mark.skipif(sys.platform != "linux", reason="blocks in the C library by its Linux name")
def test_a_worker_that_hears_nothing_is_ended_when_its_parent_is_killed(tmp_path: Path) -> None:
    """It never lets go of the interpreter's lock: no thread sees that the run is gone."""
    write(tmp_path, "s", body="""
        import ctypes
        (HERE / "begun" / str(os.getpid())).touch()
        ctypes.PyDLL(None).sleep(600)
        yield {"loss": x}
    """)
    (tmp_path / "begun").mkdir()
    process = started(tmp_path, *search_words("s", "--n-trials", 1))
    deadline = time.monotonic() + TIMEOUT_S
    while not left(tmp_path):
        assert process.poll() is None and time.monotonic() < deadline, "no trial has begun"
        time.sleep(0.05)
    process.kill()
    process.communicate(timeout=60)
    began = time.monotonic()
    assert without_any_left(tmp_path, 30)
    assert time.monotonic() - began < 15


def test_a_run_that_is_told_to_end_ends_its_workers_and_leaves_nothing_running(
    tmp_path: Path
) -> None:
    """C09.3: kill -TERM of the parent alone."""
    process, words = begun(tmp_path, "--n-trials", 4)
    process.terminate()
    code, output = finish(process)
    assert code == 130 and "Traceback" not in output, output
    assert without_any_left(tmp_path, 10)
    assert "RUNNING" not in states(trials(tmp_path, "s"))
    hpo(tmp_path, *words)
    assert states(trials(tmp_path, "s")).count("COMPLETE") == 4


@pytest.mark.parametrize("n_signals", [1, 2])
def test_an_interrupt_ends_the_run_in_order_and_the_same_command_goes_on(
    tmp_path: Path, n_signals: int
) -> None:
    """C10: exit 130, two FAIL `interrupted`, few lines; also with a second one at once."""
    process, words = begun(tmp_path, "--n-trials", 4)
    for _ in range(n_signals):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.1)
    began = time.monotonic()
    code, output = finish(process)
    assert code == 130 and time.monotonic() - began < 30
    assert "Traceback" not in output
    said = output[output.index("stopped by a signal"):].splitlines()
    assert len(said) <= 5, said
    found = trials(tmp_path, "s")
    assert states(found) == ["FAIL"] * 2
    assert all(reason.startswith("interrupted: ") for reason in reasons(found)), reasons(found)
    assert without_any_left(tmp_path, 10)
    hpo(tmp_path, *words)
    found = trials(tmp_path, "s")
    assert states(found) == ["FAIL"] * 2 + ["COMPLETE"] * 4
    for lost, again in chain(found, "interrupted"):
        assert again.params == lost.params and again.state.name == "COMPLETE"


FORKS = """
    import multiprocessing
    import os
    from pathlib import Path
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from hpo import Float, StudySpec

    torch.set_num_threads(2)
    SQUARE = torch.rand(1500, 1500) @ torch.rand(1500, 1500)
    HERE = Path(os.getcwd())

    def objective(run, x):
        with open(HERE / "said", "a") as file:
            file.write(f"{multiprocessing.get_start_method()} {torch.cuda.is_initialized()}\\n")
        for epoch in range(2):
            rows = TensorDataset(SQUARE[:8])
            total = sum(float((batch @ SQUARE).sum()) for batch, in DataLoader(
                rows, batch_size=4, num_workers=2))
            yield {"loss": x + 0 * total}

    STUDY = StudySpec(space={"x": Float(0.0, 1.0)}, objective=objective, minimize="loss", epochs=2)
"""


def test_threads_before_a_loader_forks_hang_nothing(tmp_path: Path) -> None:
    """C38: loaders start from a clean process, and CUDA is not touched before the objective."""
    write_text(tmp_path, "s", FORKS)
    hpo(tmp_path, *search_words("s", "--n-trials", 4, "--workers", 2))
    assert states(trials(tmp_path, "s")) == ["COMPLETE"] * 4
    said = (tmp_path / "said").read_text().splitlines()
    assert set(said) <= {"forkserver False", "spawn False"} and len(said) == 4
