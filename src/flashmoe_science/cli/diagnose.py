"""The verb ``diagnose``: why a kernel is slow."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from ..proof.cost.terminal import bill_as_plain, receipt
from ..proof.diagnose import gather
from ..proof.diagnose.gather import Request, choose_cases, expected_seconds, observes_here
from ..proof.diagnose.observations import Diagnosis
from ..proof.diagnose.report import case_lines, failed_lines
from ..proof.measure.environment import describe_apart
from ..proof.records.ledger import Entry
from ..proof.records.store import Store
from ..proof.subject.loading import load_subject, operator_of
from ..proof.subject.subject import Subject
from ..proof.subject.suites import Suite, SuiteCase, list_suites, load_suite, suite_beside
from .exit_codes import GATE_FAILED, HOLDS, INCONCLUSIVE
from .names import check_name, gpu_named
from .options import Json, StoreName, split
from .run_shared import Tab, as_typed, open_tab
from .terminal import Terminal, as_plain, write_file

DEFAULT_SUITE = "seed"


def diagnose(
    context: typer.Context,
    subject: Annotated[
        str, typer.Argument(metavar="SUBJECT", help="One of ours, or a kernel.toml.")
    ] = "flash_attention",
    suite: Annotated[
        str | None,
        typer.Option("--suite", "-s", metavar="SUITE", help="All its cases, or those named by --case."),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="NAME", help="A case of a suite; repeat it. Default: seed's largest."),
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline", "-b", metavar="NAME", help="A baseline to time beside it. Default: the operator's first."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", help="Show what compilation alone shows for this GPU, e.g. L4."),
    ] = None,
    counters: Annotated[
        bool, typer.Option("--counters/--no-counters", help="Use Nsight Compute, where it may read counters.")
    ] = True,
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Seed of the inputs.", show_default="random")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Also write the diagnosis to FILE, as JSON."),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="DOLLARS", min=0, help="Do not begin if the estimate exceeds it."),
    ] = None,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """Test every hypothesis of why a kernel is slow: confirmed, ruled out or undecided, with the numbers.

    Causes come first, sorted by the part of a call that each explains, with a remedy and the most that it can gain.
    Without a GPU, or for another GPU than the one here, it shows what compilation alone shows.

    \b
    Examples:
      flashmoe diagnose my_kernel.toml --case b1_h1_s512_d64_fp16
      flashmoe diagnose flash_attention --suite standard -o why.json
      flashmoe diagnose forward_triton --case b1_h1_s512_d64_fp16 --gpu L4

    \b
    Exit codes:
      0  every call was timed and diagnosed     3  the kernel cannot be built or imported
      2  wrong usage                            4  a call could not be timed
    """
    terminal = Terminal(as_json=as_json)
    chosen = load_subject(subject)
    baselines = list(operator_of(chosen).baselines())
    for name in split(baseline):
        check_name("baseline", name, baselines)
    request = Request(
        subject=chosen,
        cases=_cases(chosen, suite, split(case)),
        baselines=list(dict.fromkeys(split(baseline))) or baselines[:1],
        gpu=gpu_named(gpu) if gpu else None,
        counters=counters,
        seed=seed,
        command=as_typed(context.obj or []),
    )

    def say(line: str) -> None:
        terminal.log.print(line, style="dim", soft_wrap=True)

    terminal.say(f"diagnosing {request.subject.name}: {', '.join(case.name for case in request.cases)}")
    environment = describe_apart()
    tab = None
    if environment.gpu is not None and observes_here(request, environment):
        tab = _tab(request, suite or "", environment.gpu.name, terminal, Store(store), budget)
    if tab is not None and (reason := tab.refusal()):
        terminal.show(f"not diagnosed: {reason}")
        terminal.document({"diagnosis": None, "cost": bill_as_plain(tab.bill), "exit_code": INCONCLUSIVE})
        raise typer.Exit(INCONCLUSIVE)
    bill = None
    began = time.monotonic()
    try:
        diagnosis = gather.diagnose(request, environment, say=say)
    finally:  # an interrupted diagnosis is paid for too
        if tab is not None:
            bill = tab.book(time.monotonic() - began)
    if output is not None:
        write_file(output, diagnosis.model_dump_json(indent=1) + "\n")
    if diagnosis.failed is not None:
        terminal.show("", failed_lines(diagnosis))
    for found in diagnosis.cases:
        terminal.show("", case_lines(found))
    if bill is not None:
        terminal.show("", receipt(bill))
    code = exit_code(diagnosis)
    terminal.document({"diagnosis": as_plain(diagnosis), "cost": bill_as_plain(bill), "exit_code": code})
    raise typer.Exit(code)


def _tab(request: Request, suite: str, gpu: str, terminal: Terminal, store: Store, budget: float | None) -> Tab:
    """Print the estimated cost of the diagnosis."""
    now, name = datetime.now(timezone.utc), request.subject.name
    about = Entry(
        at=now.isoformat(timespec="seconds"),
        run=f"{now:%Y%m%dT%H%M%SZ}-diagnose-{name}-{secrets.token_hex(3)}",
        gate="diagnose",
        subject=name,
        suite=suite,
        gpu=gpu,
        gpu_seconds=0.0,
    )
    return open_tab(terminal, store, about, expected_seconds(request), "a rough model", budget=budget)


def exit_code(diagnosis: Diagnosis) -> int:
    """Return 0 where every call was timed, 3 where the subject cannot be observed, else 4."""
    if diagnosis.failed is not None:
        return GATE_FAILED
    timed = [case.observations.times.call is not None for case in diagnosis.cases]
    return HOLDS if timed and all(timed) else INCONCLUSIVE


def _cases(subject: Subject, suite: str | None, names: Sequence[str]) -> list[SuiteCase]:
    """Return the cases asked for: of the suite named, of any packaged one, or the one of most work."""
    if suite is not None:
        return choose_cases(load_suite(suite), subject, names)
    if names:
        beside = suite_beside(subject)
        return choose_cases(load_suite(str(beside)) if beside else _all_packaged(subject), subject, names)
    cases = choose_cases(load_suite(str(suite_beside(subject) or DEFAULT_SUITE)), subject, ())
    work = operator_of(subject).work
    return [max(cases, key=lambda case: work(case.problem).flops)]


def _all_packaged(subject: Subject) -> Suite:
    """Return the cases of all packaged suites of the subject's operator as one suite."""
    suites = [suite for suite in map(load_suite, list_suites()) if suite.operator == subject.operator]
    cases = {case.name: case for suite in reversed(suites) for case in suite.cases}
    return Suite("", subject.operator, "All packaged cases.", tuple(cases.values()), Path())
