"""Optimizers: the published steps or torch's own, in the right groups, by name, scaled or not."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import resnet18, vision_transformer

from hpo import Run
from hpo.baselines.lr_range import lr_range
from hpo.baselines.lr_sweep import sweep
from hpo.errors import InputError
from hpo.train import (
    LAMB,
    MLP,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Muon,
    Recipe,
    RMSprop,
    SimpleCNN,
    digits,
    optimizer,
    schedule,
)
from hpo.train.groups import Place, places
from hpo.train.loop import Trainer
from hpo.train.optim import OPTIMIZERS
from hpo.train.optim_spec import OptimizerSpec
from hpo.train.recipe import describe
from hpo.train.schedules import SCHEDULES
from hpo.train.steps import all_orthogonalised, orthogonalised

N_STEPS = 6
NAMES = list(OPTIMIZERS)


def net() -> nn.Sequential:
    """Return a small net in float64; no bias before a norm, whose gradient is mere rounding."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
                         nn.Conv2d(4, 6, 3), nn.GELU(), nn.Flatten(), nn.Linear(6, 5),
                         nn.Linear(5, 3)).double()


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(step)
    x = torch.randn(8, 2, 5, 5, generator=draws, dtype=torch.float64)
    return x, torch.randint(0, 3, (8,), generator=draws)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x, y = data(step)
    return nn.functional.cross_entropy(model(x), y)


def trained(model: nn.Module, made: torch.optim.Optimizer, extra: Callable[[], Any] = lambda: 0.0,
            before: Callable[[], None] = lambda: None) -> list[np.ndarray]:
    """Return the parameters after some steps; `extra` is added to the loss."""
    for step in range(N_STEPS):
        made.zero_grad()
        (loss_of(model, step) + extra()).backward()
        before()
        made.step()
    return [p.detach().numpy() for p in model.parameters()]


def close(ours: list[np.ndarray], theirs: list[np.ndarray], rel: float = 1e-9) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=rel, atol=1e-12)


def halves(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Return what a careful user writes: weights that decay, and the rest."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": weights, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]


TORCH: list[tuple[OptimizerSpec, type[torch.optim.Optimizer], dict[str, Any]]] = [
    (SGD(0.05, momentum=0.8, weight_decay=0.1), torch.optim.SGD,
     {"lr": 0.05, "momentum": 0.8, "nesterov": True}),
    (SGD(0.05, momentum=0.0, weight_decay=0.1), torch.optim.SGD, {"lr": 0.05}),
    (Adam(0.01, weight_decay=0.1, betas=(0.8, 0.9)), torch.optim.Adam,
     {"lr": 0.01, "betas": (0.8, 0.9)}),
    (Adam(0.01, weight_decay=0.1, amsgrad=True), torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (AdamW(0.01, weight_decay=0.1, eps=1e-4), torch.optim.AdamW, {"lr": 0.01, "eps": 1e-4}),
    (RMSprop(0.01, weight_decay=0.1, alpha=0.9, momentum=0.5, centered=True), torch.optim.RMSprop,
     {"lr": 0.01, "alpha": 0.9, "momentum": 0.5, "centered": True}),
    (Adagrad(0.05, weight_decay=0.1), torch.optim.Adagrad, {"lr": 0.05}),
    (Adadelta(0.7, weight_decay=0.1, rho=0.8), torch.optim.Adadelta, {"lr": 0.7, "rho": 0.8}),
]
IDS = [f"{type(spec).__name__}-{n}" for n, (spec, _, _) in enumerate(TORCH)]


@pytest.mark.parametrize(("spec", "kind", "fields"), TORCH, ids=IDS)
def test_an_optimizer_makes_torch_s_steps_with_no_decay_of_biases_and_norms(spec, kind, fields):
    ours, theirs = net(), net()
    expected = trained(theirs, kind(halves(theirs, 0.1), **fields))
    close(trained(ours, spec.make(ours)), expected)


@pytest.mark.parametrize(("spec", "kind", "fields"), TORCH, ids=IDS)
def test_with_decay_all_an_optimizer_makes_torch_s_steps_on_all_parameters(spec, kind, fields):
    ours, theirs = net(), net()
    expected = trained(theirs, kind(theirs.parameters(), weight_decay=0.1, **fields))
    made = type(spec)(**{**vars(spec), "decay_all": True}).make(ours)
    assert len(made.param_groups) == 1
    close(trained(ours, made), expected)


@pytest.mark.parametrize(("spec", "kind", "fields"), [
    row for row in TORCH if type(row[0]) in (SGD, RMSprop, Adagrad, Adadelta)])
def test_decoupled_decay_shrinks_weights_before_the_step(spec, kind, fields):
    ours, theirs = net(), net()
    made = type(spec)(**{**vars(spec), "decoupled_decay": True}).make(ours)

    @torch.no_grad()
    def shrink() -> None:
        for p in theirs.parameters():
            p.mul_(1.0 - fields["lr"] * 0.1 if p.ndim > 1 else 1.0)

    expected = trained(theirs, kind(theirs.parameters(), **fields), before=shrink)
    close(trained(ours, made), expected)


@pytest.mark.parametrize("name", NAMES)
def test_l1_is_the_sum_of_the_weights_sizes_in_the_loss(name):
    ours, theirs = net(), net()
    spec = optimizer(name, lr=0.01, l1=0.02)
    bare = optimizer(name, lr=0.01)

    def penalty() -> torch.Tensor:
        return 0.02 * torch.stack([p.abs().sum() for p in theirs.parameters() if p.ndim > 1]).sum()

    close(trained(ours, spec.make(ours)), trained(theirs, bare.make(theirs), extra=penalty))


@pytest.mark.parametrize("fields", [{}, {"l1": 0.01}, {"decoupled_decay": True}],
                         ids=["plain", "l1", "decoupled"])
@pytest.mark.parametrize("kind", [SGD, RMSprop, Adagrad])
def test_scaled_gradients_make_the_same_steps_and_one_that_overflows_none(kind, fields):
    plain, scaled = net().float(), net().float()
    spec = kind(0.01, weight_decay=0.1, **fields)
    one, other = spec.make(plain), spec.make(scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = data(0)
    x = x.float()

    def step(overflow: bool = False) -> None:
        scaler.scale(nn.functional.cross_entropy(scaled(x), y)).backward()
        if overflow:
            grad = next(scaled.parameters()).grad
            assert grad is not None
            grad[0] = math.inf
        scaler.step(other)
        scaler.update()
        other.zero_grad()

    for _ in range(3):
        nn.functional.cross_entropy(plain(x), y).backward()
        one.step()
        one.zero_grad()
        step()
    for ours, theirs in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    before = copy.deepcopy(list(scaled.parameters()))
    step(overflow=True)
    assert all(torch.equal(a, b) for a, b in zip(before, scaled.parameters(), strict=True))


def lamb_steps(values: list[np.ndarray], grads: list[list[np.ndarray]], adapts: list[bool],
               lr: float, decay: float) -> list[np.ndarray]:
    """Make the steps of algorithm 2 of You et al. in float64; without adaption no decay either."""
    means, squares = ([np.zeros_like(v) for v in values] for _ in range(2))
    for t, some in enumerate(grads, 1):
        for k, g in enumerate(some):
            means[k] = 0.8 * means[k] + 0.2 * g
            squares[k] = 0.9 * squares[k] + 0.1 * g * g
            ratio = means[k] / (1 - 0.8 ** t) / (np.sqrt(squares[k] / (1 - 0.9 ** t)) + 1e-6)
            if adapts[k]:
                ratio = ratio + decay * values[k]
                size = np.sqrt((values[k] ** 2).sum())
                ratio = ratio * (size / np.sqrt((ratio ** 2).sum()) if size > 0 else 1.0)
            values[k] = values[k] - lr * ratio
    return values


@pytest.mark.parametrize("decay_all", [False, True])
def test_lamb_makes_the_steps_of_the_published_algorithm(decay_all):
    model = net()
    params = list(model.parameters())
    values = [p.detach().numpy().copy() for p in params]
    made = LAMB(0.02, weight_decay=0.1, betas=(0.8, 0.9), decay_all=decay_all).make(model)
    grads = []

    def keep() -> None:
        grads.append([p.grad.numpy().copy() for p in params if p.grad is not None])

    found = trained(model, made, before=keep)
    expected = lamb_steps(values, grads, [decay_all or p.ndim > 1 for p in params], 0.02, 0.1)
    close(found, expected)


@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (48, 12), (5, 40), (10, 90)])
def test_orthogonalised_keeps_singular_vectors_and_brings_their_values_to_about_one(shape):
    """Against the SVD: the published iteration ends between 0.7 and 1.2 and turns nothing."""
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    turned = left.T @ orthogonalised(matrix) @ right.T
    values = turned.diagonal()
    assert float(values.min()) > 0.65 and float(values.max()) < 1.25
    torch.testing.assert_close(turned, torch.diag(values), rtol=0, atol=1e-10)
    single = orthogonalised(matrix.float())
    torch.testing.assert_close(single.double(), orthogonalised(matrix), rtol=0, atol=1e-4)


def test_matrices_of_one_shape_are_orthogonalised_together_each_as_by_the_formula():
    """Tall, wide, alone in its shape and too large to be put together, in mixed order."""
    draws = torch.Generator().manual_seed(3)
    shapes = [(12, 5), (5, 12), (12, 5), (7, 7), (300, 300), (5, 12), (300, 300), (12, 5)]
    matrices = [torch.randn(shape, generator=draws, dtype=torch.float64) for shape in shapes]
    got = all_orthogonalised(matrices)
    for matrix, even in zip(matrices, got, strict=True):
        x = matrix.numpy() if matrix.shape[0] <= matrix.shape[1] else matrix.numpy().T
        x = x / np.sqrt((x ** 2).sum())
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        expected = x if matrix.shape[0] <= matrix.shape[1] else x.T
        np.testing.assert_allclose(even.numpy(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_muon_makes_the_published_steps_on_hidden_weights_and_adamw_s_on_the_rest(scale):
    """In float64, a convolution as one matrix; with factors between the two rates."""
    model, twin = net(), net()
    made = Muon(0.02, weight_decay=0.1, momentum=0.9, scale=scale, adamw_lr_factor=0.5).make(model)
    # The second convolution and the first linear layer.
    weights: list[Any] = [twin[k].weight for k in (3, 6)]
    rest = [p for p in twin.parameters() if not any(p is w for w in weights)]
    adamw = torch.optim.AdamW([
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0}], lr=0.01)
    means = [np.zeros(w.shape) for w in weights]
    for step in range(N_STEPS):
        adamw.zero_grad()
        twin.zero_grad()
        loss_of(twin, step).backward()
        adamw.step()
        for k, weight in enumerate(weights):
            grad, value = weight.grad.numpy(), weight.detach().numpy()
            means[k] = 0.9 * means[k] + 0.1 * grad
            matrix = (0.1 * grad + 0.9 * means[k]).reshape(len(value), -1)
            even = matrix / np.sqrt((matrix ** 2).sum())
            for _ in range(5):
                gram = even @ even.T
                even = 3.4445 * even + (-4.7750 * gram + 2.0315 * gram @ gram) @ even
            rows, columns = even.shape
            size = (0.2 * max(rows, columns) ** 0.5 if scale != "original"
                    else max(1.0, rows / columns) ** 0.5)
            new = value * (1 - 0.02 * 0.1) - 0.02 * size * even.reshape(value.shape)
            weight.data.copy_(torch.from_numpy(new))
    close(trained(model, made), [p.detach().numpy() for p in twin.parameters()])


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_muon_s_step_of_a_matrix_is_torch_s_up_to_its_bf16(scale):
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 24), nn.Linear(24, 3))

    ours, theirs = made(), made()
    own: Any = ours[1].weight
    other: Any = theirs[1].weight
    before = own.detach().clone()
    grad = torch.randn(24, 16, generator=torch.Generator().manual_seed(2))
    own.grad, other.grad = grad.clone(), grad.clone()
    Muon(0.1, weight_decay=0.0, scale=scale).make(ours).step()
    torch.optim.Muon([other], lr=0.1, weight_decay=0.0, adjust_lr_fn=scale).step()
    moved, apart = (own - before).detach().norm(), (own - other).detach().norm()
    assert float(apart) < 0.02 * float(moved)


def test_a_model_without_hidden_weights_is_said_to_be_adamw_s_alone(caplog):
    Muon().make(MLP(hidden=8, n_layers=2).make((4,), 2))
    assert not caplog.messages
    ours, theirs = (MLP(hidden=8, n_layers=1).make((4,), 2) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    made = [Muon(0.1).make(ours), AdamW(0.1).make(theirs)]
    assert len(caplog.messages) == 1 and "no weight between its first and its head" in caplog.text
    for model, one in zip((ours, theirs), made, strict=True):
        model(torch.ones(3, 4)).square().sum().backward()
        one.step()
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def layers(model: nn.Module) -> dict[str, Place]:
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, places(model), strict=True))


def test_a_model_s_layers_are_its_blocks_and_a_norm_goes_with_the_layer_before():
    known = layers(SimpleCNN(hidden=8, width=4).make((1, 8, 8), 10))
    assert [(place.layer, place.is_weight) for place in known.values()] == [
        (0, True), (0, False), (0, False), (1, True), (1, False), (1, False),
        (2, True), (2, False), (3, True), (3, False)]
    assert [name for name, place in known.items() if place.is_hidden] == ["4.weight", "9.weight"]


def test_a_resnet_s_layers_are_its_residual_blocks():
    known = layers(resnet18(weights=None))
    assert known["conv1.weight"].layer == known["bn1.weight"].layer == 0
    assert known["layer1.0.conv2.weight"].layer == 1
    assert known["layer2.0.downsample.0.weight"].layer == 3
    assert known["layer4.1.bn2.bias"].layer == 8
    assert known["fc.bias"].layer == 9 and known["fc.bias"].n_layers == 10
    assert not known["conv1.weight"].is_hidden and not known["fc.weight"].is_hidden
    assert known["layer4.1.conv2.weight"].is_hidden


def test_a_transformer_s_tokens_and_embeddings_are_of_its_first_layer_and_not_muon_s():
    known = layers(vision_transformer.VisionTransformer(
        image_size=8, patch_size=4, num_layers=3, num_heads=2, hidden_dim=8, mlp_dim=16,
        num_classes=5))
    blocks = [name for name in known if "encoder_layer_1" in name]
    assert {known[name].layer for name in blocks} == {2}
    assert known["heads.head.weight"].layer == 4 == known["heads.head.weight"].n_layers - 1
    for name in ("class_token", "encoder.pos_embedding", "conv_proj.weight"):
        assert known[name].layer == 0 and not known[name].is_hidden
    assert known["encoder.ln.weight"].layer == 3
    hidden = [name for name, place in known.items() if place.is_hidden]
    assert len(hidden) == 3 * 4 and all("encoder_layer" in name for name in hidden)


def test_a_tied_weight_is_trained_once_and_a_norm_over_images_does_not_decay():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.norm = nn.LayerNorm([2, 4])
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

    groups = AdamW(weight_decay=0.3).make(Tied()).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [
        (1, 0.3), (2, 0.0)]


def test_a_group_has_the_rate_times_its_layer_s_factor():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 5), nn.Linear(5, 2))
    made = AdamW(0.1, head_lr_factor=3.0, layer_decay=0.5).make(model)
    rates = {id(p): group["lr"] for group in made.param_groups for p in group["params"]}
    assert [rates[id(p)] for p in model.parameters()] == pytest.approx(
        [0.025] * 4 + [0.05] * 2 + [0.3] * 2)
    assert all(group["lr"] == pytest.approx(0.1 * group["lr_scale"])
               for group in made.param_groups)


@pytest.mark.parametrize("factor", [0.1, 1.0, 10.0])
def test_a_head_s_factor_is_the_head_s_share_of_a_step(factor):
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    made = SGD(0.1, momentum=0.0, head_lr_factor=factor).make(model)
    loss_of(model, 0).backward()
    made.step()
    for k, (old, new) in enumerate(zip(before, model.parameters(), strict=True)):
        assert new.grad is not None
        rate = 0.1 * (factor if k >= len(before) - 2 else 1.0)
        torch.testing.assert_close(new.detach(), old - rate * new.grad)


@pytest.mark.parametrize("make,others", [
    (lambda: SGD(0.1, momentum=0.0, bias_lr_factor=64.0, head_lr_factor=0.5), 1.0),
    (lambda: Muon(0.1, bias_lr_factor=64.0, head_lr_factor=0.5, adamw_lr_factor=0.25), 0.25)],
    ids=["sgd", "muon"])
def test_biases_and_norms_have_a_rate_of_their_own(make, others):
    """Beside the factors of head and AdamW; the second weight is Muon's."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 5), nn.Linear(5, 2))
    made = make().make(model)
    rates = {id(p): group["lr"] for group in made.param_groups for p in group["params"]}
    expected = {"0.weight": others, "0.bias": 64 * others, "1.weight": 64 * others,
                "1.bias": 64 * others, "2.weight": 1.0, "2.bias": 64 * others,
                "3.weight": 0.5 * others, "3.bias": 32 * others}
    assert {name: rates[id(p)] / 0.1 for name, p in model.named_parameters()} == (
        pytest.approx(expected))


def test_a_model_without_parameters_is_refused():
    with pytest.raises(InputError, match="Flatten has no parameters to train"):
        AdamW().make(nn.Flatten())


@pytest.mark.parametrize(("name", "kind"), [
    ("sgd", SGD), ("adam", Adam), ("adamw", AdamW), ("AdamW", AdamW), ("rms-prop", RMSprop),
    ("adagrad", Adagrad), ("adadelta", Adadelta), ("lamb", LAMB), ("muon", Muon)])
def test_an_optimizer_of_a_name_has_the_given_rate_and_decay_and_else_its_own(name, kind):
    assert optimizer(name) == kind()
    assert optimizer(name, lr=0.3, weight_decay=0.2) == kind(0.3, weight_decay=0.2)


def test_amsgrad_is_adam_with_its_switch_on():
    assert optimizer("amsgrad", lr=0.3) == Adam(0.3, amsgrad=True)


WRONG: Any = {"flag": "yes", "scale": "adam", "betas": 0.9, "text": "0.1"}


@pytest.mark.parametrize(("make", "told"), [
    (lambda: optimizer("adamm"), "optimizer 'adamm': accepted are sgd, adam, amsgrad, adamw, "
     "rmsprop, adagrad, adadelta, lamb, muon; did you mean 'adam'?"),
    (lambda: optimizer(WRONG["betas"]), "optimizer 0.9: accepted are sgd"),
    (lambda: optimizer("adamw", momentum=0.9), "optimizer 'adamw': has no field 'momentum'"),
    (lambda: optimizer("sgd", momentm=0.9), "did you mean 'momentum'?"),
    (lambda: optimizer("amsgrad", amsgrad=False), "has no field 'amsgrad'"),
    (lambda: optimizer("sgd", lr=-1.0), "SGD.lr: must be in (0, inf), got -1.0"),
    (lambda: optimizer("lamb", lr=WRONG["text"]), "LAMB.lr: must be a number, got '0.1'"),
    (lambda: AdamW(weight_decay=-1.0), "AdamW.weight_decay"),
    (lambda: Adam(l1=-1.0), "Adam.l1"), (lambda: Adam(betas=WRONG["betas"]), "Adam.betas"),
    (lambda: Adam(eps=-1.0), "Adam.eps"), (lambda: Adam(amsgrad=WRONG["flag"]), "Adam.amsgrad"),
    (lambda: SGD(decay_all=WRONG["flag"]),
     "SGD.decay_all: must be True or False, got 'yes'"),
    (lambda: SGD(nesterov=WRONG["flag"]), "SGD.nesterov"),
    (lambda: SGD(decoupled_decay=WRONG["flag"]), "SGD.decoupled_decay"),
    (lambda: SGD(head_lr_factor=0.0), "SGD.head_lr_factor: must be in (0, inf), got 0.0"),
    (lambda: SGD(bias_lr_factor=-1.0), "SGD.bias_lr_factor: must be in (0, inf), got -1.0"),
    (lambda: SGD(layer_decay=1.5), "SGD.layer_decay: must be in (0, 1], got 1.5"),
    (lambda: RMSprop(alpha=1.0), "RMSprop.alpha"), (lambda: RMSprop(momentum=-0.1), "momentum"),
    (lambda: Adadelta(rho=1.0), "Adadelta.rho"), (lambda: Adagrad(eps=-1.0), "Adagrad.eps"),
    (lambda: LAMB(betas=(0.9, 1.0)), "LAMB.betas"),
    (lambda: Muon(scale=WRONG["scale"]),
     "Muon.scale: must be 'match_rms_adamw' or 'original', got 'adam'"),
    (lambda: Muon(n_iterations=0), "Muon.n_iterations"),
    (lambda: Muon(adamw_lr_factor=0.0), "Muon.adamw_lr_factor"),
    (lambda: Muon(momentum=1.0), "Muon.momentum"),
])
def test_a_fault_of_an_optimizer_is_one_line_that_names_it(make, told):
    with pytest.raises(InputError) as caught:
        make()
    assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_is_made_again_from_its_description(name, tmp_path):
    spec = optimizer(name, lr=0.3, weight_decay=0.2, l1=0.1, layer_decay=0.9)
    recipe = Recipe(data=digits(make_run(tmp_path)), model=MLP(), optimizer=spec)
    entry = json.loads(json.dumps(describe(recipe)["optimizer"]))
    kinds = {kind.__name__: kind for kind, _ in OPTIMIZERS.values()}
    assert kinds[entry.pop("type")](**entry) == spec


def make_run(folder: Path) -> Run:
    return Run(epochs=1, seed=0, device="cpu", dir=folder)


@pytest.mark.parametrize("name", NAMES)
def test_the_range_test_picks_a_rate_that_trains_for_every_optimizer(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HPO_CACHE_DIR", str(tmp_path / "cache"))
    run = make_run(tmp_path)
    spec = optimizer(name, layer_decay=0.9, l1=1e-6)
    recipe = Recipe(data=digits(run), model=SimpleCNN(hidden=64), optimizer=spec, batch_size=64)
    found = lr_range(lambda _: recipe, run)
    low, high = spec.sweep_bounds
    assert found.pick is not None and low < found.pick < high
    picked = dataclasses.replace(recipe, optimizer=dataclasses.replace(spec, lr=found.pick))
    (epoch,) = Trainer(picked, run).epochs()
    assert epoch["val_accuracy"] > 0.6


def test_a_sweep_keeps_the_factors_between_the_groups_rates():
    model = net()
    made = AdamW(0.1, head_lr_factor=4.0).make(model)
    seen = []

    def next_loss() -> torch.Tensor:
        seen.append([group["lr"] for group in made.param_groups])
        return loss_of(model, 0)

    sweep(model, made, next_loss, [1e-4, 1e-3])
    scales = [group["lr_scale"] for group in made.param_groups]
    assert sorted(set(scales)) == [1.0, 4.0]
    assert seen == [[rate * scale for scale in scales] for rate in (1e-4, 1e-3)]
    assert [group["lr"] for group in made.param_groups] == [0.1 * scale for scale in scales]


def test_numpy_numbers_of_a_grid_leave_a_state_that_torch_reads_alone(tmp_path):
    half: Any = np.float64(0.5)
    for spec in (SGD(half, momentum=half), RMSprop(half, alpha=half), Adadelta(half, rho=half),
                 LAMB(half, betas=(half, half)), Muon(half, momentum=half)):
        model = net()
        made = spec.make(model)
        loss_of(model, 0).backward()
        made.step()
        torch.save(made.state_dict(), tmp_path / "a.pt")
        torch.load(tmp_path / "a.pt", weights_only=True)


DOCS = (Path(__file__).parent.parent / "docs" / "optimizers.md").read_text()


def table(heading: str) -> dict[str, tuple[str, set[str]]]:
    """Return the class and the last column's fields of each row of a table in the docs."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in DOCS.split(f"## {heading}")[1].split("\n## ")[0].splitlines()
            if line.startswith("| `")]
    return {name: (row[1].strip("`"), set(row[-1].replace("`", "").split(", ")))
            for row in rows for name in row[0].replace("`", "").split(", ")}


def names(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_the_docs_list_every_optimizer_and_schedule_with_its_fields():
    common = names(SGD) & names(AdamW)
    assert table("Optimizers") == {name: (kind.__name__, names(kind) - common)
                                   for name, (kind, _) in OPTIMIZERS.items()}
    assert table("Schedules") == {name: (kind.__name__, names(kind))
                                  for name, (kind, _) in SCHEDULES.items()}
    assert all(f"`{name}" in DOCS for name in common)


def test_the_docs_study_makes_each_of_its_recipes(tmp_path):
    scope: dict[str, Any] = {}
    exec(DOCS.split("```python\n")[1].split("```")[0], scope)
    for method, curve in itertools.product(scope["SPACE"]["method"].choices,
                                           scope["SPACE"]["curve"].choices):
        made = scope["build"](make_run(tmp_path), method=method, curve=curve, lr=0.01,
                              weight_decay=1e-3)
        assert made.optimizer == optimizer(method, lr=0.01, weight_decay=1e-3)
        assert made.schedule == schedule(curve)
