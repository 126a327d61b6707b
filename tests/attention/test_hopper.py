"""What can be shown of ``forward_gluon_sm90`` without a GPU: its plans, its refusals and its machine code."""

from __future__ import annotations

import ctypes
import dataclasses
import heapq
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science import UnsupportedError
from flashmoe_science.attention.forward.plan import plan_attention
from flashmoe_science.attention.forward.plan_sm90 import (
    HOPPER_ROWS,
    HOPPER_TABLE,
    hopper_config,
    hopper_edge_tiles,
    hopper_heads_per_group,
    hopper_is_aligned,
    hopper_output_columns,
)
from flashmoe_science.attention.forward.prepare import prepare_kernels
from flashmoe_science.attention.forward.primitives_sm90 import TURNS
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.attention.tiles import ForwardConfig, HopperConfig, Plan
from flashmoe_science.errors import CompileError, LaunchError
from flashmoe_science.gpu import tensor_map
from flashmoe_science.gpu.compile import compile_kernel
from flashmoe_science.gpu.launch import count_parameters, parameter_bits
from flashmoe_science.gpu.planning import PlannedLaunch
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.gpu.tensor_map import TensorMap
from flashmoe_science.operators.attention import OPERATOR, compile_plan

from ..exhaustive import all_but, all_but_some_with
from .key_loops import key_loops

pytestmark = pytest.mark.triton

H200, L4, B200 = SPECS["H200"], SPECS["L4"], SPECS["B200"]
LONGEST = 16384  # keys measured for the last row of an entry
ROWS = [
    (columns, columns_v, causal, min(keys, LONGEST), config)
    for (columns, columns_v, causal), rows in HOPPER_TABLE.items()
    for keys, config in rows
]
# Two problems a row, (dtype, LSE, aligned with the tiles) and its opposite: over four rows, every pair of values.
VALUES = [
    (("bf16", True, True), ("fp16", False, False)),
    (("bf16", True, False), ("fp16", False, True)),
    (("bf16", False, True), ("fp16", True, False)),
    (("bf16", False, False), ("fp16", True, True)),
]


def make_problem(batch=4, heads=16, seqlen_q=4096, head_dim=128, dtype="bf16", **more) -> AttentionProblem:
    sizes = {"heads_kv": heads, "seqlen_k": seqlen_q, "head_dim_v": head_dim, **more}
    return AttentionProblem(batch=batch, heads=heads, seqlen_q=seqlen_q, head_dim=head_dim, dtype=dtype, **sizes)


def forced(problem: AttentionProblem) -> Plan:
    return plan_attention(problem, H200, "forward_gluon_sm90")


def assert_compiles(plan: Plan, folder: Path) -> None:
    """No more shared memory than sm_90 has, as many threads as planned; products side by side, no spills beside them.

    Behind the loops over keys a few values may be spilled, once a row tile: what a mask needs that crosses two tiles.
    """
    (kernel,) = prepare_kernels(plan)
    (outcome,) = compile_plan(plan)
    assert outcome.problems == ()
    assert outcome.shared_memory_bytes <= 227 * 1024
    compiled = compile_kernel(kernel.source, 90)
    assert (32 * compiled.metadata.num_warps, 1, 1) == plan.launches[0].block
    count_parameters(kernel.source, compiled.asm["ptx"])
    ptx = compiled.asm["ptx"]
    assert ptx.count(".reg .pred too_large") == 1
    assert (
        max(int(barrier) for barrier in re.findall(r"\bbar(?:rier\S*)?\.sync\s+(\d+)", ptx)) < TURNS.value
    )  # Triton's
    loops = key_loops(compiled.asm["cubin"], folder)
    assert isinstance(plan.config, HopperConfig)
    assert len(loops) == plan.config.warpgroups
    for loop in loops:
        assert sum(count for opcode, count in loop.items() if opcode.startswith("HGMMA")) >= 8
        assert loop["WARPGROUP.DEPBAR"] == 2, "the products are serialised"
        assert [opcode for opcode in loop if opcode.startswith(("LDL", "STL"))] == []


TABLE_CASES = [
    pytest.param(
        *row,
        *values,
        id=f"d{row[0]}-{row[1]}-{'causal' if row[2] else 'full'}-{row[3]}-{values[0]}-{index}",
        # Every fourth row runs by default.
        marks=[pytest.mark.exhaustive] * (index > 0 or place not in range(1, len(ROWS), 4)),
    )
    for place, (row, pair) in enumerate(zip(ROWS, itertools.cycle(VALUES), strict=False))
    for index, values in enumerate(pair)
]


@pytest.mark.parametrize(
    ("columns", "columns_v", "causal", "keys", "config", "dtype", "return_lse", "aligned"), TABLE_CASES
)
def test_table_rows_compile(columns, columns_v, causal, keys, config, dtype, return_lse, aligned, tmp_path):
    """Every row of the table, for sm_90."""
    seqlen_k = keys if aligned else keys - 37  # full: a rest of keys; causal: a diagonal that crosses two tiles
    widths = {"head_dim": columns, "head_dim_v": columns_v}
    more = {"seqlen_k": seqlen_k, "causal": causal, "return_lse": return_lse, "heads_kv": 4}
    plan = forced(make_problem(2, 8, keys, dtype=dtype, **widths, **more))
    assert plan.config == config
    assert_compiles(plan, tmp_path)


@pytest.mark.one_triton
@pytest.mark.parametrize("dtype", all_but(["fp16", "bf16"], "bf16"))
@pytest.mark.parametrize("return_lse", all_but([False, True], "True"))
def test_unaligned_causal_tiles_do_not_spill(dtype, return_lse, tmp_path):
    """Three warpgroups, two masked tiles: of all variants the one that needs most registers."""
    plan = forced(make_problem(2, 8, 2100, 64, dtype, seqlen_k=2023, causal=True, return_lse=return_lse))
    assert isinstance(plan.config, HopperConfig)
    assert plan.config.warpgroups == 3
    assert_compiles(plan, tmp_path)


@pytest.mark.one_triton
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "causal"),
    all_but(
        [
            (192, 128, True),
            (64, 128, False),
            (128, 64, True),
            (64, 256, True),
            (8, 16, True),
            (192, 192, True),
            (80, 96, False),
        ],
        "(8, 16, True)",
    ),
)
def test_unequal_and_narrow_widths_compile(head_dim, head_dim_v, causal, tmp_path):
    """O goes through tiles of its own width; narrow tiles have another swizzle."""
    problem = make_problem(1, 8, 2000, head_dim, head_dim_v=head_dim_v, causal=causal, return_lse=True)
    assert_compiles(forced(problem), tmp_path)


def test_parameters_are_laid_out_as_the_launch_path_gives_them():
    """Maps of 1,024 bits, 64-byte aligned, each followed by shape and strides; then pointer, scalars, scratch."""
    (kernel,) = prepare_kernels(forced(make_problem(return_lse=True)))
    descriptor = [1024, 32, 32, 32, 32, 64, 64, 64, 64]
    assert parameter_bits(kernel.source) == descriptor * 4 + [64, 64] + [32] * 7 + [64, 64]
    ptx = compile_kernel(kernel.source, 90).asm["ptx"]
    assert ptx[ptx.index(".entry") :].count(".align 64 .b8") == 4
    count_parameters(kernel.source, ptx)
    start = ptx.index(".entry")
    for old, new in ((".b8", ".b16"), (".u32", ".u64"), ("[128]", "[256]"), (".f32", ".f64")):
        with pytest.raises(CompileError, match="_forward_sm90_kernel: expected parameters of"):
            count_parameters(kernel.source, ptx[:start] + ptx[start:].replace(old, new, 1))


def test_tiles_fit_in_shared_memory_with_the_output_staged_beside_them():
    """All columns of the output up to 128, or half of them where more does not fit."""
    found = {}
    for columns, columns_v, causal, keys, config in ROWS:
        problem = make_problem(2, 8, keys, columns, head_dim_v=columns_v, causal=causal)
        staged = found[columns, columns_v] = hopper_output_columns(problem, config)
        rows = HOPPER_ROWS * config.warpgroups
        tiles = rows * columns + config.num_stages * config.block_n * (columns + columns_v)
        assert 2 * (tiles + rows * staged) < 227 * 1024, (columns, columns_v, config)
    all_of_it = {(dim, dim): min(dim, 128) for dim in (64, 128, 192, 256)}
    assert found == {**all_of_it, (96, 96): 128, (192, 128): 64}


def test_table_is_complete_and_in_order():
    widths = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
    assert list(HOPPER_TABLE) == [(*width, causal) for width in widths for causal in (False, True)]
    for rows in HOPPER_TABLE.values():
        keys = [limit for limit, _ in rows]
        assert keys == sorted(set(keys))
        assert keys[-1] > 2**31
        assert len({config for _, config in rows}) == len(rows)


@pytest.mark.parametrize(
    ("head_dim", "causal", "keys", "rows", "ping_pong"),
    [
        (64, False, 512, 192, True),
        (40, False, 16384, 192, True),
        (64, True, 1024, 128, True),
        (64, True, 1536, 192, False),
        (64, True, 2048, 192, False),
        (64, True, 2176, 192, True),
        (128, False, 4096, 128, False),
        (80, False, 1024, 128, True),
        (96, False, 1152, 192, True),
        (72, True, 4224, 128, True),
        (128, True, 2176, 128, False),
        (256, False, 2048, 128, True),
        (160, True, 1024, 128, False),
        (192, False, 1024, 128, True),
    ],
)
def test_tiles_follow_the_number_of_keys(head_dim, causal, keys, rows, ping_pong):
    """Both sides of every threshold, chosen by ``auto``."""
    plan = plan_attention(make_problem(8, 16, keys, head_dim, causal=causal), H200)
    assert plan.kernel == "forward_gluon_sm90"
    assert isinstance(plan.config, HopperConfig)
    assert (HOPPER_ROWS * plan.config.warpgroups, plan.config.ping_pong) == (rows, ping_pong)
    tiles = -(-keys // rows) * 8 * 16
    threads = 128 * (rows // HOPPER_ROWS + 1)
    assert plan.launches == (PlannedLaunch("_forward_sm90_kernel", (H200.sms, 1, 1), (threads, 1, 1)),)
    assert f"{tiles} row tiles of {rows} on 132 SMs" in plan.reason


@pytest.mark.parametrize(
    ("head_dim", "seqlen_k", "ping_pong", "aligned", "edge_tiles"),
    [
        *((128, 2048, True, True, 1), (128, 1920, True, False, 2), (128, 2176, False, False, 1)),
        *((128, 2049, False, False, 2), (256, 2112, False, False, 1), (64, 4096, True, True, 2)),
        *((64, 4095, True, False, 3), (64, 4160, True, False, 3)),
    ],
)
def test_masked_tiles_follow_the_diagonal(head_dim, seqlen_k, ping_pong, aligned, edge_tiles):
    """In turns they are fewer where the diagonal starts with a tile of keys."""
    problem = make_problem(8, 16, 2048, head_dim, seqlen_k=seqlen_k, causal=True)
    config = hopper_config(problem, H200)
    found = config.ping_pong, hopper_is_aligned(problem, config), hopper_edge_tiles(problem, config)
    assert found == (ping_pong, aligned, edge_tiles)


def walks(problem: AttentionProblem) -> Iterator[tuple[range, list[int], int]]:
    """Yield its rows of a head, key tiles in order, and how many are masked, of every warpgroup of the kernel."""
    config = hopper_config(problem, H200)
    edge_tiles = hopper_edge_tiles(problem, config)
    rows_of_head, turns = HOPPER_ROWS // config.pack, config.ping_pong
    rows = rows_of_head * config.warpgroups

    def key_tiles(end_row: int) -> int:
        end = max(min(problem.seqlen_k, end_row + problem.seqlen_k - problem.seqlen_q), 0)
        return max(-(-(end if problem.causal else problem.seqlen_k) // config.block_n), edge_tiles, 1)

    for first_row in range(0, problem.seqlen_q, rows):
        for w in range(config.warpgroups):
            row = first_row + w * rows_of_head
            steps = key_tiles(first_row + rows if turns else row + rows_of_head)
            ahead = w * rows_of_head // config.block_n if hopper_is_aligned(problem, config) else 0
            yield range(row, row + rows_of_head), list(range(steps - 1, -1, -1)), edge_tiles - ahead


@settings(max_examples=150, deadline=None)
@given(
    head_dim=strategies.sampled_from([64, 96, 128, 256]),
    causal=strategies.booleans(),
    sizes=strategies.lists(strategies.integers(1, 70), min_size=2, max_size=2),
    odd=strategies.lists(strategies.sampled_from([0, 0, 0, 1, 37]), min_size=2, max_size=2),
    group=strategies.sampled_from([1, 1, 2, 4, 8, 12, 64]),
)
@example(head_dim=256, causal=True, sizes=[33, 32], odd=[0, 0], group=1)
@example(head_dim=256, causal=True, sizes=[64, 32], odd=[0, 0], group=1)
@example(head_dim=64, causal=True, sizes=[42, 34], odd=[0, 0], group=1)
@example(head_dim=64, causal=True, sizes=[42, 44], odd=[0, 37], group=1)
@example(head_dim=96, causal=True, sizes=[2, 1], odd=[1, 0], group=1)
@example(head_dim=96, causal=True, sizes=[4, 5], odd=[0, 0], group=1)
@example(head_dim=64, causal=True, sizes=[41, 41], odd=[37, 37], group=4)
@example(head_dim=64, causal=True, sizes=[41, 41], odd=[37, 37], group=64)
def test_every_key_that_a_row_sees_is_walked_over_and_no_other_left_unmasked(head_dim, causal, sizes, odd, group):
    """For the walk of every warpgroup over the key tiles, as the kernel makes it."""
    seqlen_q, seqlen_k = (64 * size + more for size, more in zip(sizes, odd, strict=True))
    heads = {"heads": 64 * group, "heads_kv": 64}
    problem = make_problem(1, seqlen_q=seqlen_q, head_dim=head_dim, seqlen_k=seqlen_k, causal=causal, **heads)
    block_n = hopper_config(problem, H200).block_n
    for rows, tiles, masked in walks(problem):
        row = rows.start
        if row >= seqlen_q:
            continue
        offset = seqlen_k - seqlen_q if causal else seqlen_k  # the last key that row r sees is r + offset, or the last
        last_row = min(rows.stop, seqlen_q) - 1
        seen = min(last_row + offset, seqlen_k - 1)
        assert seen < 0 or set(range(seen // block_n + 1)) <= set(tiles)
        for tile in tiles[masked:]:
            assert (tile + 1) * block_n - 1 <= min(row + offset, seqlen_k - 1), (row, tile)


@pytest.mark.parametrize(
    ("group", "seqlen_q", "pack", "tiles"),
    [
        *(
            (4, 129, 4, 5 * 64),
            (4, 128, 1, 64 * 4),
            (8, 437, 8, 28 * 64),
            (6, 129, 2, 3 * 64 * 3),
            (5, 129, 1, 2 * 64 * 5),
        ),
        *((1, 129, 1, 2 * 64), (64, 65, 64, 33 * 64), (128, 3, 64, 2 * 64 * 2)),
        *((4, 1000, 1, 8 * 64 * 4), (4, 3000, 1, 24 * 64 * 4)),  # less than a tenth would be saved
    ],
)
def test_heads_are_packed_where_row_tiles_would_be_half_empty(group, seqlen_q, pack, tiles):
    """Row tiles of 128: a power of two of the heads of a KV head share them."""
    problem = make_problem(1, 64 * group, seqlen_q, heads_kv=64, seqlen_k=4096)
    plan = forced(problem)
    assert isinstance(plan.config, HopperConfig)
    assert plan.config.pack == pack
    assert f"{tiles} row tiles of 128" in plan.reason
    assert (f"{pack} heads of a KV head to a tile" in plan.reason) == (pack > 1)


def test_heads_are_not_packed_where_too_few_row_tiles_are_left():
    assert hopper_config(make_problem(1, 64, 65, heads_kv=8, seqlen_k=4096), H200).pack == 1


@pytest.mark.one_triton
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "group", "causal", "seqlen_k"),
    all_but_some_with(
        [
            *((64, 64, 8, True, 1435), (64, 64, 8, True, 2435), (64, 64, 4, False, 2435), (80, 80, 4, True, 1435)),
            *((80, 80, 4, False, 2435), (128, 128, 64, True, 1435), (128, 128, 8, True, 2435)),
            *((192, 128, 4, True, 1435), (192, 192, 8, False, 1435), (256, 256, 16, False, 1435)),
        ],
        lambda case: (case[3],),  # both masks
    ),
)
def test_packed_heads_compile(head_dim, head_dim_v, group, causal, seqlen_k, tmp_path):
    """The diagonal is aligned with nothing."""
    sizes = {"heads_kv": 32, "head_dim_v": head_dim_v, "seqlen_k": seqlen_k}
    plan = forced(make_problem(4, 32 * group, 70, head_dim, causal=causal, return_lse=True, **sizes))
    assert isinstance(plan.config, HopperConfig)
    assert plan.config.pack == group
    assert_compiles(plan, tmp_path)


def longest_share(problem: AttentionProblem) -> float:
    """Return the most that one program has to do, over the mean, if each draws the next row tile when it is done.

    In key tiles; a row tile costs one more by itself.
    """
    config = hopper_config(problem, H200)
    rows = HOPPER_ROWS * config.warpgroups
    tiles_m, heads, group = (
        -(-problem.seqlen_q // rows),
        problem.batch * problem.heads,
        hopper_heads_per_group(problem, hopper_config(problem, H200).pack),
    )
    programs = [0] * min(tiles_m * heads, H200.sms)
    for tile in range(tiles_m * heads):
        first = tile // (group * tiles_m) * group
        m = tiles_m - 1 - (tile - first * tiles_m) // min(group, heads - first)
        heapq.heapreplace(programs, programs[0] + 1 - (-(m + 1) * rows // config.block_n))
    return max(programs) * len(programs) / sum(programs)


@pytest.mark.parametrize("keys", [512, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize(("head_dim", "heads"), [(64, 32), (128, 16), (256, 8)])
def test_causal_programs_have_as_much_to_do(head_dim, heads, keys):
    assert longest_share(make_problem(16384 // keys, heads, keys, head_dim, causal=True)) < 1.04


@pytest.mark.parametrize(
    ("batch", "heads", "heads_kv", "keys", "group"),
    [(1, 16, 16, 512, 16), (1, 16, 16, 16384, 4), (1, 18, 18, 16384, 4), (1, 5, 5, 16384, 3), (1, 3, 3, 2**20, 1),
     (2, 32, 8, 16384, 16), (1, 64, 1, 2**17, 32)],
)  # fmt: skip
def test_heads_of_a_group_have_their_keys_in_l2(batch, heads, heads_kv, keys, group):
    """At D 128 a head's K and V take 512 B a key; groups are as equal as can be."""
    problem = make_problem(batch, heads, keys, heads_kv=heads_kv, causal=True)
    assert hopper_heads_per_group(problem, hopper_config(problem, H200).pack) == group


def test_a_program_has_a_tile_at_least():
    assert forced(make_problem(1, 1, 1000)).launches[0].grid == (8, 1, 1)


@pytest.mark.parametrize(
    ("tiles", "keys", "head_dim", "splits"),
    [
        (52, 8192, 128, True), (53, 8192, 128, False), (41, 2048, 128, True), (42, 2048, 128, False),
        (27, 1024, 128, True), (28, 1024, 128, False), (2, 512, 128, False), (48, 4096, 96, True),
        (63, 4096, 64, True), (64, 4096, 64, False), (53, 4096, 256, True), (54, 4096, 192, False),
        (2, 512, 256, False),
    ],
)  # fmt: skip
def test_few_row_tiles_are_left_to_the_kernel_that_splits_keys(tiles, keys, head_dim, splits):
    """Those of few keys are not: a second kernel costs more than it saves."""
    plan = plan_attention(make_problem(1, tiles, 128, head_dim, seqlen_k=keys), H200)
    if splits:
        assert plan.kernel == "forward_triton"
        assert (
            f"forward_gluon_sm90 too (its {tiles} row tiles do not fill 132 SMs, and it does not split the keys)"
            in plan.reason
        )
        assert isinstance(plan.config, ForwardConfig)
        assert plan.config.num_splits > 1
        assert forced(plan.problem).kernel == "forward_gluon_sm90"
    else:
        assert (plan.kernel, plan.launches[0].grid[0]) == ("forward_gluon_sm90", tiles)


def test_tiles_of_few_rows_are_left_to_the_kernel_that_has_smaller_ones():
    assert plan_attention(make_problem(1, 64, 65, seqlen_k=2048), H200).kernel == "forward_gluon_sm90"
    assert plan_attention(make_problem(1, 64, 64, seqlen_k=2048), H200).kernel == "forward_triton"
    assert plan_attention(make_problem(1, 106, 64, seqlen_k=2048), H200).kernel == "forward_gluon_sm90"


@pytest.mark.parametrize(
    ("head_dim", "causal", "warpgroups"), [(64, False, 2), (64, True, 2), (96, False, 3)], ids=("full", "causal", "96")
)
def test_two_warpgroups_serve_what_takes_one_round_where_that_was_measured(head_dim, causal, warpgroups):
    one = make_problem(1, 33, 512, head_dim, seqlen_k=4096, causal=causal)
    more = make_problem(1, 34, 512, head_dim, seqlen_k=4096, causal=causal)
    assert [hopper_config(problem, H200).warpgroups for problem in (one, more)] == [warpgroups, 3]


@pytest.mark.one_triton
@pytest.mark.parametrize("causal", all_but([False, True], "True"))
def test_what_takes_one_round_compiles(causal, tmp_path):
    plan = forced(make_problem(1, 30, 512, 64, seqlen_k=4095, causal=causal, return_lse=True))
    assert isinstance(plan.config, HopperConfig)
    assert plan.config.warpgroups == 2
    assert_compiles(plan, tmp_path)


@pytest.mark.parametrize(
    ("heads", "keys", "head_dim", "kernel"),
    [
        (32, 256, 64, "forward_short_gluon"), (32, 256, 128, "forward_gluon_sm90"),
        (16, 256, 128, "forward_short_gluon"), (16, 512, 64, "forward_gluon_sm90"), (8, 512, 64, "forward_short_gluon"),
    ],
)  # fmt: skip
def test_many_rows_of_few_keys_that_are_wide_are_not_for_the_one_pass_kernel(heads, keys, head_dim, kernel):
    plan = plan_attention(make_problem(1, heads, keys, head_dim), H200)
    assert plan.kernel == kernel
    wide = dataclasses.replace(make_problem(1, 32, 256, 64), head_dim_v=128)  # the wider of both decides
    assert plan_attention(wide, H200).kernel == "forward_gluon_sm90"
    assert (f"32 rows to {keys} keys of {head_dim} columns" in plan.reason) == (kernel == "forward_gluon_sm90")


@pytest.mark.parametrize(
    "problem",
    [
        make_problem(2, 40, 64, 64, seqlen_k=512),
        make_problem(1, 32, 256, 128, k_strides=(0, 0, 128, 1)),
    ],
    ids=("rows that leave tiles empty", "keys that TMA cannot read"),
)
def test_what_the_hopper_kernel_does_not_take_stays_with_the_one_pass_kernel(problem):
    assert plan_attention(problem, H200).kernel == "forward_short_gluon"


@pytest.mark.parametrize(
    ("heads", "keys", "kernel"),
    [
        (1, 1024, "forward_gluon_sm90"), (4, 1024, "forward_gluon_sm90"), (1, 2048, "forward_triton"),
        (2, 2048, "forward_triton"), (4, 2048, "forward_gluon_sm90"), (1, 4096, "forward_triton"),
    ],
)  # fmt: skip
def test_keys_of_256_columns_are_split_from_2k_on(heads, keys, kernel):
    assert plan_attention(make_problem(1, heads, keys, 256), H200).kernel == kernel


def test_keys_that_would_not_be_split_are_no_reason_to_pass_it_over():
    problem = make_problem(1, 1, 2048, 256, seqlen_k=2200)
    assert len(plan_attention(problem, H200, "forward_triton").launches) == 2
    assert plan_attention(problem, H200).kernel == "forward_triton"
    whole = make_problem(1, 1, 2048, 128, seqlen_k=768)
    assert len(plan_attention(whole, H200, "forward_triton").launches) == 1
    assert plan_attention(whole, H200).kernel == "forward_gluon_sm90"


def test_auto_takes_it_on_its_own_architecture_only():
    for gpu in SPECS.values():
        plan = plan_attention(make_problem(), gpu)
        assert (plan.kernel == "forward_gluon_sm90") == (gpu.arch == 90)
        assert "forward_gluon_sm90" not in plan.reason


def test_the_one_pass_kernel_comes_first():
    assert plan_attention(make_problem(1, 8, 256, 64), H200).kernel == "forward_short_gluon"


DENSE = (16 * 4096 * 128, 4096 * 128, 128, 1)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": "fp32"}, "it serves fp16 and bf16 only"),
    "no keys": ({"seqlen_k": 0}, "there are no keys"),
    "scale": ({"softmax_scale": -0.1}, "it needs a positive softmax_scale"),
    "scale of zero": ({"softmax_scale": 0.0}, "it needs a positive softmax_scale"),
    "subnormal scale": ({"softmax_scale": 8e-39}, "it needs a positive softmax_scale, of normal size in fp32"),
    "head_dim": ({"head_dim": 100, "head_dim_v": 128}, "it serves head dimensions that are multiples of 8"),
    "head_dim_v": ({"head_dim_v": 68}, "it serves head dimensions that are multiples of 8"),
    "addresses": ({"pointer_alignment": 8}, "TMA reads tensors that start at multiples of 16 bytes"),
    "sizes": ({"seqlen_k": 2**29}, f"it counts rows, keys and tiles up to {2**29}"),
    "tiles": ({"batch": 2**20, "heads": 512, "seqlen_q": 1}, f"it counts rows, keys and tiles up to {2**29}"),
    "columns of q": ({"q_strides": (DENSE[0], DENSE[1], 1, 4096)}, "rows of q are not contiguous"),
    "columns of v": ({"v_strides": (2 * DENSE[0], 2 * DENSE[1], 256, 2)}, "rows of v are not contiguous"),
    "expanded heads": ({"k_strides": (DENSE[0], 0, 128, 1)}, "k is expanded: TMA does not step by 0"),
    "expanded sequences": ({"v_strides": (0, DENSE[1], 128, 1)}, "v is expanded: TMA does not step by 0"),
    "expanded rows": ({"q_strides": (DENSE[0], DENSE[1], 0, 1)}, "q is expanded: TMA does not step by 0"),
    "odd rows": ({"k_strides": (DENSE[0], DENSE[1], 132, 1)}, "rows of k do not start at multiples of 16 bytes"),
    "odd heads": ({"v_strides": (DENSE[0], DENSE[1] + 4, 128, 1)}, "rows of v do not start at multiples of 16 bytes"),
    "distance": ({"q_strides": (2**39, DENSE[1], 128, 1)}, "rows of q are too far apart"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_refusals_say_why(why):
    """Forced, it raises; ``auto`` passes it over and ``explain`` says why."""
    changes, message = REFUSED[why]
    problem = make_problem(**changes)
    with pytest.raises(UnsupportedError, match="forward_gluon_sm90 does not serve") as raised:
        forced(problem)
    assert message in str(raised.value)
    plan = plan_attention(problem, H200)
    assert plan.kernel == "forward_triton"
    assert f"forward_gluon_sm90 too ({message}" in plan.reason


def test_another_architecture_is_refused():
    for gpu in (L4, B200):
        with pytest.raises(UnsupportedError, match=rf"it is for sm_90, this GPU is sm_{gpu.arch}"):
            plan_attention(make_problem(), gpu, "forward_gluon_sm90")


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 1, "q_strides": (0, 4096 * 128, 128, 1)},
        {"q_strides": (16 * 4096 * 128, 128, 16 * 128, 1)},  # [B, S, H, D]
        {"heads_kv": 1, "k_strides": (4096 * 128, 0, 128, 1)},
        {"seqlen_k": 1, "k_strides": (16 * 128, 128, 0, 1), "causal": True},
    ],
    ids=["one sequence", "sequence-major", "one head", "one key"],
)
def test_strides_that_are_never_stepped_along_do_not_count(changes):
    plan = forced(make_problem(**changes))
    for described in prepare_kernels(plan)[0].tensor_maps:
        assert described.strides[3] == 1
        assert all(stride > 0 and stride % 8 == 0 for stride in described.strides[:3])


def test_a_tensor_map_gives_axes_of_one_element_a_stride():
    assert TensorMap("bf16", (1, 1, 1, 64), (0, 0, 0, 1)).strides == (64, 64, 64, 1)
    assert TensorMap("bf16", (1, 4, 1, 64), (0, 640, 0, 1)).strides == (2560, 640, 64, 1)
    assert TensorMap("bf16", (2, 4, 8, 64), (2048, 512, 64, 1)).strides == (2048, 512, 64, 1)


@pytest.mark.parametrize("places", [(0,), (1,), (0, 1), ()])
def test_the_address_must_be_the_first_word_of_a_map(monkeypatch, places):
    """A driver that kept it elsewhere would have every call read the tensors of the first."""

    def encode(_tensor_map, _layout, address, out):
        words = (ctypes.c_uint64 * 16).from_address(out)
        words[:] = [7] * 16
        for place in places:
            words[place] = address

    monkeypatch.setattr(tensor_map, "encode", encode)
    memory = (ctypes.c_uint64 * 16)()
    described = TensorMap("bf16", (1, 1, 8, 64), (512, 512, 64, 1))
    if places == (0,):
        tensor_map.encode_without_address(described, {}, ctypes.addressof(memory))
        assert list(memory[1:]) == [7] * 15
    else:
        with pytest.raises(LaunchError, match="encodes tensor maps in another way"):
            tensor_map.encode_without_address(described, {}, ctypes.addressof(memory))


def test_its_sources_are_hashed():
    hopper = {
        "attention/forward/gluon_sm90.py",
        "attention/forward/primitives_sm90.py",
        "gpu/gluon_versions.py",
        "gpu/tensor_map.py",
    }
    assert hopper <= set(OPERATOR.sources("forward_gluon_sm90"))
    assert hopper <= set(OPERATOR.sources("flash_attention"))


def test_a_plan_reads_well():
    text = plan_attention(make_problem(seqlen_q=2048, causal=True), H200).as_text()
    assert "forward_short_gluon is passed over" in text
    assert "1024 row tiles of 128 on 132 SMs" in text
    assert "ping_pong True" in text
