"""Mixed batches over pages for the interpreter and for a GPU, and their check against fp64."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from flashmoe_science import flash_attention_varlen

from .cases import PAGED, VarlenCase
from .checks import assert_varlen_right, make_features, make_packed, make_paged

KERNEL = "mixed_triton"


@dataclass(frozen=True)
class Mixed:
    """A packed batch over pages, and how its keys are split."""

    case: VarlenCase
    num_splits: int = 0
    batch_invariant: bool = False

    @property
    def why(self) -> str:
        splits = f"-splits{self.num_splits}" if self.num_splits else ""
        return f"{self.case.why}{splits}{'-invariant' if self.batch_invariant else ''}"

    def __str__(self) -> str:
        return f"{self.case}{self.why.removeprefix(self.case.why)}"

    @property
    def options(self) -> dict[str, Any]:
        return {"num_splits": self.num_splits, "batch_invariant": self.batch_invariant, "kernel": KERNEL}


_V = VarlenCase
_QUERIES = (1, 21, 0, 2, 1)
_KEYS = (40, 60, 9, 0, 110)
_BATCH = _V(_QUERIES, _KEYS, 2, 1, 16, 16, "fp16", True, page_size=16, why="mixed")
MIXED_CASES = [
    Mixed(_BATCH),
    Mixed(_BATCH, num_splits=3),
    Mixed(_BATCH, batch_invariant=True),
    Mixed(_V((1,) * 4, (300, 1, 64, 0), 3, 1, 48, 48, "fp16", True, page_size=7, tail=3, why="tokens", spare=9)),
    Mixed(_V((4,) * 3, (120, 20, 3), 4, 1, 32, 32, "fp16", True, page_size=16, sinks="fp16", why="speculative")),
    Mixed(_V((40,), (300,), 3, 1, 16, 16, "fp16", True, page_size=64, why="one-chunk", softcap=3.0)),
    Mixed(_V((30, 1, 3), (90, 70, 40), 3, 1, 16, 16, "fp16", False, window=(40, 7), page_size=1, why="both-bounds")),
    Mixed(
        _V((30, 1, 3), (150, 130, 40), 3, 1, 16, 16, "fp16", True, window=(70, -1), page_size=64, why="behind"),
        batch_invariant=True,
    ),
    Mixed(
        _V((40, 1, 20), (90, 70, 30), 2, 1, 16, 16, "fp16", False, alibi="fp32", alibi_axes=2, sinks="fp32",
           seqused_q=(33, 1, 0), seqused_k=(80, 61, 30), page_size=16, why="used-alibi"),
        num_splits=4,
    ),
    *(
        Mixed(case, num_splits=(0, 2, 0)[i % 3], batch_invariant=i % 3 == 2)
        for i, case in enumerate(
            case for case in PAGED if case.dtype == "fp16" and not case.bias and case.head_dim == case.head_dim_v
        )
    ),
]  # fmt: skip


def check_mixed(
    mixed: Mixed,
    device: str = "cpu",
    poison: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    kernel: str = KERNEL,
) -> None:
    """Compare every sequence with fp64, and the same call without an LSE and in another memory layout bit for bit."""
    case, asked = mixed.case, {**mixed.options, "kernel": kernel}
    inputs, options = make_packed(case, device), make_features(case, device)
    given = make_paged(case, inputs)
    with poison():
        o, lse = flash_attention_varlen(**given, **options, **asked, return_lse=True)
        apart = {name: torch.stack((given[name], given[name]), 1)[:, 1] for name in "q"}
        apart |= {name: given[name].transpose(1, 2).contiguous().transpose(1, 2) for name in "kv"}
        apart["page_table"] = torch.nn.functional.pad(given["page_table"], (0, 3))[:, :-3]
        again = flash_attention_varlen(**{**given, **apart}, **options, **asked)
    assert_varlen_right(o, lse, inputs, options)
    rows = slice(0, sum(case.seqlens_q))
    assert torch.equal(again[rows], o[rows]), "another memory layout gives other bits"


def in_dtype(mixed: Mixed, dtype: str) -> Mixed:
    """Return the same in another dtype."""
    return dataclasses.replace(mixed, case=dataclasses.replace(mixed.case, dtype=dtype))
