"""Which registered result of a study people are to use: its champion, and who stands against it.

The first confirmed result becomes champion by itself; a later and better one only challenges it.
Whoever uses `cifar@champion` gets another model when somebody has decided so, and not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpo import standing
from hpo.errors import HpoError, InputError, NoResult
from hpo.spec import nearest
from storage.aliases import ALIASES, CHALLENGER, CHAMPION

if TYPE_CHECKING:
    from storage.database import Database

# As few characters of an id as a reader may take for one.
_SHORTEST_ID = 4


def find(db: Database, ref: str) -> dict[str, Any]:
    """Return the row of `STUDY@champion`, `STUDY@challenger`, an id, or an id's beginning.

    Raises:
        InputError: where it names no row, or more than one.
        NoResult: for a study that has no such alias.
    """
    study, at, alias = ref.rpartition("@")
    if at:
        return _held(db, study, alias)
    if ref.isdecimal() and len(ref) < _SHORTEST_ID or "/" in ref:
        raise InputError(f"'{ref}' is the number of a trial and no registered result: what the "
                         f"phase confirm of `hpo run` has trained on fresh seeds is registered; "
                         f"`hpo registry list` shows the ids")
    found = [row for row in db.registry.rows(with_deleted=True) if row["id"].startswith(ref)]
    if len(found) != 1 or not ref:
        raise InputError(f"registry row '{ref}': {len(found)} rows start so; "
                         f"`hpo registry list` shows the ids")
    return found[0]


def _held(db: Database, study: str, alias: str) -> dict[str, Any]:
    if alias not in ALIASES:
        raise InputError(f"'{study}@{alias}': accepted are {', '.join(ALIASES)}"
                         f"{nearest(alias, ALIASES)}")
    row_id = db.aliases.holder(study, alias)
    row = None if row_id is None else db.registry.get(row_id)
    if row is None:
        known = sorted({row["study"] for row in db.aliases.held() if row["alias"] == alias})
        raise NoResult(f"study '{study}' has no {alias}{nearest(study, known)} (studies that have "
                       f"one: {', '.join(known) or 'none'})")
    return row


def settle(db: Database, study: str, metric: str, maximize: bool) -> str | None:
    """Give the names after a confirmation, and return what is to be said of it.

    Without a champion the best confirmed result becomes one. With one the best, if it is another,
    becomes the challenger.
    """
    rows = [row for row in db.registry.rows(study) if row["metric"] == metric]
    holder = db.aliases.holder(study, CHAMPION, metric)
    champion = None if holder is None else db.registry.get(holder)
    best = standing.best(rows, maximize, holder)
    if best is None:
        return None
    if champion is None:
        db.aliases.give(study, metric, CHAMPION, best["id"], "the first confirmed")
        return f"champion: {standing.label(best)}, the best confirmed"
    if best["id"] == champion["id"] or not _is_better(best, champion, maximize):
        db.aliases.take(study, metric, CHALLENGER)
        return None
    gain = standing.difference(best, champion)
    said = "" if gain is None else f": {gain.metric} {gain.text(maximize)}"
    db.aliases.give(study, metric, CHALLENGER, best["id"], "the best of a later confirmation")
    return (f"challenger: {standing.label(best)}, against the champion "
            f"{standing.label(champion)}{said}; `hpo registry promote {study}@{CHALLENGER}` "
            f"makes it champion")


def _is_better(row: Mapping[str, Any], champion: Mapping[str, Any], maximize: bool) -> bool:
    """Return whether a row has the better validation mean, over the seeds that both have."""
    found = standing.on_split(row, champion, "val")
    return found is not None and found.mean != 0 and (found.mean > 0) == maximize


def promote(db: Database, ref: str, *, force: bool) -> str:
    """Make a row its study's champion and return what is to be said of it.

    Raises:
        InputError: for a row that is unknown, deleted, not confirmed or of another metric.
        HpoError: for one that is not shown to be better than the champion, without `force`.
    """
    row = find(db, ref)
    study = row["study"]
    stored = db.runs.study(study) or {}
    _check(row, stored)
    holder = db.aliases.holder(study, CHAMPION, row["metric"])
    if holder == row["id"]:
        return f"{study}: {standing.label(row)} is the champion already"
    champion = None if holder is None else db.registry.get(holder)
    why = "promoted"
    if champion is not None:
        gain = standing.difference(row, champion)
        maximize = stored["direction"] == "maximize"
        told = _gain(gain, maximize)
        if not force and (gain is None or gain.outcome(maximize) != "better"):
            raise HpoError(f"{study}: {standing.label(row)} is not shown to be better than the "
                           f"champion {standing.label(champion)}: {told}; --force makes it "
                           f"champion all the same, more seeds (hpo run --confirm-seeds) may "
                           f"show it")
        why = f"promoted{' by --force' if force else ''}: {told}"
    db.aliases.give(study, row["metric"], CHAMPION, row["id"], why)
    before = "" if champion is None else f", before it was {standing.label(champion)}"
    return f"{study}: champion is {standing.label(row)}{before} ({why})"


def _gain(gain: standing.Gap | None, maximize: bool) -> str:
    return "they have no score in common" if gain is None else (
        f"{gain.metric} {gain.text(maximize)}")


def _check(row: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    name = f"{row['study']}, {standing.label(row)}"
    if row["state"] == "study deleted" or not stored:
        raise InputError(f"{name}: its study was deleted, and its weights with it; it cannot be "
                         f"champion")
    if (why := standing.why_unconfirmed(row)) is not None:
        raise InputError(f"{name}: it is not confirmed, so it cannot be champion: {why} "
                         f"(hpo run --study {stored['module']} --phases confirm)")
    if row["metric"] != stored["metric"]:
        raise InputError(f"{name}: it was confirmed by {row['metric']}, and the study is judged "
                         f"by {stored['metric']}; it cannot be champion")
