"""SQL for hpo: an Optuna storage at next to no cost, and the tables of the tuner itself.

`storage.open(url)` gives an Optuna storage to anybody; `storage.Database` is what hpo uses.
"""

from __future__ import annotations

from storage.aliases import Aliases
from storage.creation import init
from storage.database import Database, EpochRow
from storage.ending import Back, TrialEnd
from storage.engine import mask
from storage.names import validate_name
from storage.registry import Registry
from storage.runs import Runs
from storage.sources import Sources
from storage.studies import StudyStorage
from storage.ticket import Claim, ClaimOrder, NewTicket, Ticket
from storage.tickets import Tickets

__all__ = [
    "Aliases",
    "Back",
    "Claim",
    "ClaimOrder",
    "Database",
    "EpochRow",
    "NewTicket",
    "Registry",
    "Runs",
    "Sources",
    "StudyStorage",
    "Ticket",
    "Tickets",
    "TrialEnd",
    "init",
    "mask",
    "open",
    "validate_name",
]


def open(url: str, timeout_s: float = 60) -> StudyStorage:
    """Set up a database if it is new, and return the Optuna storage on it.

    `optuna.create_study(storage=storage.open("sqlite:///study.db"))` is all it takes.
    """
    init(url, timeout_s)
    return StudyStorage(url, timeout_s)
