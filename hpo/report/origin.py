"""What a study was made with, and how to repeat it: machines, versions, data, commands, source."""

from __future__ import annotations

import hashlib
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpo import discover
from hpo.errors import HpoError
from hpo.report.blocks import Block, Code, Section, Table, Text, code
from hpo.results import Results
from hpo.settings import command

_HASH_LETTERS = 16


@dataclass(frozen=True)
class Source:
    """The module's file as it is now, by its path."""

    path: str
    text: str
    sha256: str


def module_of(results: Results) -> str:
    """Return the name by which `--study` knows the study's module."""
    return (results.module or results.name).split(".")[-1]


def read_source(results: Results) -> Source | None:
    """Return the module's file, None where this machine has none or cannot read it."""
    try:
        path = discover.file_of(module_of(results))
        raw = path.read_bytes() if path else b""
    except (HpoError, OSError):
        return None
    return Source(str(path), raw.decode(errors="replace"), hashlib.sha256(raw).hexdigest()) \
        if path else None


def made_with(results: Results) -> list[Section]:
    """Return machines, versions, data and seed of a study."""
    blocks: list[Block] = []
    machines = _machines(results)
    if machines:
        blocks.append(Table(["host", "device", "processor", "threads", "workers", "trials"],
                            machines))
    facts = {**_versions(results), **_facts(results)}
    if facts:
        blocks.append(Table(["", ""], [[name, code(said)] for name, said in facts.items()]))
    return [Section("Made with", blocks)] if blocks else []


def _machines(results: Results) -> list[list[str]]:
    n_trials = Counter(t.attrs.get("worker") for p in results.phases.values() for t in p.trials)
    n_workers: Counter[tuple[str, ...]] = Counter()
    trained: Counter[tuple[str, ...]] = Counter()
    for owner, row in results.workers.items():
        data = row.get("data") or {}
        processor = " ".join(str(data.get(what) or "")
                             for what in ("processor", "cpu_capability")).strip()
        key = (str(row.get("host") or ""), str(row.get("device") or ""), processor,
               str(data.get("n_threads") or ""))
        n_workers[key] += 1
        trained[key] += n_trials[owner]
    return [[*map(code, key[:3]), key[3], str(n_workers[key]), str(trained[key])]
            for key in sorted(n_workers)]


def _versions(results: Results) -> dict[str, str]:
    """Return each package's version, all of them where workers had different ones."""
    kept = [row.get("data", {}).get("versions") for row in results.workers.values()]
    kept += [row.get("versions") for row in results.registry[:1]]
    found: dict[str, list[str]] = {}
    for versions in kept:
        named = versions if isinstance(versions, Mapping) else {"versions": versions}
        for name, version in named.items():
            if version and str(version) not in found.setdefault(name, []):
                found[name].append(str(version))
    return {name: " and ".join(versions) for name, versions in found.items() if versions}


def _facts(results: Results) -> dict[str, str]:
    row: Mapping[str, Any] = results.registry[0] if results.registry else {}
    data, settings = results.data, results.settings
    sizes = [f"{data[what]:,} {word}" for what, word in (
        ("n_train", "train"), ("n_val", "validation"), ("n_test", "test"))
        if isinstance(data.get(what), int)]
    said = {
        "device": None if results.workers else row.get("device"),
        "git commit": row.get("git_commit"),
        "seed": settings.get("seed"),
        "data": ", ".join(sizes),
        "data fingerprint": row.get("data_fingerprint") or data.get("fingerprint"),
        "parameters of the model": data.get("n_parameters"),
    }
    return {name: f"{v:,}" if name.startswith("parameters") and isinstance(v, int) else str(v)
            for name, v in said.items() if v is not None and v != ""}


def repeat(results: Results, source: Source | None) -> list[Section]:
    """Return the commands that repeat a study, and its module's source with its digest."""
    module = module_of(results)
    name = shlex.quote(results.name)
    lines = [command(module, results.name, results.settings)]
    best = results.best("search")
    if best is not None:
        lines.append(f"hpo replay {best.number} --study {name}")
    # An objective of the user's own has no data that hpo knows, and no weights to export.
    if results.data.get("fingerprint") and any(c.val for c in results.candidates):
        lines.append(f"hpo export --study {name} --to best-of-the-search")
    told = ["In a fresh home or under another `--name` the first command repeats all of it"]
    if best is not None:
        told.append("`hpo replay` trains one trial again and compares every epoch")
    return [Section("How to repeat it", [
        Text("; ".join(told) + ":"), Code("\n".join(lines)),
        Text("Numbers repeat exactly only where this and the first run have one worker "
             "(`--workers 1`), the same machine and the same versions: with several workers the "
             "order in which trials end decides what the sampler has seen."),
        *_source(results, source),
    ])]


def _source(results: Results, source: Source | None) -> list[Block]:
    ran = sorted({str(sha) for row in results.workers.values()
                  if (sha := (row.get("data") or {}).get("module_sha256"))})
    if source is None:
        return [Text("The trials ran with the module's file of sha256 "
                     + " and ".join(map(code, ran)) + ", which is not at hand here.")] \
            if ran else []
    said = f"The module is {code(source.path)}, sha256 `{source.sha256}`"
    if not ran:
        said += "; which one the trials ran with is not stored."
    elif ran == [source.sha256]:
        said += ", the very file that all trials ran with."
    else:
        said += (", which is NOT what all trials ran with: they had "
                 + " and ".join(code(f"{sha[:_HASH_LETTERS]}…") for sha in ran) + ".")
    return [Text(said), Code(source.text.rstrip(),
                             summary=f"The source of the module {module_of(results)}")]
