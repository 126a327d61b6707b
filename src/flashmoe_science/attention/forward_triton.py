"""Attention forward, streaming over the keys (Triton, sm_80 and newer).

One program owns ``BLOCK_M`` query rows of one head and walks over the keys in tiles of ``BLOCK_N`` with the online
softmax. With ``SPLITS > 1`` it walks over one share of the keys and leaves partial results for ``merge_triton``.

What a call does not ask for is None or a constant, and leaves no instruction behind: a window, a softcap, sinks, ALiBi,
a bias, packed sequences, pages, dropout.

Source: FlashAttention-2 (Dao, 2023, arXiv 2307.08691) for the loop; Flash-Decoding (Dao et al., 2023) for the split.
Ours: tiles free of masks except at the edges, rows without keys, one grid axis in longest-first order when causal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import cap_scores, head_offset, kept_by, load_dropout, load_rows


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
    s, cols, offs_m, offs_n, seqlen_k, diagonal, softcap, slope, bias_rows, step,
    STRIDE_BIAS_N: tl.constexpr, MASK_N: tl.constexpr, ACCURATE: tl.constexpr,
):  # fmt: skip
    """Apply softcap, ALiBi and bias, in this order, to one tile of scaled scores."""
    if softcap is not None:
        s = cap_scores(s, softcap, ACCURATE)
    if slope is not None:
        s -= slope * tl.abs(offs_m[:, None] + diagonal - cols[None, :]).to(tl.float32)
    if bias_rows is not None:
        bias_ptrs = bias_rows[:, None] + step * STRIDE_BIAS_N + offs_n[None, :] * STRIDE_BIAS_N
        if MASK_N:
            s += tl.load(bias_ptrs, mask=cols[None, :] < seqlen_k, other=0.0).to(tl.float32)
        else:
            s += tl.load(bias_ptrs).to(tl.float32)
    return s


@triton.jit
def _attend(
    acc, l, m, q, k_ptrs, v_ptrs, bias_rows, start_n, offs_m, offs_n, key_rows, offs_d, offs_dv, seqlen_k,
    diagonal, window_left, window_right, scale, softcap, slope, dropout, page, first_key, stride_kb, stride_vb,
    STRIDE_KN: tl.constexpr, STRIDE_VN: tl.constexpr, STRIDE_BIAS_N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ALIGN: tl.constexpr, PAGE_SIZE: tl.constexpr, MASK_D: tl.constexpr, MASK_DV: tl.constexpr,
    MASK_N: tl.constexpr, MASK_LEFT: tl.constexpr, MASK_RIGHT: tl.constexpr, EMPTY_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold one tile of keys into the running output, sum and maximum."""
    step = tl.full([], 0, tl.int64) + start_n  # the interpreter counts loops in Python integers
    cols = start_n + offs_n
    read = cols
    if PAGE_SIZE > 0 and MASK_LEFT:  # the pages of keys before the first one in reach may be gone
        read = tl.where(cols >= first_key, cols, seqlen_k)
    k_tile = _tile_pointers(k_ptrs, step, cols, page, stride_kb, STRIDE_KN, ALIGN, PAGE_SIZE)
    k = load_rows(k_tile, read, seqlen_k, offs_d, D, MASK_N, MASK_D)  # [BLOCK_N, BLOCK_D]
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # [BLOCK_M, BLOCK_N]
    s = _change_scores(
        s, cols, offs_m, key_rows, seqlen_k, diagonal, softcap, slope, bias_rows, step, STRIDE_BIAS_N, MASK_N,
        PRECISION == "ieee",
    )  # fmt: skip
    if MASK_RIGHT:
        s = tl.where(offs_m[:, None] + (diagonal + window_right) >= cols[None, :], s, -float("inf"))
    if MASK_LEFT:
        s = tl.where(offs_m[:, None] + (diagonal - window_left) <= cols[None, :], s, -float("inf"))
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
    if dropout is not None:  # what is kept is scaled at the end
        p = tl.where(kept_by(dropout, offs_m, start_n, offs_n.shape[0]), p, 0.0)
    v_tile = _tile_pointers(v_ptrs, step, cols, page, stride_vb, STRIDE_VN, ALIGN, PAGE_SIZE)
    v = load_rows(v_tile, read, seqlen_k, offs_dv, DV, MASK_N, MASK_DV)  # [BLOCK_N, BLOCK_DV]
    if PRECISION == "ieee":  # keys are added one by one: to the sum of a tile, not of all, whose rounding is larger
        part = tl.dot(p, v, input_precision=PRECISION)
        acc = tl.fma(acc, tl.broadcast_to(alpha[:, None], acc.shape), part)  # a sum would become part of the product
    else:
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, l, m_new


@triton.jit
def _key_range(
    first_row, split, seqlen_k, diagonal, window_left, window_right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Return the keys of one program: begin, inside, unmasked, end.

    Tiles before ``inside`` cross the left bound; from ``unmasked`` on, they cross the right bound or the last key.
    """
    begin = 0
    end = seqlen_k
    if BOUND_RIGHT:
        end = tl.maximum(tl.minimum(seqlen_k, first_row + BLOCK_M + (diagonal + window_right)), 0)
    if BOUND_LEFT:
        begin = tl.maximum(first_row + diagonal - window_left, 0) // BLOCK_N * BLOCK_N
    if SPLITS > 1:
        if BOUND_LEFT:
            share = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), SPLITS), BLOCK_N) * BLOCK_N
        else:
            share = tl.cdiv(tl.cdiv(seqlen_k, SPLITS), BLOCK_N) * BLOCK_N
        begin += split * share
        end = tl.minimum(end, begin + share)
    unmasked = end // BLOCK_N * BLOCK_N
    if BOUND_RIGHT:
        first_end = tl.maximum(first_row + (diagonal + window_right) + 1, 0)  # of row first_row
        unmasked = tl.minimum(unmasked, first_end // BLOCK_N * BLOCK_N)
    unmasked = tl.maximum(unmasked, begin)
    inside = begin
    if BOUND_LEFT:
        last_begin = tl.maximum(first_row + (BLOCK_M - 1) + diagonal - window_left, 0)  # of the tile's last row
        inside = tl.maximum(tl.cdiv(last_begin, BLOCK_N) * BLOCK_N, begin)
        unmasked = tl.maximum(unmasked, inside)
    return begin, inside, unmasked, end


@triton.jit
def _forward_kernel(
    q_ptr,  # [B, H, Sq, D]; packed [T, H, D], like k, v and o
    k_ptr,  # [B, HK, Sk, D]; with pages [PAGES, PAGE_SIZE, HK, D]
    v_ptr,  # [B, HK, Sk, DV]; with pages [PAGES, PAGE_SIZE, HK, DV]
    o_ptr,  # [B, H, Sq, DV]; with SPLITS > 1 fp32 [SPLITS, B, H, Sq, DV], each share normalised
    lse_ptr,  # [B, H, Sq] fp32, natural log; with SPLITS > 1 [SPLITS, B, H, Sq]; packed [T, H]
    sinks_ptr,  # [H] or None
    alibi_ptr,  # [H], [B, H] or None
    bias_ptr,  # [B, H, Sq, Sk] or None; packed: of the longest lengths
    cu_seqlens_q_ptr,  # [B + 1] int32: where sequences start; None: not packed
    cu_seqlens_k_ptr,  # [B + 1] int32 or None
    seqused_q_ptr,  # [B] int32: their lengths where they end before the next one starts, or None
    seqused_k_ptr,  # [B] int32 or None
    page_table_ptr,  # [B, pages of a sequence] int32: where its keys lie; None: packed like q
    dropout_seed_ptr,  # [2] int64: seed and offset, or None
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,  # in units of ALIGN elements; b: or of pages
    stride_ob, stride_oh,  # in units of ALIGN_O elements
    batch, heads, seqlen_q, seqlen_k, tiles_m,  # packed: of lengths those of a bias are read alone
    # softmax_scale * log2(e); with a bias softmax_scale; with a softcap what ``cap_scores`` takes: for fp32 inputs
    # softmax_scale / softcap, for others 2 log2(e) times that.
    scale,
    window_left, window_right,  # row m sees keys m + Sk - Sq - window_left to m + Sk - Sq + window_right
    softcap,  # softcap * log2(e), with a bias softcap; or None
    stride_bias_b, stride_bias_h, stride_bias_m,  # in units of ALIGN_BIAS elements
    stride_table_b,  # of the page table
    dropout_last,  # the largest random number that drops a probability, the bits of a uint32
    dropout_scale,  # of what is kept
    STRIDE_QM: tl.constexpr, STRIDE_QD: tl.constexpr, STRIDE_KN: tl.constexpr, STRIDE_KD: tl.constexpr,
    STRIDE_VN: tl.constexpr, STRIDE_VD: tl.constexpr, STRIDE_OM: tl.constexpr,
    STRIDE_ALIBI_B: tl.constexpr, STRIDE_BIAS_N: tl.constexpr,
    ALIGN: tl.constexpr,  # every row of q, k and v starts at a multiple of this many elements
    ALIGN_O: tl.constexpr,  # every row of o starts at a multiple of this many elements
    ALIGN_BIAS: tl.constexpr,  # every row of the bias starts at a multiple of this many elements
    GROUP: tl.constexpr,  # query heads that share one K/V head
    SPLITS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr,  # whether some keys come too early, or too late, for some rows
    EMPTY_ROWS: tl.constexpr, WIDE: tl.constexpr, STORE_LSE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # 0: without a page table
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Attend BLOCK_M rows of one head to one share of the keys. Grid: (tiles_m * SPLITS * B * H,)."""
    # The unit of scores in natural units: exponentials are to base 2, but to base e with a bias.
    UNIT: tl.constexpr = 1.4426950408889634 if bias_ptr is None else 1.0
    pid = tl.program_id(0)
    tile = pid % tiles_m
    split = (pid // tiles_m) % SPLITS
    row_of_heads = pid // (tiles_m * SPLITS)
    b, h = row_of_heads // heads, row_of_heads % heads
    if BOUND_RIGHT:
        tile = tiles_m - 1 - tile  # the longest rows first: the short ones fill the gaps at the end

    first_row = tile * BLOCK_M
    if cu_seqlens_q_ptr is not None:
        start_q, start_k = tl.load(cu_seqlens_q_ptr + b), tl.load(cu_seqlens_k_ptr + b)
        place_q = tl.load(cu_seqlens_q_ptr + b + 1) - start_q  # rows up to the next sequence
        if first_row >= place_q:
            return
        longest_q, longest_k = seqlen_q, seqlen_k  # that a bias has rows and columns for, whatever lengths say
        seqlen_q, seqlen_k = place_q, tl.load(cu_seqlens_k_ptr + b + 1) - start_k
        if seqused_q_ptr is not None:
            seqlen_q = tl.load(seqused_q_ptr + b)
        if seqused_k_ptr is not None:
            seqlen_k = tl.load(seqused_k_ptr + b)
        q_ptr += start_q.to(tl.int64) * STRIDE_QM
        if PAGE_SIZE == 0:
            k_ptr += start_k.to(tl.int64) * STRIDE_KN
            v_ptr += start_k.to(tl.int64) * STRIDE_VN
        o_ptr += start_q.to(tl.int64) * STRIDE_OM
    else:
        place_q = seqlen_q

    offs_m = first_row + tl.arange(0, BLOCK_M)
    offs_n, offs_d, offs_dv = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    rows = tl.arange(0, BLOCK_M)
    if WIDE:  # an offset inside one tile can pass 2**31: strides of more than 2**31 / BLOCK elements
        rows, offs_d, offs_dv = rows.to(tl.int64), offs_d.to(tl.int64), offs_dv.to(tl.int64)
        key_rows = offs_n.to(tl.int64)
    else:
        key_rows = offs_n
    q_base = q_ptr + head_offset(b, h, stride_qb, stride_qh) * ALIGN + first_row.to(tl.int64) * STRIDE_QM
    if PAGE_SIZE == 0:
        k_base = k_ptr + head_offset(b, h // GROUP, stride_kb, stride_kh) * ALIGN
        v_base = v_ptr + head_offset(b, h // GROUP, stride_vb, stride_vh) * ALIGN
        k_ptrs = k_base + key_rows[:, None] * STRIDE_KN + offs_d[None, :] * STRIDE_KD
        v_ptrs = v_base + key_rows[:, None] * STRIDE_VN + offs_dv[None, :] * STRIDE_VD
    else:  # of the first row of page 0: which page and row a key has is added tile by tile
        k_ptrs = k_ptr + (h // GROUP).to(tl.int64) * stride_kh * ALIGN + offs_d[None, :] * STRIDE_KD
        v_ptrs = v_ptr + (h // GROUP).to(tl.int64) * stride_vh * ALIGN + offs_dv[None, :] * STRIDE_VD
    q_ptrs = q_base + rows[:, None] * STRIDE_QM + offs_d[None, :] * STRIDE_QD
    q = load_rows(q_ptrs, offs_m, seqlen_q, offs_d, D, True, D != BLOCK_D)  # [BLOCK_M, BLOCK_D]
    slope = None
    if alibi_ptr is not None:
        slope = tl.load(alibi_ptr + b.to(tl.int64) * STRIDE_ALIBI_B + h).to(tl.float32) * UNIT
    bias_rows = None
    if bias_ptr is not None:
        bias_head = bias_ptr + head_offset(b, h, stride_bias_b, stride_bias_h) * ALIGN_BIAS
        # Rows past the end read the last one: what they give is never stored.
        last_row = seqlen_q - 1
        if cu_seqlens_q_ptr is not None:
            last_row = tl.minimum(seqlen_q, longest_q) - 1
        bias_rows = bias_head + tl.minimum(offs_m, last_row).to(tl.int64) * (stride_bias_m * ALIGN_BIAS)

    dropout = None
    if dropout_seed_ptr is not None:
        dropout = load_dropout(dropout_seed_ptr, row_of_heads, dropout_last, dropout_scale)

    diagonal = seqlen_k - seqlen_q  # without bounds of its own, row m is at key m + diagonal
    if cu_seqlens_q_ptr is not None and bias_ptr is not None:
        seqlen_k = tl.minimum(seqlen_k, longest_k)
    begin, inside, unmasked, end = _key_range(
        first_row, split, seqlen_k, diagonal, window_left, window_right,
        BLOCK_M, BLOCK_N, BOUND_LEFT, BOUND_RIGHT, SPLITS,
    )  # fmt: skip
    if seqused_q_ptr is not None:
        end = tl.where(first_row < seqlen_q, end, 0)
        # Of a sequence that nobody asks about pages may not exist, and a bias has no last row.
        if PAGE_SIZE > 0 or bias_ptr is not None:
            unmasked = tl.where(first_row < seqlen_q, unmasked, 0)
    # The pages of a tile are read one tile ahead, also from loop to loop: the addresses of K and V wait for no load.
    table, page, first_key = None, None, 0
    if PAGE_SIZE > 0:
        if BOUND_LEFT:
            first_key = tl.maximum(first_row + diagonal - window_left, 0)  # that any row of the tile sees
        table = page_table_ptr + b.to(tl.int64) * stride_table_b
        page = _load_pages(table, begin, offs_n, first_key, seqlen_k, PAGE_SIZE, BLOCK_N)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if sinks_ptr is not None:  # as if a key with this score and a value of 0 came first
        sink = tl.load(sinks_ptr + h).to(tl.float32) * UNIT
        if SPLITS > 1:
            sink = tl.where(split == 0, sink, -float("inf"))
        l = tl.zeros([BLOCK_M], tl.float32) + tl.where(sink == -float("inf"), 0.0, 1.0)
        m = tl.zeros([BLOCK_M], tl.float32) + sink
    else:
        l = tl.zeros([BLOCK_M], tl.float32)
        m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    if BOUND_LEFT:
        for start_n in tl.range(begin, tl.minimum(inside, end), BLOCK_N, num_stages=1):
            page_of_tile = page
            if PAGE_SIZE > 0:
                page = _load_pages(table, start_n + BLOCK_N, offs_n, first_key, seqlen_k, PAGE_SIZE, BLOCK_N)
            acc, l, m = _attend(
                acc, l, m, q, k_ptrs, v_ptrs, bias_rows, start_n, offs_m, offs_n, key_rows, offs_d, offs_dv, seqlen_k,
                diagonal, window_left, window_right, scale, softcap, slope, dropout, page_of_tile, first_key, stride_kb,
                stride_vb, STRIDE_KN, STRIDE_VN, STRIDE_BIAS_N, D, DV, ALIGN, PAGE_SIZE, D != BLOCK_D, DV != BLOCK_DV,
                True, True, BOUND_RIGHT, True, PRECISION,
            )  # fmt: skip
    for start_n in tl.range(inside, unmasked, BLOCK_N, num_stages=NUM_STAGES):
        page_of_tile = page
        if PAGE_SIZE > 0:
            page = _load_pages(table, start_n + BLOCK_N, offs_n, first_key, seqlen_k, PAGE_SIZE, BLOCK_N)
        acc, l, m = _attend(
            acc, l, m, q, k_ptrs, v_ptrs, bias_rows, start_n, offs_m, offs_n, key_rows, offs_d, offs_dv, seqlen_k,
            diagonal, window_left, window_right, scale, softcap, slope, dropout, page_of_tile, first_key, stride_kb,
            stride_vb, STRIDE_KN, STRIDE_VN, STRIDE_BIAS_N, D, DV, ALIGN, PAGE_SIZE, D != BLOCK_D, DV != BLOCK_DV,
            False, False, False, bias_ptr is not None, PRECISION,
        )  # fmt: skip
    for start_n in tl.range(unmasked, end, BLOCK_N, num_stages=1):
        page_of_tile = page
        if PAGE_SIZE > 0:
            page = _load_pages(table, start_n + BLOCK_N, offs_n, first_key, seqlen_k, PAGE_SIZE, BLOCK_N)
        acc, l, m = _attend(
            acc, l, m, q, k_ptrs, v_ptrs, bias_rows, start_n, offs_m, offs_n, key_rows, offs_d, offs_dv, seqlen_k,
            diagonal, window_left, window_right, scale, softcap, slope, dropout, page_of_tile, first_key, stride_kb,
            stride_vb, STRIDE_KN, STRIDE_VN, STRIDE_BIAS_N, D, DV, ALIGN, PAGE_SIZE, D != BLOCK_D, DV != BLOCK_DV,
            True, False, BOUND_RIGHT, EMPTY_ROWS, PRECISION,
        )  # fmt: skip

    # A row that met no key has l == 0: its output is 0 and its LSE -inf. So are rows past the length of a sequence.
    has_keys = l != 0
    if PRECISION == "ieee":  # a reciprocal loses two units in the last place
        out = tl.div_rn(acc, tl.where(has_keys, l, 1.0)[:, None])
    else:
        out = acc * tl.where(has_keys, 1.0 / l, 0.0)[:, None]
    if dropout is not None:
        out *= dropout_scale
    if seqused_q_ptr is not None:
        has_keys = has_keys & (offs_m < seqlen_q)
        out = tl.where(has_keys[:, None], out, 0.0)
    part = 0
    if SPLITS > 1:
        part = split.to(tl.int64) * batch
    o_base = o_ptr + head_offset(part + b, h, stride_ob, stride_oh) * ALIGN_O + first_row.to(tl.int64) * STRIDE_OM
    o_ptrs = o_base + rows[:, None] * STRIDE_OM + offs_dv[None, :]
    o_mask = offs_m[:, None] < place_q
    if DV != BLOCK_DV:
        o_mask = o_mask & (offs_dv[None, :] < DV)
    tl.store(o_ptrs, out.to(o_ptr.dtype.element_ty), mask=o_mask)
    if STORE_LSE:
        if bias_ptr is None:
            lse = tl.where(has_keys, (m + tl.log2(l)) * 0.6931471805599453, -float("inf"))
        else:
            lse = tl.where(has_keys, m + tl.log(l), -float("inf"))
        if cu_seqlens_q_ptr is not None:
            lse_rows = (start_q + offs_m).to(tl.int64) * heads + h
        else:
            lse_rows = ((part + b) * heads + h).to(tl.int64) * seqlen_q + offs_m
        tl.store(lse_ptr + lse_rows, lse, mask=offs_m < place_q)
