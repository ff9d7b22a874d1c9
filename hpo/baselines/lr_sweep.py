"""One sweep of the learning rate over a model, which leaves no trace in it."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def sweep(model: torch.nn.Module, optimizer: torch.optim.Optimizer,
          next_loss: Callable[[], torch.Tensor], rates: Sequence[float], *,
          scheduler: Any = None, update: Callable[[torch.Tensor], Any] | None = None
          ) -> list[float]:
    """Make one optimizer step a rate and return the loss before each; leave no trace.

    A group's rate is the rate times its `lr_scale`, where it has one. `next_loss` gives the
    training loss of the next batch, `update` makes the step of a loss, where it is more than its
    gradient and the optimizer's step. The sweep ends at the first loss that is not finite or far
    above the first. Model, optimizer, scheduler, training mode, gradients and the random states of
    torch, numpy and Python are put back exactly, also after an error.
    """
    from hpo.train.groups import set_rate

    losses: list[float] = []
    with restored(model, optimizer, scheduler):
        model.train()
        optimizer.zero_grad()
        for rate in rates:
            set_rate(optimizer, rate)
            loss = next_loss()
            losses.append(float(loss.detach()))
            if _diverged(losses):
                break
            if update is not None:
                update(loss)
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _diverged(losses: Sequence[float]) -> bool:
    """Return whether the last loss is as far above the first as four times it, or as the fall."""
    first, last = losses[0], losses[-1]
    if not math.isfinite(last):
        return True
    return last > first + 3.0 * max(abs(first), first - min(losses))


@contextlib.contextmanager
def restored(model: torch.nn.Module, optimizer: torch.optim.Optimizer,
             scheduler: Any = None) -> Iterator[None]:
    """Put back, bit by bit, what training steps change in these and in the random states."""
    import torch

    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    grads = [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    state = copy.deepcopy(optimizer.state_dict())
    schedule = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
    # torch marks an optimizer that has stepped, for a warning about the order of calls.
    marks = {name: optimizer.__dict__.get(name) for name in ("_opt_called", "_step_count")}
    draws = (torch.get_rng_state(), np.random.get_state(), random.getstate(),
             torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad
        for module, mode in modes:
            module.training = mode
        optimizer.load_state_dict(state)
        if scheduler is not None:
            scheduler.load_state_dict(schedule)
        _put_back(optimizer, marks)
        torch.set_rng_state(draws[0])
        np.random.set_state(draws[1])
        random.setstate(draws[2])
        if draws[3]:
            torch.cuda.set_rng_state_all(draws[3])


def _put_back(holder: Any, marks: Mapping[str, Any]) -> None:
    for name, value in marks.items():
        if value is None:
            holder.__dict__.pop(name, None)
        else:
            holder.__dict__[name] = value
