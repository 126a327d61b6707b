"""Tiles of the experts' kernels compile without spills, within shared memory, and use the matrix units.

`make test` compiles a few rows: each architecture, way, dtype and number of rows once. `make test-all` compiles every
row on one architecture of its table, and the kernels around them on each architecture.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science.gpu.compile import KernelSource, compile_kernel, read_resources
from flashmoe_science.gpu.launch import count_parameters
from flashmoe_science.gpu.signature import PreparedKernel
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.gpu.tensor_map import TensorMap
from flashmoe_science.moe.backward.plan import GRADIENTS, make_backward_plan, plan_backward
from flashmoe_science.moe.backward.prepare import prepare_backward_kernels
from flashmoe_science.moe.grouped import plan_sm90 as hopper_plan
from flashmoe_science.moe.grouped.prepare_sm90 import ragged
from flashmoe_science.moe.plan import NARROW, TABLES, TileConfig, make_plan, plan_moe
from flashmoe_science.moe.prepare import prepare_moe_kernels
from flashmoe_science.moe.problem import MoeProblem, Routing
from flashmoe_science.moe.routing.prepare import backward_kernel_of, kernel_of
from flashmoe_science.moe.tiles import BACKWARD_TABLES, SHARED_TABLES, SMALL_BACKWARD, BackwardConfig

from ..exhaustive import all_but, all_but_some_with

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
        return f"sm_{self.arch}-{8 * self.item_bytes}bit-{self.config.block_m}x{self.config.up.block_n}-{self.way}"


def rows() -> Iterator[Row]:
    place = 0
    for archs, table in TABLES.items():
        for item_bytes, configs in table.items():
            for config in configs:
                place += 1
                way = list(WAYS)[place % len(WAYS)] if item_bytes == 2 else "plain"
                yield Row(archs[place % len(archs)], config, item_bytes, way)
    for arch, table in SHARED_TABLES.items():
        known = {config for archs, others in TABLES.items() if arch in archs for config in others[2]}
        for item_bytes, configs in table.items():
            yield from (Row(arch, config, item_bytes, "plain") for config in configs if config not in known)


def properties(row: Row) -> Iterator[Hashable]:
    """Every number of rows of a tile, every way, both widths of elements; on every architecture some."""
    yield "rows", row.config.block_m
    yield row.way
    yield row.arch
    yield "bytes", row.item_bytes


@pytest.mark.parametrize("row", all_but_some_with(rows(), properties), ids=str)
def test_every_tile_compiles(row):
    dtype = "bf16" if row.item_bytes == 2 else "fp32"
    problem = MoeProblem(tokens=700, dtype=dtype, **WAYS[row.way])
    plan = make_plan(problem, GPUS[row.arch], row.arch, "grouped_triton", row.config, None, "a test asked")
    kernels = dict(zip(plan.steps, prepare_moe_kernels(plan), strict=True))
    for step in ("up", "down"):
        found = check(kernels[step], row.arch, item_bytes=row.item_bytes)
        if row.arch == 90 and row.config.block_m >= 64 and row.item_bytes == 2:
            assert found["HGMMA"]


@pytest.mark.parametrize("arch", all_but(GPUS, "90"))
def test_few_pairs_and_one_token_compile(arch):
    for tokens, experts in ((16, 8), (3, 64), (64, 8)):
        problem = MoeProblem(tokens=tokens, dtype="bf16", **{**PLAIN, "experts": experts}, ids_dtype="i64")
        up, down, combine = prepare_moe_kernels(plan_moe(problem, SPECS[GPUS[arch]], "few_triton"))
        check(up, arch, item_bytes=2)
        check(down, arch, item_bytes=2)
        check(combine, arch)
    problem = MoeProblem(tokens=1, dtype="bf16", **WAYS["gpt-oss"])
    for kernel in prepare_moe_kernels(plan_moe(problem, SPECS[GPUS[arch]])):
        check(kernel, arch)


@pytest.mark.one_triton
def test_rows_that_start_anywhere_compile():
    problem = MoeProblem(700, 8, 2, 1001, 999, "bf16")
    plan = plan_moe(problem, SPECS["A100"])
    assert plan.config == NARROW
    for kernel in prepare_moe_kernels(plan):
        check(kernel, 80)


@pytest.mark.parametrize("arch", all_but(GPUS, "90"))
def test_sorting_and_routing_compile(arch):
    experts = {80: 8, 86: 60, 89: 16, 90: 128, 100: 256, 120: 512}[arch]
    for tokens in (300, 3000):
        problem = MoeProblem(tokens, experts, 4, 64, 64, "bf16", shared_experts=1, shared_inter=64)
        plan = plan_moe(problem, SPECS[GPUS[arch]])
        for step, kernel in zip(plan.steps, prepare_moe_kernels(plan), strict=True):
            if step in ("sort", "count", "sum", "place", "combine"):
                check(kernel, arch)
    routing = Routing(9, experts, 4, "fp32", (experts, 1), "sigmoid", True, "fp32", 4, 2, 1.0)
    check(backward_kernel_of(routing, arch), arch)
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
                kinds = [kind.startswith(("*", "tensordesc")) for _, kind in kernel.source.signature]
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
    routing = Routing(9, 8, 2, "fp32", (8, 1), "softmax", True, "", 1, 1, 1.0)
    for kernel in (kernel_of(routing, 90), backward_kernel_of(routing, 90)):
        assert kernel.grid == (1, 1, 1), "a block routes up to 16 tokens"
    for arch in (89, 90):
        for kernel in (kernel_of(routing, arch), backward_kernel_of(routing, arch)):
            assert kernel.source.dependent_launch == (arch == 90)
            assert dict(kernel.source.constants)["DEPENDENT_LAUNCH"] == (arch == 90)


HOPPER_WAYS: dict[str, dict[str, Any]] = {
    "kept": {**PLAIN, "keep_product": True},
    "gpt-oss": WAYS["gpt-oss"],
    "short": {**PLAIN, "hidden": 136, "inter": 72, "activation": "relu2"},
}


@pytest.mark.parametrize("way", all_but(HOPPER_WAYS, "gpt-oss"))
def test_the_products_for_hopper_compile(way):
    """Nothing spills, all of shared memory is used, and no product waits for the one before it."""
    dtype = "fp16" if way == "short" else "bf16"
    plan = plan_moe(MoeProblem(tokens=3000, dtype=dtype, **HOPPER_WAYS[way]), SPECS["H200"])
    assert plan.kernel == "grouped_gluon_sm90"
    kernels = dict(zip(plan.steps, prepare_moe_kernels(plan), strict=True))
    for step in ("up_sm90", "down_sm90"):
        source = kernels[step].source
        found = read_resources(source, 90)
        assert found.spill_bytes == 0
        assert found.shared_memory_bytes <= SPECS["H200"].shared_memory_per_block_bytes
        compiled = compile_kernel(source, 90)
        count_parameters(source, compiled.asm["ptx"])
        # Four of 16 columns a step: in front of the loop and in it, in both warpgroups.
        assert found.instructions["HGMMA"] in (8, 16)
        assert found.instructions["UTMASTG"], "the output is not stored by TMA"
        assert (found.instructions.get("LDGSTS", 0) > 0) == (step == "up_sm90"), "rows are gathered in the first alone"
        boxes = [layout["block_size"] for layout in compiled.metadata.tensordesc_meta]
        assert [len(box) for box in boxes] == [len(tensor_map.shape) for tensor_map in kernels[step].tensor_maps]


def test_an_output_that_ends_anywhere_wraps_around():
    """The address of (2^30, end, 2^30 - rows + r, part, column) is that of row end - rows + r, modulo 2^64."""
    tensor_map = TensorMap("bf16", *ragged(768, 2))
    for end, rows, row, part, column in ((64, 64, 0, 0, 0), (700, 13, 12, 1, 64), (2**30, 1, 0, 0, 704)):
        place = (2**30, end, 2**30 - rows + row, part, column)
        assert all(at < size for at, size in zip(place, tensor_map.shape, strict=True))
        address = 2 * sum(at * stride for at, stride in zip(place, tensor_map.strides, strict=True))
        assert address % 2**64 == 2 * ((end - rows + row) * 1536 + part * 768 + column)
    assert all(2 * stride % 16 == 0 and 2 * stride < 2**40 for stride in tensor_map.strides[:4])


def backward_rows() -> Iterator[tuple[int, int, BackwardConfig, str]]:
    """Each row of the tables, on one architecture of its own; those of fp32 are the same everywhere."""
    for place, (archs, table) in enumerate(BACKWARD_TABLES.items()):
        for number, config in enumerate(table[2]):
            yield archs[place % len(archs)], 2, config, ("plain", "gpt-oss")[(place + number) % 2]
    yield 80, 4, BACKWARD_TABLES[(80,)][4][0], "plain"
    yield 90, 2, SMALL_BACKWARD, "gpt-oss"
    yield 100, 2, BACKWARD_TABLES[(90, 100)][2][1], "gpt-oss"
    for arch in (86, 120):
        yield arch, 2, BACKWARD_TABLES[(86, 89, 120)][2][0], "gpt-oss"


@pytest.mark.parametrize(
    ("arch", "item_bytes", "config", "way"),
    all_but_some_with(backward_rows(), lambda row: (("bytes", row[1]), row[3])),
)
def test_every_tile_of_gradients_compiles(arch, item_bytes, config, way):
    dtype = "bf16" if item_bytes == 2 else "fp32"
    problem = MoeProblem(tokens=700, dtype=dtype, **WAYS[way], keep_product=True)
    plan = make_backward_plan(problem, GPUS[arch], arch, config, GRADIENTS, "a test asked")
    for step, kernel in zip(plan.steps, prepare_backward_kernels(plan), strict=True):
        if step not in ("dactivation", "drouting", "dx", "dgate_up", "ddown", "dbias_gate_up", "dbias_down"):
            continue
        found = read_resources(kernel.source, arch)
        assert found.spill_bytes == 0, (kernel.source.name, found.registers)
        assert found.shared_memory_bytes <= SPECS[GPUS[arch]].shared_memory_per_block_bytes
        count_parameters(kernel.source, compile_kernel(kernel.source, arch).asm["ptx"])
        constants = dict(kernel.source.constants)
        given = [name for name in kernel.source.function.arg_names if name not in constants]
        assert [name for name, _ in kernel.source.signature] == given
        if item_bytes == 2 and kernel.source.name in ("_activation_backward_kernel", "_weight_gradient_kernel"):
            assert any("MMA" in opcode for opcode in found.instructions), "the matrix units are not used"
        if step.startswith("dbias"):
            ptx = compile_kernel(kernel.source, arch).asm["ptx"]
            assert "cp.async.cg.shared.global" in ptx, "rows are not copied ahead, 16 bytes at a time"


@pytest.mark.one_triton
@pytest.mark.parametrize("arch", all_but([80, 89, 90, 100, 120], "90"))
def test_fp32_is_multiplied_as_three_parts_in_bf16(arch):
    problem = MoeProblem(tokens=700, dtype="fp32", **WAYS["plain"], keep_product=True)
    spec = SPECS[GPUS[arch]]
    kernels = [*prepare_moe_kernels(plan_moe(problem, spec))]
    kernels += prepare_backward_kernels(plan_backward(problem, spec, GRADIENTS[:4]))
    products = [kernel.source for kernel in kernels if "TILE" in dict(kernel.source.constants)]
    assert len(products) == 6
    for source in products:
        assert dict(source.constants)["TILE"].PRECISION == "bf16x6"
        ptx = compile_kernel(source, arch).asm["ptx"]
        assert ".bf16.bf16" in ptx, source.name
        assert "tf32" not in ptx, source.name


def accesses(source: KernelSource, arch: int, loaded: str, stored: str) -> str:
    """Return what PTX does: L a load from memory that ``loaded`` points to, S a store to ``stored``'s, | a barrier."""
    places = [name for name, _ in source.signature]
    origins: dict[str, set[str]] = {}  # registers, and the parameters that they were computed from
    found = []
    for line in compile_kernel(source, arch).asm["ptx"].splitlines():
        code = re.sub(r"//.*|@!?%p\d+", "", line)
        registers, address = re.findall(r"%\w+", code), re.search(r"\[\s*(%\w+)", code)
        parameter = re.search(r"ld\.param.*_param_(\d+)\]", code)
        if parameter:
            number = int(parameter[1])
            origins[registers[0]] = {places[number]} if number < len(places) else set()
        elif re.search(r"\bbar(rier)?\.sync", code):
            found.append("|")
        elif address:
            found += ["L"] * ("ld.global" in code and loaded in origins.get(address[1], ()))
            found += ["S"] * ("st.global" in code and stored in origins.get(address[1], ()))
        elif registers:
            origins[registers[0]] = {name for register in registers[1:] for name in origins.get(register, ())}
    return "".join(found)


@pytest.mark.one_triton
@pytest.mark.parametrize(
    "way",
    all_but(
        [{}, {"activation": "swiglu_clamped", "interleaved": True}, {"activation": "relu2"}],
        "{'activation': 'swiglu_clamped', 'interleaved': True}",
    ),
    ids=str,
)
@pytest.mark.parametrize("arch", [80, 90])
def test_all_threads_have_loaded_a_product_before_one_overwrites_it(arch, way):
    """Who stores an element of its gradient is not always who loaded it: another warp may be as fast as it likes."""
    dtype = "fp16" if arch == 90 else "bf16"  # for which Hopper has a kernel of its own, see below
    problem = MoeProblem(700, dtype=dtype, **{**PLAIN, **way}, keep_product=True)
    plan = plan_backward(problem, SPECS[GPUS[arch]], GRADIENTS[:4])
    kernels = dict(zip(plan.steps, prepare_backward_kernels(plan), strict=True))
    found = accesses(kernels["dactivation"].source, arch, "product_ptr", "dproduct_ptr")
    assert {"L", "S"} <= set(found), found
    assert "LS" not in found, found


@pytest.mark.one_triton
def test_columns_that_end_within_a_tile_are_copied_like_others():
    """Also on a step's weights that lie along a tile's columns, of which 2880 are 22 tiles and a half."""
    copies = []
    for way in ({}, {"hidden": 2880, "inter": 2880}):
        problem = MoeProblem(tokens=700, dtype="bf16", **{**PLAIN, **way}, keep_product=True)
        config = BACKWARD_TABLES[(80,)][2][1]
        config = dataclasses.replace(config, activation=dataclasses.replace(config.activation, block_n=128))
        plan = make_backward_plan(problem, "A100", 80, config, GRADIENTS[:1], "a test asked")
        kernels = dict(zip(plan.steps, prepare_backward_kernels(plan), strict=True))
        found = [read_resources(kernels[step].source, 80) for step in ("dactivation", "dx")]
        copies.append([(each.instructions["LDGSTS"], each.shared_memory_bytes) for each in found])
    assert copies[0] == copies[1]


@pytest.mark.parametrize("experts", all_but([1, 8], "8"))
def test_gradients_for_hopper_compile(experts):
    """Also in parts, of which the last one has fewer columns."""
    rows, hidden, inter = (300_000, 1000, 1288) if experts == 1 else (3000, 136, 72)
    problem = MoeProblem(rows, experts, 2 if experts > 1 else 1, hidden, inter, "bf16", keep_product=True)
    plan = plan_backward(problem, SPECS["H200"], GRADIENTS[:4] if experts > 1 else ("x", "w_down"))
    prepared = prepare_backward_kernels(plan)
    kernels = {step: kernel for step, kernel in zip(plan.steps, prepared, strict=True) if step.endswith("_sm90")}
    assert set(kernels) >= {"dx_sm90", "ddown_sm90"}
    drawn = [kernel.scalars for step, kernel in zip(plan.steps, prepared, strict=True) if step == "dx_sm90"]
    assert drawn == ([(0,), (2,)] if experts == 1 else [(0,)])
    drawn = [kernel.scalars for step, kernel in zip(plan.steps, prepared, strict=True) if step == "ddown_sm90"]
    assert drawn == ([(0,), (16,), (32,)] if experts == 1 else [(0,)])
    for step, kernel in kernels.items():
        source = kernel.source
        found = read_resources(source, 90)
        assert found.spill_bytes == 0
        assert found.shared_memory_bytes <= SPECS["H200"].shared_memory_per_block_bytes
        assert found.instructions["HGMMA"] in (8, 16)
        assert (found.instructions.get("LDGSTS", 0) > 0) == (step != "dx_sm90")
        compiled = compile_kernel(source, 90)
        count_parameters(source, compiled.asm["ptx"])
        boxes = [layout["block_size"] for layout in compiled.metadata.tensordesc_meta]
        assert [len(box) for box in boxes] == [len(tensor_map.shape) for tensor_map in kernel.tensor_maps]
        constants = dict(source.constants)
        given = [name for name in source.function.arg_names if name not in constants]
        assert [name for name, _ in source.signature] == given


ACTIVATION_WAYS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "interleaved": {**PLAIN, "interleaved": True},
    "gpt-oss": WAYS["gpt-oss"],
    "geglu": WAYS["geglu"],
    "short": {**PLAIN, "hidden": 136, "inter": 72, "activation": "relu2"},
}


@pytest.mark.parametrize("way", all_but(ACTIVATION_WAYS, "gpt-oss"))
def test_the_gradient_of_the_activation_for_hopper_compiles(way, monkeypatch):
    """Nothing spills, and no value of the product goes to another thread than that which asked for it."""
    monkeypatch.setattr(hopper_plan, "ACTIVATION_FEWEST_HIDDEN", 0)
    problem = MoeProblem(3000, dtype="bf16", **ACTIVATION_WAYS[way], keep_product=True)
    plan = plan_backward(problem, SPECS["H200"], GRADIENTS if problem.bias_down else GRADIENTS[:4])
    prepared = dict(zip(plan.steps, prepare_backward_kernels(plan), strict=True))
    assert "dactivation" not in prepared
    kernel = prepared["dactivation_sm90"]
    source = kernel.source
    found, compiled = read_resources(source, 90), compile_kernel(source, 90)
    assert found.spill_bytes == 0
    assert found.shared_memory_bytes <= SPECS["H200"].shared_memory_per_block_bytes
    assert found.instructions["HGMMA"] in (8, 16)  # four a step: in front of the loop and in it, in both warpgroups
    assert found.instructions["STSM"] == 32, "dA goes to shared memory in pieces"
    # Two rows of 64 columns, 16 bytes each: the product's gradient and the weighted activations; then sums of two rows.
    rows_of_bias = 2 if problem.bias_down else 0
    assert found.instructions["STG"] == 2 * (3 if problem.gated else 2) + 2 + rows_of_bias
    count_parameters(source, compiled.asm["ptx"])
    boxes = [layout["block_size"] for layout in compiled.metadata.tensordesc_meta]
    assert [len(box) for box in boxes] == [len(tensor_map.shape) for tensor_map in kernel.tensor_maps]
    constants = dict(source.constants)
    assert [name for name, _ in source.signature] == [n for n in source.function.arg_names if n not in constants]
    assert len(kernel.tensors) == len(source.signature) - 1
    (launch,) = (launch for launch in plan.launches if launch.pattern == source.name)
    assert launch.block == (32 * compiled.metadata.num_warps, 1, 1)


@pytest.mark.one_triton
def test_what_is_kept_for_gradients_compiles():
    for tokens in (8, 3000):
        problem = MoeProblem(tokens=tokens, dtype="bf16", **WAYS["gpt-oss"], keep_product=True)
        plan = plan_moe(problem, SPECS["A100"])
        assert plan.kernel == "grouped_triton"
        check(dict(zip(plan.steps, prepare_moe_kernels(plan), strict=True))["up"], 80, item_bytes=2)
