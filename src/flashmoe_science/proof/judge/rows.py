"""A record as plain rows of text and numbers: what the terminal, Markdown and CSV have in common."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...errors import TooFewRoundsError
from ..records.evidence import Accuracy, Arm, CaseRecord, Rates, Record, TimeKind
from ..text import counted, foreign
from .claims import Metric
from .judge import CaseVerdict, Control, Verdict, check_control, paired_log_ratios
from .statistics import Interval, clustered_interval, hodges_lehmann

KINDS: tuple[TimeKind, ...] = ("kernel", "graph", "wall")
METRICS: tuple[Metric, ...] = (*KINDS, "memory")

_ROLES = ("subject", "baseline", "control")


@dataclass(frozen=True)
class Ratio:
    """How the times of two arms compare. Without an interval there were too few rounds for one."""

    estimate: float
    interval: Interval | None
    rounds: int


@dataclass(frozen=True)
class ArmRow:
    """One arm in one case, seen in one kind of time."""

    case: CaseRecord
    arm: Arm
    kind: TimeKind
    # A baseline's time over the subject's (its speedup); a control's time over its original's.
    ratio: Ratio | None

    @property
    def rates(self) -> Rates | None:
        """Seconds and rates of this kind, or None where it was not measured."""
        return self.arm.rates.get(self.kind)


def commit_words(record: Record, *, letters: int = 40) -> str:
    """Return which commit of the subject's sources ran, or that none did."""
    tree = record.tree
    if tree.commit is None:
        return "none: no git repository holds the sources" if record.subject.tree else "unknown"
    return tree.commit[:letters] + (" with uncommitted changes" if tree.dirty else "")


def by_role(arms: Iterable[Arm]) -> list[Arm]:
    """Return the subject, then the baselines in their order, then the control."""
    return sorted(arms, key=lambda arm: _ROLES.index(arm.role))


def kinds_measured(record: Record) -> list[TimeKind]:
    """Return which kinds of time any case of the record has."""
    return [k for k in KINDS if any(k in rounds.seconds for case in record.cases for rounds in case.rounds)]


def default_kind(record: Record) -> TimeKind | None:
    """Return the kind of time to show where none was asked for, or None when nothing was timed."""
    kinds = kinds_measured(record)
    return "graph" if "graph" in kinds else kinds[0] if kinds else None


def arm_rows(record: Record, kind: TimeKind) -> list[ArmRow]:
    """Return a row for every case and arm: the subject, the baselines in the order asked for, the control."""
    control = check_control(record, kind)
    return [
        ArmRow(case, arm, kind, _ratio(record, case, arm, kind, control))
        for case in record.cases
        for arm in by_role(case.arms)
    ]


def _ratio(record: Record, case: CaseRecord, arm: Arm, kind: TimeKind, control: Control) -> Ratio | None:
    """Return the ratio of ``arm``'s row, with the interval that the judge uses: table and verdict say the same."""
    below = _compared_with(record, arm)
    groups = list(paired_log_ratios(case, kind, arm.name, below).values()) if below else []
    values = [value for group in groups for value in group]
    if not values:
        return None
    if arm.role == "control" and case.name in control.ratios:
        found = control.ratios[case.name]
        return Ratio(found.estimate, found, len(values))
    try:
        found = clustered_interval(groups).widened(control.biases.get(case.name, 0.0)).exp()
    except TooFewRoundsError:
        return Ratio(math.exp(hodges_lehmann(values)), None, len(values))
    return Ratio(found.estimate, found, len(values))


@dataclass(frozen=True)
class MemoryRow:
    """What one call of an arm allocates at its peak, beyond its inputs, in one case."""

    case: CaseRecord
    arm: Arm
    # A baseline's bytes over the subject's; a control's over its original's.
    ratio: float | None


def memory_rows(record: Record) -> list[MemoryRow]:
    """Return a row for every case and arm whose memory was counted, in the order of ``arm_rows``."""
    found = []
    for case in record.cases:
        peaks = {arm.name: arm.peak_bytes for arm in case.arms if arm.peak_bytes is not None}
        for arm in by_role(case.arms):
            below = peaks.get(_compared_with(record, arm))
            if arm.name in peaks:
                found.append(MemoryRow(case, arm, peaks[arm.name] / below if below else None))
    return found


def _compared_with(record: Record, arm: Arm) -> str:
    """Return the arm whose figures those of ``arm`` are divided by; empty for the subject."""
    return {"subject": "", "baseline": record.subject.name, "control": arm.name.rpartition("#")[0]}[arm.role]


@dataclass(frozen=True)
class AccuracyRow:
    """What correctness showed in one case."""

    case: str
    correct: str
    error: str
    allowed: str
    said: str  # the share of what is allowed
    same_bits: str
    baselines: Sequence[str]  # their shares
    note: str
    stood_in: bool  # something else than the subject was checked


def accuracy_rows(record: Record) -> list[AccuracyRow]:
    """Return a row for every case."""
    rows = []
    for case in record.cases:
        found = {arm.name: arm.accuracy for arm in case.arms}
        subject = next((arm for arm in case.arms if arm.role == "subject"), None)
        accuracy = subject.accuracy if subject else None
        bits = {True: "yes", False: "no", None: "not tried"}[accuracy.deterministic] if accuracy else ""
        correct = {True: "yes", False: "no", None: "of a stand-in" if case.stand_in else "not shown"}[case.correct]
        row = AccuracyRow(
            case=case.name,
            correct=correct,
            error=_error(accuracy),
            allowed=_allowed(accuracy),
            said=_share(accuracy),
            same_bits=bits,
            baselines=[_share(found.get(name)) for name in record.baselines],
            note=f"checked was {case.stand_in}" if case.stand_in else subject.reason if subject else "",
            stood_in=bool(case.stand_in),
        )
        rows.append(row)
    return rows


def _error(accuracy: Accuracy | None) -> str:
    """Return the largest error, or, where another test found a fault, what that found as a part of its limit."""
    if accuracy is None:
        return ""
    return f"{accuracy.share:.3g}x" if accuracy.failed_test else format_largest_error(accuracy)


def _allowed(accuracy: Accuracy | None) -> str:
    if accuracy is None:
        return ""
    return f"1x, of {accuracy.failed_test}" if accuracy.failed_test else format_error(accuracy.budget)


def _share(accuracy: Accuracy | None) -> str:
    return "" if accuracy is None else f"{accuracy.share:.0%}" if accuracy.share < 1e4 else "beyond all"


@dataclass(frozen=True)
class Unmeasured:
    """An arm that has no times in some cases, all for the same reason."""

    arm: str
    status: str
    reason: str
    cases: Sequence[str]
    everywhere: bool  # in every case of the run

    @property
    def where(self) -> str:
        """The cases, in words."""
        return "every case" if self.everywhere else ", ".join(self.cases)


def unmeasured(record: Record) -> list[Unmeasured]:
    """Return why arms have no times, each reason once; nothing where no arm was timed at all."""
    if not kinds_measured(record):
        return []
    cases_of: dict[tuple[str, str, str], list[str]] = {}
    for case in record.cases:
        for arm in case.arms:
            if arm.status != "measured":
                reason = arm.reason or "no reason recorded"
                cases_of.setdefault((arm.name, arm.status, reason), []).append(case.name)
    return [Unmeasured(*key, cases, len(cases) == len(record.cases)) for key, cases in cases_of.items()]


def lowest_case(verdict: Verdict) -> CaseVerdict | None:
    """Return the case whose speedup has the lowest lower end, or None where no case has one."""
    measured = [(case.interval.low, number) for number, case in enumerate(verdict.cases) if case.interval]
    return verdict.cases[min(measured)[1]] if measured else None


def is_lowest(verdict: Verdict, case: CaseVerdict) -> bool:
    """Return whether no case has a lower speedup: the one that decides, by its lower end, need not be the lowest."""
    found = [each.interval.estimate for each in verdict.cases if each.interval]
    return case.interval is not None and case.interval.estimate <= min(found)


# Numbers as text. ASCII only: it looks the same in every terminal, log and Markdown viewer.


def format_seconds(seconds: float) -> str:
    """Return four digits with the unit that fits, e.g. ``2.314 us``."""
    for unit, size in (("us", 1e-6), ("ms", 1e-3)):
        if round(seconds / size, 1) < 1000:
            return f"{_digits(seconds / size, 4)} {unit}"
    return f"{_digits(seconds, 4)} s"


def format_ratio(ratio: Ratio | Interval | None) -> str:
    """Return e.g. ``2.37x [2.35, 2.40]``, or ``2.37x (5 rounds)`` where no interval exists."""
    if ratio is None:
        return ""
    found = ratio if isinstance(ratio, Interval) else ratio.interval
    if found is None:
        assert isinstance(ratio, Ratio)
        return f"{_digits(ratio.estimate, 3)}x ({counted(ratio.rounds, 'round')})"
    decimals = min(3, _decimals(found.low, 3))  # three columns of times and this one share 100 columns
    return f"{found.estimate:.{decimals}f}x [{found.low:.{decimals}f}, {found.high:.{decimals}f}]"


def format_rate(rate: float) -> str:
    """Return three digits, or three decimals where that is less, e.g. ``53.8`` and ``0.025``."""
    return "<0.001" if 0 < rate < 0.001 else f"{rate:.{min(3, _decimals(rate, 3))}f}"


def format_largest_error(accuracy: Accuracy) -> str:
    """Return the error of an arm, and of which output it is where there are several."""
    return format_error(accuracy.max_error) + (f" ({accuracy.output})" if accuracy.output else "")


def format_error(error: float) -> str:
    """Return an absolute error, e.g. ``1.2e-04``."""
    return f"{error:.1e}" if math.isfinite(error) else str(error)


def format_bytes(count: float) -> str:
    """Return e.g. ``48.0 KiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _decimals(value: float, digits: int) -> int:
    """Return how many decimals show ``value`` with this many digits."""
    rounded = float(f"{value:.{digits - 1}e}")  # 9.996 has one digit more than 10.00
    return max(0, digits - 1 - math.floor(math.log10(rounded))) if rounded > 0 else digits - 1


def _digits(value: float, digits: int) -> str:
    return f"{value:.{_decimals(value, digits)}f}"


CSV_COLUMNS = (
    *("run", "created_at", "gpu", "suite", "case", "origin", "arm", "role", "version", "status", "reason", "correct"),
    *("kind", "seconds", "tokens_per_second", "tflops", "tbytes_per_second"),
    *("ratio", "ratio_low", "ratio_high", "rounds", "max_error", "error_budget", "peak_bytes"),
)


def csv_text(records: Iterable[Record]) -> str:
    """Return a line for every case, arm and kind of time. ``ratio`` is that of ``arm_rows``."""
    file = io.StringIO()
    writer = csv.DictWriter(file, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for record in records:
        for row in _csv_rows(record):
            writer.writerow({key: foreign(cell, "csv") if isinstance(cell, str) else cell for key, cell in row.items()})
    return file.getvalue()


def _csv_rows(record: Record) -> Iterable[dict[str, object]]:
    # A run without times still has a line for every arm: what was checked, and why nothing was measured.
    kinds: Sequence[TimeKind | None] = kinds_measured(record) or [None]
    for kind in kinds:
        for row in arm_rows(record, kind or "graph"):
            arm, accuracy, rates = row.arm, row.arm.accuracy, row.rates
            found = row.ratio.interval if row.ratio else None
            yield {
                "run": record.id,
                "created_at": record.created_at.isoformat(),
                "gpu": record.environment.gpu_name,
                "suite": record.suite,
                "case": row.case.name,
                "origin": row.case.origin,
                "arm": arm.name,
                "role": arm.role,
                "version": arm.version,
                "status": arm.status,
                "reason": arm.reason,
                "correct": row.case.correct,
                "kind": kind,
                "seconds": rates.seconds if rates else None,
                "tokens_per_second": rates.tokens_per_second if rates else None,
                "tflops": rates.tflops if rates else None,
                "tbytes_per_second": rates.tbytes_per_second if rates else None,
                "ratio": row.ratio.estimate if row.ratio else None,
                "ratio_low": found.low if found else None,
                "ratio_high": found.high if found else None,
                "rounds": row.ratio.rounds if row.ratio else None,
                "max_error": accuracy.max_error if accuracy else None,
                "error_budget": accuracy.budget if accuracy else None,
                "peak_bytes": arm.peak_bytes,
            }
