"""What it is worth that a CPU worker keeps freed memory: a CNN's steps with and without.

    python benchmarks/allocator.py [--rounds 3]

Both sides train the same SimpleCNN on the same batches of 512 images of 32x32 on one thread, in
processes of their own that take turns; one has the environment of a CPU worker. Prints seconds and
the CPU time that the kernel took, and FAIL where keeping memory does not make a step 1.2 times as
fast.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

GOAL = 1.2
N_STEPS, BATCH = 8, 512


def train() -> dict[str, float]:
    """Make the steps and return their wall time, and the kernel's share of the CPU time."""
    import torch
    from torch.nn.functional import cross_entropy

    from hpo.train import SimpleCNN

    torch.manual_seed(0)
    model = SimpleCNN(dropout=0.1).make((3, 32, 32), 10).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    images = torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (BATCH,))

    def step() -> None:
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(N_STEPS):
        step()
    took, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    return {"wall_s": took, "kernel_s": after.ru_stime - before.ru_stime,
            "peak_mb": after.ru_maxrss / 1024}


def one(keeps: bool) -> dict[str, float]:
    """Run one side in a process of its own."""
    from hpo.devices import KEEP_MEMORY

    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(KEEP_MEMORY if keeps else {})}
    done = subprocess.run([sys.executable, __file__, "--side"], env=env, check=True, text=True,
                          stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def main() -> int:
    """Compare both sides; exit code 1 where the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", action="store_true")
    args = parser.parse_args()
    if args.side:
        print(json.dumps(train()))
        return 0
    rounds = [(one(False), one(True)) for _ in range(args.rounds)]
    print(f"{N_STEPS} steps of {BATCH} images, one thread, median of {args.rounds} rounds")
    print(f"  {'':<22}{'seconds':>9}{'in the kernel':>15}{'peak MB':>9}")
    for place, label in enumerate(("as the system has it", "memory kept")):
        wall, kernel, peak = (statistics.median(pair[place][name] for pair in rounds)
                              for name in ("wall_s", "kernel_s", "peak_mb"))
        print(f"  {label:<22}{wall:>9.2f}{kernel:>15.2f}{peak:>9.0f}")
    gain = statistics.median(plain["wall_s"] / kept["wall_s"] for plain, kept in rounds)
    print(f"  {'ok' if gain >= GOAL else 'FAIL'}: a step is {gain:.2f} times as fast "
          f"(goal {GOAL})")
    return 0 if gain >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
