"""`hpo run --gpus-per-trial 2`: whole commands whose trials have two processes each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import hpo, search, states, trials, write, write_text

PAIR = ("--devices", "cpu", "--workers", 1, "--gpus-per-trial", 2)

MODULE = """
from hpo import Categorical, Float, Run, StudySpec
from hpo.train import EMA, MLP, AdamW, Recipe, digits

def build(run: Run, *, lr: float, sharding: str) -> Recipe:
    return Recipe(data=digits(run), model=MLP(hidden=32, dropout=0.1), optimizer=AdamW(lr=lr),
                  batch_size={batch_size}, ema=EMA(decay=0.9),
                  sharding=None if sharding == "none" else sharding)

STUDY = StudySpec(space={{"lr": Float(1e-4, 1e-1, log=True),
                         "sharding": Categorical("none", "fsdp")}}, build=build,
                  maximize="val_accuracy", epochs=4, defaults={{"lr": 1e-2, "sharding": "fsdp"}},
                  grid={{"lr": [1e-3, 1e-2]}}, prune_startup=2, confirm_seeds=2)
"""


def test_a_whole_run_with_pruning_ddp_and_fsdp_is_like_one_on_one_device(tmp_path: Path) -> None:
    write_text(tmp_path, "s", MODULE.format(batch_size=64))
    out = hpo(tmp_path, "run", "--study", "s", *PAIR, "--n-trials", 12).stdout
    assert "1 worker on cpu x2 with 1 thread each" in out
    found = trials(tmp_path, "s")
    assert set(states(found)) == {"COMPLETE", "PRUNED"}, out
    assert {trial.params["sharding"] for trial in found} == {"none", "fsdp"}
    assert {trial.user_attrs["n_devices"] for trial in found} == {2}
    # The registered weights are whole: the test split was scored with them on one device.
    assert re.search(r"^search +\d+ +0\.9\d+ ± [\d.]+ +0\.9", out, re.MULTILINE), out
    assert "FAIL" not in out


def test_a_batch_that_cannot_be_shared_out_ends_with_code_2_before_any_trial(
    tmp_path: Path
) -> None:
    write_text(tmp_path, "s", MODULE.format(batch_size=33))
    done = search(tmp_path, "s", *PAIR, code=2)
    assert ("Recipe.batch_size: 33 rows cannot be shared out among the 2 devices of a trial "
            "(--gpus-per-trial); use a multiple of 2") in done.stderr
    assert not (tmp_path / "hpo-runs" / "hpo.db").exists()


@pytest.mark.parametrize("n", [0, -1])
def test_a_trial_has_a_device_at_least(tmp_path: Path, n: int) -> None:
    write_text(tmp_path, "s", MODULE.format(batch_size=64))
    done = search(tmp_path, "s", "--devices", "cpu", "--gpus-per-trial", n, code=2)
    assert f"--gpus-per-trial must be at least 1, got {n}" in done.stderr


def test_a_loop_of_ones_own_is_told_how_many_devices_it_has(tmp_path: Path) -> None:
    """It is one process, which starts what it needs by itself."""
    write(tmp_path, "s", body='yield {"loss": run.n_devices}')
    search(tmp_path, "s", *PAIR, "--n-trials", 2)
    assert [trial.value for trial in trials(tmp_path, "s")] == [2.0, 2.0]
