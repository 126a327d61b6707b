"""The work of a mixed batch: how the keys of each sequence are split, and where its tiles lie in the grids (Triton).

Lengths are read on the device alone, so a CUDA graph replays with others. Each sequence is compared with all others,
those with the most keys come first. Sequences of few rows and of many have tiles, grids and partial results apart.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..kernel_arguments import Sequences, Window, WorkQuotas

RECORDS: tl.constexpr = tl.constexpr(12)  # int32 of a sequence


@triton.jit
def _read_lengths(sequences, b, batch):
    """Return where sequences start in q, their places there, their queries and their keys; 0 behind the last one."""
    mask = b < batch
    start_q = tl.load(sequences.cu_seqlens_q_ptr + b, mask=mask, other=0)
    place = tl.load(sequences.cu_seqlens_q_ptr + b + 1, mask=mask, other=0) - start_q
    queries = place
    if sequences.seqused_q_ptr is not None:
        queries = tl.load(sequences.seqused_q_ptr + b, mask=mask, other=0)
    if sequences.seqused_k_ptr is not None:
        keys = tl.load(sequences.seqused_k_ptr + b, mask=mask, other=0)
    else:
        keys = tl.load(sequences.cu_seqlens_k_ptr + b + 1, mask=mask, other=0)
        keys -= tl.load(sequences.cu_seqlens_k_ptr + b, mask=mask, other=0)
    return start_q, place, queries, keys


@triton.jit
def _most_steps(
    keys, window, TILES: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Return the most steps over keys that a row tile of ``BLOCK_M`` rows makes."""
    steps = tl.cdiv(keys, BLOCK_N)
    if TILES.BOUND_LEFT and TILES.BOUND_RIGHT:  # the keys between both bounds may start inside of a step
        seen = window.left + window.right + BLOCK_M // GROUP + 2
        steps = tl.minimum(steps, tl.cdiv(seen, BLOCK_N) + 1)
    return tl.maximum(steps, 1)


@triton.jit
def _work_of(place, keys, window, quotas, TILES: tl.constexpr):
    """Return whether sequences have few rows, their row tiles of one K/V head, and the most steps of one.

    Tiles of sequences that are longer than the host was told are left out: there is no room for them.
    """
    rows = place * TILES.GROUP
    few = rows <= TILES.FEW_ROWS
    many = tl.minimum(tl.cdiv(rows, TILES.MANY_ROWS), quotas.most_tiles)
    tiles = tl.where(few, tl.minimum(rows, 1), many)
    steps = tl.where(
        few, _most_steps(keys, window, TILES, TILES.GROUP, TILES.FEW_ROWS, TILES.FEW_KEYS),
        _most_steps(keys, window, TILES, TILES.GROUP, TILES.MANY_ROWS, TILES.MANY_KEYS),
    )  # fmt: skip
    return few, tiles, steps


@triton.jit
def _split(few, steps, few_quota, many_quota, quotas, TILES: tl.constexpr):
    """Return the steps of a share of the keys, and how many shares there are."""
    if TILES.SCHEDULE == "lengths":
        quota = tl.where(few, few_quota, many_quota)
        each = tl.cdiv(steps, tl.maximum((steps + quota // 2) // quota, 1))
    elif TILES.SCHEDULE == "even":
        each = tl.cdiv(steps, quotas.num_splits)
    else:  # by the length of the sequence alone
        each = tl.where(few, tl.minimum(quotas.fixed_steps, steps), steps)
    # As many as there is room for, also where sequences have more keys than the host was told.
    each = tl.maximum(each, tl.cdiv(steps, tl.where(few, quotas.few_most, quotas.many_most)))
    return each, tl.cdiv(steps, each)


@triton.jit
def _merges(place, few, tiles, splits, TILES: tl.constexpr):
    """Return how many programs merge the shares of one K/V head."""
    rows = tl.minimum(place * TILES.GROUP, tiles * tl.where(few, TILES.FEW_ROWS, TILES.MANY_ROWS))
    return tl.where(splits > 1, tl.cdiv(rows, TILES.MERGE_ROWS), 0)


@triton.jit
def _quotas(sequences, batch, window, quotas, TILES: tl.constexpr, BLOCK_B: tl.constexpr):
    """Return the steps that a program with few, and one with many rows should make, were all equal."""
    few_steps = tl.zeros([BLOCK_B], tl.int64)
    many_steps = tl.zeros([BLOCK_B], tl.int64)
    for first in range(0, batch, BLOCK_B):
        _, place, _, keys = _read_lengths(sequences, first + tl.arange(0, BLOCK_B), batch)
        few, tiles, steps = _work_of(place, keys, window, quotas, TILES)
        work = tiles.to(tl.int64) * steps
        few_steps += tl.where(few, work, 0)
        many_steps += tl.where(few, 0, work)
    few_quota = tl.maximum(tl.cdiv(tl.sum(few_steps, 0), quotas.few_slots), quotas.few_least).to(tl.int32)
    many_quota = tl.maximum(tl.cdiv(tl.sum(many_steps, 0), quotas.many_slots), quotas.many_least).to(tl.int32)
    return few_quota, many_quota


@triton.jit
def _plan_work_kernel(
    records_ptr,  # [RECORDS, B] int32: for each sequence, those with the most keys first, what is stored below
    sequences: Sequences,
    batch,
    window: Window,
    quotas: WorkQuotas,
    TILES: tl.constexpr,  # MixedTiles
    BLOCK_B: tl.constexpr,  # sequences of one program
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Plan the work of BLOCK_B sequences. Grid: (cdiv(B, BLOCK_B),)."""
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    few_quota, many_quota = 1, 1
    if TILES.SCHEDULE == "lengths":
        few_quota, many_quota = _quotas(sequences, batch, window, quotas, TILES, BLOCK_B)
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    start_q, place, queries, keys = _read_lengths(sequences, b, batch)
    few, tiles, steps = _work_of(place, keys, window, quotas, TILES)
    each, splits = _split(few, steps, few_quota, many_quota, quotas, TILES)
    rank = tl.zeros([BLOCK_B], tl.int32)
    few_end = tl.where(few, tiles * splits, 0)
    many_end = tl.where(few, 0, tiles * splits)
    merge_end = _merges(place, few, tiles, splits, TILES)
    few_slot = tl.zeros([BLOCK_B], tl.int32)
    many_slot = tl.zeros([BLOCK_B], tl.int32)
    for first in range(0, batch, BLOCK_B):
        other = first + tl.arange(0, BLOCK_B)
        _, other_place, _, other_keys = _read_lengths(sequences, other, batch)
        other_few, other_tiles, other_steps = _work_of(other_place, other_keys, window, quotas, TILES)
        _, other_splits = _split(other_few, other_steps, few_quota, many_quota, quotas, TILES)
        other_merges = _merges(other_place, other_few, other_tiles, other_splits, TILES)
        items = other_tiles * other_splits
        few_items, many_items = tl.where(other_few, items, 0), tl.where(other_few, 0, items)
        more = other_keys[None, :] > keys[:, None]
        as_many = (other_keys[None, :] == keys[:, None]) & (other[None, :] < b[:, None])
        before = (more | as_many) & (other[None, :] < batch)
        rank += tl.sum(before.to(tl.int32), 1)
        few_end += tl.sum(tl.where(before, few_items[None, :], 0), 1)
        many_end += tl.sum(tl.where(before, many_items[None, :], 0), 1)
        merge_end += tl.sum(tl.where(before, other_merges[None, :], 0), 1)
        kept = before & (other_splits > 1)[None, :]  # partial results
        few_slot += tl.sum(tl.where(kept, few_items[None, :], 0), 1)
        many_slot += tl.sum(tl.where(kept, many_items[None, :], 0), 1)
    mask = b < batch
    place_of = records_ptr + rank
    tl.store(place_of, few_end, mask=mask)  # programs of few rows, of one K/V head, up to its last
    tl.store(place_of + batch, many_end, mask=mask)  # the same of many rows
    tl.store(place_of + 2 * batch, merge_end, mask=mask)  # programs of the merge, of one K/V head
    tl.store(place_of + 3 * batch, b, mask=mask)
    tl.store(place_of + 4 * batch, start_q, mask=mask)
    tl.store(place_of + 5 * batch, place, mask=mask)  # queries up to the next sequence
    tl.store(place_of + 6 * batch, queries, mask=mask)
    tl.store(place_of + 7 * batch, keys, mask=mask)
    tl.store(place_of + 8 * batch, each, mask=mask)  # steps of a share of the keys
    tl.store(place_of + 9 * batch, splits, mask=mask)  # of each of its row tiles, at most
    tl.store(place_of + 10 * batch, tl.where(few, few_slot, many_slot), mask=mask)  # its first partial result
    tl.store(place_of + 11 * batch, tiles, mask=mask)  # its row tiles of one K/V head
