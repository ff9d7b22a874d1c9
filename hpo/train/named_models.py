"""Models picked by name: those that ship, any of torchvision's and, as an extra, any of timm's.

A name is plain text, so a space's Categorical can hold it and a description can make it again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.errors import InputError
from hpo.train.checks import flag, one_of
from hpo.train.models import (
    MLP,
    PLAIN_INITS,
    CifarResNet18,
    ModelSpec,
    ResNet9,
    SimpleCNN,
    SpeedNet,
    ViT,
)
from hpo.train.named import make_named

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, init=False)
class _Named:
    """A model of another package: its name there, and the fields that its maker takes."""

    name: str
    pretrained: bool
    init: str
    fields: tuple[tuple[str, Any], ...]

    def __init__(self, name: str, *, pretrained: bool = False, init: str = "default",
                 **fields: Any) -> None:
        kind = type(self).__name__
        if not isinstance(name, str) or not name:
            raise InputError(f"{kind}: must be given a model's name, got {name!r}")
        flag(f"{kind}.pretrained", pretrained)
        one_of(f"{kind}.init", init, PLAIN_INITS)
        if pretrained and init != "default":
            raise InputError(f"{kind}.init: pretrained weights would be lost, got init={init!r}; "
                             f"use pretrained=False or init='default'")
        plain = {key: _plain(f"{kind}.{key}", value) for key, value in fields.items()}
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "pretrained", pretrained)
        object.__setattr__(self, "init", init)
        object.__setattr__(self, "fields", tuple(sorted(plain.items())))

    def describe(self) -> dict[str, Any]:
        """Return it as JSON data, from which it can be made again."""
        return {"type": type(self).__name__, "name": self.name, "pretrained": self.pretrained,
                "init": self.init, **dict(self.fields)}


def _plain(where: str, value: Any) -> Any:
    # A numpy number of a grid, say.
    value = value.item() if hasattr(value, "item") else value
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise InputError(f"{where}: must be a number, a text, True, False or None, which a "
                         f"checkpoint can describe, got {type(value).__name__}")
    return value


def _refuse(kind: str, fields: Mapping[str, Any], taken: Mapping[str, str]) -> None:
    for name in fields:
        if name in taken:
            raise InputError(f"{kind}.{name}: cannot be given; {taken[name]}")


class TorchvisionModel(_Named):
    """A classifier of `torchvision.models` by name, sized to the data's channels and classes.

    `TorchvisionModel("resnet18", pretrained=True)`; `fields` go to torchvision's maker, such as
    `dropout=0.2`, or `image_size=32` of a `vit_b_16`. With `pretrained` the default weights of
    torchvision are downloaded (once, to TORCH_HOME) and all but the last layer is taken from
    them; a first layer for other than three channels takes its mean over the colours. Those of
    `googlenet` and `inception_v3` want `transform_input=True` besides. Else the weights are drawn
    as torchvision does, or by `init` as `initialise` does.

    Raises:
        InputError: naming the field that does not fit.
    """

    def __init__(self, name: str, *, pretrained: bool = False, init: str = "default",
                 **fields: Any) -> None:
        super().__init__(name, pretrained=pretrained, init=init, **fields)
        _refuse("TorchvisionModel", fields, {
            "type": "it is the model's own", "num_classes": "the data decide",
            "weights": "use pretrained=True", "progress": "a trial's log has no bar",
            "aux_logits": "the loop trains on one set of scores"})

    def make(self, image_shape: Sequence[int], n_classes: int) -> nn.Module:
        """Return the module.

        Raises:
            InputError: if torchvision has no such model or field, or it takes no such images.
            DataError: if the pretrained weights cannot be downloaded.
        """
        from hpo.train.ready_nets import torchvision_model

        return torchvision_model(self, tuple(image_shape), n_classes)


class TimmModel(_Named):
    """A classifier of the package timm by name, sized to the data's channels and classes.

    `TimmModel("resnet26d", drop_path_rate=0.1)`; `fields` go to `timm.create_model`. With
    `pretrained` its weights are downloaded, and all but the last layer is taken from them. timm is
    an extra: `pip install 'hpo[timm]'`.

    Raises:
        InputError: naming the field that does not fit, or if timm is not installed.
    """

    def __init__(self, name: str, *, pretrained: bool = False, init: str = "default",
                 **fields: Any) -> None:
        super().__init__(name, pretrained=pretrained, init=init, **fields)
        _refuse("TimmModel", fields, {
            "type": "it is the model's own", "num_classes": "the data decide",
            "in_chans": "the data decide", "model_name": "it is the first argument"})
        if importlib.util.find_spec("timm") is None:
            raise InputError(f"TimmModel '{name}': needs the package timm, which is not "
                             f"installed; pip install 'hpo[timm]'")

    def make(self, image_shape: Sequence[int], n_classes: int) -> nn.Module:
        """Return the module.

        Raises:
            InputError: if timm has no such model or field, or it takes no such images.
            DataError: if the pretrained weights cannot be downloaded.
        """
        from hpo.train.ready_nets import timm_model

        return timm_model(self, tuple(image_shape), n_classes)


SHORT_NAMES: dict[str, type] = {
    "mlp": MLP, "simple_cnn": SimpleCNN, "resnet9": ResNet9, "cifar_resnet18": CifarResNet18,
    "vit": ViT, "speed_net": SpeedNet}
PACKAGES: dict[str, type] = {"torchvision": TorchvisionModel, "timm": TimmModel}
# What `rebuild` may make again out of a description; anything else is the user's own code.
MODELS: dict[str, type] = {
    kind.__name__: kind for kind in (*SHORT_NAMES.values(), *PACKAGES.values())}


def model(name: str, **fields: Any) -> ModelSpec:
    """Return the model of a name, with its fields: for a space whose Categorical picks a net.

    Names are "mlp", "simple_cnn", "resnet9", "cifar_resnet18", "vit", "speed_net", and
    "torchvision:NAME" or "timm:NAME" for a model of these packages, such as
    "torchvision:resnet18".

    Raises:
        InputError: if there is no such model, or it has no such field.
    """
    package, _, inner = str(name).partition(":")
    if inner and package in PACKAGES:
        return PACKAGES[package](inner, **fields)
    return make_named("model", name, {short: (kind, {}) for short, kind in SHORT_NAMES.items()},
                      fields, also=("torchvision:NAME", "timm:NAME"))
