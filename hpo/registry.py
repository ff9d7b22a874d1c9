"""`hpo registry`: what is registered, which of it is champion, and how two results differ.

It reads the database and loads no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo import champions
from hpo.ask import opened, print_json
from hpo.display import say
from hpo.studies import require

if TYPE_CHECKING:
    from rich.console import Console

    from storage.database import Database


def listing(
    study: str | None, home: Path, storage: str | None, console: Console, *, every: bool,
    as_json: bool,
) -> int:
    """Print the registered results of all studies or of one, each on one line.

    A champion stands there also after a later confirmation has replaced its row.
    """
    with opened(home, storage) as db:
        names = _names(db, study)
        there = db.registry.rows(study, with_deleted=True)
        rows = [{**row, "alias": names.get(row["id"])} for row in there
                if every or row["state"] == "current" or row["id"] in names]
        if study and not there:
            require(db, study)
    if as_json:
        print_json(rows)
        return 0
    if not rows:
        say(console, "nothing is registered yet: the phase confirm of `hpo run` does it"
            if not there else f"all {len(there)} rows are of deleted studies or were replaced: "
                              f"`hpo registry list --all` shows them")
        return 0
    say(console, _table(rows, console.width if console.is_terminal else None))
    return 0


def _names(db: Database, study: str | None = None) -> dict[str, str]:
    return {held["row_id"]: held["alias"] for held in db.aliases.held(study)}


_HEAD = ("id", "study", "from", "validation", "test", "epochs", "metric", "made")
# The last two can be left out where a terminal is narrow.
_N_NEEDED = 6


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    from hpo.report import score
    from hpo.verdict import count

    origin = f"search rank {row['rank']}" if row["phase"] == "search" else row["phase"]
    gone = "" if row["state"] == "current" else f" ({row['state']})"
    val, test = ("not read" if row[f"{split}_mean"] is None
                 else score(row[f"{split}_mean"], row[f"{split}_sd"]) for split in ("val", "test"))
    return (row["id"][:8], row["study"] + gone, origin, val, test,
            count(row["epochs_spent"] or 0), row["metric"], f"{row['created_at']:%Y-%m-%d %H:%M}")


def _table(rows: Sequence[Mapping[str, Any]], width: int | None) -> str:
    """Return the table with the columns that a terminal of this width can hold, and say which not.

    A pipe has no width: there all columns stand. Aliases stand first, where there are any.
    """
    from hpo.report import aligned

    aliases = [row["alias"] or "" for row in rows]
    n_first = int(any(aliases))
    lines = [(*([alias] * n_first), *cells) for alias, cells in zip(
        ("alias", *aliases), (_HEAD, *map(_cells, rows)), strict=True)]
    numbers = tuple(n_first + i for i in (3, 4, 5))

    def first(n: int) -> str:
        return aligned([line[:n] for line in lines], right=numbers)

    n = len(lines[0])
    while (width is not None and n > n_first + _N_NEEDED
           and width < max(map(len, first(n).splitlines()))):
        n -= 1
    left_out = lines[0][n:]
    return first(n) + (f"\n(too narrow for: {', '.join(left_out)})" if left_out else "")


def show(
    ref: str, home: Path, storage: str | None, console: Console, *, as_json: bool
) -> int:
    """Print all of one registered result: what it is and scored first, its making after.

    Raises:
        InputError: where no row, or more than one, is named so.
    """
    with opened(home, storage) as db:
        row = champions.find(db, ref)
        names = [held for held in db.aliases.history(row["study"]) if held["row_id"] == row["id"]]
    if as_json:
        print_json({**row, "aliases": names})
        return 0
    for name, value in _lines(row, names):
        say(console, f"{name + ':':<18} {value}")
    return 0


# Said by the first lines of a shown row; all else follows them as it was stored.
_SAID = ("id", "study", "phase", "rank", "trial", "state", "metric", "val_mean", "val_sd",
         "test_mean", "test_sd", "scores", "seeds", "params")


def _lines(
    row: Mapping[str, Any], names: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    from hpo.results import on_test
    from hpo.verdict import score

    trial = "" if row["trial"] is None else f" (trial {row['trial']})"
    yield "id", row["id"]
    yield "study", row["study"] + ("" if row["state"] == "current" else f" ({row['state']})")
    yield "phase", row["phase"]
    yield "rank", f"{row['rank']}{trial}"
    for split, name in (("val", row["metric"]), ("test", on_test(row["metric"]))):
        mean = row[f"{split}_mean"]
        yield name, "not read" if mean is None else score(mean, row[f"{split}_sd"])
    for run in row["scores"] or ():
        yield f"seed {run['seed']}", _seed_line(run, row["metric"])
    yield "params", _shown(row["params"])
    for held in names:
        yield held["alias"], _held_line(held)
    for name, value in row.items():
        if name not in _SAID:
            yield name, _shown(value)


def _held_line(held: Mapping[str, Any]) -> str:
    until = held["until_at"]
    ended = "" if until is None else f" until {until:%Y-%m-%d %H:%M}"
    return f"since {held['since_at']:%Y-%m-%d %H:%M} UTC{ended}: {held['why']}"


def _seed_line(run: Mapping[str, Any], metric: str) -> str:
    """Return one seed's scores and where they are from."""
    from hpo.results import on_test
    from hpo.verdict import number

    test = (run.get("test_metrics") or {}).get(on_test(metric))
    epoch = run.get("best_epoch")
    said = [f"{name} {number(value)}" for name, value in ((metric, run.get("val")),
                                                         (on_test(metric), test))
            if value is not None]
    said += [] if epoch is None else [f"best epoch {epoch}"]
    if run.get("test_read_at"):
        at = run["test_read_at"][:16].replace("T", " ")
        said.append(f"test split read {at} UTC by confirmation {run.get('reading', 1)}")
    return ", ".join([*said, f"trial {run['trial']} of confirm"])


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) and value:
        return ", ".join(f"{name} {item}" for name, item in value.items())
    if isinstance(value, (list, Mapping)):
        return json.dumps(value, default=str, ensure_ascii=False)
    return "-" if value is None else str(value)


def promote(ref: str, home: Path, storage: str | None, console: Console, *, force: bool) -> int:
    """Make a row its study's champion.

    Raises:
        InputError: for a row that cannot be champion.
        HpoError: for one that is not shown to be better than the champion, without `force`.
    """
    with opened(home, storage) as db:
        say(console, champions.promote(db, ref, force=force))
    return 0
