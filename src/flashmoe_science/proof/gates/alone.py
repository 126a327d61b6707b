"""The last part of gate bench: baselines in a process that never imports the subject take as long as beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..judge.alone import ROUNDS, compare_alone, drawn_cases, graph_seconds, measured_baselines, slowed_by_subject
from ..judge.judge import FEWEST_PROCESSES
from ..records.evidence import Alone, TimeKind
from ..text import counted
from .run import Outcome, Run, failed, first_of

_HINT = "look at what its module leaves behind: threads, patches of other packages, settings, files that shadow others"
_IMPORTED = "the operator's module imports the subject: what that changes is the same alone, and is not seen"


def plans_alone(run: Run) -> bool:
    """Return whether baselines are timed without the subject: where a claim may follow.

    One process can be slow as a whole, so fewer than a claim needs tell nothing. Two revisions share all but a commit.
    """
    enough = run.settings.processes >= FEWEST_PROCESSES
    return run.has_gpu and enough and bool(run.request.baselines) and run.subject.checkout is None


def check_alone(run: Run, outcome: Outcome) -> Outcome:
    """Time baselines without the subject, and return ``outcome``, of all else, or how they differ."""
    names = drawn_cases(list(run.cases.values()), run.settings.seed)
    if not plans_alone(run) or not names:
        return outcome
    notes: list[str] = []
    if not run.alone:  # else an interrupted run has brought them
        found: list[Alone] = []
        for mode in run.modes:
            failure, imported = _measure(run, names, mode, found)
            if failure is not None:
                return failure
            notes = [_IMPORTED] if imported else []
        run.alone = found  # not before: a run that is interrupted here measures all of them anew
    if slowed := [line for each in run.alone if (line := slowed_by_subject(each))]:
        return failed(first_of(slowed), hint=_HINT, details=slowed)
    return replace(outcome, details=[*outcome.details, *_say(run.alone), *notes])


def _measure(run: Run, names: list[str], mode: list[TimeKind], found: list[Alone]) -> tuple[Outcome | None, bool]:
    """Run one process without the subject, and add what it ``found``.

    Returns:
        How it failed, or None, and whether the subject was imported.
    """
    cases: list[dict[str, Any]] = []
    baselines = dict.fromkeys(each for name in names for each in measured_baselines(run.cases[name]))
    payload = run.payload(
        settings=run.settings.model_copy(update={"seed": None, "rounds": ROUNDS}).model_dump(mode="json"),
        seed=None,
        cases=[run.case_table(name) for name in names],
        process=2 * run.settings.processes,  # that no process beside the subject has
        times=list(mode),
        slow=[name for name in names if name in run.slow],
        beside={name: graph_seconds(run.cases[name]) for name in names},
        baselines=list(baselines),
    )
    label = f"{' and '.join(mode)} time, without the subject"
    result, under_way = run.run_cases(
        "gpu_tasks:measure_alone", payload, cases.append, timeout_s=run.subject.limits.bench_s, note=f" ({label})"
    )
    if not result.ok or result.data is None:
        hint, tail = run.explain_crash(result, "bench_s")
        reason = f"the process of {label}: {run.how_it_ended(result, under_way)}"
        run.lost = f"bench: {reason}"
        return failed(reason, hint=hint, details=tail), False
    for case in cases:
        record, seconds = run.cases[case["name"]], (case["rounds"] or {"seconds": {}})["seconds"]
        for baseline in measured_baselines(record):
            for kind in mode:
                if not (column := seconds.get(kind, {}).get(baseline)):
                    told = next((arm["reason"] for arm in case["arms"] if arm["name"] == baseline), "")
                    reason = f"{baseline} has no {kind} time without the subject in case {record.name}: {told}"
                    return failed(reason), False
                found.append(compare_alone(record, baseline, kind, column))
    return None, bool(result.data["imported"])


def _say(found: list[Alone]) -> list[str]:
    """Return how the times of each baseline compare, a line each."""
    lines = []
    for baseline in dict.fromkeys(each.baseline for each in found):
        ratios = [each.ratio for each in found if each.baseline == baseline]
        over = counted(len({each.case for each in found if each.baseline == baseline}), "case")
        times = f"{min(ratios):.2f} to {max(ratios):.2f} times as long beside the subject as alone"
        lines.append(f"{baseline} takes {times}, in {over}")
    return lines
