"""A worker's own row in the database: where it runs and what it trains with.

Written once a process and never a trial: a trial's `worker` attribute, or its ticket's owner, is
the key. So a question from another host finds a trial's device and versions.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpo import discover
from hpo.queue import LEASE_S
from hpo.versions import label, surroundings

if TYPE_CHECKING:
    from storage.database import Database

# What a worker draws and prunes by; the study's row has what the latest run was given.
_DRAWS_BY = ("sampler", "pruner", "prune_startup", "prune_warmup", "allow_duplicates")
# Of those at work their leases tell; an idle one says so as often as a lease is renewed.
_BEAT_S = LEASE_S / 3


class Presence:
    """Tells of one worker: that it has begun, that it is idle, and that it has ended."""

    def __init__(self, db: Database, order: Mapping[str, Any], owner: str) -> None:
        self._db, self._owner, self._name = db, owner, str(order["name"])
        device, path = str(order["device"]), discover.source_path(str(order["module"]))
        self._label = label(device)
        self._data = {**surroundings(device, path),
                      **{what: order[what] for what in _DRAWS_BY}}
        self._told_at = 0.0

    def begin(self) -> None:
        """Write the row."""
        self._told_at = time.monotonic()
        self._db.runs.beat(self._owner, self._name, socket.gethostname(), os.getpid(),
                           self._label, self._data)

    def idle(self) -> None:
        """Say that this worker is alive, unless it has said so a moment ago."""
        if time.monotonic() - self._told_at >= _BEAT_S:
            self.begin()

    def end(self) -> None:
        """Say that this worker ends in order; its row stays, for what its trials ran with."""
        self._db.runs.left(self._owner)
