"""Which trials keep their weights: the best few of a study, and every confirmation."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.drive import Ending, Goal
from hpo.queue import phase_of

if TYPE_CHECKING:
    from storage.database import Database


class Checkpoints:
    """The weights of a study's best trials, under the home folder."""

    def __init__(self, db: Database, home: Path, name: str, top_k: int, goal: Goal) -> None:
        self._db, self._home, self._name = db, home, name
        self._top_k, self._goal = top_k, goal
        self._rankings: dict[str, _Ranking] = {}

    def path(self, phase: str, number: int | None) -> Path:
        """Return the file of a trial's weights."""
        return self._home / "artifacts" / self._name / phase / f"{number}.pt"

    def keep(
        self, study: str, number: int, ending: Ending, save: Callable[[Path], None]
    ) -> list[str]:
        """Write the weights of a trial among its study's best, and name them in its attributes.

        Returns: the files that it displaces, to be deleted once its end is stored.
        Raises:
            OSError: the file could not be written; the trial has no weights then.
            HpoError: the database stayed away.
        """
        phase = phase_of(study)
        displaced: list[str] = []
        if phase != "confirm":
            ranked = self._ranked(study)
            n_ahead = sum(not self._goal.better(float(ending.value or 0), value)
                          for value, _ in ranked[:self._top_k])
            if n_ahead >= self._top_k:
                return []
            displaced = [kept for _, kept in ranked[self._top_k - 1:] if kept]
        path = self.path(phase, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path)
        ending.attrs["checkpoint"] = str(path.relative_to(self._home))
        return displaced

    def _ranked(self, study: str) -> list[tuple[float, str | None]]:
        """Return value and checkpoint of the study's COMPLETE trials that matter, best first."""
        ranking = self._rankings.setdefault(study, _Ranking(self._goal.maximize))
        ranking.take_in(self._db, study)
        return ranking.best(self._top_k)


class _Ranking:
    """The COMPLETE trials of one Optuna study by value, brought up to date by what is new."""

    def __init__(self, maximize: bool) -> None:
        self._sign = -1.0 if maximize else 1.0
        self._study_id: int | None = None
        self._seen: Any = None
        self._rows: list[tuple[float, int, str | None]] = []
        self._with_weights: list[tuple[float, int, str | None]] = []

    def take_in(self, db: Database, study: str) -> None:
        if self._study_id is None:
            self._study_id = db.studies.get_study_id_from_name(study)
        # What others ended a moment ago counts: their files are displaced or ours are not kept.
        trials, self._seen, anew = db.studies.ended_since(self._study_id, self._seen, 0.0)
        if anew:
            self._rows, self._with_weights = [], []
        for trial in trials:
            if trial.state.name == "COMPLETE":
                kept = trial.user_attrs.get("checkpoint")
                row = (self._sign * float(trial.value or 0), trial.number, kept)
                insort(self._rows, row)
                if kept:
                    insort(self._with_weights, row)

    def best(self, n: int) -> list[tuple[float, str | None]]:
        """Return the best n trials, and behind them those that have weights."""
        chosen = self._rows[:n]
        chosen += [row for row in self._with_weights if not chosen or row > chosen[-1]]
        return [(self._sign * value, kept) for value, _, kept in chosen]
