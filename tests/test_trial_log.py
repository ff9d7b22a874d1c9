"""Each trial's own log, whether its file was there, was made beforehand, or is made now."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpo.queue import owner_token
from hpo.trial_log import TrialLogs


def say(logs: TrialLogs, path: Path, text: str, wait: bool = True) -> None:
    with logs.to(path):
        os.write(1, text.encode())
        os.write(2, f"and {text}".encode())
        deadline = time.monotonic() + 20
        while wait and not beforehand(path.parent.parent):
            assert time.monotonic() < deadline
            time.sleep(0.001)


def beforehand(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".next-")]


@pytest.mark.parametrize("wait", [True, False])
def test_each_trial_has_what_was_printed_in_its_time(tmp_path: Path, wait: bool) -> None:
    logs = TrialLogs(tmp_path / "s")
    for n in range(5):
        say(logs, tmp_path / "s" / ("search" if n < 3 else "grid") / f"{n}.log", f"trial {n}\n",
            wait and n < 4)
    logs.close()
    for n in range(5):
        path = tmp_path / "s" / ("search" if n < 3 else "grid") / f"{n}.log"
        assert path.read_text() == f"trial {n}\nand trial {n}\n"
    assert beforehand(tmp_path / "s") == []


def test_a_log_of_that_name_is_added_to(tmp_path: Path) -> None:
    logs = TrialLogs(tmp_path / "s")
    say(logs, tmp_path / "s" / "search" / "0.log", "one")
    (tmp_path / "s" / "search" / "1.log").write_text("before\n")
    say(logs, tmp_path / "s" / "search" / "1.log", "two")
    logs.close()
    assert (tmp_path / "s" / "search" / "1.log").read_text() == "before\ntwoand two"


def test_a_file_made_beforehand_that_somebody_deletes_is_not_missed(tmp_path: Path) -> None:
    logs = TrialLogs(tmp_path / "s")
    say(logs, tmp_path / "s" / "search" / "0.log", "one")
    [name] = beforehand(tmp_path / "s")
    (tmp_path / "s" / name).unlink()
    say(logs, tmp_path / "s" / "search" / "1.log", "two")
    logs.close()
    assert (tmp_path / "s" / "search" / "1.log").read_text() == "twoand two"


def test_what_killed_workers_left_is_swept_and_others_files_stay(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = [f".next-{socket.gethostname()}|{gone.pid}|12345", f".next-{owner_token()}",
            f".next-other-host|{gone.pid}|12345"]
    for name in left:
        (tmp_path / name).touch()
    TrialLogs(tmp_path).close()
    assert sorted(os.listdir(tmp_path)) == sorted(left[1:])


def test_no_file_stays_open(tmp_path: Path) -> None:
    def n_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, logs = n_open(), TrialLogs(tmp_path / "s")
    for n in range(10):
        say(logs, tmp_path / "s" / "search" / f"{n}.log", "x", wait=n % 2 == 0 and n > 0)
    logs.close()
    assert n_open() == before
