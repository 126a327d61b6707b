"""Give Liger's fused experts the arguments of the operator ``moe``."""

from liger_kernel.ops import LigerFusedMoEFunction


def experts(x, w_gate_up, w_down, topk_weights, topk_ids):
    """Return the weighted sum of the SwiGLU experts of each token."""
    return LigerFusedMoEFunction.apply(x, w_gate_up, w_down, topk_ids, topk_weights)
