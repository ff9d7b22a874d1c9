"""A further rank of a worker's trials: one process on one device that does what rank 0 tells it.

Started by the worker, with its device and threads already set. It makes the same trainer from the
same params and calls the same methods, so that all meet in what they compute together.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hpo import causes, discover, trial_log
from hpo.attempt import make_run
from hpo.channel import Channel, LineBuffer
from hpo.drive import is_out_of_memory
from hpo.errors import HpoError
from hpo.leftovers import give_memory_back
from hpo.processes import TRAINING, imports, load
from hpo.ranks import join_group
from hpo.seeding import seed_all
from hpo.space import params_from_json
from hpo.spec import StudySpec
from hpo.versions import source_digest

if TYPE_CHECKING:
    from hpo.train.loop import Trainer
    from hpo.train.team import Team

# The methods of a trainer that all ranks call together.
_METHODS = ("epoch", "state_dict", "take_state", "weights", "close")


class _Commands(threading.Thread):
    """Reads what rank 0 tells; the end of it means that rank 0 is gone, wherever this one is."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="commands")
        self.inbox: queue.Queue[dict[str, Any]] = queue.Queue()

    def run(self) -> None:
        lines = LineBuffer()
        while data := os.read(0, 1 << 16):
            for command in lines.feed(data):
                self.inbox.put(command)
        os._exit(0)


def main() -> int:
    """Run a rank; its study, device and place come in the environment."""
    rank, n, device = (int(os.environ["HPO_RANK"]), int(os.environ["HPO_RANKS"]),
                       os.environ["HPO_WORKER_DEVICE"])
    # What these mean, rank 0 decides.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    trial_log.forgive()
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload(["torch"])
    channel = Channel(int(os.environ["HPO_WORKER_EVENTS"]))
    commands = _Commands()
    commands.start()
    seed_all(0)
    try:
        with imports():
            spec = discover.load(os.environ["HPO_WORKER_STUDY"])
        if spec.build is not None:
            # While rank 0 does.
            load(*TRAINING)
        channel.send("ready", source=source_digest(spec.build))
        join_group(rank, n, device, int(commands.inbox.get()["port"]))
        _follow(spec, commands, rank, n)
    except BaseException as error:
        text = "" if isinstance(error, HpoError) else traceback.format_exc()
        channel.send("failed", said=str(error) if not text else causes.said(error), text=text,
                     is_oom=any(map(is_out_of_memory, causes.chain(error))))
        # Not in order: a thread of the group may wait for ranks that have gone.
        sys.stderr.flush()
        os._exit(1)
    return 0


def _follow(spec: StudySpec, commands: _Commands, rank: int, n: int) -> None:
    from hpo.train.team import Team

    team, trainer = Team(rank, n), None
    log = _Log()
    while True:
        command = commands.inbox.get()
        what = command["cmd"]
        if what == "begin":
            log.take(command["log"])
            trainer = _trainer(spec, command, team)
        elif what == "drop":
            trainer = None
            _free()
        elif what in _METHODS and trainer is not None:
            getattr(trainer, what)()
        elif what == "try_steps" and trainer is not None:
            from hpo.diagnosis.together import try_steps

            try_steps(trainer)
        else:
            raise ValueError(f"rank {rank} was told {what!r} and does not know it")


class _Log:
    """The log of a trial, where this rank writes where it is when that is asked of it."""

    def __init__(self) -> None:
        self._file: IO[str] = sys.stderr

    def take(self, path: str | None) -> None:
        """Write to another trial's."""
        before = self._file
        with suppress(OSError):
            self._file = sys.stderr if path is None else open(path, "a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR1, self._file)
        if before is not sys.stderr:
            before.close()


def _trainer(spec: StudySpec, command: dict[str, Any], team: Team) -> Trainer:
    from hpo.train.loop import Trainer

    assert spec.build is not None
    run = make_run(command["order"], int(command["seed"]), Path(command["folder"]))
    params = params_from_json(command["params"])
    return Trainer(spec.build(run, **params), run, metric=spec.metric,
                   maximize=spec.direction == "maximize", team=team,
                   micro_batch_size=command["micro_batch_size"])


def _free() -> None:
    import torch

    gc.collect()
    give_memory_back()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
