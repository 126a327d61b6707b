"""Sparse MLA without a GPU: meaning, contract, the kernel in the interpreter, plans, and the indexer's choice."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from flashmoe_science import (
    InputError,
    UnsupportedError,
    explain_sparse_mla,
    flash_attention,
    flash_attention_with_kv_cache,
    sparse_mla,
    sparse_mla_indices,
)
from flashmoe_science.attention.sparse.plan import SPARSE_TABLES, plan_sparse_mla
from flashmoe_science.attention.sparse.problem import SparseProblem
from flashmoe_science.gpu.specs import find_gpu
from flashmoe_science.operators.attention_sparse import OPERATOR

from .sparse_cases import CASES, check_sparse, make_call

DEEPSEEK = SparseProblem(8, 16, 1, 32768, 2048, 576, 512, "bf16", page_size=64)


def changed(**fields: Any) -> SparseProblem:
    """Return DeepSeek-V3.2's call with other fields, and the strides that follow from them."""
    names = ("batch", "heads", "seqlen_q", "capacity", "top_k", "head_dim", "head_dim_v", "dtype", "page_size")
    return SparseProblem(**{**{name: getattr(DEEPSEEK, name) for name in names}, **fields})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu_tensors(case):
    check_sparse(case, "cpu", "auto")


@pytest.mark.triton
def test_the_kernel_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, "-m", "tests.attention.interpreted_sparse"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert child.stdout.strip() == "right", child.stderr


def test_all_tokens_are_dense_mla():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 5, 3, 48, generator=generator)
    cache = torch.randn(2, 17, 1, 48, generator=generator)
    everything = torch.stack([torch.randperm(17, generator=generator) for _ in range(6)]).view(2, 3, 17).int()
    found = sparse_mla(q, cache, everything, head_dim_v=32, return_lse=True)
    expected = flash_attention_with_kv_cache(q, cache, cache[..., :32], return_lse=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_what_a_query_sees_is_a_mask():
    """A prompt whose indices are the window of each query: attention with the window."""
    generator = torch.Generator().manual_seed(1)
    q, kv = torch.randn(1, 4, 9, 16, generator=generator), torch.randn(1, 1, 9, 16, generator=generator)
    seen = torch.arange(9)[:, None] - torch.arange(4)
    found = sparse_mla(q, kv.transpose(1, 2), seen.clamp_min(-1).int()[None], head_dim_v=16)
    torch.testing.assert_close(found, flash_attention(q, kv, kv, causal=True, window=(3, 0)))


GOOD: dict[str, Any] = {
    "q": torch.ones(2, 4, 3, 80, dtype=torch.float16), "kv_cache": torch.ones(2, 20, 1, 80, dtype=torch.float16),
    "indices": torch.zeros(2, 3, 7, dtype=torch.int32), "head_dim_v": 64,
}  # fmt: skip
BAD: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.ones(2, 4, 80, dtype=torch.float16)}, r"q must have 4 dimensions \[B, H, Sq, D\]"),
    ({"q": torch.ones(2, 4, 3, 80, dtype=torch.float64)}, "q must be float16, bfloat16 or float32"),
    (
        {"kv_cache": torch.ones(2, 20, 1, 80)},
        "kv_cache must be torch.float16, or torch.uint8 for rows in fp8, got torch.float32",
    ),
    ({"kv_cache": torch.ones(2, 20, 2, 80).half()}, r"kv_cache must have shape \[pages or B, positions, 1, D\]"),
    ({"kv_cache": torch.ones(3, 20, 1, 80).half()}, "kv_cache must have one row for each of 2 sequences, got 3"),
    ({"kv_cache": torch.ones(2, 80, 1, 20).half().transpose(1, 3)}, "kv_cache must be contiguous along its last axis"),
    ({"indices": torch.zeros(2, 3, 7)}, "indices must be torch.int32, got torch.float32"),
    ({"indices": torch.zeros(2, 4, 7, dtype=torch.int32)}, r"indices must have shape \[B, Sq, K\] = \[2, 3, 7\]"),
    ({"indices": torch.full((2, 3, 7), 20, dtype=torch.int32)}, r"indices\[0, 0, 0\] must be from 0 to 19, or -1"),
    ({"indices": torch.full((2, 3, 7), -2, dtype=torch.int32)}, r"indices\[0, 0, 0\] must be .* got -2"),
    ({"page_table": torch.zeros(1, 2, dtype=torch.int32)}, r"page_table must have shape \[B, P\] = \[2, P\]"),
    ({"page_table": torch.full((2, 2), 2, dtype=torch.int32)}, r"page_table\[0, 0\] must be from 0 to 1, got 2"),
    ({"sinks": torch.zeros(3)}, r"sinks must have shape \[H\] = \[4\]"),
    ({"head_dim_v": 81}, "head_dim_v must be from 1 to D = 80, got 81"),
    ({"head_dim_v": True}, "head_dim_v must be an integer, got True"),
    ({"num_splits": 257}, r"num_splits must be 0 \(the plan chooses\) to 256, got 257"),
    ({"softmax_scale": float("nan")}, "softmax_scale must be finite"),
    ({"softmax_scale": "1"}, "softmax_scale must be a number, got '1'"),
    ({"batch_invariant": 1}, "batch_invariant must be True or False, got 1"),
    ({"kernel": "decode_triton"}, "kernel must be auto or one of sparse_mla_triton, sparse_mla_gluon_sm90, reference"),
    ({"indices": None}, "indices must be a torch.Tensor, got NoneType"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[f"{next(iter(c))}-{i}" for i, (c, _) in enumerate(BAD)])
def test_what_breaks_the_contract_is_refused_by_name(change, message):
    sparse_mla(**GOOD)
    with pytest.raises(InputError, match=message):
        sparse_mla(**{**GOOD, **change})


def test_what_no_kernel_serves_is_refused():
    with pytest.raises(UnsupportedError, match="there is no backward of sparse_mla"):
        sparse_mla(**{**GOOD, "q": GOOD["q"].clone().requires_grad_()})
    gpu = find_gpu("H100")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"dtype": "fp32"}, "no kernel attends to indexed rows in fp32"),
        ({"head_dim_v": 500}, "no kernel attends to indexed rows of D 576 and DV 500"),
        ({"head_dim": 577}, "no kernel attends to indexed rows of D 577 and DV 512"),
        ({"batch": 70000}, "a grid of .* blocks is too large for _merge_sparse_kernel"),
    ]
    for change, message in refused:
        problem = changed(num_splits=2, **change)
        with pytest.raises(UnsupportedError, match=message):
            plan_sparse_mla(problem, gpu)


def test_indices_are_split_until_they_fill_the_gpu():
    gpu = find_gpu("H100")
    plan = plan_sparse_mla(DEEPSEEK, gpu, "sparse_mla_triton")
    assert plan_sparse_mla(DEEPSEEK, gpu).kernel == "sparse_mla_gluon_sm90"
    assert plan_sparse_mla(DEEPSEEK, find_gpu("B200")).kernel == "sparse_mla_triton"
    assert "multiples of 16 bytes" in plan_sparse_mla(changed(pointer_alignment=2), gpu).reason
    assert 0.8 * gpu.sms <= plan.launches[0].grid[0] <= gpu.sms
    assert plan.splits * plan.each >= DEEPSEEK.top_k > (plan.splits - 1) * plan.each
    assert "_sparse_kernel" in str(plan)
    many = changed(batch=200)
    assert plan_sparse_mla(many, gpu).splits == 1
    invariant = [
        plan_sparse_mla(dataclasses.replace(problem, batch_invariant=True), gpu) for problem in (DEEPSEEK, many)
    ]
    assert invariant[0].each == invariant[1].each < DEEPSEEK.top_k


@pytest.mark.triton
@pytest.mark.parametrize(("heads", "arch"), [(16, 80), (16, 90), (128, 90)])
def test_tiles_fit(heads, arch):
    """All tiles in flight lie in shared memory, and nothing spills but what the operator allows."""
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    from flashmoe_science.attention.sparse.prepare import prepare_sparse_kernels
    from flashmoe_science.gpu.compile import check_kernel

    gpu = next(find_gpu(name) for name in ("A100", "H200") if find_gpu(name).arch == arch)
    problem = changed(heads=heads)
    for kernel in prepare_sparse_kernels(plan_sparse_mla(problem, gpu, "sparse_mla_triton")):
        # 8 bytes on sm_80 by Triton 3.6.
        allowed = OPERATOR.spill_bytes.get(kernel.source.name, 0) if heads > 16 else 8
        outcome = check_kernel(kernel.source, arch, gpu.name, most_spilled=allowed)
        assert not outcome.problems


@pytest.mark.triton
@pytest.mark.parametrize("heads", [8, 16, 64])
def test_the_hopper_kernel_compiles(heads):
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    from flashmoe_science.attention.sparse.prepare import prepare_sparse_kernels
    from flashmoe_science.gpu.compile import check_kernel

    gpu = find_gpu("H200")
    plan = plan_sparse_mla(changed(heads=heads), gpu, "sparse_mla_gluon_sm90")
    kernel = prepare_sparse_kernels(plan)[0]
    outcome = check_kernel(kernel.source, 90, gpu.name, most_spilled=32, instruction="*GMMA*")
    assert not outcome.problems
    for change, message in (
        ({"head_dim": 544}, "it serves D 576 and DV 512, got 544 and 512"),
        ({"pointer_alignment": 8}, "multiples of 16 bytes"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            plan_sparse_mla(changed(**change), gpu, "sparse_mla_gluon_sm90")
    with pytest.raises(UnsupportedError, match="it is for Hopper"):
        plan_sparse_mla(DEEPSEEK, find_gpu("A100"), "sparse_mla_gluon_sm90")


def test_every_architecture_has_tiles():
    assert {arch for archs in SPARSE_TABLES for arch in archs} == {80, 86, 89, 90, 100, 120}
    for configs in SPARSE_TABLES.values():
        assert [config.block_m for config in configs] == sorted({config.block_m for config in configs})


def test_explain_takes_the_arguments_of_a_call():
    (q, cache, indices), options = make_call(CASES[0])
    plan = explain_sparse_mla(q.requires_grad_(), cache, indices, **options)
    assert plan.kernel == "reference"
    assert plan.as_dict()["problem"]["top_k"] == 40


@pytest.mark.parametrize("promise", [{}, {"num_splits": 3}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("why", ["pages-of-16", "few-heads"])
def test_compile_and_opcheck(why, promise):
    """The operator traces whole graphs, with and without pages and sinks, and its fake implementation fits."""
    case = next(case for case in CASES if case.why == why)
    (q, cache, indices), options = make_call(case)
    cache = cache.nan_to_num()  # opcheck compares inputs before and after, and NaN is unlike itself
    options |= promise

    def attend(q: torch.Tensor, cache: torch.Tensor, indices: torch.Tensor) -> Any:
        return sparse_mla(q + 1, cache, indices, **options, return_lse=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for found, expected in zip(compiled(q, cache, indices), attend(q, cache, indices), strict=True):
        torch.testing.assert_close(found, expected)
    arguments = (
        q, cache, indices, options.get("page_table"), options.get("sinks"), case.head_dim_v, None,
        options["num_splits"], options.get("batch_invariant", False), "auto",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.flashmoe_science.sparse_mla, arguments)


class TestIndexer:
    """The choice of tokens."""

    def test_the_best_tokens_are_chosen(self):
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(2, 3, 5, 8, generator=generator)
        k, weights = torch.randn(2, 11, 8, generator=generator), torch.randn(2, 5, 3, generator=generator)
        lengths = torch.tensor([11, 7], dtype=torch.int32)
        found = sparse_mla_indices(q, k, weights, 4, seqlens_k=lengths)
        scores = torch.einsum("bmh,bhmn->bmn", weights, torch.relu(torch.einsum("bhmd,bnd->bhmn", q, k)))
        for b in range(2):
            for m in range(5):
                visible = int(lengths[b]) - 5 + m + 1
                best = scores[b, m, :visible].topk(min(4, visible)).indices.tolist()
                assert sorted(best) == sorted(i for i in found[b, m].tolist() if i >= 0)
                assert (found[b, m] == -1).sum() == 4 - len(best)

    def test_without_a_mask_and_with_fewer_tokens_than_asked_for(self):
        found = sparse_mla_indices(torch.ones(1, 1, 2, 4), torch.ones(1, 3, 4), torch.ones(1, 2, 1), 5, causal=False)
        assert found.dtype == torch.int32
        assert sorted(found[0, 0].tolist()) == [-1, -1, 0, 1, 2]

    def test_without_heads_all_scores_are_equal(self):
        found = sparse_mla_indices(torch.ones(1, 0, 2, 8), torch.ones(1, 4, 8), torch.ones(1, 2, 0), 2)
        assert found.shape == (1, 2, 2)

    def test_products_beyond_fp16_hide_no_token(self):
        q, k, weights = (torch.full(shape, value, dtype=torch.float16) for shape, value in (
            ((1, 1, 1, 128), 23.0), ((1, 6, 128), 23.0), ((1, 1, 1), -1.0),
        ))  # fmt: skip
        assert (sparse_mla_indices(q, k, weights, top_k=3) >= 0).all()

    def test_rows_in_parts_give_the_same(self, monkeypatch):
        generator = torch.Generator().manual_seed(1)
        q, k = torch.randn(1, 2, 9, 8, generator=generator), torch.randn(1, 9, 8, generator=generator)
        weights = torch.rand(1, 9, 2, generator=generator)
        whole = sparse_mla_indices(q, k, weights, 3)
        monkeypatch.setattr("flashmoe_science.attention.sparse.indexer._PRODUCTS", 40)
        assert torch.equal(sparse_mla_indices(q, k, weights, 3).sort().values, whole.sort().values)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"k": torch.ones(1, 3, 5)}, r"k must have shape \[B, S, D\] = \[1, 3, 4\]"),
            ({"k": torch.ones(1, 3, 4).half()}, "k must have the dtype of q"),
            ({"weights": torch.ones(1, 1, 2)}, r"weights must have shape \[B, Sq, H\] = \[1, 2, 1\]"),
            ({"top_k": 0}, r"top_k must be an integer from 1 to 2\*\*31 - 1, got 0"),
            ({"seqlens_k": torch.ones(1)}, "seqlens_k must be int32"),
            ({"seqlens_k": torch.tensor([8], dtype=torch.int32)}, "seqlens_k must be at most the 3 rows of k, got 8"),
            ({"q": 3}, "q must be a torch.Tensor"),
        ],
    )
    def test_what_breaks_the_contract_is_refused_by_name(self, change, message):
        good = {"q": torch.ones(1, 1, 2, 4), "k": torch.ones(1, 3, 4), "weights": torch.ones(1, 2, 1), "top_k": 2}
        with pytest.raises(InputError, match=message):
            sparse_mla_indices(**{**good, **change})
