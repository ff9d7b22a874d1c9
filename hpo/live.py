"""`hpo watch`: a study as it goes on, from any machine that reaches its database.

Ended trials stay in memory, so that a look costs a few small statements, however many there are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo import alive
from hpo.ask import opened
from hpo.display import about, duration, say
from hpo.errors import InputError, StorageError
from hpo.settings import go_on_command
from hpo.studies import phase_studies, require

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial
    from rich.console import Console, RenderableType

    from hpo.alive import Worker
    from storage import Database

_LEVELS = "▁▂▃▄▅▆▇█"
_N_COLUMNS, _N_LAST = 40, 5
# A run between two phases has neither tickets nor, for a moment, workers.
_N_LOOKS_AT_REST = 2


@dataclass(frozen=True)
class PhaseNow:
    """One phase: its trials by state, and its tickets."""

    name: str
    states: dict[str, int]
    tickets: dict[str, int]

    @property
    def n_total(self) -> int:
        return sum(self.tickets.values())

    @property
    def n_ended(self) -> int:
        return self.tickets["done"] + self.tickets["failed"]

    def text(self) -> str:
        """Return how many have ended, and as what."""
        states = ", ".join(f"{n} {state}" for state, n in sorted(self.states.items()))
        return f"{self.n_ended} of {self.n_total}" + (f": {states}" if states else "")


@dataclass(frozen=True)
class Frame:
    """All that one look at a study shows."""

    name: str
    metric: str
    n_epochs: int
    phases: tuple[PhaseNow, ...]
    workers: tuple[Worker, ...]
    best: FrozenTrial | None
    bests: tuple[float, ...]
    last: tuple[tuple[str, FrozenTrial], ...]
    left_s: float | None
    go_on: str

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing waits or runs and nobody is there to train more."""
        to_do = sum(p.tickets["waiting"] + p.tickets["running"] for p in self.phases)
        return not to_do and not self.here

    @property
    def here(self) -> list[Worker]:
        """The workers that are alive."""
        return [worker for worker in self.workers if worker.state != "lost"]

    def best_text(self) -> str:
        """Return the search's best trial so far, with the curve of bests."""
        if self.best is None:
            return f"no COMPLETE trial of the search yet ({self.metric})"
        return (f"best {self.metric} {self.best.value:.4g} (trial {self.best.number})  "
                f"{sparkline(self.bests)}")


def sparkline(values: Sequence[float]) -> str:
    """Return a curve as one line of bars, the last of at most 40 equal parts each."""
    if not values:
        return ""
    n = min(_N_COLUMNS, len(values))
    shown = [values[(i + 1) * len(values) // n - 1] for i in range(n)]
    low, high = min(shown), max(shown)
    scale = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(_LEVELS[round((value - low) * scale)] for value in shown)


class Looker:
    """Looks at one study again and again, and keeps what it has seen."""

    def __init__(self, db: Database, name: str) -> None:
        self._db, self._name = db, name
        self._row = require(db, name)
        self._seen: dict[str, Any] = {}
        self._ended: dict[str, list[FrozenTrial]] = {}

    def look(self) -> Frame:
        """Read what is new."""
        phases = tuple(self._phase(phase, study)
                       for phase, study in phase_studies(self._db, self._name).items())
        workers = tuple(alive.workers(self._db, self._name))
        best, bests = self._best()
        last = sorted(((phase, trial) for phase, trials in self._ended.items()
                       for trial in trials[-_N_LAST:]), key=_ended_at)[-_N_LAST:]
        return Frame(self._name, self._row["metric"], self._row["epochs"], phases, workers, best,
                     bests, tuple(last), self._left_s(phases, workers),
                     go_on_command(self._row["module"], self._name))

    def _phase(self, phase: str, study: str) -> PhaseNow:
        study_id = self._db.studies.get_study_id_from_name(study)
        new, self._seen[phase], anew = self._db.studies.ended_since(
            study_id, self._seen.get(phase), max_age_s=0.0)
        if anew:
            self._ended[phase] = []
        known = self._ended.setdefault(phase, [])
        known += new
        states: dict[str, int] = {}
        for trial in known:
            states[trial.state.name] = states.get(trial.state.name, 0) + 1
        return PhaseNow(phase, states, self._db.tickets.counts(study))

    def _best(self) -> tuple[FrozenTrial | None, tuple[float, ...]]:
        sign = 1 if str(self._row["direction"]).lower().startswith("max") else -1
        best, bests = None, []
        for trial in sorted(self._ended.get("search", ()), key=lambda t: t.number):
            if trial.state.name != "COMPLETE" or trial.value is None:
                continue
            if best is None or sign * trial.value > sign * bests[-1]:
                best = trial
            bests.append(trial.value if best is trial else bests[-1])
        return best, tuple(bests)

    def _left_s(self, phases: Sequence[PhaseNow], workers: Sequence[Worker]) -> float | None:
        """Return the time that the waiting and running trials take at the pace of the last."""
        n_here = sum(worker.state != "lost" for worker in workers)
        took = [(trial.datetime_complete - trial.datetime_start).total_seconds()
                for trials in self._ended.values() for trial in trials[-20:]
                if trial.datetime_complete and trial.datetime_start]
        n_left = sum(p.tickets["waiting"] + p.tickets["running"] for p in phases)
        if not n_left or not n_here or not took:
            return None
        return n_left * sum(took) / len(took) / n_here


def _ended_at(one: tuple[str, FrozenTrial]) -> Any:
    return one[1].datetime_complete


def watch(
    study: str, home: Path, storage: str | None, console: Console, *, interval_s: float, once: bool
) -> int:
    """Show a study until its run is over; 130 after Ctrl-C.

    Raises:
        InputError: for an interval that is none.
        NoResult: for a study that is not in the database.
    """
    if not 0.1 <= interval_s <= 3600:
        raise InputError(f"--interval must be 0.1 to 3600 seconds, got {interval_s:g}")
    with opened(home, storage) as db:
        looker = Looker(db, study)
        if once:
            console.print(drawn(looker.look()))
            return 0
        screen = _Screen(console) if console.is_terminal and not console.is_dumb_terminal \
            else _Lines(console)
        try:
            return _follow(looker, screen, interval_s)
        except KeyboardInterrupt:
            return 130
        finally:
            screen.close()


def _follow(looker: Looker, screen: _Screen | _Lines, interval_s: float) -> int:
    n_at_rest, is_lost = 0, False
    while True:
        try:
            frame = looker.look()
        except StorageError as error:
            if not is_lost:
                screen.say(f"{error}; trying again")
            is_lost = True
        else:
            is_lost = False
            screen.show(frame)
            n_at_rest = n_at_rest + 1 if frame.is_at_rest else 0
            if n_at_rest == _N_LOOKS_AT_REST:
                screen.say(f"study {frame.name}: nothing is left to do and no worker is alive")
                return 0
        time.sleep(interval_s)


class _Screen:
    """A frame that is drawn over the one before."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def show(self, frame: Frame) -> None:
        self._live.update(drawn(frame), refresh=True)

    def say(self, text: str) -> None:
        say(self._console, text)

    def close(self) -> None:
        self._live.stop()


class _Lines:
    """One line a change, for pipes and logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: dict[str, str] = {}

    def show(self, frame: Frame) -> None:
        told = {phase.name: phase.text() for phase in frame.phases}
        told |= {"best": frame.best_text(), "workers": ", ".join(
            f"{w.host} pid {w.pid} {w.what or w.state}" for w in frame.here) or "none is alive"}
        for what, text in told.items():
            if self._said.get(what) != text:
                self.say(f"{what}: {text}")
        self._said = told

    def say(self, text: str) -> None:
        say(self._console, text)

    def close(self) -> None:
        """Nothing is left on the screen."""


def drawn(frame: Frame) -> RenderableType:
    """Return one frame for a terminal."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    left = "" if frame.left_s is None else f", {about(frame.left_s)} left"
    phases = Table.grid(padding=(0, 2))
    for phase in frame.phases:
        phases.add_row(Text(phase.name, style="bold"), ProgressBar(
            total=max(1, phase.n_total), completed=phase.n_ended, width=24), Text(phase.text()))
    workers = Table.grid(padding=(0, 2))
    for worker in frame.workers:
        epochs = "" if worker.epoch is None else f"epoch {worker.epoch + 1} of {frame.n_epochs}"
        workers.add_row(*map(Text, (
            f"  {worker.host}", str(worker.pid), worker.device or "?",
            worker.what if worker.state == "at work" else f"{worker.state} {worker.what}".strip(),
            epochs, f"{duration(worker.last_sign_s)} ago")))
    n = len(frame.here)
    who = f"{n} {'worker' if n == 1 else 'workers'}" if n else \
        f"no worker is alive; `{frame.go_on}` goes on"
    last = [Text(f"  {phase} trial {trial.number}: {_end(trial)}", no_wrap=True,
                 overflow="ellipsis") for phase, trial in frame.last]
    return Group(Text(f"study {frame.name}{left}"), phases, Text(frame.best_text()), Text(who),
                 workers, *([Text("last ended"), *last] if last else []))


def _end(trial: FrozenTrial) -> str:
    reason = str(trial.user_attrs.get("reason") or "")
    if reason:
        return f"{trial.state.name} {reason.splitlines()[0]}"
    return f"{trial.state.name} {trial.value:.4g}" if trial.values else trial.state.name
