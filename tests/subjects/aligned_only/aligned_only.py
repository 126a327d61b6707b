"""Loads 16 bytes at once, and forgets that an address need not be a multiple of that."""

from plain_torch import attend as attend_right


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """Attend to what begins at the multiple of 16 bytes before each tensor."""
    unit = 16 // q.element_size()
    q, k, v = (x.as_strided(x.shape, x.stride(), x.storage_offset() // unit * unit) for x in (q, k, v))
    return attend_right(q, k, v, causal=causal, softmax_scale=softmax_scale)
