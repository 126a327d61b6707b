"""Keeps the softmax's sum and the weighted values in the inputs' dtype: good on short sequences, poor on long ones."""

TILE = 16


def attend(q, k, v, *, causal=False, softmax_scale=None):
    """Walk over the keys tile by tile, as a kernel does, with accumulators of 16 bits. Full attention only."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = (q.float() @ k.float().mT) * scale  # [B, H, SQ, SK]
    weights = (scores - scores.amax(-1, keepdim=True)).exp().to(q.dtype)
    total = weights.new_zeros(weights.shape[:-1])  # [B, H, SQ]
    output = v.new_zeros(*q.shape[:-1], v.shape[-1])  # [B, H, SQ, DV]
    for start in range(0, k.shape[-2], TILE):
        tile = weights[..., start : start + TILE]
        total += tile.float().sum(-1).to(q.dtype)
        output += (tile.float() @ v[..., start : start + TILE, :].float()).to(q.dtype)
    return output / total.unsqueeze(-1)
