"""The cells of `lr_range.py`: small trainings of many kinds, each at 33 rates, and their store.

A cell is data, net, width, batch and optimizer. Trained once, the accuracies stay in one file, so
that a changed rule for the pick is judged on them in seconds.
"""

from __future__ import annotations

import gzip
import json
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hpo import Run
from hpo.train import MLP, Recipe, SimpleCNN, optimizer, tensors

N_RATES = 33
OPTIMIZERS = ("sgd", "adam", "amsgrad", "adamw", "rmsprop", "adagrad", "adadelta", "lamb", "muon")
# Data, net, width, batch and epochs: as many that the accuracy has nearly stopped rising.
KINDS = (
    ("digits", "mlp", 32, 32, 20), ("digits", "mlp", 128, 128, 30),
    ("digits", "cnn", 8, 64, 15), ("digits", "cnn", 12, 16, 8),
    ("fashion", "mlp", 64, 64, 10), ("fashion", "mlp", 256, 256, 15),
    ("fashion", "cnn", 8, 128, 8),
)
N_SEEDS = 2
TOP_RATE = {"sgd": 10.0, "adagrad": 10.0, "adadelta": 100.0}
# A training that is no better than this after a third of its epochs is not the best one.
HOPELESS = 0.2
# Of each data set so many rows train; the rest, or so many, measure.
N_TRAIN = {"digits": 1000, "fashion": 4000}
N_MEASURED = 4000


@dataclass(frozen=True)
class Cell:
    """One small training."""

    data: str
    net: str
    width: int
    batch: int
    epochs: int
    optimizer: str

    @property
    def key(self) -> str:
        """The cell's name in the store."""
        return f"{self.data}/{self.net}{self.width}/b{self.batch}/{self.optimizer}"

    def recipe(self, data: Any, lr: float | None = None) -> Recipe:
        """Return what the cell trains, at a rate or at the optimizer's own."""
        model = MLP(hidden=self.width) if self.net == "mlp" else SimpleCNN(
            width=self.width, hidden=4 * self.width)
        made = optimizer(self.optimizer)
        return Recipe(data=data, model=model, batch_size=self.batch, eval_batch_size=1000,
                      optimizer=made if lr is None else replace(made, lr=lr))

    def rates(self) -> list[float]:
        """Return 33 rates over the four decades in which its optimizer trains such nets."""
        high = TOP_RATE.get(self.optimizer, 1.0)
        return [float(rate) for rate in np.geomspace(1e-4 * high, high, N_RATES)]


def cells(with_fashion: bool) -> list[Cell]:
    """Return all cells, those of the digits first."""
    return [Cell(*kind, name) for kind in KINDS for name in OPTIMIZERS
            if with_fashion or kind[0] == "digits"]


@cache
def data_of(name: str, fashion: Path | None) -> Any:
    """Return a cell's data: rows that train, and others that measure; the same for each seed."""
    if name == "digits":
        from sklearn.datasets import load_digits

        loaded: Any = load_digits()
        images, labels = (loaded.images / 16).astype("float32")[:, None], loaded.target
        order = np.random.default_rng(0).permutation(len(images))
        images, labels = images[order], labels[order]
        train, rest = slice(0, N_TRAIN[name]), slice(N_TRAIN[name], None)
        return tensors(images[train], labels[train], val=(images[rest], labels[rest]))
    assert fashion is not None
    x, y = _fashion(fashion, "train", N_TRAIN[name])
    return tensors(x, y, val=_fashion(fashion, "t10k", N_MEASURED))


def _fashion(folder: Path, part: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first rows of Fashion-MNIST, each 2 x 2 pixels as their mean."""
    x = _idx(folder / f"{part}-images-idx3-ubyte")[:n].astype("float32") / 255
    y = _idx(folder / f"{part}-labels-idx1-ubyte")[:n].astype("int64")
    return x.reshape(-1, 14, 2, 14, 2).mean((2, 4))[:, None], y


def _idx(path: Path) -> np.ndarray:
    packed = path.with_name(path.name + ".gz")
    data = gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()
    shape = struct.unpack(f">{data[3]}I", data[4:4 + 4 * data[3]])
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def run_of(cell: Cell, seed: int) -> Run:
    """Return the run of one seed."""
    return Run(epochs=cell.epochs, seed=seed, device="cpu", dir=Path(tempfile.gettempdir()))


def accuracies(cell: Cell, seed: int, data: Any) -> list[float]:
    """Train a cell once at each of its rates and return the accuracies after the last epoch."""
    return [_accuracy(cell, seed, data, rate) for rate in cell.rates()]


def _accuracy(cell: Cell, seed: int, data: Any, rate: float) -> float:
    from hpo.train.loop import Trainer

    last = 0.0
    for i, epoch in enumerate(Trainer(cell.recipe(data, rate), run_of(cell, seed)).epochs(), 1):
        last = epoch["val_accuracy"]
        if not np.isfinite(epoch["train_loss"]) or (last < HOPELESS and i >= cell.epochs / 3):
            break
    return last


class Store:
    """All that was trained, in one file of packed JSON that is written aside and renamed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.accuracy: dict[str, dict[str, list[float]]] = {}
        self.curves: dict[str, dict[str, Any]] = {}
        if path.exists():
            data = json.loads(gzip.decompress(path.read_bytes()))
            self.accuracy, self.curves = data["accuracy"], data["curves"]

    def save(self) -> None:
        """Write the file."""
        text = json.dumps({"accuracy": self.accuracy, "curves": self.curves})
        aside = self.path.with_name(f".{self.path.name}.part")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Without a time in it the same content is the same file.
        aside.write_bytes(gzip.compress(text.encode(), mtime=0))
        os.replace(aside, self.path)

    def missing(self, all_cells: list[Cell]) -> Iterator[tuple[Cell, int]]:
        """Yield each training that is not there yet, the first seeds of all cells first."""
        for seed in range(N_SEEDS):
            for cell in all_cells:
                if str(seed) not in self.accuracy.get(cell.key, {}):
                    yield cell, seed


def train_missing(store: Store, all_cells: list[Cell], fashion: Path | None,
                  limit_s: float) -> int:
    """Train what is not in the store yet, for about so many seconds; return what is left."""
    until = time.monotonic() + limit_s
    left = list(store.missing(all_cells))
    while left and time.monotonic() < until:
        cell, seed = left.pop(0)
        found = accuracies(cell, seed, data_of(cell.data, fashion))
        store.accuracy.setdefault(cell.key, {})[str(seed)] = [round(v, 5) for v in found]
        store.save()
        print(f"{cell.key} seed {seed}: best {max(found):.4f}, {len(left)} left", flush=True)
    return len(left)


def sweep_missing(store: Store, all_cells: list[Cell], fashion: Path | None) -> None:
    """Run the range test of the cells whose curves are not in the store yet."""
    from hpo.baselines.lr_range import lr_range

    for cell in all_cells:
        if cell.key in store.curves:
            continue
        recipe = cell.recipe(data_of(cell.data, fashion))
        # Other seeds than those whose accuracies it is held against.
        found = lr_range(lambda _, recipe=recipe: recipe, run_of(cell, 100))
        by_seed = [[round(v, 5) if np.isfinite(v) else None for v in one]
                   for one in found.by_seed]
        store.curves[cell.key] = {"rates": found.rates, "batch_size": found.batch_size,
                                  "by_seed": by_seed}
    store.save()
