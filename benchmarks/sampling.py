"""The bounded TPE against Optuna's own, on test functions: is what it finds as good?

    python benchmarks/sampling.py [--seeds 30] [--first 0] [--trials 500] [--weighed 250]
                                  [--processes 2]

Both sides run the same number of trials from the same seeds on the same storage; up to the trials
that a draw weighs they are the same, so only studies beyond it are compared. Prints the median
regret of both, the share of seeds that each wins, and the p-value of the paired Wilcoxon test on
the logarithm of the regrets; FAIL where the bounded one is worse in any function (Holm, 5 %).
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

Function = Callable[[Any], float]


def sphere(t: Any) -> float:
    """Six floats."""
    return sum((t.suggest_float(f"x{i}", -5, 5) - 0.7 * i) ** 2 for i in range(6))


def rosenbrock(t: Any) -> float:
    """Four floats along a bent valley."""
    x = [t.suggest_float(f"x{i}", -2, 2) for i in range(4)]
    return sum(100 * (b - a * a) ** 2 + (1 - a) ** 2 for a, b in zip(x, x[1:], strict=False))


def rastrigin(t: Any) -> float:
    """Four floats with many local minima."""
    x = [t.suggest_float(f"x{i}", -5.12, 5.12) for i in range(4)]
    return 40 + sum(a * a - 10 * math.cos(2 * math.pi * a) for a in x)


def ackley(t: Any) -> float:
    """Eight floats, flat far from the minimum."""
    x = [t.suggest_float(f"x{i}", -10, 10) for i in range(8)]
    mean = sum(a * a for a in x) / 8
    waves = sum(math.cos(2 * math.pi * a) for a in x) / 8
    return -20 * math.exp(-0.2 * math.sqrt(mean)) - math.exp(waves) + 20 + math.e


def rates(t: Any) -> float:
    """Three floats on a logarithmic scale, as learning rate, weight decay and epsilon."""
    lr = math.log10(t.suggest_float("lr", 1e-6, 1, log=True))
    decay = math.log10(t.suggest_float("decay", 1e-8, 1, log=True))
    eps = math.log10(t.suggest_float("eps", 1e-10, 1e-2, log=True))
    return (lr + 2.5) ** 2 + 0.3 * (decay + 4 + 0.5 * lr) ** 2 + 0.01 * (eps + 8) ** 2


def integers(t: Any) -> float:
    """Five integers, two of them on a logarithmic scale."""
    n = [t.suggest_int(f"n{i}", 1, 60) for i in range(3)]
    m = [t.suggest_int(f"m{i}", 1, 2048, log=True) for i in range(2)]
    return (sum(abs(a - b) for a, b in zip(n, (7, 31, 52), strict=True))
            + sum(abs(math.log2(a / b)) for a, b in zip(m, (96, 640), strict=True)))


def mixed(t: Any) -> float:
    """Floats, an integer and two choices, as a recipe has them."""
    lr = math.log10(t.suggest_float("lr", 1e-5, 1, log=True))
    width = math.log2(t.suggest_int("width", 16, 1024, log=True))
    drop = t.suggest_float("dropout", 0, 0.9)
    optimizer = t.suggest_categorical("optimizer", ["sgd", "adam", "lamb", "rmsprop"])
    norm = t.suggest_categorical("norm", ["batch", "layer", "none"])
    best = {"sgd": -1.0, "adam": -3.0, "lamb": -2.0, "rmsprop": -3.5}[optimizer]
    worse = {"sgd": 0.0, "adam": 0.05, "lamb": 0.2, "rmsprop": 0.4}[optimizer]
    return ((lr - best) ** 2 + 0.1 * (width - 8.3) ** 2 + (drop - 0.25) ** 2 + worse
            + {"batch": 0.0, "layer": 0.1, "none": 0.5}[norm])


def conditional(t: Any) -> float:
    """A choice that decides which other params there are."""
    if t.suggest_categorical("net", ["cnn", "mlp", "tree"]) == "cnn":
        return (t.suggest_float("kernel", 0, 9) - 3.3) ** 2 + (
            math.log10(t.suggest_float("lr", 1e-5, 1, log=True)) + 3) ** 2
    if t.params["net"] == "mlp":
        return 0.5 + (t.suggest_int("depth", 1, 12) - 3) ** 2 + abs(
            t.suggest_float("slope", -1, 1) - 0.1)
    return 1 + (t.suggest_float("leaf", 0, 1) - 0.5) ** 2


FUNCTIONS: Sequence[Function] = (sphere, rosenbrock, rastrigin, ackley, rates, integers, mixed,
                                 conditional)


def regret(job: tuple[Function, str, int, int, int]) -> float:
    """Run one study and return the best value; the minimum of every function is 0."""
    import optuna

    import storage
    from hpo.tpe import BoundedTPESampler

    function, side, seed, n_trials, n_weighed = job
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = (BoundedTPESampler(seed=seed, n_weighed=n_weighed) if side == "bounded"
               else optuna.samplers.TPESampler(seed=seed))
    with tempfile.TemporaryDirectory(prefix="hpo-sampling-") as folder:
        opened = storage.open(f"sqlite:///{folder}/x.db")
        study = optuna.create_study(storage=opened, sampler=sampler)
        study.optimize(function, n_trials=n_trials)
        opened.close()
        return study.best_value


def p_value(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the one-sided p-value of our regrets being the larger ones."""
    from scipy.stats import wilcoxon

    differences = [math.log(a + 1e-12) - math.log(b + 1e-12)
                   for a, b in zip(ours, theirs, strict=True)]
    if not any(differences):
        return 1.0
    return float(wilcoxon(differences, alternative="greater").pvalue)  # type: ignore[attr-defined]


def main() -> int:
    """Compare both samplers on every function; exit code 1 where the bounded one is worse."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("seeds", 30), ("first", 0), ("trials", 500), ("weighed", 250),
                        ("processes", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.seeds)
    jobs = [(function, side, seed, args.trials, args.weighed) for function in FUNCTIONS
            for seed in seeds for side in ("bounded", "optuna")]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        found = dict(zip(jobs, pool.imap(regret, jobs, chunksize=1), strict=True))
    print(f"{args.trials} trials, {args.weighed} weighed, {args.seeds} seeds: median regret")
    print(f"  {'':<13}{'bounded':>10}{'Optuna':>10}{'wins':>7}{'losses':>8}{'p worse':>9}")
    p_values = []
    for function in FUNCTIONS:
        ours, theirs = ([found[function, side, seed, args.trials, args.weighed]
                         for seed in seeds] for side in ("bounded", "optuna"))
        p_values.append(p_value(ours, theirs))
        wins = sum(a < b for a, b in zip(ours, theirs, strict=True))
        losses = sum(a > b for a, b in zip(ours, theirs, strict=True))
        print(f"  {function.__name__:<13}{statistics.median(ours):>10.4g}"
              f"{statistics.median(theirs):>10.4g}{wins:>7}{losses:>8}{p_values[-1]:>9.3f}")
    good = min(p_values) * len(p_values) >= 0.05
    print(f"  {'ok' if good else 'FAIL'}: smallest p {min(p_values):.4f} over {len(p_values)} "
          f"functions (Holm: worse below {0.05 / len(p_values):.4f})")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
