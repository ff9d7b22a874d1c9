"""A process beside a run: it ends the workers that outlive a run which was killed.

A worker sees that its parent is gone by a thread, and one whose library never lets go of Python's
lock sees nothing. Runs as a script, on the standard library alone: it starts in milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

_POLL_S = 0.1
# How long the other process may take to see that all is over.
_END_S = 2.0


class Guard:
    """The run's side: tells the other process which workers there are.

    `grace_s` is how long workers have, once the run is gone, to end in order.
    """

    def __init__(self, grace_s: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(grace_s)], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    def add(self, pid: int) -> None:
        """Have a worker ended that outlives the run."""
        self._tell({"add": pid, "began": began(pid)})

    def remove(self, pid: int) -> None:
        """Forget a worker that has ended."""
        self._tell({"remove": pid})

    def close(self) -> None:
        """End the other process: all workers have ended."""
        stdin = self._process.stdin
        assert stdin is not None
        # It may have been killed; the workers that are told to end do so all the same.
        with suppress(BrokenPipeError):
            stdin.close()
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            # Somebody has stopped it.
            self._process.kill()
            self._process.wait()

    def _tell(self, what: dict[str, object]) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError, ValueError):
            stdin.write(json.dumps(what).encode() + b"\n")
            stdin.flush()


def began(pid: int) -> str:
    """Return when a living process began, as the kernel counts it, or an empty text.

    A number of a process is given again; together with this it is not.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            # The command may hold blanks and brackets; the fields after it do not.
            fields = file.read().rsplit(")", 1)[1].split()
        # A zombie has ended, although its parent, or process 1, has not asked how.
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""


def _lives(pid: int, since: str) -> bool:
    if os.path.isdir("/proc"):
        return bool(since) and began(pid) == since
    with suppress(OSError):
        os.kill(pid, 0)
        return True
    return False


def main() -> None:
    """Read of workers until the run is gone; then end those that do not end in time."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    workers: dict[int, str] = {}
    for line in sys.stdin:
        with suppress(ValueError):
            told = json.loads(line)
            if "add" in told:
                workers[told["add"]] = told["began"]
            else:
                workers.pop(told["remove"], None)
    deadline = time.monotonic() + float(sys.argv[1])
    while left := [pid for pid, since in workers.items() if _lives(pid, since)]:
        if time.monotonic() >= deadline:
            for pid in left:
                # Each leads a group, with its loader processes in it.
                with suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
            return
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
