"""The verb ``study``: how often comparisons are wrong on this machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from ..errors import EvidenceError, InputError
from ..proof.cost_report import bill_as_plain, receipt
from ..proof.environment import describe_apart
from ..proof.evidence import Environment, Settings, name_of
from ..proof.ledger import Entry
from ..proof.loading import is_builtin, load_subject
from ..proof.meter import Bill
from ..proof.store import Archive, Store, find_repository, is_path
from ..proof.study.expected import expected_cost
from ..proof.study.report import study_lines, suite_lines
from ..proof.study.run import StudyRequest, asked, run_study
from ..proof.study.suites import tally_of
from ..proof.study.trials import FOLDER, SERIES, Study, read_study, study_files, write_study
from ..proof.suites import SuiteCase, check_operator, load_suite
from . import HOLDS, INCONCLUSIVE
from .names import check_name
from .running import Tab, as_typed, check_budget, open_tab
from .terminal import Terminal, as_plain, short_path

DEFAULT_CASE = "b2_h16_s1024_d128_bf16"  # of suite scaling: few sets of inputs, and a call of some 50 us
FAILS = 1


@dataclass(frozen=True)
class StudyWanted:
    """What the command line asks of ``study``."""

    subject: str
    suite: str = "scaling"
    case: str | None = None
    same: int = 200
    planted: int = 20
    processes: int = 3
    rounds: int = 10
    batches: int = 3
    tolerance: float = 0.0
    seconds: float | None = None
    seed: int | None = None
    resume: str | None = None
    budget: float | None = None  # dollars
    store: str | None = None
    args: Sequence[str] = field(default_factory=list)


def run_study_verb(wanted: StudyWanted, *, as_json: bool) -> int:
    """Study this machine, print what it shows, and return the exit code."""
    terminal = Terminal(as_json=as_json)
    repository = find_repository()
    folder = (repository or Path.cwd()) / FOLDER
    earlier = find_study(wanted.resume, repository) if wanted.resume is not None else None
    request = _request(wanted, earlier)
    environment = describe_apart()
    terminal.say(f"studying comparisons of {request.subject.name} with itself: {request.case.name}")
    tab, request = _with_tab(wanted, request, environment, terminal, repository)
    paths: list[Path] = []
    bills: list[Bill] = []
    before = earlier.gpu_seconds if earlier is not None else 0.0  # booked by the study that is gone on with

    def save(study: Study) -> None:
        paths[:] = [write_study(study, folder)]
        if tab is not None:
            spent = replace(tab, entry=replace(tab.entry, run=study.id, at=study.created_at.isoformat()))
            bills[:] = [replace(spent.book(study.gpu_seconds), spent_seconds=study.gpu_seconds - before)]

    def say(line: str) -> None:
        terminal.log.print(line, style="dim", soft_wrap=True)

    try:
        study = run_study(request, environment, say=say, save=save)
    except KeyboardInterrupt:
        if paths:
            terminal.log.print(f"what was finished is in {short_path(paths[0])}", soft_wrap=True)
        raise
    code = exit_code(study)
    costs = [receipt(bill) for bill in bills]
    terminal.show("", study_lines(study), "", *costs, f"study: {short_path(paths[0])}")
    if not study.complete:
        terminal.log.print(f"hint: flashmoe study --resume {study.id}", soft_wrap=True)
    cost = bill_as_plain(bills[0]) if bills else None
    terminal.document({"study": as_plain(study), "path": short_path(paths[0]), "cost": cost, "exit_code": code})
    return code


def run_study_of_runs(store: str | None, *, as_json: bool) -> int:
    """Count wrong verdicts over the suites of the runs that are there, and return the exit code."""
    terminal = Terminal(as_json=as_json)
    archive = Archive(Store(store), find_repository())
    listed = archive.runs(on_trouble=terminal.warn_of)
    tally = tally_of(archive.load(run.id) for run in reversed(listed))
    code = {True: HOLDS, False: FAILS, None: INCONCLUSIVE}[tally.holds]
    terminal.show(suite_lines(tally))
    terminal.document({"suites": as_plain(tally) | {"holds": tally.holds}, "exit_code": code})
    return code


def _with_tab(
    wanted: StudyWanted, request: StudyRequest, environment: Environment, terminal: Terminal, repository: Path | None
) -> tuple[Tab | None, StudyRequest]:
    """Say what the study is going to cost, and return its tab and the request with its limit in seconds."""
    if environment.gpu is None:
        return None, request
    expected = expected_cost(request, environment, [read_study(path) for path in study_files(repository or Path.cwd())])
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    about = Entry(now, "", "study", request.subject.name, request.suite, environment.gpu.name, gpu_seconds=0.0)
    tab = open_tab(
        terminal, Store(wanted.store), about, expected.seconds, expected.source, budget=check_budget(wanted.budget)
    )
    limit = tab.budget.seconds if tab.budget is not None else math.inf
    seconds = min(limit, math.inf if request.seconds is None else request.seconds)
    within = replace(request, seconds=None if math.isinf(seconds) else seconds, process_seconds=expected.of_process)
    return tab, within


def exit_code(study: Study) -> int:
    """Return 0 where a study shows what is required, 1 where it does not, 4 where it is not at its end."""
    if not study.complete:
        return INCONCLUSIVE
    return HOLDS if study.holds else FAILS


def find_study(key: str, repository: Path | None) -> Study:
    """Return the study in the file ``key``, or whose id begins with it. Raises ``EvidenceError``."""
    if is_path(key):
        return read_study(Path(key))
    found = [path for path in study_files(repository or Path.cwd()) if name_of(path).startswith(key)]
    if len(found) != 1:
        what = f"begins {len(found)} ids" if found else "is no study here"
        raise EvidenceError(f"{key!r} {what}", hint=f"they are in {FOLDER}/")
    return read_study(found[0])


def _request(wanted: StudyWanted, earlier: Study | None) -> StudyRequest:
    """Return what is asked for; a study that is gone on with stays as it was."""
    if earlier is not None:
        # A file is found again only where it is named again; what is another one is refused before anything runs.
        subject = load_subject(earlier.subject.name if is_builtin(earlier.subject) else wanted.subject)
        suite = wanted.suite if load_suite(wanted.suite).name == earlier.suite else earlier.suite
        case = _case(suite, earlier.case.name)
        return StudyRequest(subject, earlier.suite, case, seconds=wanted.seconds, resume=earlier)
    subject_found = load_subject(wanted.subject)
    suite_found = load_suite(wanted.suite)
    check_operator(suite_found, subject_found)
    names = [each.name for each in suite_found.cases]
    if wanted.case is None and DEFAULT_CASE not in names and len(names) > 1:
        hint = f"`flashmoe suites {wanted.suite}` lists its cases; one of 50 to 500 us a call is best"
        raise InputError(f"a study is of one case, and suite {suite_found.name} has {len(names)}: name one", hint=hint)
    default = DEFAULT_CASE if DEFAULT_CASE in names else names[0]
    if wanted.same + wanted.planted == 0:
        raise InputError("a study needs comparisons, got --same 0 and --planted 0")
    return StudyRequest(
        subject_found,
        suite_found.name,
        _case(wanted.suite, wanted.case or default),
        series=[each for each in asked(SERIES, same=wanted.same, planted=wanted.planted) if each.wanted],
        settings=Settings(times=["graph"], processes=wanted.processes, rounds=wanted.rounds, seed=wanted.seed),
        batches=wanted.batches,
        tolerance=wanted.tolerance,
        seconds=wanted.seconds,
        command=as_typed(wanted.args),
    )


def _case(suite: str, name: str) -> SuiteCase:
    cases = {case.name: case for case in load_suite(suite).cases}
    check_name("case", name, cases)
    return cases[name]
