"""The model of a folder that `hpo export` wrote, made again from that folder alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hpo import bundle
from hpo.errors import DataError, HpoError
from hpo.space import params_from_json
from hpo.spec import Run
from hpo.train import checkpoint
from hpo.train.loaded import normalised
from hpo.train.models import ModelSpec
from hpo.train.named_models import MODELS
from hpo.train.scoring import own_model, shaped
from hpo.train.sources import Datasets

CARD, WEIGHTS, SAFE, SOURCE = "model.json", "model.pt", "model.safetensors", "source"


class Preprocess:
    """Makes a model's inputs of rows as they are in the data set: (rows - mean) / std.

    Without a mean, bytes are divided by 255 and all else stays as it is.

    Shapes: [n, *image_shape] in, the same as float32 out, images channels-last.
    """

    def __init__(self, scale: Mapping[str, Any] | None) -> None:
        self.mean, self.std = ((None, None) if scale is None else
                               (torch.tensor(scale[name]) for name in ("mean", "std")))

    def __call__(self, rows: Tensor) -> Tensor:
        if self.mean is None or self.std is None:
            return normalised(rows, None, None)
        return normalised(rows, self.mean.to(rows.device), self.std.to(rows.device))


def load(folder: Path | str) -> nn.Module:
    """Return the model of an exported folder with its weights, on the CPU, to predict with.

    `model(model.preprocess(rows))` gives class scores of rows as they are in the data set, of
    which `model.json` says shape, type and scale under `inputs`; `model.classes` names them. A
    module that has an attribute of such a name itself keeps its own. Nothing but the folder is
    needed. A model of the user's own is made by the source in it, which is run: load such folders
    of people you trust only.

    Raises:
        DataError: in one line, for a folder that is broken or no export, or whose model cannot be
            made here.
    """
    folder = Path(folder)
    card = read_card(folder)
    with _own_source(folder, card) as module, torch.random.fork_rng(devices=[]):
        model = make(folder, card, module)
    for name, value in (("preprocess", Preprocess(card.get("normalisation"))),
                        ("classes", tuple(card.get("classes") or ()))):
        if not hasattr(model, name):
            setattr(model, name, value)
    return model


def read_card(folder: Path) -> dict[str, Any]:
    """Return what `model.json` says, once all files are there and whole.

    Raises:
        DataError: for a folder that is broken or no export.
    """
    try:
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
        missing = {"recipe", "image_shape", "n_classes"} - set(card)
    except (OSError, ValueError, TypeError) as error:
        raise _broken(folder, error) from None
    if missing:
        raise DataError(f"export {folder}: {CARD} is no description of a model (it lacks "
                        f"{', '.join(sorted(missing))})")
    for name, digest in card.get("files", {}).items():
        try:
            found = sha256(folder / name)
        except OSError as error:
            raise _broken(folder, error) from None
        if found != digest:
            raise DataError(f"export {folder}: {name} is not the file that was exported (its "
                            f"sha256 is another): export it again")
    return card


def _broken(folder: Path, error: Exception) -> DataError:
    said = str(error).splitlines()[0] if str(error) else "empty"
    return DataError(f"export {folder}: cannot be read ({type(error).__name__}: {said})")


def sha256(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def _own_source(folder: Path, card: Mapping[str, Any]) -> Iterator[ModuleType | None]:
    """Have the module of an export imported for the while, if its model is made by that."""
    if _is_ours(card):
        yield None
        return
    with source_of(folder, card) as module:
        yield module


def _is_ours(card: Mapping[str, Any]) -> bool:
    return card.get("made_by", "hpo") == "hpo" and card["recipe"]["model"].get("type") in MODELS


@contextlib.contextmanager
def source_of(folder: Path, card: Mapping[str, Any]) -> Iterator[ModuleType]:
    """Have the module that an export holds imported for the while.

    Raises:
        DataError: if there is none, or it does not import.
    """
    files = card.get("source")
    if not files:
        raise DataError(f"export {folder}: its model {card['recipe']['model'].get('type')} is the "
                        f"study's own, and the folder holds no source of it: export it again")
    with contextlib.ExitStack() as stack:
        try:
            module = stack.enter_context(
                bundle.imported(folder / SOURCE, files, card["module"]))
        except Exception as error:
            raise DataError(f"export {folder}: its module {card['module']} does not import here: "
                            f"{_said(error)}") from error
        yield module


def recipe_of(module: ModuleType, card: Mapping[str, Any], run: Run) -> Any:
    """Return the recipe that an export's module builds with its params."""
    spec = module.STUDY
    return spec.build(run, **spec.full_params(params_from_json(card["params"])))


def make(folder: Path, card: Mapping[str, Any], module: ModuleType | None) -> nn.Module:
    """Return the bare model with its weights, in evaluation mode.

    Raises:
        DataError: if it cannot be made, or the weights are not its own.
    """
    try:
        weights = torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise _broken(folder, error) from error
    try:
        if module is None:
            return checkpoint.rebuild({**card, "model": weights})
        model = _own(card, module)
        model.load_state_dict(weights)
        return model.eval()
    except HpoError as error:
        raise DataError(f"export {folder}: {error}") from error
    except Exception as error:
        raise DataError(f"export {folder}: its model cannot be made here: "
                        f"{_said(error)}") from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _own(card: Mapping[str, Any], module: ModuleType) -> nn.Module:
    with tempfile.TemporaryDirectory(prefix="hpo-load-") as aside:
        run = Run(epochs=int(card.get("epochs") or 1), seed=int(card["seed"]), device="cpu",
                  dir=Path(aside), data_fraction=float(card.get("data_fraction") or 1.0))
        given = recipe_of(module, card, run).model
        if isinstance(given, ModelSpec):
            return given.make(card["image_shape"], card["n_classes"])
        return shaped(own_model(given), card["image_shape"])


def inputs_of(recipe: Any, card: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model takes: the shape and type of a row, and how it is scaled."""
    source: Any = recipe.data.open()
    if isinstance(source, Datasets):
        row = source.train[0][0]
        kind = str(getattr(row, "dtype", "")).removeprefix("torch.")
    else:
        kind = source.x.dtype.name
    scaled = ("(rows - mean) / std, with mean and std of `normalisation`"
              if card.get("normalisation") else
              "rows / 255" if kind == "uint8" else "rows as they are")
    return {"shape": list(card["image_shape"]), "dtype": kind, "scaled": scaled,
            "scored_in": recipe.precision, "outputs": ["n", card["n_classes"]]}
