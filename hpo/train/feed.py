"""Rows as batches on the device: from a tensor that lives there, or through a DataLoader.

Both give the same rows in the same order for the same permutation, so that a data set which
outgrows the device trains the same model, only more slowly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import default_collate as torch_collate

from hpo.errors import DataError


class Feed(Protocol):
    """Some rows of a data set, given out in batches on the device.

    `device` is where the order of rows must live; `ready` says that inputs are normalised already.
    """

    device: torch.device
    ready: bool

    def __len__(self) -> int: ...

    def batches(self, order: Tensor | None, size: int,
                n_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the first `n_batches` batches of inputs and labels, in the order given."""
        ...

    def reseed(self, seed: int) -> None:
        """Have the processes that read for it draw from this seed."""
        ...

    def close(self) -> None:
        """End the processes that read for it."""
        ...


class ResidentFeed:
    """Rows of a tensor that lives on the device, shared by the splits of a data set.

    Shapes: images [all, ...], rows [n] row numbers or None for all in order, labels [n].
    """

    def __init__(self, images: Tensor, labels: Tensor, rows: Tensor | None = None, *,
                 ready: bool = False) -> None:
        self.images, self.labels, self.rows = images, labels, rows
        self.device, self.ready = images.device, ready

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, order: Tensor | None, size: int,
                n_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches: one gather of rows each, or a view where rows are taken as they lie."""
        if order is None:
            rows, labels = self.rows, self.labels
        else:
            rows = order if self.rows is None else self.rows[order]
            labels = self.labels[order]
        for start in range(0, min(n_batches * size, len(labels)), size):
            part = slice(start, start + size)
            images = self.images[part] if rows is None else (
                self.images.index_select(0, rows[part]))
            yield images, labels[part]

    def reseed(self, seed: int) -> None:
        """Do nothing: no process reads for it."""

    def close(self) -> None:
        """Do nothing: no process reads for it."""


class RowsDataset(Dataset):
    """Rows of a tensor in the host's memory, fetched a whole batch at a time."""

    def __init__(self, images: Tensor, labels: Tensor, rows: Tensor) -> None:
        self.images, self.labels, self.rows = images, labels, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.images[self.rows[row]], self.labels[row]

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        picked = torch.tensor(rows)
        return self.images.index_select(0, self.rows[picked]), self.labels[picked]


class _Order:
    """The row numbers of the coming epoch's batches; a kept loader asks for them each epoch."""

    def __init__(self) -> None:
        self.batches: Sequence[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class LoaderFeed:
    """Rows of a torch dataset, read by worker processes that stay from epoch to epoch."""

    ready = False

    def __init__(self, dataset: Any, target: torch.device, n_workers: int) -> None:
        self.dataset, self.target = dataset, target
        self.device = torch.device("cpu")
        self._order = _Order()
        whole = isinstance(dataset, RowsDataset)
        self._loader: DataLoader | None = DataLoader(
            dataset, batch_sampler=self._order, num_workers=n_workers,  # type: ignore[arg-type]
            persistent_workers=n_workers > 0, pin_memory=target.type == "cuda",
            collate_fn=_as_is if whole else collate, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.dataset)

    def batches(self, order: Tensor | None, size: int,
                n_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches, copied to the device while the next ones are read.

        Raises:
            DataError: if items of a batch have several shapes or are no tensors.
        """
        if self._loader is None:
            raise RuntimeError("the feed is closed")
        rows = (torch.arange(len(self)) if order is None else order).tolist()
        self._order.batches = [rows[k * size:(k + 1) * size] for k in range(n_batches)]
        for batch in self._loader:
            images, labels = _checked(batch, self.dataset)
            yield (images.to(self.target, non_blocking=True),
                   labels.to(self.target, non_blocking=True))

    def reseed(self, seed: int) -> None:
        """Have the processes that read for it, which are not there yet, draw from this seed."""
        if self._loader is not None and self._loader.generator is not None:
            self._loader.generator.manual_seed(seed % 2**63)

    def close(self) -> None:
        """Shut the loader's processes down now, not when Python gets to it."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
        self._loader = None


class Uncollated:
    """Why items could not be put into one batch; raised where there is a place to catch it.

    An error raised in a worker process reaches the trial as a page of tracebacks.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _as_is(batch: Any) -> Any:
    return batch


def collate(items: list[Any]) -> Any:
    """Put (input, label) items into one batch, or say why that cannot be done."""
    try:
        return torch_collate(items)
    except (RuntimeError, TypeError) as error:
        inputs: list[Any] = [
            item[0] if isinstance(item, (tuple, list)) and item else item for item in items]
        shapes = dict.fromkeys(tuple(one.shape) for one in inputs if hasattr(one, "shape"))
        if len(shapes) > 1:
            listed = " and ".join(str(list(shape)) for shape in shapes)
            return Uncollated(f"one batch mixes inputs of shapes {listed}; bring them to one "
                              f"shape in the dataset, as a resize does")
        return Uncollated(f"{len(items)} items cannot be put into one batch: {error}")


def _checked(batch: Any, dataset: Any) -> tuple[Tensor, Tensor]:
    name = type(dataset).__name__
    if isinstance(batch, Uncollated):
        raise DataError(f"dataset {name}: {batch.reason}")
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise DataError(f"dataset {name}: items must be pairs (input, label)")
    images, labels = batch
    if not isinstance(images, Tensor) or not isinstance(labels, Tensor):
        raise DataError(f"dataset {name}: inputs must be tensors and labels numbers, got "
                        f"{type(images).__name__} and {type(labels).__name__}")
    return images, labels
