"""The speed of one trial: hpo's data path and epoch against a bare loop and a plain script.

    python benchmarks/training.py [--rounds 3] [--part data|epoch|both]

`data` counts the augmented, normalised 32x32x3 images of a CPU-second on one thread: crop with a
padding of 4 and flip, (a) by PIL and torchvision for each image, as most scripts do, (b) by hpo,
from the stored bytes to the batch that the net is given. Both must have the same mean and
deviation. `epoch` counts the CPU time of the same training of the same net on one thread by (a) a
bare loop over bytes in memory that calls hpo's crop and flip, with hpo's optimizer, memory format
and schedule and nothing else, (b) hpo's own loop, (c) a plain script: a DataLoader with PIL
transforms, torch's default optimizer and `.item()` in every step. Sides take turns, each in a
process of its own; imports, data and a first epoch are not counted. All must reach the same
accuracy. Prints FAIL where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Images of a CPU-second; hpo's epoch against the bare loop's.
LEAST_IMAGES, LEAST_OF_BARE = 50_000, 0.95
# How far the sides' accuracies may be apart: three deviations of a difference on 1,000 rows.
ACCURACY_NEAR = 0.03
N_TRAIN, N_VAL, BATCH, EPOCHS, LR, SEED = 4_000, 1_000, 64, 3, 1e-2, 0
SIDES = {"bare": "(a) bare loop", "hpo": "(b) hpo", "script": "(c) plain script"}


def pictures() -> tuple[Any, Any, Any, Any]:
    """Return train and validation images [n, 3, 32, 32] uint8 and labels: coloured digits.

    scikit-learn's digits, four times as large, in a light colour on a dark one, with noise.
    """
    import numpy as np
    from sklearn.datasets import load_digits

    rng = np.random.default_rng(SEED)
    images, labels = load_digits(return_X_y=True)
    images = np.asarray(images).reshape(-1, 8, 8) / 16
    # Of the first rows for training, of the others to validate: no digit is in both.
    n_known = 1_400
    rows = np.concatenate([rng.integers(0, n_known, N_TRAIN),
                           rng.integers(n_known, len(images), N_VAL)])
    paper, ink = rng.random((2, len(rows), 3, 1, 1)) * 0.4 + [[[[[0.0]]]], [[[[0.6]]]]]
    large = images[rows].repeat(4, axis=1).repeat(4, axis=2)[:, None]
    mixed = large * ink + (1 - large) * paper + rng.normal(0, 0.05, (len(rows), 3, 32, 32))
    x = (mixed.clip(0, 1) * 255).round().astype(np.uint8)
    y = np.asarray(labels)[rows].astype(np.int64)
    return x[:N_TRAIN], y[:N_TRAIN], x[N_TRAIN:], y[N_TRAIN:]


def moments(x: Any) -> tuple[Any, Any]:
    """Return mean and deviation of each channel, in 0..255."""
    return x.mean((0, 2, 3)), x.std((0, 2, 3))


def trainer(epochs: int, **fields: Any) -> Any:
    """Return hpo's trainer of the pictures."""
    from hpo import Run
    from hpo.train import AdamW, OneCycle, RandomCrop, RandomFlip, Recipe, tensors
    from hpo.train.loop import Trainer

    x, y, val_x, val_y = pictures()
    recipe = Recipe(**{
        "data": tensors(x, y, val=(val_x, val_y)), "model": network, "optimizer": AdamW(lr=LR),
        "schedule": OneCycle(), "batch_size": BATCH, "eval_batch_size": 500,
        "augment": (RandomCrop(4), RandomFlip()), **fields})
    return Trainer(recipe, Run(epochs=epochs, seed=SEED, device="cpu", dir=Path(".")))


def network() -> Any:
    """Return the net that all sides train."""
    from hpo.train import SimpleCNN

    return SimpleCNN(hidden=64, dropout=0.1, width=16).make((3, 32, 32), 10)


def pil_dataset() -> Any:
    """Return the training pictures as most scripts read them: PIL images and transforms."""
    from PIL import Image
    from torchvision import transforms

    x, y, _, _ = pictures()
    mean, std = moments(x)
    images = [Image.fromarray(one.transpose(1, 2, 0)) for one in x]
    change = transforms.Compose([
        transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(),
        transforms.ToTensor(), transforms.Normalize((mean / 255).tolist(), (std / 255).tolist())])

    class Pictures:
        def __len__(self) -> int:
            return len(images)

        def __getitem__(self, row: int) -> tuple[Any, int]:
            return change(images[row]), int(y[row])

    return Pictures()


def data_by_pil() -> tuple[Callable[[], Iterator[Any]], int]:
    """(a): each image through PIL."""
    import torch
    from torch.utils.data import DataLoader

    torch.manual_seed(SEED)
    loader = DataLoader(pil_dataset(), batch_size=512, shuffle=True)
    return lambda: iter(loader), 1


def data_by_hpo() -> tuple[Callable[[], Iterator[Any]], int]:
    """(b): a batch at a time."""
    one = trainer(1, batch_size=512)
    return lambda: one.batches(512, one.steps_per_epoch), 12


def data(side: str) -> dict[str, Any]:
    """Return a data path's images per CPU-second, and the mean and deviation of what it gives."""
    import torch

    torch.set_num_threads(1)
    passes, n_passes = data_by_pil() if side == "pil" else data_by_hpo()
    seen = torch.cat([images for images, _ in passes()])
    began = time.process_time()
    n = sum(len(images) for _ in range(n_passes) for images, _ in passes())
    took = time.process_time() - began
    return {"per_s": n / took, "mean": float(seen.mean()), "std": float(seen.std())}


def bare() -> dict[str, Any]:
    """(a): a loop over bytes in memory."""
    import torch
    from torch.nn.functional import cross_entropy

    from hpo.train import OneCycle, RandomCrop, RandomFlip

    x, y, val_x, val_y = (torch.from_numpy(one) for one in pictures())
    mean, std = (torch.from_numpy(one).float().view(3, 1, 1) for one in moments(x.numpy()))
    crop, flip, draws = RandomCrop(4), RandomFlip(), torch.Generator().manual_seed(SEED)

    def ready(images: Any) -> Any:
        floats = images.to(torch.float32, memory_format=torch.channels_last)
        return floats.sub_(mean).div_(std)

    torch.manual_seed(SEED)
    model = network().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    n_steps = -(-len(y) // BATCH)
    rates = iter(OneCycle().rates((EPOCHS + 1) * n_steps, LR))
    took, right = [], 0.0
    for _ in range(EPOCHS + 1):
        began = time.process_time()
        model.train()
        losses = []
        for part in torch.randperm(len(y)).split(BATCH):
            optimizer.param_groups[0]["lr"] = next(rates)
            images = ready(flip(crop(x.index_select(0, part), draws), draws))
            loss = cross_entropy(model(images), y[part])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        model.eval()
        with torch.inference_mode():
            parts = zip(val_x.split(500), val_y.split(500), strict=True)
            right = torch.stack([(model(ready(images)).argmax(1) == labels).sum()
                                 for images, labels in parts]).sum()
            _, right = torch.stack([torch.stack(losses).mean(), right]).tolist()
        took.append(time.process_time() - began)
    return {"seconds": statistics.median(took[1:]), "accuracy": right / len(val_y)}


def by_hpo() -> dict[str, Any]:
    """(b): hpo's loop, with every metric it gives."""
    began, took, accuracy = time.process_time(), [], 0.0
    for metrics in trainer(EPOCHS + 1).epochs():
        took.append(time.process_time() - began)
        began, accuracy = time.process_time(), metrics["val_accuracy"]
    return {"seconds": statistics.median(took[1:]), "accuracy": accuracy}


def script() -> dict[str, Any]:
    """(c): what most people write."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, TensorDataset

    x, _, val_x, val_y = pictures()
    mean, std = (torch.from_numpy(one).float().view(3, 1, 1) for one in moments(x))
    val_images = (torch.from_numpy(val_x).float() - mean) / std
    train = DataLoader(pil_dataset(), batch_size=BATCH, shuffle=True)
    val = DataLoader(TensorDataset(val_images, torch.from_numpy(val_y)), batch_size=500)
    torch.manual_seed(SEED)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=LR, total_steps=len(train) * (EPOCHS + 1))
    took, right = [], 0.0
    for _ in range(EPOCHS + 1):
        began = time.process_time()
        model.train()
        total = 0.0
        for images, labels in train:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        model.eval()
        right = 0.0
        with torch.no_grad():
            for images, labels in val:
                right += (model(images).argmax(1) == labels).sum().item()
        took.append(time.process_time() - began)
    return {"seconds": statistics.median(took[1:]), "accuracy": right / len(val_y)}


def one(side: str) -> dict[str, Any]:
    """Run one side in a process of its own, on one core."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="hpo-training-") as cache:
        done = subprocess.run([sys.executable, __file__, "--side", side], text=True, check=True,
                              env={**env, "HPO_CACHE_DIR": cache}, stdout=subprocess.PIPE,
                              preexec_fn=_one_core)
    return json.loads(done.stdout.splitlines()[-1])


def _one_core() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def compare_data(n_rounds: int) -> bool:
    """Print the table of the data paths and return whether the goal is met."""
    rounds = [{side: one(f"data-{side}") for side in ("pil", "hpo")} for _ in range(n_rounds)]
    print(f"\ndata: {N_TRAIN} images of 32x32x3, crop and flip, one thread, "
          f"median of {n_rounds} rounds")
    print(f"  {'':<22}{'images/CPU-s':>14}{'of (a)':>9}{'mean':>9}{'deviation':>11}")
    for side, label in (("pil", "(a) PIL, by the image"), ("hpo", "(b) hpo")):
        found = rounds[-1][side]
        print(f"  {label:<22}{_median(rounds, side, 'per_s'):>14,.0f}"
              f"{_ratio(rounds, side, 'pil', 'per_s'):>9.2f}{found['mean']:>9.3f}"
              f"{found['std']:>11.3f}")
    ours, pil = rounds[-1]["hpo"], rounds[-1]["pil"]
    same = abs(ours["mean"] - pil["mean"]) < 0.01 and abs(ours["std"] - pil["std"]) < 0.01
    rate = _median(rounds, "hpo", "per_s")
    good = same and rate >= LEAST_IMAGES
    print(f"  {'ok' if good else 'FAIL'}: {rate:,.0f} images a CPU-second (goal "
          f"{LEAST_IMAGES:,}), {'the same' if same else 'OTHER'} mean and deviation")
    return good


def compare_epochs(n_rounds: int) -> bool:
    """Print the table of the epochs and return whether the goals are met."""
    rounds = [{side: one(side) for side in SIDES} for _ in range(n_rounds)]
    print(f"\nepoch: {N_TRAIN} images of 32x32x3, SimpleCNN of width 16, batches of {BATCH}, one "
          f"thread, median of {n_rounds} rounds")
    print(f"  {'':<22}{'CPU-s':>9}{'images/CPU-s':>14}{'of bare':>9}{'of script':>11}"
          f"{'accuracy':>10}")
    for side, label in SIDES.items():
        seconds = _median(rounds, side, "seconds")
        print(f"  {label:<22}{seconds:>9.2f}{N_TRAIN / seconds:>14,.0f}"
              f"{1 / _ratio(rounds, side, 'bare', 'seconds'):>9.2f}"
              f"{1 / _ratio(rounds, side, 'script', 'seconds'):>11.2f}"
              f"{_median(rounds, side, 'accuracy'):>10.4f}")
    accuracies = [_median(rounds, side, "accuracy") for side in SIDES]
    same = max(accuracies) - min(accuracies) <= ACCURACY_NEAR and min(accuracies) > 0.8
    of_bare = 1 / _ratio(rounds, "hpo", "bare", "seconds")
    of_script = 1 / _ratio(rounds, "hpo", "script", "seconds")
    good = same and of_bare >= LEAST_OF_BARE and of_script >= 1.0
    print(f"  {'ok' if good else 'FAIL'}: hpo reaches {of_bare:.2f} of the bare loop (goal "
          f"{LEAST_OF_BARE}) and {of_script:.2f} times the plain script, at "
          f"{'equal' if same else 'UNEQUAL'} accuracy")
    return good


def _median(rounds: list[dict[str, dict[str, float]]], side: str, field: str) -> float:
    return statistics.median(r[side][field] for r in rounds)


def _ratio(rounds: list[dict[str, dict[str, float]]], side: str, base: str, field: str) -> float:
    """Return the median over rounds of a side's figure against another's of the same round."""
    return statistics.median(r[side][field] / r[base][field] for r in rounds)


def main() -> int:
    """Compare the sides; exit code 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=("data", "epoch", "both"), default="both")
    parser.add_argument("--side", choices=("data-pil", "data-hpo", *SIDES))
    args = parser.parse_args()
    if args.side:
        run: dict[str, Callable[[], dict[str, Any]]] = {
            "data-pil": lambda: data("pil"), "data-hpo": lambda: data("hpo"),
            "bare": bare, "hpo": by_hpo, "script": script}
        print(json.dumps(run[args.side]()))
        return 0
    parts = {"data": compare_data, "epoch": compare_epochs}
    chosen = parts.values() if args.part == "both" else [parts[args.part]]
    return 0 if all([compare(args.rounds) for compare in chosen]) else 1


if __name__ == "__main__":
    sys.exit(main())
