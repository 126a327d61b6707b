"""Sparse MLA on a real GPU: against fp64, in graphs, compiled, in other batches, and with indices that lie outside."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashmoe_science import (
    InputError,
    explain_sparse_mla,
    pack_mla_rows,
    sparse_mla,
    sparse_mla_indices,
    unpack_mla_rows,
)

from .checks import synchronisation_is_an_error
from .sparse_cases import CASES, FP8_CASES, SparseCase, check_sparse, make_call

pytestmark = pytest.mark.gpu

DEEPSEEK = SparseCase(
    "deepseek", batch=3, seqlen_k=4096, top_k=2048, head_dim=576, head_dim_v=512, page_size=64, dtype="bf16"
)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_small_problems(case, dtype):
    check_sparse(dataclasses.replace(case, dtype=dtype), "cuda")


@pytest.mark.parametrize("page_size", [0, 1, 16, 64])
@pytest.mark.parametrize("heads", [8, 16, 20, 64, 128])
@pytest.mark.parametrize("kernel", ["sparse_mla_triton", "sparse_mla_gluon_sm90"])
def test_deepseek(heads, page_size, kernel):
    if "sm90" in kernel and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it is for Hopper")
    case = dataclasses.replace(DEEPSEEK, heads=heads, page_size=page_size, sinks=heads == 64)
    for num_splits in (0, 1, 7):
        check_sparse(dataclasses.replace(case, num_splits=num_splits), "cuda", kernel)


IN_FP8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="fp8 needs sm_89 or newer"
)


@IN_FP8
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("case", FP8_CASES, ids=str)
def test_small_problems_in_fp8(case, dtype):
    check_sparse(dataclasses.replace(case, dtype=dtype), "cuda")


@IN_FP8
@pytest.mark.parametrize("page_size", [0, 1, 16, 64])
@pytest.mark.parametrize("heads", [8, 16, 20, 64, 128])
def test_deepseek_in_fp8(heads, page_size):
    case = dataclasses.replace(DEEPSEEK, heads=heads, page_size=page_size, sinks=heads == 64, fp8=True, scale=0.03)
    for num_splits in (0, 1, 7):
        check_sparse(dataclasses.replace(case, num_splits=num_splits), "cuda")


@IN_FP8
def test_fp8_gives_the_same_bits_in_every_batch_and_in_graphs():
    case = dataclasses.replace(DEEPSEEK, batch=9, none=0.0, fp8=True)
    (q, cache, indices), options = make_call(case, "cuda")
    table = options.pop("page_table")
    whole = sparse_mla(q, cache, indices, page_table=table, batch_invariant=True, **options)
    for mine in (slice(0, 1), slice(3, 9)):
        alone = sparse_mla(q[mine], cache, indices[mine], page_table=table[mine], batch_invariant=True, **options)
        assert torch.equal(alone, whole[mine])
    assert explain_sparse_mla(q, cache, indices, page_table=table, **options).kernel == "sparse_mla_triton"
    sparse_mla(q, cache, indices, page_table=table, **options)  # it is compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = sparse_mla(q, cache, indices, page_table=table, **options)
    indices.copy_(indices.flip(-1))
    with synchronisation_is_an_error():
        graph.replay()
        expected = sparse_mla(q, cache, indices, page_table=table, **options)
    assert torch.equal(o, expected)


@IN_FP8
def test_rows_are_packed_and_unpacked_as_on_a_cpu():
    numbers = torch.randn(300, 576, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 9, 300)[:, None]
    rows = pack_mla_rows(numbers[:, :512], numbers[:, 512:])
    of_gpu = pack_mla_rows(numbers[:, :512].cuda(), numbers[:, 512:].cuda())
    assert torch.equal(unpack_mla_rows(rows.cuda(), torch.float32).cpu(), unpack_mla_rows(rows, torch.float32))
    torch.testing.assert_close(
        unpack_mla_rows(of_gpu, torch.float32).cpu(), unpack_mla_rows(rows, torch.float32), rtol=0.07, atol=0
    )


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(512, 512), (64, 64), (16, 16), (192, 128)])
def test_other_columns(head_dim, head_dim_v):
    check_sparse(dataclasses.replace(DEEPSEEK, head_dim=head_dim, head_dim_v=head_dim_v, seqlen_q=5), "cuda")


def test_a_prompt_of_indices_that_the_indexer_chose():
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, cache = normal(1, 16, 300, 576), normal(1, 300, 1, 576)
    indices = sparse_mla_indices(normal(1, 4, 300, 128), normal(1, 300, 128), normal(1, 300, 4), 128)
    found = sparse_mla(q, cache, indices, return_lse=True)
    expected = sparse_mla(q.cpu().double().float(), cache.cpu().float(), indices.cpu(), return_lse=True)
    torch.testing.assert_close(found[0].cpu().float(), expected[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found[1].cpu(), expected[1], rtol=1e-4, atol=1e-4)


def test_the_same_bits_in_every_batch():
    (q, cache, indices), options = make_call(dataclasses.replace(DEEPSEEK, batch=9, none=0.0), "cuda")
    table = options.pop("page_table")
    whole = sparse_mla(q, cache, indices, page_table=table, batch_invariant=True, **options)
    for mine in (slice(0, 1), slice(3, 9), slice(8, 9)):
        alone = sparse_mla(q[mine], cache, indices[mine], page_table=table[mine], batch_invariant=True, **options)
        assert torch.equal(alone, whole[mine])
    assert torch.equal(sparse_mla(q, cache, indices, page_table=table, batch_invariant=True, **options), whole)


def test_graphs_replay_with_new_indices_and_nothing_synchronises():
    (q, cache, indices), options = make_call(dataclasses.replace(DEEPSEEK, none=0.0), "cuda")
    cache.nan_to_num_(0.5)
    sparse_mla(q, cache, indices, **options)  # it is compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = sparse_mla(q, cache, indices, **options)
    indices.copy_(indices.flip(-1).roll(1, 0))
    with synchronisation_is_an_error():
        graph.replay()
        expected = sparse_mla(q, cache, indices, **options)
    assert torch.equal(o, expected)


def test_compiled():
    (q, cache, indices), options = make_call(DEEPSEEK, "cuda")
    compiled: Any = torch.compile(sparse_mla, fullgraph=True)
    for found, expected in zip(
        compiled(q, cache, indices, **options, return_lse=True),
        sparse_mla(q, cache, indices, **options, return_lse=True), strict=True,
    ):  # fmt: skip
        assert torch.equal(found, expected)


def test_indices_outside_are_none_or_found(monkeypatch):
    (q, cache, indices), options = make_call(dataclasses.replace(DEEPSEEK, none=0.3), "cuda")
    wrong = torch.where(indices < 0, torch.tensor(4096 + 3, dtype=torch.int32, device="cuda"), indices)
    assert torch.equal(sparse_mla(q, cache, wrong, **options), sparse_mla(q, cache, indices, **options))
    monkeypatch.setenv("FLASHMOE_CHECK", "1")
    with pytest.raises(InputError, match=r"indices\[\d, 0, \d+\] must be from 0 to 4095, or -1 for none, got 4099"):
        sparse_mla(q, cache, wrong, **options)
    sparse_mla(q, cache, indices, **options)
