"""The public functions of gradients of packed sequences: made without autograd, and explained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...gpu.checks import check_before_operator, check_not_mapped, check_tensor
from ...gpu.subclasses import is_traced
from ..checks import check_attended_packed, check_saved, named_gradients, seed_of
from ..context_parallel import refuse_context_parallel
from ..inputs import Options, check_all_options, refuse_tangents
from ..packed import check_values, packed_problem, planned_lengths
from .autograd import gradients_of, plan_of_gradients
from .plan import BackwardPlan, check_backward_kernel_name


def flash_attention_varlen_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    dlse: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    wanted: Sequence[str] = ("q", "k", "v"),
    out: Mapping[str, Tensor] | None = None,
    accumulate_into: tuple[Tensor, Tensor] | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v of packed sequences, from what the forward returned and the gradients of that.

    For callers that keep o and the LSE without autograd.

    Args:
        q: ``[Tq, H, D]``, as ``flash_attention_varlen`` takes it; so the other inputs and options.
        k: ``[Tk, HK, D]``.
        v: ``[Tk, HK, DV]``.
        o: ``[Tq, H, DV]``, what ``flash_attention_varlen`` returned for them; any strides.
        lse: ``[H, Tq]`` fp32, and its LSE.
        do: gradient of o, like it.
        cu_seqlens_q: ``[B + 1]`` int32.
        cu_seqlens_k: ``[B + 1]`` int32.
        max_seqlen_q: queries of the longest sequence, or more.
        max_seqlen_k: keys of the longest sequence, or more.
        dlse: gradient of lse, like it.
        causal: row m of a sequence sees keys up to m + Sk - Sq.
        softmax_scale: default ``D ** -0.5``.
        window: (left, right), -1 for no bound.
        softcap: 0 for none.
        sinks: ``[H]``.
        alibi: ``[H]`` or ``[B, H]``.
        bias: ``[B or 1, H or 1, max_seqlen_q, max_seqlen_k]``.
        seqused_q: ``[B]`` int32, as ``flash_attention_varlen`` takes it.
        seqused_k: ``[B]`` int32, likewise.
        dropout_p: what the forward was given; 0 for none.
        dropout_seed: ``[2]`` int64, what the forward was given. It must be given with dropout.
        wanted: the tensors whose gradients are returned, by name: of q, k, v, sinks and bias.
        out: tensors that gradients of q, k and v are written to, by name, in their shapes and dtype, with contiguous
            rows. Without it they are new.
        accumulate_into: fp32 tensors ``[Tk, HK, D]`` and ``[Tk, HK, DV]`` with contiguous rows.
            The gradients of k and v are added to them in place, and they are returned as dk and dv.
        kernel: ``"auto"``, or one name to force, as ``explain_varlen_gradients`` lists them; it never falls back.

    Returns:
        The gradients of ``wanted``, in its order, detached, in the shapes and dtypes of what they are of. Those of q, k
        and v are contiguous unless ``out`` has them, and 0 for tokens that are in no sequence.

    Raises:
        InputError: a shape, dtype, device or value breaks the contract above. The host reads no length on a GPU.
        UnsupportedError: no kernel, or not the kernel forced, serves this call.

    Numerics: as the gradients of ``flash_attention_varlen``; the same bits in every run. What
    ``backward_triton`` accumulates is fp32; other kernels round it to the dtype of q before.
    """
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse}
    given |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    refuse_context_parallel()
    for name, tensor in given.items():
        check_tensor(name, tensor)
    check_backward_kernel_name(kernel)
    lengths = (max_seqlen_q, max_seqlen_k)
    options = check_all_options(Options(causal, softmax_scale, window, softcap, lengths, kernel, dropout_p))
    more = {"dlse": dlse, "sinks": sinks, "alibi": alibi, "bias": bias, "seqused_q": seqused_q, "seqused_k": seqused_k}
    for name, tensor in {**more, **seed_of(dropout_p, dropout_seed)}.items():
        if tensor is not None:
            check_tensor(name, tensor, optional=True)
            given[name] = tensor
    check_not_mapped(given.values())
    traced = is_traced(given.values())
    if traced:
        check_before_operator(given, "q")
    check_attended_packed(given, planned_lengths(*lengths, bias))
    check_saved(given)
    names, written, sums = named_gradients(wanted, out, accumulate_into, given)
    refuse_tangents(given.values())
    if not traced:
        check_values(given, options)
    found = gradients_of(options, {**given, **sums}, names, out=written)
    return tuple(found[name] for name in names)


def explain_varlen_gradients(
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
    bias: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> BackwardPlan:
    """Return the plan that would make the gradients of ``flash_attention_varlen`` with the same arguments.

    As ``explain_gradients``; the lengths in it are those that are planned for. Nothing is launched.

    Raises:
        InputError: an argument breaks the contract of ``flash_attention_varlen``, or ``kernel`` is no name.
        UnsupportedError: no kernel, or not the kernel forced, makes these gradients.
    """
    tensors = {
        "q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "sinks": sinks,
        "alibi": alibi, "bias": bias, "seqused_q": seqused_q, "seqused_k": seqused_k, "dropout_seed": dropout_seed,
    }  # fmt: skip
    forward = packed_problem(
        tensors, (max_seqlen_q, max_seqlen_k), return_lse=True, causal=causal, softmax_scale=softmax_scale,
        window=window, softcap=softcap, dropout_p=dropout_p,
    )  # fmt: skip
    named = {name: tensors[name] for name in ("q", "k", "v", "sinks", "bias")}
    return plan_of_gradients(forward, named, has_dlse=return_lse, kernel=kernel)
