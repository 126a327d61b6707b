"""Returns the answer of an earlier call, as a pipeline does that forgot to wait."""

import plain_torch

_earlier = {}


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """Return the answer of the call before, once there is one."""
    answer = plain_torch.attend(q, k, v, causal=causal, softmax_scale=softmax_scale)
    returned = _earlier.get(q.shape, answer)
    _earlier[q.shape] = answer
    return returned
