"""Is one case right? Calls of one subject, each arranged so that a way of cheating or failing shows.

1. A first call on fresh random inputs, in memory that was filled with NaN.
2. New values written to the same addresses: a result cached by pointer or by shape is the old one.
3. The same values at new addresses: nothing may depend on where the inputs lie.
4. The same call again: the same bits, where that is promised.

Fresh memory holds NaN: free memory is filled with it, and on a CPU all that torch hands out in calls 1 and 4.

After each: a plain tensor, nothing changed that other arms share, inputs unchanged bit for bit, no NaN, largest error
within the operator's budget, and root mean square of the error within twice the framework's (and one rounding). The
largest error is the luck of one element; the mean square shows an accumulator of low precision. After all: the outputs
of earlier calls unchanged.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ProofError
from .evidence import Accuracy
from .operator import Inputs, Operator
from .shared_state import SharedState
from .worker import describe_error

_FRESH_MEMORY = frozenset(
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)

_FEW = 8  # elements: so few can be the same by chance

NAN_BYTE = 0xFF  # bytes of it read as NaN in every floating-point format, of 16 bits too


class WrongResultError(Exception):
    """The subject failed a check. ``accuracy`` is None where no finite error exists."""

    def __init__(self, reason: str, accuracy: Accuracy | None = None) -> None:
        super().__init__(reason)
        self.accuracy = accuracy


def check_case(
    operator: Operator, entry: Callable[..., Any], problem: Any, *, device: str, seed: int, deterministic: bool
) -> Accuracy:
    """Check one case and return the largest error seen beside its budget.

    Args:
        operator: says what is right.
        entry: the subject.
        problem: the case.
        device: ``cuda`` or ``cpu``.
        seed: of the first inputs; ``seed + 1`` makes the others.
        deterministic: whether the subject promises the same bits for the same input.

    Raises:
        WrongResultError: with the reason, in one line.
    """
    run = _Runner(device)
    inputs = operator.make_inputs(problem, seed=seed, device=device)
    others = operator.make_inputs(problem, seed=seed + 1, device=device)
    require_random(operator, inputs, others)

    call = operator.bind(entry, problem, inputs)
    first = run(call, inputs, _Truth.of(operator, problem, inputs), "the first call", poison_all=device == "cpu")
    for name, tensor in inputs.items():
        # Through .data the version counter stands still: a cache keyed on it too is not warned.
        tensor.data.copy_(others[name])
    truth = _Truth.of(operator, problem, inputs)
    second = run(call, inputs, truth, "new values at the same addresses")

    moved = {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in inputs.items()}
    call = operator.bind(entry, problem, moved)
    third = run(call, moved, truth, "the same values at new addresses")
    fourth = run(call, moved, truth, "the same call again", poison_all=device == "cpu")
    run.check_earlier_outputs()

    same = all(_same_bits(second, other) for other in (third, fourth))
    accuracy = run.worst.model_copy(update={"deterministic": same})
    if deterministic and not same:
        raise WrongResultError("the same input gave other bits, and determinism was promised", accuracy)
    del first
    return accuracy


@dataclass(frozen=True)
class _Truth:
    """What is right for one set of inputs."""

    exact: torch.Tensor
    dtype: torch.dtype
    budget: float
    low_precision_error: float
    rms_budget: float

    @classmethod
    def of(cls, operator: Operator, problem: Any, inputs: Inputs) -> _Truth:
        """Compute it. Raises ``ProofError`` where the operator's own rule gives no finite budget."""
        exact = operator.exact(problem, inputs)
        low = operator.low_precision(problem, inputs)
        budget = operator.error_budget(exact, low)
        if not math.isfinite(budget):
            raise ProofError(f"the error budget must be finite, got {budget}: the framework's own run overflows")
        errors = low.double() - exact
        rounding = 0.5 * torch.finfo(low.dtype).eps * _rms(exact)
        return cls(exact, low.dtype, budget, _largest(errors.abs()), 2 * _rms(errors) + rounding)


class _Runner:
    """Calls the subject, checks what comes back, and remembers the worst error."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._outputs: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # which call, output, copy made at once
        self.worst = Accuracy(max_error=0.0, budget=math.inf, low_precision_error=0.0)

    def __call__(
        self, call: Callable[[], Any], inputs: Inputs, truth: _Truth, which: str, *, poison_all: bool = False
    ) -> torch.Tensor:
        """Make one call. Raises ``WrongResultError``."""
        before = {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in inputs.items()}
        shared = SharedState()
        poison_free_memory(self._device, truth.exact.numel() * truth.dtype.itemsize)
        try:
            with PoisonFreshMemory() if poison_all else contextlib.nullcontext():  # type: ignore[no-untyped-call]
                output = call()
            _synchronize(self._device)
        except Exception as error:
            raise WrongResultError(f"{which}: raised {describe_error(error)}") from error
        if changes := shared.changes():
            raise WrongResultError(f"{which} changed what all arms share: {changes}")
        _check_form(output, truth, self._device, which)
        for name, tensor in inputs.items():
            if not _same_bits(tensor, before[name]):
                raise WrongResultError(f"{which}: the input {name} was overwritten")
        checked: torch.Tensor = output
        self._check_error(checked, truth, which)
        self._outputs.append((which, checked, checked.clone(memory_format=torch.preserve_format)))
        return checked

    def _check_error(self, output: torch.Tensor, truth: _Truth, which: str) -> None:
        unwritten = torch.isnan(output)
        if unwritten.any():
            reason = f"{which}: NaN in {_count(unwritten)}; memory that nobody wrote reads so here"
            raise WrongResultError(reason)
        errors = (output.double() - truth.exact).abs()
        largest = _largest(errors)
        if not math.isfinite(largest):
            raise WrongResultError(f"{which}: infinite in {_count(torch.isinf(output))}")
        accuracy = Accuracy(
            max_error=largest, budget=truth.budget, low_precision_error=truth.low_precision_error, deterministic=None
        )
        if largest > truth.budget:
            reason = (
                f"{which}: error {largest:.3g}, allowed {truth.budget:.3g}; wrong in {_count(errors > truth.budget)}"
            )
            raise WrongResultError(reason, accuracy)
        if (rms := _rms(errors)) > truth.rms_budget:
            reason = f"{which}: root mean square of the error {rms:.3g}, allowed {truth.rms_budget:.3g}"
            raise WrongResultError(f"{reason}: sums of too low a precision show so", accuracy)
        if accuracy.share >= self.worst.share:
            self.worst = accuracy

    def check_earlier_outputs(self) -> None:
        """Compare every output with the copy made when it came. Raises ``WrongResultError``."""
        for which, output, copy in self._outputs:
            if not _same_bits(output, copy):
                reason = f"the output of {which} was changed by a later call: it lies in memory that calls share"
                raise WrongResultError(reason)


def _check_form(output: Any, truth: _Truth, device: str, which: str) -> None:
    if not isinstance(output, torch.Tensor):
        raise WrongResultError(f"{which}: returned {type(output).__name__}, expected a tensor")
    if wrong := not_plain(output):
        raise WrongResultError(f"{which}: {wrong}")
    for name, got, expected in (
        ("shape", tuple(output.shape), tuple(truth.exact.shape)),
        ("dtype", output.dtype, truth.dtype),
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


def _largest(errors: torch.Tensor) -> float:
    return float(errors.max()) if errors.numel() else 0.0


def _rms(errors: torch.Tensor) -> float:
    return float(errors.double().square().mean().sqrt()) if errors.numel() else 0.0


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bits: NaN equals itself, and 0.0 differs from -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def poison_free_memory(device: str, output_bytes: int) -> None:
    """Fill memory with NaN and give it back, so that what the subject allocates next holds NaN where it does not write.

    The allocator hands out blocks by size: some of every size, and several of the output's own.
    """
    if device == "cuda":
        # Blocks that held the right answer a moment ago go back to the driver: an unwritten tile must not inherit it.
        torch.cuda.empty_cache()
    sizes = [512 << step for step in range(17)] + [max(output_bytes, 512)] * 8  # 512 bytes to 32 MiB
    blocks = [torch.full((size,), NAN_BYTE, device=device, dtype=torch.uint8) for size in sizes]
    _synchronize(device)
    del blocks


class PoisonFreshMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fill everything that ``torch.empty`` and its kin return with NaN, also where C++ calls them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _FRESH_MEMORY and isinstance(out, torch.Tensor) and out.is_floating_point():
            out.fill_(math.nan)
        return out
