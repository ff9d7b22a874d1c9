"""The trials that this process drives itself, and what of them is not written yet.

Their owner reads and writes them dozens of times; the database needs to hear of it only when
another process could care: soon, and before the trial's state changes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, RLock, get_ident
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    check_distribution_compatibility,
    distribution_to_json,
)
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Connection

from hpo.errors import StorageError
from storage import rows
from storage.loading import converter, distribution, local
from storage.memory import copy_trial
from storage.prepared import PreparedRows

# The width of Optuna's columns for names, which PostgreSQL keeps to.
LONGEST_NAME = 512
# What Optuna's column of steps holds.
LARGEST_STEP = {"postgresql": 2**31 - 1, "sqlite": 2**63 - 1}


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
        # Why the last attempt to write what this trial gathered failed for good.
        self.failure: Exception | None = None
        self.looked_at = time.monotonic()
        self._news = Gathered()
        self._rows: list[dict[str, Any]] = []
        # What a writer has taken and not committed yet.
        self._flying: Gathered | None = None
        self._guard = Lock()
        self._writing = RLock()
        # The thread that ends the trial at this moment.
        self._ending: int | None = None
        self._ended = False

    @property
    def has_news(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._news)

    @property
    def is_behind(self) -> bool:
        """Whether the database lacks something still, though a writer be at it."""
        return bool(self._news) or self._flying is not None

    def snapshot(self) -> FrozenTrial:
        """Return a copy of the trial as it is now."""
        with self._guard:
            return copy_trial(self.trial)

    def set_param(self, name: str, internal: float, kind: BaseDistribution) -> None:
        """Remember a param; like Optuna's own storage, the first value of a name stays."""
        if name in self.trial.params:
            check_distribution_compatibility(self.trial.distributions[name], kind)
            return
        row = param_row(self.trial._trial_id, name, internal, kind)
        with self._open():
            self.trial._params[name] = kind.to_external_repr(internal)
            self.trial._distributions[name] = kind
            self._news.params.append(row)
            self._rows.append(row)

    def set_user_attr(self, key: str, value: Any) -> None:
        """Remember a user attribute."""
        check_name(key)
        text = json.dumps(value)
        with self._open():
            self._news.users[key] = text
            self.trial._user_attrs[key] = json.loads(text)

    def set_system_attr(self, key: str, value: Any) -> None:
        """Remember an attribute of Optuna's own."""
        check_name(key)
        text = json.dumps(value)
        with self._open():
            self._news.systems[key] = text
            self.trial._system_attrs[key] = json.loads(text)

    def report(self, step: int, value: float, epoch_row: dict[str, Any] | None = None) -> None:
        """Remember a report, and the row of our own table that goes with it."""
        step, value = int(step), float(value)
        with self._open():
            self._news.reports[step] = value
            self.trial.intermediate_values[step] = value
            if epoch_row is not None:
                self._news.epochs[step] = epoch_row

    def as_stored(self) -> None:
        """Make the params what the database gives back: JSON knows no tuples, say."""
        for row in self._rows:
            name, value = row["param_name"], row["param_value"]
            kind = distribution(row["distribution_json"])
            convert = converter(kind)
            self.trial._distributions[name] = kind
            self.trial._params[name] = value if convert is None else convert(value)

    def merge(self, stored: FrozenTrial) -> None:
        """Take in what others have written to the trial; what waits to be written stays."""
        with self._guard:
            flying = self._flying or Gathered()
            news = flying.before(self._news)
            own, theirs = self.trial, stored
            for name, value in theirs.params.items():
                if not any(row["param_name"] == name for row in news.params):
                    own._params[name] = value
                    own._distributions[name] = theirs.distributions[name]
            _update(own._user_attrs, theirs.user_attrs, news.users)
            _update(own._system_attrs, theirs.system_attrs, news.systems)
            _update(own.intermediate_values, theirs.intermediate_values, news.reports)
            self.looked_at = time.monotonic()

    @contextmanager
    def taken(self, *, ending: bool = False) -> Iterator[Gathered]:
        """Hand over what is gathered, for one writer at a time; an error brings it back.

        While the trial is `ending`, whoever would add to it waits, and is refused once it ended.
        """
        with self._writing:
            with self._guard:
                self._ending = get_ident() if ending else None
                taken, self._news = self._news, Gathered()
                self._flying = taken
            try:
                yield taken
            except BaseException:
                with self._guard:
                    self._news = taken.before(self._news)
                    self._ending, self._flying = None, None
                raise
            with self._guard:
                self._ended = ending
                self._ending, self._flying = None, None

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Hold the trial for a change.

        Raises:
            UpdateFinishedTrialError: it has ended, or is being ended in this very thread.
        """
        while True:
            with self._guard:
                if self._ended or self._ending == get_ident():
                    raise UpdateFinishedTrialError(
                        f"trial {self.trial.number} has ended and can be changed no more"
                    )
                if self._ending is None:
                    yield
                    return
            with self._writing:
                pass


def _update(mine: dict[Any, Any], found: Mapping[Any, Any], waiting: Mapping[Any, Any]) -> None:
    mine.update({key: value for key, value in found.items() if key not in waiting})


def write_news(connection: Connection, found: Mapping[int, Gathered]) -> None:
    """Write what is gathered of trials that the caller knows to be unfinished."""
    known = rows.statements(connection.dialect.name)
    parts: tuple[tuple[PreparedRows, list[dict[str, Any]]], ...] = (
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
            statement.run(connection, new)


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


def check_step(step: int, dialect: str) -> int:
    """Return the step of a report, if the database can hold it.

    Raises:
        StorageError: it is too large.
    """
    step, most = int(step), LARGEST_STEP[dialect]
    if abs(step) > most:
        raise StorageError(f"step {step} of a report: {dialect} holds steps up to {most}")
    return step


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
