"""Differences of candidates on the same seeds, their noise, and how many seeds would show them."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import numpy as np
import pytest
from scipy import stats

from hpo.paired import differences, level_means, seeds_to_show, shared


def drawn(seed: int, n: int, mean: float = 0.3) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(mean, 1) for _ in range(n)]


def test_only_seeds_that_both_have_are_compared_in_their_order():
    assert shared({3: 0.9, 1: 0.5, 2: 0.7}, {1: 0.4, 3: 0.6, 9: 0.0}) == pytest.approx([0.1, 0.3])


@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_pair_alone_has_the_paired_t_test_s_p_and_interval(n):
    ds = drawn(n, n)
    found = differences({"grid": ds})["grid"]
    wanted: Any = stats.ttest_1samp(ds, 0.0)
    low, high = wanted.confidence_interval(0.95)
    assert (found.p, found.low, found.high) == pytest.approx((wanted.pvalue, low, high))
    assert (found.mean, found.sd, found.df) == pytest.approx(
        (statistics.fmean(ds), statistics.stdev(ds), n - 1))


def test_the_noise_of_the_other_pairs_counts_as_two_degrees_of_freedom():
    """By hand: 2 df at variance 1 and 2 lent ones at 4 are 4 df at 2.5."""
    pairs = {"quiet": [-1.0, 0.0, 1.0], "loud": [-2.0, 0.0, 2.0]}
    found = differences(pairs)["quiet"]
    assert (found.sd, found.df) == pytest.approx((math.sqrt(2.5), 4))
    error = math.sqrt(2.5 / 3)
    assert found.half_width == pytest.approx(stats.t.ppf(0.975, 4) * error)


def test_no_pair_is_said_to_be_quieter_than_it_was():
    found = differences({"quiet": [-1.0, 0.0, 1.0], "loud": [-2.0, 0.0, 2.0]})["loud"]
    assert found.sd == pytest.approx(2.0)


def test_a_pair_of_one_set_of_params_lends_no_silence():
    """Its scores are the same trainings twice."""
    alone = differences({"grid": [0.1, 0.2, 0.4]})["grid"]
    beside = differences({"grid": [0.1, 0.2, 0.4], "same": [0.0, 0.0, 0.0]})
    assert beside["grid"] == alone
    assert (beside["same"].mean, beside["same"].p) == (0.0, 1.0)


def test_scores_in_steps_hide_noise_of_one_step_on_either_side():
    """By hand: variance 2 x 0.01^2, three seeds, 2 degrees of freedom."""
    found = differences({"grid": [0.03, 0.03, 0.03]}, grain=0.01)["grid"]
    error = math.sqrt(2 / 3) * 0.01
    assert found.p == pytest.approx(2 * stats.t.sf(0.03 / error, 2))
    assert found.half_width == pytest.approx(stats.t.ppf(0.975, 2) * error)


def test_without_any_noise_means_are_compared_exactly():
    found = differences({"same": [0.0, 0.0], "other": [-0.1, -0.1]})
    assert (found["same"].p, found["other"].p) == (1.0, 0.0)


def test_one_seed_tells_nothing_of_the_noise_and_none_tells_nothing_at_all():
    found = differences({"one": [0.5], "none": []})
    assert set(found) == {"one"}
    assert (found["one"].mean, found["one"].p, found["one"].half_width) == (0.5, None, math.inf)


@pytest.mark.parametrize(("difference", "sd"), [(0.5, 1.0), (1.0, 1.0), (0.002, 0.01), (3.0, 1.0)])
def test_so_many_seeds_show_a_difference_four_times_out_of_five(difference, sd):
    """The power of a t-test by the noncentral t: 80 % at the number given, less with one fewer."""
    def power(n: int) -> float:
        bar = stats.t.ppf(0.975, n - 1)
        return float(stats.nct.sf(bar, n - 1, difference / sd * math.sqrt(n)))

    n = seeds_to_show(difference, sd)
    assert n is not None
    # The quantiles' sum is an approximation that is off by a seed at most where seeds are few.
    assert power(n + 1) >= 0.8 and (n < 4 or power(n - 2) < 0.8)
    assert seeds_to_show(-difference, sd) == n


def test_more_seeds_than_anybody_trains_are_no_number():
    assert seeds_to_show(1e-6, 1.0) is None and seeds_to_show(0.0, 1.0) is None


def test_means_over_the_same_seeds_are_plain_means():
    assert level_means({"a": {1: 0.5, 2: 0.7}, "b": {1: 0.4, 2: 0.1}}) == {
        "a": pytest.approx(0.6), "b": pytest.approx(0.25)}


def test_an_easy_seed_more_makes_no_candidate_better():
    """Seed 3 gives everybody 0.2 more; b, who had it, is still 0.1 worse than a."""
    scores = {"a": {1: 0.5, 2: 0.7}, "b": {1: 0.4, 2: 0.6, 3: 0.7}}
    found = level_means(scores)
    assert statistics.fmean(scores["b"].values()) == pytest.approx(0.5667, abs=1e-4)
    assert found["a"] - found["b"] == pytest.approx(0.1)


@pytest.mark.parametrize("seed", range(5))
def test_levelled_means_are_those_of_least_squares(seed):
    rng = random.Random(seed)
    names, seeds = "abcd", range(6)
    scores = {name: {s: rng.random() for s in seeds if s < 2 or rng.random() < 0.6}
              for name in names}
    rows, values = [], []
    for i, name in enumerate(names):
        for s, value in scores[name].items():
            rows.append([float(i == j) for j in range(4)] + [float(s == k) for k in range(1, 6)])
            values.append(value)
    solved = np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)[0]
    found = level_means(scores)
    for i, name in enumerate(names[1:], start=1):
        assert found[name] - found["a"] == pytest.approx(solved[i] - solved[0], abs=1e-9)
