"""What drop-ins are given, checked by the names that their callers have for it.

The functions behind drop-ins check all tensors, in their own names and their own order of axes. So a drop-in looks at
its tensors only when these refuse them (``blame``): a check costs microseconds, and a model calls once a layer. What
only they can know, as it lies in tensors of lengths or pages, ``call_by_names`` translates.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..attention.inputs import DTYPE_NAMES, check_flag
from ..attention.problem import LARGEST_SCALE
from ..errors import InputError, UnsupportedError, shown
from ..gpu.checks import check_dense, check_storages, check_tensor as check_kind
from ..gpu.memory_overlap import has_internal_overlap, is_expanded
from ..gpu.subclasses import PLAIN_OR_NONE, has_own_meaning

_is_compiling = torch.compiler.is_compiling
_FLOATS = "float16, bfloat16 or float32"
# Sizes that have a word: a message with it says more than two shapes.
_COUNTED = {"Sk": "keys", "Tk": "tokens", "pages": "pages"}

Named = tuple[str, Tensor]
_P = ParamSpec("_P")
_R = TypeVar("_R")


def blame(check: Callable[..., object], *arguments: Any) -> None:
    """Raise what ``check`` does, in the place of the error that is handled; return where it finds no fault."""
    try:
        check(*arguments)
    except (InputError, UnsupportedError) as error:
        raise error from None


def blames_tensors(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Raise what ``check_tensor`` does of an argument, where a call fails with an error that is not ours."""
    names = inspect.signature(function).parameters

    @functools.wraps(function)
    def called(*arguments: _P.args, **named: _P.kwargs) -> _R:
        try:
            return function(*arguments, **named)
        except (InputError, UnsupportedError):
            raise
        except Exception:
            for name, value in {**dict(zip(names, arguments, strict=False)), **named}.items():
                if isinstance(value, Tensor):
                    blame(check_tensor, name, value)
            raise

    return called


def plain(value: Any) -> Any:
    """Return the number that a scalar of numpy or torch holds, which waits for a GPU; another value as it is."""
    if type(value) in (int, float, bool):  # also a symbol, of which Dynamo knows no attribute
        return value
    return value.item() if _axes(value) == 0 else value


def _axes(value: Any) -> int | None:
    """Return how many axes a tensor or an array has; of a class with a meaning of its own, even a look may raise."""
    if isinstance(value, Tensor) and has_own_meaning(type(value)):
        return None
    return getattr(value, "ndim", None)


def as_flag(name: str, value: Any) -> bool:
    """Return whether a flag is set: 1, 0 and None may be given for True and False. Raises ``InputError``."""
    value = plain(value)
    if value is None or (isinstance(value, (bool, int, float)) and value in (0, 1)):
        return bool(value)
    raise InputError(f"{name} must be True or False, got {shown(value)}")


def as_window(name: str, value: Any) -> tuple[int, int]:
    """Return a pair of bounds, where any negative number is none. Raises ``InputError``."""
    sizes = value.tolist() if _axes(value) == 1 else value
    sizes = [*map(plain, sizes)] if isinstance(sizes, (tuple, list)) else []
    if len(sizes) != 2 or not all(type(size) is int and size < 2**63 for size in sizes):
        raise InputError(f"{name} must be two integers (left, right), negative for no bound, got {shown(value)}")
    return max(sizes[0], -1), max(sizes[1], -1)


def as_softcap(name: str, value: Any) -> float:
    """Return a bound on the scores, where None and any negative number are none, 0. Raises ``InputError``."""
    value = plain(value)
    if value is None or (_is_number(value) and value < 0):
        return 0.0
    check_softcap(name, value)
    return float(value)


def as_scale(name: str, value: Any) -> float | None:
    """Return a factor on the scores, or None. Raises ``InputError``."""
    value = plain(value)
    check_scale(name, value)
    return None if value is None else float(value)


def as_dropout(name: str, value: Any) -> float:
    """Return the share of the probabilities that are dropped. Raises ``InputError``."""
    value = plain(value)
    check_dropout(name, value)
    return float(value)


def contiguous_columns(tensor: Any) -> Any:
    """Return a tensor whose last axis is contiguous, as flash-attn copies one that is not; else the value."""
    if isinstance(tensor, Tensor) and tensor.dim() and tensor.stride(-1) != 1:
        return tensor.contiguous()
    return tensor


class _ForwardOnly(torch.autograd.Function):
    """Outputs that have no gradients, of inputs that ask for them: only their use raises."""

    @staticmethod
    def forward(_why: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(output.detach() for output in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004 - the name is torch's
        ctx.why = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        raise UnsupportedError(ctx.why, hint="call it under torch.no_grad(), or pass detached tensors")


def forward_only(what: str, tensors: Mapping[str, Any], call: Callable[[], Any]) -> Any:
    """Return what a call does that has no gradients: where an input asks for them, backward raises, and not the call.

    A call that is compiled is left to refuse its inputs.
    """
    wanted = {name: x for name, x in tensors.items() if isinstance(x, Tensor) and x.requires_grad}
    if not wanted or not torch.is_grad_enabled() or _is_compiling():
        return call()
    with torch.no_grad():
        found = call()
    outputs = found if isinstance(found, tuple) else (found,)
    why = f"there is no backward with {what}, and gradients are required of {', '.join(wanted)}"
    linked = _ForwardOnly.apply(why, len(outputs), *outputs, *wanted.values())  # type: ignore[no-untyped-call]
    return linked if isinstance(found, tuple) else linked[0]


def check_optional_flag(name: str, value: object) -> None:
    """Raise ``InputError`` unless it is True, False or None."""
    if value is not None:
        check_flag(name, value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_scale(name: str, value: Any) -> None:
    """Raise ``InputError`` unless it is a factor on the scores, or None."""
    if value is None:
        return
    if not _is_number(value):
        raise InputError(f"{name} must be a number or None, got {type(value).__name__}")
    if not abs(value) <= LARGEST_SCALE:  # NaN is not
        raise InputError(f"{name} must be finite in fp32, so at most {LARGEST_SCALE:.3g} in size, got {shown(value)}")


def check_softcap(name: str, value: Any) -> None:
    """Raise ``InputError`` unless it is a bound on the scores, or 0."""
    if not _is_number(value):
        raise InputError(f"{name} must be a number, 0 for none, got {type(value).__name__}")
    if not 0 <= value <= LARGEST_SCALE:  # NaN is not
        raise InputError(f"{name} must be 0 (none) or more, at most {LARGEST_SCALE:.3g}, got {shown(value)}")


def check_dropout(name: str, value: Any) -> None:
    """Raise ``InputError`` unless it is a share of the probabilities that may be dropped."""
    if not _is_number(value):
        raise InputError(f"{name} must be a number, 0 for no dropout, got {type(value).__name__}")
    if not 0 <= value < 1:  # NaN is not
        raise InputError(f"{name} must be at least 0 and less than 1, got {shown(value)}")


def check_count(name: str, value: Any) -> None:
    """Raise ``InputError`` unless it is a number of keys, queries or splits."""
    if isinstance(value, torch.SymInt) or (type(value) is int and _is_compiling()):  # a symbol may have no value yet
        return
    if type(value) is not int or not 0 <= value < 2**31:
        raise InputError(f"{name} must be an integer from 0 to 2**31 - 1, got {shown(value)}")


def check_tensor(name: str, value: object, expected: str = "a torch.Tensor") -> None:
    """Raise ``InputError`` unless it is a tensor whose elements lie in memory one by one."""
    if not isinstance(value, Tensor):
        raise InputError(f"{name} must be {expected}, got {type(value).__name__}")
    check_kind(name, value)
    check_dense(name, value)
    check_storages({name: value})


def check_kinds(**given: object) -> None:
    """Raise ``InputError`` for tensors whose class says what they mean: a view of one may have lost it."""
    for name, tensor in given.items():
        if type(tensor) not in PLAIN_OR_NONE and isinstance(tensor, Tensor):
            check_kind(name, tensor)


def check_optional_tensor(name: str, value: object) -> None:
    """Raise ``InputError`` unless it is None, or what ``check_tensor`` lets pass."""
    if value is not None:
        check_tensor(name, value, "a torch.Tensor or None")


def check_place(name: str, tensor: Tensor, first: Named) -> None:
    """Raise ``InputError`` unless a tensor is where the first one is, and holds what it is."""
    if tensor.device != first[1].device:
        raise InputError(f"{name} must be on the device of {first[0]}, {first[1].device}, got {tensor.device}")
    if not _is_compiling() and tensor.is_neg():  # tracing, nobody can tell
        raise InputError(f"{name} must not be a negative view, got one (is_neg()): call resolve_neg()")


def check_columns(name: str, tensor: Tensor) -> None:
    """Raise ``InputError`` unless the last axis is contiguous."""
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InputError(
            f"{name} must be contiguous along its last axis, got strides {list(tensor.stride())}",
            hint=".contiguous() makes a copy that is",
        )


def check_attended(given: Mapping[str, tuple[Any, str]], where: str = "") -> None:
    """Check queries, keys and values: kind, axes, dtype, place, and sizes that follow from one another.

    Args:
        given: for each name the tensor and its axes, such as ``B, HK, Sk, D``; axes of one name have one size, and a
            number is the size itself. The first tensor has the queries, with H heads; there are HK of keys.
        where: said of the axes of all but the first tensor.

    Raises:
        InputError: with the argument's name, what was expected and what was got.
    """
    sizes: dict[str, int] = {}
    first: Named | None = None
    for name, (tensor, letters) in given.items():
        axes = letters.split(", ")
        check_tensor(name, tensor)
        if tensor.dim() != len(axes):
            said = where if first else ""
            raise InputError(
                f"{name} must have {len(axes)} dimensions [{letters}]{said}, got shape {list(tensor.shape)}"
            )
        first = first or (name, tensor)
        dtype = tensor.dtype
        if dtype not in DTYPE_NAMES:
            raise InputError(f"{name} must be {_FLOATS}, got {dtype}")
        if dtype is not first[1].dtype and not is_cast_to_one(tensor, first[1]):
            raise InputError(f"{name} must have the dtype of {first[0]}, {first[1].dtype}, got {dtype}")
        check_place(name, tensor, first)
        for axis, size in zip(axes, tensor.shape, strict=True):
            if axis not in sizes:
                sizes[axis] = int(axis) if axis.isdigit() else size
            if size != sizes[axis]:
                _refuse_size(name, tensor, letters, sizes, axis, given)
        if not size:
            raise InputError(f"{name} must have {axis} of 1 or more, got shape {list(tensor.shape)}")
    assert first is not None
    if not (first[1].is_cuda or first[1].is_cpu):
        raise InputError(f"{first[0]} must be on a CUDA device or the CPU, got {first[1].device}")
    if "HK" in sizes and (sizes["H"] % sizes["HK"] if sizes["HK"] else sizes["H"]):
        keys = _who_has("HK", given)
        raise InputError(
            f"{keys} must have a number of heads that divides those of {first[0]}, {sizes['H']}, got {sizes['HK']}"
        )


def _who_has(axis: str, given: Mapping[str, tuple[Any, str]]) -> str:
    """Return who comes first with an axis."""
    return next(name for name, (_, letters) in given.items() if axis in letters.split(", "))


def is_cast_to_one(tensor: Tensor, other: Tensor) -> bool:
    """Whether autocast gives both one dtype."""
    device = other.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return False
    return {tensor.dtype, other.dtype} == {torch.float32, torch.get_autocast_dtype(device)}


def _refuse_size(
    name: str,
    tensor: Tensor,
    letters: str,
    sizes: Mapping[str, int],
    axis: str,
    given: Mapping[str, tuple[Any, str]],
) -> None:
    axes = letters.split(", ")
    if axis in _COUNTED:
        many = f"as many {_COUNTED[axis]} as {_who_has(axis, given)}, {sizes[axis]}"
        raise InputError(f"{name} must have {many}, got {tensor.shape[axes.index(axis)]}")
    expected = [
        int(other) if other.isdigit() else sizes.get(other, size)
        for other, size in zip(axes, tensor.shape, strict=True)
    ]
    raise InputError(f"{name} must have shape [{letters}] = {expected}, got {list(tensor.shape)}")


def check_per_head(name: str, tensor: Any, first: Named, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ``InputError`` unless it is None, or has a number for each head, in one of the shapes."""
    check_numbers(name, tensor, first)
    if tensor is None:
        return
    if tuple(tensor.shape) not in shapes.values():
        expected = " or ".join(f"[{letters}] = {list(shape)}" for letters, shape in shapes.items())
        raise InputError(f"{name} must have shape {expected}, got {list(tensor.shape)}")
    check_columns(name, tensor)


def check_integers(name: str, tensor: Any, first: Named, letters: str, shape: tuple[int | None, ...]) -> None:
    """Raise ``InputError`` unless it has int32 in this shape, of any size where that is None."""
    check_tensor(name, tensor)
    if tensor.dtype != torch.int32:
        raise InputError(f"{name} must be int32, got {tensor.dtype}")
    check_place(name, tensor, first)
    if tensor.dim() != len(shape) or any(
        size not in (None, own) for size, own in zip(shape, tensor.shape, strict=True)
    ):
        expected = ", ".join(
            axis if size is None else str(size) for size, axis in zip(shape, letters.split(", "), strict=True)
        )
        known = f" = [{expected}]" if expected != letters else ""
        raise InputError(f"{name} must have shape [{letters}]{known}, got {list(tensor.shape)}")
    check_columns(name, tensor)


def check_starts(first: Named, starts: Mapping[str, Any]) -> int:
    """Check where packed sequences start in queries and in keys, and return how many there are."""
    batch: int | None = None
    for name, tensor in starts.items():
        check_integers(name, tensor, first, "B + 1", (None if batch is None else batch + 1,))
        batch = tensor.shape[0] - 1
        if batch < 0:
            raise InputError(f"{name} must have shape [B + 1], so at least one element, got [0]")
    assert batch is not None
    return batch


def check_mask(name: str, mask: Any, first: Named) -> None:
    """Raise ``InputError`` unless it is None, may be added to the scores, or says which are seen."""
    check_optional_tensor(name, mask)
    if mask is not None and mask.dtype == torch.bool:
        check_place(name, mask, first)
    elif mask is not None:
        check_numbers(name, mask, first, f"bool, {_FLOATS}")


def check_numbers(name: str, tensor: Any, first: Named, dtypes: str = _FLOATS) -> None:
    """Raise ``InputError`` unless it is None, or has numbers; ``dtypes`` says of which kinds."""
    check_optional_tensor(name, tensor)
    if tensor is None:
        return
    if tensor.dtype not in DTYPE_NAMES:
        raise InputError(f"{name} must be {dtypes}, got {tensor.dtype}")
    check_place(name, tensor, first)


def as_bias(name: str, mask: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a mask as what is added to scores of ``shape``, expanded without a copy. Raises ``InputError``."""
    check_kind(name, mask)
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    try:
        return mask.expand(shape)
    except RuntimeError:
        raise InputError(f"{name} must expand to {list(shape)}, got {list(mask.shape)}") from None


def call_by_names(function: Callable[..., Any], names: Mapping[str, str], *arguments: Any, **options: Any) -> Any:
    """Call a function, and put the names of a drop-in into what it refuses: those that are no words of prose."""
    try:
        return function(*arguments, **options)
    except (InputError, UnsupportedError) as error:
        raise _translated(error, names) from None


def _translated(error: InputError | UnsupportedError, names: Mapping[str, str]) -> InputError | UnsupportedError:
    pattern = r"\b(" + "|".join(names) + r")\b"
    message, hint = (
        re.sub(pattern, lambda found: names[found.group()], text)
        for text in (str(error).partition("\nhint: ")[0], error.hint)
    )
    return type(error)(message, hint=hint)


def refuse_given(**options: object) -> None:
    """Raise ``UnsupportedError`` for an option that is given but not served: one that is not None."""
    for name, value in options.items():
        if value is not None:
            said = "a tensor" if isinstance(value, Tensor) else shown(value)
            raise UnsupportedError(f"{name} is not served, got {said}")


def is_fp8(tensor: object) -> bool:
    """Whether it is a tensor of numbers of 8 bits."""
    return isinstance(tensor, Tensor) and tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1


def refuse_fp8(hint: str, **given: object) -> None:
    """Raise ``UnsupportedError`` for tensors of fp8, by name."""
    for name, tensor in given.items():
        if isinstance(tensor, Tensor) and is_fp8(tensor):
            raise UnsupportedError(f"{name} in fp8 is not served, got {tensor.dtype}", hint=hint)


def described(value: object) -> str:
    """Return dtype and shape of a tensor, or another value, as messages have them."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else shown(value)


def check_descales(**descales: object) -> None:
    """Raise ``InputError`` unless each is None, or fp32 ``[B, HK]``.

    Only fp8 inputs have a use for them. Servers pass them with inputs of 16 bits too, for which they mean nothing.
    """
    for name, descale in descales.items():
        if descale is not None and not (
            isinstance(descale, Tensor) and descale.dim() == 2 and descale.dtype == torch.float32
        ):
            raise InputError(f"{name} must be None or a float32 tensor [B, HK], got {described(descale)}")


def require_usual(usual: int, **options: object) -> None:
    """Raise ``UnsupportedError`` for an option that is given with another value than the one that is served."""
    for name, value in options.items():
        number = plain(value)
        refuse_given(**{name: None if isinstance(number, (int, float)) and number == usual else number})


def write_out(out: Any, found: Any) -> Any:
    """Return what a call gives, o or o and LSE, with o written to ``out`` where that is given.

    Raises ``InputError`` where ``out`` does not fit o, and ``UnsupportedError`` where o has gradients. ``found`` was
    computed before: ``out`` may be q.
    """
    if out is None:
        return found
    o = found[0] if isinstance(found, tuple) else found
    check_tensor("out", out)
    if out.shape != o.shape or out.dtype != o.dtype or out.device != o.device:
        expected = f"shape, dtype and device of the output, {list(o.shape)}, {o.dtype} and {o.device}"
        raise InputError(f"out must have {expected}, got {list(out.shape)}, {out.dtype} and {out.device}")
    if is_expanded(out) or has_internal_overlap(out):
        raise InputError(f"out must have memory for every element, got strides {out.stride()}")
    if o.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            "out has no gradients, and they are required of an input",
            hint="call it under torch.no_grad(), or without out",
        )
    with torch.no_grad():
        out.copy_(o)
    return (out, *found[1:]) if isinstance(found, tuple) else out
