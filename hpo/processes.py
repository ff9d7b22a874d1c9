"""How a process that loads torch begins and ends without its idle second.

Importing makes a million objects that all stay, and Python's search for garbage among them, during
the imports, in each later search and once more at the end, costs more than a short trial.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

# What a trial's training needs; an optimizer would load the second when it is made.
TRAINING = ("hpo.train.loop", "torch._dynamo")


@contextmanager
def imports() -> Iterator[None]:
    """Import without a search for garbage, and leave what is there by then out of later ones."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def load(*modules: str) -> None:
    """Import modules before they are needed, as `imports` does."""
    with imports():
        for module in modules:
            importlib.import_module(module)


def run_alone(module: str) -> NoReturn:
    """Run the `main` of the module that this process is for, and end with the code it returns.

    Whatever is registered for the end is done, threads are waited for and output is written; what
    is left out is the taking apart of all modules and objects.
    """
    code = 1

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            # It may be closed, or its disk full.
            with suppress(AttributeError, OSError, ValueError):
                stream.flush()
        os._exit(code)

    # What is registered first is done last.
    atexit.register(leave)
    try:
        code = importlib.import_module(module).main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        raise
    sys.exit(code)
