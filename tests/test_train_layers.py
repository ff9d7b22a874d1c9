"""The layers that networks choose from: each against its published formula in float64."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from hpo.train.layers import Layout, Residual, activation, drop_path, n_groups, norm, rising

SHAPES: dict[Layout, tuple[int, ...]] = {
    "rows": (6, 32), "images": (3, 32, 4, 5), "tokens": (3, 7, 32)}
CHANNEL_AXIS = {"rows": 1, "images": 1, "tokens": 2}


def case(kind: str, layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return an input, the norm's output, and its weight and bias shaped to broadcast."""
    rng = np.random.default_rng(0)
    x = rng.normal(2.0, 3.0, SHAPES[layout])
    layer = norm(kind, 32, layout).double()
    names = dict(layer.named_parameters())
    with torch.no_grad():
        for value in names.values():
            value.copy_(torch.from_numpy(rng.normal(size=tuple(value.shape))))
    got = layer(torch.from_numpy(x)).detach().numpy()
    shape = [1] * x.ndim
    shape[CHANNEL_AXIS[layout]] = 32
    found = {name.split(".")[-1]: value.detach().numpy().reshape(shape)
             for name, value in names.items()}
    return x, got, found["weight"], found.get("bias", np.zeros(1))


@pytest.mark.parametrize("layout", SHAPES)
def test_rms_norm_is_the_formula_over_the_channels(layout: Layout) -> None:
    x, got, weight, _ = case("rms", layout)
    scale = np.sqrt((x**2).mean(CHANNEL_AXIS[layout], keepdims=True) + 1e-6)
    np.testing.assert_allclose(got, x / scale * weight, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", SHAPES)
def test_rms_norm_of_half_precision_is_the_formula_but_for_the_last_rounding(
    layout: Layout, dtype: torch.dtype
) -> None:
    """Without torch's warning that it computes in two types, which is an error here."""
    layer = norm("rms", 32, layout)
    x = torch.randn(SHAPES[layout], generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        got = layer(x)
    exact = x.double() / (x.double().square().mean(CHANNEL_AXIS[layout], True) + 1e-6).sqrt()
    assert got.dtype == dtype
    # Half the distance of two neighbours, and what float32 adds.
    near = torch.finfo(dtype).eps / 2 * 1.001
    torch.testing.assert_close(got.double(), exact, rtol=near, atol=0.0)


@pytest.mark.parametrize("layout", SHAPES)
def test_layer_norm_is_the_formula_over_the_channels(layout: Layout) -> None:
    x, got, weight, bias = case("layer", layout)
    axis = CHANNEL_AXIS[layout]
    centred = x - x.mean(axis, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis, keepdims=True) + 1e-5) * weight + bias
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layout", SHAPES)
def test_batch_norm_is_the_formula_over_all_but_the_channels(layout: Layout) -> None:
    x, got, weight, bias = case("batch", layout)
    axes = tuple(axis for axis in range(x.ndim) if axis != CHANNEL_AXIS[layout])
    centred = x - x.mean(axes, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axes, keepdims=True) + 1e-5) * weight + bias
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layout", SHAPES)
def test_group_norm_is_the_formula_over_each_group_and_all_places(layout: Layout) -> None:
    x, got, weight, bias = case("group", layout)
    axis = CHANNEL_AXIS[layout]
    first = np.moveaxis(x, axis, 1)
    grouped = first.reshape(len(x), 2, -1)
    centred = grouped - grouped.mean(2, keepdims=True)
    scaled = (centred / np.sqrt((centred**2).mean(2, keepdims=True) + 1e-5)).reshape(first.shape)
    expected = np.moveaxis(scaled, 1, axis) * weight + bias
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


def test_no_norm_changes_nothing() -> None:
    x = torch.randn(3, 32)
    assert norm("none", 32, "rows")(x) is x


@pytest.mark.parametrize(("channels", "expected"), [
    (1, 1), (17, 1), (31, 1), (32, 2), (64, 4), (96, 6), (100, 5), (512, 32)])
def test_group_norm_has_the_most_groups_of_sixteen_or_more_channels(
    channels: int, expected: int
) -> None:
    assert n_groups(channels) == expected


def test_drop_path_leaves_out_whole_rows_and_scales_the_others_up() -> None:
    x = torch.randn(20_000, 3, 2, dtype=torch.float64)
    layer = drop_path(0.25)
    torch.manual_seed(0)
    out = layer(x)
    kept = (out != 0).flatten(1).any(1)
    torch.testing.assert_close(out[kept], x[kept] / 0.75, rtol=1e-12, atol=0.0)
    assert torch.equal(out[~kept], torch.zeros_like(out[~kept]))
    # 15,000 of 20,000; a deviation is 61.
    assert abs(int(kept.sum()) - 15_000) < 300
    assert torch.equal(layer.eval()(x), x)


def test_drop_path_rises_in_a_line_to_its_rate_at_the_last_block() -> None:
    assert rising(0.4, 4) == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_a_residual_adds_its_branch_or_only_the_shortcut_where_the_row_is_left_out() -> None:
    branch, shortcut = nn.Linear(4, 6), nn.Linear(4, 6)
    block = Residual(branch, 0.5, shortcut=shortcut, after=nn.ReLU())
    x = torch.randn(200, 4)
    torch.manual_seed(0)
    out = block(x)
    short, long = shortcut(x), branch(x) / 0.5
    left_out = (out - short.relu()).abs().amax(1) < 1e-6
    taken = (out - (short + long).relu()).abs().amax(1) < 1e-5
    assert bool((left_out | taken).all()) and 60 < int(left_out.sum()) < 140
    torch.testing.assert_close(block.eval()(x), (short + branch(x)).relu())


@pytest.mark.parametrize(("kind", "formula"), [
    ("relu", lambda x: np.maximum(x, 0)),
    ("silu", lambda x: x / (1 + np.exp(-x))),
    ("gelu", lambda x: np.array([v * (1 + cast(Any, torch.erf)(torch.tensor(v / 2**0.5)).item())
                                 / 2 for v in x])),
    ("selu", lambda x: 1.0507009873554805 * np.where(
        x > 0, x, 1.6732632423543772 * (np.exp(x) - 1)))])
def test_an_activation_is_its_formula(kind: str, formula: Any) -> None:
    x = np.linspace(-3, 3, 25)
    got = activation(kind)(torch.from_numpy(x.copy())).numpy()
    np.testing.assert_allclose(got, formula(x), rtol=1e-9, atol=1e-12)
