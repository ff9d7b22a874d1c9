"""The errors of hpo, and the exit code each one ends a command with.

One tree, so that a command line prints any of them as one clear line and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence


class HpoError(Exception):
    """Anything hpo can explain; ends a command with exit code 1."""

    exit_code = 1


class InputError(HpoError):
    """Bad input found before anything was spent: a flag, a module, a file; exit code 2."""

    exit_code = 2


class SpecError(InputError):
    """One or several faults of a search-space module, all told at once.

    `faults` holds one line for each fault, without the study's name.
    """

    def __init__(self, faults: Sequence[str], *, study: str | None = None) -> None:
        self.faults = tuple(faults)
        self.study = study
        super().__init__(self._text())

    def _text(self) -> str:
        where = f"study '{self.study}', " if self.study else ""
        return "\n".join(where + fault for fault in self.faults)

    def named(self, study: str) -> SpecError:
        """Return the same faults, each with the study's name in front."""
        return SpecError(self.faults, study=study)


class DataError(InputError):
    """A data set that is missing, unreadable or does not fit the recipe; exit code 2."""


class StorageError(HpoError):
    """The database could not be reached or refused a write; exit code 1."""


class NoResult(HpoError):
    """A run, or a question about one, that has no COMPLETE trial to show; exit code 3."""

    exit_code = 3
