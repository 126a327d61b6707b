"""The verb ``diagnose``: why a kernel is slow."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from ..errors import EvidenceError
from ..proof.cost.cost import Bill, Budget, Estimate, load_rates, rate_for
from ..proof.diagnose import gather
from ..proof.diagnose.gather import Request, choose_cases, expected_seconds, observes_here
from ..proof.diagnose.observations import Diagnosis
from ..proof.diagnose.report import case_lines, failed_lines
from ..proof.measure.environment import describe_apart
from ..proof.records.ledger import Entry
from ..proof.records.store import Store, find_repository
from ..proof.subject.loading import load_subject, operator_of
from ..proof.subject.subject import Subject
from ..proof.subject.suites import Suite, SuiteCase, list_suites, load_suite, suite_beside
from .exit_codes import GATE_FAILED, HOLDS, INCONCLUSIVE
from .names import check_name, gpu_named
from .options import Json, StoreName, argument, flag, option, split
from .run_shared import as_typed, check_budget
from .terminal import Terminal, as_plain, write_file

DEFAULT_SUITE = "seed"
_GATE = "diagnose"  # in the ledger


def diagnose(
    context: typer.Context,
    subject: Annotated[str, argument("SUBJECT", "One of ours, or a kernel.toml.")] = "flash_attention",
    suite: Annotated[str | None, option("--suite -s", "SUITE", "All its cases, or those named by --case.")] = None,
    case: Annotated[
        list[str] | None, option("--case", "NAME", "A case of a suite; repeat it. Default: seed's largest.")
    ] = None,
    baseline: Annotated[
        list[str] | None,
        option("--baseline -b", "NAME", "A baseline to time beside it. Default: the operator's first."),
    ] = None,
    gpu: Annotated[
        str | None, option("--gpu", "NAME", "Show what compilation alone shows for this GPU, e.g. L4.")
    ] = None,
    counters: Annotated[
        bool, flag("--counters/--no-counters", "Use Nsight Compute, where it may read counters.")
    ] = True,
    seed: Annotated[int | None, option("", "N", "Seed of the inputs.", min=0, show_default="random")] = None,
    output: Annotated[Path | None, option("--output -o", "FILE", "Also write the diagnosis to FILE, as JSON.")] = None,
    budget: Annotated[
        float | None, option("--budget", "DOLLARS", "Do not begin if the estimate exceeds it.", min=0)
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
    bill = None
    if environment.gpu is not None and observes_here(request, environment):
        rate = rate_for(load_rates(find_repository()), environment.gpu.name, check_budget(budget))
        expected = Estimate({_GATE: expected_seconds(request)}, "a rough model")
        bill = Bill(environment.gpu.name, rate, expected)
        terminal.say(bill.announcement())
        held = Budget(budget, rate, expected) if budget is not None and rate is not None else None
        if held is not None and (reason := held.refusal(_GATE, 0.0)):
            terminal.show(f"not diagnosed: {reason}")
            terminal.document({"diagnosis": None, "cost": bill.as_plain(), "exit_code": INCONCLUSIVE})
            raise typer.Exit(INCONCLUSIVE)
    began = time.monotonic()
    try:
        diagnosis = gather.diagnose(request, environment, say=say)
    finally:  # an interrupted diagnosis is paid for too
        if bill is not None:
            bill = replace(bill, spent_seconds=time.monotonic() - began)
            _book(bill, request, suite or "", Store(store), terminal)
    if output is not None:
        write_file(output, diagnosis.model_dump_json(indent=1) + "\n")
    if diagnosis.failed is not None:
        terminal.show("", failed_lines(diagnosis))
    for found in diagnosis.cases:
        terminal.show("", case_lines(found))
    if bill is not None:
        terminal.show("", bill.receipt())
    code = exit_code(diagnosis)
    terminal.document({"diagnosis": as_plain(diagnosis), "cost": bill and bill.as_plain(), "exit_code": code})
    raise typer.Exit(code)


def _book(bill: Bill, request: Request, suite: str, store: Store, terminal: Terminal) -> None:
    """Book what a diagnosis took. A store that fails costs a warning, not the result."""
    now, name = datetime.now(timezone.utc), request.subject.name
    run = f"{now:%Y%m%dT%H%M%SZ}-diagnose-{name}-{secrets.token_hex(3)}"
    about = (now.isoformat(timespec="seconds"), run, _GATE, name, suite, bill.gpu)
    try:
        store.book(Entry(*about, bill.spent_seconds or 0.0, bill.dollars_per_hour))
    except EvidenceError as error:
        terminal.warn_of(error)


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
