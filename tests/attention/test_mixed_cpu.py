"""Mixed batches over pages, without a GPU: contract, plans, sizes, and the kernels in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch

from flashmoe_science import InputError, UnsupportedError, explain_varlen, flash_attention_varlen
from flashmoe_science.attention.forward.plan import plan_attention
from flashmoe_science.attention.mixed.plan import (
    FEW_TABLES,
    fixed_steps,
    mixed_config,
    mixed_passed_over,
    mixed_sizes,
    mixed_slots,
    most_steps,
    round_tokens,
    schedule_of,
)
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.gpu.specs import SPECS

from ..exhaustive import all_but
from ..test_traced_calls import Seen
from .mixed_cases import MIXED_CASES

# Every schedule, both sizes of tiles, bounds on both sides, lengths in use, sinks and ALiBi.
USUAL = ("mixed", "mixed-splits3", "mixed-invariant", "speculative", "behind-invariant", "used-alibi-splits4")


@pytest.mark.triton
@pytest.mark.parametrize("mixed", all_but(MIXED_CASES, *USUAL), ids=str)
def test_kernels_interpreted(mixed, interpreted):
    """The kernels themselves; see ``make_paged`` for what they must not read."""
    interpreted(mixed)


def problem(**changes: Any) -> AttentionProblem:
    """Return prompts and tokens of Llama's heads."""
    heads, heads_kv, head_dim, page = 32, 8, 128, 16
    row = heads_kv * head_dim
    usual: dict[str, Any] = {
        "batch": 64, "heads": heads, "heads_kv": heads_kv, "seqlen_q": 2048, "seqlen_k": 8192, "head_dim": head_dim,
        "head_dim_v": head_dim, "dtype": "bf16", "causal": True, "packed": True, "seqused": "k", "page_size": page,
        "table_stride": 512, "q_strides": (0, head_dim, heads * head_dim, 1),
        "k_strides": (page * row, head_dim, row, 1), "v_strides": (page * row, head_dim, row, 1),
    }  # fmt: skip
    return AttentionProblem(**{**usual, **changes})


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def split_on_the_host(p: AttentionProblem, queries: list[int], keys: list[int]) -> tuple[list[int], ...]:
    """Count programs, merges and partial results of one K/V head as ``work_triton`` does."""
    config = mixed_config(p, 90)
    slots = mixed_slots(p, config, 132)
    work = [0, 0]
    rows = [n * p.group for n in queries]
    kind = [int(n > config.few.block_m) for n in rows]
    tile = (config.few, config.many)
    tiles = [cdiv(n * p.group, tile[1].block_m) if c else min(n, 1) for n, c in zip(queries, kind, strict=True)]
    steps = [
        most_steps(dataclasses.replace(p, seqlen_k=n), tile[c], p.group) if n else 1
        for n, c in zip(keys, kind, strict=True)
    ]
    for n, c, length in zip(tiles, kind, steps, strict=True):
        work[c] += n * length
    quotas = [max(cdiv(work[c], slots[c]), (2, 8)[c]) for c in (0, 1)]
    items, kept, merges = [0, 0], [0, 0], 0
    for n, c, length, count in zip(tiles, kind, steps, rows, strict=True):
        if schedule_of(p) == "lengths":
            each = cdiv(length, max((length + quotas[c] // 2) // quotas[c], 1))
        elif schedule_of(p) == "even":
            each = cdiv(length, p.num_splits)
        else:
            each = length if c else min(length, fixed_steps(config.few))
        splits = cdiv(length, each)
        items[c] += n * splits
        if splits > 1:
            kept[c] += n * splits
            merges += cdiv(count, 4)
    return items, kept, [merges]


@pytest.mark.parametrize("options", [{}, {"num_splits": 5}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_grids_and_partial_results_hold_all_batches(options, seed):
    """Whatever the lengths, no more programs and partial results are needed than the sizes have room for."""
    draw = random.Random(seed)
    for _ in range(60):
        batch = draw.choice([1, 2, 7, 64])
        longest = draw.choice([1, 4, 128, 2048])
        heads_kv = draw.choice([1, 2, 8])
        queries = [draw.choice([0, 1, longest, draw.randint(0, longest)]) for _ in range(batch)]
        keys = [draw.choice([0, n, 8192, draw.randint(0, 8192)]) for n in queries]
        window = draw.choice([(-1, -1), (-1, -1), (500, -1)])
        p = problem(
            batch=batch, seqlen_q=longest, heads_kv=heads_kv, heads=heads_kv * draw.choice([1, 3, 8]), window=window,
            **options,
        )  # fmt: skip
        config = mixed_config(p, 90)
        items, kept, (merges,) = split_on_the_host(p, queries, keys)
        sizes = mixed_sizes(p, config, 132, round_tokens(max(1, sum(queries))))
        assert items[0] <= sizes.few_items
        assert items[1] <= sizes.many_items
        assert kept[0] <= sizes.few_slots
        assert kept[1] <= sizes.many_slots
        assert merges <= sizes.merges


def test_grids_are_few_and_never_smaller_than_the_batch():
    """Numbers of tokens are rounded up by an eighth at most, to eight numbers between two powers of two."""
    rounded = [round_tokens(n) for n in range(1, 5000)]
    assert all(n <= up <= n + n // 8 + 1 for n, up in enumerate(rounded, 1))
    assert len({up for up in rounded if 1024 <= up < 2048}) == 8


def test_a_chunk_and_single_tokens_fill_the_machine():
    """One chunk of 512 queries of 8 heads on one K/V head, and one token: both have as many programs as SMs."""
    chunk = problem(batch=1, heads=8, heads_kv=1, seqlen_q=512, seqlen_k=16384)
    items, _, _ = split_on_the_host(chunk, [512], [16384])
    assert 100 <= items[1] <= 200
    token = problem(batch=1, heads=8, heads_kv=1, seqlen_q=1, seqlen_k=65536)
    items, _, _ = split_on_the_host(token, [1], [65536])
    assert items[0] >= 250
    full = problem(batch=64, seqlen_q=1, seqlen_k=4096)
    items, _, _ = split_on_the_host(full, [1] * 64, [4096] * 64)
    assert items[0] == 64  # 512 programs over all heads: no split


def test_plans_of_batch_invariant_calls_do_not_depend_on_the_batch():
    """Tiles and shares are the same for any batch and maxima."""
    plans = [
        mixed_config(problem(batch=batch, seqlen_q=queries, seqlen_k=keys, batch_invariant=True, window=(200, -1)), 90)
        for batch, queries, keys in itertools.product((1, 64), (1, 4, 2048), (128, 100_000))
    ]
    assert len({(plan.few, plan.many) for plan in plans}) == 1


def test_every_row_of_the_tables_has_a_width():
    for table in FEW_TABLES.values():
        assert set(table) == {64, 128, 256}
        for rows in table.values():
            assert [row.block_m for row, _ in rows] == sorted(row.block_m for row, _ in rows)
            assert rows[0][0].block_m == 16


PASSED_OVER: dict[str, tuple[dict[str, Any], str]] = {
    "prompts": ({"batch": 8, "seqlen_q": 2048}, "row tiles of the longest of 8 prompts fill the GPU"),
    "little": ({"batch": 1, "seqlen_q": 1, "seqlen_k": 16000}, "measured with 16384 keys and more"),
    "dim": ({"head_dim": 256, "head_dim_v": 256}, "heads of 64 and 128"),
    "dims": ({"head_dim_v": 64}, "heads of 64 and 128"),
    "full": ({"causal": False}, "measured causal"),
    "pages": ({"page_size": 8}, "pages of 16 and more"),
    "window": ({"window": (100, -1)}, "measured without features"),
}


def test_auto_takes_it_for_what_was_measured():
    for changes in ({}, {"batch": 1, "heads": 8, "seqlen_q": 512, "seqlen_k": 16384}, {"batch": 64, "seqlen_q": 2048}):
        for gpu in ("H100", "H200"):
            plan = plan_attention(problem(**changes), SPECS[gpu])
            assert plan.kernel == "mixed_triton"
            assert "it splits the keys of prompts and tokens over pages" in plan.reason
    for gpu in ("A100", "L4", "B200"):
        assert plan_attention(problem(), SPECS[gpu]).kernel == "forward_triton"
        assert mixed_passed_over(problem(), SPECS[gpu]) == "it was measured on sm_90 alone"


@pytest.mark.parametrize("why", PASSED_OVER)
def test_what_was_not_measured_is_left_to_the_other_kernel(why):
    changes, message = PASSED_OVER[why]
    assert plan_attention(problem(**changes), SPECS["H100"]).kernel == "forward_triton"
    assert message in str(mixed_passed_over(problem(**changes), SPECS["H100"]))


def test_auto_asks_for_it_where_splits_are_asked_for():
    gpu = SPECS["H100"]
    assert plan_attention(problem(num_splits=3), gpu).kernel == "mixed_triton"
    assert plan_attention(problem(batch_invariant=True), gpu).kernel == "mixed_triton"
    plan = plan_attention(problem(), gpu, "mixed_triton")
    names = [launch.pattern for launch in plan.launches]
    assert names == ["_plan_work_kernel", "_mixed_kernel", "_mixed_kernel", "_merge_mixed_kernel"]
    decoding = plan_attention(problem(seqlen_q=1, seqlen_k=128), gpu, "mixed_triton")
    assert [launch.pattern for launch in decoding.launches][:2] == ["_plan_work_kernel", "_mixed_kernel"]
    assert "mixed_triton" in str(plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 0, "num_splits": 2}, "num_splits and batch_invariant need mixed_triton: it serves packed"),
        ({"dtype": "fp32", "batch_invariant": True}, "need mixed_triton: it serves fp16 and bf16, got fp32"),
        ({"bias": "fp32", "num_splits": 2}, "need mixed_triton: it does not serve a bias"),
        (
            {
                "head_dim": 40,
                "head_dim_v": 24,
                "k_strides": (5120, 40, 320, 1),
                "v_strides": (3072, 24, 192, 1),
                "num_splits": 2,
            },
            "need mixed_triton: it serves head sizes that are multiples of 16, got 40 and 24",
        ),
        (
            {"head_dim_v": 64, "head_dim": 48, "num_splits": 2},
            "need mixed_triton: it serves equal head sizes, or 64 and 128",
        ),
    ],
)
def test_splits_that_nobody_serves_are_refused(changes, message):
    for gpu in (SPECS["H100"], None):
        with pytest.raises(UnsupportedError, match=message):
            plan_attention(problem(**changes), gpu)


def test_other_kernels_refuse_splits():
    with pytest.raises(UnsupportedError, match="num_splits and batch_invariant are for mixed_triton"):
        plan_attention(problem(num_splits=2), SPECS["H100"], "forward_triton")


def call(**changes: Any) -> dict[str, Any]:
    usual = {
        "q": torch.randn(9, 4, 16).half(),
        "k": torch.randn(6, 4, 2, 16).half(),
        "v": torch.randn(6, 4, 2, 16).half(),
        "cu_seqlens_q": torch.tensor([0, 4, 9], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 5, 12], dtype=torch.int32),
        "max_seqlen_q": 5,
        "max_seqlen_k": 7,
        "page_table": torch.tensor([[5, 0, -1], [2, 3, 99]], dtype=torch.int32),
    }
    return {**usual, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_splits": 257}, "num_splits must be from 0 .* to 256, got 257"),
        ({"num_splits": -1}, "num_splits must be from 0 .* to 256, got -1"),
        ({"num_splits": 2.0}, "num_splits must be an integer from 0 to 256, got 2.0"),
        ({"num_splits": True}, "num_splits must be an integer from 0 to 256, got True"),
        ({"batch_invariant": 1}, "batch_invariant must be True or False, got 1"),
    ],
)
def test_bad_options(changes, message):
    with pytest.raises(InputError, match=message):
        flash_attention_varlen(**call(**changes))


def test_a_traced_call_refuses_a_number_that_torch_cannot_hold():
    with Seen(), pytest.raises(InputError, match="num_splits must be an integer from 0 to 256, got 1180591620717411"):
        flash_attention_varlen(**call(num_splits=2**70))


def test_cpu_tensors_run_the_reference_with_splits():
    expected = flash_attention_varlen(**call(), causal=True)
    given = call()
    o = flash_attention_varlen(**{**given, "num_splits": 2}, causal=True)
    assert o.shape == expected.shape
    assert explain_varlen(**given, num_splits=2).kernel == "reference"
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET=1 runs it"):
        flash_attention_varlen(**given, kernel="mixed_triton")


@pytest.mark.parametrize("splits", [(3, False), (0, True), (1, True)], ids=str)
def test_compile_and_opcheck(splits):
    """The operator traces whole graphs where bits are promised, and its fake implementation fits."""
    given = call(page_table=torch.tensor([[5, 0], [2, 3]], dtype=torch.int32))
    promise = {"num_splits": splits[0], "batch_invariant": splits[1]}
    expected = flash_attention_varlen(**given, **promise, causal=True)
    compiled = torch.compile(flash_attention_varlen, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(**given, **promise, causal=True), expected)
    *needed, longest_q, longest_k, table = given.values()
    arguments = (
        *needed, table, longest_q, longest_k, True, None, -1, -1, 0.0, None, None, None, None, None, *splits, False,
        "auto",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.flashmoe_science.attention_varlen_paged, arguments)


def test_one_split_that_is_batch_invariant_has_tiles_of_any_batch():
    """What drop-ins make of ``num_splits=1``: a promise of bits that the maxima do not decide."""
    plans = [
        mixed_config(problem(batch=batch, seqlen_q=queries, num_splits=1, batch_invariant=True), 90)
        for batch, queries in itertools.product((1, 64), (1, 4, 2048))
    ]
    assert len({(plan.few, plan.many) for plan in plans}) == 1
    assert schedule_of(problem(num_splits=1, batch_invariant=True)) == "even"
