"""`hpo doctor`: what can be known of a study before money is spent on it, on one screen.

Each line is `ok`, `look` or `wrong` with what to do. The machine and the database are looked at
here, all that needs torch in one worker process, on the device that trials would have.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo import devices
from hpo.ask import print_json
from hpo.diagnosis.database import database_findings
from hpo.diagnosis.finding import NOT_CHECKED, WRONG, Finding, wrong
from hpo.diagnosis.machine import machine_findings
from hpo.display import say
from hpo.errors import InputError
from hpo.launch import make_home, order_of
from hpo.settings import check
from hpo.trial_run import described_by_worker, end

if TYPE_CHECKING:
    from rich.console import Console

    from hpo.pool import Pool
    from hpo.settings import Settings


def doctor(settings: Settings, console: Console, *, profile: bool, as_json: bool) -> int:
    """Print what each check finds as it is made; exit code 1 where one is `wrong`.

    Raises:
        InputError: for bad flags, or a module with faults.
    """
    started = time.monotonic()
    check(settings)
    # The workers that `hpo run` would start: the doctor's has the threads of one of them.
    slots = devices.slots(settings.devices, None, n_each=settings.gpus_per_trial)
    pool, described, settings = described_by_worker(settings, slots[0])
    trace = settings.home / "reports" / settings.study / "doctor-trace.json" if profile else None
    found: list[Finding] = []
    try:
        if trace is not None:
            make_home(settings.home)
        if not as_json:
            say(console, f"study {settings.study}: {described['path']}")
        for finding in _findings(settings, described["spec"], slots, pool, trace):
            found.append(finding)
            if not as_json:
                say(console, finding.line())
    finally:
        end(pool)
    counts = Counter(finding.verdict for finding in found)
    seconds = time.monotonic() - started
    if as_json:
        print_json({"study": settings.study, "module": described["path"],
                    "counts": dict(counts), "seconds": seconds,
                    "trace": None if trace is None else str(trace),
                    "findings": [finding.to_json() for finding in found]})
    else:
        told = [f"{counts[verdict]} {verdict}" for verdict in ("ok", "look", WRONG, NOT_CHECKED)
                if counts[verdict]]
        say(console, f"{', '.join(told)}, in {seconds:.1f} s")
    return 1 if counts[WRONG] else 0


def _findings(
    settings: Settings, spec: dict[str, Any], slots: Sequence[devices.Slot], pool: Pool,
    trace: Path | None,
) -> Iterator[Finding]:
    yield from machine_findings(slots)
    yield from database_findings(settings.storage, settings.home)
    pool.tell("examine", order=order_of(settings, spec),
              trace=None if trace is None else str(trace))
    while True:
        pool.check()
        for _, event in pool.poll(0.5):
            if event["event"] == "finding":
                yield Finding.from_json(event["finding"])
            elif event["event"] == "fault":
                raise InputError(event["text"])
            elif event["event"] == "exit":
                last = " ".join(event["tail"].splitlines()[-1:])
                yield wrong("worker", "process", f"it ended with code {event['code']} in the next "
                                                 f"check: {last}",
                            "a library crashed, or the memory was full (code -9)")
                return
            elif event["event"] == "examined":
                return
