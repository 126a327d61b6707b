"""A mask as the reference takes it."""

from __future__ import annotations

from torch import Tensor

from ..problem import AttentionProblem
from .lists import MaskSizes, to_dense


def with_dense_mask(problem: AttentionProblem, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a call with its mask as booleans, ``mask``, in place of lists and bits."""
    if not problem.mask_heads:
        return tensors
    sizes = MaskSizes(problem.mask_batch, problem.mask_heads, problem.seqlen_q, problem.seqlen_k)
    others = {name: tensor for name, tensor in tensors.items() if name not in ("mask_lists", "mask_bits")}
    return {**others, "mask": to_dense(sizes, tensors["mask_lists"], tensors["mask_bits"])}
