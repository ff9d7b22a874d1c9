"""Questions about studies: the best of one, its report, its end.

They read the database and load no torch.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo import bounds
from hpo import settings as s
from hpo.display import say
from hpo.errors import HpoError, InputError, NoResult
from hpo.studies import open_existing, phase_studies, require

if TYPE_CHECKING:
    from rich.console import Console

    from hpo.results import Results
    from storage.database import Database


@contextmanager
def opened(home: Path, storage: str | None) -> Iterator[Database]:
    """Open the database that the flags name.

    Raises:
        NoResult: where there is none yet.
    """
    url = s.storage_url(storage, home)
    db = open_existing(url)
    if db is None:
        raise NoResult(f"there is no database {url.removeprefix('sqlite:///')} yet: "
                       f"`hpo run --study digits` makes one (or name yours with --home "
                       f"or --storage)")
    try:
        yield db
    finally:
        db.close()


def collected(db: Database, study: str) -> Results:
    """Read a study with all its phases.

    Raises:
        NoResult: for a study that is not in the database.
    """
    from hpo import read_results

    require(db, study)
    return read_results.collect(db, study)


def print_json(data: Any) -> None:
    """Print data as strict JSON, which has neither NaN nor infinity."""
    from hpo.report_json import strict

    print(json.dumps(strict(data), allow_nan=False, ensure_ascii=False))


def best(
    study: str, home: Path, storage: str | None, console: Console, *, rank: int, as_json: bool
) -> int:
    """Print the registered search result of a rank, or, before a confirmation, the best trial.

    Raises:
        NoResult: with the states and the commonest reason where no trial is COMPLETE.
    """
    if rank < 1:
        raise InputError(f"--rank must be at least 1, got {rank}")
    with opened(home, storage) as db:
        found = collected(db, study)
        rows = registered(db, study, "search")
    data = _registered_best(rows, rank, home) if rows else _best_trial(found, rank, home)
    ends = bounds.at_bounds(bounds.searched(found), data["params"])
    if as_json:
        print_json({"study": study, **data, "at_bounds": [asdict(e) for e in ends]})
        return 0
    params = ", ".join(f"{name}={value!r}" for name, value in data["params"].items())
    say(console, f"{study}: trial {data['trial']}: {params}")
    if data["confirmed"]:
        say(console, f"  {found.metric} {_mean(data['val_mean'], data['val_sd'])} on seeds "
                     f"{', '.join(map(str, data['seeds']))}, {found.test_metric} "
                     f"{_mean(data['test_mean'], data['test_sd'])}")
    else:
        say(console, f"  {found.metric} {data['value']!r}, not confirmed on fresh seeds yet")
    say(console, f"  checkpoint: {data['checkpoint'] or 'none'} ({data['checkpoint_state']})")
    if ends:
        say(console, f"  it {bounds.told(ends)}")
    return 0


def _mean(mean: float | None, sd: float | None) -> str:
    if mean is None:
        return "not read"
    return f"{mean:.4f}" + ("" if sd is None else f" (sd {sd:.4f})")


def registered(db: Database, study: str, phase: str | None = None) -> list[dict[str, Any]]:
    """Return a living study's registry rows, of one phase, by rank."""
    rows = [row for row in db.registry.rows(study) if row.get("state") == "current"]
    return sorted((row for row in rows if phase in (None, row["phase"])),
                  key=lambda row: (row["phase"], row["rank"]))


def _registered_best(rows: list[dict[str, Any]], rank: int, home: Path) -> dict[str, Any]:
    row = next((row for row in rows if row["rank"] == rank), None)
    if row is None:
        raise NoResult(f"there is no registered result of rank {rank}; there are {len(rows)}")
    kept = ("id", "phase", "rank", "trial", "params", "metric", "val_mean", "val_sd", "test_mean",
            "test_sd", "seeds", "epochs_spent", "checkpoint")
    return {"confirmed": True, **{name: row[name] for name in kept},
            "checkpoint_state": checkpoint_state(home, row["checkpoint"])}


def _best_trial(found: Results, rank: int, home: Path) -> dict[str, Any]:
    ranked = sorted((t for phase in ("search", "grid", "random", "lr-range")
                     for t in found.phase(phase).trials if t.state == "COMPLETE"),
                    key=lambda t: t.value or 0.0, reverse=found.maximize)
    if not ranked:
        raise NoResult(_no_complete(found))
    if rank > len(ranked):
        raise NoResult(f"there is no COMPLETE trial of rank {rank}; there are {len(ranked)}")
    trial = ranked[rank - 1]
    path = trial.attrs.get("checkpoint")
    return {"confirmed": False, "rank": rank, "trial": trial.number, "params": trial.params,
            "value": trial.value, "checkpoint": path,
            "checkpoint_state": checkpoint_state(home, path)}


def _no_complete(found: Results) -> str:
    states = Counter(t.state for phase in found.phases.values() for t in phase.trials)
    counts = ", ".join(f"{state}: {n}" for state, n in states.items()) or "no trial yet"
    reasons = Counter(t.reason for phase in found.phases.values() for t in phase.trials
                      if t.reason)
    why = f"; most often: {reasons.most_common(1)[0][0].splitlines()[0][:300]}" if reasons else ""
    return f"study '{found.name}' has no COMPLETE trial ({counts}){why}"


def checkpoint_state(home: Path, path: str | None) -> str:
    """Return `none`, `missing`, `damaged` or `kept`, by the file's two ends alone."""
    if not path:
        return "none"
    file = home / path
    if not file.is_file():
        return "missing"
    with file.open("rb") as stream:
        # torch.save writes a zip archive; its contents are listed at its end, so one that was cut
        # short has no list.
        whole = stream.read(4) == b"PK\x03\x04" and zipfile.is_zipfile(stream)
    return "kept" if whole else "damaged"


def report(study: str, home: Path, storage: str | None, console: Console, *, as_json: bool) -> int:
    """Write the report and put it where the dashboard shows it."""
    from hpo import report as reports

    with opened(home, storage) as db:
        found = collected(db, study)
        path = publish(db, found, home)
    if as_json:
        print(reports.to_json(found))
    else:
        width = console.width if console.is_terminal else None
        say(console, reports.wrapped(reports.verdict(found), width))
        say(console, f"report: {path}")
    return 0


def publish(db: Database, found: Results, home: Path) -> Path:
    """Write a study's report into the home folder and into the dashboard; return its path."""
    from hpo import report as reports

    folder = home / "reports" / found.name
    source = reports.read_source(found)
    reports.write(found, folder, source)
    reports.note(db, found, home, folder, source)
    return folder / "report.html"


def delete(
    study: str, home: Path, storage: str | None, console: Console, sure: Callable[[str], bool]
) -> int:
    """Delete a study's trials, tickets, checkpoints and logs; registry rows stay, marked.

    `sure` is asked first, with what would be gone.

    Raises:
        HpoError: while a run of the study is on.
    """
    from hpo.attachments import remove_pictures

    with opened(home, storage) as db:
        require(db, study)
        if db.tickets.running(study):
            raise HpoError(f"study '{study}' has running trials: stop its run first "
                           f"(or, if its machine is gone, `hpo run` closes them)")
        if not sure(_what_goes(db, study)):
            say(console, "nothing is deleted")
            return 1
        for name in phase_studies(db, study).values():
            remove_pictures(db, name, home)
        db.delete(study)
    for folder in ("artifacts", "logs", "reports"):
        shutil.rmtree(home / folder / study, ignore_errors=True)
    say(console, f"study {study} is deleted; its registry rows stay, marked so: "
                 f"hpo registry list --all")
    return 0


def _what_goes(db: Database, study: str) -> str:
    """Return the question before a study is deleted, with what would be gone."""
    counts = [(phase, sum(t.kind == "trial" and t.trial_id is not None
                          for t in db.tickets.list(name)))
              for phase, name in phase_studies(db, study).items()]
    told = [f"{n} of {phase}" for phase, n in counts if n]
    question = f"delete study '{study}', its trials ({', '.join(told) or 'none'}) and its files?"
    champion = db.aliases.holder(study, "champion")
    row = None if champion is None else db.registry.get(champion)
    if row is None or not any(run["checkpoint"] for run in row["scores"]):
        return question
    return (f"{question} The weights of its champion {row['id'][:8]} are among these; "
            f"hpo registry export {row['id'][:8]} --to FOLDER keeps them.")
