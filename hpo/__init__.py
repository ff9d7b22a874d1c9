"""hpo: hyperparameter optimization for PyTorch whose result is proved.

What a search-space module imports. Loads neither torch nor Optuna.
"""

from hpo.errors import HpoError
from hpo.space import Categorical, Float, Int, Param
from hpo.spec import Epochs, Metrics, Run, StudySpec

__all__ = [
    "Categorical", "Epochs", "Float", "HpoError", "Int", "Metrics", "Param", "Run", "StudySpec",
]
