"""The torch modules behind the model specs, apart so that the specs themselves load no torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import nn

from hpo.train.inits import initialise
from hpo.train.layers import Residual, activation, norm, rising

if TYPE_CHECKING:
    from hpo.train.models import MLP, CifarResNet18, ResNet9, SimpleCNN

    ConvSpec = SimpleCNN | ResNet9 | CifarResNet18

DROPOUTS = {"dropout": nn.Dropout, "dropout2d": nn.Dropout2d, "alpha": nn.AlphaDropout}


def _conv(spec: ConvSpec, n_in: int, n_out: int, *, size: int = 3, stride: int = 1,
          active: bool = True) -> list[nn.Module]:
    # A norm would take a bias away again.
    layers = [nn.Conv2d(n_in, n_out, size, stride, padding=size // 2, bias=spec.norm == "none"),
              norm(spec.norm, n_out, "images")]
    return [*layers, activation(spec.activation)] if active else layers


def _pool() -> nn.Module:
    # ceil_mode keeps one pixel of a 1x1 image, where a plain pool would leave none.
    return nn.MaxPool2d(2, ceil_mode=True)


def _maps_dropout(spec: ConvSpec) -> list[nn.Module]:
    return [nn.Dropout2d(spec.dropout)] if spec.dropout_kind == "dropout2d" else []


def _row_dropout(spec: ConvSpec) -> list[nn.Module]:
    return [] if spec.dropout_kind == "dropout2d" else [DROPOUTS[spec.dropout_kind](spec.dropout)]


def simple_cnn(spec: SimpleCNN, image_shape: tuple[int, ...], n_classes: int) -> nn.Sequential:
    """Return the small convolutional network that `SimpleCNN` describes."""
    channels, height, across = image_shape
    width, wide = spec.width, 2 * spec.width
    n_features = wide * math.ceil(height / 4) * math.ceil(across / 4)
    net = nn.Sequential(
        *_conv(spec, channels, width), _pool(), *_maps_dropout(spec),
        *_conv(spec, width, wide), _pool(), *_maps_dropout(spec), nn.Flatten(),
        nn.Linear(n_features, spec.hidden), activation(spec.activation), *_row_dropout(spec),
        nn.Linear(spec.hidden, n_classes))
    return initialise(net, spec.init)


def mlp(spec: MLP, image_shape: tuple[int, ...], n_classes: int) -> nn.Sequential:
    """Return the multilayer perceptron that `MLP` describes."""
    layers: list[nn.Module] = [nn.Flatten()]
    n_in = math.prod(image_shape)
    for _ in range(spec.n_layers):
        # No place for a norm that is none, so that weights of before there was a choice fit.
        normed = [] if spec.norm == "none" else [norm(spec.norm, spec.hidden, "rows")]
        layers += [nn.Linear(n_in, spec.hidden), *normed, activation(spec.activation),
                   DROPOUTS[spec.dropout_kind](spec.dropout)]
        n_in = spec.hidden
    return initialise(nn.Sequential(*layers, nn.Linear(n_in, n_classes)), spec.init)


def resnet9(spec: ResNet9, image_shape: tuple[int, ...], n_classes: int) -> nn.Sequential:
    """Return the network that `ResNet9` describes."""
    width = spec.width
    rates = rising(spec.drop_path, 2)

    def stage(n_in: int, n_out: int) -> list[nn.Module]:
        return [*_conv(spec, n_in, n_out), _pool(), *_maps_dropout(spec)]

    def residual(n: int, rate: float) -> nn.Module:
        return Residual(nn.Sequential(*_conv(spec, n, n), *_conv(spec, n, n)), rate)

    net = nn.Sequential(
        *_conv(spec, image_shape[0], width), *stage(width, 2 * width),
        residual(2 * width, rates[0]), *stage(2 * width, 4 * width), *stage(4 * width, 8 * width),
        residual(8 * width, rates[1]), nn.AdaptiveMaxPool2d(1), nn.Flatten(), *_row_dropout(spec),
        nn.Linear(8 * width, n_classes))
    return initialise(net, spec.init)


def cifar_resnet18(spec: CifarResNet18, image_shape: tuple[int, ...],
                   n_classes: int) -> nn.Sequential:
    """Return the network that `CifarResNet18` describes."""
    width = spec.width
    rates = iter(rising(spec.drop_path, 8))
    layers = _conv(spec, image_shape[0], width)
    n_in = width
    for n_out, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        layers += [_basic_block(spec, n_in, n_out, stride, next(rates)),
                   _basic_block(spec, n_out, n_out, 1, next(rates)), *_maps_dropout(spec)]
        n_in = n_out
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *_row_dropout(spec),
                        nn.Linear(n_in, n_classes))
    return initialise(net, spec.init)


def _basic_block(spec: CifarResNet18, n_in: int, n_out: int, stride: int, rate: float) -> Residual:
    branch = nn.Sequential(*_conv(spec, n_in, n_out, stride=stride),
                           *_conv(spec, n_out, n_out, active=False))
    same = n_in == n_out and stride == 1
    shortcut = None if same else nn.Sequential(
        *_conv(spec, n_in, n_out, size=1, stride=stride, active=False))
    return Residual(branch, rate, shortcut=shortcut, after=activation(spec.activation))
