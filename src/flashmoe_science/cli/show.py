"""The verbs that only look: verify, show, runs, doctor, suites, baselines, readme.

What needs torch is imported where it is needed: a listing should not wait for it.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import ClaimError, EvidenceError, InputError
from ..proof.compare.compare import compare_revisions
from ..proof.judge.judge import Verdict, VerdictStatus, exit_code
from ..proof.judge.rows import kinds_measured, memory_rows
from ..proof.judge.run_verdicts import EXPECTATION, conclude
from ..proof.records.evidence import Record, TimeKind, read_record
from ..proof.records.store import Archive, Store, find_repository, is_path
from ..proof.report.compare_terminal import comparison_lines
from ..proof.report.junit import write_junit
from ..proof.report.terminal import (
    case_table,
    check_lines,
    count_line,
    gate_lines,
    head_lines,
    launch_table,
    memory_table,
    plain_table,
    run_table,
    unmeasured_lines,
)
from ..proof.text import counted
from .exit_codes import USAGE
from .names import moment_named
from .terminal import Terminal, as_plain, short_path, write_csv_file, write_file

if TYPE_CHECKING:
    from ..proof.subject.suites import Suite

OUT_OF_DATE = 1

_COMPILE_TIMEOUT_S = 900.0
_NO_CLAIMS = "`flashmoe claim new` writes one from a run; ours are in the clone of flashmoe_science"


def run_verify(*, why: bool, strict: bool, trusted: bool, junit: Path | None, as_json: bool) -> int:
    """Judge all claims of the repository."""
    from ..proof.judge.verify import verify_claims

    terminal = Terminal(as_json=as_json)
    repository = find_repository()
    if repository is None:
        raise ClaimError(f"there are no claims here: {Path.cwd()} is in no folder with claims/", hint=_NO_CLAIMS)
    if trusted:
        trust_repository(repository, terminal)
    wrong: list[EvidenceError | ClaimError] = []

    def leave_out(error: EvidenceError | ClaimError) -> None:
        terminal.warn_of(error)
        wrong.append(error)

    with terminal.doing() as say:
        verdicts = verify_claims(repository, on_trouble=leave_out, on_wrong_claims=leave_out, say=say)
    code = exit_code(verdicts, strict=strict)
    unreadable = [error for error in wrong if isinstance(error, EvidenceError)]
    if wrong:
        code = USAGE  # a file is wrong: what it would say of the claims nobody knows
    if junit is not None:
        write_junit(junit, verdicts, strict=strict)
    terminal.show_verdicts(verdicts, why=why)
    terminal.show(*([""] if verdicts else []), count_line(verdicts))
    if not verdicts and not wrong:
        terminal.log.print(f"hint: {short_path(repository / 'claims')} holds none: {_NO_CLAIMS}", soft_wrap=True)
    if any(verdict.status is VerdictStatus.STALE for verdict in verdicts):
        from ..proof.judge.staleness import ANOTHER_COPY, OWN_COPY, is_of_another_copy

        hint = "a stale claim holds for the commit that it names; a new run on its GPU shows it anew"
        if is_of_another_copy(repository):
            hint = f"{ANOTHER_COPY}, so what it runs on a GPU was not compared: {OWN_COPY}"
        terminal.log.print(f"hint: {hint}", soft_wrap=True)
    if unreadable:
        said = f"{counted(len(unreadable), 'record')} cannot be read, so no claim that may rest on it is demonstrated"
        terminal.show(said.replace("on it", "on them") if len(unreadable) > 1 else said)
        if not all(error.hint for error in unreadable):
            hint = "restore it with git or `flashmoe export`, or take it out of evidence/"
            terminal.log.print(f"hint: {hint}", soft_wrap=True)
    plain = [as_plain(verdict) for verdict in verdicts]
    lost = [str(error) for error in wrong]
    terminal.document({"verdicts": plain, "unreadable": lost, "exit_code": code})
    return code


def trust_repository(repository: Path, terminal: Terminal) -> None:
    """Let the repository's code run when it is read, from now on, and say so."""
    from ..proof.subject.trust import trust

    trust(repository)
    terminal.log.print(f"{repository} is trusted: operators that its suites name run when it is read", soft_wrap=True)


def run_show(
    key: str,
    *,
    kind: str | None,
    memory: bool,
    verbose: bool,
    csv: Path | None,
    store: str | None = None,
    as_json: bool,
) -> int:
    """Render one run again."""
    terminal = Terminal(as_json=as_json)
    repository = find_repository()
    # A file needs no store, so that a wrong one does not hide it.
    record = read_record(Path(key)) if is_path(key) else Archive(Store(store), repository).load(key)
    measured = kinds_measured(record)
    if kind is not None and measured and kind not in measured:
        raise InputError(f"this run took {' and '.join(measured)} time, not {kind} time")
    if memory and kind is not None:
        raise InputError("a table has times or memory: take --time or --memory, not both")
    if memory and not memory_rows(record):
        raise InputError("this run counted no memory", hint="gates quick and bench count it, on a GPU")
    if csv is not None:
        write_csv_file([record], csv)
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
    return 0


def conclude_now(record: Record, repository: Path | None) -> list[Verdict]:
    """Return what a run says when its sources are compared with those of the repository now."""
    if repository is None:
        return conclude(record, repository)
    from ..proof.judge.staleness import changes_since

    return conclude(record, repository, since=lambda claim: changes_since(claim, record, repository))


def run_runs(
    *,
    subject: str,
    suite: str,
    gpu: str,
    since: str | None = None,
    limit: int,
    store: str | None = None,
    as_json: bool,
) -> int:
    """List the runs."""
    terminal = Terminal(as_json=as_json)
    archive = Archive(Store(store), find_repository())
    moment = moment_named(since) if since else None
    found = archive.runs(subject=subject, suite=suite, gpu=gpu, since=moment, on_trouble=terminal.warn_of)
    listed = found[:limit] if limit else found
    terminal.document({"runs": [vars(run) for run in listed], "found": len(found)})
    if not found:
        asked = subject or suite or gpu or since
        terminal.log.print("no such run" if asked else "no runs yet: flashmoe prove makes the first")
        return 0
    terminal.show(run_table(listed))
    if len(listed) < len(found):
        terminal.log.print(f"{len(found) - len(listed)} more: --limit 0 lists all", style="dim")
    return 0


def run_doctor(*, as_json: bool) -> int:
    """Print the checks of this machine, each as soon as it is known."""
    from ..proof.measure.doctor import check_width, examine

    terminal = Terminal(as_json=as_json)
    checks = []
    for check in examine():
        checks.append(check)
        terminal.show(check_lines(check, check_width()))
    terminal.document({"checks": [_fields(check, "name", "ok", "text", "hint") for check in checks]})
    return 0


def run_suites(name: str | None, *, as_json: bool) -> int:
    """List the packaged suites, or the cases of one."""
    from ..proof.subject.suites import list_suites, load_suite

    terminal = Terminal(as_json=as_json)
    if name is not None:
        _show_suite(terminal, load_suite(name))
        return 0
    found = [load_suite(packaged) for packaged in list_suites()]
    rows = [(suite.name, suite.operator, str(len(suite.cases)), suite.description) for suite in found]
    terminal.show(plain_table(("suite", "operator", "cases", "what it is"), rows))
    shown = [{**_fields(suite, "name", "operator", "description"), "cases": len(suite.cases)} for suite in found]
    terminal.document({"suites": shown})
    return 0


def _show_suite(terminal: Terminal, suite: Suite) -> None:
    from ..proof.subject.loading import load_operator

    terminal.show(f"{suite.name} ({suite.operator}): {suite.description}", "")
    terminal.show(plain_table(("case", "where it comes from"), [(case.name, case.origin) for case in suite.cases]))
    as_table = load_operator(suite.operator).as_table
    cases = [{**_fields(case, "name", "origin"), "problem": as_table(case.problem)} for case in suite.cases]
    terminal.document({**_fields(suite, "name", "operator", "description"), "cases": cases})


def run_baselines(operator: str, *, as_json: bool) -> int:
    """List the baselines of an operator."""
    from ..proof.measure.baselines import available_baselines
    from ..proof.subject.loading import load_operator

    terminal = Terminal(as_json=as_json)
    found = available_baselines(load_operator(operator))
    rows = [(b.name, "yes" if b.available else "no", b.version, b.reason) for b in found]
    terminal.show(plain_table(("baseline", "here", "version", "why not"), rows))
    names = ("name", "available", "installed", "version", "reason")
    terminal.document({"baselines": [_fields(b, *names) for b in found]})
    return 0


def run_readme(paths: Sequence[Path], *, check: bool, as_json: bool) -> int:
    """Write or check what is rendered on pages."""
    from ..proof.judge.staleness import ANOTHER_COPY, OWN_COPY, is_of_another_copy
    from ..proof.report.readme import default_pages, find_sections, judge_repository, read_page, render_readme

    terminal = Terminal(as_json=as_json)
    repository = find_repository() or Path.cwd()
    if is_of_another_copy(repository):  # by which claims are stale that are not
        raise ClaimError(f"{ANOTHER_COPY}, and cannot say which claims are stale", hint=OWN_COPY)
    pages = list(dict.fromkeys(paths)) or default_pages(repository)
    judged = functools.cache(judge_repository)
    fresh = {path: render_readme(path, judged) for path in pages}  # all of them, before one is written
    written = []
    for path, text in fresh.items():
        before = read_page(path)
        current = before == text
        if not current and not check:
            write_file(path, text)
        titles = list(dict.fromkeys(section.title for section in find_sections(path, before)))
        several = len(titles) > 1 or titles[0].startswith("the tables")
        verb = "are" if several else "is"
        said = f"{verb} current" if current else f"{verb} out of date" if check else "rewritten"
        terminal.show(f"{short_path(path)}: {' and '.join(titles)} {said}")
        done = {"current": current or not check, "rewritten": not current and not check}
        written.append({"path": short_path(path), **done})
    all_current = all(page["current"] for page in written)
    if not all_current:
        named = "".join(f" {shlex.quote(str(path))}" for path in paths)
        late = sum(not page["current"] for page in written)
        terminal.log.print(f"hint: flashmoe readme{named} rewrites {'it' if late == 1 else 'them'}", soft_wrap=True)
    # The document of one page keeps its form from when there was only one.
    rewritten = any(page["rewritten"] for page in written)
    several_pages = {"pages": written, "current": all_current, "rewritten": rewritten}
    terminal.document(written[0] if len(written) == 1 else several_pages)
    return 0 if all_current else OUT_OF_DATE


def _fields(thing: object, *names: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names}
