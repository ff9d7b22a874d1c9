"""What a study has found is read out of storage as it was written."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import optuna
import pytest
import study_samples as samples

from hpo.errors import NoResult
from hpo.progress import (
    at_equal_epochs,
    band,
    best_after,
    best_so_far,
    epochs_to_pass,
    epochs_to_reach,
)
from hpo.read_results import collect
from hpo.results import Phase, Trial, study_of


@pytest.fixture
def db(tmp_path):
    db = samples.stored(tmp_path)
    yield db
    db.close()


def test_collecting_returns_what_was_stored(db):
    found, wanted = collect(db, "toy"), samples.results()
    assert (found.metric, found.maximize, found.epochs) == ("val_accuracy", True, 8)
    for name, phase in wanted.phases.items():
        read = found.phase(name)
        assert [t.state for t in read.trials] == [t.state for t in phase.trials]
        assert [t.value for t in read.trials] == [t.value for t in phase.trials]
        assert [t.curve for t in read.trials] == [t.curve for t in phase.trials]
        assert [t.reason for t in read.trials] == [t.reason for t in phase.trials]


def test_registered_candidates_keep_their_scores_by_seed(db):
    found = {c.name: c for c in collect(db, "toy").candidates}
    for wanted in samples.results().candidates:
        assert found[wanted.name].val == wanted.val
        assert found[wanted.name].test == wanted.test


def test_a_sweep_is_read_from_its_ticket_and_its_epochs_are_counted(db):
    from storage import NewTicket

    db.tickets.write("toy", "toy/lr-range", "sweep", [NewTicket(0)])
    claim = db.tickets.claim("toy", "me", "here", 1, 60)
    sweep = samples.sweep()
    db.tickets.finish(claim.ticket.id, "me", "done", result={
        "rates": list(sweep.rates), "losses": list(sweep.losses), "smoothed": [], "pick": 0.01,
        "low": 0.001, "high": 0.1, "reason": "steep", "n_steps": 100, "epochs": 0.5})
    found = collect(db, "toy")
    assert found.sweep and found.sweep.pick == 0.01 and found.sweep.losses == sweep.losses
    assert found.phase("lr-range").n_epochs == found.phase("lr-range").trials[0].n_epochs + 0.5


def test_planned_trials_are_the_tickets_of_the_phase(db):
    from storage import NewTicket

    db.tickets.write("toy", "toy", "trial", [NewTicket(i) for i in range(7)])
    assert collect(db, "toy").phase("search").n_planned == 7


def test_a_study_that_is_not_there_is_told_with_those_that_are(db):
    with pytest.raises(NoResult, match="study 'tory' is not in this database .there are: toy"):
        collect(db, "tory")


def test_a_confirmation_without_registry_rows_is_read_from_its_trials(tmp_path):
    trials = tuple(Trial(i, "COMPLETE", 0.9 + i / 100, {"lr": 0.1}, curve=((0, 0.5),),
                         attrs={"candidate": "grid", "seed": 10 + i, "source_trial": 4})
                   for i in range(3))
    sample = samples.results(candidates=())
    phases = {**sample.phases, "confirm": Phase("confirm", "toy/confirm", trials)}
    db = samples.stored(tmp_path, sample=samples.results(candidates=(), phases=phases))
    (found,) = collect(db, "toy").candidates
    db.close()
    assert (found.name, found.source_trial) == ("grid", 4)
    assert found.val and dict(found.val.by_seed) == {10: 0.9, 11: 0.91, 12: 0.92}


def test_floats_come_back_with_all_their_digits(db):
    """C06: nothing is rounded on the way."""
    read = collect(db, "toy").phase("search").trials
    wanted = samples.results().phase("search").trials
    assert [t.params["lr"].hex() for t in read] == [t.params["lr"].hex() for t in wanted]


def test_epochs_spent_count_those_of_pruned_and_failed_trials():
    phase = Phase("search", "s", (
        Trial(0, "COMPLETE", 1.0, curve=((0, 1.0), (1, 1.0))),
        Trial(1, "PRUNED", 1.0, curve=((0, 1.0),)),
        Trial(2, "FAIL", attrs={"n_epochs": 3})), sweep_epochs=0.5)
    assert phase.n_epochs == 6.5


def test_a_diverged_epoch_is_spent_though_it_has_no_value():
    diverged = Trial(0, "PRUNED", 2.0, curve=((0, 2.0),), attrs={"n_epochs": 2},
                     reason="diverged at epoch 1")
    assert Phase("search", "s", (diverged,)).n_epochs == 2


def test_the_registry_and_the_table_count_epochs_alike(db):
    """A sweep counts for the part of an epoch it took, a diverged epoch for one."""
    from hpo.studies import epochs_spent
    from storage import NewTicket

    db.tickets.write("toy", "toy/lr-range", "sweep", [NewTicket(0)])
    claim = db.tickets.claim("toy", "me", "here", 1, 60)
    db.tickets.finish(claim.ticket.id, "me", "done", result={
        "rates": [0.1], "losses": [1.0], "smoothed": [], "pick": None, "low": None, "high": None,
        "reason": "", "n_steps": 8, "epochs": 0.8})
    study = optuna.load_study(study_name="toy", storage=db.studies)
    study.add_trial(optuna.create_trial(state=optuna.trial.TrialState.PRUNED, value=None,
                                        user_attrs={"n_epochs": 1}))
    found = collect(db, "toy")
    for phase, n_before in (("search", 132), ("lr-range", 8)):
        spent = epochs_spent(db, study_of("toy", phase))
        assert spent == found.phase(phase).n_epochs
        assert spent == pytest.approx(n_before + (1 if phase == "search" else 0.8))
    assert epochs_spent(db, "toy/nosuch") == 0


def test_a_retried_trial_counts_once():
    phase = Phase("search", "s", (
        Trial(0, "FAIL", reason="worker lost"), Trial(1, "COMPLETE", 1.0, attrs={"retry_of": 0})))
    assert phase.n_trials == 1


def test_best_so_far_follows_the_order_in_which_trials_ended():
    a, b = samples.trials(2, 0.9, prune=False)
    late = Trial(0, "COMPLETE", 0.5, curve=a.curve, ended_at=b.ended_at)
    early = Trial(1, "COMPLETE", 0.4, curve=b.curve, ended_at=a.ended_at)
    found = samples.results(search=(late, early))
    assert best_so_far(found, "search") == [(8, 0.4), (16, 0.5)]


def test_an_infinite_value_is_never_the_best():
    """C19."""
    trials = [Trial(i, "COMPLETE", v) for i, v in enumerate((float("inf"), 1.0, 2.0))]
    for maximize, best in ((True, 2), (False, 1)):
        found = samples.results(search=trials, maximize=maximize).best("search")
        assert found and found.number == best


def test_epochs_to_pass_are_none_where_the_search_never_passed_or_nothing_is_to_pass():
    low = [Trial(0, "COMPLETE", 0.1, curve=((0, 0.1),))]
    assert epochs_to_pass(samples.results(search=low), "grid") is None
    assert epochs_to_pass(samples.results(phases={}), "grid") is None
    assert epochs_to_pass(samples.results(), "grid") is not None


def test_the_grid_s_best_is_reached_by_an_equal_score_and_passed_by_a_better_one():
    best = samples.results().best("grid")
    assert best and best.score is not None
    bar = best.score
    low, equal, high = (Trial(i, "COMPLETE", value, curve=((0, value),))
                        for i, value in enumerate((0.1, bar, bar + 0.001)))
    tied, won = (samples.results(search=found) for found in ((low, equal), (low, equal, high)))
    assert (epochs_to_reach(tied, "grid"), epochs_to_pass(tied, "grid")) == (2, None)
    assert (epochs_to_reach(won, "grid"), epochs_to_pass(won, "grid")) == (2, 3)
    assert epochs_to_reach(samples.results(search=[low]), "grid") is None
    assert epochs_to_reach(samples.results(phases={}), "grid") is None


def at(start_s: float, end_s: float, **attrs: object) -> Trial:
    """Return a trial that ran from and to these seconds."""
    reason = str(attrs.pop("reason", ""))
    return Trial(0, "FAIL" if reason else "COMPLETE", 0.5, reason=reason, attrs=attrs,
                 started_at=samples.START + timedelta(seconds=start_s),
                 ended_at=samples.START + timedelta(seconds=end_s))


@pytest.mark.parametrize(("trials", "seconds"), [
    ([at(0, 10), at(10, 25)], 25), ([at(0, 10), at(5, 12), at(6, 8)], 12),
    ([at(0, 10), at(3600, 3605)], 15), ([], None),
    # Closed at the resume an hour later: it was lost, or measured by its own worker.
    ([at(0, 10), at(10, 3600, reason="worker lost: its process is gone"), at(3600, 3605)], 15),
    ([at(0, 3600, duration_s=4.5), at(3600, 3605)], 9.5),
    ([at(0, 10), at(10, 14, reason="interrupted: the run was stopped")], 14),
    ([at(0, 60, reason="worker lost: its process is gone")], None),
])
def test_the_time_of_a_phase_is_that_in_which_some_trial_ran(trials, seconds):
    """Neither a pause before a resume nor two workers at once count twice."""
    assert Phase("search", "s", tuple(trials)).duration_s == seconds


def test_a_sweep_without_a_pick_is_told_from_one_that_did_not_run():
    from dataclasses import replace

    assert samples.results(sweep=replace(samples.sweep(), pick=None)).no_pick
    assert not samples.results().no_pick and not samples.results(sweep=None).no_pick


@pytest.mark.parametrize(("other", "highest"), [
    ({}, 1.0), ({"metric": "val_loss", "maximize": False}, None), ({"metric": "val_f1"}, None)])
def test_the_highest_score_is_known_for_an_accuracy(other, highest):
    assert samples.results(**other).highest == highest


def test_importing_reports_loads_neither_torch_nor_optuna_nor_matplotlib():
    code = ("import sys, hpo.report, hpo.results, hpo.plots, hpo.dashboard, hpo.attachments\n"
            "print(sorted({'torch', 'optuna', 'matplotlib', 'scipy', 'rich', 'sqlalchemy'} "
            "& set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def spent(*trials: tuple[int, float | None], maximize: bool = True, phase: str = "random"):
    """Return a study whose phase has these trials: epochs and value, None for a failed one."""
    made = tuple(Trial(i, "FAIL" if value is None else "COMPLETE", value, ended_at=samples.START
                       + timedelta(seconds=i), attrs={"n_epochs": n})
                 for i, (n, value) in enumerate(trials))
    return samples.results(phases={phase: Phase(phase, phase, made)}, maximize=maximize)


def test_the_best_after_some_epochs_is_that_of_the_trials_that_had_ended():
    steps = [(8.0, 0.4), (16.0, 0.5)]
    assert [best_after(steps, n) for n in (7, 8, 15.9, 16, 99)] == [None, 0.4, 0.4, 0.5, 0.5]


def test_at_equal_epochs_the_search_is_what_it_was_when_it_had_spent_as_many():
    study = samples.results()
    steps = best_so_far(study, "search")
    n = study.phase("grid").n_epochs
    assert n < study.phase("search").n_epochs
    assert at_equal_epochs(study, "grid") == max(v for at, v in steps if at <= n)
    assert at_equal_epochs(study, "random") is None


def test_a_band_of_two_trials_is_what_chance_makes_of_them():
    """By hand, draws with replacement: half of the courses hold the better one after one trial,
    three quarters after two; so 80 % of them lie between the two values throughout."""
    found = band(spent((5, 0.2), (5, 0.6)), "random", n_points=4)
    assert found is not None and found.epochs == (2.5, 5.0, 7.5, 10.0)
    assert found.low == (None, 0.2, 0.2, 0.2)
    assert found.high == (None, 0.6, 0.6, 0.6)
    assert found.median[-1] == 0.6 and found.median[0] is None


def test_in_a_band_the_better_is_above_also_where_less_is_better():
    found = band(spent((5, 0.2), (5, 0.6), maximize=False), "random", n_points=2)
    assert found is not None
    assert (found.low[-1], found.median[-1], found.high[-1]) == (0.2, 0.2, 0.6)


def test_a_course_without_a_value_yet_stands_behind_all_others():
    """Nine trials of ten fail: after one trial most courses have no value at all."""
    found = band(spent(*[(1, None)] * 18, (1, 0.5), (1, 0.6)), "random", n_points=20)
    assert found is not None
    assert found.median[0] is None and found.high[0] in (None, 0.5)
    assert found.high[-1] == 0.6


def test_only_baselines_whose_trials_know_nothing_of_each_other_have_a_band():
    assert band(samples.results(), "search") is None and band(samples.results(), "grid")
    assert band(spent((5, 0.2)), "random") is None
