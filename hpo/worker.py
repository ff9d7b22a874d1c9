"""A worker: one process on one device that claims tickets and drives their trials.

Started by the pool, before torch loads, with its device and threads already set. It stays warm
from trial to trial: torch is imported once, the data stays loaded.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo import bundle, discover, trial_log
from hpo.channel import Channel, LineBuffer
from hpo.errors import HpoError
from hpo.processes import TRAINING, imports, load
from hpo.ranks import Ranks
from hpo.seeding import seed_all
from hpo.stop import Stop
from hpo.versions import source_digest

if TYPE_CHECKING:
    from hpo.tasks import Tasks

# An idle worker looks for a ticket this often.
_POLL_S = 0.05
# After the parent is gone, or asked to stop, a trial in the middle of an epoch has this long.
STOP_GRACE_S = 8.0
# Exit codes by which the parent knows what to do next.
EXIT_SPOILED = 75
EXIT_STORAGE = 74
# What trials need beside their training.
_WORK = ("hpo.tasks", "hpo.presence", "optuna", "storage.database")


class Commands(threading.Thread):
    """Reads the parent's commands; the end of them means that the parent is gone."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(daemon=True, name="commands")
        self.inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self._stop_event = stop

    def run(self) -> None:
        lines = LineBuffer()
        # Not through sys.stdin: the interpreter cannot end while a thread waits in it.
        while data := os.read(0, 1 << 16):
            commands = lines.feed(data)
            for command in commands:
                if command["cmd"] != "stop":
                    self.inbox.put(command)
            if any(command["cmd"] == "stop" for command in commands):
                break
        self._stop_event.by_run()
        self.inbox.put({"cmd": "stop"})
        # A trial looks at the event once an epoch; one that is stuck must not outlive its parent.
        time.sleep(STOP_GRACE_S)
        os._exit(0)


def _load(study: str, channel: Channel):
    """Return the study's spec, or None after its faults were sent."""
    # A model that is made when the module is imported is then the same in all processes.
    seed_all(0)
    try:
        spec = discover.load(study)
    except HpoError as error:
        channel.send("fault", text=str(error), exit_code=error.exit_code)
        return None
    channel.send("spec", spec=spec.to_json(), path=discover.source_path(study),
                 grid=_grid(spec), defaults=_defaults(spec))
    return spec


def _grid(spec) -> list[dict[str, Any]] | None:
    from hpo.baselines.grid import cells
    from hpo.space import n_params_sets, params_to_json

    if spec.grid is None and (n_params_sets(spec.space) or sys.maxsize) > _MAX_FULL_GRID:
        return None
    return [params_to_json(cell) for cell in cells(spec.space, spec.grid, spec.defaults)]


# A finite space without a grid of its own is a grid, unless nobody could mean to train all of it.
_MAX_FULL_GRID = 10_000


def _defaults(spec) -> dict[str, Any] | None:
    from hpo.space import params_to_json

    full = spec.full_params({})
    return params_to_json(full) if len(full) == len(spec.space) else None


def _answer(spec, command: dict[str, Any], channel: Channel, ranks: Ranks) -> bool:
    """Answer a question that needs the module's recipe; return whether all is well."""
    from hpo import rehearsal, rerun

    try:
        if command["cmd"] == "replay":
            rerun.rerun(spec, command, channel.send, ranks)
        elif command["cmd"] == "source":
            channel.send("source", files=bundle.files_of(command["study"]))
        elif command["cmd"] == "prepare":
            info = rehearsal.prepare(spec, command["order"])
            # A rank that cannot begin would end each of several workers.
            ranks.join()
            channel.send("ready", info=info)
        elif command["cmd"] == "examine":
            trace = command["trace"]
            for finding in rehearsal.examine(spec, command["order"],
                                             None if trace is None else Path(trace), ranks):
                channel.send("finding", finding=finding.to_json())
            channel.send("examined")
        else:
            channel.send("swept", result=rehearsal.sweep(
                spec, command["order"], low=command["low"], high=command["high"]))
    except HpoError as error:
        channel.send("fault", text=str(error), exit_code=error.exit_code)
        return False
    except Exception as error:
        import traceback

        traceback.print_exc()
        what = "objective" if spec.build is None else "build"
        channel.send("fault", text=f"{what} failed with the study's first params: "
                                   f"{discover.where(error)}: {type(error).__name__}: {error}",
                     exit_code=2)
        return False
    return True


def _work(spec, command: dict[str, Any], channel: Channel, commands: Commands,
          stop: Stop, ranks: Ranks) -> int:
    import optuna

    from hpo.presence import Presence
    from hpo.tasks import Tasks

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        tasks = Tasks(spec, command["order"], channel, stop, ranks)
    except HpoError as error:
        channel.send("error", text=str(error))
        return EXIT_STORAGE
    presence = Presence(tasks.db, tasks.order, tasks.owner)
    idle = False
    try:
        presence.begin()
        while not stop.is_set():
            while not commands.inbox.empty():
                said = commands.inbox.get_nowait()
                if said["cmd"] == "only":
                    tasks.order["only"] = said["study"]
            claim = tasks.turns.next()
            if claim is None:
                if not idle:
                    channel.send("idle")
                idle = True
                presence.idle()
                stop.wait(_POLL_S)
                continue
            idle = False
            if tasks.run(claim):
                presence.end()
                return EXIT_SPOILED
        presence.end()
    except HpoError as error:
        channel.send("error", text=str(error))
        return EXIT_STORAGE
    finally:
        closed = _close(tasks)
    return 0 if closed else EXIT_STORAGE


def _close(tasks: Tasks) -> bool:
    try:
        tasks.close()
    except HpoError as error:
        # The reaper closes what is left open; a database that is gone has been told of already.
        print(f"closing: {error}", flush=True)
        return False
    return True


def main() -> int:
    """Run a worker; its study, device and event pipe come in the environment."""
    study, device = os.environ["HPO_WORKER_STUDY"], os.environ["HPO_WORKER_DEVICE"]
    stop = Stop()
    # The parent decides what Ctrl-C means; the terminal sends it to the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    trial_log.forgive()
    # The parent asks a worker that has got stuck where it is; the answer goes to the trial's log.
    faulthandler.register(signal.SIGUSR1)
    # A forked loader process would inherit CUDA's state and this process's threads.
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload(["torch"])
    channel = Channel(int(os.environ["HPO_WORKER_EVENTS"]))
    commands = Commands(stop)
    commands.start()
    with imports():
        spec = _load(study, channel)
    if spec is None:
        return 0
    n_devices = int(os.environ["HPO_WORKER_N_DEVICES"])
    # A loop of the user's own sees all devices, and starts what it needs.
    ranks = Ranks(study, n_devices if spec.objective is None else 1, device,
                  source_digest(spec.build))
    ranks.start()
    try:
        if spec.build is not None:
            # While the parent still plans: the slowest part of a worker's start.
            load(*TRAINING)
        return _obey(spec, channel, commands, stop, ranks, {
            "device": device, "worker": int(os.environ["HPO_WORKER_INDEX"]),
            "n_devices": n_devices})
    finally:
        ranks.close()


def _obey(spec, channel: Channel, commands: Commands, stop: Stop, ranks: Ranks,
          own: dict[str, Any]) -> int:
    while True:
        if os.environ.get("HPO_WORKER_WORKS") and commands.inbox.empty():
            # While the parent makes the database, or another worker tries a step.
            load(*_WORK)
        command = commands.inbox.get()
        if command["cmd"] == "stop":
            return 0
        command["order"].update(own)
        if command["cmd"] == "work":
            return _work(spec, command, channel, commands, stop, ranks)
        if not _answer(spec, command, channel, ranks):
            return 0


if __name__ == "__main__":
    sys.exit(main())
