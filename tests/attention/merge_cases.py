"""Partial results that must merge right, each with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .checks import DTYPES


@dataclass(frozen=True)
class MergeCase:
    """Random parts; ``why`` names the test. What a part without keys holds is NaN."""

    why: str
    parts: int = 2
    shape: tuple[int, ...] = (2, 3, 5, 64)  # [B, H, S, D], or packed [T, H, D]
    dtype: str = "fp16"
    spread: float = 2.0  # of the LSEs
    unseen: float = 0.0  # share of rows of a part that saw no key

    def __str__(self) -> str:
        return self.why


MERGE_CASES = [
    MergeCase("two"),
    MergeCase("one", parts=1),
    MergeCase("five", parts=5, dtype="fp32"),
    MergeCase("packed", parts=3, shape=(37, 4, 40)),
    MergeCase("odd", parts=2, shape=(1, 1, 1, 1), dtype="fp32"),
    MergeCase("wide", shape=(1, 2, 7, 512)),
    MergeCase("prime", parts=3, shape=(3, 7, 11, 111), dtype="fp32"),
    MergeCase("far-apart", parts=3, spread=200.0),
    MergeCase("unseen", parts=3, unseen=0.6),
    MergeCase("nothing-seen", parts=2, unseen=1.0),
    MergeCase("no-rows", shape=(2, 0, 5, 64)),
]


def make_parts(case: MergeCase, device: str = "cpu") -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the outputs and LSEs of a case."""
    generator = torch.Generator().manual_seed(0)
    rows = case.shape[:3] if len(case.shape) == 4 else (case.shape[1], case.shape[0])
    outs, lses = [], []
    for _ in range(case.parts):
        out = torch.randn(case.shape, generator=generator).to(DTYPES[case.dtype])
        lse = case.spread * torch.randn(rows, generator=generator)
        unseen = torch.rand(rows, generator=generator) < case.unseen
        lse[unseen] = -math.inf
        out[unseen if len(case.shape) == 4 else unseen.t()] = math.nan
        outs.append(out.to(device))
        lses.append(lse.to(device))
    return outs, lses
