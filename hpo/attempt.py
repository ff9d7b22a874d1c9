"""One try of a trial in a worker: what it trains, and from where it goes on if it is a retry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.queue import MICRO_BATCH, phase_of, retry_attrs
from hpo.seeding import seed_all
from hpo.spec import Run, StudySpec
from hpo.states import Continued, Metrics, StateWriter, TrialStates

if TYPE_CHECKING:
    from hpo.kept import Checkpoints
    from hpo.ranks import Ranks
    from hpo.train import Recipe
    from hpo.train.loop import Trainer
    from storage.database import Database
    from storage.ticket import Claim


def make_run(order: Mapping[str, Any], seed: int, folder: Path) -> Run:
    """Return the `Run` that a recipe or objective is given, with the global generators seeded.

    A module made in `build`, or a loop of the user's own, draws from them.
    """
    seed_all(seed)
    data_dir = order.get("data_dir")
    return Run(epochs=int(order["epochs"]), seed=seed, device=order["device"], dir=folder,
               data_dir=Path(data_dir) if data_dir else None,
               n_devices=int(order.get("n_devices", 1)),
               data_fraction=float(order["data_fraction"]))


def built_from(spec: StudySpec, params: Mapping[str, Any]) -> Callable[[Run], Recipe]:
    """Return what makes the recipe of a run with these params, from the run's own seed."""
    build = spec.build
    assert build is not None

    def made(run: Run) -> Recipe:
        seed_all(run.seed)
        return build(run, **params)

    return made


class Attempt:
    """One try of a claimed trial: its epochs, its training states, and its weights.

    A retry has the folder of the first try, so that a loop of the user's own finds there what it
    has left. `say` tells the user of what goes wrong without ending the trial.
    """

    def __init__(
        self, spec: StudySpec, order: Mapping[str, Any], db: Database, claim: Claim,
        kept: Checkpoints, writer: StateWriter, source: str | None, ranks: Ranks,
        say: Callable[[str], None],
    ) -> None:
        self._ranks = ranks
        self._spec, self._order, self._db, self._claim = spec, order, db, claim
        # What a retry says of its chain.
        self.retry = retry_attrs(db, claim.ticket)
        self._goes_on = bool(self.retry) or "audit_of" in claim.ticket.payload
        phase, number = phase_of(claim.ticket.study), self.retry.get("origin", claim.number)
        if "audit_of" in claim.ticket.payload:
            phase, number = "search", claim.ticket.payload["origin"]
        self._folder = kept.path(phase, number).with_suffix("")
        self.trainer: Trainer | None = None
        self._states: TrialStates | None = None
        if spec.objective is None and spec.build is not None:
            self._states = TrialStates(self._folder, writer, source,
                                       lambda: db.studies.flush(claim.trial_id), say)
        self._continued: Continued | None = None

    @property
    def n_taken_over(self) -> int:
        """How many epochs the trials before this one have trained for it."""
        return 0 if self._continued is None else len(self._continued.taken_over)

    def epochs(self, params: Mapping[str, Any]) -> Iterator[Any]:
        """Begin to train and return the epochs' metrics, those of earlier tries first."""
        run = make_run(self._order, int(self._claim.ticket.payload["seed"]), self._folder)
        if self._states is not None:
            return self._recipe_epochs(run, params, self._states)
        assert self._spec.objective is not None
        source = self._spec.objective(run, **params)
        if not self.retry or not hasattr(source, "__next__"):
            return source
        return self._behind(self._earlier(), source)

    def _recipe_epochs(
        self, run: Run, params: Mapping[str, Any], states: TrialStates
    ) -> Iterator[Any]:
        from hpo.train.loop import Trainer

        spec, build, order = self._spec, self._spec.build, self._order
        assert build is not None

        def make() -> Trainer:
            # A try that a state did not fit has drawn from the global generators.
            again = make_run(order, run.seed, self._folder) if self.trainer else run
            micro = self._claim.ticket.payload.get(MICRO_BATCH)
            with self._ranks.watching():
                team = self._ranks.begin(order, run.seed, self._folder, params, micro)
                self.trainer = Trainer(
                    build(again, **params), again, metric=spec.metric, team=team,
                    maximize=spec.direction == "maximize", micro_batch_size=micro)
            return self.trainer

        if not self._goes_on:
            return self._ranks.watched(make().epochs())
        with self._ranks.watching():
            trainer, earlier = states.resume(make)
        return self._behind(earlier, _numbered(trainer, self._ranks))

    def _behind(self, earlier: Mapping[int, Metrics], source: Iterator[Any]) -> Iterator[Any]:
        self._continued = Continued(source, earlier)
        return self._continued.epochs()

    def _earlier(self) -> dict[int, Metrics]:
        """Return the stored epochs of the last try before this one that had any."""
        study, before = self._claim.ticket.study, self.retry.get("retry_of")
        study_id = self._db.studies.get_study_id_from_name(study)
        while before is not None:
            if rows := self._db.epochs(study, before):
                return {row.epoch: dict(row.metrics) for row in rows}
            trial_id = self._db.studies.get_trial_id_from_study_id_trial_number(study_id, before)
            before = self._db.studies.get_trial(trial_id).user_attrs.get("retry_of")
        return {}

    def is_taken_over(self, epoch: int) -> bool:
        """Return whether an earlier try has trained this epoch."""
        return self._continued is not None and epoch in self._continued.taken_over

    def is_last(self, epoch: int) -> bool:
        """Return whether this is the last epoch of a whole trial, or of one that ends early."""
        return epoch == int(self._order["epochs"]) - 1 or (
            self.trainer is not None and self.trainer.stopped_early is not None)

    def take_in(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Take in an epoch that was trained."""
        if self._states is not None:
            self._states.take_in(epoch, metrics)

    def after_epoch(self) -> None:
        """Write the training state behind the last epoch if it is due."""
        if self._states is not None and self.trainer is not None:
            with self._ranks.watching():
                self._states.after_epoch(self.trainer)

    def goes_back(self) -> None:
        """Write the training state: the trial goes back to the queue."""
        if self._states is not None and self.trainer is not None:
            with self._ranks.watching():
                self._states.write_now(self.trainer)

    def save(self, path: Path) -> None:
        """Write the checkpoint of the best epoch."""
        if self.trainer is not None:
            with self._ranks.watching():
                self.trainer.save(path)

    def release(self) -> None:
        """Let go of the model and what it has on the devices."""
        self.trainer = None
        self._ranks.drop()

    def is_over(self) -> None:
        """Delete the training states: nobody goes on with the trial."""
        if self._states is not None:
            self._states.remove()

    @property
    def smaller_batch(self) -> int | None:
        """Half of the rows that went through the model at once; None where that is nobody's."""
        size = 0 if self.trainer is None else self.trainer.micro_batch_size
        return size // 2 or None

    def attrs(self) -> dict[str, Any]:
        """Return what the trial says of this try, as user attributes."""
        found = dict(self.retry)
        if (audit_of := self._claim.ticket.payload.get("audit_of")) is not None:
            found["audit_of"] = audit_of
        if self.n_taken_over:
            found["n_epochs_taken_over"] = self.n_taken_over
        if size := self._claim.ticket.payload.get(MICRO_BATCH):
            found[MICRO_BATCH] = size
        if self.trainer is not None and self.trainer.stopped_early:
            found["stopped_early"] = self.trainer.stopped_early
        if self._ranks.n > 1:
            found["n_devices"] = self._ranks.n
        return found


def _numbered(trainer: Trainer, ranks: Ranks) -> Iterator[dict[str, Any]]:
    """Yield a trainer's epochs with their numbers: they may not begin with 0."""
    epochs: Any = ranks.watched(trainer.epochs())
    try:
        for epoch, metrics in enumerate(epochs, trainer.next_epoch):
            yield {"epoch": epoch, **metrics}
    finally:
        epochs.close()
