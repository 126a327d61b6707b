"""Which kernel serves which problem, and what the plan says of it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from flashmoe_science import InputError, UnsupportedError, explain_moe
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.moe.plan import (
    MAX_FEW_PAIRS,
    MAX_PAIRS_SORTED_AT_ONCE,
    NARROW,
    TABLES,
    TileConfig,
    choose_tile,
    most_tiles,
    plan_moe,
    workspace_sizes,
)
from flashmoe_science.moe.problem import MoeProblem

from .cases import Case, make_tensors

QWEN3 = MoeProblem(1, 128, 8, 2048, 768, "bf16")


def with_tokens(tokens: int, **change) -> MoeProblem:
    return dataclasses.replace(QWEN3, tokens=tokens, **change)


@pytest.mark.parametrize(
    ("tokens", "kernel", "steps"),
    [
        (1, "gemv_triton", ("gemv_up", "gemv_down")),
        (2, "few_triton", ("up", "down", "combine")),
        (MAX_FEW_PAIRS // 8, "few_triton", ("up", "down", "combine")),
        (MAX_FEW_PAIRS // 8 + 1, "grouped_triton", ("sort", "up", "down", "combine")),
        (MAX_PAIRS_SORTED_AT_ONCE // 8, "grouped_triton", ("sort", "up", "down", "combine")),
        (MAX_PAIRS_SORTED_AT_ONCE // 8 + 1, "grouped_triton", ("count", "sum", "place", "up", "down", "combine")),
    ],
)
def test_tokens_decide(tokens, kernel, steps):
    plan = plan_moe(with_tokens(tokens), SPECS["H200"])
    assert (plan.kernel, plan.steps) == (kernel, steps)
    assert len(plan.launches) == len(steps)


def test_nothing_is_launched_for_no_tokens():
    assert plan_moe(with_tokens(0), SPECS["H200"]).launches == ()


def test_one_tile_serves_any_number_of_tokens_when_batch_invariant():
    plans = [plan_moe(with_tokens(tokens, batch_invariant=True), SPECS["H200"]) for tokens in (1, 5, 64, 4000)]
    assert {(plan.kernel, plan.config) for plan in plans} == {("grouped_triton", plans[0].config)}
    for kernel in ("gemv_triton", "few_triton"):
        with pytest.raises(UnsupportedError, match="a token would get other bits"):
            plan_moe(with_tokens(1, batch_invariant=True), SPECS["H200"], kernel)


def test_a_forced_kernel_that_does_not_serve_is_refused():
    with pytest.raises(UnsupportedError, match=r"gemv_triton does not serve .*: it serves one token, got 2"):
        plan_moe(with_tokens(2), SPECS["H200"], "gemv_triton")
    with pytest.raises(UnsupportedError, match="up to 128 pairs of a token and an expert, got 160"):
        plan_moe(with_tokens(20), SPECS["H200"], "few_triton")
    with pytest.raises(UnsupportedError, match="reads the routing on the host"):
        plan_moe(with_tokens(20), SPECS["H200"], "reference")
    with pytest.raises(UnsupportedError, match="kernels need sm_80 or newer"):
        plan_moe(with_tokens(2), dataclasses.replace(SPECS["A100"], arch=75))


@pytest.mark.parametrize("gpu", ["A100", "L4", "H200", "B200", "RTX 5090"])
def test_tiles_grow_with_the_rows_of_an_expert(gpu):
    tiles = [choose_tile(with_tokens(tokens), SPECS[gpu].arch) for tokens in (32, 300, 600, 1000, 32768)]
    assert [tile.block_m for tile in tiles] == sorted(tile.block_m for tile in tiles)
    assert (tiles[0].block_m, tiles[-1].block_m) == (16, 128)


def test_rows_that_start_anywhere_have_a_narrow_tile():
    for change in ({"inter": 767}, {"hidden": 2047}, {"pointer_alignment": 2}, {"x_strides": (2049, 1)}):
        sizes: dict[str, Any] = {"experts": 8, "top_k": 2, "hidden": 64, "inter": 64, **change}
        problem = MoeProblem(tokens=600, dtype="bf16", **sizes)
        assert choose_tile(problem, 90) is NARROW
    assert choose_tile(with_tokens(600, gate_up_strides=(2048 * 1536, 1, 1536)), 90) is NARROW
    turned = with_tokens(
        600, gate_up_strides=(2048 * 1536, 1, 1536), interleaved=True, down_strides=(2048 * 768, 1, 2048)
    )
    assert choose_tile(turned, 90) is not NARROW


@pytest.mark.parametrize("counts", [(1, 0, 0), (16, 16, 16), (17, 1, 1), (0, 0, 100), (15, 31, 33)])
def test_the_table_of_tiles_has_room(counts):
    problem = MoeProblem(max(1, sum(counts)), 3, 1, 16, 16, "bf16")
    for block_m in (16, 32, 64, 128):
        assert sum(-(-count // block_m) for count in counts) <= most_tiles(problem, block_m)


def test_the_workspace_grows_with_pairs_alone():
    for tokens, experts in itertools.product((20, 600, 32768), (8, 512)):
        plan = plan_moe(with_tokens(tokens, experts=experts), SPECS["H200"])
        assert isinstance(plan.config, TileConfig)
        if plan.kernel == "grouped_triton":
            pairs = plan.problem.pairs
            counts = (pairs // 256 + 2) * 2 * (experts + 2)
            assert sum(workspace_sizes(plan).values()) < 3 * pairs + 4 * min(experts, pairs) + 16 + counts
        else:
            assert workspace_sizes(plan) == {}


def test_every_architecture_has_a_table():
    for spec in SPECS.values():
        for dtype in ("fp16", "bf16", "fp32"):
            assert plan_moe(with_tokens(1000, dtype=dtype), spec).config is not None
    assert all(
        config.block_m & (config.block_m - 1) == 0
        for table in TABLES.values()
        for row in table.values()
        for config in row
    )


def test_explain_shows_the_plan():
    tensors = make_tensors(Case("explained"))
    plan = explain_moe(**tensors, activation="swiglu")
    assert plan.kernel == "reference"
    assert "t9_e5_k2_h40_i24_fp32 on CPU: reference" in str(plan)
    text = str(plan_moe(with_tokens(3000, shared_experts=1, shared_inter=768), SPECS["H200"]))
    assert "launch  _gate_up_kernel, grid" in text
    assert "shared up  block_n" in text
    assert plan_moe(with_tokens(3000), SPECS["H200"]).as_dict()["config"]["block_m"] == 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "fp8"}, "dtype must be one of fp16, bf16, fp32, got 'fp8'"),
        ({"tokens": -1}, "tokens must not be negative, got -1"),
        ({"experts": 0}, "experts must be at least 1, got 0"),
        ({"ids_dtype": "i16"}, "ids_dtype must be i32 or i64, got 'i16'"),
        ({"shared_experts": 1}, "shared_experts and shared_inter must both be positive or both 0, got 1 and 0"),
        ({"shared_weights": "fp32"}, "shared_weights must be None without shared experts"),
        ({"tokens": 2**30}, r"tokens \* top_k must be less than 2\*\*31"),
    ],
)
def test_a_problem_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(QWEN3, **change)


def test_work_counts_both_products():
    assert QWEN3.flops == 6 * 8 * 2048 * 768
    assert dataclasses.replace(QWEN3, activation="relu2", gate_up_strides=()).flops == 4 * 8 * 2048 * 768
    assert QWEN3.expert_bytes == 3 * 2048 * 768 * torch.bfloat16.itemsize
