"""The network behind `SpeedNet`, and how its first layer learns to whiten from training images."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from hpo.errors import DataError
from hpo.train.inits import initialise
from hpo.train.layers import activation, norm

if TYPE_CHECKING:
    from hpo.train.models import SpeedNet

# Sides of the whitened patches, and what is added to their variances: the noise of directions that
# hardly vary would be blown up. Source: Jordan 2024, section 3.2.
PATCH, EPS = 2, 5e-4
# How fast running statistics follow the batches. Source: Jordan 2024, its published code.
MOMENTUM = 0.4
# Doubles that stand in memory at once.
_MOST = 2**23


class Scaled(nn.Module):
    """Multiplies by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Return the product."""
        return x * self.factor


class Mirrored(nn.Module):
    """A network that scores each image both ways when it is evaluated, and gives the mean."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores. Shapes: [n, channels, height, width] to [n, n_classes]."""
        if self.training:
            return self.net(x)
        return (self.net(x) + self.net(x.flip(-1))) / 2


class Whitening(nn.Conv2d):
    """A convolution whose weights are the data's: they do not train, its bias does."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, 2 * channels * PATCH**2, PATCH)
        self.weight.requires_grad_(False)


def speed_net(spec: SpeedNet, image_shape: tuple[int, ...], n_classes: int) -> nn.Module:
    """Return the network that `SpeedNet` describes."""
    channels, height, across = image_shape
    first = Whitening(channels)
    side = min(height, across) - PATCH + 1
    layers: list[nn.Module] = [first, activation(spec.activation)]
    n_in = first.out_channels
    for n_out in (spec.width, 4 * spec.width, 4 * spec.width):
        # ceil_mode keeps one pixel of one, where a plain pool would leave none.
        pool = nn.MaxPool2d(2, ceil_mode=side < 2)
        side = max(1, side // 2)
        layers += [_conv(spec, n_in, n_out), pool, *_after(spec, n_out),
                   _conv(spec, n_out, n_out), *_after(spec, n_out)]
        n_in = n_out
    net = nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Dropout(spec.dropout),
                        nn.Linear(n_in, n_classes, bias=False), Scaled(spec.scale))
    initialise(net, spec.init)
    return Mirrored(net) if spec.mirror else net


def _conv(spec: SpeedNet, n_in: int, n_out: int) -> nn.Conv2d:
    # A norm would take a bias away again.
    conv = nn.Conv2d(n_in, n_out, 3, padding=1, bias=spec.norm == "none")
    nn.init.dirac_(conv.weight.data[:n_in])
    return conv


def _after(spec: SpeedNet, n: int) -> list[nn.Module]:
    made = norm(spec.norm, n, "images")
    if isinstance(made, nn.BatchNorm2d):
        made.momentum = MOMENTUM
        made.weight.requires_grad_(False)
    return [made, activation(spec.activation)]


@torch.no_grad()
def whiten(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Have the first layer of a `SpeedNet` whiten the patches of images.

    Its outputs are the patches' principal directions, each of mean 0 and variance 1 (a little less
    by `EPS`) and uncorrelated, and the same ones negated.

    Shapes: batches of [n, channels, height, width], normalised.
    Raises:
        DataError: if the patches are not finite numbers.
    """
    first = next(part for part in model.modules() if isinstance(part, Whitening))
    mean, covariance = patch_moments(batches, PATCH)
    if not bool(covariance.isfinite().all()):
        raise DataError("SpeedNet: the training images hold NaN or infinite values, so their "
                        "patches cannot be whitened")
    # Of so small a matrix the host is the faster, and the same everywhere.
    variances, directions = torch.linalg.eigh(covariance)
    rows = directions.T / (variances.clamp_min(0.0) + EPS).sqrt()[:, None]
    weight = torch.cat([rows, -rows])
    first.weight.copy_(weight.view(first.weight.shape))
    assert first.bias is not None
    first.bias.copy_(-(weight @ mean))


def patch_moments(batches: Iterable[Tensor], size: int) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of all square patches of images, in float64 on the host.

    Shapes: batches of [n, channels, height, width]; [d] and [d, d], d = channels * size * size.
    """
    count, total, products = 0, torch.zeros(()), torch.zeros(())
    for images in batches:
        n_patches = (images.shape[2] - size + 1) * (images.shape[3] - size + 1)
        n_values = images.shape[1] * size**2 * n_patches
        for some in images.split(max(1, _MOST // n_values)):
            patches = unfold(some, size).double().transpose(0, 1).flatten(1)
            total = total.to(patches) + patches.sum(1)
            products = products.to(patches) + patches @ patches.T
            count += patches.shape[1]
    mean = total / count
    return mean.cpu(), (products / count - mean.outer(mean)).cpu()
