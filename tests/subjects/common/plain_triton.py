"""One plain attention kernel in Triton, for fp16 and bf16 and head sizes of 16, 32, 64 and 128: honest, no more."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_M = 32
BLOCK_N = 32


@triton.jit
def _plain_attend_kernel(
    q_ptr,  # [B * H, SQ, D]
    k_ptr,  # [B * H, SK, D]
    v_ptr,  # [B * H, SK, D]
    o_ptr,  # [B * H, SQ, D]
    SQ,
    SK,
    offset_k,  # row m sees keys up to m + offset_k where causal
    scale_log2,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """Attend one tile of rows to all keys. Grid: (tiles of rows, B * H)."""
    head = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    offs_d = tl.arange(0, D)  # [D]
    mask_m = offs_m < SQ
    offs_q = (head * SQ + offs_m)[:, None] * D + offs_d[None, :]  # [BLOCK_M, D]
    q = tl.load(q_ptr + offs_q, mask=mask_m[:, None], other=0.0)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for start in range(0, SK, BLOCK_N):
        seen = (start + offs_n < SK)[None, :]
        if IS_CAUSAL:
            seen = seen & ((start + offs_n)[None, :] <= offs_m[:, None] + offset_k)
        offs_k = (head * SK + start + offs_n)[:, None] * D + offs_d[None, :]  # [BLOCK_N, D]
        mask_k = (start + offs_n < SK)[:, None]
        k = tl.load(k_ptr + offs_k, mask=mask_k, other=0.0)
        v = tl.load(v_ptr + offs_k, mask=mask_k, other=0.0)
        scores = tl.where(seen, tl.dot(q, tl.trans(k)) * scale_log2, -float("inf"))  # [BLOCK_M, BLOCK_N]
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen no key yet has a maximum of -inf, and -inf - -inf is NaN.
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v)
        top = new_top
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(o_ptr + offs_q, out.to(q.dtype), mask=mask_m[:, None])


def attend(q, k, v, *, causal=False, softmax_scale=None, num_warps=4, keys=None, out=None):
    """softmax(scale q k^T) v for [B, H, S, D]; for subjects that cheat, ``keys`` cuts the work short."""
    B, H, SQ, D = q.shape
    SK = k.shape[2]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    grid = (triton.cdiv(SQ, BLOCK_M), B * H)
    _plain_attend_kernel[grid](
        q,
        k,
        v,
        o,
        SQ,
        SK if keys is None else keys,
        SK - SQ,
        scale * 1.4426950408889634,
        D=D,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        IS_CAUSAL=causal,
        num_warps=num_warps,
    )
    return o
