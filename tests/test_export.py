"""`hpo export`: the trial that was named, in files that give the model back, or one clear line."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from commands import answered, hpo, trials, write_text

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
    import hpo as installed

    with_grid(tmp_path, "MLP(hidden=16)")
    words = ("export", "--study", "s", "--phase", "grid", "--devices", "cpu", "--trial")
    for number in (0, 1):
        hpo(tmp_path, *words, number, "--to", f"out{number}")
        found = json.loads((tmp_path / f"out{number}/model.json").read_text())
        stored = trials(tmp_path, "s/grid")[number]
        assert (found["what"], found["params"]) == (f"grid trial {number}", stored.params)
        assert found["scored_again"]["val_accuracy"] == pytest.approx(stored.value, abs=1e-6)
        model = installed.load(tmp_path / f"out{number}")
        assert sum(p.numel() for p in model.parameters()) > 1000
    for phase, trial, said in (("search", 0, "the phase search of study 's' has 0 trials"),
                               ("grid", 9, "the phase grid of study 's' has 2 trials"),
                               ("gird", 0, "random, search, audit, confirm; did you mean 'grid'")):
        done = hpo(tmp_path, "export", "--study", "s", "--to", "no", "--phase", phase, "--trial",
                   trial, code=2)
        assert said in done.stderr and not (tmp_path / "no").exists()


def test_a_registered_model_of_the_user_s_own_outlives_its_module(tmp_path: Path) -> None:
    """What was stored at registration is exported, not what stands in the files by then."""
    import hpo as installed

    path = write_text(tmp_path, "s", "import nets\n" + textwrap.dedent(MODULE.format(
        model="nets.net()")))
    nets = "import torch\n\n\ndef net():\n    return " + OWN
    (tmp_path / "nets.py").write_text(nets)
    hpo(tmp_path, "run", "--study", "s", "--phases", "grid,confirm", "--workers", 1, "--devices",
        "cpu", "--data-fraction", 0.3, "--confirm-seeds", 2, "--confirm-budget", 0)
    path.unlink()
    (tmp_path / "nets.py").write_text("raise SystemExit('edited since')")
    done = hpo(tmp_path, "registry", "export", "s@champion", "--to", "out", "--devices", "cpu")
    assert "to the last bit" in done.stdout and "hpo.load('out')" in done.stdout
    card = json.loads((tmp_path / "out/model.json").read_text())
    [row] = [row for row in json.loads(hpo(tmp_path, "registry", "list", "--json").stdout)
             if row["alias"] == "champion"]
    assert card["registered"]["id"] == row["id"]
    run = next(run for run in row["scores"] if run["checkpoint"] == row["checkpoint"])
    assert card["scored_again"] == run["test_metrics"]
    assert (tmp_path / "out/source/nets.py").read_text() == nets
    hpo(tmp_path, "export", "--study", "s", "--phase", "grid", "--trial", 1, "--to", "trial",
        "--devices", "cpu")
    for folder in ("out", "trial"):
        assert [tuple(p.shape) for p in installed.load(tmp_path / folder).parameters()] == [
            (10, 64), (10,)]
    done = hpo(tmp_path, "registry", "export", "s@champion", "--to", "out", code=2)
    assert "which --force replaces" in done.stderr
    asked = answered(tmp_path, "n", "delete", "--study", "s").stdout
    assert f"hpo registry export {row['id'][:8]} --to FOLDER keeps them" in asked


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = hpo(tmp_path, "export", "--study", "s", "--to", "file/out", code=2)
    assert done.stderr.startswith("hpo: --to file/out: ") and len(done.stderr.splitlines()) == 1
    done = hpo(tmp_path, "export", "--study", "s", "--to", "out", "--phase", "nope", code=2)
    assert "accepted are search, grid, random, lr-range, default" in done.stderr
