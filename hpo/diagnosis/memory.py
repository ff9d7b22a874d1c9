"""The largest batch that a GPU's memory holds, found by doubling and halving.

Untested without a GPU but for the search itself, which is a function of what fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hpo.baselines.lr_sweep import restored
from hpo.diagnosis.batch import repeated
from hpo.diagnosis.finding import Finding, look, not_checked, ok, wrong
from hpo.diagnosis.pace import PART
from hpo.train.loop import Trainer

# The search ends when the largest that fits and the smallest that does not are this near.
NEAR = 1.1


def largest(fits: Callable[[int], bool], start: int, limit: int) -> int:
    """Return the largest batch that fits, to a tenth: 0 where not even one row does.

    From `start` it is doubled up to `limit`, or halved down to 1, then closed in on.
    """
    low, high = 0, limit + 1
    size = min(start, limit)
    while 0 < size <= limit:
        if fits(size):
            low = size
            if high <= limit or size == limit:
                break
            size = min(2 * size, limit)
        else:
            high = size
            if low:
                break
            size //= 2
    while low and high - low > 1 and high <= limit and high > NEAR * low:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_batch_finding(trainer: Trainer) -> Finding:
    """Return the largest batch that trains on this GPU beside the recipe's own."""
    if trainer.device.type != "cuda":
        return not_checked(PART, "largest batch", "on a CPU memory sets no limit worth a search")
    size, n_rows = trainer.micro_batch_size, len(trainer.data.train)
    with restored(trainer.model, trainer.optimizer):
        found = largest(lambda n: _trains(trainer, n), size, max(size, n_rows))
    torch.cuda.empty_cache()
    text = f"{found:,} rows fit, the recipe has {size:,}"
    if found < size:
        half = max(1, 2 ** math.floor(math.log2(max(1, found))))
        return wrong(PART, "largest batch", text, f"micro_batch_size={half} trains it in parts")
    if found < 1.3 * size:
        return look(PART, "largest batch", text,
                    "a trial of a larger model may not fit: micro_batch_size= trains in parts")
    return ok(PART, "largest batch", f"{text} (none above the {n_rows:,} of an epoch was tried)")


def _trains(trainer: Trainer, n: int) -> bool:
    """Return whether one step over `n` rows, some of them repeated, fits into the memory."""
    images, labels = next(trainer.batches(min(n, trainer.recipe.batch_size), 1))
    try:
        trainer.model.train()
        trainer.update.of_loss(trainer.loss(*repeated(images, labels, n)))
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        trainer.optimizer.zero_grad()
        torch.cuda.empty_cache()
