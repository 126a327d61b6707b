"""The gate launch: the kernels that ran are those promised, and nothing else did the work."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from ..measure.launches import baseline_problems, launches_match
from ..records.evidence import Launch
from ..subject.operator import framework_kernels
from ..subject.subject import KernelPromise, Subject
from ..subject.user_operator import raise_blamed
from ..text import counted, cut_name, few, short_name
from .run import Outcome, Run, failed, first_of, no_timing, passed

_SHOWN_PROBLEMS = 20


def check_launches(run: Run) -> Outcome:
    """Gate launch: one call of each case, captured, and one replay of its CUDA graph."""
    if run.no_timing_reason or not run.has_gpu:
        return no_timing(run)
    cases: list[dict[str, Any]] = []

    def on_case(case: dict[str, Any]) -> None:
        cases.append(case)
        _record(run, case)

    limit = run.subject.limits.launch_s
    result, under_way = run.run_cases("gpu_tasks:capture_launches", run.payload(), on_case, timeout_s=limit)
    needs_graph, framework = "graph" in run.settings.times, framework_kernels(run.operator)
    problems = [
        f"{case['name']}: {problem}"
        for case in cases
        for problem in case_problems(run.subject, case, framework=framework, needs_graph=needs_graph)
    ]
    notes = _notes(cases)
    if not result.ok:
        hint, tail = run.explain_crash(result, "launch_s")
        return failed(run.how_it_ended(result, under_way), hint=hint, details=[*problems, *tail])
    if problems:
        details = [*problems[:_SHOWN_PROBLEMS], *notes]
        return failed(first_of(problems), hint=_mend(problems[0]), details=details)
    return passed(_sum_up(cases) + run.not_served_note, details=notes)


def _mend(problem: str) -> str:
    """Return where to look for the cause of the first problem."""
    if "did not run" in problem or "ran with" in problem or "was not promised" in problem:
        return (
            "the entry point calls another kernel, or launches it otherwise: look where the binding chooses. "
            "`flashmoe show RUN --verbose` prints every launch"
        )
    if "cannot capture" in problem:
        return (
            "a call that waits for the GPU, or copies from the host, fits in no graph. Mend it, or leave graph time "
            "out: --time kernel --time wall"
        )
    return "the record holds every launch: name, grid, block, registers and shared memory"


def _record(run: Run, case: dict[str, Any]) -> None:
    for arm in case["arms"]:
        known = ("launches", "version", "role", "identities", "host_files")
        changes: dict[str, Any] = {name: arm[name] for name in known}
        changes["rank_launches"] = arm.get("rank_launches", [])
        if arm["status"] != "captured":
            raise_blamed(arm["reason"])
            changes |= {"status": arm["status"], "reason": arm["reason"]}
        run.update_arm(case["name"], arm["name"], **changes)


def case_problems(subject: Subject, case: dict[str, Any], *, framework: Sequence[str], needs_graph: bool) -> list[str]:
    """Return the faults in the captures of every arm in one case, one line each.

    ``framework`` has patterns of the framework's own kernels: where one runs unpromised, the work fell through to it.
    ``needs_graph``: graph time is to be taken, so that a call that no graph can hold is a failure.
    """
    problems = []
    for arm in case["arms"]:
        if arm["role"] == "subject":
            problems += _subject_problems(subject, arm, framework, needs_graph=needs_graph)
        else:
            problems += [f"baseline {arm['name']} is not what it says: {line}" for line in _baseline_problems(arm)]
    return problems


def _subject_problems(
    subject: Subject, arm: dict[str, Any], framework: Sequence[str], *, needs_graph: bool
) -> list[str]:
    if arm["status"] != "captured":
        return [arm["reason"]]
    promises = [KernelPromise(**promise) for promise in arm.get("promises", [])]
    problems = _stream_problems(subject, promises, framework, arm["launches"])
    if arm["graph_launches"] is not None:
        in_graph = _stream_problems(subject, promises, framework, arm["graph_launches"])
        problems += [f"in its CUDA graph: {problem}" for problem in in_graph if problem not in problems]
    elif needs_graph and not arm.get("graph_unseen", False):
        problems.append(f"a CUDA graph cannot capture the call: {arm['graph_reason']}")
    return list(dict.fromkeys([*problems, *arm.get("problems", [])]))


def _stream_problems(
    subject: Subject, promises: Sequence[Any], framework: Sequence[str], launches: Sequence[dict[str, Any]]
) -> list[str]:
    """Return the faults of the launches of one call or one replay."""
    records = [Launch.model_validate(launch) for launch in launches]
    if not records:
        return ["no kernel ran"]
    problems = []
    for record in records:
        forbidden = [pattern for pattern in subject.forbidden_kernels if fnmatchcase(record.name, pattern)]
        problems += [f"kernel {record.name} ran, and {pattern} is forbidden" for pattern in forbidden]
        families = [pattern for pattern in framework if fnmatchcase(record.name, pattern)]
        if families and not any(_owns(promise.pattern, record.name, families) for promise in promises):
            problems.append(f"kernel {record.name} ran: the call fell through to the framework")
    return list(dict.fromkeys([*problems, *launches_match(promises, records)]))


def _owns(promised: str, name: str, families: Sequence[str]) -> bool:
    """Return whether a promise covers a kernel of the framework's: it has to name the family, a wildcard does not."""
    named = any(all(part in promised for part in family.split("*")) for family in families)
    return named and fnmatchcase(name, promised)


def _baseline_problems(arm: dict[str, Any]) -> list[str]:
    if arm["status"] != "captured":
        return []  # reported as it is: a baseline that cannot run here says nothing against the subject
    launches = [Launch.model_validate(launch) for launch in arm["launches"]]
    return baseline_problems(arm.get("patterns", []), launches)


def _notes(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Return notes on baselines that did not run."""
    notes: dict[str, int] = {}
    for case in cases:
        for arm in case["arms"]:
            if arm["role"] != "subject" and arm["status"] != "captured":
                line = f"baseline {arm['name']} {arm['status']}: {arm['reason']}"
                notes[line] = notes.get(line, 0) + 1
    return [f"{line} ({count} of {counted(len(cases), 'case')})" for line, count in notes.items()]


def _sum_up(cases: Sequence[dict[str, Any]]) -> str:
    arms = [arm for case in cases for arm in case["arms"] if arm["role"] == "subject"]
    names = dict.fromkeys(cut_name(short_name(launch["name"]), 60) for arm in arms for launch in arm["launches"])
    shown = few(list(names))
    if all(arm.get("promises") for arm in arms):
        return f"the kernels that ran are those promised: {shown}"
    if any(arm.get("promises") for arm in arms):
        return f"what was promised ran, and for some cases nothing was promised: {shown}"
    return f"nothing was promised, so only this is shown: {shown} ran"
