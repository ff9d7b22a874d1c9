"""What the tuner costs: the same digits trials in a bare loop, by hpo, and by plain Optuna.

    python benchmarks/overhead.py [--rounds 3] [--net cnn|mlp|both]

Each side trains the same params for the same epochs on one thread of one and the same core, which
hpo's parent and worker share; the sides take turns (A B C A B C); imports and a first step count
as start-up. (a) is a bare PyTorch loop over tensors in memory, with the same net, fused optimizer
and memory format as hpo's own, and no tuner; (b) is `hpo run --phases grid` with one worker; (c)
is the Optuna script most people write: enqueued params, SQLite, a DataLoader, a report an epoch.
Prints trials per minute with and without start-up, and FAIL where (b) misses its goal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Goals of (b) against (a), start-up apart.
GOALS = {"cnn": 0.9, "mlp": 0.75}
EPOCHS = {"cnn": 8, "mlp": 10}
CELLS = {
    "cnn": {"lr": [1e-3, 3e-3, 1e-2], "weight_decay": [1e-4, 1e-2], "dropout": [0.1, 0.3]},
    "mlp": {"lr": [1e-3, 3e-3, 1e-2], "weight_decay": [1e-4, 1e-3, 1e-2],
            "dropout": [0.1, 0.3]},
}
BATCH, SEED, HIDDEN = 64, 0, 64

STUDY = '''
from hpo import Float, StudySpec
from hpo.train import MLP, AdamW, OneCycle, Recipe, SimpleCNN, digits

SPACE = {"lr": Float(1e-4, 1e-1, log=True), "weight_decay": Float(1e-6, 1e-1, log=True),
         "dropout": Float(0.0, 0.5)}

def build(run, *, lr, weight_decay, dropout):
    return Recipe(data=digits(run), model=NET(hidden=64, dropout=dropout),
                  optimizer=AdamW(lr=lr, weight_decay=weight_decay, decay_all=True),
                  schedule=OneCycle(), batch_size=64)

STUDY = StudySpec(space=SPACE, build=build, maximize="val_accuracy", epochs=EPOCHS, grid=GRID)
'''


def cells(net: str) -> list[dict[str, float]]:
    """Return the params that every side trains, in order."""
    return [dict(zip(CELLS[net], values, strict=True))
            for values in itertools.product(*CELLS[net].values())]


def split() -> tuple[Any, Any, Any, Any]:
    """Return train and validation images and labels: as many as hpo's own split has."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    rest, _ = train_test_split(range(len(labels)), test_size=359, stratify=labels, random_state=0)
    train, val = train_test_split(rest, test_size=288, stratify=labels[rest], random_state=SEED)
    mean, std = images[train].mean(), images[train].std()
    images = (images - mean) / std
    return images[train], labels[train], images[val], labels[val]


def network(net: str, dropout: float) -> Any:
    """Return the net that all sides train."""
    from hpo.train import MLP, SimpleCNN

    if net == "mlp":
        return MLP(HIDDEN, dropout).make((1, 8, 8), 10)
    return SimpleCNN(HIDDEN, dropout).make((1, 8, 8), 10)


def rates(n_steps: int, lr: float) -> list[float]:
    """Return the one-cycle rates of hpo's own schedule."""
    from hpo.train.schedules import OneCycle

    return list(OneCycle().rates(n_steps, lr))


def warm_up(net: str, images: Any, labels: Any) -> None:
    """Import what a first trial imports and make one step: hpo does so before its first trial."""
    import torch
    from torch.nn.functional import cross_entropy

    model = network(net, 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rates(1, 1e-3)[0], fused=True)
    cross_entropy(model(images[:BATCH]), labels[:BATCH]).backward()
    optimizer.step()


def bare(net: str) -> dict[str, Any]:
    """(a): a loop over tensors in memory, and nothing else."""
    import torch
    from torch.nn.functional import cross_entropy

    train_x, train_y, val_x, val_y = split()
    warm_up(net, train_x, train_y)
    started = time.perf_counter()
    values = []
    for cell in cells(net):
        torch.manual_seed(SEED)
        model = network(net, cell["dropout"]).to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=cell["lr"], fused=True,
                                      weight_decay=cell["weight_decay"])
        n_steps = -(-len(train_y) // BATCH)
        schedule = iter(rates(n_steps * EPOCHS[net], cell["lr"]))
        best = 0.0
        for _ in range(EPOCHS[net]):
            model.train()
            losses = []
            order = torch.randperm(len(train_y))
            for part in order.split(BATCH):
                optimizer.param_groups[0]["lr"] = next(schedule)
                loss = cross_entropy(model(train_x[part]), train_y[part])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            model.eval()
            with torch.inference_mode():
                scores = model(val_x)
                numbers = torch.stack([torch.stack(losses).mean(), cross_entropy(scores, val_y),
                                       (scores.argmax(1) == val_y).float().mean()]).tolist()
            best = max(best, numbers[2])
        values.append(best)
    return {"seconds": time.perf_counter() - started, "values": values}


def plain_optuna(net: str, folder: Path) -> dict[str, Any]:
    """(c): the Optuna script most people write."""
    import optuna
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, TensorDataset

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    train_x, train_y, val_x, val_y = split()
    warm_up(net, train_x, train_y)
    train = DataLoader(TensorDataset(train_x, train_y), batch_size=BATCH, shuffle=True)
    val = DataLoader(TensorDataset(val_x, val_y), batch_size=256)

    def objective(trial: optuna.Trial) -> float:
        torch.manual_seed(SEED)
        lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
        weight_decay = trial.suggest_float("weight_decay", 1e-6, 1e-1, log=True)
        model = network(net, trial.suggest_float("dropout", 0.0, 0.5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=lr, total_steps=len(train) * EPOCHS[net])
        best = 0.0
        for epoch in range(EPOCHS[net]):
            model.train()
            total = 0.0
            for x, y in train:
                optimizer.zero_grad()
                loss = cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                schedule.step()
                total += loss.item()
            model.eval()
            right = 0
            with torch.no_grad():
                for x, y in val:
                    right += (model(x).argmax(1) == y).sum().item()
            best = max(best, right / len(val_y))
            trial.report(right / len(val_y), epoch)
            trial.should_prune()
        return best

    study = optuna.create_study(storage=f"sqlite:///{folder}/plain.db", direction="maximize",
                                sampler=optuna.samplers.TPESampler(seed=SEED))
    for cell in cells(net):
        study.enqueue_trial(cell)
    started = time.perf_counter()
    study.optimize(objective, n_trials=len(cells(net)))
    return {"seconds": time.perf_counter() - started,
            "values": [trial.value for trial in study.trials]}


def by_hpo(net: str, folder: Path) -> dict[str, Any]:
    """(b): `hpo run`, timed from its first trial's start to its last trial's end."""
    import optuna

    spaces = folder / "search_spaces"
    spaces.mkdir()
    text = STUDY.replace("NET", "MLP" if net == "mlp" else "SimpleCNN")
    text = text.replace("=EPOCHS", f"={EPOCHS[net]}").replace("=GRID", f"={CELLS[net]!r}")
    (spaces / "overhead.py").write_text(text)
    command = [sys.executable, "-m", "hpo", "run", "--study", "overhead", "--phases", "grid",
               "--workers", "1", "--devices", "cpu"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    study = optuna.load_study(study_name="overhead/grid",
                              storage=f"sqlite:///{folder}/hpo-runs/hpo.db")
    trials = study.trials
    first = min(t.datetime_start for t in trials if t.datetime_start)
    last = max(t.datetime_complete for t in trials if t.datetime_complete)
    return {"seconds": (last - first).total_seconds(), "values": [t.value for t in trials]}


def one(side: str, net: str) -> dict[str, Any]:
    """Run one side in a process of its own and return its trials per minute, both ways."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = time.perf_counter()
    done = subprocess.run([sys.executable, __file__, "--side", side, "--net", net], env=env,
                          stdout=subprocess.PIPE, text=True, check=True, preexec_fn=_one_core)
    whole = time.perf_counter() - started
    found = json.loads(done.stdout.splitlines()[-1])
    n = len(cells(net))
    if len(found["values"]) != n or min(found["values"]) < 0.8:
        raise SystemExit(f"FAIL: {side} {net}: {len(found['values'])} of {n} trials, "
                         f"values {found['values']}")
    return {"warm": 60 * n / found["seconds"], "cold": 60 * n / whole}


def _one_core() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def side(name: str, net: str) -> dict[str, Any]:
    """Run a side in this process."""
    with tempfile.TemporaryDirectory(prefix="hpo-overhead-") as folder:
        if name == "bare":
            return bare(net)
        return by_hpo(net, Path(folder)) if name == "hpo" else plain_optuna(net, Path(folder))


def compare(net: str, n_rounds: int) -> bool:
    """Run all sides in turn, print their table and return whether the goal is met."""
    sides = {"bare": "(a) bare loop", "hpo": "(b) hpo, one worker", "optuna": "(c) plain Optuna"}
    rounds = [{name: one(name, net) for name in sides} for _ in range(n_rounds)]
    print(f"\n{net}: {len(cells(net))} trials of {EPOCHS[net]} epochs, one thread, "
          f"median of {n_rounds} rounds")
    print(f"  {'':<22}{'trials/min':>12}{'of bare':>9}{'with start-up':>15}{'of bare':>9}")
    for name, label in sides.items():
        cold = statistics.median(r[name]["cold"] for r in rounds)
        print(f"  {label:<22}{statistics.median(r[name]['warm'] for r in rounds):>12.1f}"
              f"{_ratio(rounds, name, 'warm'):>9.2f}{cold:>15.1f}"
              f"{_ratio(rounds, name, 'cold'):>9.2f}")
    ours, plain = _ratio(rounds, "hpo", "warm"), _ratio(rounds, "optuna", "warm")
    good = ours >= GOALS[net] and ours >= plain
    print(f"  {'ok' if good else 'FAIL'}: hpo reaches {ours:.2f} of the bare loop "
          f"(goal {GOALS[net]}) and {ours / plain:.2f} times the plain script; no trial lost")
    return good


def _ratio(rounds: list[dict[str, dict[str, float]]], name: str, kind: str) -> float:
    """Return the median over rounds of a side's rate against the bare loop's of the same round."""
    return statistics.median(r[name][kind] / r["bare"][kind] for r in rounds)


def main() -> int:
    """Compare the sides for each net; exit code 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--net", choices=("cnn", "mlp", "both"), default="both")
    parser.add_argument("--side", choices=("bare", "hpo", "optuna"))
    args = parser.parse_args()
    if args.side:
        print(json.dumps(side(args.side, args.net)))
        return 0
    nets = ("cnn", "mlp") if args.net == "both" else (args.net,)
    return 0 if all([compare(net, args.rounds) for net in nets]) else 1


if __name__ == "__main__":
    sys.exit(main())
