"""Random crop and flip, on the device and a whole batch at a time.

Each image draws its own crop and flip, from the trial's own generator, without a loop over images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hpo.train.checks import number, whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Augment(Protocol):
    """What the loop asks of an augmentation."""

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return a new batch of the same shape and type."""
        ...


@dataclass(frozen=True)
class RandomCrop:
    """Pad every side with black and cut a random window of the old size, as torchvision does.

    Shapes: [n, channels, height, width] to the same.
    """

    padding: int = 4

    def __post_init__(self) -> None:
        whole("RandomCrop.padding", self.padding, low=1)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the cropped batch."""
        import torch
        from torch.nn.functional import pad

        n, channels, height, width = images.shape
        border = self.padding
        padded = pad(images, (border, border, border, border))
        top, left = torch.randint(0, 2 * border + 1, (2, n, 1, 1), device=images.device,
                                  generator=generator)
        rows = top + torch.arange(height, device=images.device)[:, None]
        columns = left + torch.arange(width, device=images.device)[None, :]
        flat = (rows * (width + 2 * border) + columns).view(n, 1, height * width)
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
        return torch.where(draws < self.p, images.flip(-1), images)
