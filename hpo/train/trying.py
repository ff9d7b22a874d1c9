"""A recipe tried before any trial is spent on it: its data loaded, its model on a small batch.

What does not fit is told with the field of the recipe that is to blame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpo.errors import DataError, InputError
from hpo.train.loop import Trainer
from hpo.train.recipe import Recipe

if TYPE_CHECKING:
    from hpo.spec import Run


def prepare(recipe: Recipe, run: Run,
            look: Callable[[Trainer], list[str]] | None = None) -> dict[str, Any]:
    """Load the data and try the model on a small batch, before any trial is spent on it.

    `look` may look at the trainer then, and warn.

    Returns: n_train, n_val, n_test, n_classes, image_shape, fingerprint, n_parameters,
        steps_per_epoch, resident, warnings.
    Raises:
        InputError: if the model does not take these inputs or give these classes.
        DataError: if the data cannot be read or do not suffice.
    """
    trainer = Trainer(recipe, run)
    data = trainer.data
    try:
        with trainer.computing():
            _try_model(trainer)
            warnings = [] if look is None else look(trainer)
        return {"warnings": warnings, "n_train": len(data.train), "n_val": len(data.val),
                "n_test": 0 if data.test is None else len(data.test),
                "n_classes": data.n_classes, "image_shape": data.image_shape,
                "fingerprint": data.fingerprint, "resident": data.resident,
                "steps_per_epoch": trainer.steps_per_epoch,
                "n_parameters": sum(p.numel() for p in trainer.model.parameters())}
    finally:
        trainer.close()


def _try_model(trainer: Trainer) -> None:
    model = type(trainer.model).__name__
    size = min(trainer.recipe.batch_size, 8, len(trainer.data.train))
    images, labels = next(trainer.batches(max(2, size), 1))
    first, others = list(trainer.data.image_shape), list(images.shape[1:])
    if first != others:
        # The model is made for the first row's shape, and is not to blame.
        raise DataError(f"{trainer.recipe.data.name}: the first row has shape {first}, others "
                        f"have {others}; bring them to one shape in the dataset, as a resize does")
    try:
        with torch.no_grad():
            scores = trainer.model(images)
    except (RuntimeError, ValueError, TypeError) as error:
        raise InputError(f"Recipe.model: {model} does not take inputs of shape "
                         f"{list(images.shape)}: {error}") from error
    n_classes = trainer.data.n_classes
    if not isinstance(scores, Tensor) or scores.shape != (len(labels), n_classes):
        got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise InputError(f"Recipe.model: {model} gives {got} for {len(labels)} inputs; "
                         f"with {n_classes} classes it must give {[len(labels), n_classes]}")
    trainer.loss(images, labels).backward()
