"""The public function that merges partial results of attention over disjoint keys."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError, UnsupportedError, shown
from ...gpu.checks import (
    check_memory,
    check_not_mapped,
    check_not_mixed,
    check_saved_for_gradients,
    check_tensor,
)
from ...gpu.planning import refuse_architecture
from ...gpu.signature import Argument, Pointer, PreparedKernel, Scalar, kernel_source, prepare_kernel
from ...gpu.subclasses import is_traced
from ..checks import DTYPE_NAMES
from ..inputs import refuse_tangents
from ..tiles import block_dim

_MAX_COLUMNS = 1024  # of a program
_ELEMENTS = 1024  # of a program
_WARPS = 4
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001 - what torch.compile's code calls
_Layout = tuple[tuple[int, ...], tuple[int, ...]]  # strides of o [B, H, S, D] and of its LSE [B, H, S]


def merge_attention_states(outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Merge results of the same queries over disjoint keys into the result over all keys.

    ``lse = log(sum_i exp(lses[i]))`` and ``o = sum_i exp(lses[i] - lse) * outs[i]``: what one call would give that sees
    the keys of all parts. Use it where a prefix is shared, for context parallelism, and for prompts in chunks. A mask
    is that of the calls that made the parts; give sinks to one of them alone.

    Args:
        outs: 1 or more outputs ``[B, H, S, D]``, or packed ``[T, H, D]``, of one shape, dtype (fp16, bf16 or fp32) and
            device, any strides but D contiguous; or one tensor of all, parts along its first axis. D is at most 1024 on
            a GPU.
        lses: of each output its LSE ``[B, H, S]``, packed ``[H, T]``, fp32, natural logarithm, any strides, as
            ``return_lse=True`` gives it. Where it is -inf the part saw no key, and what its output holds is ignored.

    Returns:
        o in the shape and dtype of one output, and its LSE in fp32, both contiguous: 0 and -inf where no part saw a
        key.

    Raises:
        InputError: a shape, dtype, device or value breaks the contract above.
        UnsupportedError: no kernel serves D or this GPU.

    Numerics: fp32, one part after the other in the order given; the bits of a row depend on nothing else. It is
    differentiable: on the CPU, under ``torch.compile``, and where gradients are recorded, PyTorch's operations make the
    result.
    """
    parts, sums = _as_parts("outs", outs), _as_parts("lses", lses)
    _check(parts, sums)
    tensors = (*parts, *sums)
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if recorded:
        named = {f"outs[{i}]": part for i, part in enumerate(parts)}
        check_saved_for_gradients(named | {f"lses[{i}]": part for i, part in enumerate(sums)})
    if is_traced(tensors) or recorded or not parts[0].is_cuda:
        return merge_reference(parts, sums)
    refuse_tangents(tensors)
    check_not_mapped(tensors)
    return run_merge(parts, sums)


def merge_reference(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return what ``merge_attention_states`` means, by PyTorch's operations in ``dtype``."""
    wide = [lse.to(dtype) for lse in lses]
    top = functools.reduce(torch.maximum, wide).detach()  # it cancels out
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = [torch.exp(lse - top) for lse in wide]
    total = functools.reduce(torch.add, weights)
    has_keys = total != 0
    divisor = torch.where(has_keys, total, 1.0)
    o = torch.zeros(outs[0].shape, dtype=dtype, device=outs[0].device)
    for out, weight in zip(outs, weights, strict=True):
        each = _as_rows(weight / divisor)
        o = o + torch.where(each == 0, 0.0, out.to(dtype)) * each
    return o.to(outs[0].dtype), torch.where(has_keys, top + divisor.log(), -torch.inf).to(wide[0].dtype)


def _as_rows(weight: Tensor) -> Tensor:
    """Return ``[B, H, S]`` or packed ``[H, T]`` as a factor on outputs."""
    return (weight if weight.dim() == 3 else weight.t())[..., None]


def _as_parts(name: str, parts: Any) -> tuple[Tensor, ...]:
    if isinstance(parts, Tensor):
        check_tensor(name, parts)
        check_memory(name, parts)
        if not parts.dim():
            raise InputError(f"{name} must have a first axis of parts, got shape []")
        parts = parts.unbind(0)
    if not isinstance(parts, (list, tuple)) or not parts:
        raise InputError(f"{name} must be 1 or more tensors in a list, a tuple or a tensor, got {shown(parts)}")
    return tuple(parts)


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    if len(outs) != len(lses):
        raise InputError(f"lses must have an LSE for each of {len(outs)} outputs, got {len(lses)}")
    given = ("outs", outs), ("lses", lses)
    for kind, parts in given:
        for i, tensor in enumerate(parts):
            name = f"{kind}[{i}]"
            check_tensor(name, tensor)
            check_memory(name, tensor)
            if tensor.device != outs[0].device:
                raise InputError(f"{name} must be on the device of outs[0], {outs[0].device}, got {tensor.device}")
    check_not_mixed({f"{name}[{i}]": part for name, parts in given for i, part in enumerate(parts)})
    first = outs[0]
    if first.dim() not in (3, 4):
        raise InputError(f"outs[0] must have axes [B, H, S, D] or [T, H, D], got shape {list(first.shape)}")
    if first.dtype not in DTYPE_NAMES:
        raise InputError(f"outs[0] must be float16, bfloat16 or float32, got {first.dtype}")
    letters, shape = ("B, H, S", first.shape[:3]) if first.dim() == 4 else ("H, T", (first.shape[1], first.shape[0]))
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != first.shape or out.dtype != first.dtype:
            expected = f"shape and dtype of outs[0], {list(first.shape)} and {first.dtype}"
            raise InputError(f"outs[{i}] must have {expected}, got {list(out.shape)} and {out.dtype}")
        if out.shape[-1] > 1 and out.stride(-1) != 1:
            raise InputError(
                f"outs[{i}] must be contiguous along its last axis, got strides {list(out.stride())}",
                hint=".contiguous() makes a copy that is",
            )
        if lse.dtype != torch.float32:
            raise InputError(f"lses[{i}] must be float32, got {lse.dtype}")
        if tuple(lse.shape) != tuple(shape):
            raise InputError(f"lses[{i}] must have shape [{letters}] = {list(shape)}, got {list(lse.shape)}")


def run_merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge part after part, all but the last into fp32; of CPU tensors in Triton's interpreter."""
    o, lse = outs[0], lses[0]
    if len(outs) == 1:
        o, lse = merge_reference(outs, lses)
        return o.contiguous(), lse.contiguous()
    for i, (out, its_lse) in enumerate(zip(outs[1:], lses[1:], strict=True)):
        dtype = out.dtype if i == len(outs) - 2 else torch.float32
        merged = torch.empty(out.shape, dtype=dtype, device=out.device)
        merged_lse = torch.empty(lse.shape, dtype=torch.float32, device=lse.device)
        _launch((o, out, merged), (lse, its_lse, merged_lse))
        o, lse = merged, merged_lse
    return o, lse


def _launch(outs: tuple[Tensor, Tensor, Tensor], lses: tuple[Tensor, Tensor, Tensor]) -> None:
    """Merge the first two into the third."""
    batched = [out if out.dim() == 4 else out.transpose(0, 1)[None] for out in outs]
    sums = [lse if lse.dim() == 3 else lse[None] for lse in lses]
    if not outs[0].numel():
        lses[2].copy_(torch.logaddexp(lses[0], lses[1]))  # D is 0, or nothing is written
        return
    layouts = tuple((out.stride(), lse.stride()) for out, lse in zip(batched, sums, strict=True))
    dtypes = tuple(DTYPE_NAMES[out.dtype] for out in outs)
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (*outs, *lses))
    key = tuple(batched[0].shape), layouts, dtypes, aligned
    device = outs[0].device
    if device.type == "cpu":
        from ..forward.prepare import interpret

        interpret(merge_kernel(*key), (*batched[:2], *sums[:2], batched[2], sums[2]))
        return
    with torch.cuda.device(device):
        assert _raw_stream is not None
        addresses = [tensor.data_ptr() for tensor in (*batched[:2], *sums[:2], batched[2], sums[2])]
        _launch_of(*key, device.index)(_raw_stream(device.index), *addresses)


@functools.lru_cache(maxsize=1024)
def _launch_of(
    shape: tuple[int, ...], layouts: tuple[_Layout, ...], dtypes: tuple[str, ...], aligned: bool, device: int  # noqa: FBT001 - a key
) -> Callable[..., None]:  # fmt: skip
    from ...gpu.device import gpu_of_device
    from ...gpu.launch import prepare_launch

    arch = gpu_of_device(device).arch
    refuse_architecture(arch)
    kernel = merge_kernel(shape, layouts, dtypes, aligned)
    return prepare_launch(kernel.source, arch, device, kernel.grid, kernel.scalars)


def merge_kernel(
    shape: tuple[int, ...], layouts: tuple[_Layout, ...], dtypes: tuple[str, ...], aligned: bool  # noqa: FBT001 - a key
) -> PreparedKernel:  # fmt: skip
    """Return the launch that merges two parts of ``[B, H, S, D]``; layouts and dtypes are theirs and the output's."""
    from .merge_states_triton import _merge_states_kernel

    batch, heads, seqlen, columns = shape
    if columns > _MAX_COLUMNS:
        raise UnsupportedError(f"no kernel merges outputs of D {columns}", hint=f"at most {_MAX_COLUMNS} is served")
    rows, block_d = batch * heads * seqlen, block_dim(columns)
    if rows >= 2**31 - _ELEMENTS:
        raise UnsupportedError(f"no kernel merges {rows} rows", hint="fewer than 2**31 are served")
    block_m = max(1, min(_ELEMENTS // block_d, 32))
    arguments: dict[str, Argument] = {}
    names = (("o_a", "lse_a"), ("o_b", "lse_b"), ("o", "lse"))
    for (o, lse), (o_strides, lse_strides), dtype in zip(names, layouts, dtypes, strict=True):
        arguments[f"{o}_ptr"] = Pointer(dtype, aligned=aligned)
        arguments[f"{lse}_ptr"] = Pointer("fp32", aligned=aligned)
        for axis, o_stride, lse_stride in zip("bhm", o_strides[:3], lse_strides, strict=True):
            arguments[f"{o}_strides.{axis}"] = Scalar("i64", o_stride)
            arguments[f"{lse}_strides.{axis}"] = Scalar("i64", lse_stride)
    arguments |= {"rows": Scalar("i32", rows), "heads": Scalar("i32", heads), "seqlen": Scalar("i32", seqlen)}
    constants = {"D": columns, "BLOCK_M": block_m, "BLOCK_D": block_d}
    source = kernel_source(_merge_states_kernel, arguments, constants, num_warps=_WARPS)
    return prepare_kernel(source, (-(-rows // block_m), 1, 1), arguments)
