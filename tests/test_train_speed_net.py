"""SpeedNet: what it computes, that its first layer whitens, and that it trains as any model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.utils.data import TensorDataset

from hpo import Run
from hpo.errors import DataError, InputError
from hpo.train import (
    EMA,
    MLP,
    SGD,
    AlternatingFlip,
    CrossEntropy,
    Linear,
    Muon,
    RandomCrop,
    Recipe,
    SpeedNet,
    datasets,
    model,
    tensors,
)
from hpo.train.checkpoint import rebuild
from hpo.train.loop import Trainer
from hpo.train.models import ACTIVATIONS, NORMS, FromRows
from hpo.train.recipe import describe
from hpo.train.scoring import score
from hpo.train.speed_net import EPS, patch_moments, whiten

# Channels of the three groups of width 64, and values of whitened patches of three colours.
GROUPS, N_WHITE = ((24, 64), (64, 256), (256, 256)), 24


def run_of(**fields: Any) -> Run:
    return Run(**{"epochs": 1, "seed": 3, "device": "cpu", "dir": Path("."), **fields})


def pictures(n: int, seed: int = 0, size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Return noisy stripes: upright, level or of one colour, in colours that are alike."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % 3)
    wave = np.sin(np.arange(size) * 1.6 + rng.random((n, 1)) * 6)
    stripes = np.stack([np.broadcast_to(wave[:, None, :], (n, size, size)),
                        np.broadcast_to(wave[:, :, None], (n, size, size)),
                        np.zeros((n, size, size))])[y, np.arange(n)]
    hue = rng.normal(1.0, 0.2, (n, 3, 1, 1))
    x = 120 + 30 * stripes[:, None] * hue + rng.normal(0, 25, (n, 3, size, size))
    return x.clip(0, 255).astype(np.uint8), y.astype(np.int64)


X, Y = pictures(200)


def recipe_of(data: Any = None, **fields: Any) -> Recipe:
    return Recipe(**{"data": data or tensors(X, Y), "model": SpeedNet(width=4),
                     "optimizer": SGD(0.2), "batch_size": 50, **fields})


def first_layer(net: nn.Module) -> nn.Conv2d:
    return next(part for part in net.modules() if isinstance(part, nn.Conv2d))


def patches(images: np.ndarray) -> np.ndarray:
    """Return all 2x2 patches [n, channels * 4], cut out one by one, in float64."""
    n, _, height, width = images.shape
    return np.stack([images[k, :, i:i + 2, j:j + 2].astype(np.float64).ravel()
                     for k in range(n) for i in range(height - 1) for j in range(width - 1)])


def test_moments_of_patches_are_those_of_numpy_whatever_the_batches() -> None:
    images = torch.from_numpy(X[:40]).float() / 50 - 2
    cut = patches(images.numpy())
    for size in (40, 7, 1):
        mean, covariance = patch_moments(images.split(size), 2)
        assert mean.numpy() == pytest.approx(cut.mean(0), rel=1e-10)
        assert covariance.numpy() == pytest.approx(np.cov(cut.T, bias=True), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("channels", [1, 3])
def test_whitened_patches_have_mean_0_and_the_identity_as_covariance(channels: int) -> None:
    """In float64, and each direction a second time with the other sign."""
    images = torch.from_numpy(X[:60, :channels]).float() / 60 - 2
    net = SpeedNet(width=2).make((channels, 16, 16), 3)
    whiten(net, images.split(16))
    layer = first_layer(net).double()
    with torch.no_grad():
        out = layer(images.double()).transpose(0, 1).flatten(1).numpy()
    half = 4 * channels
    assert out[half:] == pytest.approx(-out[:half], abs=1e-5)
    assert out.mean(1) == pytest.approx(0.0, abs=1e-5)
    variances = np.linalg.eigvalsh(np.cov(patches(images.numpy()).T, bias=True))
    expected = np.diag(variances / (variances + EPS))
    covariance = np.cov(out[:half], bias=True)
    assert covariance == pytest.approx(expected, abs=1e-5)
    assert covariance == pytest.approx(np.eye(half), abs=2e-2)


def test_a_direction_in_which_patches_do_not_vary_is_not_blown_up() -> None:
    images = torch.ones(5, 2, 4, 4)
    net = SpeedNet(width=2).make((2, 4, 4), 3)
    whiten(net, [images])
    out = first_layer(net)(images)
    assert float(out.abs().max().detach()) < 1e-3


def test_the_first_layer_of_a_trial_whitens_its_training_rows_and_stays_as_it_is() -> None:
    """Also of rows that a loader reads; the split and the rows are the seed's."""
    trained = Trainer(recipe_of(), run_of())
    feed = trained.data.train
    [(images, _)] = feed.batches(None, len(feed), 1)
    images = trained.data.normalised(images, ready=feed.ready)
    assert images.shape == (180, 3, 16, 16)
    expected = SpeedNet(width=4).make((3, 16, 16), 3)
    whiten(expected, [images])
    begun = first_layer(trained.model)
    torch.testing.assert_close(
        begun.weight.abs(), first_layer(expected).weight.abs(), rtol=1e-3, atol=1e-4)
    weight, bias = begun.weight.clone(), begun.bias
    assert bias is not None
    before = bias.detach().clone()
    for other in (recipe_of(resident=False, n_loader_workers=0), recipe_of()):
        again = Trainer(other, run_of())
        assert torch.equal(first_layer(again.model).weight, weight)
        again.close()
    other = Trainer(recipe_of(), run_of(seed=4))
    assert not torch.equal(first_layer(other.model).weight, weight)
    list(trained.epochs())
    assert torch.equal(begun.weight, weight) and not torch.equal(bias, before)


def test_a_user_s_own_datasets_are_whitened_too() -> None:
    x, y = torch.from_numpy(X).float() / 60 - 2, torch.from_numpy(Y)
    trained = Trainer(recipe_of(datasets(TensorDataset(x, y), val=TensorDataset(x, y),
                                         n_classes=3), n_loader_workers=0), run_of())
    expected = SpeedNet(width=4).make((3, 16, 16), 3)
    whiten(expected, [x])
    torch.testing.assert_close(first_layer(trained.model).weight.abs(),
                               first_layer(expected).weight.abs(), rtol=1e-3, atol=1e-4)
    trained.close()


class Counting:
    """A model of the user's own that begins with the mean of some rows."""

    n_init_rows = 7

    def __init__(self) -> None:
        self.seen: list[int] = []

    def make(self, image_shape: Sequence[int], n_classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, n_classes))

    def initialise_from(self, model: nn.Module, batches: Iterator[Tensor]) -> None:
        images = torch.cat(list(batches))
        self.seen.append(len(images))
        with torch.no_grad():
            cast(Any, model)[1].bias.fill_(float(images.mean()))


def test_a_model_of_one_s_own_is_given_rows_once_a_trial_and_none_where_weights_are_loaded(
    tmp_path: Path
) -> None:
    own = Counting()
    assert isinstance(own, FromRows) and isinstance(SpeedNet(), FromRows)
    recipe = recipe_of(model=own)
    trained = Trainer(recipe, run_of())
    assert own.seen == [7]
    assert float(cast(Any, trained.model)[1].bias.detach().abs().min()) > 0
    list(trained.epochs())
    trained.save(tmp_path / "best")
    told = score(recipe, run_of(), tmp_path / "best", "val")
    assert told["val_accuracy"] == trained.best["val_accuracy"] and own.seen == [7]


def test_a_model_that_asks_for_no_rows_draws_the_same_weights_as_alone() -> None:
    assert not isinstance(MLP(), FromRows)
    trained = Trainer(recipe_of(model=MLP(hidden=4)), run_of())
    torch.manual_seed(3)
    alone = MLP(hidden=4).make((3, 16, 16), 3)
    after = torch.rand(3)
    with trained.random:
        assert torch.equal(torch.rand(3), after)
    assert all(torch.equal(a, b) for a, b in zip(
        trained.model.parameters(), alone.parameters(), strict=True))


def test_its_size_is_the_published_one_and_neither_whitening_nor_norm_scales_train() -> None:
    net = SpeedNet().make((3, 32, 32), 10)
    convolutions = sum(9 * (n_in * n_out + n_out * n_out) for n_in, n_out in GROUPS)
    biases = N_WHITE + sum(2 * n_out for _, n_out in GROUPS)
    sizes = {trains: sum(p.numel() for p in net.parameters() if p.requires_grad == trains)
             for trains in (True, False)}
    assert sizes == {True: convolutions + biases + 2_560, False: N_WHITE * 12 + biases - N_WHITE}
    assert sum(sizes.values()) == 1_972_792


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (2, 28, 20), (5, 2, 2), (3, 7, 9)])
def test_images_of_any_size_from_2x2_give_scores(shape: Sequence[int]) -> None:
    net = SpeedNet(width=3).make(shape, 5)
    x = torch.randn(4, *shape)
    assert net(x).shape == (4, 5) and net.eval()(x).shape == (4, 5)


@pytest.mark.parametrize("mirror", [True, False])
def test_it_is_its_published_layers(mirror: bool) -> None:
    """Written out in float64, with norms of statistics of their own."""
    torch.manual_seed(0)
    spec = SpeedNet(width=4, scale=0.2, mirror=mirror)
    net = spec.make((3, 32, 32), 5).double().eval()
    for name, value in net.named_buffers():
        if "running" in name:
            value.uniform_(0.5, 2.0)
    for value in net.parameters():
        if value.ndim == 1:
            nn.init.normal_(value)
    values = [value for value in net.state_dict().values() if value.is_floating_point()]

    def scores(x: Tensor) -> Tensor:
        left = iter(values)
        x = fn.gelu(fn.conv2d(x, next(left), next(left)))
        for _ in range(3):
            for pools in (True, False):
                x = fn.conv2d(x, next(left), padding=1)
                x = fn.max_pool2d(x, 2) if pools else x
                gain, shift, mean, var = (next(left).view(1, -1, 1, 1) for _ in range(4))
                x = fn.gelu((x - mean) / (var + 1e-5).sqrt() * gain + shift)
        assert x.shape[2:] == (3, 3)
        return x.amax((2, 3)) @ next(left).T * 0.2

    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    expected = (scores(x) + scores(x.flip(-1))) / 2 if mirror else scores(x)
    torch.testing.assert_close(net(x), expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(net(x), net(x.flip(-1))) == mirror


def test_it_scores_both_ways_only_where_it_is_evaluated() -> None:
    torch.manual_seed(0)
    net = SpeedNet(width=4, norm="none").make((3, 8, 8), 5)
    x = torch.randn(3, 3, 8, 8)
    once, turned = net(x), net(x.flip(-1))
    assert not torch.allclose(once, turned)
    assert torch.equal(net.eval()(x), (once + turned) / 2)


def test_its_convolutions_begin_as_the_identity_as_far_as_they_have_channels() -> None:
    net = SpeedNet(width=8).make((3, 16, 16), 5)
    n_seen = 0
    for part in net.modules():
        if isinstance(part, nn.Conv2d) and part.kernel_size == (3, 3):
            x = torch.randn(2, part.in_channels, 6, 6)
            n = min(part.in_channels, part.out_channels)
            torch.testing.assert_close(part(x)[:, :n], x[:, :n])
            n_seen += 1
    assert n_seen == 6


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_norm_and_activation_trains_all_that_is_to_train(norm: str, activation: str) -> None:
    torch.manual_seed(0)
    net = SpeedNet(width=4, norm=norm, activation=activation, dropout=0.1).make((2, 8, 8), 3)
    fn.cross_entropy(net(torch.randn(9, 2, 8, 8)), torch.arange(9) % 3).backward()
    for name, value in net.named_parameters():
        assert (value.grad is not None and bool(value.grad.isfinite().all())) == (
            value.requires_grad), name


@pytest.mark.parametrize("optimizer", [
    SGD(0.6, momentum=0.85, weight_decay=1e-3, bias_lr_factor=8.0), Muon(0.05)],
    ids=["sgd", "muon"])
def test_it_learns_stripes_with_all_of_the_published_ways(optimizer: Any) -> None:
    x, y = pictures(400, 1)
    val = pictures(120, 2)
    trained = Trainer(recipe_of(
        tensors(x, y, val=val), model=SpeedNet(width=8), batch_size=25, optimizer=optimizer,
        schedule=Linear(0.23, 0.07), loss=CrossEntropy(label_smoothing=0.2), ema=EMA(0.9),
        augment=(RandomCrop(2, fill="reflect"), AlternatingFlip()), precision="bf16"),
        run_of(epochs=5))
    assert [epoch["val_accuracy"] for epoch in trained.epochs()][-1] > 0.95


@pytest.mark.parametrize("fields", [
    {}, {"mirror": False, "norm": "group", "init": "orthogonal", "activation": "silu",
         "scale": 0.5, "dropout": 0.2}])
@pytest.mark.parametrize("recipe", [{}, {"checkpoint_activations": True}], ids=["", "recomputed"])
def test_a_trained_one_is_made_again_from_its_description_and_scores_the_same(
    tmp_path: Path, fields: dict[str, Any], recipe: dict[str, Any]
) -> None:
    whole = recipe_of(tensors(X, Y, val=(X, Y)), model=SpeedNet(width=4, **fields), **recipe)
    trained = Trainer(whole, run_of())
    (epoch,) = trained.epochs()
    trained.save(tmp_path / "best")
    described = json.loads(json.dumps(describe(whole)))
    again = rebuild({"recipe": described, "image_shape": [3, 16, 16], "n_classes": 3,
                     "model": trained.model.state_dict()})
    images = trained.data.normalised(torch.from_numpy(X))
    again = again.to(memory_format=torch.channels_last)
    with torch.no_grad():
        scores = again(images)
        assert torch.equal(scores, trained.model.eval()(images))
    accuracy = float((scores.argmax(1) == torch.from_numpy(Y)).double().mean())
    assert epoch["val_accuracy"] == pytest.approx(accuracy, abs=1e-9)
    assert score(whole, run_of(), tmp_path / "best", "val")["val_accuracy"] == accuracy


def test_compiled_it_trains_as_before_and_is_whitened_before_it_is_compiled() -> None:
    """By torch's backend that generates no code; both ways of its forward pass are compiled."""
    plain, compiled = (Trainer(recipe_of(ema=EMA(0.9), compile=how), run_of(epochs=2))
                       for how in (False, "aot_eager"))
    told = [[(epoch["train_loss"], epoch["val_loss"]) for epoch in one.epochs()]
            for one in (plain, compiled)]
    assert told[1][-1] == pytest.approx(told[0][-1], rel=1e-4)
    assert torch.equal(first_layer(compiled.model).weight, first_layer(plain.model).weight)


def test_loader_processes_read_the_first_rows_and_the_epochs_after() -> None:
    one, other = (Trainer(recipe_of(resident=False, n_loader_workers=n), run_of())
                  for n in (0, 1))
    told = [[epoch["val_loss"] for epoch in each.epochs()] for each in (one, other)]
    assert told[0] == told[1]


def test_a_name_gives_it() -> None:
    assert model("speed_net", width=8) == SpeedNet(width=8)


WRONG: Any = {"flag": "yes"}


@pytest.mark.parametrize(("make", "told"), [
    (lambda: SpeedNet(width=0), "SpeedNet.width: must be at least 1, got 0"),
    (lambda: SpeedNet(scale=0.0), "SpeedNet.scale: must be in (0, inf), got 0.0"),
    (lambda: SpeedNet(mirror=WRONG["flag"]), "SpeedNet.mirror: must be True or False, got 'yes'"),
    (lambda: SpeedNet(dropout=1.0), "SpeedNet.dropout"),
    (lambda: SpeedNet(norm="bach"), "did you mean 'batch'?"),
    (lambda: SpeedNet(activation="tanh"), "SpeedNet.activation: must be one of relu, gelu"),
    (lambda: SpeedNet(init="zero_residual"), "SpeedNet.init"),
    (lambda: SpeedNet().make((12,), 3), "SpeedNet: needs images [channels, height, width]"),
    (lambda: SpeedNet().make((3, 1, 9), 3), "SpeedNet: needs images of 2x2 pixels or more, got "
                                            "1x9"),
])
def test_a_fault_is_one_line_that_names_it(make: Any, told: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_images_that_hold_nan_are_refused() -> None:
    net = SpeedNet(width=2).make((1, 4, 4), 3)
    with pytest.raises(DataError, match="NaN or infinite"):
        whiten(net, [torch.full((2, 1, 4, 4), float("nan"))])
