"""What becomes of tickets: which go back, with which params, and whose owner is gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

import storage
from hpo import Categorical, Float
from hpo.queue import (
    SCORE_OFFSET,
    abandoned,
    back_after,
    close_lost,
    fixed_items,
    is_gone,
    owner_token,
    phase_of,
    search_items,
    store_params,
    stored_params,
    study_of,
)
from hpo.space import Param, params_to_json
from hpo.studies import (
    check_data,
    check_same,
    ensure_study,
    n_complete,
    open_existing,
    phase_studies,
    space_changes,
)
from storage import Claim, Database, Ticket
from storage.ending import Back

SPACE: dict[str, Param] = {"x": Float(0.0, 1.0), "sizes": Categorical((1, 2), (3,))}


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    """Give an open database with the search study `s` in it."""
    url = f"sqlite:///{tmp_path / 'hpo.db'}"
    storage.init(url)
    opened = Database(url)
    ensure_study(opened, "s", "minimize", "loss")
    yield opened
    opened.close()


def claimed(db: Database, owner: str = "here", lease_s: float = 30.0) -> Claim:
    found = db.tickets.claim("s", owner, "host", 1, lease_s)
    assert found is not None
    return found


def dead_owner() -> str:
    """Return the token of a process of this host that has ended."""
    code = "from hpo.queue import owner_token; print(owner_token())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=Path(__file__).resolve().parent.parent, timeout=60)
    return done.stdout.strip()


def test_the_search_has_the_study_s_own_name_and_phases_stand_behind_it() -> None:
    assert [study_of("s", phase) for phase in ("search", "grid", "confirm")] == [
        "s", "s/grid", "s/confirm"]
    assert [phase_of(study) for study in ("s", "s/grid", "s/lr-range")] == [
        "search", "grid", "lr-range"]


def test_a_living_process_is_not_gone() -> None:
    assert not is_gone(owner_token())


def test_a_process_that_ended_is_gone() -> None:
    assert is_gone(dead_owner())


def test_a_pid_that_another_process_has_taken_over_is_gone() -> None:
    assert is_gone(f"{socket.gethostname()}|{os.getpid()}|1")


@pytest.mark.parametrize("owner", ["other-host|1|2", "", "nonsense", f"{socket.gethostname()}|x|"])
def test_nobody_says_of_another_host_s_process_that_it_is_gone(owner: str) -> None:
    assert not is_gone(owner)


@pytest.mark.parametrize(("kind", "attempt", "max_retries", "back"), [
    ("error", 0, None, False), ("error", 0, 1, True), ("error", 1, 1, False),
    ("error", 1, 2, True), ("worker lost", 0, None, True), ("worker lost", 1, None, False),
    ("worker lost", 0, 0, False), ("oom", 0, None, False), ("oom", 0, 1, True),
])
def test_a_failed_ticket_goes_back_as_often_as_allowed(
    db: Database, kind: str, attempt: int, max_retries: int | None, back: bool
) -> None:
    """C13: --max-retries counts the tries after the first."""
    db.tickets.write("s", "s", "trial", search_items(1, 0))
    ticket = replace(db.tickets.list("s")[0], attempt=attempt)
    found = back_after(kind, f"{kind}: why", ticket, {"x": 0.5}, max_retries)
    assert found == (Back(f"{kind}: why", {"x": 0.5}, True) if back else None)


def test_an_interrupted_ticket_always_goes_back_and_is_not_counted(db: Database) -> None:
    db.tickets.write("s", "s", "trial", search_items(1, 0))
    ticket = replace(db.tickets.list("s")[0], attempt=99)
    assert back_after("interrupted", "interrupted", ticket, None, 0) == Back(
        "interrupted", None, False)


def test_a_batch_that_does_not_fit_is_tried_once_with_half_and_not_counted(db: Database) -> None:
    db.tickets.write("s", "s", "trial", search_items(1, 0))
    ticket = replace(db.tickets.list("s")[0], attempt=1)
    back = back_after("oom", "oom: why", ticket, {"x": 0.5}, 0, 64)
    assert back == Back("oom: why", {"x": 0.5}, False, {"micro_batch_size": 64})
    again = replace(ticket, payload={**ticket.payload, "micro_batch_size": 64})
    assert back_after("oom", "oom: why", again, {"x": 0.5}, 0, 32) is None


def lost_with_params(db: Database) -> tuple[Ticket, dict[str, Any] | None]:
    db.tickets.write("s", "s", "trial", search_items(1, 0))
    claim = claimed(db, dead_owner())
    for name, value in (("x", 0.1 + 0.2), ("sizes", (3,))):
        kind = SPACE[name].distribution()
        db.studies.set_trial_param(claim.trial_id or 0, name, kind.to_internal_repr(
            SPACE[name].encode(value)), kind)
    db.studies.flush(claim.trial_id)
    ticket = abandoned(db, "s")[0]
    return ticket, stored_params(db, ticket, SPACE)


def test_a_lost_trial_s_params_are_read_back_to_the_last_bit(db: Database) -> None:
    """C06, C30: floats keep their digits, tuples their type."""
    assert lost_with_params(db)[1] == {"x": 0.30000000000000004, "sizes": (3,)}


def test_params_that_a_worker_told_before_it_died_are_stored_with_its_trial(
    db: Database, tmp_path: Path
) -> None:
    """Exactly, also tuples; what the trial has already stays, and an ended trial keeps its end."""
    db.tickets.write("s", "s", "trial", search_items(1, seed=0))
    claim = claimed(db)
    parent = Database(f"sqlite:///{tmp_path / 'hpo.db'}")
    drawn = params_to_json({"x": 0.1 + 0.2, "sizes": (3,)})
    store_params(parent, claim.ticket, SPACE, drawn)
    store_params(parent, claim.ticket, SPACE, {**drawn, "x": 0.5})
    found = stored_params(parent, claim.ticket, SPACE)
    assert found == {"x": 0.30000000000000004, "sizes": (3,)}
    db.end_trial(claim.ticket.id, "here", claim.trial_id or 0, TrialState.FAIL, None, {})
    store_params(parent, claim.ticket, SPACE, drawn)
    assert parent.studies.get_all_trials(1)[0].state == TrialState.FAIL
    parent.close()


def test_a_lost_ticket_waits_again_with_its_params_and_its_origin(db: Database) -> None:
    """C11: a trial and its retries count once; none is left RUNNING."""
    ticket, params = lost_with_params(db)
    assert close_lost(db, ticket, "worker lost: gone", None, params)
    assert db.tickets.counts("s").get("waiting") == 1
    again = claimed(db)
    assert again.ticket.payload["retry_of"] == 0
    assert again.number == 1
    assert stored_params(db, again.ticket, SPACE) == params
    trial = db.studies.get_all_trials(db.studies.get_study_id_from_name("s"))[0]
    assert (trial.state.name, trial.user_attrs["reason"]) == ("FAIL", "worker lost: gone")


def test_a_ticket_lost_twice_fails(db: Database) -> None:
    ticket, params = lost_with_params(db)
    close_lost(db, ticket, "worker lost: gone", None, params)
    claimed(db, dead_owner())
    close_lost(db, abandoned(db, "s")[0], "worker lost: gone", None, params)
    counts = {state: n for state, n in db.tickets.counts("s").items() if n}
    assert counts == {"failed": 1}


def test_only_one_of_two_parents_closes_a_lost_ticket(db: Database) -> None:
    ticket, params = lost_with_params(db)
    assert close_lost(db, ticket, "worker lost: gone", None, params)
    assert not close_lost(db, ticket, "worker lost: gone", None, params)


def test_a_ticket_whose_lease_was_renewed_meanwhile_is_left_alone(db: Database) -> None:
    db.tickets.write("s", "s", "trial", search_items(1, 0))
    claimed(db, "other-host|1|2", lease_s=-1.0)
    expired = abandoned(db, "s")
    assert len(expired) == 1
    db.tickets.renew("other-host|1|2", 30.0)
    assert not close_lost(db, expired[0], "worker lost: gone", None, None)
    assert db.tickets.counts("s").get("running") == 1


def test_a_lost_sweep_without_a_trial_fails_after_its_retry(db: Database) -> None:
    [item] = search_items(1, 0)
    db.tickets.write("s", "s/lr-range", "sweep", [item])
    for state in ("waiting", "failed"):
        claimed(db, dead_owner())
        close_lost(db, abandoned(db, "s")[0], "worker lost: gone", None, None)
        assert db.tickets.counts("s/lr-range").get(state) == 1


def test_a_trial_without_all_its_params_has_none_to_keep(db: Database) -> None:
    db.tickets.write("s", "s", "trial", search_items(1, 0))
    assert stored_params(db, claimed(db).ticket, SPACE) is None


@pytest.mark.parametrize(("n", "taken", "idxs"), [
    (3, (), [0, 1, 2]), (5, (0, 1, 2), [3, 4]), (4, (0, 1, 2, 5), []), (6, (0, 1, 2, 5), [3, 4]),
    (2, (0, 1, 2), []),
])
def test_search_tickets_make_n_with_those_there_are(
    n: int, taken: tuple[int, ...], idxs: list[int]
) -> None:
    assert [item.idx for item in search_items(n, 0, taken)] == idxs


def test_fixed_items_keep_their_params_and_search_items_have_none() -> None:
    cells = fixed_items([{"x": 1, "sizes": (1, 2)}, {"x": 2, "sizes": (3,)}], 7)
    assert [(item.idx, item.payload) for item in cells] == [(0, {"seed": 7}), (1, {"seed": 7})]
    assert cells[0].params == {"x": 1, "sizes": {"tuple": [1, 2]}}
    assert cells[0].params_key != cells[1].params_key
    assert [(item.idx, item.params) for item in search_items(2, 7)] == [(0, None), (1, None)]
    assert SCORE_OFFSET > 10_000


def test_complete_trials_are_counted_in_the_phases_that_were_asked_for(db: Database) -> None:
    db.tickets.write("s", "s", "trial", search_items(2, 0))
    for state, value in ((TrialState.COMPLETE, 1.0), (TrialState.FAIL, None)):
        claim = claimed(db)
        db.end_trial(claim.ticket.id, "here", claim.trial_id or 0, state, value, {"reason": ""})
    assert n_complete(db, "s") == 1
    assert n_complete(db, "s", ("grid",)) == 0
    assert phase_studies(db, "s") == {"search": "s"}


def test_a_study_is_made_once(db: Database) -> None:
    ensure_study(db, "s", "minimize", "loss")
    assert len(db.studies.get_all_studies()) == 1


def test_a_database_that_is_not_there_or_has_no_tables_of_ours_is_not_opened(
    tmp_path: Path
) -> None:
    assert open_existing(f"sqlite:///{tmp_path / 'no.db'}") is None
    (tmp_path / "empty.db").touch()
    assert open_existing(f"sqlite:///{tmp_path / 'empty.db'}") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.db"]


def space_json(**params: Param) -> dict[str, Any]:
    return {name: param.to_json() for name, param in params.items()}


@pytest.mark.parametrize(("new", "kinds"), [
    (space_json(x=Float(0.0, 1.0)), []),
    (space_json(x=Float(0.0, 2.0)), ["bounds"]),
    (space_json(x=Float(0.1, 1.0, log=True)), ["other"]),
    (space_json(x=Float(0.0, 1.0), y=Float(0.0, 1.0)), ["other"]),
    (space_json(y=Float(0.0, 1.0)), ["other", "other"]),
    (space_json(x=Categorical(1, 2)), ["other"]),
])
def test_changes_of_bounds_are_told_from_all_others(new: dict, kinds: list[str]) -> None:
    """C26: only other float or int bounds may be allowed."""
    assert [kind for kind, _ in space_changes(space_json(x=Float(0.0, 1.0)), new)] == kinds


@pytest.mark.parametrize("choices", [[16, 32, 64], [32, 16], [16], ["16", "32"]], ids=str)
def test_other_choices_name_both_lists_and_the_way_out(choices: list) -> None:
    """C26: also a mere reorder, and texts instead of numbers."""
    from hpo.errors import InputError
    from hpo.settings import Settings

    row = {"metric": "loss", "direction": "minimize",
           "space": space_json(batch=Categorical(16, 32))}
    spec = {**row, "space": space_json(batch=Categorical(choices))}
    settings = Settings("s", "s", Path("/h"), "sqlite://", allow_space_change=True)
    with pytest.raises(InputError) as raised:
        check_same(row, settings, spec)
    assert str(raised.value) == (f"study 's', param 'batch': the study has [16, 32], the module "
                                 f"{choices!r}\nstart a new study with --name")


def test_other_data_than_the_study_s_is_refused() -> None:
    from hpo.errors import InputError

    row = {"name": "s", "data": {"fingerprint": "a"}}
    check_data(row, {"fingerprint": "a"})
    check_data(row, {})
    with pytest.raises(InputError, match="made with data a, this is data b"):
        check_data(row, {"fingerprint": "b"})
