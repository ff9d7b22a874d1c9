"""The further processes of a worker whose trials have several devices, and what ends with them.

The worker is rank 0 and owns its trials: no other rank knows a database or a run. They stay warm
from trial to trial as it does, and end with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hpo.channel import LineBuffer
from hpo.errors import HpoError
from hpo.space import params_to_json

if TYPE_CHECKING:
    from hpo.train.team import Team

_CHILD = ("import json, os, sys; sys.path[:] = json.loads(os.environ.pop('HPO_SYS_PATH')); "
          "from hpo.processes import run_alone; run_alone('hpo.rank')")
# A rank that is lost is seen by its pipe, one that is stuck by the time of its epoch; this is for
# what neither sees.
TIMEOUT = timedelta(hours=2)
# What another rank says of its failure is here within this time, once this one is cut off by it.
_TOLD_S = 2.0
# To import torch and the study's module.
_START_S = 600.0
# A rank that is told to end has this long; so has this process to leave what a lost rank broke.
_END_S = 2.0
# The worker's exit code when it has lost a rank: its trial is then one of a lost worker.
EXIT_RANK_LOST = 76


class Ranks:
    """Ranks 1 to `n` - 1 of the trials of this process, on its other devices.

    With one device there are none, and nothing here costs a trial anything.
    """

    def __init__(self, study: str, n: int, device: str, source: str | None = None) -> None:
        self._study, self.n, self._device = study, n, device
        # The digest of the study's module as this process has loaded it.
        self._source = source
        # And as the others have, once they are ready.
        self._ready: dict[int, str | None] = {}
        # Where another rank is to write where it is, when that is asked of a worker that is stuck.
        self.log: Path | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._joining = self._joined = self._aborted = False
        # Whose process told what, or None of one that said nothing; the first of them.
        self._fault: tuple[int, dict[str, Any] | None] | None = None
        self._faulty = threading.Event()
        self._leaving = False

    def start(self) -> None:
        """Start the processes; they load torch while this one does."""
        if self.n == 1:
            return
        for rank in range(1, self.n):
            reader, writer = os.pipe()
            env = {**os.environ, "HPO_SYS_PATH": json.dumps(sys.path),
                   "HPO_WORKER_STUDY": self._study, "HPO_WORKER_DEVICE": self._device,
                   "HPO_WORKER_EVENTS": str(writer), "HPO_RANK": str(rank),
                   "HPO_RANKS": str(self.n)}
            # In this process's group, so that what ends the worker at once ends them.
            process = subprocess.Popen([sys.executable, "-P", "-c", _CHILD], env=env,
                                       stdin=subprocess.PIPE, pass_fds=(writer,))
            os.close(writer)
            self._processes.append(process)
            threading.Thread(target=self._listen, args=(rank, reader, self._faulty), daemon=True,
                             name=f"rank {rank}").start()

    def pids(self) -> set[int]:
        """Return the processes that stay from trial to trial."""
        return {process.pid for process in self._processes}

    def join(self) -> None:
        """Begin to work together, with new processes where one was lost; waits for them.

        Raises:
            HpoError: if another rank cannot begin.
        """
        if self.n == 1 or self._joined and not self._faulty.is_set():
            return
        if self._joined or self._faulty.is_set():
            self.close()
        if not self._processes:
            self.start()
        self._await_ready()
        store = _store(self.n)
        self._tell("join", port=store.port)
        self._joining = True
        join_group(0, self.n, self._device, store)
        self._joining, self._joined = False, True

    def _await_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while len(self._ready) < self.n - 1 and not self._faulty.wait(0.01):
            if time.monotonic() > deadline:
                break
        if len(self._ready) < self.n - 1:
            rank, told = self._fault or (0, None)
            self.close()
            if told is not None and told["text"]:
                print(f"rank {rank}:\n{told['text']}", flush=True)
            raise HpoError(f"rank {rank} of a trial's {self.n} processes did not begin: "
                           f"{told['said'] if told else 'it ended'}" if rank else
                           f"the processes of a trial did not begin within {_START_S:.0f} s")
        if self._source is not None and any(
                digest != self._source for digest in self._ready.values()):
            # They would train another recipe than this process; a new worker loads the new one.
            print("the study's module was edited: this worker ends, a new one loads it",
                  flush=True)
            self.close()
            os._exit(EXIT_RANK_LOST)

    def begin(
        self, order: Mapping[str, Any], seed: int, folder: Path, params: Mapping[str, Any],
        micro_batch_size: int | None,
    ) -> Team:
        """Have the other ranks make the trainer of a trial, and return the team of this one."""
        from hpo.train.team import ALONE, Team

        if self.n == 1:
            return ALONE
        self.join()
        known = {name: order[name] for name in ("epochs", "data_dir", "device", "data_fraction",
                                                "n_devices")}
        self._tell("begin", order=known, seed=seed, folder=str(folder),
                   params=params_to_json(dict(params)), micro_batch_size=micro_batch_size,
                   log=None if self.log is None else str(self.log))
        return Team(0, self.n, self._tell)

    def drop(self) -> None:
        """Have the other ranks forget the trial that is over."""
        if self._joined and not self._faulty.is_set():
            self._tell("drop")

    def _tell(self, method: str, **data: Any) -> None:
        line = json.dumps({"cmd": method, **data}).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            # Of one that is gone its pipe tells.
            with suppress(BrokenPipeError, ValueError):
                process.stdin.write(line)
                process.stdin.flush()

    def _listen(self, rank: int, reader: int, faulty: threading.Event) -> None:
        lines, fault = LineBuffer(), None
        with open(reader, "rb", buffering=0) as pipe:
            while data := pipe.read(1 << 16):
                for event in lines.feed(data):
                    if event["event"] == "ready":
                        self._ready[rank] = event["source"]
                    elif event["event"] == "failed":
                        fault = event
                        self._broken(rank, fault, faulty)
        if fault is None:
            self._broken(rank, None, faulty)

    def _broken(self, rank: int, fault: dict[str, Any] | None, faulty: threading.Event) -> None:
        if self._leaving or faulty is not self._faulty or faulty.is_set():
            return
        self._fault = (rank, fault)
        faulty.set()
        if self._joining:
            # This process waits for that one, and nothing wakes it.
            print(f"rank {rank} is gone before it began, and with it the worker", flush=True)
            os._exit(EXIT_RANK_LOST)
        if self._device == "cuda":
            # NCCL waits for a lost rank without end.
            time.sleep(_END_S)
            if faulty is self._faulty and not self._leaving:
                self._aborted = True
                _abort_group()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Give the failure of another rank for the error that it caused in this one.

        After an error of this rank the others wait for it in vain, so they are ended. Where a rank
        is lost without a word, this process ends: its trial is one of a lost worker.
        """
        if self.n == 1:
            yield
            return
        try:
            yield
            if self._faulty.is_set():
                raise RuntimeError("gloo or NCCL: another rank has failed")
        except Exception as error:
            from hpo.train.team import is_of_team

            caused = (self._aborted or is_of_team(error)) and not isinstance(
                error, HpoError) and self._faulty.wait(_TOLD_S)
            fault = self._fault if caused else None
            self.close()
            if fault is None:
                raise
            rank, told = fault
            if told is None:
                self._end(rank, error)
            kind = MemoryError if told["is_oom"] else RuntimeError
            print(f"rank {rank}:\n{told['text']}", flush=True)
            raise kind(f"rank {rank}: {told['said']}") from error

    @staticmethod
    def _end(rank: int, error: Exception) -> NoReturn:
        traceback.print_exception(error)
        print(f"rank {rank} of the trial is gone, and with it the worker", flush=True)
        sys.stderr.flush()
        os._exit(EXIT_RANK_LOST)

    def watched(self, epochs: Iterator[Any]) -> Iterator[Any]:
        """Yield a trainer's epochs, each trained under `watching`."""
        try:
            while True:
                with self.watching():
                    metrics = next(epochs, None)
                if metrics is None:
                    return
                yield metrics
        finally:
            close = getattr(epochs, "close", None)
            if close is not None:
                close()

    def close(self) -> None:
        """End the other ranks."""
        self._leaving = True
        if self._joined:
            # A group that a lost rank has broken may never be left in order.
            if self._device == "cuda" and self._faulty.is_set() and not self._aborted:
                _abort_group()
            _leave_group()
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes, self._ready = [], {}
        self._joining = self._joined = self._aborted = False
        self._fault, self._faulty, self._leaving = None, threading.Event(), False


def _store(n: int, port: int = 0) -> Any:
    """Return the store by which ranks find each other; without a port, that of rank 0."""
    import torch.distributed as dist

    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        "127.0.0.1", port, n, is_master=port == 0, wait_for_workers=False, timeout=TIMEOUT)


def join_group(rank: int, n: int, device: str, store: Any) -> None:
    """Join the process group of a worker's ranks: NCCL between GPUs, gloo on the CPU.

    `store` is rank 0's, or its port.
    """
    import torch
    import torch.distributed as dist

    # All of them are on this host, whose name need not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=_store(n, store) if isinstance(store, int) else store,
                            rank=rank, world_size=n, timeout=TIMEOUT)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _abort_group() -> None:
    import torch.distributed.distributed_c10d as c10d

    with suppress(RuntimeError, ValueError):
        c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]
