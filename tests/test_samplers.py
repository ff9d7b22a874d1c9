"""The bounded TPE weighs what Optuna's TPE calls the best, and as many others as it is told."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from numpy.random import RandomState
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.samplers._tpe.sampler import _split_trials, default_gamma
from optuna.trial import TrialState

import storage
from hpo.samplers import ENDED, BoundedTPESampler, _ranked
from storage import StudyStorage

SPACE = {"x": FloatDistribution(1e-4, 1.0, log=True), "n": IntDistribution(1, 9),
         "c": CategoricalDistribution(["a", "b", "c"])}


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[StudyStorage]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    opened = storage.open(f"sqlite:///{tmp_path / 'x.db'}")
    yield opened
    opened.close()


def ended(rng: random.Random) -> Any:
    """Return a trial of any end; equal values and trials without a report come too."""
    state = rng.choice((TrialState.COMPLETE,) * 3 + (TrialState.PRUNED,) * 2 + (TrialState.FAIL,))
    value = rng.choice((0.5, rng.gauss(0, 1), float("inf")))
    steps = range(rng.randrange(6))
    return optuna.create_trial(
        state=state, value=value if state == TrialState.COMPLETE else None, distributions=SPACE,
        params={"x": 10 ** rng.uniform(-4, 0), "n": rng.randint(1, 9), "c": rng.choice("abc")},
        intermediate_values={s: rng.choice((float("nan"), 0.1, rng.random())) for s in steps})


def filled(ours: StudyStorage, n: int, seed: int, direction: Any = "minimize") -> optuna.Study:
    study = optuna.create_study(storage=ours, study_name=f"s{seed}", direction=direction)
    rng = random.Random(seed)
    for _ in range(n):
        study.add_trial(ended(rng))
    return study


def drawn(study: optuna.Study, sampler: TPESampler) -> dict[str, Any]:
    study.sampler = sampler
    trial = study.ask(dict(SPACE))
    study.tell(trial, state=TrialState.FAIL)
    return trial.params


@pytest.mark.parametrize("seed", range(3))
def test_a_study_of_fewer_trials_is_drawn_from_as_by_optuna(
    ours: StudyStorage, seed: int
) -> None:
    study = filled(ours, 200, seed)
    for k in range(3):
        assert drawn(study, BoundedTPESampler(seed=k)) == drawn(study, TPESampler(seed=k))


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_are_those_of_optuna_and_the_rest_is_a_part_of_its_rest(
    ours: StudyStorage, seed: int, direction: str
) -> None:
    study = filled(ours, 420, seed, direction)
    trials = study.get_trials(deepcopy=False, states=ENDED)
    below, _ = _split_trials(study, trials, default_gamma(len(trials)))
    ranked = _ranked(study)
    assert ranked is not None
    weighed = ranked.weighed(260, RandomState(seed))
    ours_below, ours_above = _split_trials(study, weighed, default_gamma(len(weighed)))
    assert len(trials) > 300 and len(weighed) == 260
    assert [t.number for t in ours_below] == [t.number for t in below]
    assert {t.number for t in ours_above} <= {t.number for t in trials}
    assert len({t.number for t in weighed}) == 260


def test_equal_seeds_draw_equal_params_from_a_large_study(ours: StudyStorage) -> None:
    """Whichever worker draws: the sample of the rest is seeded too."""
    study = filled(ours, 420, 7)
    first = drawn(study, BoundedTPESampler(seed=3, n_weighed=250))
    second = drawn(study, BoundedTPESampler(seed=3, n_weighed=250))
    other = drawn(study, BoundedTPESampler(seed=4, n_weighed=250))
    assert first == second != other


def test_a_large_study_is_still_learned_from(ours: StudyStorage) -> None:
    study = optuna.create_study(storage=ours, study_name="s")
    rng = random.Random(0)
    unit = FloatDistribution(0.0, 1.0)
    for _ in range(600):
        x = rng.random()
        study.add_trial(optuna.create_trial(value=abs(x - 0.3), params={"x": x},
                                            distributions={"x": unit}))
    found = []
    for k in range(15):
        study.sampler = BoundedTPESampler(seed=k, n_weighed=250)
        trial = study.ask({"x": unit})
        found.append(abs(trial.params["x"] - 0.3))
        study.tell(trial, state=TrialState.FAIL)
    assert sorted(found)[7] < 0.03


@pytest.mark.parametrize("why", ["objectives", "constraints", "storage", "hyperband"])
def test_studies_of_another_kind_are_drawn_from_as_by_optuna(
    ours: StudyStorage, why: str
) -> None:
    kinds: dict[str, Any] = {"objectives": {"directions": ["minimize"] * 2},
                             "hyperband": {"pruner": optuna.pruners.HyperbandPruner()}}
    study = optuna.create_study(storage=None if why == "storage" else ours, study_name="s",
                                **kinds.get(why, {}))
    rng = random.Random(1)
    for _ in range(300):
        x = rng.random()
        values = [x, 1 - x] if why == "objectives" else [x]
        study.add_trial(optuna.create_trial(
            values=values, params={"x": x}, distributions={"x": FloatDistribution(0.0, 1.0)},
            system_attrs={"constraints": [x - 0.5]} if why == "constraints" else {}))
    sampler = BoundedTPESampler(seed=0, n_weighed=250)
    assert sampler._bounded(study) is study
