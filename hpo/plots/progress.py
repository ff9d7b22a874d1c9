"""The best value so far over the epochs spent, and beside it what fresh seeds confirmed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpo.axes import (
    draw_chance,
    error_bar,
    limit,
    plain_log,
    spread,
    thinned,
    wants_log,
    with_chance,
    without_far,
)
from hpo.plots.figure import COLOURS, INK, NAMES, new, styled
from hpo.progress import band, best_so_far
from hpo.results import SOURCES, Results, Scores
from hpo.verdict import number, on_test_split

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# More dots are a blot, and a page of them is slow.
_N_DOTS = 400


@styled
def progress(results: Results, shares: Mapping[str, float] | None = None) -> Figure | None:
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
        return None
    figure = new(4.2)
    widths = [1.9, 1.0] if confirmed and steps else [1.0]
    panels = figure.subplots(1, len(widths), sharey=True, width_ratios=widths, squeeze=False)[0]
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
    return figure


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
        _draw_band(axes, results, phase)
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


def _draw_band(axes: Axes, results: Results, phase: str) -> None:
    """Shade where a baseline's best would stand had other trials of its kind been drawn."""
    found = band(results, phase)
    if found is None:
        return
    known = [(epochs, low, high) for epochs, low, high in
             zip(found.epochs, found.low, found.high, strict=True)
             if low is not None and high is not None]
    if known:
        xs, lows, highs = zip(*known, strict=True)
        axes.fill_between(xs, lows, highs, step="post", color=COLOURS[phase], alpha=0.13, lw=0)


def _dots(axes: Axes, results: Results, phase: str) -> None:
    spent, xs, ys = results.phase(phase).sweep_epochs, [], []
    for trial in results.phase(phase).by_end():
        spent += trial.n_epochs
        if trial.score is not None:
            xs.append(spent)
            ys.append(trial.score)
    xs, ys = thinned(xs, _N_DOTS), thinned(ys, _N_DOTS)
    axes.plot(xs, ys, "o", ms=3, color=COLOURS[phase], alpha=0.25, mew=0)


def tied(labels: Sequence[tuple[str, float, str]]) -> list[tuple[str, float, str]]:
    """Return (name, value, colour) with equal values under one name, `search = grid`."""
    merged: dict[float, tuple[str, str]] = {}
    for name, value, colour in labels:
        merged[value] = (f"{merged[value][0]} = {name}", INK) if value in merged \
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
