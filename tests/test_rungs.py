"""Rung pruning: which epochs are rungs, and who goes on at one, counted anew in a plain way."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

import storage
from hpo.plan import plan
from hpo.pruners import RungPruner
from hpo.rungs import rungs_of
from hpo.settings import Settings
from storage import StudyStorage


@pytest.fixture(autouse=True)
def quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[StudyStorage]:
    opened = storage.open(f"sqlite:///{tmp_path / 'x.db'}")
    yield opened
    opened.close()


@pytest.mark.parametrize(("epochs", "rungs"), [
    (8, (1, 2)), (27, (3, 7)), (100, (12, 25)), (15, (2, 4)), (200, (25, 50)), (6, (1, 2)),
    (5, (1,)), (4, (1,)), (3, (1,)), (2, (1,)), (1, ())])
def test_rungs_are_an_eighth_and_a_quarter_of_the_epochs(
    epochs: int, rungs: tuple[int, ...]
) -> None:
    assert rungs_of(epochs) == rungs


def test_no_rung_lies_in_the_warm_up() -> None:
    """At a rung of 12 epochs the last of them is number 11, the first after a warm-up of 11."""
    assert [rungs_of(100, n) for n in (11, 12, 24, 25)] == [(12, 25), (25,), (25,), ()]


def pruned(others: list[Any], mine: dict[int, float], *, rungs: tuple[int, ...] = (1, 3),
           maximize: bool = True, n_startup: int = 1, reduction: float = 3.0) -> bool:
    """Return whether a running trial is pruned beside these ended ones."""
    study = optuna.create_study(direction="maximize" if maximize else "minimize")
    study.add_trials(others)
    trial = optuna.create_trial(state=TrialState.RUNNING, intermediate_values=mine)
    return RungPruner(rungs, reduction=reduction, n_startup=n_startup).prune(study, trial)


def whole(*values: float) -> Any:
    return optuna.create_trial(value=max(values), intermediate_values=dict(enumerate(values)))


def cut(*values: float) -> Any:
    return optuna.create_trial(state=TrialState.PRUNED, value=values[-1],
                               intermediate_values=dict(enumerate(values)))


def test_a_third_of_those_at_a_rung_goes_on() -> None:
    """Of six, two: the sixth is kept as the second best and pruned as the third."""
    others = [whole(v, v, v) for v in (0.1, 0.2, 0.3, 0.4, 0.5)]
    assert not pruned(others, {0: 0.45})
    assert pruned(others, {0: 0.35})


def test_fewer_is_better_where_the_study_minimizes() -> None:
    others = [whole(v, v, v) for v in (0.1, 0.2, 0.3, 0.4, 0.5)]
    assert not pruned(others, {0: 0.15}, maximize=False)
    assert pruned(others, {0: 0.25}, maximize=False)


def test_pruned_trials_stand_at_the_rungs_that_they_reached_and_at_no_other() -> None:
    """By the median of the COMPLETE ones alone, 0.5, the bar would rise with each survivor."""
    others = [whole(0.5, 0.5, 0.5), *[cut(0.1)] * 5]
    assert not pruned(others, {0: 0.4})
    # At the second rung there are two others, and a third of three goes on.
    assert pruned([*others, whole(0.1, 0.7, 0.7)], {0: 0.6, 1: 0.4, 2: 0.45})
    assert not pruned([*others, whole(0.1, 0.7, 0.7)], {0: 0.6, 1: 0.4, 2: 0.45}, n_startup=3)


def test_equal_marks_are_kept() -> None:
    assert not pruned([whole(0.5, 0.5, 0.5)] * 20, {0: 0.5})


def test_nobody_is_pruned_beside_fewer_than_the_start_up() -> None:
    others = [whole(0.9, 0.9, 0.9)] * 4
    assert not pruned(others, {0: 0.1}, n_startup=5)
    assert pruned([*others, cut(0.2)], {0: 0.1}, n_startup=5)


def test_between_rungs_nobody_is_asked() -> None:
    others = [whole(0.9, 0.9, 0.9, 0.9)] * 6
    assert pruned(others, {0: 0.1})
    assert not pruned(others, {0: 0.1, 1: 0.1})
    assert pruned(others, {0: 0.1, 1: 0.1, 2: 0.1})
    assert not pruned(others, {0: 0.1, 1: 0.1, 2: 0.1, 3: 0.1})


def test_a_report_that_steps_over_a_rung_is_asked_there() -> None:
    """Its trial reports every second epoch."""
    others = [optuna.create_trial(value=0.9, intermediate_values={1: 0.9, 3: 0.9})] * 6
    assert pruned(others, {1: 0.1}, rungs=(1,))
    assert not pruned(others, {1: 0.1, 3: 0.1}, rungs=(1,))


def test_a_complete_trial_that_stopped_early_stands_at_later_rungs_with_its_best() -> None:
    others = [whole(0.7, 0.9)] * 6
    assert pruned(others, {0: 0.9, 1: 0.8, 2: 0.8}, rungs=(3,)) is False
    assert pruned(others, {0: 0.5, 1: 0.6, 2: 0.8}, rungs=(3,))


def naive(trials: list[Any], mine: dict[int, float], rungs: tuple[int, ...], sign: int,
          reduction: float, n_startup: int) -> bool:
    """Count it as the docstring says it, trial by trial."""
    def mark(reports: dict[int, float], rung: int, state: Any) -> float | None:
        at = sorted(step for step in reports if step >= rung - 1)
        if not at and state == TrialState.PRUNED:
            return None
        upto = [v for step, v in reports.items() if not at or step <= at[0]]
        return max((sign * v for v in upto if not math.isnan(v)), default=-math.inf)

    last = max(mine)
    reached = [rung for rung in rungs if rung - 1 <= last]
    if not reached or any(reached[-1] - 1 <= step < last for step in mine):
        return False
    marks = [m for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED)
             and (m := mark(t.intermediate_values, reached[-1], t.state)) is not None]
    own = mark(mine, reached[-1], TrialState.RUNNING)
    if len(marks) < n_startup:
        return False
    assert own is not None
    return own == -math.inf or sum(m > own for m in marks) >= (len(marks) + 1) / reduction


@pytest.mark.parametrize("seed", range(12))
def test_every_decision_is_that_of_the_plain_count(ours: StudyStorage, seed: int) -> None:
    """Irregular steps, NaN, all states; on our storage and on Optuna's own."""
    rng = random.Random(seed)
    sign = rng.choice((1, -1))
    rungs = tuple(sorted(rng.sample(range(1, 8), 3)))
    pruner = RungPruner(rungs, reduction=rng.choice((1.5, 2.0, 3.0)), n_startup=rng.choice((0, 3)))
    studies = [optuna.create_study(storage=kept, study_name="s", direction=(
        "maximize" if sign > 0 else "minimize")) for kept in (ours, None)]
    found = []

    def reports() -> dict[int, float]:
        steps = sorted(step for step in range(rng.randrange(1, 9)) if rng.random() < 0.8) or [0]
        return {step: math.nan if rng.random() < 0.1 else rng.randrange(9) / 8 for step in steps}

    for _ in range(25):
        state = rng.choice((TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL))
        ended = optuna.create_trial(state=state, intermediate_values=reports(),
                                    value=None if state == TrialState.FAIL else 0.5)
        for study in studies:
            study.add_trial(ended)
        mine = reports()
        running = optuna.create_trial(state=TrialState.RUNNING, intermediate_values=mine)
        said = [pruner.prune(study, running) for study in studies]
        assert said == [naive(studies[1].trials, mine, rungs, sign, pruner._reduction,
                              pruner._n_startup)] * 2
        found.append(said[0])
    assert not all(found)


def test_a_study_made_again_is_not_judged_by_the_old_one_s_trials(ours: StudyStorage) -> None:
    """C43."""
    pruner = pickle.loads(pickle.dumps(RungPruner((1,), reduction=3.0, n_startup=1)))
    trial = optuna.create_trial(state=TrialState.RUNNING, intermediate_values={0: 5.0})
    for value, is_bad in ((1.0, True), (9.0, False)):
        study = optuna.create_study(storage=ours, study_name="s")
        study.add_trial(optuna.create_trial(value=value, intermediate_values={0: value}))
        assert pruner.prune(study, trial) is is_bad
        optuna.delete_study(study_name="s", storage=ours)


def test_a_question_looks_at_no_earlier_trial_and_asks_the_database_nothing(
    ours: StudyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sqlalchemy import event

    study = optuna.create_study(storage=ours, study_name="s", direction="maximize")
    study.add_trials([whole(0.5, 0.6, 0.7, 0.8)] * 40)
    pruner = RungPruner((1, 2))
    trial = optuna.create_trial(state=TrialState.RUNNING, intermediate_values={0: 0.1})
    assert pruner.prune(study, trial)
    ours._memory[study._study_id].refreshed_at += 100
    seen: list[Any] = []
    event.listen(ours._link.engine, "before_cursor_execute",
                 lambda c, cursor, text, *rest: seen.append(text))
    monkeypatch.setattr(optuna.study.Study, "get_trials", lambda *a, **k: seen.append("trials"))
    assert all(pruner.prune(study, trial) for _ in range(100))
    assert seen == []


@pytest.mark.parametrize(("epochs", "given", "how"), [
    (100, {}, "tpe, pruning after 12 and 25 epochs"),
    (100, {"prune_warmup": 12}, "tpe, pruning after 25 epochs"),
    (4, {}, "tpe, pruning after 1 epoch"), (1, {}, "tpe, no pruning in so few epochs"),
    (8, {"pruner": "median"}, "tpe, median pruning"), (8, {"pruner": "none"}, "tpe")])
def test_a_run_says_beforehand_when_it_will_prune(
    epochs: int, given: dict[str, Any], how: str
) -> None:
    spec = {"epochs": epochs, "space": {}, "has_lr_range": False, "has_build": False}
    asked = Settings("s", "s", Path(), "", phases=("search",), **given).resolved(spec, None)
    assert [planned.how for planned in plan(asked, spec, None)] == [how]
