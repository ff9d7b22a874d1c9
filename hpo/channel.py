"""Lines of JSON between the parent and a worker: events one way, commands the other."""

from __future__ import annotations

import json
import os
import threading
from typing import Any


class Channel:
    """The worker's end: sends events from any thread; a parent that is gone is not an error."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def send(self, event: str, **data: Any) -> None:
        """Send one event; `data` must be JSON data."""
        line = json.dumps({"event": event, **data}) + "\n"
        with self._lock:
            try:
                _write_all(self._fd, line.encode())
            except OSError:
                # The reader of commands sees the same and stops the worker in order.
                return


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data):]


class LineBuffer:
    """Collects bytes and gives whole lines of JSON."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that are complete with these bytes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines if line.strip()]
