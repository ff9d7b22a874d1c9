"""The optimizers a recipe can name: plain values now, torch optimizers when a trial starts.

They use torch's fused step where torch has one, on the CPU as on CUDA: measured on one CPU thread,
an epoch of a small CNN takes 25 % less time than with torch's default loop over the parameters, of
a small MLP 30 %.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hpo.errors import InputError
from hpo.train.checks import number, whole
from hpo.train.named import make_named
from hpo.train.optim_spec import OptimizerSpec

if TYPE_CHECKING:
    import torch

    from hpo.train.groups import Place

LOG = logging.getLogger("hpo.train")
MUON_SCALES = ("match_rms_adamw", "original")


@dataclass(frozen=True)
class _WithL2(OptimizerSpec):
    """An optimizer whose weight decay is L2's, added to the gradient, as torch's.

    With `decoupled_decay` it shrinks the weights by lr * weight_decay before the step instead, as
    AdamW's does: then its best value does not move with the gradients' size.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 1.
    """

    _: KW_ONLY
    decoupled_decay: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._flags("decoupled_decay")

    def _options(self, place: Place) -> dict[str, Any]:
        options = super()._options(place)
        if self.decoupled_decay:
            options.update(weight_decay=0.0, decoupled_decay=options["weight_decay"])
        return options


@dataclass(frozen=True)
class SGD(_WithL2):
    """Stochastic gradient descent with (Nesterov) momentum, as torch's.

    Usual rates: 0.01 to 0.1.
    """

    sweep_bounds: ClassVar[tuple[float, float]] = (1e-5, 10.0)
    pick_factor: ClassVar[float] = 0.085

    lr: float = 0.1
    _: KW_ONLY
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._part("momentum")
        self._flags("nesterov")

    def _torch(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        import torch

        # Nesterov's step needs momentum: with momentum 0 both are plain gradient descent.
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum,
                               fused=not _in_parts(groups) or None,
                               nesterov=self.nesterov and self.momentum > 0)


@dataclass(frozen=True)
class _AdamLike(OptimizerSpec):
    """What Adam and AdamW have in common."""

    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pair("betas")
        self._eps(self.eps)
        self._flags("amsgrad")

    def _fields(self) -> dict[str, Any]:
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps, "amsgrad": self.amsgrad,
                "fused": True}


@dataclass(frozen=True)
class Adam(_AdamLike):
    """Adam, and AMSGrad with `amsgrad`, as torch's; AdamW is the one with decoupled decay.

    Usual rates: 1e-4 to 1e-3.

    Source: Kingma and Ba, Adam, algorithm 1; Reddi et al., On the Convergence of Adam and Beyond.
    """

    def _torch(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        import torch

        return torch.optim.Adam(groups, **self._fields())


@dataclass(frozen=True)
class AdamW(_AdamLike):
    """AdamW, with decoupled weight decay, as torch's.

    Usual rates: 1e-4 to 1e-2 for small networks, 1e-5 to 5e-4 for transformers.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2.
    """

    _: KW_ONLY
    weight_decay: float = 1e-2

    def _torch(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        import torch

        return torch.optim.AdamW(groups, **self._fields())


@dataclass(frozen=True)
class RMSprop(_WithL2):
    """RMSprop, as torch's. Usual rates: 1e-4 to 1e-2."""

    pick_factor: ClassVar[float] = 0.95

    lr: float = 1e-2
    _: KW_ONLY
    alpha: float = 0.99
    momentum: float = 0.0
    centered: bool = False
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._part("alpha")
        self._part("momentum")
        self._flags("centered")
        self._eps(self.eps)

    def _torch(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        import torch

        return torch.optim.RMSprop(groups, lr=self.lr, alpha=self.alpha, eps=self.eps,
                                   momentum=self.momentum, centered=self.centered)


@dataclass(frozen=True)
class Adagrad(_WithL2):
    """Adagrad, as torch's. Usual rates: 1e-3 to 1e-1."""

    sweep_bounds: ClassVar[tuple[float, float]] = (1e-5, 10.0)
    pick_factor: ClassVar[float] = 1.0

    lr: float = 1e-2
    _: KW_ONLY
    eps: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._eps(self.eps)

    def _torch(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        import torch

        # Older torch has a fused Adagrad on the CPU only.
        on_cpu = not _in_parts(groups) and all(
            p.device.type == "cpu" for group in groups for p in group["params"])
        return torch.optim.Adagrad(groups, lr=self.lr, eps=self.eps, fused=on_cpu or None)


@dataclass(frozen=True)
class Adadelta(_WithL2):
    """Adadelta, as torch's. Usual rates: 0.1 to 1."""

    sweep_bounds: ClassVar[tuple[float, float]] = (1e-4, 100.0)
    pick_factor: ClassVar[float] = 0.58

    lr: float = 1.0
    _: KW_ONLY
    rho: float = 0.9
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        self._part("rho")
        self._eps(self.eps)

    def _torch(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        import torch

        return torch.optim.Adadelta(groups, lr=self.lr, rho=self.rho, eps=self.eps)


@dataclass(frozen=True)
class LAMB(OptimizerSpec):
    """LAMB, for large batches: Adam's step scaled to the size of each layer's weights.

    Biases and norms, which do not decay, are not scaled either; with `decay_all` they are.
    Usual rates: 1e-3 to 1e-2.

    Source: You et al., Large Batch Optimization for Deep Learning, algorithm 2.
    """

    # It trains at a thirtieth of what blows it up, where others do at a tenth and more.
    sweep_bounds: ClassVar[tuple[float, float]] = (1e-5, 10.0)
    pick_factor: ClassVar[float] = 0.034

    lr: float = 2e-3
    _: KW_ONLY
    weight_decay: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pair("betas")
        self._eps(self.eps)

    def _options(self, place: Place) -> dict[str, Any]:
        return {**super()._options(place), "adapts": self.decay_all or place.is_weight}

    def _torch(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        from hpo.train.steps import Lamb

        return Lamb(groups, self.lr, self.betas, self.eps, self.weight_decay)


@dataclass(frozen=True)
class Muon(OptimizerSpec):
    """Muon for hidden weights, AdamW for the rest: first weight, head, embeddings, biases, norms.

    `scale` "match_rms_adamw" makes Muon's steps as large as AdamW's, so that one `lr` and one
    `weight_decay` suit both: usual rates 1e-4 to 1e-2. With "original" Muon's usual rate is 0.02,
    and AdamW's is `adamw_lr_factor` times it: 0.015 is usual. Its decay is decoupled. `momentum`
    and `nesterov` are Muon's, `betas` and `eps` are AdamW's.

    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024); Liu et
    al., Muon is Scalable for LLM Training, equation 4.
    """

    pick_factor: ClassVar[float] = 0.055

    _: KW_ONLY
    weight_decay: float = 1e-2
    momentum: float = 0.95
    nesterov: bool = True
    n_iterations: int = 5
    scale: str = "match_rms_adamw"
    adamw_lr_factor: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._part("momentum")
        self._flags("nesterov")
        whole("Muon.n_iterations", self.n_iterations, low=1)
        if self.scale not in MUON_SCALES:
            raise InputError(f"Muon.scale: must be {' or '.join(map(repr, MUON_SCALES))}, got "
                             f"{self.scale!r}")
        number("Muon.adamw_lr_factor", self.adamw_lr_factor, low=0.0, open_low=True)
        self._pair("betas")
        self._eps(self.eps)

    def _options(self, place: Place) -> dict[str, Any]:
        options = {**super()._options(place), "hidden": place.is_hidden}
        if not place.is_hidden:
            options["lr_scale"] *= float(self.adamw_lr_factor)
            options["lr"] = float(self.lr * options["lr_scale"])
        return options

    def _torch(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        from hpo.train.steps import MuonWithAdamW

        if not any(group["hidden"] for group in groups):
            LOG.warning("Muon: the model has no weight between its first and its head, so AdamW "
                        "trains all of it")
        return MuonWithAdamW(groups, lr=self.lr, weight_decay=self.weight_decay,
                             momentum=self.momentum, nesterov=self.nesterov, scale=self.scale,
                             n_iterations=self.n_iterations, betas=self.betas, eps=self.eps)


def _in_parts(groups: list[dict[str, Any]]) -> bool:
    """Return whether weights are in parts (FSDP): torch has no fused SGD or Adagrad for them."""
    return any(hasattr(p, "full_tensor") for group in groups for p in group["params"])


OPTIMIZERS: dict[str, tuple[type[OptimizerSpec], Mapping[str, Any]]] = {
    "sgd": (SGD, {}), "adam": (Adam, {}), "amsgrad": (Adam, {"amsgrad": True}),
    "adamw": (AdamW, {}), "rmsprop": (RMSprop, {}), "adagrad": (Adagrad, {}),
    "adadelta": (Adadelta, {}), "lamb": (LAMB, {}), "muon": (Muon, {})}


def optimizer(name: str, *, lr: float | None = None, weight_decay: float | None = None,
              **fields: Any) -> OptimizerSpec:
    """Return the optimizer of a name, as `Categorical("sgd", "adamw", ...)` gives it.

    The names: sgd, adam, amsgrad, adamw, rmsprop, adagrad, adadelta, lamb, muon. None is the
    optimizer's own default.

    Raises:
        InputError: if there is no such optimizer, or it has no such field.
    """
    given = {"lr": lr, "weight_decay": weight_decay}
    return make_named("optimizer", name, OPTIMIZERS, {
        **{field: value for field, value in given.items() if value is not None}, **fields})
