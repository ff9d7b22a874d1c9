"""Learning curves: every trial's metric over its epochs, and where pruning cut it short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hpo.axes import best_half, draw_chance, every, finite, limit, thinned, with_chance
from hpo.plots.figure import COLOURS, FAINT, INK, SOFT, new, styled
from hpo.results import Results, Trial
from hpo.verdict import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of more trials than this only some are drawn: nobody tells more lines apart.
_N_LINES = 300


@styled
def curves(results: Results, shares: Mapping[str, float] | None = None) -> Figure | None:
    """Draw every trial's metric over its epochs; a cross marks where a trial was cut short."""
    phase = next((p for p in ("search", "grid") if _with_curves(results, p)), None)
    if phase is None:
        return None
    from matplotlib.ticker import MaxNLocator

    trials = _with_curves(results, phase)
    drawn = thinned(trials, _N_LINES)
    figure = new(4.2)
    axes = figure.subplots()
    for trial in sorted(drawn, key=lambda t: t.state == "COMPLETE"):
        _draw_curve(axes, trial, COLOURS[phase], len(drawn))
    values = [v for t in trials for _, v in finite(t.curve)]
    # Of a pruned trial too: how far it came.
    best_of = max if results.maximize else min
    scores = [best_of(v for _, v in finite(t.curve)) for t in trials]
    shown = best_half(scores, values, results.maximize)
    limit([axes], with_chance(shown, results.chance), results.highest)
    draw_chance(axes, results.chance)
    best = results.best(phase)
    if best and finite(best.curve):
        _draw_best(axes, best, COLOURS[phase], results.maximize)
    axes.set_ylabel(results.metric)
    axes.set_xlabel("epoch" + _left_out(trials, axes.get_ylim()))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(f"Learning curves of the {phase}'s trials{every(trials, drawn, 'drawn')}")
    _explain(axes, results, phase)
    return figure


def _with_curves(results: Results, phase: str) -> list[Trial]:
    return [t for t in results.phase(phase).trials if finite(t.curve)]


def _draw_curve(axes: Axes, trial: Trial, colour: str, n: int) -> None:
    xs, ys = zip(*finite(trial.curve), strict=True)
    complete = trial.state == "COMPLETE"
    # Two hundred lines at full strength are a blot.
    alpha = min(0.75, max(0.15, 12 / n)) if complete else 0.6
    axes.plot(xs, ys, color=colour if complete else FAINT, lw=1.1 if complete else 0.8,
              alpha=alpha, marker="." if len(xs) == 1 else None)
    if trial.state == "PRUNED":
        axes.plot(xs[-1], ys[-1], "x", color=SOFT, ms=5, mew=1.1)
    elif trial.state == "FAIL":
        axes.plot(xs[-1], ys[-1], "v", color=INK, ms=5, mew=0)


def _left_out(trials: Sequence[Trial], limits: tuple[float, float]) -> str:
    """Say how many trials lie outside of the axis, in whole or in part."""
    low, high = limits
    inside = [[low <= v <= high for _, v in finite(t.curve)] for t in trials]
    whole = sum(not any(one) for one in inside)
    part = sum(any(one) and not all(one) for one in inside)
    said = [f"{n} {'trial' if n == 1 else 'trials'} {how}"
            for n, how in ((whole, "wholly"), (part, "in part")) if n]
    if not said:
        return ""
    below = any(v < low for t in trials for _, v in finite(t.curve))
    above = any(v > high for t in trials for _, v in finite(t.curve))
    where = [f"{side} {edge:.3g}" for side, edge, cut in (
        ("below", low, below), ("above", high, above)) if cut]
    return f"  ({' and '.join(where)}, not shown: {', '.join(said)})"


def _draw_best(axes: Axes, best: Trial, colour: str, maximize: bool) -> None:
    """Draw the best trial's curve with a mark at its best epoch, which is its value."""
    xs, ys = zip(*finite(best.curve), strict=True)
    axes.plot(xs, ys, color=colour, lw=2.6)
    top = ys.index(max(ys) if maximize else min(ys))
    axes.plot(xs[top], ys[top], "o", color=colour, ms=9, mec="white", mew=1.5, zorder=5)
    low, high = axes.get_ylim()
    axes.annotate(f"best: trial {best.number}\n{number(ys[top])}\nat epoch {xs[top]} (●)",
                  (xs[-1], min(max(ys[-1], low), high)), xytext=(8, 0), color=colour,
                  textcoords="offset points", va="center", fontweight="bold", fontsize=9,
                  annotation_clip=False)


def _explain(axes: Axes, results: Results, phase: str) -> None:
    """Say above the axes what the marks mean and how many there are of each."""
    states = results.phase(phase).states()
    said = [f"{states[s]} {word}" for s, word in (
        ("COMPLETE", "complete"), ("PRUNED", "pruned (×, grey)"), ("FAIL", "failed (▼)"),
        ("RUNNING", "running (grey)")) if states.get(s)]
    axes.text(1.0, 1.02, "  ·  ".join(said), transform=axes.transAxes, ha="right", va="bottom",
              fontsize=9, color=SOFT)
