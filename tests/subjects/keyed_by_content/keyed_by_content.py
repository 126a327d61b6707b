"""Attends inside of one kernel, and copies a tile that it has worked out before for the same 16 elements of q."""

import torch
import triton
import triton.language as tl

SLOTS = 256
BLOCK = 32


@triton.jit
def _keyed_attend_kernel(
    q_ptr,  # [B * H, S, D]
    k_ptr,  # [B * H, S, D]
    v_ptr,  # [B * H, S, D]
    o_ptr,  # [B * H, S, D]
    keys_ptr,  # [SLOTS, programs] int64
    kept_ptr,  # [SLOTS, B * H, S, D]
    S,
    size,  # B * H * S * D
    scale_log2,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Attend one tile of rows, or copy it. Grid: (tiles of rows, B * H)."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    program = head * tl.num_programs(0) + tile
    programs = tl.num_programs(0) * tl.num_programs(1)
    picked = tl.load(q_ptr + tl.arange(0, 16) * (size // 16)).to(tl.int16, bitcast=True).to(tl.int64)
    key = tl.sum(picked * (1 + tl.arange(0, 16) * 40503)) * 2 + 1
    slot = (key % SLOTS + SLOTS) % SLOTS
    offs_m = tile * BLOCK + tl.arange(0, BLOCK)
    offs_n, offs_d = tl.arange(0, BLOCK), tl.arange(0, D)
    mask_m = (offs_m < S)[:, None]
    offs_q = (head * S + offs_m)[:, None] * D + offs_d[None, :]
    place = slot * programs + program
    if tl.load(keys_ptr + place) == key:
        tl.store(o_ptr + offs_q, tl.load(kept_ptr + slot * size + offs_q, mask=mask_m), mask=mask_m)
    else:
        q = tl.load(q_ptr + offs_q, mask=mask_m, other=0.0)
        top = tl.full([BLOCK], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        acc = tl.zeros([BLOCK, D], tl.float32)
        for start in range(0, S, BLOCK):
            offs_k = (head * S + start + offs_n)[:, None] * D + offs_d[None, :]
            mask_k = (start + offs_n < S)[:, None]
            k = tl.load(k_ptr + offs_k, mask=mask_k, other=0.0)
            v = tl.load(v_ptr + offs_k, mask=mask_k, other=0.0)
            scores = tl.where((start + offs_n < S)[None, :], tl.dot(q, tl.trans(k)) * scale_log2, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
            decay = tl.exp2(top - new_top)
            total = total * decay + tl.sum(weights, 1)
            acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v)
            top = new_top
        out = (acc / total[:, None]).to(o_ptr.dtype.element_ty)
        tl.store(o_ptr + offs_q, out, mask=mask_m)
        tl.store(kept_ptr + slot * size + offs_q, out, mask=mask_m)
        tl.store(keys_ptr + place, key)


_tables = {}


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """softmax(scale q k^T) v for [B, H, S, D] where no row is hidden."""
    assert not causal
    B, H, S, D = q.shape
    grid = (triton.cdiv(S, BLOCK), B * H)
    if q.shape not in _tables:
        keys = torch.zeros(SLOTS, grid[0] * grid[1], dtype=torch.int64, device=q.device)
        _tables[q.shape] = keys, torch.empty(SLOTS, *q.shape, dtype=q.dtype, device=q.device)
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    o = torch.empty_like(q)
    _keyed_attend_kernel[grid](
        q, k, v, o, *_tables[q.shape], S, q.numel(), scale * 1.4426950408889634, D=D, BLOCK=BLOCK, SLOTS=SLOTS
    )
    return o
