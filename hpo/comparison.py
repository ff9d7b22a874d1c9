"""The search against each baseline, in numbers: on fresh seeds, and at equal epochs.

Only scores of fresh seeds are compared, seed by seed. A difference counts when a t-test of the
pairs puts it outside the noise of the seeds, with p corrected for all that was compared, chosen
and looked at; everything else is within it, however good it looks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpo.paired import ALPHA, Difference, differences, holm, seeds_to_show, shared
from hpo.progress import at_equal_epochs, epochs_to_pass, epochs_to_reach
from hpo.race import level
from hpo.results import ON_REQUEST, SOURCES, Candidate, Results, Scores

LABELS = {"search": "search", "grid": "grid", "random": "random", "lr-range": "LR range",
          "default": "defaults"}


@dataclass(frozen=True)
class Row:
    """One line of the end table; scores are None where nothing was confirmed.

    `n_epochs` is what finding it cost; confirming it is not in there. The last three are of a
    baseline: the epochs after which the search's best equalled or passed its best value, and
    passed it, and the search's best value once it had spent as many epochs as the baseline.
    """

    source: str
    candidate: str | None
    trial: int | None
    params: Mapping[str, Any]
    val: Scores | None
    test: Scores | None
    n_trials: int
    n_epochs: float
    reached_after: float | None = None
    passed_after: float | None = None
    search_at_equal_epochs: float | None = None

    @property
    def label(self) -> str:
        return LABELS[self.source]


@dataclass(frozen=True)
class Comparison:
    """Search minus one baseline over the seeds both have, turned so that above zero is better.

    `p` is None for a single seed: then nothing is known of the noise. It, and `low` and `high`,
    which bound the difference with 95 % confidence, are of this comparison taken alone;
    `p_corrected` allows for the other baselines, for `n_choices` where these same scores chose the
    search's best among so many, and for each of `n_rounds` after which the race might have ended.
    `sd` is the noise of one seed's difference. `grain` is the step between scores where they
    differ by less than that, and it stands for their noise.
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
    n_rounds: int = 1
    sd: float | None = None
    grain: float | None = None

    @property
    def outcome(self) -> str:
        """`better`, `worse`, `equal`, `noise`, or `unknown` for a single seed."""
        if self.p_corrected is None:
            return "unknown" if self.difference else "equal"
        if self.p_corrected < ALPHA and self.difference:
            return "better" if self.difference > 0 else "worse"
        return "noise" if self.difference else "equal"

    @property
    def n_seeds_to_show(self) -> int | None:
        """How many seeds would show a true difference of this size; None where it is not known.

        At 5 % two-sided, this comparison alone, with a power of 80 %.
        """
        if self.outcome != "noise" or not self.sd:
            return None
        return seeds_to_show(self.difference, self.sd)


def summary(results: Results) -> list[Row]:
    """Return one row for each source, in their order; one on request only where it was run."""
    return [_row(results, source) for source in SOURCES
            if source not in ON_REQUEST or results.phases.get(source)]


def _row(results: Results, source: str) -> Row:
    candidate = results.candidate(source)
    phase = results.phase(source)
    best = results.best(source)
    trial = candidate.source_trial if candidate else best.number if best else None
    bar = source not in ("search", "default")
    return Row(
        source=source, candidate=candidate.name if candidate else None, trial=trial,
        params=candidate.params if candidate else best.params if best else {},
        val=candidate.val if candidate else None, test=candidate.test if candidate else None,
        n_trials=phase.n_trials, n_epochs=phase.n_epochs,
        reached_after=epochs_to_reach(results, source) if bar else None,
        passed_after=epochs_to_pass(results, source) if bar else None,
        search_at_equal_epochs=at_equal_epochs(results, source) if bar else None,
    )


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
    on_test = on_test_split(results)
    scored = {c.name: s for c in results.candidates if (s := c.test if on_test else c.val)}
    ours = scored[search.name].by_seed
    metric = results.test_metric if on_test else results.metric
    pairs = {name: shared(ours, other.by_seed) for name, other in scored.items()
             if name != search.name}
    found = differences(pairs, results.grain(metric))
    baselines = [c for source in SOURCES[1:] if (c := results.candidate(source))]
    made = [_comparison(results, c, metric, scored[search.name], scored[c.name], found[c.name])
            for c in baselines if c.name in found]
    n_confirmed = sum(c.source == "search" and c.val is not None for c in results.candidates)
    return _corrected(made, 1 if on_test else n_confirmed,
                      max(c.n_rounds for c in results.candidates))


def _comparison(
    results: Results, theirs: Candidate, metric: str, a: Scores, b: Scores, found: Difference,
) -> Comparison:
    sign = 1.0 if results.maximize else -1.0
    seeds = a.by_seed.keys() & b.by_seed.keys()
    sums = [math.fsum(one.by_seed[seed] for seed in seeds) for one in (a, b)]
    # The same scores in another order have means that differ by rounding.
    same = math.isclose(*sums, rel_tol=1e-12)
    difference = 0.0 if same else sign * found.mean
    half = found.half_width
    grain = results.grain(metric)
    coarse = max(a.sd or 0.0, b.sd or 0.0) < grain
    return Comparison(
        theirs.source, metric, difference, found.n, 1.0 if same and found.p is not None
        else found.p, None if found.p is None else difference - half,
        None if found.p is None else difference + half, sd=found.sd,
        grain=grain if coarse else None,
    )


def _corrected(found: list[Comparison], n_choices: int, n_rounds: int) -> list[Comparison]:
    # Held against 0.05 afterwards, as every p is.
    factor = n_choices * ALPHA / level(n_rounds)
    corrected = iter(holm([min(1.0, c.p * factor) for c in found if c.p is not None]))
    return [replace(c, n_choices=n_choices, n_rounds=n_rounds,
                    p_corrected=None if c.p is None else next(corrected)) for c in found]


def on_test_split(results: Results) -> bool:
    """Return whether test scores are compared: all that was confirmed has them on every seed."""
    found = [c for source in SOURCES if (c := results.candidate(source))]
    return bool(found) and all(map(tested, found))


def tested(candidate: Candidate) -> bool:
    """Return whether a candidate has a test score on every seed it was confirmed on."""
    return (candidate.test is not None and candidate.val is not None
            and candidate.test.n >= candidate.val.n)
