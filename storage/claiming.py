"""Claims: waiting tickets become one worker's, and their Optuna trials are made, or neither."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Connection, Integer, bindparam, select, update

from hpo.errors import StorageError
from storage import rows
from storage.columns import now_s, utc_now
from storage.leases import RUNNING, in_state
from storage.prepared import Answer, Prepared
from storage.running import blank_trial
from storage.schema import tickets
from storage.studies import StudyStorage
from storage.ticket import TRIAL, Claim, ClaimOrder, Ticket
from storage.ticket_ends import WAITING


def _first_waiting(*, of_one_study: bool) -> Any:
    """Return the compare-and-set that takes the first waiting tickets, `most` of them."""
    queue = tickets.alias("queue")
    wanted = (queue.c.name == bindparam("study_name")) & in_state(queue, WAITING)
    if of_one_study:
        wanted &= queue.c.study == bindparam("only")
    first = (
        select(queue.c.id)
        .where(wanted)
        .order_by(queue.c.id)
        .limit(bindparam("most", type_=Integer))
        .with_for_update(skip_locked=True)
        # Else PostgreSQL may look for the first ones again for each row that it updates.
        .cte("first_waiting")
        .prefix_with("MATERIALIZED", dialect="postgresql")
    )
    taken = {
        "state": RUNNING,
        "lease_until": now_s() + bindparam("lease_s"),
        **{name: bindparam("new_" + name) for name in ("owner", "host", "pid", "claim_token")},
        "taken_at": bindparam("now"),
    }
    where = tickets.c.id.in_(select(first.c.id)) & in_state(tickets, WAITING)
    return update(tickets).where(where).values(taken).returning(*tickets.c)


CLAIM = Prepared(_first_waiting(of_one_study=False))
CLAIM_OF = Prepared(_first_waiting(of_one_study=True))
NOTE_TRIAL = Prepared(
    update(tickets)
    .where(tickets.c.id == bindparam("ticket"))
    .values(trial_id=bindparam("trial"), trial_number=bindparam("number"))
)


_JUST_TAKEN = (
    (tickets.c.name == bindparam("study_name"))
    & in_state(tickets, RUNNING)
    & (tickets.c.claim_token == bindparam("token"))
    & (tickets.c.kind == TRIAL)
)


def _add_noted() -> Any:
    """Make the trial of the one ticket that was just taken, and note it there, on PostgreSQL."""
    columns = rows.trials.c
    named = rows.studies.c.study_name == bindparam("study")
    made = (
        rows.adding_trial(named & select(tickets.c.id).where(_JUST_TAKEN).exists())
        .returning(columns.trial_id, columns.number, columns.study_id)
        .cte("made")
    )
    noted = {"trial_id": made.c.trial_id, "trial_number": made.c.number}
    change = update(tickets).where(_JUST_TAKEN).values(noted)
    return change.returning(made.c.trial_id, made.c.number, made.c.study_id)


ADD_NOTED = Prepared(_add_noted())
# Whether the ticket that was taken has its trial; without a study of that name it has none.
HAS_TRIAL = ~select(tickets.c.id).where(_JUST_TAKEN, tickets.c.trial_id.is_(None)).exists()


class Claiming:
    """The taking of up to `most` tickets, as work within a transaction.

    `work` does it, `done` finds it done where the answer to a COMMIT was lost, and `adopt` follows
    the commit.
    """

    def __init__(self, studies: StudyStorage, order: ClaimOrder, most: int = 1) -> None:
        self._studies = studies
        self._order = order
        self._token = uuid.uuid4().hex
        self._statement = CLAIM if order.only is None else CLAIM_OF
        self._fields: dict[str, Any] = {
            "study_name": order.name,
            "lease_s": order.lease_s,
            "new_owner": order.owner,
            "new_host": order.host,
            "new_pid": order.pid,
            "new_claim_token": self._token,
            "most": most,
            **({} if order.only is None else {"only": order.only}),
        }
        self._made: list[tuple[int, FrozenTrial]] = []

    def work(self, connection: Connection) -> list[Claim]:
        """Take the tickets and make their trials.

        Raises:
            StorageError: the Optuna study of a ticket does not exist.
        """
        taken = self._take(connection)
        start = rows.utc_naive()
        added = [(row, self._studies.add_running(connection, start, study=row.study)
                  if row.kind == TRIAL else None) for row in sorted(taken.all(), key=_by_id)]
        claims = [self._claimed(row, answer, start) for row, answer in added]
        for claim in claims:
            if claim.trial_id is not None:
                note = {"ticket": claim.ticket.id, "trial": claim.trial_id, "number": claim.number}
                NOTE_TRIAL.run(connection, note)
        return claims

    def _take(self, connection: Connection) -> Answer:
        self._made.clear()
        return self._statement.run(connection, {**self._fields, "now": utc_now()})

    @property
    def proof(self) -> dict[str, Any]:
        """The fields of HAS_TRIAL."""
        return {"study_name": self._order.name, "token": self._token}

    def say(self, connection: Connection) -> Callable[[], list[Claim]]:
        """Take a ticket of the one study and make its trial without a look.

        It is for a transaction that is refused unless HAS_TRIAL follows. Returns: what reads the
        answers, after the commit.
        """
        taken, study = self._take(connection), self._order.only
        assert study is not None
        start = rows.utc_naive()
        self._studies.lock_study(connection, study)
        added = ADD_NOTED.run(connection, {
            **self.proof,
            "study": study,
            "state": TrialState.RUNNING,
            "start": start,
            "complete": None,
        })
        return lambda: [self._claimed(row, added if row.kind == TRIAL else None, start)
                        for row in taken.all()]

    def done(self, connection: Connection) -> list[Claim]:
        """Return what was taken before."""
        mine = select(tickets).where(tickets.c.claim_token == self._token)
        found = sorted(connection.execute(mine), key=_by_id)
        trials, made_ids = rows.trials.c, [row.trial_id for row in found if row.trial_id]
        fields = (trials.study_id, trials.trial_id, trials.number, trials.datetime_start)
        made = select(*fields).where(trials.trial_id.in_(made_ids))
        self._made = [(study_id, blank_trial(trial_id, number, start))
                      for study_id, trial_id, number, start in connection.execute(made)]
        return [Claim(ticket_of(row), row.trial_id, row.trial_number) for row in found]

    def adopt(self) -> None:
        """Take the trials that were made into this process's memory."""
        for study_id, trial in self._made:
            self._studies.adopt(study_id, trial)

    def _claimed(self, row: Any, answer: Answer | None, start: Any) -> Claim:
        """Return the claim of a ticket, with the trial that the answer tells of."""
        if answer is None:
            return Claim(ticket_of(row), None, None)
        try:
            study_id, trial = self._studies.added(answer, start, study=row.study)
        except KeyError:
            raise StorageError(
                f"ticket {row.id}: its study '{row.study}' does not exist"
            ) from None
        self._made.append((study_id, trial))
        ticket = ticket_of(row, trial_id=trial._trial_id, trial_number=trial.number)
        return Claim(ticket, trial._trial_id, trial.number)


def ticket_of(row: Any, **changes: Any) -> Ticket:
    """Return the ticket of a row, which holds all its columns."""
    fields = row._asdict()
    fields["payload"] = fields["payload"] or {}
    return Ticket(**fields | changes)


def _by_id(row: Any) -> int:
    return row.id
