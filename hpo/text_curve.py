"""A learning curve as a few lines of text, against that of others."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpo.axes import finite, wants_log
from hpo.verdict import number

# Points that stand farther apart than this do not read as a curve.
_MOST_COLUMNS_AN_EPOCH = 5
OWN, OTHERS = "*", "."

Curve = Sequence[tuple[int, float]]


def draw(own: Curve, others: Curve, *, width: int, height: int) -> list[str]:
    """Return two curves over the same epochs, `*` ours and `.` theirs, with their axes.

    The values are drawn on a logarithmic axis where they span decades. Nothing is returned where
    no value is finite.
    """
    shown = finite(own) + finite(others)
    if not shown:
        return []
    values = [value for _, value in shown]
    as_drawn = math.log if wants_log(values) else float
    low, high = min(values), max(values)
    left = max(len(number(low)), len(number(high)))
    epochs = sorted({epoch for epoch, _ in shown})
    n = max(1, min(width - left - 3, _MOST_COLUMNS_AN_EPOCH * (epochs[-1] - epochs[0]) + 1))
    canvas = [[" "] * n for _ in range(height)]
    for curve, mark in ((others, OTHERS), (own, OWN)):
        for epoch, value in finite(curve):
            across = _place(epoch, epochs[0], epochs[-1], n)
            up = _place(as_drawn(value), as_drawn(low), as_drawn(high), height)
            canvas[height - 1 - up][across] = mark
    labels = {0: number(high), height - 1: number(low) if low < high else ""}
    rows = [f"{labels.get(i, ''):>{left}} |{''.join(row)}".rstrip()
            for i, row in enumerate(canvas)]
    first, last = str(epochs[0]), str(epochs[-1])
    axis = first + (last.rjust(n - len(first)) if n > len(first) + len(last) else "")
    return [*rows, f"{'epoch':>{left}}  {axis}"]


def _place(value: float, low: float, high: float, n: int) -> int:
    return 0 if high <= low else round((value - low) / (high - low) * (n - 1))
