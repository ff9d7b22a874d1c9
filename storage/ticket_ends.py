"""How a running ticket ends or goes back to the queue, within a transaction of its trial's.

The fence is in each statement: whoever has lost the ticket changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import Connection, bindparam, func, select, update

from storage.columns import clip, utc_now
from storage.leases import RUNNING, has_passed, in_state
from storage.prepared import Answer, Prepared
from storage.schema import tickets

WAITING, DONE, FAILED = "waiting", "done", "failed"


def close_ticket(
    connection: Connection,
    ticket_id: int,
    owner: str | None,
    state: str,
    cause: str | None = None,
    result: Any = None,
    expired_only: bool = False,
    trial_id: int | None = None,
    at: datetime | None = None,
) -> Answer:
    """End a running ticket within a transaction; no row is changed if the owner has lost it.

    With `trial_id` it must be at that very trial: its owner may have taken it anew meanwhile.
    """
    fields = {
        "trial": trial_id,
        "ticket": ticket_id,
        "holder": owner,
        "new_state": state,
        "now": at or utc_now(),
        "new_cause": clip(cause),
        "new_result": result,
    }
    statement = close_statement(owner is not None, expired_only, trial_id is not None)
    return statement.run(connection, fields)


def _fence(owned: bool, expired_only: bool, of_trial: bool) -> Any:
    owner = bindparam("holder") if owned else None
    trial = bindparam("trial") if of_trial else None
    return held(bindparam("ticket"), owner, expired_only, trial)


@cache
def close_statement(owned: bool, expired_only: bool, of_trial: bool) -> Prepared:
    """Return the UPDATE that closes a ticket, with the parts of the fence that are wanted."""
    return Prepared(
        update(tickets)
        .where(_fence(owned, expired_only, of_trial))
        .values(
            state=bindparam("new_state"),
            ended_at=bindparam("now"),
            lease_until=None,
            cause=bindparam("new_cause"),
            result=func.coalesce(bindparam("new_result", type_=tickets.c.result.type),
                                 tickets.c.result),
        )
    )


def return_ticket(
    connection: Connection,
    ticket_id: int,
    owner: str | None,
    cause: str,
    params: Mapping[str, Any] | None,
    count: bool,
    expired_only: bool = False,
    trial_id: int | None = None,
    more: Mapping[str, Any] | None = None,
) -> bool:
    """Let a running ticket wait again within a transaction; False if the owner has lost it.

    `more` is added to its payload.
    """
    mine = _hold(owner is not None, expired_only, trial_id is not None)
    key = {"ticket": ticket_id, "holder": owner, "trial": trial_id}
    row = mine.run(connection, key).one_or_none()
    if row is None:
        return False
    payload = {**(row.payload or {}), **(more or {})}
    if row.trial_number is not None:
        payload["retry_of"] = row.trial_number
    _FREE.run(connection, {
        "ticket": ticket_id,
        "new_cause": clip(cause),
        "new_attempt": row.attempt + (1 if count else 0),
        "new_payload": payload,
        "new_params": row.params if params is None else dict(params),
    })
    return True


@cache
def _hold(owned: bool, expired_only: bool, of_trial: bool) -> Prepared:
    where = _fence(owned, expired_only, of_trial)
    return Prepared(select(tickets).where(where).with_for_update())


def held(ticket_id: Any, owner: Any, expired_only: bool, trial_id: Any = None) -> Any:
    """Return the fence: the ticket runs, for this owner, and its lease has passed if it must."""
    where = (tickets.c.id == ticket_id) & in_state(tickets, RUNNING)
    if trial_id is not None:
        where &= tickets.c.trial_id == trial_id
    if owner is not None:
        where &= tickets.c.owner == owner
    return where & has_passed(tickets) if expired_only else where


def free() -> dict[str, None]:
    """Return the fields that a ticket without an owner has not."""
    held = ("owner", "host", "pid", "lease_until", "claim_token", "trial_id", "trial_number")
    return dict.fromkeys((*held, "taken_at"))


_CHANGED = ("cause", "attempt", "payload", "params")
_FREE = Prepared(
    update(tickets)
    .where(tickets.c.id == bindparam("ticket"))
    .values(state=WAITING, **free(), **{
        name: bindparam("new_" + name, type_=tickets.c[name].type) for name in _CHANGED
    })
)
