"""Attention of packed sequences: contract, validation, and the way from a call to its prepared launch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .calls import prepare_call
from .inputs import (
    DTYPE_NAMES,
    check_optional,
    check_options,
    check_shape,
    check_softcap,
    check_tensors,
    check_window,
    describe_heads,
    gpu_of,
    layout_of,
    pointer_alignment,
    refuse_derivatives,
)
from .plan import plan_attention
from .problem import AttentionProblem
from .tiles import Plan

_prepared: dict[tuple[Any, ...], Callable[..., Any]] = {}
_MAX_PREPARED = 8192
_is_compiling = torch.compiler.is_compiling


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Any:
    """Attend every query of a packed batch to the keys of its own sequence.

    What ``flash_attention`` computes, for each sequence b with q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]] and the k and v
    of cu_seqlens_k; masks are aligned to the ends of its own queries and keys.

    Args:
        q: ``[Tq, H, D]`` fp16, bf16 or fp32, any strides; D from 1 to 256 on a GPU.
        k: ``[Tk, HK, D]``, dtype and device of q; H is a multiple of HK.
        v: ``[Tk, HK, DV]``, dtype and device of q; DV from 1 to 256 on a GPU.
        cu_seqlens_q: ``[B + 1]`` int32, contiguous, on the device of q: where sequences start in q, and where the last
            one ends. A sequence may be empty.
        cu_seqlens_k: ``[B + 1]`` int32, the same of k and v.
        max_seqlen_q: queries of the longest sequence, or more. It decides the grid: a longer sequence is not finished.
        max_seqlen_k: keys of the longest sequence, or more. It decides tiles; a window as wide as it is dropped.
        causal: as in ``flash_attention``, like the other options.
        softmax_scale: factor on the scores. Default ``D ** -0.5``.
        window: (left, right), -1 for no bound.
        softcap: 0 for none.
        sinks: ``[H]``.
        alibi: ``[H]`` or ``[B, H]``.
        seqused_q: ``[B]`` int32, contiguous: queries of each sequence, where it ends before its place does.
        seqused_k: ``[B]`` int32, the same of its keys. Keys behind it are not read.
        return_lse: return the log-sum-exp of every row too.
        kernel: ``"auto"``, or one name to force; a forced kernel never falls back.

    Returns:
        o ``[Tq, H, DV]`` in the dtype of q, contiguous. Rows in the place of a sequence behind ``seqused_q`` are 0;
        rows in no sequence's place are not written on a GPU. With ``return_lse`` the pair of o and lse ``[H, Tq]``
        fp32, natural logarithm, the transpose of a contiguous tensor; -inf where o is 0 for want of a query.

    Raises:
        InputError: a shape, dtype, device or value breaks the contract above. Lengths on a GPU are not read, as that
            would wait for it; with ``FLASHMOE_CHECK=1`` in the environment they are read and checked, except while a
            CUDA graph is captured. Those on a CPU always are.
        UnsupportedError: as in ``flash_attention``.

    Numerics: as in ``flash_attention``. A sequence has the same bits whatever else is in the batch, as long as
    ``max_seqlen_q``, ``max_seqlen_k``, B and H lead to the same tile (``explain_varlen`` shows it).

    The host reads no tensor, so a CUDA graph replays with other lengths in the same tensors, up to the maxima.
    """
    softmax_scale = check_options(causal, softmax_scale)
    window, softcap = check_window(window), check_softcap(softcap)
    check_optional(sinks=sinks, alibi=alibi, seqused_q=seqused_q, seqused_k=seqused_k)
    needed = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    for name, tensor in needed.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    refuse_derivatives({**needed, "sinks": sinks, "alibi": alibi})
    sinks, alibi = (tensor.detach() if type(tensor) is torch.nn.Parameter else tensor for tensor in (sinks, alibi))
    optional = (sinks, alibi, seqused_q, seqused_k)
    if _is_compiling() or any(
        type(tensor) is not Tensor for tensor in (*needed.values(), *optional) if tensor is not None
    ):
        o, lse = _attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            causal, softmax_scale, *window, softcap, *optional, return_lse, kernel,
        )  # fmt: skip
        return (o, lse) if return_lse else o
    options = {"causal": causal, "softmax_scale": softmax_scale, "window": window, "softcap": softcap}
    lengths = _planned_length("max_seqlen_q", max_seqlen_q), _planned_length("max_seqlen_k", max_seqlen_k)
    tensors = {
        "q": q, "k": k, "v": v, "sinks": sinks, "alibi": alibi,
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k,
    }  # fmt: skip
    key = (*options.values(), *lengths, return_lse, kernel, *map(_layout_of_tokens, (q, k, v)))
    key = (*key, *map(layout_of, list(tensors.values())[3:]))
    call = _prepared.get(key)
    if call is None:
        problem = _packed_problem(tensors, lengths, return_lse=return_lse, **options)
        call = prepare_call(plan_attention(problem, gpu_of(q), kernel), q)
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        _prepared[key] = call
    if k.shape[0] != v.shape[0]:
        raise InputError(f"v must have as many tokens as k, {k.shape[0]}, got {v.shape[0]}")
    if _reads_lengths(q):
        check_lengths("q", q.shape[0], cu_seqlens_q, max_seqlen_q, seqused_q)
        check_lengths("k", k.shape[0], cu_seqlens_k, max_seqlen_k, seqused_k)
    extras = [tensor for tensor in list(tensors.values())[3:] if tensor is not None]
    return call(q, k, v, q.data_ptr(), k.data_ptr(), v.data_ptr(), *extras)


def explain_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Plan:
    """Return the plan that would serve ``flash_attention_varlen`` with the same arguments; nothing is launched.

    The lengths in it are those that are planned for: the maxima, rounded up.
    """
    check_optional(sinks=sinks, alibi=alibi, seqused_q=seqused_q, seqused_k=seqused_k)
    problem = _packed_problem(
        {
            "q": q, "k": k, "v": v, "sinks": sinks, "alibi": alibi,
            "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k,
        },
        (_planned_length("max_seqlen_q", max_seqlen_q), _planned_length("max_seqlen_k", max_seqlen_k)),
        causal=causal,
        softmax_scale=check_options(causal, softmax_scale),
        window=check_window(window),
        softcap=check_softcap(softcap),
        return_lse=return_lse,
    )  # fmt: skip
    return plan_attention(problem, gpu_of(q), kernel)


def _planned_length(name: str, length: object) -> int:
    """Round a longest length up, so that few plans serve all batches: to a power of two, or a multiple of 128.

    Programs behind the end of a sequence leave at once, and no loop is bounded by it. Raises ``InputError``.
    """
    if type(length) is not int or not 0 <= length < 2**31:
        raise InputError(f"{name} must be an integer from 0 to 2**31 - 1, got {length!r}")
    if length <= 128 or name == "max_seqlen_k":
        return min(1 << (length - 1).bit_length(), 2**31 - 1) if length > 1 else length
    return min(-(-length // 128) * 128, 2**31 - 1)


def _layout_of_tokens(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return ``layout_of`` but for the number of tokens, which decides nothing."""
    layout = layout_of(tensor)
    return layout and (layout[0][1:], len(layout[0]), *layout[1:])


def _packed_problem(
    tensors: dict[str, Any], lengths: tuple[int, int], *, return_lse: bool, **options: Any
) -> AttentionProblem:
    """Check the tensors against the contract and describe the call. Raises ``InputError``."""
    q, k, v = (tensors[name] for name in "qkv")
    check_tensors({"q": q, "k": k, "v": v}, "T, H, D")
    (_, heads, head_dim), heads_kv = q.shape, k.shape[1]
    check_shape("k", k, (k.shape[0], heads_kv, head_dim), "Tk, HK, D")
    check_shape("v", v, (k.shape[0], heads_kv, v.shape[2]), "Tk, HK, DV")
    batch = _check_integers("cu_seqlens_q", tensors["cu_seqlens_q"], q) - 1
    if batch < 0:
        raise InputError("cu_seqlens_q must have shape [B + 1], so at least one element, got []")
    for name, size in (("cu_seqlens_k", batch + 1), ("seqused_q", batch), ("seqused_k", batch)):
        tensor = tensors[name]
        if tensor is not None and _check_integers(name, tensor, q) != size:
            letters = "B + 1" if name == "cu_seqlens_k" else "B"
            raise InputError(f"{name} must have shape [{letters}] = [{size}], got {list(tensor.shape)}")
    return AttentionProblem(
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        head_dim=head_dim,
        head_dim_v=v.shape[2],
        dtype=DTYPE_NAMES[q.dtype],
        return_lse=return_lse,
        q_strides=_packed_strides(q),
        k_strides=_packed_strides(k),
        v_strides=_packed_strides(v),
        pointer_alignment=pointer_alignment(q, k, v),
        packed=True,
        seqused="".join(side for side in "qk" if tensors[f"seqused_{side}"] is not None),
        **options,
        **describe_heads(q, batch, heads, sinks=tensors["sinks"], alibi=tensors["alibi"]),
    )


def _packed_strides(tensor: Tensor) -> tuple[int, int, int, int]:
    """Return the strides of ``[B, H, S, D]``; that of tokens also where there is one: their number decides nothing."""
    token, head, column = tensor.stride()
    return 0, head if tensor.shape[1] > 1 else 0, token, column if tensor.shape[2] > 1 else 1


def _check_integers(name: str, tensor: Tensor, q: Tensor) -> int:
    """Check a vector of lengths and return its size."""
    if tensor.dtype != torch.int32:
        raise InputError(f"{name} must be int32, got {tensor.dtype}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise InputError(
            f"{name} must have 1 dimension and be contiguous, got shape {list(tensor.shape)}, "
            f"strides {list(tensor.stride())}"
        )
    if tensor.device != q.device:
        raise InputError(f"{name} must be on the device of q, {q.device}, got {tensor.device}")
    return tensor.shape[0]


def _reads_lengths(q: Tensor) -> bool:
    """Whether lengths are read: a GPU would have to be waited for, which a capture does not allow."""
    if q.device.type != "cuda":
        return True
    return os.environ.get("FLASHMOE_CHECK") == "1" and not torch.cuda.is_current_stream_capturing()


def check_lengths(side: str, tokens: int, cu_seqlens: Tensor, longest: int, seqused: Tensor | None) -> None:
    """Read the lengths of one side, ``q`` or ``k``, and raise ``InputError`` where they contradict one another."""
    starts = cu_seqlens.tolist()
    name = f"cu_seqlens_{side}"
    if starts[0] < 0 or starts[-1] > tokens:
        raise InputError(f"{name} must be from 0 to {tokens}, the tokens of {side}, got {starts[0]} to {starts[-1]}")
    used = [None] * (len(starts) - 1) if seqused is None else seqused.tolist()
    for b, (start, end, length) in enumerate(zip(starts, starts[1:], used, strict=False)):
        if end < start:
            raise InputError(f"{name} must not decrease, got {start} and then {end} at index {b + 1}")
        if length is not None and not 0 <= length <= end - start:
            raise InputError(f"seqused_{side} must be from 0 to {end - start} at index {b}, got {length}")
        # Rows behind seqused_q are in the grid too: they are set to 0.
        asked = length if length is not None and side == "k" else end - start
        if asked > longest:
            raise InputError(f"max_seqlen_{side} must be at least {asked}, the length of sequence {b}, got {longest}")


@torch.library.custom_op("flashmoe_science::attention_varlen", mutates_args=())
def _attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    softmax_scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: Tensor | None,
    alibi: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    return_lse: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Return o and, where it is not asked for, an LSE of no elements."""
    result = flash_attention_varlen(
        q.detach(),
        k.detach(),
        v.detach(),
        cu_seqlens_q.detach(),
        cu_seqlens_k.detach(),
        max_seqlen_q,
        max_seqlen_k,
        causal=causal,
        softmax_scale=softmax_scale,
        window=(window_left, window_right),
        softcap=softcap,
        sinks=None if sinks is None else sinks.detach(),
        alibi=None if alibi is None else alibi.detach(),
        seqused_q=None if seqused_q is None else seqused_q.detach(),
        seqused_k=None if seqused_k is None else seqused_k.detach(),
        return_lse=return_lse,
        kernel=kernel,
    )
    return result if return_lse else (result, torch.empty(0, dtype=torch.float32, device=q.device))


@_attention_varlen.register_fake
def _fake_varlen(q: Tensor, _k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    tokens, heads = q.shape[:2]
    o = torch.empty((tokens, heads, v.shape[2]), dtype=q.dtype, device=q.device)
    if not options[-2]:
        return o, torch.empty(0, dtype=torch.float32, device=q.device)
    return o, torch.empty((tokens, heads), dtype=torch.float32, device=q.device).t()
