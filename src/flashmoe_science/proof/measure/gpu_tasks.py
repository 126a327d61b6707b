"""Worker tasks of the chain on a GPU: capture the launches, and take the times."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...errors import ProofError
from ...gpu.device import current_gpu
from ..records.evidence import Settings
from ..spent import spending
from ..subject.loading import operator_of
from ..subject.operator import Inputs, Operator, identities_of, ours, part_of
from ..subject.outputs import Answer, Call, copied, parts, sizes_of
from ..subject.subject import Subject
from ..worker import Emit, agree, ask, meet, rank_here
from . import arms as arms_module, launches
from .allowed_error import ExpectedOutputs, Whole, late_tolerance, truth_of_part
from .arms import Loaded
from .host_files import files_called
from .launches import CallTrace, Recording
from .measure import CudaTimer, Graph, Timer
from .rounds import Case, Plan, measure_case
from .schedule import derived_seed
from .shared_state import Guard, guard_against

_CAPTURED_CALLS = 2  # that the second runs what the first ran is part of the answer


Opened = tuple[Operator, list[Loaded], Timer]


def measure(payload: dict[str, Any], emit: Emit, opened: Opened | None = None) -> dict[str, Any]:
    """Take the times of every case in one process.

    Args:
        payload: ``subject``, ``cases``, ``baselines``, ``settings``, ``process`` and ``times`` (kernel alone, or graph
            and wall); optionally ``control``, ``thorough``, ``slow`` and ``beside``, see ``rounds.Plan``.
        emit: gets ``{"event": "start", "name"}``, ``{"event": "round", "case", "round", "rounds"}``, and ``{"event":
            "case", "case"}`` with the result of ``rounds.measure_case``.
        opened: the arms and the timer. Default: those of ``open_gpu``.

    Raises:
        ProofError: no GPU, times that cannot share a process, or the GPU context is lost.
    """
    plan = Plan(
        Settings.model_validate(payload["settings"]),
        payload["times"],
        payload["process"],
        control=payload.get("control", True),
        thorough=payload.get("thorough", True),
        slow=frozenset(payload.get("slow", ())),
        beside=payload.get("beside", {}),
    )
    operator, loaded, timer = opened or open_gpu(payload)
    plan = replace(plan, changes=Guard().changes)
    if plan.settings.seed is None:
        plan = replace(
            plan,
            new_seed=lambda: int(ask({"seed": "values"})["seed"]),
            orders_seed=lambda name: str(ask({"seed": "orders", "case": name})["seed"]),
            is_drawn=lambda name: bool(ask({"drawn": name})["drawn"]),
        )
    with spending("clocks"):
        timer.settle()
    for table in payload["cases"]:
        name = table["name"]

        def on_round(done: int, total: int, name: str = name) -> None:
            emit({"event": "round", "case": name, "round": done, "rounds": total})

        emit({"event": "start", "name": name})
        case = Case(name, operator, operator.parse_case(table["problem"]))
        emit({"event": "case", "case": measure_case(case, loaded, plan, timer, on_round=on_round)})
    return {"cases": len(payload["cases"])}


def measure_alone(payload: dict[str, Any], emit: Emit, opened: Opened | None = None) -> dict[str, Any]:
    """Take the times of the baselines in a process that never imports the subject: ``measure`` of all else.

    Returns what that does, and ``imported``: whether the operator's own module has imported the subject after all.
    """
    plan = {**payload, "control": False, "thorough": False}
    result = measure(plan, emit, opened or open_gpu(payload, alone=True))
    module = Subject.from_json(payload["subject"]).entry_point.partition(":")[0]
    return {**result, "imported": module in sys.modules}


def capture_launches(payload: dict[str, Any], emit: Emit, opened: Opened | None = None) -> dict[str, Any]:
    """Record the kernels that the subject and the baselines run in every case.

    ``payload`` has ``subject``, ``cases``, ``baselines`` and ``seed``; ``emit`` gets a "start" and a "case" event for
    each case. Returns ``cases``, see ``capture_case``. Raises ``ProofError``: no GPU, or the GPU context is lost.
    """
    operator, loaded, timer = opened or open_gpu(payload)
    changes = Guard().changes
    subject = Subject.from_json(payload["subject"])
    cases = []
    for table in payload["cases"]:
        emit({"event": "start", "name": table["name"]})
        case = Case(table["name"], operator, operator.parse_case(table["problem"]))
        cases.append(capture_case(case, subject, loaded, timer, seed=payload["seed"]))
        if found := changes():
            cases[-1]["arms"][0]["problems"].append(f"its calls change what all arms share: {found}")
        emit({"event": "case", "case": cases[-1]})
    return {"cases": cases}


@spending("opening")
def open_gpu(payload: dict[str, Any], make_timer: Callable[[], Timer] | None = None, *, alone: bool = False) -> Opened:
    """Import the arms and open the GPU. Inputs need no gradient, and nobody pays for asking.

    ``alone``: the baselines, and not the subject.
    """
    if make_timer is None and not torch.cuda.is_available():
        raise ProofError("no NVIDIA GPU here that torch can use", hint="`flashmoe doctor` says what this machine lacks")
    torch.set_grad_enabled(False)
    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]  # a variable that a module sets is too late for the driver
    subject = Subject.from_json(payload["subject"])
    changes = guard_against(subject)
    operator = operator_of(subject)
    loaded = arms_module.load_arms(None if alone else subject, operator, payload["baselines"], changes)
    return operator, loaded, CudaTimer() if make_timer is None else make_timer()


@dataclass
class _Capture:
    """One arm on the way to its record."""

    loaded: Loaded
    status: str = "captured"
    reason: str = ""
    call: Call | None = None
    graph: Graph | None = None
    replayed: Answer | None = None  # answer of the graph to values that it was not captured with
    answer: Answer | None = None  # of an eager call to the same
    replay_matches: bool | None = None  # replay and eager call; None: not known
    replay_problem: str = ""
    graph_reason: str = ""
    promises: list[dict[str, Any]] = field(default_factory=list)
    identities: list[str] = field(default_factory=list)
    host_files: dict[str, str] = field(default_factory=dict)

    def fail(self, status: str, reason: str) -> None:
        self.status, self.reason, self.call = status, reason, None


def capture_case(case: Case, subject: Subject, loaded: Sequence[Loaded], timer: Timer, *, seed: int) -> dict[str, Any]:
    """Record two eager calls of every arm, and a replay of a CUDA graph of one call.

    Between capture and replay the inputs get other values: an answer computed while capturing is not the replay's.

    Returns:
        ``name``, and ``arms``: name, role, status (captured, failed, refused, unavailable), reason, version,
        ``identities``, ``host_files`` and ``launches`` (``evidence.Arm``), ``graph_launches`` (None where there is no
        graph: ``graph_reason`` says why), ``copies`` (names of copies and fills), ``promises``,
        ``patterns`` (the kernels by which a baseline is known) and ``problems`` (calls that differ, kernels that the
        graph lacks).
    """
    captures = [_Capture(each) for each in loaded]
    try:
        inputs, others = (
            case.operator.make_inputs(case.problem, seed=derived_seed(seed, case.name, which), device=timer.name)
            for which in ("launches", "replays")
        )
    except Exception as error:  # noqa: BLE001 - one case of many fails, with its reason
        inputs = others = {}
        for capture in captures:
            capture.fail("failed", f"the case cannot be set up: {arms_module.survive(error, 'of none', timer)}")
    if reason := agree(captures[0].reason, "set up"):
        for capture in captures:
            capture.fail("failed", reason)
        return {"name": case.name, "arms": [_record(capture, None) for capture in captures]}
    for capture in captures:
        _prepare(capture, case, subject, inputs, timer)
        _agree_on(capture, "prepared")
        if capture.call is not None:
            _try_graph(capture, timer)
    with timer.recording() as recording:
        for capture in captures:
            if capture.call is not None:
                _record_calls(capture, inputs, others, recording, timer)
    # Slow, rarely needed, and the same for all arms: their calls left these values in the inputs.
    truth = functools.cache(functools.partial(_truth, case, others, seed))
    for capture in captures:
        _compare_replay(capture, case, truth, timer)
    records = [_record(capture, recording) for capture in captures]
    for capture in captures:
        if capture.graph is not None:
            capture.graph.release()
    return {"name": case.name, "arms": records}


def _truth(case: Case, inputs: Inputs, seed: int, *, of_part: bool) -> Whole:
    """Return what is right; ``of_part``: for a part of the answer that is drawn, where the operator knows parts."""
    if not of_part:
        return Whole(case.operator, case.problem, inputs)
    return truth_of_part(case.operator, case.problem, inputs, seed=derived_seed(seed, case.name, "part"))


def _prepare(capture: _Capture, case: Case, subject: Subject, inputs: Inputs, timer: Timer) -> None:
    """Bind and call one arm, and capture a graph of its call."""
    loaded = capture.loaded
    if loaded.entry is None:
        capture.fail(loaded.status, loaded.reason)
        return
    try:
        refusal = loaded.refusal(case.problem)
        if refusal is not None:
            capture.fail("refused", refusal)
            return
        with loaded.context():
            call = case.operator.bind(loaded.entry, case.problem, inputs)
            call()  # compiles, tunes, allocates
            call()
            timer.synchronize()
        if loaded.role == "subject":
            promised = (
                ours(case.operator).promised_launches(subject.name, case.problem)
                if subject.builtin
                else subject.kernels
            )
            capture.promises = [_as_table(promise) for promise in promised]
            if subject.builtin and (gpu := current_gpu()) is not None:
                capture.identities = identities_of(case.operator, subject.name, case.problem, gpu)
                with loaded.context():
                    capture.host_files = files_called(call)
                    timer.synchronize()
        capture.call = call
    except Exception as error:  # noqa: BLE001 - what an arm raises is a result
        capture.fail("failed", arms_module.survive(error, loaded.name, timer))


def _agree_on(capture: _Capture, step: str) -> None:
    """Fail an arm on all ranks where it has failed on one."""
    fault = "" if capture.status in ("refused", "unavailable") else capture.reason
    if (found := agree(fault, f"{capture.loaded.name} {step}")) != fault:
        capture.fail("failed", found)


def _try_graph(capture: _Capture, timer: Timer) -> None:
    """Capture a graph of its call, on all ranks or on none."""
    assert capture.call is not None
    try:
        with capture.loaded.context():
            capture.graph = timer.capture([capture.call], 1)
    except Exception as error:  # noqa: BLE001 - a call that no graph can hold is a result
        capture.graph_reason = arms_module.survive(error, capture.loaded.name, timer)
    capture.graph_reason = agree(capture.graph_reason, f"{capture.loaded.name} captured")
    if capture.graph_reason and capture.graph is not None:
        capture.graph.release()
        capture.graph = None


def _record_calls(capture: _Capture, inputs: Inputs, others: Inputs, recording: Recording, timer: Timer) -> None:
    """Make the calls of one arm while the profiler runs."""
    assert capture.call is not None
    name = capture.loaded.name
    try:
        with capture.loaded.context():
            for _ in range(_CAPTURED_CALLS):
                with recording.call(f"{name}/eager"):
                    capture.call()
                    timer.synchronize()
            if capture.graph is not None:
                arms_module.copy_values(others, inputs)
                capture.graph.poison_outputs()
                timer.synchronize()
                with recording.call(f"{name}/graph"):
                    capture.graph.replay_once()
                output = capture.graph.outputs[0]
                # Copied before the eager call: the two may write to the same memory.
                capture.replayed = None if output is None else copied(output)
                if output is not None:
                    timer.poison(*sizes_of(output))  # what the call does not write is not right by luck
                capture.answer = copied(capture.call())
                timer.synchronize()
    except Exception as error:  # noqa: BLE001 - what an arm raises is a result
        capture.fail("failed", arms_module.survive(error, name, timer))
    _agree_on(capture, "recorded")


def _compare_replay(capture: _Capture, case: Case, truth: Callable[..., Whole], timer: Timer) -> None:
    """Find out whether the replay answered as the eager call did: the same bits, or within the budget.

    An eager call that answers wrongly itself is left to gate correct: nothing then is known of the graph. Of a baseline
    a part of the answer is enough: what is right of all of it takes minutes where a call is large.
    """
    wrong = ""
    if capture.replayed is not None and capture.answer is not None:
        wrong = arms_module.mismatch([capture.replayed], [capture.answer], None)
    differ = any(meet(bool(wrong), f"{capture.loaded.name} replayed"))  # then all ranks work out what is right
    if capture.replayed is None or capture.answer is None:
        return
    if differ:
        try:
            part = part_of(case.operator, case.problem, capture.loaded.entry, rank_here())
            expected = truth(of_part=capture.loaded.role != "subject").expected(part)
        except Exception as error:  # noqa: BLE001 - one case of many fails, with its reason
            wrong = f"{wrong}; {arms_module.survive(error, 'of none', timer)}".removeprefix("; ")
        else:
            if len(parts(capture.answer)) != len(expected) or arms_module.fault_of(capture.answer, expected):
                return
            if wrong and not (capture.loaded.role == "subject" and capture.loaded.deterministic):
                tolerance = tuple(late_tolerance([wanted]) for wanted in expected)
                replayed, answer = (_picked(each, expected) for each in (capture.replayed, capture.answer))
                wrong = arms_module.mismatch([replayed], [answer], tolerance) or arms_module.nan_in(capture.replayed)
    capture.replay_matches = not wrong
    if wrong:
        capture.replay_problem = f"a replay of its CUDA graph does not answer as the eager call does: {wrong}"


def _picked(answer: Answer, expected: ExpectedOutputs) -> Answer:
    """Return of each tensor of an answer the part that is compared."""
    return tuple(
        each if wanted.pick is None else wanted.pick(each) for each, wanted in zip(parts(answer), expected, strict=True)
    )


def _record(capture: _Capture, recording: Recording | None) -> dict[str, Any]:
    """Return the record of one arm."""
    name, loaded = capture.loaded.name, capture.loaded
    eager: list[CallTrace] = []
    replays: list[CallTrace] = []
    if capture.status == "captured" and recording is not None:
        eager, replays = recording.calls(f"{name}/eager"), recording.calls(f"{name}/graph")
    ran = eager[-1].launches() if eager else []
    in_graph = replays[-1].launches() if replays else None
    problems = launches.capture_problems(eager)
    unseen = False
    if in_graph is not None:
        if capture.replay_problem:
            problems.append(capture.replay_problem)
        # Copies alone are no kernel that the profiler missed: they may hand out what was computed while capturing.
        if ran and not replays[-1].events and capture.replay_matches:
            in_graph, unseen = None, True
            capture.graph_reason = "the profiler saw nothing of a replay that answered rightly"
        else:
            problems += launches.graph_problems(ran, in_graph)
    return {
        "name": name,
        "role": loaded.role,
        "status": capture.status,
        "reason": capture.reason,
        "version": loaded.version,
        "identities": capture.identities,
        "host_files": capture.host_files,
        "launches": [launch.model_dump(mode="json") for launch in ran],
        "graph_launches": None if in_graph is None else [launch.model_dump(mode="json") for launch in in_graph],
        "graph_reason": capture.graph_reason,
        "graph_unseen": unseen,  # a graph holds the call, and what it launches is not known
        "copies": list(eager[-1].copies) if eager else [],
        "promises": capture.promises,
        "patterns": list(loaded.baseline.kernels) if loaded.baseline is not None else [],
        "problems": problems,
    }


def _as_table(promise: Any) -> dict[str, Any]:
    """Return a ``LaunchPromise`` as plain values."""
    return {name: getattr(promise, name) for name in ("pattern", "grid", "block", "shared_memory_bytes")}
