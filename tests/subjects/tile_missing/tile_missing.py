"""Never writes the last tile of rows, as a grid that is rounded down does."""

import plain_torch
import torch

TILE = 16


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """Write all rows but those of the last tile."""
    answer = plain_torch.attend(q, k, v, causal=causal, softmax_scale=softmax_scale)
    output = torch.empty(answer.shape, dtype=answer.dtype, device=answer.device)
    rows = (q.shape[-2] - 1) // TILE * TILE
    output[..., :rows, :] = answer[..., :rows, :]
    return output
