"""How registered results stand to each other: which is confirmed, and what one is better by.

Two results that were trained on the same seeds had the same splits, initial weights and order of
rows; so they are compared seed by seed, which leaves out the noise that both have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpo.paired import differences, level_means, shared
from hpo.read_results import from_registry
from hpo.results import Candidate, Scores, on_test
from hpo.verdict import number, signed

# Of a float64, with room for a sum of many.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Gap:
    """Mean score of one result minus that of another, as it is: above zero is not always better.

    It is over the `n_seeds` that both have, or, where they share none, that of their means.
    `low` and `high` bound it with 95 % confidence; both are None for fewer than two shared seeds.
    """

    metric: str
    mean: float
    n_seeds: int
    low: float | None = None
    high: float | None = None

    def outcome(self, maximize: bool) -> str:
        """Return `better`, `worse`, `equal`, `noise`, or `unknown` for too few seeds."""
        if self.low is None or self.high is None:
            return "unknown"
        if self.low <= 0 <= self.high:
            return "noise" if self.mean else "equal"
        return "better" if (self.mean > 0) == maximize else "worse"

    def text(self, maximize: bool) -> str:
        """Return `0.0021 better (95 % interval +0.0004 to +0.0038, 5 shared seeds)`."""
        way = "better" if (self.mean > 0) == maximize else "worse"
        size = f"{number(abs(self.mean))} {way}" if self.mean else "the same mean"
        seeds = f"{self.n_seeds} shared seed{'s' if self.n_seeds != 1 else ''}"
        if self.low is None or self.high is None:
            return f"{size} ({seeds}: too few for an interval)"
        sign = 1.0 if maximize else -1.0
        low, high = sorted((sign * self.low, sign * self.high))
        return f"{size} (95 % interval {signed(low)} to {signed(high)}, {seeds})"


def label(row: Mapping[str, Any]) -> str:
    """Return what people call a row: `search rank 1 (3f2a1b9c)`."""
    origin = f"search rank {row['rank']}" if row["phase"] == "search" else row["phase"]
    return f"{origin} ({row['id'][:8]})"


def why_unconfirmed(row: Mapping[str, Any]) -> str | None:
    """Return why a row is no confirmed result, or None if it is one."""
    if not row.get("scores"):
        return "it has no score on fresh seeds"
    if lost := row.get("lost_seeds"):
        many = "s" if len(lost) > 1 else ""
        return f"it has no result on seed{many} {', '.join(map(str, lost))}"
    if row.get("val_mean") is None or not math.isfinite(row["val_mean"]):
        return "its mean is no finite number"
    return None


def scores(row: Mapping[str, Any]) -> Candidate | None:
    """Return a row's scores by seed, or None where it has none."""
    found = from_registry([row], row["metric"] or "")
    return found[0] if found else None


def best(rows: Sequence[Mapping[str, Any]], maximize: bool, champion: str | None) -> Any:
    """Return the confirmed row with the best validation mean, or None; the champion wins a tie.

    The test split has no say: it is there to tell what the chosen one is worth.
    """
    fit = {row["id"]: row for row in rows if why_unconfirmed(row) is None}
    # A row that was trained on an easy seed more gets nothing for it.
    means = level_means({row_id: found.val.by_seed for row_id, row in fit.items()
                         if (found := scores(row)) is not None and found.val is not None})
    sign = -1.0 if maximize else 1.0
    return min((fit[row_id] for row_id in means), default=None,
               key=lambda row: (sign * means[row["id"]], row["id"] != champion,
                                row["phase"] != "search", row["rank"]))


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Gap | None:
    """Return ours minus theirs: on the test split where both have it on all seeds, else on the
    validation split; None where they have no metric or no score in common.
    """
    a, b = scores(ours), scores(theirs)
    if ours["metric"] != theirs["metric"] or a is None or b is None or not (a.val and b.val):
        return None
    tested = all(one.test is not None and one.val is not None and one.test.n >= one.val.n
                 for one in (a, b))
    return on_split(ours, theirs, "test" if tested else "val")


def on_split(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], split: str
) -> Gap | None:
    """Return ours minus theirs on one split, seed by seed where they share seeds."""
    one, other = scores(ours), scores(theirs)
    a, b = (None if found is None else getattr(found, split) for found in (one, other))
    if a is None or b is None:
        return None
    metric = on_test(ours["metric"]) if split == "test" else ours["metric"]
    return compared(a, b, metric, _grain(ours, split) if metric.endswith("accuracy") else 0.0)


def _grain(row: Mapping[str, Any], split: str) -> float:
    """Return the step in which an accuracy comes: one image."""
    n_images = row.get(f"n_{split}")
    return 1 / n_images if n_images else 0.0


def compared(a: Scores, b: Scores, metric: str, grain: float = 0.0) -> Gap:
    """Return a minus b, seed by seed where they share seeds.

    `grain` is the step that the scores come in, which hides noise below it.
    """
    by_seed = shared(a.by_seed, b.by_seed)
    if not by_seed:
        return Gap(metric, a.mean - b.mean, 0)
    found = differences({"": by_seed}, grain)[""]
    # The same scores, summed in another order, differ by rounding.
    near = abs(found.mean) <= _ROUNDING * max(abs(a.mean), abs(b.mean))
    return Gap(metric, 0.0 if near else found.mean, found.n, found.low, found.high)
