"""A report as one HTML page: nothing is loaded from elsewhere, and no script runs in it.

Whatever users wrote (names, params, error texts) is escaped, and a policy in the page's head
forbids scripts and requests, should an escape be missing.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hpo.report.blocks import Block, Code, Picture, Section, Table, Text
from hpo.report.cost import device_seconds, duration
from hpo.report.look import style
from hpo.results import PHASES, Results
from hpo.verdict import (
    LABELS,
    compare,
    count,
    number,
    on_test_split,
    score,
    signed,
    verdict,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
# Letters of a cell that stays on one line.
_N_SHORT = 16
_OUTCOMES = {"better": "clearly better", "worse": "clearly worse", "noise": "within the noise",
             "equal": "the same", "unknown": "one seed cannot tell"}
_STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running",
           "WAITING": "waiting"}


def page(
    results: Results, sections: Sequence[Section], figures: Mapping[str, Figure]
) -> str:
    """Return a report as an HTML document; `figures` are its pictures by their files' names."""
    name = _plain(results.name)
    way = "more is better" if results.maximize else "less is better"
    kind = f"hpo report · {results.metric}, {way}{_ended(results)}"
    links = "\n".join(f'<li><a href="#{s.anchor}">{_plain(s.title)}</a></li>' for s in sections)
    body = "\n".join(_section(section, figures) for section in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name} – hpo report</title>
<link rel="icon" href="data:,">
<style>
{style()}</style>
</head>
<body>
<header>
<p class="kind">{_plain(kind)}</p>
<h1>{name}</h1>
<p class="verdict">{_verdict(results)}</p>
{_key_figures(results)}
<nav aria-label="Sections"><ul>
{links}
</ul></nav>
</header>
<main>
{body}
</main>
<footer>One file: it needs no network and no script.</footer>
</body>
</html>
"""


def _verdict(results: Results) -> str:
    """Return the verdict, what it comes down to on a line of its own."""
    said = verdict(results)
    first, colon, rest = said.partition(": ")
    if not colon or "," in first or "(" in first:
        return _inline(said)
    return f"<strong>{_inline(first)}</strong> {_inline(rest[:1].upper() + rest[1:])}"


def _ended(results: Results) -> str:
    """Say as of when this is."""
    ends = [t.ended_at for p in results.phases.values() for t in p.trials if t.ended_at]
    return f" · last trial ended {max(ends):%Y-%m-%d %H:%M} UTC" if ends else ""


def _key_figures(results: Results) -> str:
    """Return the four figures that a reader looks for first."""
    shown = [_scored(results), *_compared(results), _trials(results), _epochs(results)]
    items = "\n".join(
        f'<div><dt>{_plain(what)}</dt><dd class="value">{_plain(value)}</dd>'
        f'<dd class="more">{_plain(more)}</dd></div>' for what, value, more in shown)
    return f'<dl class="figures">\n{items}\n</dl>'


def _scored(results: Results) -> tuple[str, str, str]:
    found = results.candidate("search")
    if found is None or found.val is None:
        return "the search's result", "not confirmed", "no score on fresh seeds yet"
    scores, metric = ((found.test, results.test_metric) if found.test and on_test_split(results)
                      else (found.val, results.metric))
    seeds = "one fresh seed" if scores.n == 1 else f"mean ± sd of {scores.n} fresh seeds"
    return f"the search's {metric}", score(scores.mean, scores.sd), seeds


def _compared(results: Results) -> list[tuple[str, str, str]]:
    """Return the comparison with the baseline that is hardest to beat."""
    found = compare(results)
    if not found:
        return []
    hardest = min(found, key=lambda c: c.difference)
    more = _OUTCOMES[hardest.outcome]
    if hardest.low is not None and hardest.high is not None:
        more = f"± {number((hardest.high - hardest.low) / 2)} (95 %): {more}"
    return [(f"against {LABELS[hardest.source]}, the best baseline",
             signed(hardest.difference), more)]


def _trials(results: Results) -> tuple[str, str, str]:
    search = results.phase("search")
    states = [f"{n} {_STATES.get(state, state.lower())}" for state, n in search.states().items()]
    return "trials of the search", f"{search.n_trials:,}", " · ".join(states) or "none has begun"


def _epochs(results: Results) -> tuple[str, str, str]:
    begun = [results.phase(phase) for phase in PHASES if results.phases.get(phase)]
    seconds = sum(device_seconds(phase.trials) for phase in begun)
    more = f"{duration(seconds)} of device time" if seconds else "all phases together"
    return "epochs trained", count(sum(phase.n_epochs for phase in begun)), more


def _section(section: Section, figures: Mapping[str, Figure]) -> str:
    blocks = "\n".join(_block(block, section, figures) for block in section.blocks)
    return (f'<section id="{section.anchor}" aria-labelledby="{section.anchor}-title">\n'
            f'<h2 id="{section.anchor}-title">{_plain(section.title)}</h2>\n{blocks}\n</section>')


def _block(block: Block, section: Section, figures: Mapping[str, Figure]) -> str:
    if isinstance(block, Text):
        return f"<p>{_inline(block.text)}</p>"
    if isinstance(block, Table):
        return _table(block, section.title)
    if isinstance(block, Picture):
        return _picture(block, figures)
    return _code(block)


def _table(table: Table, title: str) -> str:
    head = "".join(_cell("th", text, i >= table.n_left, ' scope="col"')
                   for i, text in enumerate(table.head))
    rows = "\n".join(_row(row, table.n_left, not table.head[0]) for row in table.rows)
    # A header without a word says nothing.
    top = f"<thead><tr>{head}</tr></thead>\n" if any(table.head) else ""
    return (f'<div class="wide" tabindex="0" role="region" aria-label="{_plain(title)}"><table>\n'
            f"{top}<tbody>\n{rows}\n</tbody>\n</table></div>")


def _row(row: Sequence[str], n_left: int, bold: bool) -> str:
    source = next((source for source, label in LABELS.items() if row and label == row[0]), None)
    dot = f'<i class="dot" style="background: var(--{source})"></i>' if source else ""
    cells = [_cell("td", text, i >= n_left, "", dot if i == 0 else "")
             for i, text in enumerate(row)]
    first = ' class="first"' if source == "search" and bold else ""
    return f"<tr{first}>{''.join(cells)}</tr>"


def _cell(tag: str, text: str, right: bool, more: str, before: str = "") -> str:
    flush = ' class="n"' if right else ' class="flag"' if len(text) <= _N_SHORT else ""
    return f"<{tag}{more}{flush}>{before}{_inline(text)}</{tag}>"


def _picture(picture: Picture, figures: Mapping[str, Figure]) -> str:
    if picture.name not in figures:
        return f'<p class="none">No picture: {_inline(picture.missing)}.</p>'
    from hpo.plots import svg

    drawn = svg(figures[picture.name], picture.name.partition(".")[0], picture.alt)
    return f'<figure class="wide" tabindex="0">{drawn}</figure>'


def _code(block: Code) -> str:
    if block.summary:
        return (f"<details><summary>{_plain(block.summary)}</summary>"
                f"<pre><code>{_plain(block.text)}</code></pre></details>")
    # Between lines a flag stays whole.
    flags = re.sub(r"(?<=\s)(--[a-z]+(?:-[a-z]+)*)", r'<span class="flag">\1</span>',
                   _plain(block.text))
    return f'<pre class="copied"><code>{flags}</code></pre>'


def _plain(text: str) -> str:
    """Return text of anyone's as HTML shows it, with a mark for what no page may hold."""
    clean = re.sub(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)
    return html.escape(clean)


def _inline(text: str) -> str:
    """Return text as HTML, what stands between backticks as code."""
    parts = re.split(r"`([^`]*)`", text)
    # A flag is code too, and is not broken after its first dash.
    return "".join(f"<code>{_plain(part)}</code>" if i % 2 else
                   re.sub(r"(?<![\w-])(--[a-z]+(?:-[a-z]+)*)", r"<code class='flag'>\1</code>",
                          _plain(part))
                   for i, part in enumerate(parts))
