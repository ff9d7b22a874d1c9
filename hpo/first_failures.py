"""Stops a run whose first trials all fail alike: a typing error must not cost a night.

Later failures are the params' matter; these are the module's, the data's or the machine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpo.errors import NoResult
from hpo.queue import phase_of

_N_LINES = 12
# What a log may end with is read from so many bytes.
_TAIL_BYTES = 1 << 14


class FirstFailures:
    """Counts failures in a row from a run's first trial on; `most` 0 counts none.

    `logs` is the folder of the study's logs.
    """

    def __init__(self, most: int, logs: Path) -> None:
        self._most, self._logs = most, logs
        self._kind = ""
        self._failed: list[tuple[str, int]] = []
        self._error: NoResult | None = None

    @property
    def spent(self) -> dict[str, list[int]]:
        """The tickets that failed, by Optuna study, if they have stopped the run."""
        found: dict[str, list[int]] = {}
        for study, idx in self._failed if self._error else ():
            found.setdefault(study, []).append(idx)
        return found

    def hear(self, event: Mapping[str, Any]) -> None:
        """Take in an event of a worker."""
        if not self._most or event["event"] != "end" or event["kind"] != "trial":
            return
        if event["state"] != "FAIL":
            if self._error is None:
                # From here on the module is known to work.
                self._most = 0
            return
        kind = kind_of(event["reason"])
        if kind == "interrupted" or (self._error and kind != self._kind):
            return
        if kind != self._kind:
            self._kind = kind
            self._failed.clear()
        self._failed.append((event["study"], event["idx"]))
        # What fails while the others are stopped is no news.
        if len(self._failed) >= self._most and self._error is None:
            self._error = NoResult(self._text(event))

    def check(self) -> None:
        """Stop the run where it must be.

        Raises:
            NoResult: `most` trials failed for one reason, and none went well before.
        """
        if self._error is not None:
            raise self._error

    def _text(self, event: Mapping[str, Any]) -> str:
        phase, number = phase_of(event["study"]), event["number"]
        log = self._logs / phase / f"{number}.log"
        n = len(self._failed)
        which = f"the first {n} trials" if n > 1 else "the first trial"
        lines = "".join(f"\n  {line}" for line in tail(log, _N_LINES))
        ends = f"; {log} ends with:{lines}\n" if lines else "; "
        return (f"{which} failed for one reason, {phase} trial {number} with: "
                f"{event['reason']}{ends}mend it and run the same command again, nothing of it is "
                f"spent (--max-failures 0 goes on whatever fails)")


def kind_of(reason: str) -> str:
    """Return what failures of one cause have in common: `error: ValueError` without its text."""
    parts = [part.strip() for part in reason.split(":")]
    is_named = parts[0] == "error" and len(parts) > 1 and parts[1].isidentifier()
    return ": ".join(parts[:2]) if is_named else parts[0]


def tail(path: Path, n_lines: int) -> list[str]:
    """Return the last lines of a log, none where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        # The reason is told in any case.
        return []
    return text.rstrip().splitlines()[-n_lines:]
