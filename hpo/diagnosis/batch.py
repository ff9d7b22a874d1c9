"""Plain rows and plain steps for checks: nothing drawn at random, nothing augmented."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from hpo.train.loop import Trainer
from hpo.train.losses import CrossEntropy
from hpo.train.regularize import MixedLabels

# The rows that a check trains or scores: enough for batch norm, few enough for a CPU.
N_ROWS = 128


def some_rows(trainer: Trainer, n: int) -> tuple[Tensor, Tensor]:
    """Return the same `n` shuffled training rows each time, normalised, and their labels.

    They are no more than the recipe puts through the model at once: a batch that fits.
    """
    feed = trainer.data.train
    n = min(n, len(feed), max(2, trainer.micro_batch_size))
    order = torch.randperm(len(feed), generator=torch.Generator().manual_seed(0))[:n]
    [(images, labels)] = list(feed.batches(order.to(feed.device), n, 1))
    return trainer.data.normalised(images, ready=feed.ready), labels


def plain_loss(trainer: Trainer, images: Tensor, labels: Tensor) -> Tensor:
    """Return the loss without smoothing, which a model that knows all rows can bring to 0."""
    if not isinstance(trainer.recipe.loss, CrossEntropy):
        return trainer.loss(images, labels)
    return nn.functional.cross_entropy(trainer.model(images).float(), labels)


def repeated(
    images: Tensor, labels: Tensor | MixedLabels, n: int
) -> tuple[Tensor, Tensor]:
    """Return a batch of `n` rows out of fewer: the same ones again, their labels not mixed."""
    plain = labels.first if isinstance(labels, MixedLabels) else labels
    again = math.ceil(n / len(plain))
    return images.repeat(again, *[1] * (images.ndim - 1))[:n], plain.repeat(again)[:n]


def train_mode(model: nn.Module) -> None:
    """Put a model into training mode, without its dropout."""
    model.train()
    for part in model.modules():
        if isinstance(part, _DropoutNd):
            part.eval()


def step(trainer: Trainer, loss: Tensor) -> float:
    """Make one optimizer step for a loss, at the rates that are set, and return the loss."""
    trainer.update.of_loss(loss)
    return float(loss.detach())
