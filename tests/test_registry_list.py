"""The registry can be read on a narrow terminal and searched in a pipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import study_samples as samples
from rich.console import Console

from hpo import ask, registry


@pytest.fixture
def home(tmp_path: Path) -> Path:
    samples.stored(tmp_path, "toy-with-a-name").close()
    return tmp_path


def listed(home: Path, capsys: pytest.CaptureFixture[str], **console: object) -> list[str]:
    shown = Console(no_color=True, **console)  # type: ignore[arg-type]
    url = f"sqlite:///{home / 'hpo.db'}"
    assert registry.listing(None, home, url, shown, every=False, as_json=False) == 0
    return capsys.readouterr().out.splitlines()


def test_a_pipe_gets_one_whole_line_a_row(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, *rows = listed(home, capsys, width=80, force_terminal=False)
    assert head.split() == ["id", "study", "from", "validation", "test", "epochs", "metric",
                            "made"]
    assert len(rows) == 4
    [search] = [row for row in rows if "search rank 1" in row]
    assert search.split()[1:11] == ["toy-with-a-name", "search", "rank", "1", "0.9820", "±",
                                    "0.0010", "not", "read", "0"]
    assert search.split()[11] == "val_accuracy"


def test_a_wide_terminal_has_all_columns(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(home, capsys, width=140, force_terminal=True)[0].split()[-1] == "made"


def test_a_narrow_terminal_gets_whole_rows_and_is_told_what_is_left_out(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = listed(home, capsys, width=80, force_terminal=True)
    assert len(lines) == 6 and max(map(len, lines)) <= 80
    assert lines[0].split()[-1] == "epochs"
    assert lines[-1] == "(too narrow for: metric, made)"


def test_a_part_of_an_epoch_is_listed_as_the_end_table_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db = samples.stored(tmp_path)
    db.registry.add({"study": "toy", "phase": "lr-range", "rank": 1, "metric": "val_accuracy",
                     "val_mean": 0.9, "epochs_spent": 2.8})
    db.close()
    [row] = [line for line in listed(tmp_path, capsys, width=80) if " lr-range " in line]
    assert row.split()[3:7] == ["0.9000", "not", "read", "2.8"]


def shown(home: Path, phase: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what `registry show` prints of a phase's row, each line's spaces as one."""
    url = f"sqlite:///{home / 'hpo.db'}"
    with ask.opened(home, url) as db:
        [row] = [row for row in db.registry.rows() if row["phase"] == phase]
    assert registry.show(row["id"][:8], home, url, Console(width=80), as_json=False) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_registered_result_is_shown_with_what_it_is_and_scored_first(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *lines = shown(home, "search", capsys)
    assert first.startswith("id: ")
    assert lines[:8] == [
        "study: toy-with-a-name", "phase: search", "rank: 1 (trial 3)",
        "val_accuracy: 0.9820 ± 0.0010", "test_accuracy: not read",
        "seed 100: val_accuracy 0.9810, test_accuracy 0.9780, trial 0 of confirm",
        "seed 101: val_accuracy 0.9830, test_accuracy 0.9800, trial 1 of confirm",
        "seed 102: val_accuracy 0.9820, test_accuracy 0.9790, trial 2 of confirm"]
    assert lines[8] == "params: lr 0.01, hidden 256"
    after = [line.split(":")[0] for line in lines[9:]]
    assert {"versions", "git_commit", "device", "created_at"} <= set(after)
    assert not {"scores", "seeds", "val_mean", "study"} & set(after)
    assert "versions: hpo 1, torch 2" in lines


def test_a_registered_result_without_scores_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db = samples.stored(tmp_path, sample=samples.results(candidates=()))
    db.registry.add({"study": "toy", "phase": "default", "rank": 1, "metric": "val_loss",
                     "val_mean": 0.9})
    db.close()
    lines = shown(tmp_path, "default", capsys)
    assert lines[3:6] == ["rank: 1", "val_loss: 0.9000", "test_loss: not read"]


def test_a_shown_result_says_when_each_test_score_was_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db = samples.stored(tmp_path)
    runs = [{"seed": 1, "trial": 4, "val": 0.9, "test_metrics": {"test_accuracy": 0.8},
             "test_read_at": "2026-01-02T03:04:05+00:00", "reading": 2},
            {"seed": 2, "trial": 5, "val": 0.91, "test_metrics": {}}]
    row = db.registry.add({"study": "toy", "phase": "grid", "rank": 1, "metric": "val_accuracy",
                           "params": {}, "scores": runs})
    db.close()
    url = f"sqlite:///{tmp_path / 'hpo.db'}"
    assert registry.show(row, tmp_path, url, Console(width=200), as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    first, second = (next(line for line in lines if line.startswith(f"seed {n}:"))
                     for n in (1, 2))
    assert "test_accuracy 0.8000" in first and first.endswith(
        "test split read 2026-01-02 03:04 UTC by confirmation 2, trial 4 of confirm")
    assert "read" not in second
