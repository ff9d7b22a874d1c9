"""The loss a recipe can name: a plain value now, torch's function in the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpo.train.checks import number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy against labels smoothed by an even share of `label_smoothing`.

    Smoothing acts on training only: `val_loss` and `test_loss` are the plain cross entropy, so
    that trials with different smoothing can be compared.

    Source: Szegedy et al., Rethinking the Inception Architecture, section 7.
    """

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        number("CrossEntropy.label_smoothing", self.label_smoothing,
               low=0.0, high=1.0, open_high=True)

    def __call__(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of a batch. Shapes: scores [n, classes], labels [n]."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(scores, labels, label_smoothing=self.label_smoothing)
