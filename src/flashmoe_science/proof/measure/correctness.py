"""Is one case right? Calls of one subject, each arranged so that a way of cheating or failing shows.

1. A first call on fresh random inputs, in memory that was filled with NaN.
2. New values written to the same addresses: a result cached by pointer or by shape is the old one.
3. The same values at new addresses, and NaN at the old ones: nothing may depend on where the inputs lie.
4. The same call again: the same bits, where that is promised. Gradients are on: before they are off, as where times
   are taken.

On a GPU a fifth answer is a replay of a CUDA graph, captured with other values; where an exact answer takes long, a
drawn part of it is compared. Then one call in each stress draw.

Fresh memory holds NaN: free memory is filled with it, and on a CPU all that torch hands out in calls 1 and 4.

After each: plain tensors, one for each output, nothing changed that other arms share, inputs unchanged bit for bit, no
NaN, and errors within four bounds: that of each element and of each row's root mean square (RMS), by the operator's
``error_scale`` or the framework's error in that row; and of all elements together, the largest within the operator's
budget and the RMS within twice the framework's (and one rounding). An early row of a causal mask has elements hundreds
of times those of a late one, so that only the first two see a fault there; the last reveals a low-precision
accumulator. After all: the outputs of earlier calls unchanged.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import ProofError
from ..records.evidence import Accuracy, OutputAccuracy
from ..spent import spending
from ..subject.failure_hints import not_here
from ..subject.operator import Inputs, Operator, Part, part_of, stress_draws_of
from ..subject.outputs import not_formed, parts
from ..worker import agree, describe_error, meet, rank_here
from .allowed_error import Expected, ExpectedOutputs, Whole, find_expected, judge, truth_of_part
from .shared_state import SharedState

_FRESH_MEMORY = frozenset(
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)

_REPLAY = "a replay of its CUDA graph"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by the bytes of an element; int64 of others
_SLOW_TRUTH_S = 5.0  # where an exact answer takes longer, a replay is compared in a drawn part of it
_FEW = 8  # elements: so few can be the same by chance

NAN_BYTE = 0xFF  # bytes of it read as NaN in every floating-point format, of 16 bits too


class NotPossibleHereError(Exception):
    """A CPU cannot run this call: nothing is shown, for or against it."""


class WrongResultError(Exception):
    """The subject failed a check. ``accuracy`` is None where no finite error exists."""

    def __init__(self, reason: str, accuracy: Accuracy | None = None) -> None:
        super().__init__(reason)
        self.accuracy = accuracy


Capture = Callable[[Callable[[], Any]], Any]  # of one call: a ``measure.Graph``


def check_case(
    operator: Operator,
    entry: Callable[..., Any],
    problem: Any,
    *,
    device: str,
    seed: int,
    deterministic: bool,
    capture: Capture | None = None,
    on_truth: Callable[[float], None] = lambda _seconds: None,
) -> Accuracy:
    """Check one case and return the largest error seen, with its budget. Raises ``WrongResultError``.

    ``seed`` makes the first inputs and ``seed + 1`` the others. ``deterministic``: the subject promises the same bits.
    ``capture`` makes a CUDA graph of a call, whose replay is judged too; None where there is no GPU. ``on_truth`` is
    told the seconds that an exact answer takes.
    """
    with torch.no_grad():
        return _check_calls(operator, entry, problem, device, seed, capture, on_truth, deterministic=deterministic)


def _check_calls(
    operator: Operator,
    entry: Callable[..., Any],
    problem: Any,
    device: str,
    seed: int,
    capture: Capture | None,
    on_truth: Callable[[float], None],
    *,
    deterministic: bool,
) -> Accuracy:
    part = part_of(operator, problem, entry, rank_here())
    run = _Runner(device)
    inputs = _make_inputs(operator, problem, seed, device)
    others = _make_inputs(operator, problem, seed + 1, device)
    require_random(operator, inputs, others)

    call = operator.bind(entry, problem, inputs)
    begun = time.monotonic()
    wanted = find_expected(operator, problem, inputs, part)
    _synchronize(device)
    slow = max(meet(time.monotonic() - begun, "the truth took")) > _SLOW_TRUTH_S
    run(call, inputs, wanted, "the first call", poison_all=device == "cpu")
    for name, tensor in inputs.items():
        # Through .data the version counter does not change: a cache keyed on it gets no warning.
        tensor.data.copy_(others[name])
    del others, wanted  # fp64 of two may not fit
    begun = time.monotonic()
    wanted = find_expected(operator, problem, inputs, part)
    _synchronize(device)
    on_truth(time.monotonic() - begun)  # the first one loaded libraries
    second = run(call, inputs, wanted, "new values at the same addresses")

    moved, before = _copied(inputs), _copied(inputs)  # the second is kept from the subject
    call = operator.bind(entry, problem, moved)
    _leave(inputs, wanted)
    del inputs
    third = run(call, moved, wanted, "the same values at new addresses", before=before)
    again = "the same call again, with gradients on"
    with torch.enable_grad():
        fourth = run(call, moved, wanted, again, before=before, poison_all=device == "cpu")
    del before
    same = all(_same_bits(a, b) for other in (third, fourth) for a, b in zip(second, other, strict=True))
    del second, third, fourth, wanted
    accuracy, fault = run.accuracy(deterministic=same), ""
    shown: Accuracy | None = accuracy
    try:
        if capture is not None:
            compare = run.find_changed_outputs
            check_replay(
                operator, call, problem, moved, capture, seed=seed + 2, part=part, replayed=compare, sampled=slow
            )
        if changed := run.find_changed_outputs():
            raise WrongResultError(changed)
    except WrongResultError as error:
        fault, shown = str(error), None
    if not fault and deterministic and not same:
        fault = "the same input gave other bits, and determinism was promised"
    if fault := agree(fault, "after all calls"):
        raise WrongResultError(fault, shown)
    return accuracy


@spending("a replay")
def check_replay(
    operator: Operator,
    call: Callable[[], Any],
    problem: Any,
    inputs: Inputs,
    capture: Capture,
    *,
    seed: int,
    part: Part | None = None,
    replayed: Callable[[], object] = lambda: None,
    sampled: bool = False,
) -> None:
    """Capture a call in a CUDA graph, replay it with other values in the same inputs, and judge the answer.

    Times are taken of such replays: a kernel that chooses another one while it is captured is judged by that. A call
    that no graph can hold is gate launch's to report. ``replayed`` is called once that is done, before what is right
    takes its memory. ``sampled``: compare a part that ``seed`` draws, where the operator knows parts: what is right of
    all takes long, and the calls before were compared as a whole. Raises ``WrongResultError``.
    """
    graph = None
    try:
        graph = capture(call)
    except Exception:  # noqa: BLE001 - launch says why, where graph times are wanted
        _synchronize("cuda")
    if not all(meet(graph is not None, "a graph captured")) or graph is None:
        return
    try:
        others = _make_inputs(operator, problem, seed, "cuda")
        for name, tensor in inputs.items():
            tensor.data.copy_(others[name])
        graph.poison_outputs()
        graph.replay_once()
        replayed()
        overwritten = [name for name, tensor in inputs.items() if not _same_bits(tensor, others[name])]
        for name in overwritten:  # what is right is of what the replay was given, and all ranks work it out
            inputs[name].data.copy_(others[name])
        del others
        truth = truth_of_part(operator, problem, inputs, seed=seed) if sampled else Whole(operator, problem, inputs)
        wanted = truth.expected(part)
        if overwritten:
            raise WrongResultError(f"{_REPLAY}: the input {overwritten[0]} was overwritten")
        (answer,) = graph.outputs
        for output, each in zip(_check_form(answer, wanted, "cuda", _REPLAY), wanted, strict=True):
            _, fault = judge(output, each)
            if fault:
                raise WrongResultError(f"{each.within(_REPLAY)}: {fault}")
    finally:
        graph.release()


@spending("stress draws")
def check_stress(
    operator: Operator,
    entry: Callable[..., Any],
    problem: Any,
    *,
    device: str,
    seed: int,
    not_served: Sequence[str],
    refusals: tuple[type[Exception], ...] = (),
    passed: set[Hashable],
) -> list[str]:
    """Check one call in each stress draw of the operator, and return the names of those that apply here.

    Args:
        operator: what lists the draws.
        entry: the subject.
        problem: the case; a draw mostly has a smaller problem of the same kind.
        device: "cuda" or "cpu".
        seed: of the inputs.
        not_served: draws that are left out.
        refusals: what the subject may raise instead, because it documents that it does not serve such a layout.
        passed: problems and draws that an earlier case has passed; they are left out, and new ones are added.

    Raises:
        WrongResultError: the reason names the draw.
    """
    tried = []
    for draw in stress_draws_of(operator):
        found = None if draw in not_served else operator.stressed(problem, draw, seed=seed, device=device)  # type: ignore[attr-defined]
        if found is None:
            continue
        small, inputs = found
        if (small, draw) not in passed:
            runner = _Runner(device, refusals)
            with torch.no_grad():
                wanted = find_expected(operator, small, inputs, part_of(operator, small, entry, rank_here()))
                call = operator.bind(entry, small, inputs)
                try:
                    runner(call, inputs, wanted, f"stress draw {draw}", poison_all=device == "cpu")
                except refusals:
                    continue
            passed.add((small, draw))
        tried.append(draw)
    return tried


class _Runner:
    """Calls the subject, checks what comes back, and remembers the worst error."""

    def __init__(self, device: str, refusals: tuple[type[Exception], ...] = ()) -> None:
        self._device = device
        self._refusals = refusals
        self._outputs: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # which call, output, copy made at once
        self._changed = ""
        self._worst: dict[str, OutputAccuracy] = {}  # by output

    def __call__(
        self,
        call: Callable[[], Any],
        inputs: Inputs,
        expected: ExpectedOutputs,
        which: str,
        *,
        before: Inputs | None = None,
        poison_all: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Make one call. Raises ``WrongResultError``, on all ranks where one of them is wrong.

        ``before``: a copy of the inputs, where there is one.
        """
        fault, accuracy = "", None
        outputs: tuple[torch.Tensor, ...] = ()
        try:
            outputs = self._call(call, inputs, expected, which, before, poison_all=poison_all)
        except WrongResultError as error:
            fault, accuracy = str(error), error.accuracy
        if fault := agree(fault, which):
            raise WrongResultError(fault, accuracy)
        return outputs

    def _call(
        self,
        call: Callable[[], Any],
        inputs: Inputs,
        expected: ExpectedOutputs,
        which: str,
        before: Inputs | None,
        *,
        poison_all: bool,
    ) -> tuple[torch.Tensor, ...]:
        if before is None:
            before = _copied(inputs)
        shared = SharedState()
        poison_free_memory(self._device, *(wanted.nbytes for wanted in expected))
        try:
            with PoisonFreshMemory() if poison_all else contextlib.nullcontext():  # type: ignore[no-untyped-call]
                answer = self._answer(call)
        except self._refusals:
            raise
        except Exception as error:
            if self._device == "cpu" and (why := not_here(describe_error(error), error)):
                raise NotPossibleHereError(f"{why}: {describe_error(error)}") from error
            raise WrongResultError(f"{which}: raised {describe_error(error)}") from error
        if changes := shared.changes():
            raise WrongResultError(f"{which} changed what all arms share: {changes}")
        outputs = _check_form(answer, expected, self._device, which)
        for name, tensor in inputs.items():
            if not _same_bits(tensor, before[name]):
                raise WrongResultError(f"{which}: the input {name} was overwritten")
        del before
        for output, wanted in zip(outputs, expected, strict=True):
            self._check_error(output, wanted, wanted.within(which))
            self._outputs.append((wanted.within(which), output, self._copy_of(output)))
        return outputs

    @spending("calls")
    def _answer(self, call: Callable[[], Any]) -> Any:
        answer = call()
        _synchronize(self._device)
        return answer

    @spending("comparisons")
    def _check_error(self, output: torch.Tensor, wanted: Expected, which: str) -> None:
        found, fault = judge(output, wanted)
        if fault:
            accuracy = None if found is None else Accuracy(**found.model_dump(), output=wanted.output)
            raise WrongResultError(f"{which}: {fault}", accuracy)
        assert found is not None
        before = self._worst.get(wanted.output)
        if before is None or found.share >= before.share:
            self._worst[wanted.output] = found

    def accuracy(self, *, deterministic: bool) -> Accuracy:
        """Return the largest errors of all calls."""
        return accuracy_of(self._worst, deterministic=deterministic)

    def find_changed_outputs(self) -> str:
        """Return which call's output a later call changed, or an empty text. No output is kept after that."""
        outputs, self._outputs = self._outputs, []
        for which, output, copy in outputs:
            if not self._changed and not _same_bits(output, copy):
                self._changed = f"the output of {which} was changed by a later call: it lies in memory that calls share"
        return self._changed

    def _copy_of(self, output: torch.Tensor) -> torch.Tensor:
        """Return a copy, or that of an equal output: all gradients of large experts are large."""
        equal = (copy for _, _, copy in reversed(self._outputs) if _same_bits(output, copy))
        found = next(equal, None)
        return output.clone(memory_format=torch.preserve_format) if found is None else found


def accuracy_of(found: Mapping[str, OutputAccuracy], *, deterministic: bool) -> Accuracy:
    """Return the accuracy of a case from the error of each output; one without a name is all that there is."""
    name, worst = max(found.items(), key=lambda item: item[1].share)
    outputs = {} if tuple(found) == ("",) else dict(found)
    return Accuracy(**worst.model_dump(), deterministic=deterministic, output=name, outputs=outputs)


def _check_form(answer: Any, expected: ExpectedOutputs, device: str, which: str) -> tuple[torch.Tensor, ...]:
    """Return the outputs, or the parts of them that are compared. Raises ``WrongResultError``."""
    if wrong := not_formed(answer, [wanted.output for wanted in expected]):
        raise WrongResultError(f"{which}: {wrong}")
    outputs = []
    for output, wanted in zip(parts(answer), expected, strict=True):
        if wanted.pick is not None and not not_plain(output) and output.isnan().any():
            raise WrongResultError(f"{wanted.within(which)}: NaN")
        outputs.append(output if wanted.pick is None else wanted.pick(output))
        _check_output(outputs[-1], wanted, device, wanted.within(which))
    return tuple(outputs)


def _check_output(output: torch.Tensor, wanted: Expected, device: str, which: str) -> None:
    if wrong := not_plain(output):
        raise WrongResultError(f"{which}: {wrong}")
    for name, got, expected in (
        ("shape", tuple(output.shape), tuple(wanted.exact.shape)),
        ("dtype", output.dtype, wanted.dtype),
        ("device", output.device.type, device),
    ):
        if got != expected:
            raise WrongResultError(f"{which}: output has {name} {got}, expected {expected}")


def not_plain(output: torch.Tensor) -> str:
    """Return why ``output`` may be work that is put off until somebody looks at it, or an empty text."""
    if type(output) is torch.Tensor:
        return "returned a tensor whose sign is put off" if output.is_neg() or output.is_conj() else ""
    return f"returned {type(output).__name__}, expected a plain tensor: one of a class of its own can put work off"


def require_random(operator: Operator, inputs: Inputs, others: Inputs) -> None:
    """Raise ``ProofError`` where two seeds give the same inputs, or inputs whose values are all the same.

    Old values at an address could then not be told from new ones, and a GPU is faster on zeros than on other values.
    """
    if sum(tensor.numel() for tensor in inputs.values()) < _FEW:
        return
    if all(_same_bits(tensor, others[name]) for name, tensor in inputs.items()):
        hint = "draw them from a generator with the seed that make_inputs is given"
        raise ProofError(f"inputs must follow the seed, and {operator.name} makes the same from two seeds", hint=hint)
    drawn = [tensor for tensor in inputs.values() if tensor.is_floating_point() and tensor.numel() > 1]
    if drawn and all(bool((tensor == tensor.flatten()[0]).all()) for tensor in drawn):
        hint = "zeros and constants are faster than data, and hide what is confused"
        raise ProofError(f"inputs must be random, and all of those of {operator.name} are constant", hint=hint)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bits: NaN equals itself, and 0.0 differs from -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kind = _BITS.get(a.element_size(), torch.int64)  # not bytes: torch marks each element that differs
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@spending("inputs")
def _make_inputs(operator: Operator, problem: Any, seed: int, device: str) -> dict[str, torch.Tensor]:
    return operator.make_inputs(problem, seed=seed, device=device)


def _copied(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in inputs.items()}


def _leave(inputs: Inputs, wanted: ExpectedOutputs) -> None:
    """Fill inputs with NaN that no call is given again: who kept them reads that. What is right may be one of them."""
    kept = {each.exact.untyped_storage().data_ptr() for each in wanted}
    for tensor in inputs.values():
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in kept:
            tensor.data.fill_(math.nan)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@spending("memory filled with NaN")
def poison_free_memory(device: str, *output_bytes: int) -> None:
    """Fill memory with NaN and give it back, so that what the subject allocates next holds NaN where it does not write.

    The allocator hands out blocks by size: some of every size, and several of each output's own.
    """
    sizes = [512 << step for step in range(17)]  # 512 bytes to 32 MiB
    room = sys.maxsize
    if device == "cuda":
        # Blocks that held the right answer a moment ago go back to the driver: an unwritten tile must not inherit it.
        torch.cuda.empty_cache()
        room = torch.cuda.mem_get_info()[0]
    for size in output_bytes:
        own = max(size, 512)
        sizes += [own] * poisoned_blocks(own, room // len(output_bytes))
    blocks = [torch.full((size,), NAN_BYTE, device=device, dtype=torch.uint8) for size in sizes]
    _synchronize(device)
    del blocks


def poisoned_blocks(size: int, room: int) -> int:
    """Return how many blocks of an output are filled: up to eight, as half of ``room`` holds, and one at least."""
    return max(1, min(8, room // 2 // size))


class PoisonFreshMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fill everything that ``torch.empty`` and its kin return with NaN, also where C++ calls them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, which takes 2 s; under a mode it compiles nothing anyway

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _FRESH_MEMORY and isinstance(out, torch.Tensor) and out.is_floating_point():
            out.fill_(math.nan)
        return out
