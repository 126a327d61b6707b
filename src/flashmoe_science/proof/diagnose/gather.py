"""One diagnosis: ask worker processes for observations, and draw conclusions from them.

A missing observation has a reason, and the rest goes on.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...errors import InputError, ProofError, SuiteError, page
from ...gpu.specs import GpuSpec
from ..gates.launch import case_problems
from ..gates.run import work_of
from ..judge.roofline import fewest_dram_bytes, known_spec
from ..processes import TaskResult
from ..records.evidence import (
    CaseRecord,
    Environment,
    Gate,
    GateName,
    GateStatus,
    Gpu,
    Rounds,
    Settings,
    TimeKind,
    Work,
)
from ..subject.build_command import known_gpus, run_build
from ..subject.failure_hints import explain_build
from ..subject.loading import operator_of
from ..subject.operator import Operator, Scalable, framework_kernels
from ..subject.subject import Subject
from ..subject.suites import Suite, SuiteCase, check_operator
from ..text import did_you_mean
from ..worker import run_task
from .counters import read_counters
from .experiments import main_kernel
from .hypotheses import diagnose_case
from .observations import Chip, Diagnosis, Kernel, Observations, Scaled, Sensors, TimedBaseline, Times

_ROUNDS = 5
_SEQUENTIAL = (2, 4)
_PARALLEL = (2, 4, 16)  # of the first parallel axis; of the others the middle one, to see that they agree
_LARGEST_BYTES, _MOST_FLOPS = 1 << 30, 4e13  # of a longer call: inputs in several sets, and the exact answer in fp64
_LONGER = " with "

_HERE = __package__ or ""
_PROOF = _HERE.rpartition(".")[0]

Say = Callable[[str], None]
RunTask = Callable[..., TaskResult]  # ``worker.run_task``, or its stand-in
Told = dict[str, dict[str, Any]]  # what a process said of cases, by their names


@dataclass(frozen=True)
class Request:
    """The subject and the cases to diagnose."""

    subject: Subject
    cases: Sequence[SuiteCase]
    baselines: Sequence[str]
    gpu: GpuSpec | None = None  # None: the one that is here
    counters: bool = True  # ask Nsight Compute, where it may read them
    seed: int = 0
    command: str = ""


class CannotObserveError(ProofError):
    """Nothing can be observed of the subject; ``gate`` says what had to be possible before."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate.summary, hint=gate.hint)
        self.gate = gate


def choose_cases(suite: Suite, subject: Subject, names: Sequence[str]) -> list[SuiteCase]:
    """Return the cases called ``names``, or all.

    Raises:
        SuiteError: the suite is of another operator, or has no such case.
    """
    check_operator(suite, subject)
    known = {case.name: case for case in suite.cases}
    for name in names:
        if name not in known:
            where = f"suite {suite.name} has" if suite.name else f"the packaged suites of {suite.operator} have"
            listing = f"`flashmoe suites {suite.name or 'SUITE'}` lists the cases"
            raise SuiteError(f"{where} no case {name!r}", hint=f"{did_you_mean(name, known)} {listing}".strip())
    return [known[name] for name in names] or list(suite.cases)


def diagnose(request: Request, environment: Environment, *, say: Say) -> Diagnosis:
    """Observe and reason; ``say`` gets a line for each step. Raises ``InputError``: no GPU here, and none was named.

    ``failed`` of the diagnosis says where nothing could be observed because the subject cannot be built or imported.
    """
    result = Diagnosis(subject=request.subject.name, command=request.command, environment=environment)
    here = environment.gpu
    try:
        if here is not None and (request.gpu is None or request.gpu == known_spec(here)):
            if "cuda" not in request.subject.devices:
                raise InputError(f"{request.subject.name} runs on the CPU only: there is no kernel to diagnose")
            _build(request.subject, here, say)
            observations = observe_here(request, here, say=say)
        elif request.gpu is not None:
            why = "no GPU here" if here is None else f"the GPU here is another one: {here.name}"
            observations = plan_for(request, request.gpu, why, say=say)
        else:
            hint = "name one to see what compiling alone tells: --gpu H200"
            raise InputError("there is no NVIDIA GPU here", hint=hint)
    except CannotObserveError as error:
        return result.model_copy(update={"failed": error.gate})
    return result.model_copy(update={"cases": [diagnose_case(each) for each in observations]})


def _build(subject: Subject, gpu: Gpu, say: Say) -> None:
    """Run the subject's build command as gate build does. Raises ``CannotObserveError``."""
    if subject.build_command is None:
        return
    built = run_build(subject, known_gpus(subject.gpus, gpu) if subject.gpus else [], say, say)
    if built.missing:
        raise CannotObserveError(
            Gate(name="build", status=GateStatus.NOT_POSSIBLE, summary=built.lacks, hint=built.hint)
        )
    assert built.result is not None
    if not built.result.ok:
        said = explain_build(built.result.output_tail)[0]
        summary = f"the build command {built.result.reason}" + (f": {said}" if said else "")
        raise CannotObserveError(_failed("build", summary, built.result))


def _failed(gate: GateName, summary: str, result: TaskResult) -> Gate:
    tail = [line for line in result.output_tail.strip().splitlines() if line.strip()][-8:]
    hint = "`flashmoe prove SUBJECT --until import` says more"
    return Gate(name=gate, status=GateStatus.FAILED, summary=summary, hint=hint, details=tail)


@dataclass
class _Longer:
    """One case and the longer ones that are compared with it."""

    case: SuiteCase
    tables: Told = field(default_factory=dict)  # name -> problem, as a table
    runs: dict[str, Scaled] = field(default_factory=dict)
    reason: str = ""  # why there are no longer ones


@dataclass(frozen=True)
class _Observed:
    """What the processes said."""

    launched: Told
    clocks: Told  # graph and wall time
    profiled: Told  # kernel time
    unfinished: str  # what to say of a case that was not reached


def observe_here(request: Request, gpu: Gpu, *, say: Say, run: RunTask = run_task) -> list[Observations]:
    """Return the observations of every case on the GPU that is here.

    Raises:
        CannotObserveError: the subject cannot be imported, or its process ends before the first case.
    """
    operator = operator_of(request.subject)
    families = [_longer(operator, case) for case in request.cases]
    own = {each.case.name for each in families}
    tables: list[dict[str, Any]] = [
        {"name": name, "problem": table, "origin": "", "code": name in own}
        for each in families
        for name, table in each.tables.items()
    ]
    common = {"subject": request.subject.to_json(), "operator": request.subject.operator, "seed": request.seed}
    say(f"launches of {len(tables)} calls")
    launched, ended = _collect(run, f"{_HERE}.tasks:observe_launches", {**common, "cases": tables}, request, say)
    if not launched:
        raise CannotObserveError(ended)
    say(f"graph and wall time of {len(tables)} calls")
    clocks, unfinished = _measure(run, {**common, "cases": tables}, request, ["graph", "wall"], say)
    captured = {name for name, case in clocks.items() if "graph" in _seconds(case, request.subject.name)}
    say("kernel time")
    lacking = [each for each in tables if each["name"] in own or each["name"].partition(_LONGER)[0] not in captured]
    profiled, _ = _measure(run, {**common, "cases": lacking}, request, ["kernel"], say)
    told = _Observed(launched, clocks, profiled, unfinished.summary)
    observations = []
    for each in families:
        found = _observe(operator, request, gpu, each, told)
        why = "" if request.counters else "they were not asked for"
        if request.counters and found.kernels and found.times.device is not None:
            say(f"counters of {each.case.name}")
            payload = {**common, "case": {"problem": operator.as_table(each.case.problem)}}
            kernels, why = read_counters(payload, found.kernels)
            found = found.model_copy(update={"kernels": kernels})
        missing = {**found.missing, **({"counters": why} if why else {})}
        observations.append(found.model_copy(update={"missing": missing}))
    return observations


def _longer(operator: Operator, case: SuiteCase) -> _Longer:
    """Return ``case`` with the longer ones that its operator offers."""
    found = _Longer(case, {case.name: operator.as_table(case.problem)})
    if not isinstance(operator, Scalable):
        told = f"axes and scaled: {page('how-to/diagnose')}"
        found.reason = f"operator {operator.name} offers no longer problems ({told})"
        return found
    axes = list(operator.axes())
    first = next((axis.name for axis in axes if axis.kind == "parallel"), "")
    for axis in axes:
        factors = _SEQUENTIAL if axis.kind == "sequential" else _PARALLEL if axis.name == first else _PARALLEL[1:2]
        for factor in factors:
            problem = operator.scaled(case.problem, axis.name, factor)
            if problem is None:
                continue
            name = f"{case.name}{_LONGER}{factor} times {axis.meaning}"
            work, reason = operator.work(problem), ""
            if work.bytes > _LARGEST_BYTES or work.flops > _MOST_FLOPS:
                reason = f"{factor} times {axis.meaning} is too large to try"
            else:
                found.tables[name] = operator.as_table(problem)
            table = {"case": name, "axis": axis.name, "kind": axis.kind, "meaning": axis.meaning, "factor": factor}
            found.runs[name] = Scaled.model_validate({**table, "reason": reason})
    return found


def _collect(run: RunTask, task: str, payload: dict[str, Any], request: Request, say: Say) -> tuple[Told, Gate]:
    """Run a task that emits its cases; return those finished by name, and what to say where one is lacking."""
    finished: Told = {}

    def on_event(event: dict[str, Any]) -> None:
        if event.get("event") == "case":
            finished[event["case"]["name"]] = event["case"]

    result = run(task, payload, timeout_s=request.subject.limits.launch_s, on_event=on_event)
    if not result.ok:
        say(f"the process: {result.reason}")
    ending = result.reason.replace(str(request.subject.folder), ".")
    summary = f"the process: {ending}" if ending else "it was not reached"
    return finished, _failed("import", summary, result)


def _measure(
    run: RunTask, common: dict[str, Any], request: Request, times: list[TimeKind], say: Say
) -> tuple[Told, Gate]:
    """Take some times of some cases; the profiler's without a flush of L2, as the others are taken."""
    settings = Settings(times=times, processes=1, rounds=_ROUNDS, cache="rotating", seed=request.seed)
    payload = {
        **common,
        "baselines": list(request.baselines),
        "settings": settings.model_dump(mode="json"),
        "process": 0,
        "times": times,
        "control": False,  # nothing is claimed here
        "thorough": False,  # gate bench refuses a subject for it; why it is slow can be said all the same
    }
    return _collect(run, f"{_PROOF}.measure.gpu_tasks:measure", payload, request, say)


def _seconds(case: Mapping[str, Any], arm: str) -> dict[str, float]:
    """Return the medians of one arm's times in a measured case."""
    if not case.get("rounds"):
        return {}
    rounds = Rounds.model_validate(case["rounds"])
    return {kind: statistics.median(columns[arm]) for kind, columns in rounds.seconds.items() if columns.get(arm)}


def _reason(case: Mapping[str, Any], arm: str) -> str:
    return next((each["reason"] for each in case.get("arms", ()) if each["name"] == arm), "")


def _observe(operator: Operator, request: Request, gpu: Gpu, family: _Longer, told: _Observed) -> Observations:
    """Put together what the processes said of one case."""
    name, subject = family.case.name, request.subject.name
    timed, profile, launch = (each.get(name, {}) for each in (told.clocks, told.profiled, told.launched))
    missing: dict[str, str] = {}
    if not launch.get("kernels"):
        missing["launches"] = launch.get("reason") or "the process that captures launches did not reach it"
    seconds = {**_seconds(timed, subject), **_seconds(profile, subject)}
    lost = _reason(timed, subject) or _reason(profile, subject)
    if not seconds:
        missing["times"] = lost or missing.get("launches") or told.unfinished
    elif lost:
        missing["wall"] = lost
    if family.reason:
        missing["scaled"] = family.reason
    clock: Literal["graph", "kernel"] | None
    clock = "graph" if "graph" in seconds else "kernel" if "kernel" in seconds else None
    spec = known_spec(gpu)
    if spec is None:
        missing["gpu"] = f"{gpu.name} is not in the table of gpu/specs.py: its rates and limits are not known"
    sensors = Sensors(max_sm_clock_mhz=gpu.max_sm_clock_mhz)
    if timed.get("rounds"):
        rounds = Rounds.model_validate(timed["rounds"])
        sensors = sensors.model_copy(update={"sm_clock_mhz": rounds.sm_clock_mhz, "throttle": rounds.throttle})
    if all(value is None for value in sensors.sm_clock_mhz):
        missing["sensors"] = missing.get("times", "the driver does not report them (`flashmoe doctor` says why)")
    work, problem = work_of(operator, family.case.problem), operator.as_table(family.case.problem)
    sets = {key: timed[key] for key in ("input_sets", "input_set_bytes") if key in timed}
    return Observations(
        case=name,
        problem=problem,
        work=work,
        chip=None if spec is None else chip_of(spec, work, gpu.max_sm_clock_mhz),
        times=Times.model_validate(seconds),
        clock=clock,
        clock_seconds=seconds.get(clock) if clock else None,
        dram_bytes=fewest_dram_bytes(
            CaseRecord(name=name, problem={}, origin="", work=work, **sets), gpu, flushed=False
        ),
        kernels=[Kernel.model_validate(each) for each in launch.get("kernels", [])],
        scaled=[_timed(run, subject, clock, told) for run in family.runs.values()],
        sensors=sensors,
        baselines=[
            TimedBaseline(name=each, times=Times.model_validate(times))
            for each in request.baselines
            if (times := {**_seconds(timed, each), **_seconds(profile, each)})
        ],
        promised=bool(launch.get("capture", {}).get("promises")),
        broken_promises=_broken(operator, request.subject, name, launch),
        missing=missing,
    )


def _broken(operator: Operator, subject: Subject, name: str, launch: Mapping[str, Any]) -> list[str] | None:
    capture = launch.get("capture")
    if not capture or capture["status"] != "captured":
        return None
    case = {"name": name, "arms": [capture]}
    return case_problems(subject, case, framework=framework_kernels(operator), needs_graph=False)


def _timed(run: Scaled, subject: str, clock: str | None, told: _Observed) -> Scaled:
    """Return a longer call with its time and grid, or why it has none."""
    if run.reason:
        return run
    case = {"graph": told.clocks, "kernel": told.profiled}.get(clock or "", {}).get(run.case, {})
    launch = told.launched.get(run.case, {})
    seconds = _seconds(case, subject).get(clock or "")
    kernel = main_kernel([Kernel.model_validate(each) for each in launch.get("kernels", [])])
    reason = ""
    if seconds is None:
        why = _reason(case, subject) or launch.get("reason") or told.unfinished
        reason = f"{run.factor} times {run.meaning}: {why}"
    blocks = kernel.blocks if kernel else None
    return run.model_copy(update={"seconds": seconds, "blocks": blocks, "reason": reason})


def chip_of(spec: GpuSpec, work: Work, max_sm_clock_mhz: int | None = None) -> Chip:
    """Return what limits a call on this GPU, at the highest clock: the roofline's rates."""
    clock = max(spec.max_sm_clock_mhz, max_sm_clock_mhz or 0) / spec.boost_sm_clock_mhz * 1e12
    rates: dict[str, Any] = {
        "flops_per_s": spec.peak_tflops.get(work.peak, max(spec.peak_tflops.values())) * clock,
        "plain_flops_per_s": spec.peak_tflops["fp32"] * clock,
    }
    return Chip(**{name: rates[name] if name in rates else getattr(spec, name) for name in Chip.model_fields})


def plan_for(request: Request, spec: GpuSpec, why: str, *, say: Say, run: RunTask = run_task) -> list[Observations]:
    """Return the planned launches of every case on a GPU that is not here, with their machine code."""
    operator = operator_of(request.subject)
    tables = [{"name": case.name, "problem": operator.as_table(case.problem)} for case in request.cases]
    payload = {"subject": request.subject.to_json(), "cases": tables, "gpu": spec.name}
    planned, ended = _collect(run, f"{_HERE}.tasks:plan_kernels", payload, request, say)
    found = []
    for case, table in zip(request.cases, tables, strict=True):
        work, plan = work_of(operator, case.problem), planned.get(case.name, {})
        kernels = [Kernel.model_validate(each) for each in plan.get("kernels", [])]
        missing = dict.fromkeys(("times", "wall", "scaled", "counters", "sensors", "captured"), why)
        missing["launches"] = why if kernels else plan.get("reason") or ended.summary
        told: dict[str, Any] = {**table, "work": work, "chip": chip_of(spec, work), "missing": missing}
        found.append(Observations(case=told.pop("name"), kernels=kernels, **told))
    return found
