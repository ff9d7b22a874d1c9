"""One model trained by a team: each rank has its rows, and all take the step of the whole batch.

Under DDP each rank holds all weights, under FSDP2 a part of them; gradients are added up as they
are computed. With equal batches a team trains what one process does, to rounding.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpo.errors import DataError, InputError
from hpo.train.loaded import Loaded
from hpo.train.recipe import Recipe
from hpo.train.sharded import shard, whole
from hpo.train.team import Team, least_rows

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

    Far apart, since the seeds of a study's trials are not.
    """
    return seed + (rank << 40)


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


def synced(model: nn.Module, team: Team, device: torch.device) -> nn.Module:
    """Return a model whose batch norm is over the rows of all ranks, which torch has on CUDA only.

    On a CPU it stays over each rank's own rows, and the running means of rank 0 are kept.
    """
    if team.is_alone or device.type != "cuda":
        return model
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


class Joint:
    """A model as a rank calls it in training; alone it is the model itself.

    The model keeps its weights and their names.
    """

    def __init__(self, model: nn.Module, image_shape: Sequence[int], recipe: Recipe, team: Team,
                 device: torch.device) -> None:
        self._call, self._ddp = model, None
        self._shards = is_sharded(recipe, team)
        if not team.is_alone and not self._shards:
            self._call = self._ddp = DistributedDataParallel(
                model, device_ids=[torch.cuda.current_device()] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                # DDP must know; to look for them in each step would cost every model its time.
                find_unused_parameters=None in _gradients(model, image_shape, device),
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


def part(model: nn.Module, mean: nn.Module | None, image_shape: Sequence[int], recipe: Recipe,
         team: Team, device: torch.device) -> None:
    """Have each rank keep its part of a model's weights and their mean, if the recipe asks for it.

    Raises:
        InputError: if the model's gradient is another then.
    """
    if not is_sharded(recipe, team):
        return
    name, before = type(model).__name__, _gradients(model, image_shape, device)
    for one in (model, mean):
        if one is not None:
            shard(one, team, device)
    try:
        after = _gradients(model, image_shape, device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"Recipe.sharding: {name} does not compute with its weights in parts, as "
                         f"where a layer's weights are used without a call of the layer: {error}; "
                         f"use sharding=None") from error
    for was, now in zip(before, after, strict=True):
        if was is not None and (now is None or abs(was - now) > _SAME * was):
            raise InputError(f"Recipe.sharding: the gradient of {name} is another with its "
                             f"weights in parts, so it cannot be trained so; use sharding=None")


def _gradients(model: nn.Module, image_shape: Sequence[int],
               device: torch.device) -> list[float | None]:
    """Return the norm of each weight's gradient on two rows; None where it has none."""
    training = model.training
    # The same numbers each time: neither dropout nor running means.
    model.eval()
    rows = torch.linspace(-1.0, 1.0, 2 * math.prod(image_shape), device=device)
    with torch.enable_grad():
        model(rows.view(2, *image_shape)).float().square().mean().backward()
    grads = [param.grad for param in model.parameters() if param.requires_grad]
    norms = [None if grad is None else float(whole(torch.linalg.vector_norm(grad)))
             for grad in grads]
    model.train(training)
    model.zero_grad()
    return norms
