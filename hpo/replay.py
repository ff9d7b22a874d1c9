"""Run a finished trial again and hold every epoch against what is stored, to the last bit.

Nothing is written: neither to the database nor to the trial's folders.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo import devices as machine
from hpo.ask import opened, print_json
from hpo.display import say
from hpo.errors import HpoError, InputError
from hpo.launch import Stopper
from hpo.one_trial import OneTrial, find
from hpo.pool import Pool
from hpo.queue import MICRO_BATCH
from hpo.verdict import wrapped

if TYPE_CHECKING:
    from rich.console import Console

# By the house's rule a name that ends so is a time, or a rate of one: `epoch_s`, `images_per_s`.
_TIMES = "_s"
# A table longer than this shows its ends and what is around the first difference.
_MOST_ROWS, _N_ENDS = 12, 3


@dataclass(frozen=True)
class Difference:
    """A metric that is not the same; None where one side lacks it, or the whole epoch."""

    epoch: int
    metric: str
    stored: float | None
    now: float | None

    def text(self) -> str:
        """Return it as the verdict says it."""
        if self.stored is None or self.now is None:
            lacks, has = ("stored", self.now) if self.stored is None else ("now", self.stored)
            return f"at epoch {self.epoch}: {self.metric} {has!r}, but none {lacks}"
        return (f"at epoch {self.epoch}: {self.metric} stored {self.stored!r}, now {self.now!r} "
                f"(difference {self.now - self.stored:.3g})")


@dataclass(frozen=True)
class Rerun:
    """What running a trial again gave: metrics by epoch, its surroundings, and its error."""

    epochs: Mapping[int, Mapping[str, float]]
    now: Mapping[str, Any]
    error: str | None


def replay(
    trial: str, study: str, home: Path, storage: str | None, console: Console, *,
    devices: str | None, data_dir: Path | None, as_json: bool,
) -> int:
    """Run a trial again and print whether it came out the same; exit code 1 where it did not.

    Raises:
        NoResult: for a study that is not in the database.
        InputError: for a trial that is not in it, or cannot be run again.
    """
    with opened(home, storage) as db:
        one = find(db, study, trial)
    if (why := one.why_no_replay) is not None:
        raise InputError(f"trial {one.label} of study '{study}' cannot be replayed: {why}")
    again = _run_again(one, devices, data_dir, console)
    if not again.epochs:
        raise InputError(f"trial {one.label} of study '{study}' cannot be run again: "
                         f"{again.error or 'it ended before its first epoch'}")
    found, changed = differences(one, again), changes(one, again.now)
    if as_json:
        print_json(_data(one, again, found, changed))
    else:
        for line in _table(one, again, found):
            say(console, line)
        for line in _verdict(one, again, found, changed):
            say(console, wrapped(line, console.width if console.is_terminal else None))
    return 1 if found else 0


def _run_again(
    one: OneTrial, wanted: str | None, data_dir: Path | None, console: Console
) -> Rerun:
    stopper = Stopper()
    stopper.install()
    order = _order(one, data_dir)
    pool = Pool(order["module"], [_slot(one, wanted)], stopper.check)
    stopper.kill = pool.kill
    last = one.epochs[-1].epoch
    try:
        pool.describe()
        events = _heard(pool, stopper, order, dict(one.trial.params), last)
        shows = console.status("") if console.is_terminal else contextlib.nullcontext()
        with shows as line:
            epochs: dict[int, Mapping[str, float]] = {}
            now: Mapping[str, Any] = {}
            for event in events:
                if event["event"] == "replaying":
                    now = event["now"]
                elif event["event"] == "replayed":
                    epochs[event["epoch"]] = event["metrics"]
                if line is not None:
                    line.update(f"trial {one.label}: {len(epochs)} of {last + 1} epochs")
        return Rerun(epochs, now, event["error"])
    finally:
        pool.kill()
        pool.stop()


def _heard(
    pool: Pool, stopper: Stopper, order: Mapping[str, Any], params: Mapping[str, Any], last: int
) -> Iterator[dict[str, Any]]:
    """Yield the events of the one worker up to `replay_over`."""
    pool.tell("replay", order=dict(order), params=dict(params), last_epoch=last)
    while True:
        stopper.check()
        for _, event in pool.poll(0.5):
            if event["event"] == "fault":
                raise InputError(event["text"])
            if event["event"] == "exit":
                raise HpoError(f"the worker ended with code {event['code']} in mid-replay:\n"
                               f"{event['tail']}")
            yield event
            if event["event"] == "replay_over":
                return


def _order(one: OneTrial, data_dir: Path | None) -> dict[str, Any]:
    settings = one.row["settings"] or {}
    folder = data_dir or (Path(settings["data_dir"]) if settings.get("data_dir") else None)
    if folder is not None and not folder.is_dir():
        raise InputError(f"--data-dir {folder}: there is no such folder")
    return {"module": one.row["module"], "name": one.study, "epochs": one.row["epochs"],
            "seed": one.seed, "data_fraction": settings.get("data_fraction") or 1.0,
            "data_dir": None if folder is None else str(folder),
            # Of a batch that did not fit the parts were trained one after the other.
            MICRO_BATCH: one.trial.attrs.get(MICRO_BATCH)}


def _slot(one: OneTrial, wanted: str | None) -> machine.Slot:
    """Return where it runs: on a device like its own, with as many threads."""
    then = one.trial.attrs.get("device")
    slot = machine.slots(wanted or ("auto" if then in (None, "cuda") else "cpu"), 1,
                         n_each=one.trial.attrs.get("n_devices", 1))[0]
    n_threads = one.ran_with.get("n_threads")
    return replace(slot, n_threads=n_threads) if n_threads else slot


def _compared(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.endswith(_TIMES)}


def differences(one: OneTrial, again: Rerun) -> list[Difference]:
    """Return every metric of every stored epoch that is not the same to the last bit."""
    found = []
    for row in one.epochs:
        stored, now = _compared(row.metrics), _compared(again.epochs.get(row.epoch, {}))
        for name in dict.fromkeys([*stored, *now]):
            was, is_now = stored.get(name), now.get(name)
            both_nan = was != was and is_now != is_now
            if was != is_now and not both_nan:
                found.append(Difference(row.epoch, name, was, is_now))
    return found


def changes(one: OneTrial, now: Mapping[str, Any]) -> list[str]:
    """Return what a trial ran with that is not the same now, both sides named."""
    then = one.ran_with
    told = []
    was, is_now = then.get("versions") or {}, now.get("versions") or {}
    told += [f"{name} was {was[name]}, is {is_now.get(name, 'not installed')}"
             for name in was if was[name] != is_now.get(name)]
    device = then.get("device") or one.trial.attrs.get("device")
    pairs = [("device", device, now.get("device")),
             ("processor", then.get("processor"), now.get("processor")),
             ("CPU capability", then.get("cpu_capability"), now.get("cpu_capability")),
             ("threads", then.get("n_threads"), now.get("n_threads")),
             ("data", (one.row["data"] or {}).get("fingerprint"), now.get("data_fingerprint"))]
    told += [f"{name}: {before}, now {after}" for name, before, after in pairs
             if before is not None and after is not None and before != after]
    if then.get("module_sha256") and then["module_sha256"] != now.get("module_sha256"):
        told.append(f"module: the file of '{one.row['module']}' has changed")
    return told


def _table(one: OneTrial, again: Rerun, found: Sequence[Difference]) -> list[str]:
    from hpo.report import aligned

    metric = one.row["metric"]
    by_epoch: dict[int, list[str]] = {}
    for one_found in found:
        by_epoch.setdefault(one_found.epoch, []).append(one_found.metric)
    rows = [["epoch", f"{metric} stored", "now", ""]]
    for row in one.epochs:
        now = again.epochs.get(row.epoch, {}).get(metric)
        differs = by_epoch.get(row.epoch)
        rows.append([str(row.epoch), repr(row.metrics.get(metric)), repr(now),
                     f"differs: {', '.join(differs)}" if differs else "same"])
    head, *lines = aligned(rows, right=(0,)).splitlines()
    first = next((i for i, row in enumerate(one.epochs) if row.epoch in by_epoch), 0)
    return [head, *_shortened(lines, first)]


def _shortened(lines: list[str], first: int) -> list[str]:
    if len(lines) <= _MOST_ROWS:
        return lines
    kept = sorted({*range(_N_ENDS), *range(len(lines) - _N_ENDS, len(lines)),
                   *range(max(0, first - 1), min(len(lines), first + 2))})
    shown: list[str] = []
    for before, i in zip([-1, *kept], kept, strict=False):
        shown += [f"  ... {i - before - 1} more"] if i - before > 1 else []
        shown.append(lines[i])
    return shown


def _verdict(
    one: OneTrial, again: Rerun, found: Sequence[Difference], changed: Sequence[str]
) -> list[str]:
    left_out = _left_out(one)
    names = dict.fromkeys(name for row in one.epochs for name in _compared(row.metrics))
    over = f"{len(one.epochs)} epoch{'s' if len(one.epochs) != 1 else ''} of {', '.join(names)}"
    times = f" (left out: {', '.join(left_out)})" if left_out else ""
    if not found:
        lines = [f"trial {one.label}: the same to the last bit, {over}{times}"]
        return lines + ([f"although {'; '.join(changed)}"] if changed else [])
    lines = [f"trial {one.label}: first differs {found[0].text()}{times}"]
    if again.error:
        lines.append(f"it failed this time: {again.error}")
    if changed:
        lines.append(f"what may explain it: {'; '.join(changed)}")
    elif not one.ran_with:
        lines.append("what it ran with is not stored: an earlier version of hpo ran it")
    elif again.now.get("device") == "cuda":
        lines.append("nothing that is stored has changed; a GPU may sum in another order "
                     "each time")
    else:
        lines.append("nothing that is stored has changed: look for a draw that the seed does not "
                     "reach, or for code and files that the module reads")
    return lines


def _left_out(one: OneTrial) -> list[str]:
    return list(dict.fromkeys(name for row in one.epochs for name in row.metrics
                              if name.endswith(_TIMES)))


def _data(
    one: OneTrial, again: Rerun, found: Sequence[Difference], changed: Sequence[str]
) -> dict[str, Any]:
    differing = {one_found.epoch for one_found in found}
    first = found[0] if found else None
    return {
        "study": one.study, "phase": one.phase.name, "trial": one.trial.number, "same": not found,
        "n_epochs": len(one.epochs), "left_out": _left_out(one), "changes": list(changed),
        "error": again.error,
        "first_difference": first and {"epoch": first.epoch, "metric": first.metric,
                                       "stored": first.stored, "now": first.now},
        "epochs": [{"epoch": row.epoch, "same": row.epoch not in differing, "stored": row.metrics,
                    "now": again.epochs.get(row.epoch)} for row in one.epochs],
        "ran_with": {"then": one.ran_with or None, "now": again.now},
    }
