"""The running pruners decide exactly as Optuna's own, whatever the trials have reported."""

from __future__ import annotations

import math
import pickle
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.pruners import MedianPruner, PercentilePruner
from optuna.trial import TrialState

import storage
from hpo.pruners import RunningMedianPruner, RunningPercentilePruner, _Step
from storage import StudyStorage

ODD = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e308, -1e308, 5e-324)


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[StudyStorage]:
    opened = storage.open(f"sqlite:///{tmp_path / 'x.db'}")
    yield opened
    opened.close()


def reports(rng: random.Random, odd: float) -> dict[int, float]:
    """Return what a trial reports: most steps, in any order, some values not finite."""
    steps = [step for step in range(8) if rng.random() < 0.85]
    rng.shuffle(steps)
    return {step: rng.choice(ODD) if rng.random() < odd else rng.choice(
        (rng.gauss(0, 1), float(rng.randrange(4)))) for step in steps}


def ended(rng: random.Random, odd: float) -> Any:
    state = rng.choice((TrialState.COMPLETE,) * 3 + (TrialState.PRUNED, TrialState.FAIL))
    value = None if state == TrialState.FAIL else rng.random()
    return optuna.create_trial(state=state, value=value, intermediate_values=reports(rng, odd))


def decisions(ours: StudyStorage, seed: int) -> Iterator[tuple[bool, bool]]:
    """Yield the running pruner's decision and Optuna's, over one drawn study."""
    rng = random.Random(seed)
    odd = rng.choice((0.0, 0.05, 0.5))
    direction = rng.choice(("minimize", "maximize"))
    study = optuna.create_study(storage=ours, study_name=f"s{seed}", direction=direction)
    settings: dict[str, Any] = {
        "n_startup_trials": rng.choice((0, 1, 5)), "n_warmup_steps": rng.choice((0, 2, 5)),
        "interval_steps": rng.choice((1, 2, 3)), "n_min_trials": rng.choice((1, 3, 6))}
    percentile = rng.choice((0.0, 10.0, 25.0, 33.3, 50.0, 99.9, 100.0))
    pairs = [(RunningMedianPruner(**settings), MedianPruner(**settings)),
             (RunningPercentilePruner(percentile, **settings),
              PercentilePruner(percentile, **settings))]
    for _ in range(14):
        study.add_trial(ended(rng, odd))
        now: dict[int, float] = {}
        for step, value in sorted(reports(rng, odd).items()):
            now[step] = value
            trial = optuna.create_trial(state=TrialState.RUNNING, intermediate_values=dict(now))
            for running, plain in pairs:
                found = running.prune(study, trial)
                with warnings.catch_warnings():
                    # numpy warns of NaN and infinities; Optuna lets it.
                    warnings.simplefilter("ignore", RuntimeWarning)
                    yield found, bool(plain.prune(study, trial))


def test_every_decision_is_optuna_s(ours: StudyStorage) -> None:
    """Random histories, NaN and infinities, both directions, all settings."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found = [pair for seed in range(60) for pair in decisions(ours, seed)]
    assert [ours_ for ours_, _ in found] == [theirs for _, theirs in found]
    assert 300 < sum(theirs for _, theirs in found) < len(found) - 300


@pytest.mark.parametrize("seed", range(40))
def test_the_percentile_is_numpy_s_to_the_last_bit(seed: int) -> None:
    rng = random.Random(seed)
    step, values = _Step(), []
    for _ in range(60):
        values.append(rng.choice(ODD) if rng.random() < seed / 100 else rng.gauss(0, 10))
        step.add(values[-1])
        percentile = rng.choice((0, 25, 50, 75, 100, rng.uniform(0, 100)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            wanted = float(np.nanpercentile(np.array(values), percentile))
        found = step.percentile(percentile)
        assert found == wanted or (math.isnan(found) and math.isnan(wanted))


def test_what_this_process_has_ended_counts_at_once(ours: StudyStorage) -> None:
    """Of others' trials a question may miss the last quarter of a second."""
    study = optuna.create_study(storage=ours, study_name="s",
                                pruner=RunningMedianPruner(n_startup_trials=1))
    for value in (1.0, 2.0):
        trial = study.ask()
        trial.report(value, 0)
        assert trial.should_prune() is (value == 2.0)
        study.tell(trial, value)


def test_trials_of_other_processes_are_taken_in(ours: StudyStorage) -> None:
    other = StudyStorage(ours._link.url)
    study = optuna.create_study(storage=ours, study_name="s",
                                pruner=RunningMedianPruner(n_startup_trials=1))
    trial = study.ask()
    trial.report(2.0, 0)
    assert not trial.should_prune()
    optuna.load_study(study_name="s", storage=other).add_trial(
        optuna.create_trial(value=1.0, intermediate_values={0: 1.0}))
    ours._memory[study._study_id].refreshed_at -= 0.3
    assert trial.should_prune()
    other.close()


def test_questions_within_a_quarter_of_a_second_ask_the_database_nothing(
    ours: StudyStorage
) -> None:
    from sqlalchemy import event

    study = optuna.create_study(storage=ours, study_name="s")
    for _ in range(50):
        study.add_trial(optuna.create_trial(value=1.0, intermediate_values=dict.fromkeys(
            range(10), 1.0)))
    pruner = RunningMedianPruner()
    trial = optuna.create_trial(state=TrialState.RUNNING, intermediate_values={0: 0.5})
    assert not pruner.prune(study, trial)
    ours._memory[study._study_id].refreshed_at += 100
    seen: list[str] = []
    event.listen(ours._link.engine, "before_cursor_execute",
                 lambda c, cursor, text, *rest: seen.append(text))
    assert all(not pruner.prune(study, trial) for _ in range(100))
    assert seen == []


def test_a_study_made_again_is_not_judged_by_the_old_one_s_trials(ours: StudyStorage) -> None:
    """C43."""
    pruner = RunningMedianPruner(n_startup_trials=1)
    trial = optuna.create_trial(state=TrialState.RUNNING, intermediate_values={0: 5.0})
    for value, pruned in ((1.0, True), (9.0, False)):
        study = optuna.create_study(storage=ours, study_name="s", pruner=pruner)
        study.add_trial(optuna.create_trial(value=value, intermediate_values={0: value}))
        assert pruner.prune(study, trial) is pruned
        optuna.delete_study(study_name="s", storage=ours)


def test_on_any_other_storage_it_is_optuna_s_own_and_it_can_be_pickled() -> None:
    pruner = pickle.loads(pickle.dumps(RunningMedianPruner(n_startup_trials=1)))
    study = optuna.create_study(pruner=pruner)
    for value, pruned in ((1.0, False), (2.0, True)):
        trial = study.ask()
        trial.report(value, 0)
        assert trial.should_prune() is pruned
        study.tell(trial, value)
