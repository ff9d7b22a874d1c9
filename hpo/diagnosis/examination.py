"""The checks of a recipe, from its data to a few training steps, each told as soon as it is made.

A fault ends what depends on it: a model that cannot take its inputs is not trained.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpo import discover
from hpo.diagnosis.data import data_findings, splits_of
from hpo.diagnosis.finding import WRONG, Finding, look, not_checked, ok, wrong
from hpo.diagnosis.memory import largest_batch_finding
from hpo.diagnosis.model import model_findings
from hpo.diagnosis.pace import PART as SPEED
from hpo.diagnosis.pace import measure, pace_finding, precision_finding
from hpo.diagnosis.profile import profile_findings
from hpo.diagnosis.training import training_findings
from hpo.errors import DataError, HpoError
from hpo.train.compiling import without_graphs
from hpo.train.loop import Trainer

if TYPE_CHECKING:
    from hpo.spec import Run
    from hpo.train.recipe import Recipe

# Of these data faults each loss is NaN or no loss at all.
_FATAL = ("numbers", "labels")


def examine(
    build: Callable[[], Recipe], run: Run, *, metric: str = "val_accuracy", maximize: bool = True,
    trace: Path | None = None,
) -> Iterator[Finding]:
    """Yield what is to be said of the recipe that `build` gives, with a profile if `trace` is one.

    Nothing it trains is kept. Whatever fails in the user's own code is a finding.
    """
    build = without_cuda_graphs(build)
    made = _made(build, run, metric, maximize)
    if isinstance(made, Finding):
        yield made
        yield not_checked("model", "all", "there is no recipe, or no data, to look at")
        return
    try:
        with made.computing():
            yield torch_finding(made.device)
            yield from guarded("data", lambda: _rest(made, build, run, metric, maximize, trace))
    finally:
        made.close()


def without_cuda_graphs(build: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Return what builds the recipe without CUDA graphs.

    The checks look at scores and gradients of one pass after another, where the graphs' next run
    would write over them.
    """
    def made() -> Recipe:
        recipe = build()
        return dataclasses.replace(recipe, compile=without_graphs(recipe.compile))

    return made


def _made(
    build: Callable[[], Recipe], run: Run, metric: str, maximize: bool
) -> Trainer | Finding:
    try:
        return Trainer(build(), run, metric=metric, maximize=maximize)
    except HpoError as error:
        return wrong("data" if isinstance(error, DataError) else "recipe", "made",
                     str(error).splitlines()[0])
    except Exception as error:
        traceback.print_exc()
        return wrong("recipe", "made", _said(error))


def _said(error: Exception) -> str:
    text = str(error).splitlines()
    return f"{discover.where(error)}: {type(error).__name__}: {text[0] if text else ''}"


def guarded(part: str, findings: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield findings up to an error, which is one itself."""
    try:
        yield from findings()
    except Exception as error:
        traceback.print_exc()
        yield wrong(part, "error", _said(error))


def _rest(
    trainer: Trainer, build: Callable[[], Recipe], run: Run, metric: str, maximize: bool,
    trace: Path | None,
) -> Iterator[Finding]:
    fatal = False
    for finding in data_findings(trainer.data, splits_of(trainer.data)):
        fatal |= finding.verdict == WRONG and finding.what in _FATAL
        yield finding
    if fatal:
        yield not_checked("model", "all", "mend the data first")
        return
    # Before a pass changes what batch norm has counted.
    yield from guarded("model", lambda: iter([repeat_finding(
        trainer, lambda: Trainer(build(), run, metric=metric, maximize=maximize))]))
    unfit = False
    for finding in guarded("model", lambda: model_findings(trainer)):
        unfit |= finding.verdict == WRONG and finding.what in ("passes", "parameters", "error")
        yield finding
    if unfit:
        yield not_checked("training", "all", "mend the model first")
        return
    yield from guarded("training", lambda: training_findings(trainer))
    yield from guarded(SPEED, lambda: _speed(trainer, trace))


def _speed(trainer: Trainer, trace: Path | None) -> Iterator[Finding]:
    yield pace_finding(trainer, measure(trainer))
    if trainer.device.type == "cuda":
        yield precision_finding(trainer)
    if trace is not None:
        yield from profile_findings(trainer, trace)
    # The last: a GPU that was full once may be so in pieces.
    yield largest_batch_finding(trainer)


def torch_finding(device: torch.device) -> Finding:
    """Return which torch a worker has loaded, and for which CUDA it was built."""
    if device.type != "cuda":
        return ok("devices", "torch", f"torch {torch.__version__} on the CPU, "
                                      f"{torch.backends.cpu.get_cpu_capability()}")
    major, minor = torch.cuda.get_device_capability(device)
    return ok("devices", "torch", f"torch {torch.__version__} with CUDA {torch.version.cuda} on "
                                  f"{torch.cuda.get_device_name(device)} (compute capability "
                                  f"{major}.{minor})")


def repeat_finding(trainer: Trainer, again: Callable[[], Trainer]) -> Finding:
    """Return whether the same seed makes the same data and initial weights again."""
    other = again()
    try:
        if other.data.fingerprint != trainer.data.fingerprint:
            return look("model", "repeats", "the data differ the second time they are made",
                        "draw from a generator with run.seed where the data are made")
        mine, theirs = trainer.model.state_dict(), other.model.state_dict()
        torn = [name for name, value in mine.items() if isinstance(value, torch.Tensor)
                and not torch.equal(value, theirs[name])]
        if torn:
            return look("model", "repeats", f"the initial weights of {torn[0]} differ for the "
                                            f"same seed",
                        "draw them from torch's global generator, which is seeded for each trial")
        return ok("model", "repeats", "the same seed gives the same data and initial weights")
    finally:
        other.close()
