"""Attention forward over few keys, in one pass (Gluon, sm_80 and newer, fp16 and bf16).

Problems of this size are bound by latency: one trip to memory, two products, one store. So there is no loop and no
second kernel. All of Q, K and V that a program needs is on its way at once; the warps stand in a grid of ``KEY_GROUPS``
by row groups, each with its own share of the keys and a softmax of its own; they meet once more, at the merge.

Source: the split of the keys with a merge is Flash-Decoding's (Dao et al., 2023), here over the warps of one block.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ...gpu.gluon_versions import async_load
from ..kernel_arguments import Strides


@gluon.constexpr_function
def _copy_layout(groups, rows_of_warps, cols):
    """Return the layout that copies rows of ``cols`` 16-bit elements, 16 bytes a thread where a row has them."""
    vec = min(8, cols // 4)
    return gl.BlockedLayout([1, 1, vec], [1, 32 * vec // cols, cols // vec], [groups, rows_of_warps, 1], [2, 1, 0])


@gluon.constexpr_function
def _operand_shared_layout(cols):
    """Return the swizzle that lets ``ldmatrix`` read rows of ``cols`` 16-bit elements without bank conflicts."""
    rows_a_phase = max(1, 64 // cols)
    return gl.SwizzledSharedLayout(8, rows_a_phase, 8 // rows_a_phase, [2, 1, 0])


@gluon.constexpr_function
def _merge_shared_layout(cols):
    """Return the swizzle for rows of ``cols`` fp32: 8-byte stores of the accumulator, 16-byte loads of whole rows."""
    phases = min(8, cols // 8)
    return gl.SwizzledSharedLayout(8, max(1, 32 // cols), phases, [2, 1, 0])


@gluon.jit
def _copy_rows(ptr, row_stride, smem, first_row, rows, cols, LAYOUT: gl.constexpr, MASK_ROWS: gl.constexpr):
    """Start the copy of rows ``first_row + g * R + r`` to ``smem`` [G, R, C]; zeros outside ``rows`` and ``cols``."""
    R: gl.constexpr = smem.shape[1]
    g = gl.arange(0, smem.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    r = gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    c = gl.arange(0, smem.shape[2], gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    row = first_row + g[:, None, None] * R + r[None, :, None]
    mask = c[None, None, :] < cols
    if MASK_ROWS:
        mask = mask & (row < rows)
    async_load(smem, ptr + row * row_stride + c[None, None, :], mask=mask)


@gluon.jit
def _forward_short_kernel(
    q_ptr,  # [B, H, Sq, D]
    k_ptr,  # [B, HK, Sk, D]
    v_ptr,  # [B, HK, Sk, DV]
    o_ptr,  # [B, H, Sq, DV]
    lse_ptr,  # [B, H, Sq] fp32, natural log
    q_strides: Strides, k_strides: Strides, v_strides: Strides,  # in units of ALIGN elements
    o_strides: Strides,  # in units of ALIGN_O elements
    seqlen_q, seqlen_k,
    scale_log2,  # softmax_scale * log2(e), positive
    CALL: gl.constexpr,  # ShortCall
    TILE: gl.constexpr,  # ShortTile
    DEPENDENT_LAUNCH: gl.constexpr,  # launched before the kernel before it has ended (sm_90 and newer)
    num_warps: gl.constexpr,
):  # fmt: skip
    """Attend BLOCK_M rows of one head to all keys. Grid: (tiles_m, H, B)."""
    # Triton 3.6 takes names of constants in lists, not fields of groups.
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    BLOCK_D: gl.constexpr = TILE.BLOCK_D
    BLOCK_DV: gl.constexpr = TILE.BLOCK_DV
    G: gl.constexpr = TILE.KEY_GROUPS
    ROW_GROUPS: gl.constexpr = num_warps // TILE.KEY_GROUPS
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[G, ROW_GROUPS, 1], instr_shape=[1, 16, 8]
    )
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)

    first_row, h, b = gl.program_id(0) * BLOCK_M, gl.program_id(1), gl.program_id(2)
    q_base = q_ptr + (b.to(gl.int64) * q_strides.b + h.to(gl.int64) * q_strides.h) * CALL.ALIGN
    k_base = k_ptr + (b.to(gl.int64) * k_strides.b + (h // CALL.GROUP).to(gl.int64) * k_strides.h) * CALL.ALIGN
    v_base = v_ptr + (b.to(gl.int64) * v_strides.b + (h // CALL.GROUP).to(gl.int64) * v_strides.h) * CALL.ALIGN
    q_smem = gl.allocate_shared_memory(dtype, [1, BLOCK_M, BLOCK_D], _operand_shared_layout(BLOCK_D))
    k_smem = gl.allocate_shared_memory(dtype, [G, BLOCK_N, BLOCK_D], _operand_shared_layout(BLOCK_D))
    v_smem = gl.allocate_shared_memory(dtype, [G, BLOCK_N, BLOCK_DV], _operand_shared_layout(BLOCK_DV))
    if DEPENDENT_LAUNCH:  # all above ran while the kernel before was ending; no memory is touched before this wait
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    _copy_rows(k_base, k_strides.ROW, k_smem, 0, seqlen_k, CALL.D, _copy_layout(G, ROW_GROUPS, BLOCK_D), CALL.MASK_N)
    _copy_rows(
        q_base, q_strides.ROW, q_smem, first_row, seqlen_q, CALL.D, _copy_layout(1, num_warps, BLOCK_D), CALL.MASK_M
    )
    _copy_rows(v_base, v_strides.ROW, v_smem, 0, seqlen_k, CALL.DV, _copy_layout(G, ROW_GROUPS, BLOCK_DV), CALL.MASK_N)
    async_copy.commit_group()
    # One wait for all three: with a wait of their own for K and V the compiler moves the second up to the first.
    async_copy.wait_group(0)

    q = q_smem.reshape([BLOCK_M, BLOCK_D]).load(gl.SliceLayout(0, a_layout))
    q = q.expand_dims(0).broadcast_to([G, BLOCK_M, BLOCK_D])
    k = k_smem.permute((0, 2, 1)).load(b_layout)
    s = mma_v2(q, k, gl.zeros([G, BLOCK_M, BLOCK_N], gl.float32, mma))
    group = gl.arange(0, G, gl.SliceLayout(1, gl.SliceLayout(2, mma)))
    col = gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(1, mma)))
    key = group[:, None, None] * BLOCK_N + col[None, None, :]  # [G, 1, BLOCK_N]
    if CALL.IS_CAUSAL:
        row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, mma)))
        s = gl.where(key <= row[None, :, None] + (seqlen_k - seqlen_q), s, -float("inf"))
    if CALL.MASK_N:
        s = gl.where(key < seqlen_k, s, -float("inf"))
    m = gl.max(s, 2) * scale_log2  # [G, BLOCK_M]
    if CALL.IS_CAUSAL or CALL.MASK_N:  # a group that sees no key has m == -inf, and -inf - -inf is NaN
        m_safe = gl.where(m == -float("inf"), 0.0, m)
    else:
        m_safe = m
    p = gl.exp2(s * scale_log2 - m_safe[:, :, None])
    l = gl.sum(p, 2)
    p = gl.convert_layout(p.to(dtype), a_layout, assert_trivial=True)
    acc = mma_v2(p, v_smem.load(b_layout), gl.zeros([G, BLOCK_M, BLOCK_DV], gl.float32, mma))

    # Merge: every thread holds its elements of all groups.
    LANES: gl.constexpr = min(32, BLOCK_DV // 4, max(1, 32 * num_warps // BLOCK_M))  # so that a thread has one row
    out3: gl.constexpr = gl.BlockedLayout([G, 1, 4], [1, 32 // LANES, LANES], [1, num_warps, 1], [2, 1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    acc_smem = gl.allocate_shared_memory(gl.float32, [G, BLOCK_M, BLOCK_DV], _merge_shared_layout(BLOCK_DV), acc)
    m_smem = gl.allocate_shared_memory(gl.float32, [G, BLOCK_M], flat, m)
    l_smem = gl.allocate_shared_memory(gl.float32, [G, BLOCK_M], flat, l)
    m_all = m_smem.load(gl.SliceLayout(2, out3))
    l_all = l_smem.load(gl.SliceLayout(2, out3))
    top = gl.max(m_all, 0)  # [BLOCK_M]
    top_safe = gl.where(top == -float("inf"), 0.0, top)
    weight = gl.exp2(m_all - top_safe[None, :])
    total = gl.sum(weight * l_all, 0)
    has_keys = total != 0  # a row without keys: output 0, LSE -inf
    weight = weight * gl.where(has_keys, 1.0 / total, 0.0)[None, :]
    # Apart in shared memory from what the products read, partial results need no barrier before they are stored.
    q_smem._keep_alive()  # noqa: SLF001 - Gluon has no public name for it
    k_smem._keep_alive()  # noqa: SLF001
    v_smem._keep_alive()  # noqa: SLF001
    out = gl.sum(acc_smem.load(out3) * weight[:, :, None], 0)  # [BLOCK_M, BLOCK_DV]

    out2: gl.constexpr = gl.SliceLayout(0, out3)
    row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, out2))
    col = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, out2))
    o_base = o_ptr + (b.to(gl.int64) * o_strides.b + h.to(gl.int64) * o_strides.h) * CALL.ALIGN_O
    mask = col[None, :] < CALL.DV
    if CALL.MASK_M:
        mask = mask & (row < seqlen_q)[:, None]
    gl.store(o_base + row[:, None] * o_strides.ROW + col[None, :], out.to(dtype), mask=mask)
    if CALL.STORE_LSE:
        lse = gl.where(has_keys, (top + gl.log2(total)) * 0.6931471805599453, -float("inf"))
        row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, out3)))
        lse_base = lse_ptr + (b.to(gl.int64) * gl.num_programs(1) + h) * seqlen_q
        gl.store(lse_base + row, lse, mask=row < seqlen_q)
