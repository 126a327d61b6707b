"""Faster, slower, same or undecided: two revisions of one run, or two runs. See ``docs/how-to/compare.md``.

A ratio here is A's time divided by B's: above 1, B is the faster one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from statistics import median
from typing import Any

from pydantic import Field

from ...errors import EvidenceError, TooFewRoundsError
from ..judge.comparable import check_comparable, common_baseline
from ..judge.consistency import check_pair
from ..judge.familywise import comparison_intervals, unpaired_intervals
from ..judge.judge import check_control, paired_log_ratios, sanity_failure
from ..judge.rows import kinds_measured
from ..judge.statistics import Interval
from ..records.evidence import CaseRecord, GateStatus, Model, Record, TimeKind, failed_gate
from ..text import counted

# The smallest effect that matters, where nothing else is said. For two runs it has to cover what runs vary by: two
# captures of the same code were seen to differ by up to 2 %.
TOLERANCE = 0.01
TOLERANCE_OF_RUNS = 0.02

_TOO_WIDE = "no difference shows, and the interval is too wide for the same: more processes narrow it"
_NOT_CLEAR = "two runs differ, though not beyond the tolerance: such a difference can be that of the runs"

_SHOWN = 3  # cases that a reason lists
_FEWEST_PROCESSES = 2  # one process says nothing of others

_Groups = Sequence[Sequence[float]]


class Effect(str, Enum):
    """How B compares with A."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"  # shown to be within the tolerance, which is more than a difference that was not seen
    UNDECIDED = "undecided"


class CaseComparison(Model):
    """B against A in one case and one kind of time."""

    name: str
    metric: TimeKind
    effect: Effect
    reason: str = ""  # why it is undecided
    ratio: Interval | None = None  # A's time / B's, together with the other cases at 95 %
    seconds: tuple[float, float] | None = None  # medians of A and B


class Comparison(Model):
    """B against A."""

    a: str
    b: str
    subject: str
    suite: str
    paired: bool  # rounds were interleaved in one run
    quantity: str  # what the ratio is of
    tolerance: float
    effect: Effect
    reason: str
    cases: list[CaseComparison] = Field(default_factory=list)
    gate_failed: str | None = None
    notes: list[str] = Field(default_factory=list)


def effect_of(log_ratio: Interval, tolerance: float, *, paired: bool = True) -> Effect:
    """Return the effect that an interval of ``log(A / B)`` shows.

    Within the tolerance on both sides it is "same", even where it excludes zero. Beyond it, an interval of paired
    rounds that excludes zero shows a difference. An interval of two runs must lie beyond the tolerance as a whole.
    """
    limit = math.log1p(tolerance)
    if -limit <= log_ratio.low and log_ratio.high <= limit:
        return Effect.SAME
    margin = 0.0 if paired else limit
    if log_ratio.low > margin:
        return Effect.FASTER
    return Effect.SLOWER if log_ratio.high < -margin else Effect.UNDECIDED


def exit_code(comparison: Comparison) -> int:
    """Return 0 when nothing is slower, 1 when something is, 3 when a gate failed, 4 when it is undecided."""
    if comparison.gate_failed is not None:
        return 3
    return {Effect.SLOWER: 1, Effect.UNDECIDED: 4}.get(comparison.effect, 0)


def compare_revisions(
    record: Record, kinds: Sequence[TimeKind] | None = None, *, tolerance: float | None = None
) -> Comparison:
    """Return how revision B compares with revision A, by the interleaved rounds of ``record``.

    ``kinds`` of time decide, by default all. ``tolerance`` is the smallest effect that matters, by default the run's
    own. Raises ``EvidenceError`` where the record compares no revisions.
    """
    compared = record.compared
    if compared is None:
        raise EvidenceError(f"run {record.id} does not compare revisions", hint="compare it with another run")
    tolerance = compared.tolerance if tolerance is None else tolerance
    a, b = (f"{side.label} ({side.commit[:12]})" for side in (compared.a, compared.b))
    comparison = partial(
        Comparison,
        a=a,
        b=b,
        subject=record.subject.name.partition("@")[0],
        suite=record.suite,
        paired=True,
        quantity="A's time / B's",
        tolerance=tolerance,
    )
    for label, gates in ((a, compared.a.gates), (b, record.gates)):
        if failed := failed_gate(gates):
            reason = f"{label} failed gate {failed.name}: {failed.summary}"
            return comparison(effect=Effect.UNDECIDED, reason=reason, gate_failed=failed.name)
    kinds = list(kinds or kinds_measured(record))
    rows, samples = [], []
    for kind in kinds:
        unsound = sanity_failure(record, kind, (compared.a.arm, compared.b.arm))
        biases = {} if unsound else check_control(record, kind).biases
        for case in record.cases:
            wrong = unsound or _unmeasured(case, compared.a.arm, compared.b.arm)
            pairs = {} if unsound else paired_log_ratios(case, kind, compared.a.arm, compared.b.arm)
            processes, groups = sorted(pairs), [pairs[process] for process in sorted(pairs)]
            seconds = _medians(case, kind, compared.a.arm), _medians(case, kind, compared.b.arm)
            bias = biases.get(case.name, 0.0)
            rows.append(_Row(case.name, kind, wrong or _too_few(groups), seconds, (kind, *processes), bias))
            samples.append(groups)
    cases = _decide(rows, samples, tolerance, paired=True)
    effect, reason = _in_all(cases, complete=record.complete, impossible=_not_possible(record))
    return comparison(
        effect=effect,
        reason=reason,
        cases=cases,
        notes=[] if record.complete else [f"the run is incomplete: {record.incomplete_reason}"],
    )


def compare_records(
    a: Record,
    b: Record,
    kinds: Sequence[TimeKind] | None = None,
    *,
    tolerance: float = TOLERANCE_OF_RUNS,
    allowed: Iterable[str] = (),
) -> Comparison:
    """Return how the subject of run ``b`` compares with that of run ``a``: rounds of different runs are not paired.

    The ratio to a common baseline is compared; absolute times only on one card.

    Args:
        a: one run.
        b: the other.
        kinds: the times that decide. Default: all that both runs took.
        tolerance: the smallest effect that matters.
        allowed: fields of ``comparable.FIELDS`` that may differ.

    Raises:
        EvidenceError: the runs may not be compared: names the field that differs, with both values.
    """
    taken = [kind for kind in kinds_measured(a) if kind in kinds_measured(b)]
    kinds = list(kinds or taken)
    if missing := [kind for kind in kinds if kind not in taken]:
        raise EvidenceError(f"both runs need {missing[0]} times to be compared by them, and one has none")
    notes = check_comparable(a, b, kinds, allowed=allowed)
    baseline = common_baseline(a, b)
    quantity = f"(A's time / {baseline}'s in its run) / (B's time / {baseline}'s in its run)" if baseline else ""
    names = {case.name for case in b.cases}
    common = [case for case in a.cases if case.name in names]
    only = len(a.cases) + len(b.cases) - 2 * len(common)
    notes += [f"{counted(only, 'case')} in one run only"] if only else []
    notes.append("what varies from run to run is not in the intervals: two runs cannot show it")
    comparison = partial(
        Comparison,
        a=a.id,
        b=b.id,
        subject=b.subject.name,
        suite=b.suite,
        paired=False,
        quantity=quantity or "A's time / B's, on one card",
        tolerance=tolerance,
    )
    for run in (a, b):
        if failed := failed_gate(run.gates):
            reason = f"run {run.id} failed gate {failed.name}: {failed.summary}"
            return comparison(effect=Effect.UNDECIDED, reason=reason, gate_failed=failed.name, notes=notes)
    others = {case.name: case for case in b.cases}
    rows, samples, wrong_in = [], [], check_pair(a, b)
    for kind in kinds:
        invalid = [
            (run.id, sanity_failure(run, kind, (run.subject.name, baseline)) or wrong)
            for run, wrong in zip((a, b), wrong_in, strict=True)
        ]
        unsound = next((f"run {id_} is invalid: {why}" for id_, why in invalid if why), "")
        for case in common:
            pair = (case, a), (others[case.name], b)
            wrong = unsound or next((w for c, run in pair if (w := _unmeasured(c, run.subject.name, baseline))), "")
            both = [{} if unsound else _values(c, kind, run.subject.name, baseline) for c, run in pair]
            processes = [tuple(sorted(groups)) for groups in both]
            both_groups = [[groups[process] for process in sorted(groups)] for groups in both]
            wrong = wrong or next((w for groups in both_groups if (w := _too_few(groups))), "")
            seconds = [_medians(c, kind, run.subject.name) for c, run in pair]
            rows.append(_Row(case.name, kind, wrong, (seconds[0], seconds[1]), (kind, *processes)))
            samples.append((both_groups[0], both_groups[1]))
    cases = _decide(rows, samples, tolerance, paired=False)
    complete = a.complete and b.complete
    notes += [f"run {run.id} is incomplete: {run.incomplete_reason}" for run in (a, b) if not run.complete]
    effect, reason = _in_all(cases, complete=complete, impossible="no case is in both runs" if not common else "")
    return comparison(effect=effect, reason=reason, cases=cases, notes=notes)


@dataclass(frozen=True)
class _Row:
    """One case and kind of time before it is decided."""

    name: str
    metric: TimeKind
    wrong: str  # why it cannot be decided, or an empty text
    seconds: tuple[float | None, float | None]
    shared: Hashable  # the same for cases that were measured in the same processes, by the same kind of time
    bias: float = 0.0  # that the control shows


def _decide(rows: Sequence[_Row], samples: Sequence[Any], tolerance: float, *, paired: bool) -> list[CaseComparison]:
    """Return the cases with their effects; the intervals of those that have enough rounds hold together."""
    sound = [sample for row, sample in zip(rows, samples, strict=True) if not row.wrong]
    shared = [row.shared for row in rows if not row.wrong]
    try:
        intervals = iter(comparison_intervals(sound, shared) if paired else unpaired_intervals(sound, shared))
    except TooFewRoundsError as error:
        reason = str(error).partition("\n")[0]
        return [_open(row, row.wrong or reason) for row in rows]
    cases = []
    for row in rows:
        if row.wrong:
            cases.append(_open(row, row.wrong))
            continue
        found = next(intervals).widened(row.bias)
        effect = effect_of(found, tolerance, paired=paired)
        reason = ""
        if effect is Effect.UNDECIDED:
            reason = _TOO_WIDE if found.contains(0.0) else _NOT_CLEAR
        cases.append(_open(row, reason).model_copy(update={"effect": effect, "ratio": found.exp()}))
    return cases


def _open(row: _Row, reason: str) -> CaseComparison:
    a, b = row.seconds
    seconds = (a, b) if a is not None and b is not None else None
    return CaseComparison(name=row.name, metric=row.metric, effect=Effect.UNDECIDED, reason=reason, seconds=seconds)


def _unmeasured(case: CaseRecord, *arms: str) -> str:
    """Return why one of these arms has no times, or an empty text."""
    if case.correct is not True:
        return "its correctness was not shown"
    known = {arm.name: arm for arm in case.arms}
    for name in filter(None, arms):
        if name not in known:
            return f"{name} was not measured"
        if known[name].status != "measured":
            reason = known[name].reason
            return f"{name} was not measured: {known[name].status}{', ' + reason if reason else ''}"
    return ""


def _too_few(groups: _Groups) -> str:
    if len(groups) >= _FEWEST_PROCESSES:
        return ""
    return f"it has rounds in {counted(len(groups), 'process')}, expected at least {_FEWEST_PROCESSES}"


def _medians(case: CaseRecord, kind: TimeKind, arm: str) -> float | None:
    columns = [column for rounds in case.rounds if (column := rounds.seconds.get(kind, {}).get(arm))]
    return median(value for column in columns for value in column) if columns else None


def _values(case: CaseRecord, kind: TimeKind, subject: str, baseline: str) -> Mapping[tuple[int, int], Sequence[float]]:
    """Return by process the log of the subject's times, over the baseline's where there is one."""
    if baseline:
        return paired_log_ratios(case, kind, subject, baseline)
    groups: dict[tuple[int, int], list[float]] = {}
    for index, rounds in enumerate(case.rounds):
        for process, seconds in zip(rounds.process, rounds.seconds.get(kind, {}).get(subject, []), strict=False):
            groups.setdefault((index, process), []).append(math.log(seconds))
    return groups


def _not_possible(record: Record) -> str:
    """Return why nothing was timed, or an empty text."""
    gates = [gate for gate in record.gates if gate.status is GateStatus.NOT_POSSIBLE]
    if kinds_measured(record) or not gates:
        return ""
    both = f"nothing was timed: {gates[0].name} is not possible here: {gates[0].summary}"
    shown: Mapping[str, str] = {gate.name: gate.status.value for gate in record.gates}
    passed = [name for name, status in shown.items() if status == "passed"]
    return f"{both}; both revisions passed {', '.join(passed)}" if passed else both


def _in_all(cases: Sequence[CaseComparison], *, complete: bool, impossible: str) -> tuple[Effect, str]:
    """Return the verdict over all cases: one that is slower makes it slower, one that is open leaves it open."""
    if impossible or not cases:
        return Effect.UNDECIDED, impossible or "nothing was timed"
    by_effect = {effect: [case for case in cases if case.effect is effect] for effect in Effect}
    counts = ", ".join(f"{len(found)} {effect.value}" for effect, found in by_effect.items() if found)
    slower, undecided = by_effect[Effect.SLOWER], by_effect[Effect.UNDECIDED]
    if slower:
        return Effect.SLOWER, f"{counts}: {_named(slower, cases)}"
    if undecided:
        reasons = list(dict.fromkeys(case.reason for case in undecided))
        why = f": {reasons[0]}" if len(reasons) == 1 else ""
        return Effect.UNDECIDED, f"{counts}: {_named(undecided, cases)}{why}"
    if not complete:
        return Effect.UNDECIDED, f"{counts}, but not everything was measured"
    faster = by_effect[Effect.FASTER]
    return (Effect.FASTER, f"{counts}: {_named(faster, cases)}") if faster else (Effect.SAME, counts)


def _named(some: Sequence[CaseComparison], cases: Sequence[CaseComparison]) -> str:
    """Return which cases these are, after their word where the count before does not say it of all."""
    return _listed(some) if len(some) == len(cases) else f"{some[0].effect.value} {_listed(some)}"


def _listed(cases: Sequence[CaseComparison]) -> str:
    def shown(case: CaseComparison) -> str:
        ratio = case.ratio
        return f"{case.name} ({case.metric})" + (f" {ratio.estimate:.3f}x" if ratio else "")

    more = f" and {len(cases) - _SHOWN} more" if len(cases) > _SHOWN else ""
    return "; ".join(shown(case) for case in cases[:_SHOWN]) + more
