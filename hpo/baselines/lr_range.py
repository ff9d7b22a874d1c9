"""The learning-rate range test: raise the rate in a few short sweeps, and pick from their mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hpo.baselines.lr_edge import suggest_below
from hpo.baselines.lr_pick import LRSuggestion
from hpo.baselines.lr_sweep import sweep
from hpo.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from hpo.spec import Run
    from hpo.train import Recipe

# Each with its own initial weights, validation split and order of the rows.
N_SEEDS = 3
# A sweep makes one step a rate. The factors between edge and pick were measured with as many: with
# more steps on the way a loss comes back earlier.
N_POINTS = 16
LEAST_BATCH = 8


def lr_range(build: Callable[[Run], Recipe], run: Run, *, low: float | None = None,
             high: float | None = None, n_seeds: int = N_SEEDS) -> LRSuggestion:
    """Sweep a recipe's learning rate with some seeds, over at most one epoch's rows in all.

    `build` makes the recipe of a run; the runs differ in their seed. Rates rise evenly on the log
    scale, 16 a sweep, one optimizer step each, made as in a trial: in micro-batches, with the
    recipe's precision and bounds of the gradient. Where the epoch's rows do not give so many of
    its batches, batches are smaller (of 8 rows or more), so that no row is trained twice. Bounds
    default to the optimizer's own: 1e-6..1 for AdamW, 1e-5..10 for SGD. Groups keep their factors
    between their rates.

    Raises:
        InputError: if the bounds do not rise from above 0.
    """
    from hpo.train.optim_spec import OptimizerSpec

    recipe = build(run)
    # A user's own optimizer may say neither.
    usual = getattr(recipe.optimizer, "sweep_bounds", OptimizerSpec.sweep_bounds)
    factor = getattr(recipe.optimizer, "pick_factor", OptimizerSpec.pick_factor)
    bounds = [usual[0] if low is None else low, usual[1] if high is None else high]
    if not 0 < bounds[0] < bounds[1] < math.inf:
        raise InputError(f"learning-rate range: low must be above 0 and below high, got "
                         f"low={bounds[0]:g}, high={bounds[1]:g}")
    by_seed, n_used, rates, size = [], 0.0, [], 0
    for i in range(n_seeds):
        one = run if i == 0 else replace(run, seed=run.seed + i)
        losses, rates, size, n_rows = _swept(build(one) if i else recipe, one, bounds, n_seeds)
        by_seed.append(tuple(losses))
        n_used += min(n_rows, len(losses) * size) / n_rows
    found = suggest_below(rates, by_seed, factor)
    return replace(found, n_steps=sum(map(len, by_seed)), epochs=n_used, batch_size=size)


def _swept(recipe: Recipe, run: Run, bounds: list[float], n_seeds: int
           ) -> tuple[list[float], list[float], int, int]:
    """Return the losses, rates, batch size and training rows of one seed's sweep."""
    from hpo.train.loop import Trainer

    trainer = Trainer(recipe, run, metric="val_loss", maximize=False)
    try:
        n_rows = len(trainer.data.train)
        n_points, size = plan(n_rows, recipe.batch_size, n_seeds)
        rates = [float(rate) for rate in np.geomspace(bounds[0], bounds[1], n_points)]
        batches = trainer.batches(size, n_points)

        def next_loss() -> Tensor:
            images, labels = next(batches)
            return trainer.backward(images, labels, len(labels))

        with trainer.computing():
            losses = sweep(trainer.model, trainer.optimizer, next_loss, rates,
                           update=lambda _: trainer.update.step())
    finally:
        trainer.close()
    return losses, rates, size, n_rows


def plan(n_rows: int, batch_size: int, n_seeds: int = N_SEEDS) -> tuple[int, int]:
    """Return the points of each sweep and the rows of each, within one epoch's rows in all."""
    n_each = max(1, n_rows // n_seeds)
    size = min(batch_size, max(min(LEAST_BATCH, n_each), n_each // N_POINTS))
    return max(1, min(n_each // size, N_POINTS)), size
