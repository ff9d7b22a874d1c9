"""The bounded TPE draws what Optuna's own does, and weighs a part of a large study."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.samplers._tpe.sampler import _split_trials, default_gamma
from optuna.trial import TrialState

import storage
from hpo.tpe import ENDED, BoundedTPESampler
from storage import StudyStorage

SPACE = {"x": FloatDistribution(1e-4, 1.0, log=True), "n": IntDistribution(1, 9),
         "c": CategoricalDistribution(["a", "b", "c"]),
         "m": IntDistribution(1, 512, log=True), "s": FloatDistribution(0, 1, step=0.25)}
UNIT = FloatDistribution(0.0, 1.0)


@pytest.fixture
def ours(tmp_path: Path, sqlite_template: Path) -> Iterator[StudyStorage]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file = tmp_path / "x.db"
    file.write_bytes(sqlite_template.read_bytes())
    opened = storage.open(f"sqlite:///{file}")
    yield opened
    opened.close()


def ended(rng: random.Random, *, with_depth: bool = False) -> Any:
    """Return a trial of any end; equal values and trials without a report come too."""
    state = rng.choice((TrialState.COMPLETE,) * 3 + (TrialState.PRUNED,) * 2 + (TrialState.FAIL,))
    value = rng.choice((0.5, rng.gauss(0, 1), float("inf")))
    steps = range(rng.randrange(6))
    space: dict[str, Any] = dict(SPACE)
    params = {"x": 10 ** rng.uniform(-4, 0), "n": rng.randint(1, 9), "c": rng.choice("abc"),
              "m": 2 ** rng.randint(0, 9), "s": rng.randint(0, 4) / 4}
    if with_depth and rng.random() < 0.5:
        space["depth"], params["depth"] = IntDistribution(1, 5), rng.randint(1, 5)
    return optuna.create_trial(
        state=state, value=value if state == TrialState.COMPLETE else None, distributions=space,
        params=params,
        intermediate_values={s: rng.choice((float("nan"), 0.1, rng.random())) for s in steps})


def filled(
    ours: StudyStorage, n: int, seed: int, direction: Any = "minimize", *,
    with_depth: bool = False,
) -> optuna.Study:
    study = optuna.create_study(storage=ours, study_name=f"s{seed}", direction=direction)
    rng = random.Random(seed)
    for _ in range(n):
        study.add_trial(ended(rng, with_depth=with_depth))
    return study


def drawn(study: optuna.Study, sampler: TPESampler, **more: Any) -> dict[str, Any]:
    study.sampler = sampler
    trial = study.ask({**SPACE, **more})
    study.tell(trial, state=TrialState.FAIL)
    return trial.params


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
@pytest.mark.parametrize("seed", range(4))
def test_a_study_of_fewer_trials_is_drawn_from_exactly_as_by_optuna(
    ours: StudyStorage, seed: int, direction: str
) -> None:
    """To the last bit: with equal values, NaN, params that some trials lack, and running ones."""
    study = filled(ours, 250, seed, direction, with_depth=seed % 2 == 1)
    if seed > 1:
        for _ in range(3):
            study.ask(dict(SPACE))
    depth = {"depth": IntDistribution(1, 5)} if seed % 2 else {}
    for k in range(3):
        kinds: dict[str, Any] = {"multivariate": k > 0}
        found = [drawn(study, kind(seed=k, **kinds), **depth)
                 for kind in (BoundedTPESampler, TPESampler)]
        assert found[0] == found[1]
        ours.get_all_trials(study._study_id)


def test_a_whole_search_is_that_of_optuna(ours: StudyStorage) -> None:
    """From the first random trial on, with a choice that decides which other params there are."""
    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", 1e-4, 1, log=True)
        if trial.suggest_categorical("c", ["a", "b"]) == "a":
            return x + trial.suggest_int("n", 1, 9)
        return 2 * x + trial.suggest_float("y", 0, 1)

    found = []
    for kind in (BoundedTPESampler, TPESampler):
        study = optuna.create_study(storage=ours, study_name=kind.__name__, sampler=kind(seed=5))
        study.optimize(objective, n_trials=60)
        found.append([(trial.params, trial.value) for trial in study.trials])
    assert found[0] == found[1]


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_are_those_of_optuna_and_the_rest_is_a_part_of_its_rest(
    ours: StudyStorage, seed: int, direction: str
) -> None:
    study = filled(ours, 420, seed, direction)
    trials = study.get_trials(deepcopy=False, states=ENDED)
    n_below = default_gamma(len(trials))
    below, above = _split_trials(study, trials, n_below)
    history = BoundedTPESampler()._history(study)
    assert history is not None and len(history) == len(trials) > 300
    good, rest = history.split(n_below, 260, SPACE, [])
    everything, others = history.split(n_below, 10**6, SPACE, [])
    for name, kind in SPACE.items():
        of_below = [kind.to_internal_repr(t.params[name]) for t in below]
        of_above = [kind.to_internal_repr(t.params[name]) for t in above]
        assert good[name].tolist() == everything[name].tolist() == of_below
        assert others[name].tolist() == of_above
        assert len(rest[name]) == 260 - n_below
    points = [tuple(row) for row in np.stack([rest[name] for name in SPACE], 1).tolist()]
    of_above = [tuple(kind.to_internal_repr(t.params[name]) for name, kind in SPACE.items())
                for t in above]
    places = [of_above.index(point) for point in points]
    assert places == sorted(places), "they keep the order of the trials"


def test_equal_seeds_draw_equal_params_from_a_large_study(ours: StudyStorage) -> None:
    """Whichever worker draws."""
    study = filled(ours, 420, 7)
    first = drawn(study, BoundedTPESampler(seed=3, n_weighed=250))
    second = drawn(study, BoundedTPESampler(seed=3, n_weighed=250))
    other = drawn(study, BoundedTPESampler(seed=4, n_weighed=250))
    assert first == second != other


def test_a_large_study_is_still_learned_from(ours: StudyStorage) -> None:
    study = optuna.create_study(storage=ours, study_name="s")
    rng = random.Random(0)
    for _ in range(600):
        x = rng.random()
        study.add_trial(optuna.create_trial(value=abs(x - 0.3), params={"x": x},
                                            distributions={"x": UNIT}))
    found = []
    for k in range(15):
        study.sampler = BoundedTPESampler(seed=k, n_weighed=250)
        trial = study.ask({"x": UNIT})
        found.append(abs(trial.params["x"] - 0.3))
        study.tell(trial, state=TrialState.FAIL)
    assert sorted(found)[7] < 0.03


def test_a_study_that_was_made_anew_is_learned_from_alone(
    ours: StudyStorage, tmp_path: Path
) -> None:
    """C43: stock Optuna gives the old id again."""
    study = optuna.create_study(storage=ours, study_name="s")
    for _ in range(40):
        study.add_trial(optuna.create_trial(value=0.0, params={"x": 0.9},
                                            distributions={"x": UNIT}))
    sampler = BoundedTPESampler(seed=0)
    assert len(sampler._history(study) or []) == 40
    stock = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'x.db'}")
    optuna.delete_study(study_name="s", storage=stock)
    again = optuna.create_study(study_name="s", storage=stock)
    assert again._study_id == study._study_id
    for _ in range(3):
        again.add_trial(optuna.create_trial(value=0.0, params={"y": 0.1},
                                            distributions={"y": UNIT}))
    study.get_trials()
    history = sampler._history(study)
    assert history is not None and len(history) == 3
    assert list(history.common_space()) == ["y"]
    stock.remove_session()
    stock.engine.dispose()


def test_without_announcing_a_draw_writes_nothing(ours: StudyStorage) -> None:
    """hpo's workers store all params of a trial themselves, at once."""
    study = filled(ours, 60, 1)
    for announces in (True, False):
        study.sampler = BoundedTPESampler(seed=0, announces=announces)
        trial = study.ask(dict(SPACE))
        found = ours.get_trial(trial._trial_id).system_attrs
        assert any(key.startswith("tpe:relative_params") for key in found) == announces


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("why", ["objectives", "constraints", "storage", "hyperband", "group"])
def test_studies_of_another_kind_are_drawn_from_as_by_optuna(
    ours: StudyStorage, why: str
) -> None:
    kinds: dict[str, Any] = {"objectives": {"directions": ["minimize"] * 2},
                             "hyperband": {"pruner": optuna.pruners.HyperbandPruner()}}
    study = optuna.create_study(storage=None if why == "storage" else ours, study_name="s",
                                **kinds.get(why, {}))
    rng = random.Random(1)
    for _ in range(60):
        x = rng.random()
        values = [x, 1 - x] if why == "objectives" else [x]
        study.add_trial(optuna.create_trial(
            values=values, params={"x": x}, distributions={"x": UNIT},
            system_attrs={"constraints": [x - 0.5]} if why == "constraints" else {}))
    options: dict[str, Any] = {"group": True, "multivariate": True} if why == "group" else {}
    found = []
    for kind in (BoundedTPESampler, TPESampler):
        sampler = kind(seed=0, **options)
        if kind is BoundedTPESampler:
            assert sampler._history(study) is None  # type: ignore[attr-defined]
        study.sampler = sampler
        trial = study.ask({"x": UNIT})
        found.append(trial.params)
        study.tell(trial, state=TrialState.FAIL)
    assert found[0] == found[1]
