"""Ask worker processes for the observations of a diagnosis. A missing one has a reason, and the rest goes on."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...errors import ProofError, page
from ...gpu.specs import GpuSpec
from ..gates.launch import case_problems
from ..gates.run import work_of
from ..judge.roofline import fewest_dram_bytes, known_spec
from ..records.evidence import CaseRecord, Gate, GateStatus, Gpu, Rounds, Settings, TimeKind, Work
from ..subject.build_command import known_gpus, run_build
from ..subject.failure_hints import explain_build
from ..subject.loading import operator_of
from ..subject.operator import Operator, Scalable, framework_kernels
from ..subject.subject import Subject
from ..subject.suites import SuiteCase
from ..worker import TaskResult, run_task
from .counters import read_counters
from .experiments import main_kernel
from .observations import Chip, Kernel, Observations, Scaled, Sensors, TimedBaseline, Times

_ROUNDS = 5
_SEQUENTIAL = (2, 4)
_PARALLEL = (2, 4, 16)  # of the first parallel axis; of the others the middle one, to see that they agree
_LARGEST_BYTES, _MOST_FLOPS = 1 << 30, 4e13  # of a longer call: inputs in several sets, and the exact answer in fp64

_HERE = __package__ or ""
_PROOF = _HERE.rpartition(".")[0]


Say = Callable[[str], None]
RunTask = Callable[..., TaskResult]  # ``worker.run_task``, or its stand-in


@dataclass(frozen=True)
class Request:
    """The subject and the cases to diagnose."""

    subject: Subject
    cases: Sequence[SuiteCase]
    baselines: Sequence[str]
    gpu: GpuSpec | None = None  # None: the one that is here
    counters: bool = True  # ask Nsight Compute, where it may read them
    seed: int | None = None  # None: `diagnose` draws one
    command: str = ""


class CannotObserveError(ProofError):
    """Nothing can be observed of the subject; ``gate`` says what had to be possible before."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate.summary, hint=gate.hint)
        self.gate = gate


@dataclass
class _Longer:
    """One case and the longer ones that are compared with it."""

    case: SuiteCase
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> problem, as a table
    runs: dict[str, Scaled] = field(default_factory=dict)
    reason: str = ""  # why there are no longer ones


def build(subject: Subject, gpu: Gpu, say: Say) -> None:
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


def _failed(gate: Any, summary: str, result: TaskResult) -> Gate:
    tail = [line for line in result.output_tail.strip().splitlines() if line.strip()][-8:]
    hint = "`flashmoe prove SUBJECT --until import` says more"
    return Gate(name=gate, status=GateStatus.FAILED, summary=summary, hint=hint, details=tail)


def observe_here(request: Request, gpu: Gpu, *, say: Say, run: RunTask = run_task) -> list[Observations]:
    """Return the observations of every case on the GPU that is here.

    Raises:
        CannotObserveError: the subject cannot be imported, or its process ends before the first case.
    """
    operator = operator_of(request.subject)
    families = [_longer(operator, case) for case in request.cases]
    tables = [
        {"name": name, "problem": table, "origin": "", "code": name == each.case.name}
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
    own = {each.case.name: each for each in families}
    kernel_tables = [table for table in tables if table["name"] in own or _base(str(table["name"])) not in captured]
    profiled, _ = _measure(run, {**common, "cases": kernel_tables}, request, ["kernel"], say)
    observations = []
    for each in families:
        found = _observe(operator, request, gpu, each, launched, clocks, profiled, unfinished)
        if request.counters and found.kernels and found.times.device is not None:
            say(f"counters of {each.case.name}")
            payload = {**common, "case": {"problem": operator.as_table(each.case.problem)}}
            kernels, why = read_counters(payload, found.kernels)
            missing = {**found.missing, **({"counters": why} if why else {})}
            found = found.model_copy(update={"kernels": kernels, "missing": missing})
        elif not request.counters:
            found = found.model_copy(update={"missing": {**found.missing, "counters": "they were not asked for"}})
        observations.append(found)
    return observations


_LONGER = " with "


def _base(name: str) -> str:
    return name.partition(_LONGER)[0]


def _longer(operator: Operator, case: SuiteCase) -> _Longer:
    """Return ``case`` with the longer ones that its operator offers."""
    found = _Longer(case, {case.name: operator.as_table(case.problem)})
    if not isinstance(operator, Scalable):
        found.reason = (
            f"operator {operator.name} offers no longer problems (axes and scaled: {page('how-to/diagnose')})"
        )
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
            found.runs[name] = Scaled.model_validate(
                {"case": name, "axis": axis.name, "kind": axis.kind, "meaning": axis.meaning, "factor": factor}
                | {"reason": reason}
            )
    return found


def _collect(
    run: RunTask, task: str, payload: dict[str, Any], request: Request, say: Say
) -> tuple[dict[str, dict[str, Any]], Gate]:
    """Run a task that emits its cases; return those finished by name, and what to say where one is lacking."""
    finished: dict[str, dict[str, Any]] = {}

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
) -> tuple[dict[str, dict[str, Any]], Gate]:
    """Take some times of some cases; the profiler's without a flush of L2, as the others are taken."""
    settings = Settings(times=times, processes=1, rounds=_ROUNDS, cache="rotating", seed=request.seed)
    payload = {
        **common,
        "baselines": list(request.baselines),
        "settings": settings.model_dump(mode="json"),
        "process": 0,
        "times": times,
        "control": False,  # nothing is claimed here
        "check_stream": False,  # gate bench refuses a subject for it; why it is slow can be said all the same
    }
    return _collect(run, f"{_PROOF}.measure.gpu_tasks:measure", payload, request, say)


def _seconds(case: Mapping[str, Any], arm: str) -> dict[str, float]:
    """Return the medians of one arm's times in a measured case."""
    if not case.get("rounds"):
        return {}
    rounds = Rounds.model_validate(case["rounds"])
    return {kind: statistics.median(columns[arm]) for kind, columns in rounds.seconds.items() if columns.get(arm)}


def _reasons(case: Mapping[str, Any], arm: str) -> str:
    return next((each["reason"] for each in case.get("arms", ()) if each["name"] == arm), "")


def _observe(
    operator: Operator,
    request: Request,
    gpu: Gpu,
    family: _Longer,
    launched: Mapping[str, dict[str, Any]],
    clocks: Mapping[str, dict[str, Any]],
    profiled: Mapping[str, dict[str, Any]],
    unfinished: Gate,
) -> Observations:
    """Put together what the processes said of one case."""
    name, subject = family.case.name, request.subject.name
    timed, profile, launch = clocks.get(name, {}), profiled.get(name, {}), launched.get(name, {})
    missing: dict[str, str] = {}
    if not launch.get("kernels"):
        missing["launches"] = launch.get("reason") or "the process that captures launches did not reach it"
    seconds = {**_seconds(timed, subject), **_seconds(profile, subject)}
    if not seconds:
        missing["times"] = (
            _reasons(timed, subject) or _reasons(profile, subject) or missing.get("launches") or unfinished.summary
        )
    elif lost := _reasons(timed, subject) or _reasons(profile, subject):
        missing["wall"] = lost
    if family.reason:
        missing["scaled"] = family.reason
    clock: Literal["graph", "kernel"] | None = (
        "graph" if "graph" in seconds else "kernel" if "kernel" in seconds else None
    )
    times = {**dict.fromkeys(("kernel", "graph", "wall")), **seconds}
    spec = known_spec(gpu)
    if spec is None:
        missing["gpu"] = f"{gpu.name} is not in the table of gpu/specs.py: its rates and limits are not known"
    rounds = Rounds.model_validate(timed["rounds"]) if timed.get("rounds") else None
    if rounds is None or all(value is None for value in rounds.sm_clock_mhz):
        missing["sensors"] = missing.get("times", "the driver does not report them (`flashmoe doctor` says why)")
    work = work_of(operator, family.case.problem)
    source = {"graph": clocks, "kernel": profiled}.get(clock or "", {})
    return Observations(
        case=name,
        problem=operator.as_table(family.case.problem),
        work=work,
        chip=None if spec is None else chip_of(spec, work, gpu.max_sm_clock_mhz),
        times=Times.model_validate(times),
        clock=clock,
        clock_seconds=seconds.get(clock) if clock else None,
        dram_bytes=_dram_bytes(family.case, work, gpu, timed),
        kernels=[Kernel.model_validate(each) for each in launch.get("kernels", [])],
        scaled=list(_scaled(family, subject, clock, source, launched, unfinished)),
        sensors=Sensors(max_sm_clock_mhz=gpu.max_sm_clock_mhz)
        if rounds is None
        else Sensors(sm_clock_mhz=rounds.sm_clock_mhz, throttle=rounds.throttle, max_sm_clock_mhz=gpu.max_sm_clock_mhz),
        baselines=_baselines(request.baselines, timed, profile),
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


def _scaled(
    family: _Longer,
    subject: str,
    clock: str | None,
    source: Mapping[str, dict[str, Any]],
    launched: Mapping[str, dict[str, Any]],
    unfinished: Gate,
) -> Iterator[Scaled]:
    """Yield the longer calls with their times and grids, or why they have none."""
    for name, run in family.runs.items():
        if run.reason:
            yield run
            continue
        case, launch = source.get(name, {}), launched.get(name, {})
        seconds = _seconds(case, subject).get(clock or "")
        kernel = _main([Kernel.model_validate(each) for each in launch.get("kernels", [])])
        reason = ""
        if seconds is None:
            why = _reasons(case, subject) or launch.get("reason") or unfinished.summary
            reason = f"{run.factor} times {run.meaning}: {why}"
        blocks = kernel.blocks if kernel else None
        yield run.model_copy(update={"seconds": seconds, "blocks": blocks, "reason": reason})


def _main(kernels: list[Kernel]) -> Kernel | None:
    return main_kernel(Observations(case="", problem={}, work=Work(flops=0, bytes=0, tokens=0), kernels=kernels))


def _baselines(names: Sequence[str], timed: Mapping[str, Any], profile: Mapping[str, Any]) -> list[TimedBaseline]:
    found = []
    for name in names:
        seconds = {**_seconds(timed, name), **_seconds(profile, name)}
        if seconds:
            found.append(TimedBaseline(name=name, times=Times.model_validate(seconds)))
    return found


def chip_of(spec: GpuSpec, work: Work, max_sm_clock_mhz: int | None = None) -> Chip:
    """Return what limits a call on this GPU, at the highest clock: the roofline's rates."""
    clock = max(spec.max_sm_clock_mhz, max_sm_clock_mhz or 0) / spec.boost_sm_clock_mhz * 1e12
    return Chip(
        name=spec.name,
        arch=spec.arch,
        sms=spec.sms,
        l2_bytes=spec.l2_bytes,
        bandwidth_bytes_per_s=spec.bandwidth_bytes_per_s,
        flops_per_s=spec.peak_tflops.get(work.peak, max(spec.peak_tflops.values())) * clock,
        plain_flops_per_s=spec.peak_tflops["fp32"] * clock,
        threads_per_sm=spec.threads_per_sm,
        blocks_per_sm=spec.blocks_per_sm,
        registers_per_sm=spec.registers_per_sm,
        shared_memory_per_sm_bytes=spec.shared_memory_per_sm_bytes,
        shared_memory_per_block_bytes=spec.shared_memory_per_block_bytes,
    )


def _dram_bytes(case: SuiteCase, work: Work, gpu: Gpu, timed: Mapping[str, Any]) -> float:
    record = CaseRecord(
        name=case.name,
        problem={},
        origin="",
        work=work,
        input_sets=timed.get("input_sets", 1),
        input_set_bytes=timed.get("input_set_bytes", 0),
    )
    return fewest_dram_bytes(record, gpu, flushed=False)


def plan_for(request: Request, spec: GpuSpec, why: str, *, say: Say, run: RunTask = run_task) -> list[Observations]:
    """Return the planned launches of every case on a GPU that is not here, with their machine code."""
    operator = operator_of(request.subject)
    tables = [{"name": case.name, "problem": operator.as_table(case.problem)} for case in request.cases]
    payload = {"subject": request.subject.to_json(), "cases": tables, "gpu": spec.name, "arch": spec.arch}
    planned, ended = _collect(run, f"{_HERE}.tasks:plan_kernels", payload, request, say)
    found = []
    for case in request.cases:
        work, plan = work_of(operator, case.problem), planned.get(case.name, {})
        missing = dict.fromkeys(("times", "wall", "scaled", "counters", "sensors", "captured"), why)
        kernels = [Kernel.model_validate(each) for each in plan.get("kernels", [])]
        missing["launches"] = (plan.get("reason") or ended.summary) if not kernels else why
        found.append(
            Observations(
                case=case.name,
                problem=operator.as_table(case.problem),
                work=work,
                chip=chip_of(spec, work),
                kernels=kernels,
                missing=missing,
            )
        )
    return found
