"""One trial of a study, found by what a user calls it: `7` of the search, or `grid/3`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo import settings as s
from hpo.errors import InputError
from hpo.queue import study_of
from hpo.read_results import read_phase
from hpo.results import PHASES, Phase, Trial
from hpo.spec import nearest
from hpo.studies import phase_studies, require

if TYPE_CHECKING:
    from storage.database import Database, EpochRow
    from storage.ticket import Ticket


@dataclass(frozen=True)
class OneTrial:
    """A trial with all that the database holds of it and around it.

    `row` is its study's, `owner` the name of the process that ran it and `worker` that one's row,
    None where they are not stored, and `epochs` all metrics of each of its epochs.
    """

    study: str
    row: Mapping[str, Any]
    phase: Phase
    trial: Trial
    epochs: Sequence[EpochRow]
    tickets: Sequence[Ticket]
    sweeps: Sequence[Ticket]
    owner: str | None
    worker: Mapping[str, Any] | None

    @property
    def label(self) -> str:
        """What a user calls it."""
        number = str(self.trial.number)
        return number if self.phase.name == "search" else f"{self.phase.name}/{number}"

    @property
    def maximize(self) -> bool:
        """Whether more of the study's metric is better."""
        return self.row["direction"] == "maximize"

    @cached_property
    def ticket(self) -> Ticket | None:
        """The ticket that it was taken for; a retry has the same one."""
        idx = self.trial.attrs.get("ticket")
        return next((t for t in self.tickets
                     if (t.idx == idx if idx is not None else
                         t.trial_number == self.trial.number)), None)

    @property
    def ran_with(self) -> Mapping[str, Any]:
        """What its worker's process ran with; empty where that is not stored."""
        return (self.worker or {}).get("data") or {}

    @property
    def retry_of(self) -> int | None:
        """The trial that it retries."""
        if self.trial.ended:
            return self.trial.attrs.get("retry_of")
        return self.ticket.payload.get("retry_of") if self.ticket else None

    @property
    def retried_as(self) -> int | None:
        """The trial that retries it."""
        return next((t.number for t in self.phase.trials
                     if t.attrs.get("retry_of") == self.trial.number), None)

    @property
    def why_no_replay(self) -> str | None:
        """Why it cannot be run again and compared, or None."""
        if not self.trial.ended:
            return "it is still running; replay it when it has ended"
        if not self.epochs:
            why = f" ({self.trial.reason.splitlines()[0]})" if self.trial.reason else ""
            return f"it has no stored epoch to compare with{why}"
        if "seed" not in self.trial.attrs and not (self.ticket and "seed" in self.ticket.payload):
            return "its seed is not stored"
        return None

    @property
    def seed(self) -> int | None:
        """The seed that it was trained with."""
        seed = self.trial.attrs.get("seed")
        return seed if seed is not None or self.ticket is None else self.ticket.payload.get("seed")


def parse(text: str) -> tuple[str, int]:
    """Return the phase and number of a trial as a user writes it.

    Raises:
        InputError: for anything but `7`, `search/7`, `grid/3` and the like.
    """
    phase, slash, number = text.strip().rpartition("/")
    phase = phase if slash else "search"
    if phase not in PHASES:
        raise InputError(f"trial '{text}': '{phase}' is no phase{nearest(phase, PHASES)} "
                         f"(accepted are {', '.join(PHASES)})")
    if not (number.isascii() and number.isdecimal()):
        raise InputError(f"trial '{text}': '{number}' is no number; write 7 for a trial of the "
                         f"search, or grid/3 with another phase's name")
    return phase, int(number)


def find(db: Database, study: str, text: str) -> OneTrial:
    """Read one trial of a study.

    Raises:
        NoResult: for a study that is not in the database.
        InputError: for a trial that is not in it, with the range of those that are.
    """
    phase, number = parse(text)
    row = require(db, study)
    there = phase_studies(db, study)
    if phase not in there:
        raise InputError(f"trial {text}: study '{study}' has no phase {phase} "
                         f"(it has {', '.join(there) or 'none yet'})")
    name = study_of(study, phase)
    found = read_phase(db, name, phase)
    trial = next((t for t in found.trials if t.number == number), None)
    if trial is None:
        n = len(found.trials)
        known = "no trial yet" if not n else "trial 0 alone" if n == 1 else f"trials 0 to {n - 1}"
        raise InputError(f"trial {text}: the {phase} of study '{study}' has {known}")
    tickets = db.tickets.list(name)
    sweeps = [t for t in tickets if t.kind == "sweep"]
    owner = trial.attrs.get("worker")
    if not trial.ended:
        owner = next((t.owner for t in tickets if t.trial_number == number), None)
    return OneTrial(study, row, found, trial, db.epochs(name, number), tickets, sweeps, owner,
                    db.runs.worker(owner) if owner else None)


def at_flags(home: Path, storage: str | None) -> list[str]:
    """Return the flags that a command needs to find the same database, without its password."""
    from storage import mask

    flags = [] if home == s.home_folder(None) else ["--home", str(home)]
    if storage is not None and storage != s.storage_url(None, home):
        flags += ["--storage", mask(storage)]
    return flags
