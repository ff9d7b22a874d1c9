"""Where a study stands: its phases, why trials ended early, and the workers that are alive.

All of it is read from the database, so that it can be asked on any host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo import alive
from hpo.ask import collected, opened, print_json
from hpo.display import duration, say
from hpo.first_failures import kind_of
from hpo.settings import go_on_command

if TYPE_CHECKING:
    from rich.console import Console

    from hpo.alive import Worker
    from hpo.results import Phase, Results, Trial

# A reason is one line here; `hpo show` has all of it.
_MAX_REASON = 200
# A host's name is cut to no less than this where the terminal is narrow.
_LEAST_HOST = 8
_INDENT = " " * 12


@dataclass(frozen=True)
class Ended:
    """Trials of one phase that ended early for one kind of reason, the last of them as example."""

    state: str
    kind: str
    n: int
    epochs: tuple[int, ...]
    last: Trial

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {"state": self.state, "kind": self.kind, "n": self.n, "epochs": list(self.epochs),
                "last_trial": self.last.number, "reason": _first_line(self.last.reason)}


def ended_early(phase: Phase) -> list[Ended]:
    """Return why trials of a phase ended early, grouped by kind, the commonest first.

    An epoch's number and an error's own text make no new kind.
    """
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in phase.trials:
        if trial.reason:
            kind = kind_of(trial.reason.split(" at epoch")[0])
            groups.setdefault((trial.state, kind), []).append(trial)
    found = [Ended(state, kind, len(trials), _epochs(trials), trials[-1])
             for (state, kind), trials in groups.items()]
    return sorted(found, key=lambda one: -one.n)


def _epochs(trials: Sequence[Trial]) -> tuple[int, ...]:
    said = [trial.reason.partition(" at epoch ")[2] for trial in trials]
    return tuple(sorted({int(epoch) for epoch in said if epoch.isdecimal()}))


def _first_line(reason: str) -> str:
    return (reason.splitlines() or [""])[0][:_MAX_REASON]


def status(study: str, home: Path, storage: str | None, console: Console, *, as_json: bool) -> int:
    """Print a study's phases, why trials ended early, and who is at work now."""
    with opened(home, storage) as db:
        found = collected(db, study)
        tickets = {name: db.tickets.counts(phase.study) for name, phase in found.phases.items()}
        workers = alive.workers(db, study)
    if as_json:
        print_json(_data(found, tickets, workers))
        return 0
    width = console.width if console.is_terminal else None
    goal = "maximize" if found.maximize else "minimize"
    say(console, f"study {study}: {goal} {found.metric}")
    for name in found.phases:
        for line in _phase_lines(found, name, tickets[name]):
            say(console, line if width is None else _cut(line, width))
    for line in _worker_lines(found, workers, sum(t["waiting"] for t in tickets.values()), width):
        say(console, line)
    return 0


def _data(
    found: Results, tickets: Mapping[str, Mapping[str, int]], workers: Sequence[Worker]
) -> dict[str, Any]:
    phases = {name: {
        "study": phase.study, "states": phase.states(), "tickets": tickets[name],
        "reasons": [one.to_json() for one in ended_early(phase)],
        "trials": [{"number": t.number, "state": t.state, "value": t.value, "params": t.params,
                    "reason": t.reason} for t in phase.trials]}
        for name, phase in found.phases.items()}
    return {"study": found.name, "metric": found.metric, "epochs": found.epochs,
            "direction": "maximize" if found.maximize else "minimize", "phases": phases,
            "workers": [worker.to_json() for worker in workers]}


def _phase_lines(found: Results, name: str, tickets: Mapping[str, int]) -> list[str]:
    from hpo.verdict import number

    phase, best = found.phases[name], found.best(name)
    states = ", ".join(f"{n} {state}" for state, n in phase.states().items()) \
        or ("no pick" if name == "lr-range" and found.no_pick else "no trial")
    waiting = f", {tickets['waiting']} waiting" if tickets["waiting"] else ""
    # Each candidate of a confirmation has its own mean; the best of all trials says nothing.
    score = f"; best {number(best.score)} (trial {best.number})" \
        if best and best.score is not None and name != "confirm" else ""
    lines = [f"  {name:<9} {states}{waiting}{score}"]
    return lines + [f"{_INDENT}{_reason_text(one)}" for one in ended_early(phase)]


def _reason_text(one: Ended) -> str:
    if one.epochs:
        first, last = one.epochs[0], one.epochs[-1]
        at = f"at epoch {first}" if first == last else f"at epochs {first} to {last}"
        return f"{one.n} x {one.state} {one.kind}, {at}"
    rest = _first_line(one.last.reason).removeprefix(one.kind).lstrip(": ")
    said = f": {rest}" if rest else ""
    return f"{one.n} x {one.state} {one.kind}, last trial {one.last.number}{said}"


def _worker_lines(
    found: Results, workers: Sequence[Worker], n_waiting: int, width: int | None
) -> list[str]:
    here = [worker for worker in workers if worker.state != "lost"]
    lost = [worker for worker in workers if worker.state == "lost"]
    lines = []
    if here:
        verb = "worker is" if len(here) == 1 else "workers are"
        lines += [f"{len(here)} {verb} alive", *_table(found, here, width)]
    else:
        go_on = f"; `{go_on_command(found.module, found.name)}` goes on with the {n_waiting} " \
                f"waiting" if n_waiting else ""
        lines.append(f"no worker is alive{go_on}")
    for worker in lost:
        why = f"no sign for {duration(worker.last_sign_s)}" if (worker.lease_left_s or 0) < 0 \
            else "its process is gone"
        lines.append(f"lost: {worker.what} ({worker.host} pid {worker.pid}), {why}: "
                     f"closed at the next run")
    return lines


def _table(found: Results, workers: Sequence[Worker], width: int | None) -> list[str]:
    from hpo.report import aligned

    head = ["host", "pid", "device", "at", "epochs", "since", "last sign"]
    rows = [head, *(_cells(found, worker) for worker in workers)]
    text = aligned(rows, right=(1,))
    wide = max(map(len, text.splitlines())) + 2
    if width is not None and wide > width:
        longest = max(len(row[0]) for row in rows)
        rows = [[_cut(row[0], max(_LEAST_HOST, longest - wide + width)), *row[1:]] for row in rows]
        text = aligned(rows, right=(1,))
    return [f"  {line}" for line in text.splitlines()]


def _cut(text: str, n: int) -> str:
    return text if len(text) <= n else text[:n - 1] + "…"


def _cells(found: Results, worker: Worker) -> list[str]:
    where = [worker.host, str(worker.pid), worker.device or "?"]
    seen = f"{duration(worker.last_sign_s)} ago"
    if worker.state == "idle":
        return [*where, "idle", "", "", seen]
    since = worker.since_at and (datetime.now(UTC) - worker.since_at).total_seconds()
    n_ended = 0 if worker.epoch is None else worker.epoch + 1
    epochs = "" if worker.trial is None else f"{n_ended} of {found.epochs}"
    ahead = f" (+{worker.n_ahead} taken)" if worker.n_ahead else ""
    return [*where, worker.what + ahead, epochs,
            "" if since is None else f"{duration(max(0.0, since))} ago", seen]
