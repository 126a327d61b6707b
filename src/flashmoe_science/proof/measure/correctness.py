"""Is one case right? Calls of one subject, each arranged so that a way of cheating or failing shows.

1. A first call on fresh random inputs, in memory that was filled with NaN.
2. New values written to the same addresses: a result cached by pointer or by shape is the old one.
3. The same values at new addresses: nothing may depend on where the inputs lie.
4. The same call again: the same bits, where that is promised. Gradients are on: before they are off, as where times
   are taken.

On a GPU a fifth answer is a replay of a CUDA graph, captured with other values. Then one call in each stress draw.

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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import ProofError
from ..records.evidence import Accuracy, OutputAccuracy
from ..subject.failure_hints import not_here
from ..subject.operator import Inputs, Operator, stress_draws_of
from ..subject.outputs import known_parts, names_of, not_formed, parts
from ..worker import describe_error
from .shared_state import SharedState

_FRESH_MEMORY = frozenset(
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)

_ELEMENTS_AT_ONCE = 2**27  # 1 GiB in fp64
_REPLAY = "a replay of its CUDA graph"
_FEW = 8  # elements: so few can be the same by chance

# The framework's largest error of fewer elements is luck, and that of a shorter row (tools/simulate_error_scale.py).
_FEW_ELEMENTS = 1024
_LONG_ROW = 32
_LEAST_DRAWS, _MOST_DRAWS, _ELEMENTS_OF_DRAWS = 3, 16, 1 << 22
_SPREAD_OF_FEW = 3.0  # by how much the mean square of n elements may be above its own mean, times sqrt(n)
_SMALL_PART = 256  # of the budget of a whole output: what a row may be off that the framework has right by chance

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
) -> Accuracy:
    """Check one case and return the largest error seen, with its budget. Raises ``WrongResultError``.

    ``seed`` makes the first inputs and ``seed + 1`` the others. ``deterministic``: the subject promises the same bits.
    ``capture`` makes a CUDA graph of a call, whose replay is judged too; None where there is no GPU.
    """
    with torch.no_grad():
        return _check_calls(operator, entry, problem, device, seed, capture, deterministic=deterministic)


def _check_calls(
    operator: Operator,
    entry: Callable[..., Any],
    problem: Any,
    device: str,
    seed: int,
    capture: Capture | None,
    *,
    deterministic: bool,
) -> Accuracy:
    run = _Runner(device)
    inputs = operator.make_inputs(problem, seed=seed, device=device)
    others = operator.make_inputs(problem, seed=seed + 1, device=device)
    require_random(operator, inputs, others)

    call = operator.bind(entry, problem, inputs)
    first = run(call, inputs, find_expected(operator, problem, inputs), "the first call", poison_all=device == "cpu")
    for name, tensor in inputs.items():
        # Through .data the version counter does not change: a cache keyed on it gets no warning.
        tensor.data.copy_(others[name])
    del others
    wanted = find_expected(operator, problem, inputs)
    second = run(call, inputs, wanted, "new values at the same addresses")

    moved = {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in inputs.items()}
    call = operator.bind(entry, problem, moved)
    third = run(call, moved, wanted, "the same values at new addresses")
    with torch.enable_grad():
        fourth = run(call, moved, wanted, "the same call again, with gradients on", poison_all=device == "cpu")
    if capture is not None:
        check_replay(operator, call, problem, moved, capture, seed=seed + 2)
    run.check_earlier_outputs()

    same = all(_same_bits(a, b) for other in (third, fourth) for a, b in zip(second, other, strict=True))
    accuracy = run.accuracy(deterministic=same)
    if deterministic and not same:
        raise WrongResultError("the same input gave other bits, and determinism was promised", accuracy)
    del first
    return accuracy


def check_replay(
    operator: Operator, call: Callable[[], Any], problem: Any, inputs: Inputs, capture: Capture, *, seed: int
) -> None:
    """Capture a call in a CUDA graph, replay it with other values in the same inputs, and judge the answer.

    Times are taken of such replays: a kernel that chooses another one while it is captured is judged by that. A call
    that no graph can hold is gate launch's to report. Raises ``WrongResultError``.
    """
    others = operator.make_inputs(problem, seed=seed, device="cuda")
    try:
        graph = capture(call)
    except Exception:  # noqa: BLE001 - launch says why, where graph times are wanted
        _synchronize("cuda")
        return
    try:
        for name, tensor in inputs.items():
            tensor.data.copy_(others[name])
        wanted = find_expected(operator, problem, inputs)
        graph.poison_outputs()
        graph.replay_once()
        (answer,) = graph.outputs
        for output, each in zip(_check_form(answer, wanted, "cuda", _REPLAY), wanted, strict=True):
            _, fault = judge(output, each)
            if fault:
                raise WrongResultError(f"{each.within(_REPLAY)}: {fault}")
    finally:
        graph.release()


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
                wanted = find_expected(operator, small, inputs)
                call = operator.bind(entry, small, inputs)
                try:
                    runner(call, inputs, wanted, f"stress draw {draw}", poison_all=device == "cpu")
                except refusals:
                    continue
            passed.add((small, draw))
        tried.append(draw)
    return tried


@dataclass(frozen=True)
class Allowed:
    """The errors that one output may have, element by element."""

    largest: torch.Tensor  # absolute error of each element: of the output's shape, or one for each row, ``[..., 1]``
    rms: torch.Tensor | None = None  # root mean square of the errors of each row, ``[..., 1]``


@dataclass(frozen=True)
class Expected:
    """The right answer to one set of inputs, in one output."""

    output: str  # its name; empty where a call gives one tensor
    exact: torch.Tensor  # fp64
    dtype: torch.dtype
    budget: float  # largest absolute error allowed in any element
    low_precision_error: float
    rms_budget: float  # root mean square of all errors allowed
    allowed: Allowed | None = None  # None: too few elements for a budget of each row

    @property
    def nbytes(self) -> int:
        """Bytes of the output."""
        return self.exact.numel() * self.dtype.itemsize

    def within(self, which: str) -> str:
        """Return of what a message is, ``which`` being the call."""
        return f"{which}, {self.output}" if self.output else which


ExpectedOutputs = tuple[Expected, ...]  # one for each tensor of an answer


def find_expected(operator: Operator, problem: Any, inputs: Inputs) -> ExpectedOutputs:
    """Return the exact answer, and the errors allowed.

    These follow from the roundings that no kernel avoids, where the operator knows them, and from the framework's own
    error. Of few elements the latter is luck: then it counts only where nothing else does, and of several draws.
    """
    names = names_of(operator, problem)
    draw = _Draw.of(operator, problem, inputs, names)
    scales = _scales_of(operator, problem, inputs, draw.exact)
    few = any(exact.numel() < _FEW_ELEMENTS for exact in draw.exact)
    more = [] if scales is not None or not few else _more_draws(operator, problem, inputs, names)
    return tuple(
        _expect_by_scale(operator, name, draw, index, scales[index])
        if scales is not None
        else _expect_by_framework(operator, name, draw, index, more)
        for index, name in enumerate(names)
    )


@dataclass(frozen=True)
class _Draw:
    """What the operator says of one set of inputs."""

    exact: tuple[torch.Tensor, ...]
    low: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, operator: Operator, problem: Any, inputs: Inputs, names: Sequence[str]) -> _Draw:
        """Ask it. Raises ``ProofError`` where an answer has the wrong form."""
        exact = known_parts(operator, "exact", operator.exact(problem, inputs), names)
        low = known_parts(operator, "low_precision", operator.low_precision(problem, inputs), names)
        for right, part in zip(exact, low, strict=True):
            if right.shape != part.shape:
                shapes = f"got {list(right.shape)} and {list(part.shape)}"
                raise ProofError(f"exact and low_precision must have one shape, {shapes}")
        return cls(exact, low)

    def budget(self, operator: Operator, index: int) -> float:
        """Return the operator's budget for one output. Raises ``ProofError`` where it is no finite number."""
        budget: object = operator.error_budget(self.exact[index], self.low[index])
        if not isinstance(budget, (int, float)):
            raise ProofError(f"the error budget must be a number, got {budget!r}")
        if not math.isfinite(budget):
            raise ProofError(f"the error budget must be finite, got {budget}: the framework's own run overflows")
        return budget

    def max_error(self, index: int) -> float:
        return max_error(self.low[index], self.exact[index])

    def rms_error(self, index: int) -> float:
        return rms_error(self.low[index], self.exact[index])

    def rounding(self, index: int) -> float:
        """Return the root mean square of a rounding of every element, at its worst."""
        exact, low = self.exact[index], self.low[index]
        return 0.5 * torch.finfo(low.dtype).eps * rms_error(torch.zeros_like(low), exact)


def _more_draws(operator: Operator, problem: Any, inputs: Inputs, names: Sequence[str]) -> list[_Draw]:
    """Return further draws of small inputs: the framework's error in a few elements may be small by luck."""
    device = next(iter(inputs.values())).device.type
    size = sum(tensor.numel() for tensor in inputs.values())
    count = max(_LEAST_DRAWS, min(_MOST_DRAWS, _ELEMENTS_OF_DRAWS // max(1, size)))
    seeds = range(1, count + 1)
    return [_Draw.of(operator, problem, operator.make_inputs(problem, seed=s, device=device), names) for s in seeds]


def _scales_of(
    operator: Operator, problem: Any, inputs: Inputs, exact: Sequence[torch.Tensor]
) -> tuple[Allowed, ...] | None:
    """Return what the operator allows in each element of each output; None where it leaves it to the framework."""
    error_scale = getattr(operator, "error_scale", None)  # not by isinstance: a revision's operator hands it on
    if error_scale is None:
        return None
    scales = tuple(Allowed(*each) for each in error_scale(problem, inputs))
    if len(scales) != len(exact):
        raise ProofError(f"error_scale of {operator.name} must return one for each of {len(exact)} outputs")
    for scale, right in zip(scales, exact, strict=True):
        if scale.largest.shape != right.shape:
            shape, expected = list(scale.largest.shape), list(right.shape)
            raise ProofError(f"error_scale of {operator.name} must have the output's shape {expected}, got {shape}")
        if not bool(torch.isfinite(scale.largest).all()):
            raise ProofError(f"error_scale of {operator.name} must be finite")
    return scales


def _expect_by_scale(operator: Operator, name: str, draw: _Draw, index: int, scale: Allowed) -> Expected:
    """Return what is expected where the operator knows the error of each element.

    Of many elements the framework's error counts too: it shows a coarser P in all of them together.
    """
    exact, low = draw.exact[index], draw.low[index]
    budget = float(scale.largest.max()) if exact.numel() else 0.0
    rms_budget = math.inf
    if exact.numel() >= _FEW_ELEMENTS:
        budget = draw.budget(operator, index)
        rms_budget = 2 * draw.rms_error(index) + draw.rounding(index)
    return Expected(name, exact, low.dtype, budget, draw.max_error(index), rms_budget, scale)


def _expect_by_framework(operator: Operator, name: str, draw: _Draw, index: int, more: Sequence[_Draw]) -> Expected:
    """Return what is expected where all that is known is the framework's own error."""
    exact, low = draw.exact[index], draw.low[index]
    few = exact.numel() < _FEW_ELEMENTS
    draws = [draw, *more] if few else [draw]
    budget = max(each.budget(operator, index) for each in draws)
    squares = sum(each.rms_error(index) ** 2 for each in draws) / len(draws)
    luck = 1 + _SPREAD_OF_FEW / math.sqrt(exact.numel()) if few and exact.numel() else 1.0
    rms_budget = 2 * luck * math.sqrt(squares) + draw.rounding(index)
    largest = max(each.max_error(index) for each in draws)
    return Expected(name, exact, low.dtype, budget, largest, rms_budget, _allowed_of_rows(exact, low, budget))


def _allowed_of_rows(exact: torch.Tensor, low: torch.Tensor, budget: float) -> Allowed | None:
    """Return four times the framework's largest error of each row, and four roundings of its largest element.

    None where rows are short, so that their errors are luck. Where a row has no error a small part of ``budget`` does.
    """
    if exact.dim() < 2 or exact.shape[-1] < _LONG_ROW or exact.numel() == 0:
        return None
    eps, rows = torch.finfo(low.dtype).eps, []
    for right, part in _by_rows(exact, low):
        errors = (part.double() - right).abs().amax(-1, keepdim=True)
        rows.append(4 * errors + 2 * eps * right.abs().amax(-1, keepdim=True) + budget / _SMALL_PART)
    return Allowed(torch.cat(rows).reshape(*exact.shape[:-1], 1))


def _by_rows(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield tensors some rows at a time; a row is the last axis, and a tensor of one row is that of every other."""
    flat = [tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1) for tensor in tensors]
    rows = max(tensor.shape[0] for tensor in flat)
    at_once = max(1, _ELEMENTS_AT_ONCE // max(1, *(tensor.shape[1] for tensor in flat)))
    yield from zip(*(torch.split(tensor.expand(rows, -1), at_once) for tensor in flat), strict=True)


def find_shares(answer: torch.Tensor, right: torch.Tensor, allowed: Allowed) -> torch.Tensor:
    """Return the largest parts of what is allowed that an element takes, and the mean square of a row, ``[2]``.

    1.0 is all of it. NaN stays NaN. On one device it does not synchronise. Tensors that are empty take nothing.
    """
    if right.numel() == 0:
        return torch.zeros(2, dtype=torch.float64, device=right.device)
    found = []
    rms = allowed.largest if allowed.rms is None else allowed.rms
    for some, wanted, largest, of_row in _by_rows(answer.to(right.device), right, allowed.largest, rms):
        errors = (some.double() - wanted.double()).abs()
        rows = _share(errors.square().mean(-1, keepdim=True).sqrt(), of_row).max()
        if allowed.rms is None:
            rows = torch.zeros_like(rows)
        found.append(torch.stack([_share(errors, largest).max(), rows]))
    return torch.stack(found).amax(0)


def _share(errors: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    return torch.where(errors == 0, 0.0, errors / allowed)


def judge(output: torch.Tensor, wanted: Expected) -> tuple[OutputAccuracy | None, str]:
    """Return the accuracy of one output, None where it has no finite error, and its fault, empty where it is right.

    *correct* and *bench* ask this one function.
    """
    if bool((unwritten := torch.isnan(output)).any()):
        return None, f"NaN in {_count(unwritten)}: computed, or never written (fresh memory reads so here)"
    if bool((infinite := torch.isinf(output)).any()):
        return None, f"infinite in {_count(infinite)}"
    of_element = of_row = None
    if wanted.allowed is not None:
        shares = find_shares(output, wanted.exact, wanted.allowed).tolist()
        of_element, of_row = shares[0], shares[1] if wanted.allowed.rms is not None else None
    accuracy = OutputAccuracy(
        max_error=max_error(output, wanted.exact),
        budget=wanted.budget,
        low_precision_error=wanted.low_precision_error,
        element_share=of_element,
        row_share=of_row,
    )
    return accuracy, _fault(output, wanted, accuracy)


def _fault(output: torch.Tensor, wanted: Expected, accuracy: OutputAccuracy) -> str:
    """Return why errors are too large, or an empty text."""
    if accuracy.max_error > wanted.budget:
        errors = (output.double() - wanted.exact).abs()
        return f"error {accuracy.max_error:.3g}, allowed {wanted.budget:.3g}; wrong in {_count(errors > wanted.budget)}"
    if wanted.allowed is not None and (accuracy.element_share or 0.0) > 1.0:
        errors = (output.double() - wanted.exact).abs()
        place = int(_share(errors, wanted.allowed.largest).argmax())
        error, largest = (float(x.expand(errors.shape).flatten()[place]) for x in (errors, wanted.allowed.largest))
        return (
            f"error {error:.3g} in an element where {largest:.3g} is allowed; "
            f"wrong in {_count(errors > wanted.allowed.largest)}"
        )
    if wanted.allowed is not None and wanted.allowed.rms is not None and (accuracy.row_share or 0.0) > 1.0:
        rms = (output.double() - wanted.exact).square().mean(-1, keepdim=True).sqrt()
        too_large = _count(rms > wanted.allowed.rms).replace("elements", "rows")
        return f"root mean square of a row's errors {accuracy.row_share:.3g} times what is allowed, in {too_large}"
    if (rms_all := rms_error(output, wanted.exact)) > wanted.rms_budget:
        reason = f"root mean square of the error {rms_all:.3g}, allowed {wanted.rms_budget:.3g}"
        return f"{reason}: sums of too low a precision show so"
    return ""


def late_tolerance(expected: Sequence[Expected]) -> Allowed:
    """Return what two right answers to the same inputs may differ by, in any set of inputs of which some are known.

    Twice what is allowed: both may be off. Each row has its own, since rows differ by far more than sets do; where rows
    are short it is one number.
    """
    largest = [_largest_of_rows(wanted) for wanted in expected]
    tolerance = 2 * torch.stack(largest).amax(0)
    first = expected[0].allowed
    if first is None or first.rms is None:
        return Allowed(tolerance)
    rows = torch.stack([wanted.allowed.rms.double() for wanted in expected if wanted.allowed is not None])  # type: ignore[union-attr]
    rms = 2 * rows.amax(0)
    return Allowed(tolerance, rms if _has_long_rows(expected[0].exact) else rms.amax().expand(rms.shape))


def _has_long_rows(exact: torch.Tensor) -> bool:
    return exact.dim() > 0 and exact.shape[-1] >= _LONG_ROW


def _largest_of_rows(wanted: Expected) -> torch.Tensor:
    """Return the largest error allowed in each row, ``[..., 1]``."""
    rows = torch.full((*wanted.exact.shape[:-1], 1), wanted.budget, dtype=torch.float64, device=wanted.exact.device)
    if wanted.allowed is not None and wanted.exact.numel() and _has_long_rows(wanted.exact):
        rows = torch.minimum(rows, wanted.allowed.largest.double().amax(-1, keepdim=True))
    return rows


def max_error(answer: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest absolute difference; NaN where either has NaN, 0 for empty tensors."""
    return largest_error(answer, exact).item() if exact.numel() else 0.0


def largest_error(answer: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return ``max_error`` of tensors that are not empty; on one device without a synchronisation."""
    return torch.stack([errors.abs().max() for errors in _errors(answer, exact)]).max()


def rms_error(answer: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the root mean square of the differences, 0 for empty tensors."""
    squares = sum(errors.square().sum().item() for errors in _errors(answer, exact))
    return math.sqrt(squares / max(1, exact.numel()))


def _errors(answer: torch.Tensor, exact: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the differences by parts: a GPU may have no room for all of them in fp64."""
    if answer.shape != exact.shape:
        raise ValueError(f"expected shape {list(exact.shape)}, got {list(answer.shape)}")
    given = (torch.split(tensor.flatten(), _ELEMENTS_AT_ONCE) for tensor in (answer, exact))
    return (some.to(right.device).double() - right.double() for some, right in zip(*given, strict=True))


class _Runner:
    """Calls the subject, checks what comes back, and remembers the worst error."""

    def __init__(self, device: str, refusals: tuple[type[Exception], ...] = ()) -> None:
        self._device = device
        self._refusals = refusals
        self._outputs: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # which call, output, copy made at once
        self._worst: dict[str, OutputAccuracy] = {}  # by output

    def __call__(
        self,
        call: Callable[[], Any],
        inputs: Inputs,
        expected: ExpectedOutputs,
        which: str,
        *,
        poison_all: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Make one call. Raises ``WrongResultError``."""
        before = {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in inputs.items()}
        shared = SharedState()
        poison_free_memory(self._device, *(wanted.nbytes for wanted in expected))
        try:
            with PoisonFreshMemory() if poison_all else contextlib.nullcontext():  # type: ignore[no-untyped-call]
                answer = call()
            _synchronize(self._device)
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
        for output, wanted in zip(outputs, expected, strict=True):
            self._check_error(output, wanted, wanted.within(which))
            copy = output.clone(memory_format=torch.preserve_format)
            self._outputs.append((wanted.within(which), output, copy))
        return outputs

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

    def check_earlier_outputs(self) -> None:
        """Compare every output with the copy made when it came. Raises ``WrongResultError``."""
        for which, output, copy in self._outputs:
            if not _same_bits(output, copy):
                reason = f"the output of {which} was changed by a later call: it lies in memory that calls share"
                raise WrongResultError(reason)


def accuracy_of(found: Mapping[str, OutputAccuracy], *, deterministic: bool) -> Accuracy:
    """Return the accuracy of a case from the error of each output; one without a name is all that there is."""
    name, worst = max(found.items(), key=lambda item: item[1].share)
    outputs = {} if tuple(found) == ("",) else dict(found)
    return Accuracy(**worst.model_dump(), deterministic=deterministic, output=name, outputs=outputs)


def _check_form(answer: Any, expected: ExpectedOutputs, device: str, which: str) -> tuple[torch.Tensor, ...]:
    """Return the outputs. Raises ``WrongResultError``."""
    if wrong := not_formed(answer, [wanted.output for wanted in expected]):
        raise WrongResultError(f"{which}: {wrong}")
    outputs = parts(answer)
    for output, wanted in zip(outputs, expected, strict=True):
        _check_output(output, wanted, device, wanted.within(which))
    return outputs


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
        return ""
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


def _count(mask: torch.Tensor) -> str:
    """Return how many elements are marked and where the first one is."""
    first = torch.unravel_index(mask.flatten().to(torch.uint8).argmax(), mask.shape)
    return f"{int(mask.sum())} of {mask.numel()} elements, the first at {[int(i) for i in first]}"


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bits: NaN equals itself, and 0.0 differs from -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _FRESH_MEMORY and isinstance(out, torch.Tensor) and out.is_floating_point():
            out.fill_(math.nan)
        return out
