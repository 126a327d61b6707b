"""The gates that time: quick, which ends a hopeless run early, and bench, which takes the evidence."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..cost.cost import QUICK_CASES, QUICK_ROUNDS
from ..judge.roofline import fewest_seconds, impossible_time
from ..measure.launches import timed_otherwise
from ..processes import TaskResult
from ..records.evidence import CaseRecord, GateStatus, Launch, RankRounds, Rounds, Settings, TimeKind, rates_of
from ..text import counted
from .alone import check_alone
from .resume import has_cell, is_wide
from .run import Outcome, Run, failed, first_of, no_timing, not_possible, passed

_QUICK_RANGE = (0.5, 2.0)  # times the speedup expected
_WORST = ("not measured", "measured", "refused", "unavailable", "failed")  # an arm keeps the worst of all processes
_SHOWN_PROBLEMS = 20
_IMPOSSIBLE_HINT = "the clock, the work counted or the call is wrong: no kernel can be that fast"
_NONE_IMPOSSIBLE = "no time is impossible"


def measure_quickly(run: Run) -> Outcome:
    """Gate quick: five rounds of some cases. Far from what was expected, or faster than the GPU can be: stop here."""
    if (outcome := _not_timed(run)) is not None:
        return outcome
    kind: TimeKind = "graph" if "graph" in run.settings.times else run.settings.times[0]
    settings = run.settings.model_copy(update={"rounds": QUICK_ROUNDS, "processes": 1, "times": [kind]})
    cases: list[dict[str, Any]] = []
    # Whether work is ordered with the caller's stream, and follows few new values, is for the gate bench to say.
    drawn = random.Random(f"{run.settings.seed}/quick").sample(run.todo, min(QUICK_CASES, len(run.todo)))
    names = [name for name in run.todo if name in drawn]
    # Of no process of the gate bench, whose first values would be these again: they may have been kept on a disk.
    step = _Step(settings, -1, [kind], names, done=0, total=len(names), thorough=False)
    first = run.request.baselines[:1]  # what was expected is over the first
    result, under_way = _measure(run, step, cases.append, first, timeout_s=run.subject.limits.quick_s)
    if not result.ok:
        hint, tail = run.explain_crash(result, "quick_s")
        return failed(run.how_it_ended(result, under_way), hint=hint, details=tail)
    problems = [line for case in cases if (line := _subject_failure(run, case))]
    if problems:
        return failed(first_of(problems), details=problems[:_SHOWN_PROBLEMS])
    impossible = [line for case in cases if (line := _impossible(run, case, kind))]
    if impossible:
        return failed(first_of(impossible), hint=_IMPOSSIBLE_HINT, details=impossible)
    return _compare_with_expected(run, cases, kind)


def _not_timed(run: Run) -> Outcome | None:
    """Return the outcome where nothing can be timed, else None. On a CPU correct may have left cases unchecked."""
    if run.no_timing_reason:
        return no_timing(run)
    unchecked = [name for name in run.todo if run.cases[name].correct is not True]
    if not unchecked:
        return None
    return not_possible(f"no times without right answers: correct did not check {unchecked[0]} here")


def _compare_with_expected(run: Run, cases: Sequence[dict[str, Any]], kind: TimeKind) -> Outcome:
    speedups = {case["name"]: s for case in cases if (s := _speedup(run, case, kind)) is not None}
    expected = run.expected_speedup
    if not speedups:
        what = "no baseline ran, so nothing was compared"
        return passed(f"{what}; {_checked(run, cases, kind)}")
    mean = math.exp(statistics.fmean(math.log(s) for s in speedups.values()))
    details = [f"{name}: {speedup:.2f}x" for name, speedup in speedups.items()]
    over = counted(len(speedups), "case")
    if len(cases) < len(run.todo):
        over = f"{len(speedups)} of {counted(len(run.todo), 'case')}"
    summary = f"about {mean:.2f}x of {run.request.baselines[0]} in {kind} time (geometric mean of {over})"
    if (checked := _checked(run, cases, kind)) != _NONE_IMPOSSIBLE:
        summary = f"{summary}; {checked}"
    if expected is None:
        return passed(f"{summary}; no speedup was expected (--expect)", details=details)
    low, high = (factor * expected for factor in _QUICK_RANGE)
    if not low <= mean <= high:
        hint = "--expect says what else to expect; a wrong kernel, tile or grid shows in gate launch's record"
        summary = f"{expected:.2f}x was expected, and it is {summary}"
        if mean < low and (idle := _idle_sms(run, speedups)):
            summary = f"{summary}; {idle}"
            hint = "share the work over more blocks: split the keys and merge, or smaller row tiles; or --expect less"
        return failed(summary, hint=hint, details=details)
    return passed(f"{summary}; {expected:.2f}x was expected", details=details)


def _idle_sms(run: Run, speedups: Mapping[str, float]) -> str:
    """Say of how many slow cases the largest grid has fewer blocks than the GPU has SMs, or return an empty text."""
    gpu = run.environment.gpu
    blocks = {
        name: max(math.prod(launch.grid) for launch in arm.launches)
        for name in speedups
        for arm in run.cases[name].arms
        if arm.role == "subject" and arm.launches
    }
    few = {name: count for name, count in blocks.items() if gpu is not None and count < gpu.sms and speedups[name] < 1}
    if gpu is None or not few:
        return ""
    slowest = min(few, key=speedups.__getitem__)
    return (
        f"in {len(few)} of {counted(len(speedups), 'case')} it is slower with fewer blocks than the GPU's {gpu.sms} "
        f"SMs: {slowest}, {speedups[slowest]:.2g}x, has {counted(few[slowest], 'block')}, which leave "
        f"{1 - few[slowest] / gpu.sms:.0%} of the SMs idle"
    )


def measure_fully(run: Run) -> Outcome:
    """Gate bench: all rounds in all processes; kernel time in processes of its own; then baselines alone."""
    if (outcome := _not_timed(run)) is not None:
        return outcome
    for step in _all_steps(run):

        def on_case(case: dict[str, Any], process: int = step.process) -> None:
            add_measured(run, case, process)
            run.save()

        limit = run.subject.limits.bench_s
        result, under_way = _measure(run, step, on_case, run.request.baselines, timeout_s=limit)
        if not result.ok:
            hint, tail = run.explain_crash(result, "bench_s")
            reason = f"process {step.process} ({step.label}): {run.how_it_ended(result, under_way)}"
            run.lost = f"bench: {reason}"
            return failed(reason, hint=hint, details=tail)
    outcome = _sum_up(run)
    return check_alone(run, outcome) if outcome.status is GateStatus.PASSED else outcome


def _sum_up(run: Run) -> Outcome:
    subjects = [(case, arm) for case in run.cases.values() for arm in case.arms if arm.role == "subject"]
    problems = [
        f"{case.name}: {arm.reason or arm.status}"
        for case, arm in subjects
        if arm.status not in ("measured", "refused")
    ]
    notes = [
        f"{case.name}: {arm.role} {arm.name} {arm.status}: {arm.reason}"
        for case in run.cases.values()
        for arm in case.arms
        if arm.role != "subject" and arm.status != "measured" and case.name in run.served
    ]
    if problems:
        details = [*problems[:_SHOWN_PROBLEMS], *notes]
        return failed(first_of(problems), details=details)
    record = run.record()
    for kind in run.settings.times:  # gate quick has drawn some cases
        if impossible := impossible_time(record, kind, [run.subject.name]):
            return failed(impossible, hint=_IMPOSSIBLE_HINT, details=notes)
    notes += run.timed_otherwise.values()
    if run.slow:
        of = f"exact answers take long in {counted(len(run.slow), 'case')}"
        notes.append(f"{of}: bench compares there after the rounds of one process, which the seed draws")
    rounds = counted(run.settings.processes * run.settings.rounds, "round")
    processes, times = counted(run.settings.processes, "process"), ", ".join(run.settings.times)
    summary = f"{counted(len(run.served), 'case')}, {rounds} each in {processes}: {times} time{run.not_served_note}"
    planned, width = run.settings.processes, run.settings.width
    again = sum(any(p >= planned for r in case.rounds for p in r.process) for case in run.cases.values())
    if again and width is not None:
        summary += f"; {again} of them in as many again: their intervals were wider than {width:.1%} to either side"
    return passed(summary, details=notes)


@dataclass(frozen=True)
class _Step:
    """One measuring process."""

    settings: Settings
    process: int
    times: Sequence[TimeKind]
    cases: Sequence[str]
    done: int  # cases behind us when it begins, of ``total``
    total: int
    thorough: bool = True

    @property
    def label(self) -> str:
        return " and ".join(self.times) + " time"


def _all_steps(run: Run) -> Iterator[_Step]:
    """Yield the measuring processes of the gate bench: those planned, and as many again for cases that stay too wide.

    That is decided once. Whoever looks again after every process, and stops where an interval happens to be narrow,
    has intervals that hold less often than they say (docs/explanation/statistics.md).
    """
    processes = run.settings.processes
    yield from _steps(run, range(processes), [(mode, run.todo) for mode in run.modes])
    wide = [(mode, [name for name in run.todo if is_wide(run, name, mode)]) for mode in run.modes]
    yield from _steps(run, range(processes, 2 * processes), wide)


def _steps(
    run: Run, processes: Iterable[int], wanted: Sequence[tuple[Sequence[TimeKind], Sequence[str]]]
) -> list[_Step]:
    """Return measuring processes, each with the cases that lack its rounds."""
    plan = [
        (process, mode, [name for name in names if not has_cell(run.cases[name], process, mode)])
        for process in processes
        for mode, names in wanted
    ]
    total, steps, done = sum(len(cases) for _, _, cases in plan), [], 0
    for process, mode, cases in plan:
        if cases:
            steps.append(_Step(run.settings, process, mode, cases, done=done, total=total))
            done += len(cases)
    return steps


def _measure(
    run: Run, step: _Step, on_case: Callable[[dict[str, Any]], None], baselines: Sequence[str], *, timeout_s: float
) -> tuple[TaskResult, str]:
    """Run one measuring process; return how it ended, and the case that was under way then."""
    payload = run.payload(
        settings=step.settings.model_copy(update={"seed": None}).model_dump(mode="json"),
        seed=None,  # of which the values of the rounds follow: the process gets theirs when a round begins
        cases=[run.case_table(name) for name in step.cases],
        process=step.process,
        times=list(step.times),
        thorough=step.thorough,
        slow=[name for name in step.cases if name in run.slow],
        baselines=list(baselines),
    )
    note = f" ({step.label})"
    return run.run_cases(
        "gpu_tasks:measure", payload, on_case, timeout_s=timeout_s, done=step.done, total=step.total, note=note
    )


def add_measured(run: Run, case: dict[str, Any], process: int) -> None:
    """Add what one process measured of one case to the record: rounds are pooled, an arm keeps its worst status."""
    record = run.cases[case["name"]]
    rounds = list(record.rounds)
    if case.get("rounds") is not None:
        new = Rounds.model_validate(case["rounds"])
        index = next((i for i, old in enumerate(rounds) if set(old.seconds) == set(new.seconds)), None)
        if index is None:
            rounds.append(new)
        else:
            rounds[index] = pool_rounds(rounds[index], new)
    run.update_case(case["name"], rounds=rounds, input_sets=case["input_sets"], input_set_bytes=case["input_set_bytes"])
    known = {arm.name: arm for arm in record.arms}
    for arm in case["arms"]:
        of_launch = ("launches", "rank_launches", "identities", "host_files")  # gate launch found them
        told = {key: value for key, value in arm.items() if key not in (*of_launch, "rates")}
        changes = {key: value for key, value in told.items() if value is not None}
        old = known.get(arm["name"])
        timed = [Launch.model_validate(launch) for launch in arm.get("launches", ())]
        if old is not None and old.role == "subject" and timed and (unlike := timed_otherwise(old.launches, timed)):
            run.timed_otherwise[case["name"]] = f"{case['name']}: {unlike[0]}"
        if old is not None and _WORST.index(old.status) > _WORST.index(arm["status"]):
            changes |= {"status": old.status, "reason": old.reason}
        elif arm["status"] == "failed":
            changes["reason"] = f"process {process}: {arm['reason']}"
        if old is not None and old.accuracy is not None:
            changes["accuracy"] = old.accuracy  # the gate correct looked harder
        changes["rates"] = rates_of(run.cases[case["name"]], arm["name"])
        run.update_arm(case["name"], arm["name"], **changes)


def pool_rounds(old: Rounds, new: Rounds) -> Rounds:
    """Return the rounds of both, for the arms and kinds of time that both have.

    An arm that failed in one process has no sample there: its samples of the other processes cannot be paired, and go.
    """
    session: list[int] = []
    if old.session or new.session:  # rounds that say nothing are this run's own
        session = [s for rounds in (old, new) for s in rounds.session or [0] * len(rounds.process)]
    ranks = [RankRounds(**_pooled(a, b)) for a, b in zip(old.ranks, new.ranks, strict=True)]
    both = {"process": [*old.process, *new.process], "order": [*old.order, *new.order], **_pooled(old, new)}
    return Rounds(session=session, ranks=ranks, **both)


def _pooled(old: Rounds | RankRounds, new: Rounds | RankRounds) -> dict[str, Any]:
    """Return the sensors and the seconds of both."""
    columns = ("sm_clock_mhz", "power_w", "temperature_c", "throttle")
    seconds = {
        kind: {arm: [*values, *new.seconds[kind][arm]] for arm, values in arms.items() if arm in new.seconds[kind]}
        for kind, arms in old.seconds.items()
    }
    return {"seconds": seconds, **{name: [*getattr(old, name), *getattr(new, name)] for name in columns}}


def _subject_failure(run: Run, case: dict[str, Any]) -> str:
    for arm in case["arms"]:
        if arm["role"] == "subject" and arm["status"] != "measured":
            return f"{case['name']}: {arm['reason'] or arm['status']}"
    return "" if case.get("rounds") else f"{case['name']}: no time was taken of {run.subject.name}"


def _medians(case: dict[str, Any], kind: TimeKind) -> dict[str, float]:
    seconds = (case.get("rounds") or {}).get("seconds", {}).get(kind, {})
    return {arm: statistics.median(values) for arm, values in seconds.items() if values}


def _speedup(run: Run, case: dict[str, Any], kind: TimeKind) -> float | None:
    """Return how many times faster than the first baseline the subject was, or None where one of them has no time."""
    medians = _medians(case, kind)
    baseline = medians.get(run.request.baselines[0]) if run.request.baselines else None
    subject = medians.get(run.subject.name)
    return None if baseline is None or subject is None else baseline / subject


def _checked(run: Run, cases: Sequence[dict[str, Any]], kind: TimeKind) -> str:
    """Return what gate quick may say of impossible times after it found none."""
    unchecked = [case for case in cases if _least(run, case, kind) is None]
    if not unchecked:
        return _NONE_IMPOSSIBLE
    name = run.environment.gpu_name or "this machine"
    of = f"{len(unchecked)} of {counted(len(cases), 'case')}"
    return f"impossible times were not checked in {of}: {name} has no known limits"


def _least(run: Run, case: dict[str, Any], kind: TimeKind) -> float | None:
    """Return the least time that the GPU needs for a case, or None where that is not known."""
    if run.environment.gpu is None:
        return None
    sizes = {key: case[key] for key in ("input_sets", "input_set_bytes")}
    record = CaseRecord(**{**dict(run.cases[case["name"]]), **sizes})
    return fewest_seconds(record, kind, run.environment.gpu, run.settings.cache)


def _impossible(run: Run, case: dict[str, Any], kind: TimeKind) -> str:
    """Return how the subject's time is below what the GPU can do at its highest clock, or an empty text."""
    gpu = run.environment.gpu
    measured = _medians(case, kind).get(run.subject.name)
    least = _least(run, case, kind)
    if gpu is None or measured is None or least is None or measured >= least:
        return ""
    return (
        f"{case['name']}: {measured * 1e6:.2f} us a call ({kind} time); {gpu.name} needs at least {least * 1e6:.2f} us"
    )
