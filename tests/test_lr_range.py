"""The learning-rate range test: right picks, no senseless ones, and no trace of a sweep."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import hpo, write_text
from torch import nn

from hpo import Run
from hpo.baselines.lr_edge import edge_of, mean_losses, suggest_below
from hpo.baselines.lr_pick import LRSuggestion, suggest
from hpo.baselines.lr_range import lr_range, plan
from hpo.baselines.lr_sweep import sweep
from hpo.errors import InputError
from hpo.train import (
    MLP,
    SGD,
    Adadelta,
    AdamW,
    Constant,
    Recipe,
    SimpleCNN,
    digits,
    tensors,
)

RATES = np.logspace(-6, 0, 61)
X = np.log10(RATES)
DECADES = np.logspace(-6, 0, 7)
NAN_END = np.array([0.90, 0.89, 0.87, 0.86, 0.85, 0.84, math.nan])
FLAT = 2.303 + 0.001 * (-1.0) ** np.arange(61)
SPIKY = 2.3 - 1.5 / (1 + np.exp(-(X + 2) / 0.3)) + np.where(RATES > 0.5, 50 * (RATES - 0.5), 0.0)
SPIKY[0] = 5.0
RISING = 1 + X - X.min()


def test_a_nan_at_the_end_does_not_draw_the_pick():
    """C49.1."""
    assert suggest(DECADES, NAN_END).pick in (DECADES[1], DECADES[2])


def quadratic(rates):
    w = nn.Parameter(torch.tensor(1.0))
    model = nn.Module()
    model.w = w
    losses = sweep(model, torch.optim.SGD([w], lr=0.1), lambda: 5 * w * w, rates)
    return losses, float(w.detach())


def test_a_sweep_that_diverges_stops_early_and_picks_below_the_divergence():
    """C49.2: loss 5 w^2 diverges above a rate of 0.2."""
    rates = list(np.geomspace(1e-4, 10, 50))
    losses, w = quadratic(rates)
    found = suggest(rates, losses)
    assert len(losses) < 50
    assert found.pick is not None and 1e-3 < found.pick < 0.2
    assert w == 1.0


def test_rates_that_all_diverge_give_no_pick_and_advise_a_lower_start():
    """C49.3."""
    rates = list(np.geomspace(1, 100, 50))
    losses, _ = quadratic(rates)
    found = suggest(rates, losses)
    assert found.pick is None and found.low is None and found.high is None
    assert "lower the start" in found.reason


def test_a_nan_at_the_first_step_gives_no_pick_and_advises_a_lower_start():
    """C49.4."""
    found = suggest([0.1, 1.0, 10.0], [math.nan])
    assert found.pick is None and "lower the start" in found.reason


# C49's loss, 5 w^2, as the study of a model with one weight; the data are only counted.
ONE_WEIGHT = """
    import torch
    from hpo import Float, StudySpec
    from hpo.train import SGD, Recipe, tensors

    class One(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor({w}))

        def forward(self, x):
            return self.w.expand(len(x), 2)

    def build(run, *, lr):
        return Recipe(data=tensors(torch.zeros(60, 1), [0, 1] * 30), model=One,
                      optimizer=SGD(lr, momentum=0.0, nesterov=False),
                      loss=lambda scores, labels: 5 * scores[:, 0].square().mean(), batch_size=1)

    STUDY = StudySpec(space={{"lr": Float(1e-3, 1.0, log=True)}}, build=build,
                      minimize="val_loss", epochs=1, defaults={{"lr": 0.1}})
    """


def test_the_command_picks_below_the_divergence_and_ends_with_code_1_above_it(tmp_path: Path):
    """C49.2, C49.3: `hpo lr-range` with the two ranges of rates."""
    write_text(tmp_path, "s", ONE_WEIGHT.format(w="1.0"))
    words = ("lr-range", "--study", "s", "--devices", "cpu")
    found = json.loads(hpo(tmp_path, *words, "--low", 1e-4, "--high", 10, "--json").stdout)
    assert 1e-3 < found["pick"] < 0.2 and found["n_steps"] < 50
    said = hpo(tmp_path, *words, "--low", 1, "--high", 100, code=1).stdout
    assert "no learning rate to suggest" in said and "lower the start (--low)" in said


def test_the_command_ends_with_code_1_where_the_first_loss_is_nan(tmp_path: Path):
    """C49.4: a message, no traceback."""
    write_text(tmp_path, "s", ONE_WEIGHT.format(w="float('nan')"))
    said = hpo(tmp_path, "lr-range", "--study", "s", "--devices", "cpu", code=1).stdout
    assert "no learning rate to suggest" in said and "lower the start (--low)" in said


def test_a_short_flat_curve_is_said_to_be_too_short_to_tell():
    """A set of 120 rows makes 15 steps an epoch: no proof that the rate does not matter."""
    rng = np.random.default_rng(0)
    found = suggest(np.logspace(-6, 0, 15), rng.normal(1.0, 0.1, 15))
    assert found.pick is None and found.reason.startswith("too few steps to tell: 15 rates")


def test_a_flat_curve_gives_no_pick_and_is_called_flat():
    """C53.1."""
    found = suggest(RATES, FLAT)
    assert found.pick is None and "flat" in found.reason


def test_spikes_at_both_ends_do_not_draw_the_pick():
    """C53.2: the steepest fall is at 1e-2."""
    found = suggest(RATES, SPIKY)
    assert found.pick == pytest.approx(1e-2, rel=0.3)
    assert found.low and found.high and found.low < 1e-2 < found.high
    assert 1e-3 < found.low and found.high < 1e-1


def test_a_curve_that_only_rises_gives_no_pick():
    """C53.3."""
    found = suggest(RATES, RISING)
    assert found.pick is None and "rises" in found.reason


def test_a_constant_curve_gives_no_pick():
    """C53.4."""
    found = suggest(RATES, np.ones(61))
    assert found.pick is None and "flat" in found.reason


@pytest.mark.parametrize("change", [lambda y: 1000 * y, lambda y: y + 10], ids=["x1000", "+10"])
@pytest.mark.parametrize("rates,losses", [
    (DECADES, NAN_END), (RATES, FLAT), (RATES, SPIKY), (RATES, RISING), (RATES, np.ones(61))],
    ids=["nan", "flat", "spiky", "rising", "constant"])
def test_the_answer_does_not_depend_on_the_losses_unit_or_zero(rates, losses, change):
    """C53.5."""
    one, other = suggest(rates, losses), suggest(rates, change(losses))
    assert (one.pick, one.low, one.high, one.reason) == (
        other.pick, other.low, other.high, other.reason)


@pytest.mark.parametrize("n", [16, 24, 48, 100])
def test_pure_noise_is_almost_never_taken_for_a_fall(n):
    rng = np.random.default_rng(n)
    rates = np.geomspace(1e-6, 1, n)
    picks = [suggest(rates, 2.3 + 0.1 * rng.normal(size=n)).pick for _ in range(200)]
    assert sum(pick is not None for pick in picks) <= 5


@pytest.mark.parametrize("n", [24, 48, 100])
def test_a_noisy_fall_is_found_near_its_steepest_point(n):
    rng = np.random.default_rng(n)
    rates = np.geomspace(1e-6, 1, n)
    x = np.log10(rates)
    clean = 2.3 - 1.2 / (1 + np.exp(-(x + 2.5) / 0.3)) + np.where(x > -0.8, 5 * (x + 0.8), 0.0)
    picks = [suggest(rates, clean + 0.1 * rng.normal(size=n)).pick for _ in range(100)]
    found = [math.log10(pick) for pick in picks if pick is not None]
    assert len(found) >= 98
    assert sum(abs(pick + 2.5) < 0.7 for pick in found) >= 95


def test_a_chaotic_end_neither_hides_the_fall_nor_makes_one():
    """Losses of a real sweep: 1,800 CIFAR-10 images, batches of 37."""
    losses = [
        2.3, 2.31, 2.29, 2.34, 2.35, 2.34, 2.34, 2.36, 2.32, 2.28, 2.34, 2.23, 2.29, 2.21, 2.26,
        2.26, 2.28, 2.24, 2.23, 2.18, 2.13, 2.04, 2.01, 2.1, 2.06, 1.98, 2.04, 2.37, 3.06, 2.04,
        2.33, 3.02, 3.03, 3.22, 2.42, 2.05, 2.41, 2.49, 2.09, 3.51, 3.01, 2.56, 2.21, 3.89, 2.4,
        2.36, 2.44, 3.15]
    found = suggest(np.geomspace(1e-6, 1, 48), losses)
    assert found.pick is not None and 1e-4 < found.pick < 2e-3


def test_rates_that_do_not_rise_are_refused():
    with pytest.raises(InputError, match="rise"):
        suggest([1e-3, 1e-3], [1.0, 1.0])
    with pytest.raises(InputError, match="3 losses for 2 rates"):
        suggest([1e-3, 1e-2], [1.0, 1.0, 1.0])


def test_a_suggestion_survives_json_with_its_nan():
    found = suggest(DECADES, NAN_END)
    entry = json.loads(json.dumps(found.to_json(), allow_nan=False))
    back = LRSuggestion.from_json(entry)
    assert back.pick == found.pick and back.low == found.low and back.rates == found.rates
    assert entry["losses"][-1] is None and math.isnan(back.losses[-1])


class Scene:
    """C51's net, optimizer and schedule, and batches from torch's global random state."""

    def __init__(self):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5),
                                   nn.Linear(8, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.01, total_steps=60)
        self.x, self.y = torch.randn(64, 4), torch.randint(0, 2, (64,))
        self.calls = 0

    def loss(self, fail_at=-1):
        self.calls += 1
        if self.calls == fail_at:
            raise ValueError("step seven went wrong")
        rows = torch.randint(0, 64, (16,))
        noise = float(np.random.rand()) * 1e-3 + random.random() * 1e-3
        return nn.functional.cross_entropy(self.model(self.x[rows]) + noise, self.y[rows])

    def sweep(self, fail_at=-1):
        return sweep(self.model, self.optimizer, lambda: self.loss(fail_at),
                     list(np.geomspace(1e-5, 1, 20)), scheduler=self.scheduler)

    def step(self):
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def marks(self):
        """All that a sweep could leave a trace in, in a form that compares bit by bit."""
        def flat(value):
            if isinstance(value, torch.Tensor):
                return value.detach().numpy().tobytes()
            if isinstance(value, dict):
                return {key: flat(one) for key, one in value.items()}
            return [flat(one) for one in value] if isinstance(value, (list, tuple)) else value
        numpy_state: Any = np.random.get_state(legacy=True)
        return (flat(self.model.state_dict()), flat(self.optimizer.state_dict()),
                flat(self.scheduler.state_dict()), [m.training for m in self.model.modules()],
                torch.get_rng_state().numpy().tobytes(), numpy_state[1].tobytes(), numpy_state[2:],
                random.getstate(), [p.grad for p in self.model.parameters()])


@pytest.mark.parametrize("trained", [False, True])
def test_a_sweep_leaves_no_trace(trained):
    """C51.1, before training and in the midst of it, with one module in evaluation mode."""
    scene = Scene()
    if trained:
        for _ in range(3):
            scene.step()
            scene.scheduler.step()
        scene.model[1].eval()
    before = scene.marks()
    assert len(scene.sweep()) > 5
    assert scene.marks() == before


def test_a_sweep_whose_loss_raises_leaves_no_trace_and_shows_the_error():
    """C51.2."""
    scene = Scene()
    before = scene.marks()
    with pytest.raises(ValueError, match="step seven"):
        scene.sweep(fail_at=7)
    assert scene.marks() == before


def test_training_after_a_sweep_gives_the_same_losses_to_the_last_bit():
    """C51.3: three epochs of four steps at a fixed rate."""
    plain, swept = Scene(), None
    expected = [plain.step() for _ in range(12)]
    swept = Scene()
    swept.sweep()
    assert [swept.step() for _ in range(12)] == expected


def test_gradients_that_were_there_before_a_sweep_are_there_after_it():
    scene = Scene()
    scene.loss().backward()
    before = [p.grad.clone() for p in scene.model.parameters() if p.grad is not None]
    scene.sweep()
    assert all(p.grad is not None and torch.equal(p.grad, grad)
               for p, grad in zip(scene.model.parameters(), before, strict=True))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("HPO_CACHE_DIR", str(tmp_path / "cache"))
    return Run(epochs=1, seed=0, device="cpu", dir=tmp_path)


def of(recipe: Recipe):
    """Return what makes this recipe, whatever the run."""
    return lambda run: recipe


@pytest.mark.parametrize("optimizer,low,high", [(AdamW(1e-3), 1e-3, 5e-2), (SGD(0.1), 5e-3, 0.3)],
                         ids=["AdamW", "SGD"])
def test_the_pick_for_the_digits_is_a_rate_that_trains_them(run, optimizer, low, high):
    recipe = Recipe(data=digits(run), model=SimpleCNN(hidden=64), optimizer=optimizer,
                    batch_size=64)
    found = lr_range(of(recipe), run)
    assert found.pick is not None and low < found.pick < high
    assert found.low and found.high and found.low < found.pick < found.high
    assert found.edge and found.pick == pytest.approx(optimizer.pick_factor * found.edge)
    assert 0 < found.epochs <= 1.0
    assert len(found.by_seed) == 3 and len(found.losses) == max(map(len, found.by_seed))
    assert found.n_steps == sum(map(len, found.by_seed))
    assert len(found.rates) == len(found.losses) <= 16


def test_the_seeds_differ_in_weights_and_rows_and_the_first_is_the_runs_own(run):
    recipe = Recipe(data=digits(run), model=SimpleCNN(hidden=8, width=4), optimizer=AdamW(),
                    batch_size=16)
    asked: list[int] = []

    def build(one: Run) -> Recipe:
        asked.append(one.seed)
        return recipe

    found = lr_range(build, replace(run, seed=7))
    assert asked == [7, 8, 9] and len({one[0] for one in found.by_seed}) == 3


def test_the_same_seed_sweeps_the_same_losses(run):
    recipe = Recipe(data=digits(run), model=SimpleCNN(hidden=32, dropout=0.3),
                    optimizer=AdamW(), batch_size=64)
    state = torch.get_rng_state()
    assert lr_range(of(recipe), run).by_seed == lr_range(of(recipe), run).by_seed
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("n_rows,batch_size", [
    (1150, 64), (1150, 16), (1800, 512), (45_000, 512), (100, 128), (9, 4), (3, 1), (2, 64)])
def test_all_sweeps_together_train_no_more_rows_than_an_epoch_has(n_rows, batch_size):
    n_points, size = plan(n_rows, batch_size)
    assert n_points >= 1 and size >= 1 and n_points <= 16 and size <= batch_size
    assert 3 * n_points * size <= n_rows or n_rows < 3


def test_a_sweep_adds_up_micro_batches_as_a_trial_does(run):
    """No more rows at once than the recipe says, and the same losses."""
    seen: list[int] = []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

        def forward(self, x):
            seen.append(len(x))
            return self.net(x)

    torch.manual_seed(0)
    whole = Recipe(data=digits(run), model=Watched(), optimizer=SGD(), batch_size=20)
    one = lr_range(of(whole), run)
    assert max(seen) == 20
    seen.clear()
    parts = lr_range(of(replace(whole, micro_batch_size=6)), run)
    assert max(seen) <= 6
    for a, b in zip(one.by_seed, parts.by_seed, strict=True):
        assert a == pytest.approx(b, rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_finds_nearly_the_rate_that_full_precision_does(run, precision):
    recipe = Recipe(data=digits(run), model=MLP(hidden=32), optimizer=AdamW(), batch_size=32,
                    precision="fp32")
    full = lr_range(of(recipe), run)
    half = lr_range(of(replace(recipe, precision=precision)), run)
    assert full.pick and half.pick and full.low and full.high
    assert full.low < half.pick < full.high


def test_an_mlp_with_adadelta_at_batch_32_has_a_pick(run):
    """Its fall is smaller than the noise of a batch; what it does after is not."""
    recipe = Recipe(data=digits(run), model=MLP(hidden=32), optimizer=Adadelta(), batch_size=32)
    found = lr_range(of(recipe), run)
    assert found.pick is not None and 1 < found.pick < 50


def test_too_few_rows_for_a_curve_are_said_to_be_so(run):
    x, y = np.random.default_rng(0).normal(size=(12, 1, 4, 4)), np.arange(12) % 2
    recipe = Recipe(data=tensors(x, y), model=SimpleCNN(hidden=4), optimizer=AdamW(),
                    schedule=Constant())
    found = lr_range(of(recipe), run)
    assert found.pick is None and "rate" in found.reason


def test_bounds_that_do_not_rise_are_refused(run):
    recipe = Recipe(data=digits(run), model=SimpleCNN(), optimizer=AdamW())
    with pytest.raises(InputError, match="low=1, high=0.1"):
        lr_range(of(recipe), run, low=1.0, high=0.1)


SIXTEEN = np.logspace(-6, 0, 16)


def falling(edge: float, *, depth: float = 1.0) -> list[float]:
    """Return losses that fall from 2, and rise by 2 a decade to be 2 again at `edge` (log10)."""
    x = np.log10(SIXTEEN)
    bottom = edge - depth / 2
    return list(np.where(x < bottom, 2 - depth * np.clip((x + 4) / (bottom + 4), 0, 1),
                         2 + 2 * (x - edge)))


def test_the_edge_is_where_the_straight_line_between_two_rates_crosses_the_start():
    """Rates are 0.4 decades apart; the curve is straight from -1.5 on, the edge at -1.1."""
    found = edge_of(SIXTEEN.tolist(), falling(-1.1, depth=0.8))
    assert found == pytest.approx(-1.1)


def test_a_curve_that_never_comes_back_is_read_by_its_steepest_fall():
    losses = list(2 - 1 / (1 + np.exp(-(np.log10(SIXTEEN) + 2) / 0.3)))
    assert edge_of(SIXTEEN.tolist(), losses) == pytest.approx(0.0)
    found = suggest_below(SIXTEEN.tolist(), [losses] * 3, 0.1)
    assert found.pick == pytest.approx(1e-2, rel=0.3) and found.edge is None
    assert found.reason == "steepest fall of the smoothed loss"


def test_a_curve_that_rises_at_once_has_no_edge_and_no_pick():
    losses = list(2 + np.linspace(0, 3, 16))
    assert edge_of(SIXTEEN.tolist(), losses) is None
    found = suggest_below(SIXTEEN.tolist(), [losses] * 3, 0.1)
    assert found.pick is None and "lower the start (--low)" in found.reason


def test_the_pick_is_the_factor_of_the_edge_of_the_mean():
    found = suggest_below(SIXTEEN.tolist(), [falling(-1.1, depth=0.8)] * 3, 0.25)
    assert found.edge == pytest.approx(10**-1.1) and found.pick == pytest.approx(0.25 * 10**-1.1)
    assert found.pick and found.low and found.high
    assert found.pick / found.low == pytest.approx(found.high / found.pick)


def test_the_error_over_the_seeds_is_the_jackknifes():
    """By hand: the edges of the three pairs, times sqrt(2), as a population's deviation."""
    curves = [falling(edge, depth=0.8) for edge in (-1.3, -1.1, -0.9)]
    pairs = [np.mean([curves[k] for k in range(3) if k != i], axis=0) for i in range(3)]
    edges = [edge_of(SIXTEEN.tolist(), pair) for pair in pairs]
    values = [found for found in edges if found is not None]
    expected = math.sqrt(2 / 3 * sum((v - sum(values) / 3) ** 2 for v in values))
    found = suggest_below(SIXTEEN.tolist(), curves, 0.25)
    assert found.error == pytest.approx(expected) and expected > 0.05


def test_equal_seeds_still_leave_open_what_lies_between_two_rates():
    """A uniform variable between rates 0.4 decades apart, the mean of three."""
    found = suggest_below(SIXTEEN.tolist(), [falling(-1.1)] * 3, 0.25)
    assert found.error == pytest.approx(0.4 / 6)


def test_a_seed_that_left_its_curve_counts_as_twice_its_start():
    rates = [1e-3, 1e-2, 1e-1, 1.0]
    assert mean_losses(rates, [[2, 1, 50], [2, 1, 1, math.inf], [2, 1, 1, 1]]) == pytest.approx(
        [2, 1, (4 + 1 + 1) / 3, (4 + 4 + 1) / 3])


def test_flat_seeds_give_no_pick():
    rng = np.random.default_rng(0)
    curves = [list(2.3 + 0.02 * rng.normal(size=16)) for _ in range(3)]
    found = suggest_below(SIXTEEN.tolist(), curves, 0.25)
    assert found.pick is None and "noise" in found.reason


def test_a_first_loss_that_is_not_finite_gives_no_pick():
    found = suggest_below(SIXTEEN.tolist(), [[math.nan]] * 3, 0.25)
    assert found.pick is None and "lower the start (--low)" in found.reason
