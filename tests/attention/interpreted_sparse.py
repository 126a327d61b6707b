"""Child process: attend to indexed rows in Triton's interpreter, and answer ``right``."""

from __future__ import annotations

import dataclasses

import torch

from flashmoe_science import pack_mla_rows, sparse_mla

from .interpreted_cache import fill
from .sparse_cases import CASES, FP8_CASES, SparseCase, check_sparse, make_call


def main() -> None:
    """Hold every case against fp64, and bits against those of another batch and layout."""
    empty = torch.empty
    torch.empty = lambda *a, **o: fill(empty(*a, **o))
    for case in (*CASES, *FP8_CASES):
        check_sparse(case, "cpu")
    for case in (CASES[2], FP8_CASES[2]):
        check_bits(dataclasses.replace(case, batch=3, seqlen_q=2, none=0.0))
    # A pool that all sequences share, and an index outside, which counts as none.
    pool, places = torch.randn(1, 50, 1, 576), torch.randint(0, 50, (3, 2, 20)).int()
    q = torch.randn(3, 4, 2, 576).half()
    for rows in (pool.half(), pack_mla_rows(pool[..., :512], pool[..., 512:])):
        shared = rows.expand(3, -1, -1, -1)
        expected = sparse_mla(q, shared, places)
        found = sparse_mla(q, shared, places, kernel="sparse_mla_triton")
        torch.testing.assert_close(found, expected, rtol=3e-3, atol=3e-3)


def check_bits(case: SparseCase) -> None:
    """Compare each sequence with itself in another batch, and in another memory layout."""
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


if __name__ == "__main__":
    main()
    print("right")
