"""Training states on disk: where a trial goes on that was cut off.

The last two are kept, so that a broken newest one costs an epoch and not the trial.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hpo.errors import DataError
from hpo.train import checkpoint
from hpo.train.sharded import whole

LOG = logging.getLogger("hpo.train")
_N_KEPT = 2


def on_host(state: Any) -> Any:
    """Return a copy of nested state whose tensors are whole, on the CPU, and change no more."""
    if isinstance(state, Tensor):
        return whole(state.detach()).to("cpu", copy=True)
    if isinstance(state, Mapping):
        return {key: on_host(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(on_host(value) for value in state)
    return state


def differences(theirs: Any, ours: Any, name: str = "") -> list[str]:
    """Return one text for each field of nested plain data that is not the same, with both."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        return [told for key in dict.fromkeys([*theirs, *ours]) for told in differences(
            theirs.get(key), ours.get(key), f"{name}.{key}" if name else str(key))]
    if _plain(theirs) == _plain(ours):
        return []
    return [f"{name} was {theirs!r}, is {ours!r}"]


def _plain(value: Any) -> Any:
    """Return data as JSON has it, where a tuple is a list."""
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def write_state(folder: Path, state: Mapping[str, Any]) -> Path:
    """Write a trainer's state beside the one before it and return its file.

    Raises:
        OSError: the folder cannot be written; the states before stay.
    """
    path = Path(folder) / f"epoch-{state['next_epoch']:06d}.state"
    checkpoint.write(path, state)
    for old in _states(folder)[_N_KEPT:]:
        old.unlink(missing_ok=True)
    return path


def read_state(folder: Path) -> dict[str, Any] | None:
    """Return the newest state of a folder that is whole, or None; no code of a file is run."""
    for path in _states(folder):
        try:
            state = checkpoint.read(path)
        except DataError as error:
            LOG.warning("%s; the state before it is taken", error)
            continue
        if "next_epoch" in state and "trains" in state:
            return state
    return None


def _states(folder: Path) -> list[Path]:
    """Return the states of a folder, the newest first."""
    return sorted(Path(folder).glob("epoch-*.state"), reverse=True)
