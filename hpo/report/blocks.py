"""What a report is made of, before it is Markdown or HTML: both forms say the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MAX_CELL = 140


@dataclass(frozen=True)
class Text:
    """A paragraph; what stands between backticks is code."""

    text: str


@dataclass(frozen=True)
class Table:
    """A table of texts; the first `n_left` columns are flush left, the others flush right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    n_left: int = 99


@dataclass(frozen=True)
class Picture:
    """A picture by its file's name, with the words for who cannot see it, or why there is none."""

    name: str
    alt: str
    missing: str


@dataclass(frozen=True)
class Code:
    """Lines to be copied as they are; those with a `summary` are shown when asked for.

    Markdown, which becomes the dashboard's note, leaves the latter out.
    """

    text: str
    summary: str = ""


Block = Text | Table | Picture | Code


@dataclass(frozen=True)
class Section:
    """One part of a report under its title."""

    title: str
    blocks: Sequence[Block]

    @property
    def anchor(self) -> str:
        """The title as an address within the page."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


def code(text: str) -> str:
    """Return text of anyone's as one line of code: a traceback's <module> is no HTML."""
    line = " ".join(text.replace("`", "'").split())
    if len(line) > _MAX_CELL:
        line = line[:_MAX_CELL - 1] + "…"
    return f"`{line}`" if line else ""


def value(param: Any) -> str:
    """Return a param's value for reading; one that is more than a plain word as code."""
    if isinstance(param, float):
        return f"{param:.4g}"
    text = str(param)
    return text if re.fullmatch(r"[\w.,:/() +\[\]-]*", text) else code(text)
