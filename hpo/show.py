"""One trial on one screen: how it ended, how its params were chosen, how it learned.

Says only what is stored; what is not, it calls so.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.ask import checkpoint_state, opened, print_json
from hpo.display import duration, say
from hpo.first_failures import tail
from hpo.one_trial import OneTrial, at_flags, find
from hpo.provenance import how_chosen, retry_chain
from hpo.queue import MICRO_BATCH
from hpo.rungs import goes_on, marks, rungs_of

if TYPE_CHECKING:
    from rich.console import Console

    from hpo.results import Trial

# The classic terminal, less the line of the prompt.
_N_ROWS = 23
_WIDTH = 80
_LEFT = 11
_LEAST_CURVE, _MOST_CURVE = 4, 8
_LEAST_LOG, _MOST_LOG = 3, 12
# What a pruner of that name compares a trial's best with.
_PERCENTILES = {"median": 50.0, "percentile": 25.0}


@dataclass(frozen=True)
class Shown:
    """What is told of a trial besides its own row: of its files, and of the trials beside it.

    `medians` holds for each of its epochs the median of the other COMPLETE trials that reached
    it, and how many those are.
    """

    one: OneTrial
    how: Mapping[str, str]
    medians: Mapping[int, tuple[float, int]]
    met: Mapping[str, Any] | None
    checkpoint_state: str
    log: Path
    log_lines: Sequence[str]
    replay: str


def show(
    trial: str, study: str, home: Path, storage: str | None, console: Console, *, as_json: bool
) -> int:
    """Print all that is known of one trial.

    Raises:
        NoResult: for a study that is not in the database.
        InputError: for a trial that is not in it.
    """
    with opened(home, storage) as db:
        one = find(db, study, trial)
    shown = _looked_up(one, home, storage)
    if as_json:
        print_json(_data(shown))
        return 0
    width = console.width if console.is_terminal else None
    *lines, again = _lines(shown, width or _WIDTH)
    for line in lines:
        say(console, line if width is None else _cut(line, width))
    # Whole, so that it can be copied.
    say(console, again)
    return 0


def _looked_up(one: OneTrial, home: Path, storage: str | None) -> Shown:
    path = one.trial.attrs.get("log")
    log = home / path if path else (home / "logs" / one.study / one.phase.name
                                    / f"{one.trial.number}.log")
    words = ["hpo", "replay", one.label, "--study", one.study, *at_flags(home, storage)]
    return Shown(one, how_chosen(one), medians(one), met_when_pruned(one),
                 checkpoint_state(home, one.trial.attrs.get("checkpoint")), log,
                 tail(log, _MOST_LOG), shlex.join(words))


def _others(one: OneTrial) -> list[Trial]:
    return [t for t in one.phase.trials
            if t.state == "COMPLETE" and t.number != one.trial.number]


def medians(one: OneTrial) -> dict[int, tuple[float, int]]:
    """Return the median of the other COMPLETE trials at each epoch of a trial, and their number.

    Of a confirmation these are other candidates too, and other seeds.
    """
    curves = [dict(t.curve) for t in _others(one)]
    found = {}
    for epoch, _ in one.trial.curve:
        values = [c[epoch] for c in curves if epoch in c and not math.isnan(c[epoch])]
        if values:
            found[epoch] = (statistics.median(values), len(values))
    return found


def met_when_pruned(one: OneTrial) -> dict[str, Any] | None:
    """Return what a trial was held against when rungs, median or percentile pruned it.

    It is computed anew from the trials that had ended then; None where that does not explain the
    pruning, as those times are of several clocks.
    """
    trial = one.trial
    values = [value for _, value in trial.curve if not math.isnan(value)]
    if trial.state != "PRUNED" or not values or not one.epochs:
        return None
    if trial.kind == "rungs":
        return _met_at_rung(one, values)
    percentile = _PERCENTILES.get(trial.kind)
    return None if percentile is None else _met_percentile(one, values, percentile)


def _met_at_rung(one: OneTrial, values: Sequence[float]) -> dict[str, Any] | None:
    last = one.epochs[-1]
    rungs = [r for r in rungs_of(int(one.row["epochs"])) if r <= last.epoch + 1][-1:]
    sign = 1.0 if one.maximize else -1.0
    others = [mark for t in one.phase.trials
              if t.state in ("COMPLETE", "PRUNED") and t.number != one.trial.number
              and t.ended_at and t.ended_at <= last.at
              for mark in marks(dict(t.curve), rungs, sign, pruned=t.state == "PRUNED")]
    best = max(sign * value for value in values)
    n_better = sum(mark > best for mark in others)
    if not rungs or goes_on(n_better, len(others)):
        return None
    return {"epoch": last.epoch, "best": sign * best, "n_better": n_better,
            "n_trials": len(others)}


def _met_percentile(
    one: OneTrial, values: Sequence[float], percentile: float
) -> dict[str, Any] | None:
    last = one.epochs[-1]
    by_then = [v for t in _others(one) if t.ended_at and t.ended_at <= last.at
               if (v := dict(t.curve).get(last.epoch)) is not None and not math.isnan(v)]
    if not by_then:
        return None
    import numpy as np

    best = max(values) if one.maximize else min(values)
    bound = float(np.percentile(by_then, 100 - percentile if one.maximize else percentile))
    if not (best < bound if one.maximize else best > bound):
        return None
    return {"epoch": last.epoch, "best": best, "bound": bound, "percentile": percentile,
            "n_trials": len(by_then)}


def _lines(shown: Shown, width: int) -> list[str]:
    """Return the screen: curve and log share the rows that all else leaves."""
    top = [line for name, text in _facts(shown) for line in _entry(name, text, width)]
    n_left = _N_ROWS - len(top) - 1
    n_log = min(len(shown.log_lines), _LEAST_LOG)
    curve = _curve(shown, width, n_left - n_log - 1)
    log = _log(shown, max(n_log, min(_MOST_LOG, n_left - len(curve) - 1)))
    return [*top, *curve, *log, _named("run again", _again(shown))]


def _facts(shown: Shown) -> list[tuple[str, str]]:
    one, trial = shown.one, shown.one.trial
    reason = (trial.reason.splitlines() or [""])[0]
    head = [("trial", f"{trial.number} of the {one.phase.name} of study {one.study}: {trial.state}"
                      + (f", {reason}" if reason else "")),
            ("value", _value(one))]
    if shown.met:
        head.append(("pruned", _met(shown.met, one.maximize)))
    by_how: dict[str, list[str]] = {}
    for name, value in trial.params.items():
        by_how.setdefault(shown.how[name], []).append(f"{name}={_short(value)}")
    params = [("" if i else "params", f"{', '.join(said)}: {how}")
              for i, (how, said) in enumerate(by_how.items())]
    rest = [("run", _run(one)), ("time", _time(one))]
    chain = retry_chain(one)
    if len(chain) > 1:
        said = (f"{t.number} (this one)" if t.number == trial.number else f"{t.number} {t.state}"
                for t in chain)
        rest.append(("retries", " -> ".join(said)))
    rest.append(("weights", _weights(shown)))
    return [*head, *(params or [("params", "none were stored before it ended")]), *rest]


def _value(one: OneTrial) -> str:
    trial, metric = one.trial, one.row["metric"]
    if trial.value is None:
        return f"none ({metric})"
    epoch = trial.attrs.get("best_epoch")
    at = ", its last" if trial.state == "PRUNED" else "" if epoch is None \
        else f", its best, at epoch {epoch}"
    return f"{metric} {_short(trial.value)}{at}"


def _met(met: Mapping[str, Any], maximize: bool) -> str:
    if "n_better" in met:
        return (f"{met['n_better']} of the {met['n_trials']} other trials that had come as far as "
                f"epoch {met['epoch']} had been better than its best {_short(met['best'])}; the "
                f"better half goes on")
    what = "median" if met["percentile"] == 50 else f"percentile {met['percentile']:g}"
    return (f"its best {_short(met['best'])} was {'below' if maximize else 'above'} "
            f"{_short(met['bound'])}, the {what} of the {met['n_trials']} trials COMPLETE by "
            f"then at epoch {met['epoch']}")


def _run(one: OneTrial) -> str:
    worker, data = one.worker or {}, one.ran_with
    host, _, rest = (one.owner or "").partition("|")
    device = worker.get("device") or one.trial.attrs.get("device")
    n = data.get("n_threads")
    said = [f"seed {one.seed}" if one.seed is not None else "seed not stored",
            f"on {device}" if device else "device not stored"]
    if data.get("processor"):
        said[-1] += f" ({data['processor']})"
    said += [f"{n} thread{'s' if n != 1 else ''}"] if n else []
    said += [f"worker {host} pid {rest.split('|')[0]}"] if host else []
    versions = data.get("versions") or {}
    said += [f"torch {versions['torch']}"] if "torch" in versions else []
    return ", ".join(said)


def _time(one: OneTrial) -> str:
    trial, total = one.trial, one.row["epochs"]
    took = trial.attrs.get("duration_s")
    n_before = trial.attrs.get("n_epochs_taken_over", 0)
    said = [f"{trial.n_epochs + n_before} of {total} epochs"]
    if n_before:
        said[-1] += f" ({n_before} of them trained by the tries before)"
    if size := trial.attrs.get(MICRO_BATCH):
        said.append(f"{size} rows at once, as a whole batch did not fit")
    if early := trial.attrs.get("stopped_early"):
        said.append(f"stopped early ({early})")
    if took is not None:
        said.append(f"{took:.2f} s" if took < 10 else duration(took))
    if trial.started_at:
        said.append(f"begun {trial.started_at:%Y-%m-%d %H:%M:%S} UTC")
    return ", ".join(said)


def _weights(shown: Shown) -> str:
    path = shown.one.trial.attrs.get("checkpoint")
    if not path:
        return "none kept (the best --top-k of a study with build= keep theirs)"
    state = {"kept": "present"}.get(shown.checkpoint_state, shown.checkpoint_state)
    why = ", displaced by better trials or on another machine" if state == "missing" else ""
    return f"{path} ({state}{why})"


def _curve(shown: Shown, width: int, n_rows: int) -> list[str]:
    from hpo import text_curve

    one = shown.one
    curve, metric = one.trial.curve, one.row["metric"]
    ns = sorted({n for _, n in shown.medians.values()})
    over = "" if not ns else f"{ns[0]}" if len(ns) == 1 else f"{ns[0]} to {ns[-1]}"
    median = f", . median of {over} other COMPLETE trial{'s' if over != '1' else ''}" if ns else ""
    if len(curve) < 2:
        said = [f"epoch {epoch}: {_short(value)}"
                + (f", median {_short(shown.medians[epoch][0])} of {over}"
                   if epoch in shown.medians else "") for epoch, value in curve]
        return _entry("curve", "".join(said) or "no epoch was stored", width)
    height = max(_LEAST_CURVE, min(_MOST_CURVE, n_rows - 2))
    others = [(epoch, value) for epoch, (value, _) in shown.medians.items()]
    drawn = text_curve.draw(curve, others, width=width - _LEFT, height=height)
    return [*_entry("curve", f"* {metric}{median}", width),
            *(" " * _LEFT + line for line in drawn)]


def _log(shown: Shown, n: int) -> list[str]:
    if not shown.log_lines:
        state = "is empty" if shown.log.exists() else "is not on this machine"
        return [_named("log", f"{shown.log} {state}")]
    kept = list(shown.log_lines)[-n:] if n > 0 else []
    return [_named("log", f"{shown.log} ends with"), *(f"  {line}" for line in kept)]


def _again(shown: Shown) -> str:
    why = shown.one.why_no_replay
    return shown.replay if why is None else f"not possible: {why}"


def _named(name: str, text: str) -> str:
    return f"{name:<{_LEFT}}{text}"


def _entry(name: str, text: str, width: int) -> list[str]:
    """Return a named text in lines of the width, each below the other."""
    from hpo.verdict import wrapped

    first, *rest = wrapped(text, max(20, width - _LEFT)).splitlines() or [""]
    return [_named(name, first), *(" " * _LEFT + line for line in rest)]


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _cut(text: str, n: int) -> str:
    return text if len(text) <= n else text[:n - 1] + "…"


def _data(shown: Shown) -> dict[str, Any]:
    one, trial = shown.one, shown.one.trial
    metrics = {row.epoch: row.metrics for row in one.epochs}
    curve = [{"epoch": epoch, "value": value, "metrics": metrics.get(epoch),
              "median": shown.medians.get(epoch, (None, 0))[0],
              "n_others": shown.medians.get(epoch, (None, 0))[1]} for epoch, value in trial.curve]
    worker = {name: (one.worker or {}).get(name) for name in ("owner", "host", "pid", "device")}
    return {
        "study": one.study, "phase": one.phase.name, "trial": trial.number, "state": trial.state,
        "metric": one.row["metric"], "direction": one.row["direction"], "value": trial.value,
        "reason": trial.reason,
        "params": {name: {"value": value, "how": shown.how[name]}
                   for name, value in trial.params.items()},
        "seed": one.seed, "device": trial.attrs.get("device"),
        "worker": worker if one.worker else {"owner": one.owner} if one.owner else None,
        "ran_with": one.ran_with or None, "duration_s": trial.attrs.get("duration_s"),
        "started_at": trial.started_at, "ended_at": trial.ended_at,
        "n_epochs": trial.n_epochs, "epochs_planned": one.row["epochs"],
        "stopped_early": trial.attrs.get("stopped_early"), "curve": curve,
        "pruned_by": shown.met, "retry_of": one.retry_of, "retried_as": one.retried_as,
        "origin": trial.attrs.get("origin"), "chain": [t.number for t in retry_chain(one)],
        "checkpoint": trial.attrs.get("checkpoint"), "checkpoint_state": shown.checkpoint_state,
        "log": str(shown.log), "log_tail": list(shown.log_lines),
        "replay": shown.replay if one.why_no_replay is None else None,
        "why_no_replay": one.why_no_replay, "attrs": dict(trial.attrs),
    }
