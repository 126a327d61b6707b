"""Computes addresses from shapes alone, as a kernel without strides does."""

from plain_torch import attend as attend_right


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """Attend to what lies where contiguous tensors would have it."""
    q, k, v = (x.as_strided(x.shape, x.new_empty(x.shape).stride()) for x in (q, k, v))
    return attend_right(q, k, v, causal=causal, softmax_scale=softmax_scale)
