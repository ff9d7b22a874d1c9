"""Parts of a recipe by name, as a `Categorical` of a space gives them.

A name that is not known is told with the nearest one and the full list, as everywhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.errors import InputError
from hpo.spec import nearest


def make_named(what: str, name: Any, known: Mapping[str, tuple[type, Mapping[str, Any]]],
               fields: Mapping[str, Any], also: Sequence[str] = ()) -> Any:
    """Return the part of a name: its class with its own fields and those that are given.

    Capitals, hyphens and underscores of the name do not matter. `also` are names that somebody
    else makes, for the list of all.

    Raises:
        InputError: if the name or a field is not known, or a field does not fit.
    """
    plain = {_plain(one): one for one in known}
    if not isinstance(name, str) or _plain(name) not in plain:
        raise InputError(f"{what} {name!r}: accepted are {', '.join([*known, *also])}"
                         f"{nearest(str(name).lower(), known)}")
    kind, fixed = known[plain[_plain(name)]]
    accepted = [one.name for one in dataclasses.fields(kind) if one.name not in fixed]
    for field in fields:
        if field not in accepted:
            raise InputError(f"{what} {name!r}: has no field {field!r}{nearest(field, accepted)} "
                             f"({', '.join(accepted)})")
    return kind(**fixed, **fields)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
