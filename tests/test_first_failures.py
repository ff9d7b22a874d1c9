"""A run whose first trials all fail alike stops, says why, and has spent none of its tickets."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from commands import (
    arguments,
    environment,
    finish,
    hpo,
    search_words,
    start,
    states,
    trials,
    write,
)

from hpo.errors import NoResult
from hpo.first_failures import FirstFailures, kind_of

# A while into the trial, as real ones fail: a run is stopped by its parent, which hears of each
# failure some tenths of a second later, and 40 that take no time at all have failed by then.
BROKEN = """
    print("loading the data")
    if not (HERE / "mended").exists():
        time.sleep(0.2)
        raise KeyError("trian")
    yield {"loss": x}
"""


def event(idx: int, reason: str = "error: KeyError: 'x'", **data: Any) -> dict[str, Any]:
    state = "FAIL" if reason else "COMPLETE"
    return {"event": "end", "kind": "trial", "study": "s", "idx": idx, "number": idx,
            "state": state, "reason": reason, **data}


def heard(most: int, *events: dict[str, Any]) -> FirstFailures:
    found = FirstFailures(most, Path("nowhere"))
    for each in events:
        found.hear(each)
    return found


def test_so_many_failures_of_one_kind_from_the_start_are_enough(tmp_path: Path) -> None:
    few = heard(3, event(0), event(1))
    few.check()
    assert few.spent == {}
    enough = heard(3, event(0), event(1, "error: KeyError: 'y'"), event(2), event(3))
    with pytest.raises(NoResult, match="the first 3 trials failed for one reason, search trial 2 "
                                       "with: error: KeyError: 'x'; mend it") as caught:
        enough.check()
    assert caught.value.exit_code == 3
    assert enough.spent == {"s": [0, 1, 2, 3]}, "what failed until all had stopped counts too"


@pytest.mark.parametrize("events", [
    [event(0, ""), event(1), event(2), event(3)],
    [event(0), event(1, "error: ValueError: no"), event(2), event(3, "oom: no")],
    [event(n, "interrupted: the run was stopped") for n in range(9)],
    [event(n, event="epoch") for n in range(9)],
    [event(n, kind="sweep") for n in range(9)],
], ids=["one went well", "different reasons", "interrupted", "no end", "no trial"])
def test_other_events_stop_nothing(events: list[dict[str, Any]]) -> None:
    heard(3, *events).check()


def test_zero_stops_never() -> None:
    heard(0, *(event(n) for n in range(50))).check()


@pytest.mark.parametrize(("reason", "kind"), [
    ("error: ValueError: lr=0.1: too high", "error: ValueError"),
    ("error: epoch 0: 'loss' is missing", "error"),
    ("oom: OutOfMemoryError: CUDA", "oom"),
    ("worker lost", "worker lost"),
    ("", ""),
])
def test_the_kind_of_a_failure_leaves_out_what_differs(reason: str, kind: str) -> None:
    assert kind_of(reason) == kind


def test_a_broken_module_stops_early_and_the_same_command_goes_on_once_it_is_mended(
    tmp_path: Path
) -> None:
    write(tmp_path, "s", body=BROKEN)
    words = search_words("s", "--n-trials", 40, "--workers", 2)
    code, output = finish(start(tmp_path, *words))
    assert code == 3, output
    assert "the first 5 trials failed for one reason" in output
    assert "hpo:   loading the data" in output and "hpo:   KeyError: 'trian'" in output
    assert "--max-failures 0" in output
    failed = trials(tmp_path, "s")
    assert 5 <= len(failed) < 40 and set(states(failed)) == {"FAIL"}
    (tmp_path / "mended").touch()
    hpo(tmp_path, *words)
    found = trials(tmp_path, "s")
    assert states(found[len(failed):]) == ["COMPLETE"] * 40


def test_a_run_that_shall_not_stop_goes_through_all_of_them(tmp_path: Path) -> None:
    write(tmp_path, "s", body=BROKEN)
    done = hpo(tmp_path, *search_words("s", "--n-trials", 12, "--max-failures", 0), code=3)
    assert "one reason" not in done.stderr
    assert states(trials(tmp_path, "s")) == ["FAIL"] * 12


def test_a_worker_on_a_broken_host_stops_and_leaves_its_trials_to_the_others(
    tmp_path: Path
) -> None:
    """The run's own worker is on another host, say, where the module works."""
    write(tmp_path, "s", body="""
        if "HPO_BROKEN" in os.environ:
            time.sleep(0.2)
            raise OSError("no driver")
        time.sleep(0.4)
        yield {"loss": x}
    """)
    run = start(tmp_path, *search_words("s", "--n-trials", 16, "--workers", 1))
    words = ("worker", "--study", "s", "--devices", "cpu", "--max-failures", 2)
    broken = subprocess.run(arguments(*words), cwd=tmp_path, env=environment(HPO_BROKEN="1"),
                            text=True, capture_output=True, timeout=100)
    assert broken.returncode == 3, broken.stderr
    assert "the first 2 trials failed for one reason" in broken.stderr
    code, output = finish(run)
    assert code == 0, output
    assert states(trials(tmp_path, "s")).count("COMPLETE") == 16
