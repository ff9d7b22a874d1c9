"""What a person sees: plain lines in a pipe, live bars on a terminal, and the time left."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from hpo.devices import Slot
from hpo.display import (
    Display,
    LiveDisplay,
    Pace,
    PlainDisplay,
    about,
    duration,
    make_display,
)
from hpo.drive import Goal

MEMBER: Any = SimpleNamespace(slot=Slot(0, "cpu", "", 1))
OTHER: Any = SimpleNamespace(slot=Slot(1, "cuda", "4", 1))


def plain(n_workers: int = 1, maximize: bool = False) -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    show = make_display(Console(file=out, width=200), Goal("loss", maximize), n_workers)
    assert isinstance(show, PlainDisplay)
    return show, out


def live() -> tuple[LiveDisplay, Console]:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, record=True,
                      color_system=None)
    show = make_display(console, Goal("val_accuracy", True), 2)
    assert isinstance(show, LiveDisplay)
    return show, console


def end(number: int, value: float | None, **changes: Any) -> dict[str, Any]:
    return {"event": "end", "kind": "trial", "study": "s", "idx": number, "number": number,
            "state": "COMPLETE", "value": value, "reason": "", "n_epochs": 2, "duration_s": 1.0,
            "back": False, **changes}


@pytest.mark.parametrize(("seconds", "said"), [
    (0.2, "under 1 s"), (1, "1 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"),
    (3600, "1 h 00 min"), (7500, "2 h 05 min"),
])
def test_a_time_span_is_said_as_people_say_it(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_a_guess_is_said_to_be_one() -> None:
    assert (about(0.2), about(45)) == ("under 1 s", "about 45 s")


def test_the_time_left_is_unknown_before_a_trial_has_ended() -> None:
    pace = Pace(2, 10.0)
    assert pace.left_s() is None
    pace.add(4.0, 2)
    pace.settle(2)
    assert pace.left_s() == 8 * 2.0 / 2


def test_each_event_is_one_plain_line() -> None:
    show, out = plain()
    show.plan(["study s: minimize loss"], {"search": 20}, 2)
    show.start("search", 10, 0, 20)
    show.event(MEMBER, end(0, 0.5))
    show.event(MEMBER, {"event": "epoch", "epoch": 0})
    show.event(MEMBER, end(1, 0.7, state="PRUNED", reason="median at epoch 1"))
    show.event(MEMBER, end(2, None, state="FAIL", reason="error: ValueError: boom"))
    show.event(MEMBER, {"event": "note", "text": "a note [with brackets]"})
    show.close()
    assert out.getvalue().splitlines() == [
        "study s: minimize loss", "search: 10 to do",
        "search trial 0: COMPLETE loss=0.5 in 1.0 s, best 0.5 (trial 0) [1 of 10, about 9 s left]",
        "at this machine's pace the whole run takes about 9 s more, less what pruning saves",
        "search trial 1: PRUNED median at epoch 1 in 1.0 s, best 0.5 (trial 0) "
        "[2 of 10, about 8 s left]",
        "search trial 2: FAIL error: ValueError: boom in 1.0 s, best 0.5 (trial 0) "
        "[3 of 10, about 7 s left]",
        "a note [with brackets]",
    ]


def test_a_trial_that_goes_back_on_the_queue_has_not_ended() -> None:
    show, out = plain()
    show.start("search", 2, 0, 4)
    show.event(MEMBER, end(0, None, state="FAIL", reason="oom: full", back=True))
    show.event(MEMBER, end(1, 0.5))
    lines = out.getvalue().splitlines()
    assert "goes back on the queue" in lines[1] and "[0 of 2" in lines[1]
    assert "[1 of 2" in lines[-1]


def test_the_best_follows_the_direction() -> None:
    show, out = plain(maximize=True)
    show.start("search", 3, 0, 3)
    for number, value in enumerate((0.5, 0.9, 0.7)):
        show.event(MEMBER, end(number, value))
    assert "best 0.9 (trial 1)" in out.getvalue().splitlines()[-1]


def test_the_time_left_counts_the_phases_to_come_and_not_what_is_done() -> None:
    show, _ = plain()
    show.plan([], {"grid": 40, "search": 60}, 2)
    show.start("grid", 20, 15, 10)
    show.event(MEMBER, end(0, 0.5))
    assert show.pace.left_s() == (10 - 2 + 60) * 0.5
    show.start("search", 30, 0, 60)
    assert show.pace.left_s() == 60 * 0.5


def test_what_a_pruned_trial_leaves_is_not_waited_for() -> None:
    show, _ = plain()
    show.plan([], {"search": 20}, 10)
    show.start("search", 2, 0, 20)
    show.event(MEMBER, end(0, 0.5, state="PRUNED", reason="median at epoch 0", n_epochs=1))
    assert show.pace.n_epochs_left == 10


def test_the_database_s_count_wins() -> None:
    show, out = plain()
    show.start("search", 9, 0, 9)
    show.counted(5)
    show.event(MEMBER, end(0, 0.5))
    assert "[6 of 9" in out.getvalue()


def test_a_phase_that_is_partly_done_says_so() -> None:
    show, out = plain()
    show.start("search", 14, 10, 8)
    show.start("grid", 12, 12, 0)
    assert out.getvalue() == ("search: 4 to do, 10 done already\n"
                              "grid: nothing to do, 12 done already\n")


def test_a_worker_without_a_run_of_its_own_counts_nothing() -> None:
    show, out = plain()
    show.start("worker", 0, 0)
    show.event(MEMBER, end(0, 0.5))
    assert out.getvalue() == "search trial 0: COMPLETE loss=0.5 in 1.0 s, best 0.5 (trial 0)\n"


def test_a_terminal_shows_the_phase_and_a_line_for_each_worker() -> None:
    show, console = live()
    show.plan([], {"search": 300}, 15)
    show.start("search", 20, 0, 300)
    show.event(OTHER, {"event": "begin", "kind": "trial", "study": "s", "number": 4})
    show.event(MEMBER, end(0, 0.91, n_epochs=15, duration_s=30.0))
    show.event(MEMBER, end(1, 0.7, state="PRUNED", reason="median at epoch 3", n_epochs=4))
    show.event(MEMBER, {"event": "epoch", "kind": "trial", "study": "s", "number": 3, "epoch": 6,
                        "metrics": {"val_accuracy": 0.8812, "images_per_s": 12345.6}})
    console.print(show._render())
    show.close()
    text = console.export_text()
    for said in ("search", "2 of 20", "best val_accuracy 0.91 (trial 0)", "1 pruned", "about",
                 "worker 0", "cpu", "trial 3", "epoch 7 of 15", "val_accuracy 0.8812",
                 "12,346 images/s", "worker 1", "gpu 4", "trial 4", "starting"):
        assert said in text, said


def test_a_terminal_shows_failures_as_lines_that_stay() -> None:
    show, console = live()
    show.start("search", 20, 0, 20)
    show.event(MEMBER, end(0, None, state="FAIL", reason="error: ValueError: boom"))
    show.event(MEMBER, {"event": "idle"})
    show.close()
    assert "search trial 0: FAIL error: ValueError: boom" in console.export_text()


def test_sweeps_and_scores_are_called_what_they_are() -> None:
    show, console = live()
    show.start("test split", 9, 0)
    show.event(MEMBER, {"event": "begin", "kind": "score", "study": "s/confirm", "number": None})
    show.event(OTHER, {"event": "begin", "kind": "sweep", "study": "s/lr-range", "number": None})
    console.print(show._render())
    show.close()
    text = console.export_text()
    assert "test split" in text and "learning-rate sweep" in text


def test_a_dumb_terminal_gets_plain_lines() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(make_display(console, Goal("loss", False), 1), PlainDisplay)
