"""Checks of the model before it is trained: what it takes and gives, and what of it learns."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hpo.diagnosis.batch import N_ROWS, some_rows, train_mode
from hpo.diagnosis.finding import Finding, look, not_checked, ok, plural, wrong
from hpo.train.loop import Trainer
from hpo.train.losses import CrossEntropy

PART = "model"
_MOST_NAMED = 3
# Inputs far outside of what the model is made for, to see which signs its scores can have.
_PROBE_SCALE, _N_PROBES = 10.0, 64


def model_findings(trainer: Trainer) -> Iterator[Finding]:
    """Yield what is to be said of a model at its initial weights.

    Where the first of them that is `wrong` says that the model cannot be run, it is the last.
    """
    yield parameters_finding(trainer.model)
    yield types_finding(trainer.model)
    images, labels = some_rows(trainer, N_ROWS)
    passed, scores = pass_finding(trainer, images, labels)
    yield passed
    if scores is not None:
        yield scores_finding(trainer, images)
        yield unused_finding(trainer.model)
    trainer.optimizer.zero_grad()


def parameters_finding(model: nn.Module) -> Finding:
    """Return how many parameters there are, and how many of them train."""
    n = sum(p.numel() for p in model.parameters())
    training = sum(p.numel() for p in model.parameters() if p.requires_grad)
    name = type(model).__name__
    if not training:
        return wrong(PART, "parameters", f"{name}: none of {n:,} parameters trains",
                     "set requires_grad on those that should")
    if training < n:
        return ok(PART, "parameters", f"{name}: {n:,}, of which {training:,} "
                                      f"({training / n:.1%}) train")
    return ok(PART, "parameters", f"{name}: {n:,}, all of them train")


def types_finding(model: nn.Module) -> Finding:
    """Return whether all parameters are float32, as mixed precision and optimizers expect."""
    found: dict[str, str] = {}
    for name, p in model.named_parameters():
        found.setdefault(str(p.dtype).removeprefix("torch."), name)
    if set(found) <= {"float32"}:
        return ok(PART, "types", "all parameters are float32")
    named = ", ".join(f"{dtype} ({name})" for dtype, name in found.items())
    if len(found) > 1:
        return look(PART, "types", f"parameters of several types: {named}",
                    "call model.float(): autocast does what is safe in half precision")
    return look(PART, "types", f"parameters are {named}",
                "call model.float(): float64 is slow on a GPU, and a half-precision weight loses "
                "small steps")


def pass_finding(trainer: Trainer, images: Tensor, labels: Tensor
                 ) -> tuple[Finding, Tensor | None]:
    """Return whether one forward and backward pass goes well, and the scores where it does."""
    n_classes, name = trainer.data.n_classes, type(trainer.model).__name__
    train_mode(trainer.model)
    shape = f"[n, {', '.join(map(str, images.shape[1:]))}]"
    try:
        scores = trainer.model(images)
    except (RuntimeError, ValueError, TypeError) as error:
        return wrong(PART, "passes", f"{name} does not take inputs of shape {shape}: "
                                     f"{str(error).splitlines()[0]}"), None
    if not isinstance(scores, Tensor) or scores.shape != (len(labels), n_classes):
        got = (f"shape {list(scores.shape)}" if isinstance(scores, Tensor)
               else type(scores).__name__)
        return wrong(PART, "passes", f"{name} gives {got} for {len(labels)} rows",
                     f"{plural(n_classes, 'class')} need [n, {n_classes}]"), None
    loss = trainer.loss(images, labels)
    if not bool(torch.isfinite(loss)):
        return wrong(PART, "passes", f"the first loss is {float(loss.detach()):g}",
                     "smaller initial weights or normalised inputs; see also the loss"), None
    if not loss.requires_grad:
        return wrong(PART, "passes", "the loss does not depend on the parameters",
                     "see for detach(), .data and no_grad() in the model"), None
    loss.backward()
    return ok(PART, "passes", f"{shape} to [n, {n_classes}], forward and backward"), scores


def unused_finding(model: nn.Module) -> Finding:
    """Return which parameters the backward pass did not reach."""
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if not unused:
        return ok(PART, "use", "every parameter that trains has a gradient")
    more = f" and {len(unused) - _MOST_NAMED} more" if len(unused) > _MOST_NAMED else ""
    return look(PART, "use", f"{plural(len(unused), 'parameter')} without a gradient: "
                             f"{', '.join(unused[:_MOST_NAMED])}{more}",
                "the forward pass does not use them: take them out, or freeze them")


@torch.no_grad()
def scores_finding(trainer: Trainer, images: Tensor) -> Finding:
    """Return whether the model gives plain scores, as cross entropy takes them.

    Of a softmax that follows a softmax the loss cannot get near 0 and gradients are small.
    """
    if not isinstance(trainer.recipe.loss, CrossEntropy):
        return not_checked(PART, "scores", "the loss is the study's own")
    fault = scores_fault(trainer.model, images)
    if fault is None:
        return ok(PART, "scores", "of any sign, as cross entropy takes them")
    text, cure, certain = fault
    return (wrong if certain else look)(PART, "scores", text, cure)


def scores_fault(model: nn.Module, images: Tensor) -> tuple[str, str, bool] | None:
    """Return what is wrong with the scores, its cure and whether it is certain, or None."""
    model.eval()
    # The model is the recipe's: it may be in any precision, and its next pass may write over what
    # this one gives, where it is run as a CUDA graph.
    scores = model(images).float().clone()
    if scores.shape[1] == 1:
        return "one class: there is nothing to tell apart", "give two scores or more", True
    sums = scores.sum(1)
    if bool((scores >= 0).all()) and bool(((sums - 1).abs() < 1e-2).all()):
        return ("each row's scores sum to 1, as of a softmax",
                "leave the softmax out: cross entropy has its own", True)
    probe = torch.randn((min(_N_PROBES, len(images)), *images.shape[1:]),
                        generator=torch.Generator().manual_seed(0)).to(images) * _PROBE_SCALE
    found = torch.cat([scores, model(probe).float()])
    if bool((found >= 0).all()):
        what = "a sigmoid" if bool((found <= 1).all()) else "a ReLU"
        return (f"no score is below 0, as of {what} at the end",
                "end with the linear layer: cross entropy takes scores of any sign", False)
    return None


def initial_loss_fault(loss: float, n_classes: int) -> tuple[str, str, bool] | None:
    """Return what a first loss far from that of a guess says, its cure and whether it is certain.

    Source: scores of 0 give each class the same share, and a cross entropy of log(n_classes).
    """
    guess = math.log(n_classes)
    if not math.isfinite(loss):
        return f"{loss:g}", "smaller initial weights or normalised inputs", True
    if loss > 2.0 * guess + 1.0:
        return (f"{loss:.3g}, a guess has log({n_classes}) = {guess:.3g}",
                "the first scores are too large: smaller initial weights, normalised inputs, or "
                "norm layers", loss > 10.0 * guess + 5.0)
    if loss < 0.5 * guess:
        return (f"{loss:.3g}, a guess has log({n_classes}) = {guess:.3g}",
                "fine for a model that was trained before; else the label is in the inputs", False)
    return None
