"""Activation checkpointing: the same training to the last bit, in less memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.nn.utils.parametrizations import spectral_norm

from hpo import Run
from hpo.errors import InputError
from hpo.train import (
    MLP,
    SGD,
    CifarResNet18,
    Recipe,
    ResNet9,
    SimpleCNN,
    TorchvisionModel,
    ViT,
    tensors,
)
from hpo.train.loop import Trainer
from hpo.train.recompute import recomputed
from hpo.train.trying import prepare

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 3, 8, 8)).astype("float32"), np.arange(40) % 4


class Counting(nn.Module):
    """A layer whose buffer is a new tensor after each forward, and changes what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        seen: Any = self.seen
        out = self.linear(x).tanh() * seen
        if self.training:
            self.seen = seen + 0.5
        return out


def own() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), spectral_norm(nn.Linear(192, 16)), nn.BatchNorm1d(16), nn.ReLU(inplace=True),
        Counting(), nn.Dropout(0.3), nn.Linear(16, 4))


MODELS: dict[str, Any] = {
    "SimpleCNN": SimpleCNN(hidden=8, width=4, dropout=0.3),
    "MLP": MLP(hidden=8, dropout=0.3, norm="batch"),
    "ResNet9": ResNet9(width=4, drop_path=0.3, dropout=0.2, dropout_kind="dropout2d"),
    "CifarResNet18": CifarResNet18(width=4, drop_path=0.4, dropout=0.2),
    "ViT": ViT(width=12, n_layers=2, dropout=0.2, drop_path=0.2),
    "torchvision": TorchvisionModel("shufflenet_v2_x0_5"), "own": own}


def trainer(model: Any, on: bool, **fields: Any) -> Trainer:
    recipe = Recipe(data=tensors(X, Y, val=(X, Y)), model=model, optimizer=SGD(lr=0.05),
                    batch_size=16, checkpoint_activations=on, **fields)
    return Trainer(recipe, Run(epochs=2, seed=0, device="cpu", dir=Path(".")))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_training_is_the_same_to_the_last_bit_buffers_and_random_draws_included(
    model: Any
) -> None:
    found = []
    for on in (False, True):
        one = trainer(model, on)
        epochs = [{name: value for name, value in epoch.items() if not name.endswith("_s")}
                  for epoch in one.epochs()]
        found.append((epochs, one.model.state_dict(), one.random.get_state()[0]))
    (plain, weights, state), (again, other_weights, other_state) = found
    assert plain == again
    assert list(weights) == list(other_weights)
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    # What is drawn after it is drawn alike, too.
    assert torch.equal(state, other_state)


@pytest.mark.parametrize("name", ["SimpleCNN", "ViT"])
def test_a_compiled_model_that_computes_again_trains_as_one_that_does_neither(name: str) -> None:
    """Running means and counts of batch norm included, which are updated once."""
    found = []
    for fields in ({"on": False}, {"on": True, "compile": "aot_eager"}):
        one = trainer(MODELS[name], **fields)
        found.append(([epoch["val_loss"] for epoch in one.epochs()], one.model.state_dict()))
    (plain, weights), (again, others) = found
    assert again == pytest.approx(plain, rel=1e-5)
    assert list(weights) == list(others)
    for key, value in weights.items():
        torch.testing.assert_close(others[key], value, rtol=1e-4, atol=1e-5)


def held_bytes(net: nn.Module, x: Tensor) -> int:
    """Return the bytes that a forward keeps for its backward, weights left out."""
    weights = {value.untyped_storage().data_ptr() for value in net.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss = fn.cross_entropy(net(x), torch.arange(len(x)) % 4)
        held = sum(value.untyped_storage().nbytes() for where, value in kept.items()
                   if where not in weights)
    loss.backward()
    return held


def test_what_a_block_holds_is_its_input() -> None:
    net = recomputed(nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 5), nn.Tanh()),
                     nested=False)
    # Inputs of the two layers, and what the cross entropy keeps: log-probabilities, labels and
    # its weights' sum.
    assert held_bytes(net, torch.randn(8, 6)) == 4 * 8 * (6 + 30 + 5) + 8 * 8 + 4


@pytest.mark.parametrize(("model", "share"), [
    (CifarResNet18(width=8), 0.35), (ResNet9(width=8), 0.25), (ViT(width=24, n_layers=4), 0.2),
    (SimpleCNN(width=8), 0.25), (TorchvisionModel("resnet18"), 0.6)],
    ids=lambda value: type(value).__name__)
def test_a_step_holds_less_memory(model: Any, share: float) -> None:
    """Counted: 0.27, 0.18, 0.12, 0.17 and 0.54 of it, the blocks' inputs included."""
    x = torch.randn(4, 3, 32, 32)
    net = model.make((3, 32, 32), 4)
    before = held_bytes(net, x)
    assert held_bytes(recomputed(net, nested=True), x) < share * before


def test_gradients_are_those_of_a_whole_batch_of_doubles() -> None:
    net = ViT(width=12, n_layers=2).make((1, 8, 8), 4).double()
    other = recomputed(copy.deepcopy(net), nested=True)
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    for one in (net, other):
        fn.cross_entropy(one(x), torch.arange(3)).backward()
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_a_copy_has_blocks_of_its_own() -> None:
    net = recomputed(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)), nested=False)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for value in net.parameters():
            value.zero_()
    x = torch.ones(1, 3)
    assert not net(x).any() and twin(x).any()
    twin(x).sum().backward()
    assert all(value.grad is None for value in net.parameters())
    assert all(value.grad is not None for value in twin.parameters())


def test_a_second_backward_of_the_same_graph_computes_again() -> None:
    net = recomputed(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(),
                                   nn.Linear(4, 2)), nested=False)
    loss = net(torch.randn(5, 3)).square().sum()
    loss.backward(retain_graph=True)
    norm: Any = net.get_submodule("1")
    first = [value.grad.clone() for value in net.parameters() if value.grad is not None]
    loss.backward()
    for value, once in zip(net.parameters(), first, strict=True):
        torch.testing.assert_close(value.grad, 2 * once)
    assert int(norm.num_batches_tracked) == 1


class Iterating(nn.Sequential):
    """A chain that does more than to call its layers in turn."""

    def forward(self, input: Tensor) -> Tensor:
        for layer in self:
            input = input + layer(input)
        return input


def refused() -> Iterator[tuple[Any, str]]:
    told = "is no nn.Sequential of layers with weights, so there are no blocks"
    yield lambda: nn.Linear(192, 4), f"Recipe.checkpoint_activations: Linear {told}"
    yield lambda: Iterating(nn.Linear(4, 4)), f"Iterating {told}"
    yield lambda: nn.Sequential(nn.Flatten(), nn.ReLU()), f"Sequential {told}"
    yield (lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(192, 4)),
           "ReLU changes its input in place, so it cannot be computed again")


@pytest.mark.parametrize(("model", "told"), list(refused()))
def test_a_model_that_it_cannot_be_applied_to_is_refused_in_one_line(
    model: Any, told: str
) -> None:
    recipe = Recipe(data=tensors(X, Y, val=(X, Y)), model=model, optimizer=SGD(),
                    checkpoint_activations=True)
    with pytest.raises(InputError) as caught:
        prepare(recipe, Run(epochs=1, seed=0, device="cpu", dir=Path(".")))
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_shipped_model_without_chains_is_refused() -> None:
    """As torchvision's inception_v3 is one."""
    net = nn.Module()
    net.part = nn.Linear(3, 3)
    with pytest.raises(InputError, match="Module is no nn.Sequential of layers .* within it"):
        recomputed(net, nested=True)


def test_the_switch_is_true_or_false() -> None:
    wrong: Any = 3
    with pytest.raises(InputError, match="checkpoint_activations: must be True or False, got 3"):
        Recipe(data=tensors(X, Y), model=MLP(), optimizer=SGD(), checkpoint_activations=wrong)
