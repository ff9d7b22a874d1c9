"""The one training loop of every recipe.

It is as fast as a bare loop over a tensor: a step asks nothing of the device, an epoch asks once.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpo.errors import DataError, InputError
from hpo.train import checkpoint
from hpo.train.augment import by_row
from hpo.train.averaging import Averaged
from hpo.train.best import Best
from hpo.train.compiling import begin_step, compile_model, compiling, for_parts
from hpo.train.groups import set_rate
from hpo.train.joint import (
    Joint,
    check_rows,
    check_same,
    own_seed,
    part,
    rows_of_each,
    seed_datasets,
)
from hpo.train.loaded import load
from hpo.train.precision import autocast, check_precision, products
from hpo.train.randomness import PrivateRandom, generator, global_state, set_global_state
from hpo.train.recipe import Recipe, describe
from hpo.train.regularize import MixedLabels, Patience
from hpo.train.resume import differences, on_host
from hpo.train.schedules import Plateau
from hpo.train.scoring import device_of, evaluate, make_model, random_rows
from hpo.train.sharded import load_model, load_optimizer
from hpo.train.shares import has_batch_norm, n_batches, n_parts
from hpo.train.team import ALONE, Team
from hpo.train.update import Update

if TYPE_CHECKING:
    from hpo.spec import Run

LOG = logging.getLogger("hpo.train")
METRICS = ("train_loss", "val_loss", "val_accuracy", "lr", "images_per_s", "epoch_s")


class Trainer:
    """One trial's model, optimizer and data, trained an epoch at a time.

    `metric` decides which epoch is kept. `micro_batch_size` stands for the recipe's own where a
    batch does not fit, and makes the batches of the evaluation smaller too. Of a `team` each rank
    has one such trainer, and trains its part of each batch. Same recipe, run and machine: same
    numbers, to the last bit on the CPU.

    Raises:
        InputError: if the device or the metric is not there, or a part of the recipe does not fit.
        DataError: if the data cannot be read or do not suffice.
    """

    def __init__(self, recipe: Recipe, run: Run, *, metric: str = "val_accuracy",
                 maximize: bool = True, micro_batch_size: int | None = None,
                 team: Team = ALONE) -> None:
        if metric not in METRICS:
            raise InputError(f"metric '{metric}': a recipe's epochs have {', '.join(METRICS)}")
        self.recipe, self.run, self.metric, self.maximize = recipe, run, metric, maximize
        self.team = team
        most = rows_of_each(recipe, run)
        self.micro_batch_size = min(most, micro_batch_size or recipe.micro_batch_size or most)
        share = 1.0 if micro_batch_size is None else self.micro_batch_size / most
        self._eval_batch_size = max(1, int(recipe.eval_batch_size * share))
        self.device = device_of(run)
        check_precision(recipe.precision, self.device)
        self.data = load(recipe, run, self.device)
        if not all(team.of_all(self.data.resident)) and self.data.resident:
            # What fits on one device must be read as on the others: in one order.
            self.data = load(replace(recipe, resident=False), run, self.device)
        self.random = PrivateRandom(run.seed, self.device)
        with self.random:
            # Over all ranks' rows where torch has such a norm; on a CPU over each rank's own.
            self.model = make_model(recipe, self.data, self.device,
                                    synced=self.device.type == "cuda" and not team.is_alone)
            rows = None if team.is_alone else next(random_rows(self.data, 2))
        # A module that was made when the study's was imported has other weights in each process.
        team.copy_first_(*self.model.parameters(), *self.model.buffers())
        self._has_batch_norm = has_batch_norm(self.model)
        check_rows(self.data, team, self._has_batch_norm)
        self._order = generator(self.data.train.device, run.seed)
        self._draws = generator(self.device, own_seed(run.seed, team.rank) + 1)
        if team.rank:
            self.random = PrivateRandom(own_seed(run.seed, team.rank), self.device)
            seed_datasets(self.data, own_seed(run.seed, team.rank))
        mean = None if recipe.ema is None else copy.deepcopy(self.model).requires_grad_(False)
        # What is evaluated and kept.
        self._scored = self.model if mean is None else mean
        part(self.model, mean, rows, recipe, team, self.device)
        self.optimizer = recipe.optimizer.make(self.model)
        self.update = Update(recipe, self.model, self.optimizer, self.device)
        self._averaged = None if mean is None or recipe.ema is None else Averaged(
            self.model, mean, recipe.ema)
        self._compile = for_parts(recipe.compile, self.micro_batch_size, recipe.batch_size)
        self._joint = Joint(self.model, rows, recipe, team, self.device)
        compile_model(self._compile, self.model, self._scored)
        self._best = Best(self._scored)
        self._patience = None if recipe.early_stopping is None else Patience(
            recipe.early_stopping, maximize)
        self._history: list[float] = []
        self._all_rates: list[float] | None = None
        self._next_epoch = 0
        check_same(team, self._identity())

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch."""
        return n_batches(len(self.data.train), self.recipe.batch_size, self.model,
                         n_ranks=self.team.size)

    @property
    def next_epoch(self) -> int:
        """The epoch that is trained next."""
        return self._next_epoch

    @property
    def best_epoch(self) -> int:
        """The epoch whose weights are kept, or -1 before the first."""
        return self._best.epoch

    @property
    def best(self) -> dict[str, float]:
        """The metrics of the epoch whose weights are kept."""
        return dict(self._best.metrics)

    @property
    def stopped_early(self) -> str | None:
        """Why the trial ends before its last epoch, or None if it does not."""
        if self._patience is None or not self._patience.is_over:
            return None
        n = self._patience.n_without
        return f"no better {self.metric} for {n} epoch{'s' if n > 1 else ''}"

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Have the trial's own random states and switches in place for the while."""
        recipe = self.recipe
        with self.random, products(self.device, recipe.precision), compiling(recipe.compile):
            yield

    def epochs(self) -> Generator[dict[str, float], None, None]:
        """Train, and yield the metrics of each epoch; leaving the generator ends the trial.

        After `load_state_dict` these are the epochs that were missing.

        Units: `lr` is the rate of the epoch's last step, `images_per_s` counts training images
        over the whole epoch, validation included. A loss may be NaN: who drives decides.
        """
        n_batches(len(self.data.train), self.recipe.batch_size, self.model,
                  n_ranks=self.team.size, log=True)
        try:
            while self._next_epoch < self.run.epochs and not self.stopped_early:
                yield self.epoch()
        finally:
            self.close()

    def epoch(self) -> dict[str, float]:
        """Train the next epoch and return its metrics, those of rank 0 on all ranks."""
        self.team.tell("epoch")
        epoch = self._next_epoch
        with self.computing():
            metrics = self.team.of_first(self._epoch(self._rates(epoch)))
            self._history.append(metrics[self.metric])
            if self._improves(metrics):
                self._best.keep(epoch, metrics)
        if self._patience is not None:
            self._patience.add(metrics[self.metric])
        self._next_epoch = epoch + 1
        return metrics

    def _rates(self, epoch: int) -> list[float]:
        """Return the rates of an epoch's steps."""
        schedule, peak = self.recipe.schedule, self.recipe.optimizer.lr
        size, n_epochs = self.steps_per_epoch, self.run.epochs
        if isinstance(schedule, Plateau):
            return schedule.epoch_rates(epoch, size, n_epochs, peak, self._history, self.maximize)
        if self._all_rates is None:
            self._all_rates = schedule.rates(size * n_epochs, peak)
        # A step that was left out has moved no schedule.
        start = epoch * size - self.update.n_skipped
        return self._all_rates[start:start + size]

    def close(self) -> None:
        """End the processes that read for this trial; data on the device stay for the next one."""
        self.team.tell("close")
        self.data.close()

    def state_dict(self) -> dict[str, Any]:
        """Return all that the coming epochs depend on, as tensors on the host and plain data.

        Between two epochs: what another `Trainer` trains on from it is the same to the last bit on
        a CPU. What a dataset draws at random in loader processes is theirs and is drawn anew.
        """
        self.team.tell("state_dict")
        return {
            "next_epoch": self._next_epoch, "history": list(self._history),
            "model": on_host(self.model.state_dict()),
            "optimizer": on_host(self.optimizer.state_dict()), "best": self._best.state_dict(),
            "order": self._order.get_state(), "draws": self.team.of_all(self._own_draws()),
            "update": self.update.state_dict(),
            "averaged": None if self._averaged is None else self._averaged.state_dict(),
            "patience": None if self._patience is None else self._patience.state_dict(),
            "trains": self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the trainer of `state_dict` was.

        Raises:
            DataError: if that one trained anything else: recipe, data, seed, epochs or metric.
        """
        if told := differences(state["trains"], self._identity()):
            raise DataError("the state is of another trial: " + "; ".join(told))
        self.team.tell("take_state")
        self.take_state(state)

    def take_state(self, state: Mapping[str, Any] | None = None) -> None:
        """Go on from the state that rank 0 gives."""
        state = self.team.of_first(state)
        assert state is not None
        load_model(self.model, state["model"])
        load_optimizer(self.optimizer, state["optimizer"])
        self._best.load_state_dict(state["best"])
        self._order.set_state(state["order"])
        own = state["draws"][self.team.rank]
        self.random.set_state(own["torch"])
        set_global_state(own["global"])
        self._draws.set_state(own["augment"])
        self._history = list(state["history"])
        self.update.load_state_dict(state["update"])
        if self._averaged is not None:
            self._averaged.load_state_dict(state["averaged"])
        if self._patience is not None:
            self._patience.load_state_dict(state["patience"])
        self._next_epoch = state["next_epoch"]

    def _own_draws(self) -> dict[str, Any]:
        return {"torch": self.random.get_state(), "global": global_state(),
                "augment": self._draws.get_state()}

    def _identity(self) -> dict[str, Any]:
        run = self.run
        return {"recipe": describe(self.recipe), "data": self.data.fingerprint, "seed": run.seed,
                "epochs": run.epochs, "steps": self.steps_per_epoch * run.epochs,
                "data_fraction": run.data_fraction, "metric": self.metric,
                "maximize": self.maximize, "n_devices": self.team.size}

    def batches(self, size: int, n: int) -> Iterator[tuple[Tensor, Any]]:
        """Yield one pass of shuffled, augmented, normalised and mixed training batches.

        Of a team these are this rank's rows of each batch.

        Shapes: inputs [size, ...] float32, labels [size], or `MixedLabels` where the recipe mixes;
            the last batch may be smaller.
        """
        feed, mix = self.data.train, self.recipe.mix
        order = torch.randperm(len(feed), generator=self._order, device=feed.device)
        order = self.team.own_of_batches(order, size, n)
        size //= self.team.size
        parts = order.split(size)
        for (images, labels), rows in zip(feed.batches(order, size, n), parts, strict=False):
            for augment in self.recipe.augment:
                images = augment(images, generator=self._draws) if not by_row(augment) else (
                    augment.of_rows(images, rows.to(self.device, non_blocking=True),
                                    self._next_epoch, self.run.seed))
            images = self.data.normalised(images, ready=feed.ready)
            yield (images, labels) if mix is None else mix.mix(images, labels, self._draws)

    def loss(self, images: Tensor, labels: Tensor | MixedLabels) -> Tensor:
        """Return the training loss of a batch, its scores in the recipe's precision."""
        begin_step(self._compile, self.device)
        with autocast(self.device, self.recipe.precision):
            scores = self._joint(images)
        if isinstance(labels, MixedLabels):
            return labels.loss(self.recipe.loss, scores.float())
        return self.recipe.loss(scores.float(), labels)

    def _epoch(self, rates: list[float]) -> dict[str, float]:
        start = time.perf_counter()
        train_loss, n_made = self._train(rates)
        self.team.copy_first_(*self.model.buffers(), *self._scored.buffers())
        val_loss, n_right = evaluate(self._scored, self.data, self.data.val, self.recipe,
                                     self._eval_batch_size, self.team)
        n_val = len(self.data.val)
        # The epoch's only question to the device.
        numbers = torch.stack([train_loss, val_loss, n_right]).tolist()
        took = time.perf_counter() - start
        n_trained = min(len(self.data.train), self.steps_per_epoch * self.recipe.batch_size)
        return {"train_loss": numbers[0], "val_loss": numbers[1] / n_val,
                "val_accuracy": numbers[2] / n_val, "lr": rates[n_made - 1],
                "images_per_s": n_trained / took, "epoch_s": took}

    def _train(self, rates: list[float]) -> tuple[Tensor, int]:
        """Make one step a batch; return their rows' mean loss, on the device, and how many.

        A batch whose step is left out (fp16) counts in neither.
        """
        self.model.train()
        size, n_rows = self.recipe.batch_size, len(self.data.train)
        losses, counts, n_made = [], [], 0
        for i, (images, labels) in enumerate(self.batches(size, len(rates))):
            set_rate(self.optimizer, rates[n_made])
            n = min(size, n_rows - i * size)
            loss = self.backward(images, labels, n)
            if not self.update.step():
                continue
            losses.append(loss)
            counts.append(n)
            n_made += 1
            if self._averaged is not None:
                self._averaged.follow()
        if not n_made:
            raise DataError(f"all {len(rates)} steps of epoch {self._next_epoch} were skipped: in "
                            f"fp16 no gradient was finite; use precision='bf16' or 'fp32'")
        weights = torch.tensor(counts, dtype=torch.float64).to(self.device, non_blocking=True)
        loss = torch.stack(losses).double() @ weights / sum(counts)
        self.team.sum_(loss)
        return loss, n_made

    def backward(self, images: Tensor, labels: Tensor | MixedLabels, n_rows: int) -> Tensor:
        """Add the gradient of a batch of `n_rows` to the parameters', and return its mean loss.

        Each micro-batch counts by its rows: they are of one size, or differ by one row. The loss
        is on the device, and of a team this rank's part of the sum.
        """
        size = self.team.size
        n = n_parts(n_rows, size, self.micro_batch_size, self._has_batch_norm)
        if n == 1 and self.team.is_alone:
            loss = self.loss(images, labels)
            self.update.backward(loss)
            return loss.detach()
        whole = torch.zeros((), device=self.device)
        parts = zip(images.tensor_split(n), labels.tensor_split(n), strict=True)
        for i, (some_images, some_labels) in enumerate(parts):
            with self._joint.adding(is_last=i == n - 1):
                loss = self.loss(some_images, some_labels) * (len(some_labels) / n_rows)
                # The gradients of the ranks are added up and divided by how many they are.
                self.update.backward(loss * size)
            whole += loss.detach()
        return whole

    def _improves(self, metrics: dict[str, float]) -> bool:
        if self._best.epoch < 0:
            return True
        new, old = metrics[self.metric], self._best.metrics[self.metric]
        if not math.isfinite(new):
            return False
        return not math.isfinite(old) or (new > old if self.maximize else new < old)

    def weights(self) -> dict[str, Tensor]:
        """Return the best epoch's weights, whole and on the host."""
        return self._best.weights()

    def save(self, path: Path) -> None:
        """Write the best epoch's checkpoint (of the initial weights before the first epoch)."""
        self.team.tell("weights")
        data = self.data
        checkpoint.write(Path(path), {
            "model": self.weights(), "epoch": self._best.epoch,
            "metrics": self._best.metrics, "recipe": describe(self.recipe),
            "normalisation": None if data.mean is None or data.std is None else {
                "mean": data.mean.cpu(), "std": data.std.cpu()},
            "image_shape": list(data.image_shape), "n_classes": data.n_classes,
            "classes": list(data.classes), "fingerprint": data.fingerprint,
            "seed": self.run.seed, "data_fraction": self.run.data_fraction})
