"""A recipe's model on its device, and what it scores on a split."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parameter import UninitializedBuffer, is_lazy

from hpo.errors import DataError, InputError
from hpo.train import checkpoint
from hpo.train.feed import Feed
from hpo.train.loaded import Loaded, load
from hpo.train.losses import CrossEntropy
from hpo.train.models import FromRows, ModelSpec
from hpo.train.named_models import MODELS
from hpo.train.precision import autocast, check_precision, products
from hpo.train.randomness import PrivateRandom
from hpo.train.recipe import Recipe
from hpo.train.recompute import recomputed
from hpo.train.team import ALONE, Team

if TYPE_CHECKING:
    from hpo.spec import Run

# Rows at once that initial weights are made from, so that large images stay within memory.
_INIT_BATCH = 256


def device_of(run: Run) -> torch.device:
    """Return a run's device.

    Raises:
        InputError: if it asks for CUDA where there is none.
    """
    device = torch.device(run.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device '{run.device}': torch {torch.__version__} finds no CUDA device "
                         f"here; use --devices cpu, or install a CUDA build of torch")
    if device.type not in ("cuda", "cpu"):
        raise InputError(f"device '{run.device}': must be 'cpu' or 'cuda'")
    return device


def make_model(recipe: Recipe, data: Loaded, device: torch.device, *, initial: bool = True,
               synced: bool = False) -> nn.Module:
    """Return a new module of a recipe on the device; a ready module is copied.

    `initial` False leaves out what only initial weights need: the caller loads others. `synced`
    makes batch norm one over the rows of all ranks.

    Raises:
        InputError: if it does not fit the data, or its activations cannot be computed again.
    """
    given: Any = recipe.model
    model = (given.make(data.image_shape, data.n_classes) if isinstance(given, ModelSpec)
             else shaped(own_model(given), data.image_shape))
    if synced:
        # Before anything holds the model's layers: they are replaced.
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if recipe.checkpoint_activations:
        recomputed(model, nested=type(given) in MODELS.values())
    model = placed(model, data, device)
    if initial and isinstance(given, FromRows):
        given.initialise_from(model, random_rows(data, given.n_init_rows))
    return model


def random_rows(data: Loaded, n: int) -> Iterator[Tensor]:
    """Yield up to `n` random training rows, normalised, in batches; torch's global state draws."""
    feed = data.train
    order = torch.randperm(len(feed))[:n].to(feed.device)
    for images, _ in feed.batches(order, _INIT_BATCH, math.ceil(len(order) / _INIT_BATCH)):
        yield data.normalised(images, ready=feed.ready)


def own_model(given: Any) -> nn.Module:
    """Return a new module of the user's own: a copy of a ready one, or what a function makes."""
    model = _copied(given) if isinstance(given, nn.Module) else given()
    if not isinstance(model, nn.Module):
        raise InputError(f"Recipe.model: must give a torch module, got {type(model).__name__}")
    return model


def _copied(model: nn.Module) -> nn.Module:
    # torch copies a parameter without a size, and refuses to copy such a buffer.
    lazy = [value for value in model.buffers() if isinstance(value, UninitializedBuffer)]
    fresh: Any = UninitializedBuffer
    return copy.deepcopy(model, {id(value): fresh(device=value.data.device, dtype=value.data.dtype)
                                 for value in lazy})


def shaped(model: nn.Module, image_shape: Sequence[int]) -> nn.Module:
    """Return a module whose lazy layers have the sizes that inputs of one shape give them.

    Raises:
        InputError: if it does not take such inputs, or leaves a lazy layer out.
    """
    name = type(model).__name__
    if not _lazy(model):
        return model
    training = model.training
    device = next((value.device for value in model.parameters()), torch.device("cpu"))
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(2, *image_shape, device=device))
    except (RuntimeError, ValueError, TypeError) as error:
        raise InputError(f"Recipe.model: {name} does not take inputs of shape "
                         f"{[2, *image_shape]}: {error}") from error
    if left := _lazy(model):
        raise InputError(f"Recipe.model: {name} does not use its lazy layer's '{left[0]}', so "
                         f"its size is not known")
    return model.train(training)


def _lazy(model: nn.Module) -> list[str]:
    values = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, value in values if is_lazy(value)]


def placed(model: nn.Module, data: Loaded, device: torch.device) -> nn.Module:
    """Return a module on the device, in the memory layout that its inputs are fastest in."""
    model = model.to(device)
    # Faster on the CPU too: a small CNN's epoch takes 20 to 30 % less on one thread.
    return model.to(memory_format=torch.channels_last) if len(data.image_shape) == 3 else model


@torch.inference_mode()
def evaluate(
    model: nn.Module, data: Loaded, feed: Feed, recipe: Recipe, batch_size: int | None = None,
    team: Team = ALONE,
) -> tuple[Tensor, Tensor]:
    """Return the summed loss and the number of right answers, both still on the device.

    Each rank scores its own part of the rows; the sums are those of all ranks.
    """
    model.eval()
    loss_of = cross_entropy if isinstance(recipe.loss, CrossEntropy) else recipe.loss
    size = batch_size or recipe.eval_batch_size
    rows, n_own = (None, len(feed)) if team.is_alone else _own_rows(feed, size, team)
    losses, rights = [], []
    for images, labels in feed.batches(rows, size, math.ceil(len(feed) / team.size / size)):
        with autocast(labels.device, recipe.precision):
            scores = model(data.normalised(images, ready=feed.ready))
        if n_own < len(labels):
            scores, labels = scores[:n_own], labels[:n_own]
        if not len(labels):
            continue
        n_own -= len(labels)
        scores = scores.float()
        losses.append(loss_of(scores, labels).double() * len(labels))
        rights.append((scores.argmax(1) == labels).sum())
    loss, n_right = torch.stack(losses).sum(), torch.stack(rights).sum().double()
    team.sum_(loss, n_right)
    return loss, n_right


def _own_rows(feed: Feed, size: int, team: Team) -> tuple[Tensor, int]:
    """Return a rank's rows of a split, and how many of them count.

    Where they would make a batch less than those of another rank, one more row is read: ranks
    whose weights are in parts must call the model equally often.
    """
    rows = torch.arange(len(feed), device=feed.device)
    own = team.own(rows)
    if math.ceil(len(own) / size) < math.ceil(len(feed) / team.size / size):
        return torch.cat([own, rows[:1]]), len(own)
    return own, len(own)


def score(recipe: Recipe, run: Run, path: Path, split: Literal["val", "test"],
          model: nn.Module | None = None) -> dict[str, float]:
    """Return `<split>_loss` and `<split>_accuracy` of a checkpoint, or of a model made from it.

    Raises:
        DataError: if there is no such split, or the data are not those of the checkpoint.
    """
    device = device_of(run)
    entry = checkpoint.read(path)
    data = load(recipe, run, device)
    try:
        feed = {"val": data.val, "test": data.test}[split]
        if feed is None or not len(feed):
            raise DataError(f"{recipe.data.name}: no {split} split to score on")
        if entry["fingerprint"] != data.fingerprint:
            raise DataError(f"checkpoint {path}: was trained on other data "
                            f"({entry['fingerprint']}) than are there now ({data.fingerprint})")
        check_precision(recipe.precision, device)
        with PrivateRandom(run.seed, device), products(device, recipe.precision):
            if model is None:
                model = make_model(recipe, data, device, initial=False)
                model.load_state_dict(entry["model"])
            model = placed(model, data, device)
            loss, n_right = evaluate(model, data, feed, recipe)
        return {f"{split}_loss": float(loss) / len(feed),
                f"{split}_accuracy": float(n_right) / len(feed)}
    finally:
        data.close()
