"""Promises a kernel of its own, and hands the call to torch."""

import torch


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """Call SDPA."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
