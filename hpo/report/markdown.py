"""A report as Markdown: for a file, and for the dashboard's note."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hpo.report.blocks import Block, Picture, Section, Table, Text

# The name of the report's page.
PAGE = "report.html"


def markdown(
    title: str, verdict: str, sections: Sequence[Section], links: Mapping[str, str]
) -> str:
    """Return a report as Markdown; `links` gives the addresses of its pictures and its page."""
    parts = [f"# {_plain(title)}", f"**{_plain(verdict)}**"]
    if PAGE in links:
        parts.append(f"[All of this as one page, with the module's source]({links[PAGE]})")
    for section in sections:
        parts += [f"## {section.title}", *filter(None, (_block(b, links) for b in section.blocks))]
    return "\n\n".join(parts) + "\n"


def _block(block: Block, links: Mapping[str, str]) -> str:
    if isinstance(block, Text):
        return _plain(block.text)
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Picture):
        return (f"![{block.alt}]({links[block.name]})" if block.name in links
                else f"No picture: {block.missing}.")
    # A fence is longer than any in what it holds.
    fence = max(re.findall("`{3,}", block.text), default="``") + "`"
    return "" if block.summary else f"{fence}\n{block.text}\n{fence}"


def _table(table: Table) -> str:
    rule = ["---" if i < table.n_left else "---:" for i in range(len(table.head))]
    lines = [[_plain(c) for c in table.head], rule, *([_plain(c) for c in r] for r in table.rows)]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |"
                     for line in lines)


def _plain(text: str) -> str:
    """Return text whose < and & Markdown takes for no HTML; code is left alone."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if i % 2 else part.replace("&", "&amp;").replace("<", "&lt;").replace(
        "`", "\\`") for i, part in enumerate(parts))
