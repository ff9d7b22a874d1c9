"""A trial that ends no epoch is ended, and its worker replaced."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from commands import hpo, search, states, trials, write

from hpo.watch import LEAST_S, Watch


def heard(watch: Watch, *events: tuple[float, str], pid: int = 7, kind: str = "trial") -> Watch:
    for at, name in events:
        watch.hear(pid, {"event": name, "kind": kind}, at)
    return watch


def test_an_epoch_may_take_what_was_said() -> None:
    watch = heard(Watch(10.0), (100, "draw"), (101, "begin"))
    assert watch.hung(111.0) == {}
    assert watch.hung(111.5) == {7: "hung: no epoch ended in 10 s, 10 s are allowed "
                                    "(--epoch-timeout)"}
    assert heard(watch, (111.6, "epoch")).hung(121.0) == {}


@pytest.mark.parametrize("last", ["ending", "idle", "exit"])
def test_what_has_ended_is_not_watched(last: str) -> None:
    assert heard(Watch(10.0), (0, "begin"), (1, "epoch"), (2, last)).hung(1000.0) == {}
    assert heard(Watch(10.0), (0, "begin"), kind="score").hung(1000.0) == {}


def test_without_a_word_it_is_ten_median_epochs_or_five_minutes_and_no_limit_before() -> None:
    watch = heard(Watch(None), (0, "begin"))
    assert watch.limit_s is None and watch.hung(1e9) == {}
    heard(watch, (1, "epoch"), (2, "epoch"), (3, "epoch"))
    assert watch.limit_s == LEAST_S == 300.0
    heard(watch, (103, "epoch"), (203, "epoch"), (303, "epoch"), (403, "epoch"))
    assert watch.limit_s == 1000.0
    assert watch.hung(1402.0) == {} and list(watch.hung(1404.0)) == [7]


STUCK = """
    for epoch in range(3):
        if run.dir.name == "1" and epoch == 1:
            {how}
        yield {{"loss": x}}
"""


@pytest.mark.parametrize("how", ["where_it_waits()", "os.kill(os.getpid(), 19)"],
                         ids=["waits", "SIGSTOP"])
def test_a_trial_that_is_stuck_ends_as_hung_and_the_others_go_on(
    tmp_path: Path, how: str
) -> None:
    path = write(tmp_path, "s", body=STUCK.format(how=how), epochs=3)
    path.write_text("def where_it_waits():\n    import time\n    time.sleep(600)\n"
                    + path.read_text())
    began = time.monotonic()
    done = search(tmp_path, "s", "--n-trials", 5, "--epoch-timeout", 1.5,
                  "--pruner", "none")
    assert time.monotonic() - began < 60
    found = trials(tmp_path, "s")
    assert states(found).count("COMPLETE") == 4 and states(found).count("FAIL") == 1
    assert found[1].user_attrs["reason"].startswith("hung: no epoch ended in ")
    assert found[1].intermediate_values == {0: found[1].params["x"]}
    assert "search trial 1: FAIL hung" in done.stdout
    log = (tmp_path / "hpo-runs" / "logs" / "s" / "search" / "1.log").read_text()
    assert ("in where_it_waits" in log) == (how == "where_it_waits()")


def test_a_limit_of_nothing_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "s")
    words: tuple[Any, ...] = ("run", "--study", "s", "--epoch-timeout", 0)
    assert "--epoch-timeout must be above 0 seconds, got 0" in hpo(tmp_path, *words, code=2).stderr
