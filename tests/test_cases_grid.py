"""The grid through whole runs: every cell once, retries that end, failed cells not forgotten."""

from __future__ import annotations

from pathlib import Path

from commands import (
    TIMEOUT_S,
    finish,
    grid,
    grid_words,
    reasons,
    start,
    states,
    together,
    trials,
    write,
)

CELL = "time.sleep(0.05)\nyield {'loss': 1.0}"


def test_no_cell_runs_twice_with_four_workers(tmp_path: Path) -> None:
    """C15: 8, 1 and 3 trials, none a double of another; ten times each in test_cases_races."""
    write(tmp_path, "eight", "x=Int(0, 3), y=Categorical('a', 'b')", CELL)
    write(tmp_path, "one", "x=Int(0, 0)", CELL)
    write(tmp_path, "three", "x=Int(0, 9)", CELL, more="grid={'x': [1, 5, 7]}")
    sizes = {"eight": 8, "one": 1, "three": 3}
    for study in sizes:
        grid(tmp_path, study, "--workers", 4, "--seed", 0)
    for study, n in sizes.items():
        found = trials(tmp_path, f"{study}/grid")
        assert states(found) == ["COMPLETE"] * n
        assert len({tuple(trial.params.items()) for trial in found}) == n


def test_two_runs_at_once_share_the_cells(tmp_path: Path) -> None:
    """C15: also two commands in the same second run no cell twice."""
    write(tmp_path, "s", "x=Int(0, 3), y=Categorical('a', 'b')", CELL)
    together(tmp_path, grid_words("s", "--workers", 2), grid_words("s", "--workers", 2))
    found = trials(tmp_path, "s/grid")
    assert len({tuple(trial.params.items()) for trial in found}) == len(found) == 8


def test_a_failed_cell_is_tried_as_often_as_allowed(tmp_path: Path) -> None:
    """C13: the chain names the first trial as origin, ends at --max-retries, exit 0 each time."""
    for study, enough in (("helped", 2), ("not_retried", 2), ("hopeless", 99)):
        write(tmp_path, study, "i=Int(0, 2)", f"""
            counter = HERE / "{study}.count"
            if i == 1:
                k = int(counter.read_text()) if counter.exists() else 0
                counter.write_text(str(k + 1))
                if k < {enough}:
                    raise ValueError("not yet")
            yield {{"loss": float(i)}}
        """)
    retries = {"helped": 2, "not_retried": 0, "hopeless": 2}
    together(tmp_path, *(grid_words(study, "--max-retries", n) for study, n in retries.items()))
    found = {study: trials(tmp_path, f"{study}/grid") for study in retries}
    counts = {study: (states(rows).count("COMPLETE"), states(rows).count("FAIL"))
              for study, rows in found.items()}
    assert counts == {"helped": (3, 2), "not_retried": (2, 1), "hopeless": (2, 3)}
    for study in ("helped", "hopeless"):
        first, *later = [trial for trial in found[study] if trial.params["i"] == 1]
        assert len(later) == 2
        assert "origin" not in first.user_attrs
        assert [trial.user_attrs["origin"] for trial in later] == [first.number] * 2
        assert [trial.user_attrs["retry_of"] for trial in later] == [
            first.number, later[0].number]
    failed = [t for t in found["not_retried"] if t.state.name == "FAIL"][0]
    assert "ValueError: not yet" in failed.user_attrs["reason"]


def test_a_failed_cell_is_tried_by_every_run_until_it_has_a_result(tmp_path: Path) -> None:
    """C17: 2 COMPLETE and 1 FAIL; 1 more FAIL; then `3 of 3`; then nothing to add."""
    write(tmp_path, "g", "x=Int(0, 2)", """
        yield {"loss": float(x) if (HERE / "marker").exists() else 1 / x}
    """)
    for n_failed in (1, 2):
        said = grid(tmp_path, "g").stdout
        assert "x=0" in said and "2 of 3" in said
        assert sorted(states(trials(tmp_path, "g/grid"))) == ["COMPLETE"] * 2 + ["FAIL"] * n_failed
    (tmp_path / "marker").touch()
    for _ in range(2):
        assert "3 of 3" in grid(tmp_path, "g").stdout
        found = trials(tmp_path, "g/grid")
        assert sorted(states(found)) == ["COMPLETE"] * 3 + ["FAIL"] * 2
    assert found[-1].params["x"] == 0


def test_a_run_that_is_interrupted_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """C17: SIGINT ends with 130, leaves nothing RUNNING, and the next run does only the rest."""
    import signal
    import time

    write(tmp_path, "s", "x=Int(0, 3)", """
        (HERE / f"began-{x}").touch()
        for _ in range(1 if x == 0 or (HERE / "marker").exists() else 300):
            time.sleep(0.1)
            yield {"loss": float(x)}
    """)
    process = start(tmp_path, *grid_words("s"))
    deadline = time.monotonic() + TIMEOUT_S
    while not (tmp_path / "began-1").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    (tmp_path / "marker").touch()
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert "Traceback" not in output
    first = trials(tmp_path, "s/grid")
    # After the short first trial the third one's ticket was taken while the second ran.
    assert states(first) == ["COMPLETE", "FAIL", "FAIL"]
    assert reasons(first)[1].startswith("interrupted: after epoch")
    assert reasons(first)[2] == "interrupted: before its first epoch"
    grid(tmp_path, "s")
    found = trials(tmp_path, "s/grid")
    assert states(found) == ["COMPLETE", "FAIL", "FAIL"] + ["COMPLETE"] * 3
    assert found[3].params == first[1].params
