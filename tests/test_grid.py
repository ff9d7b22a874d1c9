"""The grid baseline: every cell exactly once, in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpo import Categorical, Float, Int
from hpo.baselines.grid import cells
from hpo.space import params_key


def test_a_finite_space_without_a_grid_is_its_own_grid() -> None:
    """C15: x in {0,1,2,3}, y in {a,b} has 8 cells."""
    found = cells({"x": Int(0, 3), "y": Categorical("a", "b")}, None, {})
    assert found[:2] == [{"x": 0, "y": "a"}, {"x": 0, "y": "b"}]
    assert len({tuple(cell.items()) for cell in found}) == len(found) == 8


def test_a_param_without_grid_values_stays_at_its_default() -> None:
    found = cells({"lr": Float(0.0, 1.0), "n": Int(1, 9)}, {"lr": [0.1, 0.2]}, {"n": 4})
    assert found == [{"lr": 0.1, "n": 4}, {"lr": 0.2, "n": 4}]


def test_cells_keep_the_order_of_the_space_whatever_the_grid_s_is() -> None:
    found = cells({"a": Int(0, 9), "b": Int(0, 9)}, {"b": [1, 2], "a": [3]}, {})
    assert [list(cell.items()) for cell in found] == [[("a", 3), ("b", 1)], [("a", 3), ("b", 2)]]


@given(st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(0, 9), min_size=1,
                                                         max_size=4, unique=True), min_size=1))
def test_the_cells_are_as_many_as_the_product_of_the_lists_and_none_comes_twice(
    grid: dict[str, list[int]]
) -> None:
    """C15: no double, whatever the grid."""
    found = cells({name: Int(0, 9) for name in grid}, grid, {})
    n = 1
    for values in grid.values():
        n *= len(values)
    assert len({params_key(cell) for cell in found}) == len(found) == n
