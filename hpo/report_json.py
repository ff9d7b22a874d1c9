"""A study's results as strict JSON: what the report says, for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from hpo.audit import audit
from hpo.bounds import of_best
from hpo.importance import importance
from hpo.progress import band, best_so_far
from hpo.results import Phase, Results, Scores, Trial
from hpo.space import plain
from hpo.verdict import compare, flattery, summary, verdict, worth


def to_json(results: Results, known: Mapping[str, Any] | None = None) -> str:
    """Return all of it as strict JSON: floats to their last digit, null for NaN and infinity.

    `known` is what `importance` says, where that is known already.
    """
    phases = {name: _phase_data(results, phase) for name, phase in results.phases.items()}
    data = {
        "name": results.name, "metric": results.metric, "test_metric": results.test_metric,
        "direction": "maximize" if results.maximize else "minimize", "epochs": results.epochs,
        "verdict": verdict(results), "worth_it": worth(results),
        "flattery": dict(zip(("search_score", "too_good_by"), found, strict=True))
        if (found := flattery(results)) else None,
        "summary": [{**asdict(row), "val": _scores_data(row.val), "test": _scores_data(row.test)}
                    for row in summary(results)],
        "comparisons": [{**asdict(c), "outcome": c.outcome, "n_seeds_to_show": c.n_seeds_to_show}
                        for c in compare(results)],
        **(importance(results) if known is None else known), "pruning": _pruning(results),
        "phases": phases, "at_bounds": [asdict(one) for one in of_best(results)],
        "candidates": [{**asdict(c), "val": _scores_data(c.val), "test": _scores_data(c.test)}
                       for c in results.candidates],
        "lr_range": asdict(results.sweep) if results.sweep else None,
        "registry": list(results.registry), "settings": results.settings, "data": results.data,
    }
    text = json.dumps(strict(data), allow_nan=False, indent=1, ensure_ascii=False)
    # An error's text may hold half a character, which no file does.
    return text.encode(errors="replace").decode()


def _pruning(results: Results) -> dict[str, Any] | None:
    found = audit(results, int(results.settings.get("top_k") or 1))
    if found is None:
        return None
    return {**asdict(found), "false_fraction": found.false_fraction, "interval": found.interval}


def _phase_data(results: Results, phase: Phase) -> dict[str, Any]:
    return {
        "study": phase.study, "n_trials": phase.n_trials, "n_planned": phase.n_planned,
        "n_epochs": phase.n_epochs, "duration_s": phase.duration_s, "states": phase.states(),
        "best_so_far": best_so_far(results, phase.name) if phase.name != "confirm" else [],
        "best_so_far_band": asdict(found) if (found := band(results, phase.name)) else None,
        "trials": [_trial_data(trial) for trial in phase.trials],
    }


def _trial_data(trial: Trial) -> dict[str, Any]:
    return {"number": trial.number, "state": trial.state, "value": trial.value,
            "params": trial.params, "reason": trial.reason, "n_epochs": trial.n_epochs,
            "curve": trial.curve, "started_at": trial.started_at, "ended_at": trial.ended_at,
            "attrs": trial.attrs}


def _scores_data(scores: Scores | None) -> dict[str, Any] | None:
    if scores is None:
        return None
    return {"n": scores.n, "mean": scores.mean, "sd": scores.sd, "by_seed": scores.by_seed}


def strict(value: Any) -> Any:
    """Return a value as JSON can hold it exactly; what JSON does not know becomes its text."""
    value = plain(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [strict(item) for item in value]
    return value.isoformat() if isinstance(value, datetime) else str(value)
