"""How each param of a trial was chosen, as far as what is stored can tell."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from hpo.one_trial import OneTrial
from hpo.results import Trial
from hpo.space import Categorical, Param, n_params_sets, params_from_json, space_from_json

# Optuna's TPE draws at random until so many trials have ended.
TPE_STARTUP = 10
_LEARNED_FROM = ("COMPLETE", "PRUNED")
# A worker sees within this what others have ended.
_FRESH = timedelta(seconds=0.25)


def how_chosen(one: OneTrial) -> dict[str, str]:
    """Return in a few words how each param of a trial was chosen."""
    ways = {"grid": _grid, "lr-range": _lr_range, "confirm": _confirm, "search": _search,
            "random": _random, "audit": _audit}
    retried = _retried(one)
    return retried if retried is not None else ways[one.phase.name](one)


def _retried(one: OneTrial) -> dict[str, str] | None:
    """Return the way of a retry that took over all params, else None."""
    before = next((t for t in one.phase.trials if t.number == one.retry_of), None)
    params = one.trial.params
    if before is None or one.phase.name != "search" or not params or before.params != params:
        return None
    return dict.fromkeys(params, f"those of trial {before.number}, which this one retries")


def _grid(one: OneTrial) -> dict[str, str]:
    cells = [params_from_json(t.params or {}) for t in one.tickets if t.kind == "trial"]
    said = {}
    for name in one.trial.params:
        values = []
        for cell in cells:
            if cell.get(name) not in values:
                values.append(cell.get(name))
        said[name] = (f"fixed by the grid, one of {len(values)} values" if len(values) > 1
                      else "fixed by the grid, the same in all cells")
    return said


def _lr_range(one: OneTrial) -> dict[str, str]:
    """Return the sweep's pick for the rate, and the defaults it was swept at for the rest."""
    result = next((t.result for t in one.sweeps if t.result), None) or {}
    swept_at = params_from_json(next((t.params for t in one.sweeps if t.params), {}))
    pick, said = result.get("pick"), {}
    for name, value in decoded(one).items():
        is_picked = pick is not None and value == pick
        if is_picked or (name in swept_at and value != swept_at[name]):
            moved = "" if is_picked else f", {pick:.3g}, moved into the space" if pick else ""
            said[name] = f"picked by the LR range test{moved}"
        else:
            said[name] = "the module's default"
    return said


def _random(one: OneTrial) -> dict[str, str]:
    return dict.fromkeys(one.trial.params, "drawn at random (the phase random)")


def _audit(one: OneTrial) -> dict[str, str]:
    pruned = one.trial.attrs.get("audit_of", one.ticket and one.ticket.payload.get("audit_of"))
    return dict.fromkeys(one.trial.params, f"those of search trial {pruned}, which was pruned")


def _confirm(one: OneTrial) -> dict[str, str]:
    payload = one.ticket.payload if one.ticket else {}
    candidate = one.trial.attrs.get("candidate") or payload.get("candidate")
    source = one.trial.attrs.get("source_trial", payload.get("source_trial"))
    if candidate is None:
        return dict.fromkeys(one.trial.params, "not stored")
    if candidate == "default":
        how = "the module's defaults, to be confirmed"
    else:
        phase = candidate.split("#")[0]
        how = f"those of {phase} trial {source}, to be confirmed as {candidate}"
    return dict.fromkeys(one.trial.params, how)


def _search(one: OneTrial) -> dict[str, str]:
    space = space_from_json(one.row["space"] or {})
    # The worker's own settings; the study's are those of its latest run.
    own = "sampler" in one.ran_with
    used = one.ran_with if own else one.row["settings"] or {}
    sampler = used.get("sampler")
    if sampler is None:
        return dict.fromkeys(one.trial.params, "not stored")
    again = ("" if used.get("allow_duplicates") or not space or n_params_sets(space) is None
             else "; no other trial has the same params")
    unsure = "" if own else "; by the study's latest sampler, its own is not stored"
    drawn = _drawn(one, str(sampler), used)
    return {name: _only(space.get(name), str(sampler)) or drawn + again + unsure
            for name in one.trial.params}


def _only(param: Param | None, sampler: str) -> str | None:
    if param is not None and param.n_values() == 1:
        return "the only value there is"
    if sampler == "cmaes" and isinstance(param, Categorical):
        return "drawn at random (cmaes draws no choices)"
    return None


def _drawn(one: OneTrial, sampler: str, used: Mapping[str, Any]) -> str:
    if sampler == "random":
        return "drawn at random (--sampler random)"
    if sampler == "qmc":
        return "a point of the study's Sobol sequence (--sampler qmc)"
    if sampler != "tpe" or used.get("pruner") == "hyperband":
        return f"drawn by {sampler}"
    least, most = _n_known(one)
    told = f"{least}" if least == most else f"{least} to {most}"
    if most < TPE_STARTUP:
        return f"drawn at random: TPE starts after {TPE_STARTUP} ended trials, {told} had ended"
    if least >= TPE_STARTUP:
        return f"drawn by TPE from {told} ended trials"
    return f"drawn at random or by TPE, which started about then ({told} trials had ended)"


def _n_known(one: OneTrial) -> tuple[int, int]:
    """Return of how many ended trials the sampler knew at least and at most.

    A worker knows at once what it has ended itself, and within a moment what others have.
    """
    at, worker = one.trial.started_at, one.trial.attrs.get("worker")
    if at is None:
        return 0, 0
    ended = [(t.ended_at, t.attrs.get("worker") == worker) for t in one.phase.trials
             if t.state in _LEARNED_FROM and t.ended_at and t.number != one.trial.number]
    least = sum(when <= (at if own else at - _FRESH) for when, own in ended)
    most = sum(when <= (at if own else at + _FRESH) for when, own in ended)
    return least, most


def decoded(one: OneTrial) -> dict[str, Any]:
    """Return a trial's params as its module gets them."""
    space = space_from_json(one.row["space"] or {})
    return {name: space[name].decode(value) if name in space else value
            for name, value in one.trial.params.items()}


def retry_chain(one: OneTrial) -> list[Trial]:
    """Return the trials from the first of a chain of retries to the last, this one among them."""
    by_number = {t.number: t for t in one.phase.trials}
    chain, before = [one.trial], one.retry_of
    while before in by_number and by_number[before] not in chain:
        chain.insert(0, by_number[before])
        before = by_number[before].attrs.get("retry_of")
    after = {t.attrs["retry_of"]: t for t in one.phase.trials
             if t.attrs.get("retry_of") is not None}
    while chain[-1].number in after and after[chain[-1].number] not in chain:
        chain.append(after[chain[-1].number])
    return chain
