"""What a user writes: a study's space, its objective and what counts as better.

Every fault of it is found when the spec is made, before a database or a device is touched.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from hpo.errors import SpecError
from hpo.space import RANGE_TEST, Param, RangeTested, grid_values, plain, space_to_json

Metrics: TypeAlias = dict[str, Any]
Epochs: TypeAlias = Generator[Metrics, None, None]

SAMPLERS = ("tpe", "random", "grid", "gp", "cmaes", "qmc")
_LR_PARAM = "lr"
# The lowest value of each whole number that a spec may give.
_LIMITS = {"epochs": 1, "n_trials": 1, "seed": 0, "prune_startup": 0, "prune_warmup": 0,
           "top_k": 1, "confirm_seeds": 1}
PRUNERS = ("rungs", "median", "percentile", "asha", "hyperband", "none")


class _MadeFolder:
    """A path whose folder is made when it is first asked for: most trials write no file."""

    def __get__(self, run: Any, _owner: type) -> Path:
        if run is None:
            # So that a dataclass takes it for a field without a default.
            raise AttributeError("dir")
        folder = vars(run)["dir"]
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def __set__(self, run: Any, folder: Path) -> None:
        vars(run)["dir"] = Path(folder)


@dataclass(frozen=True)
class Run:
    """What one trial may know of the run it is part of.

    `epochs` is how many to train, `seed` fixes the split, the initial weights and the data order,
    `device` is "cpu" or "cuda", `dir` is this trial's own folder (made when it is first asked
    for), `data_dir` is the folder given with --data-dir, `n_devices` counts the devices of this
    trial, and `data_fraction` is the stratified part of the training data to use.
    """

    epochs: int
    seed: int
    device: str
    dir: _MadeFolder = _MadeFolder()
    data_dir: Path | None = None
    n_devices: int = 1
    data_fraction: float = 1.0


@dataclass(frozen=True, kw_only=True)
class StudySpec:
    """A study: its space, how a trial is trained, and the baselines it is held against.

    Give `build(run, *, <params>) -> Recipe`, or `objective(run, *, <params>)`, a generator that
    yields one dict of metrics an epoch, or both: then trials use the objective and the
    learning-rate range test the recipe. Name the metric with `maximize=` or `minimize=`.
    `defaults` are the params a practitioner would start from; `grid` gives the values of the grid
    baseline (a param left out stays at its default). `lr_param` is the param that the
    learning-rate range test finds. The other fields are the study's own values of the flags of
    `hpo run` with the same names.

    Raises:
        SpecError: with one line for each fault.
    """

    # Params, or 'range-test' for the learning rate.
    space: Mapping[str, Any]
    epochs: int
    build: Callable[..., Any] | None = None
    objective: Callable[..., Epochs] | None = None
    maximize: str | None = None
    minimize: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] | None = None
    lr_param: str = _LR_PARAM
    n_trials: int | None = None
    seed: int | None = None
    sampler: str | None = None
    pruner: str | None = None
    prune_startup: int | None = None
    prune_warmup: int | None = None
    timeout_s: float | None = None
    top_k: int | None = None
    confirm_seeds: int | None = None
    confirm_budget: float | None = None
    confirm_resolution: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.space, Mapping):
            object.__setattr__(self, "space", {
                name: RangeTested() if isinstance(param, str) and param == RANGE_TEST else param
                for name, param in self.space.items()})
        for what in (*_LIMITS, "timeout_s", "confirm_budget", "confirm_resolution"):
            object.__setattr__(self, what, plain(getattr(self, what)))
        faults = _spec_faults(self)
        if faults:
            raise SpecError(faults)

    @property
    def metric(self) -> str:
        """The metric that is improved."""
        return self.maximize or self.minimize or ""

    @property
    def direction(self) -> str:
        """`maximize` or `minimize`."""
        return "maximize" if self.maximize else "minimize"

    @property
    def has_lr_range(self) -> bool:
        """Whether a learning-rate range test can be made: a recipe and a rate to find."""
        return self.build is not None and self.lr_param in self.space

    def full_params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return params for a whole trial: the given ones, and the defaults for the rest."""
        merged = {**self.defaults, **params}
        return {name: plain(merged[name]) for name in self.space if name in merged}

    def warnings(self) -> list[str]:
        """Return what is allowed but probably not meant."""
        lossy = re.search(r"loss|error|perplexity|mse|mae", self.metric, re.IGNORECASE)
        scorish = re.search(r"acc|auc|f1|precision|recall|score", self.metric, re.IGNORECASE)
        if (lossy and self.maximize) or (scorish and not lossy and self.minimize):
            return [f"the spec says {self.direction} '{self.metric}': "
                    f"a metric of that name is usually {'minimized' if lossy else 'maximized'}"]
        return []

    def to_json(self) -> dict[str, Any]:
        """Return all but the functions, as JSON data."""
        return {
            "space": space_to_json(self.space), "metric": self.metric,
            "direction": self.direction, "epochs": self.epochs,
            "has_build": self.build is not None, "has_lr_range": self.has_lr_range,
            "lr_param": self.lr_param,
            "warnings": self.warnings(), "n_trials": self.n_trials, "seed": self.seed,
            "sampler": self.sampler, "pruner": self.pruner, "prune_startup": self.prune_startup,
            "prune_warmup": self.prune_warmup, "timeout_s": self.timeout_s, "top_k": self.top_k,
            "confirm_seeds": self.confirm_seeds, "confirm_budget": self.confirm_budget,
            "confirm_resolution": self.confirm_resolution,
        }


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for a near name, else an empty text."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _unknown(name: Any, space: Mapping[Any, Any]) -> str:
    return (f"'{name}' is no param of the space ({', '.join(map(str, space))})"
            f"{nearest(name, map(str, space))}")


def _spec_faults(spec: StudySpec) -> list[str]:
    faults = _space_faults(spec.space)
    faults += _goal_faults(spec)
    faults += _number_faults(spec)
    if not isinstance(spec.space, Mapping) or not spec.space:
        return faults
    sound = {name: p for name, p in spec.space.items() if isinstance(p, Param) and not p.faults()}
    for what, function in (("build", spec.build), ("objective", spec.objective)):
        if function is not None:
            faults += _signature_faults(what, function, spec.space)
    if spec.lr_param not in (_LR_PARAM, *spec.space):
        faults.append(f"lr_param: {_unknown(spec.lr_param, spec.space)}")
    faults += _range_tested_faults(spec)
    faults += _values_faults("defaults", spec.defaults, spec.space, sound)
    if spec.grid is not None:
        faults += _grid_faults(spec, sound)
    return faults


def _space_faults(space: Any) -> list[str]:
    if not isinstance(space, Mapping) or not space:
        return [f"space must be a dict of at least one param, got {space!r}"]
    faults = []
    for name, param in space.items():
        if not isinstance(name, str) or not name.isidentifier():
            faults.append(f"param {name!r}: a name must be a text fit for a keyword argument")
        if not isinstance(param, Param):
            faults.append(f"param {name!r}: expected Float, Int or Categorical, got {param!r}")
            continue
        faults += [f"param '{name}': {fault}" for fault in param.faults()]
    return faults


def _range_tested_faults(spec: StudySpec) -> list[str]:
    """Return why the LR range test cannot give a param its bounds."""
    names = [name for name, param in spec.space.items() if isinstance(param, RangeTested)]
    faults = [f"param '{name}': '{RANGE_TEST}' is for the learning rate, which is "
              f"'{spec.lr_param}' (lr_param)" for name in names if name != spec.lr_param]
    if names and spec.build is None:
        faults.append(f"param '{names[0]}': '{RANGE_TEST}' needs build=, which gives the recipe "
                      f"that is swept")
    lacking = [name for name in spec.space if isinstance(spec.defaults, Mapping)
               and name not in spec.defaults]
    if names and lacking:
        faults.append(f"param '{names[0]}': '{RANGE_TEST}' sweeps the defaults, so each param "
                      f"needs one: {', '.join(map(repr, lacking))} has none")
    return faults


def _goal_faults(spec: StudySpec) -> list[str]:
    faults = []
    if (spec.maximize is None) == (spec.minimize is None):
        faults.append("name the metric once: maximize='val_accuracy' or minimize='val_loss'")
    elif not isinstance(spec.metric, str) or not spec.metric.strip():
        faults.append(f"the metric's name must be a text, got {spec.maximize or spec.minimize!r}")
    if spec.build is None and spec.objective is None:
        faults.append("give build= (a function that returns a Recipe) or objective= (a generator)")
    for what in ("build", "objective"):
        function = getattr(spec, what)
        if function is not None and not callable(function):
            faults.append(f"{what} must be a function, got {function!r}")
    # `--sampler grid` chooses the phase grid; the search itself has no such sampler.
    drawing = [name for name in SAMPLERS if name != "grid"]
    for what, known in (("sampler", drawing), ("pruner", PRUNERS)):
        value = getattr(spec, what)
        if value is not None and value not in known:
            faults.append(f"{what} must be one of {', '.join(known)}, got {value!r}"
                          f"{nearest(value, known)}")
    return faults


def _number_faults(spec: StudySpec) -> list[str]:
    faults = []
    for what, low in _LIMITS.items():
        value = getattr(spec, what)
        if value is None and what != "epochs":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            faults.append(f"{what} must be a whole number of at least {low}, got {value!r}")
    for what in ("timeout_s", "confirm_resolution", "confirm_budget"):
        value, may_be_0 = getattr(spec, what), what == "confirm_budget"
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))
                                  or not (value > 0 or (may_be_0 and value == 0))):
            faults.append(f"{what} must be a number {'of at least' if may_be_0 else 'above'} 0, "
                          f"got {value!r}")
    return faults


def _signature_faults(what: str, function: Any, space: Mapping[Any, Any]) -> list[str]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    kinds = inspect.Parameter
    if not parameters or parameters[0].kind not in (
        kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD, kinds.VAR_POSITIONAL,
    ):
        return [f"{what} must take the run first: "
                f"def {what}(run, *, {', '.join(map(str, space))})"]
    rest = parameters[1:]
    takes_any = any(p.kind == kinds.VAR_KEYWORD for p in rest)
    named = [p for p in rest if p.kind in (kinds.KEYWORD_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    names = [p.name for p in named]
    faults = [f"{what} takes '{p.name}', which is no param of the space "
              f"({', '.join(map(str, space))}){nearest(p.name, map(str, space))}"
              for p in named if p.name not in space and p.default is kinds.empty]
    if not takes_any:
        faults += [f"{what} does not take param '{name}'{nearest(str(name), names)}"
                   for name in space if name not in names]
    return faults


def _values_faults(
    what: str, values: Any, space: Mapping[str, Any], sound: Mapping[str, Param]
) -> list[str]:
    if not isinstance(values, Mapping):
        return [f"{what} must be a dict of params, got {values!r}"]
    faults = []
    for name, value in values.items():
        if name not in space:
            faults.append(f"{what}: {_unknown(name, space)}")
        elif name in sound and not sound[name].contains(value):
            faults.append(f"param '{name}': {what} has {value!r}, "
                          f"accepted is {sound[name].describe()}")
    return faults


def _grid_faults(spec: StudySpec, sound: Mapping[str, Param]) -> list[str]:
    if not isinstance(spec.grid, Mapping) or not spec.grid:
        return [f"grid must be a dict of lists of values, got {spec.grid!r}"]
    faults = []
    for name, listed in spec.grid.items():
        try:
            values = grid_values(listed)
        except TypeError as error:
            faults.append(f"param '{name}': grid: {error}")
            continue
        if not values:
            faults.append(f"param '{name}': grid must not be empty")
        if any(value in values[:i] for i, value in enumerate(values)):
            faults.append(f"param '{name}': grid has a value twice: {values!r}")
        for value in values:
            faults += _values_faults("grid", {name: value}, spec.space, sound)
    missing = [name for name in spec.space if name not in spec.grid and name not in spec.defaults]
    if missing:
        faults.append(f"grid: {', '.join(map(repr, missing))} has neither grid values "
                      f"nor a default")
    return list(dict.fromkeys(faults))
