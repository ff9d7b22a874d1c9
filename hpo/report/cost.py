"""What a study cost, phase by phase, and how its trials ended."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from hpo.report.blocks import Section, Table, Text, code
from hpo.results import PHASES, Phase, Results, Trial
from hpo.verdict import count


def endings(results: Results) -> list[Section]:
    """Return how many trials of each phase ended in which way, and why."""
    rows = [[phase, str(n), state, code(kind), code(_example(results.phase(phase), state, kind)),
             code(_log(results.phase(phase), state, kind))]
            for phase in PHASES
            for (state, kind), n in _ends(results.phase(phase)).items()]
    if not rows:
        return []
    # Where nothing failed, nobody looks for a log.
    n_columns = 6 if any(row[5] for row in rows) else 5
    head = ["phase", "trials", "state", "reason", "for example", "its log"]
    return [Section("How trials ended", [Table(head[:n_columns], [r[:n_columns] for r in rows])])]


def _ends(phase: Phase) -> dict[tuple[str, str], int]:
    counted: dict[tuple[str, str], int] = {}
    for trial in phase.trials:
        key = (trial.state, trial.kind if trial.state != "COMPLETE" else "")
        counted[key] = counted.get(key, 0) + 1
    return dict(sorted(counted.items(), key=lambda item: -item[1]))


def _last(phase: Phase, state: str, kind: str) -> Trial | None:
    said = [t for t in phase.trials if t.state == state and t.kind == kind and t.reason]
    return said[-1] if said and state != "COMPLETE" else None


def _example(phase: Phase, state: str, kind: str) -> str:
    trial = _last(phase, state, kind)
    return f"trial {trial.number}: {trial.reason}" if trial else ""


def _log(phase: Phase, state: str, kind: str) -> str:
    trial = _last(phase, state, kind)
    return str(trial.attrs.get("log") or "") if trial and state == "FAIL" else ""


def costs(results: Results) -> list[Section]:
    """Return the ledger: trials by their end, epochs and time of each phase."""
    begun = [results.phase(phase) for phase in PHASES if results.phases.get(phase)]
    if not begun:
        return []
    rows = [_row(phase) for phase in begun]
    every = Phase("all", "", tuple(t for p in begun for t in p.trials), None,
                  sum(p.sweep_epochs for p in begun))
    last = _row(every)
    last[1] = str(sum(p.n_trials for p in begun))
    head = ["phase", "trials", "planned", "complete", "pruned", "failed", "running", "epochs",
            "ran for", "device time", "devices busy"]
    said = ("A trial and its retries count once under trials. Epochs include those of pruned and "
            "failed trials and of the LR range test's sweep. Device time is that of the trials, "
            "once for each device; what is missing from 100 % went by between trials: drawing "
            "params, storing, waiting for a phase's last trial.")
    return [Section("What it cost", [Table(head, [*rows, last], n_left=1), Text(said)])]


def _row(phase: Phase) -> list[str]:
    states = phase.states()
    seconds = device_seconds(phase.trials)
    return [phase.name, str(phase.n_trials),
            "" if phase.n_planned is None else str(phase.n_planned),
            *(str(states.get(state, 0)) for state in ("COMPLETE", "PRUNED", "FAIL", "RUNNING")),
            count(phase.n_epochs), duration(phase.duration_s),
            duration(seconds) if phase.duration_s is not None else "", _busy(phase, seconds)]


def _busy(phase: Phase, seconds: float) -> str:
    """Return which part of its devices' time the trials had, while any trial ran."""
    n_devices = most_at_once(phase.trials)
    return f"{seconds / (phase.duration_s * n_devices):.0%} of {n_devices}" \
        if phase.duration_s and n_devices else ""


def device_seconds(trials: Iterable[Trial]) -> float:
    """Return how long devices trained, each device counted."""
    return sum((end - start).total_seconds() * n for start, end, n in _stretches(trials))


def most_at_once(trials: Iterable[Trial]) -> int:
    """Return on how many devices trials ran at once at most."""
    changes = sorted((at, change) for start, end, n in _stretches(trials)
                     for at, change in ((start, n), (end, -n)))
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def _stretches(trials: Iterable[Trial]) -> list[tuple[datetime, datetime, int]]:
    """Return when each worker trained, and on how many devices.

    The end of a short trial is stored while the next one runs: where two of one worker overlap,
    the time is that of one.
    """
    by_worker: dict[object, list[Trial]] = {}
    for trial in trials:
        if trial.span:
            # Whose worker is not known stands alone.
            by_worker.setdefault(trial.attrs.get("worker") or id(trial), []).append(trial)
    found = []
    for own in by_worker.values():
        until = None
        for (start, end), n in sorted((t.span, int(t.attrs.get("n_devices") or 1))
                                      for t in own if t.span):
            start = start if until is None else max(start, until)
            until = end if until is None else max(until, end)
            if end > start:
                found.append((start, end, n))
    return found


def duration(seconds: float | None) -> str:
    """Return a time for reading: `45 ms`, `3.2 s`, `4 min 5 s`, `2 h 10 min`."""
    if seconds is None:
        return ""
    if seconds < 0.95:
        return f"{seconds * 1000:.0f} ms"
    if round(seconds) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
