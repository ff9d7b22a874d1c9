"""Samplers and pruners by name, and drawing one trial's params.

A sampler is made anew for each trial, seeded from the study's seed and the trial's place in the
queue: workers never draw alike, and it does not matter who runs a trial.
"""

from __future__ import annotations

import copy
import random
import warnings
import weakref
from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING, Any

from hpo.errors import InputError
from hpo.space import Param, all_params, n_params_sets

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, TrialState

# A drawn params that the study already holds is drawn again this often before a free one of a
# finite space is picked at random.
_N_REDRAWS = 8
# These draw the same whatever has ended before.
BLIND = ("random", "qmc")
# Python's and numpy's generators take 32-bit seeds.
_SEED_RANGE = 2**32
# Of samplers that are gone.
_IDLE_GENERATORS: list[Any] = []


def trial_seed(study_seed: int, k: int, draw: int = 0) -> int:
    """Return the sampler's seed for the k-th trial of a study and the given redraw."""
    return random.Random(f"{study_seed}/{k}/{draw}").randrange(_SEED_RANGE)


def make_sampler(
    name: str, space: Mapping[str, Param], study_seed: int, k: int, i: int = 0
) -> BaseSampler:
    """Return the sampler of that name for the i-th draw of the study's k-th trial."""
    import optuna.samplers as samplers

    seed = trial_seed(study_seed, k, i)
    if name == "random":
        return _seeded(samplers.RandomSampler(), seed)
    if name == "qmc":
        return _qmc(space, k, seed, sequence_seed=seed if i else study_seed)
    if name == "cmaes":
        return _cmaes(seed)
    if name == "gp":
        return samplers.GPSampler(seed=seed)
    from hpo.tpe import BoundedTPESampler

    sampler = BoundedTPESampler(announces=False)
    _seeded(sampler._random_sampler, seed)
    return _seeded(sampler, seed)


def _seeded(sampler: Any, seed: int) -> Any:
    """Seed an unseeded sampler as its `seed=` would, with a generator that another has done with.

    numpy takes 0.25 ms to make one and 3 us to seed it.
    """
    if not _IDLE_GENERATORS:
        from numpy.random import RandomState

        _IDLE_GENERATORS.append(RandomState())
    generator = _IDLE_GENERATORS.pop()
    generator.seed(seed)
    sampler._rng._rng = generator
    weakref.finalize(sampler, _IDLE_GENERATORS.append, generator)
    return sampler


def _qmc(space: Mapping[str, Param], k: int, seed: int, sequence_seed: int) -> BaseSampler:
    """Return the k-th point of the study's own sequence; a redraw takes that of another."""
    from optuna.exceptions import ExperimentalWarning

    from hpo.samplers import PlacedQMCSampler

    with warnings.catch_warnings():
        # Optuna marks it as experimental; that is no news for whoever asks for it by name.
        warnings.simplefilter("ignore", category=ExperimentalWarning)
        return PlacedQMCSampler({name: param.distribution() for name, param in space.items()}, k,
                                sequence_seed=sequence_seed, seed=seed)


def check_sampler(name: str) -> None:
    """Raise InputError where a sampler's own package is not installed."""
    if name == "cmaes":
        _cmaes(0)


def _cmaes(seed: int) -> BaseSampler:
    import optuna.samplers as samplers

    try:
        import cmaes  # noqa: F401
    except ImportError:
        raise InputError("--sampler cmaes needs the package cmaes: "
                         "pip install 'hpo[cmaes]'") from None
    return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)


def make_pruner(name: str, *, n_startup: int, n_warmup: int, epochs: int) -> BasePruner:
    """Return the pruner of that name.

    Median and percentile compare only at epochs that at least `n_startup` COMPLETE trials reached
    (one at least), so that a few long trials cannot cut all others short; rungs where as many
    trials have reached the rung, however they ended.
    """
    import optuna.pruners as pruners

    from hpo.pruners import RungPruner, RunningMedianPruner, RunningPercentilePruner
    from hpo.rungs import rungs_of

    n_min = max(1, n_startup)
    if name == "rungs":
        return RungPruner(rungs_of(epochs, n_warmup), n_startup=n_min)
    if name == "median":
        return RunningMedianPruner(n_startup, n_warmup, n_min_trials=n_min)
    if name == "percentile":
        return RunningPercentilePruner(25.0, n_startup, n_warmup, n_min_trials=n_min)
    if name == "asha":
        return pruners.SuccessiveHalvingPruner(min_resource=max(1, n_warmup), reduction_factor=3)
    if name == "hyperband":
        return pruners.HyperbandPruner(min_resource=max(1, n_warmup), max_resource=epochs)
    return pruners.NopPruner()


def draw(
    study: Study,
    trial: FrozenTrial,
    space: Mapping[str, Param],
    sampler_of: Callable[[int], BaseSampler],
    reserve: Callable[[dict[str, Any]], bool],
) -> dict[str, Any]:
    """Return the params of a new trial, none that `reserve` refuses.

    `sampler_of(i)` gives the sampler of the i-th redraw; `reserve(params)` says whether no other
    trial of the study has them.
    """
    from optuna.pruners import _filter_study

    study = _snapshot(study)
    for i in range(_N_REDRAWS):
        study.sampler = sampler_of(i)
        # Hyperband's sampler learns from the trials of its own bracket alone, as Optuna has it.
        params = _drawn(_filter_study(study, trial), trial, space, study.sampler)
        if reserve(params):
            return params
    return _free_params(space, trial, reserve)


def _snapshot(study: Study) -> Study:
    """Return a copy of a study that reads its trials once, however often a sampler looks.

    The study itself keeps what it has read until its own `ask`, which nobody calls here; so it
    would never learn of the trials that end.
    """
    study = copy.copy(study)
    known: dict[Any, list[FrozenTrial]] = {}

    def get_trials(
        deepcopy: bool = True, states: Container[TrialState] | None = None,
        use_cache: bool = False,
    ) -> list[FrozenTrial]:
        asked = None if states is None else tuple(states)  # type: ignore[arg-type]
        if asked not in known:
            known[asked] = study._storage.get_all_trials(
                study._study_id, deepcopy=False, states=states)
        return copy.deepcopy(known[asked]) if deepcopy else known[asked]

    study._get_trials = get_trials
    return study


def _drawn(
    study: Study, trial: FrozenTrial, space: Mapping[str, Param], sampler: BaseSampler
) -> dict[str, Any]:
    sampler.before_trial(study, trial)
    relative_space = sampler.infer_relative_search_space(study, trial)
    relative = sampler.sample_relative(study, trial, relative_space)
    params = {}
    for name, param in space.items():
        distribution = param.distribution()
        if distribution.single():
            stored = param.encode(next(iter(param.values())))
        elif name in relative:
            stored = relative[name]
        else:
            stored = sampler.sample_independent(study, trial, name, distribution)
        params[name] = param.decode(stored)
    return params


def _free_params(
    space: Mapping[str, Param],
    trial: FrozenTrial,
    reserve: Callable[[dict[str, Any]], bool],
) -> dict[str, Any]:
    if n_params_sets(space) is None:
        raise InputError("the sampler draws the same params over and over: "
                         "use --allow-duplicates or another --sampler")
    free = list(all_params(space))
    random.Random(trial.number).shuffle(free)
    for params in free:
        if reserve(params):
            return params
    raise InputError("every params of the space has a trial already: use --allow-duplicates")
