"""Params: which bounds and choices are refused, what they hold, and that JSON gives them back."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpo.space import (
    Categorical,
    Float,
    Int,
    Param,
    all_params,
    grid_values,
    n_params_sets,
    params_from_json,
    params_key,
    params_to_json,
    space_from_json,
    space_to_json,
)

BAD = [
    (Float(0.0, 1.0, log=True), "low must be > 0 with log, got low=0.0"),
    (Float(0.1, 1.0, log=True, step=0.1), "step and log exclude each other: leave one out"),
    (Float(2.0, 1.0), "low must be below high, got low=2.0, high=1.0"),
    (Float(math.nan, 1.0), "low must be a finite number, got nan"),
    (Float(0.0, math.inf), "high must be a finite number, got inf"),
    (Float(0.0, 1.0, step=0), "step must be a number above 0, got 0"),
    (Float(0.0, 1.0, step=-0.1), "step must be a number above 0, got -0.1"),
    (Float("0", 1.0), "low must be a finite number, got '0'"),  # type: ignore[arg-type]
    (Float(True, 2.0), "low must be a finite number, got True"),
    (Int(0, 9, log=True), "low must be > 0 with log, got low=0"),
    (Int(1, 9, log=True, step=2), "step must be 1 with log, got step=2"),
    (Int(1.5, 3), "low must be a whole number, got 1.5"),  # type: ignore[arg-type]
    (Int(1, 3, step=0), "step must be a whole number above 0, got 0"),
    (Int(3, 1), "low must be below high, got low=3, high=1"),
    (Categorical(), "choices must not be empty"),
    (Categorical([]), "choices must not be empty"),
    (Categorical(1, 1, 2), "choices must differ, got 1 twice"),
    (Categorical(1, True), "choices must differ, got True twice"),
    (Categorical(1.0, math.nan), "a choice must be None, a bool, a finite number, a text, or a "
                                 "tuple or list of them, got nan"),
    (Categorical([{"a": 1}]), "a choice must be None, a bool, a finite number, a text, or a tuple "
                              "or list of them, got {'a': 1}"),
    (Categorical([len]), "a choice must be None, a bool, a finite number, a text, or a tuple or "
                         "list of them, got <built-in function len>"),
    (Categorical((1, 2), "(1, 2)"), "choices must differ, '(1, 2)' is how a tuple or list among "
                                    "them is stored"),
]

SOUND = [
    Float(0.0, 1.0), Float(1e-7, 1e-1, log=True), Float(0.0, 1.0, step=0.1), Float(3.0, 3.0),
    Float(0.0, 1.0, step=0.3), Int(0, 9), Int(1, 9, log=True), Int(0, 9, step=4), Int(4, 4),
    Categorical(16, 32), Categorical("a", None, True, 1.5), Categorical((64, 32), (128,)),
    Categorical([64, 32], [128]), Categorical([[(1, "x")], []]), Categorical(True, 0, "0"),
]


@pytest.mark.parametrize(("param", "fault"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_param_names_the_rule_and_the_value(param: Param, fault: str) -> None:
    """C28, C30.5: each broken rule is told before anything runs."""
    assert param.faults() == [fault]


@pytest.mark.parametrize("param", SOUND, ids=repr)
def test_a_sound_param_has_no_faults(param: Param) -> None:
    """C28: low = high is allowed, too."""
    assert param.faults() == []


def test_two_broken_rules_of_one_param_are_both_told() -> None:
    """C28: faults come all at once."""
    assert len(Int(0.5, 9, log=True, step=2).faults()) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("param", SOUND, ids=repr)
def test_json_gives_back_the_same_param(param: Param) -> None:
    text = json.dumps(space_to_json({"p": param}), allow_nan=False)
    again = space_from_json(json.loads(text))["p"]
    assert again == param
    assert again.to_json() == param.to_json()


@pytest.mark.parametrize("param", [p for p in SOUND if p.n_values() is not None], ids=repr)
def test_every_value_is_contained_and_survives_the_database(param: Param) -> None:
    """C30: what Optuna stores is turned back into the choice itself, with its type."""
    values = list(param.values())
    assert len(values) == param.n_values()
    distribution = param.distribution()
    for value in values:
        assert param.contains(value)
        internal = distribution.to_internal_repr(param.encode(value))
        again = param.decode(distribution.to_external_repr(internal))
        assert again == value
        assert type(again) is type(value)


@pytest.mark.parametrize(("param", "value"), [
    (Float(0.0, 1.0), 1.5), (Float(0.0, 1.0), "0.5"), (Float(0.0, 1.0), True),
    (Float(0.0, 1.0), math.nan), (Float(0.0, 1.0, step=0.3), 0.5), (Int(0, 9), 10),
    (Int(0, 9), 3.0), (Int(0, 9), True), (Int(0, 9, step=4), 5), (Categorical(1, 2), True),
    (Categorical(1, 2), "1"), (Categorical((1, 2)), [1, 2]),
])
def test_a_value_outside_is_not_contained(param: Param, value: object) -> None:
    assert not param.contains(value)


def test_numpy_bounds_and_choices_become_plain_numbers() -> None:
    """C30.3: numpy values are int and float in the JSON."""
    bounds: list[Any] = [np.int64(1), np.int64(3)]
    space = {"lr": Categorical(np.array([0.1, 0.01])), "width": Categorical(np.arange(8, 33, 8)),
             "x": Float(*np.array([0.0, 1.0], np.float32)), "n": Int(*bounds)}
    assert space_to_json(space)["width"]["choices"] == [8, 16, 24, 32]
    for name, param in space.items():
        assert param.faults() == [], name
        assert all(type(v) in (int, float) for v in params_to_json({"v": next(iter(
            param.values()), 1.0)}).values())
    json.dumps(space_to_json(space))


def test_numpy_numbers_inside_a_tuple_become_plain() -> None:
    """C30: the stored text of a tuple must not depend on numpy's repr."""
    param = Categorical((np.int64(64), np.float64(0.5)), (128,))
    assert param.faults() == []
    assert param.encode((64, 0.5)) == "(64, 0.5)"


def test_choices_may_be_listed_or_given_one_by_one() -> None:
    assert Categorical([1, 2]) == Categorical(1, 2) == Categorical(range(1, 3))


def test_a_stepped_range_ends_at_its_last_whole_step_without_a_warning() -> None:
    distribution = Float(0.0, 1.0, step=0.3).distribution()
    assert distribution.high == pytest.approx(0.9)  # type: ignore[attr-defined]
    assert Int(0, 9, step=4).distribution().high == 8  # type: ignore[attr-defined]


def test_a_sampler_s_inexact_step_is_the_same_value() -> None:
    """C34: values that differ in the last bit would be trained twice."""
    param = Float(0.0, 1.0, step=0.3)
    assert param.decode(3 * 0.3) == list(param.values())[3] == 0.9


def test_a_tenth_step_counts_all_eleven_values() -> None:
    param = Float(0.0, 1.0, step=0.1)
    assert param.n_values() == 11
    assert param.contains(0.3)
    assert list(param.values())[-1] == 1.0


def test_params_of_a_finite_space_are_counted_and_listed_once() -> None:
    space = {"x": Int(0, 3), "y": Categorical("a", "b")}
    listed = [tuple(params.values()) for params in all_params(space)]
    assert n_params_sets(space) == len(listed) == len(set(listed)) == 8
    assert n_params_sets({**space, "lr": Float(0.0, 1.0)}) is None


def test_a_key_is_equal_for_equal_params_in_any_order() -> None:
    assert params_key({"a": 1, "b": (2,)}) == params_key({"b": (2,), "a": 1})


@pytest.mark.parametrize(("one", "other"), [
    ({"a": 1}, {"a": 2}), ({"a": (1,)}, {"a": [1]}), ({"a": "1"}, {"a": 1}),
    ({"a": True}, {"a": 1}), ({"a": 1}, {"b": 1}),
])
def test_a_key_differs_for_different_params(one: dict, other: dict) -> None:
    assert params_key(one) != params_key(other)


def test_a_key_differs_by_seed() -> None:
    assert len({params_key({"a": 1}), params_key({"a": 1}, 1), params_key({"a": 1}, 2)}) == 3


@given(st.dictionaries(st.text(min_size=1), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(), lambda inner: st.lists(inner) | st.lists(inner).map(tuple), max_leaves=5)))
def test_params_come_back_from_json_to_the_last_bit(params: dict) -> None:
    """C06, C30: tuples stay tuples, lists stay lists, floats keep every digit."""
    again = params_from_json(json.loads(json.dumps(params_to_json(params))))
    assert repr(again) == repr(params)


def test_grid_values_refuse_what_is_no_list() -> None:
    assert grid_values(np.array([1, 2])) == [1, 2]
    assert grid_values(range(2)) == [0, 1]
    for bad in ("ab", 3, None, {"a": 1}):
        with pytest.raises(TypeError, match="expected a list of values"):
            grid_values(bad)
