"""A study of 10,000 trials of 10 epochs in the dashboard: how long its answers take.

    python benchmarks/dashboard.py [--trials 10000] [--rounds 3]

`hpo dashboard`, as a user starts it, serves an SQLite file; the first requests are counted apart,
since they read the trials in. Asked are the list of studies and the study itself as the page asks
for them (one client, answers whole); what the browser takes to draw them is not in. Wall time, the
best of the rounds but for the first; FAIL where an answer takes more than 3 s.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from history import fill
from large import save_study

import storage

ROOT = Path(__file__).resolve().parent.parent
GOAL_S = 3.0
TOKEN = "a-token-for-this-benchmark"


@contextmanager
def served(url: str, home: str) -> Iterator[int]:
    """Have the dashboard served by a process of its own; gives its port."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HPO_DASHBOARD_TOKEN": TOKEN}
    process = subprocess.Popen(
        [sys.executable, "-m", "hpo", "dashboard", "--storage", url, "--home", home,
         "--port", "0"],
        env=env, cwd=home, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        found = next(m for line in process.stdout if (m := re.search(r"http://[^:]+:(\d+)", line)))
        yield int(found[1])
    finally:
        process.terminate()
        process.wait()


def asked(port: int, path: str) -> tuple[float, int, Any]:
    """Return the seconds of one answer, its bytes, and its strict JSON."""
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    started = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    seconds = time.perf_counter() - started
    if answer.status != 200:
        raise SystemExit(f"{path}: status {answer.status}: {body[:200]!r}")
    return seconds, len(body), json.loads(body, parse_constant=refuse)


def line(what: str, seconds: float, more: str = "") -> bool:
    """Print one row and return whether it is within the goal."""
    good = seconds <= GOAL_S
    print(f"  {'ok  ' if good else 'FAIL'} {what:<34}{seconds:>7.2f} s{more}", flush=True)
    return good


def main() -> int:
    """Print the table; exit code 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hpo-dashboard-") as folder:
        url = f"sqlite:///{folder}/hpo.db"
        storage.init(url)
        fill(url, "s", args.trials)
        save_study(url)
        with served(url, folder) as port:
            print(f"{args.trials} trials of 10 epochs in SQLite")
            first, _, listed = asked(port, "/api/studies")
            study_id = next(one["study_id"] for one in listed["study_summaries"]
                            if one["study_name"] == "s")
            path = f"/api/studies/{study_id}"
            first_study, n_bytes, found = asked(port, path)
            good = line("the first request: all studies", first)
            good &= line("the first look at the study", first_study,
                         f", {n_bytes / 2**20:.1f} MB, {len(found['trials'])} trials")
            for what, where in (("all studies", "/api/studies"), ("the study", path)):
                good &= line(what, min(asked(port, where)[0] for _ in range(args.rounds)))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
