"""Optuna's own contract of a storage, on both databases, with writes at once and grouped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from optuna.testing.pytest_storages import StorageTestCase

import storage as sql


class TestStudyStorage(StorageTestCase):
    """The contract class as it is, on our storage."""

    @pytest.fixture(params=[False, True], ids=["at once", "grouped"])
    def storage(self, ready_url: str, request: pytest.FixtureRequest) -> Iterator[object]:
        """Give a storage on an empty database."""
        opened = sql.StudyStorage(ready_url, grouped=request.param)
        yield opened
        opened.close()
