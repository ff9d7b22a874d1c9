"""`hpo registry ...`: the registered results of all studies."""

from typing import Annotated

import typer

from hpo import settings as s
from hpo.cli_options import Home, Json, Storage, console

app = typer.Typer(no_args_is_help=True, help="The registered results of all studies.")


@app.command("list")
def registry_list(
    study: Annotated[str | None, typer.Option(help="Only this study's rows.")] = None,
    every: Annotated[bool, typer.Option(
        "--all", help="Also rows of deleted studies, and those that were replaced.")] = False,
    home: Home = None, storage: Storage = None, json: Json = False,
) -> int:
    """List the registered results, by study."""
    from hpo.ask import registry_list as show

    return show(study, s.home_folder(home), storage, console(), every=every, as_json=json)


@app.command("show")
def registry_show(
    row: Annotated[str, typer.Argument(help="The row's id, or its first characters.")],
    home: Home = None, storage: Storage = None, json: Json = False,
) -> int:
    """Show all of one registered result."""
    from hpo.ask import registry_show as show

    return show(row, s.home_folder(home), storage, console(), as_json=json)
