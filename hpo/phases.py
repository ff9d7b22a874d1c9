"""What one `hpo run` does: lr-range, grid, random, search, audit, confirm, register.

Each phase writes its tickets, if they are not there yet, and waits until the workers have ended
them; so a second run, or one after a crash, does only what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpo import champions, confirm, queue, range_tested
from hpo.display import Display
from hpo.errors import HpoError
from hpo.first_failures import FirstFailures
from hpo.plan import n_random, n_search
from hpo.pool import Member, Pool
from hpo.reaper import Reaper
from hpo.settings import Settings
from hpo.space import params_from_json, params_to_json, space_from_json
from hpo.studies import ensure_study, sweep_result
from hpo.watch import Watch

if TYPE_CHECKING:
    from storage.database import Database
    from storage.ticket import NewTicket, Ticket

# The events of our own workers come at once; those of other hosts are looked for this often.
_COUNT_S = 0.5
# A count walks over all tickets of a study, so not each of a hundred ends a second asks for one.
_COUNT_AGAIN_S = 0.2
# Events come in handfuls then, and the parent leaves the processor to its workers.
_GATHER_S = 0.02
_REAP_S = 5.0
# A worker writes the end of a trial first and tells it next.
_HEAR_OUT_S = 1.0
_SILENCE_S = 0.05


class Interrupted(HpoError):
    """The run was stopped by a signal; what it had begun is back on the queue."""

    exit_code = 130


class TimeUp(HpoError):
    """The run reached its --timeout; what it had begun is back on the queue."""

    # Where it comes before the first trial there is no COMPLETE one either.
    exit_code = 3


@dataclass
class Course:
    """One run under way: its settings, database, workers and display."""

    settings: Settings
    spec: Mapping[str, Any]
    grid: Sequence[Mapping[str, Any]] | None
    defaults: Mapping[str, Any] | None
    data: Mapping[str, Any]
    db: Database
    pool: Pool
    show: Display
    check: Callable[[], None]
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reaper = Reaper(self.db, self.name, space_from_json(self.spec["space"]),
                             self.spec["metric"], self.settings.max_retries, self.show.say)
        self.pool.goes_on = self.settings.max_failures == 0
        self.watch = Watch(self.settings.epoch_timeout_s)
        self.failures = FirstFailures(self.settings.max_failures,
                                       self.settings.home / "logs" / self.name)

    def hear(self, member: Member, event: dict[str, Any]) -> None:
        """Show an event of a worker, and do what it asks for."""
        self.show.event(member, event)
        if event["event"] == "exit" and event["code"] != 0:
            self.reaper.bury(event)
        self.failures.hear(event)
        self.watch.hear(member.process.pid, event, time.monotonic())

    def look(self) -> None:
        """Do what is due whether or not a worker has told of something.

        Raises:
            HpoError: the run must stop; Interrupted and TimeUp among them.
        """
        for pid, why in self.watch.hung(time.monotonic()).items():
            self.pool.end(pid, why)
        self.failures.check()
        self.check()

    @property
    def name(self) -> str:
        """The study's name."""
        return self.settings.name

    @property
    def seed(self) -> int:
        """The study's seed."""
        return int(self.settings.seed or 0)

    @property
    def epochs(self) -> int:
        """The epochs of a full trial."""
        return int(self.settings.epochs or 0)

    def note(self, text: str) -> None:
        """Say something that also belongs under the run's result."""
        self.notes.append(text)
        self.show.say(text)


def run(course: Course) -> None:
    """Do the phases that were asked for, in order."""
    steps = {"lr-range": _lr_range, "grid": _grid, "random": _random, "search": _search,
             "confirm": _confirm}
    if "lr-range" not in course.settings.phases:
        _range_tested(course)
    for phase in course.settings.phases:
        steps[phase](course)


def _range_tested(course: Course) -> None:
    """See that the bounds which the space takes from the range test are there, and say them.

    Raises:
        InputError: where they are not.
    """
    if not set(range_tested.DRAWING) & set(course.settings.phases):
        return
    swept = sweep_result(course.db, course.name)
    said = range_tested.check_bounds(space_from_json(course.spec["space"]), swept)
    if said is not None:
        course.show.say(f"search: {said}, by the LR range test")


def _lr_range(course: Course) -> None:
    if not course.spec["has_lr_range"]:
        course.note("lr-range: left out, it needs build= and a param for the learning rate "
                    "(lr_param)")
        return
    if course.defaults is None:
        course.note("lr-range: left out, it needs defaults= for every param")
        return
    pick = _sweep(course)
    _range_tested(course)
    if pick is None:
        return
    from storage.ticket import NewTicket

    lr_param = str(course.spec["lr_param"])
    param = space_from_json(course.spec["space"])[lr_param]
    lr = _inside(param, pick)
    course.show.say(f"lr-range: the pick is {lr_param}={lr:.3g}")
    params = {**params_from_json(course.defaults), lr_param: lr}
    trial = NewTicket(idx=1, params=params_to_json(params), params_key=None,
                      payload={"seed": course.seed, "candidate": "lr-range"})
    _do(course, "lr-range", [trial])


def _sweep(course: Course) -> float | None:
    """Make the sweep, unless it has been made, and return its pick."""
    from storage.ticket import NewTicket

    study = queue.study_of(course.name, "lr-range")
    sweep = NewTicket(idx=0, params=dict(course.defaults or {}), payload={"seed": course.seed},
                      params_key=None)
    _try_again(course, study)
    _do(course, "lr-range", [sweep], kind="sweep", label="lr-range sweep")
    found = course.db.tickets.list(study)[0]
    if found.result is None:
        course.note(f"lr-range: the sweep failed: {found.cause}")
        return None
    if found.result.get("pick") is None:
        course.note(f"lr-range: no pick: {found.result.get('reason')}")
        return None
    return float(found.result["pick"])


def _inside(param: Any, lr: float) -> Any:
    """Return a rate moved to the nearest value that the space allows."""
    if param.contains(lr):
        return lr
    values = param.values() if param.n_values() is not None else (param.low, param.high)
    return min(values, key=lambda value: abs(value - lr))


def _grid(course: Course) -> None:
    if course.grid is None:
        course.note("grid: left out, the module gives no grid=")
        return
    study = queue.study_of(course.name, "grid")
    cells = [params_from_json(cell) for cell in course.grid]
    _try_again(course, study)
    _do(course, "grid", queue.fixed_items(cells, course.seed))
    tickets = course.db.tickets.list(study)
    missing = [t for t in tickets if t.state == "failed"]
    done = len(tickets) - len(missing)
    course.show.say(f"grid: {done} of {len(tickets)} cells have a result")
    for ticket in missing:
        cell = ", ".join(f"{k}={v}" for k, v in params_from_json(ticket.params or {}).items())
        course.note(f"grid: {cell} failed: {ticket.cause}; the same command tries it again")


def _try_again(course: Course, study: str) -> None:
    """Reopen a phase's failed tickets: where each result counts, each run tries for it again."""
    failed = [t.idx for t in course.db.tickets.list(study) if t.state == "failed"]
    course.db.tickets.reopen(study, failed)


def _search(course: Course) -> None:
    asked, n = int(course.settings.n_trials or 0), n_search(course.settings, course.spec)
    if n < asked:
        course.note(f"search: {n} of {n} params: the space holds no more, so {n} trials instead "
                    f"of {asked} (--allow-duplicates trains some of them again)")
    study = queue.study_of(course.name, "search")
    before = _ended(course.db.tickets.counts(study))
    course.db.tickets.trim(study, n)
    if before >= n:
        course.show.say(f"search: {before} trials are done and --n-trials is {asked}: the budget "
                        f"is used, nothing to add")
    taken = {ticket.idx for ticket in course.db.tickets.list(study)}
    if before < n:
        _do(course, "search", queue.search_items(n, course.seed, taken))
    _audit(course)


def _random(course: Course) -> None:
    """Random search as a baseline: every trial trained whole."""
    n = n_random(course.settings, course.spec)
    study = queue.study_of(course.name, "random")
    course.db.tickets.trim(study, n)
    _try_again(course, study)
    taken = {ticket.idx for ticket in course.db.tickets.list(study)}
    _do(course, "random", queue.search_items(n, course.seed, taken))


def _audit(course: Course) -> None:
    """Train some pruned trials to their end, out of the sampler's and the pruner's sight."""
    items = queue.audit_items(course.db, course.name)
    if items:
        _do(course, "audit", items)


def _confirm(course: Course) -> None:
    candidates = confirm.candidates(course.db, course.name, course.spec, course.defaults,
                                    int(course.settings.top_k or 1))
    if not candidates:
        course.note("confirm: left out, there is no COMPLETE trial to confirm")
        return
    seeds = confirm.fresh_seeds(course.seed, int(course.settings.confirm_seeds or 1))
    _try_again(course, queue.study_of(course.name, "confirm"))
    known = confirm.tickets_by_key(course.db, course.name)
    _do(course, "confirm", confirm.items(known, candidates, seeds))
    _race(course, candidates)
    if course.spec["has_build"]:
        _do(course, "confirm", confirm.score_items(course.db, course.name), kind="score",
            label="test split")
    # The run's result comes next, and these under it.
    course.notes += confirm.register(course.db, course.name, course.settings, course.spec,
                                     candidates, course.data)
    spec = course.spec
    if said := champions.settle(course.db, course.name, spec["metric"],
                                spec["direction"] == "maximize"):
        course.notes.append(said)


def _race(course: Course, candidates: Sequence[confirm.Candidate]) -> None:
    """Train those that are close on more seeds, until the order is settled or the budget used."""
    while True:
        coming = confirm.next_round(course.db, course.name, course.settings, course.spec,
                                    candidates, course.data)
        if coming is None:
            _do(course, "confirm", [])
            continue
        if coming.said:
            course.show.say(coming.said)
        if not coming.items:
            return
        _do(course, "confirm", coming.items)


def _do(
    course: Course, phase: str, items: Sequence[NewTicket], *, kind: str = "trial",
    label: str | None = None,
) -> None:
    """Write a phase's tickets and wait until all of its study's tickets have ended."""
    study = queue.study_of(course.name, phase)
    ensure_study(course.db, study, course.spec["direction"], course.spec["metric"])
    course.db.tickets.write(course.name, study, kind, list(items))
    course.pool.only(study)
    tickets = [t for t in course.db.tickets.list(study) if t.kind == kind]
    n_ended = _n_ended(tickets)
    # After a sweep comes a trial at its pick.
    each = {"trial": course.epochs, "sweep": 1 + course.epochs, "score": 0}[kind]
    course.show.start(label or phase, len(tickets), n_ended, (len(tickets) - n_ended) * each)
    reaped_at = counted_at = 0.0
    ended = False
    while True:
        now = time.monotonic()
        if now - reaped_at > _REAP_S:
            course.reaper.reap()
            reaped_at = now
        is_over = False
        for member, event in course.pool.poll(0.1):
            course.hear(member, event)
            ended = ended or event["event"] == "end"
            # A worker that finds no ticket, or is gone, may have been the last.
            is_over = is_over or event["event"] in ("idle", "exit")
        time.sleep(_GATHER_S)
        if is_over or now - counted_at > (_COUNT_AGAIN_S if ended else _COUNT_S):
            ended = False
            counts = course.db.tickets.counts(study)
            course.show.counted(_ended(counts) - _others_ended(course, study, kind))
            counted_at = now
            if not counts.get("waiting") and not counts.get("running"):
                _hear_out(course)
                return
        course.look()


def _hear_out(course: Course) -> None:
    """Show the ends that the database knew of before our own workers had told them.

    Not even the begin of a short trial may have been heard by then, so silence is waited for.
    """
    deadline = time.monotonic() + _HEAR_OUT_S
    heard = True
    while (heard or course.pool.busy()) and time.monotonic() < deadline:
        heard = False
        for member, event in course.pool.poll(_SILENCE_S):
            course.hear(member, event)
            heard = True


def work_off(course: Course) -> int:
    """Show what the workers do with tickets that other runs write, until stopped."""
    course.show.start("worker", 0, 0)
    reaped_at = 0.0
    while True:
        for member, event in course.pool.poll(0.5):
            course.hear(member, event)
        if time.monotonic() - reaped_at > _REAP_S:
            course.reaper.reap()
            reaped_at = time.monotonic()
        course.look()


def _others_ended(course: Course, study: str, kind: str) -> int:
    """Return how many tickets of other kinds stand, ended, in the same study."""
    if phase_has_one_kind(study):
        return 0
    return _n_ended([t for t in course.db.tickets.list(study) if t.kind != kind])


def phase_has_one_kind(study: str) -> bool:
    """Return whether a study's tickets are all trials."""
    return queue.phase_of(study) in ("search", "grid", "random", "audit")


def _ended(counts: Mapping[str, int]) -> int:
    return counts.get("done", 0) + counts.get("failed", 0)


def _n_ended(tickets: Sequence[Ticket]) -> int:
    return sum(ticket.state in ("done", "failed") for ticket in tickets)


def stop(course: Course, why: str) -> None:
    """Stop the workers in order; what they were at goes back on the queue."""
    course.show.say(f"{why}: running trials go back on the queue" if course.pool.busy() else why)
    reason = "interrupted: the run was stopped"
    for _, event in course.pool.stop():
        course.failures.hear(event)
        if event["event"] == "exit" and event["heard"]:
            course.reaper.reap(reason, event)
    course.reaper.reap(reason)
    # Trials that a broken module or machine has failed are not what N counts.
    for study, idxs in course.failures.spent.items():
        course.db.tickets.reopen(study, idxs)
