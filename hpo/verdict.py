"""Whether the tuning was worth it, in one plain sentence that is true for the study's numbers."""

from __future__ import annotations

import textwrap

from hpo.comparison import LABELS, Comparison, compare, on_test_split, summary, tested
from hpo.paired import MOST_SEEDS
from hpo.progress import at_equal_epochs, epochs_to_pass, epochs_to_reach
from hpo.race import seed_sd
from hpo.results import Candidate, Results

__all__ = ["LABELS", "compare", "count", "flattery", "number", "on_test_split", "origin", "score",
           "signed", "summary", "verdict", "worth", "wrapped"]

NAMES = {"grid": "the grid", "random": "random search", "lr-range": "the LR-range pick",
         "default": "the defaults"}


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
    return " ".join(filter(None, (_headline(results, found), _flattered(results), _cost(results),
                                 _readings(results), _missing(results, found))))


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
    scores, metric = ((best.test, results.test_metric) if best.test and tested(best)
                      else (best.val, results.metric))
    return (f"The search's best, {origin(best)}, has a {metric} of {number(scores.mean)} "
            f"({_seeds(scores.n)}).")


def origin(candidate: Candidate) -> str:
    """Return which trial a candidate's params are from: `trial 5 (rank 1)` of the search."""
    if candidate.source_trial is None:
        return LABELS[candidate.source]
    rank = candidate.name.partition("#")[2]
    return f"trial {candidate.source_trial}" + (f" (rank {rank})" if rank else "")


def worth(results: Results) -> bool | None:
    """Return whether the search was worth it, or None where nothing says so.

    It was where its best is clearly better than the defaults (than each baseline that there is,
    where a module gives none) and clearly worse than no baseline.
    """
    found = compare(results)
    if not found or all(c.outcome == "unknown" for c in found):
        return None
    bars = [c for c in found if c.source == "default"] or found
    return (all(c.outcome == "better" for c in bars)
            and not any(c.outcome == "worse" for c in found))


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
        clauses.append(f"differs from {_each(by['noise'], len(found))} by no more than the noise "
                       f"of {_seeds(n)}{_coarse(by['noise'])}")
    if by["equal"]:
        clauses.append(f"scores the same as {_listed([NAMES[c.source] for c in by['equal']])}")
    if by["unknown"]:
        clauses.append(f"differs from {_each(by['unknown'], len(found))}, with one seed too few "
                       f"to tell that from noise")
    n = found[0].n_choices
    chosen = f", chosen among {n} by these same scores," if n > 1 else ""
    return (f"{_opening(results, found)}: on {found[0].metric} its best{chosen} "
            f"{_listed(clauses, '; it ')}.{_more_seeds(results, by['noise'])}")


def _coarse(found: list[Comparison]) -> str:
    grains = [c.grain for c in found if c.grain]
    return f", on scores no finer than {number(max(grains))}" if grains else ""


def _more_seeds(results: Results, noise: list[Comparison]) -> str:
    """Say how many seeds it would take to tell the nearest call, and whether that could matter."""
    closest = max(noise, key=lambda c: abs(c.difference) / (c.sd or 1.0), default=None)
    if closest is None or not closest.sd:
        return ""
    n = closest.n_seeds_to_show
    size = number(abs(closest.difference))
    said = (f"more than {MOST_SEEDS:,}" if n is None else f"about {max(n, closest.n_seeds + 1):,}")
    return (f" To show a difference of {size}, that to {NAMES[closest.source]}, would take {said} "
            f"seeds{_unnoticed(results, closest)}.")


def _unnoticed(results: Results, one: Comparison) -> str:
    split = {c.name: s.by_seed for c in results.candidates
             if (s := c.test if one.metric == results.test_metric else c.val)}
    noise = seed_sd(split)
    return (f"; it is less than the {number(noise)} by which one training differs from the next"
            if abs(one.difference) < noise else "")


def _opening(results: Results, found: list[Comparison]) -> str:
    outcomes = {c.outcome for c in found}
    if outcomes == {"unknown"}:
        return "Not decided"
    if outcomes == {"better"}:
        said = "The search won"
    elif "worse" in outcomes:
        said = "The search lost"
    elif "better" in outcomes:
        said = "The search won in part"
    else:
        said = "No difference that these seeds can show"
    return f"{'Worth it' if worth(results) else 'Not worth it'}. {said}"


def _each(found: list[Comparison], n_compared: int = 0) -> str:
    return _listed([f"{NAMES[c.source]} ({_change(c, n_compared)})" for c in found])


def _change(comparison: Comparison, n_compared: int) -> str:
    """Return the size of a difference with half its interval.

    Where nothing else says so (`n_compared` is given), also its turn, and why it counts as noise
    although its interval, which is of this comparison alone, leaves out zero.
    """
    size = number(abs(comparison.difference))
    if comparison.low is not None and comparison.high is not None:
        size += f" ± {number((comparison.high - comparison.low) / 2)}"
    if not n_compared:
        return f"by {size}"
    low, high, n = comparison.low, comparison.high, n_compared * comparison.n_choices
    alone = low is not None and high is not None and not low <= 0 <= high
    chance = f", which among {n} comparisons may be chance" if alone and n > 1 else ""
    return f"{size} {'better' if comparison.difference > 0 else 'worse'}{chance}"


def flattery(results: Results) -> tuple[float, float] | None:
    """Return the search's own score of its confirmed best, and by how much it promised too much.

    The latter is above zero where fresh seeds gave less: the winner's curse, for which the best of
    many noisy scores is chosen.
    """
    best = results.candidate("search")
    own = next((t.score for t in results.phase("search").trials
                if best and t.number == best.source_trial), None)
    if best is None or best.val is None or own is None:
        return None
    return own, (own - best.val.mean) * (1.0 if results.maximize else -1.0)


def _flattered(results: Results) -> str:
    found = flattery(results)
    if found is None:
        return ""
    own, more = found
    metric = results.metric
    if not more:
        return f"Fresh seeds gave it the very {metric} that the search had, {number(own)}."
    return (f"The search had given it a {metric} of {number(own)}, {number(abs(more))} "
            f"{'better' if more > 0 else 'worse'} than fresh seeds did"
            f"{': the winner' + chr(39) + 's curse' if more > 0 else ''}.")


def _readings(results: Results) -> str:
    """Say where the test split was read before: then it is no longer fresh."""
    n = max((c.n_readings for c in results.candidates), default=0)
    return (f"The test split was read by {n} confirmations of this study: whoever went on with "
            f"the study after the first may have done so with it in sight." if n > 1 else "")


def _cost(results: Results) -> str:
    return " ".join(filter(None, (_cost_against(results, "grid"),
                                  _cost_against(results, "random"))))


def _cost_against(results: Results, baseline: str) -> str:
    theirs, search, best = results.phase(baseline), results.phase("search"), results.best(baseline)
    if best is None or best.score is None:
        return ""
    after, passed = epochs_to_reach(results, baseline), epochs_to_pass(results, baseline)
    bar = f"{NAMES[baseline]}'s best validation score"
    n, spent = count(search.n_epochs), count(theirs.n_epochs)
    stood = at_equal_epochs(results, baseline)
    there = (f"{NAMES[baseline]} spent {spent}" + (f", and by then the search stood at "
             f"{number(stood)} against {number(best.score)}" if stood is not None else ""))
    if after is None:
        return f"Its {n} epochs never reached {bar}; {there}."
    if passed is not None:
        return f"It passed {bar} after {count(passed)} of {n} epochs; {there}."
    top = best.score == results.highest
    return (f"It reached {bar} after {count(after)} of {n} epochs"
            f"{', and none is higher' if top else ' and did not pass it'}; {there}.")


def _missing(results: Results, found: list[Comparison]) -> str:
    missing = [row.source for row in summary(results)[1:]
               if row.source not in {c.source for c in found}]
    said = []
    if "lr-range" in missing and results.no_pick:
        missing.remove("lr-range")
        said.append("The LR range test found no learning rate to pick.")
    if missing:
        said.append(f"Not compared, for want of confirmed scores: "
                    f"{_listed([NAMES[s] for s in missing])}.")
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


def signed(value: float) -> str:
    """Return a difference for reading, with its sign."""
    return ("+" if value > 0 else "-" if value < 0 else "") + number(abs(value))


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
