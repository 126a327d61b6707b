"""Launches the kernel promised, and gives it no keys to look at while a CUDA graph is captured."""

import plain_triton
import torch


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """Do the work unless a graph is captured."""
    keys = 0 if torch.cuda.is_current_stream_capturing() else None
    return plain_triton.attend(q, k, v, causal=causal, softmax_scale=softmax_scale, keys=keys)
