"""Export a trained model: weights, and the JSON that rebuilds it, proved by doing so.

The exported files are loaded again and scored; an export whose score differs is refused.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo import ask, devices, discover
from hpo.errors import HpoError, InputError, NoResult
from hpo.results import PHASES
from hpo.space import params_from_json
from hpo.spec import Run, nearest
from hpo.versions import file_digest, versions

if TYPE_CHECKING:
    from rich.console import Console

    from storage.database import Database

# What a registry row can stand for.
SOURCES = ("search", "grid", "random", "lr-range", "default")
# bf16 autocast on another GPU adds up in another order; fp32 on the CPU repeats far below this.
_TOLERANCE = 2e-3


def export(
    study: str, to: Path, home: Path, storage: str | None, console: Console, *,
    trial: int | None, rank: int, phase: str, data_dir: Path | None, devices: str,
) -> int:
    """Write `model.pt` (the state dict) and `model.json` into a new folder.

    Raises:
        InputError: for a folder that holds something already, or an unknown trial.
        HpoError: for a checkpoint that is gone or damaged, or that scores otherwise than it did.
    """
    to = Path(to)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InputError(f"--to {to}: it exists and is not an empty folder")
    _check_phase(phase, trial)
    parent = _parent(to)
    with ask.opened(home, storage) as db:
        chosen = _chosen(db, study, trial, rank, phase)
        row = ask.require(db, study)
    state = ask.checkpoint_state(home, chosen["checkpoint"])
    if state != "kept":
        raise HpoError(_no_checkpoint(home, study, chosen, state))
    run = Run(epochs=int(row["epochs"]), seed=chosen["seed"], device=_device(devices), dir=to,
              data_dir=data_dir, data_fraction=float(row["settings"]["data_fraction"]))
    with tempfile.TemporaryDirectory(prefix=f".{to.name}-", dir=parent) as folder:
        data = _write(Path(folder), home / chosen["checkpoint"], chosen, row)
        _write_json(Path(folder), data)
        scores = _score(Path(folder), home / chosen["checkpoint"], row, chosen, run)
        _compare(scores, chosen["metrics"], chosen["checkpoint"])
        _write_json(Path(folder), {**data, "scored_again": scores})
        to.mkdir(parents=True, exist_ok=True)
        for file in Path(folder).iterdir():
            shutil.move(file, to / file.name)
    shown = ", ".join(f"{name}={value:.4f}" for name, value in scores.items())
    console.print(f"{to}: model.pt and model.json; loaded again: {shown}\n"
                  f"in Python: {data['load'].replace('FOLDER', repr(str(to)))}", highlight=False,
                  markup=False, soft_wrap=True)
    return 0


def _check_phase(phase: str, trial: int | None) -> None:
    known = PHASES if trial is not None else SOURCES
    if phase not in known:
        raise InputError(f"--phase '{phase}'{' with --trial' if trial is not None else ''}: "
                         f"accepted are {', '.join(known)}{nearest(phase, known)}")


def _parent(to: Path) -> Path:
    parent = to.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--to {to}: {error.filename}: {error.strerror}") from None
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"--to {to}: no leave to write in {parent}")
    return parent


def _device(wanted: str) -> str:
    return devices.slots(wanted, 1)[0].device


def _chosen(
    db: Database, study: str, trial: int | None, rank: int, phase: str
) -> dict[str, Any]:
    """Return checkpoint, seed, params and metrics of what is to be exported."""
    from hpo import read_results

    ask.require(db, study)
    if trial is not None:
        found = read_results.collect(db, study).phases.get(phase)
        match = next((t for t in found.trials if t.number == trial), None) if found else None
        if match is None:
            n = len(found.trials) if found else 0
            raise InputError(f"--trial {trial}: the phase {phase} of study '{study}' has {n} "
                             f"trials, numbered from 0")
        return {"what": f"{phase} trial {trial}", "checkpoint": match.attrs.get("checkpoint"),
                "seed": match.attrs.get("seed"), "params": match.params,
                "metrics": match.attrs.get("best", {}), "trial": trial}
    rows = ask.registered(db, study, phase)
    row = next((row for row in rows if row["rank"] == rank), None)
    if row is None:
        raise NoResult(f"study '{study}' has no registered result of phase {phase} and rank "
                       f"{rank}: `hpo registry list --study {study}` shows those there are, and "
                       f"--trial N exports a search trial")
    run = next(run for run in row["scores"] if run["checkpoint"] == row["checkpoint"])
    return {"what": f"{phase} rank {rank}", "checkpoint": row["checkpoint"], "seed": run["seed"],
            "params": row["params"], "trial": row["trial"],
            "metrics": {**run["val_metrics"], **run["test_metrics"]}}


def _no_checkpoint(home: Path, study: str, chosen: Mapping[str, Any], state: str) -> str:
    if state == "none":
        return (f"study '{study}', {chosen['what']}: no checkpoint was kept (only COMPLETE trials "
                f"among the best --top-k keep one, and only those of a build= recipe)")
    path = home / chosen["checkpoint"]
    why = " (trials that better ones displaced keep none)" if state == "missing" else ""
    return f"study '{study}', {chosen['what']}: checkpoint {path} is {state}{why}"


def _write(
    folder: Path, checkpoint: Path, chosen: Mapping[str, Any], row: Mapping[str, Any]
) -> dict[str, Any]:
    import torch

    from hpo.train.checkpoint import read

    entry = read(checkpoint)
    torch.save(entry["model"], folder / "model.pt")
    spec_file = Path(discover.source_path(row["module"])) if _loads(row["module"]) else None
    norm = entry.get("normalisation")
    return {
        "study": row["name"], "module": row["module"],
        "module_sha256": spec_file and file_digest(spec_file),
        "what": chosen["what"], "trial": chosen["trial"], "params": dict(chosen["params"]),
        "seed": chosen["seed"], "epoch": entry["epoch"], "metrics": chosen["metrics"],
        "recipe": entry["recipe"], "image_shape": entry["image_shape"],
        "n_classes": entry["n_classes"], "classes": entry["classes"],
        "normalisation": norm and {name: norm[name].tolist() for name in norm},
        "data_fingerprint": entry["fingerprint"], "versions": versions(),
        "load": "from hpo.train.checkpoint import load_export; model = load_export(FOLDER)",
    }


def _write_json(folder: Path, data: Mapping[str, Any]) -> None:
    (folder / "model.json").write_text(json.dumps(data, indent=1, default=str) + "\n")


def _loads(module: str) -> bool:
    discover.load(module)
    return True


def _score(
    folder: Path, checkpoint: Path, row: Mapping[str, Any], chosen: Mapping[str, Any], run: Run
) -> dict[str, float]:
    """Score the model that the exported files give back, on the validation split."""
    from hpo.train.scoring import score

    spec = discover.load(row["module"])
    assert spec.build is not None
    recipe = spec.build(run, **spec.full_params(params_from_json(chosen["params"])))
    return score(recipe, run, checkpoint, "val", _loaded_again(folder, recipe))


def _loaded_again(folder: Path, recipe: Any) -> Any:
    """Return the model as `load_export` gives it; one of the user's own comes from its module."""
    import torch

    from hpo.train.checkpoint import load_export
    from hpo.train.models import ModelSpec
    from hpo.train.scoring import own_model

    if isinstance(recipe.model, ModelSpec):
        return load_export(folder)
    model = own_model(recipe.model)
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    return model


def _compare(scores: Mapping[str, float], stored: Mapping[str, float], path: str) -> None:
    for name, value in scores.items():
        before = stored.get(name)
        if before is not None and not math.isclose(value, before, rel_tol=_TOLERANCE,
                                                   abs_tol=_TOLERANCE):
            raise HpoError(f"checkpoint {path} scores {name}={value:.6g} now and scored "
                           f"{before:.6g} in its trial: nothing is written (is it the same data? "
                           f"--data-dir)")
