"""Pruned trials that are trained to their end, beside the search, and what they say of pruning."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import study_samples as samples
from commands import hpo, states, trials, write, write_text
from scipy.stats import binomtest

from hpo.audit import Audit, Rule, audit, sentence, wilson
from hpo.queue import is_audited
from hpo.results import Phase, Results, Trial

MODULE = """
from hpo import Float, Run, StudySpec
from hpo.train import MLP, AdamW, Recipe, digits

def build(run: Run, *, lr: float) -> Recipe:
    return Recipe(data=digits(run), model=MLP(hidden=16, dropout=0.2), optimizer=AdamW(lr=lr),
                  batch_size=256)

STUDY = StudySpec(space={"lr": Float(1e-5, 1e-1, log=True)}, build=build,
                  maximize="val_accuracy", epochs=6, pruner="median", prune_startup=2,
                  prune_warmup=1,
                  sampler="random")
"""
SEARCH = ("run", "--study", "s", "--phases", "search", "--workers", 1, "--n-trials", 16)


def test_an_audited_trial_trains_what_was_missing_to_the_end_of_an_undisturbed_one(
    tmp_path: Path
) -> None:
    """Out of the search's sight, which has the same trials without an audit."""
    write_text(tmp_path, "s", MODULE)
    out = hpo(tmp_path, *SEARCH, "--audit-fraction", 1).stdout
    searched, audited = trials(tmp_path, "s"), trials(tmp_path, "s/audit")
    pruned = [t for t in searched if t.state.name == "PRUNED"]
    assert len(searched) == 16 and len(pruned) >= 3
    assert f"audit: {len(pruned)} to do" in out
    assert states(audited) == ["COMPLETE"] * len(pruned)
    assert [t.user_attrs["audit_of"] for t in audited] == [t.number for t in pruned]
    assert [t.params for t in audited] == [t.params for t in pruned]
    for early, late in zip(pruned, audited, strict=True):
        n = len(early.intermediate_values)
        assert late.user_attrs["n_epochs_taken_over"] == n
        assert {e: late.intermediate_values[e] for e in range(n)} == early.intermediate_values
    # No state of a trial is left, and no weights of an audited one are kept.
    assert not list((tmp_path / "hpo-runs" / "artifacts").rglob("*.state"))
    assert not (tmp_path / "hpo-runs" / "artifacts" / "s" / "audit").exists()
    other = tmp_path / "other"
    other.mkdir()
    write_text(other, "s", MODULE)
    hpo(other, *SEARCH, "--pruner", "none")
    whole = trials(other, "s")
    for early, late in zip(pruned, audited, strict=True):
        assert late.intermediate_values == whole[early.number].intermediate_values
        assert late.value == whole[early.number].value
    # The same command adds nothing, and an audited trial is one like others.
    again = hpo(tmp_path, *SEARCH, "--audit-fraction", 1).stdout
    assert f"audit: nothing to do, {len(pruned)} done already" in again
    assert len(trials(tmp_path, "s/audit")) == len(pruned)
    assert "the same to the last bit" in hpo(tmp_path, "replay", "audit/0", "--study", "s").stdout
    shown = hpo(tmp_path, "show", "audit/0", "--study", "s").stdout
    assert f"those of search trial {pruned[0].number}, which was pruned" in shown
    hpo(tmp_path, "report", "--study", "s")
    report = (tmp_path / "hpo-runs/reports/s/report.md").read_text()
    assert "## Was pruning right?" in report and f"{len(pruned)} of them" in report


def test_a_loop_of_ones_own_is_audited_from_its_first_epoch(tmp_path: Path) -> None:
    median = "pruner='median', prune_startup=1, prune_warmup=1"
    write(tmp_path, "s", epochs=4, more=median, body="""
        for epoch in range(run.epochs):
            yield {"loss": x + 1 / (1 + epoch)}
    """)
    hpo(tmp_path, *SEARCH, "--audit-fraction", 1, "--sampler", "random")
    pruned = [t for t in trials(tmp_path, "s") if t.state.name == "PRUNED"]
    audited = trials(tmp_path, "s/audit")
    assert pruned and states(audited) == ["COMPLETE"] * len(pruned)
    for early, late in zip(pruned, audited, strict=True):
        assert late.params == early.params and len(late.intermediate_values) == 4


def test_by_itself_one_pruned_trial_in_twenty_is_audited() -> None:
    drawn = [is_audited(7, idx, 0.05) for idx in range(10_000)]
    assert 400 <= sum(drawn) <= 600
    assert not any(is_audited(7, idx, 0.0) for idx in range(1_000))
    assert all(is_audited(7, idx, 1.0) for idx in range(1_000))
    # More trials leave those that were drawn as they are.
    assert [idx for idx in range(50) if is_audited(7, idx, 0.2)] == [
        idx for idx in range(100) if is_audited(7, idx, 0.2) and idx < 50]


@pytest.mark.parametrize("value", ["-0.1", "1.5", "nan"])
def test_a_fraction_outside_of_0_and_1_is_refused(tmp_path: Path, value: str) -> None:
    write(tmp_path, "s")
    done = hpo(tmp_path, *SEARCH, "--audit-fraction", value, code=2)
    assert "--audit-fraction must be from 0 to 1" in done.stderr


@pytest.mark.parametrize(("k", "n"), [(0, 1), (1, 1), (0, 10), (3, 10), (10, 10), (17, 200)])
def test_the_interval_of_a_fraction_is_wilsons(k: int, n: int) -> None:
    known = binomtest(k, n).proportion_ci(0.95, method="wilson")
    assert wilson(k, n) == pytest.approx((known.low, known.high), abs=1e-4)


def study(n: int = 60, *, seed: int = 0, crossing: float = 0.0) -> Results:
    """Return a study whose pruned trials are all audited.

    A trial's quality is its end; `crossing` of the trials begin far below what they end at.
    """
    rng = random.Random(seed)
    search, audits = [], []
    for number in range(n):
        end, slow = rng.random(), rng.random() < crossing
        # Below any other to the fourth epoch.
        curve = tuple((e, (-1.0 if slow and e < 4 else end) - 0.1 / (e + 1)) for e in range(8))
        whole = Trial(number, "COMPLETE", max(v for _, v in curve), {}, "", curve,
                      samples.START, samples.START, {"n_epochs": 8})
        known = sorted(t.curve[2][1] for t in search if t.state == "COMPLETE")
        if number >= 5 and curve[2][1] < known[len(known) // 2]:
            search.append(replace(whole, state="PRUNED", curve=curve[:3], value=curve[2][1],
                                  reason="median at epoch 2", attrs={"n_epochs": 3}))
            audits.append(replace(whole, number=len(audits), attrs={
                "n_epochs": 8, "n_epochs_taken_over": 3, "audit_of": number}))
        else:
            search.append(whole)
    return Results("s", "val_accuracy", True, 8, phases={
        "search": Phase("search", "s", tuple(search)),
        "audit": Phase("audit", "s/audit", tuple(audits))},
        settings={"prune_warmup": 2, "prune_startup": 5, "pruner": "median"})


def test_where_curves_do_not_cross_no_prune_is_false() -> None:
    found = audit(study())
    assert found is not None
    assert found.n_audited == found.n_pruned > 20 and found.n_false == found.n_top == 0
    assert found.n_saved == 5 * found.n_pruned == found.n_spent
    assert found.false_fraction == 0.0 and found.interval is not None
    assert found.interval[1] == pytest.approx(wilson(0, found.n_pruned)[1])
    # The order is that of the first epoch, so an earlier warm-up saves more and harms nobody.
    assert found.better is not None and found.better.warmup == 0
    assert "--prune-warmup 0 would have saved" in sentence(found)


def test_where_good_trials_begin_badly_the_audit_tells_and_a_later_warmup_is_better() -> None:
    found = audit(study(200, crossing=0.3))
    assert found is not None
    by_hand = study(200, crossing=0.3)
    middle = sorted(t.value or 0 for t in by_hand.phase("search").trials
                    if t.state == "COMPLETE")
    half = (middle[(len(middle) - 1) // 2] + middle[len(middle) // 2]) / 2
    assert found.n_false == sum((t.value or 0) > half for t in by_hand.phase("audit").trials) > 2
    used = next(rule for rule in found.rules if rule.warmup == 2)
    late = next(rule for rule in found.rules if rule.warmup == 4)
    assert used.n_false > 2 and late.n_false == 0 and late.n_pruned > 30


@pytest.mark.parametrize(("rules", "warmup"), [
    # (warm-up, pruned, false, saved): the one in use is 2.
    ([(1, 10, 5, 0.6), (2, 10, 4, 0.5), (3, 10, 1, 0.3), (4, 10, 0, 0.2)], 3),
    ([(1, 10, 1, 0.6), (2, 10, 0, 0.5), (3, 10, 0, 0.3)], 1),
    ([(1, 10, 1, 0.51), (2, 10, 0, 0.5)], None),
    ([(1, 10, 5, 0.6), (2, 10, 1, 0.5)], None),
    ([(1, 10, 5, 0.6), (2, 10, 2, 0.5)], None),
])
def test_the_better_warmup_saves_most_among_the_harmless(
    rules: list[tuple[int, int, int, float]], warmup: int | None
) -> None:
    found = Audit(10, 10, 1, 0, 50, 50, 2, tuple(
        Rule(w, 30, n, false, saved) for w, n, false, saved in rules))
    assert (found.better and found.better.warmup) == warmup


def test_the_rule_that_was_used_prunes_again_what_it_pruned() -> None:
    results = study(120, crossing=0.2)
    found = audit(results)
    assert found is not None
    used = next(rule for rule in found.rules if rule.warmup == 2)
    assert used.n_trials == 120 and abs(used.n_pruned - found.n_pruned) <= 6


def test_rungs_are_told_again_with_each_warmup_that_leaves_out_one() -> None:
    """Of 8 epochs: after 1 and 2. The order of this study's first epochs is that of its ends."""
    found = audit(replace(study(80), settings={
        "prune_warmup": 0, "prune_startup": 5, "pruner": "rungs"}))
    assert found is not None and [rule.warmup for rule in found.rules] == [0, 1, 2]
    whole = study(80)
    ends = {t.number: t.value or 0.0 for t in whole.phase("search").trials}
    ends.update({int(t.attrs["audit_of"]): t.value or 0.0 for t in whole.phase("audit").trials})
    # By hand: at each rung the better half of all that came as far.
    at_first: list[float] = []
    at_second: list[float] = []
    n_cut = [0, 0]
    for number in sorted(ends):
        end = ends[number]
        if len(at_first) >= 5 and 2 * sum(v > end for v in at_first) >= len(at_first) + 1:
            n_cut[0] += 1
        else:
            is_cut = len(at_second) >= 5 and (
                2 * sum(v > end for v in at_second) >= len(at_second) + 1)
            n_cut[1] += is_cut
            at_second.append(end)
        at_first.append(end)
    rule = found.rules[0]
    assert (rule.n_trials, rule.n_pruned, rule.n_false) == (80, sum(n_cut), 0)
    assert rule.saved_fraction == pytest.approx((7 * n_cut[0] + 6 * n_cut[1]) / (80 * 8))
    assert found.rules[2].n_pruned == 0


@pytest.mark.parametrize("phases", [
    {}, {"search": Phase("search", "s", samples.trials(10, 0.9, prune=False))},
    {"search": Phase("search", "s", samples.failed(3))}])
def test_without_a_pruned_trial_there_is_nothing_to_say(phases: dict[str, Phase]) -> None:
    assert audit(samples.results(phases=phases)) is None


def test_a_study_none_of_whose_prunes_was_drawn_says_so() -> None:
    results = study()
    found = audit(replace(results, phases={"search": results.phase("search")}))
    assert found is not None and found.interval is None and not found.rules
    assert "none of them was drawn for the audit (--audit-fraction)" in sentence(found)
