"""Where a study stands: its phases, and why trials ended early."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.ask import collected, opened, print_json, say

if TYPE_CHECKING:
    from rich.console import Console

    from hpo.results import Results


def status(study: str, home: Path, storage: str | None, console: Console, *, as_json: bool) -> int:
    """Print a study's phases: trials by state, tickets to come, and why trials ended early."""
    with opened(home, storage) as db:
        found = collected(db, study)
        tickets = {name: db.tickets.counts(phase.study) for name, phase in found.phases.items()}
    if as_json:
        print_json({"study": study, "metric": found.metric,
                     "direction": "maximize" if found.maximize else "minimize",
                     "phases": {name: {**_phase_json(found, name), "tickets": tickets[name]}
                                for name in found.phases}})
        return 0
    say(console, f"study {study}: {'maximize' if found.maximize else 'minimize'} {found.metric}")
    for name, phase in found.phases.items():
        to_come = tickets[name].get("waiting", 0) + tickets[name].get("running", 0)
        states = ", ".join(f"{n} {state}" for state, n in phase.states().items()) \
            or ("no pick" if name == "lr-range" and found.no_pick else "no trial")
        say(console, f"  {name:<9} {states}" + (f", {to_come} to come" if to_come else ""))
        for reason, n in _reasons(found, name).items():
            say(console, f"            {n} x {reason}")
    return 0


def _phase_json(found: Results, name: str) -> dict[str, Any]:
    phase = found.phases[name]
    return {"study": phase.study, "states": phase.states(), "reasons": _reasons(found, name),
            "trials": [{"number": t.number, "state": t.state, "value": t.value,
                        "params": t.params, "reason": t.reason} for t in phase.trials]}


def _reasons(found: Results, name: str) -> dict[str, int]:
    """Return how often each reason ended a trial; an epoch's number makes no new reason."""
    short = (f"{t.state} {t.reason.split(' at epoch')[0].splitlines()[0][:200]}"
             for t in found.phases[name].trials if t.reason)
    return dict(Counter(short).most_common())
