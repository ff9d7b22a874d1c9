"""Bring a run to its start and to its end: module, data, database, plan, phases, result."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo import devices, phases, studies
from hpo.display import Display, duration, make_display, say
from hpo.drive import Goal
from hpo.errors import HpoError, InputError
from hpo.plan import plan
from hpo.pool import Pool
from hpo.search import check_sampler
from hpo.settings import STORED, Settings, check
from hpo.states import sweep
from hpo.trial_log import forgive

if TYPE_CHECKING:
    from rich.console import Console

    from hpo.results import Results
    from storage.database import Database

# Below this, accuracies of different trials are mostly equal.
_FEW_VALIDATION = 100
# `hpo worker` looks this often for the study that `hpo run` is to make.
_ROW_POLL_S = 2.0
# A wait for the database that is shorter is not worth a line.
_SHORT_WAIT_S = 0.5


class Stopper:
    """Turns signals and the time limit into one question: go on?

    The first SIGINT or SIGTERM stops in order; a second one kills the workers at once.
    """

    def __init__(self) -> None:
        self.signals = 0
        self.deadline: float | None = None
        self.kill: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Take over SIGINT and SIGTERM."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self.signals += 1
        if self.signals > 1:
            self.kill()

    def limit(self, timeout_s: float | None) -> None:
        """Set the moment at which the run is stopped."""
        self.deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def check(self) -> None:
        """Raise Interrupted or TimeUp where the run is to stop."""
        if self.signals:
            raise phases.Interrupted("stopped by a signal")
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise phases.TimeUp("the time of --timeout is used up")


def make_home(home: Path) -> None:
    """Make the folder that everything a run writes lies under.

    Raises:
        InputError: where it cannot be made or written to.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"--home {home}: it is a file, not a folder") from None
    except OSError as error:
        raise InputError(f"--home {home}: {error.strerror}") from None
    if not os.access(home, os.W_OK | os.X_OK):
        raise InputError(f"--home {home}: no leave to write there")


def launch(settings: Settings, console: Console) -> int:
    """Run a study from its module to its registry and return the exit code.

    Raises:
        InputError: for bad flags, a faulty module, missing data or a study that does not fit.
    """
    return _with_pool(settings, console, _run)


def serve(settings: Settings, console: Console) -> int:
    """Work off the tickets of a study that `hpo run` writes, here or elsewhere, until stopped.

    Raises:
        InputError: for bad flags, a faulty module, missing data or a study that does not fit.
    """
    return _with_pool(settings, console, _serve)


def _with_pool(
    settings: Settings, console: Console,
    work: Callable[[Settings, Console, Pool, Stopper], int],
) -> int:
    check(settings)
    # A disk that is full, or a reader that is gone, must not end a night's run.
    forgive()
    stopper = Stopper()
    stopper.install()
    stopper.limit(settings.timeout_s)
    slots = devices.slots(settings.devices, settings.workers, n_each=settings.gpus_per_trial)
    if settings.sampler:
        check_sampler(settings.sampler)
    pool = Pool(settings.study, slots, stopper.check, works=True)
    stopper.kill = pool.kill
    try:
        # They load the module and torch while this process loads its own part.
        pool.start()
        from storage import validate_name

        validate_name(settings.name)
        return work(settings, console, pool, stopper)
    finally:
        pool.kill()
        pool.stop()


def _run(settings: Settings, console: Console, pool: Pool, stopper: Stopper) -> int:
    started = time.monotonic()
    if settings.home.exists():
        make_home(settings.home)
    described = pool.describe()
    spec = described["spec"]
    row = _stored_row(settings, _patience(settings, lambda text: say(console, text), stopper))
    if row is not None:
        studies.check_same(row, settings, spec)
    settings = settings.resolved(spec, None if row is None else row["settings"])
    check(settings)
    if stopper.deadline is None:
        stopper.limit(settings.timeout_s)
    show = _display(console, spec, pool)
    _say_plan(show, settings, described, pool)
    for text in () if row is None else settings.changes(row["settings"]):
        show.say(text)
    make_home(settings.home)
    order = order_of(settings, spec)
    data = _prepared(settings, pool, order, row, show)
    # After `prepare`: what `build` imports is loaded by then.
    files = pool.ask("source", "source", order=order, study=settings.study)["files"]
    db = _made(settings, spec, data, files, _patience(settings, show.say, stopper))
    course = phases.Course(settings, spec, described["grid"], described["defaults"], data, db,
                           pool, show, stopper.check)

    def work() -> int:
        phases.run(course)
        pool.stop()
        show.close()
        sweep(settings.home / "artifacts" / course.name, lambda: not (
            db.tickets.any_waits(course.name) or db.tickets.running(course.name)))
        _say_result(course, time.monotonic() - started)
        return _exit_code(course)

    # No study has this name: the workers take no ticket until a phase names its own.
    return _worked(course, {**order, "only": ""}, work)


def _serve(settings: Settings, console: Console, pool: Pool, stopper: Stopper) -> int:
    from storage.database import Database

    described = pool.describe()
    spec = described["spec"]
    show = _display(console, spec, pool)
    row = _awaited_row(settings, show, stopper)
    studies.check_same(row, settings, spec)
    settings = replace(settings, **{name: row["settings"].get(name) for name in STORED})
    make_home(settings.home)
    order = order_of(settings, spec)
    data = _prepared(settings, pool, order, row, show)
    db = Database(settings.storage, settings.storage_timeout_s)
    course = phases.Course(settings, spec, described["grid"], described["defaults"], data, db,
                           pool, show, stopper.check)
    show.say(f"waiting for trials of study '{settings.name}'")
    return _worked(course, order, lambda: phases.work_off(course))


def _awaited_row(settings: Settings, show: Display, stopper: Stopper) -> Mapping[str, Any]:
    """Return the study's row, as soon as a run has made it."""
    said = False
    patience = _patience(settings, show.say, stopper)
    while (row := _stored_row(settings, patience)) is None:
        if not said:
            show.say(f"waiting for `hpo run` to make study '{settings.name}'")
            said = True
        stopper.check()
        time.sleep(_ROW_POLL_S)
    return row


def _patience(
    settings: Settings, tell: Callable[[str], None], stopper: Stopper
) -> Callable[[HpoError], None]:
    """Return what is called before each wait for a database that does not answer.

    It says once what is waited for, unless that was short, and lets a signal end the wait.
    """
    began = time.monotonic()
    said = False

    def waits(error: HpoError) -> None:
        nonlocal said
        stopper.check()
        if not said and time.monotonic() - began > _SHORT_WAIT_S:
            said = True
            tell(f"{error}; it has {settings.storage_timeout_s:g} s to answer "
                f"(--storage-timeout)")

    return waits


def _stored_row(
    settings: Settings, patience: Callable[[HpoError], None]
) -> Mapping[str, Any] | None:
    db = studies.open_existing(settings.storage, settings.storage_timeout_s, patience)
    if db is None:
        return None
    try:
        return db.runs.study(settings.name)
    finally:
        db.close()


def _display(console: Console, spec: Mapping[str, Any], pool: Pool) -> Display:
    goal = Goal(spec["metric"], spec["direction"] == "maximize")
    return make_display(console, goal, len(pool.slots))


def order_of(settings: Settings, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a worker is told of a run, as JSON data."""
    return {**settings.order(spec), "storage": settings.storage,
            "storage_timeout_s": settings.storage_timeout_s, "home": str(settings.home),
            "data_dir": None if settings.data_dir is None else str(settings.data_dir),
            "only": None}


def _prepared(
    settings: Settings, pool: Pool, order: dict[str, Any], row: Mapping[str, Any] | None,
    show: Display,
) -> dict[str, Any]:
    data = pool.prepare(order)
    if row is not None:
        studies.check_data(row, data)
    warned = data.pop("warnings", [])
    for text in (*data_lines(data), *warning_lines(warned, settings.study)):
        show.say(text)
    return data


def _say_plan(
    show: Display, settings: Settings, described: Mapping[str, Any], pool: Pool
) -> None:
    spec, slots = described["spec"], pool.slots
    planned = plan(settings, spec, len(described["grid"] or ()))
    where = ", ".join(dict.fromkeys(slot.label for slot in slots))
    threads = slots[0].n_threads
    lines = [f"study {settings.name}: {spec['direction']} {spec['metric']}, {settings.epochs} "
             f"epoch{'s' if settings.epochs != 1 else ''} a trial, {len(slots)} "
             f"worker{'s' if len(slots) != 1 else ''} on {where} with {threads} "
             f"thread{'s' if threads != 1 else ''} each"]
    lines += [row.text() for row in planned]
    lines += [f"warning: {text}" for text in spec["warnings"]]
    show.plan(lines, {row.phase: row.n_epochs for row in planned}, int(settings.epochs or 0))


def data_lines(data: Mapping[str, Any]) -> list[str]:
    """Return what is known of data and model as one line, and a warning where they are few."""
    if not data:
        return []
    shape = "x".join(map(str, data["image_shape"]))
    what = "images" if len(data["image_shape"]) == 3 else "rows"
    lines = [f"data: {data['n_train']} train, {data['n_val']} validation and {data['n_test']} "
             f"test {what} of {shape}, {data['n_classes']} classes; a model of "
             f"{data['n_parameters']:,} parameters"]
    if data["n_val"] < _FEW_VALIDATION:
        lines.append(f"warning: {data['n_val']} validation {what} tell trials apart in steps of "
                     f"{1 / data['n_val']:.2g} of accuracy; a larger val_fraction= tells more")
    return lines


def warning_lines(warnings: Sequence[str], study: str) -> list[str]:
    """Return the warnings of the data and the model's first pass, and which command tells more."""
    if not warnings:
        return []
    return [*(f"warning: {text}" for text in warnings),
            f"hpo doctor --study {shlex.quote(study)} looks closer"]


def _made(settings: Settings, spec: Mapping[str, Any], data: dict[str, Any],
          files: Mapping[str, str], patience: Callable[[HpoError], None]) -> Database:
    """Make home, database and the study's row where they are not there yet.

    The module's files are stored, and `data` names them from now on as `source`.
    """
    import storage
    from storage.database import Database

    storage.init(settings.storage, settings.storage_timeout_s, patience)
    db = Database(settings.storage, settings.storage_timeout_s)
    data["source"] = db.sources.put(files)
    db.runs.save_study(settings.name, module=settings.study, metric=spec["metric"],
                 direction=spec["direction"], epochs=settings.epochs,
                 settings=settings.stored(),
                 space=spec["space"], data=dict(data))
    return db


def _worked(course: phases.Course, order: dict[str, Any], work: Callable[[], int]) -> int:
    """Put the workers to work, and leave all in order however it ends."""
    course.pool.work(order)
    try:
        return work()
    except (phases.Interrupted, phases.TimeUp) as stopped:
        phases.stop(course, str(stopped))
        course.show.say("the same command goes on from here")
        if isinstance(stopped, phases.Interrupted):
            return stopped.exit_code
        return _exit_code(course)
    except HpoError:
        phases.stop(course, "the run cannot go on")
        raise
    finally:
        course.show.close()
        course.db.close()


def _exit_code(course: phases.Course) -> int:
    return 0 if studies.n_complete(course.db, course.name, course.settings.phases) else 3


def _say_result(course: phases.Course, seconds: float) -> None:
    from hpo import bounds, read_results, report

    found = read_results.collect(course.db, course.name)
    console = course.show.console
    if console.is_terminal:
        console.print(report.summary_table(found))
    else:
        course.show.say(report.plain_table(found))
    width = console.width if console.is_terminal else None
    for text in filter(None, (report.verdict(found), bounds.warning(found), *course.notes)):
        course.show.say(report.wrapped(text, width))
    course.show.say(f"done in {duration(seconds)}; {_written(course, found)}; "
                    f"hpo dashboard shows every trial")


def _written(course: phases.Course, found: Results) -> str:
    """Write the report of a run that confirmed its result, and say where it is.

    Its pictures take longer than a small study's trials: a run of some phases leaves them out.
    """
    if "confirm" not in course.settings.phases:
        return f"hpo report --study {shlex.quote(course.name)} writes the report"
    from hpo.ask import publish

    try:
        return f"report: {publish(course.db, found, course.settings.home)}"
    except OSError as error:
        # The result is registered; its report can be written at any time.
        return (f"its report could not be written ({error}), "
                f"hpo report --study {shlex.quote(course.name)} does it later")
