"""The race of the confirmation: who goes on, who is told apart, and when it ends."""

from __future__ import annotations

import random

import pytest

from hpo.comparison import compare
from hpo.race import Standing, grown, level, seed_sd, standing

SEARCH = frozenset({"search#1", "search#2"})
BASE = {1: 0.0, 2: 0.01, 3: -0.01, 4: 0.02, 5: -0.02}


def scores(**means: float) -> dict[str, dict[int, float]]:
    """Return scores on five seeds: a mean, what the seed gives to all, and a little of one's own.
    """
    rng = random.Random(0)
    return {name.replace("_", "#"): {seed: mean + common + rng.gauss(0, 0.002)
                                     for seed, common in BASE.items()}
            for name, mean in means.items()}


def stands(found: dict[str, dict[int, float]], **other) -> Standing:
    now = standing(found, of_search=SEARCH, maximize=True, **other)
    assert now is not None
    return now


def test_a_candidate_far_behind_is_told_apart_and_a_close_one_goes_on():
    now = stands(scores(search_1=0.95, search_2=0.949, grid=0.80, default=0.951),
                 resolution=0.001)
    assert now.leader == "search#1"
    assert set(now.undecided) == {"search#2", "default"}
    assert set(now.contenders) == {"search#1", "search#2", "default"}


def test_the_leader_is_of_the_search_although_a_baseline_is_ahead():
    now = stands(scores(search_1=0.90, search_2=0.85, grid=0.99))
    assert now.leader == "search#1" and now.ahead["grid"].mean < 0
    assert now.contenders == ()


def test_where_the_search_has_no_score_the_best_of_all_leads():
    assert stands(scores(grid=0.9, default=0.8)).leader == "grid"
    assert standing({"grid": {}}, of_search=SEARCH, maximize=True) is None


def test_less_leads_where_less_is_better():
    found = {name: {seed: -value for seed, value in by_seed.items()}
             for name, by_seed in scores(search_1=0.95, search_2=0.80).items()}
    now = standing(found, of_search=SEARCH, maximize=False)
    assert now is not None and now.leader == "search#1" and now.ahead["search#2"].mean > 0.1


def test_a_difference_known_to_be_too_small_to_matter_is_settled():
    close = scores(search_1=0.95, search_2=0.949)
    half = stands(close).ahead["search#2"].half_width
    assert stands(close, resolution=1.01 * half).contenders == ()
    assert stands(close, resolution=0.99 * half).undecided == ("search#2",)


def test_by_itself_the_resolution_is_the_sd_of_one_training():
    found = {"search#1": {1: 0.1, 2: 0.3}, "grid": {1: 0.5, 2: 0.9}, "default": {1: 0.2, 2: 0.2}}
    assert seed_sd(found) == pytest.approx(0.2 / 2**0.5)
    assert stands(found).resolution == pytest.approx(0.2 / 2**0.5)
    assert seed_sd({"grid": {1: 0.5}}) == 0.0


def test_one_seed_leaves_all_undecided():
    assert set(stands({"search#1": {1: 0.9}, "grid": {1: 0.1}}).contenders) == {
        "search#1", "grid"}


def test_the_same_params_are_not_told_apart_for_ever():
    same = scores(search_1=0.9)["search#1"]
    assert stands({"search#1": same, "grid": dict(same)}).contenders == ()


def test_rounds_grow_by_half():
    n, seen = 3, [3]
    while n < 30:
        n = grown(n)
        seen.append(n)
    assert seen == [3, 5, 8, 12, 18, 27, 41] and grown(1) == 2


def test_each_look_takes_its_part_of_the_five_percent():
    assert [level(n) for n in (1, 2, 3, 5)] == pytest.approx([0.05, 0.045, 0.04, 0.03])
    assert level(50) == 0.025


def raced(rng: random.Random, n_most: int):
    """Run a race of equal candidates as the phase does, and return what its end is called."""
    import study_samples as samples

    from hpo.results import Candidate, Scores

    names = ("search#1", "search#2", "grid", "default")
    val: dict[str, dict[int, float]] = {name: {} for name in names}
    test: dict[str, dict[int, float]] = {name: {} for name in names}
    common: dict[int, float] = {}
    running, n, rounds = set(names), 3, 1
    while True:
        for name in running:
            for seed in range(n):
                if seed not in val[name]:
                    own = rng.gauss(0, 1)
                    common.setdefault(seed, rng.gauss(0, 1))
                    val[name][seed] = common[seed] + own
                    test[name][seed] = common[seed] + 0.8 * own + 0.6 * rng.gauss(0, 1)
        now = standing(val, of_search=SEARCH, maximize=True, resolution=0.3)
        assert now is not None
        if not now.contenders or n >= n_most:
            break
        running, n, rounds = set(now.contenders), grown(n), rounds + 1
    found = tuple(Candidate(name, val=Scores(val[name]), test=Scores(test[name]),
                            n_rounds=rounds) for name in names)
    return [c.outcome for c in compare(samples.results(candidates=found, phases={}))], rounds


def test_a_race_that_looked_several_times_claims_no_more_by_chance():
    """400 races of equal candidates: 5 % false claims, and three standard errors of so many."""
    rng = random.Random(5)
    ends = [raced(rng, n_most=18) for _ in range(400)]
    claimed = sum("better" in outcomes or "worse" in outcomes for outcomes, _ in ends)
    assert claimed / 400 <= 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5
    assert max(rounds for _, rounds in ends) == 5
