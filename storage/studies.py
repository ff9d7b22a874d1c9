"""An Optuna storage that asks the database only for what it does not know.

Optuna's own storage reads a whole study trial by trial and writes each param and report in a
transaction of its own; here ended trials stay in memory, and what a running trial gathers is
written together. The tables are Optuna's, so stock Optuna and optuna-dashboard may use the same
database at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from optuna.distributions import BaseDistribution, check_distribution_compatibility
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Connection, select

from storage import rows
from storage.grouped import GATHER_S, PARAMS_S, GroupedWrites
from storage.link import Link
from storage.loading import ONE, distribution, heads, local, same_trial
from storage.memory import StudyMemory, copy_trial
from storage.prepared import Answer
from storage.running import (
    Gathered,
    RunningTrial,
    blank_trial,
    check_name,
    check_step,
    param_row,
    write_news,
)

# Somebody else may have written to a trial whose move is only known to have happened.
UNKNOWN = 1


class StudyStorage(GroupedWrites):
    """Optuna studies on SQLite or PostgreSQL.

    What a trial of this process gathers (params, reports, attributes) is written together, in a
    thread of its own: at most 250 ms after it happened, and always before the trial's state
    changes. This process reads it at once. A trial that this process did not begin is written to
    at once, and with `grouped` False each of them.

    It is no subclass of RDBStorage on purpose: Optuna wraps those in a cache of its own, which
    would read every study once more.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = 60,
        *,
        grouped: bool = True,
        link: Link | None = None,
    ) -> None:
        super().__init__(link or Link(url, timeout_s), grouped=grouped)
        self._timeout_s = timeout_s

    def __getstate__(self) -> dict[str, Any]:
        """Keep what another process needs to open the same database."""
        return {"url": self._link.url, "timeout_s": self._timeout_s, "grouped": self._grouped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the database anew."""
        self.__init__(**state)

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """Add a trial, numbered one above the study's last."""
        start, template = rows.utc_naive(), template_trial
        tried: list[FrozenTrial] = []

        def work(connection: Connection) -> FrozenTrial:
            if template is None:
                added = self.add_running(connection, start, study=study_id)
                tried.append(self.added(added, start, study=study_id)[1])
            else:
                tried.append(self._insert(connection, study_id, template))
            return tried[-1]

        def made(connection: Connection) -> FrozenTrial | None:
            # The answer to a COMMIT was lost; is the trial there under the id that it got?
            trial = tried[-1] if tried else None
            found = heads(connection, ONE, trial=trial._trial_id) if trial else []
            is_made = trial is not None and same_trial(trial, found[0] if found else None)
            return trial if is_made and found[0].study_id == study_id else None

        trial = self._link.write(work, again=made, prepared=template is None)
        if trial.state == TrialState.RUNNING:
            self.adopt(study_id, trial, is_new=template is None)
        if template is not None:
            memory = self._memory.setdefault(study_id, StudyMemory())
            for name, kind in template.distributions.items():
                memory.distributions.setdefault(name, kind)
            self._stale(study_id)
        return trial._trial_id

    def add_running(self, connection: Connection, start: Any, *, study: int | str) -> Answer:
        """Add a RUNNING trial to a study of this id or name, within a transaction."""
        fields = {"state": TrialState.RUNNING, "start": start, "complete": None}
        return self._add(connection, study, fields)

    def lock_study(self, connection: Connection, study: str) -> None:
        """Keep others from numbering a trial of a study until this transaction ends."""
        self._known.lock_study_named.run(connection, {"study": study})

    def added(
        self, answer: Answer, start: Any, *, study: int | str
    ) -> tuple[int, FrozenTrial]:
        """Return the trial that `add_running` added, and the id of its study.

        Raises:
            KeyError: there is no such study.
        """
        made = _made(answer, study)
        return made.study_id, blank_trial(made.trial_id, made.number, start)

    def _add(self, connection: Connection, study: int | str, fields: dict[str, Any]) -> Answer:
        by_name = isinstance(study, str)
        known = self._known
        found = {"study": study}
        if not self._link.is_sqlite:
            # There the transaction itself does not keep others from taking the same number.
            lock = known.lock_study_named if by_name else known.lock_study
            lock.run(connection, found)
        add = known.add_trial_named if by_name else known.add_trial
        return add.run(connection, {**fields, **found})

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
            self._set_own(own, {param_name: (param_value_internal, distribution)}, PARAMS_S)
            return
        news = Gathered(
            params=[param_row(trial_id, param_name, param_value_internal, distribution)]
        )
        self._change(trial_id, news, lambda connection, study_id: self._check_kind(
            connection, study_id, param_name, distribution))

    def set_trial_params(
        self, trial_id: int, params: Mapping[str, tuple[float, BaseDistribution]]
    ) -> None:
        """Set all params of a trial that this process will end: each value as Optuna has it.

        Nobody else tells its result, so they are written with what it gathers next.
        """
        own = self._running.get(trial_id)
        if own is not None:
            self._set_own(own, params, GATHER_S)
            return
        for name, (value, kind) in params.items():
            self.set_trial_param(trial_id, name, value, kind)

    def _set_own(
        self, own: RunningTrial, params: Mapping[str, tuple[float, BaseDistribution]],
        within_s: float,
    ) -> None:
        is_first = False
        for name, (value, kind) in params.items():
            is_first |= self._check_own_kind(own.study_id, name, kind)
            own.set_param(name, value, kind)
        self.gathered(own, within_s)
        if is_first:
            # The others must hear of its kind before they draw one.
            self.flush(own.trial._trial_id)

    def set_trial_intermediate_value(
        self, trial_id: int, step: int, intermediate_value: float
    ) -> None:
        """Report a value of an unfinished trial; a step reported again is overwritten."""
        self.report(trial_id, step, intermediate_value)

    def report(
        self, trial_id: int, step: int, value: float, epoch_row: dict[str, Any] | None = None
    ) -> None:
        """Report a value, with the row of our own table of epochs that goes with it."""
        own = self._running.get(trial_id)
        if own is not None:
            own.report(check_step(step, self._link.engine.dialect.name), value, epoch_row)
            self.gathered(own)
            return
        check_step(step, self._link.engine.dialect.name)
        epochs = {} if epoch_row is None else {step: epoch_row}
        self._change(trial_id, Gathered(reports={int(step): float(value)}, epochs=epochs))

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Set a user attribute of an unfinished trial."""
        own = self._running.get(trial_id)
        if own is not None:
            own.set_user_attr(key, value)
            self.gathered(own)
            return
        self._change(trial_id, Gathered(users={check_name(key): json.dumps(value)}))

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Set one of Optuna's own attributes of an unfinished trial."""
        own = self._running.get(trial_id)
        if own is not None:
            own.set_system_attr(key, value)
            self.gathered(own)
            return
        self._change(trial_id, Gathered(systems={check_name(key): json.dumps(value)}))

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        """Move an unfinished trial to a state, in one compare-and-set that has one winner."""
        at = rows.utc_naive()
        own = self._running.get(trial_id)

        def done(connection: Connection) -> int | None:
            found = heads(connection, ONE, trial=trial_id)
            stamps = {local(time) for head in found for time in (head.start, head.complete)}
            return UNKNOWN if local(at) in stamps and found[0].state == state.name else None

        def work(connection: Connection) -> int | None:
            n_rows = self.move(connection, trial_id, state, at).scalar()
            if n_rows is None:
                self._touch(connection, trial_id)
            self.write_rest(connection, trial_id, news, values)
            return n_rows

        ending = state.is_finished()
        with nullcontext(Gathered()) if own is None else own.taken(ending=ending) as news:
            n_rows = self._link.write(work, again=done, prepared=True)
        if n_rows is None:
            return False
        if own is not None and state.is_finished():
            self.ended(own, state, values, at, n_rows=n_rows)
        elif state == TrialState.RUNNING and self._grouped:
            trial, study_id = self._link.read(lambda c: self._read_one(c, trial_id))
            self.adopt(study_id, trial, is_new=False)
        else:
            self.forget(trial_id)
        return True

    def move(
        self, connection: Connection, trial_id: int, state: TrialState, at: Any,
        start: Any = None,
    ) -> Answer:
        """Change an unfinished trial's state, and its start if given, within a transaction.

        The answer's scalar is how many rows of params, reports, attributes and values it had;
        None where it has ended, or is RUNNING and should become it.
        """
        fields = {"trial": trial_id, "at": at, **({} if start is None else {"start": start})}
        return rows.move_trial(state, start is not None).run(connection, fields)

    def write_rest(
        self,
        connection: Connection,
        trial_id: int,
        news: Gathered,
        values: Sequence[float] | None,
    ) -> None:
        """Write what goes with a change of state, within its transaction."""
        write_news(connection, {trial_id: news})
        if values is not None and len(values):
            self._known.value.run(connection, rows.value_rows(trial_id, values))

    def delete_study(self, study_id: int) -> None:
        """Delete a study and everything in it."""
        super().delete_study(study_id)
        self.drop([study_id])

    def _touch(self, connection: Connection, trial_id: int) -> int:
        """Return the study of an unfinished trial and keep it unfinished until the commit."""
        found = self._known.touch_trial.run(connection, {"trial": trial_id}).one_or_none()
        if found is None:
            raise KeyError(f"no trial with id {trial_id}")
        if found.state.is_finished():
            self.forget(trial_id)
        self.check_trial_is_updatable(trial_id, found.state)
        return found.study_id

    def _change(self, trial_id: int, news: Gathered, check: Any = None) -> None:
        """Write to an unfinished trial at once."""

        def work(connection: Connection) -> None:
            study_id = self._touch(connection, trial_id)
            if check is not None:
                check(connection, study_id)
            write_news(connection, {trial_id: news})

        self._link.write(work)

    def _check_own_kind(self, study_id: int, name: str, kind: BaseDistribution) -> bool:
        """Refuse a param that does not fit those of its name; True for the first of the study."""
        memory = self._memory.setdefault(study_id, StudyMemory())
        known = memory.distributions.get(name)
        if known is not None:
            with suppress(ValueError):
                check_distribution_compatibility(known, kind)
                return False
        # Also where memory refuses it: its study may have been deleted and made anew.
        found = self._link.read(lambda c: self._check_kind(c, study_id, name, kind))
        memory.distributions[name] = found or kind
        return found is None

    def _check_kind(
        self, connection: Connection, study_id: int, name: str, kind: BaseDistribution
    ) -> BaseDistribution | None:
        """Refuse a distribution that does not fit the one which the study has for this param.

        Returns: the one that it has, if any.
        """
        check_name(name)
        table = rows.params.c
        query = (
            select(table.distribution_json)
            .join(rows.trials, rows.trials.c.trial_id == table.trial_id)
            .where(rows.trials.c.study_id == study_id, table.param_name == name)
            .limit(1)
        )
        text = connection.execute(query).scalar_one_or_none()
        if text is None:
            return None
        found = distribution(text)
        check_distribution_compatibility(found, kind)
        return found

    def _insert(
        self, connection: Connection, study_id: int, template: FrozenTrial
    ) -> FrozenTrial:
        """Add a trial with all that a template brings."""
        begun, ended = template.datetime_start, template.datetime_complete
        fields = {
            "state": template.state,
            "start": rows.utc_naive(begun) if begun else None,
            "complete": rows.utc_naive(ended) if ended else None,
        }
        made = _made(self._add(connection, study_id, fields), study_id)
        trial = copy_trial(template)
        trial.number, trial._trial_id = made.number, made.trial_id
        self._insert_details(connection, study_id, trial)
        return trial

    def _insert_details(self, connection: Connection, study_id: int, trial: FrozenTrial) -> None:
        own = RunningTrial(study_id, blank_trial(trial._trial_id, trial.number, None))
        memory = self._memory.get(study_id)
        known = {} if memory is None else memory.distributions
        for name, value in trial.params.items():
            kind = trial.distributions[name]
            if known.get(name) != kind:
                self._check_kind(connection, study_id, name, kind)
            own.set_param(name, kind.to_internal_repr(value), kind)
        for key, value in trial.user_attrs.items():
            own.set_user_attr(key, value)
        for key, value in trial.system_attrs.items():
            own.set_system_attr(key, value)
        for step, number in trial.intermediate_values.items():
            own.report(check_step(step, self._link.engine.dialect.name), number)
        with own.taken() as news:
            self.write_rest(connection, trial._trial_id, news, trial.values)


def _made(answer: Answer, study: int | str) -> Any:
    """Return the row of a trial that was added.

    Raises:
        KeyError: there is no such study.
    """
    made = answer.one_or_none()
    if made is None:
        by_name = isinstance(study, str)
        raise KeyError(f"no study {f'named {study!r}' if by_name else f'with id {study}'}")
    return made
