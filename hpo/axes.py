"""Limits, ticks and labels of the pictures' axes, so that what a reader compares is legible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from hpo.results import Scores

_Thing = TypeVar("_Thing")
_GREY = "#777777"
# A logarithmic axis is drawn where the largest value is this many times the smallest.
_LOG_RATIO = 30.0
# The least part of an axis's height that is left to what was measured where chance is on it too.
_LEAST_HEIGHT = 0.5
# A level this many times farther from the best than the next farthest is left off the axis and
# pointed at: it would squeeze all that a reader wants to compare into one line.
_FAR = 4.0
# The axis of learning curves is this many times as high as the better half of the scores is.
_BAND = 3.0
# At least this part of the trials reaches into it, so that what was pruned is seen too.
_SHOWN_FRACTION = 0.75
# The part of the axis's height that is left for marks above the highest score there can be.
_TOP_AIR = 0.04


def limit(panels: Sequence[Axes], values: Sequence[float], highest: float | None = None) -> None:
    """Set the limits of a y axis to show these values with some air, in logarithms if wide.

    No tick and no spine goes beyond `highest`, the score that none can pass; air for marks does.
    """
    axes = panels[0]
    values = [v if highest is None else min(v, highest) for v in values]
    low, high = min(values), max(values)
    if wants_log(values):
        axes.set_yscale("log")
        air = (high / low) ** 0.06
        axes.set_ylim(low / air, high * air)
        plain_log(axes.yaxis)
    else:
        air = (high - low) * 0.08 or abs(high) * 0.01 or 0.01
        axes.set_ylim(low - air, high + air)
    low, high = axes.get_ylim()
    if highest is not None and high > highest:
        axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= highest])
        for panel in panels:
            panel.spines["left"].set_bounds(low, highest)
        high = min(high, highest + _TOP_AIR * (highest - low))
    axes.set_ylim(low, high)


def plain_log(axis: Axis) -> None:
    """Write 20, 50, 100 where matplotlib would write powers of ten on top of each other."""
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 3 else (1.0,)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move label positions apart to at least `gap`, keeping their order, inside low..high."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [min(max(wanted[i], low), high) for i in order]
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + gap)
    if placed and placed[-1] > high:
        placed[-1] = high
        for i in range(len(placed) - 2, -1, -1):
            placed[i] = min(placed[i], placed[i + 1] - gap)
    moved = [0.0] * len(wanted)
    for i, y in zip(order, placed, strict=True):
        moved[i] = y
    return moved


def best_half(
    scores: Sequence[float], values: Sequence[float], maximize: bool
) -> list[float]:
    """Return the values of learning curves to show: those near the better half of the scores.

    The first epochs and bad trials would squeeze what tells the good ones apart; three quarters of
    the trials, pruned ones too, reach into what is shown all the same.
    """
    sign = 1.0 if maximize else -1.0
    as_drawn = math.log if wants_log([*scores, *values]) else float
    levels = sorted((sign * as_drawn(score) for score in scores), reverse=True)
    # Where the better half is all the same, the next level that differs stands for it.
    differing = [level for level in levels[(len(levels) - 1) // 2:] if level < levels[0]]
    if not differing:
        return _usual(sorted(values))
    most = levels[int(_SHOWN_FRACTION * (len(levels) - 1))]
    edge = levels[0] - max(_BAND * (levels[0] - differing[0]), 1.2 * (levels[0] - most))
    return [v for v in values if sign * as_drawn(v) >= edge]


def _usual(ordered: list[float]) -> list[float]:
    """Leave out the wildest twentieth at each end: one loss of 1e6 would hide all others."""
    cut = len(ordered) // 20
    # A best value is the point of the picture, and lies at one of the ends.
    middle = ordered[cut:len(ordered) - cut]
    spread = middle[-1] - middle[0]
    return [v for v in ordered if middle[0] - spread / 2 <= v <= middle[-1] + spread / 2]


def wants_log(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) / min(values) > _LOG_RATIO


def finite(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(epoch, value) for epoch, value in curve if math.isfinite(value)]


def with_chance(values: Sequence[float], chance: float | None) -> list[float]:
    """Return the values to show, with chance where that leaves them half of the axis's height."""
    if chance is None or chance <= 0:
        return list(values)
    as_drawn = math.log if wants_log(values) else float
    low, high, level = as_drawn(min(values)), as_drawn(max(values)), as_drawn(chance)
    height = max(high, level) - min(low, level)
    return [*values, chance] if high - low >= _LEAST_HEIGHT * height else list(values)


def draw_chance(axes: Axes, chance: float | None, *, label: bool = True) -> None:
    """Mark what guessing scores: a thin line, or an arrow where it lies outside of the axis."""
    if chance is None:
        return
    low, high = axes.get_ylim()
    inside = low <= chance <= high
    if inside:
        axes.axhline(chance, color=_GREY, lw=0.8, ls=(0, (6, 3)), zorder=1)
    if not label:
        return
    y, side = (chance, "bottom") if inside else (low, "bottom") if chance < low else (high, "top")
    arrow = "" if inside else " ↓" if chance < low else " ↑"
    axes.annotate(f"chance {chance:.3g}{arrow}", (0.985, y), xycoords=("axes fraction", "data"),
                  xytext=(0, 2 if side == "bottom" else -2), textcoords="offset points",
                  ha="right", va=side, color=_GREY, fontsize=8)


def error_bar(scores: Scores) -> tuple[float, float]:
    """Return both ends of the mean's error bar; where no score is below 0, neither is its end."""
    low, high = scores.mean - (scores.sd or 0.0), scores.mean + (scores.sd or 0.0)
    least = min(scores.by_seed.values())
    # An end below zero would take the logarithms from losses that need them.
    return (least if low <= 0 < least else low), high


def without_far(levels: dict[str, list[float]]) -> list[str]:
    """Return the sources but the one that lies far from all others, if there is such a one."""
    first = next(iter(levels.values()))[0]
    far = {source: max(abs(v - first) for v in values) for source, values in levels.items()}
    order = sorted(far, key=lambda source: far[source])
    if len(order) >= 3 and far[order[-1]] > _FAR * far[order[-2]] > 0:
        return order[:-1]
    return order


def loss_limits(losses: Sequence[float]) -> tuple[float, float]:
    """Cut off the explosion at the end: a little above where the sweep began is enough."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    low, start = min(finite), finite[0]
    top = min(max(finite), max(start, sorted(finite)[len(finite) // 2]) * 1.5)
    air = (top - low) * 0.08 or 0.1
    return low - air, top + air


def thinned(things: Sequence[_Thing], most: int) -> Sequence[_Thing]:
    """Return every k-th of many things, so that at most so many are left; a few as they are."""
    return things[::math.ceil(len(things) / most)] if len(things) > most else things


def every(things: Sequence[object], left: Sequence[object], what: str) -> str:
    """Say that only every k-th of many things is drawn: `, every 3rd drawn`; else nothing."""
    if len(left) == len(things):
        return ""
    k = math.ceil(len(things) / len(left))
    ending = "th" if k % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(k % 10, "th")
    return f", every {k}{ending} {what}"
