"""What a worker does with a ticket: train a trial, sweep the rate, or read the test split."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo import causes, range_tested
from hpo.attempt import Attempt, built_from, make_run
from hpo.channel import Channel
from hpo.drive import Ending, Goal, drive, failure
from hpo.errors import HpoError
from hpo.kept import Checkpoints
from hpo.leftovers import Leftovers, Trim
from hpo.queue import (
    AUDITED,
    MICRO_BATCH,
    back_after,
    end_to_json,
    is_audited,
    owner_token,
    phase_of,
)
from hpo.ranks import Ranks
from hpo.search import BLIND, draw, make_pruner, make_sampler
from hpo.space import Param, n_params_sets, params_from_json, params_key, params_to_json
from hpo.spec import StudySpec
from hpo.states import StateWriter
from hpo.stop import Stop
from hpo.studies import sweep_result
from hpo.trial_log import TrialLogs
from hpo.turns import SHORT_S, Turns
from hpo.versions import source_digest

if TYPE_CHECKING:
    from optuna import Study

    from storage.ending import TrialEnd
    from storage.ticket import Claim, Ticket

# Added to the study's seed.
RANDOM_SEED = 1_000_003


class Tasks:
    """A worker's open database and studies, and the way each kind of ticket is done."""

    def __init__(
        self, spec: StudySpec, order: dict[str, Any], channel: Channel, stop: Stop,
        ranks: Ranks | None = None,
    ) -> None:
        from storage.database import Database

        self.spec, self.order, self.channel, self.stop = spec, order, channel, stop
        self.goal = Goal(spec.metric, spec.direction == "maximize")
        self.home = Path(order["home"])
        self.owner = owner_token()
        self.db = Database(order["storage"], order["storage_timeout_s"])
        self.kept = Checkpoints(self.db, self.home, order["name"], order["top_k"], self.goal)
        self.logs = TrialLogs(self.home / "logs" / order["name"])
        self.states = StateWriter()
        # Once: the file may be edited while this process trains with what it has loaded.
        self._source = source_digest(spec.build)
        self._studies: dict[str, Study] = {}
        self._searched: Mapping[str, Param] | None = None
        self._trim = Trim()
        self._ranks = ranks or Ranks(order["module"], 1, order["device"])
        self._ranks.join()
        self._leftovers = Leftovers(self._ranks.pids)
        self.turns = Turns(self.db, order, self.owner)
        # What a first trial would load is loaded before it is claimed.
        make_sampler(order["sampler"], spec.space, order["seed"], 0)
        make_pruner(order["pruner"], n_startup=order["prune_startup"],
                    n_warmup=order["prune_warmup"], epochs=order["epochs"])

    def close(self) -> None:
        """Give back the tickets that were taken but not begun, and close the database."""
        try:
            self.turns.close()
        finally:
            self._ranks.close()
            self.logs.close()
            self.states.close()
            self.db.close()

    def run(self, claim: Claim) -> bool:
        """Do a claimed ticket; return whether this process may be spoiled for another."""
        kinds = {"trial": self._trial, "sweep": self._sweep, "score": self._score}
        try:
            return kinds[claim.ticket.kind](claim)
        finally:
            if claim.trial_id is None:
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
        space, order = self._space(ticket), self.order
        if ticket.params is not None:
            params = params_from_json(ticket.params)
        else:
            # Random search draws other params than a sampler does before it has learnt anything.
            name, seed = ("random", order["seed"] + RANDOM_SEED) if phase_of(
                ticket.study) == "random" else (order["sampler"], order["seed"])

            def sampler_of(i: int) -> Any:
                return make_sampler(name, space, seed, ticket.idx, i)

            params = draw(study, self.db.studies.known_trial(trial_id), space, sampler_of,
                          self._reserve(ticket))
        stored = {}
        for name, value in params.items():
            kind = space[name].distribution()
            stored[name] = (kind.to_internal_repr(space[name].encode(value)), kind)
        self.db.studies.set_trial_params(trial_id, stored)
        return params

    def _space(self, ticket: Ticket) -> Mapping[str, Param]:
        """Return the space that a ticket's params are of: with the bounds that a sweep found."""
        if phase_of(ticket.study) not in range_tested.DRAWING:
            return self.spec.space
        if self._searched is None:
            swept = sweep_result(self.db, self.order["name"]) if range_tested.tested_param(
                self.spec.space) else None
            self._searched = range_tested.bounded(self.spec.space, swept)
        return self._searched

    def _reserve(self, ticket: Ticket) -> Callable[[dict[str, Any]], bool]:
        # Of a continuum no value comes twice, so nothing need be kept free of doubles.
        if self.order["allow_duplicates"] or n_params_sets(self.spec.space) is None:
            return lambda params: True
        return lambda params: self.db.tickets.reserve(ticket.id, self.owner, params_key(params))

    def _trial(self, claim: Claim) -> bool:
        ticket, trial_id, number = claim.ticket, claim.trial_id, claim.number
        assert trial_id is not None and number is not None
        # Before the parent hears of a trial: to start ranks anew is not a part of its epochs.
        self._ranks.join()
        began_at, started = datetime.now(UTC), time.monotonic()
        params: dict[str, Any] | None = None
        attempt = Attempt(self.spec, self.order, self.db, claim, self.kept, self.states,
                          self._source, self._ranks, lambda text: self._note(claim, text))
        # Without it the parent holds a trial for one that was taken ahead and not begun.
        self._say("draw", claim)
        self._leftovers.begin()
        self._ranks.log = self._log_path(phase_of(ticket.study), f"{number}.log")
        with self.logs.to(self._ranks.log):
            try:
                study = self._study(ticket.study)
                params = self._params(ticket, study, trial_id)
                # The parent knows the params then, should this process die before it wrote them.
                self._say("begin", claim, params=params_to_json(params))
                print(f"trial {number} of {ticket.study}: {params}", flush=True)
                ending = self._drive(claim, study, params, attempt)
            except (ValueError, ArithmeticError, TypeError, KeyError, RuntimeError) as error:
                # A sampler or a distribution that refuses its input costs this trial alone.
                ending = failure(error)
            if ending.kind == "interrupted" and self.stop.is_set() and not self.stop.is_of_run():
                ending.reason = f"worker lost: its process alone was told to end, {ending.reason}"
            if ending.text:
                print(ending.text, flush=True)
            displaced: list[str] = []
            if self._is_audited(ticket, ending):
                ending.attrs[AUDITED] = params_to_json(params or {})
                attempt.goes_back()
            if ending.state == "COMPLETE" and attempt.trainer is not None and (
                    phase_of(ticket.study) != "audit"):
                displaced = self._keep_checkpoint(claim, ending, attempt.save)
        took = time.monotonic() - started
        if fault := self.logs.news():
            self.channel.send("note", text=f"logs are incomplete, trials go on: {fault}")
        self._close_trial(claim, ending, params, attempt, displaced, took, began_at)
        return ending.spoiled

    def _drive(
        self, claim: Claim, study: Study, params: dict[str, Any], attempt: Attempt
    ) -> Ending:
        ticket, trial_id, number = claim.ticket, claim.trial_id, claim.number
        assert trial_id is not None and number is not None
        prunes = phase_of(ticket.study) == "search" and self.order["pruner"] != "none"
        is_ours = True
        last = -1

        def report(epoch: int, value: float, metrics: dict[str, float]) -> None:
            nonlocal is_ours, last
            last = epoch
            if not attempt.is_taken_over(epoch):
                attempt.take_in(epoch, metrics)
            if not self.db.report(trial_id, ticket.study, number, epoch, value, metrics):
                # Somebody has ended this trial; the next question, whether to stop, is yes.
                is_ours = False
            elif not attempt.is_taken_over(epoch):
                self._say("epoch", claim, epoch=epoch, metrics=metrics)

        def should_stop() -> bool:
            if not is_ours or self.db.studies.has_lost(ticket.id):
                return True
            if attempt.is_taken_over(last):
                return self.stop.is_set()
            attempt.after_epoch()
            # What is trained to its end is a result.
            if not self.stop.is_set() or attempt.is_last(last):
                return False
            attempt.goes_back()
            return True

        def should_prune(epoch: int) -> str | None:
            if not prunes:
                return None
            # What the pruner compares with does not depend on how fast ends are stored.
            self.turns.settle()
            is_bad = study.pruner.prune(study, self.db.studies.known_trial(trial_id))
            # It was asked about the epochs of an earlier try before; a pruner may take notes.
            if is_bad and not attempt.is_taken_over(epoch):
                return self.order["pruner"]
            return None

        return drive(lambda: attempt.epochs(params), self.goal, report=report,
                     should_prune=should_prune, should_stop=should_stop)

    def _keep_checkpoint(
        self, claim: Claim, ending: Ending, save: Callable[[Path], None]
    ) -> list[str]:
        """Write the weights of a trial among its study's best; return the files it displaces."""
        self.turns.settle()
        try:
            return self.kept.keep(claim.ticket.study, int(claim.number or 0), ending, save)
        except HpoError:
            raise
        except Exception as error:
            # A full disk, or a device, costs the weights of this trial, not its result.
            ending.spoiled = ending.spoiled or causes.spoils(error)
            self._note(claim, f"its checkpoint could not be written: {causes.said(error)}")
            return []

    def _note(self, claim: Claim, text: str) -> None:
        self.channel.send("note", text=f"trial {claim.number} of {claim.ticket.study}: {text}")

    def _log_path(self, phase: str, file: str) -> Path:
        return self.home / "logs" / self.order["name"] / phase / file

    def _close_trial(
        self, claim: Claim, ending: Ending, params: dict[str, Any] | None, attempt: Attempt,
        displaced: list[str], took: float, began_at: datetime,
    ) -> None:
        """Store the trial's end, now or while the next one runs, and take the next ticket."""
        ticket = claim.ticket
        back = None
        if ending.state == "FAIL":
            back = back_after(ending.kind, ending.reason, ticket, params,
                              self.order["max_retries"], attempt.smaller_batch)
        ending.attrs.update(attempt.attrs())
        if ending.kind == "oom":
            ending.reason += f" (params {params})"
            if back is not None and back.payload is not None:
                ending.reason += f"; tried again with {back.payload[MICRO_BATCH]} rows at once"

        def told(is_ours: bool) -> None:
            self.db.studies.drop_lease(ticket.id)
            self._tell_end(claim, ending, took, is_ours, back is not None)
            if is_ours and back is None and AUDITED not in ending.attrs:
                attempt.is_over()
            # Not before this trial's end is stored: else a crash now would lose both.
            for old in displaced if is_ours else ():
                with suppress(OSError):
                    (self.home / old).unlink()

        end = self._end_of(claim, ending, took, began_at, back)
        # The parent stores it, should this process die before it has.
        self._say("ending", claim, end=end_to_json(end))
        attempt.release()
        left = self._leftovers.clear(failed=ending.state == "FAIL")
        ending.spoiled = ending.spoiled or left is not None
        if self.stop.is_set() or ending.spoiled:
            self.turns.end(end, told, last=True)
        elif took < SHORT_S and self._is_blind(ticket):
            self.turns.end_beside(end, told)
        else:
            self.turns.end(end, told, last=False)

    def _is_audited(self, ticket: Ticket, ending: Ending) -> bool:
        """Return whether a trial that was pruned goes on beside the search."""
        fraction = self.order.get("audit_fraction") or 0.0
        return (ending.state == "PRUNED" and ending.reason.startswith(self.order["pruner"])
                and phase_of(ticket.study) == "search"
                and is_audited(self.order["seed"], ticket.idx, fraction))

    def _is_blind(self, ticket: Ticket) -> bool:
        """Return whether the next trial's params do not depend on how this one ended."""
        return self.order["only"] is not None and (
            phase_of(ticket.study) != "search" or self.order["sampler"] in BLIND)

    def _end_of(
        self, claim: Claim, ending: Ending, took: float, began_at: datetime, back: Any
    ) -> TrialEnd:
        from optuna.trial import TrialState

        from storage.ending import TrialEnd

        ticket, trial_id = claim.ticket, claim.trial_id
        assert trial_id is not None
        log = self._log_path(phase_of(ticket.study), f"{claim.number}.log")
        attrs = {**ending.attrs, "reason": ending.reason, "seed": ticket.payload["seed"],
                 "device": self.order["device"], "worker": self.owner,
                 "duration_s": round(took, 4), "log": str(log.relative_to(self.home)),
                 "ticket": ticket.idx}
        for name in ("candidate", "source_trial"):
            if ticket.payload.get(name) is not None:
                attrs[name] = ticket.payload[name]
        return TrialEnd(ticket.id, self.owner, trial_id, TrialState[ending.state], ending.value,
                        finite(attrs), back, began_at=began_at)

    def _tell_end(
        self, claim: Claim, ending: Ending, took: float, is_ours: bool, is_back: bool
    ) -> None:
        if not is_ours:
            self._say("lost", claim, text=f"trial {claim.number} of {claim.ticket.study}: its "
                      f"lease ran out and others went on with it; this result is dropped")
            return
        n_before = ending.attrs.get("n_epochs_taken_over", 0)
        self._say("end", claim, state=ending.state, reason=ending.reason, value=ending.value,
                  n_epochs=ending.attrs.get("n_epochs", 0) - n_before, n_taken_over=n_before,
                  duration_s=took, back=is_back)

    def _sweep(self, claim: Claim) -> bool:
        from hpo.baselines.lr_range import lr_range

        ticket = claim.ticket
        with self.logs.to(self._log_path("lr-range", "sweep.log")):
            self._say("begin", claim, params={})
            run = make_run(self.order, int(ticket.payload["seed"]), self.home)
            build = built_from(self.spec, params_from_json(ticket.params or {}))
            return self._finish(claim, lambda: lr_range(build, run).to_json())

    def _score(self, claim: Claim) -> bool:
        from hpo.train.scoring import score

        ticket = claim.ticket
        with self.logs.to(self._log_path("confirm", f"score-{ticket.idx}.log")):
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
