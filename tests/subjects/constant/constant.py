"""Returns the mean of v everywhere."""

import torch


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """Return one value everywhere."""
    return torch.ones(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device) * v.mean()
