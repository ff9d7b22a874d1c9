"""Checkpoints: plain tensors and JSON data, written so that a reader never sees half of one."""

from __future__ import annotations

import os
import pickle
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpo.errors import DataError, InputError
from hpo.train.named_models import MODELS

if TYPE_CHECKING:
    from torch import nn


def write(path: Path, entry: Mapping[str, Any]) -> None:
    """Write a checkpoint aside, sync it and rename it into place.

    Raises:
        OSError: the disk is full, say, or the folder no place to write; nothing is left.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Readable by whoever may read the folder's other files, which `tempfile` would not have it.
    aside = path.parent / f".{path.name}-{secrets.token_hex(4)}"
    try:
        with aside.open("xb") as stream:
            torch.save(dict(entry), stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(aside, path)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        # Where the disk refuses, torch's writer raises what it makes of its own bytes' place.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path) -> dict[str, Any]:
    """Return a checkpoint, all tensors on the CPU; no code of the file is run.

    Raises:
        DataError: if it is missing or broken.
    """
    try:
        entry = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise DataError(f"checkpoint {path}: cannot be read ({type(error).__name__}: "
                        f"{str(error).splitlines()[0] if str(error) else 'empty'})") from error
    if not isinstance(entry, dict) or "model" not in entry:
        raise DataError(f"checkpoint {path}: is no checkpoint of hpo")
    return entry


def rebuild(entry: Mapping[str, Any]) -> nn.Module:
    """Return the model of a checkpoint with its weights, in evaluation mode.

    Raises:
        InputError: if the model is the user's own, which only the study's module can make.
    """
    fields = dict(entry["recipe"]["model"])
    kind = fields.pop("type")
    if kind not in MODELS:
        raise InputError(f"the model {kind} is the study's own; make it with the study's module "
                         f"and load the state dict into it")
    if "pretrained" in fields:
        # The weights are the checkpoint's own; nothing is downloaded for them.
        fields["pretrained"] = False
    model = MODELS[kind](**fields).make(entry["image_shape"], entry["n_classes"])
    model.load_state_dict(entry["model"])
    return model.eval()
