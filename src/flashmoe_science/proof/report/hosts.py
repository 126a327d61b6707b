"""One table of the same run on several machines. It computes nothing."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType

from ..judge.rows import ArmRow, arm_rows, default_kind, format_ratio, format_seconds
from ..records.evidence import CaseRecord, Record
from .terminal import plain_table


def host_table(runs: Mapping[str, Record]) -> RenderableType:
    """Return a row for every case and a column for every machine: its time, and its speedup over the first baseline.

    Args:
        runs: The records by the machine's name. All are of one request.
    """
    columns = {name: _cells(record) for name, record in runs.items()}
    cases = list(dict.fromkeys(case for cells in columns.values() for case in cells))
    rows = [[case, *(cells.get(case, "") for cells in columns.values())] for case in cases]
    return plain_table(["case", *(f"{name}: {_machine(record)}" for name, record in runs.items())], rows)


def _machine(record: Record) -> str:
    kind, gpu = default_kind(record), record.environment.gpu
    name = gpu.name if gpu else "no GPU"
    return f"{name}, {kind}, speedup over {record.baselines[0]}" if kind and record.baselines else name


def _cells(record: Record) -> dict[str, str]:
    kind = default_kind(record)
    if kind is None:
        return {case.name: _correctness(case) for case in record.cases}
    rows: dict[str, list[ArmRow]] = {}
    for row in arm_rows(record, kind):
        rows.setdefault(row.case.name, []).append(row)
    return {case.name: _speed(case, rows.get(case.name, []), record) for case in record.cases}


def _speed(case: CaseRecord, rows: list[ArmRow], record: Record) -> str:
    subject = next((row for row in rows if row.arm.role == "subject"), None)
    if subject is None or subject.rates is None:
        return subject.arm.status if subject else _correctness(case)
    baseline = next((row for row in rows if row.arm.name in record.baselines[:1]), None)
    ratio = format_ratio(baseline.ratio) if baseline and baseline.ratio else "no speedup"
    return f"{format_seconds(subject.rates.seconds)}, {ratio}"


def _correctness(case: CaseRecord) -> str:
    return {True: "correct", False: "wrong", None: "not shown"}[case.correct]
