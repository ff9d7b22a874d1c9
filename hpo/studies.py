"""A study's rows in the database: made once, and held against what a later run asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.errors import HpoError, InputError, NoResult
from hpo.queue import phase_of, study_of
from hpo.read_results import read_phase
from hpo.results import PHASES
from hpo.settings import Settings
from hpo.space import space_from_json

if TYPE_CHECKING:
    from storage.database import Database

_FIRST_TIMEOUT_S = 5.0


def open_existing(
    url: str, timeout_s: float | None = None,
    waits: Callable[[HpoError], None] = lambda _error: None,
) -> Database | None:
    """Open the database if it holds our tables; a question must not make any.

    It has `timeout_s` to answer, and 5 seconds where none is given; `waits` is called before each
    wait for it, as in `Link`.

    Raises:
        InputError: for a URL that cannot be used, or a database that another version set up.
        StorageError: where it does not answer.
    """
    from storage.creation import revision
    from storage.database import Database
    from storage.link import Link

    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).exists():
        return None
    # A run waits a minute for its server to come back; who asks a question does not.
    link = Link(url, timeout_s or _FIRST_TIMEOUT_S, waits)
    try:
        if revision(link) is None:
            return None
    finally:
        link.close()
    return Database(url, timeout_s or 60)


def ensure_study(db: Database, study: str, direction: str, metric: str) -> None:
    """Make the Optuna study of a phase, unless it is there."""
    from optuna.exceptions import DuplicatedStudyError
    from optuna.study import StudyDirection

    if study in study_names(db):
        return
    try:
        study_id = db.studies.create_new_study([StudyDirection[direction.upper()]], study)
        # What Study.set_metric_names writes: the dashboard labels its axes with it.
        db.studies.set_study_system_attr(study_id, "study:metric_names", [metric])
    except DuplicatedStudyError:
        return


def study_names(db: Database) -> list[str]:
    """Return the names of all Optuna studies in the database."""
    return [str(study.study_name) for study in db.studies.get_all_studies()]


def epochs_spent(db: Database, study: str) -> float:
    """Return the epochs that a phase spent, by the count of every table and report."""
    if study not in study_names(db):
        return 0
    return read_phase(db, study, phase_of(study)).n_epochs


def n_complete(db: Database, name: str, phases: Sequence[str] = PHASES) -> int:
    """Return how many COMPLETE trials the phases of a study have."""
    from optuna.trial import TrialState

    names = set(study_names(db))
    total = 0
    for study in (study_of(name, phase) for phase in phases):
        if study in names:
            study_id = db.studies.get_study_id_from_name(study)
            total += len(db.studies.get_all_trials(study_id, deepcopy=False,
                                                   states=(TrialState.COMPLETE,)))
    return total


def phase_studies(db: Database, name: str) -> dict[str, str]:
    """Return the Optuna studies that a study has, by phase."""
    names = set(study_names(db))
    found = {phase: study_of(name, phase) for phase in PHASES}
    return {phase: study for phase, study in found.items() if study in names}


def sweep_result(db: Database, name: str) -> dict[str, Any] | None:
    """Return the stored result of a study's LR range sweep, or None where there is none yet."""
    tickets = db.tickets.list(study_of(name, "lr-range"))
    return next((t.result for t in tickets if t.kind == "sweep" and t.result), None)


def known_names(db: Database) -> list[str]:
    """Return the names of all studies that hpo made."""
    return sorted({row["name"] for row in db.runs.studies()})


def require(db: Database, name: str) -> Mapping[str, Any]:
    """Return a study's stored row.

    Raises:
        NoResult: for a study that is not in the database, with the near and known names.
    """
    from hpo.spec import nearest

    row = db.runs.study(name)
    if row is None:
        known = known_names(db)
        there = f"there are: {', '.join(known)}" if known else "it holds no study yet"
        raise NoResult(f"study '{name}' is not in {db.shown_url}{nearest(name, known)} ({there})")
    return row


def check_same(row: Mapping[str, Any], settings: Settings, spec: Mapping[str, Any]) -> None:
    """Hold a module against the study it was stored as.

    Raises:
        InputError: for another space, metric or direction, naming both sides and the way out.
    """
    name = settings.name
    for what in ("metric", "direction"):
        if row[what] != spec[what]:
            raise InputError(f"study '{name}' was made to {row['direction']} '{row['metric']}', "
                             f"the module says {spec['direction']} '{spec['metric']}'; "
                             f"start a new study with --name")
    changes = space_changes(row["space"], spec["space"])
    bounds_only = all(kind == "bounds" for kind, _ in changes)
    if changes and not (settings.allow_space_change and bounds_only):
        hint = "start a new study with --name"
        if bounds_only:
            hint += ", or go on with --allow-space-change"
        raise InputError("\n".join(f"study '{name}', {text}" for _, text in changes)
                         + f"\n{hint}")


def space_changes(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return each change between two spaces' JSON: its kind (`bounds` or `other`) and a line."""
    before, after = space_from_json(old), space_from_json(new)
    changes = [("other", f"param '{name}': it is gone from the space")
               for name in before if name not in after]
    changes += [("other", f"param '{name}': it is new in the space")
                for name in after if name not in before]
    for name in (name for name in before if name in after and old[name] != new[name]):
        same_kind = {k: v for k, v in old[name].items() if k not in ("low", "high")} == {
            k: v for k, v in new[name].items() if k not in ("low", "high")}
        kind = "bounds" if same_kind and old[name]["type"] != "categorical" else "other"
        changes.append((kind, f"param '{name}': the study has {before[name].describe()}, "
                              f"the module {after[name].describe()}"))
    return changes


def check_data(row: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Raise InputError where the data is not the data that the study was made with."""
    before, now = (row["data"] or {}).get("fingerprint"), data.get("fingerprint")
    if before and now and before != now:
        raise InputError(f"study '{row['name']}' was made with data {before}, this is data {now}: "
                         f"its trials could not be compared; start a new study with --name")

