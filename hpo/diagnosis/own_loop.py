"""The checks of a study whose loop is its own: its first epoch, twice, and nothing inside of it.

Loads no torch: the loop may use none.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hpo import discover
from hpo.diagnosis.finding import Finding, look, not_checked, ok, wrong
from hpo.drive import BadMetrics, Goal

PART = "loop"
# Whose first epoch takes longer is not asked for it again.
MOST_AGAIN_S = 120.0


def examine_loop(
    first_epoch: Callable[[], Mapping[str, Any]], goal: Goal, epochs: int, *, alone: bool
) -> Iterator[Finding]:
    """Yield what is to be said of an objective; `first_epoch` runs it anew for one epoch.

    `alone` says that the study has no recipe that was looked at.
    """
    start = time.perf_counter()
    try:
        metrics = first_epoch()
    except BadMetrics as error:
        yield wrong(PART, "metrics", str(error), f"yield a dict with '{goal.metric}' each epoch")
        return
    except Exception as error:
        traceback.print_exc()
        yield wrong(PART, "first epoch",
                    f"{discover.where(error)}: {type(error).__name__}: {error}")
        return
    took = time.perf_counter() - start
    yield metrics_finding(metrics, goal)
    yield ok(PART, "first epoch", f"{took:.3g} s, begin included; {epochs} epochs take at most "
                                  f"{took * epochs:.3g} s a trial")
    if took > MOST_AGAIN_S:
        yield not_checked(PART, "repeats", f"a second run takes another {took:.0f} s")
    else:
        yield repeats_finding(metrics, first_epoch())
    for part in ("data", "model", "training", "speed") if alone else ():
        yield not_checked(part, "all", "the study has its own loop")


def metrics_finding(metrics: Mapping[str, Any], goal: Goal) -> Finding:
    """Return whether an epoch's metrics are finite."""
    named = ", ".join(f"{name}={value:.4g}" if value is not None else f"{name}=NaN"
                      for name, value in metrics.items())
    bad = [name for name, value in metrics.items() if value is None or not math.isfinite(value)]
    if goal.metric in bad:
        return wrong(PART, "metrics", f"{named}: '{goal.metric}' is not finite at the defaults",
                     "a trial ends there as diverged: choose other defaults, or mend the loop")
    if bad:
        return look(PART, "metrics", f"{named}: {bad[0]} is not finite", "see where it is from")
    return ok(PART, "metrics", named)


def repeats_finding(first: Mapping[str, Any], second: Mapping[str, Any]) -> Finding:
    """Return whether two runs of the same seed give the same metrics; times are left out."""
    torn = [name for name in {**first, **second} if not name.endswith("_s")
            and first.get(name) != second.get(name)]
    if torn:
        name = torn[0]
        return look(PART, "repeats", f"{name} was {first.get(name)} and is {second.get(name)} for "
                                     f"the same seed",
                    "something draws unseeded: make generators of your own from run.seed")
    return ok(PART, "repeats", "the same seed gives the same first epoch")
