"""When ``decode_gluon_sm90`` serves a call with a K/V cache: MLA in its absorbed form, on Hopper. No Triton."""

from __future__ import annotations

from ...gpu.specs import GpuSpec
from ..tiles import SMALLEST_SCALE_LOG2
from .config import DecodeConfig
from .problem import CacheProblem

HOPPER_DECODE_KERNEL = "decode_gluon_sm90"
FEW_ROWS = 16  # up to which products are transposed: 64 rows of the matrix units are 64 keys, or 64 columns
# For few rows one warpgroup, which copies for itself; else two, and four more warps of which one copies.
HOPPER_FEW_ROWS = DecodeConfig(FEW_ROWS, 64, 4, 2, 1)
HOPPER_DECODE = DecodeConfig(64, 64, 12, 2, 1)
_MOST_ROWS_FP8 = 32  # two tiles of rows, which read the same keys
HOPPER_FEW_ROWS_FP8 = DecodeConfig(FEW_ROWS, 64, 4, 2, 2)  # its tiles have half of the bytes
_COLUMNS, _MORE = 512, 64  # columns that keys share with values, and further columns of the keys
_MOST = 2**29  # rows, keys


def hopper_decode_config(problem: CacheProblem) -> DecodeConfig:
    """Return the tile of ``decode_gluon_sm90``; rows alone decide, so that no bits depend on the batch."""
    if problem.is_fp8:
        return HOPPER_FEW_ROWS_FP8
    return HOPPER_FEW_ROWS if problem.packed_rows <= FEW_ROWS else HOPPER_DECODE


def hopper_decode_refusal(problem: CacheProblem, gpu: GpuSpec) -> str | None:
    """Return why ``decode_gluon_sm90`` does not serve ``problem`` on ``gpu``, or None."""
    p, rows = problem, HOPPER_DECODE.block_m
    if gpu.arch != 90:
        return f"it needs sm_90, got sm_{gpu.arch}"
    if not p.shared_kv or (p.head_dim, p.head_dim_v) != (_COLUMNS + _MORE, _COLUMNS):
        return f"its values are the first {_COLUMNS} of {_COLUMNS + _MORE} columns of the keys"
    if p.item_bytes != 2:
        return f"it multiplies fp16 and bf16, got {p.dtype}"
    if p.heads_kv != 1 or (p.heads % rows and rows % max(p.heads, 1)):
        heads = f"{p.heads_kv} and {p.heads}"
        return f"it needs one K/V head and heads that divide {rows} or are a multiple of it, got {heads}"
    asked = {
        f"fp8 caches with more than {_MOST_ROWS_FP8} rows": p.is_fp8 and p.packed_rows > _MOST_ROWS_FP8,
        "left padding": p.has_leftpad,
        "batch index": p.has_batch_idx,
        "sliding window": p.window[0] >= 0 or p.window[1] > 0,
        "softcap": p.softcap > 0,
        "attention sinks": p.sinks,
        "ALiBi": p.alibi,
        "bias": p.bias,
        "rotary embedding": p.rotary_dim > 0,  # which needs new keys, and those go to no shared cache
    }
    features = [name for name, has in asked.items() if has]
    if features:
        return f"it serves no {' and no '.join(features)}"
    return _layout_refusal(p)


def _layout_refusal(p: CacheProblem) -> str | None:
    """Return why strides, alignment or sizes of q and the cache do not suit the kernel, or None."""
    if 0 in (p.capacity, p.pages):
        return "there are no keys for TMA to be told of"
    if p.kernel_scale < SMALLEST_SCALE_LOG2:
        return f"it needs a positive softmax_scale, of normal size in fp32, got {p.scale:g}"
    if p.page_size % HOPPER_DECODE.block_n:
        return f"it copies whole tiles of {HOPPER_DECODE.block_n} keys, got pages of {p.page_size}"
    of_q = _stepped(p.q_strides, p.batch, p.heads, p.seqlen_q)
    of_keys = _stepped(p.k_strides, p.pages, p.page_size or p.capacity)
    stepped = of_q + of_keys
    if 0 in stepped:
        return "q or the cache is expanded: TMA does not step by 0"
    is_apart = any(stride % 8 for stride in of_q) or any(stride * p.kv_item_bytes % 16 for stride in of_keys)
    if p.pointer_alignment < 16 or is_apart:
        return "it copies rows that start at multiples of 16 bytes"
    if not all(0 < stride < 2**39 for stride in stepped):
        return "rows of q or of the cache are too far apart"
    if max(p.capacity, p.pages * max(p.page_size, 1), p.batch * p.heads * p.seqlen_q) >= _MOST:
        return f"it counts rows and keys up to {_MOST}"
    return None


def _stepped(strides: tuple[int, ...], *sizes: int) -> list[int]:
    """Return the strides of the axes that have several entries."""
    return [stride for stride, size in zip(strides, sizes, strict=False) if size > 1]
