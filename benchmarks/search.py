"""What a search finds by how many epochs: random, grid, TPE with median, ASHA, hpo's default.

    python benchmarks/search.py [--pool FILE] [--repeats 30] [--rungs]

Replays a pool of trainings (`search_pool.py`) in seconds. A study has one of the pool's seeds. A
side ends at its number of epochs and picks its best COMPLETE trial; the pick's quality is the mean
of its other seeds, which chose nothing. Random and grid train whole trials. Samplers draw from the
whole space, and the nearest params of the pool that the study has not tried answer: they are what
it is told. So a search cannot go between the pool's params, and two near draws never get the same
noise; how an optimum is closed in upon is not shown. Audits of pruning are not counted.

Prints each side's quality minus that of random in the same repeat, with a 95 % interval over the
repeats (those that share a seed of the pool are not independent, so it is a little too narrow);
what a number of trials costs; and how many params of the pool's best tenth a side has trained to
their end, which tells pruners apart where the picks' own noise does not. FAIL where the default,
on average, is worse than 150 random trials at a tenth of their epochs, or than the whole grid at a
fiftieth. `--rungs` compares other rungs than the default's instead, by the last measure and with
random params.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from search_pool import PACKED, Params, Pool, load

N_RANDOM, OF_RANDOM, OF_GRID = 150, 10, 50
N_TRIALS = 24
# Params among so many of the pool's best by their other seeds are good ones.
GOOD = 0.1
DEFAULT = "hpo's default"
# Of the normal distribution, for 95 %.
_Z = 1.96


@dataclass(frozen=True)
class Side:
    """A way to search: a sampler's and a pruner's name as hpo has them, and the pruner."""

    name: str
    sampler: str
    pruner: Callable[[int], Any]


@dataclass(frozen=True)
class Moment:
    """Where a study stood when a trial ended.

    Epochs spent, the quality of its pick, and how many good params it had trained to their end.
    """

    n_epochs: int
    quality: float
    n_good: int


def sides() -> list[Side]:
    """Return the ways to compare, hpo's default last."""
    import optuna

    from hpo.search import make_pruner

    def median(epochs: int) -> Any:
        return make_pruner("median", n_startup=5, n_warmup=max(1, epochs // 4), epochs=epochs)

    def asha(_epochs: int) -> Any:
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)

    return [Side("TPE, no pruning", "tpe", lambda _: optuna.pruners.NopPruner()),
            Side("TPE + median", "tpe", median),
            Side("ASHA (random)", "random", asha),
            Side(DEFAULT, *default())]


def rung_sides() -> list[Side]:
    """Return random search under the median and under several rungs, the default's last."""
    from hpo.pruners import RungPruner

    def side(rungs: tuple[int, ...], reduction: float) -> Side:
        return Side(f"best 1/{reduction:g} after {', '.join(map(str, rungs))}", "random",
                    lambda _: RungPruner(rungs, reduction=reduction))

    none, median = (one.pruner for one in sides()[:2])
    return [
        Side("no pruning", "random", none), Side("median", "random", median),
        side((1,), 2), side((2,), 2), side((2,), 4), side((1, 3), 3), side((1, 2, 4), 2),
        Side(DEFAULT, "random", default()[1])]


def default() -> tuple[str, Callable[[int], Any]]:
    """Return the sampler and the pruner of a run that is told nothing."""
    from hpo.search import make_pruner
    from hpo.settings import Settings

    def resolved(epochs: int) -> Settings:
        return Settings("digits", "digits", Path(), "").resolved({"epochs": epochs}, None)

    def pruner(epochs: int) -> Any:
        used = resolved(epochs)
        return make_pruner(str(used.pruner), n_startup=int(used.prune_startup or 0),
                           n_warmup=int(used.prune_warmup or 0), epochs=epochs)

    return str(resolved(1).sampler), pruner


class Replay:
    """The random params of a pool as the answers to a sampler's draws."""

    def __init__(self, pool: Pool, space: Any) -> None:
        self.pool, self.space = pool, space
        self.params, self.curves = pool.params["random"], pool.curves["random"]
        self.places = np.array([self._place(params) for params in self.params])
        self.seeds = sorted(set.intersection(*(set(by_seed) for by_seed in self.curves)))

    def _place(self, params: Params) -> list[float]:
        """Return params in the unit cube; different choices are further apart than any others."""
        found = []
        for name, param in self.space.items():
            value = params[name]
            if param.n_values() is not None:
                found.append(10.0 * list(param.values()).index(value))
            elif param.log:
                found.append(math.log(value / param.low) / math.log(param.high / param.low))
            else:
                found.append((value - param.low) / (param.high - param.low))
        return found

    def nearest(self, params: Params, free: set[int]) -> int:
        """Return the place in the pool of the nearest params that are free."""
        left = sorted(free)
        far = ((self.places[left] - np.array(self._place(params))) ** 2).sum(axis=1)
        return left[int(far.argmin())]

    def study(self, side: Side, repeat: int, n_epochs: int) -> list[Moment]:
        """Search until so many epochs are spent; return what each trial's end led to."""
        import optuna

        import storage

        with tempfile.TemporaryDirectory(prefix="hpo-search-") as folder:
            opened = storage.open(f"sqlite:///{folder}/x.db")
            study = optuna.create_study(storage=opened, direction="maximize", study_name="s",
                                        pruner=side.pruner(self.pool.epochs))
            found = list(self._trials(study, side, repeat, n_epochs))
            opened.close()
        return found

    def _trials(self, study: Any, side: Side, repeat: int, n_epochs: int) -> Iterator[Moment]:
        seed, free = self.seeds[repeat % len(self.seeds)], set(range(len(self.params)))
        spent, best, pick, k, n_good = 0, -math.inf, math.nan, 0, 0
        bar = float(np.quantile([quality(one, seed) for one in self.curves], 1 - GOOD))
        while spent < n_epochs and free:
            i = self._trial(study, side, repeat, k, free)
            value, n = self._walk(study, k, self.curves[i][seed])
            spent, k = spent + n, k + 1
            if value is not None:
                n_good += quality(self.curves[i], seed) >= bar
            if value is not None and value > best:
                best, pick = value, quality(self.curves[i], seed)
            yield Moment(spent, pick, n_good)

    def _trial(self, study: Any, side: Side, repeat: int, k: int, free: set[int]) -> int:
        """Begin a trial; return the place of its params, which are no longer free."""
        from hpo.search import draw, make_sampler

        opened = study._storage
        trial_id = opened.create_new_trial(study._study_id)
        drawn = draw(study, opened.get_trial(trial_id), self.space,
                     lambda j: make_sampler(side.sampler, self.space, repeat, k, j),
                     lambda params: True)
        i = self.nearest(drawn, free)
        free.remove(i)
        for name, value in self.params[i].items():
            kind = self.space[name].distribution()
            opened.set_trial_param(trial_id, name, kind.to_internal_repr(value), kind)
        return i

    def _walk(self, study: Any, k: int, curve: Sequence[float]) -> tuple[float | None, int]:
        """Report a trial's epochs and end it; return its value if COMPLETE, and its epochs."""
        from optuna.trial import TrialState

        opened, epochs = study._storage, self.pool.epochs
        trial_id = opened.get_trial_id_from_study_id_trial_number(study._study_id, k)
        for epoch, value in enumerate(curve):
            opened.set_trial_intermediate_value(trial_id, epoch, value)
            if study.pruner.prune(study, opened.get_trial(trial_id)):
                opened.set_trial_state_values(trial_id, TrialState.PRUNED, [value])
                return None, epoch + 1
        if len(curve) < epochs:
            # It diverged in the epoch after its last.
            last = [curve[-1]] if curve else None
            opened.set_trial_state_values(trial_id, TrialState.PRUNED, last)
            return None, len(curve) + 1
        opened.set_trial_state_values(trial_id, TrialState.COMPLETE, [max(curve)])
        return max(curve), epochs


def quality(by_seed: dict[int, list[float]], without: int) -> float:
    """Return the mean of the best epochs of all seeds but one; chance where it diverged."""
    return statistics.fmean(max(curve, default=0.1) for seed, curve in by_seed.items()
                            if seed != without)


def picked(curves: Sequence[dict[int, list[float]]], seed: int) -> float:
    """Return the quality of the best of whole trials, on average over those that tie."""
    values = [max(by_seed[seed], default=0.0) for by_seed in curves]
    return statistics.fmean(quality(by_seed, seed) for by_seed, value
                            in zip(curves, values, strict=True) if value == max(values))


def random_searches(replay: Replay, repeats: int) -> list[float]:
    """Return the qualities that random search finds, one study a repeat."""
    found = []
    for repeat in range(repeats):
        places = np.random.default_rng(repeat).choice(len(replay.params), N_RANDOM, replace=False)
        found.append(picked([replay.curves[i] for i in places],
                            replay.seeds[repeat % len(replay.seeds)]))
    return found


def at(moments: Sequence[Moment], n_epochs: int) -> Moment:
    """Return where a study stood when so many epochs were spent."""
    found = [moment for moment in moments if moment.n_epochs <= n_epochs]
    return found[-1] if found else Moment(0, math.nan, 0)


def mean_of(values: Sequence[float]) -> str:
    """Return a mean and half the width of its 95 % interval."""
    half = _Z * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):+.2f} +- {half:.2f}"


def minus(found: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the differences in percent."""
    return [100 * (a - b) for a, b in zip(found, others, strict=True)]


def show_epochs(studies: dict[str, list[list[Moment]]], drawn: Sequence[float],
                grid: float, budgets: Sequence[int]) -> bool:
    """Print what each side has found by some numbers of epochs; return whether goals are met."""
    print(f"  {'':<22}" + "".join(f"{n:>14} epochs" for n in budgets))
    for name, found in studies.items():
        cells = []
        for n in budgets:
            mean = mean_of(minus([at(one, n).quality for one in found], drawn))
            cells.append(f"{mean} ({_n_trials(found, n):.0f})")
        print(f"  {name:<22}" + "".join(f"{cell:>21}" for cell in cells))
    by_fiftieth, by_tenth = ([at(one, n).quality for one in studies[DEFAULT]]
                             for n in budgets[:2])
    good = [statistics.fmean(by_tenth) >= statistics.fmean(drawn),
            statistics.fmean(by_fiftieth) >= grid]
    for met, said in zip(good, (f"{N_RANDOM} random trials by 1/{OF_RANDOM} of their epochs",
                                f"the grid by 1/{OF_GRID} of its epochs"), strict=True):
        print(f"  {'ok' if met else 'FAIL'}: the default reaches {said}")
    return all(good)


def _n_trials(found: Sequence[Sequence[Moment]], n_epochs: int) -> float:
    return statistics.fmean(sum(m.n_epochs <= n_epochs for m in one) for one in found)


def show_trials(studies: dict[str, list[list[Moment]]], drawn: Sequence[float]) -> None:
    """Print what a given number of trials costs and finds."""
    print(f"  {'':<22}{'epochs':>10}{'minus random':>18}")
    for name, found in studies.items():
        ends = [one[min(N_TRIALS, len(one)) - 1] for one in found]
        mean = mean_of(minus([end.quality for end in ends], drawn))
        print(f"  {name:<22}{statistics.fmean(e.n_epochs for e in ends):>10.0f}{mean:>18}")


def show_good(studies: dict[str, list[list[Moment]]], n_epochs: int) -> None:
    """Print how many good params each side trains to their end, and how many more the default."""
    rates = {name: [100 * at(one, n_epochs).n_good / n_epochs for one in found]
             for name, found in studies.items()}
    print(f"  {'':<22}{'good ones':>18}{'the default, minus':>22}")
    for name, found in rates.items():
        more = [a - b for a, b in zip(rates[DEFAULT], found, strict=True)]
        print(f"  {name:<22}{mean_of(found).removeprefix('+'):>18}"
              f"{mean_of(more) if any(more) else '':>22}")


def main() -> int:
    """Replay all sides; exit code 1 where the default misses a goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", type=Path, default=PACKED)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--rungs", action="store_true")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import optuna

    from search_spaces.digits import STUDY

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    replay = Replay(load(args.pool), STUDY.space)
    epochs, n_cells = replay.pool.epochs, len(replay.pool.curves["grid"])
    budgets = (n_cells * epochs // OF_GRID, N_RANDOM * epochs // OF_RANDOM,
               N_TRIALS * epochs)
    if args.rungs:
        show_good({side.name: [replay.study(side, repeat, budgets[2]) for repeat
                               in range(args.repeats)] for side in rung_sides()}, budgets[2])
        return 0
    drawn = random_searches(replay, args.repeats)
    grid = picked(replay.pool.curves["grid"], replay.seeds[0])
    print(f"{len(replay.params)} random params and {n_cells} cells of a grid, "
          f"{len(replay.seeds)} seeds, {epochs} epochs a trial; {args.repeats} repeats")
    print(f"  {N_RANDOM} random trials, {N_RANDOM * epochs} epochs: {statistics.fmean(drawn):.4f}")
    print(f"  the grid, {n_cells * epochs} epochs: {grid:.4f} (one study)")
    studies = {side.name: [replay.study(side, repeat, max(budgets)) for repeat
                           in range(args.repeats)] for side in sides()}
    print("quality minus that of random, in percent, and trials begun, by epochs spent:")
    good = show_epochs(studies, drawn, grid, budgets)
    print(f"the same by {N_TRIALS} trials:")
    show_trials(studies, drawn)
    print(f"params of the best {GOOD:.0%} trained to their end, in 100 of the first {budgets[2]} "
          f"epochs (random, whole trials: {100 * GOOD / epochs:.2f}):")
    show_good(studies, budgets[2])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
