"""The baselines of sparse MLA: rows gathered before SDPA, and dense scores with a mask."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit

from ...attention.sparse.fp8_rows import unpack_mla_rows
from ...attention.sparse.problem import SparseProblem
from .base import Baseline, Call, Inputs, MemoryCopy, by_name


def gathered_rows(problem: SparseProblem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows ``[B, Sq, K, D]`` of all indices, in the dtype of q, and whether each is there ``[B, Sq, K]``."""
    p, indices = problem, inputs["indices"].long()
    is_there, at = indices >= 0, indices.clamp_min(0)
    b = torch.arange(p.batch, device=at.device)[:, None, None]
    if p.page_size:
        pages = inputs["page_table"][b, at // p.page_size].long()
        rows = inputs["kv_cache"][pages, at % p.page_size, 0]
    else:
        rows = inputs["kv_cache"][b, at, 0]
    return (unpack_mla_rows(rows, inputs["q"].dtype) if p.is_fp8 else rows), is_there


class Gather(Baseline):
    """Rows gathered by an index, then ``scaled_dot_product_attention``: the heads of a query are its rows."""

    name = "gather"

    def bind(self, problem: Any, inputs: Inputs) -> Call:
        """Return a call that gathers and attends."""
        p = problem.planned

        def call() -> torch.Tensor:
            rows, is_there = gathered_rows(p, inputs)
            k, q = rows.flatten(0, 1)[:, None], inputs["q"].transpose(1, 2).reshape(-1, 1, p.heads, p.head_dim)
            mask = is_there.flatten(0, 1)[:, None, None] if problem.padding else None
            o = F.scaled_dot_product_attention(q, k, k[..., : p.head_dim_v], attn_mask=mask, scale=p.scale)
            return o.view(p.batch, p.seqlen_q, p.heads, -1).transpose(1, 2)

        return call


class Dense(Baseline):
    """Scores of the whole cache in PyTorch, of which a mask made of the indices hides the others."""

    name = "dense"

    def refusal(self, problem: Any) -> str | None:
        """It takes contiguous caches, and all scores at once."""
        p = problem.planned
        if p.page_size:
            return "it knows no page table"
        scores = p.batch * p.heads * p.seqlen_q * p.capacity
        return "its scores take too much memory" if scores > 1 << 30 else None

    def bind(self, problem: Any, inputs: Inputs) -> Call:
        """Return a call that makes the mask and attends."""
        p = problem.planned

        def call() -> torch.Tensor:
            indices, kv = inputs["indices"].long(), inputs["kv_cache"][:, :, 0]
            kv = unpack_mla_rows(kv, inputs["q"].dtype) if p.is_fp8 else kv
            # One column more takes what is no index.
            mask = torch.full((p.batch, p.seqlen_q, p.capacity + 1), -torch.inf, dtype=kv.dtype, device=kv.device)
            mask.scatter_(2, torch.where(indices < 0, p.capacity, indices), 0.0)
            scores = inputs["q"].flatten(1, 2) @ kv.mT * p.scale
            scores = scores.view(p.batch, p.heads, p.seqlen_q, -1) + mask[:, None, :, :-1]
            weights = torch.softmax(scores, -1)
            return (weights.flatten(1, 2) @ kv[..., : p.head_dim_v]).view(p.batch, p.heads, p.seqlen_q, -1)

        return call


def _read_bytes(problem: Any) -> float:
    return float(problem.planned.kv_bytes)


BASELINES = by_name(Gather(), Dense(), MemoryCopy(_read_bytes))
