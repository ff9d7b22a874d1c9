"""What a worker does with a ticket: train a trial, sweep the rate, or read the test split."""

from __future__ import annotations

import ctypes
import json
import os
import random
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.channel import Channel
from hpo.drive import Ending, Goal, drive, failure
from hpo.kept import Checkpoints
from hpo.queue import LEASE_S, back_after, owner_token, phase_of, retry_attrs
from hpo.search import draw, make_pruner, make_sampler
from hpo.space import n_params_sets, params_from_json, params_key, params_to_json
from hpo.spec import Run, StudySpec

if TYPE_CHECKING:
    from optuna import Study

    from storage.ticket import Claim, ClaimOrder, Ticket

# To look for freed memory takes milliseconds in a large process.
_TRIM_EVERY_S = 1.0


def make_run(order: dict[str, Any], seed: int, folder: Path) -> Run:
    """Return the `Run` that a recipe or objective is given, with the global generators seeded.

    A module made in `build`, or a loop of the user's own, draws from them.
    """
    random.seed(seed)
    for library in ("numpy.random", "torch"):
        # What the study has not loaded, it cannot draw from.
        if module := sys.modules.get(library):
            (module.manual_seed if library == "torch" else module.seed)(seed % 2**32)
    data_dir = order.get("data_dir")
    return Run(epochs=int(order["epochs"]), seed=seed, device=order["device"], dir=folder,
               data_dir=Path(data_dir) if data_dir else None,
               data_fraction=float(order["data_fraction"]))


class Tasks:
    """A worker's open database and studies, and the way each kind of ticket is done."""

    def __init__(
        self, spec: StudySpec, order: dict[str, Any], channel: Channel, stop: threading.Event
    ) -> None:
        from storage.database import Database

        self.spec, self.order, self.channel, self.stop = spec, order, channel, stop
        self.goal = Goal(spec.metric, spec.direction == "maximize")
        self.home = Path(order["home"])
        self.owner = owner_token()
        self.db = Database(order["storage"], order["storage_timeout_s"])
        self.kept = Checkpoints(self.db, self.home, order["name"], order["top_k"], self.goal)
        self._studies: dict[str, Study] = {}
        self._trim = Trim()
        # Taken with the end of the trial before it, in one transaction.
        self._next: Claim | None = None
        # What a first trial would load is loaded before it is claimed.
        make_sampler(order["sampler"], spec.space, order["seed"], 0)
        make_pruner(order["pruner"], n_startup=order["prune_startup"],
                    n_warmup=order["prune_warmup"], epochs=order["epochs"])

    def close(self) -> None:
        """Give back the ticket that was taken but not begun, and close the database."""
        claim, self._next = self._next, None
        try:
            if claim is not None:
                self._give_back(claim)
        finally:
            self.db.close()

    def _give_back(self, claim: Claim) -> None:
        from optuna.trial import TrialState

        reason = "interrupted: before its first epoch"
        if claim.trial_id is None:
            self.db.tickets.give_back(claim.ticket.id, self.owner, reason, count=False)
            return
        attrs = {"reason": reason, "ticket": claim.ticket.idx}
        self.db.end_trial(claim.ticket.id, self.owner, claim.trial_id, TrialState.FAIL, None,
                          attrs, back=(reason, None, False))

    def claim(self) -> Claim | None:
        """Take the next ticket, of the phase under way if one is named; None when none waits."""
        claim, self._next = self._next, None
        if claim is None:
            # An idle worker asks often, and must not keep the database from those at work.
            if not self.db.tickets.any_waits(self.order["name"], self.order["only"]):
                return None
            [claim] = self.db.tickets.claim_many(self._order_of_claim(), 1) or [None]
        if claim is not None:
            self.db.studies.keep_lease(claim.ticket.id, self.owner, LEASE_S)
        return claim

    def _order_of_claim(self) -> ClaimOrder:
        from storage.ticket import ClaimOrder

        return ClaimOrder(self.order["name"], self.owner, socket.gethostname(), os.getpid(),
                          LEASE_S, self.order["only"])

    def run(self, claim: Claim) -> bool:
        """Do a claimed ticket; return whether this process may be spoiled for another."""
        kinds = {"trial": self._trial, "sweep": self._sweep, "score": self._score}
        try:
            return kinds[claim.ticket.kind](claim)
        finally:
            self.db.studies.drop_lease(claim.ticket.id)
            self._trim.after_trial()

    def _study(self, name: str) -> Study:
        if name not in self._studies:
            import optuna

            order = self.order
            pruner = order["pruner"] if phase_of(name) == "search" else "none"
            self._studies[name] = optuna.load_study(
                study_name=name, storage=self.db.studies, sampler=optuna.samplers.RandomSampler(),
                pruner=make_pruner(pruner, n_startup=order["prune_startup"],
                                   n_warmup=order["prune_warmup"], epochs=order["epochs"]))
        return self._studies[name]

    def _params(self, ticket: Ticket, study: Study, trial_id: int) -> dict[str, Any]:
        """Return the trial's params, fixed or drawn, and store them."""
        space, order = self.spec.space, self.order
        if ticket.params is not None:
            params = params_from_json(ticket.params)
        else:
            def sampler_of(i: int) -> Any:
                return make_sampler(order["sampler"], space, order["seed"], ticket.idx, i)

            params = draw(study, self.db.studies.known_trial(trial_id), space, sampler_of,
                          self._reserve(ticket))
        stored = {}
        for name, value in params.items():
            kind = space[name].distribution()
            stored[name] = (kind.to_internal_repr(space[name].encode(value)), kind)
        self.db.studies.set_trial_params(trial_id, stored)
        return params

    def _reserve(self, ticket: Ticket) -> Callable[[dict[str, Any]], bool]:
        # Of a continuum no value comes twice, so nothing need be kept free of doubles.
        if self.order["allow_duplicates"] or n_params_sets(self.spec.space) is None:
            return lambda params: True
        return lambda params: self.db.tickets.reserve(ticket.id, self.owner, params_key(params))

    def _trial(self, claim: Claim) -> bool:
        ticket, trial_id, number = claim.ticket, claim.trial_id, claim.number
        assert trial_id is not None and number is not None
        phase, started = phase_of(ticket.study), time.monotonic()
        log = self._log_path(phase, f"{number}.log")
        params: dict[str, Any] | None = None
        trainer: list[Any] = []
        with redirected(log):
            try:
                study = self._study(ticket.study)
                params = self._params(ticket, study, trial_id)
                # The parent knows the params then, should this process die before it wrote them.
                self._say("begin", claim, params=params_to_json(params))
                print(f"trial {number} of {ticket.study}: {params}", flush=True)
                ending = self._drive(claim, study, params, trainer)
            except (ValueError, ArithmeticError, TypeError, KeyError, RuntimeError) as error:
                # A sampler or a distribution that refuses its input costs this trial alone.
                ending = failure(error)
            if ending.text:
                print(ending.text, flush=True)
            displaced = []
            if ending.state == "COMPLETE" and trainer:
                displaced = self._keep_checkpoint(claim, ending, trainer[0])
        if ending.kind == "oom":
            ending.reason += f" (params {params})"
        if self._close_trial(claim, ending, params, log, time.monotonic() - started):
            # Not before this trial's end is stored: else a crash now would lose both.
            for old in displaced:
                (self.home / old).unlink(missing_ok=True)
        return ending.spoiled

    def _drive(
        self, claim: Claim, study: Study, params: dict[str, Any], trainer: list[Any]
    ) -> Ending:
        ticket, trial_id, number = claim.ticket, claim.trial_id, claim.number
        assert trial_id is not None and number is not None
        prunes = phase_of(ticket.study) == "search" and self.order["pruner"] != "none"
        is_ours = True

        def report(epoch: int, value: float, metrics: dict[str, float]) -> None:
            nonlocal is_ours
            if not self.db.report(trial_id, ticket.study, number, epoch, value, metrics):
                # Somebody has ended this trial; the next question, whether to stop, is yes.
                is_ours = False
                return
            self._say("epoch", claim, epoch=epoch, metrics=metrics)

        def should_stop() -> bool:
            return not is_ours or self.stop.is_set() or self.db.studies.has_lost(ticket.id)

        def should_prune(epoch: int) -> str | None:
            if prunes and study.pruner.prune(study, self.db.studies.known_trial(trial_id)):
                return self.order["pruner"]
            return None

        return drive(lambda: self._epochs(ticket, number, params, trainer), self.goal,
                     report=report, should_prune=should_prune,
                     should_stop=should_stop)

    def _epochs(
        self, ticket: Ticket, number: int, params: dict[str, Any], trainer: list[Any]
    ) -> Iterator[Any]:
        folder = self.kept.path(phase_of(ticket.study), number).with_suffix("")
        run = make_run(self.order, int(ticket.payload["seed"]), folder)
        if self.spec.objective is not None:
            folder.mkdir(parents=True, exist_ok=True)
            return self.spec.objective(run, **params)
        from hpo.train.loop import Trainer

        assert self.spec.build is not None
        trainer.append(Trainer(self.spec.build(run, **params), run, metric=self.goal.metric,
                               maximize=self.goal.maximize))
        return trainer[0].epochs()

    def _keep_checkpoint(self, claim: Claim, ending: Ending, trainer: Any) -> list[str]:
        """Write the weights of a trial among its study's best; return the files it displaces."""
        try:
            return self.kept.keep(claim.ticket.study, int(claim.number or 0), ending, trainer.save)
        except OSError as error:
            # A full disk costs the weights of this trial, not its result.
            self.channel.send("note", text=f"trial {claim.number} of {claim.ticket.study}: its "
                                           f"checkpoint could not be written: {error}")
            return []

    def _log_path(self, phase: str, file: str) -> Path:
        return self.home / "logs" / self.order["name"] / phase / file

    def _close_trial(
        self, claim: Claim, ending: Ending, params: dict[str, Any] | None, log: Path, took: float
    ) -> bool:
        """Store the trial's end; False where others went on with it meanwhile."""
        from optuna.trial import TrialState

        from storage.ending import Back, TrialEnd

        ticket, trial_id = claim.ticket, claim.trial_id
        assert trial_id is not None
        attrs = {**ending.attrs, "reason": ending.reason, "seed": ticket.payload["seed"],
                 "device": self.order["device"], "worker": self.owner,
                 "duration_s": round(took, 4), "log": str(log.relative_to(self.home)),
                 "ticket": ticket.idx, **retry_attrs(self.db, ticket)}
        for name in ("candidate", "source_trial"):
            if ticket.payload.get(name) is not None:
                attrs[name] = ticket.payload[name]
        back = None
        if ending.state == "FAIL":
            back = back_after(ending.kind, ending.reason, ticket, params,
                              self.order["max_retries"])
        end = TrialEnd(ticket.id, self.owner, trial_id, TrialState[ending.state], ending.value,
                       finite(attrs), Back(*back) if back else None)
        if self.stop.is_set() or ending.spoiled:
            ok = self.db.end(end)
        else:
            ok, self._next = self.db.end_and_claim(end, self._order_of_claim())
        if not ok:
            self.channel.send("note", text=f"trial {claim.number} of {ticket.study}: its lease "
                              f"ran out and others went on with it; this result is dropped")
            return False
        self._say("end", claim, state=ending.state, reason=ending.reason,
                  value=ending.value, n_epochs=ending.attrs.get("n_epochs", 0),
                  duration_s=took, back=back is not None)
        return True

    def _sweep(self, claim: Claim) -> bool:
        from hpo.baselines.lr_range import lr_range

        ticket = claim.ticket
        with redirected(self._log_path("lr-range", "sweep.log")):
            self._say("begin", claim, params={})
            run = make_run(self.order, int(ticket.payload["seed"]), self.home)
            params = params_from_json(ticket.params or {})
            return self._finish(claim, lambda: lr_range(
                self.spec.build(run, **params), run).to_json())  # type: ignore[misc]

    def _score(self, claim: Claim) -> bool:
        from hpo.train.loop import score

        ticket = claim.ticket
        with redirected(self._log_path("confirm", f"score-{ticket.idx}.log")):
            self._say("begin", claim, params={})
            run = make_run(self.order, int(ticket.payload["seed"]), self.home)
            params = params_from_json(ticket.params or {})
            return self._finish(claim, lambda: {**ticket.payload, **score(
                self.spec.build(run, **params), run,  # type: ignore[misc]
                self.home / ticket.payload["checkpoint"], "test")})

    def _finish(self, claim: Claim, make: Callable[[], dict[str, Any]]) -> bool:
        """Close a ticket that is no trial with what `make` returns, or with its failure."""
        try:
            result, ending = make(), Ending("COMPLETE")
            # Written and read once as JSON, so that what cannot be stored fails here.
            result = json.loads(json.dumps(finite(result)))
        except Exception as error:
            traceback.print_exc()
            result, ending = None, failure(error)
        state = "failed" if result is None else "done"
        self.db.tickets.finish(claim.ticket.id, self.owner, state, ending.reason or None, result)
        self._say("end", claim, state=ending.state, reason=ending.reason, value=None, n_epochs=0,
                  duration_s=0.0, back=False)
        return ending.spoiled

    def _say(self, event: str, claim: Claim, **data: Any) -> None:
        ticket = claim.ticket
        self.channel.send(event, study=ticket.study, kind=ticket.kind, idx=ticket.idx,
                          number=claim.number, **finite(data))


def finite(data: Any) -> Any:
    """Return JSON data with every NaN and infinity as None: strict JSON has neither."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    if isinstance(data, float) and (data != data or data in (float("inf"), float("-inf"))):
        return None
    return data


def give_memory_back() -> None:
    """Return what glibc keeps of freed memory to the system, so that trials do not add up."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Trim:
    """Gives memory back after trials, but not so often that it costs short ones their time."""

    def __init__(self) -> None:
        self._done_at = time.monotonic()

    def after_trial(self) -> None:
        """Give memory back, unless that was done a moment ago."""
        if time.monotonic() - self._done_at >= _TRIM_EVERY_S:
            give_memory_back()
            self._done_at = time.monotonic()


@contextmanager
def redirected(path: Path) -> Iterator[None]:
    """Send what this process and its libraries print to a trial's own log, for the while."""
    log = _open_log(path)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for fd in (*saved, log):
            os.close(fd)


def _open_log(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)
