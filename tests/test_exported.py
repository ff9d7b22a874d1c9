"""`hpo.load`: a folder alone gives back the model that was trained, whatever it was made of."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import environment
from safetensors.torch import load_file

import hpo
from hpo import bundle, export
from hpo.errors import DataError, HpoError
from hpo.picked import Picked
from hpo.train.loop import Trainer
from hpo.train.scoring import score

NETS = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.first, self.last = nn.LazyLinear(width), nn.Linear(width, 10)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            return self.last(torch.relu(self.first(x.flatten(1))))

    class Made:
        def make(self, image_shape, n_classes):
            return nn.Sequential(nn.Flatten(), nn.Linear(image_shape[1] * 8, n_classes))
    """
MODULE = """
    from hpo import Float, StudySpec
    from hpo.train import EMA, MLP, AdamW, Recipe, SpeedNet, TimmModel, TorchvisionModel, digits
    {imports}

    def build(run, *, lr):
        return Recipe(data=digits(run), optimizer=AdamW(lr=lr), model={model}, {fields})

    STUDY = StudySpec(space={{"lr": Float(1e-4, 1e-1)}}, build=build, maximize="val_accuracy",
                      epochs=1)
    """


def sources(model: str, fields: str = "", imports: str = "from mynets import Made, Net",
            nets: str = NETS) -> dict[str, str]:
    module = textwrap.dedent(MODULE).format(model=model, fields=fields, imports=imports)
    return {"search_spaces/own.py": module, "mynets.py": textwrap.dedent(nets)}


def trained(
    folder: Path, files: Mapping[str, str], **stored: Any
) -> tuple[Picked, Path, dict[str, torch.Tensor]]:
    """Train one epoch of a study as a worker does; return what is to be exported of it."""
    bundle.write(folder / "work", files)
    run = hpo.Run(epochs=1, seed=1, device="cpu", dir=folder / "run", data_fraction=0.3)
    path = folder / "a.pt"
    with bundle.imported(folder / "work", files, "own") as module:
        recipe = module.STUDY.build(run, lr=1e-3)
        trainer = Trainer(recipe, run)
        list(trainer.epochs())
        trainer.save(path)
        scores = score(recipe, run, path, "test")
    from hpo.versions import surroundings

    ran_with = {**surroundings("cpu", ""), "n_threads": torch.get_num_threads()}
    study = {"name": "s", "module": "own", "epochs": 1, "settings": {"data_fraction": 0.3}}
    return Picked(study, "search rank 1", "a.pt", 1, {"lr": 1e-3}, 0, {**scores, **stored},
                  "test", ran_with, files), path, trainer.weights()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Give the export of a model of the user's own whose files are gone."""
    chosen, path, _ = trained(tmp_path, sources("Net(7)"))
    export.write(chosen, path, tmp_path / "out", device="cpu")
    shutil.rmtree(tmp_path / "work")
    yield tmp_path / "out"


@pytest.mark.parametrize(("model", "fields"), [
    ("MLP(hidden=8)", "ema=EMA(decay=0.5)"), ("Net(7)", ""), ("lambda: Net(9)", ""),
    ("Net(7)", "compile='eager'"), ("Made()", ""), ("SpeedNet(width=4)", ""),
    ("TorchvisionModel('shufflenet_v2_x0_5')", ""), ("TimmModel('test_resnet')", ""),
])
def test_what_is_loaded_is_the_model_that_was_trained(
    tmp_path: Path, model: str, fields: str
) -> None:
    """Lazy layers, a mean of weights, compiled ones, packages' models, and two kinds of own."""
    chosen, path, weights = trained(tmp_path, sources(model, fields))
    card = export.write(chosen, path, tmp_path / "out", device="cpu")
    assert card["scored_again"] == chosen.scores
    assert card["scored_as"] == "the stored numbers to the last bit"
    loaded = hpo.load(tmp_path / "out")
    assert not loaded.training
    for state in (loaded.state_dict(), load_file(tmp_path / "out/model.safetensors")):
        assert state.keys() == weights.keys()
        assert all(torch.equal(state[name], weights[name]) for name in weights)


def test_a_folder_is_all_that_a_process_elsewhere_needs(folder: Path, tmp_path: Path) -> None:
    """Neither module, nor database, nor home; the accuracy is computed anew by hand."""
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    code = """
        import hpo, sys, torch
        from hpo.train.sources import Digits
        model = hpo.load(sys.argv[1])
        data = Digits().open()
        scores = model(model.preprocess(torch.from_numpy(data.test_x)))
        print((scores.argmax(1) == torch.from_numpy(data.test_y)).double().mean().item())
        print(len(model.classes), "mynets" in sys.modules)
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), elsewhere], text=True,
                          cwd=tmp_path, env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr
    card = json.loads((elsewhere / "model.json").read_text())
    accuracy, rest = done.stdout.splitlines()
    assert float(accuracy) == pytest.approx(card["metrics"]["test_accuracy"], abs=1e-12)
    assert rest == "10 False"
    assert not list(elsewhere.rglob("__pycache__"))


def test_whoever_may_read_the_other_files_may_read_the_weights(folder: Path) -> None:
    """A dashboard, say, that another user serves; checkpoints and both formats of an export."""
    other = folder.parent / "other"
    other.write_text("")
    files = [folder.parent / "a.pt", folder / "model.pt", folder / "model.safetensors"]
    assert {file.stat().st_mode for file in files} == {other.stat().st_mode}


def test_the_json_says_what_goes_in_and_what_it_was_made_with(folder: Path) -> None:
    card = json.loads((folder / "model.json").read_text())
    assert card["inputs"] == {
        "shape": [1, 8, 8], "dtype": "uint8", "scored_in": "auto", "outputs": ["n", 10],
        "scaled": "(rows - mean) / std, with mean and std of `normalisation`"}
    assert card["source"] == ["mynets.py", "search_spaces/own.py"]
    assert card["params"] == {"lr": 1e-3} and card["versions"]["torch"] == torch.__version__.split(
        "+")[0]
    assert card["recipe"]["optimizer"]["lr"] == 1e-3 and card["data_fingerprint"]


def test_two_exports_with_modules_of_one_name_do_not_mix(tmp_path: Path) -> None:
    wide = NETS.replace("torch.relu(", "torch.tanh(")
    for name, nets in (("a", NETS), ("b", wide)):
        (tmp_path / name).mkdir()
        chosen, path, _ = trained(tmp_path / name, sources("Net(7)", nets=nets))
        export.write(chosen, path, tmp_path / name / "out", device="cpu")
    before = dict(sys.modules), list(sys.path)
    first, second = (hpo.load(tmp_path / name / "out") for name in ("a", "b"))
    rows = torch.randn(4, 1, 8, 8)
    assert not torch.equal(first(rows), second(rows))
    assert torch.equal(hpo.load(tmp_path / "a" / "out")(rows), first(rows))
    assert (dict(sys.modules), list(sys.path)) == before


def test_loading_draws_no_random_number(folder: Path) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    hpo.load(folder)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_s_own_attribute_is_not_taken_from_it(tmp_path: Path) -> None:
    nets = NETS.replace("def forward", "def preprocess(self, x):\n            return x\n\n"
                        "        def forward")
    chosen, path, _ = trained(tmp_path, sources("Net(7)", nets=nets))
    export.write(chosen, path, tmp_path / "out", device="cpu")
    model: Any = hpo.load(tmp_path / "out")
    assert model.preprocess("x") == "x" and len(model.classes) == 10


def _cut(folder: Path) -> None:
    (folder / "model.pt").write_bytes((folder / "model.pt").read_bytes()[:100])


def _other(folder: Path) -> None:
    (folder / "source/mynets.py").write_text("x = 1")


def _no_code(folder: Path) -> None:
    card = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**card, "source": []}))


def _no_net(folder: Path) -> None:
    card = json.loads((folder / "model.json").read_text())
    (folder / "source/mynets.py").unlink()
    del card["files"]["source/mynets.py"]
    (folder / "model.json").write_text(json.dumps({**card, "source": card["source"][1:]}))


@pytest.mark.parametrize(("harm", "said"), [
    (shutil.rmtree, "cannot be read .FileNotFoundError"),
    (lambda folder: (folder / "model.pt").unlink(), "cannot be read .FileNotFoundError"),
    (lambda folder: (folder / "model.json").write_text("{"), "cannot be read .JSONDecodeError"),
    (lambda folder: (folder / "model.json").write_text("{}"), "it lacks image_shape, n_classes"),
    (_cut, "model.pt is not the file that was exported"),
    (_other, "source/mynets.py is not the file that was exported"),
    (_no_code, "is the study's own, and the folder holds no source of it"),
    (_no_net, "its module own does not import here: ModuleNotFoundError: .*mynets"),
])
def test_a_broken_folder_is_one_line_that_names_it(folder: Path, harm: Any, said: str) -> None:
    harm(folder)
    with pytest.raises(DataError, match=f"export {folder}: .*{said}") as told:
        hpo.load(folder)
    assert "\n" not in str(told.value)


def test_a_model_that_scores_otherwise_is_refused_with_both_numbers_and_leaves_nothing(
    tmp_path: Path
) -> None:
    chosen, path, _ = trained(tmp_path, sources("Net(7)"), test_loss=2.5)
    with pytest.raises(HpoError, match=r"scores test_loss=\d\.\d{10,} now and scored 2\.5 when"):
        export.write(chosen, path, tmp_path / "out", device="cpu")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "work"]


def test_source_that_is_not_the_one_of_the_training_is_found_out(tmp_path: Path) -> None:
    """The same weights fit into it, and compute something else."""
    chosen, path, _ = trained(tmp_path, sources("Net(7)"))
    nets = textwrap.dedent(NETS.replace("torch.relu(", "torch.tanh("))
    edited = Picked(**{**vars(chosen), "source": {**(chosen.source or {}), "mynets.py": nets}})
    with pytest.raises(HpoError, match="nothing is written"):
        export.write(edited, path, tmp_path / "out", device="cpu")


def test_on_another_machine_rounding_may_differ_and_is_named(tmp_path: Path) -> None:
    chosen, path, _ = trained(tmp_path, sources("Net(7)"))
    assert chosen.scores["test_loss"] > 1
    near = {**chosen.metrics, "test_loss": chosen.metrics["test_loss"] + 1e-3}
    other = Picked(**{**vars(chosen), "metrics": near,
                      "ran_with": {**chosen.ran_with, "processor": "an old one"}})
    card = export.write(other, path, tmp_path / "out", device="cpu")
    assert card["scored_as"].startswith("the stored numbers within 0.002 (processor was an old")
    with pytest.raises(HpoError):
        export.write(Picked(**{**vars(chosen), "metrics": near}), path, tmp_path / "out2",
                     device="cpu")


def test_an_export_is_replaced_by_force_alone_and_nothing_else_ever_is(tmp_path: Path) -> None:
    full, old = tmp_path / "full", tmp_path / "old"
    for folder, file in ((full, "thesis.tex"), (old, "model.json")):
        folder.mkdir()
        (folder / file).touch()
    ask = {"home": tmp_path, "storage": None, "console": None, "data_dir": None, "devices": "cpu"}
    with pytest.raises(HpoError, match="is not an empty folder, and no export"):
        export.export_row("x", full, force=True, **ask)  # type: ignore[arg-type]
    with pytest.raises(HpoError, match="which --force replaces"):
        export.export_row("x", old, **ask)  # type: ignore[arg-type]
    chosen, path, _ = trained(tmp_path, sources("Net(7)"))
    export.write(chosen, path, old, device="cpu")
    assert len(list(old.iterdir())) == 4 and hpo.load(old)
