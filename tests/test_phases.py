"""The phases of a run: each trains its own trials alone, and tries again for what it lacks."""

from __future__ import annotations

from pathlib import Path

from commands import hpo, reasons, search, states, trials, write

GRID = 'grid={"x": [0.1, 0.9]}, defaults={"x": 0.5}'


def test_an_interrupted_search_waits_while_another_phase_runs(tmp_path: Path) -> None:
    """And then the search has N trials in all."""
    write(tmp_path, "s", epochs=2, more=GRID, body="""
        for epoch in range(2):
            time.sleep(0.0 if (HERE / "fast").exists() else 0.2)
            yield {"loss": (x - 0.3) ** 2 - epoch}
        """)
    search(tmp_path, "s", "--n-trials", 30, "--timeout", 4, code=None)
    (tmp_path / "fast").touch()
    before = trials(tmp_path, "s")
    assert 0 < len(before) < 30
    done = hpo(tmp_path, "run", "--study", "s", "--phases", "grid", "--workers", 1)
    assert "search trial" not in done.stdout and "2 of 2 cells" in done.stdout
    assert len(trials(tmp_path, "s")) == len(before)
    search(tmp_path, "s")
    ended = [t for t in trials(tmp_path, "s") if not t.user_attrs["reason"].startswith("interr")]
    assert states(ended).count("COMPLETE") + states(ended).count("PRUNED") == len(ended) == 30


def test_fewer_trials_than_an_interrupted_run_asked_for_are_not_exceeded(tmp_path: Path) -> None:
    write(tmp_path, "s", body='time.sleep(0.3)\nyield {"loss": x}')
    search(tmp_path, "s", "--n-trials", 30, "--timeout", 3, "--workers", 2, code=None)
    n = len([t for t in trials(tmp_path, "s") if t.state.name == "COMPLETE"])
    assert 0 < n < 30
    for _ in range(2):
        search(tmp_path, "s", "--n-trials", n)
    assert states(trials(tmp_path, "s")).count("COMPLETE") == n
    search(tmp_path, "s", "--n-trials", n + 2)
    assert states(trials(tmp_path, "s")).count("COMPLETE") == n + 2


def test_a_confirmation_that_failed_is_tried_again(tmp_path: Path) -> None:
    """A disk that was away for a moment must not spoil the verdict for good."""
    write(tmp_path, "s", body='if run.seed == 2 and not (HERE / "back").exists():\n'
          '    raise OSError("disk away")\nyield {"loss": (x - 0.3) ** 2}')
    words = ("run", "--study", "s", "--n-trials", 3, "--top-k", 1, "--phases", "search,confirm",
             "--workers", 1)
    done = hpo(tmp_path, *words)
    assert ": no result on seed 2, so the mean is over 2 of 3" in done.stdout
    assert [r for r in reasons(trials(tmp_path, "s/confirm")) if r] == [
        "error: OSError: disk away"]
    (tmp_path / "back").touch()
    done = hpo(tmp_path, *words)
    assert "no result on seed" not in done.stdout
    assert states(trials(tmp_path, "s/confirm")).count("COMPLETE") == 3
    assert len(trials(tmp_path, "s/confirm")) == 4
