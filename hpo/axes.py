"""Limits, ticks and labels of the pictures' axes, so that what a reader compares is legible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_GREY = "#777777"
# A logarithmic axis is drawn where the largest value is this many times the smallest.
_LOG_RATIO = 30.0
# The least part of an axis's height that is left to what was measured where chance is on it too.
_LEAST_HEIGHT = 0.5


def limit(axes: Axes, values: Sequence[float]) -> None:
    """Set the limits of the y axis to show these values with some air, in logarithms if wide."""
    low, high = min(values), max(values)
    if wants_log(values):
        axes.set_yscale("log")
        air = (high / low) ** 0.06
        axes.set_ylim(low / air, high * air)
        plain_log(axes.yaxis)
    else:
        air = (high - low) * 0.08 or abs(high) * 0.01 or 0.01
        axes.set_ylim(low - air, high + air)


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
