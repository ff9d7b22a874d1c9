"""Drive one trial: epochs from its generator to reports, pruning and a final state.

Knows no database and no process: what it reports to is given as functions, so that every way a
trial can end is one small ladder that a test can walk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hpo import causes
from hpo.space import plain

# A metric that is not finite ends the trial as diverged if it is the study's own or one of these.
_LOSSES = ("train_loss", "val_loss")
# A reason is for tables and one-line messages; the whole text is in the trial's log.
_MAX_REASON = 1000


@dataclass(frozen=True)
class Goal:
    """The metric of a study and whether more of it is better."""

    metric: str
    maximize: bool

    def better(self, value: float, than: float | None) -> bool:
        """Return whether a value improves on another; anything improves on None."""
        return than is None or (value > than if self.maximize else value < than)


@dataclass
class Ending:
    """How a trial ended: an Optuna state's name, its value, why, and what to keep of it.

    `spoiled` says that the process may be unfit for another trial; `text` is the traceback.
    """

    state: str
    value: float | None = None
    reason: str = ""
    attrs: dict[str, Any] = field(default_factory=dict)
    spoiled: bool = False
    text: str = ""

    @property
    def kind(self) -> str:
        """The first word or words of the reason: `oom`, `error`, `interrupted`, ..."""
        return self.reason.split(":")[0]


class BadMetrics(ValueError):
    """What an objective yielded is no dict of numbers with the study's metric in it."""


@dataclass
class Progress:
    """What a trial has reported so far."""

    goal: Goal
    epochs: list[int] = field(default_factory=list)
    best: float | None = None
    best_epoch: int | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    last: float | None = None
    last_metrics: dict[str, float] = field(default_factory=dict)

    def begin(self, metrics: dict[str, Any]) -> int:
        """Count the epoch that gave these metrics and return its number.

        It was trained whatever the metrics are worth: what diverged has cost its epochs too.

        Raises:
            BadMetrics: for an `epoch` that is no whole number above the last one.
        """
        epoch = self._next_epoch(metrics)
        self.epochs.append(epoch)
        return epoch

    def _next_epoch(self, metrics: dict[str, Any]) -> int:
        """Return the metrics' own key `epoch`, else one more than the last."""
        after = self.epochs[-1] if self.epochs else None
        if "epoch" not in metrics:
            return 0 if after is None else after + 1
        epoch = plain(metrics["epoch"])
        said = "the first" if after is None else f"epoch {after}"
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
            raise BadMetrics(f"epoch {epoch!r} after {said}: an epoch is a whole number from 0")
        if after is not None and epoch <= after:
            raise BadMetrics(f"epoch {epoch} after epoch {after}: epochs must rise")
        return epoch

    def add(self, epoch: int, metrics: dict[str, float]) -> float:
        """Take in the metrics of an epoch that has begun and return the study's metric."""
        value = metrics[self.goal.metric]
        self.last, self.last_metrics = value, metrics
        if self.goal.better(value, self.best):
            self.best, self.best_epoch, self.best_metrics = value, epoch, metrics
        return value

    def attrs(self) -> dict[str, Any]:
        """Return what a trial keeps of its epochs, as user attributes."""
        return {"n_epochs": len(self.epochs), "best_epoch": self.best_epoch,
                "best": self.best_metrics, "last": self.last_metrics}


def checked(metrics: Any, goal: Goal, epoch: int) -> dict[str, float]:
    """Return an epoch's metrics as plain floats.

    A tensor or array of one element counts as its number; True and texts do not.

    Raises:
        BadMetrics: naming the metric, the epoch and what came instead.
    """
    if not isinstance(metrics, dict):
        raise BadMetrics(f"epoch {epoch}: expected a dict with '{goal.metric}', "
                         f"got {type(metrics).__name__}")
    if goal.metric not in metrics:
        raise BadMetrics(f"epoch {epoch}: '{goal.metric}' is missing, "
                         f"got {', '.join(map(repr, metrics)) or 'an empty dict'}")
    return {name: _number(name, value, epoch) for name, value in metrics.items()
            if name != "epoch"}


def _number(name: str, value: Any, epoch: int) -> float:
    n_elements = value.numel() if hasattr(value, "numel") else getattr(value, "size", 1)
    if hasattr(value, "item") and n_elements == 1:
        value = value.item()
    elif hasattr(value, "item"):
        raise BadMetrics(f"epoch {epoch}: '{name}' must be one number, "
                         f"got {type(value).__name__} of {n_elements} elements")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        shown = repr(value)[:80]
        raise BadMetrics(f"epoch {epoch}: '{name}' must be a number, got {shown}")
    try:
        return float(value)
    except OverflowError:
        raise BadMetrics(f"epoch {epoch}: '{name}' is too large for a float") from None


def diverged(metrics: dict[str, float], goal: Goal) -> str | None:
    """Return the name of the first metric that must be finite and is not."""
    names = (goal.metric, *_LOSSES)
    return next((n for n in names if not math.isfinite(metrics.get(n, 0.0))), None)


def drive(
    epochs: Callable[[], Iterator[Any]],
    goal: Goal,
    *,
    report: Callable[[int, float, dict[str, float]], None],
    should_prune: Callable[[int], str | None],
    should_stop: Callable[[], bool] = lambda: False,
) -> Ending:
    """Run one trial to its end and say how it ended; only the reporting's own errors are raised.

    `epochs` starts the objective; `report(epoch, value, metrics)` stores an epoch;
    `should_prune(epoch)` gives the pruner's name or None; `should_stop()` says that the run is
    being stopped. A non-finite metric ends the trial as PRUNED, so that the sampler learns of it.
    """
    progress = Progress(goal)
    source: Any = None
    try:
        source = epochs()
        if not hasattr(source, "__next__"):
            raise BadMetrics(f"epoch 0: the objective must yield a dict with '{goal.metric}' an "
                             f"epoch, it returned {type(source).__name__}")
        ending = _walk(source, progress, report, should_prune, should_stop)
        _close(source)
    except _ReportFailed as failed:
        _close(source)
        raise failed.error from failed.error.__cause__
    except BaseException as error:
        # SystemExit, KeyboardInterrupt and its like: here they are the objective's own.
        _close(source)
        ending = failure(error)
    ending.attrs.update(progress.attrs())
    return ending


class _ReportFailed(BaseException):
    """Carries an error of the storage past the net that catches the objective's own."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _walk(source, progress, report, should_prune, should_stop) -> Ending:
    goal = progress.goal
    for metrics in source:
        said = metrics if isinstance(metrics, dict) else {}
        epoch = progress.begin(said)
        numbers = checked(metrics, goal, epoch)
        if diverged(numbers, goal):
            return Ending("PRUNED", progress.last, f"diverged at epoch {epoch}")
        value = progress.add(epoch, numbers)
        try:
            report(epoch, value, numbers)
            pruner = should_prune(epoch)
        except Exception as error:
            raise _ReportFailed(error) from error
        if pruner:
            return Ending("PRUNED", progress.last, f"{pruner} at epoch {epoch}")
        if should_stop():
            return Ending("FAIL", None, f"interrupted: after epoch {epoch}")
    if progress.best is None:
        raise BadMetrics(f"epoch 0: the objective ended without yielding '{goal.metric}'")
    return Ending("COMPLETE", progress.best)


def _close(source: Any) -> None:
    """Close the objective, so that its own clean-up runs now; its faults are not the trial's."""
    try:
        if hasattr(source, "close"):
            source.close()
    except BaseException as error:
        print(f"the objective's clean-up raised {causes.said(error)}", flush=True)


def failure(error: BaseException) -> Ending:
    """Return the ending of a trial whose objective raised."""
    import traceback

    text = "".join(traceback.format_exception(error))
    said = causes.said(error)
    if isinstance(error, BadMetrics):
        return Ending("FAIL", None, f"error: {causes.printable(str(error))}"[:_MAX_REASON],
                      text=text)
    if is_out_of_memory(error):
        return Ending("FAIL", None, f"oom: {said}"[:_MAX_REASON], spoiled=True, text=text)
    spoiled = causes.spoils(error) or any(map(is_out_of_memory, causes.chain(error)))
    return Ending("FAIL", None, f"error: {said}"[:_MAX_REASON], spoiled=spoiled, text=text)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the device's or the host's memory is full."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = causes.whole(error)
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "can't allocate memory" in text)
