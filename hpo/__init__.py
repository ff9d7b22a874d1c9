"""hpo: hyperparameter optimization for PyTorch whose result is proved.

What a search-space module imports. Loads neither torch nor Optuna.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from hpo.errors import HpoError
from hpo.space import Categorical, Float, Int, Param
from hpo.spec import Epochs, Metrics, Run, StudySpec

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

__all__ = [
    "Categorical", "Epochs", "Float", "HpoError", "Int", "Metrics", "Param", "Run", "StudySpec",
    "load",
]


def load(folder: Path | str) -> nn.Module:
    """Return the model of a folder that `hpo export` wrote, on the CPU, to predict with.

    `model(model.preprocess(rows))` gives class scores of rows as they are in the data set, and
    `model.classes` the classes' names. Nothing but the folder is needed; a model of your own is
    made by the source in it, which is run.

    Raises:
        HpoError: in one line, for a folder that is broken or no export, or whose model cannot be
            made here.
    """
    # By name: this package stands below the training, which loads torch.
    return import_module("hpo.train.exported").load(folder)
