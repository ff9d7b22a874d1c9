"""What a report says, section by section, in the order in which a reader asks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hpo import bounds
from hpo.audit import audit, sentence
from hpo.end_table import rows_with_head
from hpo.importance import about, importance
from hpo.progress import has_band
from hpo.range_tested import tested_param
from hpo.report.blocks import Block, Picture, Section, Table, Text, value
from hpo.report.cost import costs, endings
from hpo.report.origin import Source, made_with, repeat
from hpo.results import Results
from hpo.space import space_from_json
from hpo.verdict import number, origin, summary

_N_BEST = 5
_ABOUT = {
    "progress.png": ("Best so far", "Best validation score over the epochs spent by each phase",
                     "no trial is COMPLETE yet"),
    "curves.png": ("Learning curves", "Validation score of each trial over its epochs",
                   "no trial has reported an epoch yet"),
    "lr_range.png": ("LR range test", "Training loss over the learning rate, with the pick",
                     "there was no LR range test"),
    "importance.png": ("Importance of the params", "Share of each param in the search's result",
                       "not enough data"),
    "params.png": ("Params and scores", "Each trial as a line through its params to its score",
                   "fewer than two trials of the search are COMPLETE, or no param varied"),
}


def sections(
    results: Results, source: Source | None = None, found: Mapping[str, Any] | None = None
) -> list[Section]:
    """Return all that a report says below its verdict.

    `source` is the module's file, `found` what `importance` says, where that is known already.
    """
    found = importance(results) if found is None else found
    return [
        Section("Result", [Table(*rows_with_head(results), n_left=2), Text(_reading(results))]),
        *_params(results), *_pictures(results, found), *_best_trials(results), *_pruning(results),
        *endings(results), *costs(results), *made_with(results), *repeat(results, source),
    ]


def _reading(results: Results) -> str:
    better = "More" if results.maximize else "Less"
    tested = "; the test split was read for these alone" \
        if any(c.test for c in results.candidates) else ""
    return (f"{better} is better. Scores are mean ± sd over fresh seeds, each a training of its "
            f"own{tested}. Epochs are those spent on finding the params, pruned and failed trials "
            f"included; confirming is counted below. The search passed a baseline after as many "
            f"epochs as stand in its row. The last column is the search's mean minus the "
            f"baseline's, turned so that above zero is better, over the seeds that both were "
            f"trained on, with its 95 % interval.{_chosen(results)}{_sampling(results)}")


def _chosen(results: Results) -> str:
    """Say which of the search's trials its row is of, where several were confirmed."""
    found = results.candidate("search")
    n = sum(c.source == "search" and c.val is not None for c in results.candidates)
    if found is None or n < 2:
        return ""
    return (f" The search's row is of its {origin(found)}: by their own one seed the trials were "
            f"ranked, by their mean over fresh seeds one of {n} was chosen.")


def _sampling(results: Results) -> str:
    """Say how far an accuracy is from the truth for want of images, which no seed shows."""
    found = results.candidate("search")
    for split, metric, scores in (("test", results.test_metric, found and found.test),
                                  ("validation", results.metric, found and found.val)):
        n = results.n_images(metric)
        if scores and n:
            # Laplace's rule: all images right does not mean that the next one will be.
            p = (scores.mean * n + 1) / (n + 2)
            return (f" The {split} split has {n} images: as a sample of all there could be, it "
                    f"tells the search's accuracy to about ±{number(math.sqrt(p * (1 - p) / n))} "
                    f"(one standard error). No number of seeds shows that error or makes it "
                    f"smaller, so neither the sd nor the verdict has it in.")
    return ""


def _params(results: Results) -> list[Section]:
    rows = [row for row in summary(results) if row.params]
    names = list(dict.fromkeys(name for row in rows for name in row.params))
    cells = [[row.label, *(value(row.params.get(name, "")) for name in names)] for row in rows]
    if not names:
        return []
    warned = bounds.warning(results)
    return [Section("Params", [Table(["", *names], cells), *([Text(warned)] if warned else [])])]


def _pictures(results: Results, found: Mapping[str, Any]) -> list[Section]:
    told = {"importance.png": [Text(about(results))] if found["importance"] else [],
            "progress.png": _bands(results), "lr_range.png": _range_tested(results)}
    why = {"importance.png": found.get("why")}
    return [Section(title, [Picture(name, alt, why.get(name) or missing), *told.get(name, [])])
            for name, (title, alt, missing) in _ABOUT.items()]


def _bands(results: Results) -> list[Text]:
    """Say what the bands of the baselines are, where there are any."""
    names = [phase for phase in ("grid", "random") if has_band(results, phase)]
    if not names:
        return []
    return [Text(f"The band is where the best of {' and of '.join(names)} stands in 80 % of 500 "
                 f"courses with other trials of the same kind, drawn with replacement. One run of "
                 f"a search tells nothing of how another would have gone, so it has none.")]


def _range_tested(results: Results) -> list[Text]:
    """Say which bounds the range test gave the search, where it was asked for them."""
    name, sweep = tested_param(space_from_json(results.space)), results.sweep
    if name is None or sweep is None or sweep.low is None or sweep.high is None:
        return []
    return [Text(f"The search drew {name} between {sweep.low:.3g} and {sweep.high:.3g}: the space "
                 f"has it take its bounds from here.")]


def _best_trials(results: Results) -> list[Section]:
    trials = [t for t in results.phase("search").trials if t.score is not None]
    if not trials:
        return []
    trials.sort(key=lambda t: -t.score if results.maximize else t.score)  # type: ignore[operator]
    names = list(dict.fromkeys(name for t in trials[:_N_BEST] for name in t.params))
    rows = [[str(t.number), number(t.score or 0.0),
             *(value(t.params.get(name, "")) for name in names)] for t in trials[:_N_BEST]]
    kind = "high" if results.maximize else "low"
    return [Section("What the search liked best", [
        Text(f"One seed each and picked for being {kind}, so these flatter; see the result "
             f"above."), Table(["trial", results.metric, *names], rows)])]


def _pruning(results: Results) -> list[Section]:
    found = audit(results, int(results.settings.get("top_k") or 1))
    if found is None:
        return []
    blocks: list[Block] = [Text(sentence(found))]
    if found.rules:
        rows = [[f"{rule.warmup} (used)" if rule.warmup == found.warmup else str(rule.warmup),
                 f"{rule.n_pruned} of {rule.n_trials}", str(rule.n_false),
                 f"{rule.saved_fraction:.0%}"] for rule in found.rules]
        blocks += [Text(f"What the pruner '{results.settings.get('pruner')}' would have done with "
                        "each warm-up, on the trials whose ends are known; one that was audited "
                        "stands for as many pruned ones as it was drawn from."),
                   Table(["--prune-warmup", "pruned", "of these better than the median left",
                          "epochs saved"], rows, n_left=1)]
    return [Section("Was pruning right?", blocks)]
