"""Splits, fractions and a user's own data: the same rows for the same seed, faults by row."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from hpo import Run
from hpo.errors import DataError, InputError
from hpo.train import (
    MLP,
    AdamW,
    RandomCrop,
    Recipe,
    SimpleCNN,
    datasets,
    digits,
    tensors,
)
from hpo.train.loaded import load, moments
from hpo.train.loop import Trainer
from hpo.train.scoring import score
from hpo.train.split import keep_fraction, stratified
from hpo.train.trying import prepare


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPO_CACHE_DIR", str(tmp_path / "cache"))


def make_run(**fields) -> Run:
    return Run(**{"epochs": 1, "seed": 0, "device": "cpu", "dir": Path("."), **fields})


def recipe_of(data, **fields) -> Recipe:
    return Recipe(**{"data": data, "model": MLP(hidden=8), "optimizer": AdamW(), **fields})


LABELS = np.repeat([0, 1, 2, 3], [500, 300, 195, 5])


def test_a_split_keeps_the_share_of_each_class():
    stay, out = stratified(LABELS, 0.1, seed=0)
    assert np.bincount(LABELS[out]).tolist() in ([50, 30, 19, 1], [50, 30, 20, 1])
    assert np.array_equal(np.sort(np.concatenate([stay, out])), np.arange(1000))


def test_a_split_is_the_same_for_a_seed_and_another_for_another():
    first, again, other = (stratified(LABELS, 0.2, seed)[1] for seed in (3, 3, 4))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_a_split_has_the_size_that_was_asked_for():
    rng = np.random.default_rng(0)
    for n in (200, 333, 1797):
        labels = rng.integers(10, size=n)
        assert len(stratified(labels, 0.2, 0)[1]) == round(0.2 * n)


def test_a_class_of_one_row_trains_and_one_of_two_does_both():
    labels = np.array([0] * 20 + [1] + [2, 2])
    stay, out = stratified(labels, 0.1, seed=0)
    assert np.bincount(labels[stay], minlength=3).tolist()[1:] == [1, 1]
    assert np.bincount(labels[out], minlength=3).tolist()[1:] == [0, 1]


def test_a_fraction_keeps_the_share_of_each_class_and_two_rows_of_the_smallest():
    kept = keep_fraction(LABELS, 0.1, seed=0)
    assert np.bincount(LABELS[kept]).tolist()[3] == 2
    assert np.bincount(LABELS[kept]).tolist()[:2] == [50, 30]
    assert len(keep_fraction(LABELS, 1.0, seed=0)) == 1000


def test_digits_have_a_fixed_test_split_and_one_by_seed_for_validation():
    loaded: list[Any] = [load(recipe_of(digits(run)), run, torch.device("cpu"))
                         for run in (make_run(), make_run(seed=1))]
    first, other = loaded
    sizes = [len(first.train), len(first.val), len(first.test)]
    assert sizes == [1150, 288, 359] and first.image_shape == (1, 8, 8)
    assert first.n_classes == 10 and first.fingerprint == other.fingerprint
    assert torch.equal(first.test.labels, other.test.labels)
    assert not torch.equal(first.val.labels, other.val.labels)
    assert int(torch.bincount(first.test.labels).min()) >= 34


def test_a_data_fraction_leaves_the_test_split_whole():
    known = prepare(recipe_of(digits(make_run())), make_run(data_fraction=0.25))
    assert known["n_train"] + known["n_val"] == pytest.approx(1438 / 4, abs=2)
    assert known["n_test"] == 359


def test_loaded_data_stay_in_the_process_from_trial_to_trial():
    run = make_run(seed=7)
    first, again = (load(recipe_of(digits(run)), run, torch.device("cpu")) for _ in range(2))
    assert first is again


def test_normalised_training_inputs_have_mean_zero_and_deviation_one_by_channel():
    rng = np.random.default_rng(0)
    x = (rng.integers(0, 100, (60, 3, 6, 6)) + np.array([0, 50, 150]).reshape(3, 1, 1))
    data = tensors(x.astype(np.uint8), np.arange(60) % 3)
    run = make_run()
    for augment in ((), (RandomCrop(1),)):
        loaded = load(recipe_of(data, augment=augment), run, torch.device("cpu"))
        images = torch.cat([loaded.normalised(batch, ready=loaded.train.ready)
                            for batch, _ in loaded.train.batches(None, 16, 4)])
        assert images.mean((0, 2, 3)).tolist() == pytest.approx([0, 0, 0], abs=1e-5)
        assert images.std((0, 2, 3), correction=0).tolist() == pytest.approx([1, 1, 1], rel=1e-5)


def test_moments_are_those_of_numpy_and_a_constant_has_deviation_one():
    x = np.random.default_rng(0).integers(0, 256, (2_500, 2, 3, 3)).astype(np.uint8)
    x[:, 1] = 9
    rows = np.arange(0, 2_500, 2)
    mean, std = moments(torch.from_numpy(x), torch.from_numpy(rows))
    assert mean.flatten().tolist() == pytest.approx([x[rows, 0].mean(), 9.0], rel=1e-6)
    assert std.flatten().tolist() == pytest.approx([x[rows, 0].std(), 1.0], rel=1e-6)


def test_float_tensors_are_left_as_they_are_and_lists_are_taken():
    data = tensors([[0.5, 1.0], [2.0, 3.0]] * 10, [0, 1] * 10)
    loaded = load(recipe_of(data), make_run(), torch.device("cpu"))
    images, labels = next(iter(loaded.train.batches(None, 4, 1)))
    assert images[labels == 0][0].tolist() == [0.5, 1.0] and loaded.mean is None


def test_tensors_changed_in_place_are_not_taken_for_the_old_ones():
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    first = load(recipe_of(tensors(x, y)), make_run(), torch.device("cpu"))
    x[:] = 0.0
    again = load(recipe_of(tensors(x, y)), make_run(), torch.device("cpu"))
    assert first.fingerprint != again.fingerprint


@pytest.mark.parametrize("make,words", [
    (lambda: tensors(np.zeros((4, 2)), np.zeros(3, int)), ["4 inputs", "3 labels"]),
    (lambda: tensors(np.zeros((4, 2)), np.zeros(4)), ["whole numbers", "float64"]),
    (lambda: tensors(np.zeros((4, 2)), [0, 1, 2, 5], n_classes=3), ["row 3", "label 5", "0..2"]),
    (lambda: tensors(np.zeros((4, 2)), [0, 1, -1, 0]), ["row 2", "label -1"]),
    (lambda: tensors(np.array([[0.0], [np.nan]] * 2), [0, 1] * 2), ["row 1", "NaN"]),
    (lambda: tensors(np.zeros((4, 2)), [0, 1] * 2, test=(np.zeros((2, 3)), [0, 1])),
     ["test", "[3]", "[2]"]),
    (lambda: tensors(np.zeros(4), [0, 1] * 2), ["[n, ...]", "[4]"]),
])
def test_tensors_that_do_not_fit_are_told_by_row_and_shape(make, words):
    with pytest.raises(DataError) as told:
        prepare(recipe_of(make()), make_run())
    assert all(word in str(told.value) for word in words), str(told.value)


class Mixed(Dataset):
    """C60.4: a dataset whose items have two shapes."""

    targets = [0, 1] * 20

    def __len__(self):
        return 40

    def __getitem__(self, row):
        return torch.zeros(3, 8, 8 if row % 7 else 9), self.targets[row]


@pytest.mark.parametrize("n_workers", [0, 1])
def test_a_dataset_that_mixes_shapes_is_told_with_both(n_workers):
    """C60.4."""
    recipe = recipe_of(datasets(Mixed()), batch_size=32, n_loader_workers=n_workers)
    with pytest.raises(DataError) as told:
        list(Trainer(recipe, make_run()).epochs())
    assert "[3, 8, 8]" in str(told.value) and "[3, 8, 9]" in str(told.value)
    assert "Traceback" not in str(told.value) and not multiprocessing.active_children()


def blobs(n, seed=0):
    rng = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    return torch.randn(n, 4, generator=rng) + 3.0 * y[:, None], y


def test_a_dataset_is_split_trained_and_scored_through_loaders_that_end_with_the_trial(tmp_path):
    recipe = recipe_of(datasets(TensorDataset(*blobs(200)), TensorDataset(*blobs(50, 1))),
                       optimizer=AdamW(lr=0.05), batch_size=16, n_loader_workers=2)
    run = make_run(epochs=3)
    trainer = Trainer(recipe, run)
    epochs = trainer.epochs()
    next(epochs)
    assert len(multiprocessing.active_children()) > 0
    last = list(epochs)[-1]
    assert not multiprocessing.active_children()
    assert last["val_accuracy"] >= 0.9
    trainer.save(tmp_path / "a.pt")
    assert score(recipe, run, tmp_path / "a.pt", "test")["test_accuracy"] >= 0.9
    assert not multiprocessing.active_children()


def test_leaving_a_trial_in_the_middle_ends_its_loaders():
    recipe = recipe_of(datasets(TensorDataset(*blobs(64))), batch_size=16, n_loader_workers=1)
    epochs = Trainer(recipe, make_run(epochs=5)).epochs()
    next(epochs)
    epochs.close()
    assert not multiprocessing.active_children()


class Unlabelled(Dataset):
    """A dataset that does not tell its labels, and gives what `item` says."""

    def __init__(self, item):
        self.item = item

    def __len__(self):
        return 30

    def __getitem__(self, row):
        return self.item(row)


def test_a_dataset_that_does_not_tell_its_classes_must_be_given_their_number():
    data = Unlabelled(lambda row: (torch.zeros(2), row % 3))
    with pytest.raises(InputError, match="n_classes"):
        prepare(recipe_of(datasets(data)), make_run())
    assert prepare(recipe_of(datasets(data, n_classes=3)), make_run())["n_val"] == 3


@pytest.mark.parametrize("item,word", [
    (lambda row: torch.zeros(2), "pairs"), (lambda row: ("text", 0), "ToTensor"),
    (lambda row: (torch.zeros(2), "cat"), "labels numbers")])
def test_items_that_are_no_inputs_with_labels_are_told(item, word):
    with pytest.raises(DataError, match=word):
        prepare(recipe_of(datasets(Unlabelled(item), n_classes=2)), make_run())


def test_what_is_no_dataset_is_refused_at_once():
    with pytest.raises(InputError, match="int"):
        datasets(3)


@pytest.mark.parametrize("augment", [(), (RandomCrop(2),)])
def test_streamed_data_train_as_resident_ones_do(augment):
    """The same rows in the same order; only the batch's road to the model differs."""
    model = SimpleCNN(hidden=16, width=4)
    run, results = make_run(epochs=2), []
    for resident in (True, False):
        recipe = recipe_of(digits(run), model=model, resident=resident, augment=augment,
                           batch_size=64, n_loader_workers=0 if resident else 2)
        results.append([{k: v for k, v in epoch.items() if not k.endswith("_s")}
                        for epoch in Trainer(recipe, run).epochs()])
    for one, other in zip(*results, strict=True):
        assert one == pytest.approx(other, rel=2e-3)


def test_labels_out_of_the_model_s_range_are_found_before_training():
    x, y = blobs(20)
    small = nn.Linear(4, 1)
    with pytest.raises(InputError, match=r"\[8, 1\].*\[8, 2\]"):
        prepare(recipe_of(tensors(x, y), model=small), make_run())
    with pytest.raises(InputError, match=r"does not take inputs of shape \[8, 4\]"):
        prepare(recipe_of(tensors(x, y), model=nn.Linear(5, 2)), make_run())
