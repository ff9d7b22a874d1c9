"""Where an epoch's time goes, and what would shorten it.

Each part is waited for before the next one begins, so that a GPU's work is counted where it is
asked for; in training they overlap, and an epoch takes at most the sum.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hpo.baselines.lr_sweep import restored
from hpo.diagnosis.batch import repeated
from hpo.diagnosis.finding import Finding, look, ok, plural
from hpo.train.feed import Feed
from hpo.train.loop import Trainer
from hpo.train.regularize import MixedLabels
from hpo.train.scoring import evaluate

PART = "speed"
N_STEPS, N_WARM, MOST_S = 30, 3, 20.0
# An evaluation is timed on this many batches at most.
_EVAL_BATCHES = 20
# Shares of an epoch from which a cure is worth its trouble.
HIGH = {"data": 0.2, "copy": 0.15, "augment": 0.3, "optimizer": 0.3, "evaluation": 0.4}
# A batch of twice the size that takes less than this much longer leaves the GPU idle.
IDLE_BELOW = 1.3


@dataclass
class Clock:
    """Seconds of each part of a step; `sync` waits for the device."""

    sync: Callable[[], None]
    seconds: dict[str, float] = field(default_factory=dict)

    def lap(self, part: str, since: float) -> float:
        """Count the time since a moment for a part, and return the present one."""
        self.sync()
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - since
        return now


class TimedFeed:
    """A feed that tells a clock how long its reader waited."""

    def __init__(self, feed: Feed, clock: Clock) -> None:
        self._feed, self._clock = feed, clock
        self.device, self.ready = feed.device, feed.ready

    def __len__(self) -> int:
        return len(self._feed)

    def batches(self, order: Tensor | None, size: int,
                n_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the feed's batches."""
        source = self._feed.batches(order, size, n_batches)
        while True:
            start = time.perf_counter()
            batch = next(source, None)
            self._clock.lap("data", start)
            if batch is None:
                return
            yield batch

    def close(self) -> None:
        """End the processes that read for it."""
        self._feed.close()


class Head:
    """The first rows of a feed."""

    def __init__(self, feed: Feed, n: int) -> None:
        self._feed, self._n = feed, min(n, len(feed))
        self.device, self.ready = feed.device, feed.ready

    def __len__(self) -> int:
        return self._n

    def batches(self, order: Tensor | None, size: int,
                n_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the feed's batches, the last one cut short."""
        left = self._n
        for images, labels in self._feed.batches(order, size, n_batches):
            yield images[:left], labels[:left]
            left -= len(labels)

    def reseed(self, seed: int) -> None:
        """Do nothing: what it is a part of does that."""

    def close(self) -> None:
        """End the processes that read for it."""
        self._feed.close()


@dataclass(frozen=True)
class Pace:
    """Seconds of an epoch by part, guessed from some steps of it."""

    seconds: Mapping[str, float]
    n_steps: int
    images_per_s: float

    @property
    def epoch_s(self) -> float:
        """Seconds of a whole epoch."""
        return sum(self.seconds.values())

    def share(self, part: str) -> float:
        """Return the part of an epoch that goes there."""
        return self.seconds.get(part, 0.0) / max(self.epoch_s, 1e-12)


def measure(trainer: Trainer) -> Pace:
    """Time some steps and an evaluation, and put all back."""
    clock = Clock(_sync(trainer.device))
    per_epoch, whole = trainer.steps_per_epoch, trainer.data
    n = min(per_epoch, N_STEPS + N_WARM)
    trainer.data = dataclasses.replace(whole, train=TimedFeed(whole.train, clock))
    try:
        with restored(trainer.model, trainer.optimizer):
            timed = _steps(trainer, clock, n)
    finally:
        trainer.data = whole
    step = {part: statistics.median(one[part] for one in timed) for part in timed[0]}
    # Readers deliver in bursts: of many short waits and a long one the middle says nothing.
    step["data"] = statistics.mean(one["data"] for one in timed)
    if copied := min(_copy_s(trainer), step["data"]):
        # A loader's batches are copied within the wait for them.
        step["data"] -= copied
        step["copy"] = copied
    times = {part: s * per_epoch for part, s in step.items()}
    times["evaluation"] = _evaluation_s(trainer, clock.sync)
    n_rows = min(len(whole.train), per_epoch * trainer.recipe.batch_size)
    return Pace(times, len(timed), n_rows / max(sum(times.values()), 1e-12))


def _sync(device: torch.device) -> Callable[[], None]:
    if device.type != "cuda":
        return lambda: None
    return lambda: torch.cuda.synchronize(device)


def _steps(trainer: Trainer, clock: Clock, n: int) -> list[dict[str, float]]:
    """Make up to `n` steps and return the seconds of each; the first few only warm up."""
    found: list[dict[str, float]] = []
    deadline = time.monotonic() + MOST_S
    trainer.model.train()
    source = trainer.batches(trainer.recipe.batch_size, n)
    for _ in range(n):
        clock.seconds.clear()
        start = time.perf_counter()
        images, labels = next(source)
        now = clock.lap("augment", start)
        # What the feed has counted as a wait is not counted twice.
        clock.seconds["augment"] -= clock.seconds["data"]
        for part in _parts(trainer, images, labels):
            loss = trainer.loss(*part)
            now = clock.lap("forward", now)
            trainer.update.backward(loss)
            now = clock.lap("backward", now)
        trainer.update.step()
        clock.lap("optimizer", now)
        found.append(dict(clock.seconds))
        if time.monotonic() > deadline:
            break
    return found[min(N_WARM, len(found) - 1):]


def _parts(
    trainer: Trainer, images: Tensor, labels: Tensor | MixedLabels
) -> list[tuple[Tensor, Tensor | MixedLabels]]:
    """Return the micro-batches of a batch."""
    n = max(1, min(math.ceil(len(labels) / trainer.micro_batch_size), len(labels) // 2))
    return list(zip(images.tensor_split(n), labels.tensor_split(n), strict=True))


def _copy_s(trainer: Trainer) -> float:
    """Return the seconds that a batch takes from the host's pinned memory to the GPU."""
    if trainer.device.type != "cuda" or trainer.data.resident:
        return 0.0
    [(images, _)] = list(trainer.data.train.batches(
        torch.arange(min(trainer.recipe.batch_size, len(trainer.data.train))),
        trainer.recipe.batch_size, 1))
    host, sync = images.cpu().pin_memory(), _sync(trainer.device)
    took = []
    for _ in range(5):
        sync()
        start = time.perf_counter()
        host.to(trainer.device, non_blocking=True)
        sync()
        took.append(time.perf_counter() - start)
    return sorted(took)[2]


def _evaluation_s(trainer: Trainer, sync: Callable[[], None]) -> float:
    """Return the seconds of an evaluation, from the second one on: the first one warms up."""
    val, size = trainer.data.val, trainer.recipe.eval_batch_size
    some = Head(val, _EVAL_BATCHES * size)
    evaluate(trainer.model, trainer.data, Head(val, size), trainer.recipe)
    sync()
    start = time.perf_counter()
    evaluate(trainer.model, trainer.data, some, trainer.recipe)
    sync()
    return (time.perf_counter() - start) * len(val) / len(some)


def pace_finding(trainer: Trainer, pace: Pace) -> Finding:
    """Return where an epoch's time goes, and the cure for the part that stands out most."""
    shares = ", ".join(f"{part} {pace.share(part):.0%}" for part in (
        "data", "copy", "augment", "forward", "backward", "optimizer", "evaluation")
        if part in pace.seconds)
    text = (f"about {span(pace.epoch_s)} an epoch, {pace.images_per_s:,.0f} rows a second: "
            f"{shares} (of {plural(pace.n_steps, 'step')})")
    over = {part: pace.share(part) / limit for part, limit in HIGH.items()
            if pace.share(part) > limit}
    if not over:
        return ok(PART, "epoch", text)
    return look(PART, "epoch", text, cure(trainer, max(over, key=over.__getitem__)))


def span(seconds: float) -> str:
    """Return seconds as a person reads them."""
    return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms" if seconds < 1 else (
        f"{seconds:.3g} s")


def cure(trainer: Trainer, part: str) -> str:
    """Return what shortens a part of an epoch of this recipe."""
    if part == "data":
        if trainer.data.resident:
            return "rows are gathered a batch at a time: a larger batch_size= asks less often"
        reads = "n_loader_workers= (processes that read; their memory is pinned on a GPU)"
        return (f"more {reads}, or the whole data set as tensors(...), which stays on the device "
                f"(resident=True)")
    if part == "copy":
        return "resident=True keeps the data on the device; bytes take a quarter of floats' time"
    if part == "augment":
        return "fewer or cheaper augment= steps; those of hpo.train work on a batch at a time"
    if part == "optimizer":
        return "a larger batch_size= makes fewer steps an epoch (search lr along with it)"
    return "a larger eval_batch_size=, or a smaller val_fraction="


def precision_finding(trainer: Trainer) -> Finding:
    """Return in what precision a GPU computes, and whether a batch keeps it busy.

    Untested without a GPU.
    """
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    if not native:
        name = torch.cuda.get_device_name(trainer.device)
        return look(PART, "precision", f"{name} has no bf16 of its own and emulates it",
                    "a GPU from 2020 on computes in bf16 at several times the speed")
    once, twice = (_pass_s(trainer, k * trainer.micro_batch_size) for k in (1, 2))
    text = (f"{trainer.recipe.precision}; a batch twice as large takes {twice / once:.2f} times "
            f"as long")
    if twice < IDLE_BELOW * once:
        return look(PART, "precision", text, "the GPU waits for its next kernel: a larger "
                                             "batch_size= costs nearly nothing")
    if trainer.recipe.precision in ("fp32", "tf32"):
        return look(PART, "precision", text,
                    "precision='bf16' takes half the memory and less time")
    return ok(PART, "precision", text)


def _pass_s(trainer: Trainer, n: int) -> float:
    """Return the median seconds of a forward and backward pass over `n` rows, some repeated."""
    sync, took = _sync(trainer.device), []
    images, labels = repeated(*next(trainer.batches(n, 1)), n)
    with restored(trainer.model, trainer.optimizer):
        trainer.model.train()
        for _ in range(7):
            sync()
            start = time.perf_counter()
            trainer.loss(images, labels).backward()
            sync()
            took.append(time.perf_counter() - start)
            trainer.optimizer.zero_grad()
    return sorted(took[2:])[2]
