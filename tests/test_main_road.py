"""The main road from end to end on real images: a whole run, its registry, its export."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import optuna
from commands import hpo

import storage

EPOCHS = 2
WORDS = ("run", "--study", "digits", "--epochs", EPOCHS, "--n-trials", 4, "--top-k", 1,
         "--confirm-seeds", 2, "--pruner", "none", "--workers", 2, "--devices", "cpu")
N_TRIALS = {"digits/lr-range": 1, "digits/grid": 12, "digits": 4}
CANDIDATES = {"search", "grid", "lr-range", "default"}


def counts(url: str) -> Mapping[str, int]:
    """Return the COMPLETE trials of each phase, each with all its epochs in both tables."""
    db, stock = storage.Database(url), optuna.storages.RDBStorage(url)
    found = {}
    try:
        for study in db.studies.get_all_studies():
            trials = optuna.load_study(study_name=study.study_name, storage=stock).trials
            assert all(trial.state.name == "COMPLETE" for trial in trials)
            for trial in trials:
                rows = db.epochs(study.study_name, trial.number)
                assert sorted(trial.intermediate_values) == list(range(EPOCHS))
                assert [row.epoch for row in rows] == list(range(EPOCHS))
                assert all({"train_loss", "val_loss", "val_accuracy", "lr", "images_per_s",
                            "epoch_s"} == set(row.metrics) for row in rows)
            found[study.study_name] = len(trials)
    finally:
        db.close()
        stock.engine.dispose()
    return found


def held_to(folder: Path, url: str, env: Mapping[str, str]) -> None:
    """Run digits whole, look at what it left, and run it again."""
    done = hpo(folder, *WORDS, env=env)
    found = dict(counts(url))
    # Candidates with the same params share their trainings.
    assert found.pop("digits/confirm") in (4, 6, 8)
    assert found == N_TRIALS
    assert "search" in done.stdout and (folder / "hpo-runs/reports/digits/report.md").is_file()
    rows = json.loads(hpo(folder, "registry", "list", "--json", env=env).stdout)
    assert {row["phase"] for row in rows} == CANDIDATES
    for row in rows:
        assert row["seeds"] == [1, 2] and len(row["scores"]) == 2
        assert 0 < row["test_mean"] <= 1 and row["test_sd"] is not None
        assert row["data_fingerprint"] and row["versions"]["torch"] and row["checkpoint"]
    before = counts(url)
    hpo(folder, *WORDS, env=env)
    assert counts(url) == before


def test_a_whole_run_on_sqlite_registers_resumes_and_exports(tmp_path: Path) -> None:
    held_to(tmp_path, f"sqlite:///{tmp_path}/hpo-runs/hpo.db", {})
    best = json.loads(hpo(tmp_path, "best", "--study", "digits", "--json").stdout)
    assert best["confirmed"] and best["checkpoint_state"] == "kept"
    hpo(tmp_path, "export", "--study", "digits", "--to", "out", "--devices", "cpu")
    exported = json.loads((tmp_path / "out/model.json").read_text())
    assert exported["scored_again"]["test_accuracy"] == exported["metrics"]["test_accuracy"]
    assert (tmp_path / "out/model.pt").stat().st_size > 1000


def test_a_whole_run_on_postgresql_has_the_same_trials_and_epochs(
    tmp_path: Path, postgres_url: str
) -> None:
    held_to(tmp_path, postgres_url, {"HPO_STORAGE": postgres_url})
