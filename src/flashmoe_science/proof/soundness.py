"""Whether the times of a run count at all. Where they do not, nothing is said by them, whatever they show."""

from __future__ import annotations

from collections.abc import Container, Sequence

from .evidence import Gate, GateStatus, Record, TimeKind
from .judge import check_control
from .roofline import impossible_time


def failed_gate(gates: Sequence[Gate]) -> Gate | None:
    """Return the gate that failed, or None."""
    return next((gate for gate in gates if gate.status is GateStatus.FAILED), None)


def why_unsound(record: Record, kind: TimeKind, arms: Container[str]) -> str:
    """Return why no time of this kind counts in ``record``, or an empty text.

    Args:
        record: of one run.
        kind: Which time.
        arms: Whose times must not be below what the GPU can do.
    """
    if failed := failed_gate(record.gates):
        return f"gate {failed.name} failed: {failed.summary}"
    if impossible := impossible_time(record, kind, arms):  # first: no ratio can be made of a time that is none
        return impossible
    control = check_control(record, kind)
    return "" if control.passed else control.reason
