"""How much each param mattered for getting among the best trials, by Optuna's own evaluator."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hpo.results import Results, Trial

_TOO_FEW = "not enough data"


def importance(results: Results, phase: str = "search") -> dict[str, Any]:
    """Return `{"importance": {param: share}}`, or `{"importance": None, "why": ...}`.

    Shares add up to 1, the largest first; a param that could not vary has exactly 0. There is not
    enough data below two COMPLETE trials, or where all of them scored the same.

    Source: Watanabe, Bansal and Hutter 2023 (PED-ANOVA), arXiv 2304.10255.
    """
    trials = [trial for trial in results.phase(phase).trials if trial.score is not None]
    if len({trial.score for trial in trials}) < 2:
        return {"importance": None, "why": _TOO_FEW}
    raw = _raw(trials, results.maximize)
    total = sum(raw.values())
    if not total > 0:
        return {"importance": None, "why": _TOO_FEW}
    shares = {name: value / total for name, value in raw.items()}
    return {"importance": dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))}


def _raw(trials: list[Trial], maximize: bool) -> dict[str, float]:
    import optuna
    from optuna.study import StudyDirection

    direction = StudyDirection.MAXIMIZE if maximize else StudyDirection.MINIMIZE
    frozen = [optuna.create_trial(params=dict(t.params), distributions=dict(t.distributions),
                                  value=t.score) for t in trials if t.distributions]
    if len(frozen) < 2:
        return {}
    with warnings.catch_warnings(), _quiet(optuna.logging):
        # It warns of few trials, of params that only some trials have, and of `normalize=`: but
        # normalized, no importance at all could not be told from equal ones.
        warnings.simplefilter("ignore")
        study = optuna.create_study(direction=direction)
        study.add_trials(frozen)
        return optuna.importance.get_param_importances(study, normalize=False)


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Keep Optuna from announcing a study that no one will ever see."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        logging.set_verbosity(before)
