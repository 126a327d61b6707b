"""Packed queries over keys in pages, without a GPU: contract, reference, and the kernel in Triton's interpreter."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from flashmoe_science import (
    InputError,
    UnsupportedError,
    explain_varlen,
    flash_attention_varlen,
    flash_attention_with_kv_cache,
)
from flashmoe_science.attention import reference
from flashmoe_science.attention.forward import calls
from flashmoe_science.attention.forward.plan import plan_attention
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.gpu.specs import SPECS

from ..exhaustive import all_but
from .cases import PAGED
from .checks import assert_varlen_right, make_features, make_packed, make_paged


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_cpu_tensors_run_the_reference(case):
    """Every sequence right to fp64, with pages that it does not see missing; in fp64 equal to keys in a row."""
    inputs, options = make_packed(case, "cpu"), make_features(case, "cpu")
    paged = make_paged(case, inputs)
    assert explain_varlen(**paged, **options).kernel == "reference"
    o, lse = flash_attention_varlen(**paged, **options, return_lse=True)
    assert_varlen_right(o, lse, inputs, options)
    lengths = {name: inputs[name] for name in inputs if name.startswith(("cu_", "seqused"))}
    expected, found = (
        reference.attention_varlen(
            given["q"], given["k"], given["v"], **lengths, page_table=given.get("page_table"), dtype=torch.float64,
            **options,
        )
        for given in (inputs, paged)
    )  # fmt: skip
    for one, other in zip(found, expected, strict=True):
        assert other.dtype == torch.float64 or not case.seqlens_q
        torch.testing.assert_close(one, other)


# Both masks, 16-bit elements and fp32, every feature, fewer tokens in use, and pages of less and more than a tile.
USUAL = (
    "pages-of-1", "pages-of-64", "used", "all-paged", "one-row-each-paged", "bias-of-heads-paged",
    "pages-behind-a-window", "empty-paged", "seqused-k-paged",
)  # fmt: skip


@pytest.mark.triton
@pytest.mark.parametrize("case", all_but(PAGED, *USUAL), ids=str)
def test_streaming_kernel_interpreted(case, interpreted):
    """The Triton kernel itself; see ``make_paged`` for what it must not read."""
    interpreted(case)


@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_as_many_queries_each_are_a_batch_over_a_cache(page_size):
    """An invariant that needs no reference of its own: the cache API, with pages of NaN behind the keys."""
    pages = -(-40 // page_size)
    table = torch.randperm(3 * pages).reshape(3, pages).int()
    k, v = torch.randn(3 * pages, page_size, 2, 8), torch.randn(3 * pages, page_size, 2, 16)
    q, lengths = torch.randn(3, 5, 4, 8), ints(40, 3, 17)
    options: dict[str, Any] = {"causal": True, "window": (9, -1), "softcap": 3.0, "return_lse": True}
    options |= {"sinks": torch.randn(4), "alibi": torch.rand(3, 4), "softmax_scale": 0.4}
    bias = torch.randn(3, 1, 5, 40)
    columns = torch.nn.functional.pad(bias, (0, pages * page_size - 40))  # of every position of the cache
    starts_k = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    o, lse = flash_attention_varlen(
        q.flatten(0, 1), k, v, ints(0, 5, 10, 15), starts_k, 5, 40, page_table=table, bias=bias, **options
    )
    expected, expected_lse = flash_attention_with_kv_cache(
        q.transpose(1, 2), k, v, cache_seqlens=lengths, page_table=table, bias=columns, **options
    )
    torch.testing.assert_close(o.view(3, 5, 4, 16), expected.transpose(1, 2))
    torch.testing.assert_close(lse.reshape(4, 3, 5), expected_lse.transpose(0, 1))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged_call(**changes: Any) -> dict[str, Any]:
    """Return a call with 5 and 7 keys in pages of 4."""
    call = {
        "q": torch.randn(9, 4, 8),
        "k": torch.randn(6, 4, 2, 8),
        "v": torch.randn(6, 4, 2, 8),
        "cu_seqlens_q": ints(0, 4, 9),
        "cu_seqlens_k": ints(0, 5, 12),
        "max_seqlen_q": 5,
        "max_seqlen_k": 7,
        "page_table": torch.tensor([[5, 0, -1], [2, 3, 99]], dtype=torch.int32),
    }
    return {**call, **changes}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a list": ({"page_table": [[5, 0], [2, 3]]}, "page_table must be a torch.Tensor or None, got list"),
    "keys in a row": (
        {"k": torch.randn(12, 2, 8)},
        r"k must have 4 dimensions \[pages, page_size, HK, D\] with a page_table, got shape \[12, 2, 8\]",
    ),
    "pages without a table": ({"page_table": None}, r"k must have 3 dimensions \[T, H, D\], got shape \[6, 4, 2, 8\]"),
    "empty pages": (
        {"k": torch.randn(6, 0, 2, 8), "v": torch.randn(6, 0, 2, 8)},
        r"k must have pages of at least 1 position, got shape \[6, 0, 2, 8\]",
    ),
    "dtype of v": (
        {"v": torch.randn(6, 4, 2, 8).half()},
        "v must have the dtype of q, torch.float32, got torch.float16",
    ),
    "head dim of k": (
        {"k": torch.randn(6, 4, 2, 4)},
        r"k must have shape \[pages, page_size, HK, D\] = \[6, 4, 2, 8\], got \[6, 4, 2, 4\]",
    ),
    "page size of v": (
        {"v": torch.randn(6, 5, 2, 8)},
        r"v must have shape \[pages, page_size, HK, DV\] = \[6, 4, 2, 8\], got \[6, 5, 2, 8\]",
    ),
    "pages of v": ({"v": torch.randn(5, 4, 2, 8)}, "v must have .*6"),
    "columns of k": (
        {"k": torch.randn(6, 4, 2, 16)[..., ::2]},
        r"k must be contiguous along its last axis, got strides \[128, 32, 16, 2\]",
    ),
    "64-bit table": ({"page_table": torch.zeros(2, 3).long()}, "page_table must be int32, got torch.int64"),
    "a table of three": (
        {"page_table": torch.zeros(3, 3).int()},
        r"page_table must have shape \[B, P\] = \[2, P\], got \[3, 3\]",
    ),
    "a flat table": ({"page_table": ints(0, 1)}, r"page_table must have shape \[B, P\] = \[2, P\], got \[2\]"),
    "columns of the table": (
        {"page_table": torch.zeros(3, 2).int().t()},
        r"page_table must be contiguous along its last axis, got strides \[1, 2\]",
    ),
    "a table elsewhere": (
        {"page_table": torch.zeros(2, 3, dtype=torch.int32, device="meta")},
        "page_table must be on the device of q, cpu, got meta",
    ),
    "too few pages a sequence": (
        {"max_seqlen_k": 13},
        "page_table must have pages for max_seqlen_k = 13 keys, got 3 of 4 positions, which hold 12",
    ),
}
LENGTHS: dict[str, tuple[dict[str, Any], str]] = {
    "a page that is none": (
        {"page_table": torch.tensor([[5, 0, -1], [2, 6, 99]], dtype=torch.int32)},
        r"page_table\[1, 1\] must be from 0 to 5, got 6",
    ),
    "a negative page": (
        {"page_table": torch.tensor([[-1, 0, -1], [2, 3, 99]], dtype=torch.int32)},
        r"page_table\[0, 0\] must be from 0 to 5, got -1",
    ),
    "more keys than the maximum": (
        {"max_seqlen_k": 6},
        "max_seqlen_k must be at least 7, the length of sequence 1, got 6",
    ),
    "backwards": ({"cu_seqlens_k": ints(0, 7, 6)}, "cu_seqlens_k must not decrease, got 7 and then 6 at index 2"),
    "a negative length": ({"seqused_k": ints(-1, 7)}, "seqused_k must be from 0 at index 0, got -1"),
    "more used keys than the maximum": (
        {"seqused_k": ints(5, 8)},
        "max_seqlen_k must be at least 8, the length of sequence 1, got 7",
    ),
}


@pytest.mark.parametrize("why", [*BAD, *LENGTHS])
def test_bad_input(why):
    """Each broken rule is named. Lengths and pages on a CPU are always read; so are they with ``FLASHMOE_CHECK=1``."""
    changes, message = {**BAD, **LENGTHS}[why]
    flash_attention_varlen(**paged_call())  # what is prepared must not serve what only looks like it
    with pytest.raises(InputError, match=message):
        flash_attention_varlen(**paged_call(**changes))
    if why in BAD and why != "pages of v":
        with pytest.raises(InputError, match=message):
            explain_varlen(**paged_call(**changes))


def test_pages_that_nobody_sees_are_not_checked():
    """Behind the last key, before the window of the first row, and of a sequence without queries."""
    gone = torch.tensor([[99, 0, -1], [2, 3, 99]], dtype=torch.int32)
    flash_attention_varlen(**paged_call(page_table=gone, cu_seqlens_q=ints(0, 1, 6)), causal=True, window=(0, -1))
    with pytest.raises(InputError, match=r"page_table\[0, 0\] must be from 0 to 5, got 99"):
        flash_attention_varlen(**paged_call(page_table=gone, cu_seqlens_q=ints(0, 1, 6)), causal=True, window=(1, -1))
    flash_attention_varlen(**paged_call(page_table=gone, cu_seqlens_q=ints(0, 0, 5)))
    flash_attention_varlen(**paged_call(page_table=gone, seqused_k=ints(0, 7)))
    places = paged_call(cu_seqlens_k=ints(100, 105, 112))  # only differences count
    assert torch.equal(
        flash_attention_varlen(**places), flash_attention_varlen(**{**places, "cu_seqlens_k": ints(0, 5, 12)})
    )
    used = {**places, "cu_seqlens_k": ints(9, 0, -4), "seqused_k": ints(5, 7)}  # not even these
    assert torch.equal(flash_attention_varlen(**places), flash_attention_varlen(**used))


def test_dropout_and_gradients_are_refused_by_name():
    call = paged_call(sinks=torch.randn(4, requires_grad=True), bias=torch.randn(1, 1, 5, 7, requires_grad=True))
    state = torch.get_rng_state()
    for attend in (flash_attention_varlen, explain_varlen):
        with pytest.raises(UnsupportedError, match=r"dropout_p must be 0 with a page_table, .* got 0\.1"):
            attend(**call, dropout_p=0.1)
    assert torch.equal(torch.get_rng_state(), state), "no seed was drawn"
    call["k"].requires_grad_()
    with pytest.raises(
        UnsupportedError, match="there is no backward with a page_table, and gradients are required of k, sinks, bias"
    ):
        flash_attention_varlen(**call)
    explain_varlen(**call)
    with torch.no_grad():
        flash_attention_varlen(**call)


def operator_arguments(call: dict[str, Any], *, return_lse: bool) -> tuple[Any, ...]:
    *needed, longest_q, longest_k, table = call.values()
    given = torch.ones(4), torch.ones(2, 4), torch.ones(2, 1, 5, 7), None, ints(3, 7)
    return (*needed, table, longest_q, longest_k, True, 0.5, 3, -1, 2.0, *given, 0, False, return_lse, "auto")


def test_compile_and_opcheck_on_cpu():
    """The operator traces whole graphs, also with a number of pages that changes, and its fake fits."""
    bias = torch.randn(2, 1, 5, 7)

    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, page_table):
        options: dict[str, Any] = {"causal": True, "window": (3, -1), "softcap": 2.0, "return_lse": True, "bias": bias}
        return flash_attention_varlen(q + 1, k, v, cu_seqlens_q, cu_seqlens_k, 5, 7, page_table=page_table, **options)

    tensors = [value for value in paged_call().values() if isinstance(value, torch.Tensor)]
    compiled = torch.compile(attend, fullgraph=True, backend="eager", dynamic=True)
    torch.testing.assert_close(compiled(*tensors), attend(*tensors))
    tensors[1:3] = torch.randn(9, 4, 2, 8), torch.randn(9, 4, 2, 8)
    tensors[-1] = torch.randint(9, (2, 7), dtype=torch.int32)
    torch.testing.assert_close(compiled(*tensors), attend(*tensors))
    operator = torch.ops.flashmoe_science.attention_varlen_paged
    for return_lse in (False, True):
        arguments = operator_arguments(paged_call(), return_lse=return_lse)
        torch.library.opcheck(operator, arguments)
        real = operator(*arguments)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            fake = operator(*arguments)
        assert [(t.shape, t.stride()) for t in fake] == [(t.shape, t.stride()) for t in real]


def test_prepared_calls_serve_any_number_of_pages_and_see_every_other_change():
    calls._prepared.clear()
    call = paged_call()
    first = flash_attention_varlen(**call)
    more = {"k": torch.cat((call["k"], call["k"])), "v": torch.cat((call["v"], call["v"]))}
    wider = torch.nn.functional.pad(call["page_table"], (0, 5), value=-1)[:, :-2]
    assert torch.equal(flash_attention_varlen(**{**call, **more}), first)
    assert len(calls._prepared) == 1
    assert torch.equal(flash_attention_varlen(**{**call, "page_table": wider}), first)
    assert len(calls._prepared) == 2  # rows of the table are further apart
    assert torch.equal(flash_attention_varlen(**{**call, "page_table": wider[:, :4]}), first)
    assert len(calls._prepared) == 2
    smaller = {name: call[name].view(12, 2, 2, 8) for name in "kv"}
    pages = torch.tensor([[10, 11, 0], [4, 5, 6]], dtype=torch.int32)
    changed = [{}, smaller | {"page_table": torch.tensor([[0, 1, 2, 3]] * 2).int()}, {"page_table": pages % 6}]
    results = [flash_attention_varlen(**{**call, **changes}) for changes in changed]
    for one, other in itertools.combinations(results, 2):
        assert not torch.equal(one, other)


def test_a_plan_says_which_kernels_do_not_serve_pages():
    problem = AttentionProblem(8, 32, 8, 4096, 4096, 128, 128, "bf16", causal=True, packed=True, page_size=16)
    plan = plan_attention(problem, SPECS["H200"])
    assert plan.kernel == "forward_triton"
    assert "forward_features_gluon_sm90 too (it does not serve a page table)" in plan.reason
    assert problem.describe() == "b8_h32_8_s4096_d128_bf16_causal_packed_page16"
    assert problem.extras == ("cu_seqlens_q", "cu_seqlens_k", "page_table")
    with pytest.raises(
        UnsupportedError, match=r"forward_features_gluon_sm90 does not serve .*_page16: it .* a page table"
    ):
        plan_attention(problem, SPECS["H200"], "forward_features_gluon_sm90")
    with pytest.raises(InputError, match="page_size must be 0 or more, and 0 unless sequences are packed, got 16"):
        AttentionProblem(8, 32, 8, 512, 4096, 128, 128, "bf16", page_size=16)
