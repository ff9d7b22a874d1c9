"""torch.compile as a switch of the recipe: once for each shape, and never without a word.

A model is compiled in place, so that its weights keep their names.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch import nn

from hpo.train.recipe import COMPILE_TRIALS, GRAPH_MODES

LOG = logging.getLogger("hpo.train")
# How many shapes of how many models a worker may compile: torch gives up after 8, tells only its
# log, and trains on uncompiled.
_MOST = 256


def compile_model(how: bool | str, *models: nn.Module) -> None:
    """Have models compiled when they are first called; `how` is a recipe's `compile`.

    What was compiled for a model of the same layers and shapes is used again, in this process for
    the next trials too, and on disk by torch's own cache.
    """
    if not how:
        return
    for model in {id(model): model for model in models}.values():
        if how in COMPILE_TRIALS:
            model.compile(backend=how, dynamic=False)
        else:
            model.compile(mode=None if how is True else how, dynamic=False)


def without_graphs(how: bool | str) -> bool | str:
    """Return a recipe's `compile` without CUDA graphs."""
    return GRAPH_MODES.get(how, how) if isinstance(how, str) else how


def for_parts(how: bool | str, n_rows: int, batch_size: int) -> bool | str:
    """Return how to compile where `n_rows` of a batch go through the model at once.

    Of a recipe with CUDA graphs they are fewer only after a batch did not fit.
    """
    plain = without_graphs(how)
    if n_rows >= batch_size or plain == how:
        return how
    LOG.warning("compile=%r without its CUDA graphs, as %r: %d rows of a batch of %d go through "
                "the model at once", how, plain, n_rows, batch_size)
    return plain


def begin_step(how: bool | str, device: torch.device) -> None:
    """Tell CUDA graphs that nobody uses any more what their last run gave.

    torch sees that by itself, but not after a forward pass whose gradient was never taken: one of
    a trial that failed, say.
    """
    if how in GRAPH_MODES and device.type == "cuda":
        torch.compiler.cudagraph_mark_step_begin()


@contextlib.contextmanager
def compiling(how: bool | str) -> Iterator[None]:
    """Have torch compile in this process alone, and fail rather than give up for the while.

    Shapes are few then, so that cuDNN may try for each which of its convolutions is the fastest.
    """
    if not how:
        yield
        return
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        with dynamo.patch(recompile_limit=_MOST, accumulated_recompile_limit=_MOST,
                          fail_on_recompile_limit_hit=True), inductor.patch(compile_threads=1):
            yield
    finally:
        torch.backends.cudnn.benchmark = before
