"""The softmax of ``forward_features_gluon_sm90`` with a bias: its own arithmetic, on tensors of torch, against fp64."""

from __future__ import annotations

import math
import types
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science.attention.forward import (
    bias_primitives_sm90 as bias,
    primitives_sm90 as shared,
    variants_gluon_sm90 as kernel,
)
from flashmoe_science.attention.problem import LOG2_E

from .gluon_in_python import plain

ROWS, COLUMNS, TILES, DV = 64, 32, 7, 16
LOWEST = torch.finfo(torch.bfloat16).min
STORED = torch.empty(ROWS)  # memory for the LSE of one head


def _gluon() -> Any:
    """Return Gluon's operations on tensors of torch; layouts are nothing."""
    return types.SimpleNamespace(
        max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis), maximum=torch.maximum, where=torch.where,
        exp2=torch.exp2, log2=torch.log2, abs=torch.abs, reshape=torch.reshape,
        fma=lambda x, y, z: (x.double() * y + z).float(), convert_layout=lambda x, _: x, float32=torch.float32,
        SliceLayout=lambda *_: None, full=lambda shape, value, *_: torch.full(shape, value),
        load=lambda pointer: pointer, arange=lambda *_: torch.arange(ROWS), bfloat16=torch.bfloat16,
        int64=torch.int64,
        store=lambda at, lse, **_: STORED.index_copy_(0, at, torch.Tensor(lse)),
    )  # fmt: skip


class _Tensor(torch.Tensor):
    """A tensor as kernels see it: its type has a layout."""

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)


def _wrap(x: torch.Tensor) -> _Tensor:
    return x.as_subclass(_Tensor)


NAMES: dict[str, Any] = {
    "gl": _gluon(), "pack": lambda p, dtype: p.to(dtype), "LARGEST_SUM": 1024.0, "_LOG2_E": LOG2_E,
    "_LN_2": 1 / LOG2_E, "fence_async_shared": lambda: None,
    "is_too_large": lambda sums: bool((sums > 1024.0).any()), "_to_fp32": lambda x: x.to(torch.float32),
}  # fmt: skip
for _name, _module in (
    ("partial_sums", shared), ("rescale", shared), ("_power", bias), ("_raise_max", bias), ("_exponentials", bias),
    ("read_bias", bias), ("add_bias", bias), ("first_biased", bias), ("fold_biased", bias), ("biased_step", bias),
    ("normalise_biased", bias), ("lse_biased", bias), ("_store_lse", kernel),
):  # fmt: skip
    NAMES[_name] = plain(getattr(_module, _name), **NAMES)


def attend(q, k, v, added, hidden, sinks, *, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk over the tiles of keys, the last first and masked, as the kernel does; return output and LSE."""
    STORED.fill_(math.nan)
    tiles = [added[:, COLUMNS * j : COLUMNS * (j + 1)] for j in reversed(range(TILES))]
    ring = types.SimpleNamespace(
        wait=lambda _w, i: (types.SimpleNamespace(load=lambda _: tiles[i]), None), release=lambda _: None
    )
    a = types.SimpleNamespace(
        inner_scale=scale, bias_ring=ring, q_desc=types.SimpleNamespace(dtype=q.dtype), DV1=0, HAS_BIAS=True,
        HAS_SINKS=sinks is not None, sinks_ptr=sinks, IS_PACKED=False, seqlen_q=ROWS, heads=1, lse_ptr=torch.tensor(0),
    )  # fmt: skip
    acc: Any = _wrap(torch.zeros(ROWS, DV))
    m: Any = _wrap(torch.full((ROWS,), bias.BIASED_START.value))
    total = NAMES["partial_sums"](_wrap(torch.zeros(ROWS, COLUMNS)))
    packed: Any = None
    for i in range(TILES):
        keys = slice(COLUMNS * (TILES - 1 - i), COLUMNS * (TILES - i))
        if packed is not None:
            acc = acc + packed.float() @ v[COLUMNS * (TILES - i) : COLUMNS * (TILES - i + 1)].float()
        s: Any = _wrap(q.float() @ k[keys].float().T)
        s = NAMES["add_bias"](s, NAMES["read_bias"](s, a, i, 0), a)
        masked = hidden[:, keys]
        s = torch.where(masked, -math.inf, s)
        if i == 0:
            packed, m, total, sums = NAMES["first_biased"](s, m, total, a)
            total = total + sums
        else:
            step = "fold_biased" if masked.any() else "biased_step"
            acc, _, packed, m, total = NAMES[step](s, acc, None, m, total, a)
    acc = acc + packed.float() @ v[:COLUMNS].float()
    m, row, factor = NAMES["normalise_biased"](m, total.sum(1), 0, a)
    NAMES["_store_lse"](m, row, 0, torch.tensor(0), 0, 0, ROWS, a)
    return torch.Tensor(acc * factor[:, None]), STORED.clone()


def draw(kind: str, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return a bias that is hard in its own way."""
    shape = (ROWS, COLUMNS * TILES)
    added = torch.randn(shape, generator=generator)
    lowest = torch.finfo(dtype).min
    if kind == "hidden":
        added[:, 1::5] = -math.inf
        added[10] = -math.inf
        added[11, 40:] = -math.inf  # what the row sees comes last
        added[12, :-1] = -math.inf
        added[:, 64:96] = -math.inf  # a whole tile
    elif kind == "lowest":
        added[:, 1::5] = lowest
        added[10] = lowest
        added[11, 40:] = lowest
        added[12, 3:50], added[12, :3], added[12, 50:] = lowest, -math.inf, -math.inf
        added[13, :100] = -math.inf
    elif kind == "large":
        added = 1e4 * added
        added[5, 3] = added[30, -13] = 6e4
        highest = torch.finfo(dtype).max
        added[31, 3] = added[32, -13] = added[33, 100] = added[33, 20] = added[34, 200:] = highest
        added[35, 100:] = -highest
    elif kind == "rising":  # each tile far above those before it
        added += 30.0 * torch.arange(TILES).flip(0).repeat_interleave(COLUMNS)
    return added.to(dtype)


@pytest.mark.parametrize("sinks", [None, 1.5, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "hidden", "lowest", "large", "rising"])
def test_the_softmax_of_scores_with_a_bias(kind, dtype, sinks):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, 64, generator=generator).to(dtype) for n in (ROWS, COLUMNS * TILES))
    v = torch.randn(COLUMNS * TILES, DV, generator=generator).to(dtype)
    added = draw(kind, dtype, generator)
    hidden = torch.zeros(ROWS, COLUMNS * TILES, dtype=torch.bool)
    hidden[:, -5:] = True
    hidden[:20, -50:] = True
    o, lse = attend(q, k, v, added, hidden, None if sinks is None else torch.tensor(sinks), scale=0.125)
    # In fp32: what is added to the lowest number is lost, and keys that have it weigh the same.
    s = (0.125 * (q.float() @ k.float().T) + added.float()).masked_fill(hidden, -math.inf).double()
    if sinks is not None:
        s = torch.cat([s, torch.full((ROWS, 1), sinks).double()], 1)
    exact_lse = torch.logsumexp(s, 1)
    p = torch.softmax(s, 1).nan_to_num(0.0)[:, : COLUMNS * TILES]  # NaN where a row sees no key
    # A score of 6e4 is rounded to 2^-8.
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-2 if kind == "large" else 2e-3
    torch.testing.assert_close(o.double(), p @ v.double(), rtol=0, atol=tolerance)
    assert torch.equal(lse == -math.inf, exact_lse == -math.inf)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)
    if kind == "lowest" and sinks is None and dtype == torch.bfloat16:
        seen = ~hidden[10]
        torch.testing.assert_close(o[10], v[seen].float().mean(0), rtol=0, atol=1e-2)
        assert lse[10].item() == LOWEST
