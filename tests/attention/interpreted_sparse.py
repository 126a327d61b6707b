"""Child process: attend to indexed rows in Triton's interpreter, and answer ``right``."""

from __future__ import annotations

import dataclasses

import torch

from flashmoe_science import sparse_mla

from .interpreted_cache import fill
from .sparse_cases import CASES, check_sparse, make_call


def main() -> None:
    """Hold every case against fp64, and bits against those of another batch and layout."""
    empty = torch.empty
    torch.empty = lambda *a, **o: fill(empty(*a, **o))
    for case in CASES:
        check_sparse(case, "cpu")
    # The same bits of a sequence whatever is beside it, and in another memory layout.
    case = dataclasses.replace(CASES[2], batch=3, seqlen_q=2, none=0.0)
    (q, cache, indices), options = make_call(case)
    options |= {"batch_invariant": True, "kernel": "sparse_mla_triton"}
    whole = sparse_mla(q, cache, indices, **options)
    table = options.pop("page_table")
    for b in range(3):
        mine = slice(b, b + 1)
        alone = sparse_mla(
            q[mine].transpose(1, 2).contiguous().transpose(1, 2),
            cache,
            indices[mine],
            page_table=table[mine],
            **options,
        )
        assert torch.equal(alone, whole[mine]), "another batch gives other bits"
    # A pool that all sequences share, and an index outside, which counts as none.
    pool, places = torch.randn(1, 50, 1, 32).half(), torch.randint(0, 50, (3, 2, 20)).int()
    q = torch.randn(3, 4, 2, 32).half()
    expected = sparse_mla(q, pool.expand(3, -1, -1, -1), places, head_dim_v=32)
    found = sparse_mla(q, pool.expand(3, -1, -1, -1), places, head_dim_v=32, kernel="sparse_mla_triton")
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


if __name__ == "__main__":
    main()
    print("right")
