"""The training loop: repeatable, honest at the edges, and what it kept scores the same again."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from hpo import Run
from hpo.errors import DataError, InputError
from hpo.train import (
    MLP,
    SGD,
    AdamW,
    Constant,
    CrossEntropy,
    OneCycle,
    RandomCrop,
    RandomFlip,
    Recipe,
    SimpleCNN,
    datasets,
    digits,
    tensors,
)
from hpo.train import checkpoint as files
from hpo.train.loop import METRICS, Trainer
from hpo.train.scoring import score
from hpo.train.trying import prepare


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPO_CACHE_DIR", str(tmp_path / "cache"))


def make_run(**fields) -> Run:
    return Run(**{"epochs": 2, "seed": 0, "device": "cpu", "dir": Path("."), **fields})


def numbers(epochs) -> list[dict[str, float]]:
    """Return metrics without the times."""
    return [{k: v for k, v in epoch.items() if not k.endswith("_s")} for epoch in epochs]


def digits_recipe(**fields) -> Recipe:
    return Recipe(**{"data": digits(make_run()), "model": SimpleCNN(hidden=32, dropout=0.2),
                     "optimizer": AdamW(lr=5e-3), "batch_size": 64, **fields})


def test_an_epoch_has_the_metrics_that_are_promised_as_plain_numbers():
    run = make_run()
    for epoch in Trainer(digits_recipe(), run).epochs():
        assert tuple(epoch) == METRICS
        assert all(type(value) is float for value in epoch.values())


def test_the_digits_are_learnt():
    trainer = Trainer(digits_recipe(), make_run(epochs=6))
    assert list(trainer.epochs())[-1]["val_accuracy"] >= 0.96


@pytest.mark.parametrize("fields", [
    {}, {"augment": (RandomCrop(1), RandomFlip())}, {"model": MLP(hidden=16, dropout=0.3)},
    {"optimizer": SGD(lr=0.05), "clip_norm": 1.0}], ids=["plain", "augment", "mlp", "sgd"])
def test_the_same_seed_gives_the_same_numbers_to_the_last_bit(fields):
    run = make_run()
    first = numbers(Trainer(digits_recipe(**fields), run).epochs())
    torch.rand(3)
    assert numbers(Trainer(digits_recipe(**fields), run).epochs()) == first
    assert numbers(Trainer(digits_recipe(**fields), make_run(seed=1)).epochs()) != first


def test_two_trials_in_turns_do_not_disturb_each_other_nor_the_caller_s_random_state():
    run = make_run(epochs=3)
    expected = numbers(Trainer(digits_recipe(), run).epochs())
    states = (torch.get_rng_state(), repr(np.random.get_state()), random.getstate())
    one_trial, other_trial = Trainer(digits_recipe(), run), Trainer(digits_recipe(), run)
    turns = list(zip(one_trial.epochs(), other_trial.epochs(), strict=True))
    assert numbers(one for one, _ in turns) == numbers(two for _, two in turns) == expected
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (repr(np.random.get_state()), random.getstate()) == states[1:]


def test_a_ready_module_is_copied_and_a_function_makes_one():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    before = [p.detach().clone() for p in module.parameters()]
    list(Trainer(digits_recipe(model=module), make_run()).epochs())
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    made = digits_recipe(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    first, again = (numbers(Trainer(made, make_run()).epochs()) for _ in range(2))
    assert first == again


def test_train_loss_is_the_mean_over_rows_and_lr_the_last_step_s():
    """One linear model, a rate too small to change it: the loss must be that of its weights."""
    x = torch.randn(70, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(70) % 3
    module = nn.Linear(4, 3)
    recipe = Recipe(data=tensors(x, y, val=(x, y)), model=module, optimizer=SGD(lr=1e-12),
                    schedule=Constant(), batch_size=32, loss=CrossEntropy(label_smoothing=0.2))
    (epoch,) = Trainer(recipe, make_run(epochs=1)).epochs()
    scores = module(x).detach()
    smooth = nn.functional.cross_entropy(scores, y, label_smoothing=0.2)
    assert epoch["train_loss"] == pytest.approx(float(smooth), rel=1e-5)
    assert epoch["val_loss"] == pytest.approx(float(nn.functional.cross_entropy(scores, y)),
                                              rel=1e-5)
    assert epoch["val_accuracy"] == pytest.approx(float((scores.argmax(1) == y).double().mean()))
    assert epoch["lr"] == 1e-12


def test_the_loop_makes_the_steps_of_a_plain_torch_loop():
    """Same weights, same batches, torch's own AdamW, OneCycleLR and clipping; biases keep."""
    run, recipe = make_run(), digits_recipe(model=MLP(hidden=16), clip_norm=0.5)
    trainer, twin = Trainer(recipe, run), Trainer(recipe, run)
    model = twin.model
    optimizer = torch.optim.AdamW([
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 1e-2},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}], lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 5e-3, total_steps=2 * twin.steps_per_epoch, cycle_momentum=False)
    list(trainer.epochs())
    for _ in range(2):
        model.train()
        for images, labels in twin.batches(64, twin.steps_per_epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
    for ours, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_an_epoch_trains_each_row_once():
    trainer = Trainer(digits_recipe(augment=()), make_run())
    seen = torch.cat([images.flatten(1) for images, _ in trainer.batches(64, 18)])
    feed: Any = trainer.data.train
    rows = feed.images.flatten(1)
    assert len(seen) == len(rows)
    assert torch.equal(seen.sum(1).sort().values, rows.sum(1).sort().values)


def test_a_loss_that_diverges_is_reported_and_not_hidden(tmp_path):
    recipe = digits_recipe(optimizer=SGD(lr=1e6), schedule=Constant(), model=MLP(hidden=16))
    trainer = Trainer(recipe, make_run(epochs=3))
    epochs = list(trainer.epochs())
    assert not math.isfinite(epochs[-1]["train_loss"])
    trainer.save(tmp_path / "a.pt")


# 65 rows of C58: two classes that a line divides.
GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randn(65, 4, generator=GENERATOR)
ROW_LABELS = (ROWS.sum(1) > 0).long()


def norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("batch_size,n_steps,n_trained", [(64, 1, 64), (65, 1, 65), (128, 1, 65)])
def test_a_last_batch_of_one_row_is_left_out_and_a_large_batch_is_all_rows(
    batch_size, n_steps, n_trained, caplog
):
    """C58.1."""
    data = tensors(ROWS, ROW_LABELS, val=(ROWS, ROW_LABELS))
    recipe = Recipe(data=data, model=norm_net, optimizer=AdamW(), batch_size=batch_size)
    trainer = Trainer(recipe, make_run())
    epochs = list(trainer.epochs())
    assert trainer.steps_per_epoch == n_steps and len(epochs) == 2
    assert all(math.isfinite(epoch["val_loss"]) for epoch in epochs)
    assert len(trainer.data.val) == 65
    assert [("64 rows" in line) for line in caplog.messages] == [True] * (n_trained == 64)


def test_without_batch_norm_the_last_row_is_trained_too(caplog):
    data = tensors(ROWS, ROW_LABELS, val=(ROWS, ROW_LABELS))
    recipe = Recipe(data=data, model=lambda: nn.Linear(4, 2), optimizer=AdamW(), batch_size=64)
    trainer = Trainer(recipe, make_run())
    list(trainer.epochs())
    assert trainer.steps_per_epoch == 2 and not caplog.messages


def test_one_row_in_all_is_refused_in_clear_words():
    """C58.2."""
    with pytest.raises(DataError, match="1 row to train on"):
        Trainer(Recipe(data=tensors(ROWS[:1], ROW_LABELS[:1]), model=norm_net,
                       optimizer=AdamW()), make_run())


def test_a_checkpoint_scores_as_its_best_epoch_did(tmp_path):
    run, recipe = make_run(epochs=4), digits_recipe(optimizer=AdamW(lr=0.05))
    trainer = Trainer(recipe, run, metric="val_loss", maximize=False)
    epochs = list(trainer.epochs())
    best = min(range(4), key=lambda e: epochs[e]["val_loss"])
    trainer.save(tmp_path / "deep" / "a.pt")
    entry = torch.load(tmp_path / "deep" / "a.pt", weights_only=True)
    assert entry["epoch"] == best == trainer.best_epoch and entry["metrics"] == epochs[best]
    got = score(recipe, run, tmp_path / "deep" / "a.pt", "val")
    assert got == {"val_loss": epochs[best]["val_loss"],
                   "val_accuracy": epochs[best]["val_accuracy"]}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.pt"]


def test_the_kept_weights_are_those_of_the_best_epoch_and_not_of_the_last(tmp_path):
    trainer = Trainer(digits_recipe(schedule=Constant()), make_run(epochs=3), metric="lr")
    epochs = trainer.epochs()
    next(epochs)
    first = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    list(epochs)  # the rate never grows: epoch 0 stays the best
    trainer.save(tmp_path / "a.pt")
    kept = files.read(tmp_path / "a.pt")["model"]
    assert all(torch.equal(kept[name], value) for name, value in first.items())


@pytest.mark.parametrize("model", [SimpleCNN(hidden=16, width=4, dropout=0.1), MLP(hidden=8)])
def test_a_checkpoint_s_own_data_make_its_model_again(tmp_path, model):
    run, recipe = make_run(), digits_recipe(model=model)
    trainer = Trainer(recipe, run)
    list(trainer.epochs())
    trainer.save(tmp_path / "a.pt")
    entry = files.read(tmp_path / "a.pt")
    again = files.rebuild(entry)
    pixels = digits(run).open().test_x
    scale = entry["normalisation"]
    inputs = (torch.from_numpy(pixels).float() - scale["mean"]) / scale["std"]
    with torch.no_grad():
        right = (again(inputs).argmax(1).numpy() == digits(run).open().test_y).mean()
    assert right == pytest.approx(score(recipe, run, tmp_path / "a.pt", "test")["test_accuracy"])


def test_a_broken_or_missing_checkpoint_is_told_by_its_path(tmp_path):
    (tmp_path / "broken.pt").write_bytes(b"nothing")
    for name in ("broken.pt", "missing.pt"):
        with pytest.raises(DataError, match=name):
            score(digits_recipe(), make_run(), tmp_path / name, "test")


def test_a_checkpoint_of_other_data_is_not_scored(tmp_path):
    trainer = Trainer(Recipe(data=tensors(ROWS, ROW_LABELS), model=norm_net, optimizer=AdamW()),
                      make_run())
    trainer.save(tmp_path / "a.pt")
    other = Recipe(data=tensors(ROWS + 1, ROW_LABELS), model=norm_net, optimizer=AdamW())
    with pytest.raises(DataError, match="other data"):
        score(other, make_run(), tmp_path / "a.pt", "val")


def test_scoring_a_split_that_is_not_there_is_refused(tmp_path):
    recipe = Recipe(data=tensors(ROWS, ROW_LABELS), model=norm_net, optimizer=AdamW())
    Trainer(recipe, make_run()).save(tmp_path / "a.pt")
    with pytest.raises(DataError, match="no test split"):
        score(recipe, make_run(), tmp_path / "a.pt", "test")


def test_prepare_tells_what_the_trials_will_train_on():
    known = prepare(digits_recipe(schedule=OneCycle()), make_run())
    assert known["n_parameters"] == sum(
        p.numel() for p in SimpleCNN(hidden=32).make((1, 8, 8), 10).parameters())
    assert {k: known[k] for k in ("n_train", "n_val", "n_test", "n_classes", "image_shape",
                                  "resident", "steps_per_epoch")} == {
        "n_train": 1150, "n_val": 288, "n_test": 359, "n_classes": 10, "image_shape": (1, 8, 8),
        "resident": True, "steps_per_epoch": 18}


class Ragged(Dataset):
    """A dataset whose first item alone is larger than the others."""

    targets = torch.arange(40) % 2

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(5 if row == 0 else 4), int(self.targets[row])


def test_a_first_row_of_another_shape_is_blamed_on_the_data_and_not_on_the_model():
    """The model is made for the first row; a batch without it went wrong inside the model."""
    for seed in range(4):
        recipe = Recipe(data=datasets(Ragged(), n_classes=2, name="ragged"), model=MLP(hidden=4),
                        optimizer=AdamW(), batch_size=8, n_loader_workers=0)
        with pytest.raises(DataError) as told:
            prepare(recipe, make_run(seed=seed))
        assert "shape" in str(told.value) and "[5]" in str(told.value) and "[4]" in str(told.value)
        assert "Recipe.model" not in str(told.value) and "\n" not in str(told.value)


def test_a_model_that_does_not_take_the_inputs_is_still_told_as_the_model_s_fault():
    recipe = digits_recipe(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(63, 10)))
    with pytest.raises(InputError, match=r"Recipe.model: Sequential does not take inputs of "
                                         r"shape \[8, 1, 8, 8\]"):
        prepare(recipe, make_run())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none_is_an_error_and_no_silent_cpu_run():
    with pytest.raises(InputError, match="finds no CUDA device"):
        Trainer(digits_recipe(), make_run(device="cuda"))


def test_a_metric_that_no_epoch_has_is_refused():
    with pytest.raises(InputError, match="'f1'.*val_accuracy"):
        Trainer(digits_recipe(), make_run(), metric="f1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fields", [{}, {"augment": (RandomCrop(1), RandomFlip())},
                                    {"resident": False}], ids=["plain", "augment", "streamed"])
def test_a_trial_on_cuda_learns_and_scores_its_checkpoint(tmp_path, fields):
    run = make_run(epochs=6, device="cuda")
    recipe = digits_recipe(**fields)
    trainer = Trainer(recipe, run)
    epochs = list(trainer.epochs())
    assert max(epoch["val_accuracy"] for epoch in epochs) > 0.8
    trainer.save(tmp_path / "a.pt")
    got = score(recipe, run, tmp_path / "a.pt", "val")
    assert got["val_accuracy"] == pytest.approx(trainer.best["val_accuracy"], abs=0.01)


@pytest.mark.parametrize("size", [1, 20, 48, 63])
def test_micro_batches_add_up_to_the_batch(size: int) -> None:
    """The last batch of an epoch and parts of different sizes included; to float32's rounding."""
    run = make_run(epochs=2)
    fields: dict[str, Any] = {"model": MLP(hidden=16), "optimizer": AdamW(lr=1e-3)}
    whole = numbers(Trainer(digits_recipe(**fields), run).epochs())
    parts = numbers(Trainer(digits_recipe(**fields, micro_batch_size=size), run).epochs())
    for one, other in zip(whole, parts, strict=True):
        assert other["train_loss"] == pytest.approx(one["train_loss"], rel=1e-5)
        assert other["val_loss"] == pytest.approx(one["val_loss"], rel=1e-5)


def test_micro_batches_leave_batch_norm_no_row_alone() -> None:
    """Of 3 rows in parts of 2, one would be."""
    rng = np.random.default_rng(0)
    x, y = rng.random((20, 4), np.float32), np.arange(20) % 2
    recipe = Recipe(data=tensors(x[:15], y[:15], val=(x[15:], y[15:])), optimizer=AdamW(),
                    model=lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8),
                                                nn.Linear(8, 2)), batch_size=3)
    trainer = Trainer(recipe, make_run(epochs=1), micro_batch_size=2)
    assert all(math.isfinite(epoch["train_loss"]) for epoch in trainer.epochs())
