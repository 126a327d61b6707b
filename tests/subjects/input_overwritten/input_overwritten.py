"""Scales q where it lies."""

import plain_torch


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """Return the right answer, and leave q changed."""
    answer = plain_torch.attend(q, k, v, causal=causal, softmax_scale=softmax_scale)
    q.data[..., -1, :] *= 0.5
    return answer
