"""Tiles of the forward kernels compile without spills, within shared memory, and use the matrix units.

`make test` compiles a few rows: each architecture, dtype, width, mask, feature and way once. `make test-all` compiles:

- every row of ``FORWARD_TABLES`` on each of its architectures, full and causal, at the full width of its tile, in fp16
  or fp32; and in one more way: bf16, partial tiles, split keys, split keys with partial tiles, or D unlike DV;
- the two largest tiles of one width with dropout, alone or with all features, on five architectures;
- every row for 16-bit elements that features can take, on one architecture, with some features or all of them;
  ``FLASHMOE_ALL_FEATURES=1`` compiles each on every architecture with every set of features;
- every tile of ``forward_short_gluon`` for 16 to 512 keys and 16 to 128 columns on one architecture before Hopper, on
  Hopper and on one after it; a fixed seed draws architecture, mask, LSE, partial tiles and dtype;
- the merge on every architecture, with 2 and with 32 splits, with and without LSE and partial tiles.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

import triton

from flashmoe_science import UnsupportedError
from flashmoe_science.attention.forward.plan import plan_attention
from flashmoe_science.attention.forward.prepare import prepare_kernels
from flashmoe_science.attention.forward.short_plan import SHORT_MAX_KEYS, short_shared_bytes
from flashmoe_science.attention.forward.triton_plan import FORWARD_TABLES, forward_rows
from flashmoe_science.attention.problem import AttentionProblem, Strides
from flashmoe_science.attention.tiles import ForwardConfig, Plan, ShortConfig
from flashmoe_science.gpu.compile import KernelOutcome, compile_kernel, read_resources
from flashmoe_science.gpu.planning import PlannedLaunch
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.operators.attention import compile_plan

from ..exhaustive import all_but, all_but_some_with

pytestmark = pytest.mark.triton

GPUS = {
    80: SPECS["A100"],
    86: SPECS["A10G"],
    89: SPECS["L4"],
    90: SPECS["H200"],
    100: SPECS["B200"],
    120: SPECS["RTX 5090"],
}
KINDS = ((80, 86, 89), (90,), (100, 120))  # before Hopper, Hopper, after: the lowering differs
# Bytes that Triton 3.9 spills once a thread, outside the loop over whole tiles, where 3.6 spills none.
SPILLS_OF_TRITON_3_9 = {
    "sm_90-fp16-128x128x128-w8s2-split": 112,  # smaller tiles of sm_90 would not spill, and reuse K and V less
    "sm_90-16x2x64-w2-b1_h133_1_s13_125_d48_64_fp16_causal-lse": 8,  # for one more block on an SM
}
WAYS = ("bf16", "rests", "split", "split-rests", "narrow-q", "narrow-v")


@dataclass(frozen=True)
class Row:
    """One row of a table on one architecture, and the way in which it is used."""

    arch: int
    config: ForwardConfig
    columns: int
    dtype: str
    way: str

    def __str__(self) -> str:
        tile = f"{self.config.block_m}x{self.config.block_n}x{self.columns}"
        return f"sm_{self.arch}-{self.dtype}-{tile}-w{self.config.num_warps}s{self.config.num_stages}-{self.way}"

    def plan(self) -> Plan:
        split, rests = self.way.startswith("split"), self.way.endswith("rests")
        dim = self.columns * 5 // 8 if rests else self.columns  # 40, 80 and 160 are head dimensions of real models
        problem = make_problem(
            seqlen_q=1000,
            seqlen_k=900 if rests else 1000,  # fewer keys than rows: some rows see no key
            head_dim=16 if self.way == "narrow-q" else dim,
            head_dim_v=16 if self.way == "narrow-v" else dim,
            dtype="bf16" if self.way == "bf16" else self.dtype,
            causal=rests or self.way == "causal",
            return_lse=rests,
            sequence_major=rests,
        )
        config = dataclasses.replace(self.config, num_splits=4) if split else self.config
        return by_hand(problem, self.arch, config)


def make_problem(*, sequence_major: bool = False, **sizes) -> AttentionProblem:
    problem = AttentionProblem(**{"batch": 2, "heads": 4, "heads_kv": 2, **sizes})
    if not sequence_major:
        return problem

    def strides(heads: int, rows: int, columns: int) -> Strides:
        return rows * heads * columns, columns, heads * columns, 1

    return dataclasses.replace(
        problem,
        q_strides=strides(problem.heads, problem.seqlen_q, problem.head_dim),
        k_strides=strides(problem.heads_kv, problem.seqlen_k, problem.head_dim),
        v_strides=strides(problem.heads_kv, problem.seqlen_k, problem.head_dim_v),
    )


def by_hand(problem: AttentionProblem, arch: int, config: ForwardConfig) -> Plan:
    launches = [PlannedLaunch("_forward_kernel", (1, 1, 1), (32 * config.num_warps, 1, 1))]
    if config.num_splits > 1:
        launches.append(PlannedLaunch("_merge_partials_kernel", (1, 1, 1), (128, 1, 1)))
    return Plan(problem, GPUS[arch].name, arch, "forward_triton", config, tuple(launches), "a test asked for it")


def problems_of(outcome: KernelOutcome, name: str) -> list[str]:
    known = SPILLS_OF_TRITON_3_9.get(name, 0) if triton.__version__ >= "3.9" else 0
    return [text for text in outcome.problems if "spill" not in text or outcome.spill_bytes > known]


def rows() -> Iterator[Row]:
    place = 0
    for archs, table in FORWARD_TABLES.items():
        for (item_bytes, columns), configs in table.items():
            dtype = "fp16" if item_bytes == 2 else "fp32"
            ways = [way for way in WAYS if item_bytes == 2 or way != "bf16"]
            for config in configs:
                place += 1
                for step, arch in enumerate(archs):
                    for way in ("full", "causal", ways[(place + step) % len(ways)]):
                        yield Row(arch, config, columns, dtype, way)


ROWS = list(rows())


def properties_of_row(row: Row) -> Iterator[Hashable]:
    """Every architecture in both dtypes, every width with both masks, and every way."""
    yield row.arch, row.dtype
    yield row.columns, row.plan().problem.causal
    yield row.way


def test_the_tables_cover_every_architecture_and_every_width():
    assert {row.arch for row in ROWS} == set(GPUS)
    for table in FORWARD_TABLES.values():
        assert set(table) == set(itertools.product((2, 4), (64, 128, 256)))
        for configs in table.values():
            tiles = [config.block_m for config in configs]
            assert tiles == sorted(tiles, reverse=True), "the largest comes first"
            assert tiles[-1] == 16, "few rows want small tiles"
    assert {row.way for row in ROWS} == {"full", "causal", *WAYS}
    assert set(SPILLS_OF_TRITON_3_9) <= {*map(str, ROWS), *map(name_of, SHORT_PLANS)}


@pytest.mark.parametrize("row", all_but_some_with(ROWS, properties_of_row), ids=str)
def test_every_row_of_the_tables_compiles(row):
    for outcome in compile_plan(row.plan()):
        assert problems_of(outcome, str(row)) == [], (outcome.registers, outcome.shared_memory_bytes)


SOME: tuple[dict[str, Any], ...] = (
    {"window": (300, -1)},
    {"softcap": 30.0},
    {"sinks": "bf16"},
    {"alibi": "fp32"},
    {"window": (300, -1), "softcap": 30.0},
    {"window": (300, -1), "sinks": "bf16"},
    {"window": (300, -1), "alibi": "fp32"},
    {"softcap": 30.0, "sinks": "bf16"},
    {"softcap": 30.0, "alibi": "fp32"},
    {"sinks": "bf16", "alibi": "fp32"},
)
ALL_BUT_BIAS: dict[str, Any] = {"window": (300, -1), "softcap": 30.0, "sinks": "fp32", "alibi": "fp32"}
MANY: tuple[dict[str, Any], ...] = (
    ALL_BUT_BIAS,
    {"bias": "fp32"},
    {"bias": "fp16"},
    {**ALL_BUT_BIAS, "bias": "fp32"},
)
PACKED: dict[str, Any] = {"packed": True, "seqused": "qk"}
PACKED_BIASES: tuple[dict[str, Any], ...] = (
    {"bias": "fp32", **PACKED},
    {**ALL_BUT_BIAS, "bias": "fp32", **PACKED},
    {**ALL_BUT_BIAS, "bias": "fp16", "dropout_p": 0.1, **PACKED},
)
# Pages of fewer keys than a tile, of other sizes, and of whole tiles; with features that add up to as many.
PAGED: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {"causal": True}),
    (1, {}),
    (1, {"causal": True, "window": (300, -1)}),
    (2, {"causal": True, **ALL_BUT_BIAS}),
    (4, {"bias": "fp32"}),
    (4, {"causal": True, **ALL_BUT_BIAS, "bias": "fp32"}),
)


def featured_plans() -> Iterator[Plan]:
    """Yield plans with features by hand, for every row that they can take; by default each in a few ways."""
    complete = os.environ.get("FLASHMOE_ALL_FEATURES") == "1"
    place = 0
    for archs, table in FORWARD_TABLES.items():
        for item_bytes, columns in table:
            for weight, asked in ((1, SOME), (2, MANY), (4, PACKED_BIASES)):
                ways = list(itertools.product(archs, asked, ({}, PACKED) if weight < 4 else ({},), (True, False)))
                ways = [way for way in ways if not ("bias" in way[1] and way[2])]
                for config in forward_rows(archs[0], item_bytes, columns, features=weight):
                    place += 1
                    for arch, features, packed, rests in ways if complete else [ways[place * 7 % len(ways)]]:
                        if not complete and (item_bytes == 4 or config.block_m == 16):
                            continue
                        dim = columns * 5 // 8 if rests else columns
                        problem = make_problem(
                            seqlen_q=1000, seqlen_k=900, head_dim=dim, head_dim_v=dim,
                            dtype="fp32" if item_bytes == 4 else "bf16", causal=rests, return_lse=True,
                            **features, **packed,
                        )  # fmt: skip
                        yield by_hand(problem, arch, config)


def paged_plans() -> Iterator[Plan]:
    """Yield plans over pages by hand: of every architecture the rows of all widths, by default each in one way."""
    complete = os.environ.get("FLASHMOE_ALL_FEATURES") == "1"
    for turn, (arch, columns) in enumerate(itertools.product(GPUS, (64, 128, 256))):
        for item_bytes in (2, 4) if complete else (2,):
            for number, (weight, features) in enumerate(PAGED):
                for place, config in enumerate(forward_rows(arch, item_bytes, columns, features=weight, paged=True)):
                    if not complete and (number != turn % len(PAGED) or place):
                        continue
                    dim = columns * 5 // 8 if place == 1 else columns
                    problem = make_problem(
                        seqlen_q=1000, seqlen_k=1024, head_dim=dim, head_dim_v=dim, return_lse=True,
                        dtype="fp32" if item_bytes == 4 else "bf16", packed=True, seqused="k",
                        page_size=(16, 256, 3)[(turn + place) % 3], table_stride=512, **features,
                    )  # fmt: skip
                    yield by_hand(problem, arch, config)


FEATURES_OF_TABLES = (
    "a sliding window", "a softcap", "attention sinks", "ALiBi", "a bias", "packed sequences", "a page table",
)  # fmt: skip


def dropping_plans() -> Iterator[Plan]:
    """Yield plans with dropout by hand; with ``FLASHMOE_ALL_FEATURES=1`` for every row that it can take."""
    complete = os.environ.get("FLASHMOE_ALL_FEATURES") == "1"
    asked: tuple[dict[str, Any], ...] = (MANY[-1], {}, {**ALL_BUT_BIAS, **PACKED})
    chosen = {80: 128, 89: 128, 90: 64, 100: 64, 120: 256}
    for turn, (arch, columns) in enumerate(itertools.product(chosen, (64, 128, 256))):
        for item_bytes in (2, 4) if complete else (2,):
            for place, config in enumerate(forward_rows(arch, item_bytes, columns, features=3)):
                if not complete and (columns != chosen[arch] or place > 1):
                    continue
                for features in asked if complete else (asked[0] if place else asked[turn % 3],):
                    dim = columns * 5 // 8 if place % 2 else columns
                    problem = make_problem(
                        seqlen_q=1000, seqlen_k=900, head_dim=dim, head_dim_v=dim, causal=True, return_lse=True,
                        dtype="fp32" if item_bytes == 4 else "bf16", dropout_p=0.1, **features,
                    )  # fmt: skip
                    yield by_hand(problem, arch, config)


DROPPING_PLANS = list(dropping_plans())
FEATURED_PLANS = [*featured_plans(), *paged_plans()]


def name_of_featured(plan: Plan) -> str:
    config = plan.config
    assert isinstance(config, ForwardConfig)
    tile = f"{config.block_m}x{config.block_n}-w{config.num_warps}s{config.num_stages}"
    return f"sm_{plan.arch}-{tile}-{plan.problem.describe()}"


def test_the_featured_plans_cover_every_feature():
    assert {plan.arch for plan in FEATURED_PLANS} == set(GPUS)
    for feature in FEATURES_OF_TABLES:
        assert sum(feature in plan.problem.features for plan in FEATURED_PLANS) >= 3, feature
    for archs in FORWARD_TABLES:
        for weight in (0, 1, 2, 3, 4):
            for columns, item_bytes, paged in itertools.product((64, 128, 256), (2, 4), (False, True)):
                rows = forward_rows(archs[-1], item_bytes, columns, features=weight, paged=paged)
                tiles = [row.block_m for row in rows]
                assert tiles == sorted(tiles, reverse=True)
                assert tiles[-1] == 16


def properties_of_featured(plan: Plan) -> Iterator[Hashable]:
    """Every feature with both masks, on every architecture some."""
    yield plan.arch
    for feature in plan.problem.features:
        yield plan.problem.causal, feature


@pytest.mark.parametrize(
    "plan", all_but_some_with([*FEATURED_PLANS, *DROPPING_PLANS], properties_of_featured), ids=name_of_featured
)
def test_rows_with_features_compile(plan):
    for outcome in compile_plan(plan):
        assert problems_of(outcome, name_of_featured(plan)) == [], (outcome.registers, outcome.shared_memory_bytes)


@pytest.mark.parametrize(
    ("asked", "weight"),
    [
        ({}, 0),
        ({"packed": True}, 1),
        ({"packed": True, "page_size": 16}, 1),
        ({"packed": True, "page_size": 16, "window": (300, -1)}, 1),
        ({"packed": True, "page_size": 16, "window": (300, -1), "softcap": 30.0}, 2),
        *[(some, 1) for some in SOME],
        *[(many, 2) for many in MANY],
        ({"dropout_p": 0.1}, 3),
        ({**MANY[-1], "dropout_p": 0.1}, 3),
        ({"packed": True, "bias": "fp32"}, 4),
        ({"packed": True, "bias": "fp32", "page_size": 16}, 4),
        ({**MANY[-1], "packed": True, "dropout_p": 0.1}, 4),
    ],
    ids=str,
)
def test_the_plan_takes_the_rows_for_as_many_features(asked, weight):
    for arch, gpu in GPUS.items():
        problem = make_problem(
            seqlen_q=4096, seqlen_k=4096, head_dim=128, head_dim_v=128, dtype="bf16", **{"batch": 64, **asked}
        )
        plan = plan_attention(problem, gpu, "forward_triton")
        assert plan.config == forward_rows(arch, 2, 128, features=weight, paged="page_size" in asked)[0]


def short_plans() -> Iterator[Plan]:
    """Yield a plan for every tile of the one-pass kernel on one architecture of each kind."""
    draw = random.Random(0)
    keys = [2**power for power in range(4, SHORT_MAX_KEYS.bit_length())]
    seen = set()
    for archs, seqlen_k, head_dim, blocks_an_sm in itertools.product(KINDS, keys, (16, 32, 64, 128), (0, 1, 2)):
        arch, rests = draw.choice(archs), draw.random() < 0.5
        problem = make_problem(
            batch=1,
            heads=1 + blocks_an_sm * GPUS[arch].sms,  # with tiles of 16 rows
            heads_kv=1,
            seqlen_q=13 if rests else 16,
            seqlen_k=seqlen_k - 3 if rests else seqlen_k,
            head_dim=head_dim * 3 // 4 if rests else head_dim,
            head_dim_v=head_dim,
            dtype=draw.choice(("fp16", "fp16", "bf16")),
            causal=draw.random() < 0.5,
            return_lse=draw.random() < 0.5,
        )
        try:
            plan = plan_attention(problem, GPUS[arch], "forward_short_gluon")
        except UnsupportedError as error:
            if "bytes of shared memory" not in str(error):
                raise
            continue
        if (archs, plan.config, head_dim) not in seen:
            seen.add((archs, plan.config, head_dim))
            yield plan


SHORT_PLANS = list(short_plans())


def name_of(plan: Plan) -> str:
    config = plan.config
    assert isinstance(config, ShortConfig)
    tile = f"{config.block_m}x{config.key_groups}x{config.block_n}-w{config.num_warps}"
    return f"sm_{plan.arch}-{tile}-{plan.problem.describe()}{'-lse' if plan.problem.return_lse else ''}"


def test_the_short_plans_cover_every_tile_and_every_way():
    plans = {plan: plan.config for plan in SHORT_PLANS if isinstance(plan.config, ShortConfig)}
    for archs in KINDS:
        here = {plan: config for plan, config in plans.items() if plan.arch in archs}
        keys = {config.key_groups * config.block_n for config in here.values()}
        assert keys == {16, 32, 64, 128, 256, 512}
        assert {config.block_m for config in here.values()} == {16, 32}
        assert {plan.problem.head_dim_v for plan in here} == {16, 32, 64, 128}
        problems = [plan.problem for plan in here]
        ways = {(problem.causal, problem.return_lse, problem.seqlen_q == 13) for problem in problems}
        assert ways == set(itertools.product((False, True), repeat=3))
    assert {(plan.arch, plan.problem.causal) for plan in plans} == set(itertools.product(GPUS, (False, True)))


def properties_of_short(plan: Plan) -> Iterator[Hashable]:
    """Every number of rows, of keys and of columns; both masks, with and without LSE; on every architecture some."""
    problem, config = plan.problem, plan.config
    assert isinstance(config, ShortConfig)
    yield "rows", config.block_m
    yield "keys", config.key_groups * config.block_n
    yield "columns", problem.head_dim_v
    yield problem.causal, problem.return_lse
    yield plan.arch


@pytest.mark.parametrize("plan", all_but_some_with(SHORT_PLANS, properties_of_short), ids=name_of)
def test_every_tile_of_the_short_kernel_compiles(plan):
    (outcome,) = compile_plan(plan)
    assert problems_of(outcome, name_of(plan)) == [], outcome.registers
    assert isinstance(plan.config, ShortConfig)
    # The plan promised that it fits from this count.
    assert outcome.shared_memory_bytes <= short_shared_bytes(plan.problem, plan.config)


@pytest.mark.parametrize("splits", [2, 32])
@pytest.mark.parametrize("arch", all_but(GPUS, "80", "90"))
def test_the_merge_compiles(arch, splits):
    for return_lse, head_dim_v, dtype in ((splits == 2, 256, "fp32"), (splits > 2, 80, "bf16")):
        problem = make_problem(
            seqlen_q=70, seqlen_k=8192, head_dim=64, head_dim_v=head_dim_v, dtype=dtype, return_lse=return_lse,
            sequence_major=return_lse,
        )  # fmt: skip
        _, merge = prepare_kernels(by_hand(problem, arch, ForwardConfig(16, 64, 4, 2, splits)))
        found = read_resources(merge.source, arch)
        assert (found.spill_bytes, found.shared_memory_bytes) == (0, 0)


def test_sm_103_takes_the_tiles_of_sm_100():
    """And its matrix instruction; not every cuobjdump reads its machine code."""
    spec = dataclasses.replace(GPUS[100], name="B300", arch=103)
    problem = make_problem(seqlen_q=2048, seqlen_k=2048, head_dim=128, head_dim_v=128, dtype="fp16")
    plan = plan_attention(problem, spec)
    (kernel,) = prepare_kernels(plan)
    assert "tcgen05.mma" in compile_kernel(kernel.source, 103).asm["ptx"]
