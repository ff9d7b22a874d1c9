"""A space whose learning rate has the bounds that the LR range test finds.

The bounds are those of the sweep's stored result: the same for every worker and every later run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpo.errors import InputError
from hpo.space import Float, Param, RangeTested

# The phases that draw a learning rate.
DRAWING = ("search", "random")


def tested_param(space: Mapping[str, Param]) -> str | None:
    """Return the name of the param whose bounds the range test gives, or None."""
    return next((name for name, param in space.items() if isinstance(param, RangeTested)), None)


def bounded(space: Mapping[str, Param], sweep: Any) -> dict[str, Param]:
    """Return a space with the bounds of a sweep, which has `low` and `high`; as it is without.

    `sweep` is the stored result of the sweep, or None.
    """
    name = tested_param(space)
    if name is None or not sweep or sweep.get("low") is None:
        return dict(space)
    return {**space, name: Float(float(sweep["low"]), float(sweep["high"]), log=True)}


def check_bounds(space: Mapping[str, Param], sweep: Any) -> str | None:
    """Return which bounds the search takes from the range test, or None where it takes none.

    Raises:
        InputError: where it is to take them and there are none.
    """
    name = tested_param(space)
    if name is None:
        return None
    repair = f"give its bounds in the space, '{name}': Float(low, high, log=True)"
    if not sweep:
        raise InputError(f"param '{name}': its bounds are those of the LR range test, which has "
                         f"no result: run the phase lr-range first (--phases), or {repair}")
    if sweep.get("low") is None:
        raise InputError(f"param '{name}': its bounds are those of the LR range test, which found "
                         f"none ({sweep.get('reason')}): {repair}")
    return f"{name} between {sweep['low']:.3g} and {sweep['high']:.3g}"
