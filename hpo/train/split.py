"""Stratified splits of labels, the same for the same seed on every machine.

Every class keeps its share, so that a small validation split still says something of each class.
"""

from __future__ import annotations

import numpy as np

# The test split of a data set that has none of its own: fixed, whatever seed a trial has.
TEST_SEED = 20_260
TEST_FRACTION = 0.2


def stratified(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the row numbers that stay and those taken out, both sorted.

    A fraction of each class is taken, in all `round(fraction * n)` rows as near as classes allow;
    a class of two or more rows gives at least one and keeps at least one, a class of one keeps it.
    """
    rng = np.random.default_rng([seed % 2**63, len(labels)])
    classes, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    takes = _shares(counts, fraction)
    taken = [
        rng.permutation(np.flatnonzero(inverse == k))[:takes[k]] for k in range(len(classes))
    ]
    out = np.sort(np.concatenate(taken)) if taken else np.zeros(0, np.int64)
    if not len(out) and len(labels) > 1 and fraction > 0:
        out = rng.integers(len(labels), size=1)
    stay = np.setdiff1d(np.arange(len(labels)), out, assume_unique=True)
    return stay, out.astype(np.int64)


def _shares(counts: np.ndarray, fraction: float) -> np.ndarray:
    """Return how many rows each class gives: largest remainders first, within its bounds."""
    ideal = counts * fraction
    takes = np.floor(ideal).astype(np.int64)
    missing = round(float(counts.sum() * fraction)) - int(takes.sum())
    order = np.argsort(takes - ideal, kind="stable")
    takes[order[:max(0, missing)]] += 1
    low = np.where(counts >= 2, 1 if fraction > 0 else 0, 0)
    return np.clip(takes, low, np.maximum(counts - 1, 0))


def keep_fraction(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Return the sorted row numbers of a stratified part; at least two rows of a class stay.

    Two, so that a class can still be in the training and in the validation split.
    """
    if fraction >= 1.0:
        return np.arange(len(labels))
    _, kept = stratified(labels, fraction, seed)
    short = [k for k in np.unique(labels) if np.count_nonzero(labels[kept] == k) < 2]
    extra = [np.setdiff1d(np.flatnonzero(labels == k), kept)[:_missing(labels[kept], k)]
             for k in short]
    return np.sort(np.concatenate([kept, *extra])).astype(np.int64)


def _missing(kept_labels: np.ndarray, label: int) -> int:
    return 2 - int(np.count_nonzero(kept_labels == label))
