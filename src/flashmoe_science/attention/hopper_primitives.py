"""What both backward kernels for Hopper are built of, in Gluon: masks, P in 16 bits, and turns at adding to dQ."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gpu.gluon_sm90 import copy_of

ROWS = gl.constexpr(64)  # keys that a warpgroup computes scores of


@gluon.jit
def poll(ptr):
    """Read a counter; what was written before it was raised can be added to afterwards, by TMA too."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1]; fence.proxy.async.global;",
        "=r,l",
        [ptr.to(gl.int64, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def raise_counter(ptr):
    """Raise a counter by 1, after all that this warp knows to be done; one lane does it."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 lane; mov.b32 lane, %laneid; setp.eq.s32 p, lane, 0; mov.b32 $0, 0;"
        " @p red.release.gpu.global.add.s32 [$1], 1; }",
        "=r,l", [ptr.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_until_read():
    """Wait until the shared memory that this warp's additions read can be written again."""
    asm: gl.constexpr = "cp.async.bulk.wait_group.read 0; bar.warp.sync 0xffffffff; // $0"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_until_added():
    """Wait until memory has what this warp added."""
    asm: gl.constexpr = "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; // $0"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def mask_scores(s, a, key, row):
    """Put -inf where a query row of the tile does not see a key: keys are rows, queries columns.

    A thread holds columns 8 i + 2 lane + k with i and k known at compile time: as a 4-dimensional comparison of
    8 i + k with a number per lane and row, the mask costs one compare and one select an element.
    """
    COLUMNS: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    x = gl.reshape(s, [ROWS, COLUMNS // 8, 4, 2])
    x_layout: gl.constexpr = x.type.layout
    lane_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x_layout))  # [ROWS, 4]
    offs_n = key + gl.arange(0, ROWS, gl.SliceLayout(1, lane_layout))
    if a.IS_CAUSAL:
        limit = offs_n + (copy_of(a.seqlen_q) - copy_of(a.seqlen_k) - row)  # the first query that sees the key
        limit = gl.where(offs_n < copy_of(a.seqlen_k), limit, COLUMNS)
    else:
        limit = gl.where(offs_n < copy_of(a.seqlen_k), 0, COLUMNS)
    limit = limit[:, None] - 2 * gl.arange(0, 4, gl.SliceLayout(0, lane_layout))[None, :]
    i = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, x_layout))))
    k = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, x_layout))))
    column = 8 * i[None, :, None, None] + k[None, None, None, :]
    x = gl.where(column >= limit[:, None, :, None], x, -float("inf"))
    return gl.convert_layout(gl.reshape(x, [ROWS, COLUMNS]), layout)


@gluon.jit
def pack(p, dtype: gl.constexpr):
    """Round to 16 bits, two neighbours to an integer: [M, N] fp32 -> [M, N // 2] int32.

    So P crosses from step to step: 16-bit values that do are unpacked and packed again by ptxas, an instruction a pair.
    """
    PTX_TYPE: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    low, high = gl.split(p.reshape([p.shape[0], p.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(
        "cvt.rn." + PTX_TYPE + ".f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """Undo ``pack``; costs no instruction."""
    low = packed.to(gl.int16).to(dtype, bitcast=True)
    high = (packed >> 16).to(gl.int16).to(dtype, bitcast=True)
    p = gl.join(low, high).reshape([packed.shape[0], packed.shape[1] * 2])
    return gl.convert_layout(p, layout)


@gluon.jit
def unpack_wide(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """Undo ``pack`` to fp32."""
    if dtype == gl.bfloat16:
        low = (packed << 16).to(gl.float32, bitcast=True)
        high = (packed & -65536).to(gl.float32, bitcast=True)
    else:
        low = packed.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
        high = (packed >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    return gl.convert_layout(gl.join(low, high).reshape([packed.shape[0], packed.shape[1] * 2]), layout)
