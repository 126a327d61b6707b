"""What is right, and what error is allowed: of each element, of each row, and of all elements of an output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import ProofError
from ..records.evidence import OutputAccuracy
from ..spent import spending
from ..subject.operator import Inputs, Operator, Part, sample_of
from ..subject.outputs import known_parts, names_of

_ELEMENTS_AT_ONCE = 2**27  # 1 GiB in fp64
# The framework's largest error of fewer elements is luck, and that of a shorter row (tools/simulate_error_scale.py).
_FEW_ELEMENTS = 1024
_LONG_ROW = 32
_LEAST_DRAWS, _MOST_DRAWS, _ELEMENTS_OF_DRAWS = 3, 16, 1 << 22
# Scales are worked out in fp32: of this error the square is a normal number. A right kernel gives 0 for 1e-51.
_LEAST_ERROR = 2.0**-63
_SPREAD_OF_FEW = 3.0  # by how much the mean square of n elements may be above its own mean, times sqrt(n)
_SMALL_PART = 256  # of the budget of a whole output: what a row may be off that the framework has right by chance


@dataclass(frozen=True)
class Allowed:
    """The errors that one output may have, element by element."""

    largest: torch.Tensor  # absolute error of each element: of the output's shape, or one for each row, ``[..., 1]``
    rms: torch.Tensor | None = None  # root mean square of the errors of each row, ``[..., 1]``

    def cut(self, part: Part, output: str) -> Allowed:
        """Return those of one rank."""
        return Allowed(part.of(output, self.largest), None if self.rms is None else part.of(output, self.rms))


Pick = Callable[[torch.Tensor], torch.Tensor]


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
    pick: Pick | None = None  # the part of an answer that this is; None: the whole

    @property
    def nbytes(self) -> int:
        """Bytes of the output."""
        return self.exact.numel() * self.dtype.itemsize

    def within(self, which: str) -> str:
        """Return of what a message is, ``which`` being the call."""
        return f"{which}, {self.output}" if self.output else which


ExpectedOutputs = tuple[Expected, ...]  # one for each tensor of an answer


def find_expected(operator: Operator, problem: Any, inputs: Inputs, part: Part | None = None) -> ExpectedOutputs:
    """Return the exact answer, and the errors allowed; of one rank where ``part`` says so.

    These follow from the roundings that no kernel avoids, where the operator knows them, and from the framework's own
    error. Of few elements the latter is luck: then it counts only where nothing else does, and of several draws.
    """
    return Whole(operator, problem, inputs).expected(part)


class Whole:
    """What the operator says of one set of inputs, which may take long, and what follows for each rank."""

    @spending("the exact answers")
    def __init__(self, operator: Operator, problem: Any, inputs: Inputs, pick: Pick | None = None) -> None:
        """Ask the operator. ``pick``: of whole answers, the part that is asked about.

        Raises:
            ProofError: an answer has the wrong form.
        """
        self._operator = operator
        self._pick = pick
        self._names = names_of(operator, problem)
        self._draw = _Draw.of(operator, problem, inputs, self._names)
        self._scales = _scales_of(operator, problem, inputs, self._draw.exact)
        few = any(exact.numel() < _FEW_ELEMENTS for exact in self._draw.exact)
        self._more = _more_draws(operator, problem, inputs, self._names) if self._scales is None and few else []
        self._found: dict[Part | None, ExpectedOutputs] = {}

    @spending("the exact answers")
    def expected(self, part: Part | None) -> ExpectedOutputs:
        """Return what an answer has to be: that of a rank, or, for None, the whole."""
        if part not in self._found:
            names, draw, more, scales = self._names, self._draw, self._more, self._scales
            if part is not None:
                draw, more = draw.cut(part, names), [each.cut(part, names) for each in more]
                scales = scales and tuple(each.cut(part, name) for name, each in zip(names, scales, strict=True))
            found = tuple(
                _expect_by_scale(self._operator, name, draw, index, scales[index])
                if scales is not None
                else _expect_by_framework(self._operator, name, draw, index, more)
                for index, name in enumerate(names)
            )
            if part is not None:  # the largest error of fewer elements is luck
                wholes = zip(found, self.expected(None), strict=True)
                found = tuple(replace(each, budget=max(each.budget, whole.budget)) for each, whole in wholes)
            self._found[part] = tuple(replace(each, pick=self._pick) for each in found)
        return self._found[part]


def truth_of_part(operator: Operator, problem: Any, inputs: Inputs, *, seed: int) -> Whole:
    """Return what is right for a part of the answer that ``seed`` draws; for all of it if the operator knows none."""
    sample = sample_of(operator, problem, inputs, seed=seed)
    if sample is None:
        return Whole(operator, problem, inputs)
    return Whole(operator, sample.problem, sample.inputs, sample.pick)


@dataclass(frozen=True)
class _Draw:
    """What the operator says of one set of inputs."""

    exact: tuple[torch.Tensor, ...]
    low: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, operator: Operator, problem: Any, inputs: Inputs, names: Sequence[str]) -> _Draw:
        """Ask it. Raises ``ProofError`` where an answer has the wrong form."""
        # This first: autograd through a framework's run keeps much until it ends, and fp64 is large.
        low = known_parts(operator, "low_precision", operator.low_precision(problem, inputs), names)
        exact = known_parts(operator, "exact", operator.exact(problem, inputs), names)
        for right, part in zip(exact, low, strict=True):
            if right.shape != part.shape:
                shapes = f"got {list(right.shape)} and {list(part.shape)}"
                raise ProofError(f"exact and low_precision must have one shape, {shapes}")
        return cls(exact, low)

    def cut(self, part: Part, names: Sequence[str]) -> _Draw:
        """Return that of one rank."""
        each = (tuple(map(part.of, names, tensors)) for tensors in (self.exact, self.low))
        return _Draw(*each)

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
    scales = [Allowed(*each) for each in error_scale(problem, inputs)]
    if len(scales) != len(exact):
        raise ProofError(f"error_scale of {operator.name} must return one for each of {len(exact)} outputs")
    for scale, right in zip(scales, exact, strict=True):
        if scale.largest.shape != right.shape:
            shape, expected = list(scale.largest.shape), list(right.shape)
            raise ProofError(f"error_scale of {operator.name} must have the output's shape {expected}, got {shape}")
        if scale.rms is not None and scale.rms.shape != (*right.shape[:-1], 1):
            shape, expected = list(scale.rms.shape), [*right.shape[:-1], 1]
            raise ProofError(f"error_scale of {operator.name} must have one rms a row, {expected}, got {shape}")
        if not all(bool(torch.isfinite(part).all()) for part in (scale.largest, scale.rms) if part is not None):
            raise ProofError(f"error_scale of {operator.name} must be finite")
    for place, right in enumerate(exact):  # one after another: a gradient of all weights is large
        scales[place] = _with_least(scales[place], right)
    return tuple(scales)


def _with_least(scale: Allowed, exact: torch.Tensor) -> Allowed:
    """Allow the least error in elements that are not 0. Where nothing adds to an element, it has to be 0."""
    if not exact.numel():
        return scale
    some = exact != 0
    largest = torch.add(scale.largest, some, alpha=_LEAST_ERROR)
    return Allowed(largest, None if scale.rms is None else scale.rms + _LEAST_ERROR * some.any(-1, keepdim=True))


def _expect_by_scale(operator: Operator, name: str, draw: _Draw, index: int, scale: Allowed) -> Expected:
    """Return what is expected where the operator knows the error of each element.

    Of many elements the framework's error counts too: it shows a coarser P in all of them together. Its largest one may
    be small by luck, so half of the most that is allowed in an element is allowed in all.
    """
    exact, low = draw.exact[index], draw.low[index]
    budget = float(scale.largest.max()) if exact.numel() else 0.0
    rms_budget = math.inf
    if exact.numel() >= _FEW_ELEMENTS:
        budget = max(draw.budget(operator, index), budget / 2)
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
        return None, f"NaN in {count_marked(unwritten)}: computed, or never written (fresh memory reads so here)"
    if bool((infinite := torch.isinf(output)).any()):
        return None, f"infinite in {count_marked(infinite)}"
    of_element = of_row = None
    if wanted.allowed is not None:
        shares = find_shares(output, wanted.exact, wanted.allowed).tolist()
        of_element, of_row = shares[0], shares[1] if wanted.allowed.rms is not None else None
    rms = rms_error(output, wanted.exact)
    accuracy = OutputAccuracy(
        max_error=max_error(output, wanted.exact),
        budget=wanted.budget,
        low_precision_error=wanted.low_precision_error,
        element_share=of_element,
        row_share=of_row,
        rms_share=None if rms <= wanted.rms_budget else rms / wanted.rms_budget if wanted.rms_budget else math.inf,
    )
    fault = _fault(output, wanted, accuracy, rms)
    return accuracy, f"{fault}; {_worst(output, wanted)}" if fault else ""


def _worst(output: torch.Tensor, wanted: Expected) -> str:
    """Return the element with the largest error, or of the largest part of what it may have, as got and expected."""
    shares = (output.double() - wanted.exact).abs()
    if wanted.allowed is not None:
        shares = _share(shares, wanted.allowed.largest)
    place = tuple(int(i) for i in torch.unravel_index(shares.argmax(), shares.shape))
    return f"worst at {[*place]}: got {output[place].item():.6g}, expected {wanted.exact[place].item():.6g}"


def _fault(output: torch.Tensor, wanted: Expected, accuracy: OutputAccuracy, rms_all: float) -> str:
    """Return why errors are too large, or an empty text."""
    if accuracy.max_error > wanted.budget:
        wrong = (output.double() - wanted.exact).abs() > wanted.budget
        return f"error {accuracy.max_error:.3g}, allowed {wanted.budget:.3g}; wrong in {count_marked(wrong)}"
    if wanted.allowed is not None and not (accuracy.element_share or 0.0) <= 1.0:
        errors = (output.double() - wanted.exact).abs()
        place = int(_share(errors, wanted.allowed.largest).argmax())
        error, largest = (float(x.expand(errors.shape).flatten()[place]) for x in (errors, wanted.allowed.largest))
        return (
            f"error {error:.3g} in an element where {largest:.3g} is allowed; "
            f"wrong in {count_marked(errors > wanted.allowed.largest)}"
        )
    if wanted.allowed is not None and wanted.allowed.rms is not None and not (accuracy.row_share or 0.0) <= 1.0:
        rms = (output.double() - wanted.exact).square().mean(-1, keepdim=True).sqrt()
        too_large = count_marked(rms > wanted.allowed.rms).replace("elements", "rows")
        return f"root mean square of a row's errors {accuracy.row_share:.3g} times what is allowed, in {too_large}"
    if rms_all > wanted.rms_budget:
        return (
            f"root mean square of all errors {rms_all:.3g}, allowed {wanted.rms_budget:.3g}: "
            "sums of too low a precision, or wrong terms such as padding in a sum"
        )
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


def count_marked(mask: torch.Tensor) -> str:
    """Return how many elements are marked and where the first one is."""
    first = torch.unravel_index(mask.flatten().to(torch.uint8).argmax(), mask.shape)
    return f"{int(mask.sum())} of {mask.numel()} elements, the first at {[int(i) for i in first]}"
