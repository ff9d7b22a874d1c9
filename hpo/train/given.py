"""A user's own arrays or tensors, checked and brought to the loop's types."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpo.errors import DataError
from hpo.train.arrays import Arrays, fingerprint
from hpo.train.sources import Tensors


def given_arrays(given: Tensors) -> Arrays:
    """Return the arrays of a `tensors(...)` value.

    Raises:
        DataError: naming the part whose shapes, types or labels do not fit.
    """
    x, y = _inputs("x", given.x), _labels("y", given.y)
    _check_rows("x and y", x, y)
    val_x, val_y = _part("val", given.val, x)
    test_x, test_y = _part("test", given.test, x)
    n_classes = given.n_classes or int(y.max()) + 1
    for part, labels in (("y", y), ("val", val_y), ("test", test_y)):
        check_labels(f"tensors {part}", labels, n_classes)
    normalise = x.dtype == np.uint8 if given.normalise is None else given.normalise
    mark = fingerprint(x, y, val_x, val_y, test_x, test_y)
    return Arrays(x, y, n_classes, mark, (), val_x, val_y, test_x, test_y, normalise)


def check_labels(where: str, labels: np.ndarray | None, n_classes: int) -> None:
    """Check that labels count classes from 0.

    Raises:
        DataError: naming the first label that does not.
    """
    if labels is None or not len(labels):
        return
    wrong = np.flatnonzero((labels < 0) | (labels >= n_classes))
    if len(wrong):
        raise DataError(f"{where}: row {wrong[0]} has label {labels[wrong[0]]}; with {n_classes} "
                        f"classes labels must be in 0..{n_classes - 1}")


def _array(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.asarray(value)


def _inputs(where: str, value: Any) -> np.ndarray:
    array = _array(value)
    if array.ndim < 2 or array.dtype.kind not in "buif":
        raise DataError(f"tensors {where}: must be numbers of shape [n, ...], got "
                        f"{array.dtype} of shape {list(array.shape)}")
    array = array if array.dtype == np.uint8 else np.ascontiguousarray(array, np.float32)
    if array.dtype == np.float32 and not np.isfinite(array).all():
        row = int(np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(axis=1))[0])
        raise DataError(f"tensors {where}: row {row} holds a NaN or an infinite value")
    return np.ascontiguousarray(array)


def _labels(where: str, value: Any) -> np.ndarray:
    array = _array(value)
    if array.ndim != 1 or array.dtype.kind not in "bui":
        raise DataError(f"tensors {where}: labels must be whole numbers of shape [n], got "
                        f"{array.dtype} of shape {list(array.shape)}")
    return array.astype(np.int64)


def _check_rows(where: str, x: np.ndarray, y: np.ndarray) -> None:
    if len(x) != len(y):
        raise DataError(f"tensors {where}: {len(x)} inputs and {len(y)} labels")
    if not len(x):
        raise DataError(f"tensors {where}: no rows")


def _part(where: str, pair: tuple[Any, Any] | None,
          like: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    if pair is None:
        return None, None
    x, y = _inputs(where, pair[0]), _labels(where, pair[1])
    _check_rows(where, x, y)
    if x.shape[1:] != like.shape[1:] or x.dtype != like.dtype:
        raise DataError(f"tensors {where}: rows are {x.dtype} {list(x.shape[1:])}, those of x are "
                        f"{like.dtype} {list(like.shape[1:])}")
    return x, y
