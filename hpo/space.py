"""Params of a search space: plain data that knows its faults, its values and its JSON.

A space is a dict of names and params. It holds no Optuna object, so that a grid, a bounds check or
a database row can be made from it without loading Optuna.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Params: TypeAlias = dict[str, Any]

# A step that does not divide the range exactly in binary still counts as a whole number of steps.
_STEP_SLACK = 1e-8


def plain(value: Any) -> Any:
    """Return numpy's scalars and arrays, also inside a tuple or list, as Python's own."""
    if type(value) in (tuple, list):
        return type(value)(plain(part) for part in value)
    module = type(value).__module__.split(".")[0]
    return value.tolist() if module == "numpy" and hasattr(value, "tolist") else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Param:
    """One dimension of a search space; see `Float`, `Int` and `Categorical`."""

    def faults(self) -> list[str]:
        """Return one line for each rule that this param breaks; empty when it is sound."""
        raise NotImplementedError

    def contains(self, value: Any) -> bool:
        """Return whether a trial may be given this value."""
        raise NotImplementedError

    def n_values(self) -> int | None:
        """Return how many values there are, or None for a continuum."""
        raise NotImplementedError

    def values(self) -> Iterator[Any]:
        """Yield every value once; only for a param whose `n_values` is not None."""
        raise NotImplementedError

    def distribution(self) -> BaseDistribution:
        """Return the Optuna distribution that this param is stored as."""
        raise NotImplementedError

    def encode(self, value: Any) -> Any:
        """Return the value as Optuna stores it."""
        return plain(value)

    def decode(self, stored: Any) -> Any:
        """Return a stored value as the objective gets it."""
        return stored

    def to_json(self) -> dict[str, Any]:
        """Return this param as JSON data; two params are equal where these are."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return the accepted values in a few words, for messages and tables."""
        raise NotImplementedError


def _bound_faults(low: Any, high: Any, *, whole: bool) -> list[str]:
    faults = []
    for name, bound in (("low", low), ("high", high)):
        if not _is_number(bound) or not math.isfinite(bound):
            faults.append(f"{name} must be a finite number, got {bound!r}")
        elif whole and not isinstance(bound, int):
            faults.append(f"{name} must be a whole number, got {bound!r}")
    if not faults and low > high:
        faults.append(f"low must be below high, got low={low!r}, high={high!r}")
    return faults


@dataclass(frozen=True)
class Float(Param):
    """A real number in [low, high], uniform or, with `log`, uniform in its logarithm.

    With `step` the values are low, low + step, ... up to high; `log` excludes it.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None

    def __post_init__(self) -> None:
        for field in ("low", "high", "step"):
            object.__setattr__(self, field, plain(getattr(self, field)))

    def faults(self) -> list[str]:
        faults = _bound_faults(self.low, self.high, whole=False)
        if self.step is not None:
            if self.log:
                faults.append("step and log exclude each other: leave one out")
            elif not _is_number(self.step) or not math.isfinite(self.step) or self.step <= 0:
                faults.append(f"step must be a number above 0, got {self.step!r}")
        if not faults and self.log and self.low <= 0:
            faults.append(f"low must be > 0 with log, got low={self.low!r}")
        return faults

    def contains(self, value: Any) -> bool:
        value = plain(value)
        if not _is_number(value) or not self.low <= value <= self.high:
            return False
        if self.step is None:
            return True
        n_steps = (value - self.low) / self.step
        return abs(n_steps - round(n_steps)) < _STEP_SLACK

    def n_values(self) -> int | None:
        if self.low == self.high:
            return 1
        if self.step is None:
            return None
        return math.floor((self.high - self.low) / self.step + _STEP_SLACK) + 1

    def values(self) -> Iterator[float]:
        for i in range(self.n_values() or 0):
            yield self._at(i)

    def _at(self, i: int) -> float:
        """Return the i-th value, as Optuna counts them: in decimal, so that 3 x 0.3 is 0.9."""
        return float(Decimal(str(self.low)) + i * Decimal(str(self.step or 0.0)))

    def distribution(self) -> BaseDistribution:
        from optuna.distributions import FloatDistribution

        high = self.high
        if self.step is not None:
            # Optuna warns when the range is no multiple of the step; its last value is the same.
            high = self._at((self.n_values() or 1) - 1)
        return FloatDistribution(float(self.low), float(high), log=self.log, step=self.step)

    def encode(self, value: Any) -> float:
        return float(value)

    def decode(self, stored: Any) -> float:
        # A sampler multiplies in binary; equal params must be equal to the last bit.
        return stored if self.step is None else self._at(round((stored - self.low) / self.step))

    def to_json(self) -> dict[str, Any]:
        return {"type": "float", "low": float(self.low), "high": float(self.high),
                "log": self.log, "step": None if self.step is None else float(self.step)}

    def describe(self) -> str:
        extra = " log" if self.log else f" step {self.step:g}" if self.step else ""
        return f"{self.low:g} .. {self.high:g}{extra}"


# In a space, instead of a param.
RANGE_TEST = "range-test"


@dataclass(frozen=True)
class RangeTested(Float):
    """A learning rate whose bounds the LR range test finds: `"range-test"` in a space."""

    low: float = 1e-8
    high: float = 1e3
    log: bool = True

    def to_json(self) -> dict[str, Any]:
        return {"type": RANGE_TEST}

    def describe(self) -> str:
        return f"a rate of {self.low:g} .. {self.high:g}, its bounds by the LR range test"


@dataclass(frozen=True)
class Int(Param):
    """A whole number in [low, high], uniform or, with `log`, uniform in its logarithm."""

    low: int
    high: int
    log: bool = False
    step: int = 1

    def __post_init__(self) -> None:
        for field in ("low", "high", "step"):
            object.__setattr__(self, field, plain(getattr(self, field)))

    def faults(self) -> list[str]:
        faults = _bound_faults(self.low, self.high, whole=True)
        if not isinstance(self.step, int) or isinstance(self.step, bool) or self.step < 1:
            faults.append(f"step must be a whole number above 0, got {self.step!r}")
        elif self.log and self.step != 1:
            faults.append(f"step must be 1 with log, got step={self.step!r}")
        if not faults and self.log and self.low <= 0:
            faults.append(f"low must be > 0 with log, got low={self.low!r}")
        return faults

    def contains(self, value: Any) -> bool:
        value = plain(value)
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        return self.low <= value <= self.high and (value - self.low) % self.step == 0

    def n_values(self) -> int:
        return (self.high - self.low) // self.step + 1

    def values(self) -> Iterator[int]:
        return iter(range(self.low, self.high + 1, self.step))

    def distribution(self) -> BaseDistribution:
        from optuna.distributions import IntDistribution

        high = self.low + (self.n_values() - 1) * self.step
        return IntDistribution(self.low, high, log=self.log, step=self.step)

    def encode(self, value: Any) -> int:
        return int(value)

    def decode(self, stored: Any) -> int:
        return int(stored)

    def to_json(self) -> dict[str, Any]:
        return {"type": "int", "low": self.low, "high": self.high, "log": self.log,
                "step": self.step}

    def describe(self) -> str:
        extra = " log" if self.log else f" step {self.step}" if self.step != 1 else ""
        return f"{self.low} .. {self.high} whole{extra}"


@dataclass(frozen=True, init=False)
class Categorical(Param):
    """One of several choices: None, bool, int, float, str, or tuples and lists of them.

    Write the choices one after another, or as one list, tuple, range or array. A tuple or list is
    stored as its text, since Optuna hands tuples back as lists and its dashboard shows neither;
    the objective gets the choice itself, with its type.
    """

    choices: tuple[Any, ...]

    def __init__(self, *choices: Any) -> None:
        only = plain(choices[0]) if len(choices) == 1 else None
        listed = only if isinstance(only, (list, tuple, range)) else choices
        object.__setattr__(self, "choices", tuple(plain(choice) for choice in listed))

    def faults(self) -> list[str]:
        if not self.choices:
            return ["choices must not be empty"]
        bad = [choice for choice in self.choices if not _is_choice(choice)]
        if bad:
            return [f"a choice must be None, a bool, a finite number, a text, or a tuple or list "
                    f"of them, got {bad[0]!r}"]
        twice = [c for i, c in enumerate(self.choices) if c in self.choices[:i]]
        if twice:
            return [f"choices must differ, got {twice[0]!r} twice"]
        texts = [c for c in self.choices if isinstance(c, str) and c in self._texts()]
        return [f"choices must differ, {texts[0]!r} is how a tuple or list among them is stored"
                ] if texts else []

    def _texts(self) -> set[str]:
        """Return the texts that stand for tuples and lists."""
        return {_stored(choice) for choice in self.choices if isinstance(choice, (tuple, list))}

    def contains(self, value: Any) -> bool:
        return self._index(plain(value)) is not None

    def _index(self, value: Any) -> int | None:
        for i, choice in enumerate(self.choices):
            # True == 1 in Python, and a trial that wants 1 must not be given True.
            if isinstance(choice, bool) == isinstance(value, bool) and choice == value:
                return i
        return None

    def n_values(self) -> int:
        return len(self.choices)

    def values(self) -> Iterator[Any]:
        return iter(self.choices)

    def distribution(self) -> BaseDistribution:
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution([_stored(choice) for choice in self.choices])

    def encode(self, value: Any) -> Any:
        index = self._index(plain(value))
        if index is None:
            raise ValueError(f"{value!r} is not one of {self.describe()}")
        return _stored(self.choices[index])

    def decode(self, stored: Any) -> Any:
        for choice in self.choices:
            kept = _stored(choice)
            if type(kept) is type(stored) and kept == stored:
                return choice
        raise ValueError(f"{stored!r} is not one of {self.describe()}")

    def to_json(self) -> dict[str, Any]:
        return {"type": "categorical", "choices": [_jsonable(c) for c in self.choices]}

    def describe(self) -> str:
        return "[" + ", ".join(repr(choice) for choice in self.choices) + "]"


def _is_choice(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_choice(part) for part in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))


def _stored(choice: Any) -> Any:
    return repr(choice) if isinstance(choice, (list, tuple)) else choice


def _jsonable(choice: Any) -> Any:
    if isinstance(choice, tuple):
        return {"tuple": [_jsonable(part) for part in choice]}
    return [_jsonable(part) for part in choice] if isinstance(choice, list) else choice


def _from_jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(_from_jsonable(part) for part in value["tuple"])
    return [_from_jsonable(part) for part in value] if isinstance(value, list) else value


def space_to_json(space: Mapping[str, Param]) -> dict[str, Any]:
    """Return a space as JSON data, in its order."""
    return {name: param.to_json() for name, param in space.items()}


def space_from_json(data: Mapping[str, Mapping[str, Any]]) -> dict[str, Param]:
    """Return the space that `space_to_json` wrote."""
    return {name: _param_from_json(dict(param)) for name, param in data.items()}


def _param_from_json(data: dict[str, Any]) -> Param:
    kind = data.pop("type")
    if kind == RANGE_TEST:
        return RangeTested()
    if kind == "categorical":
        return Categorical([_from_jsonable(choice) for choice in data["choices"]])
    return Float(**data) if kind == "float" else Int(**data)


def params_to_json(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return params as JSON data that keeps tuples apart from lists."""
    return {name: _jsonable(plain(value)) for name, value in params.items()}


def params_from_json(data: Mapping[str, Any]) -> Params:
    """Return the params that `params_to_json` wrote."""
    return {name: _from_jsonable(value) for name, value in data.items()}


def params_key(params: Mapping[str, Any], seed: int | None = None) -> str:
    """Return a short text that is equal for equal params (and seed), whatever their order."""
    data = params_to_json(params)
    text = json.dumps([data, seed] if seed is not None else data, sort_keys=True)
    # A database index takes no texts of any length.
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def n_params_sets(space: Mapping[str, Param]) -> int | None:
    """Return how many different params a space holds, or None for a continuum."""
    counts = [param.n_values() for param in space.values()]
    return None if None in counts else math.prod(n for n in counts if n is not None)


def all_params(space: Mapping[str, Param]) -> Iterator[Params]:
    """Yield every params of a finite space once."""
    for values in itertools.product(*(list(param.values()) for param in space.values())):
        yield dict(zip(space, values, strict=True))


def grid_values(values: Any) -> list[Any]:
    """Return one param's grid values as a list of plain values."""
    values = plain(values)
    if isinstance(values, (str, bytes)) or not isinstance(values, (Sequence, range)):
        raise TypeError(f"expected a list of values, got {values!r}")
    return [plain(value) for value in values]
