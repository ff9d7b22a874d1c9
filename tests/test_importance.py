"""Importance takes pruned trials for what they are: bad, and seen for a while."""

from __future__ import annotations

import random
import statistics
from typing import Any

import optuna
import pytest
import study_samples as samples
from optuna.distributions import FloatDistribution

from hpo.importance import about, importance, ranked
from hpo.results import Phase, Results, Trial

SPACE = {name: FloatDistribution(0, 1) for name in ("lr", "b", "c")}


def search_of(*trials: Trial, audits: tuple[Trial, ...] = (), **other) -> Results:
    """Return a study whose search has these trials."""
    phases = {"search": Phase("search", "toy", trials),
              "audit": Phase("audit", "toy/audit", audits)}
    return samples.results(phases=phases, candidates=[], **other)


def trial(number: int, *values: float, cut: bool = False, **other) -> Trial:
    """Return a trial with these values an epoch, its best one its own."""
    state, reason = ("PRUNED", f"median at epoch {len(values) - 1}") if cut else ("COMPLETE", "")
    return Trial(number, state, max(values), reason=reason, curve=tuple(enumerate(values)),
                 **other)


def order(results: Results) -> list[list[int]]:
    """Return the numbers of the trials from the worst to the best, ties together."""
    by_rank: dict[float, list[int]] = {}
    for one, rank in ranked(results):
        by_rank.setdefault(rank, []).append(one.number)
    return [by_rank[rank] for rank in sorted(by_rank)]


def tuned(seed: int, n: int = 100, *, prune: bool) -> Results:
    """Return a random search whose rate decides what a median rule prunes, and `b` the rest.

    With and without pruning the trials are the same, but for where they end.
    """
    known: list[tuple[float, ...]] = []
    found = []
    for number in range(n):
        rng = random.Random(f"{seed} {number}")
        params = {name: rng.random() for name in SPACE}
        top = 0.9 - 0.8 * max(0.0, abs(params["lr"] - 0.5) - 0.1) + 0.05 * params["b"]
        values = tuple(top * (1 - 0.5 ** (e + 1)) + rng.gauss(0, 0.002) for e in range(6))
        cut = next((e for e in range(1, 5) if prune and len(known) >= 5 and max(
            values[:e + 1]) < statistics.median(other[e] for other in known)), None)
        if cut is None:
            known.append(values)
        shown = values if cut is None else values[:cut + 1]
        found.append(trial(number, *shown, cut=cut is not None, params=params,
                           distributions=SPACE))
    return search_of(*found)


def by_optuna(results: Results) -> dict[str, float]:
    """Return what Optuna itself says, which reads COMPLETE trials only."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    study.add_trials([optuna.create_trial(params=dict(t.params), distributions={**SPACE},
                                          value=t.score)
                      for t in results.phase("search").trials if t.score is not None])
    return optuna.importance.get_param_importances(study)


@pytest.mark.parametrize("seed", range(5))
def test_the_param_that_decides_what_is_pruned_matters_most(seed):
    """Optuna's own importance of the same study takes the param of the survivors for that."""
    pruned, whole = tuned(seed, 200, prune=True), tuned(seed, 200, prune=False)
    ours, truth = importance(pruned)["importance"], importance(whole)["importance"]
    theirs = by_optuna(pruned)
    assert list(truth)[0] == list(ours)[0] == "lr" and theirs["b"] > theirs["lr"]
    assert abs(ours["lr"] - truth["lr"]) < truth["lr"] - theirs["lr"]


def test_ranks_of_pruned_trials_agree_with_those_that_they_would_have_had():
    """Spearman's correlation with the ranks of the same trials, trained to their ends."""
    from scipy.stats import spearmanr

    pruned, whole = tuned(7, prune=True), tuned(7, prune=False)
    assert sum(t.state == "PRUNED" for t in pruned.phase("search").trials) > 40
    ours = [rank for _, rank in ranked(pruned)]
    truth = [rank for _, rank in ranked(whole)]
    found: Any = spearmanr(ours, truth)
    assert found.statistic > 0.95


def test_a_pruned_trial_stands_where_its_value_stood_among_those_that_went_on():
    """By hand: at epoch 0 they had 0.1, 0.2, 0.3, and ended the other way round."""
    whole = [trial(0, 0.1, 0.9), trial(1, 0.2, 0.8), trial(2, 0.3, 0.7)]
    assert order(search_of(*whole, trial(3, 0.25, cut=True))) == [[2], [1], [3], [0]]
    assert order(search_of(*whole, trial(3, 0.05, cut=True))) == [[3], [2], [1], [0]]
    assert order(search_of(*whole, trial(3, 0.2, cut=True))) == [[2], [1, 3], [0]]


def test_trials_pruned_at_different_epochs_are_compared_at_the_earlier_one():
    late, early = trial(1, 0.2, 0.3, cut=True), trial(2, 0.3, cut=True)
    assert order(search_of(trial(0, 0.5, 0.6, 0.9), late, early)) == [[1], [2], [0]]


def test_several_that_are_below_all_are_told_apart_by_their_values():
    found = [trial(0, 0.5, 0.9), *(trial(i, i / 100, cut=True) for i in (3, 1, 2))]
    assert order(search_of(*found)) == [[1], [2], [3], [0]]


def test_less_is_better_where_the_metric_is_minimized():
    found = [Trial(0, "COMPLETE", 0.1, curve=((0, 0.5), (1, 0.1))),
             Trial(1, "COMPLETE", 0.2, curve=((0, 0.4), (1, 0.2))),
             Trial(2, "PRUNED", 0.9, reason="median at epoch 0", curve=((0, 0.9),))]
    assert order(search_of(*found, metric="loss", maximize=False)) == [[2], [1], [0]]


def test_a_trial_that_diverged_is_below_all_and_a_failed_one_is_not_there():
    nan = Trial(1, "PRUNED", 0.95, reason="diverged at epoch 1",
                curve=((0, 0.95), (1, float("nan"))))
    found = [trial(0, 0.5, 0.9), nan, trial(2, 0.1, cut=True), *samples.failed(1)]
    assert order(search_of(*found)) == [[1], [2], [0]]


def test_an_audited_trial_ranks_by_the_end_that_it_came_to():
    found = [trial(0, 0.5, 0.8), trial(1, 0.6, 0.7), trial(2, 0.1, cut=True)]
    late = trial(0, 0.1, 0.75, attrs={"audit_of": 2})
    assert order(search_of(*found)) == [[2], [1], [0]]
    assert order(search_of(*found, audits=(late,))) == [[1], [2], [0]]


def test_a_search_of_pruned_trials_alone_has_an_importance():
    found = [trial(i, i / 10, cut=True, params={"lr": i / 10}, distributions={
        "lr": SPACE["lr"]}) for i in range(9)]
    assert importance(search_of(*found)) == {"importance": {"lr": 1.0}}


def test_what_the_importance_is_of_is_said():
    found = [*(trial(i, 0.5, 0.9) for i in range(3)), trial(3, 0.1, cut=True), *samples.failed(2)]
    assert "of 4 trials" in about(search_of(*found)) and "1 of them" in about(search_of(*found))
    assert "pruned" not in about(search_of(*found[:3]))
