"""Attention forward for Hopper with windows, softcap, sinks, biases and packed sequences (Gluon, sm_90, fp16, bf16).

``forward_gluon_sm90`` with bounds that only the GPU knows: rings, turns, the loop without a maximum and the products
issued together are its own, and its docstring says why they are so. What differs:

- A row tile has a range of key tiles, from the first that one of its rows sees to the last. Those that cross a bound
  are masked: at the end of the range, walked over first, and with a left bound at its start. How many these are follows
  from the lengths, so they are loops, not unrolled.
- All warpgroups walk over the key tiles of the whole row tile, whether they take turns or not.
- Packed sequences lie in one tensor ``[T, H, D]``, and tiles of keys may reach into the next sequence. Its keys are
  masked. Its values meet a P of 0, but 0 times NaN is NaN: values behind the end of a sequence become 0 in shared
  memory, in the one tile that has them. What TMA stored of a last row tile would overwrite the next sequence: such a
  tile goes to memory by masked stores.
- Packed row tiles are fetched from a counter, those of the sequences with the most keys first
  (``sequences_triton``). The host knows all other row tiles, and each program gets fixed ones: they are dealt round by
  round in alternating order (serpentine), so a program's longest tile is paired with a short one.
- A bias travels through shared memory, and has a softmax of its own: ``bias_primitives_sm90``.

Source: as ``forward_gluon_sm90``. Ours: all that differs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma_wait

from ...gpu.gluon_sm90 import (
    fetch_next,
    get_fetched,
    lap_of,
    make_mailbox,
    make_ring,
    make_tiles,
    rematerialize,
    slot_of,
    special_register,
    wait_for_kernel_before,
)
from ...gpu.gluon_versions import barrier
from ..kernel_arguments import VariantSizes, Window
from .bias_primitives_sm90 import (
    BIASED_START,
    add_bias,
    biased_step,
    fill_bias,
    first_biased,
    fold_biased,
    lse_biased,
    multiply_biased,
    normalise_biased,
    read_bias,
)
from .primitives_sm90 import (
    ROWS,
    TURNS,
    declare_too_large,
    exponentials,
    fold_masked,
    issue_output,
    issue_scores,
    multiply,
    online_softmax_step,
    partial_sums,
    rescale,
    store_output,
    update_row_max,
    warp_scheduler_arrive,
)
from .variants_primitives_sm90 import _FIELDS, _HEAD, _PLACE, _ROW, _START, Args, make_places, slope_operand

_CLEANED_ROWS = gl.constexpr(32)  # values that are looked at together


@gluon.jit
def _load_partition(a):
    """Fill the rings, for all tiles of this program."""
    # All before this wait ran while the kernel before was ending. The warpgroups write nothing before they have read.
    wait_for_kernel_before()
    i = 0  # tiles of K and of V so far
    n = 0  # row tiles so far
    rank = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    tile = special_register("ctaid.x")
    tiles = a.count_tiles()
    if not a.IS_PACKED:
        tile, turn = a.deal(turn, tiles)
    while tile < tiles:
        if a.IS_PACKED:
            rank = a.find(rank, tile)
        head, row, start, queries, start_k, keys = a.place(n, tile, rank)
        begin, end = a.key_tiles(row, queries, keys)
        kv = head // a.GROUP
        # Packed, a tile of keys lies behind where its sequence starts; else the sequence is a coordinate of its own.
        b = 0 if a.IS_PACKED else start
        first_q = start + row if a.IS_PACKED else row
        first_k = start_k if a.IS_PACKED else 0
        # K first: Q waits until the tile before has its last scores.
        a.k_ring.fill(
            a.k_desc, a.k_more_desc, b, kv, first_k + (end - 1) * a.BLOCK_N, slot_of(i, a.STAGES), lap_of(i, a.STAGES)
        )
        for w in gl.static_range(a.WARPGROUPS):
            a.q_ring.fill(a.q_desc, a.q_more_desc, b, head, first_q + w * ROWS, w, n)
        if a.HAS_BIAS:
            fill_bias(a, start, head, row, (end - 1) * a.BLOCK_N, i)
        steps = end - begin
        ticket = gl.to_tensor(0)
        for step in range(1, steps):
            # Fetch late, so that a slow program gets fewer tiles, but in time to look the tile up before the next K.
            if a.IS_PACKED and step == steps - 1:
                ticket = fetch_next(a.counter_ptr)
            key = first_k + (end - step) * a.BLOCK_N
            a.k_ring.fill(
                a.k_desc, a.k_more_desc, b, kv, key - a.BLOCK_N, slot_of(i + 1, a.STAGES), lap_of(i + 1, a.STAGES)
            )
            a.v_ring.fill(a.v_desc, a.v_more_desc, b, kv, key, slot_of(i, a.STAGES), lap_of(i, a.STAGES))
            i += 1
            if a.HAS_BIAS:  # last: it waits until all scores of the tile before are there
                fill_bias(a, start, head, row, key - a.BLOCK_N, i)
        if a.IS_PACKED and steps == 1:
            ticket = fetch_next(a.counter_ptr)
        a.v_ring.fill(
            a.v_desc, a.v_more_desc, b, kv, first_k + begin * a.BLOCK_N, slot_of(i, a.STAGES), lap_of(i, a.STAGES)
        )
        i += 1
        n += 1
        if a.IS_PACKED:
            tile = get_fetched(ticket, a.counter_ptr, tiles)
        else:
            tile, turn = a.deal(turn, tiles)
    a.publish(n, -1)  # the end


@gluon.jit
def _cap(s, a):
    """Return tanh(softmax_scale / softcap * s), to within 2**-11: what rounding a score to fp16 costs."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [s * a.inner_scale], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _slope(a, n, s_layout: gl.constexpr):
    """Return the slope of the head of the n-th tile, times log2(e), and as an operand of a product or as it is."""
    slope = gl.to_tensor(0.0)
    if a.HAS_ALIBI:
        b = 0 if a.IS_PACKED else a.row_tiles.read(n, _START)
        ptr = a.alibi_ptr + b * a.alibi_stride + a.row_tiles.read(n, _HEAD)
        slope = gl.load(ptr).to(gl.float32) * 1.4426950408889634
    operand = slope
    if a.SLOPE_PRODUCT:
        operand = slope_operand(slope / a.scale_log2, s_layout)
    return slope, operand


@gluon.jit
def _add_alibi(s, a, slope, position, key):
    """Return scores, times log2(e), with the term of ALiBi; the first row is at ``position``. Laid out as for a mask.

    Where keys lie up to the position of a row, the term is an affine one. The part of the row cancels in the softmax,
    and only the LSE needs it, so what is added depends on the key alone.
    """
    COLUMNS: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    x = gl.reshape(s * a.inner_scale, [ROWS, COLUMNS // 8, 4, 2])
    x_layout: gl.constexpr = x.type.layout
    lane_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x_layout))  # [ROWS, 4]
    lane = 2 * gl.arange(0, 4, gl.SliceLayout(0, lane_layout))[None, :]
    i = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, x_layout))))
    k = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, x_layout))))
    column = (8 * i[None, :, None, None] + k[None, None, None, :]).to(gl.float32)
    if a.SEES_AHEAD:
        own = key - position - gl.arange(0, ROWS, gl.SliceLayout(1, lane_layout))
        ahead = (own[:, None] + lane).to(gl.float32)[:, None, :, None] + column
        x -= slope * gl.abs(ahead)
    else:
        x += (slope * (key - position + lane).to(gl.float32))[:, None, :, None] + slope * column
    return gl.convert_layout(gl.reshape(x, [ROWS, COLUMNS]), layout)


@gluon.jit
def _mask(s, a, n, position, key):
    """Put -inf where a row of the tile at ``key`` does not see a key; the first row is at ``position``.

    A thread holds columns 8 i + 2 lane + k with i and k known at compile time: as a 4-dimensional comparison of
    8 i + k with a number per lane, a bound costs one compare an element.
    """
    COLUMNS: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    x = gl.reshape(s, [ROWS, COLUMNS // 8, 4, 2])
    x_layout: gl.constexpr = x.type.layout
    lane_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x_layout))  # [ROWS, 4]
    lane = 2 * gl.arange(0, 4, gl.SliceLayout(0, lane_layout))[None, :]
    own = position - key + gl.arange(0, ROWS, gl.SliceLayout(1, lane_layout))
    last = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, lane_layout)) + (a.keys_of(n) - 1 - key)
    if a.BOUND_RIGHT:
        last = gl.minimum(last, own + a.window_right)
    i = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, x_layout))))
    k = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, x_layout))))
    column = 8 * i[None, :, None, None] + k[None, None, None, :]
    seen = column <= (last[:, None] - lane)[:, None, :, None]
    if a.BOUND_LEFT:
        seen = seen & (column >= (own[:, None] - a.window_left - lane)[:, None, :, None])
    x = gl.where(seen, x, -float("inf"))
    return gl.convert_layout(gl.reshape(x, [ROWS, COLUMNS]), layout)


@gluon.jit
def _clean(values, keys):
    """Put 0 in place of the values from row ``keys`` on. Every warpgroup does it for itself: they write the same."""
    KEYS: gl.constexpr = values.shape[0]
    COLUMNS: gl.constexpr = values.shape[1]
    WIDTH: gl.constexpr = 8 if COLUMNS >= 32 else 4
    layout: gl.constexpr = gl.BlockedLayout(
        [1, WIDTH], [32 * WIDTH // min(COLUMNS, 32 * WIDTH), min(COLUMNS, 32 * WIDTH) // WIDTH], [4, 1], [1, 0]
    )
    for first in gl.static_range(0, KEYS, _CLEANED_ROWS):
        if keys < first + _CLEANED_ROWS:
            part = values.slice(first, _CLEANED_ROWS, dim=0)
            row = first + gl.arange(0, _CLEANED_ROWS, gl.SliceLayout(1, layout))
            value = part.load(layout)
            part.store(gl.where(row[:, None] < keys, value, gl.zeros_like(value)))


@gluon.jit
def _clean_values(a, i, keys):
    """Put 0 in place of the values of tile i behind its keys, if there are any."""
    if keys < a.BLOCK_N:
        v = a.v_ring.wait(slot_of(i, a.STAGES), lap_of(i, a.STAGES))
        _clean(v[0], keys)
        if a.DV1 > 0:
            _clean(v[1], keys)
        fence_async_shared()  # the matrix units, and TMA after them, see it
        barrier()


@gluon.jit
def _below(m, slope, position, key, a):
    """Return the maximum below the part of ALiBi that is common to a tile, where a product gives the rest."""
    if a.SLOPE_PRODUCT:
        m = m - slope[0] * (key - position).to(gl.float32)
    return m


@gluon.jit
def _raised(m, before, after, slope, position, key, a):
    """Return the maximum after a tile: ``m`` has the same bits where what is below (``before``) was not raised."""
    if a.SLOPE_PRODUCT:
        after = gl.where(after == before, m, after + slope[0] * (key - position).to(gl.float32))
    return after


@gluon.jit
def _first_step(q, m, l, zero, a, i, n, slope, position, key, W: gl.constexpr):
    """Scores of tile i, the last in the range, and their exponentials."""
    k = a.k_ring.wait(slot_of(i, a.STAGES), lap_of(i, a.STAGES))
    if a.SLOPE_PRODUCT:
        s = issue_scores(q, k, zero, a.D1, (slope[1], a.places))
    else:
        s = issue_scores(q, k, zero, a.D1)
    s = warpgroup_mma_wait(0, deps=[s])
    a.k_ring.release(slot_of(i, a.STAGES))
    if a.HAS_SOFTCAP:
        s = _cap(s, a)
    if a.HAS_ALIBI and not a.SLOPE_PRODUCT:
        s = _add_alibi(s, a, slope[0], position, key)
    if a.HAS_BIAS:
        s = add_bias(s, read_bias(s, a, i, W), a)
    s = _mask(s, a, n, position, key)
    before = _below(m, slope, position, key, a)
    if a.HAS_BIAS:
        packed, after, l, sums = first_biased(s, before, l, a)
    else:
        after, l, _ = update_row_max(s, before, l, a)
        packed, sums = exponentials(s, after, l, a)
    return packed, _raised(m, before, after, slope, position, key, a), l + sums


@gluon.jit
def _step(q, acc, more, packed, m, l, zero, a, i, n, slope, position, key, W: gl.constexpr, IS_EDGE: gl.constexpr):
    """Scores of tile i and the output product of tile i - 1, then the exponentials of the scores."""
    if a.HAS_BIAS:
        s, acc, more = multiply_biased(q, acc, more, packed, zero, a, i, W, IS_EDGE)
    elif a.SLOPE_PRODUCT:
        s, acc, more = multiply(q, acc, more, packed, zero, a, i, W, IS_EDGE, (slope[1], a.places))
    else:
        s, acc, more = multiply(q, acc, more, packed, zero, a, i, W, IS_EDGE)
    if a.HAS_SOFTCAP:
        s = _cap(s, a)
    if a.HAS_ALIBI and not a.SLOPE_PRODUCT:
        s = _add_alibi(s, a, slope[0], position, key)
    before = _below(m, slope, position, key, a)
    if IS_EDGE and a.HAS_BIAS:
        acc, more, packed, after, l = fold_biased(_mask(s, a, n, position, key), acc, more, before, l, a)
    elif IS_EDGE:
        acc, more, packed, after, l = fold_masked(_mask(s, a, n, position, key), acc, more, before, l, a)
    elif a.HAS_BIAS:
        acc, more, packed, after, l = biased_step(s, acc, more, before, l, a)
    else:
        acc, more, packed, after, l = online_softmax_step(s, acc, more, packed, before, l, a)
    return acc, more, packed, _raised(m, before, after, slope, position, key, a), l


@gluon.jit
def _normalise(m, l, head, a):
    """Return the maximum, the sum and the factor on the output that make it the softmax, sinks included."""
    factor = gl.full(l.shape, 1.0, gl.float32, l.type.layout)
    if a.HAS_SINKS:
        sink = gl.load(a.sinks_ptr + head).to(gl.float32) * 1.4426950408889634
        top = gl.maximum(m, sink)
        factor = gl.exp2(m - top)
        l = l * factor + gl.exp2(sink - top)
        m = top
    return m, l, gl.where(l != 0, factor / l, 0.0)


@gluon.jit
def _store_lse(m, l, head, start, row, place, queries, a):
    """Store the LSE of the rows of a warpgroup."""
    # A row without keys, or behind the queries in use: output 0, LSE -inf.
    if a.HAS_BIAS:
        lse = gl.where(l != 0, lse_biased(m, l), -float("inf"))
    else:
        lse = gl.where(l != 0, (m + gl.log2(l)) * 0.6931471805599453, -float("inf"))
    offs_m = row + gl.arange(0, ROWS, m.type.layout)
    if a.IS_PACKED:
        if a.HAS_SEQUSED_Q:
            lse = gl.where(offs_m < queries, lse, -float("inf"))
        rows = (start + offs_m).to(gl.int64) * rematerialize(a.heads) + head
        gl.store(a.lse_ptr + rows, lse, mask=offs_m < place)
    else:
        seqlen_q = rematerialize(a.seqlen_q)
        rows = (start.to(gl.int64) * rematerialize(a.heads) + head) * seqlen_q
        gl.store(a.lse_ptr + rows + offs_m, lse, mask=offs_m < seqlen_q)


@gluon.jit
def _attend_partition(a, W: gl.constexpr):
    """Attend rows 64 W to 64 W + 63 of all tiles of this program."""
    dtype: gl.constexpr = a.q_desc.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, a.BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, a.DV0, 16])
    DV1: gl.constexpr = a.DV1 if a.DV1 > 0 else 16  # a tensor that nobody uses costs nothing
    more_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV1, 16])
    if W == a.WARPGROUPS - 1:
        warp_scheduler_arrive(a, W)  # to the first
    i = 0  # tiles of K and of V so far
    n = 0  # row tiles so far
    row = a.row_tiles.wait(0, _ROW)
    while row >= 0:
        queries, keys = a.queries_of(n), a.keys_of(n)
        begin, end = a.key_tiles(row, queries, keys)
        position = row + W * ROWS + keys - queries
        slope = _slope(a, n, s_layout)
        since, until = a.unmasked_tiles(position, keys, begin, end)
        LEAST: gl.constexpr = BIASED_START if a.HAS_BIAS else -3.0e38  # not -inf: -inf - -inf is NaN
        m = gl.full([ROWS], LEAST, gl.float32, gl.SliceLayout(1, s_layout))
        l = partial_sums(gl.zeros([ROWS, a.BLOCK_N], gl.float32, s_layout))
        acc = gl.zeros([ROWS, a.DV0], gl.float32, o_layout)
        more = gl.zeros([ROWS, DV1], gl.float32, more_layout)
        zero = gl.zeros([ROWS, a.BLOCK_N], gl.float32, s_layout)

        q = a.q_ring.wait(W, n)
        last = i + end - 1 - begin
        packed, m, l = _first_step(q, m, l, zero, a, i, n, slope, position, (end - 1) * a.BLOCK_N, W)
        if a.IS_PACKED:
            _clean_values(a, i, keys - (end - 1) * a.BLOCK_N)

        masked = i + end - until  # masked at the right: the tiles before this one
        unmasked = i + end - since  # not masked: those from there to before this one
        for j in range(i + 1, masked):
            acc, more, packed, m, l = _step(
                q, acc, more, packed, m, l, zero, a, j, n, slope, position, (last - j + begin) * a.BLOCK_N, W, True
            )
        for j in range(masked, unmasked):
            acc, more, packed, m, l = _step(
                q, acc, more, packed, m, l, zero, a, j, n, slope, position, (last - j + begin) * a.BLOCK_N, W, False
            )
        if a.BOUND_LEFT:
            for j in range(unmasked, last + 1):
                acc, more, packed, m, l = _step(
                    q, acc, more, packed, m, l, zero, a, j, n, slope, position, (last - j + begin) * a.BLOCK_N, W, True
                )
        i = last
        # Read here: kept through the loops, they would spill.
        row = a.row_tiles.wait(n, _ROW) + W * ROWS
        head, start = a.row_tiles.read(n, _HEAD), a.row_tiles.read(n, _START)
        place = a.row_tiles.read(n, _PLACE) if a.IS_PACKED else 0
        queries = a.queries_of(n) if a.HAS_SEQUSED_Q else 0
        a.q_ring.release(W)  # the next Q travels under all that follows
        v = a.v_ring.wait(slot_of(i, a.STAGES), lap_of(i, a.STAGES))
        acc, more, p = issue_output(packed, v, acc, more, a)
        l_row = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, s_layout))
        if a.HAS_ALIBI and not a.SEES_AHEAD:  # the part of the row, see ``_add_alibi``
            m -= slope[0] * gl.arange(0, ROWS, m.type.layout).to(gl.float32)
        if a.HAS_BIAS:
            m, l_row, factor = normalise_biased(m, l_row, head, a)
        else:
            m, l_row, factor = _normalise(m, l_row, head, a)
        if a.STORE_LSE:
            _store_lse(m, l_row, head, start, row, place, queries, a)
        acc, more, _ = warpgroup_mma_wait(0, deps=[acc, more, p])
        a.v_ring.release(slot_of(i, a.STAGES))
        i += 1
        acc, more = rescale(acc, more, factor, a)
        if a.HAS_SEQUSED_Q:  # rows behind the queries in use may be NaN
            acc = gl.where(row + gl.arange(0, ROWS, gl.SliceLayout(1, o_layout))[:, None] < queries, acc, 0.0)
            more = gl.where(row + gl.arange(0, ROWS, gl.SliceLayout(1, more_layout))[:, None] < queries, more, 0.0)
        store_output(acc.to(dtype), more.to(dtype), a, (head, start, row, place), W)
        n += 1
        row = a.row_tiles.wait(n, _ROW)
    tma.store_wait(0)


@gluon.jit
def _forward_features_sm90_kernel(
    q_desc,  # [B, H, Sq, D]; packed [1, H, T, D], like k, v and o
    k_desc,  # [B, HK, Sk, D]
    v_desc,  # [B, HK, Sk, DV]
    o_desc,  # [B, H, Sq, DV]
    lse_ptr,  # [B, H, Sq] fp32, natural log; packed [T, H]
    sinks_ptr,  # [H] or None
    alibi_ptr,  # [H], [B, H] or None; packed [H] or None
    bias_desc,  # [B, H, Sq, Sk], axes along which it does not change of one element; or None
    o_ptr,  # packed: [T, H, DV], that of o_desc; else None
    sequences_ptr,  # packed: [8, B] int32, see ``sequences_triton``; else None
    counter_ptr,  # packed: [1] int32, 0 before and after; else None
    q_more_desc, k_more_desc, v_more_desc,  # of the second part of the columns, or None
    sizes: VariantSizes,
    window: Window,
    scale_log2,  # softmax_scale * log2(e), positive; with a softcap softcap * log2(e); see ``_scales``
    inner_scale,  # with a softcap softmax_scale / softcap; with ALiBi times log2(e); with a bias softmax_scale; or 0
    alibi_stride,  # of the slopes along B, or None
    CALL: gl.constexpr,  # VariantCall
    TILE: gl.constexpr,  # HopperTile
):  # fmt: skip
    """Attend 64 * WARPGROUPS rows of one head of one sequence at a time.

    Grid: (at most tiles,), a program attends one after another.
    """
    WARPGROUPS: gl.constexpr = TILE.WARPGROUPS
    STAGES: gl.constexpr = TILE.STAGES
    HAS_BIAS: gl.constexpr = bias_desc is not None
    BARRIERS: gl.constexpr = TURNS + 2 * WARPGROUPS + 2 * STAGES
    gl.static_assert(BARRIERS + (WARPGROUPS if HAS_BIAS else 0) <= 16, "the hardware has 16 barriers")
    declare_too_large()
    HAS_SINKS: gl.constexpr = sinks_ptr is not None
    HAS_ALIBI: gl.constexpr = alibi_ptr is not None
    IS_PACKED: gl.constexpr = sequences_ptr is not None
    q_more = q_more_desc if TILE.D1 > 0 else q_desc
    k_more = k_more_desc if TILE.D1 > 0 else k_desc
    v_more = v_more_desc if TILE.DV1 > 0 else v_desc
    q_ring = make_ring(q_desc, q_more, TILE.D1, WARPGROUPS, 1, TURNS + WARPGROUPS)
    k_ring = make_ring(k_desc, k_more, TILE.D1, STAGES, WARPGROUPS, TURNS + 2 * WARPGROUPS)
    v_ring = make_ring(v_desc, v_more, TILE.DV1, STAGES, WARPGROUPS, TURNS + 2 * WARPGROUPS + STAGES)
    bias_ring = make_ring(bias_desc, bias_desc, 0, WARPGROUPS, 1, BARRIERS) if HAS_BIAS else q_ring
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    o_bufs = make_tiles(o_desc, WARPGROUPS)
    row_tiles = make_mailbox(_FIELDS)
    places = make_places(BLOCK_N) if CALL.SLOPE_PRODUCT else o_bufs
    fence_async_shared()  # TMA, too, sees that the barriers are there, and the matrix units what was stored
    a = Args(  # type: ignore[call-arg] # aggregate gives it a constructor
        q_desc, k_desc, v_desc, o_desc, q_more, k_more, v_more, lse_ptr,
        sinks_ptr if HAS_SINKS else lse_ptr, o_ptr if IS_PACKED else lse_ptr,
        sequences_ptr if IS_PACKED else lse_ptr, counter_ptr if IS_PACKED else lse_ptr,
        row_tiles, q_ring, o_bufs, k_ring, v_ring, places, bias_desc if HAS_BIAS else q_desc, bias_ring,
        sizes.batch, sizes.heads, sizes.seqlen_q, sizes.seqlen_k, sizes.tiles_m, sizes.together, sizes.dealt,
        window.left, window.right, scale_log2, inner_scale,
        alibi_ptr if HAS_ALIBI else lse_ptr, alibi_stride if HAS_ALIBI else sizes.heads,
        CALL.GROUP, WARPGROUPS, BLOCK_N, STAGES, IS_PACKED, CALL.HAS_SEQUSED_Q, HAS_SINKS, CALL.HAS_SOFTCAP, HAS_ALIBI,
        CALL.SEES_AHEAD, CALL.SLOPE_PRODUCT, CALL.BOUND_LEFT, CALL.BOUND_RIGHT,
        TILE.PING_PONG, CALL.STORE_LSE, WARPGROUPS == 3 and BLOCK_N == 128, TILE.D1, TILE.DV0, TILE.DV1, CALL.DV,
        HAS_BIAS, CALL.BIAS_BATCH, CALL.BIAS_HEADS, CALL.BIAS_ROWS, CALL.BATCH_INNER,
    )  # fmt: skip
    R: gl.constexpr = TILE.REGISTERS
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [(_attend_partition, (a, 0)), (_attend_partition, (a, 1)), (_load_partition, (a,))],
            [4, 1],
            [R, 32],
        )
    else:
        gl.warp_specialize(
            [
                (_attend_partition, (a, 0)),
                (_attend_partition, (a, 1)),
                (_attend_partition, (a, 2)),
                (_load_partition, (a,)),
            ],
            [4, 4, 1],
            [R, R, 32],
        )
