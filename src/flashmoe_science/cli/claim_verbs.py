"""The verbs about claims, ``claim new`` and ``lint``: what each takes, and what its help teaches."""

# ruff: noqa: D301 - the character \b in a docstring tells typer to keep the lines of a paragraph apart

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from .options import Json, Metric, StoreName, split

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.callback()
def claim() -> None:
    """Write claims, which `flashmoe verify` judges.

    \b
    Example:
      flashmoe claim new 20261120 --time graph --time wall
    """


@app.command("new", short_help="Write a claim from a run.")
def new(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The id of a run, the beginning of one, or a JSON file.")],
    metric: Annotated[
        Optional[list[Metric]],  # noqa: UP045
        typer.Option("--time", metavar="KIND", help="Claim kernel, graph or wall time; repeat it. Default: graph."),
    ] = None,
    factor: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--factor", metavar="X", help="Times as fast. Default: the largest round figure that is shown."),
    ] = None,
    baseline: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--baseline", "-b", metavar="NAME", help="Repeat it: the fastest of them. Default: the first."),
    ] = None,
    cases: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--cases", metavar="PATTERN", help="Only cases whose names fit, e.g. '*_d64_*'; repeat it."),
    ] = None,
    mean: Annotated[
        bool, typer.Option("--mean", help="Claim the geometric mean over the cases, not each case.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Claim the peak bytes that a call allocates; with --time, those times too.")
    ] = False,
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="NAME", help="Words of the GPU's name. Default: its model.")
    ] = "",
    claim_id: Annotated[str, typer.Option("--id", metavar="ID", help="Default: of subject, suite, time and GPU.")] = "",
    sentence: Annotated[str, typer.Option("--sentence", metavar="TEXT", help="Default: worded from the rest.")] = "",
    file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--file", metavar="FILE", help="In claims/; default: the subject's name.", show_default=False),
    ] = None,
    asserted: Annotated[
        bool, typer.Option("--asserted", help="Write it although the evidence does not demonstrate it.")
    ] = False,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """Write a claim from a run into claims/, and print what verify says of it.

    What the evidence does not demonstrate is not written. The default factor is the largest round figure
    (1, 1.1 ... 1.9, 2, 2.5 ... 4.5, 5, 6 ... 9, times a power of ten) below the lower end of the interval.

    \b
    Examples:
      flashmoe claim new 20261120
      flashmoe claim new 20261120 --time wall --factor 1.5 --id my-kernel-wall

    \b
    Exit codes:
      0  written                       3  a gate failed in the run
      1  refuted: not written          4  not demonstrated: not written
      2  wrong usage                      (--asserted writes it, and returns the same)
    """
    from ..proof.claims import Metric as Kind
    from ..proof.new_claim import Wish
    from .claiming import run_claim_new

    times: list[Kind] = [m.value for m in metric or ()]
    wish = Wish(
        kinds=[*times, "memory"] if memory else times,
        baselines=split(baseline),
        scope="geometric mean" if mean else "each case",
        cases=cases or (),
        factor=factor,
        gpu=gpu,
        id=claim_id,
        sentence=sentence,
    )
    raise typer.Exit(run_claim_new(run, wish, file=file, asserted=asserted, store=store, as_json=as_json))


def lint(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Markdown files, or folders that hold some.")],
    strict: Annotated[bool, typer.Option("--strict", help="A stale claim backs nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Find sentences of Markdown that assert a speed or a saving of memory, and say which rest on a claim.

    A sentence names its claim in a comment behind it, <!-- claim: ID -->, by a link to claims/FILE.toml#ID, by the id
    as code, or by being the claim's own sentence. A figure larger than the claim's is not backed.

    \b
    Examples:
      flashmoe lint README.md docs
      flashmoe lint README.md --json

    \b
    Exit codes:
      0  nothing is only asserted    1  something is    2  wrong usage
    """
    from .linting import run_lint

    raise typer.Exit(run_lint(files, strict=strict, as_json=as_json))
