"""What one run says: its verdicts on the claims that it is about, or on what was expected of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from .changes import Sources
from .claims import Claim, load_claims, why_not
from .evidence import GateStatus, Record
from .judge import Verdict, exit_code, judge
from .rows import default_kind

Since = Callable[[Claim], Sources]
GATE_FAILED = 3  # the exit codes are in docs/reference/cli.md
_FROM_GOOD_TO_BAD = (0, 4, 1, GATE_FAILED)


def conclude(record: Record, repository: Path | None, *, since: Since | None = None) -> list[Verdict]:
    """Return the verdicts on those claims of ``repository`` that ``record`` is about, or else on its expectation.

    Nothing, when no time was measured. A claim is about the suite of its name as it is now, which need not be the one
    that ran: a file of another place can have its name. One for several GPUs is judged for that of the record alone.

    Args:
        record: the run.
        repository: holds the claims.
        since: says what changed since the run for a claim. Default: nothing did, as of a run that has just ended.

    Raises:
        ClaimError: a claim file is wrong.
    """
    from .verify import doubts_about, suite_now  # imports torch, which verbs that judge nothing do without

    claims = load_claims(repository / "claims") if repository else []
    about = [claim for claim in claims if why_not(claim, record) is None]
    if repository is not None and about and record.environment.gpu is not None:
        suite, gpu = suite_now(record, repository), record.environment.gpu.name
        verdicts = []
        for claim in about:
            one = claim.on_gpu(gpu)
            others = ", ".join(name for name in claim.gpu if name not in one.gpu)
            sources = since(one) if since else Sources()
            alone = [f"on {gpu} alone, and the claim is of {others} too"] if others else []
            said = [*sources.notes, *alone]
            doubts = doubts_about(claim, record, suite, datetime.now(timezone.utc))
            known = suite.problems
            verdicts.append(judge(one, record, suite=known, changed=sources.changed, notes=said, doubts=doubts))
        return verdicts
    expected = expectation(record)
    sources = since(expected) if since and expected else Sources()
    return [judge(expected, record, changed=sources.changed, notes=sources.notes)] if expected else []


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
        gpu=(gpu.name,),
        scope="each case",
    )


def run_exit_code(record: Record, verdicts: Sequence[Verdict]) -> int:
    """Return the exit code of a run: 3 for a failed gate, that of its verdicts, or 0 when it had nothing to time.

    A run that did not come to its end shows nothing of what it was to show: 4, as verdicts that are open.
    """
    if any(gate.status is GateStatus.FAILED for gate in record.gates):
        return GATE_FAILED
    return exit_code(verdicts) if verdicts or not record.complete else 0


def worst_exit_code(codes: Sequence[int]) -> int:
    """Return the exit code of several runs: a failed gate, then a refuted claim, then what is open."""
    return max(codes, key=_FROM_GOOD_TO_BAD.index)


def last_word(record: Record) -> tuple[str, str]:
    """Return how far the chain came, for a run with no verdict: a word, and a sentence."""
    failed = next((gate for gate in record.gates if gate.status is GateStatus.FAILED), None)
    if failed is not None:
        return "gate failed", f"{failed.name}: {failed.summary}"
    if not record.complete:
        return "incomplete", record.incomplete_reason
    stood_in = {"correct": "correct (of a stand-in)"} if any(case.stand_in for case in record.cases) else {}
    gates = [gate.name for gate in record.gates if gate.status is GateStatus.PASSED]
    passed = ", ".join(stood_in.get(name, name) for name in gates) or "no gate"
    impossible = [gate for gate in record.gates if gate.status is GateStatus.NOT_POSSIBLE]
    if impossible:
        names = ", ".join(gate.name for gate in impossible)
        return "not timed", f"{passed} passed; {names} not possible here: {impossible[0].summary}"
    return "not timed", f"{passed} passed; the gates after them were not asked for"
