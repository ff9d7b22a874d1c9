"""A best trial at an end of its space is told of, and one inside of it is not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import study_samples as samples

from hpo import Categorical, Float, Int, bounds, report
from hpo.results import Phase, Trial
from hpo.space import Param, space_to_json

LOG = Float(1e-4, 1e-1, log=True)
# Two hundredths of three decades are 0.06 of one.
NEAR_LOW, NEAR_HIGH = 1e-4 * 10**0.059, 1e-1 / 10**0.059
OFF_LOW, OFF_HIGH = 1e-4 * 10**0.061, 1e-1 / 10**0.061


def sides(param: Param, value: Any) -> list[str]:
    return [one.side for one in bounds.at_bounds({"x": param}, {"x": value})]


@pytest.mark.parametrize(("param", "value", "side"), [
    (LOG, NEAR_LOW, ["low"]), (LOG, NEAR_HIGH, ["high"]), (LOG, OFF_LOW, []), (LOG, OFF_HIGH, []),
    # Near to the low end on a linear scale, in the middle on its own.
    (LOG, 1e-2, []), (Float(1e-4, 1e-1), 1e-3, ["low"]),
    (Float(0.0, 0.5), 0.0099, ["low"]), (Float(0.0, 0.5), 0.0101, []),
    (Float(0.0, 0.5), 0.4901, ["high"]), (Float(-1.0, 1.0), 0.0, []),
    (Float(0.0, 1.0, step=0.3), 0.9, ["high"]), (Float(0.0, 1.0, step=0.3), 0.6, []),
    (Float(0.1, 0.1), 0.1, []),
    (Int(1, 8), 8, ["high"]), (Int(1, 8), 1, ["low"]), (Int(1, 8), 7, []), (Int(1, 2), 2, []),
    (Int(1, 9, step=3), 7, ["high"]), (Int(1, 1024, log=True), 2, []),
    (Int(1, 1_000_000_000), 1_000_000_000, ["high"]),
    (Categorical(64, 128, 32), 32, ["low"]), (Categorical(64, 128, 32), 128, ["high"]),
    (Categorical(64, 128, 32), 64, []), (Categorical(0.1, 0.2), 0.2, []),
    (Categorical("a", "b", "c"), "c", []), (Categorical(1, 2, "many"), 2, []),
    (Categorical(True, 0, 2), 2, []), (Categorical(1, 2, None), 2, []),
])
def test_a_value_is_at_an_end_in_the_params_own_scale(param, value, side):
    assert sides(param, value) == side


def test_a_param_that_a_trial_lacks_is_at_no_end():
    assert bounds.at_bounds({"x": LOG}, {}) == []


SPACE = {"lr": LOG, "hidden": Categorical(128, 256, 512), "dropout": Float(0.0, 0.5)}


def study(*trials: Trial, **other: Any):
    return samples.results(phases={"search": Phase("search", "toy", trials)}, sweep=None,
                           **{"candidates": [], "space": space_to_json(SPACE), **other})


def trial(number: int, value: float, **params: Any) -> Trial:
    return Trial(number, "COMPLETE", value, params)


def test_the_warning_names_each_param_its_end_and_what_to_do():
    found = study(trial(0, 0.9, lr=0.099, hidden=512, dropout=0.2),
                  trial(1, 0.8, lr=0.01, hidden=256, dropout=0.0))
    assert bounds.warning(found) == (
        "The search's best trial lies at ends of its space: lr=0.099 at the high end of 0.0001 .. "
        "0.1 log, hidden=512 at the high end of [128, 256, 512]. Better values may lie beyond; "
        "widen the range and go on with --allow-space-change, more choices make a new study "
        "(--name).")


def test_a_best_trial_inside_of_its_space_gives_no_warning():
    assert bounds.warning(study(trial(0, 0.9, lr=0.01, hidden=256, dropout=0.2))) is None


@pytest.mark.parametrize("trials", [(), (Trial(0, "PRUNED", 0.9, {"lr": 0.1}),)])
def test_a_search_without_a_result_gives_no_warning(trials):
    assert bounds.warning(study(*trials)) is None


def test_what_did_best_on_fresh_seeds_is_looked_at_not_the_highest_score():
    confirmed = replace(samples.candidate("search#2", 0.9, 0.9), params={"lr": 1e-4})
    found = study(trial(0, 0.99, lr=0.01), candidates=[confirmed])
    assert [(one.param, one.side) for one in bounds.of_best(found)] == [("lr", "low")]


def test_the_report_warns_and_its_json_names_the_ends():
    found = study(trial(0, 0.9, lr=0.099, hidden=256, dropout=0.2))
    said = bounds.warning(found)
    assert said and said in report.markdown(found, {})
    assert json.loads(report.to_json(found))["at_bounds"] == [
        {"param": "lr", "value": 0.099, "side": "high", "searched": "0.0001 .. 0.1 log",
         "can_go_on": True}]
