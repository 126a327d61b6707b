"""Sanity of a run: a failed gate, an impossible time or a failed control makes its times void."""

from __future__ import annotations

from collections.abc import Container, Sequence

from ..records.evidence import Gate, GateStatus, Record, TimeKind
from .judge import check_control
from .roofline import impossible_time


def failed_gate(gates: Sequence[Gate]) -> Gate | None:
    """Return the gate that failed, or None."""
    return next((gate for gate in gates if gate.status is GateStatus.FAILED), None)


def sanity_failure(record: Record, kind: TimeKind, arms: Container[str]) -> str:
    """Return why no time of this kind counts in ``record``, or an empty text.

    Args:
        record: of one run.
        kind: the kind of time.
        arms: names of the arms whose times must not be below the GPU's limits.
    """
    if failed := failed_gate(record.gates):
        return f"gate {failed.name} failed: {failed.summary}"
    if impossible := impossible_time(record, kind, arms):  # first: the control divides by times
        return impossible
    control = check_control(record, kind)
    return "" if control.passed else control.reason
