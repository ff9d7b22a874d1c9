"""The report of a study: end table, Markdown with pictures, JSON, and the dashboard's note.

All of it is made from `hpo.results` alone. Scores of fresh seeds are the result; what the search
itself saw is only ever shown as the history that it is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo import bounds
from hpo.audit import audit, sentence
from hpo.end_table import aligned, plain_table, rows_with_head, summary_table
from hpo.importance import importance
from hpo.report_json import to_json
from hpo.results import PHASES, Phase, Results
from hpo.settings import command
from hpo.verdict import count, number, origin, score, summary, verdict, wrapped

if TYPE_CHECKING:
    from storage import Database

__all__ = ["aligned", "importance", "note", "plain_table", "score", "summary", "summary_table",
           "to_json", "verdict", "wrapped", "write"]

_N_BEST = 5
_MAX_CELL = 140


# Markdown


def write(results: Results, folder: Path) -> Path:
    """Write report.md, report.json and the pictures into a folder; return the path of report.md.

    What an earlier report left there is replaced, a picture without data any more removed.
    """
    from hpo import plots

    folder = Path(folder)
    pictures = plots.draw_all(results, folder, importance(results)["importance"])
    _put(folder / "report.json", to_json(results))
    path = folder / "report.md"
    _put(path, markdown(results, {picture.name: picture.name for picture in pictures}))
    return path


def _put(path: Path, text: str) -> None:
    """Write a file aside and rename it, so that a reader never finds half of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def markdown(results: Results, links: Mapping[str, str]) -> str:
    """Return the report as Markdown; `links` gives the address of each picture that exists."""
    parts = [
        f"# {results.name}", f"**{verdict(results)}**",
        "## Result", _table(*rows_with_head(results), n_left=2), _reading(results),
        *_params(results), *filter(None, [bounds.warning(results)]), *_pictures(results, links),
        *_best_trials(results), *_pruning(results),
        *_endings(results), *_costs(results), *_versions(results), *_repeat(results),
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], n_left: int = 99) -> str:
    rule = ["---" if i < n_left else "---:" for i in range(len(head))]
    lines = [list(head), rule, *map(list, rows)]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |"
                     for line in lines)


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


def _params(results: Results) -> list[str]:
    rows = [row for row in summary(results) if row.params]
    names = list(dict.fromkeys(name for row in rows for name in row.params))
    if not names:
        return []
    cells = [[row.label, *(_value(row.params.get(name, "")) for name in names)] for row in rows]
    return ["## Params", _table(["", *names], cells)]


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _pictures(results: Results, links: Mapping[str, str]) -> list[str]:
    parts = []
    for name, (title, alt, missing) in _ABOUT.items():
        parts.append(f"## {title}")
        if name in links:
            parts.append(f"![{alt}]({links[name]})")
        elif name == "importance.png":
            parts.append(f"No picture: {importance(results).get('why', missing)}.")
        else:
            parts.append(f"No picture: {missing}.")
    return parts


_ABOUT = {
    "progress.png": ("Best so far", "Best validation score over the epochs spent by each phase",
                     "no trial is COMPLETE yet"),
    "curves.png": ("Learning curves", "Validation score of each trial over its epochs",
                   "no trial has reported an epoch yet"),
    "lr_range.png": ("LR range test", "Training loss over the learning rate, with the pick",
                     "there was no LR range test"),
    "importance.png": ("Importance of the params", "Share of each param in the search's result",
                       "not enough data"),
}


def _best_trials(results: Results) -> list[str]:
    trials = [t for t in results.phase("search").trials if t.score is not None]
    if not trials:
        return []
    trials.sort(key=lambda t: -t.score if results.maximize else t.score)  # type: ignore[operator]
    names = list(dict.fromkeys(name for t in trials[:_N_BEST] for name in t.params))
    rows = [[str(t.number), number(t.score or 0.0),
             *(_value(t.params.get(name, "")) for name in names)] for t in trials[:_N_BEST]]
    return ["## What the search liked best",
            "One seed each and picked for being high, so these flatter; see the result above."
            if results.maximize else
            "One seed each and picked for being low, so these flatter; see the result above.",
            _table(["trial", results.metric, *names], rows)]


def _pruning(results: Results) -> list[str]:
    found = audit(results, int(results.settings.get("top_k") or 1))
    if found is None:
        return []
    parts = ["## Was pruning right?", sentence(found)]
    if found.rules:
        rows = [[f"{rule.warmup} (used)" if rule.warmup == found.warmup else str(rule.warmup),
                 f"{rule.n_pruned} of {rule.n_trials}", str(rule.n_false),
                 f"{rule.saved_fraction:.0%}"] for rule in found.rules]
        parts += ["What the median rule would have done with each warm-up, on the trials whose "
                  "ends are known; one that was audited stands for as many pruned ones as it was "
                  "drawn from.",
                  _table(["--prune-warmup", "pruned", "of these better than the median left",
                          "epochs saved"], rows, n_left=1)]
    return parts


def _endings(results: Results) -> list[str]:
    rows = [[phase, str(n), state, _code(kind), _code(_example(results.phase(phase), state, kind))]
            for phase in PHASES
            for (state, kind), n in _ends(results.phase(phase)).items()]
    if not rows:
        return []
    return ["## How trials ended", _table(["phase", "trials", "state", "reason", "for example"],
                                          rows)]


def _ends(phase: Phase) -> dict[tuple[str, str], int]:
    counted: dict[tuple[str, str], int] = {}
    for trial in phase.trials:
        key = (trial.state, trial.kind if trial.state != "COMPLETE" else "")
        counted[key] = counted.get(key, 0) + 1
    return dict(sorted(counted.items(), key=lambda item: -item[1]))


def _example(phase: Phase, state: str, kind: str) -> str:
    said = [t for t in phase.trials if t.state == state and t.kind == kind and t.reason]
    return f"trial {said[-1].number}: {said[-1].reason}" if said and state != "COMPLETE" else ""


def _code(text: str) -> str:
    """Return text that Markdown leaves alone: a traceback's <module> is no HTML."""
    line = " ".join(text.replace("`", "'").split())
    return f"`{line[:_MAX_CELL]}`" if line else ""


def _costs(results: Results) -> list[str]:
    begun = [results.phase(phase) for phase in PHASES if results.phases.get(phase)]
    if not begun:
        return []
    rows = [[p.name, str(p.n_trials), "" if p.n_planned is None else str(p.n_planned),
             count(p.n_epochs), _duration(p.duration_s)] for p in begun]
    rows.append(["all", str(sum(p.n_trials for p in begun)), "",
                 count(sum(p.n_epochs for p in begun)), ""])
    return ["## What it cost", _table(["phase", "trials", "planned", "epochs", "ran for"], rows)]


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes \
        else f"{seconds:.1f} s"


def _versions(results: Results) -> list[str]:
    if not results.registry:
        return []
    row = results.registry[0]
    versions = row.get("versions") or {}
    said = {**(versions if isinstance(versions, Mapping) else {"versions": versions}),
            "device": row.get("device"), "git commit": row.get("git_commit"),
            "data fingerprint": row.get("data_fingerprint")}
    rows = [[str(name), _code(str(value))] for name, value in said.items() if value]
    return ["## Made with", _table(["", ""], rows)] if rows else []


def _repeat(results: Results) -> list[str]:
    module = (results.module or results.name).split(".")[-1]
    return ["## How to repeat it", "In a fresh home or under another `--name`:",
            f"```\n{command(module, results.name, results.settings)}\n```",
            "Numbers repeat exactly only where this and the first run have one worker "
            "(`--workers 1`), the same machine and the same versions: with several workers the "
            "order in which trials end decides what the sampler has seen."]


# The dashboard's note


def note(db: Database, results: Results, home: Path, folder: Path | None = None) -> None:
    """Put the report where optuna-dashboard shows it: as the study's note, with its pictures.

    Pictures are the study's artifacts; they and the checkpoints of the best trials replace those
    of an earlier report. `folder` is where `write` put the report (`home`/reports/NAME).
    """
    from hpo import attachments

    begun = [phase for phase in ("search", "grid", "random", "lr-range", "confirm")
             if phase in results.phases]
    if not begun:
        return
    folder = folder or Path(home) / "reports" / results.name
    links = attachments.pictures(db, results.phase(begun[0]).study, Path(home), folder)
    attachments.checkpoints(db, results, Path(home))
    attachments.save_note(db, results.phase(begun[0]).study, markdown(results, links))
