"""The processes that train one trial together, one a device: who has which rows.

Every rank does the same in the same order; what only rank 0 decides, it tells the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Team:
    """One process of `size`, which is the `rank`-th.

    Rank 0 owns the trial. `tell` has the other ranks call the trainer's method of a name, which
    rank 0 then does with them; on those ranks, and alone, it does nothing.
    """

    rank: int = 0
    size: int = 1
    tell: Callable[[str], None] = lambda method: None

    @property
    def is_alone(self) -> bool:
        """Whether one process trains the trial."""
        return self.size == 1

    def sum_(self, *values: Tensor) -> None:
        """Replace each tensor by its sum over the ranks."""
        if not self.is_alone:
            for value in values:
                dist.all_reduce(value)

    def copy_first_(self, *values: Tensor) -> None:
        """Replace each tensor by that of rank 0."""
        if not self.is_alone:
            for value in map(Tensor.detach, values):
                if 0 in value.stride() and value.numel():
                    # Expanded from fewer values: a constant, which nobody writes to.
                    continue
                # As it is sent: channels-last weights are not.
                sent = value.contiguous()
                dist.broadcast(sent, 0)
                if sent is not value:
                    value.copy_(sent)

    def of_first(self, data: Any) -> Any:
        """Return the data that rank 0 has given."""
        if self.is_alone:
            return data
        held = [data]
        dist.broadcast_object_list(held, 0)
        return held[0]

    def of_all(self, data: Any) -> list[Any]:
        """Return what each rank has given, in their order."""
        if self.is_alone:
            return [data]
        held: list[Any] = [None] * self.size
        dist.all_gather_object(held, data)
        return held

    def own(self, rows: Tensor) -> Tensor:
        """Return this rank's part of some rows; parts differ by one row at most."""
        return rows.tensor_split(self.size)[self.rank]

    def own_of_batches(self, order: Tensor, size: int, n: int) -> Tensor:
        """Return this rank's part of each of the first `n` batches, one behind the other.

        Shapes: `order` [rows], batches of `size` rows, a multiple of the ranks, the last may be
            smaller; what is returned has batches of `size / ranks` rows.
        """
        if self.is_alone:
            return order
        full = min(n, len(order) // size)
        whole = order[:full * size].view(full, self.size, size // self.size)[:, self.rank]
        return torch.cat([whole.flatten(), self.own(order[full * size:n * size])])


ALONE = Team()


def is_of_team(error: BaseException) -> bool:
    """Return whether an error may be what a rank sees when another one has failed."""
    said = f"{type(error).__name__} {error}".lower()
    return any(word in said for word in ("gloo", "nccl", "disterror", "distbackend"))
