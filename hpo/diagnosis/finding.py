"""One line of what `hpo doctor` says: a verdict, what was looked at, and what to do.

Plain data, so that a worker can send it to the parent that prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

OK, LOOK, WRONG, NOT_CHECKED = VERDICTS = ("ok", "look", "wrong", "not checked")
# On the screen, where a column of words is read at a glance.
_SHOWN = {NOT_CHECKED: "-"}
_WIDTHS = (len(WRONG), len("training"), len("largest batch"))


@dataclass(frozen=True)
class Finding:
    """What one check found.

    `verdict` is `ok`, `look` (trains, but probably not as meant), `wrong` (money would be lost) or
    `not checked`; `cure` says what to do about the middle two.
    """

    verdict: str
    part: str
    what: str
    text: str
    cure: str = ""

    def line(self) -> str:
        """Return it as one line of a screen."""
        verdict, part, what = _WIDTHS
        said = f"{self.text}; {self.cure}" if self.cure else self.text
        return (f"{_SHOWN.get(self.verdict, self.verdict):<{verdict}}  {self.part:<{part}}  "
                f"{self.what:<{what}}  {said}")

    def to_json(self) -> dict[str, str]:
        """Return it as JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Finding:
        """Return the finding that `to_json` gave."""
        return cls(**{name: str(entry[name]) for name in cls.__dataclass_fields__})


def ok(part: str, what: str, text: str) -> Finding:
    """Return a finding of something that is in order."""
    return Finding(OK, part, what, text)


def look(part: str, what: str, text: str, cure: str) -> Finding:
    """Return a finding that a person should look at."""
    return Finding(LOOK, part, what, text, cure)


def wrong(part: str, what: str, text: str, cure: str = "") -> Finding:
    """Return a finding that would cost trials."""
    return Finding(WRONG, part, what, text, cure)


def not_checked(part: str, what: str, why: str) -> Finding:
    """Return the place of a check that could not be made."""
    return Finding(NOT_CHECKED, part, what, f"not checked: {why}")


def plural(n: int, one: str) -> str:
    """Return a count with its word: `1 row`, `2 rows`, `2 classes`."""
    more = one + ("es" if one.endswith("s") else "s")
    return f"{n:,} {one if n == 1 else more}"
