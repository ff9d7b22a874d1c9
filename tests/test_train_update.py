"""From loss to step: bounds of the gradient, accumulation, precision and skipped steps."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.utils
from torch import Tensor, nn

from hpo import Run
from hpo.drive import Goal, drive
from hpo.errors import DataError, InputError
from hpo.train import (
    EMA,
    MLP,
    SGD,
    AdamW,
    Constant,
    OneCycle,
    Recipe,
    SimpleCNN,
    tensors,
)
from hpo.train.compiling import compiling, for_parts
from hpo.train.loop import Trainer
from hpo.train.precision import autocast
from hpo.train.recipe import GRAPH_MODES
from hpo.train.update import all_but_last, clip_adaptive_

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(40, 6, generator=GENERATOR)
Y = (X[:, 0] > 0).long()
PLAIN = SGD(lr=0.1, momentum=0.0)


def trainer(n_rows: int = 40, *, epochs: int = 2, **fields: Any) -> Trainer:
    recipe = {"data": tensors(X[:n_rows], Y[:n_rows], val=(X, Y)), "model": MLP(hidden=8),
              "optimizer": PLAIN, "schedule": Constant(), "batch_size": 32, **fields}
    run = Run(epochs=epochs, seed=1, device="cpu", dir=Path("."))
    return Trainer(Recipe(**recipe), run)


def weights(one: Trainer) -> dict[str, Tensor]:
    return {name: value.detach().double().clone() for name, value in
            one.model.named_parameters()}


def test_adaptive_clipping_is_the_formula_of_each_unit_in_float64():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.Linear(5, 6), nn.Conv1d(2, 3, 2)]
    params = [p for layer in layers for p in layer.parameters()]
    with torch.no_grad():
        params[0][1] = 0.0
    for k, p in enumerate(params):
        p.grad = torch.randn_like(p) * 10.0 ** (k - 3)
    with torch.no_grad():
        params[2].grad[3] = 0.0  # type: ignore[index]
    expected = []
    for p in params:
        w = p.detach().double().numpy()
        g = p.grad.double().numpy()  # type: ignore[union-attr]
        units = [((), w, g)] if w.ndim == 1 else [((i,), w[i], g[i]) for i in range(len(w))]
        out = g.copy()
        for at, some, slope in units:
            most = 0.05 * max(np.sqrt((some ** 2).sum()), 1e-3)
            norm = np.sqrt((slope ** 2).sum())
            out[at] = slope * most / norm if norm > most else slope
        expected.append(out)
    clip_adaptive_(params, 0.05)
    for p, wanted in zip(params, expected, strict=True):
        assert p.grad.numpy() == pytest.approx(wanted, rel=1e-5, abs=1e-12)  # type: ignore[union-attr]


def test_adaptive_clipping_leaves_the_last_layer_alone():
    model = SimpleCNN(hidden=5, width=2).make((1, 4, 4), 3)
    bounded = {id(p) for p in all_but_last(model)}
    assert [name for name, p in model.named_parameters() if id(p) not in bounded] == [
        "12.weight", "12.bias"]
    one, free = (trainer(epochs=1, batch_size=40, clip_adaptive=limit, optimizer=SGD(
        lr=1.0, momentum=0.0)) for limit in (1e-4, None))
    before = weights(one)
    list(one.epochs())
    list(free.epochs())
    after, unbounded = weights(one), weights(free)
    last = [name for name in after][-2:]
    for name in after:
        moved = (after[name] - before[name]).norm(dim=-1)
        if name in last:
            assert torch.equal(after[name], unbounded[name])
        else:
            assert bool((moved <= 1.01e-4 * before[name].norm(dim=-1).clamp_min(1e-3)).all())
            assert float(moved.max()) > 0


@pytest.mark.parametrize("field,limit", [("clip_norm", 1e-3), ("clip_value", 1e-4)])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_bound_acts_on_the_true_gradient_also_where_fp16_scales_it(field, limit, precision):
    """A step of rate 1 is the gradient itself; far above the limit without it."""
    one = trainer(epochs=1, batch_size=40, optimizer=SGD(lr=1.0, momentum=0.0),
                  precision=precision, **{field: limit})
    before = weights(one)
    list(one.epochs())
    moved = torch.cat([(value - before[name]).flatten() for name, value in weights(one).items()])
    size = moved.norm() if field == "clip_norm" else moved.abs().max()
    assert float(size) == pytest.approx(limit, rel=1e-3)


@pytest.mark.parametrize("n_rows,micro", [(32, 8), (40, 8), (37, 8), (40, 7), (40, 1)])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_four_times_eight_rows_make_the_step_of_32_and_a_last_part_of_a_batch_its_own(
    n_rows, micro, precision
):
    """Against whole batches, and against the mean loss of each batch in float64."""
    whole = trainer(n_rows, precision=precision)
    parts = trainer(n_rows, precision=precision, micro_batch_size=micro)
    twin = trainer(n_rows, precision="fp32")
    model = twin.model.double().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for images, labels in twin.batches(32, twin.steps_per_epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images.double()), labels).backward()
            optimizer.step()
    losses = [[epoch["train_loss"] for epoch in one.epochs()] for one in (whole, parts)]
    near = 1e-6 if precision == "fp32" else 2e-3
    assert losses[1] == pytest.approx(losses[0], rel=near)
    one, two = weights(whole), weights(parts)
    for name, value in model.named_parameters():
        assert torch.allclose(two[name], one[name], rtol=near, atol=near)
        assert torch.allclose(two[name], value, rtol=near, atol=near)


class Infinite:
    """Cross entropy, times infinity in some of the training steps, counted from 0."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.n = steps, 0

    def __call__(self, scores: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(scores, labels)
        if not scores.requires_grad:
            return loss
        self.n += 1
        return loss * math.inf if self.n - 1 in self.steps else loss


def four_steps(loss: Any, **fields: Any) -> Trainer:
    """Return a trainer of 4 steps an epoch in fp16, whose scale begins with 4."""
    one = trainer(batch_size=10, precision="fp16", loss=loss, **{"schedule": OneCycle(), **fields})
    state = one.update.state_dict()
    one.update.load_state_dict({**state, "scaler": {**state["scaler"], "scale": 4.0}})
    return one


def rates_of(one: Trainer) -> list[float]:
    """Return a list that gets the rate of each step that the optimizer makes."""
    rates: list[float] = []
    one.optimizer.register_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    return rates


def scale(one: Trainer) -> float:
    return one.update.state_dict()["scaler"]["scale"]


def test_a_trial_all_of_whose_steps_overflow_fails_and_says_skipped():
    """C57.1."""
    one = four_steps(Infinite(0, 1, 2, 3))
    before = weights(one)
    ending = drive(one.epochs, Goal("val_accuracy", True), report=lambda *_: None,
                   should_prune=lambda epoch: None)
    assert ending.state == "FAIL"
    assert "all 4 steps of epoch 0 were skipped" in ending.reason and "bf16" in ending.reason
    assert scale(one) == 4 * 0.5 ** 4
    assert all(torch.equal(before[name], value) for name, value in weights(one).items())


def test_a_skipped_step_moves_neither_schedule_nor_optimizer_nor_mean():
    """C57.2: 3 moves in the first epoch; the second goes on with the fourth."""
    one = four_steps(Infinite(1), optimizer=AdamW(lr=0.01), ema=EMA(0.9))
    rates = rates_of(one)
    epochs = list(one.epochs())
    expected = OneCycle().rates(8, 0.01)
    assert rates == expected[:7]
    assert [epoch["lr"] for epoch in epochs] == [expected[2], expected[6]]
    assert {int(state["step"]) for state in one.optimizer.state.values()} == {7}
    assert one.state_dict()["averaged"]["n_steps"] == 7 and one.update.n_skipped == 1
    assert scale(one) == 2.0


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), AdamW(lr=0.01)])
def test_a_first_step_that_is_skipped_leaves_the_optimizer_as_new(optimizer):
    """With momentum: what it begins with is the gradient of the first step that is made."""
    one = four_steps(Infinite(0), optimizer=optimizer)
    begun = []
    one.optimizer.register_step_pre_hook(lambda o, *_: begun.append(len(o.state)))
    epochs = list(one.epochs())
    assert begun[0] == 0 and len(begun) == 7
    assert all(math.isfinite(epoch["train_loss"]) for epoch in epochs)
    assert all(bool(value.isfinite().all()) for value in weights(one).values())


def test_the_scale_goes_on_after_a_resume_to_the_last_bit():
    """C57.3, with a skipped step on either side of the cut."""
    def made(*steps: int) -> Trainer:
        return four_steps(Infinite(*steps), optimizer=AdamW(lr=0.01), epochs=3)

    whole = made(1, 6)
    expected = [epoch["val_loss"] for epoch in whole.epochs()]
    first = made(1)
    epochs = first.epochs()
    assert [next(epochs)["val_loss"]] == expected[:1]
    again = made(2)
    state = first.state_dict()
    # The loss counts its own steps; all else is the same.
    assert state["update"]["scaler"]["scale"] == 2.0
    again.load_state_dict(state)
    assert [epoch["val_loss"] for epoch in again.epochs()] == expected[1:]
    assert scale(again) == scale(whole) == 1.0
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(again).items())


def test_rates_of_an_uninterrupted_training_and_of_a_resumed_one_are_the_same():
    """C54.1 and 2."""
    fields: dict[str, Any] = {"batch_size": 8, "schedule": OneCycle()}
    whole, first = trainer(**fields), trainer(**fields)
    rates, early = rates_of(whole), rates_of(first)
    list(whole.epochs())
    assert rates == OneCycle().rates(10, 0.1)
    epochs = first.epochs()
    next(epochs)
    again = trainer(**fields)
    late = rates_of(again)
    again.load_state_dict(first.state_dict())
    list(again.epochs())
    assert early + late == rates and len(late) == 5


@pytest.mark.parametrize("fields", [{"epochs": 4}, {"batch_size": 4}])
def test_a_state_is_not_gone_on_from_with_another_number_of_steps(fields):
    """C54.3 and 4."""
    state = trainer(batch_size=8).state_dict()
    with pytest.raises(DataError, match="steps was 10, is 20"):
        trainer(**{"batch_size": 8, **fields}).load_state_dict(state)


@pytest.mark.parametrize("precision,dtype", [
    ("auto", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16),
    ("fp16", torch.float16)])
def test_a_precision_is_that_of_the_products_in_training_and_evaluation(precision, dtype):
    seen: set[tuple[bool, torch.dtype, torch.dtype]] = set()

    class Noting(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            scores = super().forward(input)
            seen.add((self.training, scores.dtype, self.weight.dtype))
            return scores

    epochs = list(trainer(model=lambda: Noting(6, 2), precision=precision).epochs())
    assert seen == {(True, dtype, torch.float32), (False, dtype, torch.float32)}
    assert all(math.isfinite(epoch["val_loss"]) for epoch in epochs)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_a_convolutional_net_near_to_what_fp32_does(precision):
    x = torch.rand(60, 1, 8, 8, generator=GENERATOR)
    y = (x[:, 0, :4].mean((1, 2)) > x[:, 0, 4:].mean((1, 2))).long()
    fields: dict[str, Any] = {"data": tensors(x, y, val=(x, y)), "epochs": 3,
                              "model": SimpleCNN(hidden=8, width=4), "optimizer": AdamW(lr=0.01)}
    exact, half = (list(trainer(**fields, precision=kind).epochs())[-1]["train_loss"]
                   for kind in ("fp32", precision))
    assert half == pytest.approx(exact, rel=0.05) and half != exact


@pytest.mark.parametrize("fields,told", [
    ({"precision": "tf32"}, "'tf32' is a CUDA device's, this one is 'cpu'"),
    ({"precision": "bf17"}, "did you mean 'bf16'?"),
    ({"precision": 16}, "Recipe.precision: must be 'auto', 'fp32', 'tf32', 'bf16', 'fp16'"),
    ({"compile": "defalt"}, "did you mean 'default'?"),
    ({"compile": "reduce-overhed"}, "did you mean 'reduce-overhead'?"),
    ({"compile": "reduce-overhead", "micro_batch_size": 8},
     "Recipe.compile: 'reduce-overhead' replays CUDA graphs, which take a batch whole, got "
     "micro_batch_size=8 of batch_size=32; use 'default'"),
    ({"compile": "max-autotune", "micro_batch_size": 8}, "use 'max-autotune-no-cudagraphs'"),
    ({"compile": 1.5}, "Recipe.compile: must be True, False, 'default', "),
    ({"clip_norm": 1.0, "clip_value": 1.0}, "clip_norm and clip_value cannot both bound"),
    ({"clip_value": 0.0}, "Recipe.clip_value"), ({"clip_adaptive": -1.0}, "Recipe.clip_adaptive"),
])
def test_a_fault_of_step_or_precision_is_one_line_that_names_it(fields, told):
    with pytest.raises(InputError) as caught:
        trainer(**fields)
    assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("fields", [{}, {"ema": EMA(0.9)}], ids=["plain", "mean"])
def test_a_compiled_model_trains_as_before_under_its_own_names_and_resumes(fields):
    """By torch's backend that generates no code; dropout tells training from evaluation."""
    fields = {**fields, "model": MLP(hidden=8, dropout=0.3), "optimizer": AdamW(lr=0.01)}
    plain, compiled, first = (trainer(**fields, compile=how) for how in (
        False, "aot_eager", "aot_eager"))
    told = [[epoch["val_loss"] for epoch in one.epochs()] for one in (plain, compiled)]
    assert told[1] == pytest.approx(told[0], rel=1e-5)
    assert compiled.model.state_dict().keys() == plain.model.state_dict().keys()
    assert compiled.state_dict()["model"].keys() == plain.state_dict()["model"].keys()
    next(first.epochs())
    again = trainer(**fields, compile="aot_eager")
    again.load_state_dict(first.state_dict())
    assert [epoch["val_loss"] for epoch in again.epochs()] == told[1][1:]


def test_a_model_is_compiled_once_for_its_shapes_and_kept_for_the_next_trial():
    def n_graphs() -> int:
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    fields: dict[str, Any] = {"model": MLP(hidden=11), "compile": "aot_eager", "epochs": 3}
    before = n_graphs()
    list(trainer(**fields).epochs())
    # Batches of 32 and 8 to train on, one of 40 to evaluate.
    assert n_graphs() == before + 3
    list(trainer(**fields).epochs())
    list(trainer(**{**fields, "optimizer": AdamW(lr=0.02)}).epochs())
    assert n_graphs() == before + 3
    list(trainer(**{**fields, "model": MLP(hidden=12)}).epochs())
    assert n_graphs() == before + 6


def test_a_model_of_many_shapes_goes_on_being_compiled():
    """torch gives up after 8 of one function, and trains on uncompiled with a line in its log."""
    for hidden in range(20, 32):
        list(trainer(model=MLP(hidden=hidden), compile="aot_eager", epochs=1).epochs())
    model = trainer(model=MLP(hidden=32), compile="aot_eager", epochs=1)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    list(model.epochs())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 3


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
@pytest.mark.parametrize("how", ["reduce-overhead", "max-autotune"])
def test_a_mode_with_cuda_graphs_trains_as_the_one_without_on_a_cpu(how):
    """To the last bit, with code that torch generates; a micro-batch of the whole batch is one."""
    fields: dict[str, Any] = {"n_rows": 32, "model": MLP(hidden=8), "ema": EMA(0.9),
                              "optimizer": AdamW(lr=0.01)}
    plain, one, other = (trainer(**{**fields, **more}) for more in (
        {}, {"compile": how, "micro_batch_size": 32}, {"compile": GRAPH_MODES[how]}))
    told = [[epoch["val_loss"] for epoch in each.epochs()] for each in (plain, one, other)]
    assert told[1] == told[2] == pytest.approx(told[0], rel=1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
def test_a_batch_that_did_not_fit_is_tried_again_in_parts_without_cuda_graphs(caplog):
    """As the retry after an out of memory makes its trainer."""
    recipe = Recipe(data=tensors(X, Y, val=(X, Y)), model=MLP(hidden=8), optimizer=PLAIN,
                    batch_size=40, compile="reduce-overhead", schedule=Constant())
    run = Run(epochs=1, seed=1, device="cpu", dir=Path("."))
    whole = Trainer(recipe, run)
    assert caplog.messages == []
    parts = Trainer(recipe, run, micro_batch_size=20)
    assert caplog.messages == ["compile='reduce-overhead' without its CUDA graphs, as 'default': "
                               "20 rows of a batch of 40 go through the model at once"]
    (one,), (two,) = whole.epochs(), parts.epochs()
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-5)
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-5)


@pytest.mark.parametrize("how", [False, True, "reduce-overhead"])
def test_cudnn_tries_its_convolutions_only_while_a_compiled_trial_computes(how):
    assert not torch.backends.cudnn.benchmark
    with pytest.raises(ZeroDivisionError), compiling(how):
        assert torch.backends.cudnn.benchmark == bool(how)
        raise ZeroDivisionError
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize("how,n_rows,expected", [
    ("reduce-overhead", 32, "reduce-overhead"), ("reduce-overhead", 16, "default"),
    ("max-autotune", 16, "max-autotune-no-cudagraphs"), (True, 16, True), (False, 16, False),
    ("default", 16, "default"), ("aot_eager", 16, "aot_eager")])
def test_only_cuda_graphs_need_a_batch_whole(how, n_rows, expected):
    assert for_parts(how, n_rows, 32) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("how", ["reduce-overhead", "max-autotune"])
def test_on_cuda_graphs_train_as_compiled_code_does_for_several_trials(how):
    fields: dict[str, Any] = {"model": MLP(hidden=8), "optimizer": AdamW(lr=0.01),
                              "precision": "fp32", "ema": EMA(0.9)}
    run = Run(epochs=4, seed=1, device="cuda", dir=Path("."))

    def losses(mode: Any) -> list[float]:
        one = Trainer(Recipe(data=tensors(X, Y, val=(X, Y)), batch_size=32, compile=mode,
                             **fields), run)
        # A forward pass whose gradient is never taken must not hold the graphs up.
        with one.computing():
            one.loss(*next(one.batches(32, 1)))
        return [epoch["val_loss"] for epoch in one.epochs()]

    expected = losses(GRAPH_MODES[how])
    for _ in range(2):
        assert losses(how) == pytest.approx(expected, rel=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_on_cuda_each_precision_learns_and_the_switches_are_put_back(precision):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    recipe = Recipe(data=tensors(X, Y, val=(X, Y)), model=MLP(hidden=32), precision=precision,
                    optimizer=AdamW(lr=0.01), batch_size=8)
    run = Run(epochs=10, seed=1, device="cuda", dir=Path("."))
    assert list(Trainer(recipe, run).epochs())[-1]["val_accuracy"] > 0.8
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
    with autocast(torch.device("cuda"), "fp32"):
        assert not torch.is_autocast_enabled("cuda")
