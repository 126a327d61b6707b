"""Waits on the GPU for a flag that nobody sets."""

import torch
import triton
import triton.language as tl


@triton.jit
def _waiting_kernel(
    flag_ptr,  # [1] int32
    o_ptr,  # any
):
    """Store once the flag is set. Grid: (1,)."""
    flag = 0
    while flag == 0:
        flag = tl.load(flag_ptr, volatile=True)
    tl.store(o_ptr, 1.0)


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """Launch the kernel; it does not end."""
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _waiting_kernel[(1,)](torch.zeros(1, dtype=torch.int32, device=q.device), o)
    return o
