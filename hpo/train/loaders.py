"""A user's own torch datasets, split and read through DataLoaders.

They may read files or draw at random for each item, so nothing of them is kept between trials.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Subset

from hpo.errors import DataError, InputError
from hpo.train.arrays import fingerprint
from hpo.train.feed import LoaderFeed
from hpo.train.given import check_labels
from hpo.train.loaded import Loaded, loader_workers, split_rows
from hpo.train.randomness import same_draws
from hpo.train.recipe import Recipe
from hpo.train.sources import Datasets

if TYPE_CHECKING:
    from hpo.spec import Run

LOG = logging.getLogger("hpo.train")


def load_datasets(source: Datasets, recipe: Recipe, run: Run, device: torch.device) -> Loaded:
    """Return the splits of a `datasets(...)` value, each with its loader.

    Raises:
        DataError: if items are no pairs of a tensor and a label, or labels are no classes.
    """
    labels = known_labels(source.train)
    n_classes = _n_classes(source, labels)
    if labels is not None:
        check_labels(f"{source.name} train", labels, n_classes)
    train, val = split_rows(source.name, _by_class(source, labels), source.val_fraction, run,
                            own_val=source.val is not None)
    shape = _input_shape(source)
    n_workers = loader_workers(recipe, device)
    feeds = [LoaderFeed(part, device, n_workers) if part is not None else None for part in (
        _subset(source.train, train),
        source.val if source.val is not None else _subset(source.train, val), source.test)]
    if feeds[0] is None or feeds[1] is None:
        raise RuntimeError("a dataset without training or validation rows")
    return Loaded(feeds[0], feeds[1], feeds[2], shape, n_classes, (),
                  _fingerprint(source, labels, shape), False)


def _subset(dataset: Any, rows: np.ndarray) -> Any:
    return dataset if len(rows) == len(dataset) else Subset(dataset, rows.tolist())


def known_labels(dataset: Any) -> np.ndarray | None:
    """Return the labels a dataset tells without reading its items, or None."""
    told: Any = getattr(dataset, "targets", getattr(dataset, "labels", None))
    if told is None and isinstance(getattr(dataset, "tensors", None), tuple):
        told = dataset.tensors[-1]
    if told is None and isinstance(dataset, Subset):
        inner = known_labels(dataset.dataset)
        told = None if inner is None else inner[np.asarray(dataset.indices)]
    if told is None:
        return None
    labels = np.asarray(told.detach().cpu() if hasattr(told, "detach") else told)
    whole = labels.ndim == 1 and labels.dtype.kind in "bui" and len(labels) == len(dataset)
    return labels.astype(np.int64) if whole else None


def _by_class(source: Datasets, labels: np.ndarray | None) -> np.ndarray:
    if labels is not None:
        return labels
    LOG.info("%s: the dataset does not tell its labels, so its split is not by class", source.name)
    return np.zeros(len(source.train), np.int64)


def _n_classes(source: Datasets, labels: np.ndarray | None) -> int:
    if source.n_classes is not None:
        return source.n_classes
    if labels is None:
        raise InputError(f"datasets: {type(source.train).__name__} has no `targets` or `labels` "
                         f"that tell its classes; give datasets(..., n_classes=N)")
    return int(labels.max()) + 1 if len(labels) else 1


def _input_shape(source: Datasets) -> tuple[int, ...]:
    name = type(source.train).__name__
    if not len(source.train):
        raise DataError(f"dataset {name}: no rows")
    item = source.train[0]
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise DataError(f"dataset {name}: items must be pairs (input, label), got "
                        f"{type(item).__name__}")
    if not hasattr(item[0], "shape"):
        raise DataError(f"dataset {name}: inputs must be tensors, got {type(item[0]).__name__}; "
                        f"add a transform such as torchvision's ToTensor()")
    return tuple(item[0].shape)


def _fingerprint(source: Datasets, labels: np.ndarray | None, shape: tuple[int, ...]) -> str:
    """Return a mark of lengths, shape, labels and first item; to read all items is too dear."""
    with same_draws():
        # Whose transform draws at random, its first item would else mark each trial's data.
        first = np.asarray(source.train[0][0], dtype=np.float64)[None]
    sizes = np.array([len(part) if part is not None else -1
                      for part in (source.train, source.val, source.test)] + list(shape))
    return fingerprint(sizes, labels, first)
