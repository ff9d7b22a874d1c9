"""`hpo doctor` as a user runs it: screen, JSON, exit code, and what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import hpo, search, strict_json, write, write_text

RECIPE = '''
"""A study with a fault."""
import os
import numpy as np
import torch
from torch import nn
from hpo import Float, Run, StudySpec
from hpo.train import MLP, AdamW, Recipe, tensors

RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 8)).astype("float32")
Y = (X[:, 0] > 0).astype("int64")

class Dies(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)
    def forward(self, x):
        os._exit(7)

def softmax():
    return nn.Sequential(nn.Linear(8, 2), nn.Softmax(1))

def build(run, *, lr):
    return Recipe(data=tensors(X, Y), model=MODEL, optimizer=AdamW(lr=lr), batch_size=32)

STUDY = StudySpec(space={"lr": Float(1e-4, 1e-1)}, build=build, maximize="val_accuracy",
                  epochs=1, defaults={"lr": 1e-2})
'''


def write_recipe(folder: Path, model: str) -> None:
    write_text(folder, "mine", RECIPE.replace("MODEL", model))


def test_the_digits_are_healthy_and_nothing_is_left_behind(tmp_path: Path) -> None:
    done = hpo(tmp_path, "doctor", "--study", "digits", "--devices", "cpu")
    *lines, last = done.stdout.splitlines()[1:]
    own = [line for line in lines if line.split()[1] in ("storage", "data", "model", "training")]
    assert len(own) >= 18 and all(line.startswith("ok ") for line in own), done.stdout
    assert not any(line.startswith("wrong") for line in lines)
    assert " ok, " in last and "wrong" not in last
    assert not list(tmp_path.iterdir())


def test_a_profile_is_printed_as_json_with_its_trace(tmp_path: Path) -> None:
    done = hpo(tmp_path, "doctor", "--study", "digits", "--devices", "cpu", "--profile", "--json")
    said = strict_json(done.stdout)
    trace = tmp_path / "hpo-runs" / "reports" / "digits" / "doctor-trace.json"
    assert said["trace"] == str(trace) and json.loads(trace.read_text())["traceEvents"]
    whats = [one["what"] for one in said["findings"]]
    assert [f"operator {k}" for k in range(1, 11)] == [w for w in whats if "operator" in w]
    assert said["counts"].get("wrong", 0) == 0 and said["study"] == "digits"
    assert {one["verdict"] for one in said["findings"]} <= {"ok", "look", "not checked"}
    assert not list(tmp_path.rglob("*.db"))


def test_a_fault_ends_with_code_1_and_says_what_to_do(tmp_path: Path) -> None:
    write_recipe(tmp_path, "softmax")
    done = hpo(tmp_path, "doctor", "--study", "mine", code=1)
    [line] = [line for line in done.stdout.splitlines() if "softmax" in line]
    assert line.startswith("wrong") and "cross entropy has its own" in line
    assert done.stderr == ""


def test_a_worker_that_dies_is_a_finding(tmp_path: Path) -> None:
    write_recipe(tmp_path, "Dies")
    done = hpo(tmp_path, "doctor", "--study", "mine", code=1)
    assert "it ended with code 7 in the next check" in done.stdout
    assert "ok     data" in done.stdout


def test_a_loop_of_one_s_own_is_checked_as_far_as_it_can_be(tmp_path: Path) -> None:
    write(tmp_path, "loop", body='import random\nyield {"loss": random.Random().random()}')
    done = hpo(tmp_path, "doctor", "--study", "loop")
    assert "look   loop      repeats        loss was" in done.stdout
    assert "not checked: the study has its own loop" in done.stdout
    write(tmp_path, "loop", body='import random\nyield {"loss": random.random()}')
    done = hpo(tmp_path, "doctor", "--study", "loop")
    assert "ok     loop      repeats" in done.stdout


def test_a_run_and_a_check_warn_of_what_a_first_pass_shows(tmp_path: Path) -> None:
    write_recipe(tmp_path, "softmax")
    warning = "warning: each row's scores sum to 1, as of a softmax"
    pointer = "hpo doctor --study mine looks closer"
    checked = hpo(tmp_path, "check", "--study", "mine").stdout
    assert warning in checked and pointer in checked
    ran = search(tmp_path, "mine", "--n-trials", 1).stdout
    assert ran.count(warning) == 1 and ran.count(pointer) == 1


@pytest.mark.parametrize("words, said", [
    (("--study", "digts"), "did you mean 'digits'?"),
    (("--study", "digits", "--devices", "gpu"), "accepted are auto, cpu"),
    (("--study", "digits", "--data-dir", "nowhere"), "there is no such folder"),
])
def test_bad_flags_of_the_doctor_end_with_code_2(tmp_path: Path, words: tuple, said: str) -> None:
    done = hpo(tmp_path, "doctor", *words, code=2)
    assert said in done.stderr and len(done.stderr.splitlines()) == 1
