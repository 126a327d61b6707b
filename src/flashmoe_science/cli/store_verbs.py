"""The verbs that fill and empty the store: import, export."""

# ruff: noqa: D301 - the character \b in a docstring tells typer to keep the lines of a paragraph apart

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from .options import Json, StoreName

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(name="import", short_help="Take records into the store.")
def import_(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE|FOLDER...", help="Records, or folders of them.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace complete runs that the store has with another content.")
    ] = False,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """Take records into the store, byte for byte as they are, with what their gates took of a GPU.

    \b
    Examples:
      flashmoe import evidence/
      flashmoe import run.json --store postgresql://ada@server/runs

    \b
    Exit codes:
      0  all are in the store    2  one cannot be read, or is there with another content; the others are in
    """
    from .keeping import run_import

    raise typer.Exit(run_import(paths, replace=replace, store=store, as_json=as_json))


@app.command(short_help="Write runs to files.")
def export(
    runs: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads this on Python 3.10
        typer.Argument(metavar="RUN...", help="Ids of runs, or the beginnings of some.", show_default=False),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the files go; made where it is missing.")
    ] = Path("evidence"),
    everything: Annotated[bool, typer.Option("--all", help="Every run of the store.")] = False,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """Write runs of the store, or of evidence/, to FOLDER: each as ID.json, byte for byte as it was imported or made.

    \b
    Examples:
      flashmoe export 20261120 -o evidence/
      flashmoe export --all -o backup/

    \b
    Exit codes:
      0  written    2  there is no such run, or a file of its name with another content
    """
    from .keeping import run_export

    raise typer.Exit(run_export(runs or [], folder=folder, everything=everything, store=store, as_json=as_json))
