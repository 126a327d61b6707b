"""The verb ``diagnose``: why a kernel is slow."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from ..proof.cost_report import bill_as_plain, receipt
from ..proof.diagnose.gather import Request
from ..proof.diagnose.observations import Diagnosis
from ..proof.diagnose.report import case_lines, failed_lines
from ..proof.diagnose.run import choose_cases, diagnose, expected_seconds, observes_here
from ..proof.environment import describe_apart
from ..proof.evidence import Environment
from ..proof.ledger import Entry
from ..proof.loading import load_subject, operator_of
from ..proof.store import Store
from ..proof.subject import Subject
from ..proof.suites import Suite, SuiteCase, list_suites, load_suite
from . import GATE_FAILED, HOLDS, INCONCLUSIVE
from .names import check_name, gpu_named
from .running import Tab, as_typed, open_tab
from .terminal import Terminal, as_plain, write_file

DEFAULT_SUITE = "seed"


@dataclass(frozen=True)
class DiagnosisWanted:
    """What the command line asks of ``diagnose``."""

    subject: str
    suite: str | None = None
    cases: Sequence[str] = ()
    baselines: Sequence[str] = ()
    gpu: str | None = None
    counters: bool = True
    seed: int | None = None
    budget: float | None = None  # dollars
    store: str | None = None
    args: Sequence[str] = field(default_factory=list)


def run_diagnose(wanted: DiagnosisWanted, *, output: Path | None, as_json: bool) -> int:
    """Diagnose, print it, and return the exit code."""
    terminal = Terminal(as_json=as_json)
    request = _request(wanted)

    def say(line: str) -> None:
        terminal.log.print(line, style="dim", soft_wrap=True)

    terminal.say(f"diagnosing {request.subject.name}: {', '.join(case.name for case in request.cases)}")
    environment = describe_apart()
    tab = _tab(wanted, request, environment, terminal) if observes_here(request, environment) else None
    if tab is not None and (reason := tab.refusal()):
        terminal.show(f"not diagnosed: {reason}")
        terminal.document({"diagnosis": None, "cost": bill_as_plain(tab.bill), "exit_code": INCONCLUSIVE})
        return INCONCLUSIVE
    bill = None
    began = time.monotonic()
    try:
        diagnosis = diagnose(request, environment, say=say)
    finally:  # what was interrupted is paid for too
        if tab is not None:
            bill = tab.book(time.monotonic() - began)
    if output is not None:
        write_file(output, diagnosis.model_dump_json(indent=1) + "\n")
    if diagnosis.failed is not None:
        terminal.show("", failed_lines(diagnosis))
    for case in diagnosis.cases:
        terminal.show("", case_lines(case))
    if bill is not None:
        terminal.show("", receipt(bill))
    code = exit_code(diagnosis)
    terminal.document({"diagnosis": as_plain(diagnosis), "cost": bill_as_plain(bill), "exit_code": code})
    return code


def _tab(wanted: DiagnosisWanted, request: Request, environment: Environment, terminal: Terminal) -> Tab:
    """Say what the diagnosis is going to cost."""
    assert environment.gpu is not None
    now, name = datetime.now(timezone.utc), request.subject.name
    about = Entry(
        at=now.isoformat(timespec="seconds"),
        run=f"{now:%Y%m%dT%H%M%SZ}-diagnose-{name}-{secrets.token_hex(3)}",
        gate="diagnose",
        subject=name,
        suite=wanted.suite or "",
        gpu=environment.gpu.name,
        gpu_seconds=0.0,
    )
    store = Store(wanted.store)
    return open_tab(terminal, store, about, expected_seconds(request), "a rough model", budget=wanted.budget)


def exit_code(diagnosis: Diagnosis) -> int:
    """Return 0 where every call was timed, 3 where the subject cannot be observed, else 4."""
    if diagnosis.failed is not None:
        return GATE_FAILED
    timed = [case.observations.times.call is not None for case in diagnosis.cases]
    return HOLDS if timed and all(timed) else INCONCLUSIVE


def _request(wanted: DiagnosisWanted) -> Request:
    subject = load_subject(wanted.subject)
    rivals = list(operator_of(subject).rivals())
    for baseline in wanted.baselines:
        check_name("baseline", baseline, rivals)
    return Request(
        subject=subject,
        cases=_cases(subject, wanted),
        baselines=list(dict.fromkeys(wanted.baselines)) or rivals[:1],
        gpu=gpu_named(wanted.gpu) if wanted.gpu else None,
        counters=wanted.counters,
        seed=wanted.seed,
        command=as_typed(wanted.args),
    )


def _cases(subject: Subject, wanted: DiagnosisWanted) -> list[SuiteCase]:
    """Return the cases asked for: of the suite named, of any packaged one, or the one of most work."""
    if wanted.suite is not None:
        return choose_cases(load_suite(wanted.suite), subject, wanted.cases)
    if wanted.cases:
        return choose_cases(_all_packaged(subject), subject, wanted.cases)
    cases = choose_cases(load_suite(DEFAULT_SUITE), subject, ())
    work = operator_of(subject).work
    return [max(cases, key=lambda case: work(case.problem).flops)]


def _all_packaged(subject: Subject) -> Suite:
    """Return the cases of all packaged suites of the subject's operator as one suite."""
    suites = [suite for suite in map(load_suite, list_suites()) if suite.operator == subject.operator]
    cases = {case.name: case for suite in reversed(suites) for case in suite.cases}
    return Suite("", subject.operator, "All packaged cases.", tuple(cases.values()), Path())
