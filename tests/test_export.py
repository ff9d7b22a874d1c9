"""`hpo export`: the trial that was named, in files that give the model back, or one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import hpo, trials, write_text

MODULE = """
    import torch
    from hpo import Float, StudySpec
    from hpo.train import MLP, AdamW, Recipe, digits

    def build(run, *, lr):
        return Recipe(data=digits(run), model={model}, optimizer=AdamW(lr=lr))

    STUDY = StudySpec(space={{"lr": Float(1e-4, 1e-1)}}, build=build, maximize="val_accuracy",
                      epochs=1, grid={{"lr": [1e-4, 1e-2]}}, defaults={{"lr": 1e-3}})
    """
OWN = "torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))"


def with_grid(folder: Path, model: str) -> None:
    write_text(folder, "s", MODULE.format(model=model))
    hpo(folder, "run", "--study", "s", "--phases", "grid", "--workers", 1, "--devices", "cpu",
        "--data-fraction", 0.3)


def test_the_trial_of_the_named_phase_is_exported_and_its_files_are_what_is_scored(
    tmp_path: Path
) -> None:
    from hpo.train.checkpoint import load_export

    with_grid(tmp_path, "MLP(hidden=16)")
    words = ("export", "--study", "s", "--phase", "grid", "--devices", "cpu", "--trial")
    for number in (0, 1):
        hpo(tmp_path, *words, number, "--to", f"out{number}")
        found = json.loads((tmp_path / f"out{number}/model.json").read_text())
        stored = trials(tmp_path, "s/grid")[number]
        assert (found["what"], found["params"]) == (f"grid trial {number}", stored.params)
        assert found["scored_again"]["val_accuracy"] == pytest.approx(stored.value, abs=1e-6)
        assert sum(p.numel() for p in load_export(tmp_path / f"out{number}").parameters()) > 1000
    for phase, trial, said in (("search", 0, "the phase search of study 's' has 0 trials"),
                               ("grid", 9, "the phase grid of study 's' has 2 trials"),
                               ("gird", 0, "random, search, audit, confirm; did you mean 'grid'")):
        done = hpo(tmp_path, "export", "--study", "s", "--to", "no", "--phase", phase, "--trial",
                   trial, code=2)
        assert said in done.stderr and not (tmp_path / "no").exists()


def test_a_model_of_the_user_s_own_is_scored_from_the_exported_weights(tmp_path: Path) -> None:
    with_grid(tmp_path, OWN)
    hpo(tmp_path, "export", "--study", "s", "--phase", "grid", "--trial", 1, "--to", "out",
        "--devices", "cpu")
    found = json.loads((tmp_path / "out/model.json").read_text())
    assert found["scored_again"]["val_accuracy"] == pytest.approx(
        found["metrics"]["val_accuracy"], abs=1e-6)


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = hpo(tmp_path, "export", "--study", "s", "--to", "file/out", code=2)
    assert done.stderr.startswith("hpo: --to file/out: ") and len(done.stderr.splitlines()) == 1
    done = hpo(tmp_path, "export", "--study", "s", "--to", "out", "--phase", "nope", code=2)
    assert "accepted are search, grid, random, lr-range, default" in done.stderr
