"""Read what a study has found out of the database, into the values of `hpo.results`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from hpo.errors import NoResult
from hpo.results import (
    PHASES,
    Candidate,
    Phase,
    Results,
    Scores,
    Sweep,
    Trial,
    on_test,
    study_of,
)

if TYPE_CHECKING:
    import optuna

    from storage import Database


def collect(db: Database, name: str) -> Results:
    """Read one study, all its phases, its tickets and its registry rows.

    Raises:
        NoResult: where the database holds no study of that name.
    """
    known = {study.study_name: study for study in db.studies.get_all_studies()}
    phases = {phase: read_phase(db, study_of(name, phase), phase)
              for phase in PHASES if study_of(name, phase) in known}
    stored = db.runs.study(name) or {}
    if not phases and not stored:
        raise _unknown(name, sorted({str(study).split("/")[0] for study in known}))
    metric = stored.get("metric") or "value"
    sweep = next((sweep_of(t.result) for t in db.tickets.list(study_of(name, "lr-range"))
                  if t.kind == "sweep" and t.result), None)
    registry = tuple(map(dict, db.registry.rows(name)))
    return Results(
        name=name, metric=metric, maximize=_maximizes(stored, known.get(name)),
        epochs=stored.get("epochs"), module=stored.get("module"), phases=phases,
        candidates=from_registry(registry, metric) or _from_trials(phases.get("confirm")),
        registry=registry, sweep=sweep, settings=stored.get("settings") or {},
        data=stored.get("data") or {}, space=stored.get("space") or {},
        workers=_workers(db, phases.values()),
    )


def _workers(db: Database, phases: Iterable[Phase]) -> dict[str, dict[str, Any]]:
    """Return what the trials' workers ran with, by their names."""
    named = {str(owner) for phase in phases for trial in phase.trials
             if (owner := trial.attrs.get("worker"))}
    return db.runs.workers(sorted(named)) if named else {}


def _unknown(name: str, known: list[str]) -> NoResult:
    return NoResult(f"study '{name}' is not in this database "
                    f"(there {'are: ' + ', '.join(known) if known else 'is no study yet'})")


def _maximizes(stored: Mapping[str, Any], study: Any) -> bool:
    if stored.get("direction"):
        return str(stored["direction"]).lower().startswith("max")
    return study is not None and study.directions[0].name == "MAXIMIZE"


def read_phase(db: Database, study: str, phase: str) -> Phase:
    """Read the Optuna study of one phase, and its tickets; a KeyError where there is none."""
    trials = db.studies.get_all_trials(db.studies.get_study_id_from_name(study), deepcopy=False)
    tickets = db.tickets.list(study)
    sweeps = [t.result for t in tickets if t.kind == "sweep" and t.result]
    return Phase(phase, study, tuple(map(from_optuna, trials)),
                 sum(t.kind == "trial" for t in tickets) or None,
                 sum(float(result.get("epochs") or 0.0) for result in sweeps))


def from_optuna(trial: optuna.trial.FrozenTrial) -> Trial:
    """Return an Optuna trial as plain values; its naive times are this machine's local ones."""
    # `.values` raises nothing where a trial has none; `.value` does for several objectives.
    value = trial.values[0] if trial.values else None
    return Trial(
        number=trial.number, state=trial.state.name, value=value, params=dict(trial.params),
        reason=str(trial.user_attrs.get("reason") or ""),
        curve=tuple(sorted(trial.intermediate_values.items())),
        started_at=_aware(trial.datetime_start), ended_at=_aware(trial.datetime_complete),
        attrs=dict(trial.user_attrs), distributions=dict(trial.distributions),
    )


def _aware(when: datetime | None) -> datetime | None:
    return when.astimezone(UTC) if when else None


def sweep_of(result: Mapping[str, Any]) -> Sweep:
    """Return a sweep from its JSON, which has null for what is not finite."""
    known = {name: result[name] for name in Sweep.__dataclass_fields__ if name in result}
    for name in ("rates", "losses", "smoothed"):
        known[name] = _numbers(known.get(name) or ())
    known["by_seed"] = tuple(map(_numbers, known.get("by_seed") or ()))
    return Sweep(**known)


def _numbers(values: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else value for value in values)


def from_registry(rows: Iterable[Mapping[str, Any]], metric: str) -> tuple[Candidate, ...]:
    """Return the candidates that were registered, each with its scores by seed."""
    return tuple(_registered(row, metric) for row in rows if row.get("scores"))


def _registered(row: Mapping[str, Any], metric: str) -> Candidate:
    runs = row["scores"]
    val = _by_seed((run["seed"], run.get("val")) for run in runs)
    tests = _by_seed((run["seed"], (run.get("test_metrics") or {}).get(on_test(metric)))
                     for run in runs)
    name = f"search#{row['rank']}" if row["phase"] == "search" else row["phase"]
    return Candidate(name, params=row.get("params") or {}, source_trial=row.get("trial"),
                     val=val, test=tests, trials=tuple(run["trial"] for run in runs),
                     n_rounds=1 + max(run.get("round") or 0 for run in runs),
                     n_readings=max(run.get("reading") or 0 for run in runs))


def _by_seed(pairs: Iterable[tuple[Any, Any]]) -> Scores | None:
    found = {int(seed): float(value) for seed, value in pairs
             if isinstance(value, (int, float)) and math.isfinite(value)}
    return Scores(found) if found else None


def _from_trials(confirm: Phase | None) -> tuple[Candidate, ...]:
    """Return the candidates of a confirmation that has not come to its end yet."""
    groups: dict[str, list[Trial]] = {}
    for trial in confirm.trials if confirm else ():
        if trial.attrs.get("candidate"):
            groups.setdefault(trial.attrs["candidate"], []).append(trial)
    return tuple(
        Candidate(name, params=trials[0].params, source_trial=trials[0].attrs.get("source_trial"),
                  val=_by_seed((t.attrs.get("seed", t.number), t.score) for t in trials),
                  trials=tuple(t.number for t in trials))
        for name, trials in groups.items())
