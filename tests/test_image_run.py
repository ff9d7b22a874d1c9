"""The shipped study `cifar` on a folder of image files, from command to registry and report."""

from __future__ import annotations

import json
import os
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from commands import hpo, states, trials
from PIL import Image

N_TRAIN, N_TEST, EPOCHS = 40, 10, 3
HUES = {"blue": (40, 60, 200), "green": (50, 180, 60), "red": (200, 50, 40)}
CHANCE = 1 / len(HUES)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Three classes of noisy colour as PNG files: train/<class>/ and test/<class>/."""
    rng = np.random.default_rng(0)
    for split, n in (("train", N_TRAIN), ("test", N_TEST)):
        for name, hue in HUES.items():
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for k in range(n):
                pixels = rng.normal(hue, 40, (32, 32, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{k:02}.png")
    return tmp_path / "images"


def spoil(folder: Path) -> None:
    """Overwrite all image files with as many zeros, so that none can be decoded any more."""
    for path in folder.rglob("*.png"):
        found = path.stat()
        path.write_bytes(bytes(found.st_size))
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def test_cifar_learns_a_folder_of_images_with_two_workers_and_decodes_it_once(
    tmp_path: Path, images: Path
) -> None:
    env = {"HPO_CACHE_DIR": str(tmp_path / "cache")}
    words = ("run", "--study", "cifar", "--data-dir", images, "--data-fraction", 0.75,
             "--epochs", EPOCHS, "--workers", 2, "--devices", "cpu", "--top-k", 1,
             "--confirm-seeds", 2, "--pruner", "none", "--n-trials")
    said = hpo(tmp_path, *words, 3, env=env).stdout
    assert "data: 81 train, 9 validation and 30 test images of 3x32x32, 3 classes" in said
    for study, n in {"cifar/grid": 18, "cifar": 3}.items():
        found = trials(tmp_path, study)
        assert states(found) == ["COMPLETE"] * n
        assert all(sorted(t.intermediate_values) == list(range(EPOCHS)) for t in found)
    assert max(t.value or 0.0 for t in trials(tmp_path, "cifar")) > 2 * CHANCE
    assert len({t.user_attrs["worker"] for t in trials(tmp_path, "cifar/grid")}) == 2

    rows = json.loads(hpo(tmp_path, "registry", "list", "--json").stdout)
    assert {"search", "grid", "default"} <= {row["phase"] for row in rows}
    for row in rows:
        tests = [one["test_metrics"]["test_accuracy"] for one in row["scores"]]
        assert row["seeds"] == [1, 2] and row["test_mean"] == statistics.mean(tests)
        assert row["data_fingerprint"] and row["checkpoint"]
    best = next(row for row in rows if row["phase"] == "search")
    assert best["val_mean"] > 2 * CHANCE and best["test_mean"] > 2 * CHANCE

    folder = tmp_path / "hpo-runs/reports/cifar"
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+\.png)\)", (folder / "report.md").read_text())
    assert {"progress.png", "curves.png", "lr_range.png"} <= set(pictures)
    for name in pictures:
        with Image.open(folder / name) as picture:
            assert min(picture.size) > 200

    spoil(images)
    hpo(tmp_path, *words, 4, env=env)
    assert states(trials(tmp_path, "cifar")) == ["COMPLETE"] * 4
    assert len(list((tmp_path / "cache/data").glob("*/meta.json"))) == 1
