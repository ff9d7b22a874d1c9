"""Say which names a study may have.

A name becomes part of folders, of URLs and of the names of its phases (`NAME/grid`).
"""

from __future__ import annotations

from hpo.errors import InputError

LONGEST_NAME = 200
PHASE_MARK = "/"


def validate_name(name: str) -> str:
    """Return the name of a study if it may be one.

    Raises:
        InputError: what is wrong with it and what is accepted.
    """
    fault = _fault(name)
    if fault is None:
        return name
    shown = name if len(name) <= 40 else name[:40] + "..."
    raise InputError(
        f"study {shown!r}: {fault}; a name has 1 to {LONGEST_NAME} printable characters, without "
        "/ or \\ and not only blanks or dots"
    )


def _fault(name: str) -> str | None:
    if not name.strip():
        return "the name is empty"
    if len(name) > LONGEST_NAME:
        return f"the name has {len(name)} characters"
    if "/" in name or "\\" in name:
        return "the name holds a slash, which separates a study from its phases"
    if not name.isprintable():
        bad = next(char for char in name if not char.isprintable())
        return f"the name holds the character {bad!r}"
    if not name.strip("."):
        return "the name is made of dots only"
    return None


def belongs_to(optuna_name: str, name: str) -> bool:
    """Say whether an Optuna study is the study `name` itself or one of its phases."""
    return optuna_name == name or optuna_name.startswith(name + PHASE_MARK)
