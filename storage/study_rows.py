"""The part of an Optuna storage that is about studies, not about trials."""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from optuna.exceptions import DuplicatedStudyError
from optuna.storages import BaseStorage
from optuna.storages._base import DEFAULT_STUDY_NAME_PREFIX
from optuna.study._frozen import FrozenStudy
from optuna.study._study_direction import StudyDirection
from sqlalchemy import Connection, Table, case, delete, func, insert, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from hpo.errors import StorageError
from storage import rows
from storage.link import Link
from storage.schema import marks

LAST_STUDY_ID = "study_id"


class StudyRows(BaseStorage):
    """Studies, their directions and attributes."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def create_new_study(
        self, directions: Sequence[StudyDirection], study_name: str | None = None
    ) -> int:
        """Make a study and return its id, which no earlier study had."""
        name = DEFAULT_STUDY_NAME_PREFIX + str(uuid.uuid4()) if study_name is None else study_name
        tried: list[int] = []

        def work(connection: Connection) -> int:
            tried.append(_insert_study(connection, name, directions))
            return tried[-1]

        def made(connection: Connection) -> int | None:
            query = select(rows.studies.c.study_id).where(rows.studies.c.study_name == name)
            found = connection.execute(query).scalar_one_or_none()
            return found if found in tried else None

        try:
            return self._link.write(work, again=made)
        except StorageError as error:
            if isinstance(error.__cause__, IntegrityError):
                raise DuplicatedStudyError(f"a study named '{name}' exists already") from error
            raise

    def delete_study(self, study_id: int) -> None:
        """Delete a study and everything in it."""

        def work(connection: Connection) -> bool:
            self._name(connection, study_id)
            delete_studies(connection, [study_id])
            return True

        def done(connection: Connection) -> bool | None:
            where = rows.studies.c.study_id == study_id
            left = connection.execute(select(rows.studies.c.study_id).where(where)).first()
            return True if left is None else None

        self._link.write(work, again=done)

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        """Set a user attribute of a study."""
        self._set_attr(rows.study_user_attrs, study_id, key, value)

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        """Set one of Optuna's own attributes of a study."""
        self._set_attr(rows.study_system_attrs, study_id, key, value)

    def get_study_id_from_name(self, study_name: str) -> int:
        """Return the id of a study."""
        query = select(rows.studies.c.study_id).where(rows.studies.c.study_name == study_name)
        found = self._link.read(lambda c: c.execute(query).scalar_one_or_none())
        if found is None:
            raise KeyError(f"no study named '{study_name}'")
        return found

    def get_study_name_from_id(self, study_id: int) -> str:
        """Return the name of a study."""
        return self._link.read(lambda c: self._name(c, study_id))

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        """Return the directions of a study, in the order of its objectives."""
        table = rows.directions.c
        query = select(table.direction).where(table.study_id == study_id).order_by(table.objective)
        found = self._link.read(lambda c: list(c.execute(query).scalars()))
        if not found:
            raise KeyError(f"no study with id {study_id}")
        return found

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """Return the user attributes of a study."""
        return self._get_attrs(rows.study_user_attrs, study_id)

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """Return Optuna's own attributes of a study."""
        return self._get_attrs(rows.study_system_attrs, study_id)

    def get_all_studies(self) -> list[FrozenStudy]:
        """Return all studies by id."""
        return self._link.read(_read_studies)

    def remove_session(self) -> None:
        """Do nothing: a session goes back to the pool after each call."""

    def _name(self, connection: Connection, study_id: int) -> str:
        query = select(rows.studies.c.study_name).where(rows.studies.c.study_id == study_id)
        name = connection.execute(query).scalar_one_or_none()
        if name is None:
            raise KeyError(f"no study with id {study_id}")
        return name

    def _set_attr(self, table: Table, study_id: int, key: str, value: Any) -> None:
        text = json.dumps(value)

        def work(connection: Connection) -> None:
            self._name(connection, study_id)
            upsert = sqlite.insert if self._link.is_sqlite else postgresql.insert
            new = upsert(table).values(study_id=study_id, key=key, value_json=text)
            connection.execute(
                new.on_conflict_do_update(
                    index_elements=["study_id", "key"], set_={"value_json": text}
                )
            )

        self._link.write(work)

    def _get_attrs(self, table: Table, study_id: int) -> dict[str, Any]:
        query = select(table.c.key, table.c.value_json).where(table.c.study_id == study_id)

        def work(connection: Connection) -> dict[str, Any]:
            self._name(connection, study_id)
            return {key: json.loads(text) for key, text in connection.execute(query)}

        return self._link.read(work)


def _insert_study(connection: Connection, name: str, directions: Sequence[StudyDirection]) -> int:
    fields: dict[str, Any] = {"study_name": name}
    if connection.dialect.name == "sqlite":
        fields["study_id"] = _fresh_id(connection)
    new = insert(rows.studies).values(fields).returning(rows.studies.c.study_id)
    study_id = connection.execute(new).scalar_one()
    ways = [
        {"study_id": study_id, "objective": place, "direction": way}
        for place, way in enumerate(directions)
    ]
    connection.execute(insert(rows.directions), ways)
    return study_id


def _fresh_id(connection: Connection) -> int:
    # SQLite gives a new row the id of the last deleted one, and whoever keeps studies in memory
    # by id (optuna-dashboard does) would show the old trials in the new study.
    last = connection.execute(select(func.max(rows.studies.c.study_id))).scalar_one() or 0
    mark = select(marks.c.value).where(marks.c.name == LAST_STUDY_ID)
    return max(last, connection.execute(mark).scalar_one_or_none() or 0) + 1


def delete_studies(connection: Connection, study_ids: Sequence[int]) -> None:
    """Delete Optuna studies with all their rows, within the caller's transaction."""
    if not study_ids:
        return
    trials = select(rows.trials.c.trial_id).where(rows.trials.c.study_id.in_(study_ids))
    for table in rows.OF_A_TRIAL:
        connection.execute(delete(table).where(table.c.trial_id.in_(trials)))
    for table in (rows.trials, *rows.OF_A_STUDY, rows.studies):
        connection.execute(delete(table).where(table.c.study_id.in_(study_ids)))
    upsert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    new = upsert(marks).values(name=LAST_STUDY_ID, value=max(study_ids))
    higher = case(
        (marks.c.value > new.excluded["value"], marks.c.value), else_=new.excluded["value"]
    )
    connection.execute(new.on_conflict_do_update(index_elements=["name"], set_={"value": higher}))


def _read_studies(connection: Connection) -> list[FrozenStudy]:
    directions = defaultdict(list)
    by_objective = select(rows.directions).order_by(rows.directions.c.objective)
    for row in connection.execute(by_objective):
        directions[row.study_id].append(row.direction)
    users = _attrs_by_study(connection, rows.study_user_attrs)
    systems = _attrs_by_study(connection, rows.study_system_attrs)
    query = select(rows.studies).order_by(rows.studies.c.study_id)
    return [
        FrozenStudy(
            study_name=study.study_name,
            direction=None,
            directions=directions[study.study_id],
            user_attrs=users[study.study_id],
            system_attrs=systems[study.study_id],
            study_id=study.study_id,
        )
        for study in connection.execute(query)
        if study.study_id in directions
    ]


def _attrs_by_study(connection: Connection, table: Table) -> dict[int, dict[str, Any]]:
    found = defaultdict(dict)
    for row in connection.execute(select(table.c.study_id, table.c.key, table.c.value_json)):
        found[row.study_id][row.key] = json.loads(row.value_json)
    return found
