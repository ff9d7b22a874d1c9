"""Initial weights by name: their variances, and whole modules, shipped and the user's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hpo.errors import InputError
from hpo.train import MLP, CifarResNet18, ResNet9, SimpleCNN, ViT, initialise
from hpo.train.inits import INITS
from hpo.train.layers import Residual


@pytest.mark.parametrize(("init", "variance"), [
    ("kaiming", 2 / 300), ("lecun", 1 / 300), ("xavier", 2 / (300 + 500)),
    # A normal of deviation 1 cut off at two has the variance 0.7737.
    ("truncated_normal", 0.02**2 * 0.7737)])
def test_weights_have_the_published_variance_and_biases_are_zero(
    init: str, variance: float
) -> None:
    torch.manual_seed(0)
    layer = initialise(nn.Linear(300, 500), init)
    weight = layer.weight.detach().double()
    # Of 150,000 draws: the mean's deviation is a 387th of theirs, the variance's 0.4 % of it.
    assert float(weight.mean()) == pytest.approx(0.0, abs=4 * (variance / 150_000)**0.5)
    assert float(weight.var()) == pytest.approx(variance, rel=0.02)
    assert not layer.bias.any()
    if init == "truncated_normal":
        assert float(weight.abs().max()) <= 0.04


def test_a_convolution_counts_the_inputs_of_its_window() -> None:
    torch.manual_seed(0)
    layer = initialise(nn.Conv2d(32, 64, 3), "kaiming")
    assert float(layer.weight.detach().double().var()) == pytest.approx(2 / (32 * 9), rel=0.03)


def test_orthogonal_weights_have_orthonormal_rows() -> None:
    weight = initialise(nn.Linear(50, 20), "orthogonal").weight.detach()
    torch.testing.assert_close(weight @ weight.T, torch.eye(20), atol=1e-5, rtol=0)


def test_of_attention_each_projection_counts_by_itself() -> None:
    """Of the joint one, xavier would see four times the width."""
    torch.manual_seed(0)
    layer = initialise(nn.MultiheadAttention(200, 2), "xavier")
    for part in layer.in_proj_weight.detach().chunk(3):
        assert float(part.double().var()) == pytest.approx(2 / 400, rel=0.03)
    assert not layer.in_proj_bias.any() and not layer.out_proj.bias.any()
    apart = initialise(nn.MultiheadAttention(20, 2, kdim=30, vdim=40), "kaiming")
    assert apart.k_proj_weight is not None and apart.in_proj_weight is None


@pytest.mark.parametrize("model", [
    MLP(hidden=8, init="orthogonal"), SimpleCNN(hidden=8, width=4, init="kaiming"),
    ResNet9(width=4, init="xavier"), CifarResNet18(width=4, init="zero_residual"),
    ViT(width=12, n_layers=2, init="truncated_normal")], ids=lambda model: type(model).__name__)
def test_a_model_s_weights_are_those_of_its_seed(model: Any) -> None:
    def weights(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return list(model.make((3, 8, 8), 5).parameters())

    assert all(torch.equal(a, b) for a, b in zip(weights(1), weights(1), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights(1), weights(2), strict=True))


@pytest.mark.parametrize("norm", ["batch", "layer", "group", "rms", "none"])
def test_zero_residual_starts_each_block_as_its_shortcut_and_learns(norm: str) -> None:
    torch.manual_seed(0)
    net = CifarResNet18(width=4, norm=norm, init="zero_residual").make((3, 8, 8), 5)
    branches: list[Any] = [part.branch for part in net.modules() if isinstance(part, Residual)]
    assert len(branches) == 8
    x = {branch: torch.randn(2, next(branch.parameters()).shape[1], 4, 4) for branch in branches}
    assert all(not branch(x[branch]).any() for branch in branches)
    nn.functional.cross_entropy(net(torch.randn(4, 3, 8, 8)), torch.arange(4)).backward()
    # Where there is no norm, the layer that stands for it is the last one.
    last = [list(branch.modules())[-2 if norm == "none" else -1] for branch in branches]
    for part in last:
        slope: Any = part.weight.grad
        assert float(slope.abs().sum()) > 0


def test_zero_residual_starts_a_transformer_s_blocks_as_the_identity() -> None:
    net: Any = ViT(width=12, n_layers=3, init="zero_residual").make((1, 8, 8), 5)
    tokens = torch.randn(2, 65, 12)
    assert torch.equal(net.blocks(tokens), tokens)


def test_default_changes_nothing_and_norms_are_never_changed() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    before = [value.clone() for value in net.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(
        before, initialise(net, "default").parameters(), strict=True))
    after = list(initialise(net, "kaiming").parameters())
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2]) and torch.equal(before[3], after[3])


@pytest.mark.parametrize("init", INITS[1:])
def test_a_module_without_a_layer_that_it_acts_on_is_refused(init: str) -> None:
    with pytest.raises(InputError, match=f"init '{init}': LayerNorm has no"):
        initialise(nn.LayerNorm(4), init)


def test_an_unknown_name_is_told_with_the_nearest_and_all() -> None:
    with pytest.raises(InputError, match="xavier.*got 'xavjer'; did you mean 'xavier'"):
        initialise(nn.Linear(2, 2), "xavjer")


def test_lecun_keeps_the_deviation_through_deep_selu() -> None:
    """As the paper shows for it; after 40 layers of torch's default a tenth is left."""
    def deviation(init: str) -> float:
        torch.manual_seed(0)
        net: Any = MLP(hidden=256, n_layers=40, activation="selu", init=init).make((256,), 256)
        with torch.no_grad():
            return float(net[:-1](torch.randn(256, 256)).std())

    assert deviation("lecun") == pytest.approx(1.0, abs=0.25)
    assert deviation("default") < 0.15
