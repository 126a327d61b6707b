"""The verb ``diagnose``: why a kernel is slow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..proof.diagnose import gather
from ..proof.diagnose.gather import Request, choose_cases
from ..proof.diagnose.observations import Diagnosis
from ..proof.diagnose.report import case_lines, failed_lines
from ..proof.measure.environment import describe_apart
from ..proof.subject.loading import load_subject, operator_of
from ..proof.subject.subject import Subject
from ..proof.subject.suites import Suite, SuiteCase, list_suites, load_suite, suite_beside
from .exit_codes import GATE_FAILED, HOLDS, INCONCLUSIVE
from .names import check_name, gpu_named
from .options import Json, argument, flag, option, split
from .run_shared import as_typed
from .terminal import Terminal, as_plain, write_file

DEFAULT_SUITE = "seed"


def diagnose(
    context: typer.Context,
    subject: Annotated[str, argument("SUBJECT", "One of ours, or a kernel.toml.")] = "flash_attention",
    suite: Annotated[str | None, option("--suite -s", "SUITE", "All its cases, or those named by --case.")] = None,
    case: Annotated[
        list[str] | None,
        option("--case", "NAME", "Repeat it. Default: the largest of suite.toml beside kernel.toml, or of seed."),
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
    seed: Annotated[int, option("", "N", "Seed of the inputs.", min=0)] = 0,
    output: Annotated[Path | None, option("--output -o", "FILE", "Also write the diagnosis to FILE, as JSON.")] = None,
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
      2  wrong usage, or no GPU                 4  a call could not be timed
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
    diagnosis = gather.diagnose(request, describe_apart(), say=say)
    if output is not None:
        write_file(output, diagnosis.model_dump_json(indent=1) + "\n")
    if diagnosis.failed is not None:
        terminal.show("", failed_lines(diagnosis))
    for found in diagnosis.cases:
        terminal.show("", case_lines(found))
    code = exit_code(diagnosis)
    terminal.document({"diagnosis": as_plain(diagnosis), "exit_code": code})
    raise typer.Exit(code)


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
