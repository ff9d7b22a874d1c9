"""A recipe's model on its device: lazy layers get their sizes from the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpo import Run
from hpo.errors import InputError
from hpo.train import AdamW, Recipe, tensors
from hpo.train.loop import Trainer
from hpo.train.scoring import own_model, score, shaped
from hpo.train.trying import prepare

# An older torch warns where a lazy module is made that its use may change.
pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 2, 6, 6)).astype("float32"), np.arange(60) % 3
RUN = Run(epochs=2, seed=0, device="cpu", dir=Path("."))


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Dropout(0.2),
                         nn.Flatten(), nn.LazyLinear(3))


def eager() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2),
                         nn.Flatten(), nn.Linear(64, 3))


def recipe(model: Any) -> Recipe:
    return Recipe(data=tensors(X, Y, val=(X, Y)), model=model, optimizer=AdamW(), batch_size=16)


@pytest.mark.parametrize("ready", [False, True], ids=["made", "copied"])
def test_lazy_layers_train_as_those_of_given_sizes(tmp_path: Path, ready: bool) -> None:
    given = lazy()
    one, other = Trainer(recipe(given if ready else lazy), RUN), Trainer(recipe(eager), RUN)
    assert [tuple(value.shape) for value in one.model.parameters()] == [
        tuple(value.shape) for value in other.model.parameters()]
    # Weights are drawn in the same order, for the trial's seed.
    assert all(torch.equal(a, b) for a, b in zip(
        one.model.parameters(), other.model.parameters(), strict=True))
    first, second = ([{name: value for name, value in epoch.items() if not name.endswith("_s")}
                      for epoch in trainer.epochs()] for trainer in (one, other))
    assert first == second
    # The one that was given stays as it was.
    assert not ready or any(isinstance(value, nn.UninitializedParameter)
                            for value in given.parameters())
    one.save(tmp_path / "a.pt")
    assert score(recipe(lazy), RUN, tmp_path / "a.pt", "val")["val_accuracy"] == (
        one.best["val_accuracy"])
    weights = torch.load(tmp_path / "a.pt", weights_only=True)["model"]
    again = own_model(lazy)
    again.load_state_dict(weights)
    inputs = torch.from_numpy(X)
    expected = eager()
    expected.load_state_dict(weights)
    assert torch.equal(again.eval()(inputs), expected.eval()(inputs))


def test_a_module_without_lazy_layers_is_not_run_and_draws_nothing() -> None:
    class Loud(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("not to be called")

    net = Loud()
    state = torch.get_rng_state()
    assert shaped(net, (3,)) is net and torch.equal(torch.get_rng_state(), state)


def test_the_mode_of_a_lazy_module_is_kept_and_its_statistics_are_new() -> None:
    net: Any = shaped(lazy(), (2, 6, 6))
    assert net.training and not net[1].running_mean.any() and not int(net[1].num_batches_tracked)


class LeftOut(nn.Module):
    """A module with a lazy layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.LazyLinear(3), nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x.flatten(1))


@pytest.mark.parametrize(("model", "told"), [
    (LeftOut, "Recipe.model: LeftOut does not use its lazy layer's 'spare.weight', so its size "
              "is not known"),
    (lambda: nn.Sequential(nn.LazyConv1d(3, 2)),
     "Recipe.model: Sequential does not take inputs of shape [2, 2, 6, 6]")])
def test_a_lazy_module_that_does_not_fit_is_told(model: Any, told: str) -> None:
    with pytest.raises(InputError) as caught:
        prepare(recipe(model), RUN)
    assert told in str(caught.value)
