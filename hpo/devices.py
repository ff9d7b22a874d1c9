"""Devices of this machine, and which worker is bound to which.

Counted without torch, since the parent of the workers never imports it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from hpo.errors import InputError

# More CPU workers than this by default would spend memory (0.6 GB each) before they gain time.
_MAX_DEFAULT_CPU_WORKERS = 4


# glibc gives each large block back to the system when it is freed and asks for it again in the
# next step, all pages to be zeroed anew: half of a CNN's time on a CPU (benchmarks/allocator.py).
# With these it keeps them; a worker gives them back between trials.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2 * 10**9), "MALLOC_TRIM_THRESHOLD_": str(8 * 10**9),
               "MALLOC_TOP_PAD_": str(64 * 2**20)}


@dataclass(frozen=True)
class Slot:
    """Where one worker runs: `device` as torch names it, `visible` for CUDA_VISIBLE_DEVICES.

    A trial has all `n_devices` of it, with `n_threads` each.
    """

    index: int
    device: str
    visible: str
    n_threads: int
    n_devices: int = 1

    @property
    def label(self) -> str:
        """The device as people see it: `cpu`, or `gpu 1`."""
        if self.device == "cpu":
            return "cpu" if self.n_devices == 1 else f"cpu x{self.n_devices}"
        return f"gpu {self.visible}"

    def environment(self) -> dict[str, str]:
        """Return the variables that must be set before torch loads."""
        threads = str(self.n_threads)
        own_malloc = any(name.startswith("MALLOC_") for name in os.environ)
        return {"CUDA_VISIBLE_DEVICES": self.visible, "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                **(KEEP_MEMORY if self.device == "cpu" and not own_malloc else {})}


def n_cores() -> int:
    """Return the number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (
        os.cpu_count() or 1)


def threads_each(n_workers: int, env: Mapping[str, str] = os.environ) -> int:
    """Return the threads of each worker: the cores shared out, or OMP_NUM_THREADS if that is less.

    Two processes of two threads on two cores run at half speed.
    """
    fair = max(1, n_cores() // n_workers)
    # OpenMP itself reads a list, one number a level of nesting.
    said = env.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(fair, int(said)) if said.isdecimal() and int(said) > 0 else fair


def gpus(env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the ids of the GPUs that may be used, as CUDA_VISIBLE_DEVICES names them.

    A mask that is set from outside (by Slurm, Ray or a person) is believed: its entries are the
    devices.
    """
    mask = env.get("CUDA_VISIBLE_DEVICES")
    if mask is not None:
        ids = [part.strip() for part in mask.split(",") if part.strip()]
        # CUDA itself stops reading a mask at the first invalid entry, such as -1.
        return ids[: next((i for i, part in enumerate(ids) if part.startswith("-")), len(ids))]
    return [str(i) for i in range(_n_installed_gpus())]


@lru_cache(maxsize=1)
def _n_installed_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def slots(devices: str, n_workers: int | None, env: Mapping[str, str] = os.environ,
          n_each: int = 1) -> list[Slot]:
    """Return one slot a worker, of `n_each` devices; on the CPU a device is a process.

    `devices` is `auto` (every GPU, else the CPU), `cpu`, or indices such as `0,1`; an index named
    twice (`0,0`) lets two workers share that GPU.

    Raises:
        InputError: for a device that is not there, or more workers than devices.
    """
    wanted = devices.strip().lower()
    if wanted == "auto":
        ids = gpus(env)
        if not ids:
            return _cpu_slots(n_workers, env, n_each)
        return _gpu_slots(ids, n_workers, env, n_each)
    if wanted == "cpu":
        return _cpu_slots(n_workers, env, n_each)
    return _gpu_slots(_named(wanted, gpus(env)), n_workers, env, n_each)


def _named(wanted: str, present: list[str]) -> list[str]:
    parts = [part.strip() for part in wanted.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InputError(f"--devices {wanted!r}: accepted are auto, cpu, or indices such as 0,1")
    there = f"indices 0 to {len(present) - 1}" if present else "no GPU"
    for part in parts:
        if int(part) >= len(present):
            raise InputError(f"--devices {wanted}: there is no GPU {part} here ({there}); "
                             f"use --devices cpu to train on the CPU")
    return [present[int(part)] for part in parts]


def _gpu_slots(
    ids: list[str], n_workers: int | None, env: Mapping[str, str], n_each: int
) -> list[Slot]:
    if n_each > 1:
        return _shared_out(ids, n_workers, env, n_each)
    n = n_workers or len(ids)
    if n > len(ids):
        doubled = ",".join(str(i % len(ids)) for i in range(n))
        raise InputError(f"--workers {n}: there are {len(ids)} devices, one worker each; "
                         f"to share them write --devices {doubled}")
    threads = threads_each(n, env)
    return [Slot(i, "cuda", ids[i], threads) for i in range(n)]


def _shared_out(
    ids: list[str], n_workers: int | None, env: Mapping[str, str], n_each: int
) -> list[Slot]:
    """Return slots of several GPUs, no GPU in two of them."""
    there = list(dict.fromkeys(ids))
    if len(there) < len(ids):
        raise InputError(f"--gpus-per-trial {n_each}: each GPU is one trial's then; name each "
                         f"once with --devices")
    if len(ids) % n_each or len(ids) < n_each:
        there_are = "1 GPU is" if len(ids) == 1 else f"{len(ids)} GPUs are"
        raise InputError(f"--gpus-per-trial {n_each}: {there_are} there; name a multiple of "
                         f"{n_each} with --devices, as 0,1 is of 2")
    n = n_workers or len(ids) // n_each
    if n * n_each > len(ids):
        raise InputError(f"--workers {n}: with --gpus-per-trial {n_each} there are devices for "
                         f"{len(ids) // n_each}")
    threads = threads_each(n * n_each, env)
    return [Slot(i, "cuda", ",".join(ids[i * n_each:(i + 1) * n_each]), threads, n_each)
            for i in range(n)]


def _cpu_slots(n_workers: int | None, env: Mapping[str, str], n_each: int) -> list[Slot]:
    n = n_workers or max(1, min(n_cores(), _MAX_DEFAULT_CPU_WORKERS) // n_each)
    threads = threads_each(n * n_each, env)
    # An empty mask hides the GPUs of a machine that has some from its CPU workers.
    return [Slot(i, "cpu", "", threads, n_each) for i in range(n)]
