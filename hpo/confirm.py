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
from hpo.paired import level_means
from hpo.queue import SCORE_OFFSET, study_of
from hpo.race import grown, standing
from hpo.results import PHASES
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

    @property
    def title(self) -> str:
        """`search trial 18`, `grid trial 3`, `the defaults`."""
        return "the defaults" if self.trial is None else f"{self.phase} trial {self.trial}"


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


def tickets_by_key(db: Database, name: str) -> dict[str, Ticket]:
    """Return the confirmation's trial tickets by params and seed."""
    tickets = db.tickets.list(study_of(name, "confirm"))
    return {_key(t.params or {}, t.payload["seed"]): t for t in tickets if t.kind == "trial"}


def items(
    known: Mapping[str, Ticket], candidates: Sequence[Candidate], seeds: Sequence[int],
    round: int = 0,
) -> list[NewTicket]:
    """Return one new ticket for each candidate and seed that has none in `known`.

    Candidates with the same params share their trials. `round` is the round of the race that
    they are for, from 0.
    """
    from storage.ticket import NewTicket

    next_idx = max((ticket.idx for ticket in known.values()), default=-1) + 1
    fresh: dict[str, NewTicket] = {}
    for seed in seeds:
        for candidate in candidates:
            key = _key(candidate.params, seed)
            if key in known or key in fresh:
                continue
            payload = {"seed": seed, "candidate": candidate.label,
                       "source_trial": candidate.trial, "round": round}
            fresh[key] = NewTicket(idx=next_idx + len(fresh), params=dict(candidate.params),
                                   payload=payload, params_key=key)
    return list(fresh.values())


@dataclass(frozen=True)
class Round:
    """What comes next in the race: new tickets, or none at its end, and what to say of it."""

    items: list[NewTicket]
    said: str


def next_round(
    db: Database, name: str, settings: Settings, spec: Mapping[str, Any],
    candidates: Sequence[Candidate], data: Mapping[str, Any],
) -> Round | None:
    """Return the next round of the race, decided by the validation scores that there are.

    It goes up to half as many seeds again for the leader and those not told from it, or up to
    what the budget still pays for. None where another run has begun it: it must end first, and
    two runs that look at once decide the same.
    """
    tickets = tickets_by_key(db, name)
    if any(ticket.state not in ("done", "failed") for ticket in tickets.values()):
        return None
    n_seeds = len({ticket.payload["seed"] for ticket in tickets.values()})
    accuracy = spec["metric"].endswith("accuracy") and data.get("n_val")
    now = standing(
        _val_scores(db, name, candidates, tickets),
        of_search=frozenset(c.label for c in candidates if c.phase == "search"),
        maximize=spec["direction"] == "maximize", resolution=settings.confirm_resolution,
        grain=1 / data["n_val"] if accuracy else 0.0)
    if now is None or not now.contenders:
        return Round([], f"confirm: the order is settled after {_seeds(n_seeds)}"
                     if now else "")
    before = sum(epochs_spent(db, study_of(name, phase)) for phase in PHASES if phase != "confirm")
    epochs = int(settings.epochs or 1)
    n_paid = int((settings.confirm_budget or 0.0) * before // epochs) - len(tickets)
    open_ = [c for c in candidates if c.label in now.contenders]
    title = {c.label: c.title for c in candidates}
    close = f"{', '.join(title[label] for label in now.undecided)} " \
            f"{'is' if len(now.undecided) == 1 else 'are'} not told from {title[now.leader]} " \
            f"after {_seeds(n_seeds)}"
    round = 1 + max(ticket.payload.get("round", 0) for ticket in tickets.values())
    for n in range(grown(n_seeds), n_seeds, -1):
        new = items(tickets, open_, fresh_seeds(int(settings.seed or 0), n), round)
        if len(new) <= n_paid:
            return Round(new, f"confirm: {close}: {_seeds(n - n_seeds)} more ({len(new)} "
                              f"training{'s' if len(new) > 1 else ''})")
    return Round([], f"confirm: {close}, and --confirm-budget {settings.confirm_budget or 0:g} "
                     f"pays for no more")


def _seeds(n: int) -> str:
    return f"{n} seed{'s' if n > 1 else ''}"


def _val_scores(
    db: Database, name: str, candidates: Sequence[Candidate], tickets: Mapping[str, Ticket]
) -> dict[str, dict[int, float]]:
    """Return each candidate's validation scores by seed; candidates may share trials."""
    trials = _trials_by_number(db, study_of(name, "confirm"))
    found: dict[str, dict[int, float]] = {}
    for candidate in candidates:
        seeds = {ticket.payload["seed"] for ticket in tickets.values()}
        runs = [run for seed in sorted(seeds)
                if (key := _key(candidate.params, seed)) in tickets
                and (run := _run_row(tickets[key], trials, {})) is not None]
        found[candidate.label] = {run["seed"]: run["val"] for run in runs}
    return found


def score_items(db: Database, name: str) -> list[NewTicket]:
    """Return a ticket that reads the test split for each confirmed trial that has a checkpoint.

    Only for those without one: what was read stays. Each says which reading it is of: 1, 2, ...
    """
    from storage.ticket import NewTicket

    study = study_of(name, "confirm")
    trials = _trials_by_number(db, study)
    tickets = db.tickets.list(study)
    known = {ticket.idx: ticket for ticket in tickets if ticket.kind == "score"}
    reading = 1 + max((t.payload.get("reading", 1) for t in known.values()), default=0)
    fresh = []
    for ticket in tickets:
        trial = trials.get(ticket.trial_number)
        if (ticket.kind != "trial" or ticket.state != "done" or trial is None
                or SCORE_OFFSET + ticket.idx in known):
            continue
        path = trial.user_attrs.get("checkpoint")
        if path:
            payload = {**ticket.payload, "checkpoint": path, "trial": trial.number,
                       "reading": reading}
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
    candidates: Sequence[Candidate], data: Mapping[str, Any],
) -> list[str]:
    """Write one registry row for each candidate; the search's rank by their confirmed mean.

    Rows of an earlier confirmation that these do not replace are marked as replaced. Returns one
    line for each candidate that has no result on some seed.
    """
    tickets, trials = tickets_by_key(db, name), _trials_by_number(db, study_of(name, "confirm"))
    scores = {t.idx - SCORE_OFFSET: t for t in db.tickets.list(study_of(name, "confirm"))
              if t.kind == "score" and t.state == "done"}
    seeds = sorted({ticket.payload["seed"] for ticket in tickets.values()})
    common = {"study": name, "metric": spec["metric"], "versions": versions(),
              "git_commit": git_commit(), "data_fingerprint": data.get("fingerprint"),
              "data": dict(data)}
    # The defaults were found by no phase.
    spent = {phase: epochs_spent(db, study_of(name, phase))
             for phase in {c.phase for c in candidates} - {"default"}}
    rows, lost = [], []
    for candidate in candidates:
        asked = [(seed, tickets[key]) for seed in seeds
                 if (key := _key(candidate.params, seed)) in tickets]
        runs = [run for _, ticket in asked if (run := _run_row(ticket, trials, scores))]
        missing = [seed for seed, _ in asked if seed not in {run["seed"] for run in runs}]
        if missing:
            lost.append(f"confirm: {candidate.title}: no result on "
                        f"seed{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}, "
                        f"so the mean is over {len(runs)} of {len(asked)}")
        if runs:
            rows.append({**common, **_row(candidate, runs, spec), "lost_seeds": missing,
                         "epochs_spent": spent.get(candidate.phase, 0)})
    kept = [db.registry.add(row) for row in _reranked(rows, spec["direction"] == "maximize")]
    db.registry.retire(name, kept)
    return lost


def _run_row(
    ticket: Ticket, trials: Mapping[int | None, FrozenTrial],
    scores: Mapping[int, Ticket],
) -> dict[str, Any] | None:
    trial = trials.get(ticket.trial_number)
    # A training that diverged has a last value, but no result.
    if trial is None or trial.state.name != "COMPLETE" or trial.value is None:
        return None
    attrs, read = trial.user_attrs, scores.get(ticket.idx)
    tested = (read.result or {}) if read else {}
    marks = {"test_read_at": read.ended_at.isoformat() if read.ended_at else None,
             "reading": read.payload.get("reading", 1)} if read else {}
    return {"seed": ticket.payload["seed"], "round": ticket.payload.get("round", 0),
            "trial": trial.number, "val": trial.value,
            "val_metrics": attrs.get("best", {}), "best_epoch": attrs.get("best_epoch"),
            "last_metrics": attrs.get("last", {}), "checkpoint": attrs.get("checkpoint"),
            "device": attrs.get("device"), "duration_s": attrs.get("duration_s", 0.0),
            "test_metrics": {k: v for k, v in tested.items() if k.startswith("test_")}, **marks}


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
    levels = level_means({str(i): {run["seed"]: run["val"] for run in row["scores"]}
                          for i, row in enumerate(rows)})
    order = sorted(range(len(rows)), key=lambda i: levels[str(i)], reverse=maximize)
    search = [rows[i] for i in order if rows[i]["phase"] == "search"]
    for rank, row in enumerate(search, start=1):
        row["rank"] = rank
    return search + [row for row in rows if row["phase"] != "search"]
