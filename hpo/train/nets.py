"""The torch modules behind the model specs, apart so that the specs themselves load no torch."""

from __future__ import annotations

import math

from torch import nn


def _block(n_in: int, n_out: int) -> list[nn.Module]:
    # ceil_mode keeps one pixel of a 1x1 image, where a plain pool would leave none.
    return [nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out),
            nn.ReLU(inplace=True), nn.MaxPool2d(2, ceil_mode=True)]


def simple_cnn(image_shape: tuple[int, ...], n_classes: int, hidden: int, dropout: float,
               width: int) -> nn.Sequential:
    """Return the small convolutional network that `SimpleCNN` describes."""
    channels, height, across = image_shape
    n_features = 2 * width * math.ceil(height / 4) * math.ceil(across / 4)
    return nn.Sequential(
        *_block(channels, width), *_block(width, 2 * width), nn.Flatten(),
        nn.Linear(n_features, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout),
        nn.Linear(hidden, n_classes))


def mlp(image_shape: tuple[int, ...], n_classes: int, hidden: int, dropout: float,
        n_layers: int) -> nn.Sequential:
    """Return the multilayer perceptron that `MLP` describes."""
    layers: list[nn.Module] = [nn.Flatten()]
    n_in = math.prod(image_shape)
    for _ in range(n_layers):
        layers += [nn.Linear(n_in, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout)]
        n_in = hidden
    return nn.Sequential(*layers, nn.Linear(n_in, n_classes))
