"""How many batches an epoch has, and in how many parts each is trained: the same on all ranks."""

from __future__ import annotations

import logging
import math

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

LOG = logging.getLogger("hpo.train")


def n_batches(n_rows: int, batch_size: int, model: nn.Module, *, n_ranks: int = 1,
              log: bool = False) -> int:
    """Return the batches of an epoch; a last batch of too few rows to train is left out.

    Batch norm has no deviation over one row, and each rank needs rows. A batch size above the rows
    is one batch of them all.
    """
    full, rest = divmod(n_rows, batch_size)
    if full and 0 < rest < least_rows(n_ranks, has_batch_norm(model)):
        if log:
            LOG.warning("%d rows in batches of %d leave %s, which %s cannot train on: each epoch "
                        "trains %d rows", n_rows, batch_size,
                        "one row" if rest == 1 else f"{rest} rows",
                        "batch norm" if n_ranks == 1 else f"{n_ranks} devices", n_rows - rest)
        return full
    return full + (rest > 0)


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether a model takes deviations over the rows of a batch."""
    return any(isinstance(part, _BatchNorm) for part in model.modules())


def least_rows(n_ranks: int, has_batch_norm: bool) -> int:
    """Return the rows that a batch must have: one a rank, two where batch norm takes part."""
    return n_ranks * (2 if has_batch_norm else 1)


def n_parts(n_rows: int, n_ranks: int, micro_batch_size: int, has_batch_norm: bool) -> int:
    """Return in how many parts each rank trains its rows of a batch: all in as many."""
    most, least = math.ceil(n_rows / n_ranks), n_rows // n_ranks
    if has_batch_norm:
        # Which has no deviation over one row.
        least //= 2
    return max(1, min(math.ceil(most / micro_batch_size), least))
