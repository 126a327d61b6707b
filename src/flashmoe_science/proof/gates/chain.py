"""Run the gates in order, and keep the record whatever happens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ...errors import SubjectError
from ..cost.cost import RunSize, size_of
from ..judge.alone import MOST_CASES
from ..measure.environment import describe_apart as _read_environment
from ..ranks.topology import describe_ranks
from ..records.evidence import GATE_NAMES, Gate, GateName, GateStatus, Record
from ..records.ledger import GPU_GATES
from ..subject.subject import hash_sources
from . import correct, launch, speed, static
from .alone import plans_alone
from .resume import adopt, check_resumable, has_cell, kept_note, kept_outcome
from .run import CHANGED_SOURCES, BudgetSpentError, Outcome, Progress, ProveRequest, Run, check_request, ranks_asked

_GATES: dict[GateName, Callable[[Run], Outcome]] = {
    "sources": static.check_sources,
    "build": static.build,
    "import": static.import_entry,
    "launch": launch.check_launches,
    "correct": correct.check_results,
    "quick": speed.measure_quickly,
    "bench": speed.measure_fully,
}


def prove(request: ProveRequest, *, progress: Progress, save: Callable[[Record], None]) -> Record:
    """Run the chain of proof and return its record.

    A gate that fails stops the chain: those after it are "not reached". One that is not possible here does not stop it.

    Args:
        request: what to prove, on which shapes, against whom.
        progress: gets the progress of the gates.
        save: gets the record after every gate and every measured case; each replaces the one before.

    Raises:
        ProofError: the request cannot be carried out, its budget has no rate, or the run to go on with may not be;
            nothing was saved.
        KeyboardInterrupt: after the record of the finished part has been saved, marked incomplete.
    """
    check_request(request)
    environment = _read_environment()
    if (ranks := ranks_asked(request)) > 1:
        environment = environment.model_copy(update={"ranks": describe_ranks(ranks)})
    run = Run(request, environment=environment, progress=progress, save=save)
    if request.resume is not None:
        run.sources = hash_sources(run.subject)
        check_resumable(request.resume, run.record())
        adopt(run, request.resume)
        progress.note(kept_note(run))
    meter = request.meter
    if meter is not None:
        meter.start(run.record(), _size(run))
    name: GateName = "sources"
    try:
        for name, gate in _GATES.items():
            if meter is not None and (reason := meter.refusal(name, run.record())):
                _stop(run, name, "before", reason)
                break
            try:
                _run_gate(run, name, gate)
            except BudgetSpentError as error:
                _stop(run, name, "in", str(error), time.monotonic() - run.gate_began)
                break
            if run.gates[name].status is GateStatus.FAILED or name == request.until:
                break
        _finish(run)
    except KeyboardInterrupt:
        _mark_interrupted(run, name, "interrupted")
        raise
    except SubjectError as error:  # code of the user's operator, which the gates ask too
        _mark_interrupted(run, name, run.hide_paths(str(error).partition("\n")[0]))
        raise
    except Exception as error:
        _mark_interrupted(run, name, f"the harness failed: {type(error).__name__}: {run.hide_paths(str(error))}")
        raise
    return run.record()


def _run_gate(run: Run, name: GateName, gate: Callable[[Run], Outcome]) -> None:
    run.progress.start(name)
    run.gate_began, run.holds_gpu, run.gpu_seconds = time.monotonic(), _holds_gpu(run, name), 0.0
    outcome = kept_outcome(run, name) or gate(run)
    run.gates[name] = Gate(
        name=name,
        status=outcome.status,
        summary=outcome.summary,
        hint=outcome.hint,
        details=list(outcome.details),
        seconds=time.monotonic() - run.gate_began,
        gpu_seconds=run.gpu_seconds,
    )
    run.save()
    run.progress.finish(run.gates[name])


def _size(run: Run) -> RunSize:
    """Return what decides how long this run will hold a GPU. What it takes over from another run costs nothing."""
    asked = GATE_NAMES[: GATE_NAMES.index(run.request.until or GATE_NAMES[-1]) + 1]
    gates = [name for name in GPU_GATES if name in asked and _holds_gpu(run, name) and kept_outcome(run, name) is None]
    processes = range(run.settings.processes)
    cells = sum(
        not has_cell(run.cases[case], process, mode) for case in run.todo for mode in run.modes for process in processes
    )
    size = replace(size_of(run.record()), cases=len(run.todo), cells=cells, gates=tuple(gates))
    if plans_alone(run) and not run.alone:
        alone = len(run.modes)
        more = alone * min(MOST_CASES, len(run.served))
        size = replace(size, workers=size.workers + alone, cells=size.cells + more)
    return size


def _holds_gpu(run: Run, name: GateName) -> bool:
    return name in GPU_GATES and run.has_gpu and not run.no_timing_reason


def _stop(run: Run, name: GateName, where: str, reason: str, seconds: float = 0.0) -> None:
    """End the chain before or in the gate ``name``, whose ``seconds`` are paid for; earlier results stay."""
    summary = f"{reason}: ended after {seconds:.0f} s" if seconds else reason
    gate = Gate(name=name, status=GateStatus.NOT_REACHED, summary=summary, hint=_way_on(run))
    run.gates[name] = gate.model_copy(update={"seconds": seconds, "gpu_seconds": seconds})
    run.lost = f"stopped {where} gate {name}: {reason}"
    run.progress.finish(run.gates[name])


def _way_on(run: Run) -> str:
    """Return what goes on with a run that its budget ended."""
    if run.subject.checkout is not None:
        return "a comparison cannot be gone on with: compare again with a larger --budget, or fewer cases"
    where = " --host MACHINE" if run.request.borrowed else ""  # its name stays out of records
    return f"flashmoe prove --resume {run.id}{where} goes on from here"


def _finish(run: Run) -> None:
    """Mark the record complete, unless cases are lacking or what it describes has changed under it."""
    changed = _changed_sources(run)
    if changed:
        run.lost = f"{CHANGED_SOURCES}: {', '.join(changed)}"
    run.incomplete_reason = run.lost
    _explain_unmeasured(run)
    run.save()


def _mark_interrupted(run: Run, name: GateName, reason: str) -> None:
    """Save what was finished before the gate ``name`` was left."""
    if run.gates[name].status is GateStatus.NOT_REACHED:
        seconds = time.monotonic() - run.gate_began
        held = seconds if _holds_gpu(run, name) else 0.0  # it is paid for, whether it showed something or not
        run.gates[name] = Gate(
            name=name, status=GateStatus.NOT_REACHED, summary=reason, seconds=seconds, gpu_seconds=held
        )
    run.incomplete_reason = f"{reason} in gate {name}"
    _explain_unmeasured(run)
    run.save()


def _explain_unmeasured(run: Run) -> None:
    """Give every arm without times the reason."""
    reason = run.incomplete_reason
    for gate in run.gates.values():
        if gate.status is GateStatus.FAILED:
            reason = f"gate {gate.name} failed"
        elif gate.status is GateStatus.NOT_POSSIBLE and not reason:
            reason = f"{gate.name} is not possible here: {gate.summary}"
    if not reason and run.request.until is not None:
        reason = f"the run was to end after gate {run.request.until}"
    another = run.gates["correct"].status is GateStatus.FAILED
    for case in run.cases.values():
        why = "another case failed gate correct" if another and case.correct else reason
        for arm in case.arms:
            if arm.status == "not measured" and not arm.reason:
                run.update_arm(case.name, arm.name, reason=why)


def _changed_sources(run: Run) -> list[str]:
    before = {source.path: source.sha256 for source in run.sources}
    now = {source.path: source.sha256 for source in hash_sources(run.subject)}
    return [path for path in before if now.get(path) != before[path]]
