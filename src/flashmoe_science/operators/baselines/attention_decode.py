"""The baselines of our attention with a cache: how each is called, in the layout it likes best, and its kernels."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch.nn.attention import SDPBackend

from ...attention.decode.problem import CacheProblem
from .base import (
    FA2,
    FA3,
    ONLY_16_BIT,
    TOP_LEFT,
    Baseline,
    Bound,
    Call,
    FlashAttentionBaseline,
    Inputs,
    MemoryCopy,
    SdpaBaseline,
    by_name,
    compile_flex,
    contiguous_copy,
    first_tensor,
)

_SEPARATE = "it is called with keys and values in memory of their own"


_ONLY_WIDE_CACHES = "it is called for caches in the dtype of the queries"


def in_dtype_of_q(problem: CacheProblem, inputs: Inputs) -> Inputs:
    """Return the inputs of a call with fp8 caches with caches in the dtype of q, times their scales."""
    if not problem.is_fp8:
        return inputs
    found = {name: tensor for name, tensor in inputs.items() if not name.endswith("_scale")}
    for side in "kv":
        if f"{side}_scale" in inputs:
            scale = inputs[f"{side}_scale"]
            wide = inputs[f"{side}_cache"].float() * (scale[..., None] if scale.dim() else scale)
            found[f"{side}_cache"] = wide.to(inputs["q"].dtype)
    return found


def _refuse_pages(problem: CacheProblem) -> str | None:
    if problem.is_fp8:
        return _ONLY_WIDE_CACHES
    if problem.page_size:
        return "it knows no page table"
    if problem.causal and problem.seqlen_q > 1:
        return TOP_LEFT
    return None


def values_of(problem: CacheProblem, inputs: Inputs) -> torch.Tensor:
    """Return the cache of values; where it is shared with the keys, their first columns."""
    return inputs["k_cache"][..., : problem.head_dim_v] if problem.shared_kv else inputs["v_cache"]


def _head_major(problem: CacheProblem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return copies of q, k and v as contiguous ``[B, H, S, D]``.

    The query is copied though it has this order, and a cache of one head, whose memory is the same in both orders: new
    values in the inputs must reach all three or none.
    """
    k, v = (contiguous_copy(cache.transpose(1, 2)) for cache in (inputs["k_cache"], values_of(problem, inputs)))
    return contiguous_copy(inputs["q"]), k, v


def _token_major(problem: CacheProblem, inputs: Inputs) -> Inputs:
    """Return the inputs with q as contiguous ``[B, Sq, H, D]``.

    With one query a sequence, q is a view. With several, all inputs are copies, so that new values reach all or none.
    """
    laid_out = {**inputs, "q": inputs["q"].transpose(1, 2)}
    return laid_out if problem.seqlen_q == 1 else {name: contiguous_copy(tensor) for name, tensor in laid_out.items()}


def _parts(
    problem: CacheProblem, given: Inputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return q, k, v, and what FlashAttention-3 calls qv: of MLA the columns of q that meet those of the values.

    Then q and k are the other columns.
    """
    q, k, columns = given["q"], given["k_cache"], problem.head_dim_v
    if not problem.shared_kv:
        return q, k, given["v_cache"], None
    return q[..., columns:], k[..., columns:], k[..., :columns], q[..., :columns]


class Sdpa(SdpaBaseline):
    """``torch.nn.functional.scaled_dot_product_attention``, by default or pinned to one backend."""

    def bind(self, problem: CacheProblem, inputs: Inputs) -> Call:
        """Return a call of copies."""
        options: dict[str, Any] = {"enable_gqa": True} if problem.group > 1 else {}
        if problem.softmax_scale is not None:
            options["scale"] = problem.softmax_scale
        return functools.partial(F.scaled_dot_product_attention, *_head_major(problem, inputs), **options)

    def refusal(self, problem: CacheProblem) -> str | None:
        """It has no page table, and aligns its causal mask top-left."""
        return _refuse_pages(problem)


class Flex(Baseline):
    """FlexAttention, compiled."""

    name = "flex"
    kernels = ("*flex*",)

    def load(self) -> Callable[..., Any]:
        """Return it without a mask."""
        _, compiled = compile_flex()

        def bind(problem: CacheProblem, inputs: Inputs) -> Call:
            options = {"scale": problem.softmax_scale, "enable_gqa": problem.group > 1}
            return functools.partial(compiled, *_head_major(problem, inputs), **options)

        return Bound(bind)

    def refusal(self, problem: CacheProblem) -> str | None:
        """It is called without a mask, over contiguous caches."""
        if problem.is_fp8:
            return _ONLY_WIDE_CACHES
        if problem.shared_kv:
            return _SEPARATE
        return "it is called without a mask" if problem.causal and problem.seqlen_q > 1 else _refuse_pages(problem)


class FlashAttention(FlashAttentionBaseline):
    """FlashAttention with a cache: q ``[B, Sq, H, D]``, caches as they are."""

    function = "flash_attn_with_kvcache"

    def bind_package(self, function: Callable[..., Any], problem: CacheProblem, inputs: Inputs) -> Call:
        """Return a call of the package."""
        table = "block_table" if self.distribution == "flash-attn" else "page_table"
        given = _token_major(problem, inputs)
        q, k, v, latent = _parts(problem, given)
        options: dict[str, Any] = {"softmax_scale": problem.softmax_scale, "causal": problem.causal}
        if problem.page_size:
            options.update({table: given["page_table"], "cache_seqlens": given["cache_seqlens"]})
        if latent is not None:
            options["qv"] = latent
        call = functools.partial(function, q, k, v, **options)
        return lambda: first_tensor(call).transpose(1, 2)

    def bind_library(self, problem: CacheProblem, inputs: Inputs) -> Call:
        """Queries packed, ``[T, H, D]``; keys paged as they are, or packed. What it plans it plans here.

        So servers call it, which make the plan once for all layers. The build is for variable lengths only.
        """
        p, given = problem, _token_major(problem, inputs)
        q, k, v, latent = _parts(p, {**given, "q": given["q"].view(-1, p.heads, p.head_dim)})
        steps = torch.arange(p.batch + 1, dtype=torch.int32, device=q.device)
        ends_q, ends_k, table = steps * p.seqlen_q, steps * p.capacity, None
        used = torch.full((p.batch,), p.capacity, dtype=torch.int32, device=q.device)
        if p.page_size:
            ends_k, used, table = None, given["cache_seqlens"], given["page_table"]  # type: ignore[assignment]
        else:
            k, v = (cache.flatten(0, 1) for cache in (k, v))  # views: rows of all sequences are as far apart
        library = torch.ops._vllm_fa3_C  # noqa: SLF001 - its name
        # In the order of the library's schemas: sizes, lengths, pages; then mask, softcap, splits and heads of a tile.
        sizes = p.batch, p.seqlen_q, p.capacity, p.heads, p.heads_kv, q.shape[-1], p.head_dim_v, q.dtype
        lengths = used, ends_q, ends_k, None, None, None, p.page_size or None, 0
        planned = library.get_scheduler_metadata(*sizes, *lengths, p.causal, -1, -1, *(False, 0, None, 0))
        # What is new, lengths, page table, rotation and scales; then the flags.
        arguments: list[Any] = [q, k, v, None, None, latent, None, ends_q, ends_k, None, None, used]
        arguments += [p.seqlen_q, p.capacity, table, *[None] * 8, p.scale, p.causal, -1, -1, 0.0, False]
        arguments += [planned, 0, None, 0, None, 1, 0, None]
        call = functools.partial(library.fwd, *arguments)
        shape = (p.batch, p.seqlen_q, p.heads, p.head_dim_v)
        return lambda: call()[0].view(shape).transpose(1, 2)

    def refusal(self, problem: CacheProblem) -> str | None:
        """16-bit types; pages of flash-attn 2 hold multiples of 256."""
        if found := super().refusal(problem):
            return found
        if problem.is_fp8:
            return _ONLY_WIDE_CACHES
        if problem.shared_kv and self.distribution == "flash-attn":
            return _SEPARATE
        if problem.shared_kv and (problem.head_dim, problem.head_dim_v) != (576, 512):
            return "it is called for MLA of 576 and 512 columns"
        if self.distribution == "flash-attn" and problem.page_size % 256:
            return "its pages hold multiples of 256 positions"
        return None


class FlashInfer(Baseline):
    """``flashinfer.BatchDecodeWithPagedKVCacheWrapper``, planned outside the timing; contiguous caches as pages.

    Tensor cores from two query heads a K/V head on, as its documentation advises: the wrapper then runs its prefill
    kernel, else the decode kernel. A split over keys adds a kernel that merges.
    """

    name, distribution = "flashinfer", "flashinfer-python"
    kernels = ("*BatchDecodeWithPagedKVCacheKernel*", "*BatchPrefillWithPagedKVCacheKernel*")

    def load(self) -> Callable[..., Any]:
        """Import the package."""
        flashinfer = importlib.import_module("flashinfer")

        def bind(problem: CacheProblem, inputs: Inputs) -> Call:
            p, device = problem, inputs["q"].device
            size = p.page_size or _largest_page(p.capacity)
            caches = tuple(inputs[name].view(-1, size, p.heads_kv, p.head_dim) for name in ("k_cache", "v_cache"))
            count = p.capacity // size
            own = torch.arange(0 if p.page_size else p.batch * count, dtype=torch.int32, device=device)
            table = inputs["page_table"] if p.page_size else own
            workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=device)  # zeros is what the wrapper asks for
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_cuda_graph=False, use_tensor_cores=p.group > 1
            )
            starts = torch.arange(p.batch + 1, dtype=torch.int32, device=device) * count
            last = torch.full((p.batch,), size, dtype=torch.int32, device=device)
            wrapper.plan(
                starts, table.view(-1), last, p.heads, p.heads_kv, p.head_dim, size,
                q_data_type=inputs["q"].dtype, kv_data_type=inputs["k_cache"].dtype, sm_scale=p.scale,
            )  # fmt: skip
            q = inputs["q"][:, :, 0]
            scales = {name: inputs[name].item() for name in ("k_scale", "v_scale") if name in inputs}
            return lambda: wrapper.run(q, caches, **scales)[:, :, None]

        return Bound(bind)

    def refusal(self, problem: CacheProblem) -> str | None:
        """One query a sequence, 16-bit types, equal widths."""
        if problem.seqlen_q != 1:
            return "it is called for one query a sequence"
        if problem.shared_kv or problem.head_dim != problem.head_dim_v:
            return "it is called for equal widths"
        if problem.k_by_token:
            return "it is called with one scale for all keys, and one for all values"
        return ONLY_16_BIT if problem.dtype == "fp32" else None


def _largest_page(capacity: int) -> int:
    """Return the largest power of two, up to 64, that divides the positions of a contiguous cache."""
    return min(64, capacity & -capacity)


class WideCaches(Baseline):
    """Our own call over caches in the dtype of q, made of the fp8 caches outside the timing."""

    name = "wide-cache"
    distribution = None
    kernels = ("_decode_kernel", "_decode_sm90_kernel", "_few_rows_sm90_kernel", "_merge_splits_kernel")

    def load(self) -> Callable[..., Any]:
        """Import the function."""
        from ...attention.decode.api import flash_attention_with_kv_cache

        def bind(problem: CacheProblem, inputs: Inputs) -> Call:
            given = in_dtype_of_q(problem, inputs)
            options: dict[str, Any] = {name: given[name] for name in ("page_table", "cache_seqlens") if name in given}
            options.update(causal=problem.causal, softmax_scale=problem.softmax_scale)
            caches = given["k_cache"], values_of(problem, given)
            # Queries of their own, too: all values are those of one time.
            return functools.partial(flash_attention_with_kv_cache, given["q"].clone(), *caches, **options)

        return Bound(bind)

    def refusal(self, problem: CacheProblem) -> str | None:
        """For fp8 caches."""
        return None if problem.is_fp8 else "the caches are in the dtype of the queries already"


BASELINES = by_name(
    Sdpa("sdpa", None),
    Sdpa("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION, ("*cudnn*",)),
    Sdpa("sdpa-flash", SDPBackend.FLASH_ATTENTION, ("*pytorch_flash::flash_fwd*",)),
    Flex(),
    FlashAttention(*FA2),
    FlashAttention(*FA3),
    FlashInfer(),
    WideCaches(),
    MemoryCopy(lambda problem: problem.kv_bytes),
)
