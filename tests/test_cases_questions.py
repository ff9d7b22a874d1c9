"""Questions about studies without a usable trial, and about what a param was worth."""

from __future__ import annotations

import json
from pathlib import Path

import optuna
from commands import hpo, search_words, strict_json, together, url, write, write_tape


def test_best_of_a_study_without_a_complete_trial_says_why(tmp_path: Path) -> None:
    """C48.1, C48.2, C48.3: exit 3; all FAIL has `boom` and `FAIL: 3`."""
    write(tmp_path, "fails", body='raise ValueError("boom")\nyield {}')
    write_tape(tmp_path, "pruned", [[float("nan")]] * 3)
    together(tmp_path, search_words("fails", "--n-trials", 3),
             search_words("pruned", "--n-trials", 3), code=3)
    failed = hpo(tmp_path, "best", "--study", "fails", code=3)
    assert "boom" in failed.stderr and "FAIL: 3" in failed.stderr
    pruned = hpo(tmp_path, "best", "--study", "pruned", code=3)
    assert "PRUNED: 3" in pruned.stderr
    assert "diverged" in pruned.stderr


def test_best_of_a_study_without_a_trial_ends_with_code_3(tmp_path: Path) -> None:
    """C48.1: a study whose run was out of time before its first trial."""
    write(tmp_path, "s", body='time.sleep(60)\nyield {"loss": x}')
    hpo(tmp_path, *search_words("s", "--n-trials", 3, "--timeout", 4), code=3)
    done = hpo(tmp_path, "best", "--study", "s", code=3)
    assert "study 's'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_importance_needs_trials_that_differ(tmp_path: Path) -> None:
    """C48.4 to C48.7: not enough data, k = 0.0 and x = 1.0, and no traceback."""
    write(tmp_path, "one")
    write(tmp_path, "equal", body='yield {"loss": 1.0}')
    write(tmp_path, "fixed", "x=Float(0.0, 1.0), k=Float(1.0, 1.0)", 'yield {"loss": x}')
    together(tmp_path, search_words("one", "--n-trials", 1),
             search_words("equal", "--n-trials", 3), search_words("fixed", "--n-trials", 3))
    said = {}
    for name in ("one", "equal", "fixed"):
        report = strict_json(hpo(tmp_path, "report", "--study", name, "--json").stdout)
        said[name] = json.dumps(report)
    assert "not enough data" in said["one"]
    assert "not enough data" in said["equal"]
    assert json.loads(said["fixed"])["importance"] == {"x": 1.0, "k": 0.0}
    stock = optuna.storages.RDBStorage(url(tmp_path))
    study = optuna.load_study(study_name="fixed", storage=stock)
    study.add_trial(optuna.create_trial(
        value=0.1, params={"x": 0.2, "k": 1.0, "depth": 3},
        distributions={**study.trials[0].distributions,
                       "depth": optuna.distributions.IntDistribution(1, 9)}))
    stock.engine.dispose()
    strict_json(hpo(tmp_path, "report", "--study", "fixed", "--json").stdout)


def test_a_question_makes_no_database(tmp_path: Path) -> None:
    for command in ("best", "status", "report"):
        done = hpo(tmp_path, command, "--study", "s", code=3)
        assert "there is no database" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_study_lists_the_known_ones(tmp_path: Path) -> None:
    write(tmp_path, "quad")
    hpo(tmp_path, *search_words("quad", "--n-trials", 1))
    done = hpo(tmp_path, "best", "--study", "quat", code=3)
    assert "did you mean 'quad'?" in done.stderr and "there are: quad" in done.stderr
