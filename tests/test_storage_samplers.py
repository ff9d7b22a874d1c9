"""Optuna's public test classes of samplers, on studies in our storage.

They make their studies without a storage; here that gives a new SQLite file, each one of ours.
Optuna publishes no such class for pruners: `tests/test_pruners.py` holds ours against its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.samplers import NSGAIISampler, RandomSampler, TPESampler
from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    MultiObjectiveSamplerTestCase,
    RelativeSamplerTestCase,
)

from hpo.tpe import BoundedTPESampler
from storage import StudyStorage


@pytest.fixture(autouse=True)
def ours(
    tmp_path: Path, sqlite_template: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[StudyStorage]]:
    """Have `create_study` without a storage make one of ours, and give those that were made."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    given = optuna.storages.get_storage
    opened: list[StudyStorage] = []
    numbers = count()

    def get_storage(storage: Any) -> Any:
        if storage is not None:
            return given(storage)
        file = shutil.copy(sqlite_template, tmp_path / f"{next(numbers)}.db")
        opened.append(StudyStorage(f"sqlite:///{file}"))
        return opened[-1]

    monkeypatch.setattr(optuna.storages, "get_storage", get_storage)
    yield opened
    assert opened, "the class has used another storage"
    for storage in opened:
        storage.close()


class TestRandomSampler(BasicSamplerTestCase, MultiObjectiveSamplerTestCase):
    """Optuna's RandomSampler."""

    @pytest.fixture
    def sampler(self) -> Callable[[], optuna.samplers.BaseSampler]:
        """Give the maker of a sampler."""
        return lambda: RandomSampler(seed=0)


class TestTPESampler(BasicSamplerTestCase, RelativeSamplerTestCase, MultiObjectiveSamplerTestCase):
    """Optuna's TPESampler."""

    @pytest.fixture
    def sampler(self) -> Callable[[], optuna.samplers.BaseSampler]:
        """Give the maker of a sampler."""
        return lambda: TPESampler(n_startup_trials=0, seed=0)


class TestBoundedTPESampler(
    BasicSamplerTestCase, RelativeSamplerTestCase, MultiObjectiveSamplerTestCase
):
    """Ours."""

    @pytest.fixture
    def sampler(self) -> Callable[[], optuna.samplers.BaseSampler]:
        """Give the maker of a sampler."""
        return lambda: BoundedTPESampler(n_startup_trials=0, seed=0)


class TestNSGAIISampler(BasicSamplerTestCase, MultiObjectiveSamplerTestCase):
    """One that keeps generations of trials."""

    @pytest.fixture
    def sampler(self) -> Callable[[], optuna.samplers.BaseSampler]:
        """Give the maker of a sampler."""
        return lambda: NSGAIISampler(population_size=2, seed=0)
