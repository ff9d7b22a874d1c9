"""`hpo registry ...`: the registered results of all studies."""

from typing import Annotated

import typer

from hpo import settings as s
from hpo.cli_options import DataDir, Devices, Force, Home, Json, Storage, To, console

Row = Annotated[str, typer.Argument(
    help="A row's id, its first characters, or STUDY@champion, STUDY@challenger.")]

app = typer.Typer(no_args_is_help=True, help="The registered results of all studies.")


@app.command("list")
def registry_list(
    study: Annotated[str | None, typer.Option(help="Only this study's rows.")] = None,
    every: Annotated[bool, typer.Option(
        "--all", help="Also rows of deleted studies, and those that were replaced.")] = False,
    home: Home = None, storage: Storage = None, json: Json = False,
) -> int:
    """List the registered results, by study."""
    from hpo.registry import listing

    return listing(study, s.home_folder(home), storage, console(), every=every, as_json=json)


@app.command("show")
def registry_show(
    row: Row,
    home: Home = None, storage: Storage = None, json: Json = False,
) -> int:
    """Show all of one registered result."""
    from hpo.registry import show

    return show(row, s.home_folder(home), storage, console(), as_json=json)


@app.command("diff")
def registry_diff(
    row: Row, other: Row, home: Home = None, storage: Storage = None, json: Json = False,
) -> int:
    """Show in what two registered results differ, and by how much the first is better."""
    from hpo.registry_diff import diff

    return diff(row, other, s.home_folder(home), storage, console(), as_json=json)


@app.command("promote")
def registry_promote(
    row: Row,
    force: Annotated[bool, typer.Option(
        "--force", help="Also a result that is not shown to be better.")] = False,
    home: Home = None, storage: Storage = None,
) -> int:
    """Make a confirmed result its study's champion; the one before stays in the history."""
    from hpo.registry import promote

    return promote(row, s.home_folder(home), storage, console(), force=force)


@app.command("export")
def registry_export(
    row: Row, to: To, force: Force = False, data_dir: DataDir = None, devices: Devices = "auto",
    home: Home = None, storage: Storage = None,
) -> int:
    """Write a registered model into a folder for `hpo.load`, once it scores as it did."""
    from hpo.export import export_row

    return export_row(row, to, s.home_folder(home), storage, console(), data_dir=data_dir,
                      devices=devices, force=force)
