"""How much each param mattered for getting among the best trials, pruned ones not left out.

Whoever looks at COMPLETE trials only, looks at those that passed: the param that decides which
trials are pruned is nearly the same in all that are left, and seems to matter least.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hpo.results import Results, Trial

_TOO_FEW = "not enough data"
# "It is preferable to include at least 5 trials above target_quantile", says its documentation;
# its default is a tenth of the trials.
_TOP_FRACTION, _N_TOP, _MOST_FRACTION = 0.1, 5, 0.5


def importance(results: Results, phase: str = "search") -> dict[str, Any]:
    """Return `{"importance": {param: share}}`, or `{"importance": None, "why": ...}`.

    Shares add up to 1, the largest first; a param that could not vary has exactly 0. There is not
    enough data below two ranked trials, or where all of them rank the same.

    Source: Watanabe, Bansal and Hutter 2023 (PED-ANOVA), arXiv 2304.10255, of ranks (`ranked`).
    """
    trials = ranked(results, phase)
    if len({rank for _, rank in trials}) < 2:
        return {"importance": None, "why": _TOO_FEW}
    raw = _raw(trials)
    total = sum(raw.values())
    if not total > 0:
        return {"importance": None, "why": _TOO_FEW}
    shares = {name: value / total for name, value in raw.items()}
    return {"importance": dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))}


def about(results: Results, phase: str = "search") -> str:
    """Say of which trials the importance is."""
    trials = [trial for trial, _ in ranked(results, phase)]
    n_pruned = sum(t.state == "PRUNED" for t in trials)
    said = (f"PED-ANOVA of {len(trials)} trials: in which params the best of them differ from "
            f"all, as far as the search went there")
    if n_pruned:
        said += (f". {n_pruned} of them were pruned: each stands where its best value by its last "
                 f"epoch stood among the trials that went on, and one that was audited where it "
                 f"ended. Without them the params that decide what is pruned would seem to matter "
                 f"least")
    return said + ". Failed trials are left out."


def ranked(results: Results, phase: str = "search") -> list[tuple[Trial, float]]:
    """Return COMPLETE and pruned trials with their rank, the best with the highest.

    Trials are compared by their best values at the last epoch that both have: a pruned one takes
    the place among those that went on that its value has among theirs. One that diverged ranks
    below all others, and a pruned one that was trained to its end by the audit by that end.
    """
    trials = results.phase(phase).trials
    ends = {t.attrs.get("audit_of"): t for t in results.phase("audit").trials
            if t.score is not None} if phase == "search" else {}
    sign = 1.0 if results.maximize else -1.0
    whole: dict[int, float] = {}
    bests: dict[int, list[float]] = {}
    cut: dict[int, list[int]] = {}
    for i, trial in enumerate(trials):
        end = ends.get(trial.number, trial) if trial.state == "PRUNED" else trial
        if end.score is not None:
            whole[i], bests[i] = sign * end.score, _bests(end, sign)
        elif trial.state == "PRUNED" and trial.curve:
            diverged = trial.kind == "diverged"
            bests[i] = _bests(trial, sign)
            cut.setdefault(-1 if diverged else trial.curve[-1][0], []).append(i)
    ranks = _ranks(whole)
    for epoch in sorted(cut, reverse=True):
        ranks = _with_cut(ranks, bests, cut[epoch], epoch)
    return [(trials[i], ranks[i]) for i in sorted(ranks)]


def _bests(trial: Trial, sign: float) -> list[float]:
    """Return a trial's best value by each epoch, higher better; before any, minus infinity."""
    by_epoch, best, found = dict(trial.curve), -math.inf, []
    for epoch in range(trial.curve[-1][0] + 1 if trial.curve else 0):
        value = sign * by_epoch.get(epoch, math.nan)
        best = max(best, value) if math.isfinite(value) else best
        found.append(best)
    return found


def _at(bests: Sequence[float], epoch: int) -> float:
    """Return the best value by an epoch; one that stopped early, whole, keeps its best."""
    return bests[min(epoch, len(bests) - 1)] if bests else -math.inf


def _ranks(values: Mapping[int, Any]) -> dict[int, float]:
    """Return ranks from 0, equal values with the same one."""
    levels = {value: float(rank) for rank, value in enumerate(sorted(set(values.values())))}
    return {i: levels[value] for i, value in values.items()}


def _with_cut(
    ranks: Mapping[int, float], bests: Mapping[int, Sequence[float]], cut: Sequence[int],
    epoch: int,
) -> dict[int, float]:
    """Rank trials that ended at an epoch among those that went on.

    Epoch -1 is that of trials without a number to compare: below all.
    """
    places: dict[int, tuple[float, float]] = {i: (rank, 0.0) for i, rank in ranks.items()}
    if epoch < 0:
        return _ranks({**places, **{i: (-1.0, 0.0) for i in cut}})
    then, final = sorted(_at(bests[i], epoch) for i in ranks), sorted(ranks.values())
    for order, i in enumerate(sorted(cut, key=lambda i: _at(bests[i], epoch)), 1):
        value = _at(bests[i], epoch)
        below, up_to = bisect_left(then, value), bisect_right(then, value)
        place = (-1.0 if up_to == 0 else float(len(final)) if below == len(final) else
                 _between(final, (below + up_to) / 2))
        # Between the same two that went on, and below or above all of them, values decide.
        places[i] = (place, 0.0 if below < up_to else float(order))
    return _ranks(places)


def _between(final: Sequence[float], n_below: float) -> float:
    """Return the rank that has so many of the sorted ranks below it."""
    at = min(max(n_below - 0.5, 0.0), len(final) - 1.0)
    low = int(at)
    high = min(low + 1, len(final) - 1)
    return final[low] + (at - low) * (final[high] - final[low])


def _raw(trials: Sequence[tuple[Trial, float]]) -> dict[str, float]:
    import optuna
    from optuna.study import StudyDirection

    # Optuna holds no value that is outside of its param's space, such as NaN.
    kept = [(_inside(trial), trial, rank) for trial, rank in trials]
    frozen = [optuna.create_trial(
        params={name: trial.params[name] for name in names}, value=rank,
        distributions={name: trial.distributions[name] for name in names})
        for names, trial, rank in kept if names]
    if len(frozen) < 2:
        return {}
    with warnings.catch_warnings(), _quiet(optuna.logging):
        # It warns of few trials, of params that only some trials have, and of `normalize=`: but
        # normalized, no importance at all could not be told from equal ones.
        warnings.simplefilter("ignore")
        study = optuna.create_study(direction=StudyDirection.MAXIMIZE)
        study.add_trials(frozen)
        top = min(_MOST_FRACTION, max(_TOP_FRACTION, _N_TOP / len(frozen)))
        return optuna.importance.get_param_importances(
            study, normalize=False,
            evaluator=optuna.importance.PedAnovaImportanceEvaluator(target_quantile=top))


def _inside(trial: Trial) -> list[str]:
    return [name for name, kind in trial.distributions.items()
            if name in trial.params and not (isinstance(trial.params[name], float)
                                             and not math.isfinite(trial.params[name]))]


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Keep Optuna from announcing a study that no one will ever see."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        logging.set_verbosity(before)
