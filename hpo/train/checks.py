"""Checks of a recipe's fields, so that every fault names field, value and what is accepted.

A fault found here costs nothing; the same fault inside a training step costs a trial.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from hpo.errors import InputError
from hpo.spec import nearest


def whole(where: str, value: Any, *, low: int) -> None:
    """Check that a value is a whole number of at least `low`.

    Raises:
        InputError: naming the field.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{where}: must be a whole number, got {value!r}")
    if value < low:
        raise InputError(f"{where}: must be at least {low}, got {value!r}")


def number(where: str, value: Any, *, low: float = -math.inf, high: float = math.inf,
           open_low: bool = False, open_high: bool = False) -> None:
    """Check that a value is a finite number between two bounds.

    Raises:
        InputError: naming the field.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{where}: must be a number, got {value!r}")
    value = float(value)
    below = value <= low if open_low else value < low
    above = value >= high if open_high else value > high
    if below or above or not math.isfinite(value):
        left = "(" if open_low or low == -math.inf else "["
        right = ")" if open_high or high == math.inf else "]"
        raise InputError(f"{where}: must be in {left}{low:g}, {high:g}{right}, got {value!r}")


def one_of(where: str, value: Any, known: Sequence[str]) -> None:
    """Check that a value is one of some names.

    Raises:
        InputError: naming the nearest one and all that are accepted.
    """
    if isinstance(value, str) and value in known:
        return
    raise InputError(f"{where}: must be one of {', '.join(known)}, got {value!r}"
                     f"{nearest(value, known)}")


def flag(where: str, value: Any) -> None:
    """Check that a value is True or False.

    Raises:
        InputError: naming the field.
    """
    if not isinstance(value, bool):
        raise InputError(f"{where}: must be True or False, got {value!r}")
