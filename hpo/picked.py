"""What is to be exported: a trial or a registered result, with all that its files will say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpo import ask, champions, standing
from hpo.errors import HpoError, InputError, NoResult
from hpo.queue import study_of
from hpo.results import PHASES
from hpo.spec import nearest

if TYPE_CHECKING:
    from storage.database import Database

# What a registry row can stand for.
SOURCES = ("search", "grid", "random", "lr-range", "default")


@dataclass(frozen=True)
class Picked:
    """Weights to export: whose they are, what they scored, and what they were made with.

    `study` is the study's stored row; `split` and `scores` are what the export must score again;
    `ran_with` is what the process ran with that scored them, and `source` the module's files as
    they were then, None where that was not stored.
    """

    study: Mapping[str, Any]
    what: str
    checkpoint: str | None
    seed: int
    params: Mapping[str, Any]
    trial: int | None
    metrics: Mapping[str, float]
    split: str
    ran_with: Mapping[str, Any]
    source: Mapping[str, str] | None
    registered: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The study's name."""
        return self.study["name"]

    @property
    def scores(self) -> dict[str, float]:
        """The stored numbers of the split that is scored again."""
        return {name: value for name, value in self.metrics.items()
                if name.startswith(f"{self.split}_")}


def check_phase(phase: str, trial: int | None) -> None:
    """Raise InputError for a phase that there is not."""
    known = PHASES if trial is not None else SOURCES
    if phase not in known:
        raise InputError(f"--phase '{phase}'{' with --trial' if trial is not None else ''}: "
                         f"accepted are {', '.join(known)}{nearest(phase, known)}")


def by_trial(db: Database, study: str, phase: str, trial: int) -> Picked:
    """Pick a trial of a phase by its number.

    Raises:
        NoResult: for a study that is not in the database.
        InputError: for a trial that is not in it.
    """
    from hpo import read_results

    row = ask.require(db, study)
    found = read_results.collect(db, study).phases.get(phase)
    match = next((t for t in found.trials if t.number == trial), None) if found else None
    if match is None:
        n = len(found.trials) if found else 0
        raise InputError(f"--trial {trial}: the phase {phase} of study '{study}' has {n} "
                         f"trials, numbered from 0")
    return Picked(
        row, f"{phase} trial {trial}", match.attrs.get("checkpoint"),
        int(match.attrs.get("seed") or 0), match.params, trial, match.attrs.get("best", {}),
        "val", _ran_with(db, match.attrs.get("worker")),
        db.sources.get((row["data"] or {}).get("source")))


def by_rank(db: Database, study: str, phase: str, rank: int) -> Picked:
    """Pick a registered result by its phase and rank.

    Raises:
        NoResult: for a study that is not in the database, or a result that is not registered.
    """
    ask.require(db, study)
    rows = ask.registered(db, study, phase)
    row = next((row for row in rows if row["rank"] == rank), None)
    if row is None:
        raise NoResult(f"study '{study}' has no registered result of phase {phase} and rank "
                       f"{rank}: `hpo registry list --study {study}` shows those there are, and "
                       f"--trial N exports a search trial")
    return _of_row(db, row, f"{phase} rank {rank}")


def by_ref(db: Database, ref: str) -> Picked:
    """Pick a registered result by its id or alias.

    Raises:
        InputError: where it names no row, or one of a deleted study.
        NoResult: for a study that has no such alias.
    """
    row = champions.find(db, ref)
    if row["state"] == "study deleted":
        raise InputError(f"{row['study']}, {standing.label(row)}: its study was deleted, and its "
                         f"weights with it")
    return _of_row(db, row, f"{row['phase']} rank {row['rank']}")


def _of_row(db: Database, row: Mapping[str, Any], what: str) -> Picked:
    runs = [run for run in row["scores"] or () if run["checkpoint"] == row["checkpoint"]]
    if not runs:
        raise HpoError(f"{row['study']}, {standing.label(row)}: none of its seeds has the "
                       f"checkpoint {row['checkpoint']}")
    run, study = runs[0], ask.require(db, row["study"])
    tested = run.get("test_metrics") or {}
    confirm = study_of(row["study"], "confirm")
    kind = "score" if tested else "trial"
    owner = next((t.owner for t in db.tickets.list(confirm) if t.kind == kind
                  and run["trial"] in (t.payload.get("trial"), t.trial_number)), None)
    return Picked(
        study, what, row["checkpoint"], run["seed"], row["params"], row["trial"],
        {**(run.get("val_metrics") or {}), **tested}, "test" if tested else "val",
        _ran_with(db, owner), db.sources.get(row.get("source")),
        {name: row[name] for name in ("id", "metric", "val_mean", "val_sd", "test_mean", "test_sd",
                                      "seeds", "scores", "versions", "git_commit",
                                      "data_fingerprint", "created_at")})


def _ran_with(db: Database, owner: str | None) -> Mapping[str, Any]:
    worker = None if owner is None else db.runs.worker(owner)
    return (worker or {}).get("data") or {}
