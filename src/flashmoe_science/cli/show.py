"""The verbs that only look: verify, show, runs, doctor, suites, baselines, readme.

What needs torch is imported where it is needed: a listing should not wait for it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ..errors import ClaimError, EvidenceError, InputError, SuiteError
from ..proof.compare.compare import compare_revisions
from ..proof.judge.judge import Verdict, exit_code
from ..proof.judge.rows import csv_text, kinds_measured, memory_rows
from ..proof.judge.run_verdicts import EXPECTATION, conclude
from ..proof.records.documents import read_record
from ..proof.records.evidence import Record, TimeKind
from ..proof.records.store import Archive, Store, find_repository, is_path
from ..proof.report.junit import junit_xml, write_junit
from ..proof.report.terminal import (
    case_table,
    check_lines,
    comparison_lines,
    count_line,
    gate_lines,
    head_lines,
    launch_table,
    memory_table,
    plain_table,
    record_checks,
    rule_lines,
    run_table,
    unmeasured_lines,
)
from ..proof.text import counted
from .exit_codes import USAGE
from .names import moment_named
from .options import Csv, Json, Junit, Metric, Run, Since, StoreName, Trust, argument, flag, option
from .terminal import Terminal, as_plain, short_path, write_file

if TYPE_CHECKING:
    from ..proof.judge.consistency import Check as ConsistencyCheck
    from ..proof.records.begun import BegunRun
    from ..proof.subject.suites import Suite

OUT_OF_DATE = 1
_SHOWN_LIMITS = 3

_NO_CLAIMS = "`flashmoe claim new` writes one from a run; ours are in the clone of flashmoe_science"


def verify(
    why: Annotated[bool, flag("--why", "Give the reason of every verdict, also of good ones.")] = False,
    strict: Annotated[bool, flag("--strict", "A stale claim does not hold: 4, and not 0, where one is.")] = False,
    deep: Annotated[
        bool, flag("--deep", "Also list every check of every record, and the rules behind each claim.")
    ] = False,
    trust: Trust = False,
    as_json: Json = False,
    junit: Junit = None,
) -> None:
    """Judge every claim in claims/ by the records in evidence/. Needs no GPU.

    One line a claim: verdict, sentence, the figure with its 95 % interval, the run that shows it. A claim is
    stale when its launches changed since that run. A claim of wall time or memory is stale, too, when a file
    changed that its calls run.

    \b
    Examples:
      flashmoe verify
      flashmoe verify --strict
      flashmoe verify --deep
      flashmoe verify --json | jq '.verdicts[] | {id: .claim.id, status}'

    \b
    Exit codes:
      0  all hold (or are stale)       3  a gate failed in the run that should show one
      1  one is refuted                4  one is inconclusive, invalid, without evidence,
      2  wrong usage                      or stale under --strict; or there is no claim
    """
    from ..proof.judge.verify import verify_claims

    terminal = Terminal(as_json=as_json)
    repository = find_repository()
    if repository is None:
        raise ClaimError(f"there is no folder claims/ here: {Path.cwd()} is in no folder that has one", hint=_NO_CLAIMS)
    if trust:
        trust_repository(repository, terminal)
    wrong: list[EvidenceError | ClaimError] = []

    def leave_out(error: EvidenceError | ClaimError) -> None:
        terminal.warn_of(error)
        wrong.append(error)

    checked: dict[str, list[ConsistencyCheck]] | None = {} if deep else None
    with terminal.doing() as say:
        verdicts = verify_claims(
            repository,
            on_trouble=leave_out,
            on_wrong_claims=leave_out,
            say=say,
            checked=checked,
            begun=_runs_begun(terminal),
        )
    code = exit_code(verdicts, strict=strict)
    unreadable = [error for error in wrong if isinstance(error, EvidenceError)]
    if wrong:
        code = USAGE  # a file is wrong: what it would say of the claims nobody knows
    if junit is not None:
        write_junit(junit, junit_xml(verdicts, strict=strict))
    if checked is not None:
        _show_deep(checked, verdicts, terminal)
    terminal.show_verdicts(verdicts, why=why)
    terminal.show(*([""] if verdicts else []), count_line(verdicts))
    if not verdicts and not wrong:
        terminal.log.print(f"hint: {short_path(repository / 'claims')} holds none: {_NO_CLAIMS}", soft_wrap=True)
    terminal.explain_stale(verdicts, repository)
    _say_limits(verdicts, terminal)
    if unreadable:
        said = f"{counted(len(unreadable), 'record')} cannot be read, so no claim that may rest on it is demonstrated"
        terminal.show(said.replace("on it", "on them") if len(unreadable) > 1 else said)
        if not all(error.hint for error in unreadable):
            hint = "restore it with git or `flashmoe export`, or take it out of evidence/"
            terminal.log.print(f"hint: {hint}", soft_wrap=True)
    plain = [as_plain(verdict) for verdict in verdicts]
    lost = [str(error) for error in wrong]
    deeply = {path: [asdict(check) for check in checks] for path, checks in (checked or {}).items()}
    records = {"records": deeply} if checked is not None else {}
    terminal.document({"verdicts": plain, **records, "unreadable": lost, "exit_code": code})
    raise typer.Exit(code)


def _runs_begun(terminal: Terminal) -> Sequence[tuple[str, BegunRun]]:
    """Return the ledger of runs begun of this user's store. One that is broken is warned of."""
    try:
        return Store().begun()
    except EvidenceError as error:
        terminal.warn_of(error)
        return ()


def _show_deep(
    checked: Mapping[str, Sequence[ConsistencyCheck]], verdicts: Sequence[Verdict], terminal: Terminal
) -> None:
    """Show every check of every record, and the rules behind each claim."""
    for path, checks in checked.items():
        terminal.show(record_checks(path, checks), "")
    terminal.show(rule_lines(verdicts), "")


def _say_limits(verdicts: Sequence[Verdict], terminal: Terminal) -> None:
    """Say what most of the runs behind these verdicts could not have seen."""
    limits = Counter(limit for v in verdicts for part in v.by_gpu or [v] for limit in part.limits)
    for limit, count in limits.most_common(_SHOWN_LIMITS):
        terminal.log.print(f"not seen in {count} of {counted(len(verdicts), 'claim')}: {limit}", soft_wrap=True)


def trust_repository(repository: Path, terminal: Terminal) -> None:
    """Let the repository's code run when it is read, from now on, and say so."""
    from ..proof.subject.trust import trust

    trust(repository)
    terminal.log.print(f"{repository} is trusted: operators that its suites name run when it is read", soft_wrap=True)


def show(
    run: Run,
    metric: Annotated[
        Metric | None, option("--time", "KIND", "Show speedups of kernel, graph or wall time. Default: graph.")
    ] = None,
    memory: Annotated[bool, flag("--memory", "Show the peak bytes that a call allocates, in place of times.")] = False,
    verbose: Annotated[bool, flag("--verbose -v", "Also the details of every gate, and the kernels that ran.")] = False,
    store: StoreName = None,
    as_json: Json = False,
    csv: Csv = None,
) -> None:
    """Show a run from the store or from evidence/: its gates, its times, its verdict.

    \b
    Examples:
      flashmoe show 20261120
      flashmoe show evidence/20261120T235959Z-seed-flash_attention-1a2b3c.json.gz --verbose
      flashmoe show 20261120 --time wall
      flashmoe show 20261120 --csv times.csv
    """
    kind = metric.value if metric else None
    terminal = Terminal(as_json=as_json)
    repository = find_repository()
    # A file needs no store, so that a wrong one does not hide it.
    record = read_record(Path(run)) if is_path(run) else Archive(Store(store), repository).load(run)
    measured = kinds_measured(record)
    if kind is not None and measured and kind not in measured:
        raise InputError(f"this run took {' and '.join(measured)} time, not {kind} time")
    if memory and kind is not None:
        raise InputError("a table has times or memory: take --time or --memory, not both")
    if memory and not memory_rows(record):
        raise InputError("this run counted no memory", hint="gates quick and bench count it, on a GPU")
    if csv is not None:
        write_file(csv, csv_text([record]))
    comparison = compare_revisions(record) if record.compared else None
    verdicts = [] if comparison else conclude(record, repository, as_recorded=True)
    terminal.show(head_lines(record), "")
    for number, gate in enumerate(record.gates):
        said = {earlier.hint for earlier in record.gates[:number]}
        terminal.show(gate_lines(gate, verbose=verbose, said=said))
    terminal.show("")
    if record.cases:
        unmeasured = unmeasured_lines(record)
        table = memory_table(record) if memory else case_table(record, cast("TimeKind | None", kind))
        terminal.show(table, *([unmeasured] if unmeasured else []), "")
    if verbose and any(arm.launches for case in record.cases for arm in case.arms):
        terminal.show(launch_table(record), "")
    document = {"record": as_plain(record), "verdicts": [as_plain(verdict) for verdict in verdicts]}
    if comparison:
        terminal.show(comparison_lines(comparison))
        document["comparison"] = as_plain(comparison)
    else:
        terminal.show_conclusion(record, verdicts)
        if any(verdict.claim.id != EXPECTATION for verdict in verdicts):
            hint = "these verdicts are as of the run; `flashmoe verify` compares the code, suites and claims of today"
            terminal.log.print(f"hint: {hint}", soft_wrap=True)
    terminal.document(document)


def conclude_now(record: Record, repository: Path | None) -> list[Verdict]:
    """Return what a run says when its sources are compared with those of the repository now."""
    if repository is None:
        return conclude(record, repository)
    from ..proof.judge.staleness import changes_since

    return conclude(record, repository, since=lambda claim: changes_since(claim, record, repository))


def runs(
    subject: Annotated[str, option("", "NAME", "Only runs of this subject.")] = "",
    suite: Annotated[str, option("", "NAME", "Only runs of this suite.")] = "",
    gpu: Annotated[str, option("", "NAME", "Only runs on a GPU with this in its name.")] = "",
    since: Since = None,
    limit: Annotated[int, option("", "N", "At most this many, newest first; 0 for all.", min=0)] = 20,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """List the runs in the store and in evidence/ of this repository, newest first.

    The store is the folder ~/.local/share/flashmoe/runs, or the one that --store or FLASHMOE_STORE names.

    \b
    Examples:
      flashmoe runs --gpu H200 --suite seed
      flashmoe runs --since 7d --store ~/runs
    """
    terminal = Terminal(as_json=as_json)
    archive = Archive(Store(store), find_repository())
    moment = moment_named(since) if since else None
    found = archive.runs(subject=subject, suite=suite, gpu=gpu, since=moment, on_trouble=terminal.warn_of)
    listed = found[:limit] if limit else found
    terminal.document({"runs": [vars(run) for run in listed], "found": len(found)})
    if not found:
        asked = subject or suite or gpu or since
        terminal.log.print("no such run" if asked else "no runs yet: flashmoe prove makes the first")
        return
    terminal.show(run_table(listed))
    if len(listed) < len(found):
        terminal.log.print(f"{len(found) - len(listed)} more: --limit 0 lists all", style="dim")


def doctor(as_json: Json = False) -> None:
    """Check GPU, driver, torch, triton, nvcc, Nsight Compute, baselines and clocks; every trouble with a hint.

    \b
    Example:
      flashmoe doctor
    """
    from ..proof.measure.doctor import check_width, examine

    terminal = Terminal(as_json=as_json)
    checks = []
    for check in examine():
        checks.append(check)
        terminal.show(check_lines(check, check_width()))
    terminal.document({"checks": [_fields(check, "name", "ok", "text", "hint") for check in checks]})


def suites(
    name: Annotated[str | None, argument("SUITE", "A packaged suite, or a file.")] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """List the packaged suites, or the cases of one and where each comes from.

    \b
    Examples:
      flashmoe suites
      flashmoe suites seed
      flashmoe suites suites/mine.toml --trust
    """
    from ..proof.subject.suites import list_suites, load_suite

    terminal = Terminal(as_json=as_json)
    if name is not None:
        if name not in list_suites():
            _check_trust(Path(name), terminal, trusted=trust)
        _show_suite(terminal, load_suite(name))
        return
    found = [load_suite(packaged) for packaged in list_suites()]
    rows = [(suite.name, suite.operator, str(len(suite.cases)), suite.description) for suite in found]
    terminal.show(plain_table(("suite", "operator", "cases", "what it is"), rows))
    shown = [{**_fields(suite, "name", "operator", "description"), "cases": len(suite.cases)} for suite in found]
    terminal.document({"suites": shown})


def _check_trust(suite: Path, terminal: Terminal, *, trusted: bool) -> None:
    """Raise ``SuiteError`` where the operator of a suite is code that may not run yet."""
    from ..proof.subject.registry import is_user_defined
    from ..proof.subject.suites import operator_in
    from ..proof.subject.trust import is_trusted

    operator = operator_in(suite) if suite.is_file() else ""
    if not is_user_defined(operator):
        return
    repository = find_repository(suite.parent) or suite.resolve().parent
    if trusted:
        trust_repository(repository, terminal)
    elif not is_trusted(repository):
        raise SuiteError(
            f"{suite} is of operator {operator}, code of {repository}, which may not run yet",
            hint="--trust lets the code of this repository run when it is read, here and from now on",
        )


def _show_suite(terminal: Terminal, suite: Suite) -> None:
    from ..proof.subject.loading import load_operator

    terminal.show(f"{suite.name} ({suite.operator}): {suite.description}", "")
    terminal.show(plain_table(("case", "where it comes from"), [(case.name, case.origin) for case in suite.cases]))
    as_table = load_operator(suite.operator).as_table
    cases = [{**_fields(case, "name", "origin"), "problem": as_table(case.problem)} for case in suite.cases]
    terminal.document({**_fields(suite, "name", "operator", "description"), "cases": cases})


def baselines(
    operator: Annotated[str, option("", "NAME", "Baselines of this operator.")] = "attention",
    as_json: Json = False,
) -> None:
    """List the baselines of an operator, each tried in a process of its own: its version, or why it cannot run here.

    \b
    Example:
      flashmoe baselines
    """
    from ..proof.measure.baselines import available_baselines
    from ..proof.subject.loading import load_operator

    terminal = Terminal(as_json=as_json)
    found = available_baselines(load_operator(operator))
    rows = [(b.name, "yes" if b.available else "no", b.version, b.reason) for b in found]
    terminal.show(plain_table(("baseline", "here", "version", "why not"), rows))
    names = ("name", "available", "installed", "version", "reason")
    terminal.document({"baselines": [_fields(b, *names) for b in found]})


def readme(
    paths: Annotated[
        list[Path] | None,
        argument(
            "FILE",
            "Default: README.md of this repository, and the pages below docs/ that have marks.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[bool, flag("--check", "Write nothing; say whether the tables are current.")] = False,
    as_json: Json = False,
) -> None:
    """Write the tables of speeds, made from claims/ and evidence/, between two marks in README.md and other pages.

    \b
    Each mark is a line of its own:
      <!-- summary:begin -->   <!-- summary:end -->    a row for every run and kind of time that claims are about
      <!-- slower:begin -->    <!-- slower:end -->     a row for every suite in which a baseline is faster somewhere
      <!-- verdicts:begin -->  <!-- verdicts:end -->   a row for every claim
      <!-- cases:begin -->     <!-- cases:end -->      a row for every case, below a heading for each run and baseline

    \b
    Examples:
      flashmoe readme
      flashmoe readme --check
      flashmoe readme docs/results.md

    \b
    Exit codes:
      0  the tables are current    1  --check found one out of date    2  a file lacks the marks
    """
    from ..proof.judge.staleness import ANOTHER_COPY, OWN_COPY, is_of_another_copy
    from ..proof.report.readme import default_pages, judge_repository, read_page, render_readme

    terminal = Terminal(as_json=as_json)
    repository = find_repository() or Path.cwd()
    if is_of_another_copy(repository):  # by which claims are stale that are not
        raise ClaimError(f"{ANOTHER_COPY}, and cannot say which claims are stale", hint=OWN_COPY)
    pages = list(dict.fromkeys(paths or ())) or default_pages(repository)
    judged = functools.cache(judge_repository)
    fresh = {path: render_readme(path, judged) for path in pages}  # all of them, before one is written
    written = []
    for path, text in fresh.items():
        before = read_page(path)
        current = before == text
        if not current and not check:
            write_file(path, text)
        terminal.show(f"{short_path(path)}: {'current' if current else 'out of date' if check else 'rewritten'}")
        done = {"current": current or not check, "rewritten": not current and not check}
        written.append({"path": short_path(path), **done})
    all_current = all(page["current"] for page in written)
    if not all_current:
        terminal.log.print("hint: flashmoe readme without --check rewrites what is out of date", soft_wrap=True)
    terminal.document({"pages": written, "current": all_current})
    raise typer.Exit(0 if all_current else OUT_OF_DATE)


def _fields(thing: object, *names: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names}
