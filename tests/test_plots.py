"""Pictures are drawn for what there is, whole and legible, and for nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import study_samples as samples
from matplotlib.collections import FillBetweenPolyCollection
from PIL import Image

from hpo import plots
from hpo.axes import (
    best_half,
    draw_chance,
    error_bar,
    limit,
    spread,
    with_chance,
    without_far,
)
from hpo.progress import band
from hpo.results import Phase, Sweep, Trial

SHARES = {"lr": 0.7, "weight_decay": 0.2, "dropout": 0.1, "hidden": 0.0}


def drawn(results, folder, importance=None):
    return [path.name for path in plots.draw_all(results, folder, importance)]


def search_of(*trials):
    """Return a study whose search has these trials, and nothing else."""
    return samples.results(phases={"search": Phase("search", "toy", trials)}, candidates=[],
                           sweep=None)


def test_a_whole_study_has_all_pictures(tmp_path):
    assert drawn(samples.results(), tmp_path, SHARES) == list(plots.PICTURES)
    for name in plots.PICTURES:
        with Image.open(tmp_path / name) as picture:
            assert picture.format == "PNG" and picture.width == 1600
            assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 50


def test_nothing_to_draw_leaves_no_picture_and_removes_an_old_one(tmp_path):
    drawn(samples.results(), tmp_path, SHARES)
    empty = samples.results(phases={}, candidates=[], sweep=None)
    assert drawn(empty, tmp_path) == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("results", "names"), [
    (search_of(Trial(0, "COMPLETE", 0.9, curve=((0, 0.9),))), ["progress.png", "curves.png"]),
    (search_of(*(Trial(i, "PRUNED", 0.5, curve=((0, 0.4 + i / 10),)) for i in range(4))),
     ["curves.png"]),
    (search_of(*samples.failed(3)), []),
    (search_of(Trial(0, "RUNNING", curve=((0, 0.5), (1, 0.6)))), ["curves.png"]),
    (search_of(Trial(0, "COMPLETE", 0.0, curve=((0, 0.0),))), ["progress.png", "curves.png"]),
    (search_of(Trial(0, "COMPLETE", float("inf"), curve=((0, float("inf")),))), []),
    (search_of(*samples.trials(300, 0.99)), ["progress.png", "curves.png", "params.png"]),
])
def test_each_state_of_a_search_gets_the_pictures_it_has_data_for(tmp_path, results, names):
    assert drawn(results, tmp_path) == names


def test_losses_over_many_powers_of_ten_are_drawn(tmp_path):
    trials = [Trial(i, "COMPLETE", 10.0 ** -i, curve=tuple((e, 10.0 ** (4 - i - e))
                                                          for e in range(5))) for i in range(6)]
    loss = samples.results(search=trials, metric="val_loss", maximize=False)
    assert "progress.png" in drawn(loss, tmp_path)


def test_negative_values_and_one_wild_value_are_drawn(tmp_path):
    trials = [Trial(i, "COMPLETE", -float(i), curve=((0, -1e6 if i == 3 else -float(i)),))
              for i in range(9)]
    assert "curves.png" in drawn(search_of(*trials), tmp_path)


def test_a_sweep_without_a_pick_is_drawn_with_its_reason(tmp_path):
    sweep = samples.sweep()
    flat = Sweep(sweep.rates, (2.3,) * 100, (), None, None, None, "the loss never fell")
    plots.draw_sweep(flat, tmp_path / "new" / "lr.png")
    assert (tmp_path / "new" / "lr.png").stat().st_size > 5000


def test_a_sweep_that_blew_up_is_drawn(tmp_path):
    rates = tuple(10.0 ** (i / 10 - 7) for i in range(40))
    losses = (*(2.3 - i / 40 for i in range(36)), 1e9, float("inf"), float("nan"), float("nan"))
    plots.draw_sweep(Sweep(rates, losses, losses, 1e-4, 1e-5, 1e-3, "steep"), tmp_path / "lr.png")
    assert (tmp_path / "lr.png").stat().st_size > 5000


def test_drawing_needs_no_display_and_leaves_the_caller_s_settings_alone(tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.delenv("DISPLAY", raising=False)
    before = dict(matplotlib.rcParams)
    drawn(samples.results(), tmp_path, SHARES)
    assert dict(matplotlib.rcParams) == before


def test_labels_never_come_closer_than_asked_and_stay_inside():
    for wanted in ([0.5, 0.5, 0.5], [0.98, 0.99, 1.2], [-0.4, 0.0, 0.01, 0.9]):
        placed = spread(wanted, 0.1, 0.05, 0.95)
        ordered = sorted(placed)
        assert all(b - a >= 0.1 - 1e-9 for a, b in zip(ordered, ordered[1:], strict=False))
        assert ordered[0] >= 0.05 - 1e-9 and ordered[-1] <= 0.95 + 1e-9


def test_chance_is_on_the_axis_where_that_leaves_the_scores_half_of_it():
    assert with_chance([0.3, 0.9], 0.1) == [0.3, 0.9, 0.1]
    assert with_chance([0.93, 0.98], 0.1) == [0.93, 0.98]
    assert with_chance([0.05, 0.9], 0.1) == [0.05, 0.9, 0.1]
    assert with_chance([0.3, 0.9], None) == [0.3, 0.9]
    assert with_chance([0.7], 0.1) == [0.7]


@pytest.mark.parametrize(("other", "chance"), [
    ({"data": {"n_classes": 4}}, 0.25), ({}, None), ({"data": {"n_classes": 0}}, None),
    ({"data": {"n_classes": 10}, "metric": "val_loss"}, None),
])
def test_chance_is_known_for_an_accuracy_over_known_classes(other, chance):
    assert samples.results(**other).chance == chance


@pytest.mark.parametrize(("level", "said"), [(0.3, "chance 0.3"), (0.01, "chance 0.01 ↓"),
                                             (0.99, "chance 0.99 ↑")])
def test_chance_is_a_line_or_an_arrow_where_it_lies_outside(level, said):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    limit([axes], [0.2, 0.6])
    draw_chance(axes, level)
    assert [text.get_text() for text in axes.texts] == [said]
    assert len(axes.lines) == (level == 0.3)
    assert axes.get_ylim() == pytest.approx((0.168, 0.632))


def test_a_study_of_known_classes_is_drawn_with_chance(tmp_path):
    low = samples.results(data={"n_classes": 10},
                          search=(Trial(0, "COMPLETE", 0.5, curve=((0, 0.3), (1, 0.5))),))
    assert "progress.png" in drawn(low, tmp_path)


def test_the_end_of_an_error_bar_takes_no_logarithms_from_losses():
    low, high = error_bar(samples.scores(0.01, 0.01, 1.0))
    assert low == 0.01 and high == pytest.approx(0.34 + 0.5715767)
    assert error_bar(samples.scores(0.4, 0.6)) == pytest.approx((0.358579, 0.641421))


def test_one_level_far_from_all_others_does_not_squeeze_them():
    levels = {"search": [0.98], "grid": [0.97], "lr-range": [0.2]}
    assert without_far(levels) == ["search", "grid"]
    assert len(without_far({"search": [0.98], "grid": [0.2]})) == 2


def pictured(draw, results):
    """Return the axes of a picture and all the texts in it."""
    figure = draw(results)
    return figure.axes, [text.get_text() for axes in figure.axes for text in axes.texts]


def raced(search, grid, **other):
    """Return a study whose search and grid have one trial each, of these scores."""
    phases = {name: Phase(name, name, (Trial(0, "COMPLETE", value, curve=((0, value),)),))
              for name, value in (("search", search), ("grid", grid))}
    return samples.results(phases=phases, **other)


def test_equal_scores_stand_under_one_label_and_different_ones_under_two():
    axes, texts = pictured(plots.progress, raced(0.9965, 0.9965))
    assert "search = grid\n0.9965" in texts
    axes, texts = pictured(plots.progress, raced(0.9965, 0.9937))
    assert "search\n0.9965" in texts and "grid\n0.9937" in texts


def test_beside_the_search_stands_what_the_verdict_compares():
    axes, _ = pictured(plots.progress, samples.results())
    left, right = axes
    assert right.get_title(loc="left") == "Fresh seeds, test split"
    assert right.get_xlabel() == "mean ± sd of 3 seeds"
    assert left.get_title(loc="left") == "Best so far, one seed each; defaults: mean of 3"
    dots = {round(y, 6) for line in right.lines for y in line.get_ydata()}
    assert {0.978, 0.980, 0.979} <= dots and 0.981 not in dots
    found = [samples.candidate("search#1", 0.98, 0.97), samples.candidate("grid", 0.9, 0.91)]
    (left, right), _ = pictured(plots.progress, samples.results(candidates=found))
    assert right.get_title(loc="left") == "Fresh seeds, validation"
    assert left.get_title(loc="left") == "Best so far, one seed each"


def test_the_grid_has_its_band_and_the_search_has_none():
    found = band(samples.results(), "grid")
    assert found is not None
    known = [(low, high) for low, high in zip(found.low, found.high, strict=True) if low and high]
    (left, _), _ = pictured(plots.progress, samples.results())
    (shade,) = [one for one in left.collections if isinstance(one, FillBetweenPolyCollection)]
    outline: Any = [path.vertices for path in shade.get_paths()]
    heights = {round(float(y), 9) for points in outline for _, y in points}
    assert heights == {round(value, 9) for pair in known for value in pair}


def test_an_axis_of_accuracies_ends_at_one():
    found = [samples.candidate("search#1", 1.0, 0.98), samples.candidate("grid", 0.99, 0.97)]
    axes, _ = pictured(plots.progress, raced(1.0, 1.0, candidates=found))
    for panel in axes:
        assert max(panel.get_yticks()) <= 1.0 and panel.spines["left"].get_bounds()[1] == 1.0
        bars = [path.vertices for bar in panel.collections for path in bar.get_paths()]
        assert all(y <= 1.0 + 1e-12 for bar in bars for _, y in bar)


def test_a_loss_above_one_is_not_cut():
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    limit([axes], [0.5, 1.5], None)
    assert axes.get_ylim()[1] > 1.5


@pytest.mark.parametrize(("scores", "maximize", "lowest", "highest"), [
    ([0.95, 0.94, 0.5], True, 0.92, 0.95), ([0.05, 0.06, 0.5], False, 0.05, 0.08),
    ([0.95, 0.95, 0.95, 0.85], True, 0.65, 0.95), ([0.9], True, 0.0, 1.0), ([], True, 0.0, 1.0),
])
def test_learning_curves_show_thrice_the_height_of_the_better_half(
        scores, maximize, lowest, highest):
    """By hand: 0.95 - 3 x 0.01; where the better half ties, the next level counts."""
    values = [i / 1000 for i in range(1001)]
    # No trial's curve is better than the best score.
    near = [v for v in values if (v <= highest if maximize else v >= lowest)]
    shown = best_half(scores, near, maximize)
    assert min(shown) == pytest.approx(lowest, abs=0.002)
    assert max(shown) == pytest.approx(highest, abs=0.002)


def test_learning_curves_show_three_quarters_of_the_trials() -> None:
    """Half of them within a hair of the best, a quarter pruned at 0.8: those are seen."""
    values = [i / 1000 for i in range(1001)]
    scores = [0.950, 0.949, 0.949, 0.948, 0.948, 0.947, 0.8, 0.8, 0.8, 0.3, 0.2, 0.1]
    shown = best_half(scores, [v for v in values if v <= 0.95], maximize=True)
    assert min(shown) == pytest.approx(0.95 - 1.2 * 0.15, abs=0.002)


def test_losses_over_powers_of_ten_are_cut_by_their_logarithms():
    values = [10.0 ** (i / 10) for i in range(-30, 41)]
    shown = best_half([0.001, 0.01, 10.0], values, maximize=False)
    assert max(shown) == pytest.approx(1.0) and min(shown) == 0.001


def test_what_lies_outside_of_the_learning_curves_axis_is_counted():
    good = [Trial(i, "COMPLETE", 0.95 - i / 100, curve=((0, 0.2), (1, 0.95 - i / 100)))
            for i in range(3)]
    bad = Trial(3, "PRUNED", 0.3, curve=((0, 0.3),))
    axes, _ = pictured(plots.curves, search_of(*good, bad))
    assert axes[0].get_xlabel() == ("epoch  (below 0.928, not shown: 1 trial wholly, 3 trials in "
                                    "part)")
    axes, _ = pictured(plots.curves, search_of(good[0]))
    assert axes[0].get_xlabel() == "epoch"


def test_the_best_trial_is_marked_at_its_best_epoch():
    best = Trial(5, "COMPLETE", 0.96, curve=((0, 0.9), (1, 0.96), (2, 0.94)))
    axes, texts = pictured(plots.curves, search_of(best))
    assert "best: trial 5\n0.9600\nat epoch 1 (●)" in texts
    (mark,) = [line for line in axes[0].lines if line.get_marker() == "o"]
    assert (list(mark.get_xdata()), list(mark.get_ydata())) == ([1], [0.96])


@pytest.mark.parametrize("pick", [1.6e-3, None])
def test_no_text_lies_over_the_curves_of_a_sweep(pick):
    from dataclasses import replace

    sweep = replace(samples.sweep(), pick=pick, reason="the loss never fell, " * 10)
    axes, texts = pictured(plots.lr_range, samples.results(sweep=sweep))
    top = axes[0].get_window_extent().y1
    assert all(text.get_window_extent().y0 >= top for text in axes[0].texts)
    assert texts[0].startswith("the loss never fell" if pick is None else
                               "pick 0.0016 (line), sensible between 0.0004 and 0.008 (band)")
