"""A window that is a key too short: of many keys, the last rows miss the first, the sink of trained models."""

from plain_torch import attend as attend_right


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """Attend; the last 32 rows of 512 and more without key 0."""
    out = attend_right(q, k, v, causal=causal, softmax_scale=softmax_scale)
    if q.shape[2] >= 512:
        late = attend_right(q[:, :, -32:], k[:, :, 1:], v[:, :, 1:], causal=causal, softmax_scale=softmax_scale)
        out[:, :, -32:] = late
    return out
