"""Why a worker is to stop: its run says so, or its process alone was told to end.

The first costs a trial nothing. The second may be the trial's own doing, a signal to its process
group say, or that of a guard over the host's memory; tried again for ever, it would never end.
"""

from __future__ import annotations

import threading

# A signal to all processes of a machine reaches the worker before its parent has told it.
_HEAR_S = 1.0


class Stop(threading.Event):
    """Set when a worker is to stop, for whatever reason."""

    def __init__(self) -> None:
        super().__init__()
        self._of_run = threading.Event()

    def by_run(self) -> None:
        """Stop because the run does, or because its process is gone."""
        self._of_run.set()
        self.set()

    def is_of_run(self) -> bool:
        """Return whether the run stops; if it has not said so, that is waited for a moment."""
        return self._of_run.wait(_HEAR_S)
