"""The flags that several commands have, each said once."""

from pathlib import Path
from typing import Annotated, Any

import typer


def option(flag: str, text: str, env: str | None = None) -> Any:
    """Return a flag that an environment variable may stand for."""
    return typer.Option(flag, help=text, envvar=env, show_envvar=env is not None)


Study = Annotated[str, option("--study", "The study's name.", "HPO_STUDY")]
Home = Annotated[Path | None, option(
    "--home", "The folder of everything a run writes (default hpo-runs).", "HPO_HOME")]
Storage = Annotated[str | None, option(
    "--storage", "The database: sqlite:///FILE or postgresql://... (default: hpo.db in --home).",
    "HPO_STORAGE")]
StorageTimeout = Annotated[float, option(
    "--storage-timeout", "Seconds in which a lost database may come back before the run ends.",
    "HPO_STORAGE_TIMEOUT")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Name = Annotated[str | None, option(
    "--name", "A name for the study other than its module's: several from one module.",
    "HPO_NAME")]
Workers = Annotated[int | None, option("--workers", "Workers; one a device.", "HPO_WORKERS")]
Devices = Annotated[str, option(
    "--devices", "auto, cpu, or GPU indices: 0,1 (0,0 shares one).", "HPO_DEVICES")]
GpusPerTrial = Annotated[int, option(
    "--gpus-per-trial", "Devices that train one trial together (DDP, or FSDP).",
    "HPO_GPUS_PER_TRIAL")]
DataDir = Annotated[Path | None, option(
    "--data-dir", "Where the data lies, or is downloaded to.", "HPO_DATA_DIR")]
Fraction = Annotated[float | None, option(
    "--data-fraction", "Train on a stratified part of the data.", "HPO_DATA_FRACTION")]
Epochs = Annotated[int | None, option("--epochs", "Epochs of a full trial.", "HPO_EPOCHS")]
Seed = Annotated[int | None, option("--seed", "The study's seed.", "HPO_SEED")]
MaxFailures = Annotated[int, option(
    "--max-failures", "Stop when that many first trials all fail for one reason; 0: never.",
    "HPO_MAX_FAILURES")]
EpochTimeout = Annotated[float | None, option(
    "--epoch-timeout", "Seconds an epoch may take before its trial is ended as hung (default: 10 "
                       "times the median epoch, at least 300).", "HPO_EPOCH_TIMEOUT")]
To = Annotated[Path, typer.Option("--to", help="The folder to write, which must be new.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an export that is there.")]
Trial = Annotated[str, typer.Argument(
    help="A trial's number in the search, or PHASE/NUMBER: grid/3, confirm/2, lr-range/0.")]


def console() -> Any:
    """Return what commands print to."""
    from rich.console import Console

    return Console()
