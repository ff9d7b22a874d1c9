"""Mixing, the mean of the weights, L1 and early stopping against their formulas in float64."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpo import Run
from hpo.errors import InputError
from hpo.train import (
    EMA,
    MLP,
    SGD,
    AdamW,
    Constant,
    CrossEntropy,
    CutMix,
    EarlyStopping,
    MixUp,
    Recipe,
    SimpleCNN,
    tensors,
)
from hpo.train import checkpoint as files
from hpo.train.averaging import Averaged
from hpo.train.loop import Trainer
from hpo.train.recipe import describe
from hpo.train.regularize import MixedLabels, Patience
from hpo.train.scoring import score
from hpo.train.trying import prepare

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.rand(48, 1, 6, 6, generator=GENERATOR), torch.arange(48) % 3
DATA = tensors(X, Y, val=(X, Y))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run_of(**fields: Any) -> Run:
    return Run(**{"epochs": 3, "seed": 2, "device": "cpu", "dir": Path("."), **fields})


def trainer(run: Run | None = None, **fields: Any) -> Trainer:
    recipe = {"data": DATA, "model": MLP(hidden=8), "optimizer": AdamW(lr=5e-3),
              "batch_size": 16, **fields}
    return Trainer(Recipe(**recipe), run or run_of())


def soft_cross_entropy(scores: np.ndarray, first: np.ndarray, second: np.ndarray, share: float,
                       smoothing: float) -> float:
    """Return the mean cross entropy against share * first + (1 - share) * second, smoothed."""
    n_classes = scores.shape[1]
    target = share * np.eye(n_classes)[first] + (1 - share) * np.eye(n_classes)[second]
    target = target * (1 - smoothing) + smoothing / n_classes
    logs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    return float(-(target * logs).sum(1).mean())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixup_is_the_formula_with_soft_labels(smoothing):
    images, labels = torch.rand(8, 3, 4, 4, generator=GENERATOR), torch.arange(8) % 5
    mixed, told = MixUp(alpha=0.4).mix(images, labels, seeded(1))
    share = float(told.share)
    assert 0 < share < 1
    x = images.double().numpy()
    expected = share * x + (1 - share) * np.roll(x, 1, axis=0)
    assert mixed.numpy() == pytest.approx(expected, abs=1e-6) and mixed.dtype == torch.float32
    assert torch.equal(told.first, labels) and torch.equal(told.second, labels.roll(1))
    scores = torch.randn(8, 5, generator=GENERATOR)
    got = told.loss(CrossEntropy(label_smoothing=smoothing), scores)
    assert got.dtype == torch.float32
    assert float(got) == pytest.approx(soft_cross_entropy(
        scores.double().numpy(), labels.numpy(), np.roll(labels.numpy(), 1), share, smoothing),
        rel=1e-6)
    # And what torch gives for probabilities.
    hot = nn.functional.one_hot(labels, 5).double()
    soft = share * hot + (1 - share) * hot.roll(1, 0)
    assert float(got) == pytest.approx(float(nn.functional.cross_entropy(
        scores.double(), soft, label_smoothing=smoothing)), rel=1e-6)


@pytest.mark.parametrize("alpha", [0.1, 1.0, 5.0])
def test_shares_have_mean_and_variance_of_their_beta_distribution(alpha):
    generator, n = seeded(2), 3_000
    one = torch.zeros(1, 1)
    shares = np.array([float(MixUp(alpha).mix(one, one[0], generator)[1].share)
                       for _ in range(n)])
    variance = 1 / (4 * (2 * alpha + 1))
    assert np.isfinite(shares).all()
    assert shares.mean() == pytest.approx(0.5, abs=5 * math.sqrt(variance / n))
    assert shares.var() == pytest.approx(variance, rel=0.15)


def test_cutmix_takes_one_box_of_the_row_before_and_counts_its_pixels():
    images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 2, 9, 12).contiguous()
    labels, generator = torch.arange(4), seeded(3)
    shares, areas = [], []
    for _ in range(400):
        mixed, told = CutMix(alpha=1.0).mix(images, labels, generator)
        taken = mixed != images
        assert torch.equal(mixed, torch.where(taken, images.roll(1, 0), images))
        assert torch.equal(taken, taken[:1, :1].expand_as(taken))
        hole = taken[0, 0]
        rows, columns = hole.any(1).nonzero().view(-1), hole.any(0).nonzero().view(-1)
        assert int(hole.sum()) == len(rows) * len(columns)
        for side in (rows, columns):
            assert len(side) == 0 or int(side[-1] - side[0]) + 1 == len(side)
        assert float(told.share) == pytest.approx(1 - float(hole.double().mean()), abs=1e-12)
        assert torch.equal(told.second, labels.roll(1))
        shares.append(float(told.share))
        areas.append(hole.double())
    # The middle is anywhere, so that most boxes are cut off at an edge: less than half is taken.
    assert 0.65 < np.mean(shares) < 0.8 and min(shares) < 0.35 and max(shares) > 0.95
    often = torch.stack(areas).mean(0)
    assert often.min() > 0.08 and often.max() < 0.5


def test_the_box_of_cutmix_is_that_of_the_paper_for_its_draws():
    """Algorithm A1 in plain numbers, from the same draws."""
    for seed in range(30):
        images = torch.stack([torch.zeros(1, 10, 14), torch.ones(1, 10, 14)])
        mixed, told = CutMix(alpha=0.7).mix(images, torch.arange(2), seeded(seed))
        draws = seeded(seed)
        sample: Any = getattr(torch, "_sample_dirichlet")  # noqa: B009
        lam = float(sample(torch.full((2,), 0.7, dtype=torch.float64), generator=draws)[0])
        at = torch.rand(2, dtype=torch.float64, generator=draws).tolist()
        expected = torch.zeros(10, 14)
        cut = []
        for middle, size in zip(at, (10, 14), strict=True):
            half = int(size * math.sqrt(1 - lam)) // 2
            cut.append(slice(max(0, int(middle * size) - half), max(0, int(middle * size) + half)))
        expected[cut[0], cut[1]] = 1
        assert torch.equal(mixed[0, 0], expected)
        assert float(told.share) == pytest.approx(1 - float(expected.mean()), abs=1e-7)


def test_a_loss_of_one_s_own_is_mixed_by_its_two_values():
    def margin(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.multi_margin_loss(scores, labels)

    scores, labels = torch.randn(6, 3, generator=GENERATOR), torch.arange(6) % 3
    told = MixedLabels(labels, labels.roll(1), torch.tensor(0.3, dtype=torch.float64))
    expected = 0.3 * margin(scores, labels) + 0.7 * margin(scores, labels.roll(1))
    assert float(told.loss(margin, scores)) == pytest.approx(float(expected), rel=1e-6)
    epochs = list(trainer(mix=MixUp(), loss=margin).epochs())
    assert all(math.isfinite(epoch["train_loss"]) for epoch in epochs)


@pytest.mark.parametrize("mix", [MixUp(0.5), CutMix()])
def test_mixing_changes_training_only_repeats_by_seed_and_goes_with_micro_batches(mix):
    plain, mixed, again, other = (
        [{k: v for k, v in epoch.items() if not k.endswith("_s")} for epoch in one.epochs()]
        for one in (trainer(), trainer(mix=mix), trainer(mix=mix),
                    trainer(run_of(seed=3), mix=mix)))
    assert mixed == again and mixed != plain and mixed != other
    parts = list(trainer(mix=mix, micro_batch_size=5).epochs())
    for one, two in zip(mixed, parts, strict=True):
        assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-5)
        assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-5)


def test_cutmix_on_rows_that_are_no_images_is_told_before_any_trial():
    rows = tensors(X.flatten(1), Y, val=(X.flatten(1), Y))
    with pytest.raises(InputError, match=r"CutMix: needs images.*\[36\].*MixUp"):
        prepare(Recipe(data=rows, model=MLP(hidden=4), optimizer=AdamW(), mix=CutMix()), run_of())


@pytest.mark.parametrize("spec", [EMA(decay=0.9, warmup=False), EMA(decay=0.9)])
def test_the_mean_of_the_weights_is_the_formula_in_float64(spec):
    """Weights and running statistics alike; the count of batches is the model's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    averaged = Averaged(model, copy.deepcopy(model), spec)
    expected = {name: value.double().numpy().copy() for name, value in model.state_dict().items()}
    for step in range(1, 13):
        model(torch.randn(5, 3))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        averaged.follow()
        decay = min(0.9, (1 + step) / (10 + step)) if spec.warmup else 0.9
        for name, value in model.state_dict().items():
            expected[name] = decay * expected[name] + (1 - decay) * value.double().numpy()
    for name, value in averaged.model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            assert int(value) == 12
        else:
            assert value.double().numpy() == pytest.approx(expected[name], rel=1e-5, abs=1e-6)


def test_a_trial_evaluates_and_keeps_the_mean_and_trains_the_weights(tmp_path):
    """Against the same trial without the mean, whose weights after each step are the same."""
    spec = EMA(decay=0.8, warmup=False)
    one, plain = trainer(ema=spec), trainer()
    follower = Averaged(plain.model, copy.deepcopy(plain.model), spec)
    epochs = list(one.epochs())
    plain.optimizer.register_step_post_hook(lambda *_: follower.follow())
    list(plain.epochs())
    for name, value in plain.model.state_dict().items():
        assert torch.equal(one.model.state_dict()[name], value)
    one.save(tmp_path / "a.pt")
    assert one.best_epoch == max(range(3), key=lambda k: (epochs[k]["val_accuracy"], -k))
    got = score(one.recipe, one.run, tmp_path / "a.pt", "val")
    assert got["val_loss"] == epochs[one.best_epoch]["val_loss"]
    last = trainer(ema=spec).epochs()
    assert [next(last)["val_loss"] for _ in range(3)] == [e["val_loss"] for e in epochs]
    follower.model.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(follower.model(X), Y)
    assert epochs[-1]["val_loss"] == pytest.approx(float(loss), rel=1e-6)
    assert epochs[-1]["val_loss"] != list(trainer().epochs())[-1]["val_loss"]


def ended(values: list[float], spec: EarlyStopping, maximize: bool) -> int:
    """Return after how many values a trial of these ends."""
    patience = Patience(spec, maximize)
    for k, value in enumerate(values):
        patience.add(value)
        if patience.is_over:
            return k + 1
    return len(values)


@pytest.mark.parametrize("values,spec,maximize,expected", [
    ([1, 2, 3, 3, 3, 3], EarlyStopping(2), True, 5),
    ([1, 2, 3, 4, 5, 6], EarlyStopping(1), True, 6),
    ([5, 4, 4, 3, 3, 3, 9], EarlyStopping(2), False, 6),
    # 0.05 better each time: within min_delta of the best, until it is not.
    ([1.0, 0.95, 0.9, 0.85, 0.8], EarlyStopping(2, min_delta=0.08), False, 5),
    ([1.0, 0.95, 0.93, 0.85], EarlyStopping(2, min_delta=0.08), False, 3),
    ([-5, -4, -4.5, -4.2], EarlyStopping(2), True, 4),
    ([math.nan, math.nan, 1, 2], EarlyStopping(2), True, 2),
    ([1, math.nan, 2, math.nan, 3], EarlyStopping(2), True, 5),
    ([7, 7], EarlyStopping(1), False, 2),
])
def test_a_trial_ends_when_its_metric_has_not_improved_for_its_patience(
    values, spec, maximize, expected
):
    assert ended(values, spec, maximize) == expected


def test_a_stopped_trial_has_fewer_epochs_the_rates_of_all_and_says_why():
    fields: dict[str, Any] = {"optimizer": SGD(lr=1e-9), "schedule": Constant()}
    whole = list(trainer(run_of(epochs=6), **fields).epochs())
    one = trainer(run_of(epochs=6), early_stopping=EarlyStopping(patience=2), **fields)
    assert one.stopped_early is None
    epochs = list(one.epochs())
    assert len(epochs) == 3 and one.best_epoch == 0
    assert [e["val_loss"] for e in epochs] == [e["val_loss"] for e in whole[:3]]
    assert one.stopped_early == "no better val_accuracy for 2 epochs"
    # What goes on from its state has nothing left to train.
    again = trainer(run_of(epochs=6), early_stopping=EarlyStopping(patience=2), **fields)
    again.load_state_dict(one.state_dict())
    assert list(again.epochs()) == [] and again.stopped_early == one.stopped_early


WRONG: Any = "yes"


@pytest.mark.parametrize("make,told", [
    (lambda: MixUp(alpha=0.0), "MixUp.alpha"), (lambda: CutMix(alpha=WRONG), "CutMix.alpha"),
    (lambda: EMA(decay=1.0), "EMA.decay"), (lambda: EMA(warmup=WRONG), "EMA.warmup"),
    (lambda: EarlyStopping(patience=0), "EarlyStopping.patience"),
    (lambda: EarlyStopping(min_delta=-1.0), "EarlyStopping.min_delta"),
    (lambda: trainer(mix=WRONG), "Recipe.mix: must be MixUp(), CutMix() or None"),
    (lambda: trainer(mix=MixUp), "write MixUp(...)"),
    (lambda: trainer(ema=0.999), "Recipe.ema: must be EMA() or None"),
    (lambda: trainer(early_stopping=3), "Recipe.early_stopping"),
])
def test_a_fault_names_the_field_in_one_line(make, told):
    with pytest.raises(InputError) as caught:
        make()
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_checkpoint_of_a_recipe_with_every_part_is_made_into_its_model_again(tmp_path):
    one = trainer(model=SimpleCNN(hidden=8, width=4), mix=CutMix(), ema=EMA(0.9),
                  early_stopping=EarlyStopping(4), clip_adaptive=0.1, precision="bf16")
    list(one.epochs())
    one.save(tmp_path / "a.pt")
    entry = files.read(tmp_path / "a.pt")
    assert entry["recipe"] == describe(one.recipe)
    assert entry["recipe"]["mix"] == {"type": "CutMix", "alpha": 1.0}
    assert entry["recipe"]["ema"] == {"type": "EMA", "decay": 0.9, "warmup": True}
    kept = files.rebuild(entry).state_dict()
    assert all(torch.equal(kept[name], value) for name, value in entry["model"].items())
