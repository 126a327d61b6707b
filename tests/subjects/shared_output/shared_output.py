"""Writes every answer to the same memory: right when it returns, wrong after the next call."""

import plain_torch

_outputs = {}


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """Return a buffer that the next call will overwrite."""
    answer = plain_torch.attend(q, k, v, causal=causal, softmax_scale=softmax_scale)
    return _outputs.setdefault(q.shape, answer).copy_(answer)
