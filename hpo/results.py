"""What a study has found so far, read out of storage into frozen values.

Tables, pictures, sentences and JSON are all made from these values and from nothing else, so that
they cannot disagree, and so that each of them can be tested without a database.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

from hpo.paired import level_means

PHASES = ("lr-range", "grid", "random", "search", "audit", "confirm")
# What gets confirmed and registered, in the order of every table.
SOURCES = ("search", "grid", "random", "lr-range", "default")
# Of these, what a run leaves out unless it is asked for.
ON_REQUEST = ("random",)
ENDED = ("COMPLETE", "PRUNED", "FAIL")


@dataclass(frozen=True)
class Trial:
    """One Optuna trial; `curve` holds (epoch, value) of each epoch that was reported."""

    number: int
    state: str
    value: float | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    curve: tuple[tuple[int, float], ...] = ()
    started_at: datetime | None = None
    ended_at: datetime | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)
    distributions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n_epochs(self) -> int:
        """Epochs this trial has spent, however it ended; those of earlier tries are theirs."""
        n_epochs = max(len(self.curve), int(self.attrs.get("n_epochs") or 0))
        return n_epochs - int(self.attrs.get("n_epochs_taken_over") or 0)

    @property
    def score(self) -> float | None:
        """The value of a COMPLETE trial that is a finite number, else None."""
        ok = self.state == "COMPLETE" and self.value is not None and math.isfinite(self.value)
        return self.value if ok else None

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def kind(self) -> str:
        """The reason without its details: `error`, `oom`, `median`, `diverged` ..."""
        return self.reason.split(":")[0].split(" at epoch")[0].strip()

    @property
    def span(self) -> tuple[datetime, datetime] | None:
        """When it ran, or None: of one that lost its worker nobody saw the end."""
        start, end, took = self.started_at, self.ended_at, self.attrs.get("duration_s")
        if start is None or end is None or (took is None and self.kind == "worker lost"):
            return None
        return start, end if took is None else start + timedelta(seconds=float(took))


@dataclass(frozen=True)
class Sweep:
    """The LR range sweeps: rates, mean losses and the pick, if there was a sensible one.

    `by_seed` holds the losses of each seed, `edge` the rate at which the loss is back where it
    began, `error` the standard error of the pick over the seeds in decades.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...] = ()
    pick: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""
    epochs: float = 0.0
    by_seed: tuple[tuple[float, ...], ...] = ()
    edge: float | None = None
    error: float | None = None

    @property
    def has_curve(self) -> bool:
        """Whether any loss is finite, so that there is something to draw."""
        return any(map(math.isfinite, self.losses))


@dataclass(frozen=True)
class Phase:
    """One phase's Optuna study; `n_planned` counts its tickets, None where it has none."""

    name: str
    study: str
    trials: tuple[Trial, ...] = ()
    n_planned: int | None = None
    sweep_epochs: float = 0.0

    @property
    def n_epochs(self) -> float:
        """Epochs spent, those of pruned and failed trials and of a sweep included."""
        return sum(trial.n_epochs for trial in self.trials) + self.sweep_epochs

    @property
    def n_trials(self) -> int:
        """Ended trials; a trial and its retries count once."""
        retried = {trial.attrs.get("retry_of") for trial in self.trials if trial.ended}
        return sum(trial.ended and trial.number not in retried for trial in self.trials)

    @property
    def duration_s(self) -> float | None:
        """Seconds in which some trial ran, without pauses; None before any has ended."""
        spans = sorted(span for trial in self.trials if (span := trial.span))
        if not spans:
            return None
        ran, until = timedelta(0), spans[0][0]
        for start, end in spans:
            ran += max(timedelta(0), end - max(start, until))
            until = max(until, end)
        return ran.total_seconds()

    def states(self) -> dict[str, int]:
        """Return how many trials are in each state, the commonest first."""
        return dict(Counter(trial.state for trial in self.trials).most_common())

    def reasons(self) -> dict[tuple[str, str], int]:
        """Return counts by (state, reason without details) of the trials that have a reason."""
        counted = Counter((t.state, t.kind) for t in self.trials if t.reason)
        return dict(counted.most_common())

    def by_end(self) -> list[Trial]:
        """Return the ended trials in the order in which they ended."""
        late = datetime.max.replace(tzinfo=UTC)
        return sorted((t for t in self.trials if t.ended),
                      key=lambda t: (t.ended_at or late, t.number))


@dataclass(frozen=True)
class Scores:
    """One candidate's scores on fresh seeds: seed -> score."""

    by_seed: Mapping[int, float]

    @property
    def n(self) -> int:
        return len(self.by_seed)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed.values())

    @property
    def sd(self) -> float | None:
        """The sample standard deviation, None for a single seed."""
        return statistics.stdev(self.by_seed.values()) if self.n > 1 else None


@dataclass(frozen=True)
class Candidate:
    """What was trained again on fresh seeds: `search#1`, `grid`, `lr-range` or `default`.

    `trials` are the numbers of its trials in the phase confirm; candidates with the same params
    share them. `n_rounds` counts the rounds of the race it was in, `n_readings` the confirmations
    of the study that had read the test split when this one had.
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    source_trial: int | None = None
    val: Scores | None = None
    test: Scores | None = None
    trials: tuple[int, ...] = ()
    n_rounds: int = 1
    n_readings: int = 0

    @property
    def source(self) -> str:
        return self.name.split("#")[0]


@dataclass(frozen=True)
class Results:
    """Everything that a report of one study says."""

    name: str
    metric: str
    maximize: bool
    epochs: int | None = None
    module: str | None = None
    phases: Mapping[str, Phase] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()
    registry: tuple[Mapping[str, Any], ...] = ()
    sweep: Sweep | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    space: Mapping[str, Any] = field(default_factory=dict)
    # What each worker runs with, by the name that its trials carry as `worker`.
    workers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @cached_property
    def test_metric(self) -> str:
        """The test split's name of the study's metric."""
        return on_test(self.metric)

    def n_images(self, metric: str) -> int | None:
        """Return over how many images an accuracy was taken; None for other metrics."""
        split = "n_test" if metric == self.test_metric else "n_val"
        return self.data.get(split) or None if metric.endswith("accuracy") else None

    @property
    def chance(self) -> float | None:
        """The accuracy of guessing among the data's classes; None for other metrics."""
        n_classes = self.data.get("n_classes")
        return 1 / n_classes if n_classes and self.metric.endswith("accuracy") else None

    @property
    def highest(self) -> float | None:
        """The score that none can pass, 1 for an accuracy, where one is known."""
        return 1.0 if self.maximize and self.metric.endswith("accuracy") else None

    def grain(self, metric: str) -> float:
        """Return the step in which the scores of a metric come, 0 where none is to be seen.

        One image of an accuracy; else the smallest difference between any two scores there are.
        """
        n_images = self.n_images(metric)
        if n_images:
            return 1 / n_images
        of_test = metric == self.test_metric
        scores = [c.test if of_test else c.val for c in self.candidates]
        seen = [value for one in scores if one for value in one.by_seed.values()]
        trials = [] if of_test else [t for p in self.phases.values() for t in p.trials]
        seen = sorted(seen + [t.score for t in trials if t.score is not None])
        # The same score, summed in another order in float32, differs by rounding; that is no step.
        rounding = 1e-6 * max(map(abs, seen), default=0.0)
        steps = (b - a for a, b in zip(seen, seen[1:], strict=False))
        return min((step for step in steps if step > rounding), default=0.0)

    @property
    def no_pick(self) -> bool:
        """Whether the LR range sweep ran and found no learning rate to suggest."""
        return self.sweep is not None and self.sweep.pick is None

    def better(self, value: float, than: float | None) -> bool:
        """Return whether a score beats another; any score beats None."""
        return than is None or (value > than if self.maximize else value < than)

    def phase(self, name: str) -> Phase:
        """Return a phase, an empty one where it has not begun."""
        return self.phases.get(name) or Phase(name, study_of(self.name, name))

    def best(self, phase: str) -> Trial | None:
        """Return a phase's best COMPLETE trial, the earliest of equals, or None."""
        best: Trial | None = None
        for trial in self.phase(phase).trials:
            if trial.score is not None and self.better(trial.score, best and best.score):
                best = trial
        return best

    def candidate(self, source: str) -> Candidate | None:
        """Return the source's candidate with the best confirmation mean, or None.

        Where the race gave them other seeds, the means are levelled: `hpo.paired.level_means`.
        """
        scored = {c.name: c.val.by_seed for c in self.candidates if c.val is not None}
        means = level_means(scored)
        best: Candidate | None = None
        for candidate in self.candidates:
            if candidate.source != source or candidate.name not in scored:
                continue
            if self.better(means[candidate.name], best and means[best.name]):
                best = candidate
        return best


def study_of(name: str, phase: str) -> str:
    """Return the Optuna study that holds a phase."""
    return name if phase == "search" else f"{name}/{phase}"


def on_test(metric: str) -> str:
    """Return the test split's name of a metric: `val_accuracy` -> `test_accuracy`."""
    return "test_" + metric.removeprefix("val_")
