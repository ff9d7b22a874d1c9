"""What a trial leaves in its worker's process: other processes, open files, threads, memory.

A worker stays warm from trial to trial, so what each one leaves adds up until a later one fails of
it. DataLoaders are shut down here; where anything else is left, the worker is to be replaced.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

# What a library opens or starts once, late, and keeps is no leak.
_MORE_FILES, _MORE_THREADS = 6, 10
# What a trial that failed may leave, and what those that went well may in all: a trial may load
# data that stays for the ones after it.
_FAILED_MB, _KEPT_MB = 100, 1024
_MB = 1 << 20
# Loader processes that were told to end have this long until they are no loaders any more.
_END_S = 2.0
# To look for freed memory takes milliseconds in a large process.
_TRIM_EVERY_S = 1.0


@dataclass(frozen=True)
class Held:
    """What this process holds: open files, threads, and megabytes on host and device."""

    files: int
    threads: int
    host_mb: float
    device_mb: float


class Leftovers:
    """Compares what a worker holds after each trial with what it held when it was warm.

    `own` gives the processes that are the worker's, whenever they were started.
    """

    def __init__(self, own: Callable[[], set[int]] = set) -> None:
        self._own = own
        self._folder = os.getcwd()
        # What the module started when it was imported is nobody's leftover.
        self._old = _offspring()
        self._before = held()
        # After the first trial that went well: it loads libraries and data, and these stay.
        self._warm: Held | None = None

    def begin(self) -> None:
        """Take note of what there is before a trial."""
        self._before = held()

    def clear(self, *, failed: bool) -> str | None:
        """Undo what a trial has left; return why the process is unfit for another, or None.

        `failed` says that the trial ended in an error, which is trusted less.
        """
        self._back_to_folder()
        now, new = held(), _offspring() - self._old - self._own()
        if new or self._excess(now, failed):
            _shut_loaders()
            gc.collect()
            _empty_device_cache()
            give_memory_back()
            new = _end(new)
            now = held()
        if new:
            return f"{len(new)} process{'es' if len(new) > 1 else ''} left running"
        if self._warm is None and not failed:
            self._warm = now
        return self._excess(now, failed)

    def _excess(self, now: Held, failed: bool) -> str | None:
        """Return what there is too much of."""
        before, warm = self._before, self._warm
        if warm is None and not failed:
            return None
        warm = warm or before
        for what, more, allowed in (("files", now.files - warm.files, _MORE_FILES),
                                    ("threads", now.threads - warm.threads, _MORE_THREADS)):
            if more > allowed:
                return f"{more} {what} left open"
        for what, was, first, mb in (
                ("memory", before.host_mb, warm.host_mb, now.host_mb),
                ("device memory", before.device_mb, warm.device_mb, now.device_mb)):
            if mb - first > _KEPT_MB or failed and mb - max(was, first) > _FAILED_MB:
                return f"{mb - first:.0f} MB of {what} left taken"
        return None

    def _back_to_folder(self) -> None:
        # The home folder, the database and a user's data may be named from there.
        with suppress(OSError):
            os.chdir(self._folder)


def held() -> Held:
    """Return what this process holds; of what cannot be known, nothing."""
    files, host_mb = 0, 0.0
    try:
        files = len(os.listdir("/proc/self/fd"))
        with open("/proc/self/statm", encoding="ascii") as file:
            host_mb = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _MB
    except OSError as error:
        # Too many are open to count them.
        files = files if error.errno != errno.EMFILE else sys.maxsize
    return Held(files, threading.active_count(), host_mb, _device_mb())


def _device_mb() -> float:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0.0
    with suppress(RuntimeError):
        return torch.cuda.memory_allocated() / _MB
    return 0.0


def _empty_device_cache() -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def _offspring() -> set[int]:
    """Return the children of this process, and of the server that forks for it, but no servers."""
    servers = _servers()
    found = children(os.getpid())
    for server in servers:
        found |= children(server)
    return found - servers


def _servers() -> set[int]:
    """Return the processes by which multiprocessing starts others and tidies up after them."""
    from multiprocessing import forkserver, resource_tracker

    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    return {pid for pid in (server._forkserver_pid, tracker._pid) if pid is not None}


def children(pid: int) -> set[int]:
    """Return the children of a process, by whichever of its threads they were started."""
    found: set[int] = set()
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            # It may be gone by now.
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children",
                                         encoding="ascii") as file:
                found.update(map(int, file.read().split()))
    return found


def _end(new: set[int]) -> set[int]:
    """End the processes that a trial started; return those that were no DataLoader's."""
    deadline = time.monotonic() + _END_S
    while (new := (_offspring() & new) - _reaped(new)) and time.monotonic() < deadline:
        time.sleep(0.005)
    for pid in new:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return new


def _reaped(pids: set[int]) -> set[int]:
    """Return those that have ended and that nobody had waited for."""
    found = set()
    for pid in pids:
        # Those of the fork server are no children of ours.
        with suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                found.add(pid)
    return found


def _shut_loaders() -> None:
    """Shut down the processes of DataLoaders that somebody still holds; they start new ones."""
    loading: Any = sys.modules.get("torch.utils.data.dataloader")
    if loading is None:
        return
    # Those that were there when all was imported are not listed else.
    gc.unfreeze()
    for one in gc.get_objects():
        # Not isinstance: it asks objects that have a __class__ of their own.
        if issubclass(type(one), loading.DataLoader):
            iterator, one._iterator = getattr(one, "_iterator", None), None
            if iterator is not None:
                with suppress(Exception):
                    iterator._shutdown_workers()


def give_memory_back() -> None:
    """Return what glibc keeps of freed memory to the system, so that trials do not add up."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Trim:
    """Gives memory back after trials, but not so often that it costs short ones their time."""

    def __init__(self) -> None:
        self._done_at = time.monotonic()

    def after_trial(self) -> None:
        """Give memory back, unless that was done a moment ago."""
        if time.monotonic() - self._done_at >= _TRIM_EVERY_S:
            give_memory_back()
            self._done_at = time.monotonic()
