"""A unit of work as a value: to be written, as it was read, and as it was claimed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

# What a ticket is for.
TRIAL, SWEEP, SCORE = "trial", "sweep", "score"


@dataclass(frozen=True)
class NewTicket:
    """A unit of work to write: its place in the study, and the params if they are fixed."""

    idx: int
    params: Mapping[str, Any] | None = None
    payload: Mapping[str, Any] | None = None
    params_key: str | None = None


@dataclass(frozen=True)
class Ticket:
    """A ticket as it was when it was read; the fields are the columns of `hpo_ticket`."""

    id: int
    name: str
    study: str
    idx: int
    kind: str
    params: dict[str, Any] | None
    params_key: str | None
    payload: dict[str, Any]
    state: str
    attempt: int
    owner: str | None
    host: str | None
    pid: int | None
    lease_until: float | None
    claim_token: str | None
    cause: str | None
    trial_id: int | None
    trial_number: int | None
    result: Any
    created_at: datetime
    taken_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True)
class Claim:
    """A ticket that is ours now, with the Optuna trial that was made for it."""

    ticket: Ticket
    trial_id: int | None
    number: int | None


@dataclass(frozen=True)
class ClaimOrder:
    """Who claims, for how long, and from which study.

    `only` names the Optuna study of a phase, whose tickets alone are taken then.
    """

    name: str
    owner: str
    host: str
    pid: int
    lease_s: float
    only: str | None = None
