"""The verb ``diagnose``: what it takes, and what its help teaches. What it does is in ``diagnosing.py``."""

# ruff: noqa: D301 - the character \b in a docstring tells typer to keep the lines of a paragraph apart

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from .options import Json, StoreName, split


def diagnose(
    context: typer.Context,
    subject: Annotated[
        str, typer.Argument(metavar="SUBJECT", help="One of ours, or a kernel.toml.")
    ] = "flash_attention",
    suite: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--suite", "-s", metavar="SUITE", help="All its cases, or those named by --case."),
    ] = None,
    case: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--case", metavar="NAME", help="A case of a suite; repeat it. Default: seed's largest."),
    ] = None,
    baseline: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--baseline", "-b", metavar="NAME", help="A baseline to time beside it. Default: the operator's."),
    ] = None,
    gpu: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--gpu", metavar="NAME", help="Say what compiling alone tells for this GPU, e.g. L4."),
    ] = None,
    counters: Annotated[
        bool, typer.Option("--counters/--no-counters", help="Ask Nsight Compute, where it may read counters.")
    ] = True,
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Seed of the inputs.", show_default="drawn")
    ] = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--output", "-o", metavar="FILE", help="Also write the diagnosis to FILE, as JSON."),
    ] = None,
    budget: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--budget", metavar="DOLLARS", min=0, help="Do not begin what would pass it."),
    ] = None,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """Test every hypothesis of why a kernel is slow: confirmed, ruled out, or cannot tell, with the numbers.

    The causes come first, by the part of a call that each explains, with what to try and the most that it can give.
    With no GPU, or for another GPU than the one here, it says what compiling alone tells.

    \b
    Examples:
      flashmoe diagnose my_kernel.toml --case b1_h1_s512_d64_fp16
      flashmoe diagnose flash_attention --suite standard -o why.json
      flashmoe diagnose forward_triton --case b1_h1_s512_d64_fp16 --gpu L4

    \b
    Exit codes:
      0  every call was timed and diagnosed     3  the kernel cannot be built or imported
      2  wrong usage                            4  nothing, or not every call, could be timed
    """
    from .diagnosing import DiagnosisWanted, run_diagnose

    wanted = DiagnosisWanted(
        subject=subject,
        suite=suite,
        cases=split(case),
        baselines=split(baseline),
        gpu=gpu,
        counters=counters,
        seed=seed,
        budget=budget,
        store=store,
        args=context.obj or [],
    )
    raise typer.Exit(run_diagnose(wanted, output=output, as_json=as_json))
