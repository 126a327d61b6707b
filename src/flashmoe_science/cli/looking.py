"""The verbs that only look: verify, show, runs, explain, doctor, suites, baselines, readme.

What needs torch is imported where it is needed: a listing should not wait for it.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import ClaimError, CompileError, EvidenceError, InputError
from ..proof.compare import compare_revisions
from ..proof.conclude import GATE_FAILED, conclude
from ..proof.evidence import Record, TimeKind, read_record
from ..proof.judge import Verdict, VerdictStatus, exit_code
from ..proof.junit import write_junit
from ..proof.report import (
    case_table,
    check_lines,
    compile_line,
    count_line,
    gate_lines,
    head_lines,
    launch_table,
    plain_table,
    plan_lines,
    run_table,
    unmeasured_lines,
)
from ..proof.report_compare import comparison_lines
from ..proof.rows import kinds_measured
from ..proof.store import Archive, Store, find_repository, is_path
from ..proof.study.report import study_line, study_lines
from ..proof.study.trials import Study, is_study, read_study, study_files
from ..proof.words import counted
from . import INCONCLUSIVE, USAGE
from .names import gpu_named, moment_named
from .terminal import Terminal, as_plain, short_path, write_csv_file, write_file

if TYPE_CHECKING:
    from ..attention.backward_plan import BackwardPlan
    from ..attention.problem import AttentionProblem
    from ..attention.tiles import Plan
    from ..gpu.specs import GpuSpec
    from ..proof.suites import Suite

OUT_OF_DATE = 1

_COMPILE_TIMEOUT_S = 900.0
_NO_CLAIMS = "`flashmoe claim new` writes one from a run; ours are in the clone of flashmoe_science"


def run_verify(*, why: bool, strict: bool, junit: Path | None, as_json: bool) -> int:
    """Judge all claims of the repository."""
    from ..proof.verify import verify_claims

    terminal = Terminal(as_json=as_json)
    repository = find_repository()
    if repository is None:
        raise ClaimError(f"there are no claims here: {Path.cwd()} is in no folder with claims/", hint=_NO_CLAIMS)
    unread: list[EvidenceError] = []

    def leave_out(error: EvidenceError) -> None:
        terminal.warn_of(error)
        unread.append(error)

    verdicts = verify_claims(repository, on_trouble=leave_out)
    studies = [read_study(path) for path in study_files(repository)]
    code = exit_code(verdicts, strict=strict)
    if code == 0 and not all(study.holds for study in studies):
        code = INCONCLUSIVE  # what comparisons show rests on them being right
    if unread:
        code = USAGE  # a file is wrong: what it would say of the claims nobody knows
    if junit is not None:
        write_junit(junit, verdicts, strict=strict)
    terminal.show_verdicts(verdicts, why=why)
    terminal.show(*([""] if verdicts else []), count_line(verdicts))
    if not verdicts:
        terminal.log.print(f"hint: {short_path(repository / 'claims')} holds none: {_NO_CLAIMS}", soft_wrap=True)
    if any(verdict.status is VerdictStatus.STALE for verdict in verdicts):
        terminal.log.print("hint: a stale claim holds for the commit that it names; a new run on its GPU shows it anew")
    if unread:
        said = f"{counted(len(unread), 'record')} cannot be read, so no claim that may rest on it is demonstrated"
        terminal.show(said.replace("on it", "on them") if len(unread) > 1 else said)
        if not all(error.hint for error in unread):
            hint = "restore it with git or `flashmoe export`, or take it out of evidence/"
            terminal.log.print(f"hint: {hint}", soft_wrap=True)
    for study in studies:
        terminal.show(study_line(study))
    # Without the samples: `show` has them.
    shown = [as_plain(study.model_copy(update={"trials": []})) | {"holds": study.holds} for study in studies]
    plain = [as_plain(verdict) for verdict in verdicts]
    lost = [str(error) for error in unread]
    terminal.document({"verdicts": plain, "studies": shown, "unreadable": lost, "exit_code": code})
    return code


def run_show(
    key: str, *, kind: str | None, verbose: bool, csv: Path | None, store: str | None = None, as_json: bool
) -> int:
    """Render one run again."""
    terminal = Terminal(as_json=as_json)
    repository = find_repository()
    if is_path(key) and is_study(Path(key)):
        return _show_study(read_study(Path(key)), terminal, verbose=verbose)
    # A file needs no store, so that a wrong one does not hide it.
    record = read_record(Path(key)) if is_path(key) else Archive(Store(store), repository).load(key)
    measured = kinds_measured(record)
    if kind is not None and measured and kind not in measured:
        raise InputError(f"time must be one of {', '.join(measured)} in this run, got {kind}")
    if csv is not None:
        write_csv_file([record], csv)
    comparison = compare_revisions(record) if record.compared else None
    verdicts = [] if comparison else conclude_now(record, repository)
    terminal.show(head_lines(record), "")
    for number, gate in enumerate(record.gates):
        said = {earlier.hint for earlier in record.gates[:number]}
        terminal.show(gate_lines(gate, verbose=verbose, said=said))
    terminal.show("")
    if record.cases:
        unmeasured = unmeasured_lines(record)
        terminal.show(case_table(record, cast("TimeKind | None", kind)), *([unmeasured] if unmeasured else []), "")
    if verbose and any(arm.launches for case in record.cases for arm in case.arms):
        terminal.show(launch_table(record), "")
    document = {"record": as_plain(record), "verdicts": [as_plain(verdict) for verdict in verdicts]}
    if comparison:
        terminal.show(comparison_lines(comparison))
        document["comparison"] = as_plain(comparison)
    else:
        terminal.show_conclusion(record, verdicts)
    terminal.document(document)
    return 0


def _show_study(study: Study, terminal: Terminal, *, verbose: bool) -> int:
    terminal.show(study_lines(study, verbose=verbose))
    terminal.document({"study": as_plain(study), "holds": study.holds})
    return 0


def conclude_now(record: Record, repository: Path | None) -> list[Verdict]:
    """Return what a run says when its sources are compared with those of the repository now."""
    if repository is None:
        return conclude(record, repository)
    from ..proof.changes import changes_since

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


def run_explain(shape: str, sizes: dict[str, Any], *, gpu: str | None, backward: bool = False, as_json: bool) -> int:
    """Print the plan for one call, or for its gradients, and what compiling its kernels shows."""
    batch, heads, seqlen, head_dim = _four_sizes(shape)
    from ..attention.problem import AttentionProblem
    from ..gpu.device import current_gpu

    terminal = Terminal(as_json=as_json)
    spec = gpu_named(gpu) if gpu else current_gpu()
    if spec is None:
        raise InputError("there is no NVIDIA GPU here", hint="name one, e.g. --gpu H200")
    defaults = {"heads_kv": heads, "seqlen_k": seqlen, "head_dim_v": head_dim}
    given = {name: value for name, value in sizes.items() if value is not None}
    call = {"batch": batch, "heads": heads, "seqlen_q": seqlen, "head_dim": head_dim, **defaults, **given}
    plan = _plan_call(AttentionProblem(**call), spec, backward=backward)
    terminal.show(*plan_lines(plan.as_text()))
    compiled = _compile_apart({"call": call, "gpu": dataclasses.asdict(spec), "backward": backward})
    terminal.show(*(compile_line(**kernel) for kernel in compiled))
    fits = all(kernel["shared_memory_bytes"] <= spec.shared_memory_per_block_bytes for kernel in compiled)
    if not fits:
        terminal.show(f"  problem {spec.name} has {spec.shared_memory_per_block_bytes} bytes of shared memory a block")
    terminal.document({"plan": plan.as_dict(), "compiled": compiled, "fits": fits})
    return 0 if fits else GATE_FAILED


def _plan_call(problem: AttentionProblem, gpu: GpuSpec, *, backward: bool) -> Plan | BackwardPlan:
    if backward:
        from ..attention.backward_plan import BACKWARD_KERNEL, plan_backward
        from ..attention.backward_problem import BackwardProblem

        return plan_backward(BackwardProblem(problem), gpu, os.environ.get(BACKWARD_KERNEL) or "auto")
    from ..attention.plan import plan_attention

    return plan_attention(problem, gpu)


def _compile_apart(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Compile the kernels of a call in a process of its own: Triton 3.9 ends with a page about objects it kept."""
    from ..proof.worker import run_task

    result = run_task(f"{__name__}:compile_call", payload, timeout_s=_COMPILE_TIMEOUT_S)
    if result.data is None:
        raise CompileError(f"the compiling process: {result.reason}")
    if "error" in result.data:
        raise CompileError(result.data["error"], hint=result.data["hint"])
    return list(result.data["compiled"])


def compile_call(payload: dict[str, Any], emit: object) -> dict[str, Any]:  # noqa: ARG001 - all tasks take it
    """Compile the kernels of ``payload["call"]`` for ``payload["gpu"]``: the task of a worker process."""
    from ..attention.backward_plan import BackwardPlan
    from ..attention.backward_prepare import prepare_backward_kernels
    from ..attention.prepare import prepare_kernels
    from ..attention.problem import AttentionProblem
    from ..gpu.compile import read_resources
    from ..gpu.specs import GpuSpec

    gpu = GpuSpec(**payload["gpu"])
    names = ("registers", "spill_bytes", "shared_memory_bytes", "seconds")
    compiled = []
    try:
        plan = _plan_call(AttentionProblem(**payload["call"]), gpu, backward=payload["backward"])
        for kernel in prepare_backward_kernels(plan) if isinstance(plan, BackwardPlan) else prepare_kernels(plan):
            found = _fields(read_resources(kernel.source, gpu.arch), *names)
            compiled.append({"kernel": kernel.source.name, **found})
    except CompileError as error:
        return {"error": str(error).removesuffix(f"\nhint: {error.hint}"), "hint": error.hint}
    return {"compiled": compiled}


def _four_sizes(shape: str) -> list[int]:
    try:
        sizes = [int(size) for size in shape.replace("x", ",").split(",")]
    except ValueError:
        sizes = []
    if len(sizes) != 4:
        raise InputError(f"shape must be four integers B,H,S,D, got {shape!r}", hint="e.g. --shape 1,16,4096,128")
    return sizes


def run_doctor(*, as_json: bool) -> int:
    """Print what this machine has and lacks."""
    from ..proof.environment import doctor

    terminal = Terminal(as_json=as_json)
    checks = doctor()
    terminal.show(check_lines(checks))
    terminal.document({"checks": [_fields(check, "name", "ok", "text", "hint") for check in checks]})
    return 0


def run_suites(name: str | None, *, as_json: bool) -> int:
    """List the packaged suites, or the cases of one."""
    from ..proof.suites import list_suites, load_suite

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
    from ..proof.operator import load_operator

    terminal.show(f"{suite.name} ({suite.operator}): {suite.description}", "")
    terminal.show(plain_table(("case", "where it comes from"), [(case.name, case.origin) for case in suite.cases]))
    as_table = load_operator(suite.operator).as_table
    cases = [{**_fields(case, "name", "origin"), "problem": as_table(case.problem)} for case in suite.cases]
    terminal.document({**_fields(suite, "name", "operator", "description"), "cases": cases})


def run_baselines(operator: str, *, as_json: bool) -> int:
    """List the rivals of an operator."""
    from ..proof.baselines import available_baselines
    from ..proof.operator import load_operator

    terminal = Terminal(as_json=as_json)
    found = available_baselines(load_operator(operator))
    rows = [(b.name, "yes" if b.available else "no", b.version, b.reason) for b in found]
    terminal.show(plain_table(("baseline", "here", "version", "why not"), rows))
    names = ("name", "available", "installed", "version", "reason")
    terminal.document({"baselines": [_fields(b, *names) for b in found]})
    return 0


def run_readme(path: Path | None, *, check: bool, as_json: bool) -> int:
    """Write or check the table of speeds."""
    from ..proof.readme import render_readme

    terminal = Terminal(as_json=as_json)
    path = path or (find_repository() or Path.cwd()) / "README.md"
    fresh = render_readme(path)
    current = path.read_text(encoding="utf-8") == fresh
    if not current and not check:
        write_file(path, fresh)
    said = "is current" if current else "is out of date" if check else "rewritten"
    terminal.show(f"{short_path(path)}: the table of speeds {said}")
    if check and not current:
        terminal.log.print("hint: flashmoe readme rewrites it")
    terminal.document(
        {"path": short_path(path), "current": current or not check, "rewritten": not current and not check}
    )
    return OUT_OF_DATE if check and not current else 0


def _fields(thing: object, *names: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names}
