"""Options that more than one verb has."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..proof.records.evidence import TimeKind


def option(names: str, metavar: str, said: str, **more: Any) -> Any:
    """Return an option of a verb: its names (none: the parameter's), what stands for its value, and its help."""
    return typer.Option(*names.split(), metavar=metavar, help=said, **more)


def flag(names: str, said: str, **more: Any) -> Any:
    """Return an option of a verb that takes no value, or one of a few words."""
    return typer.Option(*names.split(), help=said, **more)


def argument(metavar: str, said: str, **more: Any) -> Any:
    """Return an argument of a verb."""
    return typer.Argument(metavar=metavar, help=said, **more)


class Metric(str, Enum):
    """The three times."""

    kernel = "kernel"
    graph = "graph"
    wall = "wall"


Json = Annotated[bool, flag("--json", "Print one JSON document on stdout; the log stays on stderr.")]
Csv = Annotated[Path | None, option("--csv", "FILE", "Also write a line for every case, arm and kind of time to FILE.")]
Junit = Annotated[Path | None, option("--junit", "FILE", "Also write gates and claims to FILE as JUnit XML.")]
StoreName = Annotated[
    str | None,
    option(
        "--store",
        "FOLDER",
        "The folder that holds the store. Default: the one that FLASHMOE_STORE names.",
        show_default=False,
    ),
]
Run = Annotated[str, argument("RUN", "The id of a run, the beginning of one, or a JSON file.")]
SuiteName = Annotated[str, option("--suite -s", "SUITE", "A packaged suite, or a file.")]
Gpus = Annotated[
    list[str] | None, option("--gpu", "NAME", "Compile for this GPU, e.g. L4; repeat it. Default: every kind.")
]
Seed = Annotated[int | None, option("--seed", "N", "Seed of inputs and orders.", min=0, show_default="random")]
Since = Annotated[str | None, option("--since", "DATE", "Only since this date (UTC), or since 7d, 12h or 2w ago.")]
Trust = Annotated[bool, flag("--trust", "Let the code of this repository run when it is read, e.g. its own operators.")]


def given(context: typer.Context) -> set[str]:
    """Return the parameters that were typed; the others have their defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def split(names: list[str] | None) -> list[str]:
    """Return the names of a repeated option; ``a,b`` counts as two."""
    return [name.strip() for given in names or () for name in given.split(",") if name.strip()]


def times_of(metrics: list[Metric] | None) -> list[TimeKind]:
    """Return the kinds of time of a repeated option, each once."""
    return list(dict.fromkeys(Metric(metric).value for metric in metrics or ()))
