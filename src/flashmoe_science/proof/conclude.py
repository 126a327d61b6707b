"""What one run says: its verdicts on the claims that it is about, or on what was expected of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .claims import Claim, why_not
from .evidence import GateStatus, Record
from .judge import Verdict, exit_code, judge
from .rows import default_kind

GATE_FAILED = 3  # the exit codes are in docs/cli.md


def conclude(record: Record, claims: Iterable[Claim], *, notes: Sequence[str] = ()) -> list[Verdict]:
    """Return the verdicts on those of ``claims`` that ``record`` is about, or else on its expectation.

    Nothing, when no time was measured.
    """
    about = [claim for claim in claims if why_not(claim, record) is None]
    expected = expectation(record)
    return [judge(claim, record, notes=notes) for claim in about or ([expected] if expected else [])]


def expectation(record: Record) -> Claim | None:
    """Return what the run set out to show: the speedup expected over the first baseline, or at least parity.

    None, when there is no time or no baseline to judge it by.
    """
    kind, gpu, subject = default_kind(record), record.environment.gpu, record.subject
    if kind is None or gpu is None or not record.baselines:
        return None
    factor = subject.expected_speedup or 1.0
    rival = record.baselines[0]
    what = f"{subject.name} is at least {factor:g}x as fast as {rival}"
    return Claim(
        id="expectation",
        sentence=f"{what} in each case of {record.suite}, {kind} time, on {gpu.name}",
        subject=subject.name,
        baseline=(rival,),
        suite=record.suite,
        metric=kind,
        factor=factor,
        gpu=gpu.name,
        scope="each case",
    )


def run_exit_code(record: Record, verdicts: Sequence[Verdict]) -> int:
    """Return the exit code of a run: 3 for a failed gate, that of its verdicts, or 0 when it had nothing to time."""
    if any(gate.status is GateStatus.FAILED for gate in record.gates):
        return GATE_FAILED
    return exit_code(verdicts) if verdicts else 0


def last_word(record: Record) -> tuple[str, str]:
    """Return how far the chain came, for a run with no verdict: a word, and a sentence."""
    failed = next((gate for gate in record.gates if gate.status is GateStatus.FAILED), None)
    if failed is not None:
        return "gate failed", f"{failed.name}: {failed.summary}"
    passed = ", ".join(gate.name for gate in record.gates if gate.status is GateStatus.PASSED) or "no gate"
    impossible = [gate for gate in record.gates if gate.status is GateStatus.NOT_POSSIBLE]
    if impossible:
        names = ", ".join(gate.name for gate in impossible)
        return "not timed", f"{passed} passed; {names} not possible here: {impossible[0].summary}"
    return "not timed", f"{passed} passed; the gates after them were not asked for"
