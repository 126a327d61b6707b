"""Sort pairs of a token and an expert by expert, on the device (Triton, sm_80 and newer).

A counting sort: the position of a pair is the number of pairs of lower experts plus that of earlier pairs of its own
expert. It is stable and uses no memory atomics. The host does not read the result: the table of row tiles has room for
the maximum. For few pairs one kernel sorts, in which each program counts all pairs; for many, three kernels.

A tile has four numbers: expert, first row, end, unused. The first entry of the table is the number of tiles and three
zeros: counters from which programs fetch tiles (``grouped_gluon_sm90``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..primitives import expert_of_ids


@triton.jit
def _load_experts(ids_ptr, offs, pairs, EXPERTS: tl.constexpr, PAST: tl.constexpr):
    """Load the experts of pairs; ``PAST``, which names no expert, past the last pair."""
    ids = expert_of_ids(tl.load(ids_ptr + offs, mask=offs < pairs, other=0), EXPERTS)
    return tl.where(offs < pairs, ids, PAST)


@triton.jit
def _place(
    own, ids, before, counts, tiles_ptr, order_ptr, positions_ptr, offsets_ptr, pairs, pid,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write the positions of pairs, given the earlier pairs of the same expert and the counts of all experts."""
    experts = tl.arange(0, BLOCK_E)
    counts = tl.where(experts < EXPERTS, counts, 0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    earlier = experts[None, :] < ids[:, None]  # [own, BLOCK_E]
    first = tl.sum(tl.where(earlier, counts[None, :], 0), 1)
    first_tile = tl.sum(tl.where(earlier, tiles[None, :], 0), 1)
    count = tl.sum(tl.where(experts[None, :] == ids[:, None], counts[None, :], 0), 1)
    position = first + before
    present = (own < pairs) & (ids < EXPERTS)
    tl.store(order_ptr + position, own, mask=present)
    tl.store(positions_ptr + own, tl.where(present, position, -1), mask=own < pairs)
    begins = present & (before % BLOCK_M == 0)  # a tile
    entry = tiles_ptr + 4 + 4 * (first_tile + before // BLOCK_M)
    tl.store(entry, ids, mask=begins)
    tl.store(entry + 1, position, mask=begins)
    tl.store(entry + 2, tl.minimum(position + BLOCK_M, first + count), mask=begins)
    if pid == 0:
        header = tl.arange(0, 4)
        tl.store(tiles_ptr + header, tl.where(header == 0, tl.sum(tiles, 0), 0))
        if offsets_ptr is not None:
            tl.store(offsets_ptr + experts, tl.cumsum(counts, 0) - counts, mask=experts <= EXPERTS)
            tl.store(offsets_ptr + EXPERTS + 1 + header, tl.zeros([4], tl.int32))


@triton.jit
def _sort_few_kernel(
    ids_ptr,  # [T, K]
    tiles_ptr,  # [1 + tiles, 4] int32
    order_ptr,  # [P] int32: pairs by expert
    positions_ptr,  # [P] int32: the position of each pair in that order, -1 without an expert
    offsets_ptr,  # [E + 5] int32: the first row of each expert, the end, and four zeros (counters); or None
    pairs,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,  # a power of two, at least EXPERTS + 2
    BLOCK_M: tl.constexpr,  # rows of a tile
    BLOCK_P: tl.constexpr,  # pairs of one program
    CHUNK: tl.constexpr,  # pairs that it counts at a time
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Sort; every program reads all pairs. Grid: (cdiv(P, BLOCK_P),)."""
    pid = tl.program_id(0)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    own = pid * BLOCK_P + tl.arange(0, BLOCK_P)
    ids = _load_experts(ids_ptr, own, pairs, EXPERTS, BLOCK_E - 1)
    before = tl.zeros([BLOCK_P], tl.int32)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in tl.range(0, pairs, CHUNK):
        others = start + tl.arange(0, CHUNK)
        theirs = _load_experts(ids_ptr, others, pairs, EXPERTS, BLOCK_E - 1)
        same = (theirs[None, :] == ids[:, None]) & (others[None, :] < own[:, None])  # [BLOCK_P, CHUNK]
        before += tl.sum(same.to(tl.int32), 1)
        counts += tl.histogram(theirs, BLOCK_E)
    _place(
        own,
        ids,
        before,
        counts,
        tiles_ptr,
        order_ptr,
        positions_ptr,
        offsets_ptr,
        pairs,
        pid,
        EXPERTS,
        BLOCK_E,
        BLOCK_M,
    )


@triton.jit
def _count_kernel(
    ids_ptr,  # [T, K]
    counts_ptr,  # [CHUNKS, BLOCK_E] int32
    pairs,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,  # pairs of one program
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Count the pairs of each expert in one chunk. Grid: (CHUNKS,)."""
    chunk = tl.program_id(0).to(tl.int64)  # times BLOCK_E it can pass 2**31
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    offs = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    ids = _load_experts(ids_ptr, offs, pairs, EXPERTS, BLOCK_E - 1)
    tl.store(counts_ptr + chunk * BLOCK_E + tl.arange(0, BLOCK_E), tl.histogram(ids, BLOCK_E))


@triton.jit
def _sum_chunks_kernel(
    counts_ptr,  # [CHUNKS + 1, BLOCK_E] int32: becomes the pairs in earlier chunks; last row: in all chunks
    chunks,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,  # chunks of one step
    COLUMNS: tl.constexpr,  # experts of one program
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Sum counts over chunks. Grid: (BLOCK_E / COLUMNS,)."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([COLUMNS], tl.int32)
    for start in tl.range(0, chunks, BLOCK_C):
        rows = start + tl.arange(0, BLOCK_C)
        at = counts_ptr + rows.to(tl.int64)[:, None] * BLOCK_E + columns[None, :]
        counts = tl.load(at, mask=rows[:, None] < chunks, other=0)  # [BLOCK_C, COLUMNS]
        through = tl.cumsum(counts, 0)
        tl.store(at, through - counts + total[None, :], mask=rows[:, None] < chunks)
        total += tl.sum(counts, 0)
    tl.store(counts_ptr + chunks.to(tl.int64) * BLOCK_E + columns, total)


@triton.jit
def _place_kernel(
    ids_ptr,  # [T, K]
    counts_ptr,  # [CHUNKS + 1, BLOCK_E] int32, summed over chunks
    tiles_ptr,  # [1 + tiles, 4] int32
    order_ptr,  # [P] int32
    positions_ptr,  # [P] int32
    offsets_ptr,  # [E + 5] int32, or None
    pairs, chunks,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,  # pairs of one program; a divisor of CHUNK
    CHUNK: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Write the positions of BLOCK_P pairs. Grid: (cdiv(P, BLOCK_P),).

    A program counts and sums by expert once, and each pair gathers the entry of its expert. Only the pairs of one
    program are compared with each other.
    """
    pid = tl.program_id(0)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    chunk = pid * BLOCK_P // CHUNK
    inside, others = tl.arange(0, BLOCK_P), chunk * CHUNK + tl.arange(0, CHUNK)
    own = pid * BLOCK_P + inside
    ids = _load_experts(ids_ptr, own, pairs, EXPERTS, BLOCK_E - 1)
    theirs = _load_experts(ids_ptr, others, pid * BLOCK_P, EXPERTS, BLOCK_E - 1)  # earlier pairs of the chunk
    experts = tl.arange(0, BLOCK_E)
    earlier = tl.load(counts_ptr + chunk.to(tl.int64) * BLOCK_E + experts) + tl.histogram(theirs, BLOCK_E)
    totals_ptr = counts_ptr + chunks.to(tl.int64) * BLOCK_E
    counts = tl.where(experts < EXPERTS, tl.load(totals_ptr + experts), 0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    offsets = tl.cumsum(counts, 0) - counts
    # [others, own]: threads have columns of their own, so that sums need no other thread.
    same = (ids[:, None] == ids[None, :]) & (inside[:, None] < inside[None, :])
    before = tl.gather(earlier, ids, 0) + tl.sum(same.to(tl.int32), 0)
    first = tl.gather(offsets, ids, 0)
    position = first + before
    present = (own < pairs) & (ids < EXPERTS)
    tl.store(order_ptr + position, own, mask=present)
    tl.store(positions_ptr + own, tl.where(present, position, -1), mask=own < pairs)
    begins = present & (before % BLOCK_M == 0)  # a tile
    first_tile = tl.gather(tl.cumsum(tiles, 0) - tiles, ids, 0)
    end = first + tl.load(totals_ptr + ids)
    entry = tiles_ptr + 4 + 4 * (first_tile + before // BLOCK_M)
    tl.store(entry, ids, mask=begins)
    tl.store(entry + 1, position, mask=begins)
    tl.store(entry + 2, tl.minimum(position + BLOCK_M, end), mask=begins)
    if pid == 0:
        header = tl.arange(0, 4)
        tl.store(tiles_ptr + header, tl.where(header == 0, tl.sum(tiles, 0), 0))
        if offsets_ptr is not None:
            tl.store(offsets_ptr + experts, offsets, mask=experts <= EXPERTS)
            tl.store(offsets_ptr + EXPERTS + 1 + header, tl.zeros([4], tl.int32))
