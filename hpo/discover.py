"""Find a study's module by name and read its spec, telling every fault in one message.

A user's own `search_spaces/` in the working directory merges with the one that ships.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from hpo.errors import HpoError, InputError, SpecError
from hpo.spec import StudySpec, nearest

PACKAGE = "search_spaces"


def add_working_directory() -> None:
    """Append the working directory to the import path, so that ours are never shadowed by it.

    Raises:
        InputError: where the directory's `search_spaces/__init__.py` would hide our studies.
    """
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
        importlib.invalidate_caches()
    marker = Path(here, PACKAGE, "__init__.py")
    if marker.exists():
        raise InputError(
            f"{marker} hides the studies that ship with hpo: remove that file "
            f"({PACKAGE} is a namespace package and needs none)")


def known_studies() -> list[str]:
    """Return the names of all modules that `--study` may name, sorted."""
    package = importlib.import_module(PACKAGE)
    names = {path.stem for folder in package.__path__ for path in Path(folder).glob("*.py")}
    return sorted(name for name in names if not name.startswith("_"))


def load(study: str) -> StudySpec:
    """Return the spec of the module `search_spaces/<study>.py`.

    Raises:
        SpecError: for every fault of the spec, each line with the study's name.
        InputError: for an unknown name, or a module that does not import or has no STUDY.
    """
    add_working_directory()
    try:
        module = _import(study)
    except SpecError as error:
        raise error.named(study) from None
    spec = getattr(module, "STUDY", None)
    if not isinstance(spec, StudySpec):
        raise InputError(f"study '{study}': {module.__file__} must define STUDY = StudySpec(...), "
                         f"got {type(spec).__name__ if spec is not None else 'no STUDY'}")
    return spec


def source_path(study: str) -> str:
    """Return the path of the study's module, once it is loaded."""
    return str(sys.modules[f"{PACKAGE}.{study}"].__file__)


def file_of(study: str) -> Path | None:
    """Return the file of a study's module without running it, or None where there is none.

    Raises:
        InputError: where the working directory hides the studies that ship.
    """
    add_working_directory()
    if study not in known_studies():
        return None
    folders = importlib.import_module(PACKAGE).__path__
    return next((path for folder in folders
                 if (path := Path(folder, f"{study}.py")).is_file()), None)


def _import(study: str) -> ModuleType:
    known = known_studies()
    if study not in known:
        raise InputError(f"study '{study}': there is no {PACKAGE}/{study}.py in {os.getcwd()} nor "
                         f"among those that ship{nearest(study, known)} "
                         f"(there are: {', '.join(known)})")
    _refuse_two(study)
    try:
        return importlib.import_module(f"{PACKAGE}.{study}")
    except HpoError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"study '{study}': {where(error)}: "
                         f"{type(error).__name__}: {error}") from error


def _refuse_two(study: str) -> None:
    """Raise InputError where two different modules have the study's name: which one is meant?"""
    folders = importlib.import_module(PACKAGE).__path__
    files = dict.fromkeys(path.resolve() for folder in folders
                          if (path := Path(folder, f"{study}.py")).is_file())
    if len({path.read_bytes() for path in files}) > 1:
        raise InputError(f"study '{study}': {' and '.join(map(str, files))} both define it and "
                         f"differ: rename yours")


def where(error: BaseException) -> str:
    """Return file and line of the innermost frame in the user's own code."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename} line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}{PACKAGE}{os.sep}" in frame.filename]
    frame = (own or frames)[-1]
    return f"{frame.filename} line {frame.lineno}"
