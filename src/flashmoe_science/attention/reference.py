"""What attention means: eager torch, on CPU or GPU, in any floating-point dtype up to fp64.

    s[b, h, m, n] = softmax_scale * sum_d q[b, h, m, d] * k[b, h // G, n, d]      G = H / HK
    s[b, h, m, n] = -inf where causal and n > m + Sk - Sq                          (aligned bottom-right)
    o[b, h, m]    = sum_n softmax(s)[m, n] * v[b, h // G, n]
    lse[b, h, m]  = log(sum_n exp(s[m, n]))                                        (natural logarithm)

A row that sees no key has o = 0 and lse = -inf.
"""

from __future__ import annotations

import torch

# Scores of one chunk of rows, so that fp64 references of long sequences fit: 2**27 elements are 1 GiB.
_CHUNK_SCORES = 1 << 27


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(o, lse)``, computed in ``dtype``.

    Args:
        q: ``[B, H, Sq, D]``.
        k: ``[B, HK, Sk, D]``; H is a multiple of HK.
        v: ``[B, HK, Sk, DV]``.
        causal: hide key n from row m where n > m + Sk - Sq.
        softmax_scale: factor on the scores. Default ``D ** -0.5``.
        dtype: of every step. Default: fp32 for 16-bit inputs, else the inputs' own.

    Returns:
        o ``[B, H, Sq, DV]`` and lse ``[B, H, Sq]``, both in ``dtype``.
    """
    if dtype is None:
        dtype = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    batch, heads, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_k, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    o = torch.zeros(batch, heads, seqlen_q, head_dim_v, dtype=dtype, device=q.device)
    lse = torch.full((batch, heads, seqlen_q), -torch.inf, dtype=dtype, device=q.device)
    if o.numel() == 0 or seqlen_k == 0:
        return o, lse
    group = heads // heads_kv
    rows = max(1, min(seqlen_q, _CHUNK_SCORES // (group * seqlen_k)))
    keys = torch.arange(seqlen_k, device=q.device)
    for b in range(batch):
        for h in range(heads_kv):
            kh, vh = k[b, h].to(dtype), v[b, h].to(dtype)
            mine = slice(h * group, (h + 1) * group)
            for first in range(0, seqlen_q, rows):
                last = min(first + rows, seqlen_q)
                scores = (q[b, mine, first:last].to(dtype) @ kh.T) * scale
                if causal:
                    row = torch.arange(first, last, device=q.device)
                    scores.masked_fill_(keys > row[:, None] + (seqlen_k - seqlen_q), -torch.inf)
                lse[b, mine, first:last] = part = torch.logsumexp(scores, -1)
                weights = torch.exp(scores - torch.where(part == -torch.inf, 0.0, part)[..., None])
                o[b, mine, first:last] = weights @ vh
    return o, lse


def attention_low_precision(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    """Return o as the framework's own eager code computes it in the dtype of the inputs: scores, softmax, product.

    What it loses against fp64 sets the error budget of the kernels.
    """
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q * scale) @ k.transpose(-1, -2)
    if causal:
        row, key = torch.arange(q.shape[2], device=q.device), torch.arange(k.shape[2], device=q.device)
        scores = scores.masked_fill(key > row[:, None] + (k.shape[2] - q.shape[2]), -torch.inf)
    weights = torch.softmax(scores, -1)
    return torch.nan_to_num(weights, nan=0.0) @ v  # rows without keys: NaN after the softmax, 0 by definition
