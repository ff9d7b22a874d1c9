"""The registry's list can be read on a narrow terminal and searched in a pipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import study_samples as samples
from rich.console import Console

from hpo import ask


@pytest.fixture
def home(tmp_path: Path) -> Path:
    samples.stored(tmp_path, "toy-with-a-name").close()
    return tmp_path


def listed(home: Path, capsys: pytest.CaptureFixture[str], **console: object) -> list[str]:
    shown = Console(no_color=True, **console)  # type: ignore[arg-type]
    url = f"sqlite:///{home / 'hpo.db'}"
    assert ask.registry_list(None, home, url, shown, every=False, as_json=False) == 0
    return capsys.readouterr().out.splitlines()


def test_a_pipe_gets_one_whole_line_a_row(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, *rows = listed(home, capsys, width=80, force_terminal=False)
    assert head.split() == ["id", "study", "from", "validation", "test", "epochs", "metric",
                            "made"]
    assert len(rows) == 4
    [search] = [row for row in rows if "search#1" in row]
    assert search.split()[1:9] == ["toy-with-a-name", "search#1", "0.9820", "±", "0.0010",
                                   "not", "read", "0"]
    assert search.split()[9] == "val_accuracy"


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
