"""The confirmation: the search's best and the baselines' picks on fresh seeds, and their registry.

A search's own score is the best of many tries and promises too much; what is registered is the
mean over seeds that chose nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.drive import Goal
from hpo.queue import SCORE_OFFSET, study_of
from hpo.space import params_from_json, params_key, params_to_json, space_from_json
from hpo.studies import epochs_spent, study_names
from hpo.versions import git_commit, versions

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from hpo.settings import Settings
    from storage.database import Database
    from storage.ticket import NewTicket, Ticket


@dataclass(frozen=True)
class Candidate:
    """Params that stand for confirmation, the phase that found them, and its trial's number."""

    phase: str
    rank: int
    params: Mapping[str, Any]
    trial: int | None

    @property
    def label(self) -> str:
        """`search#1`, `grid`, `random`, `lr-range` or `default`."""
        return f"search#{self.rank}" if self.phase == "search" else self.phase


def fresh_seeds(study_seed: int, n: int) -> list[int]:
    """Return seeds that no trial of the search, the grid or the sweep has used."""
    return [study_seed + 1 + i for i in range(n)]


def ranked(db: Database, study: str, goal: Goal) -> list[FrozenTrial]:
    """Return a study's COMPLETE trials, best first; the earlier one wins a tie."""
    from optuna.trial import TrialState

    if study not in study_names(db):
        return []
    study_id = db.studies.get_study_id_from_name(study)
    trials = db.studies.get_all_trials(study_id, deepcopy=False, states=(TrialState.COMPLETE,))
    sign = -1.0 if goal.maximize else 1.0
    return sorted(trials, key=lambda t: (sign * float(t.value or 0.0), t.number))


def candidates(
    db: Database, name: str, spec: Mapping[str, Any], defaults: Mapping[str, Any] | None,
    top_k: int,
) -> list[Candidate]:
    """Return what is to be confirmed: the search's best `top_k`, the baselines' best, defaults."""
    goal = Goal(spec["metric"], spec["direction"] == "maximize")
    space = space_from_json(spec["space"])
    found = []
    for phase, n in (("search", top_k), ("grid", 1), ("random", 1), ("lr-range", 1)):
        for i, trial in enumerate(_distinct(ranked(db, study_of(name, phase), goal))[:n]):
            params = {n: space[n].decode(v) for n, v in trial.params.items() if n in space}
            found.append(Candidate(phase, i + 1, params_to_json(params), trial.number))
    if defaults is not None and found:
        found.append(Candidate("default", 1, dict(defaults), None))
    return found


def _distinct(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the first trial of each params: confirming one twice tells nothing."""
    seen: dict[str, FrozenTrial] = {}
    for trial in trials:
        seen.setdefault(params_key(trial.params), trial)
    return list(seen.values())


def _key(params: Mapping[str, Any], seed: int) -> str:
    return params_key(params_from_json(params), seed)


def _by_key(db: Database, name: str) -> dict[str, Ticket]:
    tickets = db.tickets.list(study_of(name, "confirm"))
    return {_key(t.params or {}, t.payload["seed"]): t for t in tickets if t.kind == "trial"}


def items(
    db: Database, name: str, candidates: Sequence[Candidate], seeds: Sequence[int]
) -> list[NewTicket]:
    """Return one new ticket for each candidate and seed that has none yet.

    Candidates with the same params share their trials.
    """
    from storage.ticket import NewTicket

    known = _by_key(db, name)
    next_idx = max((ticket.idx for ticket in known.values()), default=-1) + 1
    fresh: dict[str, NewTicket] = {}
    for seed in seeds:
        for candidate in candidates:
            key = _key(candidate.params, seed)
            if key in known or key in fresh:
                continue
            payload = {"seed": seed, "candidate": candidate.label, "source_trial": candidate.trial}
            fresh[key] = NewTicket(idx=next_idx + len(fresh), params=dict(candidate.params),
                                   payload=payload, params_key=key)
    return list(fresh.values())


def score_items(db: Database, name: str) -> list[NewTicket]:
    """Return a ticket that reads the test split for each confirmed trial that has a checkpoint."""
    from storage.ticket import NewTicket

    study = study_of(name, "confirm")
    trials = _trials_by_number(db, study)
    fresh = []
    for ticket in db.tickets.list(study):
        trial = trials.get(ticket.trial_number)
        if ticket.kind != "trial" or ticket.state != "done" or trial is None:
            continue
        path = trial.user_attrs.get("checkpoint")
        if path:
            payload = {**ticket.payload, "checkpoint": path, "trial": trial.number}
            fresh.append(NewTicket(idx=SCORE_OFFSET + ticket.idx, params=ticket.params,
                                   payload=payload, params_key=None))
    return fresh


def _trials_by_number(db: Database, study: str) -> dict[int | None, FrozenTrial]:
    if study not in study_names(db):
        return {}
    study_id = db.studies.get_study_id_from_name(study)
    return {t.number: t for t in db.studies.get_all_trials(study_id, deepcopy=False)}


def register(
    db: Database, name: str, settings: Settings, spec: Mapping[str, Any],
    candidates: Sequence[Candidate], seeds: Sequence[int], data: Mapping[str, Any],
) -> list[str]:
    """Write one registry row for each candidate; the search's rank by their confirmed mean.

    Rows of an earlier confirmation that these do not replace are marked as replaced. Returns one
    line for each candidate that has no result on some seed.
    """
    tickets, trials = _by_key(db, name), _trials_by_number(db, study_of(name, "confirm"))
    scores = {t.idx - SCORE_OFFSET: t.result or {} for t in db.tickets.list(
        study_of(name, "confirm")) if t.kind == "score" and t.state == "done"}
    common = {"study": name, "metric": spec["metric"], "versions": versions(),
              "git_commit": git_commit(), "data_fingerprint": data.get("fingerprint"),
              "data": dict(data)}
    # The defaults were found by no phase.
    spent = {phase: epochs_spent(db, study_of(name, phase))
             for phase in {c.phase for c in candidates} - {"default"}}
    rows, lost = [], []
    for candidate in candidates:
        runs = [_run_row(tickets[key], trials, scores) for seed in seeds
                if (key := _key(candidate.params, seed)) in tickets]
        runs = [run for run in runs if run is not None]
        missing = [seed for seed in seeds if seed not in {run["seed"] for run in runs}]
        if missing:
            lost.append(f"confirm: {candidate.label} has no result on "
                        f"seed{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}, "
                        f"so its mean is over {len(runs)} of {len(seeds)}")
        if runs:
            rows.append({**common, **_row(candidate, runs, spec), "lost_seeds": missing,
                         "epochs_spent": spent.get(candidate.phase, 0)})
    kept = [db.registry.add(row) for row in _reranked(rows, spec["direction"] == "maximize")]
    db.registry.retire(name, kept)
    return lost


def _run_row(
    ticket: Ticket, trials: Mapping[int | None, FrozenTrial],
    scores: Mapping[int, Mapping[str, Any]],
) -> dict[str, Any] | None:
    trial = trials.get(ticket.trial_number)
    # A training that diverged has a last value, but no result.
    if trial is None or trial.state.name != "COMPLETE" or trial.value is None:
        return None
    attrs = trial.user_attrs
    return {"seed": ticket.payload["seed"], "trial": trial.number, "val": trial.value,
            "val_metrics": attrs.get("best", {}), "best_epoch": attrs.get("best_epoch"),
            "last_metrics": attrs.get("last", {}), "checkpoint": attrs.get("checkpoint"),
            "device": attrs.get("device"), "duration_s": attrs.get("duration_s", 0.0),
            "test_metrics": {k: v for k, v in scores.get(ticket.idx, {}).items()
                             if k.startswith("test_")}}


def _row(
    candidate: Candidate, runs: Sequence[Mapping[str, Any]], spec: Mapping[str, Any]
) -> dict[str, Any]:
    maximize = spec["direction"] == "maximize"
    best = (max if maximize else min)(runs, key=lambda run: run["val"])
    val = [run["val"] for run in runs]
    # The test metric of the same name; an objective of the user's own reads no test split.
    test_name = spec["metric"].replace("val_", "test_", 1)
    test = [run["test_metrics"][test_name] for run in runs if test_name in run["test_metrics"]]
    return {
        "phase": candidate.phase, "rank": candidate.rank, "trial": candidate.trial,
        "params": dict(candidate.params), "seeds": [run["seed"] for run in runs],
        "val_mean": statistics.fmean(val), "val_sd": _sd(val),
        "test_mean": statistics.fmean(test) if test else None, "test_sd": _sd(test),
        "scores": [dict(run) for run in runs], "checkpoint": best["checkpoint"],
        "device": best["device"], "duration_s": sum(run["duration_s"] for run in runs),
    }


def _sd(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation, or None of fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def _reranked(rows: list[dict[str, Any]], maximize: bool) -> list[dict[str, Any]]:
    search = sorted((row for row in rows if row["phase"] == "search"),
                    key=lambda row: row["val_mean"], reverse=maximize)
    for rank, row in enumerate(search, start=1):
        row["rank"] = rank
    return search + [row for row in rows if row["phase"] != "search"]
