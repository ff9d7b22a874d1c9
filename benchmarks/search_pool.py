"""Learning curves of many params of the digits, trained once: what `search.py` replays.

    python benchmarks/search_pool.py FOLDER [--random 300] [--seeds 3] [--seconds 240]
                                     [--pack FILE]

Trains random params of the space of `search_spaces/digits.py`, a grid of five values an axis (all
of a choice), and the study's defaults, on one thread, and writes each training's curve as it ends:
begun again it goes on. A seed decides the validation split, the initial weights and the data
order, as in a study, of which all trials have one seed. `--pack` writes what there is as one
compressed file.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

N_GRID = 5
PACKED = Path(__file__).parent / "results" / "digits_pool.json.gz"
Params = dict[str, Any]
# Curves by kind, place of the params, and seed.
Done = Mapping[tuple[str, int, int], list[float]]


class Job(NamedTuple):
    """One training."""

    kind: str
    i: int
    seed: int
    params: Params


@dataclass(frozen=True)
class Pool:
    """Params of a space and what training them gave.

    `curves[kind][i]` maps each seed to the metric of every epoch of the i-th params of `random`,
    `grid` or `defaults`; a training that diverged has fewer than `epochs`.
    """

    epochs: int
    params: dict[str, list[Params]]
    curves: dict[str, list[dict[int, list[float]]]]


def random_params(space: Mapping[str, Any], n: int) -> list[Params]:
    """Return the first n of an endless row of random params."""
    rng = np.random.default_rng(0)
    return [{name: _at(param, rng.random()) for name, param in space.items()} for _ in range(n)]


def grid_params(space: Mapping[str, Any]) -> list[Params]:
    """Return a grid of five values an axis from bound to bound, and of all choices."""
    cells: list[Params] = [{}]
    for name, param in space.items():
        n = param.n_values() or N_GRID
        cells = [{**cell, name: _at(param, i / (n - 1))} for cell in cells for i in range(n)]
    return cells


def _at(param: Any, part: float) -> Any:
    """Return the value of a param at a part of its range."""
    if param.n_values() is not None:
        values = list(param.values())
        return values[min(int(part * len(values)), len(values) - 1)]
    if param.log:
        low, high = math.log(param.low), math.log(param.high)
        return min(max(math.exp(low + part * (high - low)), param.low), param.high)
    return param.low + part * (param.high - param.low)


def wanted(args: argparse.Namespace, study: Any, done: Done) -> Iterator[Job]:
    """Yield every training that is wanted, done or not.

    The grid is a study of the first seed; its best cells alone get the others.
    """
    seeds, grid = range(args.seeds), grid_params(study.space)
    for kind, found in (("defaults", [dict(study.defaults)]),
                        ("random", random_params(study.space, args.random))):
        yield from (Job(kind, i, seed, params) for i, params in enumerate(found)
                    for seed in seeds)
    yield from (Job("grid", i, 0, params) for i, params in enumerate(grid))
    best = max((max(curve) for key, curve in done.items() if key[0] == "grid" and curve),
               default=math.inf)
    yield from (Job("grid", i, seed, params) for i, params in enumerate(grid)
                for seed in seeds if max(done.get(("grid", i, 0)) or [0.0]) >= best)


def train(params: Params, seed: int, study: Any, folder: Path) -> list[float]:
    """Return the metric of every epoch, up to the first that is not finite."""
    from hpo import Run
    from hpo.seeding import seed_all
    from hpo.train.loop import Trainer

    seed_all(seed)
    run = Run(epochs=study.epochs, seed=seed, device="cpu", dir=folder)
    curve: list[float] = []
    for metrics in Trainer(study.build(run, **params), run).epochs():
        values = (metrics["train_loss"], metrics["val_loss"], metrics[study.metric])
        if not all(map(math.isfinite, values)):
            break
        curve.append(round(metrics[study.metric], 5))
    return curve


def train_missing(args: argparse.Namespace, study: Any) -> int:
    """Train what the folder does not hold, for as long as may be; return how much is missing."""
    import torch

    torch.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / "curves.jsonl"
    done = {(line["kind"], line["i"], line["seed"]): line["curve"] for line in _lines(path)}
    deadline = time.monotonic() + args.seconds
    with path.open("a") as file:
        while missing := [job for job in wanted(args, study, done) if job[:3] not in done]:
            for kind, i, seed, params in missing:
                if time.monotonic() > deadline:
                    return len(missing)
                curve = train(params, seed, study, args.folder)
                line = {"kind": kind, "i": i, "seed": seed, "curve": curve}
                file.write(json.dumps(line) + "\n")
                file.flush()
                done[kind, i, seed] = curve
    return 0


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return what was trained; a last line that a kill has cut off does not count."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[:text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def pack(folder: Path, to: Path, study: Any, args: argparse.Namespace) -> None:
    """Write what the folder holds as one file, without random params that lack a seed."""
    params = {"defaults": [dict(study.defaults)], "grid": grid_params(study.space),
              "random": random_params(study.space, args.random)}
    curves: dict[str, Any] = {kind: [{} for _ in found] for kind, found in params.items()}
    for line in _lines(folder / "curves.jsonl"):
        curves[line["kind"]][line["i"]][line["seed"]] = line["curve"]
    whole = [i for i, by_seed in enumerate(curves["random"]) if len(by_seed) == args.seeds]
    for found in (params, curves):
        found["random"] = [found["random"][i] for i in whole]
    said = ("Validation accuracy of every epoch of trainings of search_spaces/digits.py on a CPU, "
            "by `python benchmarks/search_pool.py FOLDER --pack FILE`; curves by kind, place of "
            "the params and seed.")
    data = json.dumps({"about": said, "epochs": study.epochs, "params": params, "curves": curves})
    # No time in it: the same curves are the same bytes.
    to.write_bytes(gzip.compress(data.encode(), mtime=0))


def load(path: Path = PACKED) -> Pool:
    """Return a packed pool."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    curves = defaultdict(list)
    for kind, found in data["curves"].items():
        curves[kind] = [{int(seed): curve for seed, curve in by_seed.items()}
                        for by_seed in found]
    return Pool(data["epochs"], data["params"], dict(curves))


def main() -> int:
    """Train what is missing; exit code 0 when nothing is any more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for name, value in (("random", 300), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--pack", type=Path)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from search_spaces.digits import STUDY

    n_missing = train_missing(args, STUDY)
    print(f"{n_missing} trainings are missing")
    if args.pack is not None:
        pack(args.folder, args.pack, STUDY, args)
    return 0 if n_missing == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
