"""The parts of a recipe: right rates, losses and augmentations, and faults that name the field."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from hpo.errors import InputError
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
    WarmupCosine,
    tensors,
)
from hpo.train.recipe import describe

DATA = tensors(np.zeros((8, 1, 4, 4), np.uint8), np.arange(8) % 2)


def test_a_study_s_module_loads_neither_torch_nor_optuna_nor_numpy():
    code = ("import sys, hpo, hpo.train, search_spaces.digits, search_spaces.cifar, "
            "search_spaces.fashion\n"
            "print([m for m in ('torch', 'optuna', 'numpy', 'torchvision') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("n_steps", [10, 100, 333])
def test_one_cycle_has_the_rates_of_torch_s(n_steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.3, total_steps=n_steps, pct_start=0.25, div_factor=20, final_div_factor=1e3,
        cycle_momentum=False)
    expected = []
    for _ in range(n_steps):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    rates = OneCycle(warmup_fraction=0.25, div_factor=20, final_div_factor=1e3).rates(n_steps, 0.3)
    assert rates == pytest.approx(expected, rel=1e-12)


def test_one_cycle_of_very_few_steps_is_finite_and_above_zero():
    for n_steps in range(1, 8):
        rates = OneCycle().rates(n_steps, 0.1)
        assert len(rates) == n_steps and all(0 < rate <= 0.1 for rate in rates)


def test_warmup_cosine_rises_in_a_line_and_falls_by_half_a_cosine():
    rates = WarmupCosine(warmup_fraction=0.1, final_fraction=0.01).rates(100, 2.0)
    assert rates[:10] == pytest.approx([2.0 * (i + 1) / 11 for i in range(10)])
    expected = [0.02 + (2.0 - 0.02) * (1 + math.cos(math.pi * i / 89)) / 2 for i in range(90)]
    assert rates[10:] == pytest.approx(expected, rel=1e-12)


def test_a_constant_schedule_keeps_the_rate():
    assert Constant().rates(3, 0.5) == [0.5, 0.5, 0.5]


def test_label_smoothing_is_the_formula_in_float64():
    rng = np.random.default_rng(0)
    scores, labels, smoothing = rng.normal(size=(16, 10)) * 3, rng.integers(10, size=16), 0.1
    logs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    target = np.eye(10)[labels] * (1 - smoothing) + smoothing / 10
    expected = -(target * logs).sum(1).mean()
    got = CrossEntropy(label_smoothing=smoothing)(
        torch.tensor(scores, dtype=torch.float32), torch.tensor(labels))
    assert float(got) == pytest.approx(expected, rel=1e-6)


def one_weight() -> tuple[nn.Module, nn.Parameter]:
    """Return a module of one weight, [1, -2], and that weight."""
    model = nn.Linear(2, 1, bias=False)
    model.weight = nn.Parameter(torch.tensor([[1.0, -2.0]]))
    return model, model.weight


def test_sgd_with_nesterov_makes_the_formula_s_steps():
    model, w = one_weight()
    optimizer = SGD(lr=0.1, momentum=0.9, weight_decay=0.01).make(model)
    value, speed = np.array([1.0, -2.0]), np.zeros(2)
    for _ in range(5):
        optimizer.zero_grad()
        (w ** 2).sum().backward()
        optimizer.step()
        slope = 2 * value + 0.01 * value
        speed = 0.9 * speed + slope
        value = value - 0.1 * (slope + 0.9 * speed)
    assert w.detach().numpy()[0] == pytest.approx(value, rel=1e-5)


def test_adamw_makes_the_formula_s_steps():
    model, w = one_weight()
    optimizer = AdamW(lr=0.1, weight_decay=0.05, betas=(0.8, 0.9)).make(model)
    value, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    for t in range(1, 6):
        optimizer.zero_grad()
        (w ** 2).sum().backward()
        optimizer.step()
        slope = 2 * value
        m, v = 0.8 * m + 0.2 * slope, 0.9 * v + 0.1 * slope ** 2
        step = m / (1 - 0.8 ** t) / (np.sqrt(v / (1 - 0.9 ** t)) + 1e-8)
        value = value * (1 - 0.1 * 0.05) - 0.1 * step
    assert w.detach().numpy()[0] == pytest.approx(value, rel=1e-5)


def test_a_random_crop_is_a_window_of_the_padded_image_with_all_offsets_alike():
    images = torch.arange(1, 26, dtype=torch.uint8).view(1, 1, 5, 5).expand(9_000, 2, 5, 5)
    cut = RandomCrop(padding=1)(images, torch.Generator().manual_seed(0))
    padded = nn.functional.pad(images[:1], (1, 1, 1, 1))
    windows = [padded[..., i:i + 5, j:j + 5] for i in range(3) for j in range(3)]
    counts = [int((cut == window).flatten(1).all(1).sum()) for window in windows]
    assert cut.dtype == torch.uint8 and sum(counts) == 9_000
    # Nine offsets of 1,000 each; a count has a deviation of 30.
    assert all(850 < count < 1_150 for count in counts)


def test_a_random_flip_mirrors_whole_images_with_its_probability():
    images = torch.arange(12, dtype=torch.float32).view(1, 1, 3, 4).expand(10_000, 3, 3, 4)
    turned = RandomFlip(p=0.3)(images, torch.Generator().manual_seed(0))
    same = (turned == images).flatten(1).all(1)
    mirrored = (turned == images.flip(-1)).flatten(1).all(1)
    assert bool((same | mirrored).all())
    assert 2_800 < int(mirrored.sum()) < 3_200


@pytest.mark.parametrize("size", [1, 2, 3, 8, 28, 33])
def test_the_small_cnn_takes_images_of_any_size(size):
    model = SimpleCNN(hidden=4, width=2).make((3, size, size), 5).eval()
    assert model(torch.zeros(2, 3, size, size)).shape == (2, 5)


def test_the_small_cnn_refuses_rows_that_are_no_images():
    with pytest.raises(InputError, match=r"\[4\].*MLP"):
        SimpleCNN().make((4,), 2)


def test_an_mlp_has_its_hidden_layers():
    model = MLP(hidden=7, n_layers=3).make((2, 3), 5)
    assert [tuple(p.shape) for p in model.parameters() if p.ndim == 2] == [
        (7, 6), (7, 7), (7, 7), (5, 7)]


# What a user without a type checker may write.
WRONG: Any = {"batch": 2.5, "model": "cnn", "cnn": SimpleCNN, "data": [1, 2], "adam": "adam",
              "class": AdamW, "schedule": 3, "augment": ("flip",), "lr": "fast"}


@pytest.mark.parametrize("make,field", [
    (lambda: Recipe(data=DATA, model=SimpleCNN(), optimizer=AdamW(), batch_size=0), "batch_size"),
    (lambda: Recipe(data=DATA, model=SimpleCNN(), optimizer=AdamW(), batch_size=WRONG["batch"]),
     "batch_size"),
    (lambda: Recipe(data=DATA, model=WRONG["cnn"], optimizer=AdamW()), "SimpleCNN(...)"),
    (lambda: Recipe(data=DATA, model=WRONG["model"], optimizer=AdamW()), "Recipe.model"),
    (lambda: Recipe(data=WRONG["data"], model=SimpleCNN(), optimizer=AdamW()), "Recipe.data"),
    (lambda: Recipe(data=DATA, model=SimpleCNN(), optimizer=WRONG["adam"]), "Recipe.optimizer"),
    (lambda: Recipe(data=DATA, model=SimpleCNN(), optimizer=WRONG["class"]), "AdamW(...)"),
    (lambda: Recipe(data=DATA, model=SimpleCNN(), optimizer=AdamW(),
                    schedule=WRONG["schedule"]), "schedule"),
    (lambda: Recipe(data=DATA, model=SimpleCNN(), optimizer=AdamW(), clip_norm=0.0), "clip_norm"),
    (lambda: Recipe(data=DATA, model=SimpleCNN(), optimizer=AdamW(), augment=WRONG["augment"]),
     "Recipe.augment"),
    (lambda: AdamW(lr=-1.0), "AdamW.lr"), (lambda: AdamW(lr=math.nan), "AdamW.lr"),
    (lambda: AdamW(lr=WRONG["lr"]), "AdamW.lr"), (lambda: AdamW(betas=(0.9, 1.0)), "AdamW.betas"),
    (lambda: SGD(momentum=1.0), "SGD.momentum"), (lambda: SimpleCNN(hidden=0), "SimpleCNN.hidden"),
    (lambda: SimpleCNN(dropout=1.0), "SimpleCNN.dropout"), (lambda: MLP(n_layers=0), "n_layers"),
    (lambda: CrossEntropy(label_smoothing=1.5), "label_smoothing"),
    (lambda: RandomCrop(padding=0), "RandomCrop.padding"),
    (lambda: RandomFlip(p=2), "RandomFlip.p"),
])
def test_a_fault_of_a_recipe_names_the_field(make, field):
    with pytest.raises(InputError) as told:
        make()
    assert field in str(told.value) and "\n" not in str(told.value)


def test_numpy_values_of_a_grid_are_taken_as_numbers():
    """C30.3."""
    eight, four, half = (cast(Any, value) for value in (np.int64(8), np.int64(4), np.float64(0.5)))
    recipe = Recipe(data=DATA, model=SimpleCNN(hidden=eight, dropout=half),
                    optimizer=AdamW(lr=half), batch_size=four)
    entry = describe(recipe)
    assert type(entry["model"]["hidden"]) is int and type(entry["optimizer"]["lr"]) is float
    assert type(entry["batch_size"]) is int


def test_a_recipe_is_described_as_json_data():
    recipe = Recipe(data=DATA, model=SimpleCNN(hidden=8), optimizer=SGD(lr=0.1),
                    augment=(RandomCrop(2), RandomFlip()), schedule=WarmupCosine())
    entry = describe(recipe)
    assert entry["model"] == {
        "type": "SimpleCNN", "hidden": 8, "dropout": 0.0, "width": 32, "norm": "batch",
        "activation": "relu", "dropout_kind": "dropout", "init": "default"}
    assert entry["augment"] == [{"type": "RandomCrop", "padding": 2, "fill": "black"},
                                {"type": "RandomFlip", "p": 0.5}]
    assert entry["loss"] == {"type": "CrossEntropy", "label_smoothing": 0.0}
