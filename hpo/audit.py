"""Whether pruning was right: some pruned trials were trained to their end, out of sight.

A pruner is judged by what it cut off, and of that nobody knows the end. Those drawn for the audit
are a fair sample of all that were pruned: the draw looks at nothing but their place in the queue.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpo.results import Results, Trial
from hpo.rungs import goes_on, marks, rungs_of

# Of the normal distribution, for 95 %.
_Z = 1.96
# A rule whose false prunes are no more than this part of what it prunes counts as harmless.
HARMLESS = 0.1
# A part of all epochs that is not worth another setting.
_LITTLE = 0.02
# Pruners whose rule is told again on the trials whose ends are known.
_REPLAYED = ("rungs", "median")
_Curve = Mapping[int, float]


@dataclass(frozen=True)
class Rule:
    """What the pruner's rule would have done with one warm-up, on trials whose ends are known.

    `n_false` of its `n_pruned` end better than the median of those it leaves; `saved_fraction` is
    the part of all epochs that it would have saved.
    """

    warmup: int
    n_trials: int
    n_pruned: int
    n_false: int
    saved_fraction: float

    @property
    def false_fraction(self) -> float:
        """The part of what it prunes that ends better than that."""
        return self.n_false / self.n_pruned if self.n_pruned else 0.0


@dataclass(frozen=True)
class Audit:
    """What the audit of a study's pruning has found.

    A prune is false where the trial, trained to its end, is better than the median of the search's
    COMPLETE trials, which the rule took it to be worse than. `n_top` of those audited would have
    been among the best that are confirmed. Epochs: `n_saved` by pruning, `n_spent` on the audit.
    """

    n_pruned: int
    n_audited: int
    n_false: int
    n_top: int
    n_saved: int
    n_spent: int
    warmup: int
    rules: tuple[Rule, ...] = ()

    @property
    def false_fraction(self) -> float | None:
        """The part of the audited prunes that were false."""
        return self.n_false / self.n_audited if self.n_audited else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The false fraction of all prunes, with 95 % confidence."""
        return wilson(self.n_false, self.n_audited) if self.n_audited else None

    @property
    def better(self) -> Rule | None:
        """The rule that saves the most among the harmless ones, where the one in use is none of
        them, or saves clearly less."""
        now = next((rule for rule in self.rules if rule.warmup == self.warmup), None)
        harmless = [rule for rule in self.rules if rule.false_fraction <= HARMLESS]
        if now is None or not harmless:
            return None
        best = max(harmless, key=lambda rule: (rule.saved_fraction, -rule.warmup))
        if best.warmup == now.warmup or now in harmless and (
                best.saved_fraction < now.saved_fraction + _LITTLE):
            return None
        return best


def wilson(k: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a fraction that was seen k times in n.

    Source: Wilson 1927, Probable inference, the law of succession, and statistical inference.
    """
    middle = (k + _Z**2 / 2) / (n + _Z**2)
    half = _Z * math.sqrt(k * (n - k) / n + _Z**2 / 4) / (n + _Z**2)
    return max(0.0, middle - half), min(1.0, middle + half)


def audit(results: Results, n_top: int = 3) -> Audit | None:
    """Return what is known of a study's pruning, or None where nothing was pruned."""
    search = results.phase("search")
    pruned = [t for t in search.trials if t.state == "PRUNED" and t.kind != "diverged"]
    scores = [t.score for t in search.trials if t.score is not None]
    if not pruned or not scores:
        return None
    audits = results.phase("audit")
    ended = [t for t in audits.trials if t.score is not None]
    middle = statistics.median(scores)
    best = sorted(scores, reverse=results.maximize)[:n_top]
    epochs = results.epochs or max(t.n_epochs for t in search.trials)
    settings = results.settings
    warmup = int(settings.get("prune_warmup") or 0)
    return Audit(
        n_pruned=len(pruned), n_audited=len(ended),
        n_false=sum(results.better(t.score, middle) for t in ended if t.score is not None),
        n_top=sum(results.better(t.score, best[-1]) for t in ended if t.score is not None),
        n_saved=sum(max(0, epochs - t.n_epochs) for t in pruned),
        n_spent=int(audits.n_epochs), warmup=warmup,
        rules=_rules(results, ended, int(settings.get("prune_startup") or 0), epochs)
        if settings.get("pruner") in _REPLAYED and ended else ())


def _rules(
    results: Results, audited: Sequence[Trial], n_startup: int, epochs: int
) -> tuple[Rule, ...]:
    """Return what the pruner's rule would have done with each warm-up.

    The trials are those that ran to their end and those audited, which stand for as many pruned
    ones as they were drawn from: each counts by that.
    """
    search = results.phase("search")
    n_pruned = sum(t.state == "PRUNED" and t.kind != "diverged" for t in search.trials)
    of = {int(t.attrs.get("audit_of", -1)): t for t in audited}
    weight = n_pruned / len(of) if of else 1.0
    whole = []
    for trial in search.by_end():
        curve = of[trial.number] if trial.number in of else trial
        if curve.score is not None:
            whole.append((curve, weight if trial.number in of else 1.0))
    if len(whole) <= n_startup + 1:
        return ()
    sign, start = 1.0 if results.maximize else -1.0, max(1, n_startup)
    if results.settings.get("pruner") == "median":
        return tuple(_replayed(results, whole, n, _Median(n, sign, start), epochs)
                     for n in range(epochs))
    # Another warm-up is another rule only where it leaves out a rung.
    used = int(results.settings.get("prune_warmup") or 0)
    return tuple(_replayed(results, whole, n, _Rungs(rungs_of(epochs, n), sign, start), epochs)
                 for n in sorted({0, *rungs_of(epochs), used}))


class _Median:
    """The median rule: the bar at each epoch is that of the trials that ended whole."""

    def __init__(self, warmup: int, sign: float, n_startup: int) -> None:
        self._warmup, self._sign, self._n_startup = warmup, sign, n_startup
        # Of the trials that ended whole: how many, and their values at each epoch in order.
        self._n_known, self._known = 0, defaultdict[int, list[float]](list)

    def cut(self, curve: _Curve) -> int | None:
        """Return the epoch at which it prunes a trial."""
        best = -math.inf
        for epoch, value in sorted(curve.items()):
            best = max(best, self._sign * value) if math.isfinite(value) else best
            at = self._known[epoch]
            if epoch >= self._warmup and min(self._n_known, len(at)) >= self._n_startup and (
                    best < (at[(len(at) - 1) // 2] + at[len(at) // 2]) / 2):
                return epoch
        return None

    def add(self, curve: _Curve, cut: int | None) -> None:
        """Take in a trial that has ended."""
        if cut is None:
            self._n_known += 1
            for epoch, value in curve.items():
                if math.isfinite(value):
                    insort(self._known[epoch], self._sign * value)


class _Rungs:
    """The rule of the pruner `rungs`: the better half of all that came as far goes on."""

    def __init__(self, rungs: Sequence[int], sign: float, n_startup: int) -> None:
        self._rungs, self._sign, self._n_startup = rungs, sign, n_startup
        self._marks: list[list[float]] = [[] for _ in rungs]

    def cut(self, curve: _Curve) -> int | None:
        """Return the epoch at which it prunes a trial."""
        mine = marks(curve, self._rungs, self._sign, pruned=True)
        for rung, mark, others in zip(self._rungs, mine, self._marks, strict=False):
            n_better = len(others) - bisect_right(others, mark)
            if len(others) >= self._n_startup and not goes_on(n_better, len(others)):
                return min(epoch for epoch in curve if epoch >= rung - 1)
        return None

    def add(self, curve: _Curve, cut: int | None) -> None:
        """Take in a trial that has ended."""
        seen = {e: v for e, v in curve.items() if cut is None or e <= cut}
        for known, mark in zip(self._marks, marks(seen, self._rungs, self._sign,
                                                  pruned=cut is not None), strict=False):
            insort(known, mark)


def _replayed(
    results: Results, whole: Sequence[tuple[Trial, float]], warmup: int, rule: _Median | _Rungs,
    epochs: int,
) -> Rule:
    """Go through whole trials in their order and prune as a rule does."""
    survivors: list[float] = []
    pruned: list[tuple[float, float]] = []
    saved = 0.0
    for trial, weight in whole:
        assert trial.score is not None
        curve = dict(trial.curve)
        cut = rule.cut(curve)
        # At the last epoch nothing is left to save.
        cut = None if cut == epochs - 1 else cut
        rule.add(curve, cut)
        if cut is None:
            survivors.append(trial.score)
        else:
            pruned.append((trial.score, weight))
            saved += weight * (epochs - 1 - cut)
    n_all, middle = sum(weight for _, weight in whole), statistics.median(survivors)
    return Rule(warmup, round(n_all), round(sum(weight for _, weight in pruned)),
                round(sum(weight for end, weight in pruned if results.better(end, middle))),
                saved / (n_all * epochs))


def sentence(found: Audit) -> str:
    """Return what the audit says, in one or two plain sentences."""
    n = found.n_pruned
    said = (f"Pruning ended {n} trial{'s' if n != 1 else ''} early and saved {found.n_saved} "
            f"epochs")
    if not found.n_audited:
        return f"{said}; none of them was drawn for the audit (--audit-fraction)."
    assert found.interval is not None
    low, high = found.interval
    spent = f"{found.n_spent} epoch{'s' if found.n_spent != 1 else ''}"
    said += (f"; {found.n_audited} of them {'were' if found.n_audited != 1 else 'was'} trained to "
             f"the end ({spent}), and {found.n_false} would have ended better than the median of "
             f"the COMPLETE ones: {low:.0%} to {high:.0%} of all prunes, with 95 % confidence")
    if found.n_top:
        said += f"; {found.n_top} would have been among the best"
    better = found.better
    if better is not None and better.saved_fraction < _LITTLE:
        said += (f". On these trials no --prune-warmup would have saved anything with at most "
                 f"{HARMLESS:.0%} false prunes: --pruner none would have lost little")
    elif better is not None:
        said += (f". On these trials --prune-warmup {better.warmup} would have saved "
                 f"{better.saved_fraction:.0%} of the epochs with {better.false_fraction:.0%} "
                 f"false prunes")
    return said + "."
