"""Studies of any size, written in seconds: what the storage's benchmarks begin with."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

from optuna.distributions import FloatDistribution, distribution_to_json
from sqlalchemy import insert, text

N_PARAMS, N_EPOCHS = 6, 10
SPACE = {
    f"x{i}": FloatDistribution(1e-5, 1.0, log=i % 2 == 0) for i in range(N_PARAMS)}
TEXTS = {name: distribution_to_json(kind) for name, kind in SPACE.items()}
BEGIN = datetime(2026, 1, 1)
# Rows go in by so many trials at a time, to keep a hundred thousand of them out of memory.
_AT_ONCE = 5000


def curve(params: dict[str, float]) -> Iterator[float]:
    """Yield the metric of each epoch: a smooth curve towards a value that the params decide."""
    end = 1.0 - 0.1 * sum((math.log10(x) + 2) ** 2 for x in params.values()) / N_PARAMS
    for epoch in range(N_EPOCHS):
        yield end * (1 - 0.6 ** (epoch + 1))


def fill(url: str, name: str, n_trials: int, seed: int = 0) -> None:
    """Make a study of ended trials in a database that is set up, with hpo's own rows.

    Every second trial is pruned half-way, as under a median pruner.
    """
    import optuna

    from storage import Database

    db = Database(url)
    study = optuna.create_study(storage=db.studies, study_name=name, direction="maximize")
    rng = random.Random(seed)
    numbers = iter(range(n_trials))
    while chunk := list(islice(numbers, _AT_ONCE)):
        with db.engine.begin() as connection:
            for table, found in _rows(study._study_id, name, chunk, rng).items():
                connection.execute(insert(table), found)
    with db.engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            last = "SELECT setval('trials_trial_id_seq', (SELECT max(trial_id) FROM trials))"
            connection.execute(text(last))
        connection.execute(text("ANALYZE"))
    db.close()


def _rows(study_id: int, name: str, numbers: list[int], rng: random.Random) -> dict[Any, Any]:
    from storage import rows, schema

    tables = (rows.trials, rows.params, rows.reports, rows.values, rows.user_attrs,
              schema.tickets, schema.epochs)
    found: dict[Any, list[dict[str, Any]]] = {table: [] for table in tables}
    for number in numbers:
        trial_id, pruned = number + 1, number % 2 == 1
        values = {key: 10 ** rng.uniform(-5, 0) for key in SPACE}
        reports = list(curve(values))[:N_EPOCHS // 2 if pruned else N_EPOCHS]
        begin = BEGIN + timedelta(seconds=number)
        state = "PRUNED" if pruned else "COMPLETE"
        found[rows.trials].append({
            "trial_id": trial_id, "number": number, "study_id": study_id, "state": state,
            "datetime_start": begin, "datetime_complete": begin + timedelta(milliseconds=900)})
        found[rows.params] += [
            {"trial_id": trial_id, "param_name": key, "param_value": value,
             "distribution_json": TEXTS[key]} for key, value in values.items()]
        found[rows.reports] += [
            {"trial_id": trial_id, "step": epoch, "intermediate_value": value,
             "intermediate_value_type": "FINITE"} for epoch, value in enumerate(reports)]
        found[rows.values].append({"trial_id": trial_id, "objective": 0, "value": reports[-1],
                                   "value_type": "FINITE"})
        found[rows.user_attrs] += [
            {"trial_id": trial_id, "key": key, "value_json": json.dumps(value)}
            for key, value in (("n_epochs", len(reports)), ("reason", "median" * pruned))]
        found[schema.tickets].append({
            "name": name, "study": name, "idx": number, "kind": "trial", "payload": {"seed": 0},
            "state": "done", "attempt": 0, "created_at": begin.astimezone(),
            "trial_id": trial_id, "trial_number": number})
        found[schema.epochs] += [
            {"study": name, "trial_number": number, "epoch": epoch, "metrics": {"score": value},
             "at": begin.astimezone()} for epoch, value in enumerate(reports)]
    return found
