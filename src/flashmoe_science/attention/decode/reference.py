"""What attention with a K/V cache means: eager torch, on CPU or GPU, in any floating-point dtype up to fp64.

    length[b]   = cache_seqlens[b] + Sn
    K[b, n]     = k_cache[page_table[b, n // page_size], n % page_size], with position n = cache_seqlens[b] + i
                  holding k[b, :, i] (rotated) from this call on; of an fp8 cache times its scale
    p[m]        = m + length[b] - Sq
    visible     : leftpad_k[b] <= n < length[b]  and  p[m] - left <= n <= p[m] + right
    s[m, n]     = softcap(softmax_scale * q[m] . K[n]) - slope * |p[m] - n| + bias[m, n]
    o[m]        = sum_n exp(s[m, n]) V[n] / (sum_n exp(s[m, n]) + exp(sink))
    lse[m]      = log(sum_n exp(s[m, n]) + exp(sink))

It reads lengths on the host.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...gpu.ambient import without_autocast
from .problem import CacheProblem

_LARGEST_E4M3 = 448.0
_SMALLEST_SCALE = 2.0**-126  # a quotient of tiny keys may be 0, and 0 / 0 is NaN


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool) -> Tensor:
    """Return ``x`` ``[H, S, D]`` with its first columns rotated by the angles at ``positions`` ``[S]``.

    Computed in fp32 at the least, and rounded to the dtype of x. A position behind the tables gives NaN.
    """
    half = cos.shape[1]
    wide = torch.promote_types(torch.float32, x.dtype)
    inside = (positions >= 0) & (positions < cos.shape[0])
    at = torch.where(inside, positions, 0).long()
    c, s = (torch.where(inside[:, None], table[at].to(wide), torch.nan) for table in (cos, sin))
    out = x.to(wide).clone()
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    )
    a, b = x[..., first].to(wide), x[..., second].to(wide)
    out[..., first], out[..., second] = a * c - b * s, a * s + b * c
    return out.to(x.dtype)


def append(problem: CacheProblem, tensors: Mapping[str, Tensor]) -> Tensor:
    """Write new keys and values to the caches, and return the queries to attend with."""
    q, k, v = tensors["q"], tensors.get("k"), tensors.get("v")
    if k is None or v is None:
        return q
    is_inference = torch.is_inference_mode_enabled() or any(
        tensors[name].is_inference() for name in ("k_cache", "v_cache", "k_scale", "v_scale") if name in tensors
    )
    with torch.inference_mode(is_inference), torch.no_grad():  # inference mode off turns gradients on
        return _write(problem, tensors, q, k, v)


def _write(problem: CacheProblem, tensors: Mapping[str, Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    queries = q.clone() if problem.rotary_dim else q
    for b, before in enumerate(tensors["cache_seqlens"].tolist()):
        places = [(i, before + i) for i in range(problem.seqlen_new) if 0 <= before + i < problem.capacity]
        new = k[b]
        if problem.rotary_dim:
            cos, sin = tensors["rotary_cos"], tensors["rotary_sin"]
            steps = torch.arange(problem.seqlen_new, device=q.device)
            new = rotate(new, cos, sin, before + steps, interleaved=problem.rotary_interleaved)
            steps = torch.arange(problem.seqlen_q, device=q.device) * int(problem.rotary_advance)
            queries[b] = rotate(q[b], cos, sin, before + steps, interleaved=problem.rotary_interleaved)
        for i, place in places:
            page, inside = locate(problem, tensors, b, place)
            _store(tensors, "k", new[:, i], page, inside, by_token=problem.k_by_token)
            _store(tensors, "v", v[b, :, i], page, inside, by_token=problem.v_by_token)
    return queries


def _store(tensors: Mapping[str, Tensor], side: str, rows: Tensor, page: int, inside: int, *, by_token: bool) -> None:
    """Write ``rows`` ``[HK, columns]`` to a place; quantise them if the cache is fp8, and write their scales."""
    cache, scale = tensors[f"{side}_cache"], tensors.get(f"{side}_scale")
    if cache.dtype == torch.float8_e4m3fn:
        wide = rows.float()
        if scale is not None and by_token:
            largest = wide.abs().amax(-1)
            scale[page, inside] = torch.where(largest == 0, 1.0, (largest / _LARGEST_E4M3).clamp_min(_SMALLEST_SCALE))
            scale = scale[page, inside]
        if scale is not None:
            wide = wide / (scale if scale.dim() == 0 else scale[:, None])
        rows = wide.clamp(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn)
    cache[page, inside] = rows


def locate(problem: CacheProblem, tensors: Mapping[str, Tensor], b: int, position: int) -> tuple[int, int]:
    """Return page and place of one position of sequence ``b``."""
    if problem.page_size:
        page = int(tensors["page_table"][b, position // problem.page_size])
        return page, position % problem.page_size
    index = tensors.get("cache_batch_idx")
    return (b if index is None else int(index[b])), position


def _gather(
    problem: CacheProblem, tensors: Mapping[str, Tensor], b: int, first: int, end: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return keys and values [first, end) of sequence ``b`` as ``[HK, S, D]`` in ``dtype``; nothing else is read."""
    positions = torch.arange(first, end, device=tensors["q"].device)

    def rows_of(tensor: Tensor) -> Tensor:
        if not problem.page_size:
            return tensor[locate(problem, tensors, b, 0)[0], first:end]
        pages = tensors["page_table"][b, positions // problem.page_size].long()
        return tensor[pages, positions % problem.page_size]

    found = []
    for side, by_token in (("k", problem.k_by_token), ("v", problem.v_by_token)):
        cache, shared = tensors[f"{side}_cache"], side == "v" and problem.shared_kv
        scale = tensors.get("k_scale" if shared else f"{side}_scale")
        rows = rows_of(cache.view(torch.uint8)).view(cache.dtype) if problem.is_fp8 else rows_of(cache)
        rows = rows.transpose(0, 1)
        if scale is not None:  # it is fp32, and so is the product before it is rounded
            if problem.k_by_token if shared else by_token:
                scale = rows_of(scale).transpose(0, 1)[..., None]
            elif scale.dim():
                scale = scale[:, None, None]
            wide = torch.promote_types(torch.float32, dtype)
            rows = rows.to(wide) * scale.to(wide)
        found.append(rows.to(dtype))
    return found[0], found[1]


@without_autocast
def attention_with_kv_cache(
    problem: CacheProblem, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Append, and return ``(o, lse)`` computed in ``dtype``: fp32 for 16-bit inputs unless said, else the inputs' own.

    Args:
        problem: what ``cache_problem_of`` makes of the tensors.
        tensors: by the names of ``flash_attention_with_kv_cache``; the caches are written where k is there.
        dtype: of every step but the rotation, which rounds to the dtype of the cache.

    Returns:
        o ``[B, H, Sq, DV]`` and lse ``[B, H, Sq]``, both in ``dtype``.
    """
    q = append(problem, tensors)
    if dtype is None:
        dtype = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    p = problem
    o = torch.zeros(p.batch, p.heads, p.seqlen_q, p.head_dim_v, dtype=dtype, device=q.device)
    lse = torch.full((p.batch, p.heads, p.seqlen_q), -torch.inf, dtype=dtype, device=q.device)
    lengths = tensors["cache_seqlens"].tolist() if p.has_seqlens else [p.capacity] * p.batch
    padding = tensors["leftpad_k"].tolist() if p.has_leftpad else [0] * p.batch
    sinks = tensors["sinks"].to(dtype)[:, None] if p.sinks else None  # [H, 1]
    for b in range(p.batch if o.numel() else 0):
        end = max(0, min(lengths[b] + p.seqlen_new, p.capacity))
        first = min(max(0, padding[b]), end)
        if p.window[0] >= 0:  # what no row's window reaches is not read: its pages may be gone
            first = min(max(first, end - p.seqlen_q - p.window[0]), end)
        k, v = _gather(p, tensors, b, first, end, dtype)
        scores = _scores(p, tensors, b, q[b].to(dtype), k, first, end)  # [H, Sq, S]
        top = scores.amax(-1) if end > first else torch.full_like(lse[b], -torch.inf)
        top = top if sinks is None else torch.maximum(top, sinks)
        top = torch.where(top == -torch.inf, 0.0, top)
        # Not the LSE is taken from the scores: among the most negative ones the logarithm of their number is lost.
        weights = torch.exp(scores - top[..., None])
        total = weights.sum(-1) if sinks is None else weights.sum(-1) + torch.exp(sinks - top)
        lse[b] = top + total.log()
        weights = weights / torch.where(total == 0, 1.0, total)[..., None]
        o[b] = _by_kv_head(p, weights, v)
    return o, lse


def _by_kv_head(problem: CacheProblem, rows: Tensor, columns: Tensor) -> Tensor:
    """Return ``rows`` ``[H, Sq, X]`` times ``columns`` ``[HK, X, Y]`` as ``[H, Sq, Y]``."""
    shape = (problem.heads_kv, problem.group * problem.seqlen_q, rows.shape[2])
    return (rows.reshape(shape) @ columns).reshape(problem.heads, problem.seqlen_q, columns.shape[2])


def _scores(
    problem: CacheProblem, tensors: Mapping[str, Tensor], b: int, q: Tensor, k: Tensor, first: int, end: int
) -> Tensor:
    """Return the scores of one sequence, -inf where a row does not see a key."""
    scores = _by_kv_head(problem, q, k.transpose(1, 2)) * problem.scale
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    position = torch.arange(problem.seqlen_q, device=q.device)[:, None] + (end - problem.seqlen_q)
    keys = torch.arange(first, end, device=q.device)
    if problem.alibi:
        slopes = tensors["alibi"]
        slopes = (slopes[b] if slopes.dim() == 2 else slopes).to(scores.dtype)
        scores = scores - slopes[:, None, None] * (position - keys).abs()
    if problem.bias:
        bias = tensors["bias"]
        scores = scores + bias[b % bias.shape[0], :, :, first:end].to(scores.dtype)
    left, right = problem.window
    hidden = torch.zeros(problem.seqlen_q, end - first, dtype=torch.bool, device=q.device)
    if left >= 0:
        hidden |= keys < position - left
    if right >= 0:
        hidden |= keys > position + right
    return scores.masked_fill(hidden, -torch.inf)
