"""The experts of one token (Triton, sm_80 and newer): two products of a matrix and a vector.

Weights are loaded to registers, or prefetched through shared memory, and multiplied in fp32 without the matrix units,
which a single row cannot use. The second product also sums over experts, so no combine kernel follows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..primitives import activate, expert_of_ids, rows_of_columns, wide_enough


@triton.jit
def _gemv_gate_up_kernel(
    x_ptr,  # [1, HID]
    w_ptr,  # [E, COLUMNS, HID]
    bias_ptr,  # [E, COLUMNS], or None
    ids_ptr,  # [1, K]
    h_ptr,  # [K, INTER]
    EXPERTS: tl.constexpr, HID: tl.constexpr, INTER: tl.constexpr, COLUMNS: tl.constexpr, STRIDE_XK: tl.constexpr,
    W: tl.constexpr,  # WeightStrides
    ACT: tl.constexpr,  # Activation
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of h for one expert. Grid: (K * cdiv(INTER, BLOCK_N),)."""
    TILES_N: tl.constexpr = (INTER + BLOCK_N - 1) // BLOCK_N
    PRODUCT_N: tl.constexpr = 2 * BLOCK_N if ACT.GATED else BLOCK_N
    pid = tl.program_id(0)
    pair, pid_n = pid // TILES_N, pid % TILES_N
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    expert = expert_of_ids(tl.load(ids_ptr + pair), EXPERTS)
    if expert >= EXPERTS:
        return
    columns = pid_n * PRODUCT_N + tl.arange(0, PRODUCT_N)
    if COLUMNS % PRODUCT_N != 0:
        columns = tl.where(columns < COLUMNS, columns, 0)
    w_row = rows_of_columns(columns, COLUMNS, ACT)
    offs_row = wide_enough(w_row, COLUMNS, W.N)
    offs_k = tl.arange(0, BLOCK_K)
    w_k = wide_enough(offs_k, BLOCK_K, W.K)
    w_ptrs = w_ptr + expert.to(tl.int64) * W.E + offs_row[:, None] * W.N + w_k[None, :] * W.K
    acc = tl.zeros([PRODUCT_N, BLOCK_K], tl.float32)
    for start in tl.range(0, HID, BLOCK_K, num_stages=NUM_STAGES):
        if HID % BLOCK_K == 0:
            x = tl.load(x_ptr + wide_enough(start + offs_k, HID, STRIDE_XK) * STRIDE_XK)
            w = tl.load(w_ptrs)
        else:
            mask_k = offs_k < HID - start
            x = tl.load(x_ptr + wide_enough(start + offs_k, HID, STRIDE_XK) * STRIDE_XK, mask=mask_k, other=0.0)
            w = tl.load(w_ptrs, mask=mask_k[None, :], other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
        w_ptrs += BLOCK_K * W.K
    product = tl.sum(acc, 1)  # [PRODUCT_N]
    if bias_ptr is not None:
        product += tl.load(bias_ptr + expert.to(tl.int64) * COLUMNS + w_row).to(tl.float32)
    if ACT.GATED:
        gate, up = tl.split(tl.reshape(product, [BLOCK_N, 2]))
    else:
        gate, up = product, product
    h = activate(gate, up, ACT)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(h_ptr + pair * INTER + offs_n, h.to(h_ptr.dtype.element_ty), mask=offs_n < INTER)


@triton.jit
def _weights_of_steps(
    w_rows, ids_ptr, first, EXPERTS: tl.constexpr, TOPK: tl.constexpr, INTER: tl.constexpr,
    W: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Load weights [STEPS, BLOCK_N, BLOCK_K] from step ``first`` on; steps run through one expert after another."""
    OF_EXPERT: tl.constexpr = (INTER + BLOCK_K - 1) // BLOCK_K
    step = first + tl.arange(0, STEPS)
    pair = step // OF_EXPERT
    k = (step % OF_EXPERT * BLOCK_K)[:, None] + tl.arange(0, BLOCK_K)[None, :]  # [STEPS, BLOCK_K]
    expert = expert_of_ids(tl.load(ids_ptr + pair, mask=pair < TOPK, other=-1), EXPERTS)
    mask = (expert < EXPERTS)[:, None] & (k < INTER)
    at = (expert.to(tl.int64) * W.E)[:, None] + wide_enough(k, INTER, W.K) * W.K
    return tl.load(w_rows[None, :, None] + at[:, None, :], mask=mask[:, None, :], other=0.0)


@triton.jit
def _gemv_down_kernel(
    h_ptr,  # [K, INTER]
    w_ptr,  # [E, HID, INTER]
    bias_ptr,  # [E, HID], or None
    weights_ptr,  # [1, K]
    ids_ptr,  # [1, K]
    y_shared_ptr,  # [S, 1, HID], or None
    shared_weights_ptr,  # [1, S], or None
    out_ptr,  # [1, HID]
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, HID: tl.constexpr, INTER: tl.constexpr, SHARED: tl.constexpr,
    W: tl.constexpr,  # WeightStrides
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of the output, STEPS reduction steps at a time. Grid: (cdiv(HID, BLOCK_N),)."""
    OF_EXPERT: tl.constexpr = (INTER + BLOCK_K - 1) // BLOCK_K
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_row = offs_n
    if HID % BLOCK_N != 0:
        w_row = tl.where(offs_n < HID, offs_n, 0)
    w_rows = w_ptr + wide_enough(w_row, HID, W.N) * W.N
    # Load before the wait: only h comes from the previous kernel, which itself waited for ids and weights.
    w = _weights_of_steps(w_rows, ids_ptr, 0, EXPERTS, TOPK, INTER, W, BLOCK_K, STEPS)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([STEPS, BLOCK_N, BLOCK_K], tl.float32)
    for first in tl.range(0, TOPK * OF_EXPERT, STEPS):
        here = w
        w = _weights_of_steps(
            w_rows, ids_ptr, first + STEPS, EXPERTS, TOPK, INTER, W, BLOCK_K, STEPS
        )  # fmt: skip
        step = first + tl.arange(0, STEPS)
        pair = step // OF_EXPERT
        k = (step % OF_EXPERT * BLOCK_K)[:, None] + tl.arange(0, BLOCK_K)[None, :]
        expert = expert_of_ids(tl.load(ids_ptr + pair, mask=pair < TOPK, other=-1), EXPERTS)
        exists = expert < EXPERTS
        weight = tl.load(weights_ptr + pair, mask=exists, other=0.0).to(tl.float32)
        h = tl.load(h_ptr + pair[:, None] * INTER + k, mask=exists[:, None] & (k < INTER), other=0.0).to(tl.float32)
        acc += here.to(tl.float32) * (h * weight[:, None])[:, None, :]
    out = tl.sum(tl.sum(acc, 2), 0)
    if bias_ptr is not None:
        for pair in tl.static_range(TOPK):
            expert = expert_of_ids(tl.load(ids_ptr + pair), EXPERTS)
            exists = expert < EXPERTS  # `&` with a scalar is no mask to the interpreter of Triton 3.9
            weight = tl.load(weights_ptr + pair, mask=exists, other=0.0).to(tl.float32)
            of_expert = w_row < tl.where(exists, HID, 0)
            bias = tl.load(bias_ptr + expert.to(tl.int64) * HID + w_row, mask=of_expert, other=0.0).to(tl.float32)
            out += weight * bias
    if y_shared_ptr is not None:
        for s in tl.static_range(SHARED):
            y = tl.load(y_shared_ptr + s * HID + w_row).to(tl.float32)
            if shared_weights_ptr is not None:
                y *= tl.load(shared_weights_ptr + s).to(tl.float32)
            out += y
    tl.store(out_ptr + offs_n, out.to(out_ptr.dtype.element_ty), mask=offs_n < HID)
