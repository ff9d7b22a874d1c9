"""The models that ship: shapes, published sizes, reference outputs, and weights of before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from hpo import Run
from hpo.errors import InputError
from hpo.train import MLP, SGD, CifarResNet18, Recipe, ResNet9, SimpleCNN, ViT, tensors
from hpo.train.checkpoint import rebuild
from hpo.train.loop import Trainer
from hpo.train.models import ACTIVATIONS, NORMS
from hpo.train.recipe import describe

SMALL: dict[str, dict[str, Any]] = {
    "SimpleCNN": {"hidden": 8, "width": 4}, "MLP": {"hidden": 8}, "ResNet9": {"width": 4},
    "CifarResNet18": {"width": 4}, "ViT": {"width": 12, "n_layers": 2}}
KINDS: dict[str, Any] = {"SimpleCNN": SimpleCNN, "MLP": MLP, "ResNet9": ResNet9,
                         "CifarResNet18": CifarResNet18, "ViT": ViT}


def small(kind: str, **fields: Any) -> Any:
    return KINDS[kind](**{**SMALL[kind], **fields})


def n_parameters(net: nn.Module) -> int:
    return sum(value.numel() for value in net.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (2, 28, 20), (5, 1, 1), (3, 7, 9)])
def test_images_of_any_size_and_channels_give_scores(kind: str, shape: Sequence[int]) -> None:
    net = small(kind).make(shape, 5).eval()
    assert net(torch.zeros(2, *shape)).shape == (2, 5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_norm_and_activation_trains_a_step(kind: str, norm: str, activation: str) -> None:
    torch.manual_seed(0)
    net = small(kind, norm=norm, activation=activation, dropout=0.1).make((2, 8, 8), 3)
    x, y = torch.randn(9, 2, 8, 8), torch.arange(9) % 3
    before = fn.cross_entropy(net(x), y)
    before.backward()
    assert all(value.grad is not None and bool(value.grad.isfinite().all())
               for value in net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    optimizer.step()
    after = fn.cross_entropy(net(x), y)
    assert bool(after.isfinite()) and float(after.detach()) != float(before.detach())


def test_the_sizes_are_the_published_ones() -> None:
    assert n_parameters(CifarResNet18().make((3, 32, 32), 10)) == 11_173_962
    # Published with a bias in each of its 2,240 channels, which batch norm takes away again.
    assert n_parameters(ResNet9().make((3, 32, 32), 10)) == 6_575_370 - 2_240
    # ViT-Tiny of 16 pixels at 224.
    tiny = ViT(width=192, n_layers=12, n_heads=3, patch_size=16)
    assert n_parameters(tiny.make((3, 224, 224), 1000)) == 5_717_416


def settled(net: Any) -> Any:
    """Return a net whose norms hold means and deviations of their own, in evaluation mode."""
    for name, value in net.named_buffers():
        if name.endswith("running_mean"):
            value.normal_()
        elif name.endswith("running_var"):
            value.uniform_(0.5, 2.0)
    for value in net.parameters():
        if value.ndim == 1:
            nn.init.uniform_(value, 0.5, 1.5)
    return net.eval()


def test_the_cifar_resnet_is_torchvision_s_with_another_first_layer_and_no_pool() -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    net = settled(CifarResNet18().make((3, 32, 32), 10))
    theirs: Any = resnet18(num_classes=10)
    theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    theirs.load_state_dict(dict(zip(theirs.state_dict(), net.state_dict().values(), strict=True)))
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(net(x), theirs.eval()(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_the_transformer_is_torchvision_s_and_the_mean_is_that_of_all_tokens(pool: str) -> None:
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    net = settled(ViT(width=24, n_layers=2, n_heads=3, patch_size=4, pool=pool).make(
        (3, 16, 16), 5))
    theirs: Any = VisionTransformer(16, 4, 2, 3, 24, 96, num_classes=5,
                                    norm_layer=partial(nn.LayerNorm, eps=1e-5)).eval()
    own = dict(net.named_parameters())
    renamed = {"class_token": own.get("cls", torch.zeros(1, 1, 24)),
               "conv_proj.weight": own["patches.weight"], "conv_proj.bias": own["patches.bias"]}
    positions = own["positions"]
    renamed["encoder.pos_embedding"] = positions if pool == "cls" else torch.cat(
        [torch.zeros(1, 1, 24), positions], 1)
    for name in theirs.state_dict():
        if "layers." in name:
            renamed[name] = own[_own_name(name)]
        elif name.startswith("encoder.ln"):
            renamed[name] = own[f"norm.{name.rpartition('.')[2]}"]
        elif name.startswith("heads"):
            renamed[name] = own[f"head.{name.rpartition('.')[2]}"]
    theirs.load_state_dict(renamed)
    x = torch.randn(2, 3, 16, 16)
    if pool == "cls":
        torch.testing.assert_close(net(x), theirs(x), rtol=1e-4, atol=1e-5)
        return
    tokens = theirs._process_input(x) + positions
    expected = theirs.heads(theirs.encoder.ln(theirs.encoder.layers(tokens)).mean(1))
    torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-5)


def _own_name(theirs: str) -> str:
    """Return our name of a parameter in `encoder.layers.encoder_layer_0.ln_1.weight`."""
    block, _, part = theirs.removeprefix("encoder.layers.encoder_layer_").partition(".")
    for name, own in (("ln_1", "0.branch.0"), ("self_attention", "0.branch.1.heads"),
                      ("ln_2", "1.branch.0"), ("mlp.0", "1.branch.1"), ("mlp.3", "1.branch.4")):
        if part.startswith(name + "."):
            return f"blocks.{block}.{own}{part.removeprefix(name)}"
    raise AssertionError(theirs)


def test_resnet9_is_its_published_layers() -> None:
    """Eight convolutions, two of them a residual twice, written out in float64."""
    torch.manual_seed(0)
    net = settled(ResNet9(width=4).make((3, 16, 16), 5)).double()
    values = iter(net.state_dict().values())

    def conv(x: Tensor) -> Tensor:
        weight, scale, shift, mean, var, _ = (next(values) for _ in range(6))
        x = fn.conv2d(x, weight, padding=1)
        shaped = [part.view(1, -1, 1, 1) for part in (scale, shift, mean, var)]
        return ((x - shaped[2]) / (shaped[3] + 1e-5).sqrt() * shaped[0] + shaped[1]).clamp_min(0)

    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    y = fn.max_pool2d(conv(conv(x)), 2)
    y = y + conv(conv(y))
    y = fn.max_pool2d(conv(fn.max_pool2d(conv(y), 2)), 2)
    y = y + conv(conv(y))
    weight, bias = next(values), next(values)
    torch.testing.assert_close(net(x), y.amax((2, 3)) @ weight.T + bias, rtol=1e-9, atol=1e-9)


def old_cnn() -> nn.Sequential:
    """Return the net that SimpleCNN(hidden=8, dropout=0.2, width=4) was before it had a norm."""
    def block(n_in: int, n_out: int) -> list[nn.Module]:
        return [nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out),
                nn.ReLU(inplace=True), nn.MaxPool2d(2, ceil_mode=True)]

    return nn.Sequential(*block(1, 4), *block(4, 8), nn.Flatten(), nn.Linear(32, 8),
                         nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(8, 10))


def old_mlp() -> nn.Sequential:
    """Return the net that MLP(hidden=8, dropout=0.2) was."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(inplace=True), nn.Dropout(0.2),
                         nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.2),
                         nn.Linear(8, 10))


OLD: list[tuple[Any, dict[str, Any], Any]] = [
    (old_cnn, {"type": "SimpleCNN", "hidden": 8, "dropout": 0.2, "width": 4},
     SimpleCNN(hidden=8, dropout=0.2, width=4)),
    (old_mlp, {"type": "MLP", "hidden": 8, "dropout": 0.2, "n_layers": 2},
     MLP(hidden=8, dropout=0.2))]


@pytest.mark.parametrize(("old", "described", "spec"), OLD, ids=["cnn", "mlp"])
def test_a_checkpoint_of_before_there_was_a_choice_is_loaded_and_seeds_draw_the_same(
    old: Any, described: dict[str, Any], spec: Any
) -> None:
    torch.manual_seed(3)
    before = old()
    torch.manual_seed(3)
    now = spec.make((1, 8, 8), 10)
    assert list(before.state_dict()) == list(now.state_dict())
    x = torch.randn(4, 1, 8, 8)
    for net in (before, now):
        torch.manual_seed(5)
        fn.cross_entropy(net(x), torch.arange(4)).backward()
    assert all(torch.equal(cast(Tensor, a.grad), cast(Tensor, b.grad)) for a, b in zip(
        before.parameters(), now.parameters(), strict=True))
    entry = {"recipe": {"model": described}, "image_shape": [1, 8, 8], "n_classes": 10,
             "model": before.state_dict()}
    assert torch.equal(rebuild(json.loads(json.dumps(
        {**entry, "model": None})) | {"model": before.state_dict()})(x), before.eval()(x))


CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("SimpleCNN", {"norm": "group", "dropout": 0.3, "dropout_kind": "dropout2d"}),
    ("SimpleCNN", {"norm": "none", "activation": "silu", "init": "orthogonal"}),
    ("MLP", {"norm": "rms", "dropout": 0.3, "n_layers": 3}),
    ("MLP", {"activation": "selu", "dropout_kind": "alpha", "dropout": 0.1, "init": "lecun"}),
    ("ResNet9", {"drop_path": 0.3, "norm": "layer", "dropout": 0.2}),
    ("CifarResNet18", {"drop_path": 0.3, "dropout": 0.2, "dropout_kind": "dropout2d",
                       "init": "zero_residual"}),
    ("ViT", {"drop_path": 0.3, "dropout": 0.1, "pool": "mean", "patch_size": 2, "norm": "rms"}),
    ("ViT", {"norm": "batch", "init": "truncated_normal"})]


@pytest.mark.parametrize(("kind", "fields"), CHOICES)
def test_a_trained_model_is_made_again_from_its_description(
    kind: str, fields: dict[str, Any]
) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 2, 8, 8)).astype("float32"), np.arange(24) % 3
    recipe = Recipe(data=tensors(x, y, val=(x, y)), model=small(kind, **fields),
                    optimizer=SGD(lr=0.01), batch_size=8)
    trainer = Trainer(recipe, Run(epochs=1, seed=0, device="cpu", dir=Path(".")))
    (epoch,) = trainer.epochs()
    assert np.isfinite(epoch["train_loss"])
    described = json.loads(json.dumps(describe(recipe)))
    again = rebuild({"recipe": described, "image_shape": [2, 8, 8], "n_classes": 3,
                     "model": trainer.model.state_dict()})
    # The trainer's layout, which sums in another order.
    again, inputs = again.to(memory_format=torch.channels_last), torch.from_numpy(x)
    with torch.no_grad():
        assert torch.equal(again(inputs), trainer.model.eval()(inputs))


def test_dropout_is_where_its_kind_says() -> None:
    def layers(spec: Any) -> list[str]:
        return [type(part).__name__ for part in spec.make((1, 8, 8), 3).modules()]

    after = {"SimpleCNN": 2, "ResNet9": 3, "CifarResNet18": 4}
    for kind, n in after.items():
        names = layers(small(kind, dropout=0.5, dropout_kind="dropout2d"))
        assert (names.count("Dropout2d"), names.count("Dropout")) == (n, 0)
        names = layers(small(kind, dropout=0.5))
        assert (names.count("Dropout2d"), names.count("Dropout")) == (0, 1)
        assert names[-2:] == ["Dropout", "Linear"]
    names = layers(MLP(n_layers=3, dropout=0.1, activation="selu", dropout_kind="alpha"))
    assert names.count("AlphaDropout") == 3 and names.count("Dropout") == 0


def test_drop_path_rises_over_the_blocks_of_each_residual_net() -> None:
    def rates(spec: Any) -> list[float]:
        return [part.p for part in spec.make((1, 8, 8), 3).modules()
                if type(part).__name__ == "StochasticDepth"]

    assert rates(small("ResNet9", drop_path=0.2)) == pytest.approx([0.1, 0.2])
    assert rates(small("CifarResNet18", drop_path=0.4)) == pytest.approx(
        [0.05 * n for n in range(1, 9)])
    assert rates(small("ViT", drop_path=0.2)) == pytest.approx([0.1, 0.1, 0.2, 0.2])
    assert rates(small("ViT")) == []


@pytest.mark.parametrize(("size", "patch"), [
    ((224, 224), 16), ((32, 32), 4), ((28, 28), 4), ((8, 8), 1), ((64, 48), 4), ((96, 96), 12),
    ((30, 20), 2), ((1, 1), 1)])
def test_a_patch_size_that_fits_is_found(size: tuple[int, int], patch: int) -> None:
    net: Any = ViT(width=3, n_layers=1, n_heads=1).make((3, *size), 2)
    assert net.patches.kernel_size == (patch, patch)
    assert net(torch.zeros(1, 3, *size)).shape == (1, 2)


WRONG: Any = {"norm": 3, "patch": "big"}


@pytest.mark.parametrize(("make", "told"), [
    (lambda: SimpleCNN(norm="bach"),
     "SimpleCNN.norm: must be one of batch, layer, group, rms, none, got 'bach'; did you mean "
     "'batch'?"),
    (lambda: MLP(norm=WRONG["norm"]), "MLP.norm: must be one of batch, layer, group"),
    (lambda: ResNet9(activation="tanh"),
     "ResNet9.activation: must be one of relu, gelu, silu, selu, got 'tanh'"),
    (lambda: MLP(dropout_kind="dropout2d"),
     "MLP.dropout_kind: must be one of dropout, alpha, got 'dropout2d'"),
    (lambda: MLP(dropout_kind="alpha"),
     "MLP.dropout_kind: 'alpha' keeps mean and deviation after SELU only, got "
     "activation='relu'; use activation='selu'"),
    (lambda: ResNet9(init="zero_residual"), "ResNet9.init: must be one of default, kaiming"),
    (lambda: SimpleCNN(init="zero_residual"), "SimpleCNN.init"),
    (lambda: ResNet9(drop_path=1.0), "ResNet9.drop_path: must be in [0, 1), got 1.0"),
    (lambda: CifarResNet18(width=0), "CifarResNet18.width: must be at least 1, got 0"),
    (lambda: CifarResNet18(dropout=-0.1), "CifarResNet18.dropout"),
    (lambda: ViT(width=64), "ViT.n_heads: must divide width=64, got 3"),
    (lambda: ViT(pool="max"), "ViT.pool: must be one of cls, mean, got 'max'"),
    (lambda: ViT(n_layers=0), "ViT.n_layers"), (lambda: ViT(patch_size=0), "ViT.patch_size"),
    (lambda: ViT(patch_size=WRONG["patch"]), "ViT.patch_size: must be a whole number, got 'big'"),
    (lambda: ViT(patch_size=5).make((3, 32, 48), 2),
     "ViT.patch_size: must divide images of 32x48, got 5; 1, 2, 4, 8, 16 do"),
    (lambda: ViT().make((3, 97, 89), 2), "are 8633 tokens, over 1024"),
    (lambda: ViT().make((12,), 2), "ViT: needs images [channels, height, width]"),
    (lambda: ResNet9().make((12,), 2), "ResNet9: needs images [channels, height, width]"),
    (lambda: CifarResNet18().make((3, 4), 2), "CifarResNet18: needs images"),
])
def test_a_fault_of_a_model_is_one_line_that_names_the_field(make: Any, told: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert told in str(caught.value) and "\n" not in str(caught.value)
