"""One axis of the parallel coordinates: where a value lies on it, and which values it names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpo.axes import wants_log
from hpo.results import Results, Trial

# The score's axis reaches down to this part of the COMPLETE trials; worse ones end at its foot.
_SHOWN_FRACTION = 0.9
_N_TICKS = 6
_N_LETTERS = 14


@dataclass(frozen=True)
class Scale:
    """A scale from 0, the foot, to 1; `choices` are evenly spaced, `flipped` has its low up."""

    low: float = 0.0
    high: float = 1.0
    log: bool = False
    choices: tuple[Any, ...] = ()
    flipped: bool = False

    @classmethod
    def of_param(cls, name: str, trials: Sequence[Trial]) -> Scale:
        """Return a param's scale: over its space, or over what was seen where none is kept."""
        kinds = [t.distributions[name] for t in trials if name in t.distributions]
        values = [t.params[name] for t in trials if name in t.params]
        choices = [c for kind in kinds for c in getattr(kind, "choices", ())]
        if choices or not all(map(_is_number, values)):
            # A choice may be a list, which is in no set.
            seen = {repr(c): c for c in [*choices, *values]}
            return cls(choices=tuple(seen.values()))
        bounds = [float(b) for kind in kinds for b in (kind.low, kind.high)] or values
        log = any(getattr(kind, "log", False) for kind in kinds)
        return cls(float(min(bounds)), float(max(bounds)), log)

    @classmethod
    def of_scores(cls, results: Results) -> Scale:
        """Return the scale of the search's scores, the better ones up."""
        scores = sorted((t.score for t in results.phase("search").trials if t.score is not None),
                        reverse=results.maximize)
        shown = scores[:max(2, math.ceil(_SHOWN_FRACTION * len(scores)))]
        return cls(min(shown), max(shown), wants_log(shown), flipped=not results.maximize)

    def at(self, value: Any) -> float:
        """Return the place of a value, NaN for one that is missing or no number."""
        if self.choices:
            known = [repr(choice) for choice in self.choices]
            if repr(value) not in known:
                return math.nan
            return (known.index(repr(value)) + 0.5) / len(known)
        if not _is_number(value) or not math.isfinite(value) or self.log and value <= 0:
            return math.nan
        if self.low == self.high:
            return 0.5
        as_drawn = math.log if self.log else float
        place = (as_drawn(value) - as_drawn(self.low)) / (as_drawn(self.high) - as_drawn(self.low))
        return min(1.0, max(0.0, 1 - place if self.flipped else place))

    def ticks(self) -> list[tuple[float, str]]:
        """Return place and text of each value that the axis names."""
        return [(self.at(value), _short(value)) for value in self._named()]

    def _named(self) -> list[Any]:
        if self.choices:
            return list(self.choices[::math.ceil(len(self.choices) / (2 * _N_TICKS))])
        if self.low == self.high:
            return [self.low]
        from matplotlib.ticker import LogLocator, MaxNLocator

        decades = math.log10(self.high / self.low) if self.log else 0.0
        locator = LogLocator(subs=(1.0,) if decades >= 2 else (1.0, 2.0, 5.0)) if self.log \
            else MaxNLocator(_N_TICKS - 1)
        inside = [float(v) for v in locator.tick_values(self.low, self.high)
                  if self.low <= v <= self.high]
        return inside or [self.low, self.high]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))
    return text if len(text) <= _N_LETTERS else text[:_N_LETTERS - 1] + "…"
