"""The gates that need no GPU: sources, build, import."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ...gpu.specs import find_gpu
from ..subject.failure_hints import not_here
from ..subject.subject import expand_sources, hash_sources
from ..text import counted
from ..worker import TaskCall, run_tasks
from . import library
from .run import Outcome, Run, failed, first_of, not_possible, passed

_COMPILE_PROCESSES = 8
_SHOWN_PROBLEMS = 20


def check_sources(run: Run) -> Outcome:
    """Gate sources: the files named exist, and their hashes go into the record."""
    run.sources = hash_sources(run.subject)
    missing = expand_sources(run.subject)[1]
    if missing:
        hints = ["sources are relative to the folder of the kernel.toml", *_nearest(run.subject.folder, missing)]
        return failed(
            f"no such file: {', '.join(missing)}",
            hint="; ".join(hints),
            details=[f"{source.path} is there" for source in run.sources],
        )
    return passed(f"{counted(len(run.sources), 'file')} hashed")


def _nearest(folder: Path, missing: Sequence[str]) -> list[str]:
    """Return the nearest file name for each entry that names no file."""
    hints = []
    for entry in (entry for entry in missing if not any(letter in entry for letter in "*?[")):
        place = PurePosixPath(entry)
        names = [path.name for path in (folder / place.parent).glob("*") if path.is_file()]
        if near := difflib.get_close_matches(place.name, names, n=1):
            hints.append(f"did you mean {place.parent / near[0]}?")
    return hints


def build(run: Run) -> Outcome:
    """Gate build: the build command runs; kernels compile for every GPU named, within its limits, on any machine."""
    details: list[str] = []
    if (outcome := library.broken_limits(run) or library.run_build_command(run, details)) is not None:
        return outcome
    found = library.look_into(run, details)
    if isinstance(found, Outcome):
        return found
    kept = run.kept_gates.get("build") if not run.request.gpus else None
    if kept is not None and not found:  # what the compiler said holds on any machine
        return passed(kept.summary, details=[*details, f"as run {run.resumed[0].run} showed it"])
    if run.subject.builtin or run.subject.compile_jobs is not None:
        return _compile(run, details)
    if run.subject.build_command is None:
        return passed("nothing to build: no build command, no compile jobs")
    return passed(found or details[0], details=details)


def _compile(run: Run, details: list[str]) -> Outcome:
    """Compile all jobs in a few processes; one that dies takes its own jobs with it, and no others."""
    details = [*details, *_left_out(run)]
    unserved = [gpu for gpu, refused in run.refusals.items() if len(refused) == len(run.cases)]
    if len(unserved) == len(run.gpus):
        reason = run.refusals[run.gpus[0]][next(iter(run.cases))]
        return not_possible(f"{run.subject.name} serves none of these cases: {reason}", details=details)
    parts = min(_COMPILE_PROCESSES, os.cpu_count() or 1)
    common = run.payload(cases=[case.problem for case in run.cases.values()], gpus=run.gpus, parts=parts)
    task = f"{__package__.rpartition('.')[0]}.measure.tasks:compile_kernels"
    calls = [TaskCall(task, {**common, "part": part}, run.subject.limits.compile_s) for part in range(parts)]
    jobs: list[dict[str, Any]] = []
    current = [""] * parts

    def on_event(part: int, event: dict[str, Any]) -> None:
        if event["event"] == "start":
            current[part] = event["label"]
        else:
            jobs.append(event["job"])
        run.progress.advance(len(jobs), event.get("total", 0) or len(jobs), current[part])

    results = run_tasks(calls, on_event=on_event)
    jobs.sort(key=lambda job: (run.gpus.index(job["gpu"]), job["label"]))  # they finish in any order
    problems = [f"{job['label']} for {job['gpu']}: {problem}" for job in jobs for problem in job["problems"]]
    for part, result in enumerate(results):
        if not result.ok:
            where = f"while compiling {current[part]}" if current[part] else "before the first kernel"
            tail = run.explain_crash(result)[1]
            problems += [f"the compiling process {result.reason} {where}", *tail]
    if problems:
        hint = f"`flashmoe explain --gpu {run.gpus[0]}` shows the plan of one shape" if run.subject.builtin else ""
        return failed(first_of(problems), hint=hint, details=[*details, *problems[:_SHOWN_PROBLEMS]])
    if not jobs:
        return failed("there is no kernel to compile for these cases", details=details)
    note = f"; not served: {', '.join(unserved)}" if unserved else ""
    return passed(_summarize(jobs) + note, details=[*details, *_by_gpu(jobs)])


def _left_out(run: Run) -> list[str]:
    """Return the unserved cases, a line for each GPU."""
    lines = []
    for gpu, refused in run.refusals.items():
        if refused:
            reason = first_of(list(dict.fromkeys(refused.values())))
            lines.append(f"{gpu}: {len(refused)} of {counted(len(run.cases), 'case')} left out, not served: {reason}")
    return lines


def _summarize(jobs: Sequence[dict[str, Any]]) -> str:
    spills = sum(job["spill_bytes"] > 0 for job in jobs)
    shared = max(job["shared_memory_bytes"] for job in jobs) / 1024
    return (
        f"{counted(len(jobs), 'kernel')} compiled for {counted(len({job['gpu'] for job in jobs}), 'GPU')}: at most "
        f"{max(job['registers'] for job in jobs)} registers a thread, {shared:.0f} KiB shared memory a block, "
        f"{'no spills' if not spills else f'{spills} with spills'}"
    )


def _by_gpu(jobs: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for gpu in dict.fromkeys(job["gpu"] for job in jobs):
        own = [job for job in jobs if job["gpu"] == gpu]
        shared = max(job["shared_memory_bytes"] for job in own) / 1024
        limit = find_gpu(gpu).shared_memory_per_block_bytes / 1024
        lines.append(
            f"{gpu}: {counted(len(own), 'kernel')}, at most {shared:.0f} of {limit:.0f} KiB shared memory a block"
        )
    return lines


def import_entry(run: Run) -> Outcome:
    """Gate import: the module loads in a fresh process, the entry point exists, its signature fits."""
    if run.not_built:
        return not_possible(run.not_built)
    smallest = min(run.cases.values(), key=lambda case: case.work.bytes)
    payload, limit = run.payload(case=smallest.problem), run.subject.limits.import_s
    result = run.run_task("tasks:import_subject", payload, timeout_s=limit)
    said = result.reason if result.data is None else result.data.get("failure", "")
    if said and not run.has_gpu and (why := not_here(said)):
        run.not_built = f"it cannot be imported here: {why}"
        return not_possible(f"{run.subject.entry_point}: {why}", details=[run.hide_paths(said)])
    if not result.ok or result.data is None:
        hint, tail = run.explain_crash(result, "import_s")
        return failed(f"{run.subject.entry_point}: {run.hide_paths(result.reason)}", hint=hint, details=tail)
    if "failure" in result.data:
        entry = run.subject.entry_point
        reason = f"{entry}: {run.hide_paths(result.data['failure']).removeprefix(f'entry point {entry}: ')}"
        return failed(reason, hint=result.data["hint"])
    return passed(f"{run.subject.entry_point} loads in a fresh process", details=result.data["notes"])
