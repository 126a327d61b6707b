"""Primitives of the Hopper decode kernels (Gluon): sizes, and splits of the keys, cut as by ``decode_triton``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

KEYS = gl.constexpr(64)  # of a tile
COLUMNS = gl.constexpr(512)  # that keys and values share
MORE = gl.constexpr(64)  # that keys have besides
STAGES = gl.constexpr(2)  # tiles of keys in shared memory
ROWS = gl.constexpr(16)  # of a program of few rows, and of a sequence at the most
_LENGTHS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def launch_dependents():
    """Let the kernel after this one start, up to its own wait for the end of this one."""
    asm: gl.constexpr = "griddepcontrol.launch_dependents; // $0"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def uniform(x):
    """Return an integer that all threads of a warp have in common, so that ptxas knows that they do.

    A loop that ends with it then keeps the addresses of matrices in uniform registers, where 128 bytes were spilled.
    """
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def zero_rows(values, keys):
    """Put 0 in place of the values in shared memory from row ``keys`` on. The caller fences, and lets warps meet."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    LINES: gl.constexpr = 16  # at a time: more would take registers that hold the output
    for first in gl.static_range(0, KEYS, LINES):
        if keys < first + LINES:
            part = values.slice(first, LINES, dim=0)
            row = first + gl.arange(0, LINES, gl.SliceLayout(1, layout))
            value = part.load(layout)
            part.store(gl.where(row[:, None] < keys, value, gl.zeros_like(value)))


@gluon.jit
def place_of_tile(table_ptr, b, key, PAGE_SIZE: gl.constexpr):
    """Return the page in which a tile lies, and its first row there."""
    page = b
    inside = key
    if PAGE_SIZE > 0:
        page = gl.load(table_ptr + key // PAGE_SIZE)
        inside = key % PAGE_SIZE
    return page, inside


@gluon.jit
def hide_keys(s, key, end, seqlen_q, HEADS: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """Put -inf where a row does not see a key of the tile at ``key``."""
    layout: gl.constexpr = s.type.layout
    keys = key + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    if IS_CAUSAL:  # row m of Sq sees key m + end - Sq, too
        token = gl.arange(0, ROWS, gl.SliceLayout(0, layout)) // HEADS
        s = gl.where(keys[:, None] - token[None, :] <= end - seqlen_q, s, -float("inf"))
    return gl.where((keys < end)[:, None], s, -float("inf"))


@gluon.jit
def _cdiv(a, b):
    return (a + b - 1) // b


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def find_share(
    chunk, sizes, seqlens_ptr, kv_splits, BALANCED: gl.constexpr, BLOCK_B: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Return sequence and number of the share ``chunk``, its tiles, the shares of the sequence, and its keys.

    The number is not below that of the shares where there is nothing to do.
    """
    if BALANCED:
        seqs = gl.arange(0, BLOCK_B, _LENGTHS)
        present = seqs < sizes.batch
        ends = seqs * 0 + sizes.capacity
        if seqlens_ptr is not None:
            ends = gl.load(seqlens_ptr + seqs, mask=present, other=0) + sizes.seqlen_new
            ends = gl.minimum(gl.maximum(ends, 0), sizes.capacity)
        tiles = gl.where(present, _cdiv(ends, BLOCK_N), 0)
        total = gl.sum(tiles, 0)
        mean = total // sizes.batch
        quota = gl.maximum(_cdiv(total, kv_splits.splits), kv_splits.least_tiles)
        wanted = gl.maximum((tiles + quota // 2) // quota, 1)
        if gl.max(tiles, 0) <= mean + mean // 8:
            wanted = seqs * 0 + kv_splits.uniform
        shares = gl.maximum(_cdiv(tiles, wanted), 1)
        counts = gl.where(present, gl.maximum(_cdiv(tiles, shares), 1), 0)
        b = gl.sum((gl.associative_scan(counts, 0, _add) <= chunk).to(gl.int32), 0)
        split = chunk - gl.sum(gl.where(seqs < b, counts, 0), 0)
        share = gl.sum(gl.where(seqs == b, shares, 0), 0)
        count = gl.sum(gl.where(seqs == b, counts, 0), 0)
        end = gl.sum(gl.where(seqs == b, ends, 0), 0)
    else:
        b = chunk // kv_splits.splits
        split = chunk % kv_splits.splits
        end = b * 0 + sizes.capacity
        if seqlens_ptr is not None:
            end = gl.minimum(gl.maximum(gl.load(seqlens_ptr + b) + sizes.seqlen_new, 0), sizes.capacity)
        tiles = _cdiv(end, BLOCK_N)
        share = gl.maximum(_cdiv(tiles, kv_splits.splits), kv_splits.least_tiles)
        count = gl.maximum(_cdiv(tiles, share), 1)
    return b, split, share, count, end
