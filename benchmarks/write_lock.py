"""Several processes write to one SQLite file without a pause: how long does a transaction wait?

    python benchmarks/write_lock.py [--seconds 8]

SQLite's own busy handler looks for the write lock after 1, 2, 5, 10 ... 100 ms, so whoever has
waited long looks rarely and is overtaken by those who have just come. hpo's writers look every 0.3
to 5 ms. Four processes write transactions of a millisecond, once as SQLite itself waits and once
as hpo does; with them a fifth that waits as SQLite does, like stock Optuna and the dashboard.

Prints a table and FAIL where hpo's writers wait longer than SQLite's, or a neighbour gives up.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sqlite3
import sys
import time
from typing import Any

from databases import databases

N_WRITERS, HOLD_S, TIMEOUT_S = 4, 0.001, 30


def hpo_writer(url: str, until: float, told: Any) -> None:
    """Write as hpo's storage does; tell how often, and the longest wait in seconds."""
    from sqlalchemy import Connection, text

    from storage.link import Link

    link = Link(url, TIMEOUT_S)

    def work(connection: Connection) -> None:
        connection.execute(text("UPDATE hpo_mark SET value = value + 1"))
        time.sleep(HOLD_S)

    told.put(("hpo", *repeated(lambda: link.write(work), until)))


def plain_writer(url: str, until: float, told: Any) -> None:
    """Write as SQLite's driver waits by itself."""
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), timeout=TIMEOUT_S,
                                 isolation_level=None)

    def once() -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE hpo_mark SET value = value + 1")
        time.sleep(HOLD_S)
        connection.execute("COMMIT")

    told.put(("SQLite", *repeated(once, until)))


def repeated(once: Any, until: float) -> tuple[int, float, int]:
    """Return how often something was done, its longest time, and how often it failed."""
    n, longest, n_failed = 0, 0.0, 0
    while time.time() < until:
        began = time.time()
        try:
            once()
        except Exception:
            n_failed += 1
        n, longest = n + 1, max(longest, time.time() - began)
    return n, longest, n_failed


def measured(url: str, writer: Any, seconds: float) -> tuple[list[Any], Any]:
    """Return what the writers told, and what their neighbour did."""
    context = multiprocessing.get_context("spawn")
    told, neighbour = context.Queue(), context.Queue()
    # The processes need a while to start.
    until = time.time() + 4 + seconds
    started = [context.Process(target=writer, args=(url, until, told)) for _ in range(N_WRITERS)]
    started.append(context.Process(target=plain_writer, args=(url, until, neighbour)))
    for process in started:
        process.start()
    found = [told.get(timeout=120) for _ in range(N_WRITERS)], neighbour.get(timeout=120)
    for process in started:
        process.join()
    return found


def main() -> int:
    """Run both sides; exit code 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    args = parser.parse_args()
    longest, n_failed = {}, 0
    print(f"  {'four writers wait as':<22}{'transactions of each':<30}{'longest wait':<15}"
          "neighbour: transactions, longest wait, given up")
    for name, writer in (("SQLite does", plain_writer), ("hpo does", hpo_writer)):
        with databases() as made:
            writers, (_, n, wait_s, failed) = measured(made.new("sqlite"), writer, args.seconds)
        counts = " ".join(str(count) for _, count, _, _ in sorted(writers, key=lambda w: w[1]))
        longest[name] = max(wait for _, _, wait, _ in writers)
        n_failed += failed + sum(one[3] for one in writers)
        print(f"  {name:<22}{counts:<30}{longest[name]:<15.2f}{n}, {wait_s:.2f} s, {failed}")
    good = longest["hpo does"] <= longest["SQLite does"] and not n_failed
    print(f"  {'ok  ' if good else 'FAIL'} longest wait {longest['hpo does']:.2f} s against "
          f"{longest['SQLite does']:.2f} s, {n_failed} gave up")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
