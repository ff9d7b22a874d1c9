"""The recipe: a frozen value that says everything the one training loop needs.

Because a trial is a value and not a script, the learning-rate range test, the checks before a run,
resume and export all work on any study without a word of code from its author.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from hpo.errors import InputError
from hpo.train.checks import flag, number, whole
from hpo.train.losses import CrossEntropy
from hpo.train.models import ModelSpec
from hpo.train.named_models import MODELS
from hpo.train.optim_spec import OptimizerSpec
from hpo.train.regularize import EMA, EarlyStopping, Mix
from hpo.train.schedules import OneCycle, Plateau, Schedule
from hpo.train.sources import Source

if TYPE_CHECKING:
    from torch import Tensor, nn

Model: TypeAlias = "ModelSpec | nn.Module | Callable[[], nn.Module]"
Loss: TypeAlias = "CrossEntropy | Callable[[Tensor, Tensor], Tensor]"
SHARDINGS = ("fsdp",)
PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")
# torch's modes with CUDA graphs, and what each is without them: a graph's next run may write over
# the gradients of its last, which are added up over a batch's micro-batches.
GRAPH_MODES = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
COMPILE_MODES = (*GRAPH_MODES.values(), *GRAPH_MODES)
# torch's backends that follow the model as a compiler does and generate no code: to find out in
# seconds whether it compiles.
COMPILE_TRIALS = ("eager", "aot_eager")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything one trial trains with.

    `data` is one of the data helpers' values (`digits(run)`, `tensors(...)`, ...). `model` is a
    model spec, a function without arguments that makes a module, or a module, which is copied and
    so never trained itself. `loss` takes class scores and labels. `augment` acts on training
    batches in order, `mix` (MixUp or CutMix) on the normalised ones. One of three may bound the
    gradient: `clip_norm` its norm, `clip_value` each of its values, `clip_adaptive` the norm of
    each unit as a part of its weights' norm (AGC; not of the last layer). `ema` has a mean of the
    weights evaluated and kept; `early_stopping` ends a trial that gets no better. Of a batch
    `micro_batch_size` rows go through the model at once (None: all of them); their gradients add
    up to that of the batch, and only batch norm sees the difference. `checkpoint_activations`
    holds less memory in a training step and computes the inside of each block of the model twice;
    it needs a model that ships, or an `nn.Sequential`. `precision` is that of products and
    convolutions; weights stay float32. `auto` is bf16 on CUDA and fp32 on the CPU; fp16 scales the
    loss and leaves steps out whose gradient overflows. `compile` True or a mode of torch.compile
    compiles the model, once for each of its shapes; "reduce-overhead" and "max-autotune" replay
    it as CUDA graphs, with whole batches only. `resident` says whether the data set is held
    on the device (None: when it fits), `n_loader_workers` how many processes read a data set that
    is not (None: by the device and its threads). Where a trial has several devices (`hpo run
    --gpus-per-trial`), `sharding` "fsdp" has each hold a part of the weights, and None all of them
    (DDP).

    Raises:
        InputError: naming the first field that does not fit.
    """

    data: Source
    model: Model
    optimizer: OptimizerSpec
    schedule: Schedule | Plateau = field(default_factory=OneCycle)
    batch_size: int = 128
    micro_batch_size: int | None = None
    loss: Loss = field(default_factory=CrossEntropy)
    augment: tuple[Callable[..., Tensor], ...] = ()
    mix: Mix | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    clip_adaptive: float | None = None
    ema: EMA | None = None
    early_stopping: EarlyStopping | None = None
    precision: str = "auto"
    compile: bool | str = False
    eval_batch_size: int = 1024
    resident: bool | None = None
    n_loader_workers: int | None = None
    checkpoint_activations: bool = False
    sharding: str | None = None

    def __post_init__(self) -> None:
        _check_kind("data", self.data, hasattr(self.data, "open"),
                    "a data helper's value such as digits(run) or tensors(x, y)")
        _check_kind("model", self.model, isinstance(self.model, ModelSpec) or callable(self.model),
                    "a model such as SimpleCNN(hidden=256), a module or a function that makes one")
        _check_kind("optimizer", self.optimizer, hasattr(self.optimizer, "make")
                    and hasattr(self.optimizer, "lr"), "AdamW(lr=...) or optimizer('sgd', lr=...)")
        _check_kind("schedule", self.schedule, isinstance(self.schedule, Plateau)
                    or callable(getattr(self.schedule, "rates", None)),
                    "OneCycle(), schedule('cosine') or another of hpo.train's")
        _check_kind("loss", self.loss, callable(self.loss), "CrossEntropy() or a function")
        if callable(self.augment):
            object.__setattr__(self, "augment", (self.augment,))
        _check_kind("augment", self.augment, isinstance(self.augment, (tuple, list))
                    and all(callable(one) for one in self.augment),
                    "augmentations such as (RandomCrop(), RandomFlip())")
        object.__setattr__(self, "augment", tuple(self.augment))
        whole("Recipe.batch_size", self.batch_size, low=1)
        whole("Recipe.eval_batch_size", self.eval_batch_size, low=1)
        if self.micro_batch_size is not None:
            whole("Recipe.micro_batch_size", self.micro_batch_size, low=1)
        self._check_regularisation()
        if self.n_loader_workers is not None:
            whole("Recipe.n_loader_workers", self.n_loader_workers, low=0)
        flag("Recipe.checkpoint_activations", self.checkpoint_activations)
        _check_kind("resident", self.resident, self.resident in (None, True, False),
                    "True, False or None")

    def _check_regularisation(self) -> None:
        _check_kind("mix", self.mix, self.mix is None or isinstance(self.mix, Mix),
                    "MixUp(), CutMix() or None")
        _check_kind("ema", self.ema, self.ema is None or isinstance(self.ema, EMA),
                    "EMA() or None")
        _check_kind("early_stopping", self.early_stopping, self.early_stopping is None
                    or isinstance(self.early_stopping, EarlyStopping), "EarlyStopping() or None")
        bounds = ("clip_norm", "clip_value", "clip_adaptive")
        given = [name for name in bounds if getattr(self, name) is not None]
        for name in given:
            number(f"Recipe.{name}", getattr(self, name), low=0.0, open_low=True)
        if len(given) > 1:
            raise InputError(f"Recipe: {' and '.join(given)} cannot both bound the gradient; "
                             f"give one of {', '.join(bounds)}")
        _check_choice("precision", self.precision, PRECISIONS)
        if self.sharding is not None:
            _check_choice("sharding", self.sharding, SHARDINGS, "None, ")
        if not isinstance(self.compile, bool):
            known = (*COMPILE_MODES, *COMPILE_TRIALS)
            _check_choice("compile", self.compile, known, "True, False, ")
            self._check_graphs(self.compile)

    def _check_graphs(self, mode: str) -> None:
        micro = self.micro_batch_size
        if mode in GRAPH_MODES and micro is not None and micro < self.batch_size:
            raise InputError(f"Recipe.compile: {mode!r} replays CUDA graphs, which take a batch "
                             f"whole, got micro_batch_size={micro} of batch_size="
                             f"{self.batch_size}; use {GRAPH_MODES[mode]!r}")


def _check_choice(name: str, value: Any, known: tuple[str, ...], others: str = "") -> None:
    if value not in known:
        near = difflib.get_close_matches(str(value), known, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise InputError(f"Recipe.{name}: must be {others}{', '.join(map(repr, known))}, "
                         f"got {_short(value)}{hint}")


def _check_kind(name: str, value: Any, fits: bool, accepted: str) -> None:
    # A class in place of its value (`model=SimpleCNN`) has the same attributes, so it is told
    # apart; a user's own module class is a function that makes a module.
    if isinstance(value, type) and (name != "model" or value.__name__ in MODELS):
        raise InputError(f"Recipe.{name}: got the class {value.__name__}; "
                         f"write {value.__name__}(...)")
    if not fits:
        raise InputError(f"Recipe.{name}: must be {accepted}, got {_short(value)}")


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def describe(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as JSON data: each part as its fields and its type's name."""
    return {item.name: _plain(getattr(recipe, item.name)) for item in dataclasses.fields(recipe)}


def _plain(value: Any) -> Any:
    if hasattr(value, "describe"):
        return value.describe()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    scalar: Any = value
    if hasattr(scalar, "item"):
        return scalar.item()
    if isinstance(value, (int, float)):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return {"type": f"{named.__module__}.{named.__qualname__}"}
