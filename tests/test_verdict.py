"""What is called clearly better is so: rarely by chance, and always where it really is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import study_samples as samples
from study_samples import candidate

from hpo import report
from hpo.comparison import compare
from hpo.paired import differences, holm
from hpo.results import Candidate, Results

BASELINES = ("grid", "lr-range", "default")
SD = 0.004
# The size of the digits' test split.
N_IMAGES = 359
N_STUDIES = 1500
# 5 %, and three standard errors of so many simulated studies.
MOST = 0.05 + 3 * (0.05 * 0.95 / N_STUDIES) ** 0.5
EMPTY = samples.results(candidates=(), phases={}, sweep=None)


def simulated(
    rng: random.Random, *, n_seeds: int = 3, top_k: int = 3, gain: float = 0.0, sd: float = SD,
    tested: bool = False, n_images: int | None = None, noisy: str = "",
) -> Results:
    """Return a study whose search is truly better than each baseline by `gain`, or is not.

    A seed moves all candidates by as much as their own noise, which is threefold for `noisy`.
    """
    seeds = [rng.gauss(0, sd) for _ in range(n_seeds)]

    def as_counted(value: float) -> float:
        return value if n_images is None else round(value * n_images) / n_images

    def one(name: str, mean: float) -> Candidate:
        own = 3 * sd if name == noisy else sd
        luck = [common + rng.gauss(0, own) for common in seeds]
        # A training that went well on one split mostly did on the other.
        again = [0.8 * x + 0.6 * rng.gauss(0, own) for x in luck]
        return candidate(name, *(as_counted(mean + x) for x in luck),
                         test=[as_counted(mean + x) for x in again] if tested else None)

    found = [one(f"search#{i + 1}", 0.93 + gain) for i in range(top_k)]
    return replace(EMPTY, candidates=(*found, *(one(name, 0.93) for name in BASELINES)))


def share(said: Callable[[list[str]], bool], **study: object) -> float:
    """Return the share of simulated studies whose outcomes fulfil a condition."""
    rng = random.Random(20260101)
    outcomes = ([c.outcome for c in compare(simulated(rng, **study))]  # type: ignore[arg-type]
                for _ in range(N_STUDIES))
    return sum(map(said, outcomes)) / N_STUDIES


def clear(outcomes: list[str]) -> bool:
    return "better" in outcomes or "worse" in outcomes


@pytest.mark.parametrize("n_seeds", [2, 3, 5])
@pytest.mark.parametrize("tested", [True, False], ids=["test split", "no test split"])
def test_without_a_true_difference_at_most_one_study_in_twenty_claims_one(tested, n_seeds):
    assert share(clear, tested=tested, n_seeds=n_seeds) <= MOST


@pytest.mark.parametrize("noisy", ["grid", "search#1"])
@pytest.mark.parametrize("n_seeds", [3, 5])
def test_a_candidate_of_threefold_noise_claims_hardly_more_often(n_seeds, noisy):
    """The pairs lend each other their noise, which is the most wrong here."""
    assert share(clear, tested=True, n_seeds=n_seeds, noisy=noisy) <= MOST + 0.02


@pytest.mark.parametrize("sd", [0.001, 0.002, 0.004])
@pytest.mark.parametrize("n_seeds", [2, 3])
@pytest.mark.parametrize("tested", [True, False], ids=["test split", "no test split"])
def test_scores_that_count_few_images_claim_no_more_often(tested, n_seeds, sd):
    """Equal accuracies on every seed happen by chance there, and are no proof of no noise."""
    assert share(clear, tested=tested, n_seeds=n_seeds, sd=sd, n_images=N_IMAGES) <= MOST


@pytest.mark.parametrize("n_images", [None, N_IMAGES])
@pytest.mark.parametrize("tested", [True, False], ids=["test split", "no test split"])
def test_a_difference_of_ten_sd_is_found_from_three_seeds(tested, n_images):
    won = share(lambda outcomes: outcomes == ["better"] * 3, tested=tested, gain=10 * SD,
                n_images=n_images)
    assert won > 0.96


def test_holm_multiplies_the_smallest_p_by_the_number_of_tests_and_keeps_their_order():
    """By hand: 3 x 0.01, 2 x 0.02 and 1 x 0.04, none below one before it."""
    assert holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize("seed", range(5))
def test_holm_agrees_with_the_closed_procedure(seed):
    """A p stays below a level if every set of tests that holds it is below it by Bonferroni."""
    rng = random.Random(seed)
    ps = [rng.random() ** 4 for _ in range(4)]
    sets = [[i for i in range(4) if bits >> i & 1] for bits in range(1, 16)]
    wanted = [min(1.0, max(len(s) * min(ps[j] for j in s) for s in sets if i in s))
              for i in range(4)]
    assert holm(ps) == pytest.approx(wanted)


def test_the_correction_is_for_the_baselines_and_where_scores_chose_for_the_choice():
    found = [candidate("search#1", 0.95, 0.96, 0.97), candidate("search#2", 0.91, 0.95, 0.93),
             candidate("grid", 0.91, 0.92, 0.93), candidate("default", 0.90, 0.91, 0.92)]
    study = samples.results(candidates=found)
    by = {c.source: c for c in compare(study)}
    for one in by.values():
        pairs = {"grid": [0.04, 0.04, 0.04], "default": [0.05, 0.05, 0.05],
                 "search#2": [0.04, 0.01, 0.04]}
        assert one.p == pytest.approx(differences(
            pairs, study.grain("val_accuracy"))[one.source].p)
        assert one.n_choices == 2
    assert by["default"].p_corrected == pytest.approx(4 * by["default"].p)  # type: ignore[operator]
    assert by["grid"].p_corrected == pytest.approx(2 * by["grid"].p)  # type: ignore[operator]
    tested = [replace(c, test=c.val) for c in found]
    by = {c.source: c for c in compare(samples.results(candidates=tested))}
    assert by["default"].p_corrected == pytest.approx(2 * by["default"].p)  # type: ignore[operator]
    assert by["default"].n_choices == 1


def test_a_choice_by_the_compared_scores_is_told():
    found = [candidate("search#1", 0.95, 0.951, 0.952), candidate("search#2", 0.7, 0.71, 0.7),
             candidate("grid", 0.90, 0.901, 0.902)]
    said = report.verdict(samples.results(candidates=found))
    assert said.startswith("Worth it. The search won: on val_accuracy its best, chosen among 2 by "
                           "these same scores, is clearly better than the grid (by 0.0500 ± ")


def test_a_difference_that_is_clear_only_alone_is_said_to_be_one_of_several():
    """Its p is 0.03 alone and 0.06 as one of two: noise, although its interval leaves out zero."""
    found = [candidate("search#1", *(0.9 + x for x in (0.021, 0.003, 0.010, 0.012))),
             candidate("grid", 0.9, 0.9, 0.9, 0.9),
             candidate("default", *(0.9 + x for x in (0.010, 0.003, 0.012, 0.012)))]
    study = replace(EMPTY, candidates=tuple(found), data={"n_val": 100_000})
    grid = next(c for c in compare(study) if c.source == "grid")
    assert grid.p is not None and grid.p_corrected is not None and grid.low is not None
    assert grid.p < 0.05 < grid.p_corrected and grid.low > 0 and grid.outcome == "noise"
    said = report.verdict(study)
    assert "better, which among 2 comparisons may be chance)" in said
    assert said.count("may be chance") == 1


@pytest.mark.parametrize(("n_seeds", "images", "outcome"), [
    (3, 1, "noise"), (3, 2, "noise"), (2, 4, "noise"), (3, 20, "better"), (3, -20, "worse"),
    (3, 0, "equal"),
])
def test_equal_accuracies_on_every_seed_are_known_to_one_image_only(n_seeds, images, outcome):
    found = [candidate("search#1", *[(300 + images) / N_IMAGES] * n_seeds),
             candidate("grid", *[300 / N_IMAGES] * n_seeds)]
    study = samples.results(candidates=found, data={"n_val": N_IMAGES})
    (one,) = compare(study)
    assert one.outcome == outcome and one.grain == 1 / N_IMAGES
    assert ("on scores no finer than 0.0028" in report.verdict(study)) == (outcome == "noise")


def test_the_grain_is_an_image_or_else_the_smallest_step_to_be_seen():
    known = samples.results(data={"n_val": 200, "n_test": 359})
    assert known.grain("val_accuracy") == 1 / 200 and known.grain("test_accuracy") == 1 / 359
    found = [candidate("search#1", 0.9, 0.9 + 1e-9), candidate("grid", 0.7, 0.74)]
    assert replace(EMPTY, candidates=tuple(found)).grain("val_accuracy") == pytest.approx(0.04)
    assert replace(EMPTY, candidates=()).grain("val_accuracy") == 0.0
    loss = samples.results(metric="val_loss", data={"n_val": 200})
    assert loss.grain("val_loss") < 0.001


def test_means_of_the_same_scores_in_another_order_are_equal():
    found = [candidate("search#1", 0.1, 0.2, 0.3), candidate("grid", 0.3, 0.2, 0.1 + 1e-17)]
    found[1] = replace(found[1], val=samples.scores(0.3, 0.1, 0.2))
    assert "scores the same as the grid" in report.verdict(samples.results(candidates=found))


def test_a_baseline_of_one_seed_counts_as_no_test():
    found = [candidate("search#1", 0.95, 0.96), candidate("grid", 0.9, 0.91),
             candidate("default", 0.5)]
    by = {c.source: c for c in compare(samples.results(candidates=found))}
    assert by["grid"].p_corrected == by["grid"].p and by["default"].outcome == "unknown"


def test_the_sampling_error_of_the_test_split_is_told_beside_the_table():
    """0.979 of 359 images: (0.979 * 0.021 / 359)^0.5 is 0.0076, and Laplace's rule adds to it."""
    study = samples.results(data={"n_val": 100, "n_test": N_IMAGES})
    said = report.markdown(study, {})
    assert "The test split has 359 images" in said and "about ±0.0080 (one standard error)" in said
    untested = [replace(c, test=None) for c in study.candidates]
    said = report.markdown(replace(study, candidates=tuple(untested)), {})
    assert "The validation split has 100 images" in said and "about ±0.0163" in said


@pytest.mark.parametrize("other", [{}, {"data": {"n_val": 100}, "metric": "val_loss"},
                                   {"data": {"n_val": 100, "n_test": 9}, "candidates": ()}])
def test_without_a_number_of_images_or_scores_no_sampling_error_is_told(other):
    assert "one standard error" not in report.markdown(samples.results(**other), {})
