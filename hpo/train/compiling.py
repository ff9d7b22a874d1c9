"""torch.compile as a switch of the recipe: once for each shape, and never without a word.

A model is compiled in place, so that its weights keep their names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from hpo.train.recipe import COMPILE_TRIALS

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


@contextlib.contextmanager
def compiling(how: bool | str) -> Iterator[None]:
    """Have torch compile in this process alone, and fail rather than give up for the while."""
    if not how:
        yield
        return
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    with dynamo.patch(recompile_limit=_MOST, accumulated_recompile_limit=_MOST,
                      fail_on_recompile_limit_hit=True), inductor.patch(compile_threads=1):
        yield
