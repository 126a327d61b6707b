"""Writes the last head transposed, as a wrong stride does."""

import plain_torch


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """Return the right answer but for the last head."""
    answer = plain_torch.attend(q, k, v, causal=causal, softmax_scale=softmax_scale)
    head = answer[:, -1]  # [B, S, D]
    answer[:, -1] = head.mT.reshape(head.shape).clone()
    return answer
