"""`hpo registry diff`: both sides of what differs, and nothing of what does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import storage
from hpo.errors import InputError
from hpo.registry_diff import diff

SOURCE = {"search_spaces/s.py": "WIDTH = 64\nDEPTH = 2\n"}


@pytest.fixture
def db(tmp_path: Path, sqlite_template: Path) -> Any:
    (tmp_path / "hpo.db").write_bytes(sqlite_template.read_bytes())
    opened = storage.Database(f"sqlite:///{tmp_path / 'hpo.db'}")
    opened.runs.save_study("s", module="s", metric="val_accuracy", direction="maximize")
    yield opened
    opened.close()


def register(db: Any, phase: str, params: dict[str, Any], val: dict[int, float],
             **more: Any) -> str:
    runs = [{"seed": seed, "trial": i, "val": value, "test_metrics": {}}
            for i, (seed, value) in enumerate(val.items())]
    return db.registry.add({
        "study": "s", "phase": phase, "rank": 1, "metric": "val_accuracy", "params": params,
        "scores": runs, "seeds": list(val), "versions": {"torch": "2.9", "numpy": "2"}, **more})


def told(tmp_path: Path, capsys: Any, a: str, b: str) -> str:
    url = f"sqlite:///{tmp_path / 'hpo.db'}"
    assert diff(a, b, tmp_path, url, Console(width=200), as_json=False) == 0
    return capsys.readouterr().out


def as_data(tmp_path: Path, capsys: Any, a: str, b: str) -> dict[str, Any]:
    url = f"sqlite:///{tmp_path / 'hpo.db'}"
    assert diff(a, b, tmp_path, url, Console(), as_json=True) == 0
    return json.loads(capsys.readouterr().out)


def test_what_differs_stands_side_by_side_and_what_does_not_is_left_out(db, tmp_path, capsys):
    a = register(db, "search", {"lr": 0.01, "hidden": 64}, {1: 0.9, 2: 0.91, 3: 0.93},
                 data_fingerprint="abc", device="cpu", source=db.sources.put(SOURCE))
    b = register(db, "grid", {"lr": 0.1, "hidden": 64}, {1: 0.8, 2: 0.82, 3: 0.81},
                 data_fingerprint="xyz", device="cpu", source=db.sources.put(
                     {"search_spaces/s.py": "WIDTH = 32\nDEPTH = 2\n"}))
    out = told(tmp_path, capsys, a, b)
    assert f"s, search rank 1 ({a[:8]})" in out and f"s, grid ({b[:8]})" in out
    row = next(line for line in out.splitlines() if line.startswith("param lr"))
    assert row.split()[-2:] == ["0.01", "0.1"]
    assert "hidden" not in out and "device" not in out and "version of" not in out
    assert "data_fingerprint" in out and "-WIDTH = 32" in out and "+WIDTH = 64" in out
    assert "val_accuracy: the first is 0.1033 better (95 % interval" in out


def test_the_difference_is_that_of_the_seeds_that_both_have(db, tmp_path, capsys):
    """By hand: 0.1 and 0.1 on seeds 1 and 2; seed 9 is of one alone."""
    a = register(db, "search", {"lr": 0.01}, {1: 0.9, 2: 0.8, 9: 0.1})
    b = register(db, "grid", {"lr": 0.1}, {1: 0.8, 2: 0.7})
    found = as_data(tmp_path, capsys, a, b)
    [gap] = found["scores"]
    assert gap["mean"] == pytest.approx(0.1) and gap["n_seeds"] == 2
    assert found["seeds"]["9"]["val"] == [0.1, None]
    assert found["source"] == {"same": None, "changes": []}
    assert as_data(tmp_path, capsys, b, a)["scores"][0]["mean"] == pytest.approx(-0.1)


def test_one_result_differs_from_itself_in_nothing(db, tmp_path, capsys):
    a = register(db, "search", {"lr": 0.01}, {1: 0.9, 2: 0.8}, source=db.sources.put(SOURCE))
    out = told(tmp_path, capsys, a, a)
    assert "params: the same" in out and "source: the same" in out and "the same mean" in out


def test_scores_by_two_metrics_are_not_compared(db, tmp_path, capsys):
    a = register(db, "search", {"lr": 0.01}, {1: 0.9, 2: 0.8})
    b = register(db, "grid", {"lr": 0.01}, {1: 0.9, 2: 0.8}, metric="val_loss")
    assert "scores: none in common to compare" in told(tmp_path, capsys, a, b)


def test_a_reference_to_nothing_is_told(db, tmp_path, capsys):
    a = register(db, "search", {"lr": 0.01}, {1: 0.9})
    with pytest.raises(InputError, match="0 rows start so"):
        told(tmp_path, capsys, a, "nosuchrow")
