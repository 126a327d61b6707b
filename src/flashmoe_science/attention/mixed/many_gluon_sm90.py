"""Attention of a mixed batch's sequences with many queries, over keys in pages (Gluon, sm_90, fp16 and bf16).

Loops, rings and turns are those of ``forward_features_gluon_sm90``, whose docstring says why they are so. What differs:

- A tile of keys is copied page by page, one TMA copy for each 64 columns of the rows that lie together.
- Row tiles, and shares of their keys, are those that ``work_triton`` counted; programs fetch them one after another.
  One of several shares leaves its output, largest scores and sums in fp32 for the merge.

Source: as ``forward_gluon_sm90``. Ours: all that differs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from ...gpu.gluon_sm90 import (
    fetch_next,
    get_fetched,
    lap_of,
    make_mailbox,
    make_ring,
    rematerialize,
    slot_of,
    special_register,
    wait_for_kernel_before,
)
from ...gpu.gluon_versions import barrier
from ..forward.primitives_sm90 import (
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
from .primitives_sm90 import BEGIN, COLUMNS, END, FIELDS, HEAD, KEYS, PART, PLACE, QUERIES, ROW, START, Args, PagedRing

_CLEANED_ROWS = gl.constexpr(32)  # values that are looked at together
# Triton 3.9 renamed it; the arguments are the same: (descriptor, dtype, shape, layout).
_Descriptor = gl.shared_memory_descriptor
_reinterpret = getattr(_Descriptor, "reinterpret", None) or _Descriptor._reinterpret  # noqa: SLF001 - the older name


@gluon.jit
def _make_paged_ring(desc, MORE: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, READERS: gl.constexpr,
                     FREE: gl.constexpr):  # fmt: skip
    """Allocate a ring for tiles of BLOCK_N keys that boxes of ``desc`` fill."""
    BOXES: gl.constexpr = BLOCK_N // desc.block_type.shape[2]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, COLUMNS], desc.dtype)
    bufs = gl.allocate_shared_memory(desc.dtype, [SLOTS * BOXES] + desc.block_type.shape, desc.layout)
    tiles = _reinterpret(bufs, desc.dtype, [SLOTS, BLOCK_N, COLUMNS], layout)
    more_bufs = bufs
    more_tiles = tiles
    if MORE > 0:
        more_bufs = gl.allocate_shared_memory(desc.dtype, [SLOTS * BOXES] + desc.block_type.shape, desc.layout)
        more_tiles = _reinterpret(more_bufs, desc.dtype, [SLOTS, BLOCK_N, COLUMNS], layout)
    ready_bars = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready_bars.index(slot), count=1)
    return PagedRing(bufs, more_bufs, tiles, more_tiles, ready_bars, BOXES, MORE, FREE, READERS)  # type: ignore[call-arg] # aggregate gives it a constructor


@gluon.jit
def _load_partition(a):
    """Fill the rings, for all tiles of this program."""
    wait_for_kernel_before()  # which planned the work
    i = 0  # tiles of K and of V so far
    n = 0  # row tiles so far
    at = gl.to_tensor(0)
    item = special_register("ctaid.x")
    items = a.record(a.batch - 1, 1) * a.heads
    while item < items:
        at = a.find(at, item // a.heads)
        has_work, head, row, queries, keys, begin, end = a.place(n, at, item)
        ticket = gl.to_tensor(0)
        if has_work:
            kv = head // a.GROUP
            table_ptr = a.page_table_ptr + a.record(at, 3).to(gl.int64) * a.stride_table_b
            start = a.record(at, 4)
            last_page = gl.maximum((keys - 1) // a.PAGE_SIZE, 0)
            first_page = gl.to_tensor(0)
            if a.BOUND_LEFT:
                first_page = gl.minimum(gl.maximum(row + keys - queries - a.window_left, 0) // a.PAGE_SIZE, last_page)
            # K first: Q waits until the tile before has its last scores.
            a.fill(a.k_ring, a.k_desc, table_ptr, kv, end - 1, first_page, last_page, i)
            for w in gl.static_range(a.WARPGROUPS):
                a.q_ring.fill(a.q_desc, a.q_desc, 0, head, start + row + w * ROWS, w, n)
            steps = end - begin
            for step in range(1, steps):
                if step == steps - 1:  # late, so that a slow program gets fewer tiles
                    ticket = fetch_next(a.counter_ptr)
                a.fill(a.k_ring, a.k_desc, table_ptr, kv, end - step - 1, first_page, last_page, i + 1)
                a.fill(a.v_ring, a.v_desc, table_ptr, kv, end - step, first_page, last_page, i)
                i += 1
            if steps == 1:
                ticket = fetch_next(a.counter_ptr)
            a.fill(a.v_ring, a.v_desc, table_ptr, kv, begin, first_page, last_page, i)
            i += 1
            n += 1
        else:
            ticket = fetch_next(a.counter_ptr)
        item = get_fetched(ticket, a.counter_ptr, items)
    a.publish(n, -1)  # the end


@gluon.jit
def _cap(s, a):
    """Return tanh(softmax_scale / softcap * s), to within 2**-11: what rounding a score to fp16 costs."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [s * a.cap_scale], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _mask(s, a, n, position, key):
    """Put -inf where a row of the tile at ``key`` does not see a key; the first row is at ``position``."""
    WIDTH: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    x = gl.reshape(s, [ROWS, WIDTH // 8, 4, 2])
    x_layout: gl.constexpr = x.type.layout
    lane_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x_layout))  # [ROWS, 4]
    lane = 2 * gl.arange(0, 4, gl.SliceLayout(0, lane_layout))[None, :]
    own = position - key + gl.arange(0, ROWS, gl.SliceLayout(1, lane_layout))
    last = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, lane_layout)) + (a.row_tiles.read(n, KEYS) - 1 - key)
    if a.BOUND_RIGHT:
        last = gl.minimum(last, own + a.window_right)
    i = gl.arange(0, WIDTH // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, x_layout))))
    k = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, x_layout))))
    column = 8 * i[None, :, None, None] + k[None, None, None, :]
    seen = column <= (last[:, None] - lane)[:, None, :, None]
    if a.BOUND_LEFT:
        seen = seen & (column >= (own[:, None] - a.window_left - lane)[:, None, :, None])
    x = gl.where(seen, x, -float("inf"))
    return gl.convert_layout(gl.reshape(x, [ROWS, WIDTH]), layout)


@gluon.jit
def _clean(values, keys):
    """Put 0 in place of the values from row ``keys`` on. Every warpgroup does it for itself: they write the same."""
    TILE: gl.constexpr = values.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for first in gl.static_range(0, TILE, _CLEANED_ROWS):
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
def _first_step(q, m, l, zero, a, i, n, position, key):
    """Scores of tile i, the last in the range, and their exponentials."""
    k = a.k_ring.wait(slot_of(i, a.STAGES), lap_of(i, a.STAGES))
    s = warpgroup_mma_wait(0, deps=[issue_scores(q, k, zero, a.D1)])
    a.k_ring.release(slot_of(i, a.STAGES))
    if a.HAS_SOFTCAP:
        s = _cap(s, a)
    s = _mask(s, a, n, position, key)
    m, l, _ = update_row_max(s, m, l, a)
    packed, sums = exponentials(s, m, l, a)
    return packed, m, l + sums


@gluon.jit
def _step(q, acc, more, packed, m, l, zero, a, i, n, position, key, W: gl.constexpr, IS_EDGE: gl.constexpr):
    """Scores of tile i and the output product of tile i - 1, then the exponentials of the scores."""
    s, acc, more = multiply(q, acc, more, packed, zero, a, i, W, IS_EDGE)
    if a.HAS_SOFTCAP:
        s = _cap(s, a)
    if IS_EDGE:
        return fold_masked(_mask(s, a, n, position, key), acc, more, m, l, a)
    return online_softmax_step(s, acc, more, packed, m, l, a)


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
    """Store the LSE of the rows of a warpgroup: -inf without keys, or behind the queries in use."""
    lse = gl.where(l != 0, (m + gl.log2(l)) * 0.6931471805599453, -float("inf"))
    offs_m = row + gl.arange(0, ROWS, m.type.layout)
    if a.HAS_SEQUSED_Q:
        lse = gl.where(offs_m < queries, lse, -float("inf"))
    rows = (start + offs_m).to(gl.int64) * rematerialize(a.heads) + head
    gl.store(a.lse_ptr + rows, lse, mask=offs_m < place)


@gluon.jit
def _store_part(acc, more, m, l, part, a, W: gl.constexpr):
    """Leave a share's output before its sum divides it, its largest scores and its sums."""
    layout: gl.constexpr = acc.type.layout
    first = part.to(gl.int64) + W * ROWS
    offs_m = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    o_ptr = a.o_part_ptr + first * a.DV
    gl.store(o_ptr + offs_m[:, None] * a.DV + offs_d[None, :], acc)
    if a.DV1 > 0:
        gl.store(o_ptr + a.DV0 + offs_m[:, None] * a.DV + offs_d[None, :], more)
    rows = first + gl.arange(0, ROWS, m.type.layout)
    gl.store(a.sums_part_ptr + 2 * rows, m)
    gl.store(a.sums_part_ptr + 2 * rows + 1, l)


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
    row = a.row_tiles.wait(0, ROW)
    while row >= 0:
        queries, keys = a.row_tiles.read(n, QUERIES), a.row_tiles.read(n, KEYS)
        begin, end = a.row_tiles.read(n, BEGIN), a.row_tiles.read(n, END)
        position = row + W * ROWS + keys - queries
        since, until = a.unmasked_tiles(position, keys, begin, end)
        m = gl.full([ROWS], -3.0e38, gl.float32, gl.SliceLayout(1, s_layout))  # not -inf: -inf - -inf is NaN
        l = partial_sums(gl.zeros([ROWS, a.BLOCK_N], gl.float32, s_layout))
        acc = gl.zeros([ROWS, a.DV0], gl.float32, o_layout)
        more = gl.zeros([ROWS, DV1], gl.float32, more_layout)
        zero = gl.zeros([ROWS, a.BLOCK_N], gl.float32, s_layout)

        q = a.q_ring.wait(W, n)
        last = i + end - 1 - begin
        packed, m, l = _first_step(q, m, l, zero, a, i, n, position, (end - 1) * a.BLOCK_N)
        _clean_values(a, i, keys - (end - 1) * a.BLOCK_N)

        masked = i + end - until  # masked at the right: the tiles before this one
        unmasked = i + end - since  # not masked: those from there to before this one
        for j in range(i + 1, masked):
            acc, more, packed, m, l = _step(
                q, acc, more, packed, m, l, zero, a, j, n, position, (last - j + begin) * a.BLOCK_N, W, True
            )
        for j in range(masked, unmasked):
            acc, more, packed, m, l = _step(q, acc, more, packed, m, l, zero, a, j, n, 0, 0, W, False)
        if a.BOUND_LEFT:
            for j in range(unmasked, last + 1):
                acc, more, packed, m, l = _step(
                    q, acc, more, packed, m, l, zero, a, j, n, position, (last - j + begin) * a.BLOCK_N, W, True
                )
        i = last
        # Read here: kept through the loops, they would spill.
        row = a.row_tiles.wait(n, ROW) + W * ROWS
        head, start, place = a.row_tiles.read(n, HEAD), a.row_tiles.read(n, START), a.row_tiles.read(n, PLACE)
        part = a.row_tiles.read(n, PART)
        queries = a.row_tiles.read(n, QUERIES) if a.HAS_SEQUSED_Q else 0
        a.q_ring.release(W)  # the next Q travels under all that follows
        v = a.v_ring.wait(slot_of(i, a.STAGES), lap_of(i, a.STAGES))
        acc, more, p = issue_output(packed, v, acc, more, a)
        l_row = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, s_layout))
        acc, more, _ = warpgroup_mma_wait(0, deps=[acc, more, p])
        a.v_ring.release(slot_of(i, a.STAGES))
        i += 1
        if part >= 0:
            _store_part(acc, more, m, l_row, part, a, W)
        else:
            m, l_row, factor = _normalise(m, l_row, head, a)
            if a.STORE_LSE:
                _store_lse(m, l_row, head, start, row, place, queries, a)
            acc, more = rescale(acc, more, factor, a)
            if a.HAS_SEQUSED_Q:  # rows behind the queries in use may be NaN
                acc = gl.where(row + gl.arange(0, ROWS, gl.SliceLayout(1, o_layout))[:, None] < queries, acc, 0.0)
                more = gl.where(row + gl.arange(0, ROWS, gl.SliceLayout(1, more_layout))[:, None] < queries, more, 0.0)
            store_output(acc.to(dtype), more.to(dtype), a, (head, start, row, place), W)
        n += 1
        row = a.row_tiles.wait(n, ROW)
    tma.store_wait(0)


@gluon.jit
def _many_sm90_kernel(
    q_desc,  # [1, H, T, D], in boxes of 64 rows and 64 columns
    k_desc,  # [PAGES, HK, PAGE_SIZE, D], in boxes of rows of one page and 64 columns
    v_desc,  # [PAGES, HK, PAGE_SIZE, DV]
    o_desc,  # [1, H, T, DV]
    lse_ptr,  # [T, H] fp32, natural log
    sinks_ptr,  # [H] or None
    o_ptr,  # [T, H, DV], that of o_desc
    o_part_ptr,  # [rows, DV] fp32, of each share before its sum divides it
    sums_part_ptr,  # [rows, 2] fp32: the largest score of a row in units of log2(e), and its sum
    records_ptr,  # [RECORDS, B] int32: the work
    page_table_ptr,  # [B, pages of a sequence] int32
    counter_ptr,  # [1] int32, 0 before and after
    stride_table_b,
    batch, heads,
    first_part,  # where the partial results of these tiles begin
    window_left, window_right,
    scale_log2,  # softmax_scale * log2(e), positive; with a softcap softcap * log2(e)
    cap_scale,  # softmax_scale / softcap; or 0
    CALL: gl.constexpr,  # ManyCall
    TILE: gl.constexpr,  # ManyTile
):  # fmt: skip
    """Attend 128 rows of one head to one share of the keys at a time. Grid: (at most shares of tiles,)."""
    WARPGROUPS: gl.constexpr = TILE.WARPGROUPS
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    STAGES: gl.constexpr = TILE.STAGES
    gl.static_assert(TURNS + 2 * WARPGROUPS + 2 * STAGES <= 16, "the hardware has 16 barriers")
    declare_too_large()
    HAS_SINKS: gl.constexpr = sinks_ptr is not None
    D1: gl.constexpr = CALL.D - COLUMNS
    DV1: gl.constexpr = CALL.DV - COLUMNS
    R: gl.constexpr = TILE.REGISTERS
    q_ring = make_ring(q_desc, q_desc, D1, WARPGROUPS, 1, TURNS + WARPGROUPS)
    k_ring = _make_paged_ring(k_desc, D1, BLOCK_N, STAGES, WARPGROUPS, TURNS + 2 * WARPGROUPS)
    v_ring = _make_paged_ring(v_desc, DV1, BLOCK_N, STAGES, WARPGROUPS, TURNS + 2 * WARPGROUPS + STAGES)
    o_bufs = gl.allocate_shared_memory(o_desc.dtype, [WARPGROUPS] + o_desc.block_type.shape, o_desc.layout)
    row_tiles = make_mailbox(FIELDS)
    fence_async_shared()  # TMA, too, sees that the barriers are there
    a = Args(  # type: ignore[call-arg] # aggregate gives it a constructor
        q_desc, k_desc, v_desc, o_desc, o_part_ptr if lse_ptr is None else lse_ptr,
        sinks_ptr if HAS_SINKS else o_part_ptr, o_ptr, o_part_ptr, sums_part_ptr, records_ptr, page_table_ptr,
        counter_ptr, row_tiles, q_ring, o_bufs, k_ring, v_ring, stride_table_b, batch, heads, first_part,
        window_left, window_right, scale_log2, cap_scale, CALL.GROUP, WARPGROUPS, BLOCK_N, STAGES,
        CALL.PAGE_SIZE, CALL.HAS_SEQUSED_Q, HAS_SINKS, CALL.HAS_SOFTCAP, CALL.BOUND_LEFT, CALL.BOUND_RIGHT,
        TILE.PING_PONG, CALL.STORE_LSE, False, D1, COLUMNS, DV1, CALL.DV,
    )  # fmt: skip
    gl.warp_specialize(
        [(_attend_partition, (a, 0)), (_attend_partition, (a, 1)), (_load_partition, (a,))],
        [4, 1],
        [R, 32],
    )
