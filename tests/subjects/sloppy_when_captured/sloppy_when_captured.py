"""Exact when called eagerly, as a check may; of 8 bits in the graph that is timed."""

import torch
from plain_torch import attend as attend_right


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """Attend; to values of 8 bits while a graph is captured."""
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        q, k, v = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (q, k, v))
    return attend_right(q, k, v, causal=causal, softmax_scale=softmax_scale)
