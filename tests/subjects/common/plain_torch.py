"""Attention in plain torch with sums in fp32: right, and the material of the subjects that are not."""

from __future__ import annotations

import math

import torch


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """softmax(scale q k^T) v for [B, H, S, D]."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = (q.float() @ k.float().mT) * scale  # [B, H, SQ, SK]
    if causal:
        rows, columns = scores.shape[-2:]
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(1 + columns - rows)
        scores.masked_fill_(hidden, -math.inf)
    return (scores.softmax(-1) @ v.float()).to(q.dtype)
