"""The trials that this process drives itself, and what of them is not written yet.

Their owner reads and writes them dozens of times; the database needs to hear of it only when
another process could care: with the next report, and before the trial's state changes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    check_distribution_compatibility,
    distribution_to_json,
)
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Connection

from storage import rows
from storage.loading import local


@dataclass
class RunningTrial:
    """One trial of this process: as it is, and the rows that the database lacks."""

    study_id: int
    trial: FrozenTrial
    new_params: list[dict[str, Any]] = field(default_factory=list)
    new_users: dict[str, Any] = field(default_factory=dict)
    new_systems: dict[str, Any] = field(default_factory=dict)

    def set_param(self, name: str, internal: float, kind: BaseDistribution) -> None:
        """Remember a param; like Optuna's own storage, the first value of a name stays."""
        if name in self.trial.params:
            check_distribution_compatibility(self.trial.distributions[name], kind)
            return
        self.trial.params[name] = kind.to_external_repr(internal)
        self.trial.distributions[name] = kind
        self.new_params.append(param_row(self.trial._trial_id, name, internal, kind))

    def set_user_attr(self, key: str, value: Any) -> None:
        """Remember a user attribute."""
        self.new_users[key] = text = json.dumps(value)
        self.trial.user_attrs[key] = json.loads(text)

    def set_system_attr(self, key: str, value: Any) -> None:
        """Remember an attribute of Optuna's own."""
        self.new_systems[key] = text = json.dumps(value)
        self.trial.system_attrs[key] = json.loads(text)

    @property
    def has_news(self) -> bool:
        """Whether the database lacks something."""
        return bool(self.new_params or self.new_users or self.new_systems)

    def write(self, connection: Connection) -> None:
        """Write what the database lacks; the caller commits and then calls `written`."""
        known = rows.statements(connection.dialect.name)
        trial_id = self.trial._trial_id
        if self.new_params:
            connection.execute(known.param, self.new_params)
        if self.new_users:
            connection.execute(known.user_attr, attr_rows(trial_id, self.new_users))
        if self.new_systems:
            connection.execute(known.system_attr, attr_rows(trial_id, self.new_systems))

    def written(self) -> None:
        """Forget what is committed."""
        self.new_params.clear()
        self.new_users.clear()
        self.new_systems.clear()


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


def attr_rows(trial_id: int, texts: dict[str, str]) -> list[dict[str, Any]]:
    """Return the rows of attributes that are JSON already."""
    return [{"trial_id": trial_id, "key": key, "value_json": text} for key, text in texts.items()]
