"""The global random generators of a trial (Python's, numpy's, torch's), also where loaded late."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The function that seeds a library's global generator.
_SEED = {"numpy.random": "seed", "torch": "manual_seed"}


def seed_all(seed: int) -> None:
    """Seed the global generators; of a library that is not loaded yet, as soon as it is.

    So a loop that imports torch in its own body draws the same in a worker's first trial as in
    its later ones, and who does not use torch does not wait for it.
    """
    random.seed(seed)
    for library in _SEED:
        if module := sys.modules.get(library):
            _seed(module, seed)
    _late.seed = seed
    if _late not in sys.meta_path and not all(library in sys.modules for library in _SEED):
        sys.meta_path.insert(0, _late)


def _seed(module: ModuleType, seed: int) -> None:
    getattr(module, _SEED[module.__name__])(seed % 2**32)


class _Late(MetaPathFinder):
    """Sees a library being imported, and seeds it at the end of that with the latest seed."""

    seed = 0
    _asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _SEED or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is None or spec.loader is None:
            return spec
        load: Any = spec.loader.exec_module

        def load_and_seed(module: ModuleType) -> None:
            load(module)
            _seed(module, self.seed)

        spec.loader.exec_module = load_and_seed
        return spec


_late = _Late()
