"""A thread that writes what running trials have gathered, soon after it happened.

The thread that trains only remembers; so neither a slow disk nor a held lock keeps it waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from threading import Condition, Thread, current_thread

# A thread without work ends after this long, and with it its hold on the storage.
_IDLE_S = 5.0


class Writer:
    """Calls `work` when it is due, in a thread of its own that lives as long as there is work.

    `work` returns in how many seconds it wants to be called again unless asked before, or
    infinity; it must not raise.
    """

    def __init__(self, work: Callable[[], float]) -> None:
        self._work = work
        self._due = inf
        self._changed = Condition()
        self._thread: Thread | None = None
        self._closed = False

    def within(self, delay_s: float) -> None:
        """Have the work done at most so many seconds from now."""
        due = time.monotonic() + delay_s
        with self._changed:
            if due >= self._due or self._closed:
                return
            if self._thread is None:
                thread = Thread(target=self._run, daemon=True, name="hpo-storage")
                # Where no thread can be started, the next call tries again.
                thread.start()
                self._thread = thread
            self._due = due
            self._changed.notify()

    @property
    def is_closed(self) -> bool:
        """Whether nothing is written in the background any more."""
        return self._closed

    def close(self) -> None:
        """End the thread, and wait for the work that it is at."""
        with self._changed:
            self._closed, self._due = True, inf
            thread = self._thread
            self._changed.notify()
        if thread is not None and thread is not current_thread():
            thread.join()

    def _run(self) -> None:
        while self._wait():
            again_s = self._work()
            if again_s < inf:
                self.within(again_s)

    def _wait(self) -> bool:
        """Wait until the work is due; False when nobody wanted it for a while."""
        idle_since = time.monotonic()
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                if now >= self._due:
                    self._due = inf
                    return True
                if self._due == inf and now - idle_since >= _IDLE_S:
                    break
                self._changed.wait(min(self._due - now, _IDLE_S))
            self._thread = None
            return False
