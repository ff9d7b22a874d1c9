"""A torch.profiler trace of some training steps, and the operators that take most of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from hpo.baselines.lr_sweep import restored
from hpo.diagnosis.batch import step
from hpo.diagnosis.finding import Finding, ok
from hpo.diagnosis.pace import PART
from hpo.train.loop import Trainer

N_STEPS, N_WARM, N_OPERATORS = 10, 3, 10


def profile_findings(trainer: Trainer, path: Path) -> Iterator[Finding]:
    """Profile some steps, write their trace and yield the file and the table's lines."""
    on_gpu = trainer.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    n = min(trainer.steps_per_epoch, N_STEPS + N_WARM)
    n_warm = min(N_WARM, n - 1)
    with restored(trainer.model, trainer.optimizer):
        trainer.model.train()
        batches = trainer.batches(trainer.recipe.batch_size, n)
        for _ in range(n_warm):
            step(trainer, trainer.loss(*next(batches)))
        with profile(activities=activities) as seen:
            for batch in batches:
                step(trainer, trainer.loss(*batch))
    path.parent.mkdir(parents=True, exist_ok=True)
    seen.export_chrome_trace(str(path))
    yield ok(PART, "trace", f"{path} (of {n - n_warm} steps; chrome://tracing and "
                            f"ui.perfetto.dev read it)")
    yield from operator_lines(list(seen.key_averages()), on_gpu)


def operator_lines(events: list[Any], on_gpu: bool) -> Iterator[Finding]:
    """Yield the operators of most own time, as lines of a table."""
    def own_us(event: Any) -> float:
        return event.self_device_time_total if on_gpu else event.self_cpu_time_total

    total = sum(map(own_us, events)) or 1.0
    for rank, event in enumerate(sorted(events, key=own_us, reverse=True)[:N_OPERATORS], 1):
        yield ok(PART, f"operator {rank}", f"{own_us(event) / total:4.0%}  "
                                           f"{own_us(event) / 1000:8.1f} ms  "
                                           f"{event.count:5d} calls  {event.key[:60]}")
