"""The verb ``study``: what it takes, and what its help teaches. What it does is in ``studying.py``."""

# ruff: noqa: D301 - the character \b in a docstring tells typer to keep the lines of a paragraph apart

from __future__ import annotations

from typing import Annotated, Optional

import typer

from .options import Json, StoreName, check_alone


def study(
    context: typer.Context,
    subject: Annotated[
        str, typer.Argument(metavar="SUBJECT", help="One of ours, or a kernel.toml.")
    ] = "flash_attention",
    suite: Annotated[
        str, typer.Option("--suite", "-s", metavar="SUITE", help="A packaged suite, or a file.")
    ] = "scaling",
    case: Annotated[
        Optional[str],  # noqa: UP045 - typer reads this on Python 3.10
        typer.Option("--case", metavar="NAME", help="Its case. Default: one of a few dozen microseconds."),
    ] = None,
    same: Annotated[
        int, typer.Option("--same", min=0, metavar="N", help="Comparisons of the kernel with itself.")
    ] = 200,
    planted: Annotated[
        int, typer.Option("--planted", min=0, metavar="N", help="Comparisons with 3 % more work, and with 1 %.")
    ] = 20,
    processes: Annotated[int, typer.Option(min=2, metavar="N", help="Worker processes of a comparison.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Rounds in each process.")] = 10,
    batches: Annotated[int, typer.Option(min=1, metavar="N", help="Groups of comparisons that share processes.")] = 3,
    tolerance: Annotated[
        float, typer.Option(metavar="SHARE", min=0, max=1, help="The smallest effect that matters, as in compare.")
    ] = 0.0,
    seconds: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(metavar="S", min=0, help="Begin no process that would pass so many seconds of the GPU."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Seed of inputs and orders.", show_default="drawn")
    ] = None,
    resume: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--resume", metavar="STUDY", help="Go on with this study: its file, or the beginning of its id."),
    ] = None,
    runs: Annotated[
        bool,
        typer.Option("--runs", help="Measure nothing: count wrong verdicts over the suites of known runs."),
    ] = False,
    budget: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--budget", metavar="DOLLARS", min=0, help="Begin no process that would pass it."),
    ] = None,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """See how often comparisons are wrong on this GPU.

    The kernel is compared with itself, again and again, and with itself plus 3 % and 1 % of planted work: how many
    verdicts are wrong, and how many see what was planted? Writes a study to evidence/studies/, after every process.
    With --runs nothing is measured: in every run the first baseline stands against its own copy, over a whole suite.

    \b
    Examples:
      flashmoe study
      flashmoe study --same 40 --planted 0
      flashmoe study --resume 20261121T101500Z
      flashmoe study --runs
      flashmoe show evidence/studies/20261121T101500Z-study-flash_attention-1a2b3c.json.gz --verbose

    \b
    Exit codes:
      0  as required        1  wrong too often, or planted work is seen too rarely
      2  wrong usage        4  it did not come to its end: --resume goes on; or too few runs
    """
    from .studying import StudyWanted, run_study_of_runs, run_study_verb

    if runs:
        check_alone(context, "runs", "store", "as_json")
        raise typer.Exit(run_study_of_runs(store, as_json=as_json))
    wanted = StudyWanted(
        subject=subject,
        suite=suite,
        case=case,
        same=same,
        planted=planted,
        processes=processes,
        rounds=rounds,
        batches=batches,
        tolerance=tolerance,
        seconds=seconds,
        seed=seed,
        resume=resume,
        budget=budget,
        store=store,
        args=context.obj or [],
    )
    raise typer.Exit(run_study_verb(wanted, as_json=as_json))
