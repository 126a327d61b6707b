"""Records whose every text is an attack on the page that shows it."""

from __future__ import annotations

from flashmoe_science.proof.records.evidence import Gate, GateStatus, Record, SourceFile

from .builders import build_gates, build_record

HOSTILE = (
    """"><script>document.title='owned'</script><img src=x onerror="document.title='owned'">'|`[x](javascript:1)"""
)


def hostile_record(day: int = 0) -> Record:
    """Return a valid record in which every text that may be anything is ``HOSTILE``."""
    record = build_record(subject=HOSTILE, suite=HOSTILE, baselines={HOSTILE + "b": 1.0}, speedups=[2.0] * 3, day=day)
    launch = record.cases[0].arms[0].launches[0].model_copy(update={"name": HOSTILE})
    cases = [
        case.model_copy(
            update={
                "name": f"{HOSTILE}{number}",
                "origin": HOSTILE,
                "problem": {**case.problem, HOSTILE: 2**number, "dtype": HOSTILE},
                "arms": [
                    arm.model_copy(update={"launches": [launch], "version": HOSTILE, "reason": HOSTILE})
                    for arm in case.arms
                ],
                "rounds": [r.model_copy(update={"throttle": [HOSTILE] * len(r.process)}) for r in case.rounds],
            }
        )
        for number, case in enumerate(record.cases)
    ]
    gates = [*build_gates()[:-1], Gate(name="bench", status=GateStatus.PASSED, summary=HOSTILE, hint=HOSTILE)]
    gates[0] = gates[0].model_copy(update={"details": [HOSTILE]})
    gpu = record.environment.gpu
    assert gpu is not None
    environment = record.environment.model_copy(
        update={
            "gpu": gpu.model_copy(update={"name": f"H200 {HOSTILE}"}),
            "driver": HOSTILE,
            "cuda": HOSTILE,
            "platform": HOSTILE,
            "cpu": HOSTILE,
            "commit": HOSTILE,
            "versions": {HOSTILE: HOSTILE},
            "settings": {HOSTILE: HOSTILE},
        }
    )
    subject = record.subject.model_copy(
        update={"operator": HOSTILE, "entry_point": HOSTILE, "sources": [SourceFile(path=HOSTILE, sha256="0")]}
    )
    changes = {"id": f"{HOSTILE}{day}", "command": HOSTILE, "incomplete_reason": HOSTILE, "complete": False}
    parts = {"cases": cases, "gates": gates, "environment": environment, "subject": subject}
    return record.model_copy(update={**changes, **parts})
