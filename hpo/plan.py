"""What each phase of a run will train at most: said before it begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpo.rungs import rungs_of
from hpo.settings import Settings
from hpo.space import n_params_sets, space_from_json


def n_search(settings: Settings, spec: Mapping[str, Any]) -> int:
    """Return how many search trials there will be: all asked for, or all that a space holds."""
    n, total = int(settings.n_trials or 0), n_params_sets(space_from_json(spec["space"]))
    return n if total is None or settings.allow_duplicates else min(n, total)


def n_random(settings: Settings, spec: Mapping[str, Any]) -> int:
    """Return how many trials of random search there will be, by itself as many as of the search.
    """
    n = int(settings.n_random or settings.n_trials or 0)
    total = n_params_sets(space_from_json(spec["space"]))
    return n if total is None or settings.allow_duplicates else min(n, total)


def plan(course_settings: Settings, spec: Mapping[str, Any], n_cells: int | None) -> list[Planned]:
    """Return what each phase will train at most, in order."""
    epochs = int(course_settings.epochs or 0)
    n = n_search(course_settings, spec)
    n_candidates = (int(course_settings.top_k or 1) + 1 + bool(n_cells) + spec["has_lr_range"]
                    + ("random" in course_settings.phases))
    drawn = n_random(course_settings, spec)
    then = ", then the test split once" if spec["has_build"] else ""
    rows = {
        "lr-range": Planned("lr-range", 1, epochs + 1, "sweeps of one epoch in all, then a trial")
        if spec["has_lr_range"] else None,
        "grid": Planned("grid", n_cells, n_cells * epochs, "no pruning") if n_cells else None,
        "random": Planned("random", drawn, drawn * epochs, "random search, no pruning"),
        "search": Planned("search", n, n * epochs,
                          f"{course_settings.sampler}{_pruning(course_settings)}"),
    }
    planned = [row for phase in course_settings.phases if (row := rows.get(phase)) is not None]
    if "confirm" in course_settings.phases:
        n_first = n_candidates * int(course_settings.confirm_seeds or 1)
        budget = (course_settings.confirm_budget or 0.0) * sum(row.n_epochs for row in planned)
        n_confirm = max(n_first, int(budget // epochs) if epochs else 0)
        close = ", more where two are close" if n_confirm > n_first else ""
        planned.append(Planned("confirm", n_confirm, n_confirm * epochs,
                               f"at most {n_candidates} candidates on "
                               f"{course_settings.confirm_seeds} fresh seeds each{close}{then}"))
    return planned


def _pruning(settings: Settings) -> str:
    """Say how the search stops trials, after what it draws them by."""
    if settings.pruner != "rungs":
        return "" if settings.pruner == "none" else f", {settings.pruner} pruning"
    rungs = rungs_of(int(settings.epochs or 0), int(settings.prune_warmup or 0))
    if not rungs:
        return ", no pruning in so few epochs"
    at = " and ".join(map(str, rungs))
    return f", pruning after {at} epoch{'s' if rungs[-1] > 1 else ''}"


@dataclass(frozen=True)
class Planned:
    """What a phase will train: trials, and epochs at most."""

    phase: str
    n_trials: int
    n_epochs: int
    how: str

    def text(self) -> str:
        """Return it as one line."""
        trials = f"{self.n_trials} trial{'s' if self.n_trials != 1 else ''}"
        return f"  {self.phase:<9} {trials:>10}, at most {self.n_epochs} epochs ({self.how})"
