"""RandAugment by the batch: the images that drew one operation go through torchvision's together.

The operations and their strengths are those of torchvision's own RandAugment, which draws one
operation for a whole batch, or else must be called for each image.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.errors import InputError
from hpo.train.checks import whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# torchvision's scale of strengths, 0 to 30, of which the paper uses up to 30.
_MOST = 30


@dataclass(frozen=True)
class RandAugment:
    """Change each image by `n_ops` operations drawn at random, at one strength for all.

    Slower than the other augmentations, by about an order of magnitude, and for each of them the
    device is asked once what was drawn. What shifts and turns fills with black.

    Shapes: [n, 1 or 3, height, width] uint8 to the same.
    Source: Cubuk et al., RandAugment, section 3, with torchvision's operations.
    """

    n_ops: int = 2
    magnitude: int = 9

    def __post_init__(self) -> None:
        whole("RandAugment.n_ops", self.n_ops, low=1)
        whole("RandAugment.magnitude", self.magnitude, low=0)
        if self.magnitude > _MOST:
            raise InputError(f"RandAugment.magnitude: must be at most {_MOST}, "
                             f"got {self.magnitude!r}")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return the changed batch.

        Raises:
            InputError: if the inputs are no uint8 images of one or three channels.
        """
        import torch

        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
            raise InputError(f"RandAugment: needs uint8 images [1 or 3, height, width], got "
                             f"{images.dtype} of shape {list(images.shape[1:])}")
        out = images.clone()
        for _ in range(self.n_ops):
            # Two for each operation: with either sign.
            draws = torch.randint(0, 2 * len(OPERATIONS), (len(images),), generator=generator,
                                  device=images.device)
            for draw in draws.unique().tolist():
                rows = (draws == draw).nonzero().view(-1)
                name, sign = list(OPERATIONS)[draw // 2], -1.0 if draw % 2 else 1.0
                changed = operate(name, out.index_select(0, rows), self.magnitude, sign)
                out.index_copy_(0, rows, changed)
        return out


def operate(name: str, images: Tensor, magnitude: int, sign: float) -> Tensor:
    """Return a batch changed by one operation at a strength of 0 to 30; some have no sign."""
    from torchvision.transforms.v2 import functional

    return OPERATIONS[name](functional, images, magnitude, sign)


def _shear(functional: Any, images: Tensor, x: float, y: float) -> Tensor:
    # About the corner, as the published code does.
    return functional.affine(images, angle=0.0, translate=[0, 0], scale=1.0, center=[0, 0],
                             shear=[math.degrees(math.atan(x)), math.degrees(math.atan(y))])


def _shift(functional: Any, images: Tensor, x: float, y: float) -> Tensor:
    return functional.affine(images, angle=0.0, translate=[int(x), int(y)], scale=1.0,
                             shear=[0.0, 0.0])


def _at(end: float, magnitude: int, start: float = 0.0) -> float:
    """Return the strength of a magnitude, in float32 as torchvision has it."""
    import torch

    return float(torch.linspace(start, end, _MOST + 1)[magnitude])


# What each does with (torchvision's functions, images, magnitude, sign). The bounds are
# torchvision's: shifts of 150 of 331 pixels, turns of 30 degrees, shears of 0.3, factors of 0.9.
OPERATIONS: dict[str, Callable[[Any, Tensor, int, float], Tensor]] = {
    "Identity": lambda f, x, m, s: x,
    "ShearX": lambda f, x, m, s: _shear(f, x, s * _at(0.3, m), 0.0),
    "ShearY": lambda f, x, m, s: _shear(f, x, 0.0, s * _at(0.3, m)),
    "TranslateX": lambda f, x, m, s: _shift(f, x, s * _at(150.0 / 331.0 * x.shape[-1], m), 0.0),
    "TranslateY": lambda f, x, m, s: _shift(f, x, 0.0, s * _at(150.0 / 331.0 * x.shape[-2], m)),
    "Rotate": lambda f, x, m, s: f.rotate(x, s * _at(30.0, m)),
    "Brightness": lambda f, x, m, s: f.adjust_brightness(x, 1.0 + s * _at(0.9, m)),
    "Color": lambda f, x, m, s: f.adjust_saturation(x, 1.0 + s * _at(0.9, m)),
    "Contrast": lambda f, x, m, s: f.adjust_contrast(x, 1.0 + s * _at(0.9, m)),
    "Sharpness": lambda f, x, m, s: f.adjust_sharpness(x, 1.0 + s * _at(0.9, m)),
    "Posterize": lambda f, x, m, s: f.posterize(x, 8 - round(4 * m / _MOST)),
    "Solarize": lambda f, x, m, s: f.solarize(x, 255.0 * _at(0.0, m, 1.0)),
    "AutoContrast": lambda f, x, m, s: f.autocontrast(x),
    "Equalize": lambda f, x, m, s: f.equalize(x),
}
