"""Each trial's own log file: what its process and its libraries print goes there.

To make a file waits for the disk where somebody else, a database say, syncs at that moment: up to
a millisecond. So the next file is made while a trial runs, and takes its name when it is needed.
"""

from __future__ import annotations

import io
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
    """Sends standard output and error to one log after another, all below one folder.

    A log that cannot be made or written, on a full disk say, costs its text and no trial.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mine = _NEXT + owner_token()
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="next-log")
        self._next: Future[int] | None = None
        self._fault: OSError | None = None
        self._is_told = False
        self._sweep()

    def close(self) -> None:
        """Remove the file that was made for a trial which did not come."""
        self._maker.shutdown()
        fd = self._take()
        if fd is not None:
            os.close(fd)
            (self._folder / self._mine).unlink(missing_ok=True)

    def news(self) -> OSError | None:
        """Return why a log is missing or cut short, the first time that one is."""
        fault = self._fault or next((s.fault for s in (sys.stdout, sys.stderr)
                                     if isinstance(s, Forgiving) and s.fault), None)
        if self._is_told or fault is None:
            return None
        self._is_told = True
        return fault

    @contextmanager
    def to(self, path: Path) -> Iterator[None]:
        """Send what this process and its libraries print to a file, for the while."""
        try:
            log = self._open(path)
            saved = _saved(log)
        except OSError as error:
            self._fault = self._fault or error
            yield
            return
        try:
            self._next = self._maker.submit(self._make)
            yield
        finally:
            _flush()
            for number, fd in zip((1, 2), saved, strict=True):
                os.dup2(fd, number)
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
        with suppress(OSError):
            for left in self._folder.glob(f"{_NEXT}*"):
                if is_gone(left.name.removeprefix(_NEXT)):
                    left.unlink(missing_ok=True)


def _saved(log: int) -> tuple[int, int]:
    """Put a file in the place of standard output and error; return what they were."""
    _flush()
    try:
        saved = os.dup(1), os.dup(2)
        os.dup2(log, 1)
        os.dup2(log, 2)
    finally:
        os.close(log)
    return saved


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A module may have put its own in their place, and closed it.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


class Forgiving(io.TextIOWrapper):
    """Standard output or error: what cannot be written or encoded is not missed.

    To print is no part of a trial that a full disk, a reader that is gone, or a letter may fail.
    """

    def __init__(self, fd: int, encoding: str) -> None:
        self._raw = _Forgiving(fd, "w", closefd=False)
        super().__init__(io.BufferedWriter(self._raw), encoding=encoding,
                         errors="backslashreplace", line_buffering=fd == 2 or self._raw.isatty())

    @property
    def fault(self) -> OSError | None:
        """Why something was not written."""
        return self._raw.fault


class _Forgiving(io.FileIO):
    fault: OSError | None = None

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            self.fault = self.fault or error
            return len(data)  # type: ignore[arg-type]


def forgive() -> None:
    """Have what this process prints written where it can be, and no error raised where not."""
    # Where somebody has put streams of his own, a notebook say, they stay.
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = Forgiving(1, sys.stdout.encoding)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = Forgiving(2, sys.stderr.encoding)
