"""The spec a user writes: every fault is found at once, before anything is spent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpo import Categorical, Float, Int, Run, StudySpec
from hpo.errors import SpecError


def objective(run: Run, *, x: float):
    yield {"loss": x}


def build(run: Run, *, lr: float, width: int = 8):
    return None


GOOD: dict[str, Any] = {"space": {"x": Float(0.0, 1.0)}, "objective": objective, "epochs": 2,
                        "minimize": "loss"}


def faults(**changes: Any) -> tuple[str, ...]:
    with pytest.raises(SpecError) as raised:
        StudySpec(**{**GOOD, **changes})
    return raised.value.faults


def test_a_sound_spec_says_its_metric_and_direction() -> None:
    spec = StudySpec(**GOOD)
    assert (spec.metric, spec.direction, spec.has_lr_range) == ("loss", "minimize", False)
    json.dumps(spec.to_json(), allow_nan=False)


@pytest.mark.parametrize(("changes", "fault"), [
    ({"space": {}}, "space must be a dict of at least one param, got {}"),
    ({"space": [1]}, "space must be a dict of at least one param, got [1]"),
    ({"space": {"x": 3}}, "param 'x': expected Float, Int or Categorical, got 3"),
    ({"space": {"x": Float(2.0, 1.0)}},
     "param 'x': low must be below high, got low=2.0, high=1.0"),
    ({"minimize": None}, "name the metric once: maximize='val_accuracy' or minimize='val_loss'"),
    ({"maximize": "acc"}, "name the metric once: maximize='val_accuracy' or minimize='val_loss'"),
    ({"minimize": 3}, "the metric's name must be a text, got 3"),
    ({"minimize": " "}, "the metric's name must be a text, got ' '"),
    ({"objective": None},
     "give build= (a function that returns a Recipe) or objective= (a generator)"),
    ({"objective": 3}, "objective must be a function, got 3"),
    ({"epochs": 0}, "epochs must be a whole number of at least 1, got 0"),
    ({"epochs": 1.5}, "epochs must be a whole number of at least 1, got 1.5"),
    ({"epochs": None}, "epochs must be a whole number of at least 1, got None"),
    ({"epochs": True}, "epochs must be a whole number of at least 1, got True"),
    ({"n_trials": 0}, "n_trials must be a whole number of at least 1, got 0"),
    ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
    ({"timeout_s": 0}, "timeout_s must be a number above 0, got 0"),
    ({"timeout_s": "1 h"}, "timeout_s must be a number above 0, got '1 h'"),
    ({"sampler": "tpa"}, "sampler must be one of tpe, random, gp, cmaes, qmc, got 'tpa'; "
                         "did you mean 'tpe'?"),
    ({"sampler": "grid"}, "sampler must be one of tpe, random, gp, cmaes, qmc, got 'grid'"),
    ({"pruner": "medium"}, "pruner must be one of rungs, median, percentile, asha, hyperband, "
                           "none, got 'medium'; did you mean 'median'?"),
    ({"defaults": {"y": 1}}, "defaults: 'y' is no param of the space (x)"),
    ({"defaults": {"x": 2.0}}, "param 'x': defaults has 2.0, accepted is 0 .. 1"),
    ({"defaults": 3}, "defaults must be a dict of params, got 3"),
    ({"lr_param": "learning_rate"}, "lr_param: 'learning_rate' is no param of the space (x)"),
    ({"grid": {}}, "grid must be a dict of lists of values, got {}"),
    ({"grid": {"x": []}}, "param 'x': grid must not be empty"),
    ({"grid": {"x": 0.5}}, "param 'x': grid: expected a list of values, got 0.5"),
    ({"grid": {"x": "ab"}}, "param 'x': grid: expected a list of values, got 'ab'"),
    ({"grid": {"x": [0.5, 0.5]}}, "param 'x': grid has a value twice: [0.5, 0.5]"),
    ({"grid": {"x": [0.5, 2.0]}}, "param 'x': grid has 2.0, accepted is 0 .. 1"),
], ids=lambda value: str(value)[:50])
def test_a_fault_is_one_line_with_what_is_accepted(changes: dict, fault: str) -> None:
    """C22.4, C28: what is wrong with which value, and what is accepted."""
    assert faults(**changes) == (fault,)


def test_a_name_that_is_no_text_is_told() -> None:
    """C28: the library itself takes a number as a name."""
    found = faults(space={1: Float(0.0, 1.0)}, objective=lambda run, **params: iter(()))
    assert found == ("param 1: a name must be a text fit for a keyword argument",)


def test_two_bad_params_are_told_in_one_message() -> None:
    """C28: the last module has two parameters that are bad at once."""
    with pytest.raises(SpecError) as raised:
        StudySpec(**{**GOOD, "space": {"x": Float(0.0, 1.0, log=True), "y": Int(1, 9, step=0)},
                     "objective": lambda run, x, y: iter(())})
    assert str(raised.value.named("s")).splitlines() == [
        "study 's', param 'x': low must be > 0 with log, got low=0.0",
        "study 's', param 'y': step must be a whole number above 0, got 0"]


def test_faults_of_every_part_come_in_one_message() -> None:
    found = faults(space={"x": Float(2.0, 1.0)}, epochs=0, pruner="x", defaults={"q": 1})
    assert len(found) == 4


def test_a_param_the_function_does_not_take_is_told_with_the_near_name() -> None:
    def misspelt(run: Run, *, weigth_decay: float):
        yield {"loss": weigth_decay}

    assert faults(space={"weight_decay": Float(0.0, 1.0)}, objective=misspelt) == (
        "objective takes 'weigth_decay', which is no param of the space (weight_decay); "
        "did you mean 'weight_decay'?",
        "objective does not take param 'weight_decay'; did you mean 'weigth_decay'?")


def test_a_function_without_the_run_is_told() -> None:
    assert faults(objective=lambda *, x: iter(())) == (
        "objective must take the run first: def objective(run, *, x)",)


def test_an_argument_with_a_default_need_not_be_in_the_space() -> None:
    spec = StudySpec(space={"lr": Float(1e-4, 1.0, log=True)}, build=build, epochs=1,
                     maximize="val_accuracy")
    assert spec.has_lr_range


def test_a_function_that_takes_anything_fits_any_space() -> None:
    StudySpec(**{**GOOD, "space": {"a": Int(0, 1), "b": Int(0, 1)},
                 "objective": lambda run, **params: iter(())})


def test_a_grid_needs_a_value_for_every_param() -> None:
    found = faults(space={"x": Float(0.0, 1.0), "y": Int(0, 3)}, grid={"x": [0.5]},
                   objective=lambda run, x, y: iter(()))
    assert found == ("grid: 'y' has neither grid values nor a default",)


def test_numpy_numbers_are_plain_in_the_json() -> None:
    """C30: a number that came from numpy must not end a worker."""
    spec = StudySpec(**{**GOOD, "epochs": np.int64(3), "timeout_s": np.float64(2.5),
                        "defaults": {"x": np.float64(0.5)}})
    data = json.loads(json.dumps(spec.to_json()))
    assert (data["epochs"], data["timeout_s"]) == (3, 2.5)
    assert type(spec.full_params({})["x"]) is float


def test_full_params_come_in_the_order_of_the_space_with_defaults_filled_in() -> None:
    spec = StudySpec(space={"b": Int(0, 9), "a": Categorical((1, 2), (3,))}, epochs=1,
                     minimize="loss",
                     objective=lambda run, a, b: ({} for _ in ()), defaults={"a": (3,), "b": 4})
    assert list(spec.full_params({"b": 5}).items()) == [("b", 5), ("a", (3,))]


@pytest.mark.parametrize(("goal", "n"), [
    ({"maximize": "loss", "minimize": None}, 1), ({"maximize": None, "minimize": "val_acc"}, 1),
    ({"maximize": "val_accuracy", "minimize": None}, 0), ({"minimize": "val_loss"}, 0),
    ({"minimize": "anything"}, 0), ({"maximize": None, "minimize": "error_score"}, 0),
])
def test_a_direction_that_does_not_fit_the_metric_is_one_warning(goal: dict, n: int) -> None:
    """C22.3: the warning names both words."""
    spec = StudySpec(**{**GOOD, **goal})
    assert len(spec.warnings()) == n
    for text in spec.warnings():
        assert spec.metric in text
        assert spec.direction in text


def test_a_trials_folder_is_there_when_it_is_asked_for_and_not_before(tmp_path: Path) -> None:
    run = Run(epochs=1, seed=0, device="cpu", dir=tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    assert run.dir == tmp_path / "a" / "b" and run.dir.is_dir()
    with pytest.raises(TypeError, match="dir"):
        Run(epochs=1, seed=0, device="cpu")
    with pytest.raises(AttributeError):
        run.dir = tmp_path  # type: ignore[misc, assignment]
