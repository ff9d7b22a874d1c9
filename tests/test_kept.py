"""Which trials keep their weights, as trials end in any order and in several processes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from optuna.trial import TrialState

from hpo.drive import Ending, Goal
from hpo.kept import Checkpoints
from hpo.queue import search_items
from hpo.studies import ensure_study
from storage import Database

TOP_K = 3


@pytest.fixture
def db(tmp_path: Path, sqlite_template: Path) -> Iterator[Database]:
    """Give an open database with the search study `s` in it."""
    file = tmp_path / "hpo.db"
    file.write_bytes(sqlite_template.read_bytes())
    opened = Database(f"sqlite:///{file}")
    yield opened
    opened.close()


def save(path: Path) -> None:
    path.write_text("weights")


@pytest.mark.parametrize("maximize", [False, True])
def test_after_every_trial_the_files_are_those_of_the_best(
    db: Database, tmp_path: Path, maximize: bool
) -> None:
    """With equal values the earlier trial is the better one; two processes take turns."""
    ensure_study(db, "s", "maximize" if maximize else "minimize", "score")
    db.tickets.write("s", "s", "trial", search_items(60, 0))
    others = Database(db.url)
    sides = [(one, Checkpoints(one, tmp_path, "s", TOP_K, Goal("score", maximize)))
             for one in (db, others)]
    rng = random.Random(3)
    ended: list[tuple[float, int]] = []
    for k in range(60):
        opened, kept = sides[k % 2]
        claim = opened.tickets.claim("s", "me", "h", 1, 60)
        assert claim is not None and claim.number is not None and claim.trial_id is not None
        value = rng.choice((0.25, 0.5, rng.random()))
        ending = Ending("COMPLETE", value)
        displaced = kept.keep("s", claim.number, ending, save)
        opened.end_trial(claim.ticket.id, "me", claim.trial_id, TrialState.COMPLETE, value,
                         ending.attrs)
        for file in displaced:
            (tmp_path / file).unlink(missing_ok=True)
        ended.append((-value if maximize else value, claim.number))
        best = {f"{number}.pt" for _, number in sorted(ended)[:TOP_K]}
        found = {path.name for path in (tmp_path / "artifacts" / "s" / "search").glob("*.pt")}
        assert found == best
    others.close()


def test_every_confirmation_keeps_its_weights(db: Database, tmp_path: Path) -> None:
    kept = Checkpoints(db, tmp_path, "s", 1, Goal("score", True))
    for number in range(3):
        ending = Ending("COMPLETE", 0.5)
        assert kept.keep("s/confirm", number, ending, save) == []
        assert ending.attrs["checkpoint"] == f"artifacts/s/confirm/{number}.pt"


def test_a_file_that_cannot_be_written_leaves_the_trial_without_weights(
    db: Database, tmp_path: Path
) -> None:
    ensure_study(db, "s", "maximize", "score")

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    ending = Ending("COMPLETE", 0.5)
    with pytest.raises(OSError, match="No space"):
        Checkpoints(db, tmp_path, "s", 1, Goal("score", True)).keep("s", 0, ending, full)
    assert ending.attrs == {}
