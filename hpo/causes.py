"""What an exception says of a failed trial: its cause in one line, and what it did to the process.

Torch tells many causes in a page of tracebacks, and some not at all: of a loader process that was
killed it may show a lost connection alone.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

# How an exception of a DataLoader's process begins, in torch/_utils.py.
_CAUGHT = "Caught "
# What is left of a device after it, or of the process's files.
_SPOILING = ("CUDA error", "CUDA driver error", "device-side assert", "cuDNN error",
             "CUBLAS_STATUS", "Too many open files")
_LOSSES = ("cross_entropy", "nll_loss")
_SHM = "/dev/shm"
# The end of a connection is seen before that of its process.
_DIES_S = 2.0


def said(error: BaseException) -> str:
    """Return an exception as one line that any terminal, table and database takes."""
    text = f"{type(error).__name__}: {_text(error)}".removesuffix(": ")
    hints = [hint for hint in (_of_loader(error), _of_labels(error), _of_assert(text)) if hint]
    return printable(" ".join([text, *(f"({hint})" for hint in hints)]))


def printable(text: str) -> str:
    """Return a text without what cannot be encoded, NUL and the bells of a terminal."""
    encoded = text.encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in encoded)


def spoils(error: BaseException) -> bool:
    """Return whether a process may be unfit for another trial after an exception."""
    return any(
        isinstance(one, OSError) and one.errno in (errno.EMFILE, errno.ENFILE)
        or any(words in whole(one) for words in _SPOILING) for one in chain(error))


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that it was raised from, or while they were handled."""
    seen: set[int] = set()
    left: BaseException | None = error
    while left is not None and id(left) not in seen:
        seen.add(id(left))
        yield left
        left = left.__cause__ or left.__context__


def whole(error: BaseException) -> str:
    """Return an exception's text, whatever its class makes of it."""
    try:
        return str(error)
    except Exception as failed:
        # A class of the user's own may need what is not there.
        return f"its text cannot be made, {type(failed).__name__}"


def _text(error: BaseException) -> str:
    """Return the line of an exception's text that says most."""
    lines = whole(error).strip().splitlines()
    if not lines:
        return ""
    if lines[0].startswith(_CAUGHT) and len(lines) > 1:
        # The traceback of another process, whose last line names the cause.
        where = lines[0].removeprefix(_CAUGHT).partition(" in ")[2].rstrip(".")
        last = lines[-1].partition(": ")[2] or lines[-1]
        return f"{last} (in {where})" if where else last
    return lines[0].strip()


def _frames(error: BaseException) -> Iterator[FrameType]:
    for one in chain(error):
        traceback = one.__traceback__
        while traceback is not None:
            yield traceback.tb_frame
            traceback = traceback.tb_next


def _of_loader(error: BaseException) -> str:
    """Return which process of a DataLoader was killed, if the exception passed through one."""
    if "torch" not in sys.modules:
        return ""
    for frame in _frames(error):
        loader = frame.f_locals.get("self")
        if type(loader).__name__ == "_MultiProcessingDataLoaderIter":
            is_cut_off = isinstance(error, (ConnectionError, EOFError, FileNotFoundError))
            code = _first_code(getattr(loader, "_workers", ()), _DIES_S if is_cut_off else 0)
            if code is None:
                return "its DataLoader worker process is gone" if is_cut_off else ""
            how = f"ended with code {code}" if code > 0 else f"was killed by {_signal(-code)}"
            return f"a DataLoader worker process {how}"
    return ""


def _first_code(processes: Any, wait_s: float) -> int | None:
    """Return the exit code of the process that died by itself, as soon as it is known."""
    deadline = time.monotonic() + wait_s
    while True:
        for process in processes:
            # Not those that torch itself ended, once it had seen the first.
            if process.exitcode not in (None, 0, -signal.SIGTERM):
                return process.exitcode
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.01)


def _signal(number: int) -> str:
    """Return a signal's name, and what sends it to a process that only reads data."""
    if number == signal.SIGBUS:
        return (f"SIGBUS: it may be out of shared memory{_shared_memory()}; give the machine or "
                f"container more (docker's --shm-size), or use fewer workers or smaller batches")
    if number == signal.SIGKILL:
        return "SIGKILL, as the kernel does where the host's memory is full"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _shared_memory() -> str:
    try:
        found = os.statvfs(_SHM)
    except OSError:
        return ""
    size_gb, free_gb = (n * found.f_frsize / 1e9 for n in (found.f_blocks, found.f_bavail))
    return f", {_SHM} has {size_gb:.3g} GB and {free_gb:.3g} GB of it free now"


def _of_labels(error: BaseException) -> str:
    """Return which labels a batch had and for how many classes, if a loss refused them."""
    if not isinstance(error, (IndexError, RuntimeError)):
        return ""
    for frame in _frames(error):
        if frame.f_code.co_name in _LOSSES and "functional" in frame.f_code.co_filename:
            return _of_batch(frame.f_locals.get("input"), frame.f_locals.get("target"))
    return ""


def _of_batch(scores: Any, labels: Any) -> str:
    try:
        # Of a device that an assert has stopped nothing can be read any more.
        if labels.device.type != "cpu" or labels.is_floating_point() or not labels.numel():
            return ""
        low, high = int(labels.min()), int(labels.max())
        n_classes = scores.shape[1] if scores.ndim > 1 else scores.shape[0]
    except Exception:
        # No tensors, or none of these shapes: torch's own text has to do.
        return ""
    return (f"labels from {low} to {high} in a batch of {len(labels) if labels.ndim else 1}, "
            f"for {n_classes} classes, which are 0 to {n_classes - 1}")


def _of_assert(text: str) -> str:
    if "device-side assert" not in text:
        return ""
    return ("mostly a label or an index out of its range; the log may say more, and "
            "CUDA_LAUNCH_BLOCKING=1 or --devices cpu shows the line")
