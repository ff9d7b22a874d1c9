"""The confirmation: who stands for it, on which seeds, and what the registry says of them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

import storage
from hpo import Categorical, Float
from hpo.confirm import (
    Candidate,
    Round,
    candidates,
    fresh_seeds,
    items,
    next_round,
    ranked,
    register,
    score_items,
    tickets_by_key,
    versions,
)
from hpo.drive import Goal
from hpo.queue import SCORE_OFFSET, fixed_items
from hpo.settings import Settings
from hpo.space import Param, params_to_json
from hpo.studies import ensure_study
from storage import Database

SPACE: dict[str, Param] = {"x": Float(0.0, 1.0), "sizes": Categorical((1, 2), (3,))}
SPEC: dict[str, Any] = {"metric": "val_accuracy", "direction": "maximize",
                        "space": {name: param.to_json() for name, param in SPACE.items()}}
SETTINGS = Settings("s", "s", Path("/h"), "sqlite://")
DEFAULTS = params_to_json({"x": 0.9, "sizes": (3,)})


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path / 'hpo.db'}"
    storage.init(url)
    opened = Database(url)
    yield opened
    opened.close()


def params(x: float) -> dict[str, Any]:
    return {"x": x, "sizes": (1, 2)}


def work_off(db: Database, value_of: Any, **attrs: Any) -> None:
    """End every waiting trial with the value that its params and seed give; None is FAIL."""
    while (claim := db.tickets.claim("s", "me", "host", 1, 30.0)) is not None:
        ticket = claim.ticket
        assert ticket.params is not None and claim.trial_id is not None
        given = {"x": ticket.params["x"], "sizes": tuple(ticket.params["sizes"]["tuple"])}
        for name, value in given.items():
            kind = SPACE[name].distribution()
            db.studies.set_trial_param(claim.trial_id, name, kind.to_internal_repr(
                SPACE[name].encode(value)), kind)
        value = value_of(given["x"], ticket.payload["seed"])
        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        db.end_trial(ticket.id, "me", claim.trial_id, state, value, {
            "reason": "", "duration_s": 2.0, "best": {"val_accuracy": value}, "device": "cpu",
            **{name: made(claim.number) for name, made in attrs.items()}})


def trained(db: Database, study: str, xs: list[float]) -> None:
    ensure_study(db, study, "maximize", "val_accuracy")
    db.tickets.write("s", study, "trial", fixed_items([params(x) for x in xs], 0))
    work_off(db, lambda x, seed: None if x == 0.0 else x, n_epochs=lambda number: 20)


def labels(found: list[Candidate]) -> list[tuple[str, float, int | None]]:
    return [(c.label, c.params["x"], c.trial) for c in found]


def test_the_best_of_the_search_the_baselines_and_the_defaults_are_candidates(
    db: Database
) -> None:
    trained(db, "s", [0.2, 0.8, 0.5, 0.0])
    trained(db, "s/grid", [0.1, 0.4])
    trained(db, "s/lr-range", [0.3])
    assert labels(candidates(db, "s", SPEC, DEFAULTS, 2)) == [
        ("search#1", 0.8, 1), ("search#2", 0.5, 2), ("grid", 0.4, 1), ("lr-range", 0.3, 0),
        ("default", 0.9, None)]


def test_the_lowest_are_the_best_where_less_is_better(db: Database) -> None:
    trained(db, "s", [0.2, 0.8, 0.5])
    spec = {**SPEC, "direction": "minimize"}
    assert labels(candidates(db, "s", spec, None, 1)) == [("search#1", 0.2, 0)]


def test_equal_params_stand_once(db: Database) -> None:
    """C34: confirming the same params twice tells nothing."""
    ensure_study(db, "s", "maximize", "val_accuracy")
    doubled = [storage.NewTicket(idx=i, params=params_to_json(params(0.5)), payload={"seed": 0})
               for i in range(3)]
    db.tickets.write("s", "s", "trial", doubled)
    work_off(db, lambda x, seed: x)
    assert labels(candidates(db, "s", SPEC, None, 3)) == [("search#1", 0.5, 0)]


def test_without_a_complete_trial_nothing_is_confirmed(db: Database) -> None:
    """C48.2: not even the defaults."""
    trained(db, "s", [0.0])
    assert candidates(db, "s", SPEC, DEFAULTS, 3) == []
    assert ranked(db, "nosuch", Goal("loss", False)) == []


def test_the_earlier_of_two_equal_trials_is_ahead(db: Database) -> None:
    ensure_study(db, "s", "maximize", "val_accuracy")
    db.tickets.write("s", "s", "trial", fixed_items([params(0.1), params(0.2)], 0))
    work_off(db, lambda x, seed: 0.7)
    assert [t.number for t in ranked(db, "s", Goal("val_accuracy", True))] == [0, 1]


def test_confirmation_seeds_are_fresh() -> None:
    assert fresh_seeds(4, 3) == [5, 6, 7]


def test_each_candidate_gets_each_seed_once_and_a_rerun_adds_nothing(db: Database) -> None:
    trained(db, "s", [0.2, 0.8])
    trained(db, "s/grid", [0.8])
    chosen = candidates(db, "s", SPEC, None, 2)
    ensure_study(db, "s/confirm", "maximize", "val_accuracy")
    found = items(tickets_by_key(db, "s"), chosen, [1, 2])
    assert [(item.idx, (item.payload or {})["candidate"], (item.payload or {})["seed"])
            for item in found] == [(0, "search#1", 1), (1, "search#2", 1), (2, "search#1", 2),
                                   (3, "search#2", 2)]
    db.tickets.write("s", "s/confirm", "trial", found)
    assert items(tickets_by_key(db, "s"), chosen, [1, 2]) == []
    assert [item.idx for item in items(tickets_by_key(db, "s"), chosen, [1, 2, 3])] == [4, 5]


def test_the_registry_holds_mean_and_spread_over_the_fresh_seeds(db: Database) -> None:
    """Rank is by the confirmed mean, not by the search's own score."""
    trained(db, "s", [0.8, 0.7])
    trained(db, "s/grid", [0.4])
    chosen = candidates(db, "s", SPEC, None, 2)
    ensure_study(db, "s/confirm", "maximize", "val_accuracy")
    db.tickets.write("s", "s/confirm", "trial", items(tickets_by_key(db, "s"), chosen, [1, 2]))
    confirmed = {0.8: 0.5, 0.7: 0.6, 0.4: 0.3}
    work_off(db, lambda x, seed: confirmed[x] + seed / 100,
             checkpoint=lambda n: f"artifacts/s/confirm/{n}.pt")
    scores = score_items(db, "s")
    assert len(scores) == 6
    assert all(item.idx >= SCORE_OFFSET for item in scores)
    db.tickets.write("s", "s/confirm", "score", scores)
    while (claim := db.tickets.claim("s", "me", "host", 1, 30.0)) is not None:
        db.tickets.finish(claim.ticket.id, "me", "done", None,
                          {"test_accuracy": 0.25 * (claim.ticket.payload["seed"])})
    register(db, "s", SETTINGS, SPEC, chosen, {"fingerprint": "abc"})
    rows = {(row["phase"], row["rank"]): row for row in db.registry.rows("s")}
    assert set(rows) == {("search", 1), ("search", 2), ("grid", 1)}
    first = rows["search", 1]
    assert first["params"]["x"] == 0.7
    assert first["val_mean"] == pytest.approx(0.615)
    assert first["val_sd"] == pytest.approx(0.01 / math.sqrt(2))
    assert (first["test_mean"], first["seeds"]) == (pytest.approx(0.375), [1, 2])
    assert first["checkpoint"].endswith(f"{first['scores'][1]['trial']}.pt")
    assert (first["data_fingerprint"], first["device"], first["duration_s"]) == ("abc", "cpu", 4.0)
    assert "optuna" in first["versions"]
    assert rows["grid", 1]["epochs_spent"] == 20


def test_registering_again_replaces_the_rows_and_keeps_their_ids(db: Database) -> None:
    trained(db, "s", [0.8])
    chosen = candidates(db, "s", SPEC, None, 1)
    ensure_study(db, "s/confirm", "maximize", "val_accuracy")
    db.tickets.write("s", "s/confirm", "trial", items(tickets_by_key(db, "s"), chosen, [1]))
    work_off(db, lambda x, seed: x)
    ids = set()
    for _ in range(2):
        register(db, "s", SETTINGS, SPEC, chosen, {})
        ids |= {row["id"] for row in db.registry.rows("s")}
    assert len(ids) == 1


def test_a_single_seed_has_no_spread_and_an_objective_of_its_own_no_test_score(
    db: Database
) -> None:
    trained(db, "s", [0.8])
    chosen = candidates(db, "s", SPEC, None, 1)
    ensure_study(db, "s/confirm", "maximize", "val_accuracy")
    db.tickets.write("s", "s/confirm", "trial", items(tickets_by_key(db, "s"), chosen, [1]))
    work_off(db, lambda x, seed: x)
    assert score_items(db, "s") == []
    register(db, "s", SETTINGS, SPEC, chosen, {})
    [row] = db.registry.rows("s")
    assert (row["val_mean"], row["val_sd"], row["test_mean"], row["test_sd"]) == (
        0.8, None, None, None)


def test_candidates_whose_confirmation_failed_have_no_row(db: Database) -> None:
    trained(db, "s", [0.8, 0.7])
    chosen = candidates(db, "s", SPEC, None, 2)
    ensure_study(db, "s/confirm", "maximize", "val_accuracy")
    db.tickets.write("s", "s/confirm", "trial", items(tickets_by_key(db, "s"), chosen, [1]))
    work_off(db, lambda x, seed: None if x == 0.8 else x)
    register(db, "s", SETTINGS, SPEC, chosen, {})
    assert [(row["rank"], row["params"]["x"]) for row in db.registry.rows("s")] == [(1, 0.7)]


def test_a_seed_without_a_result_is_told_and_left_out_of_the_mean(db: Database) -> None:
    trained(db, "s", [0.8])
    chosen = candidates(db, "s", SPEC, None, 1)
    ensure_study(db, "s/confirm", "maximize", "val_accuracy")
    db.tickets.write("s", "s/confirm", "trial", items(tickets_by_key(db, "s"), chosen, [1, 2, 3]))
    work_off(db, lambda x, seed: None if seed == 2 else x + seed / 100)
    assert register(db, "s", SETTINGS, SPEC, chosen, {}) == [
        "confirm: search trial 0: no result on seed 2, so the mean is over 2 of 3"]
    [row] = db.registry.rows("s")
    assert row["lost_seeds"] == [2] and row["seeds"] == [1, 3]
    assert row["val_mean"] == pytest.approx(0.82)


def test_a_smaller_podium_leaves_no_row_of_the_larger_one(db: Database) -> None:
    """A rank that a second confirmation has not given again is marked, and not deleted."""
    trained(db, "s", [0.8, 0.7, 0.6])
    ensure_study(db, "s/confirm", "maximize", "val_accuracy")
    for top_k in (3, 1):
        chosen = candidates(db, "s", SPEC, None, top_k)
        db.tickets.write("s", "s/confirm", "trial", items(tickets_by_key(db, "s"), chosen, [1]))
        work_off(db, lambda x, seed: x)
        register(db, "s", SETTINGS, SPEC, chosen, {})
    assert [(row["rank"], row["params"]["x"]) for row in db.registry.rows("s")] == [(1, 0.8)]
    states = [row["state"] for row in db.registry.rows("s", with_deleted=True)]
    assert sorted(states) == ["current", "replaced", "replaced"]


def confirming(db: Database, **of: Any) -> tuple[list[Candidate], Settings]:
    """Train 3 search trials and a grid of 20 epochs each on the search's seed, and 3 fresh ones.

    The first two are equal but for a little noise, the grid is far behind.
    """
    trained(db, "s", [0.8, 0.79, 0.1])
    trained(db, "s/grid", [0.3])
    chosen = candidates(db, "s", SPEC, None, 2)
    ensure_study(db, "s/confirm", "maximize", "val_accuracy")
    settings = replace(SETTINGS, seed=0, epochs=20, **of)
    db.tickets.write("s", "s/confirm", "trial", items(tickets_by_key(db, "s"), chosen, [1, 2, 3]))
    return chosen, settings


def noisy(x: float, seed: int) -> float:
    mean = 0.8 if x > 0.5 else 0.3
    return mean + random.Random(f"{x}/{seed}").gauss(0, 0.01)


def decided(db: Database, settings: Settings, chosen: list[Candidate]) -> Round:
    found = next_round(db, "s", settings, SPEC, chosen, {})
    assert found is not None
    return found


def test_the_close_ones_are_trained_on_more_seeds_and_the_beaten_are_not(db: Database) -> None:
    chosen, settings = confirming(db, confirm_budget=9.0, confirm_resolution=1e-9)
    work_off(db, noisy)
    coming = decided(db, settings, chosen)
    assert [(t.payload["candidate"], t.payload["seed"], t.payload["round"])  # type: ignore[index]
            for t in coming.items] == [("search#1", 4, 1), ("search#2", 4, 1),
                                       ("search#1", 5, 1), ("search#2", 5, 1)]
    assert "not told from search trial" in coming.said
    assert "2 seeds more (4 trainings)" in coming.said
    db.tickets.write("s", "s/confirm", "trial", coming.items)
    work_off(db, noisy)
    register(db, "s", settings, SPEC, chosen, {})
    n_seeds = {(row["phase"], row["rank"]): len(row["scores"]) for row in db.registry.rows("s")}
    assert n_seeds == {("search", 1): 5, ("search", 2): 5, ("grid", 1): 3}
    again = decided(db, settings, chosen)
    assert {t.payload["round"] for t in again.items} == {2}  # type: ignore[index]
    assert len(again.items) == 6


@pytest.mark.parametrize(("budget", "n_more"), [(2.5, 0), (2.8, 2), (3.0, 2), (3.3, 4)])
def test_the_budget_is_a_part_of_the_epochs_spent_before(
    db: Database, budget: float, n_more: int
) -> None:
    """By hand: 80 epochs before; 2.8 times that pays for 11 trainings of 20, and 9 are done."""
    chosen, settings = confirming(db, confirm_budget=budget, confirm_resolution=1e-9)
    work_off(db, noisy)
    coming = decided(db, settings, chosen)
    assert len(coming.items) == n_more
    assert (f"--confirm-budget {budget:g} pays for no more" in coming.said) == (n_more == 0)


def test_a_round_that_another_run_has_begun_is_waited_for(db: Database) -> None:
    """Two runs at once: whoever looks in mid-round decides nothing, and adds nothing."""
    chosen, settings = confirming(db, confirm_budget=9.0, confirm_resolution=1e-9)
    assert next_round(db, "s", settings, SPEC, chosen, {}) is None
    work_off(db, noisy)
    first = next_round(db, "s", settings, SPEC, chosen, {})
    assert first == next_round(db, "s", settings, SPEC, chosen, {}) and first is not None
    assert db.tickets.write("s", "s/confirm", "trial", first.items) == 4
    assert db.tickets.write("s", "s/confirm", "trial", first.items) == 0
    assert next_round(db, "s", settings, SPEC, chosen, {}) is None


def test_a_settled_order_ends_the_race(db: Database) -> None:
    chosen, settings = confirming(db, confirm_budget=9.0, confirm_resolution=1.0)
    work_off(db, noisy)
    coming = decided(db, settings, chosen)
    assert coming.items == [] and coming.said == "confirm: the order is settled after 3 seeds"


def test_the_test_split_is_read_once_for_each_training_and_each_reading_is_marked(
    db: Database
) -> None:
    chosen, settings = confirming(db)
    work_off(db, noisy, checkpoint=lambda n: f"artifacts/s/confirm/{n}.pt")

    def read() -> int:
        new = score_items(db, "s")
        db.tickets.write("s", "s/confirm", "score", new)
        while (claim := db.tickets.claim("s", "me", "host", 1, 30.0)) is not None:
            db.tickets.finish(claim.ticket.id, "me", "done", None, {"test_accuracy": 0.5})
        return len(new)

    assert (read(), read()) == (9, 0)
    more = items(tickets_by_key(db, "s"), chosen, [1, 2, 3, 4], 1)
    db.tickets.write("s", "s/confirm", "trial", more)
    work_off(db, noisy, checkpoint=lambda n: f"artifacts/s/confirm/{n}.pt")
    assert read() == 3
    register(db, "s", settings, SPEC, chosen, {})
    for row in db.registry.rows("s"):
        assert [run["reading"] for run in row["scores"]] == [1, 1, 1, 2]
        assert [run["round"] for run in row["scores"]] == [0, 0, 0, 1]
        assert all(run["test_read_at"].endswith("+00:00") for run in row["scores"])


def test_versions_name_what_a_result_depends_on() -> None:
    found: Mapping[str, str] = versions()
    assert {"python", "torch", "optuna", "numpy"} <= set(found)
