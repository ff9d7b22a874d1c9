"""The report of a study: end table, HTML, Markdown with pictures, JSON, and the dashboard's note.

All of it is made from `hpo.results` alone. Scores of fresh seeds are the result; what the search
itself saw is only ever shown as the history that it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hpo.end_table import aligned, plain_table, summary_table
from hpo.importance import importance
from hpo.report.document import sections
from hpo.report.markdown import PAGE
from hpo.report.markdown import markdown as as_markdown
from hpo.report.origin import Source, read_source
from hpo.report.page import page
from hpo.report_json import to_json
from hpo.results import Results
from hpo.verdict import score, summary, verdict, wrapped

if TYPE_CHECKING:
    from storage import Database

__all__ = ["Source", "aligned", "importance", "markdown", "note", "page", "plain_table",
           "read_source", "score", "summary", "summary_table", "to_json", "verdict", "wrapped",
           "write"]


def write(results: Results, folder: Path, source: Source | None = None) -> Path:
    """Write report.html, report.md, report.json and the pictures; return the path of report.md.

    What an earlier report left there is replaced, a picture without data any more removed.
    `source` is the study's module, where it is at hand.
    """
    from hpo import plots

    folder = Path(folder)
    found = importance(results)
    figures = plots.draw(results, found["importance"])
    plots.save_all(figures, folder)
    said = sections(results, source, found)
    _put(folder / PAGE, page(results, said, figures))
    _put(folder / "report.json", to_json(results, found))
    path = folder / "report.md"
    _put(path, as_markdown(results.name, verdict(results), said,
                           {name: name for name in (*figures, PAGE)}))
    return path


def _put(path: Path, text: str) -> None:
    """Write a file aside and rename it, so that a reader never finds half of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    aside.write_text(text, encoding="utf-8", errors="replace")
    aside.replace(path)


def markdown(results: Results, links: Mapping[str, str], source: Source | None = None) -> str:
    """Return the report as Markdown; `links` gives the address of each picture that exists."""
    return as_markdown(results.name, verdict(results), sections(results, source), links)


def note(
    db: Database, results: Results, home: Path, folder: Path | None = None,
    source: Source | None = None,
) -> None:
    """Put the report where optuna-dashboard shows it: as the study's note, with its pictures.

    Pictures and the page are the study's artifacts; they and the checkpoints of the best trials
    replace those of an earlier report. `folder` is where `write` put it (`home`/reports/NAME).
    """
    from hpo import attachments

    begun = [phase for phase in ("search", "grid", "random", "lr-range", "confirm")
             if phase in results.phases]
    if not begun:
        return
    folder = folder or Path(home) / "reports" / results.name
    links = attachments.pictures(db, results.phase(begun[0]).study, Path(home), folder)
    attachments.checkpoints(db, results, Path(home))
    attachments.save_note(db, results.phase(begun[0]).study, markdown(results, links, source))
