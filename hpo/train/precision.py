"""The number formats that a trial computes in: float32 for weights, any for products."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hpo.errors import InputError


def check_precision(precision: str, device: torch.device) -> None:
    """Check that a device has a precision.

    Raises:
        InputError: for TF32 without CUDA: it would be fp32 under another name.
    """
    if precision == "tf32" and device.type != "cuda":
        raise InputError(f"Recipe.precision: 'tf32' is a CUDA device's, this one is "
                         f"'{device.type}'; use 'fp32', 'bf16' or 'auto'")


def autocast(device: torch.device,
             precision: str = "auto") -> contextlib.AbstractContextManager[Any]:
    """Return the context in which a device computes scores; `auto` is bf16 on CUDA, else fp32."""
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if precision in halves:
        return torch.autocast(device.type, dtype=halves[precision])
    return contextlib.nullcontext()


@contextlib.contextmanager
def products(device: torch.device, precision: str) -> Iterator[None]:
    """Have float32 products on CUDA computed as asked for the while: `fp32` in full, or `tf32`.

    These are switches of the process. Left alone, torch multiplies matrices in fp32 and convolves
    in TF32.
    """
    if device.type != "cuda" or precision not in ("fp32", "tf32"):
        yield
        return
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
