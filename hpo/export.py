"""Export a trained model: weights, source, and the JSON that rebuilds it, proved by doing so.

The exported files are loaded as `hpo.load` loads them and scored; an export whose score is not
the stored one is refused.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo import ask, bundle, devices, discover, picked
from hpo.display import say
from hpo.errors import HpoError, InputError
from hpo.picked import Picked
from hpo.spec import Run
from hpo.versions import surroundings, versions

if TYPE_CHECKING:
    from rich.console import Console

    from storage.database import Database

# bf16 autocast on another GPU adds up in another order; another machine's fp32 repeats far below.
_TOLERANCE = 2e-3
# What the loop scored in a trial may be compiled, or of rows in smaller parts.
_ROUNDING = 1e-6


def export(
    study: str, to: Path, home: Path, storage: str | None, console: Console, *,
    trial: int | None, rank: int, phase: str, data_dir: Path | None, devices: str,
    force: bool = False,
) -> int:
    """Write the model of a trial, or of a registered result by its rank, into a new folder.

    Raises:
        InputError: for a folder that holds something already, or an unknown trial.
        HpoError: for a checkpoint that is gone or damaged, or that scores otherwise than it did.
    """
    picked.check_phase(phase, trial)

    def pick(db: Database) -> Picked:
        if trial is not None:
            return picked.by_trial(db, study, phase, trial)
        return picked.by_rank(db, study, phase, rank)

    return _export(pick, Path(to), home, storage, console, data_dir, devices, force)


def export_row(
    ref: str, to: Path, home: Path, storage: str | None, console: Console, *,
    data_dir: Path | None, devices: str, force: bool = False,
) -> int:
    """Write the model of a registered result, by its id or alias, into a new folder.

    Raises:
        InputError: for a folder that holds something already, or a result that is not there.
        HpoError: for a checkpoint that is gone or damaged, or that scores otherwise than it did.
    """
    return _export(lambda db: picked.by_ref(db, ref), Path(to), home, storage, console, data_dir,
                   devices, force)


def _export(
    pick: Callable[[Database], Picked], to: Path, home: Path, storage: str | None,
    console: Console, data_dir: Path | None, wanted: str, force: bool,
) -> int:
    _check_target(to, force)
    _parent(to)
    with ask.opened(home, storage) as db:
        chosen = pick(db)
    state = ask.checkpoint_state(home, chosen.checkpoint)
    if state != "kept" or chosen.checkpoint is None:
        raise HpoError(_no_checkpoint(home, chosen, state))
    card = write(chosen, home / chosen.checkpoint, to, data_dir=data_dir,
                 device=devices.slots(wanted, 1)[0].device)
    shown = ", ".join(f"{name}={value!r}" for name, value in card["scored_again"].items())
    say(console, f"{to}: {', '.join(sorted(path.name for path in to.iterdir()))}\n"
                 f"scored again: {shown}, {card['scored_as']}\n"
                 f"in Python: {card['load'].replace('FOLDER', repr(str(to)))}")
    return 0


def write(
    chosen: Picked, checkpoint: Path, to: Path, *, device: str, data_dir: Path | None = None
) -> dict[str, Any]:
    """Write an export aside, prove it, rename it into place, and return what its JSON says.

    Raises:
        HpoError: where it does not load, or scores otherwise than what is stored; nothing is left.
    """
    with tempfile.TemporaryDirectory(prefix=f".{to.name}-", dir=to.absolute().parent) as aside:
        folder, run = Path(aside) / "new", _run(chosen, Path(aside), data_dir, device)
        folder.mkdir()
        card = _write(folder, checkpoint, chosen)
        card |= _proved(folder, card, checkpoint, chosen, run)
        _write_card(folder, card)
        _put(folder, to, Path(aside) / "old")
    return card


def _check_target(to: Path, force: bool) -> None:
    if not to.exists() or (to.is_dir() and not any(to.iterdir())):
        return
    if not to.is_dir():
        raise InputError(f"--to {to}: it is a file")
    if not (to / "model.json").is_file():
        raise InputError(f"--to {to}: it exists and is not an empty folder, and no export")
    if not force:
        raise InputError(f"--to {to}: it exists and is not an empty folder; it is an export, "
                         f"which --force replaces")


def _parent(to: Path) -> None:
    parent = to.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--to {to}: {error.filename}: {error.strerror}") from None
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"--to {to}: no leave to write in {parent}")


def _run(chosen: Picked, folder: Path, data_dir: Path | None, device: str) -> Run:
    settings = chosen.study["settings"] or {}
    given = data_dir or settings.get("data_dir")
    return Run(epochs=int(chosen.study["epochs"]), seed=chosen.seed,
               device=device, dir=folder,
               data_dir=Path(given) if given else None,
               data_fraction=float(settings.get("data_fraction") or 1.0))


def _no_checkpoint(home: Path, chosen: Picked, state: str) -> str:
    said = f"study '{chosen.name}', {chosen.what}: "
    if state == "none" or chosen.checkpoint is None:
        return (f"{said}no checkpoint was kept (only COMPLETE trials among the best --top-k keep "
                f"one, and only those of a build= recipe)")
    why = " (trials that better ones displaced keep none)" if state == "missing" else ""
    return f"{said}checkpoint {home / chosen.checkpoint} is {state}{why}"


def _write(folder: Path, checkpoint: Path, chosen: Picked) -> dict[str, Any]:
    """Write weights and source into a folder and return what its JSON says of them."""
    import torch
    from safetensors.torch import save_file

    from hpo.train.checkpoint import read
    from hpo.train.exported import SAFE, SOURCE, WEIGHTS, sha256

    entry, module = read(checkpoint), chosen.study["module"]
    weights = entry["model"]
    torch.save(weights, folder / WEIGHTS)
    # That format holds no two names for one memory.
    save_file({name: value.clone().contiguous() for name, value in weights.items()},
              folder / SAFE)
    # It leaves a file for its owner alone.
    (folder / SAFE).chmod((folder / WEIGHTS).stat().st_mode)
    source = chosen.source or _source_now(module)
    bundle.write(folder / SOURCE, source)
    files = [folder / WEIGHTS, folder / SAFE, *((folder / SOURCE) / name for name in source)]
    norm = entry.get("normalisation")
    return {
        "study": chosen.name, "module": module, "what": chosen.what, "trial": chosen.trial,
        "params": dict(chosen.params), "seed": chosen.seed, "epoch": entry["epoch"],
        "epochs": chosen.study["epochs"], "data_fraction": entry.get("data_fraction", 1.0),
        "metrics": dict(chosen.metrics), "registered": dict(chosen.registered),
        "recipe": entry["recipe"], "image_shape": entry["image_shape"],
        "n_classes": entry["n_classes"], "classes": entry["classes"],
        "normalisation": norm and {name: norm[name].tolist() for name in norm},
        "data_fingerprint": entry["fingerprint"], "versions": versions(),
        "trained_with": dict(chosen.ran_with), "source": sorted(source),
        "files": {str(path.relative_to(folder)): sha256(path) for path in files},
        "load": "import hpo; model = hpo.load(FOLDER)",
    }


def _source_now(module: str) -> dict[str, str]:
    """Return the source as it is now, for a result that is older than the keeping of it."""
    discover.load(module)
    return bundle.files_of(module)


def _write_card(folder: Path, card: Mapping[str, Any]) -> None:
    from hpo.report_json import strict
    from hpo.train.exported import CARD

    text = json.dumps(strict(dict(card)), indent=1, allow_nan=False, ensure_ascii=False)
    (folder / CARD).write_text(text + "\n", encoding="utf-8")


def _proved(
    folder: Path, card: dict[str, Any], checkpoint: Path, chosen: Picked, run: Run
) -> dict[str, Any]:
    """Load the files as anybody will, score the model, and say what came of it.

    Its data come by the exported source too; what that says of inputs and model goes into `card`.

    Raises:
        HpoError: where a score is not the stored one, with both.
    """
    from hpo.train import exported
    from hpo.train.named_models import MODELS
    from hpo.train.scoring import score

    with exported.source_of(folder, card) as module, _threads(chosen, run):
        recipe = exported.recipe_of(module, card, run)
        card["made_by"] = "hpo" if type(recipe.model) in MODELS.values() else "source"
        card["inputs"] = exported.inputs_of(recipe, card)
        _write_card(folder, card)
        model = exported.load(folder)
        scores = score(recipe, run, checkpoint, chosen.split, model)  # type: ignore[arg-type]
    unlike = _unlike(chosen, run)
    allowed = _TOLERANCE if unlike else 0.0 if chosen.split == "test" else _ROUNDING
    _compare(scores, chosen.scores, chosen.checkpoint or "", allowed, unlike)
    said = "the stored numbers" + (" to the last bit" if not allowed else
                                   f" within {allowed:g}" + (f" ({unlike})" if unlike else ""))
    return {"scored_again": scores, "scored_as": said}


@contextlib.contextmanager
def _threads(chosen: Picked, run: Run) -> Iterator[None]:
    """Compute with as many threads as then: sums of floats depend on how they are shared out."""
    import torch

    before, wanted = torch.get_num_threads(), chosen.ran_with.get("n_threads")
    if run.device == "cpu" and wanted:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _unlike(chosen: Picked, run: Run) -> str:
    """Return what is not as it was when the model was scored, so that rounding may differ."""
    then = chosen.ran_with
    if not then:
        return "what it was scored with is not stored"
    if "cuda" in (run.device.split(":")[0], then.get("device")):
        return f"scored on {then.get('device')} then, on {run.device} now"
    now = surroundings(run.device, "")
    was, is_now = then.get("versions") or {}, now["versions"]
    pairs = [(name, was.get(name), is_now.get(name)) for name in ("torch", "numpy")]
    pairs += [(name, then.get(name), now[name]) for name in ("processor", "cpu_capability")]
    return ", ".join(f"{name} was {before}, is {after}" for name, before, after in pairs
                     if before != after)


def _compare(
    scores: Mapping[str, float], stored: Mapping[str, float], path: str, allowed: float,
    unlike: str,
) -> None:
    for name, value in scores.items():
        before = stored.get(name)
        if before is None or math.isclose(value, before, rel_tol=allowed, abs_tol=allowed):
            continue
        why = f" ({unlike})" if unlike else ""
        raise HpoError(f"checkpoint {path} scores {name}={value!r} now and scored {before!r} "
                       f"when it was stored{why}: nothing is written (is it the same data? "
                       f"--data-dir)")


def _put(folder: Path, to: Path, aside: Path) -> None:
    """Rename a written folder into place; one that it replaces goes aside first."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    if to.exists() and any(to.iterdir()):
        os.rename(to, aside)
    os.rename(folder, to)
