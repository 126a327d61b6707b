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
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch

from ..errors import ProofError
from .check import not_plain
from .evidence import Accuracy, TimeKind
from .operator import Inputs, Operator, Rival
from .shared_state import SharedState
from .subject import Subject, load_entry
from .worker import describe_error

Call = Callable[[], torch.Tensor]
Role = Literal["subject", "baseline", "control"]

CONTROL_SUFFIX = "#2"


class Device(Protocol):
    """What checking an arm needs of a GPU. ``measure.CudaDevice`` is the real one."""

    name: str  # as torch names it

    def synchronize(self) -> None:
        """Wait for all work on all streams; raises when the context is lost."""

    def poison(self, nbytes: int) -> None:
        """Fill the free memory that the next outputs will get with NaN; an output takes ``nbytes``."""

    def peak_bytes(self, call: Call) -> int:
        """Return how much memory one call allocates at its peak."""

    def streams(self) -> Sequence[AbstractContextManager[Any]]:
        """Return contexts, each of which makes one stream current: the default one and another."""

    def sleep(self) -> None:
        """Make the current stream wait for longer than the host needs to enqueue a call."""


@dataclass(frozen=True)
class Loaded:
    """An implementation as it was imported, once in a process, for all cases."""

    name: str
    role: Role
    entry: Callable[..., torch.Tensor] | None
    status: Literal["loaded", "unavailable", "failed"]
    reason: str = ""
    version: str = ""
    deterministic: bool = False  # promised: the same input gives the same bits
    rival: Rival | None = None

    def context(self) -> AbstractContextManager[object]:
        """Return the context in which every call is made, e.g. a pinned backend."""
        return contextlib.nullcontext() if self.rival is None else self.rival.context()

    @property
    def yardstick(self) -> bool:
        """Whether it does other work, whose answer is none to the problem: only that it repeats is checked."""
        return bool(getattr(self.rival, "yardstick", False))

    def refusal(self, problem: Any) -> str | None:
        """Return why it cannot serve ``problem``, or None."""
        return None if self.rival is None else self.rival.refusal(problem)


@dataclass(frozen=True)
class Truth:
    """What the answer to one set of inputs should be."""

    exact: torch.Tensor  # fp64
    budget: float  # largest absolute error allowed
    low_precision_error: float
    output_bytes: int


@dataclass
class Arm:
    """One implementation, bound to the inputs of one case."""

    loaded: Loaded
    name: str
    role: Role
    status: Literal["ready", "refused", "unavailable", "failed", "not measured"] = "ready"
    reason: str = ""
    calls: list[Call] = field(default_factory=list)  # one for each set of inputs
    expected: list[torch.Tensor] = field(default_factory=list)  # its first answer to each set
    tolerance: float | None = None  # of a later answer; None: the same bits
    follows: bool = True  # its answers follow the inputs' values; a baseline may have laid out copies when it was bound
    accuracy: Accuracy | None = None
    peak_bytes: int | None = None
    lost: dict[TimeKind, str] = field(default_factory=dict)  # kind of time -> why it could not be taken

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


def load_arms(subject: Subject, operator: Operator, baselines: Sequence[str]) -> list[Loaded]:
    """Import the subject and the baselines, the subject first. What cannot be imported says why.

    Raises:
        ProofError: a baseline is unknown, or two arms have one name.
    """
    names = [subject.name, *baselines]
    if len(set(names)) < len(names):
        raise ProofError(f"subject and baselines must have names of their own, got {', '.join(names)}")
    loaded = [_load_subject(subject)]
    rivals = operator.rivals()
    for name in baselines:
        if name not in rivals:
            raise ProofError(f"baseline must be one of {', '.join(rivals)}, got {name!r}")
        loaded.append(load_rival(rivals[name]))
    return loaded


def _load_subject(subject: Subject) -> Loaded:
    try:
        entry = load_entry(subject)
    except Exception as error:  # noqa: BLE001 - what a subject raises is a result
        return Loaded(subject.name, "subject", None, "failed", describe_error(error))
    return Loaded(subject.name, "subject", entry, "loaded", deterministic=subject.deterministic)


def load_rival(rival: Rival) -> Loaded:
    """Import one baseline; a missing package makes it unavailable, any other error failed."""
    try:
        entry = rival.load()
        version = rival.version()
    except ImportError as error:
        return Loaded(rival.name, "baseline", None, "unavailable", str(error).strip() or "cannot be imported")
    except Exception as error:  # noqa: BLE001 - what a rival raises is a result
        return Loaded(rival.name, "baseline", None, "failed", describe_error(error))
    return Loaded(rival.name, "baseline", entry, "loaded", version=version, rival=rival)


def find_truth(operator: Operator, problem: Any, inputs: Inputs) -> Truth:
    """Return the exact answer, the error allowed, and what the framework's own low-precision run makes of it."""
    exact = operator.exact(problem, inputs)
    low = operator.low_precision(problem, inputs)
    budget = float(operator.error_budget(exact, low))
    return Truth(exact, budget, max_error(low, exact), low.numel() * low.element_size())


def prepare_arm(
    loaded: Loaded,
    operator: Operator,
    problem: Any,
    input_sets: Sequence[Inputs],
    truths: Mapping[int, Truth],
    device: Device,
) -> Arm:
    """Bind ``loaded`` to every set of inputs, call it, and check its answers.

    Compiling, tuning and the first allocation happen here. The answers to the sets that ``truths`` knows are compared
    with the exact ones; the answers to all sets are kept, to be compared with those after timing.
    """
    tolerance = None if loaded.deterministic else 2 * max(truth.budget for truth in truths.values())
    output_bytes = max(truth.output_bytes for truth in truths.values())
    arm = Arm(loaded, loaded.name, loaded.role, tolerance=tolerance)
    if loaded.entry is None:
        arm.status, arm.reason = "unavailable" if loaded.status == "unavailable" else "failed", loaded.reason
        return arm
    try:
        refusal = loaded.refusal(problem)
        if refusal is not None:
            arm.status, arm.reason = "refused", refusal
            return arm
        shared = SharedState()
        with loaded.context():
            arm.calls = [operator.bind(loaded.entry, problem, inputs) for inputs in input_sets]
            arm.calls[0]()  # compiles, tunes, allocates
            device.synchronize()
            arm.peak_bytes = device.peak_bytes(arm.calls[0])
            device.poison(output_bytes)
            for call in arm.calls:
                answer = call()
                if wrong := not_plain(answer):
                    arm.fail(wrong)
                    return arm
                device.synchronize()  # here work on any stream is waited for: check_stream says what is wrong with it
                arm.expected.append(answer.clone())
            device.poison(output_bytes)
            again = arm.calls[0]().clone()
            device.synchronize()
        if changes := shared.changes():
            arm.fail(f"a call of it changes what all arms share: {changes}")
            return arm
        repeats = mismatch([again], arm.expected[:1], None) == ""
        judged = {} if loaded.yardstick else truths
        problem_found = next(
            (wrong for index, truth in judged.items() if (wrong := _judge_answer(arm, index, truth, repeats=repeats))),
            "",
        )
    except Exception as error:  # noqa: BLE001 - what an arm raises is a result
        problem_found = survive(error, arm.name, device)
    if problem_found:
        arm.fail(problem_found)
    return arm


def _judge_answer(arm: Arm, index: int, truth: Truth, *, repeats: bool) -> str:
    """Return what is wrong with the answer to one set, or an empty string; records the worst accuracy of all sets."""
    first = arm.expected[index]
    if first.shape != truth.exact.shape:
        return f"its answer must have shape {list(truth.exact.shape)}, got {list(first.shape)}"
    error = max_error(first, truth.exact)
    if math.isnan(error):
        return "its answer has NaN"
    accuracy = Accuracy(
        max_error=error, budget=truth.budget, low_precision_error=truth.low_precision_error, deterministic=repeats
    )
    if arm.accuracy is None or accuracy.share > arm.accuracy.share:
        arm.accuracy = accuracy
    if error > truth.budget:
        return f"its answer is off by {error:.3g}, allowed are {truth.budget:.3g}"
    if arm.loaded.deterministic and not repeats:
        return "the same input gave other bits the second time, and the same bits are promised"
    return ""


def control_of(arms: Sequence[Arm]) -> Loaded | None:
    """Return what the control runs: a second copy of the first baseline that is ready here."""
    return next((arm.loaded for arm in arms if arm.role == "baseline" and arm.ready), None)


def check_stream(arm: Arm, operator: Operator, problem: Any, inputs: Inputs, device: Device, *, seed: int) -> str:
    """Return why the arm's work is not ordered with the stream it is called on, or an empty string.

    On the calling stream: a sleep, fresh values into the bound inputs, the call, a copy of its answer. Work that
    another stream does without waiting reads the old values, or is not done when the answer is copied.
    """
    assert arm.loaded.entry is not None
    saved: Inputs | None = None
    try:
        fresh = operator.make_inputs(problem, seed=seed, device=device.name)
        saved = {name: tensor.clone() for name, tensor in inputs.items()}
        with arm.loaded.context():
            expected = operator.bind(arm.loaded.entry, problem, fresh)().clone()
            device.synchronize()
            for stream in device.streams():
                device.poison(expected.numel() * expected.element_size())
                device.synchronize()
                with stream:
                    device.sleep()
                    copy_values(fresh, inputs)
                    answer = arm.calls[0]().clone()
                device.synchronize()
                wrong = mismatch([answer], [expected], arm.tolerance)
                copy_values(saved, inputs)
                device.synchronize()
                if wrong:
                    return f"its work is not ordered with the stream that it is called on: {wrong}"
    except Exception as error:  # noqa: BLE001 - what an arm raises is a result
        reason = survive(error, arm.name, device)
        if saved is not None:
            copy_values(saved, inputs)
        return f"called on another stream: {reason}"
    return ""


def check_again(arm: Arm, device: Device) -> str:
    """Return how the arm's answers differ from its first, or an empty string. Poisons memory before."""
    try:
        with arm.loaded.context():
            device.poison(max(tensor.numel() * tensor.element_size() for tensor in arm.expected))
            answers = [call().clone() for call in arm.calls]
            device.synchronize()
            wrong = mismatch(answers, arm.expected, arm.tolerance)
    except Exception as error:  # noqa: BLE001 - what an arm raises is a result
        return survive(error, arm.name, device)
    return f"its answer after timing is not the one before: {wrong}" if wrong else ""


def find_followers(input_sets: Sequence[Inputs], arms: Sequence[Arm], device: Device) -> None:
    """Roll the values once, and see which arms answer to the new ones.

    The subject must. A baseline that prefers another memory layout has copied its inputs when it was bound, outside of
    the timing, and answers to those. An arm that answers to neither fails.
    """
    if len(input_sets) < 2:
        return
    _move_values(input_sets)
    for arm in arms:
        old, new = arm.expected[:2]
        try:
            with arm.loaded.context():
                answer = arm.calls[0]().clone()
                device.synchronize()
                arm.follows = not mismatch([answer], [new], arm.tolerance)
                kept = not mismatch([answer], [old], arm.tolerance)
        except Exception as error:  # noqa: BLE001 - what an arm raises is a result
            arm.fail(survive(error, arm.name, device))
            continue
        if arm.follows:
            _roll_expected(arm)
        elif not kept:
            arm.fail("its answer to new values at the same addresses is wrong")
        elif arm.role == "subject":
            arm.fail("its answer to new values at the same addresses is the old one")


def roll_values(input_sets: Sequence[Inputs], arms: Sequence[Arm]) -> None:
    """Move the values of every set of inputs to the set before it, and the answers expected along with them.

    So every round has new values at the same addresses, and the same values at new addresses.
    """
    if len(input_sets) < 2:
        return
    _move_values(input_sets)
    for arm in arms:
        if arm.follows:
            _roll_expected(arm)


def _move_values(input_sets: Sequence[Inputs]) -> None:
    first = {name: tensor.clone() for name, tensor in input_sets[0].items()}
    for target, source in pairwise(input_sets):
        copy_values(source, target)
    copy_values(first, input_sets[-1])


def swap_values(input_sets: Sequence[Inputs], arms: Sequence[Arm], place: int, other: int) -> None:
    """Swap the values of two sets of inputs, on the current stream, and the answers expected along with them."""
    first, second = input_sets[place], input_sets[other]
    kept = {name: tensor.clone() for name, tensor in first.items()}
    copy_values(second, first)
    copy_values(kept, second)
    for arm in arms:
        if arm.follows:
            arm.expected[place], arm.expected[other] = arm.expected[other], arm.expected[place]


def _roll_expected(arm: Arm) -> None:
    arm.expected[:] = arm.expected[1:] + arm.expected[:1]


def copy_values(source: Inputs, target: Inputs) -> None:
    """Write the values of ``source`` into the tensors of ``target``, on the current stream.

    Through ``.data`` the version counter stands still: a cache keyed on it too is not warned.
    """
    for name, tensor in target.items():
        tensor.data.copy_(source[name])


def max_error(answer: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest absolute difference; NaN where either has NaN, 0 for empty tensors."""
    if exact.numel() == 0:
        return 0.0
    return (answer.to(exact.device, torch.float64) - exact.to(torch.float64)).abs().max().item()


def mismatch(answers: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float | None) -> str:
    """Return how ``answers`` differ from ``expected``, or an empty string. NaN always differs.

    Args:
        answers: on one device.
        expected: as many, on the same device.
        tolerance: largest absolute difference; None: the same bits.
    """
    wrong: list[torch.Tensor] = []  # read once at the end: one synchronisation for all sets
    for answer, wanted in zip(answers, expected, strict=True):
        if odd := not_plain(answer):
            return odd
        if answer.shape != wanted.shape or answer.dtype != wanted.dtype:
            return f"expected {wanted.dtype} of shape {list(wanted.shape)}, got {answer.dtype} of {list(answer.shape)}"
        if wanted.numel() == 0:
            continue
        if tolerance is None:
            wrong.append((_bytes(answer) != _bytes(wanted)).any() | answer.isnan().any())
        else:
            wrong.append(~((answer.double() - wanted.double()).abs().max() <= tolerance))
    if not wrong:
        return ""
    count = int(torch.stack(wrong).sum().item())
    allowed = "the same bits" if tolerance is None else f"a difference up to {tolerance:.3g}"
    return f"{count} of {len(wrong)} answers differ, expected {allowed}" if count else ""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def survive(error: Exception, arm: str, device: Device) -> str:
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
