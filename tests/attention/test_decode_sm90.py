"""Attention to a cache on Hopper where values are columns of the keys: when it is chosen, and that it compiles."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Hashable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science import UnsupportedError, explain_with_kv_cache
from flashmoe_science.attention.decode.plan import plan_with_kv_cache
from flashmoe_science.attention.decode.prepare import pointer_names, prepare_cache_kernels
from flashmoe_science.attention.decode.problem import CacheProblem
from flashmoe_science.gpu.compile import compile_kernel, read_resources
from flashmoe_science.gpu.launch import count_parameters
from flashmoe_science.gpu.occupancy import occupancy
from flashmoe_science.gpu.specs import SPECS

from ..exhaustive import all_but_some_with

H200 = SPECS["H200"]
MLA: dict[str, Any] = {"heads_kv": 1, "head_dim": 576, "head_dim_v": 512, "dtype": "bf16", "shared_kv": True}
PROBLEM = CacheProblem(batch=16, heads=128, seqlen_q=1, capacity=8192, page_size=64, **MLA)


def change(**options) -> CacheProblem:
    sizes = {"batch": 16, "heads": 128, "seqlen_q": 1, "capacity": 8192, "page_size": 64}
    return CacheProblem(**{**MLA, **sizes, **options})


@pytest.mark.parametrize("heads", [1, 2, 16, 64, 128, 192])
@pytest.mark.parametrize("page_size", [0, 64, 256])
def test_it_serves_mla_on_hopper(heads, page_size):
    for seqlen_q, causal in ((1, False), (3, True)):
        problem = change(heads=heads, page_size=page_size, seqlen_q=seqlen_q, causal=causal)
        plan = plan_with_kv_cache(problem, H200)
        assert plan.kernel == "decode_gluon_sm90"
        assert "values are columns of the keys" in plan.reason
        tiles_m = -(-heads * seqlen_q // 64)
        assert plan.shares is not None
        assert plan.launches[0].grid == (tiles_m * plan.shares.programs, 1, 1)
        few = heads * seqlen_q <= 16
        assert plan.launches[0].pattern == ("_few_rows_sm90_kernel" if few else "_decode_sm90_kernel")
        assert plan.launches[0].block == ((128 if few else 384), 1, 1)
        assert plan_with_kv_cache(problem, SPECS["B200"]).kernel == "decode_triton"


def test_rows_alone_choose_the_kernel():
    """Also where the bits must not depend on the batch: neither it nor the keys have a say."""
    rows = {(16, 1): True, (16, 2): False, (1, 16): True, (1, 17): False, (8, 2): True, (8, 3): False}
    for (heads, seqlen_q), few in rows.items():
        for options in ({}, {"batch_invariant": True}, {"num_splits": 3}):
            for batch, capacity in ((1, 64), (1, 8192), (64, 4096)):
                plan = plan_with_kv_cache(
                    change(batch=batch, capacity=capacity, heads=heads, seqlen_q=seqlen_q, **options), H200
                )
                assert plan.kernel == "decode_gluon_sm90"
                assert (plan.launches[0].pattern == "_few_rows_sm90_kernel") == few


REFUSED = {
    "no MLA": (change(shared_kv=False, head_dim=128, head_dim_v=128), "the first 512 of 576 columns"),
    "narrower": (change(head_dim=320, head_dim_v=256), "the first 512 of 576 columns"),
    "two": (change(heads_kv=2), "one K/V head"),
    "heads": (change(heads=40), "heads that divide 64 or are a multiple of it, got 1 and 40"),
    "pages": (change(page_size=16), "whole tiles of 64 keys, got pages of 16"),
    "window": (change(window=(100, -1)), "no sliding window"),
    "right": (change(window=(-1, 1), seqlen_q=4), "no sliding window"),
    "features": (change(softcap=3.0, sinks="bf16"), "no softcap and no attention sinks"),
    "alibi": (change(alibi="fp32"), "no ALiBi"),
    "bias": (change(bias="fp32"), "no bias"),
    "padding": (change(has_leftpad=True), "no left padding"),
    "index": (change(has_batch_idx=True, page_size=0), "no batch index"),
    "scale": (change(softmax_scale=-0.5), "positive softmax_scale, of normal size in fp32, got -0.5"),
    "tiny scale": (change(softmax_scale=1e-46), "of normal size in fp32, got 1e-46"),
    "rotary": (change(rotary_dim=64, rotary_dtype="fp32", rotary_length=9000), "no rotary embedding"),
    "expanded q": (change(q_strides=(0, 576, 576, 1)), "expanded"),
    "expanded heads": (change(q_strides=(576, 0, 576, 1)), "expanded"),
    "expanded cache": (change(page_size=0, k_strides=(0, 576, 576, 1)), "expanded"),
    "far": (change(page_size=0, k_strides=(2**39, 576, 576, 1)), "too far apart"),
    "address": (change(pointer_alignment=8), "multiples of 16 bytes"),
    "rows": (change(k_strides=(64 * 580, 580, 576, 1)), "multiples of 16 bytes"),
    "rows of 8 bits": (change(heads=16, is_fp8=True, k_strides=(64 * 584, 584, 576, 1)), "multiples of 16 bytes"),
    "no capacity": (change(capacity=0, page_size=0), "no keys"),
    "large": (change(capacity=2**29, pages=2**23, batch=1), "up to 536870912"),
}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}, {"num_splits": 3}], ids=str)
def test_rows_of_queries_that_start_at_16_bytes_are_served_beside_a_cache_of_8_bits(options, batch):
    """Whatever the batch: a kernel of another batch would have other bits."""
    strides = (9224 if batch > 1 else 0, 584, 0, 1)
    problem = change(batch=batch, heads=16, is_fp8=True, q_strides=strides, **options)
    assert plan_with_kv_cache(problem, H200).launches[0].pattern == "_few_rows_fp8_sm90_kernel"


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_serve_goes_to_triton_and_says_why(name):
    problem, message = REFUSED[name]
    plan = plan_with_kv_cache(problem, H200)
    assert plan.kernel == "decode_triton"
    assert ("decode_gluon_sm90 is passed over (" in plan.reason) == problem.shared_kv
    assert message in plan.reason or not problem.shared_kv
    with pytest.raises(UnsupportedError, match=f"decode_gluon_sm90 does not serve .*{re.escape(message)}"):
        plan_with_kv_cache(problem, H200, "decode_gluon_sm90")


def test_where_there_is_no_hopper():
    with pytest.raises(UnsupportedError, match="it needs sm_90, got sm_100"):
        plan_with_kv_cache(PROBLEM, SPECS["B200"], "decode_gluon_sm90")
    with pytest.raises(UnsupportedError, match="needs a Hopper GPU, got CPU tensors"):
        plan_with_kv_cache(PROBLEM, None, "decode_gluon_sm90")


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages_of_any_size_are_planned_everywhere(page_size):
    """Of MLA: smaller pages than a tile of keys go to the kernel that reads rows one by one."""
    problem = change(page_size=page_size)
    for gpu in ("A100", "H100", "H200", "B200"):
        for promise in ({}, {"batch_invariant": True}, {"num_splits": 4}):
            plan = plan_with_kv_cache(dataclasses.replace(problem, **promise), SPECS[gpu])
            hopper = page_size == 64 and SPECS[gpu].arch == 90
            assert plan.kernel == ("decode_gluon_sm90" if hopper else "decode_triton")
            assert plan.launches
    cache = torch.zeros(8, page_size, 1, 576, dtype=torch.bfloat16)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    q = torch.zeros(2, 16, 1, 576, dtype=torch.bfloat16)
    explained = explain_with_kv_cache(q, cache, cache[..., :512], page_table=table)
    assert (explained.kernel, explained.problem.shared_kv, explained.problem.page_size) == (
        "reference",
        True,
        page_size,
    )


COMPILED = [
    change(heads=heads, seqlen_q=seqlen_q, causal=True, page_size=page_size, return_lse=return_lse, batch=batch,
           has_seqlens=batch > 1, dtype=dtype)
    for (heads, seqlen_q), page_size, (return_lse, batch, dtype) in itertools.product(
        ((8, 1), (16, 3), (128, 1), (192, 2)), (0, 64), ((True, 16, "bf16"), (False, 1, "fp16"))
    )
] + [
    change(heads=16, num_splits=1),
    *(
        change(heads=heads, seqlen_q=rows, causal=True, page_size=page_size, dtype=dtype, return_lse=by_token,
               is_fp8=True, k_by_token=by_token, k_scale_strides=(64, 1, 1) if by_token else (0, 0, 1))
        for (heads, rows), page_size, dtype, by_token in (((16, 1), 64, "bf16", True), ((4, 4), 0, "fp16", False))
    ),
]  # fmt: skip


def properties(problem: CacheProblem) -> Iterator[Hashable]:
    """Part of a tile of rows, one and several; pages or none; with and without LSE."""
    yield "rows", min(2, problem.heads * problem.seqlen_q // 64)
    yield "pages", problem.page_size
    yield "lse", problem.return_lse
    yield "one share", problem.num_splits == 1
    yield "fp8", problem.is_fp8, problem.k_by_token


@pytest.mark.triton
@pytest.mark.parametrize("problem", all_but_some_with(COMPILED, properties), ids=str)
def test_it_compiles(problem):
    """Within shared memory, without spills: the outputs of many rows fill the registers of two warpgroups."""
    plan = plan_with_kv_cache(problem, H200, "decode_gluon_sm90")
    decode = prepare_cache_kernels(plan)[0]
    few = problem.packed_rows <= 16
    few_kernel = "_few_rows_fp8_sm90_kernel" if problem.is_fp8 else "_few_rows_sm90_kernel"
    assert decode.source.name == (few_kernel if few else "_decode_sm90_kernel")
    found = read_resources(decode.source, 90)
    assert found.spill_bytes == 0
    assert found.shared_memory_bytes <= H200.shared_memory_per_block_bytes
    resident = occupancy(
        H200, threads=plan.launches[0].block[0], registers=found.registers,
        shared_memory_bytes=found.shared_memory_bytes,
    )  # fmt: skip
    assert plan.config is not None
    assert resident.blocks >= plan.config.blocks_per_sm
    # 36 for scores of 576 columns; 4 for each half of the output, or for each 64 columns of it.
    assert sum(count for name, count in found.instructions.items() if "GMMA" in name) == (68 if few else 44)
    count_parameters(decode.source, compile_kernel(decode.source, 90).asm["ptx"])


def test_a_launch_is_given_each_tensor_once():
    """The maps of the columns behind the first 512 repeat the addresses of the first, and come behind all pointers."""
    kernel = prepare_cache_kernels(plan_with_kv_cache(change(return_lse=True), H200))[0]
    names = ("q_ptr", "k_ptr", "page_table_ptr", "seqlens_ptr", "o_ptr", "lse_ptr", "o_part_ptr", "sums_part_ptr")
    assert pointer_names(kernel) == names
    order = [name for name, _ in kernel.source.signature]
    assert order.index("q_more_desc") == len(names)
    assert [tensor_map.of for tensor_map in kernel.tensor_maps] == [None, None, 0, 1]
    scalars = [name for name, kind in kernel.source.signature if kind in ("i32", "i64", "fp32")]
    given = dict(zip(scalars, kernel.scalars, strict=True))
    assert given["sizes.capacity"] == 8192
    assert given["scale_log2"] == pytest.approx(576**-0.5 * 1.4426950408889634)
    groups = list(dict.fromkeys(name.partition(".")[0] for name in scalars))
    assert [name for name in kernel.source.function.arg_names if name in groups] == groups
