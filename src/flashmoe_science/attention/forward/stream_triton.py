"""Attention forward, streaming over the keys (Triton, sm_80 and newer).

One program owns ``BLOCK_M`` query rows of one head and walks over the keys in tiles of ``BLOCK_N`` with the online
softmax. With ``SPLITS > 1`` it walks over one share of the keys and leaves partial results for ``merge_triton``.

Unused options are None or a constant, and cost no instruction: a window, a softcap, sinks, ALiBi,
a bias, packed sequences, pages, dropout.

Source: FlashAttention-2 (Dao, 2023, arXiv 2307.08691) for the loop; Flash-Decoding (Dao et al., 2023) for the split.
Ours: tiles free of masks except at the edges, rows without keys, one grid axis in longest-first order when causal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernel_arguments import BiasStrides, Dropout, ForwardSizes, Sequences, Strides, Window
from ..primitives import bias_rows_of, cap_scores, head_offset, kept_by, load_dropout, load_rows, used_lengths


@triton.jit
def _load_pages(table, start_n, offs_n, first_key, seqlen_k, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the page of each key of a tile, or the one page of all; 0 for keys outside of [first_key, seqlen_k)."""
    if PAGE_SIZE % BLOCK_N == 0:
        return tl.load(table + start_n // PAGE_SIZE, mask=start_n < seqlen_k, other=0)
    else:  # noqa: RET505 - triton.jit compiles only the branch that a constexpr chooses
        cols = start_n + offs_n
        return tl.load(table + cols // PAGE_SIZE, mask=(cols >= first_key) & (cols < seqlen_k), other=0)


@triton.jit
def _tile_pointers(ptrs, step, cols, page, stride_page, STRIDE_N: tl.constexpr, ALIGN: tl.constexpr,
                   PAGE_SIZE: tl.constexpr):  # fmt: skip
    """Return pointers to one tile of K or V; ``ptrs`` are those of the first one or, with pages, of a page's row 0."""
    if PAGE_SIZE == 0:
        return ptrs + step * STRIDE_N
    else:  # noqa: RET505 - triton.jit compiles only the branch that a constexpr chooses
        rows = page.to(tl.int64) * stride_page * ALIGN + (cols % PAGE_SIZE).to(tl.int64) * STRIDE_N
        return ptrs + rows[:, None]


@triton.jit
def _change_scores(
    s, cols, offs_m, offs_n, seqlen_k, diagonal, softcap, slope, bias_rows, step, bias_strides,
    MASK_N: tl.constexpr, ACCURATE: tl.constexpr,
):  # fmt: skip
    """Apply softcap, ALiBi and bias, in this order, to one tile of scaled scores."""
    if softcap is not None:
        s = cap_scores(s, softcap, ACCURATE)
    if slope is not None:
        s -= slope * tl.abs(offs_m[:, None] + diagonal - cols[None, :]).to(tl.float32)
    if bias_rows is not None:
        bias_ptrs = bias_rows[:, None] + step * bias_strides.COLUMN + offs_n[None, :] * bias_strides.COLUMN
        if MASK_N:
            s += tl.load(bias_ptrs, mask=cols[None, :] < seqlen_k, other=0.0).to(tl.float32)
        else:
            s += tl.load(bias_ptrs).to(tl.float32)
    return s


@triton.jit
def _attend(
    acc, l, m, q, k_ptrs, v_ptrs, bias_rows, start_n, offs_m, offs_n, key_rows, offs_d, offs_dv, seqlen_k,
    diagonal, window, scale, softcap, slope, draws, page, first_key, k_strides, v_strides, bias_strides,
    CALL: tl.constexpr, MASK_N: tl.constexpr, MASK_LEFT: tl.constexpr, MASK_RIGHT: tl.constexpr,
    EMPTY_ROWS: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to the running output, sum and maximum: a step of the online softmax."""
    step = tl.full([], 0, tl.int64) + start_n  # the interpreter counts loops in Python integers
    cols = start_n + offs_n
    read = cols
    if CALL.PAGE_SIZE > 0 and MASK_LEFT:  # the pages of keys before the first one in reach may be gone
        read = tl.where(cols >= first_key, cols, seqlen_k)
    k_tile = _tile_pointers(k_ptrs, step, cols, page, k_strides.b, k_strides.ROW, CALL.ALIGN, CALL.PAGE_SIZE)
    k = load_rows(k_tile, read, seqlen_k, offs_d, CALL.D, MASK_N, CALL.D != CALL.BLOCK_D)  # [BLOCK_N, BLOCK_D]
    s = tl.dot(q, tl.trans(k), input_precision=CALL.PRECISION) * scale  # [BLOCK_M, BLOCK_N]
    s = _change_scores(
        s, cols, offs_m, key_rows, seqlen_k, diagonal, softcap, slope, bias_rows, step, bias_strides, MASK_N,
        CALL.PRECISION == "ieee",
    )  # fmt: skip
    if MASK_RIGHT:
        s = tl.where(offs_m[:, None] + (diagonal + window.right) >= cols[None, :], s, -float("inf"))
    if MASK_LEFT:
        s = tl.where(offs_m[:, None] + (diagonal - window.left) <= cols[None, :], s, -float("inf"))
    if MASK_N:
        s = tl.where(cols[None, :] < seqlen_k, s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    # A row that has met no key has m == -inf, and -inf - -inf is NaN.
    m_safe = tl.where(m_new == -float("inf"), 0.0, m_new) if EMPTY_ROWS else m_new
    if bias_rows is None:
        p = tl.exp2(s - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
    else:  # the smallest number of fp32, a common mask, is infinite times log2(e)
        p = tl.exp(s - m_safe[:, None])
        alpha = tl.exp(m - m_safe)
    l = l * alpha + tl.sum(p, 1)
    if draws is not None:  # what is kept is scaled at the end
        p = tl.where(kept_by(draws, offs_m, start_n, offs_n.shape[0]), p, 0.0)
    v_tile = _tile_pointers(v_ptrs, step, cols, page, v_strides.b, v_strides.ROW, CALL.ALIGN, CALL.PAGE_SIZE)
    v = load_rows(v_tile, read, seqlen_k, offs_dv, CALL.DV, MASK_N, CALL.DV != CALL.BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
    if (
        CALL.PRECISION == "ieee"
    ):  # keys are added one by one: to the sum of a tile, not of all, whose rounding is larger
        part = tl.dot(p, v, input_precision=CALL.PRECISION)
        acc = tl.fma(acc, tl.broadcast_to(alpha[:, None], acc.shape), part)  # a sum would become part of the product
    else:
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=CALL.PRECISION)
    return acc, l, m_new


@triton.jit
def _attend_keys(
    page, acc, l, m, q, k_ptrs, v_ptrs, bias_rows, begin, inside, unmasked, end, offs_m, offs_n, key_rows, offs_d,
    offs_dv, seqlen_k, diagonal, window, scale, softcap, slope, draws, table, first_key, k_strides, v_strides,
    bias_strides, CALL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add the keys of one program, as ``_key_range`` gives them; ``page``: of the first tile.

    The pages of a tile are read one tile ahead, also from loop to loop: the addresses of K and V wait for no load.
    """
    if CALL.BOUND_LEFT:
        for start_n in tl.range(begin, tl.minimum(inside, end), TILE.BLOCK_N, num_stages=1):
            page_of_tile = page
            if CALL.PAGE_SIZE > 0:
                page = _load_pages(
                    table, start_n + TILE.BLOCK_N, offs_n, first_key, seqlen_k, CALL.PAGE_SIZE, TILE.BLOCK_N
                )
            acc, l, m = _attend(
                acc, l, m, q, k_ptrs, v_ptrs, bias_rows, start_n, offs_m, offs_n, key_rows, offs_d, offs_dv, seqlen_k,
                diagonal, window, scale, softcap, slope, draws, page_of_tile, first_key, k_strides, v_strides,
                bias_strides, CALL, True, True, CALL.BOUND_RIGHT, True,
            )  # fmt: skip
    for start_n in tl.range(inside, unmasked, TILE.BLOCK_N, num_stages=TILE.NUM_STAGES):
        page_of_tile = page
        if CALL.PAGE_SIZE > 0:
            page = _load_pages(table, start_n + TILE.BLOCK_N, offs_n, first_key, seqlen_k, CALL.PAGE_SIZE, TILE.BLOCK_N)
        acc, l, m = _attend(
            acc, l, m, q, k_ptrs, v_ptrs, bias_rows, start_n, offs_m, offs_n, key_rows, offs_d, offs_dv, seqlen_k,
            diagonal, window, scale, softcap, slope, draws, page_of_tile, first_key, k_strides, v_strides, bias_strides,
            CALL, False, False, False, bias_rows is not None,
        )  # fmt: skip
    for start_n in tl.range(unmasked, end, TILE.BLOCK_N, num_stages=1):
        page_of_tile = page
        if CALL.PAGE_SIZE > 0:
            page = _load_pages(table, start_n + TILE.BLOCK_N, offs_n, first_key, seqlen_k, CALL.PAGE_SIZE, TILE.BLOCK_N)
        acc, l, m = _attend(
            acc, l, m, q, k_ptrs, v_ptrs, bias_rows, start_n, offs_m, offs_n, key_rows, offs_d, offs_dv, seqlen_k,
            diagonal, window, scale, softcap, slope, draws, page_of_tile, first_key, k_strides, v_strides, bias_strides,
            CALL, True, False, CALL.BOUND_RIGHT, CALL.EMPTY_ROWS,
        )  # fmt: skip
    return acc, l, m


@triton.jit
def _key_range(first_row, split, seqlen_k, diagonal, window, CALL: tl.constexpr, TILE: tl.constexpr):
    """Return the keys of one program: begin, inside, unmasked, end.

    Tiles before ``inside`` cross the left bound; from ``unmasked`` on, they cross the right bound or the last key.
    """
    begin = 0
    end = seqlen_k
    if CALL.BOUND_RIGHT:
        end = tl.maximum(tl.minimum(seqlen_k, first_row + TILE.BLOCK_M + (diagonal + window.right)), 0)
    if CALL.BOUND_LEFT:
        begin = tl.maximum(first_row + diagonal - window.left, 0) // TILE.BLOCK_N * TILE.BLOCK_N
    if TILE.SPLITS > 1:
        if CALL.BOUND_LEFT:
            share = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), TILE.SPLITS), TILE.BLOCK_N) * TILE.BLOCK_N
        else:
            share = tl.cdiv(tl.cdiv(seqlen_k, TILE.SPLITS), TILE.BLOCK_N) * TILE.BLOCK_N
        begin += split * share
        end = tl.minimum(end, begin + share)
    unmasked = end // TILE.BLOCK_N * TILE.BLOCK_N
    if CALL.BOUND_RIGHT:
        first_end = tl.maximum(first_row + (diagonal + window.right) + 1, 0)  # of row first_row
        unmasked = tl.minimum(unmasked, first_end // TILE.BLOCK_N * TILE.BLOCK_N)
    unmasked = tl.maximum(unmasked, begin)
    inside = begin
    if CALL.BOUND_LEFT:
        last_begin = tl.maximum(first_row + (TILE.BLOCK_M - 1) + diagonal - window.left, 0)  # of the tile's last row
        inside = tl.maximum(tl.cdiv(last_begin, TILE.BLOCK_N) * TILE.BLOCK_N, begin)
        unmasked = tl.maximum(unmasked, inside)
    return begin, inside, unmasked, end


@triton.jit
def _first_sums(sinks_ptr, h, split, BLOCK_M: tl.constexpr, UNIT: tl.constexpr, SPLITS: tl.constexpr):
    """Return sum and maximum of every row before its first key."""
    if sinks_ptr is not None:  # as if a key with this score and a value of 0 came first
        sink = tl.load(sinks_ptr + h).to(tl.float32) * UNIT
        if SPLITS > 1:
            sink = tl.where(split == 0, sink, -float("inf"))
        l = tl.zeros([BLOCK_M], tl.float32) + tl.where(sink == -float("inf"), 0.0, 1.0)
        m = tl.zeros([BLOCK_M], tl.float32) + sink
    else:
        l = tl.zeros([BLOCK_M], tl.float32)
        m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    return l, m


@triton.jit
def _store_rows(
    acc, l, m, o_ptr, lse_ptr, sequences, start_q, place_q, seqlen_q, b, h, split, first_row, offs_m, rows, offs_dv,
    sizes, o_strides, draws, dropout, CALL: tl.constexpr, TILE: tl.constexpr, BASE_E: tl.constexpr,
):  # fmt: skip
    """Store output and LSE of rows that have met all their keys; BASE_E: the exponentials were to base e."""
    # A row that met no key has l == 0: its output is 0 and its LSE -inf. So are rows past the length of a sequence.
    has_keys = l != 0
    if CALL.PRECISION == "ieee":  # a reciprocal loses two units in the last place
        out = tl.div_rn(acc, tl.where(has_keys, l, 1.0)[:, None])
    else:
        out = acc * tl.where(has_keys, 1.0 / l, 0.0)[:, None]
    if draws is not None:
        out *= dropout.scale
    if sequences.seqused_q_ptr is not None:
        has_keys = has_keys & (offs_m < seqlen_q)
        out = tl.where(has_keys[:, None], out, 0.0)
    part = 0
    if TILE.SPLITS > 1:
        part = split.to(tl.int64) * sizes.batch
    o_base = (
        o_ptr
        + head_offset(part + b, h, o_strides.b, o_strides.h) * CALL.ALIGN_O
        + first_row.to(tl.int64) * o_strides.ROW
    )
    o_ptrs = o_base + rows[:, None] * o_strides.ROW + offs_dv[None, :]
    o_mask = offs_m[:, None] < place_q
    if CALL.DV != CALL.BLOCK_DV:
        o_mask = o_mask & (offs_dv[None, :] < CALL.DV)
    tl.store(o_ptrs, out.to(o_ptr.dtype.element_ty), mask=o_mask)
    if CALL.STORE_LSE:
        if not BASE_E:
            lse = tl.where(has_keys, (m + tl.log2(l)) * 0.6931471805599453, -float("inf"))
        else:
            lse = tl.where(has_keys, m + tl.log(l), -float("inf"))
        if sequences.cu_seqlens_q_ptr is not None:
            lse_rows = (start_q + offs_m).to(tl.int64) * sizes.heads + h
        else:
            lse_rows = ((part + b) * sizes.heads + h).to(tl.int64) * seqlen_q + offs_m
        tl.store(lse_ptr + lse_rows, lse, mask=offs_m < place_q)


@triton.jit
def _forward_kernel(
    q_ptr,  # [B, H, Sq, D]; packed [T, H, D]
    k_ptr,  # [B, HK, Sk, D]; with pages [PAGES, PAGE_SIZE, HK, D]
    v_ptr,  # [B, HK, Sk, DV]; with pages [PAGES, PAGE_SIZE, HK, DV]
    o_ptr,  # [B, H, Sq, DV]; with SPLITS > 1 fp32 [SPLITS, B, H, Sq, DV], each share normalised
    lse_ptr,  # [B, H, Sq] fp32, natural log; with SPLITS > 1 [SPLITS, B, H, Sq]; packed [T, H]
    sinks_ptr,  # [H] or None
    alibi_ptr,  # [H], [B, H] or None
    bias_ptr,  # [B, H, Sq, Sk] or None; packed: of the longest lengths
    sequences: Sequences,
    page_table_ptr,  # [B, pages of a sequence] int32: where its keys lie; None: packed like q
    dropout_seed_ptr,  # [2] int64: seed and offset, or None
    q_strides: Strides, k_strides: Strides, v_strides: Strides,
    o_strides: Strides,
    sizes: ForwardSizes,
    # softmax_scale * log2(e); with a bias softmax_scale; with a softcap what ``cap_scores`` takes: for fp32 inputs
    # softmax_scale / softcap, for others 2 log2(e) times that.
    scale,
    window: Window,
    softcap,  # softcap * log2(e), with a bias softcap; or None
    bias_strides: BiasStrides,
    stride_table_b,  # of the page table
    dropout: Dropout,
    CALL: tl.constexpr,  # ForwardCall
    TILE: tl.constexpr,  # ForwardTile
):  # fmt: skip
    """Attend BLOCK_M rows of one head to one share of the keys. Grid: (tiles_m * SPLITS * B * H,)."""
    # Shapes: Triton 3.6 takes names of constants in lists, not fields of groups.
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_DV: tl.constexpr = CALL.BLOCK_DV
    # The unit of scores in natural units: exponentials are to base 2, but to base e with a bias.
    UNIT: tl.constexpr = 1.4426950408889634 if bias_ptr is None else 1.0
    seqlen_q, seqlen_k = sizes.seqlen_q, sizes.seqlen_k
    pid = tl.program_id(0)
    tile = pid % sizes.tiles_m
    split = (pid // sizes.tiles_m) % TILE.SPLITS
    row_of_heads = pid // (sizes.tiles_m * TILE.SPLITS)
    b, h = row_of_heads // sizes.heads, row_of_heads % sizes.heads
    if CALL.BOUND_RIGHT:
        tile = sizes.tiles_m - 1 - tile  # the longest rows first: the short ones fill the gaps at the end

    first_row = tile * TILE.BLOCK_M
    if sequences.cu_seqlens_q_ptr is not None:
        start_q, start_k = tl.load(sequences.cu_seqlens_q_ptr + b), tl.load(sequences.cu_seqlens_k_ptr + b)
        place_q = tl.load(sequences.cu_seqlens_q_ptr + b + 1) - start_q  # rows up to the next sequence
        if first_row >= place_q:
            return
        longest_q, longest_k = seqlen_q, seqlen_k  # that a bias has rows and columns for, whatever lengths say
        seqlen_q, seqlen_k = place_q, tl.load(sequences.cu_seqlens_k_ptr + b + 1) - start_k
        seqlen_q, seqlen_k = used_lengths(sequences, b, seqlen_q, seqlen_k)
        q_ptr += start_q.to(tl.int64) * q_strides.ROW
        if CALL.PAGE_SIZE == 0:
            k_ptr += start_k.to(tl.int64) * k_strides.ROW
            v_ptr += start_k.to(tl.int64) * v_strides.ROW
        o_ptr += start_q.to(tl.int64) * o_strides.ROW
    else:
        start_q, place_q, longest_q = None, seqlen_q, None

    offs_m = first_row + tl.arange(0, TILE.BLOCK_M)
    offs_n, offs_d, offs_dv = tl.arange(0, TILE.BLOCK_N), tl.arange(0, CALL.BLOCK_D), tl.arange(0, CALL.BLOCK_DV)
    rows = tl.arange(0, TILE.BLOCK_M)
    if TILE.WIDE:  # an offset inside one tile can pass 2**31: strides of more than 2**31 / BLOCK elements
        rows, offs_d, offs_dv = rows.to(tl.int64), offs_d.to(tl.int64), offs_dv.to(tl.int64)
        key_rows = offs_n.to(tl.int64)
    else:
        key_rows = offs_n
    q_base = q_ptr + head_offset(b, h, q_strides.b, q_strides.h) * CALL.ALIGN + first_row.to(tl.int64) * q_strides.ROW
    if CALL.PAGE_SIZE == 0:
        k_base = k_ptr + head_offset(b, h // CALL.GROUP, k_strides.b, k_strides.h) * CALL.ALIGN
        v_base = v_ptr + head_offset(b, h // CALL.GROUP, v_strides.b, v_strides.h) * CALL.ALIGN
        k_ptrs = k_base + key_rows[:, None] * k_strides.ROW + offs_d[None, :] * k_strides.COLUMN
        v_ptrs = v_base + key_rows[:, None] * v_strides.ROW + offs_dv[None, :] * v_strides.COLUMN
    else:  # of the first row of page 0: which page and row a key has is added tile by tile
        k_ptrs = k_ptr + (h // CALL.GROUP).to(tl.int64) * k_strides.h * CALL.ALIGN + offs_d[None, :] * k_strides.COLUMN
        v_ptrs = v_ptr + (h // CALL.GROUP).to(tl.int64) * v_strides.h * CALL.ALIGN + offs_dv[None, :] * v_strides.COLUMN
    q_ptrs = q_base + rows[:, None] * q_strides.ROW + offs_d[None, :] * q_strides.COLUMN
    q = load_rows(q_ptrs, offs_m, seqlen_q, offs_d, CALL.D, True, CALL.D != CALL.BLOCK_D)  # [BLOCK_M, BLOCK_D]
    slope = None
    if alibi_ptr is not None:
        slope = tl.load(alibi_ptr + b.to(tl.int64) * CALL.STRIDE_ALIBI_B + h).to(tl.float32) * UNIT
    bias_rows = bias_rows_of(bias_ptr, b, h, offs_m, seqlen_q, longest_q, bias_strides, CALL.ALIGN_BIAS)
    draws = None
    if dropout_seed_ptr is not None:
        draws = load_dropout(dropout_seed_ptr, row_of_heads, dropout.last, dropout.scale)

    diagonal = seqlen_k - seqlen_q  # without bounds of its own, row m is at key m + diagonal
    if sequences.cu_seqlens_q_ptr is not None and bias_ptr is not None:
        seqlen_k = tl.minimum(seqlen_k, longest_k)
    begin, inside, unmasked, end = _key_range(first_row, split, seqlen_k, diagonal, window, CALL, TILE)
    if sequences.seqused_q_ptr is not None:
        end = tl.where(first_row < seqlen_q, end, 0)
        # Pages of a sequence without queries may not exist, and its bias has no last row.
        if CALL.PAGE_SIZE > 0 or bias_ptr is not None:
            unmasked = tl.where(first_row < seqlen_q, unmasked, 0)
    table, page, first_key = None, None, 0
    if CALL.PAGE_SIZE > 0:
        if CALL.BOUND_LEFT:
            first_key = tl.maximum(first_row + diagonal - window.left, 0)  # that any row of the tile sees
        table = page_table_ptr + b.to(tl.int64) * stride_table_b
        page = _load_pages(table, begin, offs_n, first_key, seqlen_k, CALL.PAGE_SIZE, TILE.BLOCK_N)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    l, m = _first_sums(sinks_ptr, h, split, BLOCK_M, UNIT, TILE.SPLITS)
    acc, l, m = _attend_keys(
        page, acc, l, m, q, k_ptrs, v_ptrs, bias_rows, begin, inside, unmasked, end, offs_m, offs_n, key_rows, offs_d,
        offs_dv, seqlen_k, diagonal, window, scale, softcap, slope, draws, table, first_key, k_strides, v_strides,
        bias_strides, CALL, TILE,
    )  # fmt: skip
    _store_rows(
        acc, l, m, o_ptr, lse_ptr, sequences, start_q, place_q, seqlen_q, b, h, split, first_row, offs_m, rows,
        offs_dv, sizes, o_strides, draws, dropout, CALL, TILE, bias_ptr is not None,
    )  # fmt: skip
