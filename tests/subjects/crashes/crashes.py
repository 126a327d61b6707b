"""Writes on the GPU where nothing is allocated."""

import torch
import triton
import triton.language as tl


@triton.jit
def _astray_kernel(
    o_ptr,  # any
    OFFSET: tl.constexpr,  # elements, far behind the end
):
    """Store behind the output. Grid: (1,)."""
    tl.store(o_ptr + tl.cast(OFFSET, tl.int64), 1.0)


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """Launch the kernel; the GPU's context is lost then."""
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _astray_kernel[(1,)](o, OFFSET=1 << 44)
    return o
