"""Whose worker is lost: the dead at once, others where nobody renews their lease under our eyes.

A clock that is set on or back makes leases look as if they had run out, or would for an hour.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from optuna.trial import TrialState
from sqlalchemy import update

from hpo.queue import owner_token, search_items
from hpo.reaper import Reaper
from hpo.space import Float
from hpo.studies import ensure_study
from storage import Database
from storage.ending import TrialEnd
from storage.schema import tickets
from storage.ticket import Claim

WATCH_S = 0.4


@pytest.fixture
def reaper(db: Database) -> Reaper:
    """Give a reaper of the study `s`, which has a ticket, that watches leases for a short time."""
    ensure_study(db, "s", "minimize", "loss")
    db.tickets.write("s", "s", "trial", search_items(1, 0))
    return Reaper(db, "s", {"x": Float(0.0, 1.0)}, "loss", None, lambda text: None, WATCH_S)


def claimed(db: Database, owner: str) -> Claim:
    claim = db.tickets.claim("s", owner, owner.split("|")[0], int(owner.split("|")[1]), 30.0)
    assert claim is not None
    return claim


def shift_leases(db: Database, by_s: float) -> None:
    """Leave the leases as a clock has them that was then so many seconds ahead of today's."""
    with db.engine.begin() as connection:
        connection.execute(update(tickets).values(lease_until=tickets.c.lease_until + by_s))


def states(db: Database) -> dict[str, int]:
    return {state: n for state, n in db.tickets.counts("s").items() if n}


@pytest.mark.parametrize("by_s", [-3600, 3600], ids=["set on", "set back"])
@pytest.mark.parametrize("owner", [owner_token, lambda: "other-host|7|8"], ids=["here", "there"])
def test_a_worker_that_renews_its_lease_loses_nothing_when_the_clock_jumps(
    db: Database, reaper: Reaper, owner: Callable[[], str], by_s: float
) -> None:
    claimed(db, owner())
    shift_leases(db, by_s)
    reaper.reap()
    assert states(db) == {"running": 1}
    time.sleep(WATCH_S)
    assert db.tickets.renew(owner(), 30.0)
    for _ in range(3):
        reaper.reap()
        time.sleep(WATCH_S / 2)
    assert states(db) == {"running": 1}


@pytest.mark.parametrize("by_s", [-3600, 3600], ids=["set on", "set back"])
def test_a_worker_elsewhere_that_is_gone_is_found_though_the_clock_jumped(
    db: Database, reaper: Reaper, by_s: float
) -> None:
    """Set back by an hour, its lease would hold the study for that hour."""
    claim = claimed(db, "other-host|7|8")
    shift_leases(db, by_s)
    reaper.reap()
    time.sleep(WATCH_S)
    reaper.reap()
    assert states(db) == {"waiting": 1}
    assert db.studies.get_trial(claim.trial_id or 0).state == TrialState.FAIL


def test_a_lease_that_runs_out_in_its_time_is_watched_no_longer_than_its_renewal_takes(
    db: Database, reaper: Reaper
) -> None:
    claimed(db, "other-host|7|8")
    reaper.reap()
    time.sleep(WATCH_S)
    reaper.reap()
    assert states(db) == {"running": 1}, "it has not run out"
    shift_leases(db, -31)
    reaper.reap()
    time.sleep(WATCH_S)
    reaper.reap()
    assert states(db) == {"waiting": 1}


def test_a_trial_never_ends_before_it_began(db: Database, reaper: Reaper) -> None:
    """The clock is set back by an hour while it runs: it lasts no time, not minus one hour."""
    claim = claimed(db, owner_token())
    assert claim.trial_id is not None
    later = datetime.now(UTC) + timedelta(hours=1)
    assert db.end(TrialEnd(claim.ticket.id, owner_token(), claim.trial_id, TrialState.COMPLETE,
                           1.0, {}, began_at=later))
    trial = db.studies.get_trial(claim.trial_id)
    assert trial.duration == timedelta(0)
