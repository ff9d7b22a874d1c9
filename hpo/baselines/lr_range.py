"""The learning-rate range test: raise the rate through an epoch, pick where the loss falls most.

A pick is given only where the fall stands out of the noise; a sweep that tells nothing says so.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hpo.errors import InputError

if TYPE_CHECKING:
    import torch

    from hpo.spec import Run
    from hpo.train import Recipe

# A sweep makes one step a rate. More points than these add nothing to the curve; with fewer than
# the least, the batches are made smaller, so that the epoch's rows make more points.
MOST_POINTS = 100
LEAST_POINTS = 24
LEAST_BATCH = 8
# A slope needs neighbours on both sides, and noise an estimate.
LEAST_LOSSES = 5
# How far the smoothed curve must fall to be no accident, in standard errors of a smoothed point:
# about one in 200 sweeps of pure noise, of 10 to 100 points, falls as far.
SIGNIFICANT = 10.0
# Kernel widths in points, as parts of the curve's length: the first that shows a fall is taken.
WIDTHS = (0.04, 0.08, 0.12)


@dataclass(frozen=True)
class LRSuggestion:
    """What a sweep says: the rate where the loss falls most steeply, and the interval around it.

    `pick`, `low` and `high` are None where the curve tells nothing; `reason` says why in either
    case. `smoothed` goes with `losses` point by point. `epochs` is the part of an epoch's rows
    that the sweep trained on.
    """

    pick: float | None
    low: float | None
    high: float | None
    reason: str
    smoothed: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    n_steps: int = 0
    epochs: float = 0.0
    batch_size: int | None = field(default=None)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data; a loss that is not finite becomes None."""
        entry = asdict(self)
        for name in ("smoothed", "rates", "losses"):
            entry[name] = [v if math.isfinite(v) else None for v in entry[name]]
        return entry

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> LRSuggestion:
        """Return the suggestion that `to_json` gave."""
        known = {name: entry[name] for name in cls.__dataclass_fields__ if name in entry}
        for name in ("smoothed", "rates", "losses"):
            known[name] = tuple(math.nan if v is None else v for v in known.get(name, ()))
        return cls(**known)


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
        if n < LEAST_POINTS:
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


def sweep(model: torch.nn.Module, optimizer: torch.optim.Optimizer,
          next_loss: Callable[[], torch.Tensor], rates: Sequence[float], *,
          scheduler: Any = None, update: Callable[[torch.Tensor], Any] | None = None
          ) -> list[float]:
    """Make one optimizer step a rate and return the loss before each; leave no trace.

    A group's rate is the rate times its `lr_scale`, where it has one. `next_loss` gives the
    training loss of the next batch, `update` makes the step of a loss, where it is more than its
    gradient and the optimizer's step. The sweep ends at the first loss that is not finite or far
    above the first. Model, optimizer, scheduler, training mode, gradients and the random states of
    torch, numpy and Python are put back exactly, also after an error.
    """
    from hpo.train.groups import set_rate

    losses: list[float] = []
    with restored(model, optimizer, scheduler):
        model.train()
        optimizer.zero_grad()
        for rate in rates:
            set_rate(optimizer, rate)
            loss = next_loss()
            losses.append(float(loss.detach()))
            if _diverged(losses):
                break
            if update is not None:
                update(loss)
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _diverged(losses: Sequence[float]) -> bool:
    """Return whether the last loss is as far above the first as four times it, or as the fall."""
    first, last = losses[0], losses[-1]
    if not math.isfinite(last):
        return True
    return last > first + 3.0 * max(abs(first), first - min(losses))


@contextlib.contextmanager
def restored(model: torch.nn.Module, optimizer: torch.optim.Optimizer,
             scheduler: Any = None) -> Iterator[None]:
    """Put back, bit by bit, what training steps change in these and in the random states."""
    import torch

    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    grads = [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    state = copy.deepcopy(optimizer.state_dict())
    schedule = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
    # torch marks an optimizer that has stepped, for a warning about the order of calls.
    marks = {name: optimizer.__dict__.get(name) for name in ("_opt_called", "_step_count")}
    draws = (torch.get_rng_state(), np.random.get_state(), random.getstate(),
             torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad
        for module, mode in modes:
            module.training = mode
        optimizer.load_state_dict(state)
        if scheduler is not None:
            scheduler.load_state_dict(schedule)
        _put_back(optimizer, marks)
        torch.set_rng_state(draws[0])
        np.random.set_state(draws[1])
        random.setstate(draws[2])
        if draws[3]:
            torch.cuda.set_rng_state_all(draws[3])


def _put_back(holder: Any, marks: Mapping[str, Any]) -> None:
    for name, value in marks.items():
        if value is None:
            holder.__dict__.pop(name, None)
        else:
            holder.__dict__[name] = value


def lr_range(recipe: Recipe, run: Run, *, low: float | None = None,
             high: float | None = None) -> LRSuggestion:
    """Sweep a recipe's learning rate over at most one epoch's rows and return the suggestion.

    Rates rise evenly on the log scale, one optimizer step each: as many as the epoch has steps, at
    most 100. An epoch of fewer than 24 steps is cut into smaller batches (of 8 rows or more), so
    that its rows still give a curve: no row is trained twice. Bounds default to the optimizer's
    own: 1e-6..1 for AdamW, 1e-5..10 for SGD. Groups keep their factors between their rates.

    Raises:
        InputError: if the bounds do not rise from above 0.
    """
    from hpo.train.loop import Trainer
    from hpo.train.optim_spec import OptimizerSpec

    # A user's own optimizer may say none.
    usual = getattr(recipe.optimizer, "sweep_bounds", OptimizerSpec.sweep_bounds)
    bounds = [usual[0] if low is None else low, usual[1] if high is None else high]
    if not 0 < bounds[0] < bounds[1] < math.inf:
        raise InputError(f"learning-rate range: low must be above 0 and below high, got "
                         f"low={bounds[0]:g}, high={bounds[1]:g}")
    trainer = Trainer(recipe, run, metric="val_loss", maximize=False)
    try:
        n_rows = len(trainer.data.train)
        n_points, size = plan(n_rows, recipe.batch_size)
        rates = [float(rate) for rate in np.geomspace(bounds[0], bounds[1], n_points)]
        batches = trainer.batches(size, n_points)
        with trainer.computing():
            losses = sweep(trainer.model, trainer.optimizer,
                           lambda: trainer.loss(*next(batches)), rates,
                           update=trainer.update.of_loss)
    finally:
        trainer.close()
    found = asdict(suggest(rates, losses))
    n_used = min(n_rows, len(losses) * size)
    return LRSuggestion(**{**found, "n_steps": len(losses), "epochs": n_used / n_rows,
                           "batch_size": size})


def plan(n_rows: int, batch_size: int) -> tuple[int, int]:
    """Return the points of a sweep and the rows of each, within one epoch's rows."""
    steps = n_rows // batch_size
    if steps >= LEAST_POINTS:
        return min(steps, MOST_POINTS), batch_size
    size = min(batch_size, max(LEAST_BATCH, n_rows // (2 * LEAST_POINTS)))
    return max(1, min(n_rows // size, 2 * LEAST_POINTS)), min(size, n_rows)
