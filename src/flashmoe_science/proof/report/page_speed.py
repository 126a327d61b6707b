"""The speedups on a page: a row for every case and baseline, its interval drawn as a bar."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..judge.rows import ArmRow, arm_rows, format_ratio, format_seconds
from ..records.evidence import Record, TimeKind
from .plots import Bar, Ruler, place_ruler


@dataclass(frozen=True)
class SpeedRow:
    """The subject against one baseline in one case."""

    case: str
    baseline: str
    slot: int
    said: str  # the speedup with its interval, or why there is none
    bar: Bar | None
    side: str  # faster, slower or even: where the interval lies; open: there is none
    ours: str
    theirs: str


@dataclass(frozen=True)
class Speeds:
    """The subject against its baselines in one kind of time."""

    kind: TimeKind
    rows: Sequence[SpeedRow]
    ruler: Ruler | None
    legend: str


def find_speeds(record: Record, kind: TimeKind, claimed: Iterable[float] = ()) -> Speeds:
    """Return a row for every case and baseline, on one scale; ``claimed`` are factors to draw a line at."""
    rows = [row for row in arm_rows(record, kind) if row.arm.role == "baseline"]
    found = [row.ratio.interval for row in rows if row.ratio and row.ratio.interval]
    ends = [end for each in found for end in (each.low, each.high) if math.isfinite(end) and end > 0]
    lines = [(1.0, ""), *((factor, f"{factor:g}x claimed") for factor in sorted(set(claimed)) if factor != 1.0)]
    ruler = place_ruler(ends, lines) if ends else None
    ours = {case.name: case.arms for case in record.cases}
    subject = {
        name: next((format_seconds(a.rates[kind].seconds) for a in arms if a.role == "subject" and kind in a.rates), "")
        for name, arms in ours.items()
    }
    legend = "speedup: the baseline's time / the subject's, with its 95 % interval"
    return Speeds(kind, [_speed_row(record, row, ruler, subject[row.case.name]) for row in rows], ruler, legend)


def _speed_row(record: Record, row: ArmRow, ruler: Ruler | None, ours: str) -> SpeedRow:
    found = row.ratio.interval if row.ratio else None
    bar = ruler.bar(found.low, found.estimate, found.high) if ruler and found and 0 < found.low <= found.high else None
    side = "open" if found is None else "faster" if found.low > 1 else "slower" if found.high < 1 else "even"
    slot = 1 + record.baselines.index(row.arm.name) if row.arm.name in record.baselines else 0
    said = format_ratio(row.ratio) or row.arm.status
    theirs = format_seconds(row.rates.seconds) if row.rates else ""
    return SpeedRow(row.case.name, row.arm.name, slot, said, bar, side, ours, theirs)
