"""What holds a model back from learning its training rows by heart: plain values, no torch.

Mixing acts on batches, the average on weights, early stopping on the trial's length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hpo.errors import InputError
from hpo.train.checks import number, whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class MixedLabels:
    """The labels of a mixed batch: `first` count by `share`, `second` by the rest.

    Shapes: first, second [n]; share [], on the device.
    """

    first: Tensor
    second: Tensor
    share: Tensor

    def __len__(self) -> int:
        return len(self.first)

    def tensor_split(self, n_parts: int) -> list[MixedLabels]:
        """Return the parts that `Tensor.tensor_split` gives, each with the batch's share."""
        parts = zip(self.first.tensor_split(n_parts), self.second.tensor_split(n_parts),
                    strict=True)
        return [MixedLabels(first, second, self.share) for first, second in parts]

    def loss(self, loss_of: Callable[[Tensor, Tensor], Tensor], scores: Tensor) -> Tensor:
        """Return share * loss(first) + (1 - share) * loss(second), which any loss can take.

        For cross entropy, smoothed or not, it is the loss against the soft labels.
        """
        first, second = loss_of(scores, self.first), loss_of(scores, self.second)
        share = self.share.to(first.dtype)
        return share * first + (1 - share) * second


@runtime_checkable
class Mix(Protocol):
    """What the loop asks of a mixing of rows."""

    def mix(self, images: Tensor, labels: Tensor,
            generator: torch.Generator) -> tuple[Tensor, MixedLabels]:
        """Return a new batch of the same shape, and its labels."""
        ...


@dataclass(frozen=True)
class MixUp:
    """Train on weighted means of two rows, and of their labels.

    A batch draws one share from Beta(alpha, alpha); each row is mixed with the one before it.

    Source: Zhang et al., mixup: Beyond Empirical Risk Minimization, equation 1.
    """

    alpha: float = 0.2

    def __post_init__(self) -> None:
        number("MixUp.alpha", self.alpha, low=0.0, open_low=True)

    def mix(self, images: Tensor, labels: Tensor,
            generator: torch.Generator) -> tuple[Tensor, MixedLabels]:
        """Return the mixed batch and its labels. Shapes: images [n, ...] float, labels [n]."""
        share = _share(self.alpha, images.device, generator)
        mixed = images.roll(1, 0).lerp(images, share.to(images.dtype))
        return mixed, MixedLabels(labels, labels.roll(1, 0), share)


@dataclass(frozen=True)
class CutMix:
    """Replace a box of each image by that of the one before it, and mix labels by the area.

    A batch draws one box: its area is 1 - share of the image, with share from Beta(alpha, alpha)
    and the middle anywhere; what lies outside of the image is cut off, and the labels' share is
    that of the pixels left.

    Source: Yun et al., CutMix, equations 1 and 2 and appendix A, algorithm A1.
    """

    alpha: float = 1.0

    def __post_init__(self) -> None:
        number("CutMix.alpha", self.alpha, low=0.0, open_low=True)

    def mix(self, images: Tensor, labels: Tensor,
            generator: torch.Generator) -> tuple[Tensor, MixedLabels]:
        """Return the mixed batch and its labels. Shapes: images [n, c, h, w], labels [n].

        Raises:
            InputError: if the inputs are no images.
        """
        import torch

        if images.ndim != 4:
            raise InputError(f"CutMix: needs images [channels, height, width], got rows of shape "
                             f"{list(images.shape[1:])}; MixUp() takes these")
        device = images.device
        side = (1 - _share(self.alpha, device, generator)).sqrt()
        middle = torch.rand(2, device=device, dtype=torch.float64, generator=generator)
        box = torch.ones((), dtype=torch.bool, device=device)
        # On the device throughout: nothing is asked of it.
        for axis, size in ((0, images.shape[2]), (1, images.shape[3])):
            at = (middle[axis] * size).floor()
            half = (side * size).floor().div(2, rounding_mode="floor")
            pixels = torch.arange(size, device=device)
            inside = (pixels >= at - half) & (pixels < at + half)
            box = box & (inside[:, None] if axis == 0 else inside[None, :])
        mixed = torch.where(box, images.roll(1, 0), images)
        return mixed, MixedLabels(labels, labels.roll(1, 0), 1 - box.double().mean())


def _share(alpha: float, device: torch.device, generator: torch.Generator) -> Tensor:
    """Return one draw from Beta(alpha, alpha), in float64, on the device.

    torch has no public Beta with a generator of one's own; torchvision draws so too.
    """
    import torch

    both = torch.full((2,), float(alpha), dtype=torch.float64, device=device)
    draw: Any = torch._sample_dirichlet  # pyright: ignore[reportPrivateImportUsage]
    return draw(both, generator=generator)[0]


@dataclass(frozen=True)
class EMA:
    """Evaluate and keep a running mean of the weights in place of the weights themselves.

    After step t (from 1) the mean moves by 1 - d towards the weights, with d = `decay`, or with
    `warmup` the lesser of `decay` and (1 + t) / (10 + t): a short trial's mean would else be that
    of its initial weights. Running statistics of batch norm are averaged like weights; counts are
    copied.

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging; the warm-up
    is TensorFlow's ExponentialMovingAverage with `num_updates`.
    """

    decay: float = 0.999
    warmup: bool = True

    def __post_init__(self) -> None:
        number("EMA.decay", self.decay, low=0.0, high=1.0, open_high=True)
        if not isinstance(self.warmup, bool):
            raise InputError(f"EMA.warmup: must be True or False, got {self.warmup!r}")

    def decay_at(self, step: int) -> float:
        """Return the decay of a step, from 1."""
        return min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay


@dataclass(frozen=True)
class EarlyStopping:
    """End a trial, as COMPLETE, when its metric has not improved for `patience` epochs.

    An epoch improves if it is better than the best before by more than `min_delta`, in the units
    of the study's metric. The schedule is not shortened: it is that of all epochs.
    """

    patience: int = 5
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        whole("EarlyStopping.patience", self.patience, low=1)
        number("EarlyStopping.min_delta", self.min_delta, low=0.0)


class Patience:
    """How long a metric has not improved."""

    def __init__(self, spec: EarlyStopping, maximize: bool) -> None:
        self._spec, self._sign = spec, 1.0 if maximize else -1.0
        self._best = -math.inf
        self.n_without = 0

    @property
    def is_over(self) -> bool:
        """Whether the trial ends here."""
        return self.n_without >= self._spec.patience

    def add(self, value: float) -> None:
        """Take in the metric of an epoch; NaN improves nothing."""
        better = self._sign * value
        if better - self._spec.min_delta > self._best or (
                self._best == -math.inf and math.isfinite(better)):
            self._best, self.n_without = better, 0
        else:
            self.n_without += 1

    def state_dict(self) -> dict[str, Any]:
        """Return what the coming epochs are held against."""
        return {"best": self._best, "n_without": self.n_without}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._best, self.n_without = state["best"], state["n_without"]
