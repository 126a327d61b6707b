"""Where the speed of a subject changed over its runs, and what changed there. See ``docs/how-to/compare.md``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from statistics import fmean

from pydantic import Field

from ...errors import EvidenceError, TooFewRoundsError
from ..judge.comparable import describe_change, traits
from ..judge.judge import paired_log_ratios, sanity_failure
from ..judge.statistics import Interval, hodges_lehmann, shift_interval
from ..records.evidence import CaseRecord, Model, Record, TimeKind
from ..subject.loading import same_entry
from ..text import counted
from .change_points import FEWEST_RUNS, ChangePoint, change_points, segments

KINDS = ("code", "method", "hardware")
UNEXPLAINED = "unexplained"


class Point(Model):
    """One run."""

    run: str
    created_at: datetime
    commit: str
    speedup: float  # over the baseline: the geometric mean of the cases
    level: int  # which stretch of one level it belongs to


class Change(Model):
    """A place between two runs at which a new level begins."""

    label: str  # code, method, hardware, or several of them; unexplained
    before: str  # the last run with the old level
    after: str  # the first with the new one
    shift: float  # of the speedup, as a ratio: above 1 the subject became faster
    interval: Interval | None = None  # of the shift, at 95 %; None: too few runs on a side
    chance: float  # that a series without change shows a place as clear
    reason: str


class History(Model):
    """What the runs of a subject show."""

    subject: str
    suite: str
    baseline: str
    metric: TimeKind
    cases: list[str]  # that all runs have
    points: list[Point]
    changes: list[Change] = Field(default_factory=list)
    enough: bool  # whether there are enough runs to tell
    verdict: str
    notes: list[str] = Field(default_factory=list)


def look_back(records: Sequence[Record], metric: TimeKind, *, case: str | None = None, level: float = 0.05) -> History:
    """Return where the speed of a subject changed over its runs, and what changed there.

    Args:
        records: runs of one subject, in any order.
        metric: the kind of time.
        case: only this case. Default: the geometric mean of the cases that all runs have.
        level: the chance of a false alarm in a series without change.

    Raises ``TooFewRoundsError`` where no run has times of a GPU, and ``EvidenceError`` where none counts.
    """
    if records and all(record.environment.gpu is None for record in records):
        what = f"{counted(len(records), 'run')} of {records[0].subject.name}"
        raise TooFewRoundsError(
            f"no run has times of a GPU: {what}, on machines without one", hint="flashmoe prove on a GPU takes times"
        )
    unsound = {r.id: why for r in records if (why := sanity_failure(r, metric, (r.subject.name, *r.baselines)))}
    sound = [record for record in records if record.id not in unsound]
    timed = sorted((r for r in sound if _measured(r, metric)), key=lambda record: (record.created_at, record.id))
    invalid = [f"run {id_} left out: {why}" for id_, why in unsound.items()]
    if unsound and not timed:
        raise EvidenceError(f"none of {counted(len(records), 'run')} has {metric} times that count: {invalid[0]}")
    if not timed:
        raise EvidenceError(
            f"none of {counted(len(records), 'run')} has {metric} times", hint="flashmoe runs lists them"
        )
    newest = timed[-1]
    baseline, suite = newest.baselines[0], newest.suite
    used = [record for record in timed if _alike(record, newest) and baseline in _measured(record, metric)]
    cases = [
        name for name in _cases(newest, metric, baseline) if all(name in _cases(r, metric, baseline) for r in used)
    ]
    if case is not None:
        if case not in cases:
            known = ", ".join(cases) or "none"
            raise EvidenceError(f"case must be one that all {len(used)} runs have ({known}), got {case!r}")
        cases = [case]
    if not cases:
        raise EvidenceError(f"no case of suite {suite} is in all of {counted(len(used), 'run')}", hint="--since, --gpu")
    values = [_value(record, cases, metric, baseline) for record in used]
    points = change_points(values, level=level)
    stretches = segments(points, len(values))
    enough = len(values) >= FEWEST_RUNS
    left_out = len(sound) - len(used)
    others = f"{counted(left_out, 'run')} left out: no {metric} times, or another suite, baseline or entry point"
    return History(
        subject=newest.subject.name,
        suite=suite,
        baseline=baseline,
        metric=metric,
        cases=cases,
        points=[
            Point(
                run=record.id,
                created_at=record.created_at,
                commit=record.tree.commit or "",
                speedup=math.exp(value),
                level=next(n for n, stretch in enumerate(stretches) if index in stretch),
            )
            for index, (record, value) in enumerate(zip(used, values, strict=True))
        ],
        changes=[_new_level(used, values, stretches, n, point) for n, point in enumerate(points)],
        enough=enough,
        verdict=_verdict(len(values), len(points), enough=enough),
        notes=[*([others] if left_out else []), *sorted(invalid)],
    )


def _verdict(runs: int, points: int, *, enough: bool) -> str:
    if not enough:
        return f"{counted(runs, 'run')} cannot tell: a change of level needs at least {FEWEST_RUNS} to stand out"
    return f"{counted(points, 'change')} of level in {runs} runs" if points else f"no change of level in {runs} runs"


def _alike(one: Record, other: Record) -> bool:
    """Return whether two runs are of one suite and one subject: two files kernel.toml may use the same name."""
    return one.suite == other.suite and same_entry(one.subject.entry_point, other.subject.entry_point)


def _measured(record: Record, metric: TimeKind) -> set[str]:
    """Return the baselines that some case has times of, beside the subject's."""
    if not record.baselines:
        return set()
    return {name for name in record.baselines if _cases(record, metric, name)}


def _cases(record: Record, metric: TimeKind, baseline: str) -> list[str]:
    return [case.name for case in record.cases if _ratios(case, metric, baseline, record.subject.name)]


def _ratios(case: CaseRecord, metric: TimeKind, baseline: str, subject: str) -> list[float]:
    return [value for group in paired_log_ratios(case, metric, baseline, subject).values() for value in group]


def _value(record: Record, cases: Sequence[str], metric: TimeKind, baseline: str) -> float:
    """Return the mean over cases of the log-speedup."""
    by_name = {case.name: case for case in record.cases}
    return fmean(hodges_lehmann(_ratios(by_name[name], metric, baseline, record.subject.name)) for name in cases)


def _new_level(
    runs: Sequence[Record], values: Sequence[float], stretches: Sequence[range], number: int, point: ChangePoint
) -> Change:
    """Return a change of level, with what separates the runs before it from those after."""
    before, after = stretches[number], stretches[number + 1]
    old, new = ([values[i] for i in stretch] for stretch in (before, after))
    causes = _separating([runs[i] for i in before], [runs[i] for i in after])
    label = " or ".join(causes) or UNEXPLAINED
    told = [text for texts in causes.values() for text in texts]
    reason = "; ".join(told) or "nothing that is recorded separates the runs before from those after"
    if len(causes) > 1:
        reason += "; they changed together, so they cannot be told apart"
    try:
        interval = shift_interval(new, old).exp()
    except TooFewRoundsError:
        interval = None
    return Change(
        label=label,
        before=runs[before[-1]].id,
        after=runs[after[0]].id,
        shift=math.exp(fmean(new) - fmean(old)),
        interval=interval,
        chance=point.chance,
        reason=reason,
    )


def _separating(before: Sequence[Record], after: Sequence[Record]) -> dict[str, list[str]]:
    """Return the traits whose values before and after have nothing in common, by kind.

    A value that is found on both sides, e.g. a card that two runs used, explains no difference between them.
    """
    old, new = ([traits(run) for run in side] for side in (before, after))
    found: dict[str, list[str]] = {}
    for kind in KINDS:
        names = dict.fromkeys([*old[-1][kind], *new[0][kind]])
        for name in names:
            values = [{one[kind].get(name) for one in side} for side in (old, new)]
            if not values[0] & values[1]:
                found.setdefault(kind, []).append(describe_change(name, before[-1], after[0], kind))
    return found
