"""Tiles of ``decode_triton`` compile without spills, within shared memory, and as many blocks fit on an SM as planned.

`make test` compiles a few rows: each way, architecture, number of rows and width once. `make test-all` compiles every
row on one architecture of its table, and 16 rows of 128 columns on every one, contiguous and paged; the merge and the
append on every architecture.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science.attention.decode.config import DecodeConfig
from flashmoe_science.attention.decode.plan import (
    _FEW,
    _FEW_KEYS,
    _MORE_TO_READ,
    _MORE_TO_READ_IN_FP8,
    _SHORT,
    DECODE_TABLES,
    DecodePlan,
    plan_with_kv_cache,
)
from flashmoe_science.attention.decode.prepare import prepare_cache_kernels
from flashmoe_science.attention.decode.problem import CacheProblem
from flashmoe_science.gpu.compile import compile_kernel, parameter_names, read_resources
from flashmoe_science.gpu.launch import count_parameters
from flashmoe_science.gpu.occupancy import occupancy
from flashmoe_science.gpu.specs import SPECS

from ..exhaustive import all_but, all_but_some_with

pytestmark = pytest.mark.triton

GPUS = {80: "A100", 86: "A10G", 89: "L4", 90: "H200", 100: "B200", 120: "RTX 5090"}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"has_seqlens": False},
    "page16": {"page_size": 16},
    "page64": {"page_size": 64, "batch_invariant": True, "has_leftpad": True},
    "features": {"window": (100, 1), "softcap": 9.0, "sinks": "fp32", "alibi": "fp32", "return_lse": True},
    "wide": {"page_size": 16, "pages": 2**22},
}


@dataclass(frozen=True)
class Row:
    """One row of a table on one architecture, and the way in which it is used."""

    arch: int
    config: DecodeConfig
    item_bytes: int
    columns: int
    way: str
    batch: int = 2
    keys: int = 4096
    is_fp8: bool = False

    def __str__(self) -> str:
        config = self.config
        tile = f"{config.block_m}x{config.block_n}x{self.columns}"
        tile += f"-w{config.num_warps}s{config.num_stages}b{config.blocks_per_sm}"
        return f"sm_{self.arch}-{'fp8' if self.is_fp8 else f'{8 * self.item_bytes}bit'}-{tile}-{self.way}"

    def plan(self) -> DecodePlan:
        dtype = "fp32" if self.item_bytes == 4 else "bf16"
        rows = self.config.block_m // (2 if self.way == "features" else 1)
        mla = self.columns == 512
        problem = CacheProblem(
            batch=self.batch, heads=2 * rows, heads_kv=2, seqlen_q=2 if self.way == "features" else 1,
            capacity=self.keys, head_dim=576 if mla else self.columns, head_dim_v=self.columns, dtype=dtype,
            shared_kv=mla, is_fp8=self.is_fp8, **WAYS[self.way],
        )  # fmt: skip
        plan = plan_with_kv_cache(problem, SPECS[GPUS[self.arch]], "decode_triton")
        assert plan.config == self.config
        return plan


def rows() -> Iterator[Row]:
    place = 0
    for archs, table in DECODE_TABLES.items():
        for (item_bytes, columns), configs in table.items():
            for config in configs:
                place += 1
                yield Row(archs[place % len(archs)], config, item_bytes, columns, list(WAYS)[place % len(WAYS)])
                if item_bytes == 2 and columns == 128 and config.block_m == 16:
                    yield from (
                        Row(arch, config, item_bytes, columns, way) for arch in archs for way in ("plain", "page16")
                    )


def rows_for_more_to_read() -> Iterator[Row]:
    """Tiles of 16 rows, with batches that are large enough for each."""
    batches = {192 << 10: 8, 384 << 10: 64}
    for is_fp8, tables in ((False, _MORE_TO_READ), (True, _MORE_TO_READ_IN_FP8)):
        for archs, table in tables.items():
            for arch, ((item_bytes, columns), steps) in itertools.product(archs, table.items()):
                for (least, config), way in itertools.product(steps, ("plain", "page16", "wide")):
                    batch = batches[least] * (2 if is_fp8 else 1)
                    yield Row(arch, config, item_bytes, columns, way, batch, is_fp8=is_fp8)
    for archs, few in _FEW.items():
        for arch, ((item_bytes, columns), config) in itertools.product(archs, few.items()):
            yield Row(arch, config, item_bytes, columns, "plain", 1, _FEW_KEYS)
    for archs, short in _SHORT.items():
        for arch, ((item_bytes, columns), config) in itertools.product(archs, short.items()):
            for way in ("plain", "page16", "wide"):
                yield Row(arch, config, item_bytes, columns, way, 200)


def properties(row: Row) -> Iterator[Hashable]:
    """Every way; every number of rows, of keys and of columns of a tile; on every architecture some."""
    yield row.way
    yield row.arch
    yield "rows", row.config.block_m
    yield "columns", row.columns, row.item_bytes


ROWS = dict.fromkeys([*rows(), *rows_for_more_to_read()])


@pytest.mark.parametrize("row", all_but_some_with(ROWS, properties), ids=str)
def test_every_tile_compiles(row):
    plan = row.plan()
    decode = next(kernel for kernel in prepare_cache_kernels(plan) if kernel.source.name == "_decode_kernel")
    found, gpu = read_resources(decode.source, row.arch), SPECS[GPUS[row.arch]]
    assert found.spill_bytes == 0, found.registers
    assert found.shared_memory_bytes <= gpu.shared_memory_per_block_bytes
    resident = occupancy(
        gpu, threads=32 * row.config.num_warps, registers=found.registers,
        shared_memory_bytes=found.shared_memory_bytes,
    )  # fmt: skip
    assert resident.blocks >= row.config.blocks_per_sm - (row.way == "wide"), resident
    count_parameters(decode.source, compile_kernel(decode.source, row.arch).asm["ptx"])
    if row.item_bytes == 2:
        assert any("MMA" in opcode for opcode in found.instructions), "the matrix units are not used"
        assert found.instructions.get("LDGSTS"), "K and V are copied to shared memory asynchronously"


@pytest.mark.one_triton
@pytest.mark.parametrize("arch", all_but(GPUS, "90"))
def test_a_bias_compiles(arch):
    """In every tile of 16 rows that decoding takes, and in the tile of many rows."""
    for head_dim, heads, page_size, shared in ((64, 32, 0, False), (128, 32, 16, False), (256, 512, 0, False),
                                               (576, 16, 64, True)):  # fmt: skip
        problem = CacheProblem(
            batch=4, heads=heads, heads_kv=1 if shared else 8, seqlen_q=1, capacity=8192, head_dim=head_dim,
            head_dim_v=512 if shared else head_dim, dtype="bf16", page_size=page_size, shared_kv=shared, bias="fp32",
        )  # fmt: skip
        kernels = prepare_cache_kernels(plan_with_kv_cache(problem, SPECS[GPUS[arch]]))
        decode = next(kernel for kernel in kernels if kernel.source.name == "_decode_kernel")
        found = read_resources(decode.source, arch)
        assert found.spill_bytes == 0, (head_dim, found.registers)
        assert found.shared_memory_bytes <= SPECS[GPUS[arch]].shared_memory_per_block_bytes


@pytest.mark.parametrize("arch", all_but(GPUS, "80", "90"))
def test_the_merge_and_the_append_compile(arch):
    for balanced in (False, True):
        problem = CacheProblem(
            batch=70 if balanced else 1, heads=32, heads_kv=8, seqlen_q=1, capacity=9000, head_dim=128, head_dim_v=80,
            dtype="fp16", seqlen_new=1, has_leftpad=balanced, sinks="bf16", rotary_dim=64, rotary_dtype="fp32",
            rotary_interleaved=balanced, page_size=16, return_lse=True,
        )  # fmt: skip
        append, _, merge = prepare_cache_kernels(plan_with_kv_cache(problem, SPECS[GPUS[arch]]))
        for kernel in (append, merge):
            found = read_resources(kernel.source, arch)
            assert found.spill_bytes == 0
            assert found.shared_memory_bytes <= 16384


def test_arguments_are_given_in_the_order_of_the_kernel():
    """A launch gives values by place: pointers, then scalars."""
    for ways in WAYS.values():
        problem = CacheProblem(
            **{"batch": 3, "heads": 8, "heads_kv": 2, "seqlen_q": 2, "capacity": 4096, "head_dim": 64, **ways},
            head_dim_v=64, dtype="bf16", seqlen_new=1 if ways.get("has_seqlens", True) else 0,
        )  # fmt: skip
        for kernel in prepare_cache_kernels(plan_with_kv_cache(problem, SPECS["H200"])):
            constants = dict(kernel.source.constants)
            given = [name for name in parameter_names(kernel.source.function) if name not in constants]
            assert [name for name, _ in kernel.source.signature] == given
            kinds = [kind.startswith("*") for _, kind in kernel.source.signature]
            assert kinds == sorted(kinds, reverse=True), "pointers come first"
            assert len(kernel.scalars) == kinds.count(False)


def test_a_kernel_waits_for_the_one_before_it_on_hopper_and_later():
    problem = CacheProblem(1, 32, 8, 1, 4096, 128, 128, "bf16", seqlen_new=1)
    for kernel in prepare_cache_kernels(plan_with_kv_cache(problem, SPECS["H200"])):
        assert kernel.source.dependent_launch
        assert read_resources(kernel.source, 90).instructions["ACQBULK"] == 1
    for kernel in prepare_cache_kernels(plan_with_kv_cache(problem, SPECS["L4"])):
        assert not kernel.source.dependent_launch


def test_keys_asked_for_ahead_wait_for_nothing():
    """Before the queries, and before the kernel before has ended."""
    plan = plan_with_kv_cache(CacheProblem(1, 32, 8, 1, 1000, 128, 128, "bf16", has_seqlens=False), SPECS["H200"])
    assert plan.config is not None
    assert plan.config.prefetch
    source = prepare_cache_kernels(plan)[0].source
    ptx = compile_kernel(source, 90).asm["ptx"]
    queries = ptx.index("ld.global.v4.b32")
    assert 0 < ptx.index("prefetch.global.L2") < ptx.index("griddepcontrol.wait") < queries < ptx.index("cp.async")
    assert ptx.count("griddepcontrol.wait") == 1
    found = read_resources(source, 90)
    assert found.spill_bytes == 0
    assert found.instructions["CCTL"] == ptx.count("prefetch.global.L2")


@pytest.mark.parametrize(
    "way",
    [{"batch": 2}, {"capacity": 1025}, {"has_seqlens": True}, {"page_size": 16}, {"batch_invariant": True}],
    ids=str,
)
def test_keys_are_asked_for_ahead_where_that_was_measured_to_pay(way):
    sizes = {
        "batch": 1,
        "heads": 32,
        "heads_kv": 8,
        "seqlen_q": 1,
        "capacity": 1000,
        "head_dim": 128,
        "head_dim_v": 128,
    }
    problem = CacheProblem(**{**sizes, "has_seqlens": False, **way}, dtype="bf16")
    config = plan_with_kv_cache(problem, SPECS["H200"]).config
    assert config is not None
    assert not config.prefetch
