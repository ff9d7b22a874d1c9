"""The study `cifar_fast` and its benchmark: what can be known of them without a GPU."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import environment
from PIL import Image

from hpo import Run, discover
from hpo.train import Recipe, SpeedNet
from hpo.train.loop import Trainer

ROOT = Path(__file__).resolve().parent.parent
HUES = {"blue": (40, 60, 200), "green": (50, 180, 60), "red": (200, 50, 40)}


def run_of(**fields: Any) -> Run:
    return Run(**{"epochs": 2, "seed": 0, "device": "cpu", "dir": Path("."), **fields})


def recipe_of(run: Run) -> Recipe:
    study = discover.load("cifar_fast")
    assert study.build is not None
    return study.build(run, **study.defaults)


def test_its_recipe_is_compiled_with_cuda_graphs_on_a_gpu_and_not_on_a_cpu() -> None:
    recipe = recipe_of(run_of(device="cuda"))
    assert recipe.compile == "reduce-overhead" and recipe.precision == "auto"
    assert recipe.model == SpeedNet()
    # Nine tenths of CIFAR-10's training rows, and the rest: whole batches of one shape each.
    assert 45_000 % recipe.batch_size == 5_000 % recipe.eval_batch_size == 0
    assert recipe_of(run_of()).compile is False


def test_it_trains_a_folder_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPO_CACHE_DIR", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for split, n in (("train", 20), ("test", 2)):
        for name, hue in HUES.items():
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for k in range(n):
                pixels = rng.normal(hue, 40, (32, 32, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{k:02}.png")
    run = run_of(data_dir=tmp_path / "images")
    epochs = list(Trainer(recipe_of(run), run).epochs())
    assert [np.isfinite(epoch["val_loss"]) for epoch in epochs] == [True, True]


def speedrun(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ROOT / "benchmarks" / "speedrun.py"), *words],
                          text=True, capture_output=True, timeout=300,
                          env={**environment(), "CUDA_VISIBLE_DEVICES": ""})


def test_the_benchmark_says_in_one_line_that_there_is_no_gpu_and_ends_with_2() -> None:
    done = speedrun()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "needs a CUDA GPU" in done.stderr


def test_the_benchmark_s_smoke_test_learns() -> None:
    done = speedrun("--small")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok: " in done.stdout


def test_the_benchmark_s_busy_time_counts_kernels_that_overlap_once(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark: Any = importlib.import_module("speedrun")
    assert benchmark.busy([(5, 6), (0, 2), (1, 3), (1.5, 2.5), (6, 8)]) == 6.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_compiled_half_precision_step_learns() -> None:
    from test_train_speed_net import pictures

    from hpo.train import tensors

    x, y = pictures(500, 1)
    recipe = recipe_of(run_of(device="cuda"))
    fields = {name: getattr(recipe, name) for name in (
        "optimizer", "schedule", "loss", "ema", "augment", "compile")}
    small = Recipe(data=tensors(x, y, val=pictures(100, 2)), model=SpeedNet(width=8),
                   batch_size=50, **fields)
    run = run_of(device="cuda", epochs=8)
    assert list(Trainer(small, run).epochs())[-1]["val_accuracy"] > 0.9
