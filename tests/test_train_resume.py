"""A trial that was cut off goes on as if nothing had happened."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from hpo import Run
from hpo.errors import DataError
from hpo.train import (
    EMA,
    MLP,
    SGD,
    AdamW,
    AlternatingFlip,
    CifarResNet18,
    ColorJitter,
    CrossEntropy,
    CutMix,
    Cutout,
    EarlyStopping,
    MixUp,
    Muon,
    OneCycle,
    RandAugment,
    RandomCrop,
    RandomFlip,
    Recipe,
    ResNet9,
    SimpleCNN,
    SpeedNet,
    ViT,
    WarmupCosine,
    datasets,
    digits,
)
from hpo.train.loop import Trainer
from hpo.train.resume import differences, read_state, write_state

N_EPOCHS = 5
RECIPES: dict[str, dict[str, Any]] = {
    "cnn": {"augment": (RandomCrop(1), RandomFlip()), "schedule": OneCycle()},
    "mlp": {"model": MLP(hidden=16, dropout=0.3), "schedule": WarmupCosine()},
    "sgd": {"optimizer": SGD(lr=0.05, weight_decay=1e-3), "clip_norm": 1.0},
    "alpha": {"model": MLP(hidden=16, dropout=0.1, activation="selu", dropout_kind="alpha",
                           init="lecun")},
    "resnet9": {"model": ResNet9(width=2, drop_path=0.2, dropout=0.1, dropout_kind="dropout2d",
                                 norm="group", init="orthogonal")},
    "resnet18": {"model": CifarResNet18(width=2, drop_path=0.2, init="zero_residual"),
                 "batch_size": 512},
    "vit": {"model": ViT(width=8, n_layers=1, n_heads=2, patch_size=2, dropout=0.1, drop_path=0.2,
                         norm="rms")},
    "speed net": {"model": SpeedNet(width=4, dropout=0.1), "ema": EMA(0.9), "batch_size": 256,
                  "optimizer": SGD(lr=0.3, momentum=0.85, bias_lr_factor=8.0),
                  "augment": (RandomCrop(2, fill="reflect"), AlternatingFlip())},
    "speed net, muon": {"model": SpeedNet(width=4), "optimizer": Muon(5e-3, bias_lr_factor=2.0),
                        "precision": "bf16", "batch_size": 256},
    "recomputed": {"model": SimpleCNN(hidden=16, width=4, dropout=0.3, dropout_kind="dropout2d"),
                   "checkpoint_activations": True},
    "lazy": {"model": lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.LazyBatchNorm1d(),
                                            nn.Dropout(), nn.LazyLinear(10))},
    "own": {"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8),
                                           nn.Dropout(), nn.Linear(8, 10))},
    "mixup, mean, bf16": {"mix": MixUp(0.4), "ema": EMA(0.9), "precision": "bf16"},
    "cutmix, fp16": {"model": MLP(hidden=16, dropout=0.1), "mix": CutMix(),
                     "precision": "fp16", "clip_adaptive": 0.1,
                     "ema": EMA(0.8, warmup=False), "loss": CrossEntropy(label_smoothing=0.1)},
    "augmented, accumulated": {"augment": (AlternatingFlip(), Cutout(2), ColorJitter(0.3, 0.3),
                                           RandAugment()), "micro_batch_size": 50,
                               "clip_value": 0.1, "mix": MixUp()},
    "patient": {"early_stopping": EarlyStopping(patience=N_EPOCHS), "ema": EMA()},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPO_CACHE_DIR", str(tmp_path / "cache"))


def run_of(**fields: Any) -> Run:
    return Run(**{"epochs": N_EPOCHS, "seed": 3, "device": "cpu", "dir": Path("."), **fields})


def trainer(run: Run | None = None, **fields: Any) -> Trainer:
    recipe = {"data": digits(run_of()), "model": SimpleCNN(hidden=16, dropout=0.2),
              "optimizer": AdamW(lr=5e-3), "batch_size": 128, **fields}
    return Trainer(Recipe(**recipe), run or run_of())


def numbers(epochs: Any, n: int = N_EPOCHS) -> list[dict[str, float]]:
    """Return the metrics of the next n epochs, without the times."""
    found = [next(epochs) for _ in range(n)]
    return [{k: v for k, v in epoch.items() if not k.endswith("_s")} for epoch in found]


# An older torch warns where a lazy module is made that its use may change.
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("fields", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("cut", [1, 3])
def test_what_is_trained_after_a_cut_is_the_same_to_the_last_bit(
    tmp_path: Path, fields: dict[str, Any], cut: int
) -> None:
    """Also where others draw from the global random state in between, and weights kept before."""
    whole = trainer(**fields)
    expected = numbers(whole.epochs())
    before = trainer(**fields)
    epochs = before.epochs()
    assert numbers(epochs, cut) == expected[:cut]
    write_state(tmp_path, before.state_dict())
    # What is trained after the state was written is lost, and does not change it.
    next(epochs, None)
    torch.manual_seed(99)
    after = trainer(**fields)
    state = read_state(tmp_path)
    assert state is not None
    after.load_state_dict(state)
    left = after.epochs()
    assert numbers(left, N_EPOCHS - cut) == expected[cut:]
    assert next(left, None) is None
    assert (after.best_epoch, after.best["val_accuracy"]) == (
        whole.best_epoch, whole.best["val_accuracy"])
    for path, one in (("a", whole), ("b", after)):
        one.save(tmp_path / path)
    first, second = (torch.load(tmp_path / path, weights_only=True) for path in "ab")
    assert all(torch.equal(first["model"][name], second["model"][name]) for name in first["model"])


def test_a_state_from_before_the_first_epoch_and_after_the_last_one_work(tmp_path: Path) -> None:
    expected = numbers(trainer().epochs())
    fresh = trainer()
    fresh.load_state_dict(trainer().state_dict())
    assert numbers(fresh.epochs()) == expected
    again = trainer()
    again.load_state_dict(fresh.state_dict())
    assert list(again.epochs()) == [] and again.best_epoch == fresh.best_epoch


class Noisy(Dataset):
    """Items that are drawn anew each time they are read, in the trial's own process."""

    targets = torch.arange(60) % 3

    def __len__(self) -> int:
        return 60

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(4) + float(np.random.rand()) + random.random()
        return noise + self.targets[row], int(self.targets[row])


def test_a_dataset_that_draws_at_random_goes_on_too() -> None:
    def made() -> Trainer:
        return trainer(data=datasets(Noisy(), Noisy(), n_classes=3), n_loader_workers=0,
                       model=MLP(hidden=8))

    def seeded() -> Trainer:
        # As a worker does before each trial.
        random.seed(1)
        np.random.seed(1)
        return made()

    # Its mark is that of its data, whatever the first item's noise.
    assert made().data.fingerprint == made().data.fingerprint
    expected = numbers(seeded().epochs())
    before = seeded()
    epochs = before.epochs()
    assert numbers(epochs, 2) == expected[:2]
    state = before.state_dict()
    after = made()
    after.load_state_dict(state)
    assert numbers(after.epochs(), 3) == expected[2:]


@pytest.mark.parametrize(("change", "told"), [
    ({"batch_size": 64}, "recipe.batch_size was 128, is 64"),
    ({"optimizer": AdamW(lr=1e-3)}, "recipe.optimizer.lr was 0.005, is 0.001"),
    ({"run": run_of(epochs=9)}, "epochs was 5, is 9"),
    ({"run": run_of(seed=4)}, "seed was 3, is 4"),
])
def test_a_state_of_another_recipe_is_refused_with_both_sides_named(
    change: dict[str, Any], told: str
) -> None:
    other = trainer(**change)
    before = numbers(trainer(**change).epochs())
    with pytest.raises(DataError, match="the state is of another trial") as caught:
        other.load_state_dict(trainer().state_dict())
    assert told in str(caught.value)
    # Nothing of it was taken in.
    assert numbers(other.epochs(), len(before)) == before


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "gone"])
def test_of_a_broken_newest_state_the_one_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    one = trainer()
    epochs = one.epochs()
    paths = []
    for _ in range(4):
        next(epochs)
        paths.append(write_state(tmp_path, one.state_dict()))
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in paths[2:]]
    content = paths[-1].read_bytes()
    if damage == "gone":
        paths[-1].unlink()
    else:
        paths[-1].write_bytes({"cut": content[:len(content) // 2], "garbage": b"x" * len(content),
                               "empty": b""}[damage])
    with caplog.at_level(logging.WARNING, logger="hpo.train"):
        state = read_state(tmp_path)
    assert state is not None and state["next_epoch"] == 3
    assert [str(paths[-1]) in record.message for record in caplog.records] == (
        [] if damage == "gone" else [True])
    paths[-2].write_bytes(b"")
    paths[-1].write_bytes(b"")
    assert read_state(tmp_path) is None
    assert read_state(tmp_path / "nowhere") is None


def test_a_state_on_disk_holds_no_code(tmp_path: Path) -> None:
    """Nothing of it is run when it is read."""
    one = trainer()
    next(one.epochs())
    path = write_state(tmp_path, one.state_dict())
    assert torch.load(path, weights_only=True)["next_epoch"] == 1


def test_differences_name_each_field_with_both_values() -> None:
    assert differences({"a": {"b": (1, 2), "c": 3}}, {"a": {"b": [1, 2], "c": 3}}) == []
    assert differences({"a": {"b": 1}, "x": 0}, {"a": {"b": 2}, "y": 5}) == [
        "a.b was 1, is 2", "x was 0, is None", "y was None, is 5"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_it_goes_on_where_it_was() -> None:
    run = run_of(device="cuda")
    expected = numbers(trainer(run).epochs())
    before = trainer(run)
    numbers(before.epochs(), 2)
    after = trainer(run)
    after.load_state_dict(before.state_dict())
    for found, wanted in zip(numbers(after.epochs(), 3), expected[2:], strict=True):
        assert found["val_loss"] == pytest.approx(wanted["val_loss"], rel=0.05)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_patience_goes_on_after_a_cut(cut: int) -> None:
    """Of epochs of which none is better than the first."""
    fields: dict[str, Any] = {"optimizer": SGD(lr=1e-12), "model": MLP(hidden=8),
                              "early_stopping": EarlyStopping(3)}
    whole = [epoch["val_loss"] for epoch in trainer(**fields).epochs()]
    assert len(whole) == 4
    before = trainer(**fields)
    epochs = before.epochs()
    for _ in range(cut):
        next(epochs)
    after = trainer(**fields)
    after.load_state_dict(before.state_dict())
    assert [epoch["val_loss"] for epoch in after.epochs()] == whole[cut:]
    assert after.stopped_early == "no better val_accuracy for 3 epochs"
