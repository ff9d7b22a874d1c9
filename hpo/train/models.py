"""The models a recipe can name: plain values now, modules when a trial starts.

They are torch-free so that a study's module can be read, checked and listed in an instant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from hpo.errors import InputError
from hpo.train.checks import number, whole

if TYPE_CHECKING:
    from torch import nn


@runtime_checkable
class ModelSpec(Protocol):
    """What the loop asks of a model's description."""

    def make(self, image_shape: Sequence[int], n_classes: int) -> nn.Module:
        """Return a module from inputs of one shape (no batch axis) to class scores."""
        ...


@dataclass(frozen=True)
class SimpleCNN:
    """Two convolution blocks with batch norm, a hidden layer of the searched size, and dropout.

    Shapes: inputs [n, channels, height, width] of any size, outputs [n, n_classes]. A block is a
    3x3 convolution, batch norm, ReLU and a 2x2 max-pool; the second has twice the `width`.
    """

    hidden: int = 256
    dropout: float = 0.0
    width: int = 32

    def __post_init__(self) -> None:
        whole("SimpleCNN.hidden", self.hidden, low=1)
        whole("SimpleCNN.width", self.width, low=1)
        number("SimpleCNN.dropout", self.dropout, low=0.0, high=1.0, open_high=True)

    def make(self, image_shape: Sequence[int], n_classes: int) -> nn.Module:
        """Return the module.

        Raises:
            InputError: if the inputs are no images.
        """
        if len(image_shape) != 3:
            raise InputError(f"SimpleCNN: needs images [channels, height, width], got rows of "
                             f"shape {list(image_shape)}; use MLP(hidden=...) for these")
        from hpo.train.nets import simple_cnn

        return simple_cnn(tuple(image_shape), n_classes, self.hidden, self.dropout, self.width)


@dataclass(frozen=True)
class MLP:
    """Hidden layers of one size, each with ReLU and dropout, on the flattened input.

    Shapes: inputs [n, ...] of any shape, outputs [n, n_classes].
    """

    hidden: int = 256
    dropout: float = 0.0
    n_layers: int = 2

    def __post_init__(self) -> None:
        whole("MLP.hidden", self.hidden, low=1)
        whole("MLP.n_layers", self.n_layers, low=1)
        number("MLP.dropout", self.dropout, low=0.0, high=1.0, open_high=True)

    def make(self, image_shape: Sequence[int], n_classes: int) -> nn.Module:
        """Return the module."""
        from hpo.train.nets import mlp

        return mlp(tuple(image_shape), n_classes, self.hidden, self.dropout, self.n_layers)
