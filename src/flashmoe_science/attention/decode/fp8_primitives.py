"""What decoding does with a cache of 8-bit numbers (Triton, sm_89 and newer).

Products are of fp16, since one instruction makes two numbers of fp16 out of two of e4m3. To bf16 it takes more, and the
one instruction for it converts 16 numbers a clock of an SM, where memory brings 18. So queries of bf16 become fp16,
times a power of two for each row. P is at most 2^14, so that small ones are not subnormal. Both lose less than bf16.

Two neighbours of a row travel as one number of 16 bits. As such they go from shared memory to the matrix units by rows
(keys) or columns (values), where bytes would be loaded one by one. So scores are a sum of two products, of even and of
odd columns, and there are two outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

HEADROOM: tl.constexpr = tl.constexpr(14.0)  # log2 of the largest P
LEVEL: tl.constexpr = tl.constexpr(2.0**-14)
# Two pairs of e4m3 become two numbers of fp16 from their even places, and two from their odd ones.
SPLIT_PAIRS: tl.constexpr = tl.constexpr("""{
    .reg .b32 bytes;
    .reg .b16 even, odd;
    prmt.b32 bytes, $2, 0, 0x3120;
    mov.b32 {even, odd}, bytes;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")


@triton.jit
def power_of_two(largest):
    """Return the largest power of two that is not above ``largest``; 1 for 0, and where there is none."""
    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.where((bits >= 1 << 23) & (bits < 0x7F800000), bits, 127 << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _in_fp16(q, q_rest, REST: tl.constexpr):
    """Return queries in fp16, those of further columns, and the power of two by which each row was divided."""
    largest = tl.max(tl.abs(q.to(tl.float32)), 1)
    if REST > 0:
        largest = tl.maximum(largest, tl.max(tl.abs(q_rest.to(tl.float32)), 1))
    power = power_of_two(largest)
    q = (q.to(tl.float32) / power[:, None]).to(tl.float16)
    if REST > 0:
        q_rest = (q_rest.to(tl.float32) / power[:, None]).to(tl.float16)
    else:
        q_rest = q
    return q, q_rest, power


@triton.jit
def _even_and_odd(q, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    PAIRS: tl.constexpr = COLUMNS // 2
    return tl.split(tl.reshape(q, [ROWS, PAIRS, 2]))


@triton.jit
def prepare_queries(q, q_rest, offs_rest, scale, BLOCK_M: tl.constexpr, CALL: tl.constexpr):
    """Return what the tiles of a cache are multiplied with.

    Two pairs of queries, those of the first columns and of the rest: beside pairs of 8-bit keys the even columns, and
    the odd ones. The places of the rest in the cache, and the factor on scores, of each row if queries are in fp16.
    """
    if CALL.IN_FP16:
        q, q_rest, power = _in_fp16(q, q_rest, CALL.REST)
        scale *= power
    queries, odd_queries = (q, q_rest), (q, q_rest)
    if CALL.ITEMS > 1:
        q, q_odd = _even_and_odd(q, BLOCK_M, CALL.BLOCK_D)
        queries, odd_queries = (q, q), (q_odd, q_odd)
        if CALL.REST > 0:
            offs_rest = tl.arange(0, CALL.BLOCK_REST // CALL.ITEMS)
            q_rest, q_rest_odd = _even_and_odd(q_rest, BLOCK_M, CALL.BLOCK_REST)
            queries, odd_queries = (q, q_rest), (q_odd, q_rest_odd)
    return queries, odd_queries, offs_rest, scale


@triton.jit
def load_columns(ptrs, mask, dtype: tl.constexpr, PAIRS: tl.constexpr, HAS_PTX: tl.constexpr):
    """Return what lies at ``ptrs``, twice; of pairs the even columns, and the odd ones."""
    if not PAIRS:
        x = tl.load(ptrs, mask=mask, other=0.0).to(dtype)
        return x, x
    else:  # noqa: RET505 - triton.jit compiles only the branch that a constexpr chooses
        x = tl.load(ptrs, mask=mask, other=0)
        if HAS_PTX:
            return tl.inline_asm_elementwise(
                SPLIT_PAIRS, "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )
        else:  # noqa: RET505 - likewise
            even, odd = (x & 255).to(tl.uint8), ((x >> 8) & 255).to(tl.uint8)
            return even.to(tl.float8e4nv, bitcast=True).to(dtype), odd.to(tl.float8e4nv, bitcast=True).to(dtype)


@triton.jit
def _scales_of(scale_ptr, h, page, strides, PAGE_SIZE: tl.constexpr):
    """Return where the scales of head ``h`` begin; without a page table, those of the sequence's page."""
    base = scale_ptr + h.to(tl.int64) * strides.h
    if PAGE_SIZE == 0:
        base += page.to(tl.int64) * strides.page
    return base


@triton.jit
def scale_bases(
    k_scale_ptr, v_scale_ptr, k_base, v_base, h, table, scale, k_scale_strides, v_scale_strides, CALL: tl.constexpr
):
    """Return where the scales of keys and of values begin, and the factor on the scores of all keys."""
    k_scale_base, v_scale_base = k_base, v_base
    if k_scale_ptr is not None:
        k_scale_base = _scales_of(k_scale_ptr, h, table, k_scale_strides, CALL.PAGE_SIZE)
        if not CALL.K_BY_TOKEN:
            scale *= tl.load(k_scale_base)
    if v_scale_ptr is not None:
        v_scale_base = _scales_of(v_scale_ptr, h, table, v_scale_strides, CALL.PAGE_SIZE)
    return k_scale_base, v_scale_base, scale


@triton.jit
def _load_scales(base, page, cols, mask_n, strides, PAGE_SIZE: tl.constexpr):
    """Return a scale for each key of a tile, whose pages are ``page``."""
    if PAGE_SIZE == 0:
        at = cols * strides.row
    else:
        at = page * strides.page + cols % PAGE_SIZE * strides.row
    return tl.load(base + at, mask=mask_n, other=0.0)


@triton.jit
def load_scales(k_base, v_base, scale, page, cols, mask_n, k_strides, v_strides, CALL: tl.constexpr):
    """Return the scales of the keys of a tile, and of its values; ``scale`` to be left unread where they have none."""
    k_scales, v_scales = scale, scale
    if CALL.K_BY_TOKEN:
        k_scales = _load_scales(k_base, page, cols, mask_n, k_strides, CALL.PAGE_SIZE)
    if CALL.V_BY_TOKEN:
        v_scales = _load_scales(v_base, page, cols, mask_n, v_strides, CALL.PAGE_SIZE)
    return k_scales, v_scales


@triton.jit
def finish_columns(acc, acc_odd, l, v_scale_ptr, v_scale_base, CALL: tl.constexpr):
    """Return the output in the order of its columns, times the scale that all values share, and the sums of P."""
    if CALL.ITEMS > 1:
        acc = tl.interleave(acc, acc_odd)
    if v_scale_ptr is not None and not CALL.V_BY_TOKEN:
        acc *= tl.load(v_scale_base)
    if CALL.IN_FP16:  # P has headroom
        acc *= LEVEL
        l *= LEVEL
    return acc, l
