"""The machine that workers would run on, as far as the parent can tell: devices, threads, memory.

Asked of the system and of nvidia-smi, since the parent never loads torch.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpo.devices import Slot, n_cores
from hpo.diagnosis.finding import Finding, look, ok, plural, wrong

PART = "devices"
# What a worker takes before its model and data: torch alone, measured on a CPU.
WORKER_BYTES = 600 * 2**20
# Below this part of free memory somebody else is on the GPU.
_FREE_FRACTION = 0.5
_GPU_FIELDS = "index,uuid,name,driver_version,memory.total,memory.used"


def machine_findings(slots: Sequence[Slot]) -> Iterator[Finding]:
    """Yield what is to be said of the machine for the workers that `hpo run` would start."""
    if slots[0].device == "cpu":
        yield ok(PART, "device", f"{plural(len(slots), 'worker')} on the CPU; no GPU is used")
    else:
        yield from _gpu_findings(slots)
    if slots[0].n_devices > 1:
        yield trials_finding(slots)
    yield threads_finding(slots, n_cores(), cpu_quota())
    available = available_bytes()
    if available is not None:
        yield memory_finding(slots, available)


def trials_finding(slots: Sequence[Slot]) -> Finding:
    """Return how many trials run at once where each has several devices."""
    n_each = slots[0].n_devices
    each = plural(n_each, "process") if slots[0].device == "cpu" else f"{n_each} GPUs"
    return ok(PART, "trials", f"{plural(len(slots), 'trial')} at once, of {each} each")


def _n_processes(slots: Sequence[Slot]) -> int:
    return sum(slot.n_devices for slot in slots)


def _processes(slots: Sequence[Slot]) -> str:
    n = _n_processes(slots)
    return plural(n, "worker" if n == len(slots) else "process")


def _gpu_findings(slots: Sequence[Slot]) -> Iterator[Finding]:
    listed = ""
    # A mask in CUDA_VISIBLE_DEVICES may name GPUs of a machine without nvidia-smi.
    if shutil.which("nvidia-smi") is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            listed = subprocess.run(
                ["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits"],
                capture_output=True, text=True, timeout=30).stdout
    for visible in dict.fromkeys(one for slot in slots for one in slot.visible.split(",")):
        yield gpu_finding(visible, listed)


def gpu_finding(visible: str, listed: str) -> Finding:
    """Return what nvidia-smi's list says of one GPU: its driver, and how much of it is free."""
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines()]
    row = next((row for row in rows if len(row) == len(_GPU_FIELDS.split(","))
                and (visible == row[0] or row[1].startswith(visible))), None)
    if row is None:
        return look(PART, "device", f"gpu {visible}: nvidia-smi does not list it",
                    "see whether nvidia-smi works, and what CUDA_VISIBLE_DEVICES says")
    _, _, name, driver, total, used = row
    text = f"gpu {visible}: {name}, driver {driver}"
    if not (total.isdecimal() and used.isdecimal()):
        # Integrated GPUs share the host's memory and tell `[N/A]`.
        return ok(PART, "device", text)
    free = int(total) - int(used)
    text += f", {free / 1024:.1f} of {int(total) / 1024:.1f} GB free"
    if free < _FREE_FRACTION * int(total):
        return look(PART, "device", text, "another process is on it: nvidia-smi names it")
    return ok(PART, "device", text)


def threads_finding(slots: Sequence[Slot], cores: int, quota: float | None) -> Finding:
    """Return whether the workers' threads fit the cores that may be used."""
    n_workers, each = _n_processes(slots), slots[0].n_threads
    text = (f"{_processes(slots)} with {plural(each, 'thread')} each on "
            f"{plural(cores, 'core')}")
    if quota is not None and quota < cores and n_workers * each > max(1.0, quota):
        fitting = max(1, int(quota) // n_workers)
        return look(PART, "threads", f"{text}, of which this container may use {quota:g}",
                    f"set OMP_NUM_THREADS={fitting}: threads that are held back wait for each "
                    f"other")
    if 2 * n_workers * each <= cores:
        return look(PART, "threads", text,
                    "the other cores idle: raise or unset OMP_NUM_THREADS, or give --workers")
    return ok(PART, "threads", text)


def memory_finding(slots: Sequence[Slot], available: int) -> Finding:
    """Return whether the host's free memory holds the workers, before their models and data."""
    free, needed = available / 2**30, _n_processes(slots) * WORKER_BYTES / 2**30
    text = f"{free:.1f} GB free; {_processes(slots)} take {needed:.1f} GB before data"
    if needed > free:
        return wrong(PART, "memory", text, "give fewer --workers")
    if 2 * needed > free:
        return look(PART, "memory", text, "give fewer --workers if the data are large")
    return ok(PART, "memory", text)


def cpu_quota(group: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return how many cores' time a container may use, None where it is not limited."""
    try:
        limit, period = (group / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) / int(period)


def available_bytes(
    table: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the memory that new processes can have, a container's limit included."""
    try:
        found = dict(line.split(":", 1) for line in table.read_text().splitlines() if ":" in line)
        free = int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        # Not Linux.
        return None
    try:
        limit = int((group / "memory.max").read_text())
        return min(free, max(0, limit - int((group / "memory.current").read_text())))
    except (OSError, ValueError):
        return free
