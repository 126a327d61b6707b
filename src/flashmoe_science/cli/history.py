"""The verb ``history``: where the speed of a subject changed over its runs."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import InputError
from ..proof.compare.history import look_back
from ..proof.records.store import Archive, Store, find_repository
from ..proof.report.compare_terminal import history_lines
from .exit_codes import HOLDS, INCONCLUSIVE
from .names import moment_named
from .options import Json, Metric, Since, StoreName
from .terminal import Terminal, as_plain


def history(
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="The name of a subject, as `runs` lists it.")],
    suite: Annotated[
        str, typer.Option(metavar="NAME", help="Only runs of this suite. Default: the newest run's.")
    ] = "",
    gpu: Annotated[str, typer.Option(metavar="NAME", help="Only runs on a GPU with this in its name.")] = "",
    metric: Annotated[Metric, typer.Option("--time", metavar="KIND", help="kernel, graph or wall.")] = Metric.graph,
    case: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only this case. Default: the geometric mean of those that all runs have."),
    ] = None,
    since: Since = None,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """Find where the speed of a subject changed over its runs, and whether code, method or hardware changed there.

    Speed means the speedup over the baseline of the newest run. Too few runs are inconclusive.

    \b
    Examples:
      flashmoe history flash_attention --suite seed --gpu H200
      flashmoe history my_attention --time wall --case b1_h16_s512_d64_fp16

    \b
    Exit codes:
      0  shown    2  wrong usage, or no such runs    4  too few runs
    """
    terminal = Terminal(as_json=as_json)
    archive = Archive(Store(store), find_repository())
    moment = moment_named(since) if since else None
    listed = archive.runs(subject=subject, suite=suite, gpu=gpu, since=moment, on_trouble=terminal.warn_of)
    if not listed:
        asked = {"of suite": suite, "on": gpu, "since": since}
        which = "".join(f" {word} {value}" for word, value in asked.items() if value)
        raise InputError(f"there is no run of {subject}{which}", hint=_hint(archive, subject))
    found = look_back([archive.load(run.id) for run in listed], metric.value, case=case)
    terminal.show(history_lines(found))
    code = HOLDS if found.enough else INCONCLUSIVE
    terminal.document({"history": as_plain(found), "exit_code": code})
    raise typer.Exit(code)


def _hint(archive: Archive, subject: str) -> str:
    """Return which runs there are instead."""
    known = archive.runs(on_trouble=lambda _: None)
    own = [run for run in known if run.subject == subject]
    if own:
        suites = ", ".join(sorted({run.suite for run in own}))
        gpus = ", ".join(sorted({run.gpu or "machines without a GPU" for run in own}))
        return f"its runs are of {suites} on {gpus}, the newest of {own[0].created_at[:10]}"
    names = ", ".join(sorted({run.subject for run in known}))
    return f"there are runs of {names}" if names else "flashmoe prove makes the first"
