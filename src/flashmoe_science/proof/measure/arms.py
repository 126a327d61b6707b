"""The arms of a case: the subject, the baselines and the control, made ready to be called and checked before and after.

An arm that raises, runs out of memory or answers wrongly becomes a failed arm with its reason, and the others go on.
Only a lost GPU context ends the process.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ...errors import ProofError
from ..records.evidence import Accuracy, Launch, OutputAccuracy, TimeKind
from ..subject.loading import load_entry
from ..subject.operator import Baseline, Inputs, Operator, Part, part_of
from ..subject.outputs import Answer, Call, copied, names_of, not_formed, parts, sizes_of
from ..subject.subject import Subject
from ..worker import agree, describe_error, meet, rank_here
from .allowed_error import Allowed, ExpectedOutputs, Whole, find_shares, judge, late_tolerance
from .correctness import accuracy_of, not_plain
from .fresh_values import FreshValues
from .measure import Timer
from .shared_state import AT_IMPORT, Guard, SharedState

Role = Literal["subject", "baseline", "control"]

CONTROL_SUFFIX = "#2"
_FAR = 4.0  # times the noise: another answer


@dataclass(frozen=True)
class Loaded:
    """An implementation as it was imported, once in a process, for all cases."""

    name: str
    role: Role
    entry: Callable[..., Any] | None
    status: Literal["loaded", "unavailable", "failed"]
    reason: str = ""
    version: str = ""
    deterministic: bool = False  # promised: the same input gives the same bits
    baseline: Baseline | None = None

    def context(self) -> AbstractContextManager[object]:
        """Return the context in which every call is made, e.g. a pinned backend."""
        return contextlib.nullcontext() if self.baseline is None else self.baseline.context()

    @property
    def speed_of_light(self) -> bool:
        """Whether it does other work, e.g. a matrix product: only the repeatability of its answer is checked."""
        return bool(getattr(self.baseline, "speed_of_light", False))

    def refusal(self, problem: Any) -> str | None:
        """Return why it cannot serve ``problem``, or None."""
        return None if self.baseline is None else self.baseline.refusal(problem)


Tolerance = tuple[Allowed, ...]  # of each tensor of an answer


@dataclass
class Arm:
    """One implementation, bound to the inputs of one case."""

    loaded: Loaded
    name: str
    role: Role
    status: Literal["ready", "refused", "unavailable", "failed", "not measured"] = "ready"
    reason: str = ""
    calls: list[Call] = field(default_factory=list)  # one for each set of inputs
    expected: list[Answer] = field(default_factory=list)  # its first answer to each set
    tolerance: Tolerance | None = None  # of a later answer; None: the same bits; empty: not known
    noise: float = 0.0  # how far two answers to the same values are apart
    follows: bool = True  # its answers follow the inputs' values; a baseline may have laid out copies when it was bound
    accuracy: Accuracy | None = None
    peak_bytes: int | None = None
    timed: dict[tuple[str, int, int], Launch] = field(default_factory=dict)  # by name, registers and shared memory
    lost: dict[TimeKind, str] = field(default_factory=dict)  # kind of time -> why it could not be taken
    part: Part | None = None  # of the whole answer, that this rank gives

    @property
    def ready(self) -> bool:
        """Whether it can be timed."""
        return self.status == "ready"

    def fail(self, reason: str) -> None:
        """Record that it cannot be timed, and let go of its memory."""
        self.status, self.reason = "failed", reason
        self.release()

    def lose(self, kinds: Sequence[TimeKind], reason: str) -> None:
        """Record why some kinds of time cannot be taken; the others still can."""
        self.lost.update(dict.fromkeys(kinds, reason))

    def release(self) -> None:
        """Let go of its closures and answers."""
        self.calls.clear()
        self.expected.clear()


def load_arms(
    subject: Subject | None, operator: Operator, baselines: Sequence[str], changes: Callable[[], str] | None = None
) -> list[Loaded]:
    """Import the subject, unless it is None, and the baselines, the subject first. What cannot be imported says why.

    ``changes`` says what the subject changed by being imported: of a ``Guard`` that is as old as the process should be.

    Raises:
        ProofError: a baseline is unknown, or two arms have one name.
    """
    names = [*([] if subject is None else [subject.name]), *baselines]
    if len(set(names)) < len(names):
        raise ProofError(f"subject and baselines must have names of their own, got {', '.join(names)}")
    loaded = [] if subject is None else [_load_subject(subject, changes or Guard().changes)]
    known = operator.baselines()
    for name in baselines:
        if name not in known:
            raise ProofError(f"baseline must be one of {', '.join(known)}, got {name!r}")
        loaded.append(load_baseline(known[name]))
    return loaded


def _load_subject(subject: Subject, changes: Callable[[], str]) -> Loaded:
    try:
        entry = load_entry(subject)
    except Exception as error:  # noqa: BLE001 - what a subject raises is a result
        return Loaded(subject.name, "subject", None, "failed", describe_error(error))
    if found := changes():
        return Loaded(subject.name, "subject", None, "failed", f"{AT_IMPORT}: {found}")
    return Loaded(subject.name, "subject", entry, "loaded", deterministic=subject.deterministic)


def load_baseline(baseline: Baseline) -> Loaded:
    """Import one baseline; a missing package makes it unavailable, any other error failed."""
    try:
        entry = baseline.load()
        version = baseline.version()
    except ImportError as error:
        return Loaded(baseline.name, "baseline", None, "unavailable", str(error).strip() or "cannot be imported")
    except Exception as error:  # noqa: BLE001 - what a baseline raises is a result
        return Loaded(baseline.name, "baseline", None, "failed", describe_error(error))
    return Loaded(baseline.name, "baseline", entry, "loaded", version=version, baseline=baseline)


def prepare_arm(
    loaded: Loaded,
    operator: Operator,
    problem: Any,
    input_sets: Sequence[Inputs],
    wholes: Mapping[int, Whole],
    device: Timer,
) -> Arm:
    """Bind ``loaded`` to every set of inputs, call it, and check its answers.

    Compiling, tuning and the first allocation happen here. The answers to the sets that ``wholes`` knows, which may be
    none, are compared with the exact ones; the answers to all sets are kept, to be compared with those after timing.
    """
    part = part_of(operator, problem, loaded.entry, rank_here())
    expected = {place: whole.expected(part) for place, whole in wholes.items()}
    by_output = zip(*expected.values(), strict=True)
    tolerance = None if loaded.deterministic else tuple(late_tolerance(each) for each in by_output)
    if tolerance is not None and loaded.speed_of_light:  # its answer has a form of its own
        tolerance = tuple(Allowed(each.largest.max()) for each in tolerance)
    arm = Arm(loaded, loaded.name, loaded.role, tolerance=tolerance, part=part)
    fault, refusal = loaded.reason, ""
    try:
        if loaded.entry is not None:
            refusal = loaded.refusal(problem) or ""
            fault = "" if refusal else _first_answers(arm, operator, problem, input_sets, expected, device)
    except Exception as error:  # noqa: BLE001 - what an arm raises is a result
        fault = survive(error, arm.name, device)
    if fault := agree(fault, f"{arm.name} prepared"):
        arm.fail(fault)
        arm.status = "unavailable" if loaded.status == "unavailable" else "failed"
    elif refusal:
        arm.status, arm.reason = "refused", refusal
    return arm


def _first_answers(
    arm: Arm,
    operator: Operator,
    problem: Any,
    input_sets: Sequence[Inputs],
    expected: Mapping[int, ExpectedOutputs],
    device: Timer,
) -> str:
    """Bind and call an arm, keep its answers, and return the fault of one, or an empty text.

    It makes all calls, whatever an answer is: those of other ranks wait for them.
    """
    loaded, names, shared = arm.loaded, names_of(operator, problem), SharedState()
    faults: list[str] = []
    assert loaded.entry is not None
    with loaded.context():
        arm.calls = [operator.bind(loaded.entry, problem, inputs) for inputs in input_sets]
        answer = arm.calls[0]()  # compiles, tunes, allocates
        device.synchronize()
        known = next(iter(expected.values()), None)
        output_bytes = [wanted.nbytes for wanted in known] if known else sizes_of(answer)
        del answer
        arm.peak_bytes = device.peak_bytes(arm.calls[0])
        device.poison(*output_bytes)
        for call in arm.calls:
            answer = call()
            faults.append(not_an_answer(answer, loaded, names))
            device.synchronize()  # waits for work on any stream; check_stream reports such work
            arm.expected.append(answer if faults[-1] else copied(answer))
        device.poison(*output_bytes)
        again = arm.calls[0]()
        device.synchronize()
    if wrong := next(filter(None, faults), ""):
        return wrong
    if changes := shared.changes():
        return f"a call of it changes what all arms share: {changes}"
    repeats = mismatch([copied(again)], arm.expected[:1], None) == ""
    arm.noise = 0.0 if repeats else distance(again, arm.expected[0])
    judged = {} if loaded.speed_of_light else expected
    for index, each in judged.items():
        if wrong := _judge_answer(arm, index, each, repeats=repeats):
            return wrong
    if loaded.deterministic and not repeats:
        return "the same input gave other bits the second time, and the same bits are promised"
    return ""


def not_an_answer(answer: Any, loaded: Loaded, names: Sequence[str]) -> str:
    """Return why ``answer`` is not what the call of an arm has to give, or an empty text."""
    wrong = "" if loaded.speed_of_light else not_formed(answer, names)
    return wrong or next((odd for part in parts(answer) if (odd := not_plain(part))), "")


def _judge_answer(arm: Arm, index: int, expected: ExpectedOutputs, *, repeats: bool) -> str:
    """Return the fault of the answer to one set, or an empty string; record the worst accuracy of all sets."""
    found: dict[str, OutputAccuracy] = {}
    faults: list[str] = []
    answer = parts(arm.expected[index])
    for first, wanted in zip(answer, expected, strict=True):
        its = f"its {wanted.output}" if wanted.output else "its answer"
        if first.shape != wanted.exact.shape:
            return f"{its} must have shape {list(wanted.exact.shape)}, got {list(first.shape)}"
        accuracy, fault = judge(first, wanted)
        if fault and accuracy is None:
            return f"{its} has {fault}"
        assert accuracy is not None
        found[wanted.output] = accuracy
        faults.append(f"{its} is off: {fault}" if fault else "")
    accuracy_of_all = accuracy_of(found, deterministic=repeats)
    if arm.accuracy is None or accuracy_of_all.share > arm.accuracy.share:
        arm.accuracy = accuracy_of_all
    return next(filter(None, faults), "")


def control_of(arms: Sequence[Arm]) -> Loaded | None:
    """Return what the control runs: a second copy of the first baseline that is ready here."""
    return next((arm.loaded for arm in arms if arm.role == "baseline" and arm.ready), None)


def check_stream(arm: Arm, operator: Operator, problem: Any, inputs: Inputs, device: Timer, *, seed: int) -> str:
    """Return why the arm's work is not ordered with the stream it is called on, or an empty string.

    On the calling stream: a sleep, fresh values into the bound inputs, the call, a copy of its answer. Work that
    another stream does without waiting reads the old values, or is not done when the answer is copied.
    """
    assert arm.loaded.entry is not None
    saved: Inputs | None = None
    wrong: list[str] = []
    try:
        fresh = operator.make_inputs(problem, seed=seed, device=device.name)
        saved = {name: tensor.clone() for name, tensor in inputs.items()}
        with arm.loaded.context():
            expected = copied(operator.bind(arm.loaded.entry, problem, fresh)())
            device.synchronize()
            for stream in device.streams():
                device.poison(*sizes_of(expected))
                device.synchronize()
                with stream:
                    device.sleep()
                    copy_values(fresh, inputs)
                    answer = copied(arm.calls[0]())
                device.synchronize()
                wrong.append(mismatch([answer], [expected], arm.tolerance))
                if arm.tolerance == () and distance(answer, arm.expected[0]) < distance(answer, expected):
                    wrong[-1] = "it is nearer to that to the old values"
                copy_values(saved, inputs)
                device.synchronize()
    except Exception as error:  # noqa: BLE001 - what an arm raises is a result
        reason = survive(error, arm.name, device)
        if saved is not None:
            copy_values(saved, inputs)
        return f"called on another stream: {reason}"
    late = next(filter(None, wrong), "")
    return f"its work is not ordered with the stream that it is called on: {late}" if late else ""


def find_followers(values: FreshValues, arms: Sequence[Arm], device: Timer, *, compare: bool = True) -> None:
    """Write new values, and see which arms answer to them: with what is right, or, unless ``compare``, otherwise.

    The subject must. A baseline that prefers another memory layout has copied its inputs when it was bound, outside of
    the timing, and answers to those. An arm that answers to neither fails.
    """
    values.write([0])
    for arm in (arm for arm in arms if not arm.loaded.speed_of_light):
        follows, fault = True, ""
        try:
            with arm.loaded.context():
                answer = copied(arm.calls[0]())
                device.synchronize()
                if compare:
                    follows = not fault_of(answer, values.expected(0, arm.part))
                else:
                    follows = distance(answer, arm.expected[0]) > _FAR * arm.noise
                if not follows and mismatch([answer], arm.expected[:1], arm.tolerance):
                    fault = "its answer to new values at the same addresses is wrong"
                elif not follows and arm.role == "subject":
                    fault = "its answer to new values at the same addresses is the old one"
        except Exception as error:  # noqa: BLE001 - what an arm raises is a result
            fault = survive(error, arm.name, device)
        arm.follows = all(meet(follows, f"{arm.name} follows"))
        if fault := agree(fault, f"{arm.name} called with new values"):
            arm.fail(fault)


def check_parts(arm: Arm, values: FreshValues, device: Timer, *, times: int) -> str:
    """Return how an answer is wrong where most values are as they were before, or an empty text.

    So shows a result that was kept by a few elements of the inputs: most often these did not change.
    """
    if not values.writes_parts or not arm.ready:
        return ""
    values.write([0])
    wrong = []
    try:
        with arm.loaded.context():
            for _ in range(times):
                arm.calls[0]()
                values.write_part(0)
                answer = arm.calls[0]()
                device.synchronize()
                wrong.append(fault_of(answer, values.expected(0, arm.part)))
    except Exception as error:  # noqa: BLE001 - what an arm raises is a result
        return survive(error, arm.name, device)
    first = next(filter(None, wrong), "")
    return f"its answer is wrong where most values are those of the call before: {first}" if first else ""


def wrong_late(arm: Arm, answer: Answer, place: int, values: FreshValues, *, compare: bool = True) -> str:
    """Return how a late answer is wrong, or an empty text.

    It must be right for the values at ``place``, unless ``compare`` is false, and what the same call gives once more.
    An arm that keeps the values that it was bound with answers to those.
    """
    wrong = ""
    found: dict[str, OutputAccuracy] = {}
    if compare and not arm.loaded.speed_of_light and arm.follows:
        wrong, found = compared(answer, values.expected(place, arm.part))
    elif compare and not arm.loaded.speed_of_light:
        wrong = mismatch([answer], [arm.expected[place]], arm.tolerance)
    again = mismatch([answer], [copied(arm.calls[place]())], arm.tolerance)  # always: other ranks wait for the call
    if arm.accuracy is None and found and not wrong:
        arm.accuracy = accuracy_of(found, deterministic=arm.tolerance is None and not again)
    return wrong or (f"the same call gives another one afterwards: {again}" if again else "")


def check_again(arm: Arm, values: FreshValues, places: Sequence[int], device: Timer, *, compare: bool = True) -> str:
    """Return how the arm's answers after timing are wrong, or an empty string. Poisons memory before.

    All sets have new values by then; those at ``places`` are compared with what is right, or, unless ``compare``, one
    must change with its values.
    """
    try:
        with arm.loaded.context():
            device.poison(*sizes_of(arm.expected[0]))
            answers = [copied(call()) for call in arm.calls]
            device.synchronize()
            late = [wrong_late(arm, answers[place], place, values, compare=compare) for place in places]
            if not compare and arm.follows and not arm.loaded.speed_of_light:
                values.write(places[:1])
                newest = copied(arm.calls[places[0]]())
                if not mismatch([newest], [answers[places[0]]], None):
                    late.append("it is the old one")
            wrong = next(filter(None, [*map(nan_in, answers), *late]), "")
    except Exception as error:  # noqa: BLE001 - what an arm raises is a result
        return survive(error, arm.name, device)
    return f"its answer after timing is wrong: {wrong}" if wrong else ""


def fault_of(answer: Answer, expected: ExpectedOutputs) -> str:
    """Return how an answer differs from what is right by more than is allowed, or an empty text."""
    return compared(answer, expected)[0]


def compared(answer: Answer, expected: ExpectedOutputs) -> tuple[str, dict[str, OutputAccuracy]]:
    """Return the same, and the accuracy of each output before the first that is wrong."""
    found: dict[str, OutputAccuracy] = {}
    for whole, wanted in zip(parts(answer), expected, strict=True):
        its = f"its {wanted.output}" if wanted.output else "it"
        if odd := not_plain(whole):
            return odd, found
        if wanted.pick is not None and whole.isnan().any():
            return f"{its} has NaN", found
        part = whole if wanted.pick is None else wanted.pick(whole)
        if part.shape != wanted.exact.shape:
            return f"{its} has shape {list(part.shape)}, expected {list(wanted.exact.shape)}", found
        accuracy, fault = judge(part, wanted)
        if fault:
            return f"{its} has {fault}" if accuracy is None else f"{its} is off: {fault}", found
        assert accuracy is not None
        found[wanted.output] = accuracy
    return "", found


def distance(one: Answer, other: Answer) -> float:
    """Return the root of the sum of all squared differences; infinite where there is NaN."""
    norms = [
        float(torch.linalg.vector_norm(a.float() - b.float())) for a, b in zip(parts(one), parts(other), strict=True)
    ]
    return found if math.isfinite(found := math.hypot(*norms)) else math.inf


def nan_in(answer: Answer) -> str:
    """Return that an answer has NaN, or an empty text."""
    return "it has NaN" if any(bool(part.isnan().any()) for part in parts(answer)) else ""


def copy_values(source: Inputs, target: Inputs) -> None:
    """Write the values of ``source`` into the tensors of ``target``, on the current stream.

    Through ``.data`` the version counter does not change: a cache keyed on it gets no warning.
    """
    for name, tensor in target.items():
        tensor.data.copy_(source[name])


def mismatch(answers: Sequence[Answer], expected: Sequence[Answer], tolerance: Tolerance | None) -> str:
    """Return how ``answers`` differ from ``expected``, on one device, or an empty string. NaN always differs.

    ``tolerance``: what each tensor of an answer may differ by; None: the same bits; empty: nothing but NaN differs.
    """
    wrong: list[torch.Tensor] = []  # read once at the end: one synchronisation for all sets
    for answer, wanted in zip(answers, expected, strict=True):
        got, asked = parts(answer), parts(wanted)
        if len(got) != len(asked):
            return f"expected {len(asked)} tensors, got {len(got)}"
        differ = []
        for number, (part, right) in enumerate(zip(got, asked, strict=True)):
            if odd := not_plain(part):
                return odd
            if part.shape != right.shape or part.dtype != right.dtype:
                return f"expected {right.dtype} of shape {list(right.shape)}, got {part.dtype} of {list(part.shape)}"
            if right.numel() == 0:
                continue
            if tolerance is None:
                differ.append((_bytes(part) != _bytes(right)).any() | part.isnan().any())
            elif not tolerance:
                differ.append(part.isnan().any())
            else:
                differ.append(~(find_shares(part, right, tolerance[min(number, len(tolerance) - 1)]) <= 1).all())
        if differ:
            wrong.append(torch.stack(differ).any())
    if not wrong:
        return ""
    count = int(torch.stack(wrong).sum().item())
    within = "the same bits"
    if tolerance:
        within = f"a difference up to {', '.join(f'{float(each.largest.max()):.3g}' for each in tolerance)}"
    return f"{count} of {len(wrong)} answers differ, expected {within}" if count else ""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def survive(error: Exception, arm: str, device: Timer) -> str:
    """Return the reason to record for ``error``; raises when the GPU context did not survive it."""
    reason = describe_error(error)
    try:
        device.synchronize()
    except Exception as lost:
        raise ProofError(
            f"the GPU context is lost after arm {arm}: {reason}",
            hint="an illegal memory access or a trap ends the process; compute-sanitizer finds where",
        ) from lost
    return reason
