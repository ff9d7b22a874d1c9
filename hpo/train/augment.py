"""Random crops, flips, holes and colours, on the device and a whole batch at a time.

Each image draws its own change, from the trial's own generator, without a loop over images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from hpo.errors import InputError
from hpo.train.checks import number, one_of, whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FILLS = ("black", "reflect")


class Augment(Protocol):
    """What the loop asks of an augmentation."""

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return a new batch of the same shape and type."""
        ...


@dataclass(frozen=True)
class RandomCrop:
    """Pad every side and cut a random window of the old size, as torchvision does.

    `fill` is what lies outside of an image: "black", or "reflect", its mirror image without the
    outermost pixels again.

    Shapes: [n, channels, height, width] to the same.
    """

    padding: int = 4
    fill: str = "black"

    def __post_init__(self) -> None:
        whole("RandomCrop.padding", self.padding, low=1)
        one_of("RandomCrop.fill", self.fill, FILLS)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the cropped batch.

        Raises:
            InputError: if the images are too small to be mirrored.
        """
        import torch

        n, _, height, width = images.shape
        border = self.padding
        padded = self._padded(images).contiguous()
        top, left = torch.randint(0, 2 * border + 1, (2, n), device=images.device,
                                  generator=generator)
        # The same windows: a CPU copies whole rows fastest, a GPU has a thread for each pixel.
        cut = cut_rows if images.device.type == "cpu" else cut_gather
        return cut(padded, top, left, height, width)

    def _padded(self, images: Tensor) -> Tensor:
        from torch.nn.functional import pad

        border, sides = self.padding, images.shape[2:]
        if self.fill == "black":
            return pad(images, (border, border, border, border))
        if border >= min(sides):
            raise InputError(f"RandomCrop.padding: images of {sides[0]}x{sides[1]} can be "
                             f"mirrored by less than their sides, got {border}; use fill='black'")
        # By row and column numbers: torch's own padding mirrors no bytes.
        for axis in (2, 3):
            images = images.index_select(axis, _mirrored(images, axis, border))
        return images


def _mirrored(images: Tensor, axis: int, border: int) -> Tensor:
    """Return the number of the row that lies at each place from -border on."""
    import torch

    last = images.shape[axis] - 1
    places = torch.arange(-border, last + 1 + border, device=images.device).abs()
    return last - (last - places).abs()


def cut_rows(padded: Tensor, top: Tensor, left: Tensor, height: int, width: int) -> Tensor:
    """Return a window of each image, copied a row of pixels at a time.

    Shapes: padded [n, channels, ...] contiguous, top, left [n]; [n, channels, height, width].
    """
    import torch

    n, channels, rows, across = padded.shape
    # Row k of this view is what lies from pixel k on; rows overlap.
    starts = padded.view(-1).as_strided((padded.numel() - width + 1, width), (1, 1))
    image = torch.arange(n).mul_(channels * rows * across) + top * across + left
    channel = torch.arange(channels).mul_(rows * across)
    first = image.view(n, 1, 1) + channel.view(1, -1, 1) + torch.arange(height).mul_(across)
    return starts.index_select(0, first.view(-1)).view(n, channels, height, width)


def cut_gather(padded: Tensor, top: Tensor, left: Tensor, height: int, width: int) -> Tensor:
    """Return a window of each image, one pixel at a time; shapes as for `cut_rows`."""
    import torch

    n, channels, _, across = padded.shape
    rows = top.view(n, 1, 1) + torch.arange(height, device=padded.device)[:, None]
    columns = left.view(n, 1, 1) + torch.arange(width, device=padded.device)
    flat = (rows * across + columns).view(n, 1, height * width)
    cut = padded.flatten(2).gather(2, flat.expand(n, channels, height * width))
    return cut.view(n, channels, height, width)


@dataclass(frozen=True)
class RandomFlip:
    """Mirror each image left to right with probability `p`.

    Shapes: [n, channels, height, width] to the same.
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        number("RandomFlip.p", self.p, low=0.0, high=1.0)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the batch with about a fraction `p` of its images mirrored."""
        import torch

        draws = torch.rand(len(images), 1, 1, 1, device=images.device, generator=generator)
        return _flipped(images, draws.view(-1) < self.p)


def _flipped(images: Tensor, turns: Tensor) -> Tensor:
    """Return a batch with some images mirrored. Shapes: turns [n], bool."""
    import torch

    if images.device.type != "cpu":
        # What must be known on the host would make it wait for the device.
        return torch.where(turns.view(-1, 1, 1, 1), images.flip(-1), images)
    rows = turns.nonzero().view(-1)
    return images.clone().index_copy_(0, rows, images.index_select(0, rows).flip(-1))


class RowAugment(Protocol):
    """An augmentation that must know which rows a batch holds, and the epoch."""

    def of_rows(self, images: Tensor, rows: Tensor, epoch: int, seed: int) -> Tensor:
        """Return a new batch of the same shape and type; `rows` are numbers of training rows."""
        ...


def by_row(augment: Any) -> TypeGuard[RowAugment]:
    """Return whether an augmentation must know the rows of a batch."""
    return hasattr(augment, "of_rows")


@dataclass(frozen=True)
class AlternatingFlip:
    """Mirror each image left to right in every other epoch; a coin a row says in which.

    Of two epochs in a row a model sees each image both ways, where `RandomFlip` shows half of
    them the same way twice.

    Shapes: [n, channels, height, width] to the same.
    Source: Jordan, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU, section 3.6.
    """

    def of_rows(self, images: Tensor, rows: Tensor, epoch: int, seed: int) -> Tensor:
        """Return the batch with about half of its images mirrored."""
        turns = (coins(rows, seed) + epoch) % 2 == 1
        return _flipped(images, turns)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Refuse: without the rows there is nothing to alternate.

        Raises:
            InputError: always.
        """
        raise InputError("AlternatingFlip: a batch alone is not enough; call of_rows(images, "
                         "rows, epoch, seed), or take RandomFlip()")


def coins(rows: Tensor, seed: int) -> Tensor:
    """Return 0 or 1 for each row number, always the same for a seed.

    Source: Steele et al., Fast Splittable Pseudorandom Number Generators, the mixer of SplitMix64.
    """
    mixed = (rows + 1) * _signed(0x9E3779B97F4A7C15) + _signed(seed * 0xD1B54A32D192ED03)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _right(mixed, shift)) * _signed(factor)
    return (mixed ^ _right(mixed, 31)) & 1


def _signed(value: int) -> int:
    """Return the 64-bit integer of torch that has the lowest bits of a whole number."""
    return (value + 2**63) % 2**64 - 2**63


def _right(values: Tensor, n: int) -> Tensor:
    """Shift right as without a sign, which torch's integers have."""
    return (values >> n) & (2 ** (64 - n) - 1)


@dataclass(frozen=True)
class Cutout:
    """Paint a black square of `size` pixels a side over each image, its middle anywhere.

    What lies outside of the image is cut off.

    Shapes: [n, channels, height, width] to the same.
    Source: DeVries and Taylor, Improved Regularization of Convolutional Neural Networks with
    Cutout.
    """

    size: int = 8

    def __post_init__(self) -> None:
        whole("Cutout.size", self.size, low=1)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the batch with its holes."""
        import torch

        n, _, height, width = images.shape
        sides = []
        for length in (height, width):
            first = torch.randint(0, length, (n, 1), device=images.device,
                                  generator=generator) - self.size // 2
            pixels = torch.arange(length, device=images.device)
            sides.append((pixels >= first) & (pixels < first + self.size))
        hole = sides[0].view(n, 1, height, 1) & sides[1].view(n, 1, 1, width)
        return images.masked_fill(hole, 0)


@dataclass(frozen=True)
class ColorJitter:
    """Change brightness, contrast and saturation of each image by factors of its own.

    A factor is drawn evenly from 1 - x to 1 + x (not below 0), x being the field. The order is
    brightness, contrast, saturation, where torchvision shuffles it. Saturation is that of three
    channels; images of one have none.

    Shapes: [n, channels, height, width], uint8 or floats in 0..1, to the same.
    Source: torchvision's adjust_brightness, adjust_contrast and adjust_saturation.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            number(f"ColorJitter.{name}", getattr(self, name), low=0.0)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the changed batch."""
        import torch

        spans = torch.tensor([self.brightness, self.contrast, self.saturation],
                             device=images.device)
        draws = torch.rand(3, len(images), device=images.device, generator=generator)
        factors = ((2 * draws - 1) * spans[:, None] + 1).clamp_(min=0)
        return jittered(images, *(row.view(-1, 1, 1, 1) for row in factors))


def jittered(images: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Return images with brightness, contrast and saturation multiplied by a factor each.

    Shapes: images [n, channels, height, width], factors [n, 1, 1, 1].
    """
    top = 1.0 if images.is_floating_point() else 255.0
    x = (images.float() * brightness).clamp_(0, top)
    grey = _grey(x).mean((1, 2, 3), keepdim=True)
    x = grey.lerp(x, contrast).clamp_(0, top)
    if x.shape[1] == 3:
        x = _grey(x).lerp(x, saturation).clamp_(0, top)
    return x.to(images.dtype) if images.is_floating_point() else x.round_().to(images.dtype)


def _grey(images: Tensor) -> Tensor:
    """Return images of one channel: the luma of ITU-R BT.601."""
    if images.shape[1] != 3:
        return images
    red, green, blue = images.split(1, 1)
    return 0.2989 * red + 0.587 * green + 0.114 * blue
