"""The models a recipe can name: plain values now, modules when a trial starts.

They are torch-free so that a study's module can be read, checked and listed in an instant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from hpo.errors import InputError
from hpo.train.checks import flag, number, one_of, whole
from hpo.train.inits import INITS

if TYPE_CHECKING:
    from torch import Tensor, nn

NORMS = ("batch", "layer", "group", "rms", "none")
ACTIVATIONS = ("relu", "gelu", "silu", "selu")
POOLS = ("cls", "mean")
# Those of models without residual blocks, or with ones that end in an activation: where that is
# ReLU, a branch of zeros has no gradient and stays zero for ever.
PLAIN_INITS = tuple(name for name in INITS if name != "zero_residual")
# Seven patches a side are the fewest of the published ones (224 pixels in patches of 32), and 16
# pixels the usual patch.
MIN_PATCHES, MAX_PATCH = 7, 16
# Attention costs the square of it; the published ones have 50 to 577.
MAX_TOKENS = 1024


@runtime_checkable
class ModelSpec(Protocol):
    """What the loop asks of a model's description."""

    def make(self, image_shape: Sequence[int], n_classes: int) -> nn.Module:
        """Return a module from inputs of one shape (no batch axis) to class scores."""
        ...


@runtime_checkable
class FromRows(Protocol):
    """A model's description whose initial weights come of training rows."""

    @property
    def n_init_rows(self) -> int:
        """How many rows it asks for; fewer come of a smaller data set."""
        ...

    def initialise_from(self, model: nn.Module, batches: Iterator[Tensor]) -> None:
        """Set a new module's weights from normalised training rows, on the module's device.

        It is asked once a trial, before the first step, and not where weights are loaded.
        """
        ...


def _check(spec: Any, *, dropouts: Sequence[str] = (), inits: Sequence[str]) -> None:
    """Check the fields that models share.

    Raises:
        InputError: naming the model and the field.
    """
    name = type(spec).__name__
    one_of(f"{name}.norm", spec.norm, NORMS)
    one_of(f"{name}.activation", spec.activation, ACTIVATIONS)
    one_of(f"{name}.init", spec.init, inits)
    number(f"{name}.dropout", spec.dropout, low=0.0, high=1.0, open_high=True)
    if hasattr(spec, "drop_path"):
        number(f"{name}.drop_path", spec.drop_path, low=0.0, high=1.0, open_high=True)
    if dropouts:
        one_of(f"{name}.dropout_kind", spec.dropout_kind, dropouts)
        if spec.dropout_kind == "alpha" and spec.activation != "selu":
            raise InputError(f"{name}.dropout_kind: 'alpha' keeps mean and deviation after SELU "
                             f"only, got activation={spec.activation!r}; use activation='selu'")


def _images(name: str, image_shape: Sequence[int]) -> tuple[int, int, int]:
    """Return channels, height and width.

    Raises:
        InputError: if the inputs are no images.
    """
    if len(image_shape) != 3:
        raise InputError(f"{name}: needs images [channels, height, width], got rows of "
                         f"shape {list(image_shape)}; use MLP(hidden=...) for these")
    channels, height, width = image_shape
    return channels, height, width


@dataclass(frozen=True)
class SimpleCNN:
    """Two convolution blocks, a hidden layer of the searched size, and dropout.

    A block is a 3x3 convolution, a norm, an activation and a 2x2 max-pool; the second has twice
    the `width`. `norm` is "batch", "layer" (over the channels of each pixel), "group" (as many
    groups as divide the channels, each of 16 or more), "rms" (over the channels of each pixel) or
    "none"; `activation` "relu", "gelu", "silu" or "selu"; `init` a name that `initialise` takes.
    `dropout_kind` "dropout" acts on the hidden layer, as does "alpha" (with SELU only), and
    "dropout2d" on whole channels after each block.

    Shapes: inputs [n, channels, height, width] of any size, outputs [n, n_classes].
    Raises:
        InputError: naming the field that does not fit.
    """

    hidden: int = 256
    dropout: float = 0.0
    width: int = 32
    norm: str = "batch"
    activation: str = "relu"
    dropout_kind: str = "dropout"
    init: str = "default"

    def __post_init__(self) -> None:
        whole("SimpleCNN.hidden", self.hidden, low=1)
        whole("SimpleCNN.width", self.width, low=1)
        _check(self, dropouts=("dropout", "dropout2d", "alpha"), inits=PLAIN_INITS)

    def make(self, image_shape: Sequence[int], n_classes: int) -> nn.Module:
        """Return the module.

        Raises:
            InputError: if the inputs are no images.
        """
        shape = _images("SimpleCNN", image_shape)
        from hpo.train.nets import simple_cnn

        return simple_cnn(self, shape, n_classes)


@dataclass(frozen=True)
class MLP:
    """Hidden layers of one size, each with a norm, an activation and dropout, on the flat input.

    `norm`, `activation` and `init` are as of `SimpleCNN`; layer and RMS norm are over a row.
    `dropout_kind` is "dropout" or "alpha": `MLP(activation="selu", dropout_kind="alpha",
    init="lecun")` is the self-normalising network.

    Shapes: inputs [n, ...] of any shape, outputs [n, n_classes].
    Raises:
        InputError: naming the field that does not fit.
    Source: Klambauer et al. 2017, Self-Normalizing Neural Networks (SELU, alpha dropout).
    """

    hidden: int = 256
    dropout: float = 0.0
    n_layers: int = 2
    norm: str = "none"
    activation: str = "relu"
    dropout_kind: str = "dropout"
    init: str = "default"

    def __post_init__(self) -> None:
        whole("MLP.hidden", self.hidden, low=1)
        whole("MLP.n_layers", self.n_layers, low=1)
        _check(self, dropouts=("dropout", "alpha"), inits=PLAIN_INITS)

    def make(self, image_shape: Sequence[int], n_classes: int) -> nn.Module:
        """Return the module."""
        from hpo.train.nets import mlp

        return mlp(self, tuple(image_shape), n_classes)


@dataclass(frozen=True)
class ResNet9:
    """A residual network of nine layers that learns CIFAR-10 in few epochs.

    Eight 3x3 convolutions of `width` to 8 `width` channels, two residual blocks, and a linear
    layer on the largest of each channel. `norm`, `activation`, `dropout_kind` ("dropout" before
    the linear layer, or "dropout2d" after each pooled block) and `init` are as of `SimpleCNN`.
    `drop_path` leaves out the residual branch of a row: half as often in the first block.

    Shapes: inputs [n, channels, height, width] of any size, outputs [n, n_classes].
    Raises:
        InputError: naming the field that does not fit.
    Source: Page 2018, How to Train Your ResNet; without its scale of the scores.
    """

    width: int = 64
    dropout: float = 0.0
    drop_path: float = 0.0
    norm: str = "batch"
    activation: str = "relu"
    dropout_kind: str = "dropout"
    init: str = "default"

    def __post_init__(self) -> None:
        whole("ResNet9.width", self.width, low=1)
        _check(self, dropouts=("dropout", "dropout2d"), inits=PLAIN_INITS)

    def make(self, image_shape: Sequence[int], n_classes: int) -> nn.Module:
        """Return the module.

        Raises:
            InputError: if the inputs are no images.
        """
        shape = _images("ResNet9", image_shape)
        from hpo.train.nets import resnet9

        return resnet9(self, shape, n_classes)


@dataclass(frozen=True)
class CifarResNet18:
    """The residual network of 18 layers for small images: a 3x3 first layer and no max-pool.

    torchvision's, which is made for images of 224 pixels, is `TorchvisionModel("resnet18")`.
    `norm`, `activation`, `dropout_kind` ("dropout" before the linear layer, or "dropout2d" after
    each of the four stages) and `init` are as of `SimpleCNN`, and "zero_residual" besides.
    `drop_path` leaves out the residual branch of a row, rising in a line over the eight blocks.

    Shapes: inputs [n, channels, height, width] of any size, outputs [n, n_classes].
    Raises:
        InputError: naming the field that does not fit.
    Source: He et al. 2016, Deep Residual Learning for Image Recognition, section 4.2.
    """

    width: int = 64
    dropout: float = 0.0
    drop_path: float = 0.0
    norm: str = "batch"
    activation: str = "relu"
    dropout_kind: str = "dropout"
    init: str = "default"

    def __post_init__(self) -> None:
        whole("CifarResNet18.width", self.width, low=1)
        _check(self, dropouts=("dropout", "dropout2d"), inits=INITS)

    def make(self, image_shape: Sequence[int], n_classes: int) -> nn.Module:
        """Return the module.

        Raises:
            InputError: if the inputs are no images.
        """
        shape = _images("CifarResNet18", image_shape)
        from hpo.train.nets import cifar_resnet18

        return cifar_resnet18(self, shape, n_classes)


@dataclass(frozen=True)
class ViT:
    """A small vision transformer with the norm before each branch.

    `patch_size` None takes the largest one up to 16 that divides height and width and leaves 7
    patches or more a side. The scores come of a class token (`pool="cls"`) or of the mean over
    the tokens ("mean"). `dropout` acts after the positions and each dense layer, `drop_path`
    leaves out both branches of a row and rises in a line over the blocks. `norm` is of each token;
    "batch" and "group" are over the tokens too. `init` takes all names that `initialise` has.

    Shapes: inputs [n, channels, height, width], outputs [n, n_classes].
    Raises:
        InputError: naming the field that does not fit.
    Source: Dosovitskiy et al. 2021, An Image is Worth 16x16 Words, equations 1 to 4.
    """

    width: int = 192
    n_layers: int = 6
    n_heads: int = 3
    mlp_ratio: int = 4
    patch_size: int | None = None
    pool: str = "cls"
    dropout: float = 0.0
    drop_path: float = 0.0
    norm: str = "layer"
    activation: str = "gelu"
    init: str = "default"

    def __post_init__(self) -> None:
        for field in ("width", "n_layers", "n_heads", "mlp_ratio"):
            whole(f"ViT.{field}", getattr(self, field), low=1)
        if self.patch_size is not None:
            whole("ViT.patch_size", self.patch_size, low=1)
        if self.width % self.n_heads:
            raise InputError(f"ViT.n_heads: must divide width={self.width}, got {self.n_heads}")
        one_of("ViT.pool", self.pool, POOLS)
        _check(self, inits=INITS)

    def make(self, image_shape: Sequence[int], n_classes: int) -> nn.Module:
        """Return the module.

        Raises:
            InputError: if the inputs are no images, or the patch size does not fit them.
        """
        shape = _images("ViT", image_shape)
        patch = self._patch(*shape[1:])
        from hpo.train.vit import vit

        return vit(self, shape, n_classes, patch)

    def _patch(self, height: int, width: int) -> int:
        common = math.gcd(height, width)
        fitting = [n for n in range(1, common + 1) if common % n == 0]
        if self.patch_size is not None and self.patch_size not in fitting:
            raise InputError(f"ViT.patch_size: must divide images of {height}x{width}, got "
                             f"{self.patch_size}; {', '.join(map(str, fitting))} do")
        patch = self.patch_size or max(
            (n for n in fitting if n <= MAX_PATCH and min(height, width) // n >= MIN_PATCHES),
            default=1)
        n_tokens = (height // patch) * (width // patch)
        if n_tokens > MAX_TOKENS:
            raise InputError(f"ViT: images of {height}x{width} in patches of {patch} are "
                             f"{n_tokens} tokens, over {MAX_TOKENS}; give a patch_size, or images "
                             f"whose sides have a larger common divisor")
        return patch


@dataclass(frozen=True)
class SpeedNet:
    """A small network that learns CIFAR-10 in the fewest seconds, for short trainings on a GPU.

    Its first layer whitens patches of 2x2 pixels: its weights come of 5,000 training images when
    a trial begins, and only its bias trains. Three groups of two 3x3 convolutions follow, of
    `width`, 4 `width` and 4 `width` channels, each with a 2x2 max-pool after the first, and a
    linear layer without a bias on the largest of each channel, whose scores are multiplied by
    `scale`. The 3x3 convolutions begin as the identity as far as they have channels; any other
    `init` draws them and the linear layer as `initialise` does. `norm` "batch" trains biases
    alone, and its running statistics follow the last few batches. With `mirror` a model that is
    evaluated gives the mean of the scores of each image and of its mirror image, wherever it is
    evaluated: in validation, in the test and when it is exported. `norm` and `activation` are as
    of `SimpleCNN`; `dropout` is before the linear layer.

    Shapes: inputs [n, channels, height, width] of 2x2 pixels or more, outputs [n, n_classes].
    Raises:
        InputError: naming the field that does not fit.
    Source: Jordan 2024, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU, sections 3.1 to 3.5;
        Page 2019, How to Train Your ResNet 8 (whitening, biases, mirrored scores).
    """

    n_init_rows: ClassVar[int] = 5_000

    width: int = 64
    scale: float = 1 / 9
    mirror: bool = True
    dropout: float = 0.0
    norm: str = "batch"
    activation: str = "gelu"
    init: str = "default"

    def __post_init__(self) -> None:
        whole("SpeedNet.width", self.width, low=1)
        number("SpeedNet.scale", self.scale, low=0.0, open_low=True)
        flag("SpeedNet.mirror", self.mirror)
        _check(self, inits=PLAIN_INITS)

    def make(self, image_shape: Sequence[int], n_classes: int) -> nn.Module:
        """Return the module, its first layer not whitening yet.

        Raises:
            InputError: if the inputs are no images, or too small.
        """
        shape = _images("SpeedNet", image_shape)
        if min(shape[1:]) < 2:
            raise InputError(f"SpeedNet: needs images of 2x2 pixels or more, got "
                             f"{shape[1]}x{shape[2]}")
        from hpo.train.speed_net import speed_net

        return speed_net(self, shape, n_classes)

    def initialise_from(self, model: nn.Module, batches: Iterator[Tensor]) -> None:
        """Have the first layer whiten the patches of normalised training images."""
        from hpo.train.speed_net import whiten

        whiten(model, batches)
