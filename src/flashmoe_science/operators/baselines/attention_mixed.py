"""The baselines of our attention of mixed batches: how each is called, and the kernels that show it ran."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..packed.problem import VarlenProblem
from .attention_varlen import TorchVarlen
from .base import FA3, Baseline, Bound, Call, FlashAttentionBaseline, Inputs, MemoryCopy, by_name, first_tensor


def pages_of(problem: VarlenProblem) -> list[int]:
    """Return the pages of each sequence; one at the least, so that there are caches."""
    size = problem.planned.page_size
    return [max(1, -(-length // size)) for length in problem.lengths_k]


def keys_in_a_row(problem: VarlenProblem, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return the inputs with copies of the keys and values of all sequences in a row, and no page table."""
    table = inputs["page_table"].long()
    found = {name: tensor for name, tensor in inputs.items() if name != "page_table"}
    for name in "kv":
        found[name] = torch.cat(
            [
                inputs[name][row[:count]].flatten(0, 1)[:length]
                for row, count, length in zip(table, pages_of(problem), problem.lengths_k, strict=True)
            ]
        )
    return found


class GatheredTorchVarlen(TorchVarlen):
    """``torch.nn.attention.varlen.varlen_attn`` over keys that were copied out of their pages before the timing."""

    def load(self) -> Callable[..., Any]:
        """Return it with the options of this version of torch."""
        bound = super().load()

        def bind(problem: VarlenProblem, inputs: Inputs) -> Call:
            q = inputs["q"].clone()  # new values reach all of them or none
            call: Call = bound.bind_inputs(problem, {**keys_in_a_row(problem, inputs), "q": q})  # type: ignore[attr-defined]
            return call

        return Bound(bind)


class FlashAttention(FlashAttentionBaseline):
    """FlashAttention-3 over pages, as servers call it: what it plans it plans once for all layers."""

    function = "flash_attn_varlen_func"

    def bind_package(self, function: Callable[..., Any], problem: VarlenProblem, inputs: Inputs) -> Call:
        """Return a call of the package."""
        options: dict[str, Any] = dict(zip(("max_seqlen_q", "max_seqlen_k"), problem.longest, strict=True))
        options |= {"cu_seqlens_q": inputs["cu_seqlens_q"], "seqused_k": inputs["cu_seqlens_k"].diff()}
        options |= {"page_table": inputs["page_table"], "softmax_scale": problem.planned.softmax_scale}
        call = functools.partial(
            function, inputs["q"], inputs["k"], inputs["v"], causal=problem.planned.causal, **options
        )
        return lambda: first_tensor(call)

    def bind_library(self, problem: VarlenProblem, inputs: Inputs) -> Call:
        """Return a call of the library."""
        p, starts, used = problem.planned, inputs["cu_seqlens_q"], inputs["cu_seqlens_k"].diff()
        library = torch.ops._vllm_fa3_C  # noqa: SLF001 - its name
        # In the order of the library's schemas: sizes, lengths, pages; then mask, softcap, splits and heads of a tile.
        sizes = p.batch, *problem.longest, p.heads, p.heads_kv, p.head_dim, p.head_dim_v, inputs["q"].dtype
        lengths = used, starts, None, None, None, None, p.page_size, 0
        planned = library.get_scheduler_metadata(*sizes, *lengths, p.causal, -1, -1, *(False, 0, None, 0))
        # What is new, lengths, page table, rotation and scales; then the flags.
        arguments: list[Any] = [*(inputs[name] for name in "qkv"), *[None] * 4, starts, None, None, None, used]
        arguments += [*problem.longest, inputs["page_table"], *[None] * 8, p.scale, p.causal, -1, -1, 0.0, False]
        arguments += [planned, 0, None, 0, None, 1, 0, None]
        call = functools.partial(library.fwd, *arguments)
        shape = (problem.tokens[0], p.heads, p.head_dim_v)
        return lambda: call()[0].view(shape)


class Portable(Baseline):
    """Our own kernel for every GPU, which does not split keys."""

    name = "forward-triton"
    distribution = None
    kernels = ("_forward_kernel",)

    def load(self) -> Callable[..., Any]:
        """Import the function."""
        from ...attention.varlen import flash_attention_varlen

        def bind(problem: VarlenProblem, inputs: Inputs) -> Call:
            names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
            options = {"causal": problem.planned.causal, "softmax_scale": problem.planned.softmax_scale}
            return functools.partial(
                flash_attention_varlen, *(inputs[name] for name in names), *problem.longest,
                page_table=inputs["page_table"], kernel="forward_triton", **options,
            )  # fmt: skip

        return Bound(bind)


def _key_bytes(problem: VarlenProblem) -> float:
    p = problem.planned
    return float(problem.tokens[1] * p.heads_kv * (p.head_dim + p.head_dim_v) * p.item_bytes)


BASELINES = by_name(Portable(), GatheredTorchVarlen(), FlashAttention(*FA3), MemoryCopy(_key_bytes))
