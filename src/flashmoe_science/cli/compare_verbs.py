"""The verbs ``compare`` and ``history``: what each takes, and what its help teaches."""

# ruff: noqa: D301 - the character \b in a docstring tells typer to keep the lines of a paragraph apart

from __future__ import annotations

from typing import Annotated, Optional

import typer

from .options import Json, Metric, StoreName, split

# Three show a difference; that all of a dozen cases are the same, within 1 %, they rarely show: docs/how-to/compare.md.
PROCESSES = 6


def compare(
    context: typer.Context,
    a: Annotated[str, typer.Argument(metavar="A", help="A revision of this git repository, or a run.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The one that is compared with A.")],
    subject: Annotated[
        Optional[str],  # noqa: UP045
        # By name: typer 0.27.0 takes the metavar for the name where they differ only in case.
        typer.Option("--subject", metavar="SUBJECT", help="One of ours, or a kernel.toml. Default: flash_attention."),
    ] = None,
    suite: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--suite", "-s", metavar="SUITE", help="A packaged suite, or a file. Default: seed."),
    ] = None,
    metric: Annotated[
        Optional[list[Metric]],  # noqa: UP045
        typer.Option("--time", metavar="KIND", help="kernel, graph or wall; repeat it. Default: graph, or all."),
    ] = None,
    tolerance: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            metavar="SHARE", min=0, max=1, help="The smallest effect that matters. Default: 0.01, of two runs 0.02."
        ),
    ] = None,
    allow_different: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="FIELD", help="Of two runs: a field that may differ, e.g. driver; repeat it."),
    ] = None,
    gpu: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--gpu", metavar="NAME", help="Compile for this GPU, e.g. L4; repeat it. Default: every kind."),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, metavar="N", help="Worker processes that measure.")] = PROCESSES,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Rounds in each process.")] = 10,
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Seed of inputs and orders.", show_default="drawn")
    ] = None,
    budget: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--budget", metavar="DOLLARS", min=0, help="Of both: stop before the gate that would pass it, or in it."
        ),
    ] = None,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """Say whether B is faster than A, slower, the same, or whether that is undecided: case by case, and in all.

    Two revisions are checked out and built apart, both must be correct, and their rounds are interleaved in one run.
    Two runs (ids or JSON files) are compared by what each measured against a common baseline.

    \b
    Examples:
      flashmoe compare main HEAD
      flashmoe compare HEAD~1 HEAD --subject my_kernel/kernel.toml --time graph --time wall
      flashmoe compare 20261121T130849Z 20261121T190255Z --time kernel --allow-different driver

    \b
    Exit codes:
      0  nothing is slower             3  a revision fails a gate
      1  something is slower           4  undecided, or nothing was measured
      2  wrong usage                   130  interrupted
    """
    from .comparing import Wanted, run_compare

    wanted = Wanted(
        a=a,
        b=b,
        subject=subject,
        suite=suite,
        times=[m.value for m in metric or ()],
        tolerance=tolerance,
        allowed=split(allow_different),
        gpus=split(gpu),
        processes=processes,
        rounds=rounds,
        seed=seed,
        budget=budget,
        store=store,
        args=context.obj or [],
    )
    raise typer.Exit(run_compare(wanted, as_json=as_json))


def history(
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="The name of a subject, as `runs` lists it.")],
    suite: Annotated[
        str, typer.Option(metavar="NAME", help="Only runs of this suite. Default: the newest run's.")
    ] = "",
    gpu: Annotated[str, typer.Option(metavar="NAME", help="Only runs on a GPU with this in its name.")] = "",
    metric: Annotated[Metric, typer.Option("--time", metavar="KIND", help="kernel, graph or wall.")] = Metric.graph,
    case: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME", help="Only this case. Default: the geometric mean of those that all runs have."),
    ] = None,
    since: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="DATE", help="Only runs since this date (UTC), or since 7d, 12h or 2w ago."),
    ] = None,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """Say where the speed of a subject changed over its runs, and whether code, method or hardware changed there.

    The speed is that over the baseline of the newest run. Too few runs cannot tell, and then it says so.

    \b
    Examples:
      flashmoe history flash_attention --suite seed --gpu H200
      flashmoe history my_attention --time wall --case b1_h16_s512_d64_fp16

    \b
    Exit codes:
      0  looked at    2  wrong usage, or no such runs    4  too few runs to tell
    """
    from .comparing import Only, run_history

    only = Only(subject, suite, gpu, since)
    code = run_history(only, metric=metric.value, case=case, store=store, as_json=as_json)
    raise typer.Exit(code)
