"""Each trial's own log file: what its process and its libraries print goes there.

To make a file waits for the disk where somebody else, a database say, syncs at that moment: up to
a millisecond. So the next file is made while a trial runs, and takes its name when it is needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from hpo.queue import is_gone, owner_token

# Before the name of the process that made it.
_NEXT = ".next-"
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND


class TrialLogs:
    """Sends standard output and error to one log after another, all below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mine = _NEXT + owner_token()
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="next-log")
        self._next: Future[int] | None = None
        self._sweep()

    def close(self) -> None:
        """Remove the file that was made for a trial which did not come."""
        self._maker.shutdown()
        fd = self._take()
        if fd is not None:
            os.close(fd)
            (self._folder / self._mine).unlink(missing_ok=True)

    @contextmanager
    def to(self, path: Path) -> Iterator[None]:
        """Send what this process and its libraries print to a file, for the while.

        Raises:
            OSError: the file cannot be made.
        """
        log = self._open(path)
        sys.stdout.flush()
        sys.stderr.flush()
        saved = os.dup(1), os.dup(2)
        try:
            os.dup2(log, 1)
            os.dup2(log, 2)
            self._next = self._maker.submit(self._make)
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
            for fd in (*saved, log):
                os.close(fd)

    def _make(self) -> int:
        return os.open(self._folder / self._mine, _FLAGS, 0o644)

    def _open(self, path: Path) -> int:
        """Return the file made beforehand, under its name, or the file that is there or made."""
        fd = self._take()
        # A log of that name is an earlier study's, deleted with its files kept, and is added to.
        if fd is not None and not path.exists():
            with suppress(OSError):
                os.rename(self._folder / self._mine, path)
                return fd
        if fd is not None:
            os.close(fd)
        try:
            return os.open(path, _FLAGS, 0o644)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, _FLAGS, 0o644)

    def _take(self) -> int | None:
        made, self._next = self._next, None
        with suppress(OSError):
            return made.result() if made is not None else None
        return None

    def _sweep(self) -> None:
        """Remove what workers of this host left that were killed."""
        for left in self._folder.glob(f"{_NEXT}*"):
            if is_gone(left.name.removeprefix(_NEXT)):
                left.unlink(missing_ok=True)
