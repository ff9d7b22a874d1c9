"""The grid baseline's cells, enumerated here since Optuna's GridSampler repeats cells."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.space import Param, all_params, grid_values


def cells(
    space: Mapping[str, Param],
    grid: Mapping[str, Sequence[Any]] | None,
    defaults: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return every cell of a grid exactly once, in the order of its lists.

    A param without grid values stays at its default. Without a grid, the cells are all params of
    a finite space.
    """
    if grid is None:
        return list(all_params(space))
    values = {name: grid_values(grid[name]) if name in grid else [defaults[name]]
              for name in space}
    return [dict(zip(values, cell, strict=True)) for cell in itertools.product(*values.values())]
