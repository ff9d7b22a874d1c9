"""What a person sees while a run goes on: live bars on a terminal, plain lines in a pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpo.drive import Goal
from hpo.queue import phase_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from hpo.pool import Member

# A phase's trials to come are guessed from at least this many ended epochs.
_MIN_EPOCHS = 1


def say(console: Console, text: str) -> None:
    """Print a text as it stands: no markup, no line breaks of the terminal's."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Return a time span as people say it: `45 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds < 1:
        return "under 1 s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def about(seconds: float) -> str:
    """Return a guessed time span: `under 1 s`, `about 45 s`."""
    return duration(seconds) if seconds < 1 else f"about {duration(seconds)}"


@dataclass
class PhaseView:
    """Where a phase stands."""

    name: str
    n_total: int
    n_ended: int = 0
    best: float | None = None
    best_trial: int | None = None
    states: dict[str, int] = field(default_factory=dict)


@dataclass
class Pace:
    """How fast this machine trains, and how many epochs are still to come."""

    n_workers: int
    n_epochs_left: float = 0.0
    seconds: float = 0.0
    epochs: int = 0

    def add(self, seconds: float, epochs: int) -> None:
        """Take in how long a trial's epochs took."""
        self.seconds += seconds
        self.epochs += epochs

    def settle(self, epochs: int) -> None:
        """Take epochs off what is to come: trained, or not to be trained any more."""
        self.n_epochs_left = max(0.0, self.n_epochs_left - epochs)

    def left_s(self) -> float | None:
        """Return the seconds still to go, or None before a trial has ended."""
        if self.epochs < _MIN_EPOCHS:
            return None
        return self.n_epochs_left * self.seconds / self.epochs / self.n_workers


class Display:
    """Keeps where the run stands; what it prints is the subclass's matter."""

    def __init__(self, console: Console, goal: Goal, n_workers: int) -> None:
        self.console, self.goal = console, goal
        self.pace = Pace(n_workers)
        self.phase: PhaseView | None = None
        self.epochs = 0
        self._planned: dict[str, int] = {}
        self._said_time = False

    def say(self, text: str) -> None:
        """Print one line."""
        say(self.console, text)

    def plan(self, lines: Sequence[str], planned: Mapping[str, int], epochs: int) -> None:
        """Say what will be done before it starts; `planned` is each phase's epochs at most."""
        self._planned, self.epochs = dict(planned), epochs
        for line in lines:
            self.say(line)

    def start(self, name: str, n_total: int, n_ended: int, n_epochs: int = 0) -> None:
        """Begin a phase of `n_total` tickets, some done already, with `n_epochs` to come."""
        self.phase = PhaseView(name, n_total, n_ended)
        self._planned.pop(name, None)
        self.pace.n_epochs_left = n_epochs + sum(self._planned.values())

    def counted(self, n_ended: int) -> None:
        """Take over how many of the phase's tickets have ended, whoever ended them."""
        if self.phase is not None:
            self.phase.n_ended = n_ended

    def event(self, member: Member, event: dict[str, Any]) -> None:
        """Take in and show one event of a worker."""
        kind = event["event"]
        if kind == "end" and event["kind"] == "trial":
            self._ended(member, event)
        elif kind in ("note", "lost", "error"):
            self.say(event["text"])

    def _ended(self, member: Member, event: dict[str, Any]) -> None:
        phase = self.phase
        if phase is None:
            return
        phase.states[event["state"]] = phase.states.get(event["state"], 0) + 1
        value = event["value"]
        if event["state"] == "COMPLETE" and self.goal.better(value, phase.best):
            phase.best, phase.best_trial = value, event["number"]
        self.pace.add(event["duration_s"], max(1, event["n_epochs"]))
        if not event.get("back"):
            # What a trial that is pruned or fails leaves untrained need not be waited for.
            phase.n_ended += 1
            self.pace.settle(self.epochs)
        self._trial_line(member, event)
        self._time_once()

    def _time_once(self) -> None:
        left = self.pace.left_s()
        if left and not self._said_time:
            self._said_time = True
            self.say(f"at this machine's pace the whole run takes {about(left)} more, "
                     f"less what pruning saves")

    def _trial_line(self, member: Member, event: dict[str, Any]) -> None:
        raise NotImplementedError

    def ended_text(self, event: dict[str, Any]) -> str:
        """Return one ended trial as one line."""
        phase = self.phase
        assert phase is not None
        what = f"{phase_of(event['study'])} trial {event['number']}"
        if event["state"] == "COMPLETE":
            said = f"COMPLETE {self.goal.metric}={event['value']:.4g}"
        else:
            said = f"{event['state']} {event['reason']}"
        back = ", goes back on the queue" if event.get("back") else ""
        begun = f", from epoch {n} on" if (n := event.get("n_taken_over")) else ""
        best = "" if phase.best is None else f", best {phase.best:.4g} (trial {phase.best_trial})"
        return f"{what}: {said}{back} in {event['duration_s']:.1f} s{begun}{best}"

    def close(self) -> None:
        """Leave the screen in order."""


class PlainDisplay(Display):
    """One plain line for each event: for pipes, logs and dumb terminals."""

    def start(self, name: str, n_total: int, n_ended: int, n_epochs: int = 0) -> None:
        super().start(name, n_total, n_ended, n_epochs)
        if n_total:
            done = f", {n_ended} done already" if n_ended else ""
            left = n_total - n_ended
            self.say(f"{name}: {left or 'nothing'} to do{done}")

    def _trial_line(self, member: Member, event: dict[str, Any]) -> None:
        phase = self.phase
        assert phase is not None
        if not phase.n_total:
            self.say(self.ended_text(event))
            return
        left = self.pace.left_s()
        tail = "" if left is None else f", {about(left)} left"
        self.say(f"{self.ended_text(event)} [{min(phase.n_ended, phase.n_total)} of "
                 f"{phase.n_total}{tail}]")


class LiveDisplay(Display):
    """A bar for the phase and a line for each worker, redrawn a few times a second."""

    def __init__(self, console: Console, goal: Goal, n_workers: int) -> None:
        from rich.live import Live

        super().__init__(console, goal, n_workers)
        self._workers: dict[int, tuple[str, dict[str, Any]]] = {}
        self._live = Live(console=console, refresh_per_second=4, transient=True,
                          get_renderable=self._render)

    def start(self, name: str, n_total: int, n_ended: int, n_epochs: int = 0) -> None:
        self._leave_line()
        super().start(name, n_total, n_ended, n_epochs)
        self._live.start()

    def _leave_line(self) -> None:
        """Say how the phase ended whose bar goes now."""
        phase = self.phase
        if phase is not None and phase.states:
            parts = (f"{phase.n_ended} of {phase.n_total}", _states_text(phase),
                     self._best_text())
            self.say(f"{phase.name}: {', '.join(part for part in parts if part)}")
            phase.states.clear()

    def event(self, member: Member, event: dict[str, Any]) -> None:
        index = member.slot.index
        if event["event"] in ("begin", "epoch"):
            self._workers[index] = (member.slot.label, event)
        elif event["event"] in ("idle", "exit"):
            self._workers.pop(index, None)
        super().event(member, event)

    def _trial_line(self, member: Member, event: dict[str, Any]) -> None:
        if event["state"] == "FAIL":
            self.say(self.ended_text(event))

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        phase = self.phase
        if phase is None:
            return Text("")
        head = Table.grid(padding=(0, 1))
        left = self.pace.left_s()
        head.add_row(
            Text(phase.name, style="bold"),
            ProgressBar(total=max(1, phase.n_total), completed=phase.n_ended, width=30),
            f"{phase.n_ended} of {phase.n_total}", self._best_text(), _states_text(phase),
            "" if left is None else f"{about(left)} left")
        lines = Table.grid(padding=(0, 2))
        for index, (label, event) in sorted(self._workers.items()):
            lines.add_row(*self._worker_row(index, label, event))
        return Group(head, lines)

    def _best_text(self) -> str:
        phase = self.phase
        if phase is None or phase.best is None:
            return ""
        return f"best {self.goal.metric} {phase.best:.4g} (trial {phase.best_trial})"

    def _worker_row(self, index: int, label: str, event: dict[str, Any]) -> list[str]:
        metrics = event.get("metrics") or {}
        what = {"sweep": "learning-rate sweep", "score": "test split"}.get(
            event["kind"], f"trial {event['number']}")
        row = [f"  worker {index}", label, what]
        if "epoch" not in event:
            return [*row, "starting"]
        row.append(f"epoch {event['epoch'] + 1} of {self.epochs}")
        value = metrics.get(self.goal.metric)
        row.append("" if value is None else f"{self.goal.metric} {value:.4g}")
        pace = metrics.get("images_per_s")
        return [*row, "" if pace is None else f"{pace:,.0f} images/s"]

    def close(self) -> None:
        self._leave_line()
        self._live.stop()


def _states_text(phase: PhaseView) -> str:
    names = {"PRUNED": "pruned", "FAIL": "failed"}
    return ", ".join(f"{phase.states[s]} {names[s]}" for s in names if phase.states.get(s))


def make_display(console: Console, goal: Goal, n_workers: int) -> Display:
    """Return the live display on a terminal, the plain one elsewhere."""
    kind = LiveDisplay if console.is_terminal and not console.is_dumb_terminal else PlainDisplay
    return kind(console, goal, n_workers)
