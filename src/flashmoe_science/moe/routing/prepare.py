"""Turn a call of ``route``, or of its gradient, into a kernel to compile and its launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton

from ...errors import UnsupportedError
from ...gpu.signature import Argument, Pointer, PreparedKernel, Scalar, kernel_source, prepare_kernel
from ..problem import Routing
from .route_triton import _route_backward_kernel, _route_kernel

MAX_EXPERTS = 4096  # a program holds a row of logits in registers
_ELEMENTS = 2048  # logits of one program; at least one row
_WARPS = 4


def kernel_of(routing: Routing, arch: int) -> PreparedKernel:
    """Return the prepared kernel. Raises ``UnsupportedError``."""
    r = routing
    if r.experts > MAX_EXPERTS:
        raise UnsupportedError(
            f"no kernel routes among {r.experts} experts", hint=f"the most that are served: {MAX_EXPERTS}"
        )
    constants = {
        "GROUPS": r.groups,
        "BLOCK_G": max(2, triton.next_power_of_2(r.groups)),
        "TOP_GROUPS": r.top_groups,
        "BEST": min(2 if r.bias else 1, r.experts // r.groups),
        "BLOCK_K": max(2, triton.next_power_of_2(r.top_k)),
    }
    arguments: dict[str, Argument] = {
        "logits_ptr": Pointer(r.dtype, "logits"),
        "bias_ptr": Pointer(r.bias, "bias") if r.bias else None,
        "weights_ptr": Pointer("fp32", "weights", aligned=True),
        "ids_ptr": Pointer("i32", "ids", aligned=True),
    }
    return _prepare(_route_kernel, r, arch, arguments, constants)


def backward_kernel_of(routing: Routing, arch: int) -> PreparedKernel:
    """Return the prepared kernel of the gradient of the logits."""
    arguments = {
        "logits_ptr": Pointer(routing.dtype, "logits"),
        "ids_ptr": Pointer("i32", "ids"),
        "dweights_ptr": Pointer("fp32", "dweights"),
        "dlogits_ptr": Pointer(routing.dtype, "dlogits", aligned=True),
    }
    return _prepare(_route_backward_kernel, routing, arch, arguments, {})


def _prepare(
    function: Any, r: Routing, arch: int, pointers: Mapping[str, Argument], constants: Mapping[str, Any]
) -> PreparedKernel:
    """Return a kernel whose programs each process some rows of logits."""
    block_e = max(16, triton.next_power_of_2(r.experts))
    block_t = max(1, min(16, _ELEMENTS // block_e))
    shared = {
        "EXPERTS": r.experts, "TOPK": r.top_k, "STRIDE_T": r.strides[0], "STRIDE_E": r.strides[1],
        "IS_SOFTMAX": r.score == "softmax", "RENORMALIZE": r.renormalize, "BLOCK_T": block_t, "BLOCK_E": block_e,
    }  # fmt: skip
    arguments = {**pointers, "tokens": Scalar("i32", r.tokens), "scale": Scalar("fp32", r.scale)}
    source = kernel_source(
        function, arguments, {**shared, **constants}, num_warps=_WARPS, max_registers=255, dependent_launch=arch >= 90
    )
    return prepare_kernel(source, (triton.cdiv(r.tokens, block_t), 1, 1), arguments)
