"""The settings of one run: a flag beats an HPO_* variable beats the module beats the default.

A study keeps what its numbers depend on (epochs, seed, part of the data): a run that goes on with
it takes these over, and one that asks for others is told to make a new study. It also keeps what
its user has said of the rest, so that `hpo run --study NAME` alone goes on as it was begun.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpo.errors import InputError
from hpo.spec import PRUNERS, SAMPLERS, nearest

RUN_PHASES = ("lr-range", "grid", "random", "search", "confirm")
# Those of a run that is not told which: a random search is a baseline that costs as much again.
PHASES = ("lr-range", "grid", "search", "confirm")
DEFAULT_N_TRIALS = 20
# What `hpo run` uses where neither a flag, a variable nor the module says anything.
_DEFAULTS: dict[str, Any] = {
    "n_trials": DEFAULT_N_TRIALS, "sampler": "tpe", "pruner": "rungs",
    "seed": 0, "data_fraction": 1.0, "top_k": 3, "confirm_seeds": 3, "timeout_s": None,
    "confirm_budget": 0.15,
    "allow_duplicates": False, "audit_fraction": 0.05,
}
# A stored study refuses other values of these: its trials could not be compared.
FIXED = ("epochs", "seed", "data_fraction")
# What the database keeps of a run's settings: Optuna itself stores neither sampler nor pruner.
STORED = (*FIXED, "n_trials", "sampler", "pruner", "prune_startup", "prune_warmup", "top_k",
          "confirm_seeds", "confirm_budget", "confirm_resolution", "allow_duplicates",
          "max_retries", "n_random", "audit_fraction")
# What a command that repeats a study names, in this order.
REPEATED = ("n_trials", "n_random", "epochs", "seed", "sampler", "pruner", "prune_startup",
            "prune_warmup", "audit_fraction", "top_k", "confirm_seeds", "confirm_budget",
            "confirm_resolution", "data_fraction", "max_retries", "allow_duplicates", "data_dir")
# Pruners that wait for no other trials, and refuse to be told how long.
WITHOUT_STARTUP = ("asha", "hyperband", "none")
# A run without the search says nothing about the search's own.
OF_THE_SEARCH = ("n_trials", "sampler", "pruner", "prune_startup", "prune_warmup",
                 "allow_duplicates", "audit_fraction")
# Where it keeps those of them that a flag or variable gave: these a later run goes on with.
GIVEN = "given"


@dataclass(frozen=True)
class Settings:
    """One run's settings; None means that nobody has said anything yet."""

    study: str
    name: str
    home: Path
    storage: str
    n_trials: int | None = None
    n_random: int | None = None
    workers: int | None = None
    devices: str = "auto"
    gpus_per_trial: int = 1
    sampler: str | None = None
    pruner: str | None = None
    prune_startup: int | None = None
    prune_warmup: int | None = None
    audit_fraction: float | None = None
    seed: int | None = None
    epochs: int | None = None
    timeout_s: float | None = None
    epoch_timeout_s: float | None = None
    storage_timeout_s: float = 60.0
    phases: tuple[str, ...] = PHASES
    max_retries: int | None = None
    max_failures: int = 5
    allow_duplicates: bool | None = None
    allow_space_change: bool = False
    data_dir: Path | None = None
    data_fraction: float | None = None
    top_k: int | None = None
    confirm_seeds: int | None = None
    confirm_budget: float | None = None
    confirm_resolution: float | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    def resolved(self, module: Mapping[str, Any], stored: Mapping[str, Any] | None) -> Settings:
        """Return these settings with every gap filled.

        `module` is the spec's JSON, `stored` the settings that the study's row has.

        Raises:
            InputError: for another value of what the study's numbers depend on.
        """
        values = asdict(self)
        said = {what: values[what] for what in STORED
                if what not in FIXED and values[what] is not None
                and ("search" in self.phases or what not in OF_THE_SEARCH)}
        given = {**(stored or {}).get(GIVEN, {}), **said}
        _check_startup(said, given.get("pruner") or module.get("pruner"))
        for what in FIXED:
            if stored:
                values[what] = _kept(self.name, what, values[what], stored[what])
        if values["data_dir"] is None and (stored or {}).get("data_dir"):
            values["data_dir"] = Path((stored or {})["data_dir"])
        values.update({what: given[what] for what in given if values[what] is None})
        for what in (*_DEFAULTS, "epochs", "prune_startup", "prune_warmup",
                     "confirm_resolution"):
            if values[what] is None:
                default = _DEFAULTS.get(what)
                values[what] = default if module.get(what) is None else module[what]
        if values["prune_startup"] is None:
            values["prune_startup"] = 2 if values["pruner"] == "rungs" else 5
        if values["prune_warmup"] is None:
            values["prune_warmup"] = _warmup(values["pruner"], values["epochs"])
        return Settings(**{**values, GIVEN: given})

    def changes(self, stored: Mapping[str, Any]) -> list[str]:
        """Return a line for each way in which the search goes on otherwise than it began."""
        if "search" not in self.phases:
            return []
        return [f"search: {what.replace('_', '-')} changes from {stored[what]} to "
                f"{getattr(self, what)} for the trials to come"
                for what in ("sampler", "pruner", "prune_startup", "prune_warmup")
                if stored[what] != getattr(self, what)]

    def stored(self) -> dict[str, Any]:
        """Return what a study's row keeps of these settings, as JSON data."""
        return {**{what: getattr(self, what) for what in STORED}, GIVEN: dict(self.given),
                "data_dir": None if self.data_dir is None else str(self.data_dir.absolute())}

    def order(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a worker needs to know of these settings, as JSON data."""
        names = ("epochs", "seed", "data_fraction", "sampler", "pruner", "prune_startup",
                 "prune_warmup", "audit_fraction", "allow_duplicates", "max_retries", "top_k")
        return {"name": self.name, "module": self.study, "metric": spec["metric"],
                "direction": spec["direction"], **{name: getattr(self, name) for name in names}}


def flag(what: str) -> str:
    """Return the flag of a setting."""
    return "--" + what.replace("_", "-")


def command(module: str, name: str, stored: Mapping[str, Any]) -> str:
    """Return the command that runs a study anew, by what its row keeps of its settings."""
    words = ["hpo", "run", "--study", module, *(["--name", name] if name != module else [])]
    for what in REPEATED:
        value = stored.get(what)
        waits = what != "prune_startup" or stored.get("pruner") not in WITHOUT_STARTUP
        if value is True:
            words.append(flag(what))
        elif value is not None and value is not False and waits:
            words += [flag(what), str(value)]
    return shlex.join(words)


def go_on_command(module: str | None, name: str) -> str:
    """Return the command that goes on with a study as it was begun."""
    return shlex.join(["hpo", "run", "--study", module or name,
                       *(["--name", name] if module not in (None, name) else [])])


def _warmup(pruner: str, epochs: int) -> int:
    """Return in how many epochs no trial is pruned, where nobody has said it.

    The first quarter of a schedule says little about its end, and the first epoch never enough: a
    trial of one epoch has nothing left to save. Rungs are few and know how early they are.
    """
    return 0 if pruner == "rungs" else max(1, epochs // 4)


def _check_startup(said: Mapping[str, Any], pruner: str | None) -> None:
    if "prune_startup" in said and pruner in WITHOUT_STARTUP:
        raise InputError(f"--prune-startup: pruner '{pruner}' waits for no other trials; leave it "
                         f"out, or use --pruner rungs, median or percentile")


def _kept(name: str, what: str, asked: Any, stored: Any) -> Any:
    if asked is not None and asked != stored:
        said = flag(what)
        raise InputError(f"study '{name}' was made with {what}={stored}, got {said} {asked}: its "
                         f"trials could not be compared; leave {said} out, or start a new study "
                         f"with --name")
    return stored


def home_folder(home: str | Path | None) -> Path:
    """Return the folder that everything a run writes lies under."""
    return Path(home or os.environ.get("HPO_HOME") or "hpo-runs").expanduser().absolute()


def storage_url(storage: str | None, home: Path) -> str:
    """Return the database's URL: the given one, else the SQLite file in the home folder."""
    return storage or os.environ.get("HPO_STORAGE") or f"sqlite:///{home / 'hpo.db'}"


def parse_phases(text: str | None, sampler: str | None) -> tuple[str, ...]:
    """Return the phases to do, in their order.

    `--sampler grid` means the grid phase alone.

    Raises:
        InputError: for an unknown or empty list, or a search without a sampler.
    """
    if text is None:
        return ("grid",) if sampler == "grid" else PHASES
    asked = [part.strip() for part in text.split(",") if part.strip()]
    if not asked:
        raise InputError(f"--phases names no phase; accepted are {', '.join(RUN_PHASES)}")
    for phase in asked:
        if phase not in RUN_PHASES:
            raise InputError(f"--phases: '{phase}' is no phase{nearest(phase, RUN_PHASES)} "
                             f"(accepted are {', '.join(RUN_PHASES)})")
    if sampler == "grid" and "search" in asked:
        raise InputError("--sampler grid is the phase grid and cannot draw for the phase search: "
                         "leave one out")
    return tuple(phase for phase in RUN_PHASES if phase in asked)


def check(settings: Settings) -> None:
    """Raise InputError for the first flag that is out of its range."""
    for what, low in (("n_trials", 1), ("n_random", 1), ("workers", 1), ("gpus_per_trial", 1),
                      ("epochs", 1),
                      ("prune_startup", 0), ("prune_warmup", 0), ("seed", 0), ("max_retries", 0),
                      ("max_failures", 0), ("top_k", 1),
                      ("confirm_seeds", 1)):
        value = getattr(settings, what)
        if value is not None and value < low:
            raise InputError(f"{flag(what)} must be at least {low}, got {value}")
    if settings.timeout_s is not None and not settings.timeout_s > 0:
        raise InputError(f"--timeout must be above 0 seconds, got {settings.timeout_s:g}")
    if settings.epoch_timeout_s is not None and not settings.epoch_timeout_s > 0:
        raise InputError("--epoch-timeout must be above 0 seconds, got "
                         f"{settings.epoch_timeout_s:g}")
    if not settings.storage_timeout_s > 0:
        raise InputError("--storage-timeout must be above 0 seconds, got "
                         f"{settings.storage_timeout_s:g}")
    fraction = settings.data_fraction
    if fraction is not None and not 0 < fraction <= 1:
        raise InputError(f"--data-fraction must be above 0 and at most 1, got {fraction:g}")
    audited = settings.audit_fraction
    if audited is not None and not 0 <= audited <= 1:
        raise InputError(f"--audit-fraction must be from 0 to 1, got {audited:g}")
    budget = settings.confirm_budget
    if budget is not None and not 0 <= budget < math.inf:
        raise InputError(f"--confirm-budget must be 0 or more, a part of the epochs spent before "
                         f"the confirmation, got {budget:g}")
    resolution = settings.confirm_resolution
    if resolution is not None and not 0 < resolution < math.inf:
        raise InputError(f"--confirm-resolution must be above 0, a difference of the metric, got "
                         f"{resolution:g}")
    for what, value, known in (("sampler", settings.sampler, SAMPLERS),
                               ("pruner", settings.pruner, PRUNERS)):
        if value is not None and value not in known:
            raise InputError(f"--{what} {value!r} is unknown{nearest(value, known)} "
                             f"(accepted are {', '.join(known)})")
    if settings.data_dir is not None and not settings.data_dir.is_dir():
        raise InputError(f"--data-dir {settings.data_dir}: there is no such folder")
