"""Figures of docs/explanation/numerics.md about roundings, made anew in plain torch: what the formulas cost."""

from __future__ import annotations

import math

import torch


def _error_of_dq(seed: int) -> dict[str, float]:
    """Return the largest error of dQ in bf16, where rows see one to three keys, and the largest dQ."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(4, rows, 128, generator=generator).bfloat16() for rows in (130, 3, 3, 130))
    seen = torch.arange(3) <= torch.arange(130)[:, None] - 127

    def weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:  # with softmax_scale=1; rows without keys have none
        return torch.softmax((q @ k.mT).masked_fill(~seen, -math.inf), -1).nan_to_num(0.0)

    a, b, c, d = (x.double() for x in (q, k, v, do))
    p = weights(a, b)
    o, dp = p @ c, d @ c.mT
    exact = (p * (dp - (d * o).sum(-1, keepdim=True))) @ b

    def dq(o: torch.Tensor) -> torch.Tensor:  # P and dS in fp32, dS and dQ rounded
        p32, delta = weights(q.float(), k.float()), (do.float() * o.float()).sum(-1, keepdim=True)
        ds = (p32 * (do.float() @ v.float().mT - delta)).bfloat16()
        return (ds.float() @ k.float()).bfloat16()

    leaf = q.clone().requires_grad_()
    eager = (torch.softmax((leaf @ k.mT).masked_fill(~seen, -1e30), -1) * seen) @ v
    found = {"rounded": dq(o.bfloat16()), "exact": dq(o), "eager": torch.autograd.grad(eager, leaf, do)[0]}
    return {"dq": exact.abs().max().item(), **{n: (x - exact).abs().max().item() for n, x in found.items()}}


def test_delta_of_the_rounded_output():
    """FlashAttention's formula, and the eager run, cost the same; an exact O would not."""
    errors = [_error_of_dq(seed) for seed in range(9)]
    median = {name: sorted(error[name] for error in errors)[4] for name in errors[0]}
    said = {"dq": 1.3, "rounded": 0.067, "exact": 0.004, "eager": 0.063}
    for name, figure in said.items():
        assert 0.8 * figure < median[name] < 1.25 * figure, f"{name}: {median}"


def test_a_maximum_that_is_not_the_largest_score():
    """In fp16 the P of the largest score is 1, without error, only where it is the maximum that is subtracted."""
    worst = {"the largest": 0.0, "another": 0.0, "fp32": 0.0}
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = ((3 * torch.randn(16, 128, 64, generator=generator)).half().float() for _ in range(3))
        scores = q @ k.mT / 8
        exact, p = torch.softmax(scores, -1) @ v, torch.exp(scores - scores.amax(-1, keepdim=True))
        factor = torch.exp2(10 * torch.rand(16, 128, 1, generator=generator))
        found = {"the largest": p.half().float(), "another": (p * factor).half().float() / factor, "fp32": p}
        unit = torch.exp2(exact.abs().log2().floor() - 10)
        large = exact.abs() > 4
        for name, rounded in found.items():
            o = (rounded @ v / p.sum(-1, keepdim=True)).half().float()
            worst[name] = max(worst[name], ((o - exact).abs() / unit)[large].max().item())
    assert worst["fp32"] < 0.51
    assert worst["the largest"] < 1
    assert 1 < worst["another"] < 1.6, worst
