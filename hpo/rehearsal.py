"""What is tried before any trial: the data and one step, an objective's first epoch, a rate sweep.

A fault of the module is then found at its cheapest, with the study's first params.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.attempt import built_from, make_run
from hpo.drive import BadMetrics, Goal, checked
from hpo.spec import StudySpec
from hpo.tasks import finite

if TYPE_CHECKING:
    from hpo.diagnosis.finding import Finding
    from hpo.ranks import Ranks
    from hpo.train.recipe import Recipe


def prepare(spec: StudySpec, order: dict[str, Any]) -> dict[str, Any]:
    """Build a recipe from the study's first params, load its data and try one step.

    Returns what is known of the data and the model, with warnings of what they show at a glance;
    an objective of the user's own has neither.
    """
    if spec.build is None:
        return {"first_epoch": first_epoch(spec, order)} if order.get("first_epoch") else {}
    from hpo.diagnosis.cheap import warnings_of
    from hpo.train.trying import prepare as prepare_recipe

    with tempfile.TemporaryDirectory(prefix="hpo-prepare-") as folder:
        run = make_run(order, int(order["seed"]), Path(folder))
        return prepare_recipe(spec.build(run, **first_params(spec)), run, warnings_of)


def examine(
    spec: StudySpec, order: dict[str, Any], trace: Path | None, ranks: Ranks
) -> Iterator[Finding]:
    """Yield what `hpo doctor` is to say of a study's recipe, and of a loop of its own."""
    goal, build = Goal(spec.metric, spec.direction == "maximize"), spec.build
    if build is not None:
        with tempfile.TemporaryDirectory(prefix="hpo-doctor-") as folder:
            yield from _of_recipe(spec, order, Path(folder), trace, ranks)
    if spec.objective is not None:
        from hpo.diagnosis.own_loop import examine_loop

        yield from examine_loop(lambda: first_epoch(spec, order), goal, int(order["epochs"]),
                                alone=build is None)


def _of_recipe(
    spec: StudySpec, order: dict[str, Any], folder: Path, trace: Path | None, ranks: Ranks
) -> Iterator[Finding]:
    from hpo.diagnosis.examination import examine as examine_recipe
    from hpo.diagnosis.examination import guarded
    from hpo.diagnosis.finding import WRONG, not_checked
    from hpo.diagnosis.together import PART, together_findings

    run, params = make_run(order, int(order["seed"]), folder), first_params(spec)

    def build() -> Recipe:
        # Seeded each time: what `build` draws must be the same.
        assert spec.build is not None
        return spec.build(make_run(order, run.seed, folder), **params)

    is_sound = True
    for finding in examine_recipe(build, run, metric=spec.metric,
                                  maximize=spec.direction == "maximize", trace=trace):
        is_sound &= finding.verdict != WRONG
        yield finding
    if ranks.n > 1 and is_sound:
        yield from guarded(PART, lambda: together_findings(build, run, ranks, order, params))
    elif ranks.n > 1:
        yield not_checked(PART, "all", "mend what is wrong first")


def first_epoch(spec: StudySpec, order: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of an objective's first epoch at the study's first params.

    Raises:
        BadMetrics: for anything but a dict of numbers with the study's metric in it.
    """
    goal = Goal(spec.metric, spec.direction == "maximize")
    assert spec.objective is not None
    with tempfile.TemporaryDirectory(prefix="hpo-check-") as folder:
        run = make_run(order, int(order["seed"]), Path(folder))
        source = spec.objective(run, **first_params(spec))
        if not hasattr(source, "__next__"):
            raise BadMetrics(f"it must yield a dict with '{goal.metric}' an epoch, and returned "
                             f"{type(source).__name__}")
        try:
            metrics = next(source, None)
            if metrics is None:
                raise BadMetrics(f"it ended without yielding '{goal.metric}'")
            return finite(checked(metrics, goal, 0))
        finally:
            source.close()


def sweep(
    spec: StudySpec, order: dict[str, Any], *, low: float | None = None, high: float | None = None
) -> dict[str, Any]:
    """Run the learning-rate range test at the study's first params and return its JSON."""
    from hpo.baselines.lr_range import lr_range

    with tempfile.TemporaryDirectory(prefix="hpo-sweep-") as folder:
        run = make_run(order, int(order["seed"]), Path(folder))
        build = built_from(spec, first_params(spec))
        return finite(lr_range(build, run, low=low, high=high).to_json())


def first_params(spec: StudySpec) -> dict[str, Any]:
    """Return the study's defaults, with the lowest value or first choice where there is none."""
    full = spec.full_params({})
    lows = {name: getattr(param, "low", None) if param.n_values() is None
            else next(iter(param.values())) for name, param in spec.space.items()}
    return {name: full.get(name, lows[name]) for name in spec.space}
