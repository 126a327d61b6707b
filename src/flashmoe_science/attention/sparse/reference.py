"""What ``sparse_mla`` means, in plain PyTorch: the answer that kernels are measured against, and what CPUs run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...gpu.ambient import without_autocast
from .fp8_rows import unpack_rows
from .problem import SparseProblem


@without_autocast
def sparse_attention(
    problem: SparseProblem, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention to the rows that indices name.

    Args:
        problem: what ``sparse_problem_of`` makes of the call.
        tensors: by the names of ``sparse_mla``.
        dtype: of every step; None: fp32 for 16-bit inputs, else that of q.

    Returns:
        o ``[B, H, Sq, DV]`` and lse ``[B, H, Sq]``, both in ``dtype``.
    """
    p, q = problem, tensors["q"]
    if dtype is None:
        dtype = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    o = torch.zeros(p.batch, p.heads, p.seqlen_q, p.head_dim_v, dtype=dtype, device=q.device)
    lse = torch.full((p.batch, p.heads, p.seqlen_q), -torch.inf, dtype=dtype, device=q.device)
    sinks = tensors["sinks"].to(dtype)[:, None] if p.sinks else None  # [H, 1]
    for b in range(p.batch if o.numel() else 0):
        for token in range(p.seqlen_q):
            rows = rows_of(problem, tensors, b, token, dtype)  # [N, D]
            scores = q[b, :, token].to(dtype) @ rows.T * p.scale  # [H, N]
            with_sink = scores if sinks is None else torch.cat((scores, sinks), 1)
            if not with_sink.shape[1]:
                continue
            top = with_sink.amax(1)
            top = torch.where(top == -torch.inf, 0.0, top)
            total = torch.exp(with_sink - top[:, None]).sum(1)
            lse[b, :, token] = top + total.log()
            weights = torch.exp(scores - top[:, None]) / torch.where(total == 0, 1.0, total)[:, None]
            o[b, :, token] = weights @ rows[:, : p.head_dim_v]
    return o, lse


def rows_of(problem: SparseProblem, tensors: Mapping[str, Tensor], b: int, token: int, dtype: torch.dtype) -> Tensor:
    """Return the rows ``[N, D]`` of the cache that one query sees, in the order of its indices."""
    indices, cache = tensors["indices"][b, token].long(), tensors["kv_cache"]
    indices = indices[(indices >= 0) & (indices < problem.capacity)]
    if problem.page_size:
        pages = tensors["page_table"][b, indices // problem.page_size].long()
        rows = cache[pages, indices % problem.page_size, 0]
    else:
        rows = cache[b, indices, 0]
    return unpack_rows(rows, dtype) if problem.is_fp8 else rows.to(dtype)
