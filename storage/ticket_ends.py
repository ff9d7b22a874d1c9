"""How a running ticket ends or goes back to the queue, within a transaction of its trial's.

The fence is in each statement: whoever has lost the ticket changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from sqlalchemy import Connection, bindparam, func, select, update

from storage.columns import clip, now_s, utc_now
from storage.leases import RUNNING
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
) -> bool:
    """End a running ticket within a transaction; False if the owner has lost it.

    With `trial_id` it must be at that very trial: its owner may have taken it anew meanwhile.
    """
    fields = {
        "trial": trial_id,
        "ticket": ticket_id,
        "holder": owner,
        "new_state": state,
        "now": utc_now(),
        "new_cause": clip(cause),
        "new_result": result,
    }
    return bool(connection.execute(
        _close(owner is not None, expired_only, trial_id is not None), fields).rowcount)


@cache
def _close(owned: bool, expired_only: bool, of_trial: bool) -> Any:
    owner = bindparam("holder") if owned else None
    trial = bindparam("trial") if of_trial else None
    mine = held(bindparam("ticket"), owner, expired_only, trial)
    return (
        update(tickets)
        .where(mine)
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
) -> bool:
    """Let a running ticket wait again within a transaction; False if the owner has lost it."""
    mine = select(tickets).where(held(ticket_id, owner, expired_only, trial_id))
    mine = mine.with_for_update()
    row = connection.execute(mine).one_or_none()
    if row is None:
        return False
    payload = dict(row.payload or {})
    if row.trial_number is not None:
        payload["retry_of"] = row.trial_number
    fields = {
        **free(),
        "state": WAITING,
        "cause": clip(cause),
        "attempt": row.attempt + (1 if count else 0),
        "payload": payload,
    }
    if params is not None:
        fields["params"] = dict(params)
    connection.execute(update(tickets).where(tickets.c.id == ticket_id).values(fields))
    return True


def held(ticket_id: Any, owner: Any, expired_only: bool, trial_id: Any = None) -> Any:
    """Return the fence: the ticket runs, for this owner, and its lease has passed if it must."""
    where = (tickets.c.id == ticket_id) & (tickets.c.state == RUNNING)
    if trial_id is not None:
        where &= tickets.c.trial_id == trial_id
    if owner is not None:
        where &= tickets.c.owner == owner
    return where & (tickets.c.lease_until < now_s()) if expired_only else where


def free() -> dict[str, None]:
    """Return the fields that a ticket without an owner has not."""
    held = ("owner", "host", "pid", "lease_until", "claim_token", "trial_id", "trial_number")
    return dict.fromkeys((*held, "taken_at"))
