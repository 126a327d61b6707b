"""ALiBi in Hopper's gradients: the kernel's own arithmetic, on tensors of torch, against -slope * |distance|."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science.attention.backward import scores_primitives_sm90 as scores

from .gluon_in_python import plain

ROWS = 64  # keys


class _Tensor(torch.Tensor):
    """A tensor as kernels see it: its type has a layout."""

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)


_GLUON = types.SimpleNamespace(
    reshape=torch.reshape, arange=lambda start, end, _: torch.arange(start, end), SliceLayout=lambda *_: None,
    float32=torch.float32, expand_dims=torch.unsqueeze, convert_layout=lambda x, _: x, maximum=torch.clamp,
    where=lambda condition, x, y: torch.where(torch.tensor(condition), x, y),
)  # fmt: skip


@pytest.mark.parametrize("columns", [64, 128])
def test_each_distance_of_keys_behind_and_ahead(columns):
    below = plain(scores._below_lse_ahead, gl=_GLUON)
    generator = torch.Generator().manual_seed(0)
    s = torch.randn(ROWS, columns, generator=generator)
    lse = torch.randn(columns, generator=generator)
    a, slope = types.SimpleNamespace(scale_log2=0.25), 0.5
    rows, keys = torch.arange(columns), torch.arange(ROWS)[:, None]
    for behind in range(-ROWS - 8, columns + 8):
        # The pass before adds the part of a row within its tile to the LSE.
        found = below(s.as_subclass(_Tensor), a, lse + slope * rows, slope, behind)
        wanted = 0.25 * s - slope * (rows - behind - keys).abs() - lse
        torch.testing.assert_close(torch.Tensor(found), wanted, rtol=1e-5, atol=1e-4, msg=f"behind {behind}")
