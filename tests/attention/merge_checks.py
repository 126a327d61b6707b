"""What every merge of partial results is held to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .merge_cases import MergeCase


def merged_exactly(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE in fp64, by one softmax over the parts."""
    sums = torch.stack([lse.double() for lse in lses])
    lse = torch.logsumexp(sums, 0)
    weights = torch.exp(sums - torch.where(lse == -math.inf, 0.0, lse))
    if outs[0].dim() == 3:
        weights = weights.mT
    values = torch.stack([out.double() for out in outs])
    return (torch.where(weights[..., None] == 0, 0.0, values) * weights[..., None]).sum(0), lse


def assert_merged(
    case: MergeCase, o: torch.Tensor, lse: torch.Tensor, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> None:
    """Compare with fp64: fp32's rounding in every part, and one rounding to the dtype of the parts."""
    exact, exact_lse = merged_exactly(outs, lses)
    assert (o.shape, o.dtype, lse.shape, lse.dtype) == (outs[0].shape, outs[0].dtype, lses[0].shape, torch.float32)
    if not o.numel():
        return
    if case.parts > 1:  # one part is copied, whatever it holds
        largest = max(out.nan_to_num().abs().max().item() for out in outs)
        spread = 1 + case.spread * 4  # exp of a rounded difference
        bound = largest * (torch.finfo(o.dtype).eps + 8 * case.parts * spread * torch.finfo(torch.float32).eps)
        error = (o.double() - exact).abs().max().item()
        assert error <= bound, f"{case.why}: error {error:.2e} is above {bound:.2e}"
    assert torch.equal(lse == -math.inf, exact_lse == -math.inf)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
