"""A data set as numpy arrays, and the cache of memory-mapped files that all workers share.

Decoding happens once a machine: each worker maps the same file, so the pages are in memory once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpo.errors import DataError

# Raised when the meaning of a cached file changes, so that old ones are not read as new ones.
FORMAT = 1


@dataclass(frozen=True, eq=False)
class Arrays:
    """A data set in memory or mapped from a file.

    Shapes: `x`, `val_x`, `test_x` [n, ...] uint8 or float32; `y`, `val_y`, `test_y` [n] int64.
    `x` is divided into training and validation rows unless `val_x` is given. `normalise` asks for
    inputs of mean 0 and deviation 1 over the training rows.
    """

    x: np.ndarray
    y: np.ndarray
    n_classes: int
    fingerprint: str
    classes: tuple[str, ...] = ()
    val_x: np.ndarray | None = None
    val_y: np.ndarray | None = None
    test_x: np.ndarray | None = None
    test_y: np.ndarray | None = None
    normalise: bool = True


def fingerprint(*arrays: np.ndarray | None) -> str:
    """Return a short sha256 of the arrays' types, shapes and bytes."""
    digest = hashlib.sha256()
    for array in arrays:
        if array is None:
            digest.update(b"none")
            continue
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        for start in range(0, len(array), 4096):
            digest.update(np.ascontiguousarray(array[start:start + 4096]).data)
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Return where decoded data sets are kept: HPO_CACHE_DIR, else the user's cache folder."""
    own = os.environ.get("HPO_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "hpo"


def cached(name: str, key: str, write: Callable[[Path], tuple[str, ...]]) -> Arrays:
    """Return the data set of a key from the cache, written by `write(folder)` if it is new.

    `write` saves `x.npy`, `y.npy` and, if there is a test split, `test_x.npy` and `test_y.npy`,
    and returns the class names. Workers that start together wait for the one that writes.

    Raises:
        DataError: if the cache folder cannot be written.
    """
    digest = hashlib.sha256(f"{FORMAT}|{key}".encode()).hexdigest()[:20]
    folder = cache_folder() / "data" / f"{name}-{digest}"
    if not (folder / "meta.json").is_file():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(folder.with_suffix(".lock")):
                if not (folder / "meta.json").is_file():
                    _write_aside(folder, write)
        except OSError as error:
            raise _unwritable(error) from error
    return _read(folder)


def _unwritable(error: OSError) -> DataError:
    return DataError(f"the cache of decoded data sets, {cache_folder()}, cannot be written "
                     f"({error.strerror or error}); set HPO_CACHE_DIR to a folder that can")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _write_aside(folder: Path, write: Callable[[Path], tuple[str, ...]]) -> None:
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        classes = write(aside)
        found = _arrays(aside)
        meta = {"classes": list(classes), "fingerprint": fingerprint(*found.values())}
        (aside / "meta.json").write_text(json.dumps(meta))
        for path in aside.iterdir():
            with open(path, "rb") as handle:
                os.fsync(handle.fileno())
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _arrays(folder: Path) -> dict[str, np.ndarray | None]:
    paths = {part: folder / f"{part}.npy" for part in ("x", "y", "test_x", "test_y")}
    return {part: np.load(path, mmap_mode="c") if path.is_file() else None
            for part, path in paths.items()}


def _read(folder: Path) -> Arrays:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        found = _arrays(folder)
        x, y = found["x"], found["y"]
        if x is None or y is None:
            raise ValueError("a file is missing")
    except (ValueError, OSError) as error:
        raise DataError(f"the cached data set {folder} cannot be read ({error}); "
                        f"delete that folder, it is made again") from error
    return Arrays(x, y, len(meta["classes"]), meta["fingerprint"], tuple(meta["classes"]),
                  test_x=found["test_x"], test_y=found["test_y"])
