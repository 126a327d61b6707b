"""Every tile compiles where it can be chosen: no spills, within shared memory, on the matrix units.

Each on one architecture of its table, in a way that goes round; every kernel around them on each architecture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science.gpu.compile import compile_kernel, read_resources
from flashmoe_science.gpu.launch import count_parameters
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.moe.plan import NARROW, TABLES, TileConfig, make_plan, plan_moe
from flashmoe_science.moe.prepare import PreparedKernel, prepare_moe_kernels
from flashmoe_science.moe.problem import MoeProblem
from flashmoe_science.moe.routing import Routing, kernel_of

pytestmark = pytest.mark.triton

GPUS = {80: "A100", 86: "A10G", 89: "L4", 90: "H200", 100: "B200", 120: "RTX 5090"}
# Sizes of no model: reductions of few steps are unrolled, and many take long to compile.
PLAIN: dict[str, Any] = {"experts": 8, "top_k": 2, "hidden": 4096, "inter": 3072}
WAYS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "gpt-oss": {
        **PLAIN, "hidden": 2880, "inter": 2880, "activation": "swiglu_clamped", "interleaved": True,
        "bias_gate_up": True, "bias_down": True,
    },
    "geglu": {**PLAIN, "activation": "geglu", "bias_gate_up": True},
}  # fmt: skip


def check(kernel: PreparedKernel, arch: int, *, item_bytes: int = 4) -> dict[str, int]:
    found = read_resources(kernel.source, arch)
    assert found.spill_bytes == 0, found.registers
    assert found.shared_memory_bytes <= SPECS[GPUS[arch]].shared_memory_per_block_bytes
    count_parameters(kernel.source, compile_kernel(kernel.source, arch).asm["ptx"])
    if item_bytes == 2:
        assert any("MMA" in opcode for opcode in found.instructions), "the matrix units are not used"
        assert found.instructions.get("LDGSTS"), "operands are copied to shared memory asynchronously"
    return dict(found.instructions)


@dataclass(frozen=True)
class Row:
    """One row of a table on one architecture, and the way in which it is used."""

    arch: int
    config: TileConfig
    item_bytes: int
    way: str

    def __str__(self) -> str:
        return f"sm_{self.arch}-{8 * self.item_bytes}bit-{self.config.block_m}-{self.way}"


def rows() -> Iterator[Row]:
    place = 0
    for archs, table in TABLES.items():
        for item_bytes, configs in table.items():
            for config in configs:
                place += 1
                way = list(WAYS)[place % len(WAYS)] if item_bytes == 2 else "plain"
                yield Row(archs[place % len(archs)], config, item_bytes, way)


@pytest.mark.parametrize("row", [*rows()], ids=str)
def test_every_tile_compiles(row):
    dtype = "bf16" if row.item_bytes == 2 else "fp32"
    problem = MoeProblem(tokens=700, dtype=dtype, **WAYS[row.way])
    plan = make_plan(problem, GPUS[row.arch], row.arch, "grouped_triton", row.config, None, "a test asked")
    kernels = dict(zip(plan.steps, prepare_moe_kernels(plan), strict=True))
    for step in ("up", "down"):
        found = check(kernels[step], row.arch, item_bytes=row.item_bytes)
        if row.arch == 90 and row.config.block_m >= 64 and row.item_bytes == 2:
            assert found["HGMMA"]


@pytest.mark.parametrize("arch", [80, 90])
def test_few_pairs_and_one_token_compile(arch):
    for tokens, experts in ((16, 8), (3, 64)):
        problem = MoeProblem(tokens=tokens, dtype="bf16", **{**PLAIN, "experts": experts}, ids_dtype="i64")
        up, down, combine = prepare_moe_kernels(plan_moe(problem, SPECS[GPUS[arch]], "few_triton"))
        check(up, arch, item_bytes=2)
        check(down, arch, item_bytes=2)
        check(combine, arch)
    problem = MoeProblem(tokens=1, dtype="bf16", **WAYS["gpt-oss"])
    for kernel in prepare_moe_kernels(plan_moe(problem, SPECS[GPUS[arch]])):
        check(kernel, arch)


def test_rows_that_start_anywhere_compile():
    problem = MoeProblem(700, 8, 2, 1001, 999, "bf16")
    plan = plan_moe(problem, SPECS["A100"])
    assert plan.config == NARROW
    for kernel in prepare_moe_kernels(plan):
        check(kernel, 80)


@pytest.mark.parametrize("arch", [80, 90, 120])
def test_sorting_and_routing_compile(arch):
    experts = {80: 8, 90: 128, 120: 512}[arch]
    for tokens in (300, 3000):
        problem = MoeProblem(tokens, experts, 4, 64, 64, "bf16", shared_experts=1, shared_inter=64)
        plan = plan_moe(problem, SPECS[GPUS[arch]])
        for step, kernel in zip(plan.steps, prepare_moe_kernels(plan), strict=True):
            if step in ("sort", "count", "sum", "place", "combine"):
                check(kernel, arch)
    routing = Routing(9, experts, 4, "fp32", (experts, 1), "sigmoid", True, "fp32", 4, 2, 1.0)
    check(kernel_of(dataclasses.replace(routing, groups=1, top_groups=1) if arch != 90 else routing, arch), arch)


def test_arguments_are_given_in_the_order_of_the_kernel():
    """A launch gives values by place: pointers, then scalars."""
    for tokens in (1, 8, 200, 5000):
        for way in WAYS.values():
            problem = MoeProblem(
                tokens=tokens, dtype="bf16", **way, shared_experts=2, shared_inter=64, shared_weights="fp32"
            )
            plan = plan_moe(problem, SPECS["H200"])
            assert len(plan.launches) == len(prepare_moe_kernels(plan))
            for kernel in prepare_moe_kernels(plan):
                constants = dict(kernel.source.constants)
                given = [name for name in kernel.source.function.arg_names if name not in constants]
                assert [name for name, _ in kernel.source.signature] == given
                kinds = [kind.startswith("*") for _, kind in kernel.source.signature]
                assert kinds == sorted(kinds, reverse=True), "pointers come first"
                assert len(kernel.scalars) == kinds.count(False)
                assert len(kernel.tensors) == kinds.count(True)


def test_a_kernel_waits_for_the_one_before_it_on_hopper_and_later():
    for tokens in (1, 8, 3000):
        problem = MoeProblem(tokens=tokens, dtype="bf16", **PLAIN)
        for kernel in prepare_moe_kernels(plan_moe(problem, SPECS["H200"])):
            assert kernel.source.dependent_launch
            if kernel.source.name in ("_count_kernel", "_combine_kernel", "_gemv_down_kernel"):
                assert read_resources(kernel.source, 90).instructions["ACQBULK"] == 1
        for kernel in prepare_moe_kernels(plan_moe(problem, SPECS["L4"])):
            assert not kernel.source.dependent_launch
