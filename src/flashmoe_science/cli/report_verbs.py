"""The verb that makes a page: report."""

# ruff: noqa: D301 - the character \b in a docstring tells typer to keep the lines of a paragraph apart

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from .options import Json, Metric, StoreName

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(short_help="Make a page about a run, or several.")
def report(
    run: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            metavar="[RUN]...",
            help="Ids of runs, beginnings of them, or JSON files. Default: the newest run of this repository.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(
            "--output", "-o", metavar="FILE", help="Ends in .html, .md or .csv; repeat it. Default: report.html."
        ),
    ] = None,
    metric: Annotated[
        Optional[Metric],  # noqa: UP045
        typer.Option("--time", metavar="KIND", help="Plot kernel, graph or wall time. Default: graph."),
    ] = None,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """Make one self-contained page about a run, or several side by side: verdicts, gates, speed, roofline, raw numbers.

    The page is one file without scripts that fetches nothing. The ending of FILE says whether it becomes HTML, Markdown
    or CSV.

    \b
    Examples:
      flashmoe report
      flashmoe report 20261120 -o report.html -o report.md
      flashmoe report evidence/*.json.gz -o all.html

    \b
    Exit codes:
      0  written    2  there is no such run, or a file cannot be read or written
    """
    from .reporting import run_report

    kind = metric.value if metric else None
    code = run_report(run or [], files=output or [Path("report.html")], kind=kind, store=store, as_json=as_json)
    raise typer.Exit(code)
