"""An Optuna storage that asks the database only for what it does not know.

Optuna's own storage reads a whole study trial by trial and checks each write with several
queries; here ended trials stay in memory, and each write is one short transaction. The tables are
Optuna's, so stock Optuna and optuna-dashboard may use the same database at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from optuna.distributions import BaseDistribution, check_distribution_compatibility
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Connection, insert, select

from storage import rows
from storage.link import Link
from storage.loading import ONE, distribution, heads, local
from storage.memory import StudyMemory, copy_trial
from storage.running import RunningTrial, attr_rows, blank_trial, param_row
from storage.trial_reads import TrialReads


class StudyStorage(TrialReads):
    """Optuna studies on SQLite or PostgreSQL.

    It is no subclass of RDBStorage on purpose: Optuna wraps those in a cache of its own, which
    would read every study once more.

    With `grouped`, what a trial of this process gathers (params, attributes) is written together
    with its next report, its end, or `flush`; without, at once.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = 60,
        *,
        grouped: bool = False,
        link: Link | None = None,
    ) -> None:
        super().__init__(link or Link(url, timeout_s))
        self._timeout_s = timeout_s
        self._grouped = grouped
        self._known = rows.statements(self._link.engine.dialect.name)

    def __getstate__(self) -> dict[str, Any]:
        """Keep what another process needs to open the same database."""
        return {"url": self._link.url, "timeout_s": self._timeout_s, "grouped": self._grouped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the database anew."""
        self.__init__(**state)

    def close(self) -> None:
        """Write what is gathered and close all sessions."""
        with suppress(UpdateFinishedTrialError):
            self.flush()
        self._link.close()

    def adopt(self, study_id: int, trial: FrozenTrial) -> None:
        """Take a RUNNING trial of this process into memory, if writes are grouped."""
        if self._grouped:
            with self._lock:
                self._running[trial._trial_id] = RunningTrial(study_id, trial)

    def flush(self, trial_id: int | None = None) -> None:
        """Write what running trials have gathered.

        Raises:
            UpdateFinishedTrialError: somebody else has ended the trial.
        """
        chosen = list(self._running) if trial_id is None else [trial_id]
        for one in chosen:
            own = self._running.get(one)
            if own is not None and own.has_news:
                self._change(one, lambda _connection, _study: None)

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """Add a trial, numbered one above the study's last."""
        start = rows.utc_naive()
        template = template_trial

        def made(connection: Connection) -> FrozenTrial | None:
            mine = (rows.trials.c.study_id == study_id) & (rows.trials.c.datetime_start == start)
            found = connection.execute(select(rows.trials).where(mine)).first()
            return blank_trial(found.trial_id, found.number, start) if found else None

        trial = self._link.write(
            lambda c: self._insert(c, study_id, start, template),
            again=made if template is None else None,
        )
        if trial.state == TrialState.RUNNING:
            self.adopt(study_id, trial)
        self._stale(study_id)
        return trial._trial_id

    def insert_running(self, connection: Connection, study_id: int, start: Any) -> FrozenTrial:
        """Add a RUNNING trial within a transaction that holds the study's lock."""
        fields = {"study": study_id, "state": TrialState.RUNNING, "start": start, "complete": None}
        made = connection.execute(self._known.add_trial, fields).one()
        return blank_trial(made.trial_id, made.number, start)

    def set_trial_param(
        self,
        trial_id: int,
        param_name: str,
        param_value_internal: float,
        distribution: BaseDistribution,
    ) -> None:
        """Set a param of an unfinished trial, the same distribution in all trials of a study."""
        own = self._running.get(trial_id)
        if own is not None:
            self._check_own_kind(own.study_id, param_name, distribution)
            own.set_param(param_name, param_value_internal, distribution)
            return
        row = param_row(trial_id, param_name, param_value_internal, distribution)

        def work(connection: Connection, study_id: int) -> None:
            self._check_kind(connection, study_id, param_name, distribution)
            connection.execute(self._known.param, row)

        self._change(trial_id, work)

    def set_trial_intermediate_value(
        self, trial_id: int, step: int, intermediate_value: float
    ) -> None:
        """Report a value of an unfinished trial; a step reported again is overwritten."""
        row = rows.report_row(trial_id, step, intermediate_value)

        def work(connection: Connection) -> None:
            if not self.write_report(connection, row):
                self._touch(connection, trial_id)

        self._link.write(work)
        self.note_report(trial_id, step, intermediate_value)

    def write_report(self, connection: Connection, row: dict[str, Any]) -> bool:
        """Write a report and what the trial gathered, and say whether the trial was unfinished."""
        own = self._running.get(row["trial"])
        if not connection.execute(self._known.report, row).rowcount:
            return False
        if own is not None:
            own.write(connection)
        return True

    def note_report(self, trial_id: int, step: int, value: float) -> None:
        """Remember a report that is committed."""
        own = self._running.get(trial_id)
        if own is not None:
            own.trial.intermediate_values[int(step)] = float(value)
            own.written()

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Set a user attribute of an unfinished trial."""
        own = self._running.get(trial_id)
        if own is not None:
            own.set_user_attr(key, value)
            return
        new = attr_rows(trial_id, {key: json.dumps(value)})
        self._change(trial_id, lambda c, _study: c.execute(self._known.user_attr, new))

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Set one of Optuna's own attributes of an unfinished trial."""
        own = self._running.get(trial_id)
        if own is not None:
            own.set_system_attr(key, value)
            return
        new = attr_rows(trial_id, {key: json.dumps(value)})
        self._change(trial_id, lambda c, _study: c.execute(self._known.system_attr, new))

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        """Move an unfinished trial to a state, in one compare-and-set that has one winner."""
        at = rows.utc_naive()

        def done(connection: Connection) -> bool | None:
            found = heads(connection, ONE, trial=trial_id)
            stamps = {local(time) for head in found for time in (head.start, head.complete)}
            return True if local(at) in stamps and found[0].state == state.name else None

        moved = self._link.write(lambda c: self.move(c, trial_id, state, values, at), again=done)
        if moved:
            self.forget(trial_id)
        if moved and state == TrialState.RUNNING and self._grouped:
            trial, study_id = self._link.read(lambda c: self._read_one(c, trial_id))
            self.adopt(study_id, trial)
        return moved

    def move(
        self,
        connection: Connection,
        trial_id: int,
        state: TrialState,
        values: Sequence[float] | None,
        at: Any,
    ) -> bool:
        """Change a trial's state within a transaction; False where it is RUNNING already."""
        fields = {"trial": trial_id, "at": at}
        moved = bool(connection.execute(rows.move_trial(state), fields).rowcount)
        if not moved:
            self._touch(connection, trial_id)
        own = self._running.get(trial_id)
        if own is not None:
            own.write(connection)
        if values is not None and len(values):
            connection.execute(self._known.value, rows.value_rows(trial_id, values))
        return moved

    def delete_study(self, study_id: int) -> None:
        """Delete a study and everything in it."""
        super().delete_study(study_id)
        with self._lock:
            self._memory.pop(study_id, None)
            gone = [t for t, own in self._running.items() if own.study_id == study_id]
            for trial_id in gone:
                self.forget(trial_id)

    def _touch(self, connection: Connection, trial_id: int) -> int:
        """Return the study of an unfinished trial and keep it unfinished until the commit."""
        found = connection.execute(self._known.touch_trial, {"trial": trial_id}).one_or_none()
        if found is None:
            raise KeyError(f"no trial with id {trial_id}")
        if found.state.is_finished():
            self.forget(trial_id)
        self.check_trial_is_updatable(trial_id, found.state)
        return found.study_id

    def _change(self, trial_id: int, work: Any) -> None:
        """Do some idempotent work on an unfinished trial, in one transaction."""
        own = self._running.get(trial_id)

        def all_of_it(connection: Connection) -> None:
            study_id = self._touch(connection, trial_id)
            if own is not None:
                own.write(connection)
            work(connection, study_id)

        self._link.write(all_of_it)
        if own is not None:
            own.written()

    def _check_own_kind(self, study_id: int, name: str, kind: BaseDistribution) -> None:
        memory = self._memory.get(study_id)
        if memory is not None and name in memory.distributions:
            check_distribution_compatibility(memory.distributions[name], kind)
        else:
            self._link.read(lambda c: self._check_kind(c, study_id, name, kind))

    def _check_kind(
        self, connection: Connection, study_id: int, name: str, kind: BaseDistribution
    ) -> None:
        """Refuse a distribution that does not fit the one which the study has for this param."""
        memory = self._memory.setdefault(study_id, StudyMemory())
        earlier = memory.distributions.get(name)
        if earlier is None:
            table = rows.params.c
            query = (
                select(table.distribution_json)
                .join(rows.trials, rows.trials.c.trial_id == table.trial_id)
                .where(rows.trials.c.study_id == study_id, table.param_name == name)
                .limit(1)
            )
            text = connection.execute(query).scalar_one_or_none()
            earlier = kind if text is None else distribution(text)
        check_distribution_compatibility(earlier, kind)
        memory.distributions[name] = earlier

    def _insert(
        self, connection: Connection, study_id: int, start: Any, template: FrozenTrial | None
    ) -> FrozenTrial:
        """Add a trial, with all that a template brings."""
        if connection.execute(self._known.lock_study, {"study": study_id}).first() is None:
            raise KeyError(f"no study with id {study_id}")
        if template is None:
            return self.insert_running(connection, study_id, start)
        begun, ended = template.datetime_start, template.datetime_complete
        fields = {
            "study": study_id,
            "state": template.state,
            "start": rows.utc_naive(begun) if begun else None,
            "complete": rows.utc_naive(ended) if ended else None,
        }
        made = connection.execute(self._known.add_trial, fields).one()
        trial = copy_trial(template)
        trial.number, trial._trial_id = made.number, made.trial_id
        self._insert_details(connection, study_id, trial)
        return trial

    def _insert_details(self, connection: Connection, study_id: int, trial: FrozenTrial) -> None:
        own = RunningTrial(study_id, blank_trial(trial._trial_id, trial.number, None))
        for name, value in trial.params.items():
            kind = trial.distributions[name]
            self._check_kind(connection, study_id, name, kind)
            own.set_param(name, kind.to_internal_repr(value), kind)
        for key, value in trial.user_attrs.items():
            own.set_user_attr(key, value)
        for key, value in trial.system_attrs.items():
            own.set_system_attr(key, value)
        own.write(connection)
        if trial.values is not None:
            new = rows.value_rows(trial._trial_id, trial.values)
            connection.execute(self._known.value, new)
        if trial.intermediate_values:
            reports = trial.intermediate_values.items()
            new = [rows.template_report(trial._trial_id, *report) for report in reports]
            connection.execute(insert(rows.reports), new)
