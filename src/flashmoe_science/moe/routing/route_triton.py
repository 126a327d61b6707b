"""Choose the experts of each token and their weights; the gradient of the logits (Triton, sm_80 and newer).

Choices are compared as integers in the order of their floats, which orders ties, NaN and experts already taken the same
way in every run: ties go to the lower expert.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..primitives import wide_enough

TAKEN: tl.constexpr = tl.constexpr(-(2**31))
FORBIDDEN: tl.constexpr = tl.constexpr(-(2**31) + 1)
LOWEST: tl.constexpr = tl.constexpr(-(2**31) + 2)  # NaN and -inf


@triton.jit
def _order(x):
    """Map fp32 to int32 in the same order; both zeros are equal, and NaN counts as -inf."""
    x = tl.where(x == 0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x > -float("inf"), tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), LOWEST)


@triton.jit
def _first_of(keys, columns, BLOCK: tl.constexpr):
    """Return the column of the largest key of each row; the first one of ties."""
    largest = tl.max(keys, 1)
    return tl.min(tl.where(keys == largest[:, None], columns[None, :], BLOCK - 1), 1)


@triton.jit
def _forbid_groups(
    keys, choice, columns, EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr,
):  # fmt: skip
    """Exclude experts outside the best groups. The value of a group is the sum of its ``BEST`` best choices."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    groups = tl.arange(0, BLOCK_G)
    worth = tl.full([BLOCK_T, BLOCK_G], TAKEN, tl.int32)
    for g in tl.static_range(GROUPS):
        inside = (columns // SIZE == g)[None, :] & (columns < EXPERTS)[None, :]
        first = _first_of(tl.where(inside, keys, TAKEN), columns, BLOCK_E)
        total = tl.max(tl.where(inside, choice, -float("inf")), 1)
        if BEST > 1:
            rest = inside & (columns[None, :] != first[:, None])
            total += tl.max(tl.where(rest, choice, -float("inf")), 1)
        worth = tl.where((groups == g)[None, :], _order(total)[:, None], worth)
    is_best = tl.zeros([BLOCK_T, BLOCK_G], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        best = groups[None, :] == _first_of(worth, groups, BLOCK_G)[:, None]
        is_best = tl.where(best, 1, is_best)
        worth = tl.where(best, TAKEN, worth)
    for g in tl.static_range(GROUPS):
        is_out = tl.sum(tl.where((groups == g)[None, :], is_best, 0), 1)[:, None] == 0
        inside = (columns // SIZE == g)[None, :] & (columns < EXPERTS)[None, :]
        keys = tl.where(inside & is_out, FORBIDDEN, keys)
    return keys


@triton.jit
def _scores(logits, mask_e, IS_SOFTMAX: tl.constexpr):
    """Return softmax or sigmoid of each row."""
    if IS_SOFTMAX:
        score = tl.exp(logits - tl.max(logits, 1)[:, None])
        score = tl.where(mask_e[None, :], score, 0.0)
        score /= tl.sum(score, 1)[:, None]
    else:
        score = 1 / (1 + tl.exp(-logits))
    return score


@triton.jit
def _route_kernel(
    logits_ptr,  # [T, E]
    bias_ptr,  # [E], or None
    weights_ptr,  # [T, K] fp32
    ids_ptr,  # [T, K] int32
    tokens,
    scale,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, STRIDE_T: tl.constexpr, STRIDE_E: tl.constexpr,
    IS_SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Route BLOCK_T tokens. Grid: (cdiv(T, BLOCK_T),)."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns, slots = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    mask_t, mask_e = rows < tokens, columns < EXPERTS
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    at = rows.to(tl.int64)[:, None] * STRIDE_T + wide_enough(columns, EXPERTS, STRIDE_E)[None, :] * STRIDE_E
    logits = tl.load(logits_ptr + at, mask=mask_t[:, None] & mask_e[None, :], other=-float("inf")).to(tl.float32)
    logits = tl.where(mask_t[:, None], logits, 0.0)  # rows past the last must not give NaN
    score = _scores(logits, mask_e, IS_SOFTMAX)
    # Compare logits: scores are monotonic in them, but different logits can round to one score.
    choice = logits
    if bias_ptr is not None:
        choice = score + tl.load(bias_ptr + columns, mask=mask_e, other=0.0).to(tl.float32)[None, :]
    choice = tl.where(choice > -float("inf"), choice, -float("inf"))  # not NaN
    keys = tl.where(mask_e[None, :], _order(choice), TAKEN)  # [BLOCK_T, BLOCK_E]
    if GROUPS > 1:
        keys = _forbid_groups(
            keys, choice, columns, EXPERTS, BLOCK_T, BLOCK_E, GROUPS, BLOCK_G, TOP_GROUPS, BEST
        )  # fmt: skip
    weights = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    ids = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    for k in tl.range(0, TOPK):
        expert = _first_of(keys, columns, BLOCK_E)
        is_it = columns[None, :] == expert[:, None]
        weight = tl.sum(tl.where(is_it, score, 0.0), 1)
        weights = tl.where((slots == k)[None, :], weight[:, None], weights)
        ids = tl.where((slots == k)[None, :], expert[:, None], ids)
        keys = tl.where(is_it, TAKEN, keys)
    if RENORMALIZE:
        weights /= tl.sum(weights, 1)[:, None] + 1e-20
    out = rows.to(tl.int64)[:, None] * TOPK + slots[None, :]
    mask = mask_t[:, None] & (slots < TOPK)[None, :]
    tl.store(weights_ptr + out, weights * scale, mask=mask)
    tl.store(ids_ptr + out, ids, mask=mask)


@triton.jit
def _route_backward_kernel(
    logits_ptr,  # [T, E]
    ids_ptr,  # [T, K] int32
    dweights_ptr,  # [T, K] fp32
    dlogits_ptr,  # [T, E]
    tokens,
    scale,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, STRIDE_T: tl.constexpr, STRIDE_E: tl.constexpr,
    IS_SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the logits of BLOCK_T tokens. Grid: (cdiv(T, BLOCK_T),)."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_E)
    mask_t, mask_e = rows < tokens, columns < EXPERTS
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    at = rows.to(tl.int64)[:, None] * STRIDE_T + wide_enough(columns, EXPERTS, STRIDE_E)[None, :] * STRIDE_E
    logits = tl.load(logits_ptr + at, mask=mask_t[:, None] & mask_e[None, :], other=-float("inf")).to(tl.float32)
    logits = tl.where(mask_t[:, None], logits, 0.0)  # rows past the last must not give NaN
    score = _scores(logits, mask_e, IS_SOFTMAX)
    dscore = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    chosen = tl.zeros([BLOCK_T, BLOCK_E], tl.int32)
    for k in tl.range(0, TOPK):
        pair = rows.to(tl.int64) * TOPK + k
        expert = tl.load(ids_ptr + pair, mask=mask_t, other=0)
        dweight = tl.load(dweights_ptr + pair, mask=mask_t, other=0.0)
        is_it = columns[None, :] == expert[:, None]
        dscore = tl.where(is_it, dweight[:, None], dscore)
        chosen = tl.where(is_it, 1, chosen)
    if RENORMALIZE:
        inverse = 1 / (tl.sum(tl.where(chosen > 0, score, 0.0), 1) + 1e-20)
        mean = tl.sum(dscore * score, 1) * inverse
        dscore = tl.where(chosen > 0, (dscore - mean[:, None]) * inverse[:, None], 0.0)
    if IS_SOFTMAX:
        dlogits = score * (dscore - tl.sum(dscore * score, 1)[:, None])
    else:
        dlogits = dscore * score * (1 - score)
    out = rows.to(tl.int64)[:, None] * EXPERTS + columns[None, :]
    mask = mask_t[:, None] & mask_e[None, :]
    tl.store(dlogits_ptr + out, (dlogits * scale).to(dlogits_ptr.dtype.element_ty), mask=mask)
