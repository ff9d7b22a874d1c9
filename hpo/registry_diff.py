"""`hpo registry diff`: in what two registered results differ, and by how much one is better."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo import champions, standing
from hpo.ask import opened, print_json
from hpo.display import say

if TYPE_CHECKING:
    from rich.console import Console

    from storage.database import Database

_MISSING = "-"


def diff(
    ours: str, theirs: str, home: Path, storage: str | None, console: Console, *, as_json: bool
) -> int:
    """Print what two registered results have not in common, the first one's side first.

    Raises:
        InputError: where a reference names no row, or more than one.
        NoResult: for a study that has no such alias.
    """
    with opened(home, storage) as db:
        rows = (champions.find(db, ours), champions.find(db, theirs))
        found = _compared(db, *rows)
    if as_json:
        print_json({"rows": [row["id"] for row in rows], **found})
        return 0
    for line in _lines(rows, found):
        say(console, line)
    return 0


def _compared(db: Database, a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    stored = db.runs.study(a["study"]) or db.runs.study(b["study"]) or {}
    maximize = str(stored.get("direction") or "maximize").lower().startswith("max")
    gaps = [gap for split in ("val", "test")
            if a["metric"] == b["metric"] and (gap := standing.on_split(a, b, split))]
    return {
        "params": _pairs(a["params"], b["params"]),
        "scores": [{**asdict(gap), "outcome": gap.outcome(maximize), "said": gap.text(maximize)}
                   for gap in gaps],
        "seeds": _seeds(a, b),
        "versions": _pairs(a.get("versions"), b.get("versions")),
        "other": {name: [a.get(name), b.get(name)] for name in
                  ("study", "metric", "data_fingerprint", "git_commit", "device", "epochs_spent")
                  if a.get(name) != b.get(name)},
        "source": _source(db, a, b),
    }


def _pairs(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> dict[str, list[Any]]:
    """Return the values that differ, by name, in the order of their names in a, then b."""
    a, b = a or {}, b or {}
    return {name: [a.get(name), b.get(name)] for name in dict.fromkeys((*a, *b))
            if a.get(name) != b.get(name) or (name in a) != (name in b)}


def _seeds(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[int, dict[str, list[Any]]]:
    """Return both results' scores on each seed that either has, by split."""
    found = [standing.scores(row) for row in (a, b)]
    sides = {split: [dict(scores.by_seed) if one and (scores := getattr(one, split)) else {}
                     for one in found] for split in ("val", "test")}
    seeds = sorted({seed for pair in sides.values() for side in pair for seed in side})
    return {seed: {split: [side.get(seed) for side in pair] for split, pair in sides.items()
                   if any(seed in side for side in pair)} for seed in seeds}


def _source(db: Database, a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Return whether the modules' texts are the same, and what was changed from b to a."""
    kept = [db.sources.get(row.get("source")) for row in (a, b)]
    if None in kept:
        return {"same": None, "changes": []}
    new, old = kept
    assert new is not None and old is not None
    changes: list[str] = []
    for name in sorted(new.keys() | old.keys()):
        changes += difflib.unified_diff(
            old.get(name, "").splitlines(), new.get(name, "").splitlines(),
            f"{name} ({b['id'][:8]})", f"{name} ({a['id'][:8]})", lineterm="")
    return {"same": new == old, "changes": changes}


def _lines(
    rows: tuple[Mapping[str, Any], Mapping[str, Any]], found: Mapping[str, Any]
) -> Iterator[str]:
    from hpo.report import aligned

    table = [["", *(f"{row['study']}, {standing.label(row)}" for row in rows)]]
    for title, pairs in (("param ", found["params"]), ("", found["other"]),
                         ("version of ", found["versions"])):
        table += [[title + name, *map(_cell, pair)] for name, pair in pairs.items()]
    for seed, splits in found["seeds"].items():
        table += [[f"seed {seed}, {split}", *map(_cell, pair)] for split, pair in splits.items()]
    yield aligned(table)
    if not found["params"]:
        yield "params: the same"
    for gap in found["scores"]:
        yield f"{gap['metric']}: the first is {gap['said']}"
    if not found["scores"]:
        yield "scores: none in common to compare"
    source = found["source"]
    said = {None: "was not kept of both", True: "the same", False: "changed, - to +:"}
    yield f"source: {said[source['same']]}"
    yield from source["changes"]


def _cell(value: Any) -> str:
    if value is None:
        return _MISSING
    return f"{value:.6g}" if isinstance(value, float) else str(value)
