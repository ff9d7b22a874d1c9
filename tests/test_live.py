"""`hpo watch`: the frame, its lines in a pipe, its end, and what it costs the database."""

from __future__ import annotations

import io
import os
import pty
import subprocess

import pytest
import study_samples as samples
from commands import arguments, environment
from rich.console import Console
from sqlalchemy import event

from hpo import live
from hpo.errors import InputError
from hpo.queue import owner_token
from storage import NewTicket


@pytest.fixture
def db(tmp_path):
    opened = samples.stored(tmp_path)
    yield opened
    opened.close()


def text_of(frame):
    written = io.StringIO()
    Console(file=written, width=120).print(live.drawn(frame))
    return written.getvalue()


def test_a_frame_shows_phases_workers_the_best_and_the_last_ended(db):
    db.tickets.write("toy", "toy", "trial", [NewTicket(i, params={}) for i in range(3)])
    db.tickets.claim("toy", owner_token(), "here", 17, 30.0)
    frame = live.Looker(db, "toy").look()
    text = text_of(frame)
    best = max(t.score for t in samples.results().phase("search").trials if t.score is not None)
    assert f"best val_accuracy {best:.4g}" in text
    assert "0 of 3: " in text and "COMPLETE" in text and "here  17" in text
    assert "search trial 20" in text and "1 worker" in text and "last ended" in text
    assert frame.left_s is not None and not frame.is_at_rest


def test_a_curve_becomes_bars_from_its_lowest_to_its_highest():
    assert live.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert live.sparkline([5, 5]) == "▁▁" and live.sparkline([]) == ""
    assert len(live.sparkline(range(1000))) == 40


def test_a_second_look_reads_what_is_new_alone(db):
    looker, statements = live.Looker(db, "toy"), []
    looker.look()
    event.listen(db.engine, "before_cursor_execute", lambda *a: statements.append(a[2]))
    looker.look()
    assert 0 < len(statements) <= 24 and not any("trial_values" in text for text in statements)


def test_a_study_at_rest_ends_the_watching_and_a_pipe_gets_one_line_a_change(tmp_path):
    samples.stored(tmp_path).close()
    written = io.StringIO()
    console = Console(file=written, width=200)
    assert live.watch("toy", tmp_path, None, console, interval_s=0.1, once=False) == 0
    lines = written.getvalue().splitlines()
    assert sum(line.startswith("best: ") for line in lines) == 1
    assert lines[-1] == "study toy: nothing is left to do and no worker is alive"
    assert "\x1b" not in written.getvalue()


def test_an_interval_of_nothing_is_refused(tmp_path):
    with pytest.raises(InputError, match="--interval must be"):
        live.watch("toy", tmp_path, None, Console(), interval_s=0, once=False)


def test_in_a_real_terminal_it_draws_and_ends_by_itself(tmp_path):
    samples.stored(tmp_path).close()
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        arguments("watch", "--study", "toy", "--home", tmp_path, "--interval", "0.2"),
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment(TERM="xterm-256color"))
    os.close(theirs)
    screen = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:
            break
        if not part:
            break
        screen += part
    os.close(ours)
    assert process.wait(60) == 0
    assert b"\x1b[" in screen and "█".encode() in screen and b"study toy" in screen
    assert b"Traceback" not in screen
