"""Studies for the tests of reports, pictures and the dashboard: as values, and in a database."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState

import storage
from hpo.results import Candidate, Phase, Results, Scores, Sweep, Trial

START = datetime(2026, 1, 1, tzinfo=UTC)
SPACE = {
    "lr": FloatDistribution(1e-4, 1e-1, log=True), "dropout": FloatDistribution(0.0, 0.5),
    "hidden": CategoricalDistribution([128, 256, 512]),
}


def curve(rng: random.Random, top: float, n_epochs: int) -> tuple[tuple[int, float], ...]:
    """Return a learning curve that rises towards `top`."""
    rate = rng.uniform(0.3, 1.0)
    return tuple((e, min(0.9999, top - (top - 0.1) * math.exp(-rate * (e + 1))
                         + rng.gauss(0, 0.004))) for e in range(n_epochs))


def trials(n: int, top: float, *, seed: int = 0, n_epochs: int = 8,
           prune: bool = True) -> tuple[Trial, ...]:
    """Return trials of which the worse ones are pruned, one after another in time."""
    rng, at, made = random.Random(seed), START, []
    for number in range(n):
        quality = top - abs(rng.gauss(0, 0.04))
        points = curve(rng, quality, n_epochs)
        cut = prune and number >= 5 and quality < top - 0.03
        points = points[:n_epochs // 2] if cut else points
        ends = at + timedelta(seconds=len(points))
        params = {"lr": 10 ** rng.uniform(-4, -1), "dropout": rng.uniform(0, 0.5),
                  "hidden": rng.choice([128, 256, 512])}
        made.append(Trial(
            number, "PRUNED" if cut else "COMPLETE", max(v for _, v in points), params,
            f"median at epoch {points[-1][0]}" if cut else "", points, at, ends,
            {"n_epochs": len(points)}, SPACE))
        at = ends
    return tuple(made)


def failed(n: int, reason: str = "error: ValueError: boom") -> tuple[Trial, ...]:
    """Return trials that failed before their first epoch."""
    return tuple(Trial(i, "FAIL", None, {"lr": 0.1}, reason) for i in range(n))


def scores(*values: float) -> Scores:
    """Return scores of as many seeds."""
    return Scores({100 + i: value for i, value in enumerate(values)})


def candidate(name: str, *values: float, test: Iterable[float] | None = None) -> Candidate:
    """Return a candidate with these validation scores, and test scores where given."""
    return Candidate(name, {"lr": 0.01, "hidden": 256}, 3, scores(*values),
                     None if test is None else scores(*test))


def sweep() -> Sweep:
    """Return an LR range sweep of the usual shape."""
    rng = random.Random(1)
    rates = [10 ** (-7 + 8 * i / 99) for i in range(100)]
    smooth = [2.3 - 1.5 / (1 + math.exp(-3 * (math.log10(r) + 2.8)))
              + 9 * max(0.0, math.log10(r) + 0.9) ** 2 for r in rates]
    return Sweep(tuple(rates), tuple(s + rng.gauss(0, 0.07) for s in smooth), tuple(smooth),
                 1.6e-3, 4e-4, 8e-3, "steepest descent", 1.0)


def results(
    search: Iterable[Trial] | None = None, candidates: Iterable[Candidate] | None = None,
    **other: Any,
) -> Results:
    """Return a whole study with all phases; any part can be given instead."""
    phases = {
        "search": Phase("search", "toy", trials(20, 0.985) if search is None else tuple(search),
                        20),
        "grid": Phase("grid", "toy/grid", trials(9, 0.97, seed=1, prune=False), 9),
        "lr-range": Phase("lr-range", "toy/lr-range", trials(1, 0.96, seed=2), 1, 1.0),
        "confirm": Phase("confirm", "toy/confirm", trials(12, 0.98, seed=3, prune=False), 12),
    }
    if candidates is None:
        candidates = (
            candidate("search#1", 0.981, 0.983, 0.982, test=(0.978, 0.980, 0.979)),
            candidate("grid", 0.968, 0.966, 0.967, test=(0.965, 0.963, 0.964)),
            candidate("lr-range", 0.962, 0.960, 0.961, test=(0.959, 0.957, 0.958)),
            candidate("default", 0.951, 0.949, 0.950, test=(0.948, 0.946, 0.947)))
    said: dict[str, Any] = {
        "name": "toy", "metric": "val_accuracy", "maximize": True, "epochs": 8, "module": "toy",
        "phases": phases, "candidates": tuple(candidates), "sweep": sweep(),
        "settings": {"n_trials": 20, "seed": 0, "sampler": "tpe"}}
    return Results(**{**said, **other})


def stored(folder: Path, name: str = "toy", sample: Results | None = None) -> storage.Database:
    """Return an opened SQLite database that holds a study like `results`."""
    url = f"sqlite:///{folder / 'hpo.db'}"
    storage.init(url)
    db = storage.Database(url)
    fill(db, name, sample or results())
    return db


def fill(db: storage.Database, name: str, sample: Results) -> None:
    """Write a study into a database as a run would leave it."""
    direction = "maximize" if sample.maximize else "minimize"
    db.runs.save_study(name, module=sample.module, metric=sample.metric, direction=direction,
                       epochs=sample.epochs, settings=dict(sample.settings), space={}, data={})
    for phase in sample.phases.values():
        study = optuna.create_study(
            study_name=phase.study.replace("toy", name), storage=db.studies, direction=direction)
        for trial in phase.trials:
            study.add_trial(frozen(trial))
    for one in sample.candidates:
        db.registry.add(row(name, one, sample))
    db.studies.flush()


def frozen(trial: Trial) -> optuna.trial.FrozenTrial:
    """Return a trial as Optuna holds it."""
    value = trial.value if trial.state in ("COMPLETE", "PRUNED") else None
    return optuna.create_trial(
        state=TrialState[trial.state], value=value, intermediate_values=dict(trial.curve),
        params=dict(trial.params) if trial.distributions else {},
        distributions=dict(trial.distributions),
        user_attrs={**trial.attrs, "reason": trial.reason})


def row(name: str, one: Candidate, sample: Results) -> Mapping[str, Any]:
    """Return a registry row for a candidate."""
    assert one.val is not None
    test = one.test.by_seed if one.test else {}
    runs = [{"seed": seed, "val": value, "trial": i,
             "test_metrics": {"test_accuracy": test[seed]} if seed in test else {}}
            for i, (seed, value) in enumerate(one.val.by_seed.items())]
    phase, _, rank = one.name.partition("#")
    return {"study": name, "phase": phase, "rank": int(rank or 1), "trial": one.source_trial,
            "params": dict(one.params), "metric": sample.metric, "val_mean": one.val.mean,
            "val_sd": one.val.sd, "seeds": list(one.val.by_seed), "scores": runs,
            "versions": {"hpo": "1", "torch": "2"}, "git_commit": "abc", "device": "cpu"}
