"""Networks of torchvision and timm, sized to a data set and tried on one row of its shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpo.errors import DataError, InputError
from hpo.spec import nearest
from hpo.train.inits import initialise

if TYPE_CHECKING:
    from hpo.train.named_models import TimmModel, TorchvisionModel

Shape = tuple[int, ...]
# What a maker raises for a field or an image size that it does not take.
REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError, KeyError, IndexError,
            AttributeError, ZeroDivisionError)
# A hub that gives no answer within this time is away.
_ANSWER_S = 5.0
# By default these two train on several sets of scores, and warn unless told how to draw weights.
QUIET: dict[str, dict[str, bool]] = {
    name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}


def torchvision_model(spec: TorchvisionModel, image_shape: Shape, n_classes: int) -> nn.Module:
    """Return the network that `TorchvisionModel` describes.

    Raises:
        InputError: if there is no such model or field, or it takes no such images.
        DataError: if the pretrained weights cannot be downloaded.
    """
    from torchvision import models

    where = f"TorchvisionModel '{spec.name}'"
    known = models.list_models(module=models)
    if spec.name not in known:
        raise InputError(f"{where}: torchvision has no such classifier"
                         f"{nearest(spec.name, known)}; it has {', '.join(known)}")
    channels = _channels(where, image_shape)
    fields: dict[str, Any] = {**QUIET.get(spec.name, {}), **dict(spec.fields)}
    try:
        net = models.get_model(spec.name, weights=None, num_classes=n_classes, **fields)
    except REFUSALS as error:
        raise InputError(f"{where}: torchvision refuses {fields}: {_line(error)}") from error
    if channels != 3:
        _take_channels(net, channels)
    if spec.pretrained:
        published: Any = models.get_model_weights(spec.name)
        _load_weights(where, net, published.DEFAULT)
    return tried(where, initialise(net, spec.init), image_shape, n_classes)


def timm_model(spec: TimmModel, image_shape: Shape, n_classes: int) -> nn.Module:
    """Return the network that `TimmModel` describes.

    Raises:
        InputError: if there is no such model or field, or it takes no such images.
        DataError: if the pretrained weights cannot be downloaded.
    """
    import timm  # type: ignore[import-not-found]

    where = f"TimmModel '{spec.name}'"
    if not timm.is_model(spec.name):
        near = nearest(spec.name, timm.list_models())
        raise InputError(f"{where}: timm {timm.__version__} has no such model"
                         f"{near or '; timm.list_models() lists them'}")
    fields = {"in_chans": _channels(where, image_shape), "num_classes": n_classes,
              **dict(spec.fields)}
    try:
        net = timm.create_model(spec.name, pretrained=False, **fields)
    except REFUSALS as error:
        raise InputError(f"{where}: timm refuses {fields}: {_line(error)}") from error
    if spec.pretrained:
        net = _pretrained(where, lambda: timm.create_model(spec.name, pretrained=True, **fields))
    return tried(where, initialise(net, spec.init), image_shape, n_classes)


def _pretrained(where: str, make: Callable[[], nn.Module]) -> nn.Module:
    """Make a model of timm with its weights, from its cache alone while their hub is away."""
    from huggingface_hub import constants  # type: ignore[import-not-found]

    was_offline = constants.HF_HUB_OFFLINE
    away = None if was_offline else _no_answer(constants.ENDPOINT)
    # Its client would ask again and again, 23 s for each file that the cache lacks.
    constants.HF_HUB_OFFLINE = was_offline or away is not None
    try:
        return make()
    # Whatever its downloader raises: the same model without weights has just been made.
    except Exception as error:
        why = _line(error) if away is None else f"{constants.ENDPOINT} does not answer: {away}"
        raise DataError(f"{where}: its pretrained weights cannot be loaded ({why}); "
                        f"use pretrained=False to do without") from error
    finally:
        constants.HF_HUB_OFFLINE = was_offline


def _no_answer(url: str) -> str | None:
    """Return what keeps the hub's client from an answer, of whatever kind, or None."""
    from huggingface_hub.utils import get_session  # type: ignore[import-not-found]

    try:
        get_session().head(url, timeout=_ANSWER_S)
    except Exception as error:
        return _line(error)
    return None


def tried(where: str, net: nn.Module, image_shape: Shape, n_classes: int) -> nn.Module:
    """Return a network after one row has gone through it, which draws and changes nothing.

    Raises:
        InputError: if it takes no such images, or gives other than the scores of the classes.
    """
    training = net.training
    try:
        with torch.no_grad():
            scores = net.eval()(torch.zeros(1, *image_shape))
    except REFUSALS as error:
        raise InputError(f"{where}: takes no images of shape {list(image_shape)}: "
                         f"{_line(error)}") from error
    if not isinstance(scores, Tensor) or scores.shape != (1, n_classes):
        got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise InputError(f"{where}: gives {got} for one image, not {[1, n_classes]}; "
                         f"it is no plain classifier")
    return net.train(training)


def _channels(where: str, image_shape: Shape) -> int:
    if len(image_shape) != 3:
        raise InputError(f"{where}: needs images [channels, height, width], got rows of shape "
                         f"{list(image_shape)}; use MLP(hidden=...) for these")
    return image_shape[0]


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _first_layer(net: nn.Module) -> tuple[str, nn.Conv2d]:
    return next((name, part) for name, part in net.named_modules() if isinstance(part, nn.Conv2d))


def _take_channels(net: nn.Module, channels: int) -> None:
    """Give a network of three colours a new first layer for another number of channels."""
    name, old = _first_layer(net)
    new = nn.Conv2d(channels, old.out_channels, old.kernel_size, old.stride,  # type: ignore[arg-type]
                    old.padding, old.dilation, old.groups,  # type: ignore[arg-type]
                    old.bias is not None, old.padding_mode)
    parent, _, own = name.rpartition(".")
    setattr(net.get_submodule(parent), own, new)


def _load_weights(where: str, net: nn.Module, weights: Any) -> None:
    """Load published weights into all but the last layer, which has other classes.

    The first layer for `c` channels takes the mean over the colours times 3 / c, so that grey
    images give what they gave in three equal channels.
    """
    try:
        given = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{where}: its pretrained weights cannot be downloaded from "
                        f"{weights.url} ({_line(error)}); put the file into "
                        f"{torch.hub.get_dir()}/checkpoints, or use pretrained=False") from error
    first = f"{_first_layer(net)[0]}.weight"
    own = net.state_dict()
    n_known = len(weights.meta["categories"])
    taken = {}
    for name, value in own.items():
        new = given.get(name)
        if name == first and new is not None and new.shape[1] != value.shape[1]:
            new = new.mean(1, keepdim=True).expand_as(value) * (new.shape[1] / value.shape[1])
        fits = new is not None and new.shape == value.shape
        head = new is not None and new.shape[:1] == (n_known,) != value.shape[:1]
        if not fits and not head:
            raise InputError(f"{where}: the pretrained weights do not fit these fields at "
                             f"'{name}'; use pretrained=False, or leave them out")
        taken[name] = new if fits else value
    net.load_state_dict(taken)
