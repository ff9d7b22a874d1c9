"""What the rows of a split are like, read once in the order they lie.

Counts, ranges and marks of rows are gathered a batch at a time: no split is held as floats.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hpo.train.feed import Feed
from hpo.train.loaded import Loaded

# A resident split of this many rows is read in a second or two; a loader may decode each image.
MOST_ROWS = 100_000
MOST_LOADED = 2_000
MOST_LOADING_S = 15.0
_BATCH = 512
# Rows of fewer numbers may all be alike and mean something.
LEAST_WIDTH = 16


@dataclass
class Split:
    """Facts of the rows that were read.

    `total` counts all rows of the split. `mean` and `sd` are over the normalised rows without a
    NaN: by channel of images, else by input. `counts` has an entry for each class, `outside` the
    labels that are none; `marks` has the hash of each row with its label.
    """

    name: str
    total: int
    n_rows: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    label_fault: str = ""
    low: float = math.inf
    high: float = -math.inf
    n_bad: int = 0
    first_bad: int = -1
    n_constant: int = 0
    counts: list[int] = field(default_factory=list)
    outside: dict[int, int] = field(default_factory=dict)
    marks: list[tuple[bytes, int]] = field(default_factory=list)
    mean: Tensor = field(default_factory=lambda: torch.zeros(0))
    sd: Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def whole(self) -> bool:
        """Whether all rows were read."""
        return self.n_rows == self.total

    @property
    def seen(self) -> str:
        """How many rows the facts are of."""
        return f"{self.n_rows:,}" if self.whole else f"the first {self.n_rows:,}"


def read_split(name: str, feed: Feed, data: Loaded, n_classes: int) -> Split:
    """Read a split: all of it where it is resident, else as many rows as a few seconds give."""
    split = Split(name, len(feed), counts=[0] * n_classes)
    n = min(len(feed), MOST_ROWS if data.resident else MOST_LOADED)
    total = squares = torch.zeros((), dtype=torch.float64)
    n_numbers, deadline = 0, time.monotonic() + MOST_LOADING_S
    for images, labels in feed.batches(None, _BATCH, math.ceil(n / _BATCH)):
        rows = data.normalised(images, ready=feed.ready)
        _note_rows(split, images, rows)
        _note_labels(split, images, labels)
        good = rows[torch.isfinite(rows).flatten(1).all(1)].double()
        axes = (0, 2, 3) if rows.ndim == 4 else (0,)
        total = total + good.sum(axes).cpu()
        squares = squares + good.square().sum(axes).cpu()
        n_numbers += len(good) * (math.prod(rows.shape[2:]) if rows.ndim == 4 else 1)
        split.n_rows += len(rows)
        if not data.resident and time.monotonic() > deadline:
            break
    if n_numbers:
        split.mean = total / n_numbers
        split.sd = (squares / n_numbers - split.mean.square()).clamp_min(0.0).sqrt()
    return split


def _note_rows(split: Split, images: Tensor, rows: Tensor) -> None:
    split.shape, split.dtype = tuple(images.shape[1:]), str(images.dtype).removeprefix("torch.")
    flat = rows.flatten(1)
    finite = torch.isfinite(flat).all(1)
    bad = (~finite).nonzero().flatten().tolist()
    if bad and split.first_bad < 0:
        split.first_bad = split.n_rows + bad[0]
    split.n_bad += len(bad)
    good = flat[finite]
    if good.numel():
        split.low = min(split.low, float(good.min()))
        split.high = max(split.high, float(good.max()))
    if flat.shape[1] >= LEAST_WIDTH and len(good):
        split.n_constant += int((good.amax(1) == good.amin(1)).sum())


def _note_labels(split: Split, images: Tensor, labels: Tensor) -> None:
    if labels.ndim != 1 or labels.dtype.is_floating_point or labels.dtype.is_complex:
        split.label_fault = (f"labels are {str(labels.dtype).removeprefix('torch.')} of shape "
                             f"[n{''.join(f', {n}' for n in labels.shape[1:])}]")
        return
    told = labels.tolist()
    for label in told:
        if 0 <= label < len(split.counts):
            split.counts[label] += 1
        else:
            split.outside[label] = split.outside.get(label, 0) + 1
    split.marks += zip(_marks(images), told, strict=True)


def _marks(images: Tensor) -> Iterable[bytes]:
    """Return a hash of each row as it is stored; equal rows have equal ones."""
    for row in images.contiguous().cpu().numpy():
        yield hashlib.blake2b(row.tobytes(), digest_size=16).digest()
