"""What the curve of a sweep says: where it falls most steeply, if that stands out of the noise.

A sweep that tells nothing says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from hpo.errors import InputError

# A slope needs neighbours on both sides, and noise an estimate.
LEAST_LOSSES = 5
# How far the smoothed curve must fall to be no accident, in standard errors of a smoothed point:
# about one in 200 sweeps of pure noise, of 10 to 100 points, falls as far.
SIGNIFICANT = 10.0
# Kernel widths in points, as parts of the curve's length: the first that shows a fall is taken.
WIDTHS = (0.04, 0.08, 0.12)
# With fewer points a curve without a fall is called too short to tell.
FEW_POINTS = 24


@dataclass(frozen=True)
class LRSuggestion:
    """What sweeps say: the rate to train with, and the interval in which the best one should lie.

    `pick`, `low` and `high` are None where the curve tells nothing; `reason` says why in either
    case. `losses` is the mean over the seeds' sweeps, `by_seed` the losses of each, `smoothed`
    goes with `losses` point by point. `edge` is the rate at which the loss is back where it began,
    `error` the standard error of the pick over the seeds, in decades. `epochs` is the part of an
    epoch's rows that the sweeps trained on.
    """

    pick: float | None
    low: float | None
    high: float | None
    reason: str
    smoothed: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    by_seed: tuple[tuple[float, ...], ...] = ()
    edge: float | None = None
    error: float | None = None
    n_steps: int = 0
    epochs: float = 0.0
    batch_size: int | None = field(default=None)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data; a loss that is not finite becomes None."""
        entry = asdict(self)
        for name in ("smoothed", "rates", "losses"):
            entry[name] = _finite(entry[name])
        entry["by_seed"] = [_finite(losses) for losses in self.by_seed]
        return entry

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> LRSuggestion:
        """Return the suggestion that `to_json` gave."""
        known = {name: entry[name] for name in cls.__dataclass_fields__ if name in entry}
        for name in ("smoothed", "rates", "losses"):
            known[name] = _numbers(known.get(name, ()))
        known["by_seed"] = tuple(map(_numbers, known.get("by_seed", ())))
        return cls(**known)


def _finite(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _numbers(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else value for value in values)


def suggest(rates: Sequence[float] | np.ndarray,
            losses: Sequence[float] | np.ndarray) -> LRSuggestion:
    """Return the rate of steepest descent of a sweep, or none with the reason.

    Losses may be fewer than rates (a sweep that stopped) and are read up to the first that is
    not finite. Lone spikes are set to their neighbours' median; the curve is smoothed over log
    rates by local lines (no lag, unlike a moving average); what follows its blow-up is not looked
    at; the fall must stand out of the noise. Multiplying the losses or adding to them changes
    nothing.

    Raises:
        InputError: if rates do not rise from above 0, or are fewer than the losses.
    """
    x, y, raw = _checked(rates, losses)
    told: dict[str, Any] = {"rates": tuple(map(float, rates[:len(raw)])),
                            "losses": tuple(map(float, raw))}
    if len(y) < LEAST_LOSSES:
        return LRSuggestion(None, None, None, _too_few(rates, raw, y), **told)
    tamed = _without_spikes(y)
    # A range of rounding errors only: no noise to hold a fall against.
    if np.ptp(tamed) <= 1e-9 * np.abs(tamed).max():
        return LRSuggestion(None, None, None, "flat: the loss is the same at all rates",
                            tuple(map(float, tamed)), **told)
    noise = _noise_before_chaos(x, tamed)
    for width in WIDTHS:
        curve = _Curve.fit(x, tamed, width * len(y), noise)
        if curve.falls:
            return _picked(curve, x, told)
    curve = _Curve.fit(x, tamed, WIDTHS[1] * len(y), noise)
    return LRSuggestion(None, None, None, curve.why_none(float(rates[0])),
                        tuple(map(float, curve.smooth)), **told)


def _checked(rates: Sequence[float] | np.ndarray, losses: Sequence[float] | np.ndarray
             ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return log10 rates and losses up to the first that is not finite, and all losses."""
    steps, raw = np.asarray(rates, np.float64), np.asarray(losses, np.float64)
    if len(raw) > len(steps):
        raise InputError(f"learning-rate range: {len(raw)} losses for {len(steps)} rates")
    if len(steps) and (not np.isfinite(steps).all() or steps[0] <= 0
                       or (np.diff(steps) <= 0).any()):
        raise InputError("learning-rate range: rates must be above 0 and rise")
    bad = np.flatnonzero(~np.isfinite(raw))
    n = int(bad[0]) if len(bad) else len(raw)
    return np.log10(steps[:n]), raw[:n], raw


def _too_few(rates: Sequence[float] | np.ndarray, raw: np.ndarray, y: np.ndarray) -> str:
    if not len(raw):
        return "no rate was tried"
    if not len(y):
        return (f"the loss is {raw[0]:g} at the first rate, {rates[0]:g}: "
                f"lower the start (--low), or check the data")
    if len(y) < len(raw) or len(raw) < len(rates) or y[-1] > y[0]:
        return (f"the loss diverges within {len(y)} step{'s' if len(y) > 1 else ''} from the "
                f"first rate, {rates[0]:g}: lower the start (--low)")
    return f"too few rates: {len(y)} were tried, {LEAST_LOSSES} are needed"


def _without_spikes(y: np.ndarray) -> np.ndarray:
    """Return losses with lone outliers set to the median of the five (at the ends three) around.

    Source: Hampel's identifier, with one scale for the whole curve.
    """
    reach = 2 if len(y) >= 9 else 1
    middle = np.array([np.median(y[max(0, i - reach):i + reach + 1]) for i in range(len(y))])
    middle[0], middle[-1] = np.median(y[:3]), np.median(y[-3:])
    off = np.abs(y - middle)
    scale = 1.4826 * np.median(off)
    # On a noiseless curve the scale is 0 and every bend an outlier: an even bend is none.
    limit = max(6.0 * scale, 6.0 * float(np.median(np.abs(np.diff(y)))))
    return np.where(off > limit, middle, y)


def _noise(y: np.ndarray) -> float:
    """Return the deviation of single losses around a smooth curve, from second differences."""
    bends = np.sort(np.abs(y[:-2] - 2.0 * y[1:-1] + y[2:]))
    # The mean of the smaller 70 % leaves the blow-up out, and varies less than a median. Of a
    # normal variable's absolute values they average 0.474 deviations; a bend has sqrt(6) of y's.
    return float(bends[:math.ceil(0.7 * len(bends))].mean() / (0.474 * math.sqrt(6.0)))


def _noise_before_chaos(x: np.ndarray, y: np.ndarray) -> float:
    """Return the noise up to the lowest point: beyond it losses leap, and would hide the fall."""
    everywhere = _noise(y)
    lowest = int(np.argmin(_Curve.fit(x, y, WIDTHS[1] * len(y), everywhere).smooth))
    return min(everywhere, _noise(y[:lowest + 1])) if lowest >= 8 else everywhere


@dataclass(frozen=True, eq=False)
class _Curve:
    """A smoothed sweep: values, slopes per decade, and the fall that was found in it.

    The fall goes from `top` to `bottom`; `error` is the standard error of a smoothed point.
    """

    smooth: np.ndarray
    slope: np.ndarray
    top: int
    bottom: int
    error: float

    @classmethod
    def fit(cls, x: np.ndarray, y: np.ndarray, width: float, noise: float) -> _Curve:
        """Smooth by local lines with Gaussian weights of `width` points (at least 0.6)."""
        reach = max(0.6, width) * float(np.median(np.diff(x)))
        away = x[None, :] - x[:, None]
        weights = np.exp(-0.5 * (away / reach) ** 2)
        s0, s1, s2 = (np.sum(weights * away ** k, axis=1) for k in range(3))
        det = np.maximum(s0 * s2 - s1 ** 2, 1e-300)
        to_value = weights * (s2[:, None] - s1[:, None] * away) / det[:, None]
        to_slope = weights * (s0[:, None] * away - s1[:, None]) / det[:, None]
        error = noise * float(np.median(np.sqrt(np.sum(to_value ** 2, axis=1))))
        # Taken from the middle of the values, so that a large constant costs no digits.
        smooth = to_value @ (y - y.mean()) + y.mean()
        bottom = _bottom(smooth, error)
        return cls(smooth, to_slope @ (y - y.mean()), int(np.argmax(smooth[:bottom + 1])), bottom,
                   error)

    @property
    def drop(self) -> float:
        """How far the loss falls."""
        return float(self.smooth[self.top] - self.smooth[self.bottom])

    @property
    def falls(self) -> bool:
        """Whether it falls further than noise does."""
        return self.bottom > self.top and self.drop > SIGNIFICANT * self.error

    def steepest(self) -> tuple[int, int, int]:
        """Return the steepest point, and the first and last where it falls half as steeply."""
        inside = np.arange(self.top, self.bottom + 1)
        height = (self.smooth[inside] - self.smooth[self.bottom]) / self.drop
        # The ends of the fall are out: there slopes are half noise.
        steep = inside[(height >= 0.1) & (height <= 0.9)]
        steep = steep if len(steep) else inside
        least = self.slope[steep].min()
        pick = int(steep[np.flatnonzero(self.slope[steep] <= least * (1.0 - 1e-6))[0]])
        low = high = pick
        while low > self.top and self.slope[low - 1] <= 0.5 * least:
            low -= 1
        while high < self.bottom and self.slope[high + 1] <= 0.5 * least:
            high += 1
        return pick, low, high

    def why_none(self, first_rate: float) -> str:
        """Say why there is no pick."""
        rise = float(self.smooth.max() - self.smooth[:2].min())
        if rise > SIGNIFICANT * self.error and self.smooth[-1] > self.smooth[0]:
            return (f"the loss rises from the first rate, {first_rate:g}, without falling before: "
                    f"lower the start (--low)")
        n = len(self.smooth)
        if n < FEW_POINTS:
            return (f"too few steps to tell: {n} rates were tried, one a step of an epoch, and "
                    f"the loss does not fall by more than the noise of so few")
        return "flat: the loss does not fall by more than its noise at any rate"


def _bottom(smooth: np.ndarray, error: float) -> int:
    """Return the lowest point before the loss is back above where it began; there chaos begins."""
    lowest = np.minimum.accumulate(smooth)
    begun = smooth[0]
    back = np.flatnonzero(smooth > begun + SIGNIFICANT * error + 0.1 * (begun - lowest))
    end = int(back[0]) if len(back) else len(smooth)
    return int(np.argmin(smooth[:max(1, end)]))


def _picked(curve: _Curve, x: np.ndarray, told: dict[str, Any]) -> LRSuggestion:
    pick, low, high = curve.steepest()
    # An interval of one point tells nothing of its neighbours: half a step to each side.
    part = 10 ** (0.5 * float(np.median(np.diff(x)))) if low == high else 1.0
    rates = told["rates"]
    return LRSuggestion(
        rates[pick], rates[low] / part, rates[high] * part,
        "steepest fall of the smoothed loss", tuple(map(float, curve.smooth)), **told)
