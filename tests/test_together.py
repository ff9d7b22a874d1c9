"""What `hpo doctor --gpus-per-trial` finds in a trial over two processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import hpo, write_text

from hpo import discover
from hpo.attempt import make_run
from hpo.diagnosis.finding import Finding
from hpo.diagnosis.together import (
    Steps,
    backend_finding,
    links_finding,
    memory_finding,
    steps_finding,
    together_findings,
)
from hpo.ranks import Ranks
from hpo.seeding import seed_all
from hpo.versions import source_digest

MODULE = '''
"""Recipes for two processes; `case` says what is the matter with each."""
import os
import torch
from torch import nn
from hpo import Categorical, Run, StudySpec
from hpo.train import *

class Drifts(nn.Module):
    """Its weights change by what each process draws for itself."""
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
    def forward(self, x):
        if torch.is_grad_enabled() and self.training:
            with torch.no_grad():
                self.layer.weight.add_(1e-4 * torch.randn_like(self.layer.weight))
        return self.layer(x.flatten(1))

class Full(nn.Module):
    """Finds no memory on the second device."""
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
    def forward(self, x):
        if self.training and os.environ.get("HPO_RANK") == "1":
            raise MemoryError("as said")
        return self.layer(x.flatten(1))

SMALL = MLP(hidden=32, n_layers=1)
CASES = {"sound": SMALL, "other": SMALL, "drifts": Drifts, "full": Full}

def build(run: Run, *, case: str, sharding: str) -> Recipe:
    size = 33 if case == "odd" else 64
    if case == "other":
        size += 2 * int(os.environ.get("HPO_RANK", 0))
    return Recipe(data=digits(run), model=CASES.get(case, SMALL), batch_size=size,
                  optimizer=SGD(lr=0.1), sharding=None if sharding == "none" else sharding)

STUDY = StudySpec(space={"case": Categorical("odd", *CASES),
                         "sharding": Categorical("none", "fsdp")},
                  build=build, maximize="val_accuracy", epochs=1)
'''
# Weights and biases of 64 x 32, then 32 x 10, in float32; so many gradients and momenta.
MLP_BYTES = 3 * 4 * (64 * 32 + 32 + 32 * 10 + 10)
ORDER = {"epochs": 1, "device": "cpu", "data_fraction": 0.3, "data_dir": None, "n_devices": 2}


class Pair:
    """This process and another, on which a doctor tries recipes."""

    def __init__(self, folder: Path) -> None:
        seed_all(0)
        self.folder, self.spec = folder, discover.load("together_cases")
        self.ranks = Ranks("together_cases", 2, "cpu", source_digest(self.spec.build))

    def findings(self, case: str, sharding: str = "none") -> dict[str, Finding]:
        run, params = make_run(ORDER, 3, self.folder), {"case": case, "sharding": sharding}

        def build() -> Any:
            assert self.spec.build is not None
            return self.spec.build(make_run(ORDER, 3, self.folder), **params)

        return {one.what: one
                for one in together_findings(build, run, self.ranks, ORDER, params)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("together")
    write_text(folder, "together_cases", MODULE)
    before = os.getcwd()
    os.chdir(folder)
    made = Pair(folder)
    try:
        made.ranks.start()
        yield made
    finally:
        made.ranks.close()
        os.chdir(before)


@pytest.mark.parametrize(("sharding", "way", "share"), [
    ("none", "DDP", 1), ("fsdp", "FSDP", 2)])
def test_a_sound_trial_has_its_batch_memory_and_pace_told(
    pair: Pair, sharding: str, way: str, share: int
) -> None:
    found = pair.findings("sound", sharding)
    assert list(found) == ["backend", "batch", "memory", "steps"]
    assert {one.verdict for name, one in found.items() if name != "steps"} == {"ok"}
    assert found["backend"].text == "gloo, between processes of the CPU"
    assert found["batch"].text == "64 rows a step, 32 on each of 2 devices"
    # Each rank holds its part of them, or all.
    each, whole = (f"{held / 2**20:.2g} MB" for held in (MLP_BYTES / share, MLP_BYTES))
    assert found["memory"].text == (f"weights, gradients and moments take {each} on each under "
                                    f"{way}, {whole} on one alone")
    assert re.match(rf"[\d.]+ ms a step under {way}, [\d.]+ ms on one device: [\d.]+ times as "
                    rf"fast, where 2 trials of one device each are 2$", found["steps"].text)


@pytest.mark.parametrize(("case", "where", "text"), [
    ("drifts", "steps", "the ranks' weights differ"),
    ("other", "begin", "rank 1 trains something else than rank 0 (recipe.batch_size was 64"),
    ("full", "memory", "a step does not fit on 2 devices"),
])
def test_what_would_fail_each_trial_is_wrong(
    pair: Pair, case: str, where: str, text: str
) -> None:
    found = pair.findings(case)
    assert found[where].verdict == "wrong" and text in found[where].text, found


def test_a_command_tells_of_the_devices_of_a_trial_and_ends_with_1_where_rows_are_odd(
    tmp_path: Path
) -> None:
    write_text(tmp_path, "s", MODULE)
    done = hpo(tmp_path, "doctor", "--study", "s", "--devices", "cpu", "--gpus-per-trial", 2,
               code=1)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    [trials] = [line for line in lines if line.startswith("ok devices trials")]
    assert trials.endswith("at once, of 2 processes each")
    [made] = [line for line in lines if line.startswith("wrong")]
    assert made.startswith("wrong recipe made Recipe.batch_size: 33 rows cannot be shared out")
    assert made.endswith("use a multiple of 2")
    assert "- ranks all not checked: mend what is wrong first" in lines


def test_the_flag_of_the_doctor_is_at_least_1(tmp_path: Path) -> None:
    done = hpo(tmp_path, "doctor", "--study", "digits", "--gpus-per-trial", 0, code=2)
    assert "--gpus-per-trial must be at least 1, got 0" in done.stderr


@pytest.mark.parametrize(("device", "nccl", "gloo", "verdict", "text"), [
    ("cpu", False, True, "ok", "gloo"), ("cpu", False, False, "wrong", "no gloo"),
    ("cuda", False, True, "wrong", "no NCCL"), ("cuda", True, False, "wrong", "no gloo")])
def test_a_torch_that_cannot_join_the_devices_is_wrong(
    device: str, nccl: bool, gloo: bool, verdict: str, text: str
) -> None:
    found = backend_finding(device, nccl=nccl, gloo=gloo)
    assert found.verdict == verdict and text in found.text


@pytest.mark.parametrize(("apart", "shared", "verdict", "text"), [
    ([], 0, "ok", "each of 4 GPUs reads the others' memory"),
    ([(0, 2)], 2**30, "look", "GPUs 0 and 2 do not read"),
    ([(0, 2), (0, 3), (1, 2), (1, 3)], 2**30, "look", "0 and 3, 1 and 2 and 1 more pair "),
    ([(0, 2)], 64 * 2**20, "look", "with 64 MB of /dev/shm; give more of it")])
def test_gpus_that_are_not_linked_are_named(
    apart: list[tuple[int, int]], shared: int, verdict: str, text: str
) -> None:
    found = links_finding(4, apart, shared)
    assert found.verdict == verdict and text in found.line()


@pytest.mark.parametrize(("peak", "sharded", "verdict", "cure"), [
    (70, False, "ok", ""), (79, False, "look", "sharding='fsdp'"),
    (79, True, "look", "checkpoint_activations=True")])
def test_a_gpu_that_is_nearly_full_is_worth_a_look(
    peak: int, sharded: bool, verdict: str, cure: str
) -> None:
    found = memory_finding(None, Steps(1.0, 10 * 2**30, peak * 2**30), 80 * 2**30,
                           sharded=sharded)
    assert found.verdict == verdict and cure in found.cure
    assert f"one device does not hold a step; a step needs at most {peak}.0 GB of 80.0 GB" in (
        found.text)


@pytest.mark.parametrize(("alone", "verdict", "text"), [
    (1.8, "ok", "1.80 times as fast"), (0.5, "look", "0.50 times as fast"),
    (None, "ok", "1 s a step under DDP")])
def test_devices_that_are_slower_together_than_one_are_worth_a_look(
    alone: float | None, verdict: str, text: str
) -> None:
    one = None if alone is None else Steps(alone, 1)
    found = steps_finding(one, Steps(1.0, 1), 2, sharded=False)
    assert found.verdict == verdict and text in found.text
