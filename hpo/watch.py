"""Watches that trials get on: one that is alive and ends no epoch holds its device for ever."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

# The limit where none is given: so many median epochs, but no less than these seconds, since an
# epoch may be held up by a disk, a neighbour, or a new shape that is compiled.
_TIMES_MEDIAN, LEAST_S = 10.0, 300.0
_N_REMEMBERED = 1000


class Watch:
    """Knows when each worker's trial last began, or ended an epoch.

    `timeout_s` is how long an epoch may take; None stands for ten times the median of the epochs
    heard of, at least 5 minutes, and for no limit before the first of them. Times are those of
    `time.monotonic`.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        # By worker: a worker trains one trial at a time.
        self._since: dict[int, float] = {}
        self._took: deque[float] = deque(maxlen=_N_REMEMBERED)

    @property
    def limit_s(self) -> float | None:
        """The seconds that an epoch may take, or None as long as nobody knows."""
        if self._timeout_s is not None:
            return self._timeout_s
        if not self._took:
            return None
        return max(LEAST_S, _TIMES_MEDIAN * statistics.median(self._took))

    def hear(self, pid: int, event: Mapping[str, Any], now: float) -> None:
        """Take in an event of a worker."""
        kind = event["event"]
        if kind in ("draw", "begin") and event["kind"] == "trial":
            self._since[pid] = now
        elif kind == "epoch" and pid in self._since:
            self._took.append(now - self._since[pid])
            self._since[pid] = now
        elif kind in ("ending", "idle", "exit"):
            self._since.pop(pid, None)

    def hung(self, now: float) -> dict[int, str]:
        """Return the workers whose trial has got stuck, with the reason that it ends with."""
        least_s = LEAST_S if self._timeout_s is None else self._timeout_s
        if all(now - since <= least_s for since in self._since.values()):
            # Asked many times a second: the median is for when it may matter.
            return {}
        limit_s = self.limit_s
        if limit_s is None:
            return {}
        how = ("--epoch-timeout" if self._timeout_s is not None
               else "10 times the median epoch, at least 5 minutes")
        return {pid: f"hung: no epoch ended in {now - since:.0f} s, {limit_s:.3g} s are allowed "
                     f"({how})"
                for pid, since in self._since.items() if now - since > limit_s}
