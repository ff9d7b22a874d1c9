"""A trial over two processes trains what one process does: DDP, FSDP, parts of batches, resume."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpo import discover
from hpo.attempt import make_run
from hpo.errors import DataError, InputError
from hpo.ranks import Ranks
from hpo.seeding import seed_all
from hpo.spec import Run, StudySpec
from hpo.train import SGD, Recipe, SimpleCNN, checkpoint, datasets, tensors
from hpo.train.joint import own_seed, seed_datasets
from hpo.train.loaded import load
from hpo.train.loop import Trainer
from hpo.train.scoring import evaluate, make_model
from hpo.train.shares import n_parts
from hpo.train.team import Team
from hpo.versions import source_digest

MODULE = '''
"""What a team is tried on; `case` names it."""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from hpo import Categorical, Run, StudySpec
from hpo.train import *
from hpo.train.optim import OPTIMIZERS

class OneHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(64, 10), nn.Linear(3, 3)
    def forward(self, x):
        return self.used(x.flatten(1))

class Again(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 32), nn.Linear(32, 10)
    def forward(self, x):
        x = checkpoint(self.one, x.flatten(1), use_reentrant=False).relu()
        return checkpoint(self.two, x, use_reentrant=False)

class Overflowing(nn.Module):
    """Has, in its third training step, an infinite gradient of one row of one weight."""

    def __init__(self):
        super().__init__()
        self.main, self.more = nn.Linear(64, 10), nn.Linear(64, 10)
        self.n = 0

    def forward(self, x):
        more = self.more(x.flatten(1))
        self.n += self.training
        if self.training and self.n == 3:
            factor = torch.ones(10)
            factor[9] = float("inf")
            more.register_hook(lambda gradient: gradient * factor.to(gradient))
        return self.main(x.flatten(1)) + more

class Tied(nn.Module):
    """Uses the weights of a layer that it does not call."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        return nn.functional.linear(self.one(x.flatten(1)), self.two.weight, self.two.bias)

class Words(nn.Module):
    """Takes whole numbers below 10 and nothing else."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.table(x.long()).mean(1))

X = torch.randn(144, 64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(144) % 10
MLP_ = MLP(hidden=32, norm="layer")
CASES = {
    "mlp": {},
    # By SGD: Adam moves a weight of nearly no gradient by its rounding, another on each CPU.
    "cnn": {"model": SimpleCNN(hidden=16, norm="group"), "optimizer": SGD(lr=0.05)},
    "odd": {"batch_size": 50},
    "accumulated": {"micro_batch_size": 10},
    "clip_norm": {"clip_norm": 0.1}, "clip_value": {"clip_value": 0.01},
    "clip_adaptive": {"clip_adaptive": 0.05},
    "ema": {"ema": EMA(decay=0.8)},
    "l1": {"optimizer": AdamW(lr=1e-2, l1=1e-3)},
    "again": {"model": Again},
    "tied": {"model": Tied}, "overflow": {"model": Overflowing, "precision": "fp16"},
    "words": {"model": Words, "data": tensors(torch.randint(0, 10, (144, 5)).float(), Y)},
    # The gradient of the convolution's bias is rounding alone.
    "conv_in": {"model": nn.Sequential(nn.Conv2d(1, 8, 3), nn.InstanceNorm2d(8), nn.Flatten(),
                                       nn.Linear(288, 10))},
    "sized": {"model": nn.Linear(64, 10), "data": tensors(X, Y, val_fraction=0.3)},
    "unused": {"model": OneHead},
    "recomputed": {"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.LayerNorm(32),
                                          nn.ReLU(), nn.Linear(32, 10)),
                   "checkpoint_activations": True},
    "bf16": {"precision": "bf16"},
    "rms": {"model": ResNet9(width=4, norm="rms"), "optimizer": SGD(lr=0.02)},
    "ema_vit": {"model": ViT(patch_size=4, width=32, n_layers=2, n_heads=2),
                "ema": EMA(decay=0.8), "optimizer": SGD(lr=0.05)},
    "layer": {"model": SimpleCNN(hidden=8, width=4, norm="layer"), "optimizer": SGD(lr=0.05)},
    "vit": {"model": ViT(patch_size=4, width=32, n_layers=2, n_heads=2)},
    "resnet": {"model": ResNet9(width=8), "optimizer": SGD(lr=0.05)},
    "noisy": {"model": MLP(hidden=32, dropout=0.3), "augment": (RandomCrop(1),),
              "mix": MixUp(), "ema": EMA(decay=0.8), "schedule": Plateau(patience=0)},
    "compiled": {"compile": "eager"},
    "fp16": {"precision": "fp16"},
    "sgd_like": {"optimizer": SGD(lr=0.1, momentum=0.9)},
    **{name: {"optimizer": optimizer(name, lr=1e-2)} for name in OPTIMIZERS},
}

def build(run: Run, *, case: str, sharding: str) -> Recipe:
    given = {"data": digits(run), "model": MLP_, "optimizer": AdamW(lr=1e-2), "batch_size": 64,
             **CASES[case]}
    return Recipe(sharding=None if sharding == "none" else sharding, **given)

STUDY = StudySpec(space={"case": Categorical(*CASES), "sharding": Categorical("none", "fsdp")},
                  build=build, maximize="val_accuracy", epochs=2)
'''
ORDER = {"epochs": 2, "device": "cpu", "data_fraction": 0.3, "data_dir": None}


class Pair:
    """This process and another, which train trials together."""

    def __init__(self, folder: Path) -> None:
        seed_all(0)
        self.spec: StudySpec = discover.load("team_cases")
        self.ranks = Ranks("team_cases", 2, "cpu", source_digest(self.spec.build))
        self.folder = folder

    def trainer(self, case: str, sharding: str = "none", *, n: int = 2, epochs: int = 2,
                micro: int | None = None) -> Trainer:
        params = {"case": case, "sharding": sharding}
        order = {**ORDER, "epochs": epochs, "n_devices": n}
        assert self.spec.build is not None
        with self.ranks.watching():
            team = self.ranks.begin(order, 3, self.folder, params, micro) if n == 2 else Team()
            run = make_run(order, 3, self.folder)
            return Trainer(self.spec.build(run, **params), run, team=team, micro_batch_size=micro)

    def train(self, case: str, sharding: str = "none", *, n: int = 2,
              epochs: int = 2) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        trainer = self.trainer(case, sharding, n=n, epochs=epochs)
        metrics = list(self.ranks.watched(trainer.epochs()))
        trainer.team.tell("weights")
        return metrics, trainer.weights()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("team")
    (folder / "search_spaces").mkdir()
    (folder / "search_spaces" / "team_cases.py").write_text(MODULE)
    before = os.getcwd()
    os.chdir(folder)
    found = Pair(folder)
    try:
        found.ranks.start()
        found.ranks.join()
        yield found
    finally:
        found.ranks.close()
        os.chdir(before)


def differ(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    """Return the largest difference of a loss, relative to it."""
    assert len(ours) == len(theirs)
    return max(abs(a[name] - b[name]) / abs(b[name]) for a, b in zip(ours, theirs, strict=True)
               for name in ("train_loss", "val_loss"))


def farthest(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    assert one.keys() == two.keys()
    return max(float((one[name].double() - two[name].double()).abs().max()) for name in one)


SHARDINGS = pytest.mark.parametrize("sharding", ["none", "fsdp"])
SAME = ["mlp", "cnn", "odd", "accumulated", "clip_norm", "clip_value", "clip_adaptive", "ema",
        "l1", "unused", "recomputed", "again", "vit", "compiled", "sgd", "adam", "amsgrad",
        "adamw", "rmsprop", "adagrad", "adadelta", "lamb", "muon", "words", "conv_in", "rms",
        "layer", "ema_vit"]


@SHARDINGS
@pytest.mark.parametrize("case", SAME)
def test_two_processes_train_what_one_does(pair: Pair, case: str, sharding: str) -> None:
    """Two epochs of 6 steps, the last batch of 25 rows shared out as 13 and 12."""
    one, weights = pair.train(case, n=1)
    two, theirs = pair.train(case, sharding)
    assert differ(two, one) < 1e-6
    # Adam moves a weight without a gradient by the sign of its rounding: a key's bias in the ViT.
    assert case in ("vit", "conv_in") or farthest(weights, theirs) < 2e-5


@SHARDINGS
@pytest.mark.parametrize(("case", "limit"), [("bf16", 0.01), ("fp16", 1e-3)])
def test_in_half_precision_two_processes_differ_by_its_rounding(
    pair: Pair, case: str, limit: float, sharding: str
) -> None:
    one, _ = pair.train(case, n=1)
    two, _ = pair.train(case, sharding)
    assert 0 < differ(two, one) < limit


@SHARDINGS
def test_both_ranks_leave_out_a_step_that_overflows_on_one(pair: Pair, sharding: str) -> None:
    """A gradient is infinite in a part of one weight only, which one rank alone may hold."""
    one, weights = pair.train("overflow", n=1)
    trainer = pair.trainer("overflow", sharding)
    two = list(pair.ranks.watched(trainer.epochs()))
    trainer.team.tell("weights")
    theirs = trainer.weights()
    assert trainer.update.n_skipped == 1
    assert differ(two, one) < 1e-3
    assert farthest(weights, theirs) < 1e-3


@SHARDINGS
@pytest.mark.parametrize("case", ["noisy", "resnet", "muon", "fp16"])
def test_a_resumed_trial_ends_at_the_same_numbers(pair: Pair, case: str, sharding: str) -> None:
    """To the last bit, with what each rank draws for itself."""
    whole, weights = pair.train(case, sharding, epochs=4)
    first = pair.trainer(case, sharding, epochs=4)
    begun = [first.epoch(), first.epoch()]
    state = first.state_dict()
    second = pair.trainer(case, sharding, epochs=4)
    second.load_state_dict(state)
    ended = list(pair.ranks.watched(second.epochs()))
    second.team.tell("weights")
    theirs = second.weights()
    assert [strip(m) for m in [*begun, *ended]] == [strip(m) for m in whole]
    assert farthest(weights, theirs) == 0.0


def strip(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.endswith("_s")}


def test_the_state_of_one_process_is_not_taken_by_two(pair: Pair) -> None:
    state = pair.trainer("mlp", n=1).state_dict()
    with pytest.raises(DataError, match="n_devices was 1, is 2"):
        pair.trainer("mlp").load_state_dict(state)


def test_ranks_draw_dropout_and_crops_of_their_own(pair: Pair) -> None:
    trainer = pair.trainer("noisy")
    drawn = []
    for draws in trainer.state_dict()["draws"]:
        for state in (draws["torch"][0], draws["augment"]):
            generator = torch.Generator()
            generator.set_state(state)
            drawn += torch.rand(20, generator=generator).tolist()
    assert len(set(drawn)) == 80


class Drawing(torch.utils.data.Dataset):
    """Rows that torch draws at random."""

    targets = [i % 10 for i in range(60)]

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.rand(8), i % 10


def test_each_rank_s_dataset_draws_for_itself(tmp_path: Path) -> None:
    """In loader processes, whose seed is otherwise the same on all ranks."""
    run = Run(epochs=1, seed=0, device="cpu", dir=tmp_path)
    recipe = Recipe(data=datasets(Drawing(), val=Drawing()), model=nn.Linear(8, 10),
                    optimizer=SGD(lr=0.1), n_loader_workers=1)
    drawn = []
    for rank in range(2):
        data = load(recipe, run, torch.device("cpu"))
        if rank:
            seed_datasets(data, own_seed(run.seed, rank))
        drawn.append(next(iter(data.train.batches(torch.arange(10), 10, 1)))[0])
        data.close()
    assert not set(drawn[0].flatten().tolist()) & set(drawn[1].flatten().tolist())


def test_a_batch_norm_on_a_cpu_is_over_the_rows_of_each_rank(pair: Pair) -> None:
    """As its docs say; both ranks score with the running means of rank 0."""
    one, _ = pair.train("resnet", n=1)
    two, _ = pair.train("resnet")
    assert 1e-6 < differ(two, one) < 0.5


def test_the_weights_of_a_sharded_trial_are_whole_in_its_checkpoint(
    pair: Pair, tmp_path: Path
) -> None:
    trainer = pair.trainer("cnn", "fsdp")
    metrics = list(pair.ranks.watched(trainer.epochs()))
    trainer.save(tmp_path / "it.pt")
    stored = checkpoint.read(tmp_path / "it.pt")["model"]
    alone = pair.trainer("cnn", n=1)
    alone.model.load_state_dict(stored)
    best = metrics[trainer.best_epoch]
    loss, n_right = evaluate(alone.model, alone.data, alone.data.val, alone.recipe)
    assert float(loss) / len(alone.data.val) == pytest.approx(best["val_loss"], rel=1e-6)
    assert float(n_right) / len(alone.data.val) == best["val_accuracy"]


@pytest.mark.parametrize("size", [1, 7, 8, 10, 21, 22, 43, 100])
def test_each_validation_row_is_scored_once(pair: Pair, size: int) -> None:
    """Ranks whose weights are in parts must call the model equally often, whatever the rows."""
    trainer = pair.trainer("sized", "fsdp", micro=size)
    found = trainer.epoch()
    trainer.team.tell("weights")
    weights = trainer.weights()
    alone = pair.trainer("sized", n=1)
    alone.model.load_state_dict(weights)
    loss, n_right = evaluate(alone.model, alone.data, alone.data.val, alone.recipe)
    assert found["val_loss"] == pytest.approx(float(loss) / len(alone.data.val), rel=1e-6)
    assert found["val_accuracy"] == float(n_right) / len(alone.data.val)


@pytest.mark.parametrize(("n_rows", "size", "n"), [(10, 4, 3), (8, 4, 2), (9, 4, 2), (3, 8, 1)])
def test_the_ranks_rows_of_a_batch_are_the_batch(n_rows: int, size: int, n: int) -> None:
    order = torch.randperm(n_rows)
    own = [Team(rank, 2).own_of_batches(order, size, n) for rank in range(2)]
    parts = [rows.split(size // 2) for rows in own]
    for k, batch in enumerate(order[:n * size].split(size)):
        shares = [part[k] for part in parts]
        assert torch.equal(torch.cat(shares), batch)
        assert abs(len(shares[0]) - len(shares[1])) <= 1


@pytest.mark.parametrize(("n_rows", "n_ranks", "micro", "batch_norm", "parts"), [
    (64, 1, 64, False, 1), (64, 1, 10, False, 7), (64, 2, 10, False, 4), (25, 2, 10, False, 2),
    (3, 2, 1, False, 1), (5, 1, 1, True, 2), (5, 2, 1, True, 1), (1, 1, 8, True, 1),
])
def test_all_ranks_train_a_batch_in_as_many_parts(
    n_rows: int, n_ranks: int, micro: int, batch_norm: bool, parts: int
) -> None:
    assert n_parts(n_rows, n_ranks, micro, batch_norm) == parts


def test_a_synced_norm_is_the_one_that_is_computed_again(tmp_path: Path) -> None:
    """As CUDA has it: in evaluation a row's scores do not depend on the others."""
    run = Run(epochs=1, seed=0, device="cpu", dir=tmp_path)
    recipe = Recipe(data=tensors(torch.randn(32, 1, 8, 8), torch.arange(32) % 4),
                    model=SimpleCNN(hidden=8), optimizer=SGD(lr=0.1), checkpoint_activations=True)
    cpu = torch.device("cpu")
    data = load(recipe, run, cpu)
    model = make_model(recipe, data, cpu, synced=True).eval()
    norms = [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    assert norms and all(isinstance(part, nn.SyncBatchNorm) for part in norms)
    rows = torch.randn(8, 1, 8, 8)
    with torch.no_grad():
        assert torch.allclose(model(rows)[:4], model(rows[:4]), atol=1e-6)


def one_of_two(tmp_path: Path, recipe: dict[str, Any], n_rows: int = 64) -> Trainer:
    x, y = torch.randn(n_rows, 1, 8, 8), torch.arange(n_rows) % 4
    run = Run(epochs=1, seed=0, device="cpu", dir=tmp_path, n_devices=2)
    return Trainer(Recipe(data=tensors(x, y), optimizer=SGD(lr=0.1),
                          **{"model": SimpleCNN(hidden=8), **recipe}), run)


def test_a_batch_that_cannot_be_shared_out_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Recipe.batch_size: 33 rows .* 2 devices .* multiple"):
        one_of_two(tmp_path, {"batch_size": 33})


def test_what_is_tried_on_one_device_has_as_many_rows_at_once_as_each_of_them(
    tmp_path: Path
) -> None:
    """The check of a step, and the learning-rate range test."""
    assert one_of_two(tmp_path, {"batch_size": 32}).micro_batch_size == 16
    assert one_of_two(tmp_path, {"batch_size": 32, "micro_batch_size": 5}).micro_batch_size == 5


def test_a_model_that_cannot_be_in_parts_is_refused_with_the_reason(pair: Pair) -> None:
    with pytest.raises(InputError, match=r"Recipe.sharding: Tied does not compute with its"):
        pair.trainer("tied", "fsdp")
    assert pair.train("tied")[0]


@pytest.mark.parametrize("value", ["ddp", 1, "FSDP"])
def test_an_unknown_sharding_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"Recipe.sharding: must be None, 'fsdp', got"):
        Recipe(data=tensors(torch.zeros(4, 2), torch.arange(4) % 2), model=nn.Linear(2, 2),
               optimizer=SGD(lr=0.1), sharding=value)
