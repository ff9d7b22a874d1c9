"""What `hpo doctor` finds: each fault gets its line and its cure, a healthy recipe none."""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import storage
from hpo import Run
from hpo.devices import Slot
from hpo.diagnosis import machine
from hpo.diagnosis.cheap import warnings_of
from hpo.diagnosis.database import database_findings, trip_finding
from hpo.diagnosis.examination import examine, without_cuda_graphs
from hpo.diagnosis.finding import Finding, look, not_checked, ok, wrong
from hpo.diagnosis.memory import largest
from hpo.diagnosis.model import initial_loss_fault
from hpo.diagnosis.own_loop import examine_loop
from hpo.diagnosis.pace import PART as SPEED
from hpo.diagnosis.pace import Pace, measure, pace_finding
from hpo.diagnosis.profile import N_OPERATORS
from hpo.diagnosis.training import Learnt, gradients_verdict, heart_verdict, training_findings
from hpo.drive import BadMetrics, Goal
from hpo.train import (
    MLP,
    SGD,
    AdamW,
    Recipe,
    SimpleCNN,
    datasets,
    digits,
    tensors,
)
from hpo.train.loop import Trainer
from hpo.train.trying import prepare


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPO_CACHE_DIR", str(tmp_path / "cache"))


def make_run(**fields: Any) -> Run:
    return Run(**{"epochs": 1, "seed": 0, "device": "cpu", "dir": Path("."), **fields})


def images(n: int = 400, *, seed: int = 0, n_classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Return normalised images, of which each class is brighter in another corner, and labels."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % n_classes)
    x = rng.normal(size=(n, 1, 6, 6)).astype("float32")
    for k in range(n_classes):
        x[y == k, :, 3 * (k // 2):3 * (k // 2) + 3, 3 * (k % 2):3 * (k % 2) + 3] += 2
    return (x - x.mean()) / x.std(), y


X, Y = images()
TEST_X, TEST_Y = images(200, seed=1)


def recipe_of(data: Any = None, model: Any = None, **fields: Any) -> Recipe:
    return Recipe(**{
        "data": data or tensors(X, Y, test=(TEST_X, TEST_Y)), "model": model or MLP(hidden=16),
        "optimizer": AdamW(lr=1e-2), "batch_size": 64, **fields})


def findings(recipe: Recipe | Callable[[], Recipe], **more: Any) -> dict[str, Finding]:
    """Return what the doctor finds in a recipe, by `part what`."""
    build = (lambda: recipe) if isinstance(recipe, Recipe) else recipe
    return {f"{one.part} {one.what}": one for one in examine(build, make_run(), **more)}


def test_the_checks_look_at_a_recipe_without_cuda_graphs() -> None:
    """Whose next run would write over the scores and gradients that they compare."""
    def looked_at(compile: Any) -> Any:
        return without_cuda_graphs(lambda: recipe_of(compile=compile))().compile

    assert [looked_at(how) for how in ("reduce-overhead", "max-autotune", True, False)] == [
        "default", "max-autotune-no-cudagraphs", True, False]


def net(*layers: nn.Module, n_in: int = 36, hidden: int = 16) -> Callable[[], nn.Module]:
    """Return a function that makes one hidden layer, with these layers before the last."""
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(n_in, hidden), *layers,
                                 nn.Linear(hidden, 4))


def ended_by(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(net(nn.ReLU())(), *layers)


def biased(value: float) -> Callable[[], nn.Module]:
    """Return a function that makes a network whose hidden ReLUs begin with this bias."""
    def make() -> nn.Module:
        model: Any = net(nn.ReLU())()
        nn.init.constant_(model[1].bias, value)
        return model
    return make


def scaled(factor: float) -> Callable[[], nn.Module]:
    """Return a function that makes a network whose initial weights are multiplied."""
    def make() -> nn.Module:
        model: Any = nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.ReLU(), nn.Linear(32, 32),
                                   nn.ReLU(), nn.Linear(32, 4))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(factor)
        return model
    return make


def deep(between: type[nn.Module], factor: float) -> Callable[[], nn.Module]:
    """Return a function that makes ten layers whose initial weights are multiplied."""
    def make() -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(36, 16)]
        for _ in range(8):
            layers += [between(), nn.Linear(16, 16)]
        model = nn.Sequential(*layers, between(), nn.Linear(16, 4))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(factor)
        return model
    return make


def frozen() -> nn.Module:
    return net(nn.ReLU())().requires_grad_(False)


class Spare(nn.Module):
    """A network with a layer that it does not use, a parameter in float64, or neither."""

    def __init__(self, *, spare: bool = False, double: bool = False) -> None:
        super().__init__()
        self.used = net(nn.ReLU())()
        if spare:
            self.spare = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64)) if double else None

    def forward(self, x: Tensor) -> Tensor:
        scores = self.used(x)
        return scores if self.scale is None else scores * self.scale.float()


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net(nn.ReLU())()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).detach()


class Unwell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(36, 4)

    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("mask")


def copied(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return test rows of which the first `n` are training rows."""
    return np.concatenate([X[:n], TEST_X[n:]]), np.concatenate([Y[:n], TEST_Y[n:]])


def with_value(value: float, n: int = 1) -> np.ndarray:
    x = X.copy()
    x[7:7 + n] = value
    return x


def torch_set(x: np.ndarray, y: np.ndarray) -> TensorDataset:
    return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))


def without(k: int, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x[y != k], y[y != k]


def torn_labels() -> Any:
    x, y = X.copy(), Y.copy()
    x[1::20] = x[0::20]
    return tensors(x, (y + np.arange(len(y))) % 4, val=(TEST_X, TEST_Y))


def rare() -> np.ndarray:
    return np.flatnonzero((Y != 3) | (np.cumsum(Y == 3) <= 4))


COLUMNS = np.random.default_rng(0).normal(size=(400, 5)).astype("float32") + [0, 0, 900, 0, 0]

BROKEN = {
    "no recipe": (lambda: 1 / 0, "recipe made", "wrong", "ZeroDivisionError", ""),
    "labels of tensors": (recipe_of(tensors(X, Y, test=(TEST_X, TEST_Y + 9))), "data made",
                          "wrong", "has label", ""),
    "a NaN in tensors": (lambda: recipe_of(tensors(with_value(np.nan), Y)), "data made", "wrong",
                         "row 7 holds a NaN", ""),
    "labels of a dataset": (recipe_of(datasets(torch_set(X, Y), torch_set(TEST_X, TEST_Y + 3))),
                            "data labels", "wrong", "test: 150 labels outside of 0..3 (4, 5, 6)",
                            "count classes from 0"),
    "labels that are no numbers": (
        recipe_of(datasets(torch_set(X, Y), torch_set(TEST_X, TEST_Y.astype("float32")))),
        "data labels", "wrong", "test: labels are float32", "one whole number"),
    "a NaN in a dataset": (recipe_of(datasets(torch_set(with_value(np.nan, 30), Y))),
                           "data numbers", "wrong", "rows of train with a NaN", "leave out"),
    "empty images": (recipe_of(tensors(with_value(0.25, 30), Y)), "data numbers", "look",
                     "rows of train hold one value alone", "empty images"),
    "not normalised": (recipe_of(tensors(40 * X + 120, Y)), "data scale", "look",
                       "not mean 0 and sd 1", "normalise=True"),
    "a column far off": (recipe_of(tensors(COLUMNS, Y)), "data scale", "look", "far from mean 0",
                         "normalise=True"),
    "a split of another kind": (recipe_of(tensors(X, Y, val=(TEST_X + 3, TEST_Y))), "data scale",
                                "look", "validation lies 3.", "scaled in another way"),
    "a class never trained": (
        recipe_of(tensors(*without(2, X, Y), test=(TEST_X, TEST_Y), n_classes=4)),
        "data classes", "wrong", "train has no row of class 2, other splits have",
        "split by class"),
    "a class nowhere": (recipe_of(tensors(X, Y, n_classes=5), net(nn.ReLU())), "data classes",
                        "look", "train has no row of class 4", "is n_classes=5 meant?"),
    "a class not tested": (recipe_of(tensors(X, Y, test=without(1, TEST_X, TEST_Y))),
                           "data classes", "look", "test has no row of class 1", "stratified"),
    "a rare class": (recipe_of(tensors(X[rare()], Y[rare()], val=(TEST_X, TEST_Y))),
                     "data classes", "look", "the rarest is 3", "weigh the loss"),
    "a leak into test": (recipe_of(tensors(X, Y, test=copied(40), val=(X[-1:] + 1, Y[-1:]))),
                         "data doubles", "wrong", "40 rows of test are in train", "no proof"),
    "one double": (recipe_of(tensors(X, Y, test=copied(1), val=images(100, seed=2))),
                   "data doubles", "look", "1 row of test is in train", "take them out"),
    "two labels of a row": (recipe_of(torn_labels()), "data doubles", "look",
                            "repeat another with another label", "which label is right"),
    "nothing trains": (recipe_of(model=frozen), "model parameters", "wrong", "none of",
                       "requires_grad"),
    "types": (recipe_of(model=lambda: Spare(double=True)), "model types", "look",
              "float64 (scale)", "model.float()"),
    "half a model": (recipe_of(model=lambda: net(nn.ReLU())().double()), "model types", "look",
                     "parameters are float64", "model.float()"),
    "too few scores": (recipe_of(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3))),
                       "model passes", "wrong", "gives shape [64, 3] for 64 rows", "need [n, 4]"),
    "other inputs": (recipe_of(model=net(nn.ReLU(), n_in=35)), "model passes", "wrong",
                     "does not take inputs of shape [n, 1, 6, 6]", ""),
    "an error in the model": (recipe_of(model=Unwell), "model error", "wrong", "KeyError: 'mask'",
                              ""),
    "no way back": (recipe_of(model=Detached), "model passes", "wrong", "does not depend",
                    "detach()"),
    "a NaN at once": (recipe_of(model=scaled(math.inf)), "model passes", "wrong",
                      "the first loss is nan", "smaller initial weights"),
    "a part that is not used": (recipe_of(model=lambda: Spare(spare=True)), "model use", "look",
                                "2 parameters without a gradient: spare.weight", "take them out"),
    "softmax at the end": (recipe_of(model=ended_by(nn.Softmax(1))), "model scores", "wrong",
                           "sum to 1", "leave the softmax out"),
    "sigmoid at the end": (recipe_of(model=ended_by(nn.Sigmoid())), "model scores", "look",
                           "a sigmoid", "linear layer"),
    "ReLU at the end": (recipe_of(model=ended_by(nn.ReLU())), "model scores", "look", "a ReLU",
                        "linear layer"),
    "draws without a seed": (
        lambda: recipe_of(model=scaled(1 + np.random.default_rng().random())), "model repeats",
        "look", "the initial weights of 1.weight differ", "torch's global generator"),
    "other data each time": (
        lambda: recipe_of(tensors(X + np.random.default_rng().random(), Y)), "model repeats",
        "look", "the data differ", "run.seed"),
    "large weights": (recipe_of(model=scaled(20.0)), "training first loss", "wrong",
                      "a guess has log(4) = 1.39", "smaller initial weights"),
    "exploding gradients": (recipe_of(model=deep(nn.ReLU, 6.0)), "training gradients", "look",
                            "they explode", "clip_norm=1.0"),
    "dead ReLUs": (recipe_of(model=biased(-100.0)), "training gradients", "wrong",
                   "none reaches layer 1", "dead ReLUs"),
    "nothing is learnt": (recipe_of(model=biased(-100.0)), "training one batch", "wrong",
                          "nor is it learnt at lr", "labels that do not belong"),
    "vanishing gradients": (recipe_of(model=deep(nn.Sigmoid, 1.0)), "training gradients", "look",
                            "they vanish", "ReLU in place of sigmoid"),
    "a rate that is too high": (recipe_of(optimizer=SGD(lr=4.0)), "training one batch", "look",
                                "at lr 0.4 it is learnt", "hpo lr-range"),
    "a rate that is far too high": (recipe_of(optimizer=SGD(lr=1e4)), "training one batch",
                                    "wrong", "nor is it learnt at lr 1e+03", "hpo lr-range"),
    "a rate that is too low": (recipe_of(optimizer=AdamW(lr=1e-4)), "training one batch", "look",
                               "at lr 0.001 it is learnt", "the default rate is low"),
}


@pytest.mark.parametrize("recipe, where, verdict, text, cure", BROKEN.values(), ids=BROKEN)
def test_a_fault_gets_its_line_and_its_cure(
    recipe: Any, where: str, verdict: str, text: str, cure: str
) -> None:
    found = findings(recipe)
    assert where in found, [one.line() for one in found.values()]
    one = found[where]
    assert (one.verdict, text in one.text, cure in one.cure) == (verdict, True, True), one.line()


@pytest.mark.parametrize("recipe", [
    Recipe(data=digits(make_run()), model=SimpleCNN(hidden=32), optimizer=AdamW(lr=1e-3),
           batch_size=64),
    recipe_of(),
    recipe_of(datasets(torch_set(X, Y), torch_set(TEST_X, TEST_Y)), SimpleCNN(hidden=16, width=8),
              optimizer=SGD(lr=0.05), clip_norm=1.0, micro_batch_size=16),
    recipe_of(model=net(nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5))),
    recipe_of(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 4))),
], ids=["digits", "tensors", "datasets", "own", "linear"])
def test_a_healthy_recipe_is_ok_in_every_line(recipe: Recipe) -> None:
    found = findings(recipe)
    assert len(found) == 18
    told = {name: one.line() for name, one in found.items() if one.verdict != "ok"}
    # What a machine that is busy with other things takes for a part of an epoch is its own.
    assert set(told) - {"speed epoch"} == {"speed largest batch"}, told
    assert found["speed largest batch"].verdict == "not checked"


def test_a_fault_ends_what_depends_on_it_and_says_so() -> None:
    no_model = {"model all", "training all"}
    assert not no_model & set(findings(recipe_of()))
    found = findings(recipe_of(datasets(torch_set(with_value(np.inf), Y))))
    assert found["model all"].text == "not checked: mend the data first"
    assert "training first loss" not in found
    found = findings(recipe_of(model=Unwell))
    assert found["training all"].text == "not checked: mend the model first"


def test_a_layer_that_begins_at_zero_is_not_called_dead() -> None:
    def zero_headed() -> nn.Module:
        model: Any = net(nn.ReLU())()
        nn.init.zeros_(model[-1].weight)
        return model

    found = findings(recipe_of(model=zero_headed))
    assert found["training gradients"].verdict == found["training first loss"].verdict == "ok"


def test_a_loss_of_one_s_own_is_not_held_against_cross_entropy() -> None:
    def squares(scores: Tensor, labels: Tensor) -> Tensor:
        return (scores.softmax(1) - nn.functional.one_hot(labels, 4)).square().sum(1).mean()

    found = findings(recipe_of(loss=squares))
    assert found["model scores"].verdict == found["training first loss"].verdict == "not checked"
    assert found["training one batch"].verdict == "ok"


def test_a_class_has_its_name_and_rows_that_were_not_all_read_are_counted() -> None:
    class Slow(Dataset):
        targets = np.arange(3000) % 4

        def __len__(self) -> int:
            return 3000

        def __getitem__(self, row: int) -> tuple[Tensor, int]:
            return torch.full((1, 2, 2), row / 1500 - 1), int(self.targets[row])

    found = findings(recipe_of(datasets(Slow())))
    assert "(looked at the first 2,048 of train)" in found["data rows"].text
    assert found["data classes"].verdict == "ok"


def test_the_checks_leave_a_trainer_as_it_was() -> None:
    """Weights, optimizer, batch norm's counts and the data: all but the order of rows drawn."""
    trainer = Trainer(recipe_of(model=SimpleCNN(hidden=8, width=4)), make_run())
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    data, optimizer = trainer.data, trainer.optimizer.state_dict()
    with trainer.random:
        list(training_findings(trainer))
        measure(trainer)
    after = trainer.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert trainer.optimizer.state_dict() == optimizer and trainer.data is data


GRADIENTS = [
    ({"a": 0.1, "b": 0.3}, None, "ok", "0.1 of the weight in layer a to 0.3 in layer b"),
    ({"a": 0.0, "b": 0.3}, {"a": 0.1, "b": 0.3}, "ok", "0.1 of the weight in layer a"),
    ({"a": 0.0, "b": 0.3}, None, "wrong", "none reaches layer a"),
    ({"a": 40.0, "b": 0.3}, None, "look", "they explode"),
    ({"a": 1e-7, "b": 1e-3}, None, "look", "they vanish: 1e-07 of the weight in layer a"),
    ({"a": 1e-5, "b": 2.0}, None, "look", "they vanish"),
    ({"a": math.nan, "b": 0.3}, None, "wrong", "layer a: not finite"),
    ({}, None, "not checked", "no layer with a weight trains"),
]


@pytest.mark.parametrize("first, later, verdict, text", GRADIENTS)
def test_gradients_are_judged_by_layer(first: Any, later: Any, verdict: str, text: str) -> None:
    found = gradients_verdict(first, first if later is None else later)
    assert found.verdict == verdict and text in found.text, found.line()


def test_a_device_that_is_too_slow_for_the_batch_is_not_called_wrong() -> None:
    slow = [Learnt(1.0, 2.3, 2.0, 9, False), Learnt(0.1, 2.3, 2.2, 9, False)]
    assert heart_verdict(slow, 32, 0.1).verdict == "look"
    in_time = [Learnt(1.0, 2.3, 2.0, 200, True), Learnt(0.1, 2.3, 2.2, 200, True)]
    assert heart_verdict(in_time, 32, 0.1).verdict == "wrong"


@pytest.mark.parametrize("loss, n_classes, verdict", [
    (math.log(10), 10, None), (2.9, 10, None), (1.5, 10, None), (0.7, 2, None), (0.0, 1, None),
    (6.0, 10, False), (0.5, 10, False), (50.0, 10, True), (math.inf, 10, True)])
def test_a_first_loss_is_held_against_that_of_a_guess(
    loss: float, n_classes: int, verdict: bool | None
) -> None:
    fault = initial_loss_fault(loss, n_classes)
    assert (fault is None) == (verdict is None) and (fault is None or fault[2] is verdict)


class Sleepy(Dataset):
    """Rows that take as long to read as a large image does."""

    targets = Y

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        time.sleep(0.0005)
        return torch.from_numpy(X[row]), int(Y[row])


def slow_augment(batch: Tensor, generator: torch.Generator) -> Tensor:
    time.sleep(0.02)
    return batch


@pytest.mark.parametrize("recipe, part, cure", [
    (recipe_of(datasets(Sleepy())), "data", "n_loader_workers="),
    (recipe_of(augment=(slow_augment,)), "augment", "augment="),
    (recipe_of(tensors(X, Y, val=(np.tile(TEST_X, (40, 1, 1, 1)), np.tile(TEST_Y, 40))),
               eval_batch_size=8), "evaluation", "eval_batch_size="),
], ids=["data", "augment", "evaluation"])
def test_where_an_epoch_s_time_goes_is_told_with_the_cure(
    recipe: Recipe, part: str, cure: str
) -> None:
    trainer = Trainer(recipe, make_run())
    pace = measure(trainer)
    found = pace_finding(trainer, pace)
    trainer.close()
    assert found.verdict == "look" and cure in found.cure, found.line()
    assert max(pace.seconds, key=pace.share) == part
    assert all(s >= 0 for s in pace.seconds.values())
    assert sum(map(pace.share, pace.seconds)) == pytest.approx(1.0)


def test_the_time_of_an_epoch_is_about_that_of_a_real_one() -> None:
    trainer = Trainer(recipe_of(datasets(Sleepy())), make_run(epochs=2))
    guessed = measure(trainer)
    real = list(trainer.epochs())[-1]["epoch_s"]
    assert guessed.epoch_s == pytest.approx(real, rel=0.5)


def test_only_the_part_that_stands_out_most_is_cured() -> None:
    trainer = Trainer(recipe_of(), make_run())
    times = {"data": 0.25, "augment": 0.0, "forward": 0.0, "optimizer": 0.65, "evaluation": 0.1}
    assert "larger batch_size=" in pace_finding(trainer, Pace(times, 5, 1.0)).cure
    even = {"data": 0.1, "forward": 0.4, "backward": 0.4, "optimizer": 0.1}
    assert pace_finding(trainer, Pace(even, 5, 1.0)).verdict == "ok"


@pytest.mark.parametrize("start", [1, 3, 64, 1000])
@pytest.mark.parametrize("most", [0, 1, 2, 5, 63, 64, 65, 500, 999, 1000, 5000])
def test_the_largest_batch_is_found_to_a_tenth(start: int, most: int) -> None:
    tried: list[int] = []

    def fits(n: int) -> bool:
        tried.append(n)
        return n <= most

    found, truth = largest(fits, start, 1000), min(most, 1000)
    assert found <= truth <= max(found * 1.1, found) + 1
    assert len(tried) < 20 and max(tried) <= 1000


def test_a_profile_is_a_trace_and_a_table_of_the_ten_slowest_operators(tmp_path: Path) -> None:
    path = tmp_path / "reports" / "trace.json"
    found = findings(recipe_of(model=SimpleCNN(hidden=8, width=4)), trace=path)
    events = json.loads(path.read_text())["traceEvents"]
    assert any("convolution" in str(event.get("name")) for event in events)
    assert str(path) in found["speed trace"].text
    shares = [float(found[f"speed operator {k}"].text.split("%")[0])
              for k in range(1, N_OPERATORS + 1)]
    assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 105


GOAL = Goal("loss", maximize=False)


def loop_findings(epoch: Callable[[], Any], **more: Any) -> dict[str, Finding]:
    return {f"{one.part} {one.what}": one
            for one in examine_loop(epoch, GOAL, 10, **{"alone": True, **more})}


def test_a_loop_of_one_s_own_is_run_twice_and_the_rest_is_said_not_to_be_checked() -> None:
    times = iter([1.0, 2.0])
    found = loop_findings(lambda: {"loss": 0.5, "epoch_s": next(times)})
    assert [one.verdict for one in found.values()] == ["ok"] * 3 + ["not checked"] * 4
    assert found["data all"].text == "not checked: the study has its own loop"
    assert "10 epochs take at most" in found["loop first epoch"].text
    assert len(loop_findings(lambda: {"loss": 0.5}, alone=False)) == 3


def raising() -> Any:
    raise BadMetrics("epoch 0: 'loss' is missing, got 'acc'")


def numbered() -> Iterator[dict[str, float]]:
    yield from ({"loss": float(k)} for k in range(2))


@pytest.mark.parametrize("epoch, where, verdict, text", [
    (numbered().__next__, "loop repeats", "look", "loss was 0.0 and is 1.0"),
    (lambda: {"loss": None}, "loop metrics", "wrong", "'loss' is not finite at the defaults"),
    (lambda: {"loss": 1.0, "f1": None}, "loop metrics", "look", "f1 is not finite"),
    (raising, "loop metrics", "wrong", "'loss' is missing"),
    (lambda: {}["x"], "loop first epoch", "wrong", "KeyError: 'x'"),
], ids=["unseeded", "nan", "other nan", "no metric", "error"])
def test_a_fault_of_a_loop_gets_its_line(
    epoch: Any, where: str, verdict: str, text: str
) -> None:
    found = loop_findings(epoch)[where]
    assert found.verdict == verdict and text in found.text, found.line()


def slots(n: int, threads: int, device: str = "cpu", n_each: int = 1) -> list[Slot]:
    return [Slot(i, device, "" if device == "cpu" else str(i), threads, n_each) for i in range(n)]


@pytest.mark.parametrize("workers, threads, cores, quota, verdict", [
    (2, 1, 2, None, "ok"), (4, 16, 64, None, "ok"), (4, 1, 64, None, "look"),
    (2, 2, 4, 4.0, "ok"), (4, 16, 64, 2.0, "look"), (1, 1, 1, 0.5, "ok")])
def test_threads_are_held_against_the_cores_that_may_be_used(
    workers: int, threads: int, cores: int, quota: float | None, verdict: str
) -> None:
    assert machine.threads_finding(slots(workers, threads), cores, quota).verdict == verdict


@pytest.mark.parametrize("workers, gb, verdict", [(2, 8, "ok"), (2, 2, "look"), (4, 1, "wrong")])
def test_memory_is_held_against_what_workers_take(workers: int, gb: int, verdict: str) -> None:
    assert machine.memory_finding(slots(workers, 1), gb * 2**30).verdict == verdict


def test_threads_and_memory_are_those_of_all_processes_of_a_trial() -> None:
    two_of_two = slots(2, 4, n_each=2)
    assert machine.threads_finding(two_of_two, 16, None).text == (
        "4 processes with 4 threads each on 16 cores")
    assert machine.threads_finding(two_of_two, 64, None).verdict == "look"
    assert machine.memory_finding(two_of_two, 8 * 2**30).text == (
        "8.0 GB free; 4 processes take 2.3 GB before data")


@pytest.mark.parametrize("device, visible, text", [
    ("cpu", "", "1 trial at once, of 2 processes each"),
    ("cuda", "0,1", "1 trial at once, of 2 GPUs each")])
def test_each_device_of_a_trial_has_its_line(device: str, visible: str, text: str) -> None:
    found = list(machine.machine_findings([Slot(0, device, visible, 1, 2)]))
    [trials] = [one for one in found if one.what == "trials"]
    assert (trials.verdict, trials.text) == ("ok", text)
    named = [one.text.split(":")[0] for one in found if one.what == "device"]
    assert named == (["gpu 0", "gpu 1"] if device == "cuda" else [
        "1 worker on the CPU; no GPU is used"])


LISTED = ("0, GPU-aaaa-1, NVIDIA H200, 570.12, 143771, 500\n"
          "1, GPU-bbbb-2, NVIDIA H200, 570.12, 143771, 120000\n"
          "2, GPU-cccc-3, Thor, 580.00, [N/A], [N/A]\n")


@pytest.mark.parametrize("visible, verdict, text", [
    ("0", "ok", "NVIDIA H200, driver 570.12, 139.9 of 140.4 GB free"),
    ("GPU-aaaa", "ok", "139.9 of"), ("1", "look", "23.2 of 140.4 GB free"),
    ("2", "ok", "Thor, driver 580.00"), ("7", "look", "nvidia-smi does not list it")])
def test_a_gpu_is_told_as_nvidia_smi_lists_it(visible: str, verdict: str, text: str) -> None:
    found = machine.gpu_finding(visible, LISTED)
    assert found.verdict == verdict and text in found.text, found.line()


def test_a_container_s_limits_are_read(tmp_path: Path) -> None:
    assert machine.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert machine.cpu_quota(tmp_path) == 1.5
    table = tmp_path / "meminfo"
    table.write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert machine.available_bytes(table, tmp_path) == 4000 * 1024
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert machine.available_bytes(table, tmp_path) == 600_000
    assert machine.available_bytes(tmp_path / "none", tmp_path) is None


def stored(url: str, home: Path) -> dict[str, Finding]:
    return {one.what: one for one in database_findings(url, home)}


def test_a_database_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    home = tmp_path / "new" / "home"
    found = stored(f"sqlite:///{home / 'hpo.db'}", home)
    assert [one.verdict for one in found.values()] == ["ok"] * 4
    assert "`hpo run` makes it" in found["database"].text
    assert not list(tmp_path.iterdir())


def test_a_database_that_is_there_is_read_and_not_written(sqlite_url: str, tmp_path: Path) -> None:
    storage.init(sqlite_url)
    before = (tmp_path / "hpo.db").read_bytes()
    found = stored(sqlite_url, tmp_path)
    assert [one.verdict for one in found.values()] == ["ok"] * 4
    assert "with a write-ahead log" in found["database"].text
    assert (tmp_path / "hpo.db").read_bytes() == before
    with sqlite3.connect(tmp_path / "hpo.db") as db:
        db.execute("PRAGMA journal_mode=DELETE")
    db.close()
    assert stored(sqlite_url, tmp_path)["database"].verdict == "look"


def test_a_server_tells_its_version_and_its_round_trip(postgres_url: str, tmp_path: Path) -> None:
    found = stored(postgres_url, tmp_path)
    assert "PostgreSQL 1" in found["database"].text
    assert "`hpo run` sets it up" in found["database"].text
    assert found["round trip"].verdict == "ok" and "a question takes" in found["round trip"].text


@pytest.mark.parametrize("url, what, text", [
    ("mysql://me:secret@host/db", "database", "is not supported"),
    ("sqlite:///{home}/file/hpo.db", "database", "is a file, not a folder"),
    ("sqlite:///{home}/broken.db", "database", "broken.db"),
])
def test_a_database_that_cannot_be_used_is_wrong(
    tmp_path: Path, url: str, what: str, text: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "broken.db").write_text("no database " * 1000)
    found = stored(url.format(home=tmp_path), tmp_path)[what]
    assert found.verdict == "wrong" and text in found.text and "secret" not in found.text
    assert stored(url.format(home=tmp_path), tmp_path / "file" / "x")["home"].verdict == "wrong"


def test_a_slow_database_is_worth_a_look() -> None:
    assert trip_finding("commit", [80.0, 90.0, 100.0]).verdict == "look"
    assert trip_finding("commit", [1.0, 2.0, 500.0]).verdict == "ok"


def warned(recipe: Recipe) -> list[str]:
    """Return the warnings of `hpo run`'s own check."""
    return prepare(recipe, make_run(), warnings_of)["warnings"]


@pytest.mark.parametrize("recipe, text", [
    (recipe_of(tensors(300 * X, Y)), "inputs have mean"),
    (recipe_of(tensors(X, Y, n_classes=6)), "class 4, 5 has no training row, of 6 classes"),
    (recipe_of(model=ended_by(nn.Softmax(1))), "sum to 1, as of a softmax"),
    (recipe_of(model=scaled(20.0)), "a guess has log(4)"),
    (recipe_of(datasets(torch_set(with_value(np.nan, 380), Y))), "NaN or an infinite value"),
], ids=["scale", "class", "softmax", "weights", "nan"])
def test_a_run_s_own_check_warns_in_a_line_or_two(recipe: Recipe, text: str) -> None:
    said = warned(recipe)
    assert any(text in line for line in said) and len(said) <= 3, said
    assert all("\n" not in line for line in said)


def test_a_pass_that_fails_is_a_warning_and_no_error_of_the_check() -> None:
    class Picky(Spare):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                raise NotImplementedError("no evaluation yet")
            return super().forward(x)

    [said] = warned(recipe_of(model=Picky))
    assert said == "a pass over 64 rows failed: NotImplementedError: no evaluation yet"


def test_rows_that_cannot_be_read_are_a_warning_and_no_error_of_the_check() -> None:
    """Sixteen rows are looked at, of which the first trial may see none."""
    class Broken(Sleepy):
        def __getitem__(self, row: int) -> tuple[Tensor, int]:
            x, y = super().__getitem__(row)
            return (x, y) if 20 < row < 380 else (x[:, :5], y)

    recipe = recipe_of(datasets(Broken()), batch_size=4)
    trainer = Trainer(recipe, make_run())
    [said] = warnings_of(trainer)
    assert "some cannot be read" in said and "mixes inputs of shapes" in said


@pytest.mark.parametrize("recipe", [
    Recipe(data=digits(make_run()), model=SimpleCNN(hidden=64), optimizer=AdamW()),
    Recipe(data=tensors(np.random.default_rng(0).integers(0, 256, (512, 3, 32, 32), np.uint8),
                        np.arange(512) % 10), model=SimpleCNN(), optimizer=AdamW()),
    recipe_of(), recipe_of(datasets(torch_set(X, Y))),
    recipe_of(tensors((X - X.min()) / (X.max() - X.min()), Y)),
], ids=["digits", "like cifar", "tensors", "datasets", "0 to 1"])
def test_a_run_s_own_check_says_nothing_of_a_sound_study(recipe: Recipe) -> None:
    assert warned(recipe) == []


def test_a_finding_is_one_line_and_goes_through_json() -> None:
    all_kinds = [ok("data", "rows", "3"), look("data", "rows", "3", "take 4"),
                 wrong("data", "rows", "3"), not_checked("data", "rows", "why")]
    for one in all_kinds:
        assert Finding.from_json(json.loads(json.dumps(one.to_json()))) == one
        assert "\n" not in one.line()
    assert all_kinds[1].line().endswith("3; take 4") and all_kinds[3].line().startswith("- ")
    assert SPEED == "speed"
