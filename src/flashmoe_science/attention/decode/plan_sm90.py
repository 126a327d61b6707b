"""When ``decode_gluon_sm90`` serves a call with a K/V cache: MLA in its absorbed form, on Hopper. No Triton."""

from __future__ import annotations

from ...gpu.specs import GpuSpec
from ..tiles import SMALLEST_SCALE_LOG2
from .config import DecodeConfig
from .problem import CacheProblem

HOPPER_DECODE_KERNEL = "decode_gluon_sm90"
# Its one tile: two warpgroups, and four more warps of which one is the producer.
HOPPER_DECODE = DecodeConfig(64, 64, 12, 2, 1)
_COLUMNS, _MORE = 512, 64  # columns that keys share with values, and further columns of the keys
_MOST = 2**29  # rows, keys
# Up to 16 rows both kernels wait for memory, and decode_triton starts faster. This kernel takes 47.8 us instead of 49.2
# with 16 sequences of 8k keys, and 107.6 instead of 110.1 with 64 of 4k, but 14.8 instead of 13.2 with one of 8k, and
# 51.8 instead of 49.9 with 128 of 1k (lab/decode/3_mla.txt).
_FEW_ROWS, _MANY_KEYS, _MANY_BYTES = 16, 4096, 128 << 20


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
        "fp8 caches": p.is_fp8,
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


def hopper_decode_is_slower(problem: CacheProblem) -> str | None:
    """Return why ``decode_triton`` is expected to be faster, or None.

    With ``batch_invariant`` or ``num_splits``, which promise the same bits, batch and capacity have no influence.
    """
    p = problem
    if p.packed_rows > _FEW_ROWS:
        return None
    if p.batch_invariant or p.num_splits:
        return f"up to {_FEW_ROWS} rows it pays in large batches alone, and bits are not to depend on the batch"
    if p.seen_keys >= _MANY_KEYS and p.kv_bytes >= _MANY_BYTES:
        return None
    return (
        f"up to {_FEW_ROWS} rows it pays with {_MANY_KEYS} keys a sequence and {_MANY_BYTES >> 20} MiB of keys or more"
    )


def _layout_refusal(p: CacheProblem) -> str | None:
    """Return why strides, alignment or sizes of q and the cache do not suit the kernel, or None."""
    if 0 in (p.capacity, p.pages):
        return "there are no keys for TMA to be told of"
    if p.kernel_scale < SMALLEST_SCALE_LOG2:
        return f"it needs a positive softmax_scale, of normal size in fp32, got {p.scale:g}"
    if p.page_size % HOPPER_DECODE.block_n:
        return f"it copies whole tiles of {HOPPER_DECODE.block_n} keys, got pages of {p.page_size}"
    sizes = (
        *zip(p.q_strides, (p.batch, p.heads, p.seqlen_q), strict=False),
        *zip(p.k_strides, (p.pages, p.page_size or p.capacity), strict=False),
    )
    stepped = [stride for stride, size in sizes if size > 1]
    if 0 in stepped:
        return "q or the cache is expanded: TMA does not step by 0"
    if p.pointer_alignment < 16 or any(stride % 8 for stride in stepped):
        return "it copies rows that start at multiples of 16 bytes"
    if not all(0 < stride < 2**39 for stride in stepped):
        return "rows of q or of the cache are too far apart"
    if max(p.capacity, p.pages * max(p.page_size, 1), p.batch * p.heads * p.seqlen_q) >= _MOST:
        return f"it counts rows and keys up to {_MOST}"
    return None
