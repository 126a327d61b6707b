"""Judge a claim by a record: a verdict and its reason. The rules are in ``docs/reference/claims.md``.

A verdict is never rounded up. Whatever is missing, too noisy or not checked leaves a claim inconclusive. A failed
control makes a run invalid.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

from pydantic import Field

from ..records.evidence import GATE_NAMES, CaseRecord, GateStatus, Model, Record, TimeKind
from ..text import counted
from .claims import Claim, claim_sentence, why_not
from .roofline import has_limits, impossible_time, known_spec
from .statistics import (
    Interval,
    clustered_interval,
    clustered_smallest_effect,
    family_intervals,
    interval,
    log_ratios,
    processes_needed,
    suite_interval,
)

FEWEST_PROCESSES = 3  # for a claim
FEWEST_ROUNDS = 30  # for a claim, over all processes

_SHOWN = 3  # cases that a reason lists

Problem = Mapping[str, Any]  # an operator's own description of one call

_Process = tuple[int, int]  # which of the case's ``rounds``, and which process there
_Groups = Mapping[_Process, Sequence[float]]


class VerdictStatus(str, Enum):
    """The result of judging a claim."""

    DEMONSTRATED = "demonstrated"
    STALE = "stale"  # it was demonstrated, and what it measured has changed since
    REFUTED = "refuted"
    INCONCLUSIVE = "inconclusive"
    ASSERTED = "asserted"  # there is no evidence
    INVALID = "invalid"  # a control failed, a number is impossible, or the record contradicts itself


class CaseVerdict(Model):
    """The verdict on one case. A speedup is the baseline's time divided by the subject's."""

    name: str
    status: VerdictStatus
    reason: str
    baseline: str = ""  # the one that decides: see ``deciding_baseline``
    interval: Interval | None = None  # of the speedup beside it; None where nothing was measured
    smallest_effect: float | None = None  # that the case's rounds could see, as a share: 0.01 is 1 %
    rounds_needed: int | None = None  # still needed where inconclusive; None: more rounds would not decide


class Control(Model):
    """How the second copy of the first baseline compared with the first."""

    passed: bool
    reason: str
    ratios: dict[str, Interval] = Field(default_factory=dict)  # case -> copy / original; together they hold at 95 %
    biases: dict[str, float] = Field(default_factory=dict)  # case -> size of its log-ratio where one shows, else 0


class Verdict(Model):
    """The verdict on one claim."""

    claim: Claim
    status: VerdictStatus
    reason: str
    record: str | None = None  # id of the run that decided
    evidence: str | None = None  # its file, from the repository's root
    gate_failed: str | None = None
    cases: list[CaseVerdict] = Field(default_factory=list)
    geometric_mean: Interval | None = None  # of the speedups, beside the cases
    others: str = ""  # what the other cases of the suite show, of a claim that selects cases; the notes have it too
    control: Control | None = None
    notes: list[str] = Field(default_factory=list)  # a reader of the status must know these; the reason has them too
    signature: str = ""  # who signed the record, or why that is not known
    limits: list[str] = Field(default_factory=list)  # what the run could not have seen; ``limits.py``
    rule: str = ""  # by which rules the record was made; ``limits.py``
    refused_today: str = ""  # why the record could not make this claim today; empty where it could
    by_gpu: list[Verdict] = Field(default_factory=list)  # for a claim on several GPUs: one each, weakest first

    @property
    def rounds_needed(self) -> int | None:
        """About how many more rounds would decide it; None: more rounds alone would not."""
        lacking = [case.rounds_needed for case in self.cases if case.status is VerdictStatus.INCONCLUSIVE]
        if self.status is not VerdictStatus.INCONCLUSIVE or not lacking or None in lacking:
            return None
        return max(rounds for rounds in lacking if rounds is not None)


def judge(
    claim: Claim,
    record: Record | None,
    *,
    suite: Mapping[str, Problem] | None = None,
    changed: str = "",
    notes: Sequence[str] = (),
    doubts: Sequence[str] = (),
    contradiction: str = "",
) -> Verdict:
    """Return the verdict on ``claim`` by the evidence of ``record``.

    Args:
        claim: What is claimed.
        record: The run that decides, or None for no evidence.
        suite: The suite's cases as they are now, by name; one that the record lacks leaves the claim inconclusive.
            None: not known.
        changed: Sources that changed since the run; they make a demonstrated claim stale. Empty: none is known.
        notes: Added to the end of the reason.
        doubts: Notes that keep a claim from being demonstrated.
        contradiction: How the record contradicts itself; then nothing in it counts. Empty: it does not.
    """
    if record is None:
        reason = f"there is no evidence: no record shows {claim_sentence(claim, None)!r}"
        return Verdict(claim=claim, status=VerdictStatus.ASSERTED, reason=reason)

    if len(claim.gpu) > 1:
        doubts = [*doubts, f"one record shows one GPU, and the claim is of {', '.join(claim.gpu)}"]
    since = [f"measured {_before_change(record, changed)}"] if changed else []
    said = [*doubts, *_notes_on(record), *since, *notes]
    verdict = partial(Verdict, claim=claim, record=record.id, notes=said)
    if contradiction:
        reason = _reason(f"record {record.id} contradicts itself, so nothing in it counts: {contradiction}", said)
        return verdict(status=VerdictStatus.INVALID, reason=reason)
    if failed := record.failed_gate:
        reason = _reason(f"gate {failed.name} failed: {failed.summary}", said)
        return verdict(status=VerdictStatus.INCONCLUSIVE, reason=reason, gate_failed=failed.name)
    if mismatch := why_not(claim, record):
        return verdict(status=VerdictStatus.INCONCLUSIVE, reason=_reason(mismatch, said))
    if claim.metric == "memory":
        control = memory_control(record)
    elif impossible := impossible_time(record, claim.metric, (claim.subject, *claim.baseline)):
        return verdict(status=VerdictStatus.INVALID, reason=_reason(impossible, said))
    else:
        control = check_control(record, claim.metric)
    if not control.passed:
        return verdict(status=VerdictStatus.INVALID, reason=_reason(control.reason, said), control=control)

    judged = [_judge_case(claim, case, control) for case in claim.cases_of(record)]
    cases = [case for case, _ in judged]
    others = _other_cases(claim, record, control)
    if others:
        said = [*said, others]
        verdict = partial(verdict, notes=said, others=others)
    mean = _geometric_mean({case.name: groups for case, groups in judged}, control)
    status, reason = _over_cases(claim, cases) if claim.scope == "each case" else _over_mean(claim, cases, mean)
    gap = _gap(claim, record, suite or {})
    if status is VerdictStatus.DEMONSTRATED and (gaps := [*([gap] if gap else []), *doubts]):
        status, reason = VerdictStatus.INCONCLUSIVE, f"{'; '.join(gaps)}; of what was measured, {reason}"
        said = said[len(doubts) :]  # the reason began with them
    elif status is VerdictStatus.DEMONSTRATED and changed:
        status = VerdictStatus.STALE
        said = [f"demonstrated {_before_change(record, changed)}", *(note for note in said if note not in since)]
        verdict = partial(verdict, notes=said)
    return verdict(status=status, reason=_reason(reason, said), cases=cases, geometric_mean=mean, control=control)


def check_control(record: Record, metric: TimeKind) -> Control:
    """Compare the second copy of the first baseline with the first, in all cases of ``record`` that have enough rounds.

    The intervals hold together: with 13 cases, 13 intervals of 95 % each would fail half of all sound runs.
    """
    compared: dict[str, _Groups] = {}
    for case in record.cases:
        copy = next((arm.name for arm in case.arms if arm.role == "control" and arm.status == "measured"), None)
        groups = paired_log_ratios(case, metric, copy, copy.rpartition("#")[0]) if copy else {}
        if not _too_few(groups):
            compared[case.name] = groups
    if not compared:
        return Control(passed=True, reason="no case has a control with enough rounds")
    family = family_intervals([list(groups.values()) for groups in compared.values()])
    ratios = {name: found.exp() for name, found in zip(compared, family, strict=True)}
    biases = {name: _shown_bias(groups) for name, groups in compared.items()}
    failed = [f"{name} {_shown(ratio)}" for name, ratio in ratios.items() if not ratio.contains(1.0)]
    reason = f"the control held in {len(ratios)} of {counted(len(record.cases), 'case')}"
    if failed:
        reason = (
            f"the control failed in {len(failed)} of {counted(len(ratios), 'case')}, so nothing else counts: "
            f"a second copy of the baseline took other times than the first: {_listed(failed)}"
        )
    return Control(passed=not failed, reason=reason, ratios=ratios, biases=biases)


def memory_control(record: Record) -> Control:
    """Compare what the second copy of the first baseline allocated with what the first did, in all cases.

    Bytes are counted and have no noise. Two copies of the same code differ where the first call keeps a workspace. This
    difference is the bias of the case.
    """
    biases: dict[str, float] = {}
    for case in record.cases:
        peaks = {arm.name: arm.peak_bytes for arm in case.arms if arm.peak_bytes}
        copy = next((arm.name for arm in case.arms if arm.role == "control" and arm.name in peaks), None)
        original = copy.rpartition("#")[0] if copy else None
        if copy in peaks and original in peaks:
            biases[case.name] = abs(math.log(peaks[copy] / peaks[original]))
    same = sum(bias == 0 for bias in biases.values())
    reason = f"the copy of the baseline allocated as much as the first in {same} of {counted(len(biases), 'case')}"
    return Control(passed=True, reason=reason, biases=biases)


def sanity_failure(record: Record, kind: TimeKind, arms: Container[str]) -> str:
    """Return why no time of this kind counts in ``record``, or an empty text: a gate, an impossible time, the control.

    ``arms`` are those whose times must not be below the GPU's limits.
    """
    if failed := record.failed_gate:
        return f"gate {failed.name} failed: {failed.summary}"
    if impossible := impossible_time(record, kind, arms):  # first: the control divides by times
        return impossible
    control = check_control(record, kind)
    return "" if control.passed else control.reason


def paired_log_ratios(case: CaseRecord, metric: TimeKind, above: str, below: str) -> _Groups:
    """Return the log-ratios of two arms' times, by process."""
    groups: dict[_Process, list[float]] = {}
    for index, rounds in enumerate(case.rounds):
        columns = rounds.seconds.get(metric, {})
        if above in columns and below in columns:
            for process, value in zip(rounds.process, log_ratios(columns[above], columns[below]), strict=True):
                groups.setdefault((index, process), []).append(value)
    return groups


def paired_processes(case: CaseRecord, metric: TimeKind, above: str, below: str) -> int:
    """Return how many processes measured both arms."""
    return sum(
        len(set(rounds.process)) for rounds in case.rounds if {above, below} <= rounds.seconds.get(metric, {}).keys()
    )


def holds(verdict: Verdict, *, strict: bool = False) -> bool:
    """Return whether a claim is demonstrated, or, where that is not ``strict``, was so before its sources changed."""
    stale_holds = verdict.status is VerdictStatus.STALE and not strict
    return verdict.status is VerdictStatus.DEMONSTRATED or stale_holds


def exit_code(verdicts: Iterable[Verdict], *, strict: bool = False) -> int:
    """Return 0 when all hold, 1 when one is refuted, 3 when a gate failed, else 4: open, or nothing to judge."""
    verdicts = list(verdicts)
    if any(verdict.status is VerdictStatus.REFUTED for verdict in verdicts):
        return 1
    if any(verdict.gate_failed for verdict in verdicts):
        return 3
    return 0 if verdicts and all(holds(verdict, strict=strict) for verdict in verdicts) else 4


def _judge_case(claim: Claim, case: CaseRecord, control: Control) -> tuple[CaseVerdict, _Groups | None]:
    """Return the verdict on one case, and the values of the baseline that decides it where there are enough."""
    inconclusive = partial(CaseVerdict, name=case.name, status=VerdictStatus.INCONCLUSIVE)
    if reason := _unmeasured(claim, case):
        return inconclusive(reason=reason), None
    measured = [arm.name for arm in case.arms if arm.name in claim.baseline and arm.status == "measured"]
    if claim.metric == "memory":
        peaks = {arm.name: arm.peak_bytes for arm in case.arms}
        if nothing := next((name for name in (claim.subject, *measured) if not peaks[name]), None):
            return inconclusive(reason=f"{nothing} allocated nothing, or it was not counted"), None
        logs = {name: math.log((peaks[name] or 0) / (peaks[claim.subject] or 1)) for name in measured}
        compared: dict[str, _Groups] = {name: {(0, 0): [value]} for name, value in logs.items()}
        intervals = {name: Interval(value, value, value, 1) for name, value in logs.items()}
    else:
        compared = {name: paired_log_ratios(case, claim.metric, name, claim.subject) for name in measured}
        if reason := next(filter(None, map(_too_few, compared.values())), None):
            return inconclusive(reason=reason), None
        intervals = {name: clustered_interval(list(groups.values())) for name, groups in compared.items()}
    if case.name not in control.biases:
        return inconclusive(reason="it has no control: the baseline has no second copy with enough rounds"), None

    bias = control.biases[case.name]
    fastest = min(intervals, key=lambda name: intervals[name].estimate)
    intervals = {name: found.widened(bias) for name, found in intervals.items()}
    decider = deciding_baseline(intervals, math.log(claim.factor))
    verdict = _weigh(claim, case.name, intervals[decider], list(compared[decider].values()), bias)
    skipped = [f"{name} does not serve it" for name in claim.baseline if name not in measured]
    reason = "; ".join([f"{_shown(intervals[decider].exp())} against {decider}{verdict.reason}", *skipped])
    return verdict.model_copy(update={"baseline": decider, "reason": reason}), compared[fastest]


def deciding_baseline(intervals: Mapping[str, Interval], target: float) -> str:
    """Return the baseline whose interval decides: of those beside which the subject does worst, the fastest.

    At least c times as fast as the fastest means at least c times as fast as each. So one interval below the target
    refutes, and else one that contains it leaves the case open, without a correction for choosing.

    Args:
        intervals: of the speedup beside each baseline.
        target: what the speedup is held against, on the same scale.
    """

    def order(name: str) -> tuple[bool, bool, float]:
        found = intervals[name]
        return found.high >= target, found.low >= target, found.estimate

    return min(intervals, key=order)


def _weigh(claim: Claim, name: str, found: Interval, groups: Sequence[Sequence[float]], bias: float) -> CaseVerdict:
    """Judge an interval of the log-speedup by the factor; an inconclusive case says what it lacks."""
    verdict = partial(CaseVerdict, name=name, interval=found.exp())
    target = math.log(claim.factor)
    if found.low >= target:
        return verdict(status=VerdictStatus.DEMONSTRATED, reason="")
    if found.high < target:
        return verdict(status=VerdictStatus.REFUTED, reason="")
    if found.n == 1:  # bytes are counted, not timed: only the control widens the interval
        reason = f": {claim.factor:g}x lies inside, as the two copies of the baseline allocated different amounts"
        return verdict(status=VerdictStatus.INCONCLUSIVE, reason=reason)

    smallest = math.expm1(clustered_smallest_effect(groups) + bias)
    effect = abs(found.estimate - target) - bias
    processes = processes_needed(groups, effect) if effect > 0 else None
    needed, would = None, "and no number of rounds would decide a difference this small"
    if processes is not None:
        # The estimate may say that these processes suffice, and they did not: add at least one.
        more = max(1, processes - len(groups))
        needed = math.ceil(more * sum(map(len, groups)) / len(groups))
        would = f"about {needed} rounds more, in {counted(more, 'further process')}, would decide"
    said = f": {claim.factor:g}x lies inside; {_rounds_in(groups)} see {smallest:.2%}"
    reason = f"{said}, {would}" if needed is None else f"{said}; {would}"
    inconclusive = partial(verdict, status=VerdictStatus.INCONCLUSIVE, reason=reason)
    return inconclusive(smallest_effect=smallest, rounds_needed=needed)


def _unmeasured(claim: Claim, case: CaseRecord) -> str | None:
    """Return why the case has no times to compare, or None. Of several baselines, one may not serve the problem."""
    if case.correct is not True:
        return "its correctness was not shown"
    arms = {arm.name: arm for arm in case.arms}
    some_measured = any(name in arms and arms[name].status == "measured" for name in claim.baseline)
    for name in (claim.subject, *claim.baseline):
        if name not in arms:
            return f"{name} was not measured"
        arm = arms[name]
        refused = arm.status == "refused" and arm.role != "subject" and some_measured
        if arm.status != "measured" and not refused:
            return f"{name} was not measured: {arm.status}{', ' + arm.reason if arm.reason else ''}"
    return None


def _too_few(groups: _Groups) -> str | None:
    """Return why these rounds do not suffice for a claim, or None."""
    rounds = sum(len(values) for values in groups.values())
    if len(groups) >= FEWEST_PROCESSES and rounds >= FEWEST_ROUNDS:
        return None
    return (
        f"it has {_rounds_in(groups.values())}, "
        f"expected at least {FEWEST_ROUNDS} rounds in {FEWEST_PROCESSES} processes"
    )


def _rounds_in(groups: Iterable[Sequence[float]]) -> str:
    sizes = [len(values) for values in groups]
    return f"{counted(sum(sizes), 'round')} in {counted(len(sizes), 'process')}"


def _shown_bias(groups: _Groups) -> float:
    """Return the size of the control's log-ratio where its own 95 % interval over rounds excludes zero, else 0."""
    found = interval([value for values in groups.values() for value in values])
    return 0.0 if found.contains(0.0) else abs(found.estimate)


def _geometric_mean(cases: Mapping[str, _Groups | None], control: Control) -> Interval | None:
    """Return the geometric mean of the speedups; None where a case has none, or is the only one."""
    measured = {name: groups for name, groups in cases.items() if groups}
    if len(measured) < max(2, len(cases)):
        return None
    # Processes that few cases have, those with wide intervals, do not show what a process does to every case.
    counts = Counter(process for groups in measured.values() for process in groups)
    processes = sorted(process for process, cases_with_it in counts.items() if 2 * cases_with_it > len(measured))
    table = [[groups.get(process, []) for process in processes] for groups in measured.values()]
    bias = sum(control.biases[name] for name in measured) / len(measured)
    return suite_interval(table).widened(bias).exp()


def _other_cases(claim: Claim, record: Record, control: Control) -> str:
    """Return what the cases show that the claim leaves out, set against 1x; empty: it leaves none out."""
    parity = claim.model_copy(update={"factor": 1.0})
    left_out = [_judge_case(parity, case, control)[0] for case in record.cases if not claim.is_about(case.name)]
    if not left_out:
        return ""
    measured = [case for case in left_out if case.interval]
    counts = Counter(case.status for case in measured)
    worse, better = ("more memory", "no more memory") if claim.metric == "memory" else ("slower", "faster")
    named = {
        worse: counts[VerdictStatus.REFUTED],
        "inconclusive": counts[VerdictStatus.INCONCLUSIVE],
        better: counts[VerdictStatus.DEMONSTRATED],
        "not measured": len(left_out) - len(measured),
    }
    shown = [f"{count} {word}" for word, count in named.items() if count]
    if measured:
        shown.append(f"lowest {min(case.interval.estimate for case in measured if case.interval):.3f}x")
    which = "the other case shows" if len(left_out) == 1 else f"the other {len(left_out)} cases show"
    return f"{which} {', '.join(shown)}"


def _over_cases(claim: Claim, cases: Sequence[CaseVerdict]) -> tuple[VerdictStatus, str]:
    """Return the verdict on a claim about each case."""
    refuted = [case for case in cases if case.status is VerdictStatus.REFUTED]
    if refuted:
        what = f"{len(refuted)} of {counted(len(cases), 'case')} are below {claim.factor:g}x"
        return VerdictStatus.REFUTED, f"{what}: {_listed(_by_reason(refuted))}"
    inconclusive = [case for case in cases if case.status is not VerdictStatus.DEMONSTRATED]
    if inconclusive:
        what = f"{len(inconclusive)} of {counted(len(cases), 'case')} are inconclusive"
        return VerdictStatus.INCONCLUSIVE, f"{what}: {_listed(_by_reason(inconclusive))}"
    lowest = min(cases, key=lambda case: case.interval.low if case.interval else math.inf)
    what = f"every one of {counted(len(cases), 'case')} is at least {claim.factor:g}x"
    least = min(case.interval.estimate if case.interval else math.inf for case in cases)
    word = "lowest" if lowest.interval is None or lowest.interval.estimate <= least else "deciding one"
    return VerdictStatus.DEMONSTRATED, f"{what}; the {word} is {lowest.name}, {lowest.reason}"


def _by_reason(cases: Sequence[CaseVerdict]) -> list[str]:
    """Return the cases with their reasons, each reason once."""
    names: dict[str, list[str]] = {}
    for case in cases:
        names.setdefault(case.reason, []).append(case.name)
    return [f"{_listed(named)} {reason}" for reason, named in names.items()]


def _over_mean(claim: Claim, cases: Sequence[CaseVerdict], mean: Interval | None) -> tuple[VerdictStatus, str]:
    """Return the verdict on a claim about the geometric mean."""
    unmeasured = [case for case in cases if case.interval is None]
    if unmeasured:
        what = f"{len(unmeasured)} of {counted(len(cases), 'case')} have no speedup"
        return VerdictStatus.INCONCLUSIVE, f"{what}: {_listed(_by_reason(unmeasured))}"
    if mean is None:
        return VerdictStatus.INCONCLUSIVE, f"a mean over {counted(len(cases), 'case')} says nothing of cases like these"
    what = f"the geometric mean over {counted(len(cases), 'case')} is {_shown(mean)}"
    if mean.low >= claim.factor:
        return VerdictStatus.DEMONSTRATED, what
    if mean.high < claim.factor:
        return VerdictStatus.REFUTED, what
    seen = max(mean.high / mean.estimate, mean.estimate / mean.low) - 1
    return VerdictStatus.INCONCLUSIVE, f"{what}: {claim.factor:g}x lies inside; these cases and rounds see {seen:.2%}"


def _gap(claim: Claim, record: Record, suite: Mapping[str, Problem]) -> str | None:
    """Return what keeps a record from demonstrating anything, or None."""
    if record.environment.gpu is None:
        return "a CPU shows no speed"
    if not record.complete:
        return f"the run is incomplete: {record.incomplete_reason or 'no reason recorded'}"
    for name in GATE_NAMES:
        gate = record.gate(name)
        if gate is None or gate.status is not GateStatus.PASSED:
            return f"gate {name} did not pass: {gate.status.value + ', ' + gate.summary if gate else 'not recorded'}"
    recorded = {case.name: case.problem for case in record.cases}
    if idle := claim.idle_patterns(suite or recorded):
        near = difflib.get_close_matches(idle[0], suite or recorded, n=1)
        meant = f": did you mean {near[0]}?" if near else ""
        return f"no case of the suite fits {_listed(idle)}, of the claim's cases{meant}"
    claimed = {name: problem for name, problem in suite.items() if claim.is_about(name)}
    if absent := [name for name, problem in claimed.items() if recorded.get(name) != problem]:
        return f"the suite has cases that the record lacks or has other problems for: {_listed(absent)}"
    return None


def _notes_on(record: Record) -> list[str]:
    """Return what a reader of any verdict on ``record`` must know."""
    notes = []
    gpu = record.environment.gpu
    if gpu is not None and has_limits(gpu) and known_spec(gpu) is None:
        notes.append(f"times were held against the SMs of {gpu.name} alone: the limits of its memory are not known")
    elif gpu is not None and known_spec(gpu) is None:
        notes.append(f"impossible times were not looked for: the limits of {gpu.name} are not known")
    if gpu is None:
        notes.append("its times are those of a CPU: not a claim")
    if record.tree.dirty:
        commit = record.tree.commit
        where = f", at commit {commit[:12]}," if commit else ""
        notes.append(f"the tree that ran{where} had uncommitted changes")
    if record.subject.tree is not None and record.environment.dirty:
        notes.append("the harness that ran had uncommitted changes")
    return notes


def _before_change(record: Record, changed: str) -> str:
    commit = record.tree.commit
    return f"{f'at commit {commit[:12]}, ' if commit else ''}before its sources changed: {changed}"


def _reason(reason: str, notes: Sequence[str]) -> str:
    return "; ".join([reason, *notes])


def _shown(ratio: Interval) -> str:
    return f"{ratio.estimate:.3f}x ({ratio.low:.3f} to {ratio.high:.3f})"


def _listed(texts: Iterable[str]) -> str:
    texts = list(texts)
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more
