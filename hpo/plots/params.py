"""What the params did: how much each mattered, and which values went with which result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpo.axes import every, thinned
from hpo.plots.figure import COLOURS, FAINT, INK, SOFT, new, styled
from hpo.plots.scale import Scale
from hpo.results import Results, Trial
from hpo.verdict import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# More axes than this leave no room for their names.
_N_AXES = 9
_N_LINES = 300


@styled
def importances(
    results: Results, shares: Mapping[str, float] | None = None
) -> Figure | None:
    """Draw how much each param mattered for getting among the best trials."""
    if not shares:
        return None
    names = sorted(shares, key=lambda name: shares[name])
    figure = new(0.9 + 0.36 * len(names))
    axes = figure.subplots()
    bars = axes.barh(names, [shares[n] for n in names], color=COLOURS["search"], height=0.62)
    axes.bar_label(bars, [f"{shares[n]:.0%}" for n in names], padding=5)
    axes.set_xlim(0, max(shares.values()) * 1.1 or 1.0)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.grid(visible=False)
    axes.spines[["bottom"]].set_visible(False)
    axes.set_title("Importance of each param for the search's result")
    return figure


@styled
def parallel(results: Results, shares: Mapping[str, float] | None = None) -> Figure | None:
    """Draw each trial of the search as a line through its params' values to its score.

    The most important params are nearest to the score. A pruned trial has no score: its line
    ends before.
    """
    trials = [t for t in results.phase("search").trials
              if t.params and (t.score is not None or t.state == "PRUNED")]
    names = _names(trials, shares)
    if not names or sum(t.score is not None for t in trials) < 2:
        return None
    drawn = list(thinned(trials, _N_LINES))
    best = results.best("search")
    if best is not None and best not in drawn:
        drawn.append(best)
    figure = new(4.4)
    axes = figure.subplots()
    scales = [Scale.of_param(name, trials) for name in names]
    score = Scale.of_scores(results)
    for trial, look in _looks(results, drawn):
        ys = [scale.at(trial.params.get(name)) for scale, name in zip(scales, names, strict=True)]
        if trial.score is not None:
            ys.append(score.at(trial.score))
        axes.plot(range(len(ys)), ys, **look)
    _draw_axes(axes, [*names, results.metric], [*scales, score])
    all_of = every(trials, drawn, "drawn") if len(drawn) < len(trials) else ""
    left = len({name for t in trials for name in t.params}) - len(names)
    more = f", {left} less important params left out" if left else ""
    axes.set_title(f"Params and score of the search's trials{all_of}{more}")
    _explain(axes, results, trials)
    return figure


def _names(trials: Sequence[Trial], shares: Mapping[str, float] | None) -> list[str]:
    """Return the params to show, the most important last, those that never vary left out."""
    names = list(dict.fromkeys(name for t in trials for name in t.params))
    names = [name for name in names
             if len({repr(t.params[name]) for t in trials if name in t.params}) > 1]
    ranked = sorted(names, key=lambda name: (shares or {}).get(name, 0.0))
    return ranked[-_N_AXES:]


def _looks(results: Results, trials: Sequence[Trial]) -> list[tuple[Trial, dict[str, Any]]]:
    """Return how each line is drawn: pruned ones faint and first, the best one bold and last."""
    sign = -1.0 if results.maximize else 1.0
    whole = sorted((t for t in trials if t.score is not None),
                   key=lambda t: sign * (t.score or 0.0), reverse=True)
    n_top = _n_top(len(whole))
    looks: list[tuple[Trial, dict[str, Any]]] = [
        (t, {"color": FAINT, "lw": 0.7, "alpha": 0.5}) for t in trials if t.score is None]
    for i, trial in enumerate(whole):
        top = i >= len(whole) - n_top
        looks.append((trial, {"color": COLOURS["search"], "lw": 1.4 if top else 0.9,
                              "alpha": 0.9 if top else 0.3}))
    best = results.best("search")
    looks.append((best or whole[-1], {"color": COLOURS["grid"], "lw": 2.4}))
    return looks


def _n_top(n_whole: int) -> int:
    return max(1, round(n_whole / 10))


def _draw_axes(axes: Axes, names: Sequence[str], scales: Sequence[Scale]) -> None:
    """Draw one upright axis for each name, with its ticks on paper of their own."""
    paper: Any = {"facecolor": "white", "alpha": 0.8, "pad": 0.8, "lw": 0}
    for x, scale in enumerate(scales):
        axes.plot([x, x], [0, 1], color="#888888", lw=1, zorder=3)
        for place, label in scale.ticks():
            axes.plot([x - 0.02, x + 0.02], [place, place], color="#888888", lw=1, zorder=3)
            axes.annotate(label, (x, place), xytext=(5, 0), textcoords="offset points",
                          fontsize=8, color=SOFT, va="center", bbox=paper, zorder=4)
    # Of many, every second name stands one line higher.
    apart = [f"{name}\n" if len(names) > 5 and not x % 2 else name for x, name in enumerate(names)]
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(names)), apart, fontsize=9, color=INK)
    axes.get_xticklabels()[-1].set_fontweight("bold")
    axes.tick_params(length=0)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_xlim(-0.1, len(names) - 1 + 0.4)
    axes.set_ylim(-0.03, 1.03)


def _explain(axes: Axes, results: Results, trials: Sequence[Trial]) -> None:
    n_pruned = sum(t.score is None for t in trials)
    n_whole = len(trials) - n_pruned
    best = results.best("search")
    said = [f"orange: the best, trial {best.number} ({number(best.score or 0.0)})"
            if best else "", "blue: the best tenth" if _n_top(n_whole) > 1 else "",
            "light: other complete ones",
            f"grey: {n_pruned} pruned, without an end" if n_pruned else ""]
    axes.set_xlabel("  ·  ".join(filter(None, said)), fontsize=8.5, color=SOFT)
