"""Pictures of a study as PNG files, drawn without a display.

Each function draws one picture and says whether there was anything to draw. Colours are Okabe and
Ito's, which colour-blind readers can tell apart; names stand at their lines, not in a legend.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.axes import draw_chance, finite, limit, plain_log, spread, wants_log, with_chance
from hpo.results import SOURCES, Results, Scores, Sweep, Trial, best_so_far
from hpo.verdict import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito 2008, https://jfly.uni-koeln.de/color/ ; grid is their vermilion, which reads
# better as text on white than their orange.
COLOURS = {"search": "#0072B2", "grid": "#D55E00", "lr-range": "#009E73", "default": "#555555"}
NAMES = {"search": "search", "grid": "grid", "lr-range": "LR pick", "default": "defaults"}
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
# A level this many times farther from the best than the next farthest is left off the axis and
# pointed at: it would squeeze all that a reader wants to compare into one line.
_FAR = 4.0


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
    """Draw each phase's best value over its epochs spent, and beside it what was confirmed."""
    steps = {phase: best_so_far(results, phase) for phase in SOURCES[:3]}
    steps = {phase: found for phase, found in steps.items() if found}
    confirmed = {source: candidate.val for source in SOURCES
                 if (candidate := results.candidate(source)) and candidate.val}
    if not steps and not confirmed:
        return False
    with _figure(path, 4.2) as figure:
        widths = [1.9, 1.0] if confirmed and steps else [1.0]
        panels = figure.subplots(1, len(widths), sharey=True, width_ratios=widths,
                                 squeeze=False)[0]
        limit(panels[0], with_chance(_compared(steps, confirmed), results.chance))
        if steps:
            _draw_steps(panels[0], results, steps, confirmed.get("default"))
        if confirmed:
            _draw_confirmed(panels[-1], confirmed)
        for panel in panels:
            draw_chance(panel, results.chance, label=panel is panels[0])
        panels[0].set_ylabel(results.metric)
    return True


def _compared(steps: dict[str, Any], confirmed: dict[str, Scores]) -> list[float]:
    """Return what the y axis must show: levels, seeds with error bars, later improvements."""
    levels = {phase: [found[-1][1]] for phase, found in steps.items()}
    for source, scores in confirmed.items():
        levels.setdefault(source, []).append(scores.mean)
    near = _without_far(levels)
    seeds = [v for s, scores in confirmed.items() if s in near
             for v in (*scores.by_seed.values(), *_bar(scores))]
    late = [v for p, found in steps.items() if p in near for _, v in found[len(found) // 2:]]
    return [v for source in near for v in levels[source]] + seeds + late


def _bar(scores: Scores) -> tuple[float, float]:
    """Return both ends of the mean's error bar; where no score is below 0, neither is its end."""
    low, high = scores.mean - (scores.sd or 0.0), scores.mean + (scores.sd or 0.0)
    least = min(scores.by_seed.values())
    # An end below zero would take the logarithms from losses that need them.
    return (least if low <= 0 < least else low), high


def _without_far(levels: dict[str, list[float]]) -> list[str]:
    """Return the sources but the one that lies far from all others, if there is such a one."""
    first = next(iter(levels.values()))[0]
    far = {source: max(abs(v - first) for v in values) for source, values in levels.items()}
    order = sorted(far, key=lambda source: far[source])
    if len(order) >= 3 and far[order[-1]] > _FAR * far[order[-2]] > 0:
        return order[:-1]
    return order


def _draw_steps(
    axes: Axes, results: Results, steps: dict[str, Any], defaults: Scores | None
) -> None:
    end = max(results.phase(phase).n_epochs for phase in steps)
    if wants_log([found[0][0] for found in steps.values()] + [end]):
        axes.set_xscale("log")
    labels = [(NAMES[p], found[-1][1], COLOURS[p]) for p, found in steps.items()]
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
    axes.set_title("Best so far, one seed each", fontsize=10)
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


def _draw_confirmed(axes: Axes, confirmed: dict[str, Scores]) -> None:
    for x, (source, scores) in enumerate(confirmed.items()):
        colour = COLOURS[source]
        beside = [x - 0.22] * scores.n
        axes.plot(beside, list(scores.by_seed.values()), "o", ms=4, color=colour, alpha=0.4, mew=0)
        axes.errorbar(x, scores.mean, yerr=scores.sd, color=colour, marker="D", ms=5, capsize=4,
                      lw=1.6)
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
    axes.set_title("Fresh seeds: mean ± sd", fontsize=10)


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
        values = sorted(v for t in trials for _, v in finite(t.curve))
        limit(axes, with_chance(_usual(values), results.chance))
        draw_chance(axes, results.chance)
        best = results.best(phase)
        if best and finite(best.curve):
            _draw_best(axes, best, COLOURS[phase])
        axes.set_ylabel(results.metric)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(f"Learning curves of the {phase}'s trials")
        _explain(axes, results, phase)
    return True


def _with_curves(results: Results, phase: str) -> list[Trial]:
    return [t for t in results.phase(phase).trials if finite(t.curve)]


def _usual(ordered: list[float]) -> list[float]:
    """Leave out the wildest twentieth at each end: one loss of 1e6 would hide all others."""
    cut = len(ordered) // 20
    # A best value is the point of the picture, and lies at one of the ends.
    middle = ordered[cut:len(ordered) - cut]
    spread = middle[-1] - middle[0]
    return [v for v in ordered if middle[0] - spread / 2 <= v <= middle[-1] + spread / 2]


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


def _draw_best(axes: Axes, best: Trial, colour: str) -> None:
    xs, ys = zip(*finite(best.curve), strict=True)
    axes.plot(xs, ys, color=colour, lw=2.6, marker="o" if len(xs) == 1 else None)
    axes.annotate(f"#{best.number} best", (xs[-1], ys[-1]), xytext=(6, 0), color=colour,
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
        axes.plot(sweep.rates[:len(sweep.losses)], sweep.losses, color=_FAINT, lw=0.9, alpha=0.8)
        smooth = sweep.smoothed or sweep.losses
        axes.plot(sweep.rates[:len(smooth)], smooth, color=COLOURS["search"], lw=2.2)
        low, top = _loss_limits(smooth)
        axes.set_ylim(low, top)
        shown = [r for r, loss in zip(sweep.rates, smooth, strict=False) if loss <= top]
        axes.set_xlim(sweep.rates[0], max(shown) * 1.6)
        axes.set_ylabel("training loss")
        axes.set_xlabel("learning rate")
        if sweep.pick is not None:
            _draw_pick(axes, sweep)
            axes.set_title("LR range test")
        else:
            axes.set_title("LR range test: no pick")
            axes.text(0.02, 0.95, "\n".join(textwrap.wrap(sweep.reason, 90)), va="top",
                      transform=axes.transAxes, fontweight="bold", fontsize=9)
        axes.text(1.0, 1.02, "grey: each step  ·  blue: smoothed", transform=axes.transAxes,
                  ha="right", va="bottom", fontsize=9, color="#555555")


def _loss_limits(losses: Sequence[float]) -> tuple[float, float]:
    """Cut off the explosion at the end: a little above where the sweep began is enough."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    low, start = min(finite), finite[0]
    top = min(max(finite), max(start, sorted(finite)[len(finite) // 2]) * 1.5)
    air = (top - low) * 0.08 or 0.1
    return low - air, top + air


def _draw_pick(axes: Axes, sweep: Sweep) -> None:
    assert sweep.pick is not None
    colour = COLOURS["lr-range"]
    if sweep.low is not None and sweep.high is not None:
        axes.axvspan(sweep.low, sweep.high, color=colour, alpha=0.13, lw=0)
    axes.axvline(sweep.pick, color=colour, lw=1.8)
    said = f"pick {sweep.pick:.2g}"
    if sweep.low is not None and sweep.high is not None:
        said += f"\n{sweep.low:.2g} to {sweep.high:.2g}"
    low, high = axes.get_xlim()
    right = math.log(sweep.pick / low) < 0.7 * math.log(high / low)
    axes.annotate(said, (sweep.pick, 0.97), xycoords=("data", "axes fraction"), color=colour,
                  xytext=(6 if right else -6, 0), textcoords="offset points", va="top",
                  ha="left" if right else "right", fontweight="bold")


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
