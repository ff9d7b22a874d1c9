"""The parent's side of the workers: starts, watches, replaces and stops them.

Never imports torch: a parent without CUDA can start and bury workers that have it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from hpo.channel import LineBuffer
from hpo.devices import Slot
from hpo.errors import HpoError, InputError
from hpo.guard import Guard
from hpo.leftovers import children
from hpo.worker import STOP_GRACE_S

# The child takes over the parent's import path before it imports anything of ours; -P keeps a
# file of the working directory from standing in for a module of the standard library.
_CHILD = ("import json, os, sys; sys.path[:] = json.loads(os.environ.pop('HPO_SYS_PATH')); "
          "from hpo.processes import run_alone; run_alone('hpo.worker')")
# Workers that die one after another without ending a trial are a fault of the machine or the
# module, and starting more of them only hides it.
_MAX_DEATHS = 5
# The first worker is asked again by the one that replaces it, where it was killed from outside: by
# the kernel that had no memory left, or by a person. A module that kills each of them is told.
_MAX_KILLED = 2
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
# A worker that is asked where it is has this long to say so.
_STACK_S = 0.3


@dataclass
class Heard:
    """What a worker has told of one trial that it began."""

    # Empty while they are drawn.
    params: dict[str, Any] = field(default_factory=dict)
    # Its epochs, of which the database may lack the last; as many as a short trial may have.
    epochs: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=10_000))
    # The end that it is about to store.
    ending: dict[str, Any] | None = None


@dataclass
class Member:
    """One worker as its parent sees it: its process and the trial it is at."""

    slot: Slot
    process: subprocess.Popen[bytes]
    events: int
    output: IO[bytes]
    buffer: LineBuffer = field(default_factory=LineBuffer)
    # Of its trials whose ends are not stored, by study and number.
    trials: dict[tuple[Any, Any], Heard] = field(default_factory=dict)
    # Why the parent has ended it.
    why: str | None = None
    # The ticket that it began last, if it has not told an end since.
    ticket: tuple[Any, Any] | None = None

    def tail(self, n_lines: int = 12) -> str:
        """Return the last lines that the worker printed outside of a trial."""
        self.output.seek(0)
        text = self.output.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-n_lines:])


class Pool:
    """Workers of one study, one for each slot.

    `check` is called while the pool waits for a worker to start; it raises to give up. `works`
    says that they will train trials, so that each loads what these need before it is told to.
    """

    def __init__(
        self, study: str, slots: Sequence[Slot], check: Callable[[], None] = lambda: None, *,
        works: bool = False,
    ) -> None:
        self.study, self.slots = study, list(slots)
        self.check, self._works = check, works
        self.members: dict[int, Member] = {}
        self._selector = selectors.DefaultSelector()
        self._order: dict[str, Any] | None = None
        # By ticket, since one that is tried again dies again; by pid of those that had none.
        self._deaths: set[Any] = set()
        # Whether the workers that die of a trial are not counted.
        self.goes_on = False
        self._fatal: HpoError | None = None
        self._stopping = False
        self._guard: Guard | None = None

    def start(self) -> None:
        """Start a worker for each slot that has none."""
        for slot in self.slots:
            if slot.index not in self.members:
                self._start(slot)

    def _start(self, slot: Slot) -> None:
        reader, writer = os.pipe()
        env = {**os.environ, **slot.environment(), "HPO_SYS_PATH": json.dumps(sys.path),
               "HPO_WORKER_STUDY": self.study, "HPO_WORKER_DEVICE": slot.device,
               "HPO_WORKER_INDEX": str(slot.index), "HPO_WORKER_EVENTS": str(writer),
               "HPO_WORKER_N_DEVICES": str(slot.n_devices),
               "HPO_WORKER_WORKS": "1" if self._works else ""}
        output = tempfile.TemporaryFile(prefix="hpo-worker-")
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD], env=env, stdin=subprocess.PIPE,
                stdout=output, stderr=output, pass_fds=(writer,), start_new_session=True)
        finally:
            os.close(writer)
        member = Member(slot, process, reader, output)
        self.members[slot.index] = member
        self._guard = self._guard or Guard(STOP_GRACE_S + 1)
        self._guard.add(process.pid)
        self._selector.register(reader, selectors.EVENT_READ, member)
        if self._order is not None:
            self._send(member, "work", order=dict(self._order))

    def _send(self, member: Member, cmd: str, **data: Any) -> None:
        stdin = member.process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps({"cmd": cmd, **data}).encode() + b"\n")
            stdin.flush()
        except (BrokenPipeError, ValueError):
            # It is dead; the end of its events tells us so in a moment.
            return

    def describe(self) -> dict[str, Any]:
        """Return what the module says of itself to the first worker; the others load it as well.

        Raises:
            InputError: with the module's faults.
        """
        self.start()
        return self._await("spec")

    def prepare(self, order: dict[str, Any]) -> dict[str, Any]:
        """Have the first worker look at data and model; the others load torch meanwhile.

        Raises:
            InputError: for data that is missing or does not fit, or a `build` that fails.
        """
        return self.ask("prepare", "ready", order=order)["info"]

    def ask(self, cmd: str, answer: str, **data: Any) -> dict[str, Any]:
        """Send the first worker one command and return its answer.

        Raises:
            InputError: with the fault that it answers instead.
        """
        self.tell(cmd, **data)
        return self._await(answer, lambda: self.tell(cmd, **data))

    def tell(self, cmd: str, **data: Any) -> None:
        """Send the first worker one command; what it answers comes with `poll`."""
        self._send(self.members[self.slots[0].index], cmd, **data)

    def _await(
        self, wanted: str, ask_again: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Return the first worker's next event of that name; one that is killed is replaced."""
        n_killed = 0
        while True:
            self.check()
            for member, event in self.poll(0.5):
                if event["event"] == "fault":
                    raise InputError(event["text"])
                if event["event"] == "exit" and member.slot.index == self.slots[0].index:
                    n_killed += 1
                    if event["code"] in _FROM_OUTSIDE and n_killed <= _MAX_KILLED:
                        self.start()
                        ask_again()
                        continue
                    raise HpoError(f"study '{self.study}': the first worker ended with code "
                                   f"{event['code']} before any trial:\n{event['tail']}")
                if event["event"] == wanted and member.slot.index == self.slots[0].index:
                    return event

    def only(self, study: str) -> None:
        """Have all workers take the tickets of this Optuna study alone from now on."""
        if self._order is not None:
            self._order["only"] = study
        for member in self.members.values():
            self._send(member, "only", study=study)

    def work(self, order: dict[str, Any]) -> None:
        """Have all workers, and any that replaces one, take tickets by this order."""
        for member in self.members.values():
            self._send(member, "work", order=dict(order))
        self._order = order
        # One may have been lost since it was started.
        self.start()

    def poll(self, timeout_s: float) -> list[tuple[Member, dict[str, Any]]]:
        """Return the events that came in, waiting at most `timeout_s` for the first.

        The end of a worker comes as an event `exit` with its pid and code, `why` the parent has
        ended it if it has, what was `heard` of
        its trials by study and number, and the tail of what it printed; a worker that ended
        while there is work is replaced.

        Raises:
            HpoError: when workers keep dying without ending a trial.
        """
        if self._fatal is not None and not self._stopping:
            raise self._fatal
        found: list[tuple[Member, dict[str, Any]]] = []
        for key, _ in self._selector.select(timeout_s):
            member: Member = key.data
            data = os.read(member.events, 1 << 16)
            found += [(member, event) for event in member.buffer.feed(data)]
            if not data:
                found.append((member, self._bury(member)))
        for member, event in found:
            self._note(member, event)
        return found

    def _note(self, member: Member, event: dict[str, Any]) -> None:
        kind, key = event["event"], (event.get("study"), event.get("number"))
        if kind in ("draw", "begin"):
            member.ticket = (event["study"], event["idx"])
        if kind == "draw":
            member.trials[key] = Heard()
        elif kind == "begin":
            member.trials[key] = Heard(event["params"])
        elif kind == "epoch" and key in member.trials:
            member.trials[key].epochs.append(event)
        elif kind == "ending" and key in member.trials:
            member.trials[key].ending = event["end"]
        elif kind in ("end", "lost"):
            member.trials.pop(key, None)
            member.ticket = None
            self._deaths.clear()
        elif kind == "idle":
            member.trials.clear()

    def busy(self) -> bool:
        """Return whether a worker has not told the end of its trial yet."""
        return any(member.trials for member in self.members.values())

    def _bury(self, member: Member) -> dict[str, Any]:
        self._selector.unregister(member.events)
        os.close(member.events)
        try:
            code = member.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            _kill_group(member.process.pid)
            code = member.process.wait()
        _kill_group(member.process.pid)
        event = {"event": "exit", "code": code, "heard": member.trials, "tail": member.tail(),
                 "pid": member.process.pid, "why": member.why}
        member.output.close()
        self._close_stdin(member)
        if self._guard is not None:
            self._guard.remove(member.process.pid)
        self.members.pop(member.slot.index, None)
        if self._order is not None and not self._stopping:
            if code != 0 and not (self.goes_on and member.ticket):
                self._deaths.add(member.ticket or member.process.pid)
            if len(self._deaths) >= _MAX_DEATHS:
                # Not raised here: of this and other workers there is more to tell first.
                self._fatal = HpoError(
                    f"{_MAX_DEATHS} workers died one after another, the last with code {code} "
                    f"(--max-failures 0 goes on whatever trials do); it printed:\n"
                    f"{event['tail']}")
                return event
            self._start(member.slot)
        return event

    @staticmethod
    def _close_stdin(member: Member) -> None:
        try:
            if member.process.stdin is not None:
                member.process.stdin.close()
        except BrokenPipeError:
            return

    def stop(self, grace_s: float = STOP_GRACE_S + 1) -> list[tuple[Member, dict[str, Any]]]:
        """Stop all workers in order, kill those that do not, and return their last events."""
        self._stopping = True
        for member in self.members.values():
            self._close_stdin(member)
        events: list[tuple[Member, dict[str, Any]]] = []
        deadline = time.monotonic() + grace_s
        while self.members:
            left = deadline - time.monotonic()
            if left <= 0:
                self.kill()
            events += self.poll(max(0.05, min(left, 1.0)))
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        return events

    def end(self, pid: int, why: str) -> None:
        """Kill a worker that has got stuck, for a reason that its `exit` event gives.

        Before, it is asked to write into its trial's log where it is.
        """
        for member in self.members.values():
            if member.process.pid == pid and member.why is None:
                member.why = why
                os.kill(pid, signal.SIGUSR1)
                time.sleep(_STACK_S)
                # Then those that it has started: one of several ranks may be the stuck one.
                for child in children(pid):
                    with suppress(OSError):
                        os.kill(child, signal.SIGUSR1)
                    time.sleep(_STACK_S)
                _kill_group(pid)

    def kill(self) -> None:
        """Kill every worker, and what each has started, at once."""
        self._stopping = True
        for member in self.members.values():
            _kill_group(member.process.pid)


def _kill_group(pid: int) -> None:
    """Kill a worker's process group: the worker leads its own, with its loader processes in it."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
