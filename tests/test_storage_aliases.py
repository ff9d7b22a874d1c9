"""The names that point at registered results, and the source that is kept with these."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from storage import Database
from storage.sources import digest_of

ROW = {"study": "s", "phase": "search", "rank": 1, "metric": "val_loss", "val_mean": 0.9}


def held(db: Database, study: str = "s") -> dict[str, str]:
    return {row["alias"]: row["row_id"] for row in db.aliases.held(study)}


def test_a_name_goes_from_one_row_to_the_next_and_its_history_stays(db: Database) -> None:
    for row_id, why in (("a", "the first"), ("b", "better"), ("b", "again")):
        db.aliases.give("s", "val_loss", "champion", row_id, why)
    assert held(db) == {"champion": "b"}
    first, second = db.aliases.history("s")
    assert (first["row_id"], first["why"], second["row_id"], second["why"]) == (
        "a", "the first", "b", "better")
    assert first["since_at"] <= first["until_at"] == second["since_at"]
    assert second["until_at"] is None and first["since_at"].tzinfo is not None


def test_a_challenger_that_becomes_champion_is_no_challenger_any_more(db: Database) -> None:
    db.aliases.give("s", "val_loss", "champion", "a", "")
    db.aliases.give("s", "val_loss", "challenger", "b", "")
    db.aliases.give("s", "val_loss", "champion", "b", "")
    assert held(db) == {"champion": "b"}


def test_each_study_and_each_metric_has_its_own_champion(db: Database) -> None:
    for study, metric, row_id in (("s", "val_loss", "a"), ("s", "val_accuracy", "b"),
                                  ("t", "val_loss", "c")):
        db.aliases.give(study, metric, "champion", row_id, "")
    assert db.aliases.holder("s", "champion", "val_accuracy") == "b"
    assert [row["row_id"] for row in db.aliases.held("t")] == ["c"]
    assert len(db.aliases.held()) == 3


def test_a_name_that_is_taken_is_nobody_s(db: Database) -> None:
    db.aliases.give("s", "val_loss", "challenger", "a", "")
    db.aliases.take("s", "val_loss", "challenger")
    assert held(db) == {} and db.aliases.holder("s", "challenger") is None
    assert db.aliases.history("s")[0]["until_at"] is not None


def test_a_deleted_study_has_no_champion_and_one_made_again_gets_its_own(db: Database) -> None:
    row_id = db.registry.add(ROW)
    db.aliases.give("s", "val_loss", "champion", row_id, "")
    db.aliases.give("t", "val_loss", "champion", "other", "")
    assert db.delete("s")
    assert held(db) == {} and held(db, "t") == {"champion": "other"}
    db.aliases.give("s", "val_loss", "champion", db.registry.add(ROW), "")
    assert len(db.aliases.history("s")) == 2


def test_of_many_that_give_a_name_at_once_one_holds_it(db: Database) -> None:
    """Two runs of a study may end at the same moment."""
    with ThreadPoolExecutor(4) as several:
        list(several.map(lambda i: db.aliases.give("s", "val_loss", "champion", str(i), ""),
                         range(4)))
    assert len(db.aliases.held("s")) == 1 and len(db.aliases.history("s")) == 4


def test_the_same_files_are_kept_once_and_come_back_as_they_were(db: Database) -> None:
    files = {"search_spaces/s.py": "x = 'ü\\0'\n", "nets.py": ""}
    digest = db.sources.put(files)
    assert db.sources.put(dict(reversed(files.items()))) == digest == digest_of(files)
    assert db.sources.get(digest) == files
    assert db.sources.put({**files, "nets.py": " "}) != digest
    assert db.sources.get("0") is None and db.sources.get(None) is None
