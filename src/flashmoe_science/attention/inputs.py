"""The description of one call of attention: tensors and options, checked once, and the problem that they make."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypedDict, TypeVar

import torch
from torch import Tensor

from ..errors import InputError, UnsupportedError, shown
from ..gpu.checks import (
    check_before_operator,
    check_not_mapped,
    check_saved_for_gradients,
    check_tensor,
)
from ..gpu.device import gpu_of as gpu_of  # noqa: PLC0414 - callers of this module take it from here
from ..gpu.subclasses import PLAIN, has_own_meaning, is_dtensor
from .checks import (
    DTYPE_NAMES as DTYPE_NAMES,  # noqa: PLC0414 - callers of this module take it from here
    check_attended,
    refuse_without_memory,
)
from .forward.plan import check_kernel_name
from .masks.call import check_mask_tensors, mask_tensors
from .problem import MAX_SPLITS, AttentionProblem, canonical_strides, check_share

# All tensors that a call may have, in the order in which prepared calls take them.
TENSORS = (
    "q", "k", "v", "sinks", "alibi", "bias", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table",
    "dropout_seed", "mask_lists", "mask_bits",
)  # fmt: skip
DIFFERENTIABLE = ("q", "k", "v", "sinks", "bias")
_TWO_INTS = [int, int]
_OF_MASK = ("mask_lists", "mask_bits")  # how long they are decides nothing
_COUNTED = frozenset(
    ("q", "k", "v", "o", "do", "dk", "dv", "page_table")
)  # one axis counts tokens or pages in packed calls
_NEEDED = frozenset(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"))
_LARGEST_FP64 = (2 - 2.0**-52) * 2.0**1023
_forward_ad = torch.autograd.forward_ad
_functorch_level = torch._C._functorch.maybe_current_level  # noqa: SLF001 - has no public name
if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

    from .masks.block_mask import BlockMask

    AnyMask = BlockMask | TorchBlockMask
_P = ParamSpec("_P")
_R = TypeVar("_R")


class NamedOptions(TypedDict, total=False):
    """What public functions take by name, but for ``return_lse``: types of their overloads."""

    causal: bool
    softmax_scale: float | None
    window: tuple[int, int]
    softcap: float
    sinks: Tensor | None
    alibi: Tensor | None
    bias: Tensor | None
    dropout_p: float
    dropout_seed: Tensor | None
    kernel: str


class BatchedOptions(NamedOptions, total=False):
    """The same, with what packed sequences do not have."""

    mask: AnyMask | None


class Options(NamedTuple):
    """What a call asks for besides its tensors."""

    causal: bool
    softmax_scale: float | None = None
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    max_seqlens: tuple[int, int] | None = None  # queries and keys of the longest of packed sequences
    kernel: str = "auto"
    dropout_p: float = 0.0
    mask_sizes: tuple[int, int] = (0, 0)  # sequences and heads that have a block mask of their own; 0: no mask
    num_splits: int = 0
    batch_invariant: bool = False
    head_parts: int = 1  # of how many equal parts of the heads this is one: gradients have the bits of the whole
    return_lse: bool = False


class AttentionCall(NamedTuple):
    """One call of attention. ``describe_call`` makes it."""

    tensors: Mapping[str, Tensor]  # those that are given, in the order of TENSORS
    options: Options  # a recorded call returns the LSE
    recorded: bool = False  # whether autograd wants gradients


def describe_call(tensors: Mapping[str, Any], options: Options, *, traced: bool = False) -> AttentionCall:
    """Check what does not depend on shapes, and return the call with its seed, its inputs cast under autocast.

    Args:
        tensors: what the caller passed, None included, in the order of ``TENSORS``.
        options: what the caller passed.
        traced: whether an operator will be called, which may run its fake kernel: this checks devices too.

    Raises:
        InputError: with the argument's name, the expected value and the given one.
        UnsupportedError: dropout or gradients with pages, a gradient that there is not, or a forward-mode tangent.
    """
    options = check_all_options(options)
    given = check_kinds(tensors, options)
    recorded = is_recorded(given)
    if recorded:
        options = Options(*options[:-1], return_lse=True)
    refuse_tangents(given.values())
    if not traced and _functorch_level() is not None:
        check_not_mapped(given.values())
    given["q"], given["k"], given["v"] = cast_under_autocast(given["q"], given["k"], given["v"])
    if options.dropout_p and "dropout_seed" not in given:
        # A function of torch, outside of our operators: what replays its generator replays the mask.
        given["dropout_seed"] = torch.randint(2**62, (2,), dtype=torch.int64, device=given["q"].device)
    if traced:
        check_before_operator(given, "q")
        _check_numbers(options)
    return AttentionCall(given, options, recorded)


def _check_numbers(options: Options) -> None:
    """Check the numbers that an operator would refuse in words of torch. Raises ``InputError``."""
    if min(options.window) < -1:
        raise InputError(f"window must be two integers (left, right), -1 for no bound, got {shown(options.window)}")
    if torch.compiler.is_dynamo_compiling():  # a length may be a symbol without a value, which Dynamo calls an int
        return
    for name, length in zip(("max_seqlen_q", "max_seqlen_k"), options.max_seqlens or (), strict=False):
        if type(length) is int and not 0 <= length < 2**31:
            raise InputError(f"{name} must be an integer from 0 to 2**31 - 1, got {shown(length)}")


def _is_served(kind: type[Tensor], tensors: Mapping[str, Any]) -> bool:
    """Return whether tensors of a class are served: DTensors where all of the call are such."""
    if is_dtensor(kind):
        return all(is_dtensor(type(tensor)) for tensor in tensors.values() if tensor is not None)
    return not has_own_meaning(kind)


def check_kinds(tensors: Mapping[str, Any], options: Options) -> dict[str, Tensor]:
    """Return the tensors that are given; a seed without dropout is not. Raises ``InputError``, ``UnsupportedError``."""
    given = {}
    for name, tensor in tensors.items():
        if tensor is None and name not in _NEEDED:
            continue
        kind = type(tensor)
        if kind not in PLAIN and not (isinstance(tensor, Tensor) and _is_served(kind, tensors)):
            check_tensor(name, tensor, optional=name not in _NEEDED)
        given[name] = tensor
    if options.dropout_p and "page_table" in given:  # before a seed is drawn
        raise UnsupportedError(
            f"dropout_p must be 0 with a page_table, which is for inference, got {options.dropout_p}"
        )
    if not options.dropout_p:
        given.pop("dropout_seed", None)
    return given


def is_recorded(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether autograd wants gradients of a call. Raises ``UnsupportedError`` for one that there is not."""
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors.values():
        if tensor.requires_grad:
            break
    else:
        return False
    wanted = [name for name, tensor in tensors.items() if tensor.requires_grad]
    if "page_table" in tensors:
        raise UnsupportedError(
            f"there is no backward with a page_table, and gradients are required of {', '.join(wanted)}",
            hint="call it under torch.no_grad(), or pass detached tensors",
        )
    others = [name for name in wanted if name not in DIFFERENTIABLE]
    if others:
        raise UnsupportedError(
            f"{', '.join(others)} must not require grad: there is no gradient of it",
            hint="pass detached tensors; slopes that are learned can be a bias",
        )
    if not torch.compiler.is_dynamo_compiling() and any(tensor.is_inference() for tensor in tensors.values()):
        check_saved_for_gradients(tensors)
    return True


def refuse_tangents(tensors: Iterable[Tensor | None]) -> None:
    """Raise ``UnsupportedError`` where an input has a tangent that the call would lose."""
    if _forward_ad._current_level < 0:  # noqa: SLF001 - the public way asks tensor by tensor
        return
    tangents = [_forward_ad.unpack_dual(tensor).tangent for tensor in tensors if isinstance(tensor, Tensor)]  # type: ignore[no-untyped-call]
    if any(tangent is not None for tangent in tangents):
        raise UnsupportedError("an input has a forward-mode tangent, and there is no forward-mode derivative")


def cast_under_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v; in a region of autocast those of fp32 are cast to its dtype."""
    if torch.float32 not in (q.dtype, k.dtype, v.dtype):
        return q, k, v
    device = q.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (tensor.to(dtype) if tensor.dtype == torch.float32 else tensor for tensor in (q, k, v))
    return q, k, v


def problem_of(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> AttentionProblem:
    """Describe the problem of ``flash_attention(q, k, v, **arguments)``. Raises ``InputError``."""
    features = ("sinks", "alibi", "bias", "dropout_seed")
    tensors = {"q": q, "k": k, "v": v, **{name: arguments.pop(name, None) for name in features}}
    mask = arguments.pop("mask", None)
    options = check_all_options(Options(**{"causal": False, **arguments}))
    if mask is not None:
        tensors, options = with_mask(mask, tensors, options)
    return batched_problem(check_kinds(tensors, options), options)


def with_mask(mask: Any, tensors: Mapping[str, Any], options: Options) -> tuple[dict[str, Any], Options]:
    """Return tensors and options of a call with the mask that the caller passed.

    Raises:
        InputError: it is no mask, or does not fit q and k.
        UnsupportedError: an option that it does not stand beside is asked for too.
    """
    options = check_all_options(options)
    asked = {
        "causal": options.causal, "window": options.window != (-1, -1), "dropout_p": options.dropout_p != 0.0,
        "alibi": tensors["alibi"] is not None, "bias": tensors["bias"] is not None,
    }  # fmt: skip
    lists, bits, sizes = mask_tensors(mask, tensors, asked)
    return {**tensors, "mask_lists": lists, "mask_bits": bits}, options._replace(mask_sizes=sizes)


def batched_problem(tensors: Mapping[str, Tensor], options: Options) -> AttentionProblem:
    """Check the tensors of a call of ``flash_attention``, and describe its problem. Raises ``InputError``."""
    check_attended(tensors)
    if "mask_lists" in tensors:
        check_mask_tensors(tensors, options.mask_sizes)
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    batch, heads, seqlen_q, head_dim = q.shape
    return AttentionProblem(
        batch=batch,
        heads=heads,
        heads_kv=k.shape[1],
        seqlen_q=seqlen_q,
        seqlen_k=k.shape[2],
        head_dim=head_dim,
        head_dim_v=v.shape[3],
        dtype=DTYPE_NAMES[q.dtype],
        q_strides=canonical_strides(q.shape, q.stride()),
        k_strides=canonical_strides(k.shape, k.stride()),
        v_strides=canonical_strides(v.shape, v.stride()),
        **describe_rest(tensors, options, batch),
    )


def describe_rest(tensors: Mapping[str, Tensor], options: Options, batch: int) -> dict[str, Any]:
    """Return the fields of a problem that batched and packed calls share; its tensors have been checked."""
    found: dict[str, Any] = {
        "causal": options.causal, "softmax_scale": options.softmax_scale, "return_lse": options.return_lse,
        "window": options.window, "softcap": options.softcap, "dropout_p": options.dropout_p,
        "pointer_alignment": pointer_alignment(tensors["q"], tensors["k"], tensors["v"]),
        **{name: DTYPE_NAMES[tensors[name].dtype] for name in ("sinks", "alibi", "bias") if name in tensors},
        "mask_batch": options.mask_sizes[0], "mask_heads": options.mask_sizes[1],
        "num_splits": options.num_splits, "batch_invariant": options.batch_invariant,
    }  # fmt: skip
    if (alibi := tensors.get("alibi")) is not None:
        found["alibi_stride"] = alibi.stride(0) if alibi.dim() == 2 and batch > 1 else 0
    if (bias := tensors.get("bias")) is not None:
        found["bias_strides"] = tuple(
            stride if size > 1 else 0 for size, stride in zip(bias.shape, bias.stride(), strict=True)
        )
        found["bias_alignment"] = pointer_alignment(bias)
    return found


def pointer_alignment(*tensors: Tensor) -> int:
    """Return the bytes by which all addresses are multiples, 16 at the most."""
    if any(type(tensor) not in PLAIN for tensor in tensors):  # fake tensors have no address
        return 16
    return math.gcd(16, *(tensor.data_ptr() for tensor in tensors))


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return all that a plan and a prepared launch depend on, but the address."""
    address = tensor.data_ptr() & 15 if tensor.device.type != "meta" else 0
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, address, tensor.is_neg()


def layouts_of(tensors: Mapping[str, Tensor], *, packed: bool) -> list[tuple[Any, ...]]:
    """Return the layout of each tensor; of packed calls without the number of tokens and of pages a sequence."""
    try:
        layouts = [*map(layout_of, tensors.values())]
    except RuntimeError:
        refuse_without_memory(tensors)
    if packed:
        for i, name in enumerate(tensors):
            if name in _COUNTED:
                shape = layouts[i][0]
                layouts[i] = (shape[:1] if name == "page_table" else shape[1:], len(shape), *layouts[i][1:])
    if "mask_lists" in tensors:
        for i, name in enumerate(tensors):
            if name in _OF_MASK:
                layouts[i] = layouts[i][1:]
    return layouts


def check_all_options(options: Options) -> Options:
    """Return options in their types. Raises ``InputError``."""
    causal, softmax_scale, window, softcap, max_seqlens, kernel, dropout_p, mask_sizes = options[:8]
    splits, invariant, head_parts, return_lse = options[8:]
    if (
        type(causal) is type(invariant) is type(return_lse) is bool and type(kernel) is str and type(window) is tuple  # type: ignore[redundant-expr] # callers may pass what types rule out
        and type(splits) is int
        and type(softcap) is type(dropout_p) is float and (softmax_scale is None or type(softmax_scale) is float)
        and [*map(type, window)] == _TWO_INTS and 0 <= dropout_p < 1 and max(window) < 2**63
        and (max_seqlens is None or [*map(type, max_seqlens)] == _TWO_INTS)
    ):  # fmt: skip
        return options  # as nearly all are: nothing to convert or to refuse
    check_flag("return_lse", return_lse)
    check_splits(splits, invariant)
    if not isinstance(kernel, str):  # a plan checks the name
        check_kernel_name(kernel)  # type: ignore[unreachable] # callers may pass what types rule out
    for name, length in zip(("max_seqlen_q", "max_seqlen_k"), max_seqlens or (), strict=False):
        if type(length) is not int and not isinstance(length, torch.SymInt):  # type: ignore[unreachable] # a symbol in a graph that is traced
            raise InputError(f"{name} must be an integer from 0 to 2**31 - 1, got {shown(length)}")
    return Options(
        causal,
        check_options(causal, softmax_scale),
        check_window(window),
        _check_number("softcap", softcap, "a number, 0 for none"),
        max_seqlens,
        kernel,
        check_dropout(dropout_p),
        mask_sizes,
        splits,
        invariant,
        head_parts,
        return_lse,
    )


def check_flag(name: str, flag: object) -> None:
    """Raise ``InputError`` unless ``flag`` is True or False."""
    if not isinstance(flag, bool):
        raise InputError(f"{name} must be True or False, got {shown(flag)}")


def check_splits(num_splits: object, batch_invariant: object) -> None:
    """Raise ``InputError`` unless they are a number of splits, and True or False."""
    check_flag("batch_invariant", batch_invariant)
    if type(num_splits) is not int or abs(num_splits) >= 2**31:
        raise InputError(f"num_splits must be an integer from 0 to {MAX_SPLITS}, got {shown(num_splits)}")


def check_options(causal: object, softmax_scale: object) -> float | None:
    """Return the scale as a float, or None. Raises ``InputError``."""
    check_flag("causal", causal)
    return None if softmax_scale is None else _check_number("softmax_scale", softmax_scale, "a number or None")


def _check_number(name: str, value: object, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{name} must be {expected}, got {type(value).__name__}")
    if abs(value) > _LARGEST_FP64 and value not in (math.inf, -math.inf):
        raise InputError(f"{name} must be finite in fp32, got an integer beyond fp64")
    return float(value)  # AttentionProblem checks its size


def check_window(window: object) -> tuple[int, int]:
    """Return the window as a pair. Raises ``InputError``."""
    if isinstance(window, (tuple, list)) and len(window) == 2 and all(type(n) is int and n < 2**63 for n in window):
        return window[0], window[1]  # AttentionProblem checks how small they are
    raise InputError(f"window must be two integers (left, right), -1 for no bound, got {shown(window)}")


def check_dropout(dropout_p: object) -> float:
    """Return the share that is dropped as a float; a seed is drawn only after this. Raises ``InputError``."""
    share = _check_number("dropout_p", dropout_p, "a number, 0 for no dropout")
    check_share(share)
    return share


def parameters_of(function: Callable[_P, Any]) -> Callable[[Callable[..., _R]], Callable[_P, _R]]:
    """Return a decorator that gives a function the parameters of ``function``; it gets all of them by name."""
    signature = inspect.signature(function)

    def decorate(decorated: Callable[..., _R]) -> Callable[_P, _R]:
        @functools.wraps(decorated)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return decorated(**bound.arguments)

        returned = inspect.signature(decorated).return_annotation
        call.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
        return call

    return decorate
