"""Verdicts of one run: on the claims about it, or else on its expected speedup."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from ..records.evidence import GateStatus, Record
from .claims import NO_GPU, Claim, claim_sentence, load_claims, why_not
from .consistency import check_alone, contradiction
from .judge import Problem, Verdict, exit_code, judge
from .rows import default_kind
from .staleness import Sources
from .unreadable import naming

Since = Callable[[Claim], Sources]
EXPECTATION = "expectation"  # the id of the claim that a run is expected to show
GATE_FAILED = 3  # the exit codes are in docs/reference/cli.md
_FROM_GOOD_TO_BAD = (0, 4, 1, GATE_FAILED)


def conclude(
    record: Record, repository: Path | None, *, since: Since | None = None, as_recorded: bool = False
) -> list[Verdict]:
    """Return the verdicts on those claims of ``repository`` that ``record`` is about, or else on its expectation.

    Returns no verdict where no time was measured. A claim names a suite as it is now; another file of that name may
    have run. A claim for several GPUs is judged for the GPU of the record alone. ``since`` says what changed since the
    run for a claim: by default nothing did. ``as_recorded`` leaves out suite and age of now: it needs no torch.
    """
    claims = load_claims(repository / "claims") if repository else []
    about = [claim for claim in claims if why_not(claim, record) is None]
    gpu = record.environment.gpu
    wrong = contradiction(check_alone(record, counts_work=not as_recorded))
    if repository is None or not about or gpu is None:
        expected = expectation(record)
        with naming(f"run {record.id}"):
            sources = since(expected) if since and expected else Sources()
            found = expected and judge(
                expected, record, changed=sources.changed, notes=sources.notes, contradiction=wrong
            )
            return [found] if found else []
    known, doubts_about = (None, _no_doubts) if as_recorded else _seen_now(record, repository)
    verdicts = []
    for claim in about:
        one = claim.on_gpu(gpu.name)
        others = ", ".join(name for name in claim.gpu if name not in one.gpu)
        alone = [f"on {gpu.name} alone, and the claim is of {others} too"] if others else []
        with naming(f"run {record.id}"):
            sources = since(one) if since else Sources()
            said = {"notes": [*sources.notes, *alone], "doubts": doubts_about(claim)}
            verdicts.append(judge(one, record, suite=known, changed=sources.changed, contradiction=wrong, **said))
    return verdicts


def _no_doubts(_: Claim) -> list[str]:
    return []


def _seen_now(record: Record, repository: Path) -> tuple[Mapping[str, Problem] | None, Callable[[Claim], list[str]]]:
    """Return the suite of a record as it is now, and what finds doubts about a claim by it."""
    from .verify import doubts_about, suite_now  # imports torch

    suite, now = suite_now(record, repository), datetime.now(timezone.utc)
    return suite.problems, lambda claim: doubts_about(claim, record, suite, now)


def expectation(record: Record) -> Claim | None:
    """Return the expected speedup over the first baseline as a claim; parity where none is expected.

    None where no time or no baseline was measured.
    """
    kind, subject, ranks = default_kind(record), record.subject, record.environment.ranks
    if kind is None or not record.baselines:
        return None
    claim = Claim(
        id=EXPECTATION,
        sentence="made below",
        subject=subject.name,
        baseline=(record.baselines[0],),
        suite=record.suite,
        metric=kind,
        factor=subject.expected_speedup or 1.0,
        gpu=(record.environment.gpu_name or NO_GPU,),
        ranks=ranks.count if ranks else 1,
        link=ranks.link if ranks else "",
        scope="each case",
    )
    return claim.model_copy(update={"sentence": claim_sentence(claim, record)})


def run_exit_code(record: Record, verdicts: Sequence[Verdict]) -> int:
    """Return the exit code of a run: 3 for a failed gate, else that of its verdicts, or 0 where nothing was timed.

    A run that did not end is inconclusive: 4.
    """
    if record.failed_gate:
        return GATE_FAILED
    return exit_code(verdicts) if verdicts or not record.complete else 0


def worst_exit_code(codes: Sequence[int]) -> int:
    """Return the worst exit code of several runs: a failed gate, then a refuted claim, then an inconclusive one."""
    return max(codes, key=_FROM_GOOD_TO_BAD.index)


def last_word(record: Record) -> tuple[str, str]:
    """Return how far a run without a verdict came: a word, and a sentence."""
    if failed := record.failed_gate:
        return "gate failed", f"{failed.name}: {failed.summary}"
    if not record.complete:
        return "incomplete", record.incomplete_reason
    stand_in = (
        {"correct": "correct (for a kernel that ran in place of the GPU's)"}
        if any(case.stand_in for case in record.cases)
        else {}
    )
    gates = [gate.name for gate in record.gates if gate.status is GateStatus.PASSED]
    passed = ", ".join(stand_in.get(name, name) for name in gates) or "no gate"
    impossible = [gate for gate in record.gates if gate.status is GateStatus.NOT_POSSIBLE]
    if impossible:
        names = ", ".join(gate.name for gate in impossible)
        return "not timed", f"{passed} passed; {names} not possible here: {impossible[0].summary}"
    return "not timed", f"{passed} passed; the later gates were not asked for"
