"""Baselines in a process without the subject: which cases are drawn, and how times there and beside it have to agree.

Settings, patches and threads of a subject slow the baselines that share its process. Most of these are looked for by
name (``measure/shared_state.py``). This finds those that nobody has thought of, where they cost more than a fifth.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import compress
from statistics import median

from ..records.evidence import Alone, CaseRecord, GateStatus, Record, TimeKind

MOST_TIMES = 1.2  # as long beside the subject as alone; processes of one run differ by less in kernel and graph times
MOST_CASES = 3
ROUNDS = 5  # of the process without the subject
_SAME = 1e-9  # as a share: of two ways to work out the same number


def drawn_cases(cases: Sequence[CaseRecord], seed: int | None) -> list[str]:
    """Return the names of at most three cases with a measured baseline, drawn by the seed of the run."""
    names = [case.name for case in cases if measured_baselines(case)]
    drawn = set(random.Random(f"{seed}/alone").sample(names, min(MOST_CASES, len(names))))
    return [name for name in names if name in drawn]


def measured_baselines(case: CaseRecord) -> list[str]:
    """Return the baselines that have all their times in a case."""
    return [arm.name for arm in case.arms if arm.role == "baseline" and arm.status == "measured" and case.rounds]


def compare_alone(case: CaseRecord, baseline: str, kind: TimeKind, seconds: Sequence[float]) -> Alone:
    """Return the times of a baseline in the process without the subject, and beside it."""
    alone, beside = median(seconds), beside_seconds(case, baseline, kind)
    return Alone(
        case=case.name,
        baseline=baseline,
        kind=kind,
        seconds=list(seconds),
        alone=alone,
        beside=beside,
        ratio=beside / alone,
    )


def beside_seconds(case: CaseRecord, baseline: str, kind: TimeKind) -> float:
    """Return the least of the medians of the processes that hold the subject; infinite where there is none.

    A process can be slow as a whole, in wall time above all. A handicap that some processes lack shows in the width of
    the intervals.
    """
    medians = [
        median(compress(column, [p == process for p in rounds.process]))
        for rounds in case.rounds
        if (column := rounds.seconds.get(kind, {}).get(baseline))
        for process in dict.fromkeys(rounds.process)
    ]
    return min(medians, default=math.inf)


def graph_seconds(case: CaseRecord) -> list[float]:
    """Return the medians of all arms beside the subject: they decide how many calls a graph holds."""
    return [median(column) for rounds in case.rounds for column in rounds.seconds.get("graph", {}).values() if column]


def slowed_by_subject(found: Alone) -> str:
    """Return that the subject's process slows a baseline down, or an empty text."""
    if found.ratio <= MOST_TIMES:
        return ""
    times = f"{found.kind} time, {found.beside * 1e6:.4g} us against {found.alone * 1e6:.4g} us"
    return (
        f"{found.baseline} takes {found.ratio:.2f} times as long beside the subject as alone in case {found.case} "
        f"({times}): the subject's process slows it down; at most {MOST_TIMES:g} is allowed"
    )


def alone_faults(record: Record) -> Iterator[str]:
    """Compare what is said of baselines without the subject with the samples, the seed and the verdict."""
    cases = {case.name: case for case in record.cases}
    drawn = drawn_cases(record.cases, record.settings.seed)
    expected = {
        (name, baseline, kind)
        for name in drawn
        for baseline in measured_baselines(cases[name])
        for kind in record.settings.times
    }
    said = [(each.case, each.baseline, each.kind) for each in record.alone]
    if said and (set(said) != expected or len(said) != len(expected)):
        odd = sorted(set(said) ^ expected) or sorted(said)
        yield f"case {odd[0][0]}: {odd[0][1]} alone, {odd[0][2]} time, is not what the seed draws, once each"
        return
    passed = any(gate.name == "bench" and gate.status is GateStatus.PASSED for gate in record.gates)
    for each in record.alone:
        told = f"case {each.case}: {each.baseline} alone, {each.kind} time"
        if len(each.seconds) != ROUNDS or not all(0 < seconds < math.inf for seconds in each.seconds):
            yield f"{told}: expected {ROUNDS} times above 0, got {each.seconds}"
            return
        follows = compare_alone(cases[each.case], each.baseline, each.kind, each.seconds)
        for name in ("alone", "beside", "ratio"):
            value, right = getattr(each, name), getattr(follows, name)
            if not math.isclose(value, right, rel_tol=_SAME):
                yield f"{told}: it says {value:.6g} for {name}, and its samples show {right:.6g}"
        if passed and (slowed := slowed_by_subject(follows)):
            yield f"gate bench passed, and {slowed}"
