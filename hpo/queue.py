"""The queue's rules: which tickets a phase writes, and what becomes of a ticket that fails.

The SQL is `storage.tickets`; here is only what a study means by it.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from hpo.guard import began
from hpo.space import Param, params_from_json, params_key, params_to_json

if TYPE_CHECKING:
    from storage.database import Database
    from storage.ending import Back, TrialEnd
    from storage.ticket import NewTicket, Ticket

# Score tickets stand in the confirm study behind its trials, this far from their confirm ticket.
SCORE_OFFSET = 100_000
# A worker lost by no fault of the params is worth one more try; the objective's own error is not.
_DEFAULT_RETRIES = {"worker lost": 1}
# Of a ticket that is tried again because its batch did not fit, and of its trial.
MICRO_BATCH = "micro_batch_size"
# Of a pruned trial that is trained to its end: its params as JSON data.
AUDITED = "audited"
# The reason of a trial whose ticket was taken, and no more.
NOT_BEGUN = "interrupted: before its first epoch"
# Renewed at a third of this; a ticket of a worker that vanished is free again after it.
LEASE_S = 30.0


def study_of(name: str, phase: str) -> str:
    """Return the name of the Optuna study of a phase; the search has the study's own name."""
    return name if phase == "search" else f"{name}/{phase}"


def phase_of(study: str) -> str:
    """Return the phase that an Optuna study's name stands for."""
    return study.rsplit("/", 1)[1] if "/" in study else "search"


def owner_token() -> str:
    """Return this process's name as an owner of tickets: host, pid and start of the process."""
    return f"{socket.gethostname()}|{os.getpid()}|{began(os.getpid())}"


def is_gone(owner: str) -> bool:
    """Return whether an owner was a process of this host that does not live any more."""
    host, _, rest = owner.partition("|")
    pid, _, started = rest.partition("|")
    if host != socket.gethostname() or not pid.isdecimal():
        return False
    if os.path.isdir("/proc"):
        return began(int(pid)) != started
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def fixed_items(
    cells: Iterable[Mapping[str, Any]], seed: int, payload: Mapping[str, Any] | None = None
) -> list[NewTicket]:
    """Return one ticket for each params of a grid, in order."""
    from storage.ticket import NewTicket

    return [NewTicket(idx=i, params=params_to_json(cell), params_key=params_key(cell),
                      payload={"seed": seed, **(payload or {})})
            for i, cell in enumerate(cells)]


def search_items(n: int, seed: int, taken: Collection[int] = ()) -> list[NewTicket]:
    """Return the tickets, with params for the sampler to draw, that make n with those taken."""
    from storage.ticket import NewTicket

    free = (i for i in count() if i not in taken)
    return [NewTicket(idx=i, params=None, payload={"seed": seed}, params_key=None)
            for i in islice(free, max(0, n - len(taken)))]


def is_audited(seed: int, idx: int, fraction: float) -> bool:
    """Return whether a search trial is trained to its end although it is pruned.

    Drawn from the study's seed and the trial's place, so that it is the same for every worker and
    has nothing to do with how the trial goes.
    """
    return random.Random(f"{seed}/audit/{idx}").random() < fraction


def audit_items(db: Database, name: str) -> list[NewTicket]:
    """Return a ticket for each pruned trial that is to be trained to its end."""
    from storage.ticket import NewTicket

    tickets = {ticket.idx: ticket for ticket in db.tickets.list(name)}
    study_id = db.studies.get_study_id_from_name(name)
    found = []
    for trial in db.studies.get_all_trials(study_id, deepcopy=False):
        attrs = trial.user_attrs
        if not attrs.get(AUDITED) or attrs.get("ticket") not in tickets:
            continue
        params = tickets[attrs["ticket"]].params or attrs[AUDITED]
        payload = {"seed": attrs["seed"], "audit_of": trial.number,
                   "origin": attrs.get("origin", trial.number)}
        if MICRO_BATCH in attrs:
            payload[MICRO_BATCH] = attrs[MICRO_BATCH]
        found.append(NewTicket(idx=trial.number, params=params, payload=payload,
                               params_key=None))
    return found


def back_after(
    kind: str, reason: str, ticket: Ticket, params: Mapping[str, Any] | None,
    max_retries: int | None, micro_batch_size: int | None = None,
) -> Back | None:
    """Return how a failed ticket goes back on the queue, or None.

    A ticket that was interrupted always goes back and is not counted as a retry; nor is one whose
    batch did not fit, which is tried once more with `micro_batch_size` rows at once.
    """
    from storage.ending import Back

    kept = None if params is None else params_to_json(params)
    if kind == "interrupted":
        return Back(reason, kept, False)
    if kind == "oom" and micro_batch_size and MICRO_BATCH not in ticket.payload:
        return Back(reason, kept, False, {MICRO_BATCH: micro_batch_size})
    allowed = _DEFAULT_RETRIES.get(kind, 0) if max_retries is None else max_retries
    return Back(reason, kept, True) if ticket.attempt < allowed else None


def was_begun(db: Database, ticket: Ticket) -> bool:
    """Return whether a ticket's trial has stored anything: its params come 250 ms after its begin.

    A ticket is taken ahead while the trial before it runs, so it may run without a begin.
    """
    if ticket.trial_id is None:
        return True
    trial = db.studies.get_trial(ticket.trial_id)
    return bool(trial.params or trial.intermediate_values)


def close_lost(
    db: Database, ticket: Ticket, reason: str, max_retries: int | None,
    params: Mapping[str, Any] | None,
) -> bool:
    """End the ticket of a worker that is gone; return False when somebody else did so first."""
    from optuna.trial import TrialState

    kind = reason.split(":")[0]
    back = back_after(kind, reason, ticket, params, max_retries)
    if ticket.trial_id is None:
        if back is not None:
            return db.tickets.give_back(ticket.id, ticket.owner, reason, count=back.count)
        return db.tickets.finish(ticket.id, ticket.owner, "failed", reason)
    attrs = {"reason": reason, "ticket": ticket.idx, **retry_attrs(db, ticket)}
    # A worker that lives may renew its lease in this very moment; then the ticket stays its own.
    return db.end_trial(ticket.id, ticket.owner, ticket.trial_id, TrialState.FAIL, None, attrs,
                        back=back, expired_only=not is_gone(ticket.owner or ""))


def end_to_json(end: TrialEnd) -> dict[str, Any]:
    """Return the end of a trial as JSON data: the parent stores it if the worker cannot."""
    began_at = end.began_at.isoformat() if end.began_at else None
    return {**asdict(end), "state": end.state.name, "began_at": began_at}


def end_from_json(data: Mapping[str, Any]) -> TrialEnd:
    """Return the end of a trial from JSON data."""
    from optuna.trial import TrialState

    from storage.ending import Back, TrialEnd

    began_at = data["began_at"]
    return TrialEnd(**{
        **data, "state": TrialState[data["state"]],
        "back": Back(**data["back"]) if data["back"] else None,
        "began_at": datetime.fromisoformat(began_at) if began_at else None})


def retry_attrs(db: Database, ticket: Ticket) -> dict[str, Any]:
    """Return what a retry says of its chain: the trial before it, and the first, its origin."""
    before = ticket.payload.get("retry_of")
    if before is None:
        return {}
    study_id = db.studies.get_study_id_from_name(ticket.study)
    trial_id = db.studies.get_trial_id_from_study_id_trial_number(study_id, before)
    origin = db.studies.get_trial(trial_id).user_attrs.get("origin", before)
    return {"retry_of": before, "origin": origin}


def abandoned(db: Database, name: str) -> list[Ticket]:
    """Return the running tickets of a study whose worker is gone: lease passed, or pid dead."""
    lost = {ticket.id: ticket for ticket in db.tickets.expired() if ticket.name == name}
    for ticket in db.tickets.running(name):
        if ticket.owner and is_gone(ticket.owner):
            lost[ticket.id] = ticket
    return list(lost.values())


def store_params(
    db: Database, ticket: Ticket, space: Mapping[str, Param], drawn: Mapping[str, Any]
) -> None:
    """Store the params of a lost ticket's trial, as its worker told them; those it has stay."""
    if ticket.trial_id is None:
        return
    for name, value in params_from_json(drawn).items():
        kind = space[name].distribution()
        stored = kind.to_internal_repr(space[name].encode(value))
        with suppress(RuntimeError):
            # Somebody else closed the trial meanwhile.
            db.studies.set_trial_param(ticket.trial_id, name, stored, kind)


def stored_params(
    db: Database, ticket: Ticket, space: Mapping[str, Param]
) -> dict[str, Any] | None:
    """Return the params a lost ticket's trial had, or None when it had not got all of them."""
    if ticket.params is not None:
        return params_from_json(ticket.params)
    if ticket.trial_id is None:
        return None
    stored = db.studies.get_trial(ticket.trial_id).params
    if any(name not in stored for name in space):
        return None
    return {name: space[name].decode(stored[name]) for name in space}
