"""Look at a study without running it: `hpo check`, and the learning-rate range test alone.

Neither opens a database.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpo import devices
from hpo.display import say
from hpo.errors import InputError
from hpo.launch import Stopper, data_lines, make_home, order_of, warning_lines
from hpo.pool import Pool
from hpo.settings import Settings
from hpo.settings import check as check_settings

if TYPE_CHECKING:
    from rich.console import Console


def described_by_worker(
    settings: Settings, slot: devices.Slot | None = None
) -> tuple[Pool, dict[str, Any], Settings]:
    """Start one worker and return it with what the module says and the settings it gives.

    Without a slot it has the first device, with all threads.
    """
    check_settings(settings)
    slots = [slot] if slot is not None else devices.slots(settings.devices, 1)
    stopper = Stopper()
    stopper.install()
    pool = Pool(settings.study, slots, stopper.check)
    stopper.kill = pool.kill
    try:
        described = pool.describe()
    except BaseException:
        end(pool)
        raise
    return pool, described, settings.resolved(described["spec"], None)


def end(pool: Pool) -> None:
    """Stop a pool's workers at once."""
    pool.kill()
    pool.stop()


def check(settings: Settings, console: Console) -> int:
    """Say what a study is, whether its data is there and one training step goes well.

    Raises:
        InputError: with every fault found.
    """
    pool, described, settings = described_by_worker(settings)
    try:
        spec = described["spec"]
        say(console, f"study {settings.study}: {described['path']}")
        say(console, f"  {spec['direction']} {spec['metric']}, {settings.epochs} epochs, "
                     f"{len(spec['space'])} params: {', '.join(spec['space'])}")
        for text in spec["warnings"]:
            say(console, f"  warning: {text}")
        found = pool.prepare({**order_of(settings, spec), "first_epoch": True})
        epoch = found.pop("first_epoch", None)
        if epoch is not None:
            metrics = ", ".join(f"{name}={value:.4g}" for name, value in epoch.items())
            say(console, f"  an objective of its own: its first epoch gives {metrics}")
        warned = found.pop("warnings", [])
        for text in (*data_lines(found), *warning_lines(warned, settings.study)):
            say(console, f"  {text}")
        say(console, "  ok")
        return 0
    finally:
        end(pool)


def lr_range(
    settings: Settings, console: Console, *, low: float | None, high: float | None, as_json: bool
) -> int:
    """Sweep the learning rate, print the pick and draw the curve; exit code 1 without a pick.

    Raises:
        InputError: for a study without a recipe or a rate to find, or senseless bounds.
    """
    for what, value in (("--low", low), ("--high", high)):
        if value is not None and not value > 0:
            raise InputError(f"{what} must be above 0, got {value:g}")
    if low is not None and high is not None and low >= high:
        raise InputError(f"--low must be below --high, got {low:g} and {high:g}")
    make_home(settings.home)
    pool, described, settings = described_by_worker(settings)
    try:
        spec = described["spec"]
        if not spec["has_lr_range"]:
            raise InputError(f"study '{settings.study}': a learning-rate range test needs build= "
                             f"and a param '{spec['lr_param']}' in the space (lr_param=)")
        found = pool.ask("sweep", "swept", order=order_of(settings, spec), low=low, high=high)
    finally:
        end(pool)
    return _show_sweep(settings, spec, found["result"], console, as_json)


def _show_sweep(
    settings: Settings, spec: Mapping[str, Any], result: dict[str, Any], console: Console,
    as_json: bool,
) -> int:
    from hpo.plots import draw_sweep
    from hpo.read_results import sweep_of

    path = settings.home / "reports" / settings.name / "lr_range.png"
    swept = sweep_of(result)
    if swept.has_curve:
        draw_sweep(swept, path)
    if as_json:
        picture = str(path) if swept.has_curve else None
        print(json.dumps({**result, "picture": picture}, allow_nan=False))
    elif result["pick"] is None:
        say(console, f"no learning rate to suggest: {result['reason']}")
    else:
        say(console, f"{spec['lr_param']} = {result['pick']:.3g}{_error(result)}, sensible "
                     f"between {result['low']:.3g} and {result['high']:.3g}: "
                     f"{result['reason']}; {result['n_steps']} steps, {result['epochs']:.2g} of "
                     f"an epoch")
    if not as_json and swept.has_curve:
        say(console, f"curve: {path}")
    return 0 if result["pick"] is not None else 1


def _error(result: Mapping[str, Any]) -> str:
    """Return the pick's error over the seeds: a factor, since rates are compared by ratios."""
    error = result.get("error")
    return "" if error is None else f" (a standard error is a factor of {10 ** error:.2g})"
