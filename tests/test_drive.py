"""One trial's every ending, walked without a database or a process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hpo.drive import Ending, Goal, Progress, drive, failure, is_out_of_memory

LOSS = Goal("loss", maximize=False)
ACC = Goal("acc", maximize=True)


class Told:
    """What a driven trial reported."""

    def __init__(self) -> None:
        self.reported: list[tuple[int, float]] = []

    def __call__(self, epoch: int, value: float, metrics: dict[str, float]) -> None:
        self.reported.append((epoch, value))


def driven(
    yields: list[Any] | Callable[[], Any], goal: Goal = LOSS,
    prune: Callable[[int], str | None] = lambda epoch: None,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Ending, list[tuple[int, float]]]:
    told = Told()
    epochs = yields if callable(yields) else lambda: iter(yields)
    ending = drive(epochs, goal, report=told, should_prune=prune, should_stop=stop)
    return ending, told.reported


def test_a_trial_s_value_is_its_best_epoch() -> None:
    ending, told = driven([{"loss": 3}, {"loss": 1, "acc": 0.5}, {"loss": 2}])
    assert (ending.state, ending.value, ending.reason) == ("COMPLETE", 1.0, "")
    assert told == [(0, 3.0), (1, 1.0), (2, 2.0)]
    assert ending.attrs == {"n_epochs": 3, "best_epoch": 1, "best": {"loss": 1.0, "acc": 0.5},
                            "last": {"loss": 2.0}}


def test_best_is_the_highest_where_more_is_better() -> None:
    """C22: direction and metric fit."""
    assert driven([{"acc": 0.3}, {"acc": 0.1}], ACC)[0].value == 0.3


def test_the_first_of_two_equal_epochs_is_the_best() -> None:
    assert driven([{"loss": 1}, {"loss": 1}])[0].attrs["best_epoch"] == 0


@pytest.mark.parametrize(("second", "state", "said"), [
    ({"loss": math.nan}, "PRUNED", "diverged at epoch 1"),
    ({"loss": None}, "FAIL", "error: epoch 1: 'loss' must be a number, got None"),
    ({"loss": "abc"}, "FAIL", "error: epoch 1: 'loss' must be a number, got 'abc'"),
    ({"acc": 1, "f1": 2}, "FAIL", "error: epoch 1: 'loss' is missing, got 'acc', 'f1'"),
    ({}, "FAIL", "error: epoch 1: 'loss' is missing, got an empty dict"),
    (0.5, "FAIL", "error: epoch 1: expected a dict with 'loss', got float"),
    (None, "FAIL", "error: epoch 1: expected a dict with 'loss', got NoneType"),
    ({"loss": torch.zeros(2)}, "FAIL",
     "error: epoch 1: 'loss' must be one number, got Tensor of 2 elements"),
    ({"loss": np.zeros(3)}, "FAIL",
     "error: epoch 1: 'loss' must be one number, got ndarray of 3 elements"),
    ({"loss": [0.5]}, "FAIL", "error: epoch 1: 'loss' must be a number, got [0.5]"),
    ({"loss": True}, "FAIL", "error: epoch 1: 'loss' must be a number, got True"),
    ({"loss": np.bool_(True)}, "FAIL", "error: epoch 1: 'loss' must be a number, got True"),
    ({"loss": "0.5"}, "FAIL", "error: epoch 1: 'loss' must be a number, got '0.5'"),
    ({"loss": 1j}, "FAIL", "error: epoch 1: 'loss' must be a number, got 1j"),
    ({"loss": 10 ** 400}, "FAIL", "error: epoch 1: 'loss' is too large for a float"),
    ({"loss": 0.5, "acc": "high"}, "FAIL", "error: epoch 1: 'acc' must be a number, got 'high'"),
], ids=lambda value: str(value)[:30])
def test_a_bad_yield_names_the_metric_and_the_epoch(second: Any, state: str, said: str) -> None:
    """C18.1, C18.3: the reason has the metric, the epoch and what came instead."""
    ending, told = driven([{"loss": 0.5}, second])
    assert (ending.state, ending.reason) == (state, said)
    assert told == [(0, 0.5)]


@pytest.mark.parametrize("value", [
    torch.tensor(0.5), torch.tensor([0.5], requires_grad=True), np.float32(0.5), np.array([[0.5]]),
    0.5,
], ids=repr)
def test_one_number_of_any_library_counts_as_that_number(value: Any) -> None:
    """C18.3, C30.4: a tensor with one element and numpy.float32 are taken."""
    ending, _ = driven([{"loss": value, "acc": torch.tensor(1)}])
    assert (ending.state, ending.value) == ("COMPLETE", 0.5)
    assert type(ending.value) is float
    assert ending.attrs["best"] == {"loss": 0.5, "acc": 1.0}


def test_an_objective_that_yields_nothing_fails_at_epoch_0() -> None:
    """C18.1: `noyield`."""
    ending, _ = driven([])
    assert (ending.state, ending.reason) == (
        "FAIL", "error: epoch 0: the objective ended without yielding 'loss'")


@pytest.mark.parametrize("returned", [None, 0.5, {"loss": 1}, [{"loss": 1}]])
def test_an_objective_that_is_no_generator_says_what_it_returned(returned: Any) -> None:
    ending, _ = driven(lambda: returned)
    assert ending.state == "FAIL"
    assert ending.reason == (f"error: epoch 0: the objective must yield a dict with 'loss' an "
                             f"epoch, it returned {type(returned).__name__}")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("metric", ["loss", "train_loss", "val_loss"])
def test_a_metric_that_is_not_finite_is_pruned_as_diverged(metric: str, value: float) -> None:
    """C19: an infinite value never becomes the best."""
    ending, told = driven([{"loss": 2.0}, {"loss": 1.0, metric: value}])
    assert (ending.state, ending.reason, ending.value) == ("PRUNED", "diverged at epoch 1", 2.0)
    assert told == [(0, 2.0)]


def test_a_trial_that_diverges_at_once_has_no_value() -> None:
    """C19: `diverged at epoch 0`."""
    ending, told = driven([{"loss": math.inf}])
    assert (ending.state, ending.reason, ending.value) == ("PRUNED", "diverged at epoch 0", None)
    assert told == []


def test_an_epoch_that_diverged_was_trained_and_is_counted() -> None:
    ending, told = driven([{"loss": 2.0}, {"loss": 1.0}, {"loss": math.nan}])
    assert (ending.attrs["n_epochs"], len(told)) == (3, 2)
    assert (ending.attrs["best"], ending.attrs["last"]) == ({"loss": 1.0}, {"loss": 1.0})
    assert driven([{"loss": math.inf}])[0].attrs["n_epochs"] == 1
    assert driven([{"loss": 1.0}, {"loss": "high"}])[0].attrs["n_epochs"] == 2


def test_another_metric_may_be_infinite() -> None:
    assert driven([{"loss": 1.0, "grad_norm": math.inf}])[0].state == "COMPLETE"


@pytest.mark.parametrize(("epochs", "said"), [
    ([0, 0, 1], "epoch 0 after epoch 0"), ([0, 1.5, 2], "epoch 1.5 after epoch 0"),
    ([2, 1, 0], "epoch 1 after epoch 2"), ([-1, 0, 1], "epoch -1 after the first"),
    (["0", "1", "2"], "epoch '0' after the first"), ([0, True], "epoch True after epoch 0"),
    ([0, None], "epoch None after epoch 0"),
], ids=str)
def test_epochs_that_do_not_rise_by_whole_numbers_fail(epochs: list[Any], said: str) -> None:
    """C23.2: the reason holds the two numbers; nothing is dropped silently."""
    ending, _ = driven([{"epoch": epoch, "loss": 1.0} for epoch in epochs])
    assert ending.state == "FAIL"
    assert ending.reason.startswith(f"error: {said}")


def test_epochs_of_numpy_count_as_whole_numbers() -> None:
    """C23.2: numpy.int64 0,1,2 is COMPLETE."""
    ending, told = driven([{"epoch": np.int64(k), "loss": 1.0} for k in range(3)])
    assert ending.state == "COMPLETE"
    assert told == [(0, 1.0), (1, 1.0), (2, 1.0)]
    assert "epoch" not in ending.attrs["last"]


def test_epochs_may_leave_gaps() -> None:
    assert driven([{"epoch": k, "loss": 1.0} for k in (0, 5, 9)])[1] == [
        (0, 1.0), (5, 1.0), (9, 1.0)]


def test_without_an_epoch_key_epochs_are_counted() -> None:
    """C23.1, C23.3: 3 x 4 epochs are 12 values, whatever the values are."""
    _, told = driven([{"loss": 3 - k} for _ in range(3) for k in range(4)])
    assert [epoch for epoch, _ in told] == list(range(12))


def test_a_pruned_trial_has_the_pruner_s_name_and_its_last_value() -> None:
    """C22.1: the reason is `median at epoch e`."""
    ending, told = driven([{"loss": 1}, {"loss": 4}, {"loss": 5}],
                          prune=lambda epoch: "median" if epoch == 1 else None)
    assert (ending.state, ending.reason, ending.value) == ("PRUNED", "median at epoch 1", 4.0)
    assert len(told) == 2
    assert (ending.attrs["best_epoch"], ending.attrs["last"]) == (0, {"loss": 4.0})


def test_a_trial_of_a_run_that_stops_is_interrupted_after_its_epoch() -> None:
    ending, told = driven([{"loss": 1}, {"loss": 2}], stop=lambda: True)
    assert (ending.state, ending.reason) == ("FAIL", "interrupted: after epoch 0")
    assert ending.kind == "interrupted"
    assert told == [(0, 1.0)]


def test_leaving_a_trial_runs_the_objective_s_own_clean_up() -> None:
    left: list[str] = []

    def objective() -> Iterator[dict[str, float]]:
        try:
            for k in range(9):
                yield {"loss": k}
        finally:
            left.append("closed")

    driven(objective, prune=lambda epoch: "median")
    assert left == ["closed"]


def test_a_clean_up_that_raises_does_not_change_the_ending(
    capsys: pytest.CaptureFixture[str]
) -> None:
    def objective() -> Iterator[dict[str, float]]:
        try:
            yield {"loss": 1}
            yield {"loss": 2}
        finally:
            raise OSError("no such file")

    ending, _ = driven(objective, prune=lambda epoch: "median")
    assert ending.reason == "median at epoch 0"
    assert "clean-up raised OSError: no such file" in capsys.readouterr().out


def test_an_objective_cannot_swallow_its_pruning() -> None:
    def objective() -> Iterator[dict[str, float]]:
        for k in range(9):
            try:
                yield {"loss": k}
            except Exception:
                continue

    assert driven(objective, prune=lambda epoch: "median")[0].state == "PRUNED"


@pytest.mark.parametrize(("error", "reason", "spoiled"), [
    (ValueError("boom"), "error: ValueError: boom", False),
    (SystemExit(3), "error: SystemExit: 3", False),
    (MemoryError(), "oom: MemoryError", True),
    (KeyboardInterrupt(), "error: KeyboardInterrupt", False),
    (GeneratorExit(), "error: GeneratorExit", False),
    (OSError(24, "Too many open files"), "error: OSError: [Errno 24] Too many open files", True),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
     "oom: RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", True),
    (torch.OutOfMemoryError("CUDA out of memory."), "oom: OutOfMemoryError: CUDA out of memory.",
     True),
    (RuntimeError("CUDA error: device-side assert triggered"),
     "error: RuntimeError: CUDA error: device-side assert triggered (mostly a label or an index "
     "out of its range; the log may say more, and CUDA_LAUNCH_BLOCKING=1 or --devices cpu shows "
     "the line)", True),
], ids=lambda value: str(value)[:30])
def test_an_error_of_the_objective_is_the_reason(
    error: BaseException, reason: str, spoiled: bool
) -> None:
    def objective() -> Iterator[dict[str, float]]:
        yield {"loss": 1}
        raise error

    ending, told = driven(objective)
    assert (ending.state, ending.reason, ending.spoiled) == ("FAIL", reason, spoiled)
    assert told == [(0, 1.0)]
    assert ending.attrs["n_epochs"] == 1
    assert "Traceback" in ending.text


def test_a_reason_is_short_and_the_text_whole() -> None:
    """C08.3: a message of 2 MB leaves a reason of at most 4 KB."""
    ending = failure(ValueError("x" * 2_000_000))
    assert len(ending.reason) <= 1000
    assert len(ending.text) > 2_000_000


def test_an_error_that_talks_of_memory_without_being_one_is_no_oom() -> None:
    assert not is_out_of_memory(ValueError("out of memory"))


class Unreachable(Exception):
    pass


@pytest.mark.parametrize("where", ["report", "prune"])
def test_the_storage_s_own_error_is_raised_and_not_the_trial_s(where: str) -> None:
    """A database that cannot be reached says nothing of the params."""
    left: list[str] = []

    def objective() -> Iterator[dict[str, float]]:
        try:
            yield {"loss": 1}
        finally:
            left.append("closed")

    def breaks(*_: Any) -> None:
        raise Unreachable

    def quiet(*_: Any) -> None:
        return None

    with pytest.raises(Unreachable):
        drive(objective, LOSS, report=breaks if where == "report" else quiet,
              should_prune=breaks if where == "prune" else quiet)
    assert left == ["closed"]


def test_progress_counts_from_the_epoch_that_was_given() -> None:
    progress = Progress(LOSS)
    progress.add(progress.begin({"epoch": 3}), {"loss": 1.0})
    assert progress.begin({}) == 4
