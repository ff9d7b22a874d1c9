"""What every optimizer of a recipe has: its rate, its decay, and the groups of its parameters."""

from __future__ import annotations

import abc
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hpo.errors import InputError
from hpo.train.checks import number

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hpo.train.groups import Place


@dataclass(frozen=True)
class OptimizerSpec(abc.ABC):
    """What every optimizer has beside its own fields.

    `weight_decay` and `l1` act on weights: not on biases, norms and other parameters of one axis,
    unless `decay_all`. `l1` adds that part of each weight's sign to its gradient, after clipping,
    as l1 * sum(|w|) in the loss does. The head, the last layer, learns `head_lr_factor` times as
    fast as it would; what does not decay, `bias_lr_factor` times; each layer `layer_decay` times
    as fast as the one after it. Layers are counted as the model registers them.

    Source: `layer_decay`: Clark et al., ELECTRA, appendix A.
    """

    # The rates between which the range test sweeps.
    sweep_bounds: ClassVar[tuple[float, float]] = (1e-6, 1.0)
    # The best rate of a training, as a part of the rate at which the range test's loss is back
    # where it began: tuned on one half of the cells of benchmarks/lr_range.py.
    pick_factor: ClassVar[float] = 0.25

    lr: float = 1e-3
    _: KW_ONLY
    weight_decay: float = 0.0
    l1: float = 0.0
    decay_all: bool = False
    head_lr_factor: float = 1.0
    bias_lr_factor: float = 1.0
    layer_decay: float = 1.0

    def __post_init__(self) -> None:
        name = type(self).__name__
        number(f"{name}.lr", self.lr, low=0.0, open_low=True)
        number(f"{name}.weight_decay", self.weight_decay, low=0.0)
        number(f"{name}.l1", self.l1, low=0.0)
        number(f"{name}.head_lr_factor", self.head_lr_factor, low=0.0, open_low=True)
        number(f"{name}.bias_lr_factor", self.bias_lr_factor, low=0.0, open_low=True)
        number(f"{name}.layer_decay", self.layer_decay, low=0.0, high=1.0, open_low=True)
        self._flags("decay_all")

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the torch optimizer of a model's parameters, in groups.

        Each group's `lr_scale` is the factor between the recipe's rate and its own.

        Raises:
            InputError: if the model has no parameters.
        """
        from hpo.train.groups import add_penalties, param_groups

        made = self._torch(param_groups(model, self._options))
        if any(group.get("l1") or group.get("decoupled_decay") for group in made.param_groups):
            add_penalties(made)
        # A grid's numpy numbers would make the state one that only numpy can read.
        for group in made.param_groups:
            group.update({name: value.item() for name, value in group.items()
                          if type(value).__module__ == "numpy"})
        return made

    @abc.abstractmethod
    def _torch(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return the torch optimizer of ready groups."""

    def _options(self, place: Place) -> dict[str, Any]:
        """Return the options of the group that a parameter belongs to."""
        scale = self.layer_decay ** (place.n_layers - 1 - place.layer)
        if place.layer == place.n_layers - 1:
            scale *= self.head_lr_factor
        if not place.is_weight:
            scale *= self.bias_lr_factor
        decays = self.decay_all or place.is_weight
        options = {"lr": float(self.lr * scale), "lr_scale": float(scale),
                   "weight_decay": float(self.weight_decay) if decays else 0.0}
        if self.l1 and decays:
            options["l1"] = float(self.l1)
        return options

    def _flags(self, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{type(self).__name__}.{name}: must be True or False, got "
                                 f"{getattr(self, name)!r}")

    def _pair(self, name: str) -> None:
        value, where = getattr(self, name), f"{type(self).__name__}.{name}"
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise InputError(f"{where}: must be a pair of numbers, got {value!r}")
        for one in value:
            number(where, one, low=0.0, high=1.0, open_high=True)
        object.__setattr__(self, name, tuple(map(float, value)))

    def _part(self, name: str) -> None:
        number(f"{type(self).__name__}.{name}", getattr(self, name),
               low=0.0, high=1.0, open_high=True)

    def _eps(self, eps: float) -> None:
        number(f"{type(self).__name__}.eps", eps, low=0.0)
