"""Pictures of a study as PNG files, drawn without a display.

Each function draws one picture and says whether there was anything to draw. Colours are Okabe and
Ito's, which colour-blind readers can tell apart; names stand at their lines, not in a legend.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.axes import (
    best_half,
    draw_chance,
    error_bar,
    finite,
    limit,
    loss_limits,
    plain_log,
    spread,
    wants_log,
    with_chance,
    without_far,
)
from hpo.results import SOURCES, Results, Scores, Sweep, Trial, best_so_far
from hpo.verdict import number, on_test_split

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito 2008, https://jfly.uni-koeln.de/color/ ; grid is their vermilion, which reads
# better as text on white than their orange.
COLOURS = {"search": "#0072B2", "grid": "#D55E00", "random": "#CC79A7", "lr-range": "#009E73",
           "default": "#555555"}
NAMES = {"search": "search", "grid": "grid", "random": "random", "lr-range": "LR pick",
         "default": "defaults"}
_INK, _FAINT = "#222222", "#9a9a9a"
# 8 inches at 200 dots are 1600 pixels: sharp at twice the width of a README's column.
_WIDTH, _DPI = 8.0, 200
_STYLE: Any = {
    "font.size": 10, "axes.edgecolor": "#888888", "axes.labelcolor": _INK, "text.color": _INK,
    "xtick.color": "#555555", "ytick.color": "#555555", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8, "axes.axisbelow": True, "axes.titlesize": 11,
    "axes.titlelocation": "left", "axes.titleweight": "bold", "figure.dpi": 100,
    "font.family": "DejaVu Sans", "lines.solid_capstyle": "round",
}


@contextmanager
def _figure(path: Path, height: float) -> Iterator[Figure]:
    """Give a figure, and save it to `path`: written aside and renamed, so never half a picture."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        aside = path.with_name(f".{path.name}.{os.getpid()}.part")
        figure.savefig(aside, format="png", dpi=_DPI, facecolor="white")
        aside.replace(path)


def draw_all(results: Results, folder: Path, importance: dict[str, float] | None) -> list[Path]:
    """Draw every picture there is data for and return their paths; remove the stale others."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, draw in _PICTURES.items():
        path = folder / name
        if draw(results, path, importance):
            drawn.append(path)
        else:
            path.unlink(missing_ok=True)
    return drawn


# Best so far over epochs spent


def progress(results: Results, path: Path, importance: Any = None) -> bool:
    """Draw each phase's best value over its epochs spent, and beside it what was confirmed.

    What was confirmed is shown as the verdict compares it: on the test split where there is one.
    """
    steps = {phase: best_so_far(results, phase) for phase in SOURCES if phase != "default"}
    steps = {phase: found for phase, found in steps.items() if found}
    tested = on_test_split(results)
    confirmed = {source: scores for source in SOURCES
                 if (candidate := results.candidate(source))
                 and (scores := candidate.test if tested else candidate.val)}
    if not steps and not confirmed:
        return False
    with _figure(path, 4.2) as figure:
        widths = [1.9, 1.0] if confirmed and steps else [1.0]
        panels = figure.subplots(1, len(widths), sharey=True, width_ratios=widths,
                                 squeeze=False)[0]
        defaults = results.candidate("default")
        shown = _compared(steps, confirmed, defaults and defaults.val)
        limit(panels, with_chance(shown, results.chance), results.highest)
        if steps:
            _draw_steps(panels[0], results, steps, defaults and defaults.val)
        if confirmed:
            _draw_confirmed(panels[-1], confirmed, results.highest)
            panels[-1].set_title(f"Fresh seeds, {'test split' if tested else 'validation'}",
                                 fontsize=10)
        for panel in panels:
            draw_chance(panel, results.chance, label=panel is panels[0])
        panels[0].set_ylabel(results.metric)
    return True


def _compared(
    steps: dict[str, Any], confirmed: dict[str, Scores], defaults: Scores | None
) -> list[float]:
    """Return what the y axis must show: levels, seeds with error bars, later improvements."""
    levels = {phase: [found[-1][1]] for phase, found in steps.items()}
    for source, scores in confirmed.items():
        levels.setdefault(source, []).append(scores.mean)
    if defaults and steps:
        levels.setdefault("default", []).append(defaults.mean)
    near = without_far(levels)
    seeds = [v for s, scores in confirmed.items() if s in near
             for v in (*scores.by_seed.values(), *error_bar(scores))]
    late = [v for p, found in steps.items() if p in near for _, v in found[len(found) // 2:]]
    return [v for source in near for v in levels[source]] + seeds + late


def _draw_steps(
    axes: Axes, results: Results, steps: dict[str, Any], defaults: Scores | None
) -> None:
    end = max(results.phase(phase).n_epochs for phase in steps)
    if wants_log([found[0][0] for found in steps.values()] + [end]):
        axes.set_xscale("log")
    labels = tied([(NAMES[p], found[-1][1], COLOURS[p]) for p, found in steps.items()])
    for phase, found in steps.items():
        colour, spent = COLOURS[phase], results.phase(phase).n_epochs
        _dots(axes, results, phase)
        xs, ys = zip(*found, (spent, found[-1][1]), strict=True)
        axes.step(xs, ys, where="post", color=colour, lw=2.2 if phase == "search" else 1.8)
        axes.plot([spent, end], [ys[-1]] * 2, color=colour, lw=1, ls=(0, (2, 3)))
        axes.plot(xs[-1], ys[-1], "o", ms=4, color=colour)
    if defaults is not None:
        axes.axhline(defaults.mean, color=COLOURS["default"], lw=1, ls=(0, (2, 3)))
        labels.append((NAMES["default"], defaults.mean, COLOURS["default"]))
    if axes.get_xscale() == "log":
        plain_log(axes.xaxis)
    else:
        axes.set_xlim(0, end * 1.03)
    apart = f"; defaults: mean of {defaults.n}" if defaults and defaults.n > 1 else ""
    axes.set_title(f"Best so far, one seed each{apart}", fontsize=10)
    axes.set_xlabel("epochs spent, pruned and failed trials included")
    _label_levels(axes, labels)


def _dots(axes: Axes, results: Results, phase: str) -> None:
    spent, xs, ys = results.phase(phase).sweep_epochs, [], []
    for trial in results.phase(phase).by_end():
        spent += trial.n_epochs
        if trial.score is not None:
            xs.append(spent)
            ys.append(trial.score)
    axes.plot(xs, ys, "o", ms=3, color=COLOURS[phase], alpha=0.25, mew=0)


def tied(labels: Sequence[tuple[str, float, str]]) -> list[tuple[str, float, str]]:
    """Return (name, value, colour) with equal values under one name, `search = grid`."""
    merged: dict[float, tuple[str, str]] = {}
    for name, value, colour in labels:
        merged[value] = (f"{merged[value][0]} = {name}", _INK) if value in merged \
            else (name, colour)
    return [(name, value, colour) for value, (name, colour) in merged.items()]


def _label_levels(axes: Axes, labels: Sequence[tuple[str, float, str]]) -> None:
    """Write each name and value at the right edge, moved apart; an arrow where it lies outside."""
    to_axes = axes.transData + axes.transAxes.inverted()
    x = axes.get_xlim()[1]
    wanted = [float(to_axes.transform((x, value))[1]) for _, value, _ in labels]
    places = spread(wanted, 0.115, 0.045, 0.955)
    for (name, value, colour), want, y in zip(labels, wanted, places, strict=True):
        arrow = " ↓" if want < 0 else " ↑" if want > 1 else ""
        axes.text(1.015, y, f"{name}{arrow}\n{number(value)}", color=colour,
                  transform=axes.transAxes, va="center", fontsize=9, linespacing=1.05)


def _draw_confirmed(axes: Axes, confirmed: dict[str, Scores], highest: float | None) -> None:
    for x, (source, scores) in enumerate(confirmed.items()):
        colour = COLOURS[source]
        beside = [x - 0.22] * scores.n
        axes.plot(beside, list(scores.by_seed.values()), "o", ms=4, color=colour, alpha=0.4, mew=0)
        sd = scores.sd or 0.0
        above = sd if highest is None else min(sd, highest - scores.mean)
        axes.errorbar(x, scores.mean, yerr=((sd,), (above,)) if sd else None, color=colour,
                      marker="D", ms=5, capsize=4, lw=1.6)
        low, high = axes.get_ylim()
        if not low <= scores.mean <= high:
            down = scores.mean < low
            axes.annotate("↓" if down else "↑", (x, low if down else high), color=colour,
                          ha="center", va="bottom" if down else "top", fontsize=11)
    axes.set_xticks(range(len(confirmed)), [NAMES[s].replace(" ", "\n") for s in confirmed],
                    fontsize=9)
    for tick, source in zip(axes.get_xticklabels(), confirmed, strict=True):
        tick.set_color(COLOURS[source])
    axes.set_xlim(-0.6, len(confirmed) - 0.4)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="x", visible=False)
    n_seeds = {scores.n for scores in confirmed.values()}
    axes.set_xlabel("mean ± sd" + (f" of {n_seeds.pop()} seeds" if len(n_seeds) == 1 else ""))


# Learning curves


def curves(results: Results, path: Path, importance: Any = None) -> bool:
    """Draw every trial's metric over its epochs; a cross marks where a trial was cut short."""
    phase = next((p for p in ("search", "grid") if _with_curves(results, p)), None)
    if phase is None:
        return False
    from matplotlib.ticker import MaxNLocator

    trials = _with_curves(results, phase)
    with _figure(path, 4.2) as figure:
        axes = figure.subplots()
        for trial in sorted(trials, key=lambda t: t.state == "COMPLETE"):
            _draw_curve(axes, trial, COLOURS[phase], len(trials))
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
        axes.set_title(f"Learning curves of the {phase}'s trials")
        _explain(axes, results, phase)
    return True


def _with_curves(results: Results, phase: str) -> list[Trial]:
    return [t for t in results.phase(phase).trials if finite(t.curve)]


def _draw_curve(axes: Axes, trial: Trial, colour: str, n: int) -> None:
    xs, ys = zip(*finite(trial.curve), strict=True)
    complete = trial.state == "COMPLETE"
    # Two hundred lines at full strength are a blot.
    alpha = min(0.75, max(0.15, 12 / n)) if complete else 0.6
    axes.plot(xs, ys, color=colour if complete else _FAINT, lw=1.1 if complete else 0.8,
              alpha=alpha, marker="." if len(xs) == 1 else None)
    if trial.state == "PRUNED":
        axes.plot(xs[-1], ys[-1], "x", color="#555555", ms=5, mew=1.1)
    elif trial.state == "FAIL":
        axes.plot(xs[-1], ys[-1], "v", color=_INK, ms=5, mew=0)


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
              fontsize=9, color="#555555")


# LR range


def lr_range(results: Results, path: Path, importance: Any = None) -> bool:
    """Draw the loss over the learning rate, with the pick and the interval around it."""
    if results.sweep is None or not results.sweep.has_curve:
        return False
    draw_sweep(results.sweep, path)
    return True


def draw_sweep(sweep: Sweep, path: Path) -> None:
    """Draw one LR range sweep: raw loss, smoothed loss, pick and interval."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _figure(path, 3.8) as figure:
        axes = figure.subplots()
        axes.set_xscale("log")
        for losses in sweep.by_seed or (sweep.losses,):
            axes.plot(sweep.rates[:len(losses)], losses, color=_FAINT, lw=0.9, alpha=0.8)
        smooth = sweep.losses if sweep.by_seed else sweep.smoothed or sweep.losses
        axes.plot(sweep.rates[:len(smooth)], smooth, color=COLOURS["search"], lw=2.2)
        low, top = loss_limits(smooth)
        axes.set_ylim(low, top)
        shown = [r for r, loss in zip(sweep.rates, smooth, strict=False) if loss <= top]
        axes.set_xlim(sweep.rates[0], max(shown) * 1.6)
        axes.set_ylabel("training loss")
        axes.set_xlabel("learning rate")
        _draw_pick(axes, sweep)


def _draw_pick(axes: Axes, sweep: Sweep) -> None:
    """Mark the pick and its interval, and name them, or why there is none, above the curves."""
    colour, said = COLOURS["lr-range"], sweep.reason or "no reason was stored"
    if sweep.pick is not None:
        axes.axvline(sweep.pick, color=colour, lw=1.8)
        said = f"pick {sweep.pick:.2g} (line)"
        if sweep.low is not None and sweep.high is not None:
            axes.axvspan(sweep.low, sweep.high, color=colour, alpha=0.13, lw=0)
            if sweep.error is not None:
                axes.axvspan(sweep.pick / 10 ** sweep.error, sweep.pick * 10 ** sweep.error,
                             color=colour, alpha=0.22, lw=0)
                said += " ± one standard error"
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
                  color=_INK if sweep.pick is None else colour, **place)
    meaning = "grey: each seed  ·  blue: their mean" if sweep.by_seed else (
        "grey: each step  ·  blue: smoothed")
    axes.annotate(meaning, (1, 1), xytext=(0, above), ha="right",
                  color="#555555", **place)


# Importances


def importances(results: Results, path: Path, importance: dict[str, float] | None) -> bool:
    """Draw how much each param mattered for getting among the best trials."""
    if not importance:
        return False
    names = sorted(importance, key=lambda name: importance[name])
    with _figure(path, 0.9 + 0.36 * len(names)) as figure:
        axes = figure.subplots()
        bars = axes.barh(names, [importance[n] for n in names], color=COLOURS["search"],
                         height=0.62)
        axes.bar_label(bars, [f"{importance[n]:.0%}" for n in names], padding=5)
        axes.set_xlim(0, max(importance.values()) * 1.1 or 1.0)
        axes.set_xticks([])
        axes.tick_params(axis="y", length=0, labelcolor=_INK)
        axes.grid(visible=False)
        axes.spines[["bottom"]].set_visible(False)
        axes.set_title("Importance of each param for the search's result")
    return True


_PICTURES: dict[str, Callable[[Results, Path, dict[str, float] | None], bool]] = {
    "progress.png": progress, "curves.png": curves, "lr_range.png": lr_range,
    "importance.png": importances,
}
PICTURES = tuple(_PICTURES)
