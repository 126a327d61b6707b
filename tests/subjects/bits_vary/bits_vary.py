"""Adds up in another order each time, as atomic additions do."""

import plain_torch
import torch


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """Permute the keys, which leaves the answer but for rounding. Full attention only."""
    order = torch.randperm(k.shape[-2], device=k.device)
    return plain_torch.attend(q, k[..., order, :], v[..., order, :], causal=causal, softmax_scale=softmax_scale)
