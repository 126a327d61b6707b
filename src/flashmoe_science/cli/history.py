"""The verb ``history``: where the speed of a subject changed over its runs."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import InputError
from ..proof.compare.history import look_back
from ..proof.records.store import Archive, Store, find_repository
from ..proof.report.terminal import history_lines
from .exit_codes import HOLDS, INCONCLUSIVE
from .names import moment_named
from .options import Json, Metric, Since, StoreName, argument, option
from .terminal import Terminal, as_plain


def history(
    subject: Annotated[str, argument("SUBJECT", "The name of a subject, as `runs` lists it.")],
    suite: Annotated[str, option("", "NAME", "Only runs of this suite. Default: the newest run's.")] = "",
    gpu: Annotated[str, option("", "NAME", "Only runs on a GPU with this in its name.")] = "",
    metric: Annotated[Metric, option("--time", "KIND", "kernel, graph or wall.")] = Metric.graph,
    case: Annotated[
        str | None, option("", "NAME", "Only this case. Default: the geometric mean of those that all runs have.")
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
        raise InputError(f"there is no run of {subject}{which}", hint="flashmoe runs lists those that there are")
    found = look_back([archive.load(run.id) for run in listed], metric.value, case=case)
    terminal.show(history_lines(found))
    code = HOLDS if found.enough else INCONCLUSIVE
    terminal.document({"history": as_plain(found), "exit_code": code})
    raise typer.Exit(code)
