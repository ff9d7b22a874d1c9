"""What becomes of open storages when their process ends or forks.

A script that ends has its last reports in memory still, and a forked child (a DataLoader's worker,
say) must not use the sockets and files of its parent, nor write what the parent gathered.
"""

from __future__ import annotations

import atexit
import os
import sys
from multiprocessing import util
from typing import Protocol
from weakref import WeakSet


class Open(Protocol):
    """An open storage."""

    def close(self) -> None:
        """Write what is gathered and close all sessions."""

    def after_fork(self) -> None:
        """Give up, in a child, what belongs to the parent."""


_open: WeakSet[Open] = WeakSet()


def watch(storage: Open) -> None:
    """Close the storage at the process's end, and tell it of a fork."""
    _open.add(storage)


def unwatch(storage: Open) -> None:
    """Leave a storage alone that is closed."""
    _open.discard(storage)


def _close_all() -> None:
    for storage in list(_open):
        try:
            storage.close()
        except Exception as error:
            print(f"hpo: the last reports could not be written: {error}", file=sys.stderr)


def _after_fork() -> None:
    for storage in list(_open):
        storage.after_fork()


def _close_with_child(_: object = None) -> None:
    # A child of multiprocessing leaves without the functions of atexit, and with these.
    util.Finalize(None, _close_all, exitpriority=10)


class _Mark:
    """What multiprocessing holds on to, to call us in its children."""


_mark = _Mark()
atexit.register(_close_all)
util.register_after_fork(_mark, _close_with_child)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
