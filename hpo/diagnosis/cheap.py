"""The checks that `hpo run` makes by itself: on rows that are there, in a fraction of a second."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hpo import causes
from hpo.diagnosis.model import initial_loss_fault, scores_fault
from hpo.train.feed import ResidentFeed
from hpo.train.loop import Trainer
from hpo.train.losses import CrossEntropy

# Rows of a resident split cost one gather, those of a loader are read anew.
N_ROWS, N_LOADED = 128, 16
# Only what no normalisation that was meant can give; `hpo doctor` is stricter.
GROSS_MEAN, GROSS_SD, GROSS_LEAST_SD = 10.0, 20.0, 0.01
MOST_WARNINGS = 3


def warnings_of(trainer: Trainer) -> list[str]:
    """Return one line for each of the worst faults that a few rows show.

    Rows that cannot be read are one: whether a trial fails of them, the trial says.
    """
    feed = trainer.data.train
    n = min(len(feed), N_ROWS if trainer.data.resident else N_LOADED)
    # Evenly over the split: files are often sorted by class.
    order = torch.linspace(0, len(feed) - 1, n, device=feed.device).long()
    try:
        [(images, labels)] = list(feed.batches(order, n, 1))
    except Exception as error:
        return [f"of {n} training rows some cannot be read: {causes.said(error)}"]
    rows = trainer.data.normalised(images, ready=feed.ready)
    found = [*_of_rows(rows), *_of_classes(trainer, feed)]
    if torch.isfinite(rows).all():
        # No more than a trial puts through the model at once: what fits there fits here.
        n = min(n, max(2, trainer.micro_batch_size))
        try:
            found += _of_model(trainer, rows[:n], labels[:n])
        except Exception as error:
            found.append(f"a pass over {n} rows failed: {causes.said(error)}")
    return found[:MOST_WARNINGS]


def _of_rows(rows: Tensor) -> list[str]:
    if not bool(torch.isfinite(rows).all()):
        return ["some training rows hold a NaN or an infinite value"]
    mean, sd = float(rows.mean()), float(rows.std())
    if abs(mean) > GROSS_MEAN or not GROSS_LEAST_SD < sd < GROSS_SD:
        return [f"inputs have mean {mean:.3g} and sd {sd:.3g}: a model learns best from mean 0 "
                f"and sd 1 (normalise=True, or a transform)"]
    return []


def _of_classes(trainer: Trainer, feed: object) -> list[str]:
    # Of a loader the labels would have to be read.
    if not isinstance(feed, ResidentFeed):
        return []
    n_classes = trainer.data.n_classes
    missing = torch.bincount(feed.labels, minlength=n_classes).eq(0).nonzero().flatten().tolist()
    if not missing:
        return []
    named = ", ".join(map(str, missing[:5]))
    return [f"class {named} has no training row, of {n_classes} classes"]


@torch.no_grad()
def _of_model(trainer: Trainer, rows: Tensor, labels: Tensor) -> list[str]:
    if not isinstance(trainer.recipe.loss, CrossEntropy):
        return []
    trainer.model.train()
    loss = float(nn.functional.cross_entropy(trainer.model(rows).float(), labels))
    scores = scores_fault(trainer.model, rows)
    first = initial_loss_fault(loss, trainer.data.n_classes)
    found = [] if scores is None else [f"{scores[0]}: {scores[1]}"]
    # A low one is that of a model that was trained before.
    if first is not None and not loss < math.log(max(2, trainer.data.n_classes)):
        found.append(f"the first loss is {first[0]}: {first[1]}")
    return found
