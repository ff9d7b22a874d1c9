"""The trials that this process drives itself, and what of them is not written yet.

Their owner reads and writes them dozens of times; the database needs to hear of it only when
another process could care: soon, and before the trial's state changes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, RLock
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    check_distribution_compatibility,
    distribution_to_json,
)
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Connection

from hpo.errors import StorageError
from storage import rows
from storage.loading import local

# The width of Optuna's columns for names, which PostgreSQL keeps to.
LONGEST_NAME = 512


@dataclass
class Gathered:
    """What the database lacks of one trial."""

    params: list[dict[str, Any]] = field(default_factory=list)
    users: dict[str, str] = field(default_factory=dict)
    systems: dict[str, str] = field(default_factory=dict)
    reports: dict[int, float] = field(default_factory=dict)
    # Rows of our own table of epochs, by epoch.
    epochs: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.params or self.users or self.systems or self.reports or self.epochs)

    def before(self, later: Gathered) -> Gathered:
        """Return both, of which `later` has the last word."""
        return Gathered(
            self.params + later.params,
            self.users | later.users,
            self.systems | later.systems,
            self.reports | later.reports,
            self.epochs | later.epochs,
        )


class RunningTrial:
    """One trial of this process: as it is, and what the database lacks of it."""

    def __init__(self, study_id: int, trial: FrozenTrial, *, is_new: bool = True) -> None:
        self.study_id = study_id
        self.trial = trial
        # Whether the database holds nothing of the trial but its head.
        self.is_new = is_new
        self.has_news = False
        self._news = Gathered()
        self._guard = Lock()
        self._writing = RLock()
        self._pid = os.getpid()

    def set_param(self, name: str, internal: float, kind: BaseDistribution) -> None:
        """Remember a param; like Optuna's own storage, the first value of a name stays."""
        if name in self.trial.params:
            check_distribution_compatibility(self.trial.distributions[name], kind)
            return
        row = param_row(self.trial._trial_id, name, internal, kind)
        with self._guard:
            self.trial._params[name] = kind.to_external_repr(internal)
            self.trial._distributions[name] = kind
            self._news.params.append(row)
            self.has_news = True

    def set_user_attr(self, key: str, value: Any) -> None:
        """Remember a user attribute."""
        text = json.dumps(value)
        with self._guard:
            self._news.users[check_name(key)] = text
            self.trial._user_attrs[key] = json.loads(text)
            self.has_news = True

    def set_system_attr(self, key: str, value: Any) -> None:
        """Remember an attribute of Optuna's own."""
        text = json.dumps(value)
        with self._guard:
            self._news.systems[check_name(key)] = text
            self.trial._system_attrs[key] = json.loads(text)
            self.has_news = True

    def report(self, step: int, value: float, epoch_row: dict[str, Any] | None = None) -> None:
        """Remember a report, and the row of our own table that goes with it."""
        step, value = int(step), float(value)
        with self._guard:
            self._news.reports[step] = value
            self.trial.intermediate_values[step] = value
            if epoch_row is not None:
                self._news.epochs[step] = epoch_row
            self.has_news = True

    @contextmanager
    def taken(self) -> Iterator[Gathered]:
        """Hand over what is gathered, for one writer at a time; an error brings it back."""
        with self._writing:
            with self._guard:
                taken, self._news = self._news, Gathered()
                self.has_news = False
            try:
                yield taken
            except BaseException:
                with self._guard:
                    self._news = taken.before(self._news)
                    self.has_news = bool(self._news)
                raise


def write_news(connection: Connection, found: Mapping[int, Gathered]) -> None:
    """Write what is gathered of trials that the caller knows to be unfinished."""
    known = rows.statements(connection.dialect.name)
    parts: tuple[tuple[Any, list[dict[str, Any]]], ...] = (
        (known.param, [row for news in found.values() for row in news.params]),
        (known.report, [rows.report_row(trial_id, *report) for trial_id, news in found.items()
                        for report in news.reports.items()]),
        (known.epoch, [row for news in found.values() for row in news.epochs.values()]),
        (known.user_attr, [row for trial_id, news in found.items()
                           for row in attr_rows(trial_id, news.users)]),
        (known.system_attr, [row for trial_id, news in found.items()
                             for row in attr_rows(trial_id, news.systems)]),
    )
    for statement, new in parts:
        if new:
            connection.execute(statement, new)


def check_name(name: str) -> str:
    """Return the name of a param or an attribute, if every database can hold it.

    Raises:
        StorageError: it is too long, or holds a character that is none. What is gathered is
            written later, all together: here alone can one name be refused.
    """
    if len(name) > LONGEST_NAME or "\x00" in name or not _is_utf8(name):
        raise StorageError(
            f"a name of {len(name)} characters, {name[:60]!r}: up to {LONGEST_NAME} can be "
            "stored, without NUL and halves of characters"
        )
    return name


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def blank_trial(trial_id: int, number: int, start: Any) -> FrozenTrial:
    """Return a RUNNING trial as it is right after it was made."""
    return FrozenTrial(
        number=number,
        state=TrialState.RUNNING,
        value=None,
        datetime_start=local(start),
        datetime_complete=None,
        params={},
        distributions={},
        user_attrs={},
        system_attrs={},
        intermediate_values={},
        trial_id=trial_id,
    )


def param_row(trial_id: int, name: str, internal: float, kind: BaseDistribution) -> dict[str, Any]:
    """Return the row of one param."""
    return {
        "trial_id": trial_id,
        "param_name": name,
        "param_value": float(internal),
        "distribution_json": distribution_to_json(kind),
    }


def attr_rows(trial_id: int, texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the rows of attributes that are JSON already."""
    return [{"trial_id": trial_id, "key": key, "value_json": text} for key, text in texts.items()]
