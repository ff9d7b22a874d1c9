"""Checks by a few training steps: the first loss, gradients by layer, one batch learnt by heart.

All are put back afterwards: a check leaves weights, optimizer and random states as they were.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hpo.baselines.lr_sweep import restored
from hpo.diagnosis.batch import N_ROWS, plain_loss, some_rows, step, train_mode
from hpo.diagnosis.finding import Finding, look, not_checked, ok, plural, wrong
from hpo.diagnosis.model import initial_loss_fault
from hpo.train.loop import Trainer
from hpo.train.losses import CrossEntropy

PART = "training"
# A batch that any sound model can learn by heart, and how long it may take.
HEART_ROWS, HEART_STEPS, HEART_S = 32, 200, 20.0
# Learnt: the loss is at most this part of the first one.
HEART_FRACTION = 0.1
# A layer's gradient is measured before this many steps and after: a last layer that begins at 0
# lets none through to the others at first.
_WARM_STEPS = 3
# Of the norm of a gradient to that of its weight. Sound networks, from a linear one to residual
# ones, lie between a thousandth and one.
EXPLODES, VANISHES = 30.0, 1e-6
# How far the layers of one network may be apart.
SPREAD = 1e5


def training_findings(trainer: Trainer) -> Iterator[Finding]:
    """Yield what a few steps at the recipe's rate say."""
    with restored(trainer.model, trainer.optimizer):
        yield initial_loss_finding(trainer)
    with restored(trainer.model, trainer.optimizer):
        yield gradients_finding(trainer)
    yield heart_finding(trainer)


@torch.no_grad()
def initial_loss_finding(trainer: Trainer) -> Finding:
    """Return whether the first loss is that of a guess."""
    if not isinstance(trainer.recipe.loss, CrossEntropy):
        return not_checked(PART, "first loss", "the loss is the study's own")
    train_mode(trainer.model)
    loss = float(plain_loss(trainer, *some_rows(trainer, N_ROWS)))
    fault = initial_loss_fault(loss, trainer.data.n_classes)
    if fault is not None:
        text, cure, certain = fault
        return (wrong if certain else look)(PART, "first loss", text, cure)
    return ok(PART, "first loss", f"{loss:.3g}, a guess has log({trainer.data.n_classes}) = "
                                  f"{math.log(trainer.data.n_classes):.3g}")


def gradients_finding(trainer: Trainer) -> Finding:
    """Return whether gradients vanish or explode in a layer, against the weights they change."""
    train_mode(trainer.model)
    images, labels = some_rows(trainer, N_ROWS)
    plain_loss(trainer, images, labels).backward()
    first = gradient_parts(trainer.model)
    trainer.optimizer.zero_grad()
    for _ in range(_WARM_STEPS):
        step(trainer, plain_loss(trainer, images, labels))
    plain_loss(trainer, images, labels).backward()
    return gradients_verdict(first, gradient_parts(trainer.model))


def gradient_parts(model: nn.Module) -> dict[str, float]:
    """Return each layer's norm of the gradient over that of the weight, in the model's order.

    Biases and norms are left out: they begin at 0 and 1 by convention. A weight that is all 0 has
    nothing to hold its gradient against, and counts as 0.
    """
    found = {}
    for name, p in model.named_parameters():
        if p.grad is not None and p.ndim >= 2:
            size = float(p.detach().norm())
            found[name.removesuffix(".weight")] = float(p.grad.norm()) / size if size else 0.0
    return found


def gradients_verdict(first: Mapping[str, float], later: Mapping[str, float]) -> Finding:
    """Return the verdict on gradients at the start and a few steps on."""
    if not first:
        return not_checked(PART, "gradients", "no layer with a weight trains")
    broken = next((name for name, part in first.items() if not math.isfinite(part)), None)
    if broken is not None:
        return wrong(PART, "gradients", f"layer {broken}: not finite",
                     "smaller initial weights, normalised inputs or clip_norm=1.0")
    dead = [name for name, part in first.items() if part == 0 and later.get(name, 0) == 0]
    if dead:
        return wrong(PART, "gradients", f"none reaches layer {', '.join(dead[:3])}",
                     "dead ReLUs (all inputs below 0), a detach(), or a layer of zeros behind it: "
                     "smaller biases, other initial weights")
    living = {name: part or later[name] for name, part in first.items()}
    low, high = min(living, key=living.__getitem__), max(living, key=living.__getitem__)
    text = (f"{living[low]:.1g} of the weight in layer {low} to {living[high]:.1g} in layer "
            f"{high}")
    if living[high] > EXPLODES:
        return look(PART, "gradients", f"they explode: {text}",
                    "clip_norm=1.0, smaller initial weights, or norm layers")
    if living[low] < VANISHES or living[high] > SPREAD * living[low]:
        return look(PART, "gradients", f"they vanish: {text}",
                    "ReLU in place of sigmoid or tanh, norm layers, or residual connections")
    return ok(PART, "gradients", f"{text}; {plural(len(first), 'layer')}")


@dataclass(frozen=True)
class Learnt:
    """How a model came along on one batch: its first and last loss, and the steps it made."""

    factor: float
    first: float
    last: float
    n_steps: int
    in_time: bool

    @property
    def by_heart(self) -> bool:
        """Whether it has learnt the batch."""
        return self.last <= HEART_FRACTION * self.first

    @property
    def rose(self) -> bool:
        """Whether the loss rose, or is no number any more."""
        return not self.last < self.first


def heart_finding(trainer: Trainer) -> Finding:
    """Return whether the model can learn one batch by heart, as every sound one can.

    A rate at which it cannot is divided by 10 once, or, where the loss fell too slowly for
    `HEART_STEPS` steps, multiplied by 10.
    """
    n = min(HEART_ROWS, trainer.recipe.batch_size, len(trainer.data.train))
    if n < 2:
        return not_checked(PART, "one batch", "a batch of one row")
    lr, tries = trainer.recipe.optimizer.lr, [learn(trainer, n, 1.0)]
    for factor in (0.1, 10.0):
        # Slower does not help what fell too slowly, nor faster what rose.
        if not tries[-1].by_heart and (factor < 1 or not tries[0].rose):
            tries.append(learn(trainer, n, factor))
    return heart_verdict(tries, n, lr)


def heart_verdict(tries: Sequence[Learnt], n: int, lr: float) -> Finding:
    """Return the verdict on one or several tries to learn `n` rows by heart."""
    first, last = tries[0], tries[-1]
    at = f"{plural(n, 'row')} at lr {lr:.3g}"
    if first.by_heart:
        return ok(PART, "one batch", f"{at}: loss {first.first:.3g} to {first.last:.2g} in "
                                     f"{plural(first.n_steps, 'step')}")
    text = f"{at}: loss {first.first:.3g} to {first.last:.3g} in {plural(first.n_steps, 'step')}"
    if last.by_heart and last.factor < 1:
        return look(PART, "one batch", f"{text}; at lr {lr * last.factor:.3g} it is learnt",
                    "the default rate is too high: hpo lr-range finds one")
    if last.by_heart:
        return look(PART, "one batch", f"{text}; at lr {lr * last.factor:.3g} it is learnt",
                    "the default rate is low: hpo lr-range finds one")
    if not all(one.in_time for one in tries):
        return look(PART, "one batch", f"{text}, then its {HEART_S:.0f} s were over",
                    "this device is too slow for this check: look at it on a GPU")
    others = " or ".join(f"{lr * one.factor:.3g}" for one in tries[1:])
    return wrong(PART, "one batch", f"{text}, nor is it learnt at lr {others}",
                 "a lower rate (hpo lr-range), then the lines above: labels that do not belong to "
                 "their rows, a wrong loss, or layers that learn nothing")


def learn(trainer: Trainer, n_rows: int, factor: float) -> Learnt:
    """Train one batch with the recipe's rate times `factor`, and put all back."""
    images, labels = some_rows(trainer, n_rows)
    with restored(trainer.model, trainer.optimizer):
        train_mode(trainer.model)
        for group in trainer.optimizer.param_groups:
            group["lr"] *= factor
        losses, deadline = [], time.monotonic() + HEART_S
        for _ in range(HEART_STEPS):
            losses.append(step(trainer, plain_loss(trainer, images, labels)))
            if not math.isfinite(losses[-1]) or losses[-1] <= HEART_FRACTION * losses[0]:
                break
            if time.monotonic() > deadline:
                break
        in_time = time.monotonic() <= deadline
    # The middle of the last few: a rate at its upper end makes the loss leap.
    tail = sorted(losses[-5:])[len(losses[-5:]) // 2]
    done = losses[-1] if losses[-1] <= HEART_FRACTION * losses[0] else tail
    return Learnt(factor, losses[0], done if math.isfinite(losses[-1]) else losses[-1],
                  len(losses), in_time)
