"""Does the search's best trial lie at an end of its space, where better values may lie beyond?

A best value inside its range has been looked for on both sides; one at the end only on one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpo.range_tested import bounded
from hpo.results import Results
from hpo.space import Categorical, Float, Int, Param, space_from_json

# So near to an end, as a part of the range in the param's own scale, is at it.
NEAR_FRACTION = 0.02
# Of two values each is an end, and says nothing.
_LEAST_VALUES = 3


@dataclass(frozen=True)
class AtBound:
    """A param whose best value lies at the `low` or the `high` end of what was searched."""

    param: str
    value: Any
    side: str
    searched: str
    can_go_on: bool

    def text(self) -> str:
        """Return it in a few words."""
        value = f"{self.value:.4g}" if isinstance(self.value, float) else str(self.value)
        return f"{self.param}={value} at the {self.side} end of {self.searched}"


def at_bounds(space: Mapping[str, Param], params: Mapping[str, Any]) -> list[AtBound]:
    """Return which of a trial's params lie at an end of the space, in its order."""
    found = []
    for name, param in space.items():
        side = _side(param, params.get(name))
        if side is not None:
            found.append(AtBound(name, params[name], side, param.describe(),
                                 not isinstance(param, Categorical)))
    return found


def _side(param: Param, value: Any) -> str | None:
    n_values = param.n_values()
    if not _is_number(value) or (n_values is not None and n_values < _LEAST_VALUES):
        return None
    if isinstance(param, Categorical):
        if not all(map(_is_number, param.choices)):
            return None
        ends = {min(param.choices): "low", max(param.choices): "high"}
        return ends.get(value)
    assert isinstance(param, (Float, Int))
    scale = math.log if param.log else float
    # A step may end below the upper bound: nothing beyond the last value was searched.
    last = param.high if n_values is None else param.low + (n_values - 1) * (param.step or 0)
    low, high, at = scale(param.low), scale(last), scale(value)
    near = NEAR_FRACTION * (high - low)
    return "low" if at <= low + near else "high" if at >= high - near else None


def _is_number(value: Any) -> bool:
    return (isinstance(value, (int, float)) and not isinstance(value, bool)
            and math.isfinite(value))


def of_best(results: Results) -> list[AtBound]:
    """Return the params at an end of the space of the search's best trial.

    That is the one that did best on fresh seeds, or before that the one with the best score.
    """
    confirmed, best = results.candidate("search"), results.best("search")
    params = confirmed.params if confirmed else best.params if best else {}
    return at_bounds(searched(results), params)


def searched(results: Results) -> dict[str, Param]:
    """Return the space that the search drew from, with the bounds that the range test gave it."""
    sweep = results.sweep
    return bounded(space_from_json(results.space),
                   sweep and {"low": sweep.low, "high": sweep.high})


def warning(results: Results) -> str | None:
    """Return the params of the best trial that lie at an end, and what to do, or None."""
    found = of_best(results)
    return f"The search's best trial {told(found)}" if found else None


def told(found: Sequence[AtBound]) -> str:
    """Return at which ends a trial lies and what to do, as the rest of a sentence about it."""
    said = ", ".join(one.text() for one in found)
    ways = []
    if any(one.can_go_on for one in found):
        ways.append("widen the range and go on with --allow-space-change")
    if not all(one.can_go_on for one in found):
        ways.append("more choices make a new study (--name)")
    return (f"lies at {'an end' if len(found) == 1 else 'ends'} of its space: {said}. "
            f"Better values may lie beyond; {', '.join(ways)}.")
