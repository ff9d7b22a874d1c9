"""The command line: thin commands, each of which reads its flags and calls one function.

Imports neither torch nor Optuna, so that `hpo --help` answers at once.
"""

import gc
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException as UsageError

from hpo import cli_registry
from hpo import settings as s
from hpo.cli_options import (
    DataDir,
    Devices,
    Epochs,
    EpochTimeout,
    Force,
    Fraction,
    GpusPerTrial,
    Home,
    Json,
    MaxFailures,
    Name,
    Seed,
    Storage,
    StorageTimeout,
    Study,
    To,
    Trial,
    Workers,
    console,
    option,
)
from hpo.errors import HpoError, InputError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Find good hyperparameters for a PyTorch model, and prove that they are good.",
)
app.add_typer(cli_registry.app, name="registry")


@app.callback()
def _global(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    if debug:
        os.environ["HPO_DEBUG"] = "1"


@app.command()
def run(
    study: Study,
    name: Name = None,
    n_trials: Annotated[int | None, option(
        "--n-trials", "Search trials in all.", "HPO_N_TRIALS")] = None,
    n_random: Annotated[int | None, option(
        "--n-random", "Trials of the phase random (default: as many as --n-trials).",
        "HPO_N_RANDOM")] = None,
    workers: Workers = None,
    devices: Devices = "auto",
    gpus_per_trial: GpusPerTrial = 1,
    sampler: Annotated[str | None, option(
        "--sampler", "tpe, random, gp, cmaes, qmc; grid: the grid phase alone.",
        "HPO_SAMPLER")] = None,
    pruner: Annotated[str | None, option(
        "--pruner", "rungs, median, percentile, asha, hyperband, none.", "HPO_PRUNER")] = None,
    prune_startup: Annotated[int | None, option(
        "--prune-startup", "Trials that must be COMPLETE before any is pruned (rungs: that must "
                           "have come as far).",
        "HPO_PRUNE_STARTUP")] = None,
    prune_warmup: Annotated[int | None, option(
        "--prune-warmup", "Epochs in which no trial is pruned.", "HPO_PRUNE_WARMUP")] = None,
    audit_fraction: Annotated[float | None, option(
        "--audit-fraction", "Part of the pruned trials that is trained to the end, to see whether "
                            "pruning was right (default 0.05).", "HPO_AUDIT_FRACTION")] = None,
    seed: Seed = None,
    epochs: Epochs = None,
    timeout: Annotated[float | None, option(
        "--timeout", "Stop in order after this many seconds.", "HPO_TIMEOUT")] = None,
    epoch_timeout: EpochTimeout = None,
    phases: Annotated[str | None, option(
        "--phases", "Some of lr-range,grid,random,search,confirm (default: all but random).",
        "HPO_PHASES")] = None,
    top_k: Annotated[int | None, option(
        "--top-k", "How many of the search's best are confirmed.", "HPO_TOP_K")] = None,
    confirm_seeds: Annotated[int | None, option(
        "--confirm-seeds", "Fresh seeds each candidate is trained on, at least.",
        "HPO_CONFIRM_SEEDS")] = None,
    confirm_budget: Annotated[float | None, option(
        "--confirm-budget", "More seeds where candidates are close, until confirming has cost "
                            "this part of the epochs spent before (default 0.15).",
        "HPO_CONFIRM_BUDGET")] = None,
    confirm_resolution: Annotated[float | None, option(
        "--confirm-resolution", "A difference of the metric that is too small to matter "
                                "(default: the sd of one training).",
        "HPO_CONFIRM_RESOLUTION")] = None,
    max_retries: Annotated[int | None, option(
        "--max-retries", "Times a failed trial is tried again (default: 1 for a lost worker, "
                         "0 for an error).", "HPO_MAX_RETRIES")] = None,
    max_failures: MaxFailures = 5,
    allow_duplicates: Annotated[bool | None, typer.Option(
        "--allow-duplicates/--no-allow-duplicates",
        help="Train params again that have a trial already.")] = None,
    allow_space_change: Annotated[bool, typer.Option(
        "--allow-space-change", help="Go on with other float or int bounds.")] = False,
    data_dir: DataDir = None,
    data_fraction: Fraction = None,
    home: Home = None,
    storage: Storage = None,
    storage_timeout: StorageTimeout = 60.0,
) -> int:
    """Run a study: LR range test, grid baseline, search, confirmation, registration."""
    from hpo.launch import launch

    where = s.home_folder(home)
    return launch(s.Settings(
        study=study, name=study if name is None else name, home=where,
        storage=s.storage_url(storage, where), n_trials=n_trials, n_random=n_random,
        workers=workers, devices=devices, gpus_per_trial=gpus_per_trial,
        audit_fraction=audit_fraction,
        sampler=None if sampler == "grid" else sampler, pruner=pruner,
        prune_startup=prune_startup, prune_warmup=prune_warmup, seed=seed, epochs=epochs,
        timeout_s=timeout, epoch_timeout_s=epoch_timeout,
        phases=s.parse_phases(phases, sampler), top_k=top_k,
        confirm_seeds=confirm_seeds, confirm_budget=confirm_budget,
        confirm_resolution=confirm_resolution, max_retries=max_retries,
        max_failures=max_failures,
        allow_duplicates=allow_duplicates,
        allow_space_change=allow_space_change, data_dir=data_dir, data_fraction=data_fraction,
        storage_timeout_s=storage_timeout,
    ), console())


@app.command()
def worker(
    study: Study, name: Name = None, workers: Workers = None, devices: Devices = "auto",
    gpus_per_trial: GpusPerTrial = 1, timeout: Annotated[float | None, option(
        "--timeout", "Stop in order after this many seconds.", "HPO_TIMEOUT")] = None,
    epoch_timeout: EpochTimeout = None, max_failures: MaxFailures = 5,
    data_dir: DataDir = None, home: Home = None, storage: Storage = None,
    storage_timeout: StorageTimeout = 60.0,
) -> int:
    """Train trials of a study that `hpo run` drives, here or on another host, until stopped."""
    from hpo.launch import serve

    where = s.home_folder(home)
    return serve(s.Settings(
        study=study, name=study if name is None else name, home=where,
        storage=s.storage_url(storage, where), workers=workers, devices=devices,
        gpus_per_trial=gpus_per_trial, timeout_s=timeout, epoch_timeout_s=epoch_timeout,
        max_failures=max_failures, data_dir=data_dir, storage_timeout_s=storage_timeout,
    ), console())


@app.command()
def check(
    study: Study, devices: Devices = "auto", data_dir: DataDir = None,
    data_fraction: Fraction = None,
) -> int:
    """Check a study's module, its data and one training step, and spend nothing else."""
    from hpo.trial_run import check as check_study

    return check_study(_brief(study, devices, data_dir, data_fraction), console())


@app.command()
def doctor(
    study: Study, devices: Devices = "auto", gpus_per_trial: GpusPerTrial = 1,
    data_dir: DataDir = None,
    data_fraction: Fraction = None, seed: Seed = None,
    profile: Annotated[bool, typer.Option(
        "--profile", help="Write a torch.profiler trace and list the ten slowest operators.")] =
    False,
    home: Home = None, storage: Storage = None, json: Json = False,
) -> int:
    """Look at machine, database, data, model and a few steps; 1: something is wrong."""
    from hpo.doctor import doctor as look

    settings = replace(_brief(study, devices, data_dir, data_fraction, home, seed, storage),
                       gpus_per_trial=gpus_per_trial)
    return look(settings, console(), profile=profile, as_json=json)


@app.command("lr-range")
def lr_range(
    study: Study, devices: Devices = "auto", data_dir: DataDir = None,
    data_fraction: Fraction = None, seed: Seed = None,
    low: Annotated[float | None, typer.Option(help="The sweep's first rate.")] = None,
    high: Annotated[float | None, typer.Option(help="The sweep's last rate.")] = None,
    home: Home = None, json: Json = False,
) -> int:
    """Run the learning-rate range test at the study's defaults, print it and draw it."""
    from hpo.trial_run import lr_range as sweep

    settings = _brief(study, devices, data_dir, data_fraction, home, seed)
    return sweep(settings, console(), low=low, high=high, as_json=json)


def _brief(
    study: str, devices: str, data_dir: Path | None, data_fraction: float | None,
    home: Path | None = None, seed: int | None = None, storage: str | None = None,
) -> s.Settings:
    where = s.home_folder(home)
    return s.Settings(study=study, name=study, home=where, storage=s.storage_url(storage, where),
                      devices=devices, workers=1, data_dir=data_dir, seed=seed,
                      data_fraction=data_fraction)


@app.command()
def status(study: Study, home: Home = None, storage: Storage = None, json: Json = False) -> int:
    """Show where a study stands: its phases, why trials ended early, and who is alive."""
    from hpo.status import status as show

    return show(study, s.home_folder(home), storage, console(), as_json=json)


@app.command()
def watch(
    study: Study, home: Home = None, storage: Storage = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
) -> int:
    """Watch a study on the terminal, from any machine that reaches its database, to its end."""
    from hpo.live import watch as follow

    return follow(study, s.home_folder(home), storage, console(), interval_s=interval, once=once)


@app.command()
def show(
    trial: Trial, study: Study, home: Home = None, storage: Storage = None, json: Json = False,
) -> int:
    """Show one trial: how it ended, how its params were chosen, how it learned, its log's end."""
    from hpo.show import show as explain

    return explain(trial, study, s.home_folder(home), storage, console(), as_json=json)


@app.command()
def replay(
    trial: Trial, study: Study,
    devices: Annotated[str | None, option(
        "--devices", "auto, cpu, or a GPU's index (default: a device like the trial's).",
        "HPO_DEVICES")] = None,
    data_dir: DataDir = None, home: Home = None, storage: Storage = None, json: Json = False,
) -> int:
    """Run a trial again and compare each epoch; 1: it differs. Nothing is written."""
    from hpo.replay import replay as run_again

    return run_again(trial, study, s.home_folder(home), storage, console(), devices=devices,
                     data_dir=data_dir, as_json=json)


@app.command()
def best(
    study: Study, home: Home = None, storage: Storage = None, json: Json = False,
    rank: Annotated[int, typer.Option(help="1 is the best.")] = 1,
) -> int:
    """Show a study's best: the registered result, else the best COMPLETE trial so far."""
    from hpo.ask import best as show

    return show(study, s.home_folder(home), storage, console(), rank=rank, as_json=json)


@app.command()
def report(study: Study, home: Home = None, storage: Storage = None, json: Json = False) -> int:
    """Write the report, one HTML file and Markdown, and put it where the dashboard shows it."""
    from hpo.ask import report as write

    return write(study, s.home_folder(home), storage, console(), as_json=json)


@app.command()
def export(
    study: Study, to: To, force: Force = False,
    trial: Annotated[int | None, typer.Option(
        help="A trial by its number, of the search unless --phase names another.")] = None,
    rank: Annotated[int, typer.Option(help="A registered result by its rank; 1 is the best.")] = 1,
    phase: Annotated[str, typer.Option(help="search, grid, lr-range or default.")] = "search",
    data_dir: DataDir = None, devices: Devices = "auto", home: Home = None,
    storage: Storage = None,
) -> int:
    """Write a trained model into a folder for `hpo.load`, once it scores as it did."""
    from hpo.export import export as write

    return write(study, to, s.home_folder(home), storage, console(), trial=trial, rank=rank,
                 phase=phase, data_dir=data_dir, devices=devices, force=force)


@app.command()
def delete(
    study: Study, home: Home = None, storage: Storage = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> int:
    """Delete a study: its trials, tickets and checkpoints; its registry rows stay, marked."""
    from hpo.ask import delete as remove

    if not yes and not sys.stdin.isatty():
        raise InputError("delete asks before it deletes, and here is no terminal to ask on: "
                         "give --yes")
    return remove(study, s.home_folder(home), storage, console(),
                  lambda question: yes or typer.confirm(question))


@app.command()
def init(home: Home = None, storage: Storage = None) -> int:
    """Set up the database, or bring it up to date; safe to repeat."""
    import storage as database

    url = s.storage_url(storage, s.home_folder(home))
    database.init(url)
    console().print(f"{database.mask(url)} is set up", highlight=False, markup=False,
                     soft_wrap=True)
    return 0


@app.command()
def dashboard(
    home: Home = None, storage: Storage = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; 0: any free one.")] = 8080,
    path_prefix: Annotated[str, option(
        "--path-prefix", "The path under which a proxy serves it: /hpo.",
        "HPO_DASHBOARD_PREFIX")] = "",
    public_host: Annotated[list[str] | None, typer.Option(
        "--public-host", help="A name under which a proxy serves it; several times for several.",
        envvar="HPO_DASHBOARD_HOSTS", show_envvar=True)] = None,
    trusted_proxy: Annotated[str | None, option(
        "--trusted-proxy", "The address of a proxy whose X-Forwarded-For, -Proto and -Host are "
                           "believed.", "HPO_DASHBOARD_PROXY")] = None,
    token: Annotated[str | None, option(
        "--token", "The token of readers (default: a new one).", "HPO_DASHBOARD_TOKEN")] = None,
    writer_token: Annotated[str | None, option(
        "--writer-token", "The token of writers, who may change and delete studies.",
        "HPO_DASHBOARD_WRITER_TOKEN")] = None,
    no_token: Annotated[bool, typer.Option(
        "--no-token", help="Ask readers for no token; only on 127.0.0.1.")] = False,
    writable: Annotated[bool, typer.Option(
        "--writable", help="Make a token for writers, unless one is given.")] = False,
) -> int:
    """Start optuna-dashboard on the studies, with their pictures and checkpoints."""
    from hpo.dashboard import make_address, serve

    where = s.home_folder(home)
    serve(s.storage_url(storage, where), where,
          make_address(host, port, path_prefix, public_host or (), trusted_proxy), token=token,
          writer_token=writer_token, no_token=no_token, writable=writable)
    return 0


def main() -> None:
    """Run the command line; any error that hpo can explain is one line on stderr."""
    try:
        code = app(standalone_mode=False)
    except HpoError as error:
        _fail(str(error))
        code = error.exit_code
    except UsageError as error:
        error.show()  # type: ignore[attr-defined]
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except OSError as error:
        # A disk, a folder or a socket that refuses; what it was asked for is in its own words.
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        code = 1
    # What a command has imported is no garbage to be searched for at its end.
    gc.freeze()
    sys.exit(code or 0)


def _fail(text: str) -> None:
    if os.environ.get("HPO_DEBUG"):
        import traceback

        traceback.print_exc()
    for line in text.splitlines():
        print(f"hpo: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
