"""cuDNN's attention, called as the baseline ``sdpa-cudnn`` calls it."""

import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch.nn.attention import SDPBackend, sdpa_kernel


def attend(q, k, v, *, causal, softmax_scale):
    """softmax(scale q k^T) v for [B, H, S, D]; k and v may have fewer heads."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=k.shape[1] < q.shape[1]
        )
