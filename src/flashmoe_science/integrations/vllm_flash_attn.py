"""``flash_attn_varlen_func`` of vLLM's flash-attention, served by ``flash_attention_varlen``.

What is not served raises ``UnsupportedError`` by name. Options that choose among vLLM's kernels change nothing here:
``fa_version``, ``scheduler_metadata``, ``deterministic``, and ``num_splits`` above 1, the most that vLLM has room for.
Descales are checked and mean nothing, as there: no input is fp8. Rows that see no key have an LSE of -inf, there +inf.

Source: vllm_flash_attn/flash_attn_interface.py of vllm-project/flash-attention at 617264c for the signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..attention.varlen import flash_attention_varlen
from ..errors import InputError, UnsupportedError, shown
from .arguments import (
    as_dropout,
    as_flag,
    as_scale,
    as_softcap,
    as_window,
    blames_tensors,
    call_by_names,
    check_count,
    check_descales,
    check_kinds,
    contiguous_columns,
    forward_only,
    plain,
    refuse_fp8,
    refuse_given,
    require_usual,
    write_out,
)

__all__ = ["flash_attn_varlen_func"]

_NAMES = {"alibi": "alibi_slopes", "page_table": "block_table", "sinks": "s_aux"}
_VERSIONS = (2, 3, 4)


@blames_tensors
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,  # noqa: ARG001 - kernels plan on the device
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    fa_version: int = 2,
    s_aux: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
) -> Any:
    """Attend packed queries ``[Tq, H, D]``: prompts, chunks and single tokens together.

    Give either ``cu_seqlens_k`` ``[B + 1]`` with k and v ``[Tk, HK, D]``, or ``block_table`` ``[B, P]`` and
    ``seqused_k`` ``[B]`` with caches ``[pages, page_size, HK, D]``. See ``flash_attention_varlen``, whose ``sinks`` are
    ``s_aux`` ``[H]``.

    With ``num_splits=1`` and a ``block_table`` a sequence has the same bits whatever else is in the batch
    (``batch_invariant``), or the call raises ``UnsupportedError``. Without pages keys are never split, but tiles depend
    on the maxima and on the number of sequences.

    Returns:
        o ``[Tq, H, DV]``, which is ``out`` where that is given; with ``return_softmax_lse`` the pair of o and lse
        ``[H, Tq]`` fp32. Rows of ``out`` behind the last sequence may hold anything afterwards.
    """
    refuse_given(q_v=q_v, cp_tot_seqused_k=cp_tot_seqused_k)
    require_usual(0, cp_rank=cp_rank)
    require_usual(1, cp_world_size=cp_world_size)
    refuse_given(return_attn_probs=as_flag("return_attn_probs", return_attn_probs) or None)
    as_flag("deterministic", deterministic)
    _check_version(fa_version)
    check_count("num_splits", plain(num_splits))
    check_descales(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse_fp8("flash_attention_with_kv_cache serves fp8 caches, with queries of 16 bits", q=q, k=k, v=v)
    return_lse = as_flag("return_softmax_lse", return_softmax_lse)
    options: dict[str, Any] = {
        "dropout_p": as_dropout("dropout_p", dropout_p),
        "softmax_scale": as_scale("softmax_scale", softmax_scale),
        "causal": as_flag("causal", causal),
        "window": (-1, -1) if window_size is None else as_window("window_size", window_size),
        "softcap": as_softcap("softcap", softcap),
    }
    if block_table is not None and plain(num_splits) == 1:
        options |= {"num_splits": 1, "batch_invariant": True}
    check_kinds(q=q, k=k, v=v)
    starts = _starts_of_keys(cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    found = forward_only(
        "a block_table",
        {} if block_table is None else {"q": q, "k": k, "v": v},
        lambda: call_by_names(
            flash_attention_varlen,
            _NAMES,
            contiguous_columns(q),
            contiguous_columns(k),
            contiguous_columns(v),
            cu_seqlens_q,
            starts,
            plain(max_seqlen_q),
            plain(max_seqlen_k),
            alibi=alibi_slopes,
            sinks=s_aux,
            page_table=block_table,
            seqused_k=seqused_k,
            return_lse=return_lse,
            **options,
        ),
    )
    return write_out(out, found)


def _check_version(fa_version: object) -> None:
    version = plain(fa_version)
    if type(version) is not int or version not in _VERSIONS:
        raise InputError(f"fa_version must be one of {', '.join(map(str, _VERSIONS))}, got {shown(fa_version)}")


def _starts_of_keys(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None, block_table: Tensor | None
) -> Tensor:
    """Return where keys start. With pages nothing reads it, so it may be where queries start. Raises ``InputError``."""
    if cu_seqlens_k is not None and seqused_k is not None:
        raise InputError("seqused_k must be None with cu_seqlens_k, got both")
    if block_table is not None and seqused_k is None:
        raise InputError("seqused_k must be given with a block_table, got None")
    if block_table is None and cu_seqlens_k is None:
        if seqused_k is not None:
            raise UnsupportedError(
                "seqused_k needs a block_table, got None", hint="for padded batches pass cu_seqlens_k and packed keys"
            )
        raise InputError("cu_seqlens_k or seqused_k must be given, got None of both")
    return cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
