"""Schedules: torch's numbers with the same arguments, plateau's cuts, and resumed trials."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from hpo import Run
from hpo.errors import InputError
from hpo.train import (
    MLP,
    SGD,
    AdamW,
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    Linear,
    MultiStep,
    OneCycle,
    Plateau,
    Recipe,
    Step,
    WarmupCosine,
    digits,
    optimizer,
    schedule,
)
from hpo.train.loop import Trainer
from hpo.train.optim import OPTIMIZERS
from hpo.train.recipe import describe
from hpo.train.resume import read_state, write_state
from hpo.train.schedules import SCHEDULES

PEAK = 0.3


def torch_rates(make: Any, n_steps: int) -> list[float]:
    """Return the rates of a torch scheduler that is stepped per optimizer step."""
    made = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = make(made)
    found = []
    for _ in range(n_steps):
        found.append(made.param_groups[0]["lr"])
        made.step()
        scheduler.step()
    return found


def after_warm_up(make: Any, n_warm: int) -> Any:
    """Return a torch scheduler that rises in a line for some steps and then goes on as `make`."""
    def both(made: torch.optim.Optimizer) -> Any:
        rise = lr_scheduler.LinearLR(made, 1 / (n_warm + 1), total_iters=n_warm)
        return lr_scheduler.SequentialLR(made, [rise, make(made)], [n_warm])
    return both


@pytest.mark.parametrize(("ours", "theirs", "n_steps"), [
    (Step(0.25, gamma=0.5), lambda o: lr_scheduler.StepLR(o, 25, 0.5), 100),
    (Step(1 / 3), lambda o: lr_scheduler.StepLR(o, 30, 0.1), 90),
    (Step(1e-9, gamma=0.9), lambda o: lr_scheduler.StepLR(o, 1, 0.9), 7),
    (MultiStep((0.3, 0.6, 0.9), gamma=0.2),
     lambda o: lr_scheduler.MultiStepLR(o, [15, 30, 45], 0.2), 50),
    (Exponential(0.01), lambda o: lr_scheduler.ExponentialLR(o, 0.01 ** (1 / 80)), 80),
    (Cosine(0.1), lambda o: lr_scheduler.CosineAnnealingLR(o, 77, eta_min=0.1 * PEAK), 77),
    (Cosine(), lambda o: lr_scheduler.CosineAnnealingLR(o, 1), 1),
    (CosineRestarts(3, mult=2, final_fraction=0.05),
     lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10, 2, eta_min=0.05 * PEAK), 70),
    (CosineRestarts(4, mult=1),
     lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 1), 20),
    (Linear(0.0, final_fraction=0.2),
     lambda o: lr_scheduler.LinearLR(o, 1.0, 0.2, total_iters=40), 40),
    (Linear(0.25), after_warm_up(
        lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=45), 15), 60),
    (Constant(0.1), after_warm_up(lambda o: lr_scheduler.ConstantLR(o, 1.0), 5), 50),
    (Exponential(0.5, warmup_fraction=0.2), after_warm_up(
        lambda o: lr_scheduler.ExponentialLR(o, 0.5 ** (1 / 40)), 10), 50),
    (WarmupCosine(0.2, final_fraction=0.1), after_warm_up(
        lambda o: lr_scheduler.CosineAnnealingLR(o, 39, eta_min=0.1 * PEAK), 10), 50),
    (CosineRestarts(2, mult=3, warmup_fraction=0.2), after_warm_up(
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10, 3), 10), 50),
], ids=lambda value: repr(value) if hasattr(value, "rates") else "")
def test_a_schedule_has_the_rates_of_torch_s(ours, theirs, n_steps):
    assert ours.rates(n_steps, PEAK) == pytest.approx(torch_rates(theirs, n_steps), rel=1e-9,
                                                      abs=1e-15)


@pytest.mark.parametrize("warm", [Step, MultiStep])
def test_a_warm_up_of_steps_scales_the_first_rates_and_moves_no_step(warm):
    plain, warmed = (warm(warmup_fraction=part).rates(60, PEAK) for part in (0.0, 0.1))
    assert warmed[6:] == plain[6:]
    assert warmed[:6] == pytest.approx([PEAK * (i + 1) / 7 for i in range(6)])


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "plateau"])
@pytest.mark.parametrize("n_steps", [1, 2, 3, 7, 50])
def test_a_schedule_of_few_steps_is_finite_and_never_above_the_rate(name, n_steps):
    one: Any = schedule(name)
    fields = {"warmup_fraction": 0.5} if hasattr(one, "warmup_fraction") else {}
    warmed: Any = schedule(name, **fields)
    for made in (one, warmed):
        rates = made.rates(n_steps, PEAK)
        assert len(rates) == n_steps and all(0 <= rate <= PEAK * (1 + 1e-12) for rate in rates)
        assert rates[0] > 0


PLATEAUS: list[dict[str, Any]] = [
    {}, {"patience": 0}, {"factor": 0.5, "patience": 2, "cooldown": 3},
    {"factor": 0.5, "patience": 1, "min_delta": 0.05, "relative": False},
    {"factor": 0.3, "patience": 0, "final_fraction": 0.02, "min_delta": 0.1}]


def torch_plateau(fields: dict[str, Any], history: list[float], maximize: bool) -> list[float]:
    made = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    given = Plateau(**fields)
    scheduler = lr_scheduler.ReduceLROnPlateau(
        made, "max" if maximize else "min", factor=given.factor, patience=given.patience,
        threshold=given.min_delta, threshold_mode="rel" if given.relative else "abs",
        cooldown=given.cooldown, min_lr=given.final_fraction * PEAK)
    found = [PEAK]
    for value in history:
        scheduler.step(value)
        found.append(made.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("fields", PLATEAUS, ids=repr)
@pytest.mark.parametrize("maximize", [True, False])
def test_a_plateau_cuts_where_torch_s_does_on_random_histories(fields, maximize):
    rng = np.random.default_rng(0)
    n_cuts = 0
    for kind in range(30):
        history = list(np.cumsum(rng.normal(0, 0.1, 40)) * (kind % 3) + rng.normal(1, 0.05, 40))
        if kind % 5 == 0:
            history[kind % 40] = math.nan
        expected = torch_plateau(fields, history, maximize)
        found = [Plateau(**fields).rate(PEAK, history[:n], maximize) for n in range(41)]
        assert found == expected
        n_cuts += len(set(found)) - 1
    assert n_cuts > 20


def test_a_plateau_s_warm_up_rises_over_the_first_steps_of_the_training():
    plateau = Plateau(patience=0, warmup_fraction=0.2)
    # 30 steps in all, 6 of them warm-up, 5 an epoch.
    first = plateau.epoch_rates(0, 5, 6, PEAK, [], True)
    second = plateau.epoch_rates(1, 5, 6, PEAK, [1.0], True)
    third = plateau.epoch_rates(2, 5, 6, PEAK, [1.0, 0.9], True)
    assert first + second == pytest.approx([PEAK * min(1, (i + 1) / 7) for i in range(10)])
    assert third == pytest.approx([PEAK * 0.1] * 5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_a_name_is_made_again_from_its_description(name, tmp_path):
    kind = SCHEDULES[name][0]
    one = schedule(name)
    assert one == kind() and schedule(name.replace("_", "-").upper()) == one
    recipe = Recipe(data=digits(make_run()), model=MLP(), optimizer=AdamW(), schedule=one)
    entry = json.loads(json.dumps(describe(recipe)["schedule"]))
    assert entry.pop("type") == kind.__name__ and kind(**entry) == one


WRONG: Any = {"text": "often", "one": 0.5, "flag": 1}


@pytest.mark.parametrize(("make", "told"), [
    (lambda: schedule("cosin"), "schedule 'cosin': accepted are constant, step, multi_step, "
     "exponential, cosine, cosine_restarts, plateau, one_cycle, warmup_cosine, linear; "
     "did you mean 'cosine'?"),
    (lambda: schedule(WRONG["one"]), "schedule 0.5: accepted are constant"),
    (lambda: schedule("step", step_size=30), "schedule 'step': has no field 'step_size'"),
    (lambda: Step(0.0), "Step.step_fraction: must be in (0, 1], got 0.0"),
    (lambda: Step(gamma=2.0), "Step.gamma"), (lambda: Step(warmup_fraction=1.0), "Step.warmup"),
    (lambda: MultiStep(()), "MultiStep.milestone_fractions: must be some fractions"),
    (lambda: MultiStep(WRONG["one"]), "MultiStep.milestone_fractions: must be some fractions"),
    (lambda: MultiStep((0.5, 0.5)), "MultiStep.milestone_fractions: must rise"),
    (lambda: MultiStep((30, 60)), "MultiStep.milestone_fractions: must be in (0, 1), got 30.0"),
    (lambda: MultiStep(gamma=0.0), "MultiStep.gamma"),
    (lambda: Exponential(0.0), "Exponential.final_fraction: must be in (0, 1], got 0.0"),
    (lambda: Cosine(1.5), "Cosine.final_fraction"),
    (lambda: CosineRestarts(0), "CosineRestarts.n_cycles"),
    (lambda: CosineRestarts(mult=0), "CosineRestarts.mult"),
    (lambda: Linear(1.0), "Linear.warmup_fraction"),
    (lambda: Linear(final_fraction=-1.0), "Linear.final_fraction"),
    (lambda: Constant(-0.1), "Constant.warmup_fraction"),
    (lambda: Plateau(factor=1.0), "Plateau.factor: must be in (0, 1), got 1.0"),
    (lambda: Plateau(patience=-1), "Plateau.patience"),
    (lambda: Plateau(patience=WRONG["one"]), "Plateau.patience: must be a whole number, got 0.5"),
    (lambda: Plateau(min_delta=-1.0), "Plateau.min_delta"),
    (lambda: Plateau(relative=WRONG["flag"]), "Plateau.relative: must be True or False, got 1"),
    (lambda: Plateau(cooldown=-1), "Plateau.cooldown"),
    (lambda: Plateau(final_fraction=2.0), "Plateau.final_fraction"),
    (lambda: WarmupCosine(WRONG["text"]), "WarmupCosine.warmup_fraction: must be a number"),
    (lambda: OneCycle(div_factor=0.5), "OneCycle.div_factor"),
])
def test_a_fault_of_a_schedule_is_one_line_that_names_it(make, told):
    with pytest.raises(InputError) as caught:
        make()
    assert told in str(caught.value) and "\n" not in str(caught.value)


def make_run(**fields: Any) -> Run:
    return Run(**{"epochs": 2, "seed": 0, "device": "cpu", "dir": Path("."), **fields})


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def shared_cache(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPO_CACHE_DIR", cache)


def trainer(run: Run | None = None, metric: str = "val_accuracy", **fields: Any) -> Trainer:
    recipe = {"data": digits(make_run()), "model": MLP(hidden=16), "batch_size": 128, **fields}
    return Trainer(Recipe(**recipe), run or make_run(), metric=metric,
                   maximize=metric == "val_accuracy")


def numbers(epochs: Any) -> list[dict[str, float]]:
    return [{k: v for k, v in epoch.items() if not k.endswith("_s")} for epoch in epochs]


@pytest.mark.parametrize("rates", SCHEDULES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_schedule_precision_and_accumulation_train_and_go_on_after_a_cut(
    name: str, rates: str, tmp_path: Path
) -> None:
    """To the last bit, through the file; with a layer's own rates and the optimizer's l1."""
    run = make_run(data_fraction=0.2)
    for k, (precision, size) in enumerate(
            itertools.product(("fp32", "bf16", "fp16"), (None, 40))):
        fields: dict[str, Any] = {
            "optimizer": optimizer(name, weight_decay=1e-3, l1=1e-5, head_lr_factor=0.5,
                                   layer_decay=0.9),
            "schedule": schedule(rates), "precision": precision, "micro_batch_size": size}
        whole = trainer(run, **fields)
        expected = numbers(whole.epochs())
        assert all(math.isfinite(value) for epoch in expected for value in epoch.values())
        assert expected[1]["train_loss"] < expected[0]["train_loss"]
        before = trainer(run, **fields)
        next(before.epochs())
        write_state(tmp_path / str(k), before.state_dict())
        state = read_state(tmp_path / str(k))
        assert state is not None
        after = trainer(run, **fields)
        after.load_state_dict(state)
        assert numbers(after.epochs()) == expected[1:], fields
        pairs = zip(whole.model.parameters(), after.model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("metric", ["val_accuracy", "val_loss"])
@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_trial_s_rate_follows_torch_s_plateau_of_its_metric_also_when_resumed(
    metric: str, cut: int, tmp_path: Path
) -> None:
    """A rate far too high at first, so that the metric comes and goes."""
    run = make_run(epochs=8)
    fields: dict[str, Any] = {"optimizer": SGD(0.8), "schedule": Plateau(0.3, patience=0)}
    found = numbers(trainer(run, metric, **fields).epochs())
    made = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.8)
    scheduler = lr_scheduler.ReduceLROnPlateau(
        made, "max" if metric == "val_accuracy" else "min", factor=0.3, patience=0)
    for epoch in found:
        assert epoch["lr"] == made.param_groups[0]["lr"]
        scheduler.step(epoch[metric])
    assert found[-1]["lr"] < 0.8
    before = trainer(run, metric, **fields)
    epochs = before.epochs()
    for _ in range(cut):
        next(epochs)
    write_state(tmp_path, before.state_dict())
    state = read_state(tmp_path)
    assert state is not None
    after = trainer(run, metric, **fields)
    after.load_state_dict(state)
    assert numbers(after.epochs()) == found[cut:]


def test_the_loop_gives_each_group_its_own_part_of_the_schedule_s_rate() -> None:
    """Plain SGD by hand: two rates, one schedule, the trainer's own batches."""
    fields: dict[str, Any] = {
        "optimizer": SGD(0.1, momentum=0.0, head_lr_factor=0.1), "schedule": Cosine()}
    one, twin = trainer(**fields), trainer(**fields)
    list(one.epochs())
    size = twin.steps_per_epoch
    rates = Cosine().rates(2 * size, 0.1)
    params = list(twin.model.parameters())
    for epoch in range(2):
        for step, (images, labels) in enumerate(twin.batches(128, size)):
            grads = torch.autograd.grad(twin.loss(images, labels), params)
            with torch.no_grad():
                for k, (param, grad) in enumerate(zip(params, grads, strict=True)):
                    factor = 0.1 if k >= len(params) - 2 else 1.0
                    param -= rates[epoch * size + step] * factor * grad
    for ours, theirs in zip(one.model.parameters(), params, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
