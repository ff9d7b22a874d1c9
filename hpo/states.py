"""Where a trial goes on that was cut off: its training states, and the epochs before them.

A state is written while the trial trains on, from a copy; so the trial pays for the copy alone,
and no more than a small part of its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.errors import DataError, HpoError

if TYPE_CHECKING:
    from hpo.train.loop import Trainer

Metrics = dict[str, float]
# A trial loses this at most, or an epoch where that takes longer, when its process is killed.
_LEAST_S = 1.0
# The part of a trial's time that its states may cost.
_MOST_FRACTION = 0.02


class StateWriter:
    """Writes one state after another in the background, for all trials of a worker."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="states")

    def submit(self, write: Callable[[], float]) -> Future[float]:
        """Have a state written; the result is the CPU time that it took."""
        return self._pool.submit(write)

    def close(self) -> None:
        """Wait for what is being written."""
        self._pool.shutdown()


class TrialStates:
    """The training states of one trial and of those that it retries, in one folder.

    `source` is the digest of the file that makes the recipe, as it was loaded: a model's code is
    not in the recipe. `flush` stores the epochs that a state goes on from: no
    trial takes over what no trial has reported. `say` tells the user of what goes wrong.
    """

    def __init__(
        self, folder: Path, writer: StateWriter, source: str | None,
        flush: Callable[[], None], say: Callable[[str], None],
    ) -> None:
        self._folder, self._writer, self._flush, self._say = folder, writer, flush, say
        self._source = source
        self._history: dict[int, Metrics] = {}
        self._since = time.monotonic()
        self._cost_s = 0.0
        self._writing: Future[float] | None = None
        # The epoch that the newest state goes on with.
        self._stored = 0
        self._has_files = False

    def resume(self, make: Callable[[], Trainer]) -> tuple[Trainer, dict[int, Metrics]]:
        """Return a trainer that goes on where the newest state ends, and the epochs before.

        A state of another recipe, module or data set is refused with both sides named, and a
        broken one passed over; without any, the trainer begins at the first epoch.
        """
        from hpo.train.resume import read_state
        from hpo.train.team import is_of_team

        trainer = make()
        state = read_state(self._folder)
        self._has_files = self._folder.is_dir()
        if state is None:
            return trainer, {}
        try:
            if state["module"] != self._source:
                raise DataError("the study's module has changed")
            trainer.load_state_dict(state)
        except (DataError, RuntimeError, ValueError, KeyError, TypeError) as error:
            if not isinstance(error, DataError) and is_of_team(error):
                # No fault of the state's: another rank is gone.
                raise
            self._say(f"its training state is not used, {error}: it begins at its first epoch")
            # Some of the state may be in this one.
            trainer.close()
            return make(), {}
        self._stored = trainer.next_epoch
        self._history = {int(epoch): dict(metrics) for epoch, metrics in state["history"]}
        return trainer, dict(self._history)

    def take_in(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Take in an epoch that the trial has trained: it belongs to each later state."""
        self._history[epoch] = dict(metrics)

    def after_epoch(self, trainer: Trainer) -> None:
        """Have the state of the last epoch written if it is due."""
        now = time.monotonic()
        due_s = max(_LEAST_S, self._cost_s / _MOST_FRACTION)
        is_over = trainer.next_epoch >= trainer.run.epochs
        if is_over or now - self._since < due_s or self._is_writing():
            return
        self._settle()
        self._since = now
        began = time.thread_time()
        state = self._state(trainer)
        self._cost_s = time.thread_time() - began
        self._has_files = True
        self._writing = self._writer.submit(lambda: self._write(state))

    def write_now(self, trainer: Trainer) -> None:
        """Write the state of the last epoch, before the trial goes back to the queue."""
        self._settle()
        if trainer.next_epoch > self._stored:
            with self._told():
                self._has_files = True
                self._write(self._state(trainer))

    def remove(self) -> None:
        """Delete all states: the trial has ended, and nobody goes on with it."""
        self._settle()
        if self._has_files:
            remove_states(self._folder)

    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def _settle(self) -> None:
        """Wait for the state that is being written, and tell of one that could not be."""
        writing, self._writing = self._writing, None
        if writing is not None:
            with self._told():
                self._cost_s += writing.result()

    @contextmanager
    def _told(self) -> Iterator[None]:
        from optuna.exceptions import UpdateFinishedTrialError

        try:
            yield
        except UpdateFinishedTrialError:
            # Others have ended the trial; its owner is told so by its next report.
            return
        except (OSError, RuntimeError, HpoError) as error:
            self._say(f"its training state could not be written ({error}): a stop or a crash "
                      f"costs what it has trained since the one before")

    def _state(self, trainer: Trainer) -> dict[str, Any]:
        history = [[epoch, metrics] for epoch, metrics in self._history.items()]
        return {**trainer.state_dict(), "history": history, "module": self._source}

    def _write(self, state: Mapping[str, Any]) -> float:
        from hpo.train.resume import write_state

        began = time.thread_time()
        self._flush()
        write_state(self._folder, state)
        self._stored = state["next_epoch"]
        return time.thread_time() - began


# Whole states, and those whose writer was killed.
_FILES = ("epoch-*.state", ".epoch-*.state-*")


def remove_states(folder: Path) -> None:
    """Delete the training states of a trial's folder, and the folder if nothing else is in it."""
    for pattern in _FILES:
        for path in folder.glob(pattern):
            with suppress(OSError):
                path.unlink()
    with suppress(OSError):
        folder.rmdir()


def sweep(artifacts: Path, is_over: Callable[[], bool]) -> None:
    """Delete the states that trials of a study have left, if it is over: nobody goes on with them.

    A worker that was killed right after its trial's end has left them, as its parent stored the
    end. Which there are is looked up before `is_over`, so those of a trial that begins are safe.
    """
    folders = {path.parent for pattern in _FILES for path in artifacts.glob(f"*/*/{pattern}")}
    if folders and is_over():
        for folder in folders:
            remove_states(folder)


class Continued:
    """A trial's epochs, behind those that the trials before it had trained.

    `earlier` are their metrics by epoch. What the trial itself yields first says, by its key
    `epoch`, how many of them it does not train again.
    """

    def __init__(self, epochs: Iterator[Any], earlier: Mapping[int, Metrics]) -> None:
        self._epochs, self._earlier = epochs, earlier
        self.taken_over: set[int] = set()

    def epochs(self) -> Iterator[Any]:
        """Yield the metrics of each epoch, the earlier ones first."""
        try:
            first = next(self._epochs, None)
            yield from self._before(first)
            if first is not None:
                yield first
                yield from self._epochs
        finally:
            close = getattr(self._epochs, "close", None)
            if close is not None:
                close()

    def _before(self, first: Any) -> Iterator[Any]:
        epoch = first.get("epoch") if isinstance(first, dict) else None
        end = epoch if isinstance(epoch, int) else 0
        if first is None:
            # Nothing was left to train.
            end = max(self._earlier, default=-1) + 1
        for epoch in sorted(self._earlier):
            if epoch < end:
                self.taken_over.add(epoch)
                yield {"epoch": epoch, **self._earlier[epoch]}
