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


def test_another_result_at_a_place_has_an_id_of_its_own_and_the_old_one_stays(
    db: Database,
) -> None:
    """What an id stands for never changes: somebody may rely on it."""
    first = db.registry.add({**ROW, "checkpoint": "a.pt"})
    second = db.registry.add({**ROW, "params": {"lr": 0.2}, "val_mean": 0.95})
    [row] = db.registry.rows("s")
    assert (row["id"], row["val_mean"], row["checkpoint"]) == (second, 0.95, None)
    old = db.registry.get(first)
    assert old is not None
    assert (old["state"], old["val_mean"], old["checkpoint"]) == ("replaced", 0.9, "a.pt")


def test_a_result_that_is_confirmed_on_more_seeds_keeps_its_id_and_its_weights(
    db: Database,
) -> None:
    scores = [{"seed": 1, "trial": 0, "val": 0.9}, {"seed": 2, "trial": 1, "val": 0.92}]
    more = {**ROW, "scores": scores, "seeds": [1, 2], "val_mean": 0.91, "checkpoint": "b.pt"}
    first = db.registry.add({**ROW, "scores": scores[:1], "checkpoint": "a.pt", "source": "x"})
    assert db.registry.add({**more, "source": "y", "lost_seeds": [3]}) == first
    [row] = db.registry.rows("s")
    assert (row["val_mean"], row["scores"], row["seeds"]) == (0.91, scores, [1, 2])
    assert (row["checkpoint"], row["source"], row["lost_seeds"]) == ("a.pt", "x", [3])


def test_other_scores_on_the_same_seed_are_another_result(db: Database) -> None:
    scores = [{"seed": 1, "trial": 0, "val": 0.9}]
    first = db.registry.add({**ROW, "scores": scores})
    assert db.registry.add({**ROW, "scores": [{**scores[0], "val": 0.8}]}) != first


def test_two_results_that_change_places_keep_their_ids(db: Database) -> None:
    """The order by the confirmed mean changes as seeds are added."""
    rows = [{**ROW, "params": {"lr": lr}, "rank": rank} for rank, lr in ((1, 0.1), (2, 0.2))]
    before = [db.registry.add(row) for row in rows]
    after = [db.registry.add({**row, "rank": 3 - row["rank"]}) for row in reversed(rows)]
    assert after == before[::-1]
    found = [(row["rank"], row["params"]["lr"]) for row in db.registry.rows("s")]
    assert found == [(1, 0.2), (2, 0.1)]


def test_rows_that_a_new_confirmation_did_not_write_are_marked_as_replaced(db: Database) -> None:
    """Those of other studies stay as they are."""
    kept = db.registry.add(ROW)
    db.registry.add({**ROW, "rank": 2, "params": {"lr": 0.2}})
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
