"""Find out why the copies of decode_gluon_sm90 are slow: kernels that only read 64 x 4,096 MLA keys of 1,152 bytes.

    python lab/decode/mla_copies.py [--seconds 80] [name ...]      # on an H200
    python lab/decode/mla_copies.py --compile                      # no GPU: compile, and check who reads which tile

Each kernel fills slots of shared memory with tiles of 64 keys (72 KiB) and asks for the next tile as soon as one has come.
Before it is timed, the same machine code adds up all it was given, once, and the sum is compared with torch's. A time is the
median of replays of a CUDA graph over three sets of 302 MB, so all comes from memory.

What may be slow, and what would show it (4.3 TB/s are 70 us; 3 us for launch and first bytes):

A. Order in memory. A box is 64 rows of 128 bytes, 1,152 apart, so a stretch of memory is visited nine times. If so, boxes of
   8 rows, copies in memory order ("lines", "flat") and cp.async reach 4 TB/s, and L2 ("l2") gives boxes far more.
B. The copy engine: many small boxes of one thread. If so, "l2" is no faster than memory, one instruction a tile ("chunks") is faster
   than nine, and the order does not matter.
C. Bytes under way: too few ("slots1" slow, "slots3" fast) or too many ("slots3" slow, "slots1" fast).
D. Places: 128 programs at the same place of their share. If so, "linear" (all programs side by side) beats "share".
E. The ends: 128 of 132 SMs, a late start, 200 empty programs. If so, "base" beats "now", and "full rounds" takes no longer.
F. What else a call does: queries, partial outputs, the merge. If so, "now" is near 75 us, and only "whole call" takes 108.

Foreseen: A, most of it, and a few percent of E. Ends count for less than a tenth, C and D for nothing.

The variants, in the order in which they run; what is not said is as in "base":

name            | options                                         | foreseen us and why
base            |                                                 | 97 A: boxes as now, 132 programs, pages in random order
now             | programs=128 grid=328                           | 100 as base on 128 SMs; F is 5 to 8 us
flat            | kind=flat                                       | 75 A: 2 boxes of 256 lines of 128 bytes and 1 of 64, in memory order
rows8           | rows=8                                          | 80 A: 72 boxes of 8 rows, so 9 KB are read at a time
l2              | pages=few                                       | 55 A: 19 MB read 16 times, from L2
plain loads     | kind=plain programs=528 pages=none warps=8      | 72 the ceiling: ld.global of 16 bytes, memory order
async 8w        | kind=async warps=8                              | 76 A: rows of 1 KB by cp.async
lines           | kind=lines                                      | 77 A: 1 box of 64 rows x 8 chunks, a row after the other, and 1 of the last chunk
chunks          | kind=chunks                                     | 97 A: as base in 2 instructions; 80 if B
8 issue         | warps=8                                         | 97 not B: 8 threads ask for a box each
slots1          | slots=1                                         | 112 nothing under way between two tiles
slots3          | slots=3                                         | 97 not C
linear          | walk=linear pages=none                          | 95 side by side: memory sees more of a stretch at a time
share           | pages=none                                      | 97 not D
full rounds     | tiles=4224                                      | 98 31.03 rounds take as long as 32, less the wait for a few SMs
rows16          | rows=16                                         | 83 A
rows32          | rows=32                                         | 89 A
wide            | kind=wide                                       | 86 A: boxes of 256 columns without swizzle, 512 bytes a row
two an SM       | slots=1 programs=264                            | 97 as base
two an SM rows8 | slots=1 programs=264 rows=8                     | 80 as rows8
flat linear     | kind=flat walk=linear pages=none                | 72 the ideal walk
flat slots1     | kind=flat slots=1                               | 95 nothing under way between two tiles
flat slots3     | kind=flat slots=3                               | 75 not C
rows8 linear    | rows=8 walk=linear pages=none                   | 77
rows8 128       | rows=8 programs=128 grid=328                    | 83 E: what the kernel would reach
tile32          | tile=32 slots=4                                 | 91 A: boxes of 32 rows; lost as tiles of 32 keys
tile8           | tile=8 slots=16                                 | 80 as rows8, 9 KB asked for as 9 KB come
tile128         | kind=rows tile=128 slots=1 pages=none           | 115 one slot of 144 KB
no promo        | promo=0                                         | 97 every chunk is whole lines
promo64         | promo=1                                         | 97
promo256        | promo=3                                         | 101 lines of the row before are asked for twice; 113 for 108 was found
rotated         | kind=rotated                                    | 97 A: 9 boxes, each program begins with another
rows            | kind=rows                                       | 97 row coordinates in place of a page axis
pages in order  | pages=order                                     | 97 not D
l2 flat         | kind=flat pages=few                             | 52
async 4w        | kind=async warps=4                              | 78
async slots3    | kind=async warps=8 slots=3                      | 76
async two an SM | kind=async warps=8 slots=1 programs=264         | 76
async flat      | kind=asyncflat warps=8                          | 74 whole tiles in memory order
async boxes     | kind=asyncbox warps=8                           | 88 A: by cp.async in boxes of 32 rows x 128 bytes, as rows32
async linear    | kind=async warps=8 walk=linear pages=none       | 74
empty           | programs=1 tiles=1                              | 3 a launch and one tile
whole call      | kind=ours                                       | 108 with merge and outputs
copy            | kind=copy                                       | 72 torch's copy of 151 MB: as many bytes, half of them written
base again      |                                                 | 97 as base: how much the card drifts

After these, "base", "flat" and "whole call" are timed as one call: behind a fill of 128 MiB, which leaves L2 full of dirty lines
(foreseen: 11 us more), behind a fill and a read (2 us more: a start with nothing under way), and behind nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import faulthandler
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
import triton
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from flashmoe_science.attention.decode.calls import prepare_call
from flashmoe_science.attention.decode.plan import plan_with_kv_cache
from flashmoe_science.attention.decode.prepare import prepare_cache_kernels
from flashmoe_science.attention.decode.problem import CacheProblem
from flashmoe_science.gpu import tensor_map
from flashmoe_science.gpu.compile import KernelSource, compile_kernel, read_resources
from flashmoe_science.gpu.gluon_sm90 import make_barriers, make_tiles
from flashmoe_science.gpu.gluon_versions import async_load, barrier, tma_load
from flashmoe_science.gpu.launch import prepare_launch
from flashmoe_science.gpu.specs import find_gpu
from flashmoe_science.gpu.tensor_map import TensorMap

START = time.monotonic()
PAGE, TILES, MOST_TILES, SETS = 64, 4096, 4224, 3  # keys of a page, pages of the 64 sequences, pages of a set of inputs
ROW_BYTES = 1152
CONTEXT_LOST = 3  # exit status
_PAGE = gl.constexpr(64)
_WIDTH = gl.constexpr(576)
_PIECE = gl.constexpr(4096)  # elements that a warp adds up at once


@gluon.jit
def _tiles_of(pid, programs, tiles, LINEAR: gl.constexpr):
    """Return first tile, step and number of tiles of a program; those behind ``programs`` have none."""
    first = pid
    step = programs
    count = (tiles - pid + programs - 1) // programs
    if not LINEAR:
        first = pid * tiles // programs
        step = 1
        count = (pid + 1) * tiles // programs - first
    if pid >= programs:
        count = count * 0
    return first, step, count


@gluon.jit
def _row_of(table_ptr, tile, TILE: gl.constexpr, PAGED: gl.constexpr):
    """Return the first row of a tile, counted over all pages."""
    row = tile * TILE
    if PAGED:
        row = gl.load(table_ptr + row // _PAGE) * _PAGE + row % _PAGE
    return row


@gluon.jit
def _issue(big_desc, small_desc, big, small, bar, row, pid, at, KIND: gl.constexpr, TILE: gl.constexpr,
           ROWS: gl.constexpr, BIG: gl.constexpr):  # fmt: skip
    """Ask for the tile whose first row is ``row``, into the boxes from number ``at * TILE // ROWS`` on."""
    GROUPS: gl.constexpr = TILE // ROWS
    mbarrier.expect(bar, TILE * 1152)
    for g in gl.static_range(GROUPS):
        line = row + g * ROWS
        into = at * GROUPS + g
        for n in gl.static_range(BIG):
            box = big.index(into * BIG + n)
            if KIND == "page":
                tma_load(big_desc, [line // _PAGE, line % _PAGE, 0], bar, box)
            elif KIND == "rows":
                tma_load(big_desc, [line, 0], bar, box)
            elif KIND == "wide":
                tma_load(big_desc, [line, n * 256], bar, box)
            elif KIND == "chunks":
                tma_load(big_desc, [0, line, 0], bar, box)
            elif KIND == "lines":
                tma_load(big_desc, [line, 0, 0], bar, box)
            elif KIND == "flat":
                tma_load(big_desc, [line * 9 + n * 256, 0], bar, box)
            else:  # rotated
                tma_load(big_desc, [line, (n + pid) % 9 * 64], bar, box)
        if KIND == "page":
            tma_load(small_desc, [line // _PAGE, line % _PAGE, 512], bar, small.index(into))
        elif KIND == "rows" or KIND == "wide":  # noqa: PLR1714 - Gluon has no "in"
            tma_load(small_desc, [line, 512], bar, small.index(into))
        elif KIND == "chunks":
            tma_load(small_desc, [8, line, 0], bar, small.index(into))
        elif KIND == "lines":
            tma_load(small_desc, [line, 8, 0], bar, small.index(into))
        elif KIND == "flat":
            tma_load(small_desc, [line * 9 + 512, 0], bar, small.index(into))


@gluon.jit
def _sum(box, WARPS: gl.constexpr):
    """Return the sum of the 16-bit integers of a box."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    WIDTH: gl.constexpr = box.shape[len(box.shape) - 1]
    flat = box
    if len(box.shape) == 3:
        flat = box.reshape([box.shape[0] * box.shape[1], WIDTH])
    HEIGHT: gl.constexpr = flat.shape[0]
    LINES: gl.constexpr = _PIECE // WIDTH if _PIECE // WIDTH < HEIGHT else HEIGHT
    total = 0
    for first in gl.static_range(0, HEIGHT, LINES):
        piece = flat.slice(first, LINES, dim=0).load(layout)
        total += gl.sum(gl.sum(piece.to(gl.int16, bitcast=True).to(gl.int32), 1), 0)
    return total


@gluon.jit
def _tma_kernel(
    big_desc,
    table_ptr,  # [tiles] int32: page
    sums_ptr,  # [programs of the grid] int32: sum of what was read, with full
    small_desc,  # of the same tensor
    programs, tiles,
    full,  # whether to read shared memory, for the check
    KIND: gl.constexpr, TILE: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr, BIG: gl.constexpr,
    PAGED: gl.constexpr, LINEAR: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Read tiles with TMA."""
    pid = gl.program_id(0)
    first, step, count = _tiles_of(pid, programs, tiles, LINEAR)
    GROUPS: gl.constexpr = TILE // ROWS
    big, small = make_tiles(big_desc, SLOTS * GROUPS * BIG), make_tiles(small_desc, SLOTS * GROUPS)
    bars = make_barriers(SLOTS, 1)
    fence_async_shared()
    barrier()
    for i in gl.static_range(SLOTS):
        if i < count:
            row = _row_of(table_ptr, first + i * step, TILE, PAGED)
            _issue(big_desc, small_desc, big, small, bars.index(i), row, pid, i, KIND, TILE, ROWS, BIG)
    total = pid * 0
    for i in range(count):
        slot = i % SLOTS
        more = i + SLOTS < count
        row = _row_of(table_ptr, first + gl.where(more, i + SLOTS, i) * step, TILE, PAGED)  # asked for before the wait
        mbarrier.wait(bars.index(slot), i // SLOTS & 1)
        barrier()
        if full > 0:
            for n in gl.static_range(GROUPS * BIG):
                total += _sum(big.index(slot * (GROUPS * BIG) + n), WARPS)
            if KIND != "rotated":
                for n in gl.static_range(GROUPS):
                    total += _sum(small.index(slot * GROUPS + n), WARPS)
            barrier()
        if more:
            _issue(big_desc, small_desc, big, small, bars.index(slot), row, pid, slot, KIND, TILE, ROWS, BIG)
    gl.store(sums_ptr + pid, total)


@gluon.jit
def _copy_tile(keys_ptr, buf, more_buf, row, KIND: gl.constexpr, WARPS: gl.constexpr):
    """Ask for a tile by cp.async, 16 bytes a thread."""
    if KIND == "asyncflat":
        layout: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
        ptr = keys_ptr + row * _WIDTH
        async_load(buf, ptr + gl.arange(0, 32768, layout))
        async_load(more_buf, ptr + (32768 + gl.arange(0, 4096, layout)))
    else:
        narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
        whole: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS // 2, 2], [1, 0])  # two warps a row
        wide: gl.constexpr = narrow if KIND == "asyncbox" else whole
        rows, columns = gl.arange(0, 64, gl.SliceLayout(1, wide)), gl.arange(0, 512, gl.SliceLayout(0, wide))
        async_load(buf, keys_ptr + ((row + rows)[:, None] * _WIDTH + columns[None, :]))
        rows, columns = gl.arange(0, 64, gl.SliceLayout(1, narrow)), gl.arange(0, 64, gl.SliceLayout(0, narrow))
        async_load(more_buf, keys_ptr + ((row + rows)[:, None] * _WIDTH + (512 + columns)[None, :]))


@gluon.jit
def _async_kernel(
    keys_ptr, table_ptr, sums_ptr, programs, tiles, full,
    SLOTS: gl.constexpr, PAGED: gl.constexpr, LINEAR: gl.constexpr, KIND: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Read tiles of 64 keys with cp.async."""
    pid = gl.program_id(0)
    first, step, count = _tiles_of(pid, programs, tiles, LINEAR)
    FLAT: gl.constexpr = KIND == "asyncflat"
    SHAPE: gl.constexpr = [32768] if FLAT else [64, 512]
    MORE: gl.constexpr = [4096] if FLAT else [64, 64]
    ORDER: gl.constexpr = [0] if FLAT else [1, 0]
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1 if FLAT else 8, ORDER)
    bufs = gl.allocate_shared_memory(gl.bfloat16, [SLOTS] + SHAPE, shared)
    more_bufs = gl.allocate_shared_memory(gl.bfloat16, [SLOTS] + MORE, shared)
    read: gl.constexpr = (
        gl.BlockedLayout([8], [32], [WARPS], [0]) if FLAT else gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    )
    for i in gl.static_range(SLOTS):
        if i < count:
            row = _row_of(table_ptr, first + i * step, 64, PAGED)
            _copy_tile(keys_ptr, bufs.index(i), more_bufs.index(i), row, KIND, WARPS)
        async_copy.commit_group()
    total = pid * 0
    for i in range(count):
        slot = i % SLOTS
        more = i + SLOTS < count
        row = _row_of(table_ptr, first + gl.where(more, i + SLOTS, i) * step, 64, PAGED)
        async_copy.wait_group(SLOTS - 1)
        barrier()
        if full > 0:
            a = bufs.index(slot).load(read).to(gl.int16, bitcast=True).to(gl.int32)
            b = more_bufs.index(slot).load(read).to(gl.int16, bitcast=True).to(gl.int32)
            if FLAT:
                total += gl.sum(a, 0) + gl.sum(b, 0)
            else:
                total += gl.sum(gl.sum(a, 1), 0) + gl.sum(gl.sum(b, 1), 0)
            barrier()
        if more:
            _copy_tile(keys_ptr, bufs.index(slot), more_bufs.index(slot), row, KIND, WARPS)
        async_copy.commit_group()  # an empty one, too, so that waits count alike
    gl.store(sums_ptr + pid, total)


@triton.jit
def _plain_kernel(keys_ptr, table_ptr, sums_ptr, programs, tiles, full, BLOCK: tl.constexpr):
    """Add up all keys, 16 KB at a time, all programs side by side."""
    pid = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for block in range(pid, tiles * 36864 // BLOCK, programs):
        total += tl.load(keys_ptr + block * BLOCK + at).to(tl.int16, bitcast=True).to(tl.int32)
    tl.store(sums_ptr + pid, tl.sum(total, 0))


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of the table above."""

    name: str
    foreseen: str
    kind: str = "page"
    tile: int = 64  # keys that are asked for when as many have come
    rows: int = 64  # of a box; all of a tile where nothing is said
    slots: int = 2  # tiles in shared memory
    programs: int = 132  # that read
    grid: int = 0  # programs in all; 0: those that read
    walk: str = "share"  # a stretch of tiles each; linear: side by side
    pages: str = "random"  # by a table: random, order, few (256 pages again and again); none: no table
    tiles: int = TILES  # of 64 keys
    promo: int = 2  # CU_TENSOR_MAP_L2_PROMOTION: 0 none, 1 64 bytes, 2 128, 3 256
    warps: int = 1  # with one, one thread asks for all boxes


def read_table() -> list[Variant]:
    found = []
    lines = __doc__.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("name  "))
    for line in lines[start + 1 :]:
        if not line.strip():
            break
        name, options, foreseen = (part.strip() for part in line.split("|"))
        given = dict(option.split("=") for option in options.split())
        given.setdefault("rows", given.get("tile", "64"))
        found.append(Variant(name, foreseen, **{k: int(v) if v.isdigit() else v for k, v in given.items()}))
    return found


def boxes_of(v: Variant):
    """Return big box, small box, shape and strides of the tensor, swizzle in bytes, and big boxes of a group of rows."""
    n, rows = MOST_TILES * PAGE, v.rows
    return {
        "page": ((1, rows, 512), (1, rows, 64), (n // PAGE, PAGE, 576), (PAGE * 576, 576, 1), 128, 1),
        "rows": ((rows, 512), (rows, 64), (n, 576), (576, 1), 128, 1),
        "wide": ((rows, 256), (rows, 64), (n, 576), (576, 1), 0, 2),
        "chunks": ((8, rows, 64), (1, rows, 64), (9, n, 64), (64, 576, 1), 128, 1),
        "lines": ((rows, 8, 64), (rows, 1, 64), (n, 9, 64), (576, 64, 1), 128, 1),
        "flat": ((256, 64), (64, 64), (n * 9, 64), (64, 1), 128, 2),
        # Nine big boxes; the small one is never asked for.
        "rotated": ((rows, 64), (8, 64), (n, 576), (576, 1), 128, 9),
    }[v.kind]


def descriptor(box, swizzle: int) -> str:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=len(box))
    return f"tensordesc<bf16[{', '.join(map(str, box))}],{layout!r}>"


def source_of(v: Variant) -> KernelSource:
    paged, linear = v.pages != "none", v.walk == "linear"
    numbers = (("programs", "i32"), ("tiles", "i32"), ("full", "i32"))
    pointers = (("table_ptr", "*i32"), ("sums_ptr", "*i32"))
    signature = (("keys_ptr", "*bf16"), *pointers, *numbers)
    if v.kind == "plain":
        constants = (("BLOCK", 8192),)
        return KernelSource(_plain_kernel, signature, constants, frozenset({"keys_ptr"}), v.warps, max_registers=255)
    shared = (("SLOTS", v.slots), ("PAGED", paged), ("LINEAR", linear))
    if v.kind.startswith("async"):
        constants = (*shared, ("KIND", v.kind), ("WARPS", v.warps))
        return KernelSource(_async_kernel, signature, constants, frozenset({"keys_ptr"}), v.warps, max_registers=255)
    big, small, _, _, swizzle, count = boxes_of(v)
    big, small = descriptor(big, swizzle), descriptor(small, swizzle)
    signature = (("big_desc", big), *pointers, ("small_desc", small), *numbers)
    constants = (("KIND", v.kind), ("TILE", v.tile), ("ROWS", v.rows), ("BIG", count), ("WARPS", v.warps), *shared)
    return KernelSource(_tma_kernel, signature, constants, frozenset(), v.warps)


def key_of(v: Variant):
    """Return what is equal for variants that share a kernel, as they differ in numbers alone."""
    return v.kind if v.kind == "ours" else source_of(v)


def compile_only(v: Variant) -> str:
    """Compile a variant, in a process of its own; return its resources, or what went wrong."""
    try:
        if v.kind == "ours":
            for kernel in prepare_cache_kernels(plan_of_whole_call()):
                compile_kernel(kernel.source, 90)
            return ""
        found = read_resources(source_of(v), 90)
        copies = compile_kernel(source_of(v), 90).asm["ptx"].count("cp.async.bulk.tensor")
        spills = f" SPILLS {found.spill_bytes}" if found.spill_bytes else ""
        return f"r{found.registers} m{found.shared_memory_bytes >> 10}K" + (f" b{copies}" if copies else "") + spills
    except Exception as error:  # noqa: BLE001 - one that does not compile is named, and the others run
        return f"FAILS {type(error).__name__}: {' '.join(str(error).split())[-300:]}"


def check_walks(variants: list[Variant]) -> None:
    """Check that each tile is read once, with the arithmetic of the kernels."""
    for v in variants:
        if v.kind in ("ours", "copy", "plain"):
            continue
        assert v.kind != "page" or v.rows <= PAGE, v
        tiles, seen = v.tiles * PAGE // v.tile, []
        for pid in range(v.grid or v.programs):
            first, step, count = _tiles_of.fn(pid, v.programs, tiles, v.walk == "linear")
            seen += [first + i * step for i in range(count)]
        assert sorted(seen) == list(range(tiles)), v


class Keys:
    """Sets of keys, their page tables, and what a variant should find in them."""

    def __init__(self):
        torch.manual_seed(0)
        shape = MOST_TILES, PAGE, 576
        self.sets = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)]
        self.page_sums = [x.view(torch.int16).sum((1, 2), dtype=torch.int64) for x in self.sets]
        pages = torch.arange(MOST_TILES, device="cuda", dtype=torch.int32)
        self.tables = {"order": pages, "none": pages, "few": pages % 256}
        # One for all sets: the first 4,096 pages among themselves, so that any variant reads the same bytes.
        self.tables["random"] = torch.cat([torch.randperm(TILES, device="cuda").int(), pages[TILES:]])
        self.sums = torch.empty(4096, device="cuda", dtype=torch.int32)

    def expected(self, v: Variant) -> int:
        return int(self.page_sums[0][self.tables[v.pages][: v.tiles].long()].sum())


def launches_of(v: Variant, keys: Keys):
    """Return the calls of a variant, one for each set: launches on the current stream. Raises where its sum is wrong."""
    source, device = source_of(v), torch.cuda.current_device()
    tiles = v.tiles * PAGE // v.tile
    maps = ()
    if source.function is _tma_kernel:
        _, _, shape, strides, _, _ = boxes_of(v)
        maps = TensorMap("bf16", shape, strides), TensorMap("bf16", shape, strides, 0)
    before = tensor_map.ENCODING["l2_promotion"]
    tensor_map.ENCODING["l2_promotion"] = v.promo
    try:
        grid = v.grid or v.programs, 1, 1
        check, run = (prepare_launch(source, 90, device, grid, (v.programs, tiles, full), maps) for full in (1, 0))
    finally:
        tensor_map.ENCODING["l2_promotion"] = before
    table, sums = keys.tables[v.pages], keys.sums

    def call(launch, x) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        launch(stream, x.data_ptr(), table.data_ptr(), sums.data_ptr(), 0)

    sums.fill_(0)
    call(check, keys.sets[0])
    found, expected = int(sums.sum(dtype=torch.int64)), keys.expected(v)
    if (found - expected) % 2**32:
        raise ValueError(f"WRONG SUM: {found % 2**32:08x}, expected {expected % 2**32:08x}")
    sets = keys.sets[:1] if v.pages == "few" else keys.sets
    return [lambda x=x: call(run, x) for x in sets]


def plan_of_whole_call():
    mla = {"head_dim": 576, "head_dim_v": 512, "shared_kv": True, "page_size": PAGE, "has_seqlens": True}
    return plan_with_kv_cache(CacheProblem(64, 16, 1, 1, 4096, dtype="bf16", **mla), find_gpu("H200"))


def whole_call(keys: Keys):
    """Return our decode over the same keys, one call for each set."""
    run = prepare_call(plan_of_whole_call(), keys.sets[0].device)
    q = torch.randn(64, 16, 1, 576, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((64,), 4096, device="cuda", dtype=torch.int32)
    table = keys.tables["random"][:TILES].reshape(64, 64).contiguous()
    calls = []
    for x in keys.sets:
        cache = x[:TILES].unsqueeze(2)
        tensors = {"q": q, "k_cache": cache, "v_cache": cache[..., :512], "page_table": table, "cache_seqlens": lengths}
        calls.append(lambda tensors=tensors: run(tensors)[0])
    return calls


def calls_of(v: Variant, keys: Keys):
    if v.kind == "ours":
        return whole_call(keys)
    if v.kind == "copy":
        half = TILES // 2
        target = torch.empty_like(keys.sets[0][:half])
        return [lambda x=x: target.copy_(x[:half]) for x in keys.sets]
    return launches_of(v, keys)


def one_call(calls, flush) -> float:
    """Return the microseconds of one call behind a flush, as kernel times are taken: median of 15."""
    times = []
    for i in range(15):
        torch.cuda._sleep(300_000)  # the host is ahead when the call's turn comes
        flush()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        calls[i % len(calls)]()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def show(v: Variant, microseconds, notes: str) -> None:
    if isinstance(microseconds, str):
        print(f"{v.name:16} {microseconds} | {notes}", flush=True)
    else:
        rate = v.tiles * PAGE * ROW_BYTES / microseconds / 1e6
        foreseen = "foreseen: see the docstring" if notes.startswith("as one") else f"foreseen {v.foreseen}"
        print(f"{v.name:16} {microseconds:7.2f} us {rate:6.3f} TB/s | {foreseen} | {notes}", flush=True)


def attempt(v: Variant, run, notes: str) -> None:
    """Time it, or say why not; nothing after the time limit."""
    if time.monotonic() - START > ARGS.seconds:
        show(v, "not run: out of time", notes)
        return
    try:
        show(v, run(), notes)
    except Exception as error:  # noqa: BLE001 - the other variants say something without it
        show(v, f"{type(error).__name__}: {str(error).splitlines()[0][:150]}", notes)
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            sys.exit(CONTEXT_LOST)


def supervise(names: list[str]) -> None:
    """Measure in a process of its own; where a kernel ends it or hangs, go on in another one with the next variant."""
    for _ in range(5):
        seconds = ARGS.seconds - (time.monotonic() - START)
        command = [sys.executable, __file__, "--worker", "--seconds", f"{seconds:.0f}", *names]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            for line in worker.stdout:
                print(line, end="", flush=True)
                if names and line.startswith(f"{names[0]:16} "):
                    del names[0]
        if worker.returncode and names and worker.returncode != CONTEXT_LOST:
            print(f"{names[0]:16} ended its process", flush=True)
            del names[0]
        if not worker.returncode or not names:
            return
    print(f"given up; not run: {', '.join(names)}")


def main() -> None:
    variants = [v for v in read_table() if not ARGS.names or v.name in ARGS.names]
    check_walks(variants)
    kernels = [v for v in variants if v.kind != "copy"]
    once = {key_of(v): v for v in kernels}
    with concurrent.futures.ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        compiled = dict(zip(once, pool.map(compile_only, once.values()), strict=True))
    notes = {v: compiled[key_of(v)] for v in kernels}
    print(f"{len(once)} kernels compiled after {time.monotonic() - START:.1f} s, Triton {triton.__version__}")
    if ARGS.compile:
        for v in kernels:
            show(v, v.kind, notes[v])
        return

    from sweep import replay

    keys = Keys()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; r registers, m shared memory, b copies in code")
    for v in variants:
        note = notes.get(v, "")
        faulthandler.dump_traceback_later(15, exit=True)  # a kernel that hangs
        attempt(v, lambda: note if note.startswith("FAILS") else replay(calls_of(v, keys)), note)
    faulthandler.dump_traceback_later(30, exit=True)
    dirty = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    clean = torch.ones(16 << 20, dtype=torch.float32, device="cuda")  # 64 MiB
    flushes = {
        "after a fill": lambda: dirty.fill_(2),
        "after a fill and a read": lambda: (dirty.fill_(2), clean.sum()),
        "after nothing": lambda: None,
    }
    for v in variants:
        if v.name in ("base", "flat", "whole call"):
            for what, flush in flushes.items():
                attempt(v, lambda: one_call(calls_of(v, keys), flush), f"as one call {what}")
    faulthandler.cancel_dump_traceback_later()
    print(f"{time.monotonic() - START:.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="variants to run; all where none is named")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--compile", action="store_true", help="compile only")
    parser.add_argument("--worker", action="store_true", help="measure in this process")
    ARGS = parser.parse_args()
    if ARGS.compile or ARGS.worker:
        main()
    else:
        supervise([v.name for v in read_table() if not ARGS.names or v.name in ARGS.names])
