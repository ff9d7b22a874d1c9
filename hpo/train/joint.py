"""One model trained by a team: each rank has its rows, and all take the step of the whole batch.

Under DDP each rank holds all weights, under FSDP2 a part of them; gradients are added up as they
are computed. With equal batches a team trains what one process does, to rounding.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpo.errors import DataError, InputError
from hpo.train.loaded import Loaded
from hpo.train.recipe import Recipe
from hpo.train.resume import differences
from hpo.train.sharded import shard, whole
from hpo.train.shares import least_rows
from hpo.train.team import Team, is_of_team

if TYPE_CHECKING:
    from hpo.spec import Run


# As torch calls it, and as it did before.
_NO_SYNC: Any = {next(name for name in ("forward_sync_buffers", "broadcast_buffers")
                      if name in inspect.signature(DistributedDataParallel).parameters): False}


# How far the norms of a gradient may be apart by rounding, as a part of it.
_SAME = 1e-3


def rows_of_each(recipe: Recipe, run: Run) -> int:
    """Return the rows of a batch that each device of a trial trains.

    Raises:
        InputError: if they cannot be shared out evenly.
    """
    n = run.n_devices
    if recipe.batch_size % n:
        raise InputError(f"Recipe.batch_size: {recipe.batch_size} rows cannot be shared out among "
                         f"the {n} devices of a trial (--gpus-per-trial); use a multiple of {n}")
    return recipe.batch_size // n


def own_seed(seed: int, rank: int) -> int:
    """Return a seed of a rank's own, for dropout and augmentation; that of rank 0 is the trial's.

    Drawn, since the seeds of a study's trials follow one another; torch's generator on a CPU looks
    at the lowest 32 bits alone.
    """
    return random.Random(f"{seed}/rank {rank}").randrange(2**31) if rank else seed


def check_rows(data: Loaded, team: Team, has_batch_norm: bool) -> None:
    """Check that each rank has rows to train and to validate on.

    Raises:
        DataError: if there are too few.
    """
    for what, feed, least in (("train", data.train, least_rows(team.size, has_batch_norm)),
                              ("validate", data.val, team.size)):
        if not team.is_alone and len(feed) < least:
            raise DataError(f"{len(feed)} rows to {what} on: {team.size} devices a trial need "
                            f"{least}")


def check_same(team: Team, trained: Mapping[str, Any]) -> None:
    """Check that all ranks train the same: recipe, data, seed and epochs.

    Raises:
        DataError: with what differs, on all ranks.
    """
    first, *others = team.of_all(trained)
    for rank, other in enumerate(others, start=1):
        if told := differences(first, other):
            raise DataError(f"rank {rank} trains something else than rank 0 ({'; '.join(told)}): "
                            f"build must give the same recipe in each process")


def seed_datasets(data: Loaded, seed: int) -> None:
    """Have what a dataset draws for its rows drawn by this rank alone."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    for feed in (data.train, data.val, data.test):
        if feed is not None:
            feed.reseed(seed)


class Joint:
    """A model as a rank calls it in training; alone it is the model itself.

    The model keeps its weights and their names.
    """

    def __init__(self, model: nn.Module, rows: Tensor | None, recipe: Recipe, team: Team,
                 device: torch.device) -> None:
        self._call, self._ddp = model, None
        self._shards = is_sharded(recipe, team)
        if rows is not None and not self._shards:
            self._call = self._ddp = DistributedDataParallel(
                model, device_ids=[torch.cuda.current_device()] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                # DDP must know; to look for them in each step would cost every model its time.
                find_unused_parameters=None in _gradients(model, rows),
                # Only what is evaluated uses the buffers, once an epoch.
                **_NO_SYNC)

    def __call__(self, images: Tensor) -> Tensor:
        return self._call(images)

    @contextlib.contextmanager
    def adding(self, *, is_last: bool) -> Iterator[None]:
        """Add up gradients over the ranks in the last part of a batch only."""
        if self._ddp is not None and not is_last:
            with self._ddp.no_sync():
                yield
            return
        if self._shards:
            self._call.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        yield


def is_sharded(recipe: Recipe, team: Team) -> bool:
    """Return whether each rank holds a part of the weights."""
    return recipe.sharding is not None and not team.is_alone


def part(model: nn.Module, mean: nn.Module | None, rows: Tensor | None, recipe: Recipe,
         team: Team, device: torch.device) -> None:
    """Have each rank keep its part of a model's weights and their mean, if the recipe asks for it.

    Raises:
        InputError: if the model does not compute then, or its gradient for `rows` is another.
    """
    if rows is None or not is_sharded(recipe, team):
        return
    name, before = type(model).__name__, _gradients(model, rows)
    for one in (model, mean):
        if one is not None:
            shard(one, team, device)
    try:
        after = _gradients(model, rows)
    except (RuntimeError, TypeError, ValueError) as error:
        if is_of_team(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        raise InputError(f"Recipe.sharding: {name} does not compute with its weights in parts, as "
                         f"where a layer's weights are used without a call of the layer: {error}; "
                         f"use sharding=None") from error
    largest = max((norm for norm in before if norm is not None), default=0.0)
    for was, now in zip(before, after, strict=True):
        # A gradient that is nothing but rounding is another each time.
        if was is not None and (now is None or abs(was - now) > _SAME * max(was, _SAME * largest)):
            raise InputError(f"Recipe.sharding: the gradient of {name} is another with its "
                             f"weights in parts, so it cannot be trained so; use sharding=None")


def _gradients(model: nn.Module, rows: Tensor) -> list[float | None]:
    """Return the norm of each weight's gradient for some rows; None where it has none."""
    training = model.training
    # The same numbers each time: neither dropout nor running means.
    model.eval()
    with torch.enable_grad():
        model(rows).float().square().mean().backward()
    grads = [param.grad for param in model.parameters() if param.requires_grad]
    norms = [None if grad is None else float(whole(torch.linalg.vector_norm(grad)))
             for grad in grads]
    model.train(training)
    model.zero_grad()
    return norms
