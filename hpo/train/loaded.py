"""A data set made ready for one trial: split, held on the device, normalised by its training rows.

A worker keeps what it loaded, so that its next trial starts in milliseconds.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hpo.errors import DataError, InputError
from hpo.train.arrays import Arrays
from hpo.train.feed import Feed, LoaderFeed, ResidentFeed, RowsDataset
from hpo.train.given import check_labels
from hpo.train.recipe import Recipe
from hpo.train.sources import Datasets, Source, Tensors
from hpo.train.split import keep_fraction, stratified

if TYPE_CHECKING:
    from hpo.spec import Run

# Inputs up to this size are kept normalised as floats on the CPU: a gather is then all that a
# batch costs. Larger ones stay bytes, which all workers share in one mapping.
READY_BYTES = 32 * 2**20
# The part of a GPU's free memory that a data set may take; the rest is the model's.
RESIDENT_FRACTION = 0.5
KEPT_SOURCES = 2
KEPT_SPLITS = 4

_sources: OrderedDict[Hashable, Arrays] = OrderedDict()
_bases: OrderedDict[Hashable, Tensor] = OrderedDict()
_splits: OrderedDict[Hashable, Loaded] = OrderedDict()


@dataclass(frozen=True, eq=False)
class Loaded:
    """The splits of a data set for one seed and fraction, on the device.

    `mean` and `std` are in the units of the stored inputs (0..255 for bytes) and shaped to
    broadcast over a batch; None leaves inputs as they are.
    """

    train: Feed
    val: Feed
    test: Feed | None
    image_shape: tuple[int, ...]
    n_classes: int
    classes: tuple[str, ...]
    fingerprint: str
    resident: bool
    mean: Tensor | None = None
    std: Tensor | None = None

    def normalised(self, images: Tensor, *, ready: bool = False) -> Tensor:
        """Return a batch as normalised floats, images channels-last."""
        return images if ready else normalised(images, self.mean, self.std)

    def close(self) -> None:
        """End the processes that read for it."""
        for feed in (self.train, self.val, self.test):
            if feed is not None:
                feed.close()


def normalised(images: Tensor, mean: Tensor | None, std: Tensor | None) -> Tensor:
    """Return (images - mean) / std as float32, images channels-last."""
    layout = torch.channels_last if images.ndim == 4 else torch.preserve_format
    floats = images.to(torch.float32, memory_format=layout)
    if mean is None or std is None:
        return floats.div_(255.0) if images.dtype == torch.uint8 else floats
    if images.dtype != torch.uint8 or images.ndim != 4:
        return floats.sub(mean).div_(std)
    # In place, over whole rows of pixels: broadcast over three channels takes 3 times as long.
    width = images.shape[3]
    rows = floats.permute(0, 2, 3, 1).flatten(2)
    rows.sub_(mean.flatten().repeat(width)).div_(std.flatten().repeat(width))
    return floats


def load(recipe: Recipe, run: Run, device: torch.device) -> Loaded:
    """Return a recipe's data for a run, from what this process keeps if it has it.

    Raises:
        DataError: if the data cannot be read or do not suffice.
    """
    source = recipe.data
    if isinstance(source, Datasets):
        from hpo.train.loaders import load_datasets

        return load_datasets(source, recipe, run, device)
    arrays = _open(source)
    resident = recipe.resident if recipe.resident is not None else _fits(arrays, device)
    if not resident:
        return _load_streamed(arrays, source, recipe, run, device)
    ready = device.type == "cpu" and not recipe.augment and _float_bytes(arrays) <= READY_BYTES
    key = (arrays.fingerprint, source.name, source.val_fraction, arrays.normalise, str(device),
           run.seed, run.data_fraction, ready)
    return _kept(_splits, key, KEPT_SPLITS,
                 lambda: _load_resident(arrays, source, run, device, ready))


def forget() -> None:
    """Drop all data that this process keeps."""
    for store in (_sources, _bases, _splits):
        store.clear()


def _kept(store: OrderedDict[Hashable, Any], key: Hashable, limit: int, make: Any) -> Any:
    if key not in store:
        made = make()
        while len(store) >= limit:
            store.popitem(last=False)
        store[key] = made
    store.move_to_end(key)
    return store[key]


def _open(source: Source) -> Arrays:
    # Tensors may have been changed in place by their owner since the last trial: looked at anew.
    if isinstance(source, Tensors):
        arrays = source.open()
    else:
        arrays = _kept(_sources, source, KEPT_SOURCES, source.open)
    if not isinstance(arrays, Arrays):
        raise InputError(f"Recipe.data: {type(source).__name__}.open() must give Arrays, "
                         f"got {type(arrays).__name__}")
    check_labels(f"{source.name} train", arrays.y, arrays.n_classes)
    check_labels(f"{source.name} test", arrays.test_y, arrays.n_classes)
    return arrays


def _parts(arrays: Arrays) -> list[np.ndarray]:
    return [part for part in (arrays.x, arrays.val_x, arrays.test_x) if part is not None]


def _float_bytes(arrays: Arrays) -> int:
    return sum(4 * part.size for part in _parts(arrays))


def _fits(arrays: Arrays, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return sum(part.nbytes for part in _parts(arrays)) <= RESIDENT_FRACTION * free


def split_rows(name: str, labels: np.ndarray, val_fraction: float, run: Run, *,
               own_val: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of training and validation for a run's seed and fraction.

    Raises:
        DataError: if there are too few rows to train and validate on.
    """
    pool = keep_fraction(labels, run.data_fraction, run.seed)
    if own_val:
        train, val = pool, np.zeros(0, np.int64)
    else:
        stay, out = stratified(labels[pool], val_fraction, run.seed)
        train, val = pool[stay], pool[out]
    if len(train) < 2 or (not own_val and not len(val)):
        raise DataError(f"{name}: {len(pool)} row{'s' if len(pool) != 1 else ''} to train on; "
                        f"training needs at least 2 and validation 1")
    return train, val


def _load_resident(arrays: Arrays, source: Source, run: Run, device: torch.device,
                   ready: bool) -> Loaded:
    train, val = split_rows(source.name, arrays.y, source.val_fraction, run,
                            own_val=arrays.val_x is not None)
    base = _on_device(arrays, "x", device)
    rows = torch.from_numpy(train).to(device)
    mean, std = moments(base, rows) if arrays.normalise else (None, None)

    def feed(part: str, picked: np.ndarray | None) -> Feed:
        images = _on_device(arrays, part, device)
        labels = getattr(arrays, part.replace("x", "y"))
        where = None if picked is None else torch.from_numpy(picked).to(device)
        marks = torch.from_numpy(labels if picked is None else labels[picked]).to(device)
        if not ready:
            return ResidentFeed(images, marks, where)
        chosen = images if where is None else images.index_select(0, where)
        return ResidentFeed(normalised(chosen, mean, std).contiguous(), marks, ready=True)

    return Loaded(
        feed("x", train), feed("val_x", None) if arrays.val_x is not None else feed("x", val),
        feed("test_x", None) if arrays.test_x is not None else None,
        tuple(arrays.x.shape[1:]), arrays.n_classes, arrays.classes, arrays.fingerprint, True,
        mean, std)


def _on_device(arrays: Arrays, part: str, device: torch.device) -> Tensor:
    array = getattr(arrays, part)
    if device.type == "cpu":
        return torch.from_numpy(array)
    key = (arrays.fingerprint, part, str(device))
    return _kept(_bases, key, 3 * KEPT_SOURCES, lambda: torch.from_numpy(array).to(device))


def _load_streamed(arrays: Arrays, source: Source, recipe: Recipe, run: Run,
                   device: torch.device) -> Loaded:
    train, val = split_rows(source.name, arrays.y, source.val_fraction, run,
                            own_val=arrays.val_x is not None)
    base = torch.from_numpy(arrays.x)
    mean, std = moments(base, torch.from_numpy(train)) if arrays.normalise else (None, None)
    n_workers = loader_workers(recipe, device)

    def feed(x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> LoaderFeed:
        data = RowsDataset(torch.from_numpy(x), torch.from_numpy(y[rows]), torch.from_numpy(rows))
        return LoaderFeed(data, device, n_workers)

    def whole(x: np.ndarray, y: np.ndarray | None) -> LoaderFeed:
        assert y is not None
        return feed(x, y, np.arange(len(x)))

    return Loaded(
        feed(arrays.x, arrays.y, train),
        whole(arrays.val_x, arrays.val_y) if arrays.val_x is not None
        else feed(arrays.x, arrays.y, val),
        whole(arrays.test_x, arrays.test_y) if arrays.test_x is not None else None,
        tuple(arrays.x.shape[1:]), arrays.n_classes, arrays.classes, arrays.fingerprint, False,
        None if mean is None else mean.to(device), None if std is None else std.to(device))


def loader_workers(recipe: Recipe, device: torch.device) -> int:
    """Return how many processes read: on a GPU up to 8 of its threads, on the CPU none.

    On the CPU the threads are busy training; readers would only take turns with them.
    """
    if recipe.n_loader_workers is not None:
        return recipe.n_loader_workers
    return min(8, torch.get_num_threads()) if device.type == "cuda" else 0


def moments(images: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation over some rows: by channel of images, else by input.

    Shapes: images [all, c, h, w] give [c, 1, 1]; [all, ...] give [...].
    A deviation of 0 becomes 1.
    """
    axes = (0, 2, 3) if images.ndim == 4 else (0,)
    total = torch.zeros((), dtype=torch.float64, device=images.device)
    squares = total.clone()
    # By chunks, so that the doubles of a large data set never stand in memory together.
    for chunk in rows.split(1024):
        part = images.index_select(0, chunk).double()
        total = total + part.sum(axes)
        squares = squares + part.square().sum(axes)
    count = len(rows) * math.prod(images.shape[axis] for axis in axes[1:])
    mean = total / count
    std = (squares / count - mean.square()).clamp_min(0.0).sqrt()
    std = torch.where(std > 1e-6 * mean.abs().clamp_min(1e-30), std, torch.ones_like(std))
    shape = (-1, 1, 1) if images.ndim == 4 else images.shape[1:]
    return mean.float().view(shape), std.float().view(shape)
