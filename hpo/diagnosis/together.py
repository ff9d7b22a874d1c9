"""Checks of a trial over several devices: what joins them, their memory, and a few steps together.

The same steps are made by one device first, so that both sides of the choice have a number.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpo.diagnosis.finding import Finding, look, ok, plural, wrong
from hpo.diagnosis.pace import span
from hpo.errors import HpoError
from hpo.ranks import Ranks
from hpo.train.joint import is_sharded
from hpo.train.loop import Trainer
from hpo.train.sharded import local

if TYPE_CHECKING:
    from hpo.spec import Run
    from hpo.train.recipe import Recipe

PART = "ranks"
# The first steps make what later ones use again: buckets, moments, connections.
N_WARM, N_STEPS = 3, 12
# Ranks that cannot reach each other wait without a word.
MOST_S = 300.0
# NCCL sends through shared memory where GPUs do not read each other's; Docker gives 64 MB.
_SHARED, _LEAST_SHARED = Path("/dev/shm"), 512 * 2**20
_GAVE_UP = 77
# Above this part of its memory a GPU has no room for a larger model of the space.
_MOST_FRACTION = 0.9


@dataclass(frozen=True)
class Steps:
    """A few steps of training, on the rank that was the slowest or held the most.

    `seconds` are the median step's, `held` the bytes of weights, gradients and moments, `peak` all
    that a GPU's memory had to hold (0 on a CPU). `same` says that all ranks have the same weights
    after them.
    """

    seconds: float
    held: int
    peak: int = 0
    same: bool = True


def together_findings(
    build: Callable[[], Recipe], run: Run, ranks: Ranks, order: Mapping[str, Any],
    params: Mapping[str, Any],
) -> Iterator[Finding]:
    """Yield what is to be said of a trial that all devices of this worker train."""
    yield backend_finding(run.device, nccl=dist.is_nccl_available(), gloo=dist.is_gloo_available())
    total = 0
    if run.device == "cuda":
        n, total = torch.cuda.device_count(), torch.cuda.mem_get_info()[1]
        apart = [(a, b) for a in range(n) for b in range(a + 1, n)
                 if not torch.cuda.can_device_access_peer(a, b)]
        yield links_finding(n, apart, shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else 0)
    alone = _alone(build, run)
    try:
        trainer, joint = _joint(build, run, ranks, order, params)
    except HpoError as error:
        yield wrong(PART, "begin", str(error).splitlines()[0])
        return
    except (MemoryError, torch.OutOfMemoryError):
        yield wrong(PART, "memory", f"a step does not fit on {run.n_devices} devices",
                    "micro_batch_size=, checkpoint_activations=True, or sharding='fsdp'")
        return
    sharded = is_sharded(trainer.recipe, trainer.team)
    yield rows_finding(trainer)
    yield memory_finding(alone, joint, total, sharded=sharded)
    yield steps_finding(alone, joint, run.n_devices, sharded=sharded)


def _alone(build: Callable[[], Recipe], run: Run) -> Steps | None:
    """Return the steps of one device; None where its memory does not hold them."""
    try:
        trainer = Trainer(build(), replace(run, n_devices=1))
        try:
            return try_steps(trainer)
        finally:
            trainer.close()
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _joint(
    build: Callable[[], Recipe], run: Run, ranks: Ranks, order: Mapping[str, Any],
    params: Mapping[str, Any],
) -> tuple[Trainer, Steps]:
    """Return the trainer and the steps of all devices."""
    said = (f"{run.n_devices} ranks did not make {N_WARM + N_STEPS} steps within {MOST_S:.0f} s: "
            f"NCCL_DEBUG=INFO in the environment says where they wait")
    timer = threading.Timer(MOST_S, _give_up, [said])
    timer.daemon = True
    timer.start()
    try:
        with ranks.watching():
            team = ranks.begin(order, run.seed, vars(run)["dir"], params, None)
            trainer = Trainer(build(), run, team=team)
            team.tell("try_steps")
            joint = try_steps(trainer)
            trainer.close()
        ranks.drop()
        return trainer, joint
    finally:
        timer.cancel()


def _give_up(said: str) -> None:
    """End this process, which waits for another one and would do so for hours."""
    print(said, flush=True)
    os._exit(_GAVE_UP)


def try_steps(trainer: Trainer) -> Steps:
    """Make a few steps of training; all ranks of a team do so together."""
    device, size, grads = trainer.device, trainer.recipe.batch_size, 0
    n, took = min(trainer.steps_per_epoch, N_WARM + N_STEPS), []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    trainer.model.train()
    params = list(trainer.model.parameters())
    with trainer.computing():
        start = time.perf_counter()
        for i, (images, labels) in enumerate(trainer.batches(size, n)):
            trainer.backward(images, labels, min(size, len(trainer.data.train) - i * size))
            grads = _bytes(param.grad for param in params)
            trainer.update.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            took.append(time.perf_counter() - start)
            start = time.perf_counter()
    held = grads + _bytes(params) + _bytes(
        value for moments in trainer.optimizer.state.values() for value in moments.values())
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    # Of weights in parts each rank has others.
    sums = [] if is_sharded(trainer.recipe, trainer.team) else [
        float(param.detach().double().sum()) for param in params]
    found = trainer.team.of_all((statistics.median(took[min(N_WARM, n - 1):]), held, peak, sums))
    return Steps(max(one[0] for one in found), max(one[1] for one in found),
                 max(one[2] for one in found), all(one[3] == found[0][3] for one in found))


def _bytes(values: Iterable[Any]) -> int:
    """Return the bytes that this rank holds of some tensors."""
    return sum(local(value).nbytes for value in values if isinstance(value, Tensor))


def backend_finding(device: str, *, nccl: bool, gloo: bool) -> Finding:
    """Return whether this torch has what joins the devices."""
    if not gloo:
        return wrong(PART, "backend", "this torch has no gloo, which joins processes",
                     "install a torch with it, or leave --gpus-per-trial out")
    if device != "cuda":
        return ok(PART, "backend", "gloo, between processes of the CPU")
    if not nccl:
        return wrong(PART, "backend", "this torch has no NCCL, which joins GPUs",
                     "install torch's CUDA build for Linux")
    from torch.cuda import nccl as library

    version = ".".join(map(str, library.version()))
    return ok(PART, "backend", f"NCCL {version} between GPUs, gloo between their processes")


def links_finding(n: int, apart: Sequence[tuple[int, int]], shared: int) -> Finding:
    """Return whether each GPU reads the others' memory; `apart` are pairs that do not.

    Those go through the host's shared memory, of which so many bytes are free.
    """
    if not apart:
        return ok(PART, "links", f"each of {n} GPUs reads the others' memory (P2P)")
    named = ", ".join(f"{a} and {b}" for a, b in apart[:3])
    more = f" and {plural(len(apart) - 3, 'more pair')}" if len(apart) > 3 else ""
    text = f"GPUs {named}{more} do not read each other's memory: their sums pass through the host"
    if shared < _LEAST_SHARED:
        return look(PART, "links", f"{text}, with {shared / 2**20:.0f} MB of {_SHARED}",
                    "give more of it (docker run --shm-size=1g), or GPUs that are linked")
    return look(PART, "links", text, "nvidia-smi topo -p2p r shows which GPUs are linked")


def rows_finding(trainer: Trainer) -> Finding:
    """Return how a batch is shared out."""
    size, n, n_rows = trainer.recipe.batch_size, trainer.team.size, len(trainer.data.train)
    text = f"{plural(size, 'row')} a step, {size // n} on each of {n} devices"
    left = n_rows - min(n_rows, trainer.steps_per_epoch * size)
    if left:
        text += f"; the last {plural(left, 'row')} of an epoch are too few and left out"
    return ok(PART, "batch", text)


def memory_finding(alone: Steps | None, joint: Steps, total: int, *, sharded: bool) -> Finding:
    """Return what each device holds, of `total` bytes on a GPU."""
    way = _way(sharded)
    text = f"weights, gradients and moments take {_size(joint.held)} on each under {way}"
    text += ("; one device does not hold a step" if alone is None
             else f", {_size(alone.held)} on one alone")
    if not total:
        return ok(PART, "memory", text)
    text += f"; a step needs at most {_size(joint.peak)} of {_size(total)}"
    if joint.peak > _MOST_FRACTION * total:
        return look(PART, "memory", text,
                    "checkpoint_activations=True or a micro_batch_size= leaves room" if sharded
                    else "sharding='fsdp' has each device hold a part")
    return ok(PART, "memory", text)


def steps_finding(alone: Steps | None, joint: Steps, n: int, *, sharded: bool) -> Finding:
    """Return how fast the devices train together, and whether they train the same."""
    text = f"{span(joint.seconds)} a step under {_way(sharded)}"
    if not joint.same:
        return wrong(PART, "steps", f"after {text} the ranks' weights differ",
                     "the model changes weights otherwise than by gradients; train it on one "
                     "device")
    if alone is None:
        return ok(PART, "steps", text)
    factor = alone.seconds / joint.seconds
    text += (f", {span(alone.seconds)} on one device: {factor:.2f} times as fast, where {n} "
             f"trials of one device each are {n}")
    if factor < 1.0:
        return look(PART, "steps", text, "leave --gpus-per-trial out, unless memory asks for it")
    return ok(PART, "steps", text)


def _way(sharded: bool) -> str:
    return "FSDP" if sharded else "DDP"


def _size(n: int) -> str:
    return f"{n / 2**30:.1f} GB" if n >= 2**30 else f"{n / 2**20:.2g} MB"
