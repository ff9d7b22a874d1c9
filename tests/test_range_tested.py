"""`"lr": "range-test"`: the LR range test gives the search its bounds, the same for everybody."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import study_samples as samples
from commands import hpo, trials, url

import storage
from hpo import Float, StudySpec, bounds, report
from hpo.errors import InputError, SpecError
from hpo.range_tested import bounded, check_bounds
from hpo.space import RangeTested, space_from_json, space_to_json

SPACE: dict[str, Any] = {"lr": "range-test", "dropout": Float(0.0, 0.5)}
DEFAULTS = {"lr": 1e-2, "dropout": 0.1}
MODULE = '''"""A small net of digits whose rate has the bounds of the range test."""
from hpo import Float, StudySpec
from hpo.train import MLP, AdamW, Recipe, digits


def build(run, *, lr, dropout):
    return Recipe(data=digits(run), model=MLP(hidden=16, dropout=dropout),
                  optimizer=AdamW(lr=lr), batch_size=64)


STUDY = StudySpec(space={"lr": "range-test", "dropout": Float(0.0, 0.5)}, build=build,
                  maximize="val_accuracy", epochs=1, n_trials=6,
                  defaults={"lr": 1e-2, "dropout": 0.1}, grid={"lr": [1e-7, 10.0]})
'''


def build(run: Any, *, lr: float, dropout: float) -> Any: ...


def spec(**other: Any) -> StudySpec:
    return StudySpec(**{"space": SPACE, "build": build, "maximize": "val_accuracy", "epochs": 2,
                        "defaults": DEFAULTS, **other})


def test_the_word_stands_for_a_param_that_json_keeps():
    made = spec(grid={"lr": [1e-7, 10.0]})
    assert isinstance(made.space["lr"], RangeTested)
    stored = space_to_json(made.space)
    assert stored["lr"] == {"type": "range-test"}
    assert space_from_json(json.loads(json.dumps(stored))) == made.space


def objective(run: Any, *, lr: float, dropout: float) -> Any:
    yield {}


@pytest.mark.parametrize(("other", "fault"), [
    ({"space": {"lr": Float(1e-3, 1e-1), "dropout": "range-test"}},
     "param 'dropout': 'range-test' is for the learning rate, which is 'lr'"),
    ({"defaults": {"lr": 1e-2}}, "each param needs one: 'dropout' has none"),
    ({"build": None, "objective": objective}, "needs build="),
    ({"space": {"lr": "rangetest", "dropout": Float(0, 1)}}, "expected Float, Int or Categorical"),
    ({"defaults": {"lr": -1.0, "dropout": 0.1}}, "param 'lr': defaults has -1.0"),
])
def test_what_cannot_be_swept_is_told_when_the_spec_is_made(other, fault):
    with pytest.raises(SpecError, match=fault):
        spec(**other)


def test_the_bounds_are_those_of_the_stored_sweep():
    space = spec().space
    found = bounded(space, {"low": 1e-3, "high": 0.1, "pick": 0.01})
    assert found == {"lr": Float(1e-3, 0.1, log=True), "dropout": Float(0.0, 0.5)}
    assert bounded(space, None) == space
    plain = {"lr": Float(1e-4, 1.0, log=True)}
    assert bounded(plain, {"low": 1e-3, "high": 0.1}) == plain
    assert check_bounds(plain, None) is None


@pytest.mark.parametrize(("sweep", "words"), [
    (None, "no result: run the phase lr-range first"),
    ({"low": None, "reason": "flat"}, "found none .flat.: give its bounds in the space"),
])
def test_without_bounds_the_search_does_not_begin(sweep, words):
    with pytest.raises(InputError, match=words):
        check_bounds(spec().space, sweep)


def test_a_best_rate_at_an_end_of_the_found_bounds_is_told_of():
    sweep = replace(samples.sweep(), low=4e-4, high=8e-3)
    study = samples.results(space=space_to_json({"lr": RangeTested()}), sweep=sweep)
    found = [replace(c, params={"lr": 8e-3}) for c in study.candidates]
    [one] = bounds.of_best(replace(study, candidates=tuple(found)))
    assert (one.param, one.side) == ("lr", "high") and "0.0004 .. 0.008" in one.searched


def test_the_report_says_which_bounds_the_range_test_gave():
    study = samples.results(space=space_to_json({"lr": RangeTested()}),
                            sweep=replace(samples.sweep(), low=4e-4, high=8e-3))
    said = "The search drew lr between 0.0004 and 0.008"
    assert said in report.markdown(study, {}) and said not in report.markdown(
        samples.results(), {})


def test_a_run_draws_its_rates_between_the_bounds_that_it_found_and_again_the_same(
    tmp_path: Path
) -> None:
    (tmp_path / "search_spaces").mkdir()
    (tmp_path / "search_spaces" / "s.py").write_text(MODULE)
    words = ("run", "--study", "s", "--workers", 1)
    refused = hpo(tmp_path, *words, "--phases", "search", code=2)
    assert "run the phase lr-range first (--phases)" in refused.stdout + refused.stderr
    out = hpo(tmp_path, *words, "--phases", "lr-range,grid,search").stdout
    db = storage.Database(url(tmp_path))
    sweep = next(t.result for t in db.tickets.list("s/lr-range") if t.kind == "sweep")
    db.close()
    searched = trials(tmp_path, "s")
    assert len(searched) == 6 and 1e-7 < sweep["low"] < sweep["high"] < 10.0
    for trial in searched:
        kind: Any = trial.distributions["lr"]
        assert (kind.low, kind.high, kind.log) == (sweep["low"], sweep["high"], True)
        assert sweep["low"] <= trial.params["lr"] <= sweep["high"]
    assert f"lr between {sweep['low']:.3g} and {sweep['high']:.3g}, by the LR range test" in out
    # The grid's own rates may lie outside.
    assert {t.params["lr"] for t in trials(tmp_path, "s/grid")} == {1e-7, 10.0}
    hpo(tmp_path, *words, "--phases", "search", "--n-trials", 7)
    seventh: Any = trials(tmp_path, "s")[6].distributions["lr"]
    assert (seventh.low, seventh.high) == (sweep["low"], sweep["high"])
