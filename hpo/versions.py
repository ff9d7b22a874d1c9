"""What a result depends on besides its params and seed: versions, commit, module and machine."""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("hpo", "torch", "torchvision", "optuna", "numpy")


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Return the commit of the working directory, with `+` where it has changes; None outside."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def surroundings(device: str, module: str) -> dict[str, Any]:
    """Return what this process trains with, as JSON data: asked once a process.

    `device` is "cpu" or "cuda", `module` the path of the study's own file.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch = sys.modules.get("torch")
    return {
        "versions": versions(), "module_sha256": file_digest(Path(module)),
        "device": device,
        "processor": _processor(device),
        # One model's name may stand for several in a cloud; known once torch is loaded.
        "cpu_capability": torch.backends.cpu.get_cpu_capability() if torch else None,
        "n_threads": int(threads) if threads.isdecimal() else None,
    }


def file_digest(path: Path) -> str | None:
    """Return the sha256 of a file, or None where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def source_digest(function: Any) -> str | None:
    """Return the sha256 of the file that a function was defined in, or None where there is none.

    It is read now: what was loaded of it may be older.
    """
    try:
        path = inspect.getsourcefile(function)
    except TypeError:
        # No function, or one without a file.
        return None
    return None if path is None else file_digest(Path(path))


def label(device: str) -> str:
    """Return this process's device as people see it: `cpu`, or `gpu 1`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"gpu {visible}".strip() if device == "cuda" else device


def _processor(device: str) -> str:
    """Return the model of GPU or CPU: floats are summed in an order that depends on it."""
    torch = sys.modules.get("torch")
    if device == "cuda" and torch is not None and torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            names = (line.split(":", 1)[1].strip() for line in file if line.startswith("model n"))
            name = next(names, name)
    except OSError:
        # Not Linux.
        pass
    return name
