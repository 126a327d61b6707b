"""Leaves the last tile of rows zero: no NaN tells, only the error does."""

import plain_torch

TILE = 16


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """Return zeros in the last tile."""
    answer = plain_torch.attend(q, k, v, causal=causal, softmax_scale=softmax_scale)
    answer[..., (q.shape[-2] - 1) // TILE * TILE :, :] = 0
    return answer
