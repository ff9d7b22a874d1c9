"""The LR range test: loss over learning rate, the pick, and the interval around it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpo.axes import loss_limits, plain_log
from hpo.plots.figure import COLOURS, FAINT, INK, SOFT, new, styled
from hpo.results import Results, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def lr_range(results: Results, shares: Mapping[str, float] | None = None) -> Figure | None:
    """Draw the loss over the learning rate, with the pick and the interval around it."""
    if results.sweep is None or not results.sweep.has_curve:
        return None
    return sweep_figure(results.sweep)


@styled
def sweep_figure(sweep: Sweep) -> Figure:
    """Draw the LR range sweeps: each seed's loss, their mean, the pick, its error and interval."""
    figure = new(3.8)
    axes = figure.subplots()
    axes.set_xscale("log")
    for losses in sweep.by_seed or (sweep.losses,):
        axes.plot(sweep.rates[:len(losses)], losses, color=FAINT, lw=0.9, alpha=0.8)
    smooth = sweep.losses if sweep.by_seed else sweep.smoothed or sweep.losses
    axes.plot(sweep.rates[:len(smooth)], smooth, color=COLOURS["search"], lw=2.2)
    low, top = loss_limits(smooth)
    axes.set_ylim(low, top)
    shown = [r for r, loss in zip(sweep.rates, smooth, strict=False) if loss <= top]
    axes.set_xlim(sweep.rates[0], max(shown) * 1.6)
    plain_log(axes.xaxis)
    axes.set_ylabel("training loss")
    axes.set_xlabel("learning rate")
    _draw_pick(axes, sweep)
    return figure


def _draw_pick(axes: Axes, sweep: Sweep) -> None:
    """Mark the pick and its interval, and name them, or why there is none, above the curves."""
    colour, said = COLOURS["lr-range"], sweep.reason or "no reason was stored"
    if sweep.pick is not None:
        axes.axvline(sweep.pick, color=colour, lw=1.8)
        said = f"pick {sweep.pick:.2g} (line)"
        if sweep.error is not None:
            axes.axvspan(sweep.pick / 10 ** sweep.error, sweep.pick * 10 ** sweep.error,
                         color=colour, alpha=0.22, lw=0)
            said += " ± one standard error"
        if sweep.low is not None and sweep.high is not None:
            axes.axvspan(sweep.low, sweep.high, color=colour, alpha=0.13, lw=0)
            said += f", sensible between {sweep.low:.2g} and {sweep.high:.2g} (band)"
        if sweep.edge is not None:
            axes.axvline(sweep.edge, color="#555555", lw=1.2, ls=":")
            said += f", edge {sweep.edge:.2g} (dots)"
    lines = textwrap.wrap(said, 88)
    above = 6 + 12 * len(lines)
    axes.set_title("LR range test" if sweep.pick is not None else "LR range test: no pick",
                   pad=above)
    place: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom",
                  "fontsize": 9}
    axes.annotate("\n".join(lines), (0, 1), xytext=(0, 4), fontweight="bold",
                  color=INK if sweep.pick is None else colour, **place)
    meaning = "grey: each seed  ·  blue: their mean" if sweep.by_seed else (
        "grey: each step  ·  blue: smoothed")
    axes.annotate(meaning, (1, 1), xytext=(0, above), ha="right",
                  color=SOFT, **place)
