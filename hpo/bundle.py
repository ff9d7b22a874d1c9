"""The source that a study is made of: its module, and the user's other modules that it imports.

With these files a model of the user's own can be made again where the study's folder is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

PACKAGE = "search_spaces"
# Of hpo's own modules the version is stored.
_OURS = ("hpo", "storage", "__main__", "__mp_main__")
_INSTALLED = ("site-packages", "dist-packages")


def files_of(study: str) -> dict[str, str]:
    """Return the texts of a study's module and of the user's modules loaded beside it.

    The module must be loaded. Names are those of the modules as paths: `nets/blocks.py`. What is
    installed (the standard library, packages) is left out, and so is what has no source.
    """
    found = {}
    for name, module in sorted(sys.modules.items()):
        path = _own_file(module)
        if path is None or name.split(".")[0] in _OURS:
            continue
        if _is_installed(path) and name != f"{PACKAGE}.{study}":
            continue
        tail = "/__init__.py" if path.name == "__init__.py" else ".py"
        with contextlib.suppress(OSError, SyntaxError, UnicodeDecodeError):
            found[name.replace(".", "/") + tail] = importlib.util.decode_source(path.read_bytes())
    return found


def _own_file(module: ModuleType | None) -> Path | None:
    given = getattr(module, "__file__", None)
    return Path(given).absolute() if isinstance(given, str) and given.endswith(".py") else None


def _is_installed(path: Path) -> bool:
    library = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    return bool(set(_INSTALLED) & set(path.parts)) or any(
        path.is_relative_to(folder) for folder in library)


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files below a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Read as UTF-8, whatever a comment of the first lines said of the file before.
        path.write_text(text, encoding="utf-8", newline="\n")


@contextlib.contextmanager
def imported(folder: Path, files: Iterable[str], study: str) -> Iterator[ModuleType]:
    """Import a study's module out of written files, and forget all of them afterwards.

    Two folders whose modules have the same names do not mix, neither with each other nor with
    what was imported before.
    """
    names = {_module(name) for name in files} | {PACKAGE}
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    path, writes = list(sys.path), sys.dont_write_bytecode
    # An export must stay as it was written.
    sys.dont_write_bytecode = True
    sys.path.insert(0, os.fspath(folder.absolute()))
    importlib.invalidate_caches()
    try:
        yield importlib.import_module(f"{PACKAGE}.{study}")
    finally:
        sys.path[:], sys.dont_write_bytecode = path, writes
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def _module(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
