"""Options that more than one verb has."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Metric(str, Enum):
    """The three times."""

    kernel = "kernel"
    graph = "graph"
    wall = "wall"


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; the log stays on stderr.")]
Csv = Annotated[
    Path | None,
    typer.Option("--csv", metavar="FILE", help="Also write a line for every case, arm and kind of time to FILE."),
]
Junit = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", help="Also write gates and claims to FILE as JUnit XML.")
]
StoreName = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="FOLDER",
        help="The folder that holds the store. Default: the one that FLASHMOE_STORE names.",
        show_default=False,
    ),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="The id of a run, the beginning of one, or a JSON file.")]
SuiteName = Annotated[str, typer.Option("--suite", "-s", metavar="SUITE", help="A packaged suite, or a file.")]
Gpus = Annotated[
    list[str] | None,
    typer.Option("--gpu", metavar="NAME", help="Compile for this GPU, e.g. L4; repeat it. Default: every kind."),
]
Seed = Annotated[
    int | None, typer.Option("--seed", min=0, metavar="N", help="Seed of inputs and orders.", show_default="random")
]
Since = Annotated[
    str | None,
    typer.Option("--since", metavar="DATE", help="Only since this date (UTC), or since 7d, 12h or 2w ago."),
]


Trust = Annotated[
    bool,
    typer.Option("--trust", help="Let the code of this repository run when it is read, e.g. its own operators."),
]


def given(context: typer.Context) -> set[str]:
    """Return the parameters that were typed; the others have their defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def split(names: list[str] | None) -> list[str]:
    """Return the names of a repeated option; ``a,b`` counts as two."""
    return [name.strip() for given in names or () for name in given.split(",") if name.strip()]
