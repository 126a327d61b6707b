"""Options that more than one verb has."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

from ..errors import InputError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; the log stays on stderr.")]
Csv = Annotated[
    Optional[Path],  # noqa: UP045 - typer reads this on Python 3.10
    typer.Option("--csv", metavar="FILE", help="Also write a line for every case, arm and kind of time to FILE."),
]
Junit = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--junit", metavar="FILE", help="Also write gates and claims to FILE as JUnit XML."),
]
StoreName = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--store",
        metavar="FOLDER",
        help="The folder that holds the store. Default: the one that FLASHMOE_STORE names.",
        show_default=False,
    ),
]


class Metric(str, Enum):
    """The three times."""

    kernel = "kernel"
    graph = "graph"
    wall = "wall"


def given(context: typer.Context) -> set[str]:
    """Return the parameters that stand on the command line; the others have their defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def check_alone(context: typer.Context, option: str, *beside: str) -> None:
    """Raise ``InputError`` where anything but ``beside`` was given with ``option``, which would not look at it."""
    others = sorted(given(context) - {option, *beside})
    if others:
        raise InputError(f"--{option} does not go with {', '.join(others)}")


def split(names: list[str] | None) -> list[str]:
    """Return the names of a repeated option; ``a,b`` counts as two."""
    return [name.strip() for given in names or () for name in given.split(",") if name.strip()]
