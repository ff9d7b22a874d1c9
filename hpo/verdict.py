"""Whether the tuning was worth it: search against each baseline, in numbers and in one sentence.

Only scores of fresh seeds are compared. A difference counts when Welch's t-test puts it outside
the noise of the seeds, with p corrected for all that was compared and chosen; everything else is
said to be within it, however good it looks.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpo.results import ON_REQUEST, SOURCES, Candidate, Results, Scores, best_so_far

LABELS = {"search": "search", "grid": "grid", "random": "random", "lr-range": "LR range",
          "default": "defaults"}
_NAMES = {"grid": "the grid", "random": "random search", "lr-range": "the LR-range pick",
          "default": "the defaults"}
# Two-sided; the usual 95 % interval of a difference then leaves out zero.
_ALPHA = 0.05


@dataclass(frozen=True)
class Row:
    """One line of the end table; scores are None where nothing was confirmed.

    `n_epochs` is what finding it cost; confirming it is not in there. The last two are the epochs
    after which the search's best equalled or passed, and passed, the grid's best value.
    """

    source: str
    candidate: str | None
    trial: int | None
    params: Mapping[str, Any]
    val: Scores | None
    test: Scores | None
    n_trials: int
    n_epochs: float
    reached_grid_after: float | None = None
    passed_grid_after: float | None = None

    @property
    def label(self) -> str:
        return LABELS[self.source]


@dataclass(frozen=True)
class Comparison:
    """Search minus one baseline, turned so that above zero is better.

    `p` is None where one of the two has a single seed: then nothing is known of the noise. It,
    and `low` and `high`, which bound the difference with 95 % confidence, are of this comparison
    taken alone; `p_corrected` allows for the other baselines, and for `n_choices` where these
    same scores chose the search's best among so many. `grain` is the step between scores where
    the seeds differ by less than that, and it stands for their noise.
    """

    source: str
    metric: str
    difference: float
    n_seeds: int
    p: float | None = None
    low: float | None = None
    high: float | None = None
    p_corrected: float | None = None
    n_choices: int = 1
    grain: float | None = None

    @property
    def outcome(self) -> str:
        """`better`, `worse`, `equal`, `noise`, or `unknown` for a single seed."""
        if self.p_corrected is None:
            return "unknown" if self.difference else "equal"
        if self.p_corrected < _ALPHA and self.difference:
            return "better" if self.difference > 0 else "worse"
        return "noise" if self.difference else "equal"


def summary(results: Results) -> list[Row]:
    """Return one row for each source, in their order; one on request only where it was run."""
    return [_row(results, source) for source in SOURCES
            if source not in ON_REQUEST or results.phases.get(source)]


def _row(results: Results, source: str) -> Row:
    candidate = results.candidate(source)
    phase = results.phase(source)
    best = results.best(source)
    trial = candidate.source_trial if candidate else best.number if best else None
    ours = source == "search"
    return Row(
        source=source, candidate=candidate.name if candidate else None, trial=trial,
        params=candidate.params if candidate else best.params if best else {},
        val=candidate.val if candidate else None, test=candidate.test if candidate else None,
        n_trials=phase.n_trials, n_epochs=phase.n_epochs,
        reached_grid_after=epochs_to_reach(results, "grid") if ours else None,
        passed_grid_after=epochs_to_pass(results, "grid") if ours else None,
    )


def epochs_to_pass(results: Results, baseline: str, phase: str = "search") -> float | None:
    """Return the epochs a phase spent until its best value passed a baseline's best, or None."""
    bar = results.best(baseline)
    return next((spent for spent, value in best_so_far(results, phase)
                 if bar and results.better(value, bar.score)), None)


def epochs_to_reach(results: Results, baseline: str, phase: str = "search") -> float | None:
    """Return the epochs a phase spent until a baseline's best was equalled or passed, or None."""
    bar = results.best(baseline)
    return next((spent for spent, value in best_so_far(results, phase)
                 if bar and (results.better(value, bar.score) or value == bar.score)), None)


def compare(results: Results) -> list[Comparison]:
    """Compare the search's best confirmed candidate with each confirmed baseline.

    Test scores are compared where all have them on every seed they were confirmed on, else the
    validation scores of those seeds. The latter have also chosen the best candidate, so that each
    p is multiplied by how many there were to choose from (Bonferroni); then Holm's correction for
    several baselines. Test scores chose nothing: even at a correlation of 0.8 with the validation
    scores that did, three candidates make no more than 5 % of false claims.
    """
    search = results.candidate("search")
    if search is None:
        return []
    found = {source: results.candidate(source) for source in SOURCES[1:]}
    baselines = {source: candidate for source, candidate in found.items() if candidate}
    on_test = on_test_split(results)
    n_confirmed = sum(c.source == "search" and c.val is not None for c in results.candidates)
    return _corrected([_compare(results, source, search, baseline, on_test)
                       for source, baseline in baselines.items()], 1 if on_test else n_confirmed)


def _compare(
    results: Results, source: str, ours: Candidate, theirs: Candidate, on_test: bool
) -> Comparison:
    a, b = (ours.test, theirs.test) if on_test else (ours.val, theirs.val)
    assert a is not None and b is not None
    sign = 1.0 if results.maximize else -1.0
    # The same scores in another order have means that differ by rounding.
    same = math.isclose(a.mean, b.mean, rel_tol=1e-12)
    difference = 0.0 if same else sign * (a.mean - b.mean)
    metric = results.test_metric if on_test else results.metric
    grain = results.grain(metric)
    p, half = welch(list(a.by_seed.values()), list(b.by_seed.values()), grain)
    coarse = max(a.sd or 0.0, b.sd or 0.0) < grain
    return Comparison(
        source, metric, difference, min(a.n, b.n), p,
        None if half is None else difference - half, None if half is None else difference + half,
        grain=grain if coarse else None,
    )


def _corrected(found: list[Comparison], n_choices: int) -> list[Comparison]:
    corrected = iter(holm([min(1.0, c.p * n_choices) for c in found if c.p is not None]))
    return [replace(c, n_choices=n_choices,
                    p_corrected=None if c.p is None else next(corrected)) for c in found]


def holm(ps: Sequence[float]) -> list[float]:
    """Return each p corrected for all of them: below 0.05 by chance in 5 % of such sets at most.

    Source: Holm 1979, A simple sequentially rejective multiple test procedure.
    """
    order = sorted(range(len(ps)), key=ps.__getitem__)
    corrected, largest = [0.0] * len(ps), 0.0
    for n_before, i in enumerate(order):
        largest = max(largest, min(1.0, ps[i] * (len(ps) - n_before)))
        corrected[i] = largest
    return corrected


def on_test_split(results: Results) -> bool:
    """Return whether test scores are compared: all that was confirmed has them on every seed."""
    found = [c for source in SOURCES if (c := results.candidate(source))]
    return bool(found) and all(map(_tested, found))


def _tested(candidate: Candidate) -> bool:
    return (candidate.test is not None and candidate.val is not None
            and candidate.test.n >= candidate.val.n)


def welch(
    a: Sequence[float], b: Sequence[float], grain: float = 0.0
) -> tuple[float | None, float | None]:
    """Return Welch's two-sided p and half the width of the 95 % interval of mean(a) - mean(b).

    Values that come in steps of `grain` hide noise below one step: no sd counts as less than that.

    Returns: (None, None) where either has a single value. Equal values throughout carry no noise
    where there is no grain: p is then 0 for different means and 1 for equal ones.

    Source: Welch 1947, with the Welch-Satterthwaite degrees of freedom.
    """
    if len(a) < 2 or len(b) < 2:
        return None, None
    mean_a, mean_b = math.fsum(a) / len(a), math.fsum(b) / len(b)
    va, vb = (max(math.fsum((x - m) ** 2 for x in xs) / (len(xs) - 1), grain**2) / len(xs)
              for xs, m in ((a, mean_a), (b, mean_b)))
    # Means of equal floats differ from them by rounding; that is no noise.
    if va + vb <= (1e-12 * max(abs(mean_a), abs(mean_b))) ** 2:
        same = math.isclose(mean_a, mean_b, rel_tol=1e-12)
        return (1.0 if same else 0.0), 0.0
    from scipy.special import stdtr, stdtrit

    df = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    error = math.sqrt(va + vb)
    p = 2.0 * float(stdtr(df, -abs(mean_a - mean_b) / error))
    return p, float(stdtrit(df, 1 - _ALPHA / 2)) * error


def verdict(results: Results) -> str:
    """Return one or two plain sentences that are true for these numbers."""
    if results.best("search") is None and results.candidate("search") is None:
        return _without_result(results)
    if results.candidate("search") is None:
        return _unconfirmed(results)
    found = compare(results)
    if not found:
        return f"{_scored(results)} No baseline was confirmed, so nothing says yet whether the " \
               f"search was worth it."
    return " ".join(filter(None, (_headline(results, found), _cost(results),
                                 _missing(results, found))))


def _without_result(results: Results) -> str:
    states = results.phase("search").states()
    if not states:
        return "No search trial has run yet, so there is no result."
    counts = ", ".join(f"{state}: {n}" for state, n in states.items())
    return f"No search trial ended COMPLETE ({counts}), so there is no result.{_why(results)}"


def _why(results: Results) -> str:
    """Name the commonest reason, in the words of its last trial."""
    ended = [t for t in results.phase("search").trials if t.reason]
    if not ended:
        return ""
    (state, kind), n = next(iter(results.phase("search").reasons().items()))
    last = [t for t in ended if (t.state, t.kind) == (state, kind)][-1]
    return f" The commonest reason, {n} of {len(ended)}: {last.reason}"


def _unconfirmed(results: Results) -> str:
    confirm = results.phase("confirm")
    best = results.best("search")
    assert best is not None
    said = f"The search's best, trial {best.number}, "
    if any(c.source == "search" for c in results.candidates):
        states = ", ".join(f"{s}: {n}" for s, n in confirm.states().items())
        return said + f"has no COMPLETE confirmation on fresh seeds ({states}), so there is no " \
                      f"result to trust yet."
    return said + "was not confirmed on fresh seeds, so its score flatters it by an unknown " \
                  "amount and there is no result to trust yet: run the phase confirm."


def _scored(results: Results) -> str:
    best = results.candidate("search")
    assert best is not None and best.val is not None
    scores, metric = ((best.test, results.test_metric) if best.test and _tested(best)
                      else (best.val, results.metric))
    return (f"The search's best, {origin(best)}, has a {metric} of {number(scores.mean)} "
            f"({_seeds(scores.n)}).")


def origin(candidate: Candidate) -> str:
    """Return which trial a candidate's params are from: `trial 5 (rank 1)` of the search."""
    if candidate.source_trial is None:
        return LABELS[candidate.source]
    rank = candidate.name.partition("#")[2]
    return f"trial {candidate.source_trial}" + (f" (rank {rank})" if rank else "")


def _headline(results: Results, found: list[Comparison]) -> str:
    by = {outcome: [c for c in found if c.outcome == outcome]
          for outcome in ("better", "worse", "noise", "equal", "unknown")}
    clauses = []
    if by["better"]:
        clauses.append(f"is clearly better than {_each(by['better'])}")
    if by["worse"]:
        clauses.append(f"is clearly worse than {_each(by['worse'])}")
    if by["noise"]:
        n = min(c.n_seeds for c in by["noise"])
        clauses.append(f"differs from {_each(by['noise'], signed=True)} by no more than the noise "
                       f"of {_seeds(n)}{_coarse(by['noise'])}")
    if by["equal"]:
        clauses.append(f"scores the same as {_listed([_NAMES[c.source] for c in by['equal']])}")
    if by["unknown"]:
        clauses.append(f"differs from {_each(by['unknown'], signed=True)}, with one seed too few "
                       f"to tell that from noise")
    n = found[0].n_choices
    chosen = f", chosen among {n} by these same scores," if n > 1 else ""
    return (f"{_opening(found)}: on {found[0].metric} its best{chosen} "
            f"{_listed(clauses, '; it ')}.")


def _coarse(found: list[Comparison]) -> str:
    grains = [c.grain for c in found if c.grain]
    return f", on scores no finer than {number(max(grains))}" if grains else ""


def _opening(found: list[Comparison]) -> str:
    outcomes = {c.outcome for c in found}
    if outcomes == {"better"}:
        return "The search won"
    if "worse" in outcomes:
        return "The search lost"
    if "better" in outcomes:
        return "The search won in part"
    if outcomes == {"unknown"}:
        return "Not decided"
    return "No difference that these seeds can show"


def _each(found: list[Comparison], *, signed: bool = False) -> str:
    return _listed([f"{_NAMES[c.source]} ({_change(c, signed)})" for c in found])


def _change(comparison: Comparison, signed: bool) -> str:
    size = number(abs(comparison.difference))
    if not signed:
        return f"by {size}"
    return f"{size} {'better' if comparison.difference > 0 else 'worse'}"


def _cost(results: Results) -> str:
    grid, search = results.phase("grid"), results.phase("search")
    if results.best("grid") is None:
        return ""
    after, passed = epochs_to_reach(results, "grid"), epochs_to_pass(results, "grid")
    bar, spent = "the grid's best validation score", count(grid.n_epochs)
    if after is None:
        return f"Its {count(search.n_epochs)} epochs never reached {bar}; the grid spent {spent}."
    if passed is not None:
        return (f"It passed {bar} after {count(passed)} of {count(search.n_epochs)} epochs; the "
                f"grid spent {spent}.")
    best = results.best("grid")
    top = best is not None and best.score == results.highest
    return (f"It reached {bar} after {count(after)} of {count(search.n_epochs)} epochs"
            f"{', and none is higher' if top else ' and did not pass it'}; the grid spent "
            f"{spent}.")


def _missing(results: Results, found: list[Comparison]) -> str:
    missing = [row.source for row in summary(results)[1:]
               if row.source not in {c.source for c in found}]
    said = []
    if "lr-range" in missing and results.no_pick:
        missing.remove("lr-range")
        said.append("The LR range test found no learning rate to pick.")
    if missing:
        said.append(f"Not compared, for want of confirmed scores: "
                    f"{_listed([_NAMES[s] for s in missing])}.")
    return " ".join(said)


def _listed(parts: list[str], last: str = " and ") -> str:
    if last != " and ":
        return last.join(parts)
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + last + parts[-1]


def _seeds(n: int) -> str:
    return "one seed" if n == 1 else f"{n} seeds"


def number(value: float) -> str:
    """Return a score for reading: four decimals, or three digits where those would be lost."""
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.4f}"
    return f"{value:.3g}"


def score(mean: float, sd: float | None) -> str:
    """Return a mean for reading, with its standard deviation where there is one."""
    return number(mean) + ("" if sd is None else f" ± {number(sd)}")


def wrapped(text: str, width: int | None) -> str:
    """Return text in lines of at most `width`, broken between words; as it is without a width."""
    if width is None:
        return text
    return "\n".join(textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
                     for line in text.splitlines())


def count(epochs: float) -> str:
    """Return epochs for reading; a sweep may spend a part of one."""
    return f"{epochs:.1f}".removesuffix(".0")
