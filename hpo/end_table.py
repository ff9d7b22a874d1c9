"""The end table: search and baselines side by side, their scores, their costs and the gain."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from hpo.comparison import Comparison, Row, compare, summary
from hpo.results import Results
from hpo.verdict import count, number, on_test_split, score, signed

if TYPE_CHECKING:
    from rich.table import Table

_PASSED, _GAIN = "search passed it after", "search minus it (95 %)"
# A terminal's lines for them.
_NARROW = {_PASSED: "passed\nafter", _GAIN: "search minus it\n(95 %)"}


def rows_with_head(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns, and one row of cells for each source."""
    head = ["", "trial", results.metric, results.test_metric, "seeds", "trials", "epochs",
            _PASSED, _GAIN]
    no_pick = "no pick" if results.no_pick else "not run"
    gains = {c.source: c for c in compare(results)}
    return head, [_cells(row, gains.get(row.source),
                         no_pick if row.source == "lr-range" else "not run")
                  for row in summary(results)]


def _cells(row: Row, gain: Comparison | None, none: str) -> list[str]:
    if row.val is None and row.trial is None and not row.n_trials:
        return [row.label, none, "", "", "", "0", count(row.n_epochs), "", ""]
    return [
        row.label, "" if row.trial is None else str(row.trial),
        "not confirmed" if row.val is None else score(row.val.mean, row.val.sd),
        "-" if row.test is None else score(row.test.mean, row.test.sd),
        str(row.val.n) if row.val else "", str(row.n_trials), count(row.n_epochs),
        _passed(row), _gain(gain),
    ]


def _passed(row: Row) -> str:
    if row.source in ("search", "default") or row.trial is None:
        return ""
    if row.passed_after is not None:
        return count(row.passed_after)
    return "never" if row.reached_after is None else f"{count(row.reached_after)} (tied)"


def _gain(gain: Comparison | None) -> str:
    if gain is None:
        return ""
    if gain.low is None or gain.high is None:
        return signed(gain.difference)
    return f"{signed(gain.difference)} ± {number((gain.high - gain.low) / 2)}"


def summary_table(results: Results) -> Table:
    """Return the end table for a terminal: 80 columns hold it, with no score on two lines.

    The scores are those that are compared. Seeds stand in the title where all rows have as many,
    else in the place of the trial.
    """
    from rich.table import Table

    head, rows = rows_with_head(results)
    n_seeds = {row[head.index("seeds")] for row in rows if row[head.index("seeds")]}
    hidden = {results.metric if on_test_split(results) else results.test_metric,
              "seeds" if len(n_seeds) < 2 else "trial"}
    over = "".join(f"{n} " for n in n_seeds) if len(n_seeds) == 1 else ""
    said = "one fresh seed" if over == "1 " else f"mean ± sd over {over}fresh seeds"
    table = Table(title=f"{results.name}: {said}", title_justify="left", box=None, pad_edge=False)
    shown = [i for i, name in enumerate(head) if name not in hidden]
    for i in shown:
        table.add_column(_NARROW.get(head[i], head[i]), justify="left" if i < 2 else "right",
                         no_wrap=True)
    for cells in rows:
        table.add_row(*(cells[i] for i in shown), style="bold" if cells[0] == "search" else None)
    return table


def plain_table(results: Results) -> str:
    """Return the end table as aligned plain text, for a pipe or a log."""
    head, rows = rows_with_head(results)
    return aligned([head, *rows], range(2, len(head)))


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> str:
    """Return rows as lines of plain text, one each; the columns in `right` end flush."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(w) if i in right else cell.ljust(w)
                  for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows)
