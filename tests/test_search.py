"""Samplers and pruners by name: equal seeds draw alike, others never, and no params come twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optuna
import pytest

from hpo import Categorical, Float, Int
from hpo.errors import InputError
from hpo.search import check_sampler, draw, make_pruner, make_sampler, trial_seed
from hpo.space import Param, params_key
from hpo.spec import PRUNERS

SPACE: dict[str, Param] = {"x": Float(1e-4, 1.0, log=True), "n": Int(1, 9),
                           "c": Categorical((1, 2), "a", None), "one": Float(0.5, 0.5)}
DRAWING = ("tpe", "random", "qmc", "cmaes")


def searched(name: str, n: int, seed: int = 0, space: dict[str, Param] | None = None,
             refuse: bool = False,
             value_of: Callable[[dict[str, Any]], float] = lambda params: 0.5,
             ) -> list[dict[str, Any]]:
    """Return the params of n trials, each drawn by a sampler of its own as a worker does.

    The study is one object all along, as in a worker that stays warm.
    """
    space = space or SPACE
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    taken: set[str] = set()

    def reserve(params: dict[str, Any]) -> bool:
        key = params_key(params)
        free = not refuse or key not in taken
        taken.add(key)
        return free

    found = []
    for k in range(n):
        def sampler_of(i: int, k: int = k) -> Any:
            return make_sampler(name, space, seed, k, i)

        trial_id = study._storage.create_new_trial(study._study_id)
        params = draw(study, study._storage.get_trial(trial_id), space, sampler_of, reserve)
        for name_, value in params.items():
            kind = space[name_].distribution()
            study._storage.set_trial_param(
                trial_id, name_, kind.to_internal_repr(space[name_].encode(value)), kind)
        study._storage.set_trial_state_values(
            trial_id, optuna.trial.TrialState.COMPLETE, [value_of(params)])
        found.append(params)
    return found


@pytest.mark.parametrize("name", DRAWING)
def test_every_sampler_draws_from_the_whole_space(name: str) -> None:
    """C30: also tuples, None and a param with a single value."""
    for params in searched(name, 14):
        assert list(params) == list(SPACE)
        assert all(SPACE[n].contains(value) for n, value in params.items())
        assert params["one"] == 0.5


def test_the_gaussian_process_draws_from_the_whole_space() -> None:
    space: dict[str, Param] = {"x": Float(0.0, 1.0), "n": Int(1, 9)}
    assert all(space["x"].contains(params["x"]) for params in searched("gp", 12, space=space))


@pytest.mark.parametrize("name", DRAWING)
def test_equal_seeds_draw_equal_params_to_the_last_bit(name: str) -> None:
    """C32.2: one worker repeats exactly."""
    assert searched(name, 13) == searched(name, 13)


@pytest.mark.parametrize("name", ["tpe", "random"])
def test_another_seed_differs_from_the_first_value_on(name: str) -> None:
    """C32.2: `--seed 8`."""
    for one, other in zip(searched(name, 5, 7), searched(name, 5, 8), strict=True):
        assert one["x"] != other["x"]


@pytest.mark.parametrize("name", DRAWING)
def test_no_two_trials_of_a_study_draw_the_same(name: str) -> None:
    """C32.1: the k-th trial has a seed of its own."""
    assert len({params["x"] for params in searched(name, 12)}) == 12


@pytest.mark.parametrize("name", ["tpe", "cmaes", "gp"])
def test_a_warm_worker_s_sampler_learns_from_the_trials_that_ended(name: str) -> None:
    """A study that kept its first look at the trials would draw at random for ever."""
    space: dict[str, Param] = {"x": Float(0.0, 1.0), "y": Float(0.0, 1.0)}

    def away(params: dict[str, Any]) -> float:
        return abs(params["x"] - 0.3) + abs(params["y"] - 0.6)

    n = {"tpe": 60, "cmaes": 60, "gp": 25}[name]
    far = sorted(map(away, searched(name, n, space=space, value_of=away)[-15:]))
    random = sorted(map(away, searched("random", n, space=space, value_of=away)))
    assert far[7] < random[n // 2] / 2


def test_quasi_random_points_are_those_of_one_sequence_whoever_draws_them() -> None:
    """Optuna's own counter gives two workers that draw at once the same point."""
    from scipy.stats import qmc

    space: dict[str, Param] = {"x": Float(0.0, 1.0), "y": Float(0.0, 1.0)}
    study = optuna.create_study()
    trials = [study._storage.get_trial(study._storage.create_new_trial(study._study_id))
              for _ in range(8)]
    drawn = {k: draw(study, trials[k], space, lambda i, k=k: make_sampler("qmc", space, 5, k, i),
                     lambda params: True) for k in reversed(range(8))}
    sobol: Any = qmc.Sobol
    wanted = sobol(2, seed=5, scramble=True).random(8)
    assert [(drawn[k]["x"], drawn[k]["y"]) for k in range(8)] == [tuple(row) for row in wanted]


def test_hyperband_s_sampler_learns_from_its_own_bracket() -> None:
    """As in Optuna's own ask: trials that other rungs stopped are not compared."""
    study = optuna.create_study(study_name="s", pruner=make_pruner("hyperband", n_startup=0,
                                                                   n_warmup=1, epochs=9))
    pruner: Any = study.pruner
    for _ in range(12):
        trial = study.ask()
        trial.report(1.0, 0)
        trial.should_prune()
        study.tell(trial, 1.0)
    seen: list[int] = []

    class Looking(optuna.samplers.RandomSampler):
        def sample_independent(self, study: Any, trial: Any, name: str, kind: Any) -> Any:
            seen.extend(t.number for t in study.get_trials(deepcopy=False))
            return super().sample_independent(study, trial, name, kind)

    new = study._storage.get_trial(study._storage.create_new_trial(study._study_id))
    draw(study, new, {"x": Float(0.0, 1.0)}, lambda i: Looking(seed=0), lambda params: True)
    mine = pruner._get_bracket_id(study, new)
    others = [t for t in study.get_trials() if pruner._get_bracket_id(study, t) == mine]
    assert seen == [t.number for t in others] and len(seen) < 13


def test_seeds_of_trials_and_redraws_differ() -> None:
    seeds = {trial_seed(seed, k, i) for seed in range(5) for k in range(20) for i in range(3)}
    assert len(seeds) == 300


@pytest.mark.parametrize("name", ["tpe", "random", "qmc"])
def test_a_finite_space_is_drawn_without_a_double(name: str) -> None:
    """C34.1: TPE alone trained one of four values fifteen times."""
    space: dict[str, Param] = {"x": Int(0, 3), "y": Float(0.0, 0.9, step=0.3)}
    found = searched(name, 16, space=space, refuse=True)
    assert len({(p["x"], p["y"]) for p in found}) == 16


def test_a_space_that_is_used_up_says_so() -> None:
    with pytest.raises(InputError, match="use --allow-duplicates"):
        searched("tpe", 5, space={"x": Int(0, 3)}, refuse=True)


@pytest.mark.parametrize("name", PRUNERS)
def test_every_pruner_judges_a_running_trial(name: str) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(study_name="s", pruner=make_pruner(name, n_startup=2, n_warmup=1,
                                                                   epochs=9))
    for value in range(30):
        trial = study.ask()
        for epoch in range(9):
            trial.report(value, epoch)
            trial.should_prune()
        study.tell(trial, value)
    last = study.ask()
    judged = []
    for epoch in range(9):
        last.report(99.0, epoch)
        judged.append(last.should_prune())
    assert not judged[0]
    assert any(judged) == (name != "none")


def pruned_at(n_startup: int, tape: Sequence[Sequence[float]]) -> int | None:
    """Return the epoch at which the median prunes the last list."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(pruner=make_pruner("median", n_startup=n_startup, n_warmup=0,
                                                   epochs=3))
    for row in tape[:-1]:
        trial = study.ask()
        for epoch, value in enumerate(row):
            trial.report(value, epoch)
        study.tell(trial, min(row))
    last = study.ask()
    for epoch, value in enumerate(tape[-1]):
        last.report(value, epoch)
        if last.should_prune():
            return epoch
    return None


def test_the_median_compares_only_epochs_that_enough_trials_reached() -> None:
    """C21: one long trial cuts nobody short; five do."""
    assert pruned_at(5, [*[[5, 4]] * 4, [5, 4, 1], [4, 3.5, 3]]) is None
    assert pruned_at(5, [*[[5, 4, 1]] * 5, [4, 3.5, 3]]) == 2


def test_a_start_up_of_none_prunes_from_the_first_trial_on() -> None:
    assert pruned_at(0, [[1, 1], [9, 9]]) == 0


def test_a_sampler_without_its_package_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cmaes", None)
    with pytest.raises(InputError, match=r"pip install 'hpo\[cmaes\]'"):
        check_sampler("cmaes")


def test_samplers_give_no_warning_when_asked_for_by_name() -> None:
    made: list[Callable[[], Any]] = [lambda n=n: make_sampler(n, SPACE, 1, 0) for n in DRAWING]
    assert all(make() is not None for make in made)


@pytest.mark.parametrize("name", ["random", "tpe"])
def test_a_generator_that_served_before_draws_as_a_new_one(name: str) -> None:
    """Two samplers that live at once have one each."""
    plain = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}[name]
    study = optuna.create_study()
    kind = optuna.distributions.FloatDistribution(0.0, 1.0)

    def drawn(sampler: Any, n: int = 3) -> list[float]:
        trial = study.ask()
        return [sampler.sample_independent(study, study._storage.get_trial(trial._trial_id), "x",
                                           kind) for _ in range(n)]

    for k in range(4):
        one, two = make_sampler(name, SPACE, 7, k), make_sampler(name, SPACE, 7, k + 50)
        assert drawn(one) == drawn(plain(seed=trial_seed(7, k)))
        assert drawn(two) == drawn(plain(seed=trial_seed(7, k + 50)))
