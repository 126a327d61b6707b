"""The public functions of gradients: made without autograd, and explained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...gpu.checks import check_not_mapped, check_not_mixed, check_tensor
from ...gpu.subclasses import is_traced
from ..checks import check_saved, check_tensors, named_gradients, seed_of
from ..context_parallel import refuse_context_parallel
from ..inputs import Options, check_all_options, problem_of, refuse_tangents
from .autograd import gradients_of, plan_of_gradients
from .plan import BackwardPlan, check_backward_kernel_name

if TYPE_CHECKING:
    from ..inputs import AnyMask


def flash_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    *,
    dlse: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    wanted: Sequence[str] = ("q", "k", "v"),
    out: Mapping[str, Tensor] | None = None,
    accumulate_into: tuple[Tensor, Tensor] | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v, from what the forward returned and the gradients of that.

    For callers that keep o and the LSE without autograd.

    Args:
        q: ``[B, H, Sq, D]``, as ``flash_attention`` takes it; so k, v, causal, softmax_scale and window.
        k: ``[B, HK, Sk, D]``.
        v: ``[B, HK, Sk, DV]``.
        o: ``[B, H, Sq, DV]``, what ``flash_attention`` returned for them; any strides.
        lse: ``[B, H, Sq]`` fp32, and its LSE.
        do: gradient of o, like it.
        dlse: gradient of lse, like it.
        causal: row m sees keys up to m + Sk - Sq.
        softmax_scale: default ``D ** -0.5``.
        window: (left, right), -1 for no bound.
        softcap: 0 for none.
        sinks: ``[H]``.
        alibi: ``[H]`` or ``[B, H]``.
        bias: ``[B or 1, H or 1, Sq, Sk]``.
        dropout_p: what the forward was given; 0 for none.
        dropout_seed: ``[2]`` int64, what the forward was given. It must be given with dropout.
        wanted: the tensors whose gradients are returned, by name: of q, k, v, sinks and bias.
        out: tensors that gradients of q, k and v are written to, by name, in their shapes and dtype, with contiguous
            rows. Without it they are new.
        accumulate_into: fp32 tensors ``[B, HK, Sk, D]`` and ``[B, HK, Sk, DV]`` with contiguous rows.
            The gradients of k and v are added to them in place, and they are returned as dk and dv.
        kernel: ``"auto"``, or one name to force (``explain_gradients`` lists them); a forced kernel never falls back.

    Returns:
        The gradients of ``wanted``, in its order, detached, in the shapes and dtypes of what they are of.

    Raises:
        InputError: a shape, dtype, device or value breaks the contract above.
        UnsupportedError: no kernel, or not the kernel forced, serves this call.

    Numerics: as the gradients of ``flash_attention``; the same bits in every run. What
    ``backward_triton`` accumulates is fp32; other kernels round it to the dtype of q before.
    """
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse}
    refuse_context_parallel()
    check_backward_kernel_name(kernel)
    for name, tensor in given.items():
        check_tensor(name, tensor)
    options = check_all_options(Options(causal, softmax_scale, window, softcap, kernel=kernel, dropout_p=dropout_p))
    more = {"dlse": dlse, "sinks": sinks, "alibi": alibi, "bias": bias, **seed_of(dropout_p, dropout_seed)}
    for name, tensor in more.items():
        if tensor is not None:
            check_tensor(name, tensor, optional=True)
            given[name] = tensor
    check_tensors(given, "B, H, S, D")
    check_saved(given)
    names, written, sums = named_gradients(wanted, out, accumulate_into, given)
    refuse_tangents(given.values())
    check_not_mapped(given.values())
    if is_traced(given.values()):
        check_not_mixed(given)
    found = gradients_of(options, {**given, **sums}, names, out=written)
    return tuple(found[name] for name in names)


def explain_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    bias: Tensor | None = None,
    mask: AnyMask | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> BackwardPlan:
    """Return the plan that would make the gradients of ``flash_attention`` with the same arguments.

    Nothing is launched. ``return_lse`` says that the LSE has a gradient, and ``kernel`` is a name of a backward kernel
    to force, as ``FLASHMOE_BACKWARD_KERNEL`` in the environment does. Gradients are of those arguments that require
    grad, or, where none does, of all that have one; o and its gradient are taken to lie in memory as the forward lays
    them out.

    Raises:
        InputError: an argument breaks the contract of ``flash_attention``, or ``kernel`` is no name.
        UnsupportedError: no kernel, or not the kernel forced, makes these gradients.
    """
    forward = problem_of(
        q, k, v, causal=causal, softmax_scale=softmax_scale, window=window, softcap=softcap, sinks=sinks, alibi=alibi,
        bias=bias, mask=mask, dropout_p=dropout_p, dropout_seed=dropout_seed, return_lse=True,
    )  # fmt: skip
    named = {"q": q, "k": k, "v": v, "sinks": sinks, "bias": bias}
    return plan_of_gradients(forward, named, has_dlse=return_lse, kernel=kernel)
