"""A trial that was cut off goes on in a later trial, to the last bit what it would have been."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from commands import (
    TIMEOUT_S,
    arguments,
    environment,
    hpo,
    search,
    search_words,
    trials,
    write,
    write_text,
)

from hpo.states import sweep

N_EPOCHS = 8
# Its epochs take 0.4 s while the file `slow` is there, so that a test may cut in.
RECIPE = """
    import os, pathlib, time
    import torch
    from torch import nn
    from hpo import Float, StudySpec
    from hpo.train import AdamW, Recipe, digits

    HERE = pathlib.Path({here!r})
    MOST = {most}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.2),
                                     nn.Linear(16, 10))

        def forward(self, x):
            if self.training and len(x) > MOST:
                raise torch.OutOfMemoryError("CUDA out of memory")
            if not self.training and (HERE / "slow").exists():
                time.sleep(0.4)
            return self.net(x)

    def build(run, *, lr):
        with (HERE / "built").open("a") as file:
            file.write(f"{{os.getpid()}}\\n")
        return Recipe(data=digits(run), model=Net, optimizer=AdamW(lr=lr), batch_size={batch})

    STUDY = StudySpec(space=dict(lr=Float(1e-3, 1e-1, log=True)), build=build,
                      maximize="val_accuracy", epochs={epochs}, defaults=dict(lr=0.01))
"""
Curve = list[tuple[int, float]]
WORDS = ("--n-trials", 1, "--sampler", "random", "--pruner", "none")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder with the study `s`, whose epochs take 0.4 s while `slow` is there."""
    write_text(tmp_path, "s", recipe(tmp_path))
    (tmp_path / "slow").touch()
    return tmp_path


def recipe(folder: Path, **fields: Any) -> str:
    return RECIPE.format(**{"here": str(folder), "most": 10**6, "batch": 128,
                            "epochs": N_EPOCHS, **fields})


def cut_off(folder: Path, after: int, number: int, then: Callable[[], Any] = int) -> None:
    """Search, and send a signal to the whole group once a state of so many epochs is there.

    `then` is done before.
    """
    process = subprocess.Popen(
        arguments(*search_words("s", *WORDS)), cwd=folder, env=environment(),
        start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + TIMEOUT_S
    while not any(int(path.stem.split("-")[1]) >= after for path in states(folder)):
        assert process.poll() is None and time.monotonic() < deadline, "no state was written"
        time.sleep(0.02)
    then()
    if number == signal.SIGKILL:
        for pid in {process.pid, *map(int, (folder / "built").read_text().split())}:
            try:
                os.killpg(pid, number)
            except ProcessLookupError:
                pass
    else:
        process.send_signal(number)
    process.wait(TIMEOUT_S)


def states(folder: Path) -> list[Path]:
    return sorted((folder / "hpo-runs" / "artifacts").rglob("*.state"))


def curves(folder: Path) -> list[Curve]:
    return [list(trial.intermediate_values.items()) for trial in trials(folder, "s")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Curve]:
    """Give a function that returns the curve of the same trial trained in one go, by batch."""
    @cache
    def train(batch: int = 128) -> Curve:
        folder = tmp_path_factory.mktemp("whole")
        write_text(folder, "s", recipe(folder, batch=batch))
        search(folder, "s", *WORDS)
        return curves(folder)[0]

    return train


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_trial_that_was_stopped_or_killed_ends_as_if_nothing_had_happened(
    folder: Path, number: int, uninterrupted: Callable[..., Curve]
) -> None:
    """It trains the missing epochs alone, says whose it took over, and leaves no state."""
    cut_off(folder, 3, number)
    before = trials(folder, "s")
    (folder / "slow").unlink()
    said = search(folder, "s", *WORDS).stdout
    first, second = trials(folder, "s")
    assert first.state.name == "FAIL" and second.state.name == "COMPLETE"
    assert second.user_attrs["retry_of"] == 0 and second.params == first.params
    n_taken_over = second.user_attrs["n_epochs_taken_over"]
    assert 3 <= n_taken_over <= len(first.intermediate_values) < N_EPOCHS
    if number == signal.SIGINT:
        # The state was written as it was stopped.
        assert n_taken_over == len(before[0].intermediate_values)
        assert first.user_attrs["reason"].startswith("interrupted: after epoch")
    assert f"from epoch {n_taken_over} on" in said, said
    assert curves(folder)[1] == uninterrupted()
    assert second.user_attrs["n_epochs"] == N_EPOCHS and states(folder) == []


def test_a_broken_newest_state_costs_an_epoch_or_two_and_not_the_trial(
    folder: Path, uninterrupted: Callable[..., Curve]
) -> None:
    cut_off(folder, 4, signal.SIGINT)
    older, newest = states(folder)
    newest.write_bytes(newest.read_bytes()[:1000])
    (folder / "slow").unlink()
    search(folder, "s", *WORDS)
    second = trials(folder, "s")[1]
    assert second.user_attrs["n_epochs_taken_over"] == int(older.stem.split("-")[1])
    assert curves(folder)[1] == uninterrupted()


def test_a_state_of_another_recipe_is_refused_with_both_sides_and_the_trial_begins_anew(
    folder: Path, uninterrupted: Callable[..., Curve]
) -> None:
    cut_off(folder, 2, signal.SIGINT)
    write_text(folder, "s", recipe(folder, batch=64))
    (folder / "slow").unlink()
    said = search(folder, "s", *WORDS).stdout
    assert "its training state is not used, the study's module has changed" in said, said
    second = trials(folder, "s")[1]
    assert "n_epochs_taken_over" not in second.user_attrs
    assert curves(folder)[1] == uninterrupted(batch=64)


def test_a_state_is_of_the_module_that_was_loaded_although_its_file_was_edited_meanwhile(
    folder: Path, uninterrupted: Callable[..., Curve]
) -> None:
    """What the worker trains with is what it loaded; a state written later is no newer."""
    cut_off(folder, 2, signal.SIGINT, lambda: write_text(folder, "s", recipe(folder, batch=64)))
    (folder / "slow").unlink()
    said = search(folder, "s", *WORDS).stdout
    assert "the study's module has changed" in said, said
    assert curves(folder)[1] == uninterrupted(batch=64)


def test_a_loop_of_the_users_own_finds_its_checkpoint_and_the_epochs_before_it(
    tmp_path: Path
) -> None:
    """C10: `run.dir` is the same; the epochs that it does not train again are taken over."""
    write(tmp_path, "s", epochs=6, body="""
        file = run.dir / "epoch.txt"
        begin = int(file.read_text()) if file.exists() else 0
        with (HERE / "trained").open("a") as trained:
            for epoch in range(begin, 6):
                print(epoch, file=trained, flush=True)
                if epoch == 3 and not begin:
                    os.kill(os.getpid(), 9)
                file.write_text(str(epoch + 1))
                yield {"epoch": epoch, "loss": x + epoch}
                time.sleep(0.3)
    """)
    search(tmp_path, "s", "--n-trials", 1)
    assert (tmp_path / "trained").read_text().split() == list("0123345")
    first, second = trials(tmp_path, "s")
    assert first.user_attrs["reason"].startswith("worker lost")
    assert list(first.intermediate_values) == [0, 1, 2]
    x = second.params["x"]
    assert second.intermediate_values == {epoch: x + epoch for epoch in range(6)}
    assert second.user_attrs["n_epochs_taken_over"] == 3 and second.value == x
    said = hpo(tmp_path, "show", 1, "--study", "s").stdout
    assert "6 of 6 epochs (3 of them trained by the tries before)" in said


def test_a_batch_that_does_not_fit_is_tried_once_more_in_two_parts(tmp_path: Path) -> None:
    """With the same effective batch; both the trial and the one before it say so."""
    write_text(tmp_path, "s", recipe(tmp_path, most=64, epochs=2))
    search(tmp_path, "s", *WORDS)
    first, second = trials(tmp_path, "s")
    assert first.state.name == "FAIL" and second.state.name == "COMPLETE"
    assert first.user_attrs["reason"].startswith("oom: OutOfMemoryError: CUDA out of memory")
    assert first.user_attrs["reason"].endswith("; tried again with 64 rows at once")
    assert second.user_attrs["micro_batch_size"] == 64 and second.params == first.params
    assert first.user_attrs["worker"] != second.user_attrs["worker"]
    assert "trial 1: the same to the last bit" in hpo(tmp_path, "replay", 1, "--study", "s").stdout
    assert "64 rows at once" in hpo(tmp_path, "show", 1, "--study", "s").stdout


def test_a_batch_that_does_not_fit_in_two_parts_either_fails(tmp_path: Path) -> None:
    write_text(tmp_path, "s", recipe(tmp_path, most=32, epochs=2))
    search(tmp_path, "s", *WORDS, code=3)
    found = trials(tmp_path, "s")
    assert [trial.state.name for trial in found] == ["FAIL", "FAIL"]
    assert found[1].user_attrs["reason"].startswith("oom: ")
    assert "tried again" not in found[1].user_attrs["reason"]


def test_states_that_a_killed_worker_left_of_an_ended_trial_go_as_the_run_ends(
    tmp_path: Path
) -> None:
    """Its parent stored the end; what the user keeps in a trial's folder stays."""
    write_text(tmp_path, "s", recipe(tmp_path, epochs=1))
    search(tmp_path, "s", *WORDS)
    artifacts = tmp_path / "hpo-runs" / "artifacts" / "s"
    left = artifacts / "search" / "0" / "epoch-000001.state"
    aside = artifacts / "grid" / "3" / ".epoch-000002.state-abc"
    mine = left.parent / "mine.txt"
    for path in (left, aside, mine):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    sweep(artifacts, lambda: False)
    assert left.exists() and aside.exists()
    search(tmp_path, "s", *WORDS)
    assert mine.exists() and not left.exists() and not aside.parent.exists()
