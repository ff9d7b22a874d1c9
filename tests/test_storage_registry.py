"""The registry, the studies' settings, the workers, and what a deletion leaves."""

from __future__ import annotations

import pytest
from optuna.study import StudyDirection

import storage
from storage import Database

ROW = {
    "study": "s",
    "phase": "search",
    "rank": 1,
    "trial": 7,
    "params": {"lr": 0.1 + 0.2},
    "metric": "val_accuracy",
    "val_mean": 0.9,
    "seeds": [1, 2, 3],
    "scores": [{"seed": 1}],
}


def test_a_registered_row_comes_back_with_all_it_was_given(db: Database) -> None:
    """Fields without a column are kept too."""
    id_ = db.registry.add({**ROW, "lr_range": [1e-4, 1e-2]})
    row = db.registry.get(id_)
    assert row is not None
    assert {**ROW, "lr_range": [1e-4, 1e-2]}.items() <= row.items()
    assert row["created_at"].tzinfo is not None


def test_registering_a_place_again_replaces_the_row_and_keeps_its_id(db: Database) -> None:
    """A second run of the confirmation."""
    first = db.registry.add(ROW)
    second = db.registry.add({"study": "s", "phase": "search", "rank": 1, "val_mean": 0.95})
    rows = db.registry.rows("s")
    assert first == second and len(rows) == 1
    assert (rows[0]["val_mean"], rows[0]["params"], rows[0]["trial"]) == (0.95, None, None)


def test_rows_that_a_new_confirmation_did_not_write_are_marked_as_replaced(db: Database) -> None:
    """Those of other studies stay as they are."""
    kept = db.registry.add(ROW)
    db.registry.add({**ROW, "rank": 2})
    db.registry.add({**ROW, "study": "other", "rank": 2})
    assert db.registry.retire(ROW["study"], [kept]) == 1
    assert [row["id"] for row in db.registry.rows(ROW["study"])] == [kept]
    assert len(db.registry.rows("other")) == 1
    assert db.registry.retire(ROW["study"], [kept]) == 0


@pytest.mark.parametrize("beginning", ["", "%", "no-such-id"])
def test_an_unknown_id_gives_none(db: Database, beginning: str) -> None:
    """Neither does a wildcard find anything."""
    db.registry.add(ROW)
    assert db.registry.get(beginning) is None


def test_a_row_is_found_by_the_beginning_of_its_id(db: Database) -> None:
    """As git does with commits."""
    id_ = db.registry.add(ROW)
    found = db.registry.get(id_[:8])
    assert found is not None and found["id"] == id_


def test_deleting_a_study_takes_its_phases_and_marks_its_registry_rows(db: Database) -> None:
    """C43.2: and leaves a study whose name only begins alike."""
    for name in ("s", "s/grid", "s-2"):
        study_id = db.studies.create_new_study([StudyDirection.MAXIMIZE], name)
        trial_id = db.studies.create_new_trial(study_id)
        db.report(trial_id, name, 0, 0, 0.5, {"a": 0.5})
        db.tickets.write(name.split("/")[0], name, "trial", [storage.NewTicket(0)])
    db.registry.add(ROW)
    db.runs.save_study("s", module="s")
    assert db.delete("s")
    assert [study.study_name for study in db.studies.get_all_studies()] == ["s-2"]
    assert (db.n_epochs("s"), db.n_epochs("s/grid"), db.n_epochs("s-2")) == (0, 0, 1)
    assert db.tickets.list("s") == [] and len(db.tickets.list("s-2")) == 1
    assert db.registry.rows("s") == [] and db.runs.study("s") is None
    assert [row["state"] for row in db.registry.rows("s", with_deleted=True)] == ["study deleted"]


def test_deleting_nothing_says_so(db: Database) -> None:
    """The command line tells it."""
    assert not db.delete("nothing")


def test_a_study_made_again_gets_its_own_registry_row(db: Database) -> None:
    """The marked row stays beside it."""
    old = db.registry.add(ROW)
    db.delete("s")
    assert db.registry.add(ROW) != old
    assert len(db.registry.rows("s", with_deleted=True)) == 2


def test_settings_of_a_study_are_kept_and_changed_field_by_field(db: Database) -> None:
    """Optuna stores neither sampler nor pruner."""
    db.runs.save_study("s", module="s", settings={"sampler": "tpe"}, epochs=15)
    db.runs.save_study("s", epochs=20)
    study = db.runs.study("s")
    assert study is not None
    assert (study["settings"], study["epochs"]) == ({"sampler": "tpe"}, 20)


def test_workers_are_seen_while_they_live(db: Database) -> None:
    """By the database's clock."""
    db.runs.beat("w1", "s", "host", 1, "cpu")
    db.runs.beat("w1", "s", "host", 1, "cpu", {"trial": 3})
    [(worker, ago_s)] = db.runs.seen("s", within_s=30)
    assert worker["data"] == {"trial": 3} and 0 <= ago_s < 30
    assert db.runs.seen("s", within_s=-1) == []
    assert db.runs.seen("other", within_s=30) == []


def test_a_worker_that_has_ended_is_not_seen_and_what_it_ran_with_is_kept(db: Database) -> None:
    db.runs.beat("w1", "s", "host", 1, "gpu 0", {"versions": {"torch": "2.9"}})
    db.runs.left("w1")
    assert db.runs.seen("s", within_s=1000) == []
    worker = db.runs.worker("w1")
    assert worker is not None
    assert (worker["device"], worker["data"]) == ("gpu 0", {"versions": {"torch": "2.9"}})
    assert db.runs.worker("w2") is None


def test_a_worker_on_a_host_with_a_long_name_has_a_row(db: Database) -> None:
    """A host's name may have 64 characters, and the column has no more for the whole owner."""
    owner = f"{'n' * 64}|12345|678901234"
    db.runs.beat(owner, "s", "n" * 64, 12345)
    worker = db.runs.worker(owner)
    assert worker is not None and worker["owner"] == owner and worker["data"] == {}
    assert [row["owner"] for row, _ in db.runs.seen("s", within_s=30)] == [owner]
