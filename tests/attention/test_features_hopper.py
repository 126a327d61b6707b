"""What can be shown of ``forward_features_gluon_sm90`` without a GPU: plans, refusals, schedule, machine code."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science import UnsupportedError
from flashmoe_science.attention.forward.plan import plan_attention
from flashmoe_science.attention.forward.plan_sm90 import HOPPER_TABLE
from flashmoe_science.attention.forward.variants_plan import (
    FEATURES_KERNEL,
    ORDER_SEQUENCES,
    heads_fit,
    heads_together,
    shares,
    variants_config,
)
from flashmoe_science.attention.forward.variants_prepare import prepare_features
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.attention.tiles import HopperConfig, Plan
from flashmoe_science.gpu.compile import compile_kernel
from flashmoe_science.gpu.launch import count_parameters
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.operators.attention import compile_plan

from ..exhaustive import all_but
from .cases import Ordering
from .key_loops import key_loops
from .walked import Fill, Seen, Walk, order_sequences

pytestmark = pytest.mark.triton

H200 = SPECS["H200"]
ALL: dict[str, Any] = {"window": (1000, 5), "softcap": 30.0, "sinks": "bf16"}
PACKED: dict[str, Any] = {"packed": True, "causal": True}
EVERYTHING: dict[str, Any] = {**ALL, "packed": True, "seqused": "qk"}


def make_problem(head_dim=128, dtype="bf16", **more) -> AttentionProblem:
    sizes = {"batch": 8, "heads": 16, "heads_kv": 4, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim_v": head_dim}
    return AttentionProblem(**{**sizes, **more}, head_dim=head_dim, dtype=dtype)


def forced(problem: AttentionProblem) -> Plan:
    return plan_attention(problem, H200, FEATURES_KERNEL)


COMPILED: dict[str, dict[str, Any]] = {
    "d64-everything": {"head_dim": 64, **EVERYTHING, "return_lse": True},
    "d128-packed-causal": {**PACKED, "return_lse": True},
    "d128-window-sinks": {"window": (127, 0), "sinks": "fp32"},
    "d256-everything": {"head_dim": 256, "dtype": "fp16", **EVERYTHING, "return_lse": True},
    "d192-128-packed": {"head_dim": 192, "head_dim_v": 128, "packed": True},
    "d128-alibi": {"alibi": "fp32", "causal": True, "return_lse": True},
    "d64-alibi-full": {"head_dim": 64, "alibi": "fp32", "return_lse": True},
    "d256-alibi-packed": {"head_dim": 256, "alibi": "bf16", **PACKED, "return_lse": True},
    "d64-bias-causal": {"head_dim": 64, "bias": "bf16", "causal": True, "return_lse": True},
    "d96-bias": {"head_dim": 96, "bias": "bf16", "return_lse": True},
    "d128-bias-window-sinks": {"bias": "fp16", "window": (1000, 5), "sinks": "fp32", "return_lse": True},
    "d128-bias-of-columns": {"dtype": "fp16", "bias": "bf16", "bias_strides": (4096, 0, 0, 1)},
    "d192-128-bias": {"head_dim": 192, "head_dim_v": 128, "bias": "bf16", "return_lse": True},
    "d192-bias-causal": {"head_dim": 192, "bias": "bf16", "causal": True, "return_lse": True},
    "d256-bias": {"head_dim": 256, "bias": "fp16", "dtype": "fp16", "sinks": "bf16", "return_lse": True},
    "d80-causal-softcap": {"head_dim": 80, "softcap": 20.0, "causal": True},
}


@pytest.mark.parametrize(
    "name", all_but(COMPILED, "d64-everything", "d80-causal-softcap", "d128-alibi", "d128-bias-window-sinks")
)
def test_kernels_compile(name, tmp_path):
    """As ``forward_gluon_sm90``: no spills in loops over keys, and in those without a mask the products side by side.

    Masked tiles wait for both products at once.
    """
    check_compiled(forced(make_problem(**COMPILED[name])), tmp_path)


def check_compiled(plan, tmp_path):
    outcomes = compile_plan(plan)
    assert [outcome.problems for outcome in outcomes] == [()] * len(plan.launches)
    kernel = prepare_features(plan)[-1]
    assert outcomes[-1].shared_memory_bytes <= 227 * 1024
    compiled = compile_kernel(kernel.source, 90)
    assert (32 * compiled.metadata.num_warps, 1, 1) == plan.launches[-1].block
    count_parameters(kernel.source, compiled.asm["ptx"])
    loops = key_loops(compiled.asm["cubin"], tmp_path)
    assert isinstance(plan.config, HopperConfig)
    waits = [loop["WARPGROUP.DEPBAR"] for loop in loops]
    one_warpgroup = [1, 2, 1] if plan.problem.bounded_left else [1, 2]
    assert waits == one_warpgroup * plan.config.warpgroups, "the products are serialised"
    for loop in loops:
        assert sum(count for opcode, count in loop.items() if opcode.startswith("HGMMA")) >= 8
        # A bias is read as scores are laid out, eight pairs of 16 bits at once.
        reads = sum(count for opcode, count in loop.items() if opcode.startswith("LDS"))
        assert reads == (plan.config.block_n // 16 if plan.problem.bias and plan.problem.bias_strides[2] else reads)
        # The slope as an operand takes four registers.
        assert sum(count for opcode, count in loop.items() if opcode.startswith("LDL")) <= plan.config.slope_product
        assert [opcode for opcode in loop if opcode.startswith("STL")] == []
    ptx = compiled.asm["ptx"]
    assert ("tanh.approx.f32" in ptx) == (plan.problem.softcap > 0)
    assert ("st.global.v4" in ptx) == plan.problem.packed  # rows of the last tile of a sequence
    if plan.problem.bias:
        # A bias is in registers before its slot is released: an arrival at a barrier waits for no load.
        fenced = re.findall(r"fence\.proxy\.async[^\n]*\n(?:[^\n]*\n){1,9}?\s*bar\.arrive [^\n]*, 160;", ptx)
        assert len(fenced) == len(waits) + plan.config.warpgroups
    if plan.problem.packed:
        # Values set to 0 are there before a product reads them: stored, fenced, and all warps have met.
        cleaned = re.findall(
            r"st\.shared(?:(?!wgmma\.mma)[\s\S])*?fence\.proxy\.async[^\n]*\n(?:[^\n]*\n){1,4}?\s*bar", ptx
        )
        assert len(cleaned) >= plan.config.warpgroups


def test_every_row_of_the_plain_table_serves_features():
    """The tile is that of the plain problem, at D 128 in turns with a softcap; none is refused for shared memory."""
    for (columns, columns_v, causal), rows in HOPPER_TABLE.items():
        for keys, config in rows:
            length = min(keys, 16384)
            problem = make_problem(columns, head_dim_v=columns_v, causal=causal, softcap=9.0, seqlen_k=length)
            plan = plan_attention(dataclasses.replace(problem, seqlen_q=length), H200)
            in_turns = config.ping_pong or (64 < columns <= 128 and columns_v <= 128)
            assert (plan.kernel, plan.config) == (FEATURES_KERNEL, dataclasses.replace(config, ping_pong=in_turns))
            with_slopes = plan_attention(dataclasses.replace(problem, seqlen_q=length, softcap=0.0, alibi="fp32"), H200)
            by_product = causal and max(columns, columns_v) <= 128
            expected = dataclasses.replace(config, slope_product=by_product)
            assert (with_slopes.kernel, with_slopes.config) == (FEATURES_KERNEL, expected)


@pytest.mark.parametrize(
    ("options", "by_product"),
    [
        ({"window": (100, 0)}, True),
        ({"window": (100, -1), "causal": True}, True),
        ({"window": (100, 3)}, False),  # a row sees keys ahead: its part of ALiBi is no line
        ({"window": (100, -1)}, False),
        ({"head_dim": 80, "causal": True}, True),
        ({"head_dim": 136, "causal": True}, False),
    ],
)
def test_slopes_come_from_a_product_where_no_row_sees_a_key_ahead(options, by_product):
    plan = forced(make_problem(**{"head_dim": 128, **options, "alibi": "fp32"}))
    assert isinstance(plan.config, HopperConfig)
    assert plan.config.slope_product == by_product


def test_a_window_takes_the_tile_of_the_keys_that_it_leaves():
    long = make_problem(64, causal=True, seqlen_q=16384, seqlen_k=16384)
    assert variants_config(dataclasses.replace(long, softcap=2.0)).warpgroups == 3
    assert variants_config(dataclasses.replace(long, window=(511, -1))).warpgroups == 2
    assert variants_config(dataclasses.replace(long, causal=False, window=(511, -1))).warpgroups == 3


@pytest.mark.parametrize("causal", [False, True])
def test_many_packed_sequences_take_the_tile_of_calls_that_fill_the_gpu(causal):
    """Each takes few row tiles; together they take many rounds."""
    problem = make_problem(64, causal=causal, packed=True, batch=64, seqlen_q=4096, seqlen_k=4096)
    plan = plan_attention(problem, H200)
    assert plan.kernel == FEATURES_KERNEL
    assert isinstance(plan.config, HopperConfig)
    assert plan.config.warpgroups == 3


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"bias": "fp32", "sinks": "bf16"}, "it serves biases of fp16 and bf16"),
        ({"bias": "bf16", "dropout_p": 0.1}, "it does not serve dropout"),
        ({"bias": "bf16", "packed": True}, "it does not serve packed sequences with a bias"),
        ({"bias": "bf16", "alibi": "fp32"}, "it does not serve ALiBi with a bias"),
        ({"bias": "bf16", "softcap": 3.0}, "it does not serve a softcap with a bias"),
        ({"bias": "bf16", "bias_strides": (0, 2**24, 1, 4096)}, "the columns of the bias are not contiguous"),
        ({"bias": "bf16", "bias_strides": (0, 0, 4096, 0)}, "the columns of the bias are not contiguous"),
        ({"bias": "fp16", "bias_strides": (0, 0, 4100, 1)}, "rows of the bias do not start at multiples of 16 bytes"),
        ({"bias": "fp16", "bias_alignment": 8}, "rows of the bias do not start at multiples of 16 bytes"),
        ({"bias": "fp16", "bias_strides": (2**39, 0, 4096, 1)}, "rows of the bias are too far apart"),
        ({"bias": "fp16", "bias_strides": (0, 0, 8, 1)}, "rows of the bias overlap"),
        ({"alibi": "fp32", "softcap": 2.0}, "it does not serve ALiBi with a softcap"),
        ({"alibi": "fp32", "alibi_stride": 16, "packed": True}, "packed, it serves slopes that all sequences share"),
        ({}, "the call has no features, which is what forward_gluon_sm90 is for"),
        ({"softcap": 2.0, "dtype": "fp32"}, "it serves fp16 and bf16 only"),
        ({"softcap": 2.0, "head_dim": 100}, "it serves head dimensions that are multiples of 8"),
        ({"packed": True, "pointer_alignment": 8}, "TMA reads tensors that start at multiples of 16 bytes"),
        ({"packed": True, "q_strides": (0, 128, 2052, 1)}, "rows of q do not start at multiples of 16 bytes"),
        ({"packed": True, "seqlen_q": 1, "q_strides": (0, 128, 2052, 1)}, "rows of q do not start at multiples of 16"),
        ({"window": (0, 0), "k_strides": (2**21, 2**19, 130, 1)}, "rows of k do not start at multiples of 16 bytes"),
        ({"packed": True, "k_strides": (0, 0, 512, 1)}, "k is expanded: TMA does not step by 0"),
        ({"sinks": "bf16", "softmax_scale": -1.0}, "it needs a positive softmax_scale"),
        ({"packed": True, "seqlen_k": 0}, "there are no keys"),
        ({"packed": True, "batch": 2**20, "seqlen_q": 2**20}, "it counts row tiles up to 2"),
    ],
)
def test_refusals(changes, why):
    """Forced it raises; ``auto`` says why and takes another kernel."""
    problem = make_problem(**changes)
    with pytest.raises(UnsupportedError, match=re.escape(why)):
        forced(problem)
    if problem.features and problem.batch < 2**20:
        plan = plan_attention(problem, H200)
        assert plan.kernel == "forward_triton"
        assert why in plan.reason
    with pytest.raises(UnsupportedError, match="it is for sm_90, this GPU is sm_100"):
        plan_attention(make_problem(softcap=3.0), SPECS["B200"], FEATURES_KERNEL)


@pytest.mark.parametrize(
    ("strides", "tile", "shape"),
    [
        ((2**28, 2**24, 4096, 1), (1, 1, 64, 128), (8, 16, 4096, 4096)),
        ((0, 2**24, 4096, 1), (1, 1, 64, 128), (1, 16, 4096, 4096)),
        ((2**24, 0, 4096, 1), (1, 1, 64, 128), (8, 1, 4096, 4096)),
        ((4096, 0, 0, 1), (1, 1, 1, 128), (8, 1, 1, 4096)),
        ((0, 0, 0, 1), (1, 1, 1, 128), (1, 1, 1, 4096)),
        ((2**28, 4096, 2**16, 1), (1, 1, 64, 128), (8, 16, 4096, 4096)),  # [B, Sq, H, Sk] in memory
    ],
)
def test_a_bias_is_as_large_as_its_own_axes(strides, tile, shape):
    """TMA steps along no axis that the bias does not change along: there the tile is the first."""
    plan = plan_attention(make_problem(bias="bf16", bias_strides=strides), H200)
    assert plan.kernel == FEATURES_KERNEL
    (prepared,) = prepare_features(plan)
    names = [name for name, kind in prepared.source.signature if kind.startswith("tensordesc")]
    place = names.index("bias_desc")
    assert prepared.tensor_maps[place].shape == shape
    assert dict(prepared.source.signature)["bias_desc"].startswith(f"tensordesc<bf16[{', '.join(map(str, tile))}]")
    assert prepared.tensors.index("bias") == len(prepared.tensors) - 1
    call = dict(prepared.source.constants)["CALL"]
    own = tuple(bool(stride) for stride in strides[:3])
    assert own == (call.BIAS_BATCH, call.BIAS_HEADS, call.BIAS_ROWS)
    assert (own[:2] == (False, True)) == call.BATCH_INNER


@pytest.mark.parametrize("head_dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_has_room_beside_keys_and_values(head_dims, causal):
    """In shared memory, and among the hardware's barriers."""
    problem = make_problem(head_dims[0], head_dim_v=head_dims[1], causal=causal, bias="bf16")
    plan = plan_attention(problem, H200)
    assert isinstance(plan.config, HopperConfig)
    assert (plan.kernel, plan.config.warpgroups, plan.config.num_stages) == (FEATURES_KERNEL, 2, 2)
    assert plan.config.block_n == {128: 128, 192: 64, 256: 32}[max(128, *head_dims)]
    assert plan.config.ping_pong or max(head_dims) > 128


def test_few_queries_are_left_to_smaller_tiles():
    plan = plan_attention(make_problem(packed=True, batch=200, seqlen_q=32), H200)
    assert plan.kernel == "forward_triton"
    assert "its row tiles are for more than the 32 queries of the longest sequence" in plan.reason


def test_softcap_with_an_lse_in_fp16_is_left_to_an_exact_tanh():
    """It may be for gradients."""
    capped = {"softcap": 50.0, "return_lse": True}
    plan = plan_attention(make_problem(**capped, dtype="fp16"), H200)
    assert plan.kernel == "forward_triton"
    assert "with a softcap its LSE is not exact enough for gradients in fp16" in plan.reason
    for change in (
        {"dtype": "bf16"},
        {"dtype": "fp16", "return_lse": False},
        {"dtype": "fp16", "softcap": 0.0, "sinks": "fp32"},
    ):
        assert plan_attention(make_problem(**{**capped, **change}), H200).kernel == FEATURES_KERNEL


def test_a_plan_of_packed_sequences_has_two_launches():
    plan = plan_attention(make_problem(packed=True, batch=130, causal=True), H200)
    assert [(launch.pattern, launch.grid[0]) for launch in plan.launches] == [
        ("_order_sequences_kernel", -(-130 // ORDER_SEQUENCES)),
        ("_forward_features_sm90_kernel", 132),
    ]
    assert plan.reason.endswith("at most 66560 row tiles of 128 on 132 SMs, drawn, the longest sequences first")


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def check_walk(walk: Walk, lengths: dict[int, tuple[int, int, int]]) -> None:
    """Check what all programs did. ``lengths`` are queries, keys and first key of a sequence, by its start."""
    p, config, block_n = walk.problem, walk.config, walk.config.block_n
    attended = []
    for fills, warpgroups in zip(walk.fills, walk.seen, strict=True):
        by_ring = {what: [fill for fill in fills if fill.what == what] for what in ("k", "v", "q0", "q1", "q2")}
        for what in "kv":
            assert [fill.number for fill in by_ring[what]] == list(range(len(by_ring[what])))
        k_before_v = [fill.what for fill in fills if fill.what in "kv"]
        assert k_before_v[:2] in ([], ["k", "v"], ["k", "k"])
        for w, tiles in enumerate(warpgroups):
            number = 0
            for n, seen in enumerate(tiles):
                queries, keys, first_k = lengths[seen.start]
                start = seen.start if p.packed else 0
                q = by_ring[f"q{w}"][n]
                assert (q.b, q.head, q.row) == (
                    0 if p.packed else seen.start,
                    seen.head,
                    start + seen.first_row + 64 * w,
                )
                attended += [(seen.start, seen.head, seen.first_row)] if w == 0 else []
                here = by_ring["k"][number : number + len(seen.outputs)]
                assert seen.outputs == [fill.number for fill in here]
                assert [(f.b, f.head, f.row) for f in here] == [
                    (f.b, f.head, f.row) for f in by_ring["v"][number : number + len(here)]
                ]
                check_biases(walk, fills, seen, here)
                assert {(f.b, f.head) for f in here} == {(0 if p.packed else seen.start, seen.head // p.group)}
                first_keys = [fill.row - first_k for fill in here]
                assert first_keys == list(range(first_keys[0], first_keys[-1] - 1, -block_n))
                position = seen.first_row + 64 * w + keys - queries
                assert set(seen.masked) <= set(seen.placed)
                assert seen.placed == [(i, position, first_keys[i - number]) for i in seen.outputs]
                assert sorted([i for i, _, _ in seen.masked] + seen.unmasked) == seen.outputs
                assert seen.cleaned == ([(number, keys - first_keys[0])] if p.packed else [])
                check_mask(
                    walk, seen, w, lengths[seen.start], set(first_keys), {first_keys[i - number] for i in seen.unmasked}
                )
                assert seen.stored[:3] == (seen.head, seen.start, seen.first_row + 64 * w)
                number += len(here)
            assert number == len(by_ring["k"])
            assert len(by_ring[f"q{w}"]) == len(tiles)
    rows = 64 * config.warpgroups
    places = {seen.start: seen.place for program in walk.seen for seen in program[0]}
    assert set(places) == set(lengths)
    expected = [
        (start, head, row)
        for start, place in places.items()
        for head in range(p.heads)
        for row in range(0, place, rows)
    ]
    assert sorted(attended) == sorted(expected)


def check_biases(walk: Walk, fills: list[Fill], seen: Seen, keys: list[Fill]) -> None:
    """Check that each tile of K has one of the bias, behind the tile of V before it: its slot is free after that."""
    biases = [fill for fill in fills if fill.what == "bias" and fill.number in seen.outputs]
    if not walk.problem.bias:
        assert biases == []
        return
    assert [f.number for f in biases] == seen.outputs
    assert [(f.b, f.head, f.row, f.key) for f in biases] == [
        (seen.start, seen.head, seen.first_row, fill.row) for fill in keys
    ]
    for fill in biases[1:]:
        before = next(f for f in fills if (f.what, f.number) == ("v", fill.number - 1))
        assert fills.index(before) < fills.index(fill)


def check_mask(
    walk: Walk, seen: Seen, w: int, lengths: tuple[int, int, int], visited: set[int], unmasked: set[int]
) -> None:
    """Check that no key that a row sees is left out, and none that one does not see left unmasked."""
    p, block_n = walk.problem, walk.config.block_n
    queries, keys, _ = lengths
    left, right = p.window
    right = max(right, 0) if p.bounded_right else keys + queries
    for row in range(seen.first_row + 64 * w, seen.first_row + 64 * w + 64):
        at = row + keys - queries
        first = max(0, at - left) if left >= 0 else 0
        last = min(keys - 1, at + right)
        if row < queries and last >= first:
            assert set(range(first // block_n * block_n, last + 1, block_n)) <= visited
        for key in unmasked:
            assert key + block_n <= keys
            assert row >= queries or first <= key <= key + block_n - 1 <= last


LENGTHS = strategies.integers(0, 1200) | strategies.sampled_from([0, 1, 63, 64, 128, 192, 256, 512])
WINDOWS = strategies.tuples(
    strategies.sampled_from([-1, -1, 0, 1, 63, 64, 127, 128, 300, 1000]),
    strategies.sampled_from([-1, -1, 0, 5, 70, 700]),
)


@settings(max_examples=120, deadline=None)
@given(
    head_dim=strategies.sampled_from([64, 96, 128, 256]),
    causal=strategies.booleans(),
    sizes=strategies.tuples(strategies.integers(1, 1500), strategies.integers(1, 1500)),
    window=WINDOWS,
    programs=strategies.integers(1, 9),
)
@example(head_dim=64, causal=True, sizes=(1, 1), window=(-1, -1), programs=3)
@example(head_dim=128, causal=True, sizes=(700, 20), window=(-1, -1), programs=2)
@example(head_dim=128, causal=False, sizes=(20, 1700), window=(0, -1), programs=5)
@example(head_dim=256, causal=True, sizes=(2048, 2048), window=(127, -1), programs=8)
def test_every_row_meets_the_keys_that_it_sees(head_dim, causal, sizes, window, programs):
    """The kernel's own control flow, with numbers for tensors."""
    problem = make_problem(
        head_dim, batch=2, heads=4, heads_kv=2, causal=causal, seqlen_q=sizes[0], seqlen_k=sizes[1], window=window,
        softcap=2.0,
    )  # fmt: skip
    check_walk(Walk(problem, programs=programs), dict.fromkeys(range(2), (sizes[0], sizes[1], 0)))


@settings(max_examples=60, deadline=None)
@given(
    head_dim=strategies.sampled_from([64, 128, 192, 256]),
    causal=strategies.booleans(),
    sizes=strategies.tuples(strategies.integers(1, 900), strategies.integers(1, 900)),
    window=WINDOWS,
    programs=strategies.integers(1, 9),
    own=strategies.tuples(strategies.booleans(), strategies.booleans()),
)
def test_every_tile_of_keys_has_its_bias(head_dim, causal, sizes, window, programs, own):
    """With a batch and heads of its own or not; heads that share it follow each other."""
    strides = (own[0] * 4 * 2**20, own[1] * 2**20, 1024, 1)
    problem = make_problem(
        head_dim, batch=3, heads=4, heads_kv=2, causal=causal, seqlen_q=sizes[0], seqlen_k=sizes[1], window=window,
        bias="bf16", bias_strides=strides,
    )  # fmt: skip
    walk = Walk(problem, programs=programs)
    check_walk(walk, dict.fromkeys(range(3), (sizes[0], sizes[1], 0)))
    if programs == 1 and own == (False, True):
        first = walk.seen[0][0][0]
        assert {(seen.head, seen.start) for seen in walk.seen[0][0][:3]} <= {(first.head, b) for b in range(3)}


@settings(max_examples=120, deadline=None)
@given(
    head_dim=strategies.sampled_from([64, 128, 256]),
    causal=strategies.booleans(),
    lengths=strategies.lists(
        strategies.tuples(LENGTHS, LENGTHS, strategies.sampled_from([0, 0, 1, 70, 2000])), min_size=1, max_size=6
    ),
    window=WINDOWS,
    programs=strategies.integers(1, 40),
    together=strategies.integers(1, 4),
    used=strategies.booleans(),
    seed=strategies.integers(0, 9),
)
def test_every_row_of_packed_sequences_meets_the_keys_that_it_sees(
    head_dim, causal, lengths, window, programs, together, used, seed
):  # fmt: skip
    """Whoever draws which tile; ``lengths`` are queries, keys, and what of both is not in use."""
    places, keys, cut = (tuple(column) for column in zip(*lengths, strict=True))
    queries = tuple(max(0, place - less) if used else place for place, less in zip(places, cut, strict=True))
    starts_k = tuple(sum(keys[:b]) for b in range(len(keys)))
    seen = tuple(max(0, length - less) if used else length for length, less in zip(keys, cut, strict=True))
    problem = make_problem(
        head_dim, batch=len(lengths), heads=4, heads_kv=2, causal=causal, seqlen_q=2048, seqlen_k=2048, window=window,
        packed=True, seqused="qk" if used else "",
    )  # fmt: skip
    rows = 64 * variants_config(problem).warpgroups
    sequences = order_sequences(places, seen, starts_k, 4, rows, queries, together)
    walk = Walk(problem, sequences, programs=programs, seed=seed)
    assert walk.tiles == sum(-(-place // rows) for place in places) * 4
    found = {start: (used_q, used_k, first_k) for _, tiles, start, _, used_q, first_k, used_k, _ in sequences if tiles}
    check_walk(walk, found)


def test_a_window_reads_what_it_needs():
    """8k keys with a window of 1024: 9 tiles of 128 keys for 128 rows, of which three are masked at most."""
    problem = make_problem(batch=1, heads=1, heads_kv=1, causal=True, seqlen_q=8192, seqlen_k=8192, window=(1023, -1))
    tiles = [seen for program in Walk(problem).seen for warpgroup in program for seen in warpgroup]
    assert {len(seen.outputs) for seen in tiles if seen.first_row >= 1024} == {9}
    assert max(len(seen.masked) for seen in tiles) <= 3


@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_programs_have_equal_shares(head_dim, seqlen):
    """Causal, in the order that the host fixes: what the slowest has, over the mean."""
    heads = 2048 // head_dim
    problem = make_problem(
        head_dim, batch=16384 // seqlen, heads=heads, heads_kv=heads, seqlen_q=seqlen, seqlen_k=seqlen, causal=True,
        softcap=9.0,
    )  # fmt: skip
    config = variants_config(problem)
    tiles_m, all_heads = cdiv(seqlen, 64 * config.warpgroups), problem.batch * heads
    together = heads_together(problem, config, 132)
    fit = heads_fit(problem)
    assert fit is not None
    assert together * seqlen <= max(fit, seqlen)
    found = shares(tiles_m, all_heads, together, 132)
    least = tiles_m * (tiles_m + 3) / 2 * all_heads
    assert sum(found) == least
    assert max(found) <= 1.04 * least / 132


@settings(max_examples=100, deadline=None)
@given(
    tiles_m=strategies.integers(1, 9),
    heads=strategies.integers(1, 30),
    together=strategies.integers(1, 30),
    all_dealt=strategies.booleans(),
    programs=strategies.integers(1, 40),
)
def test_every_row_tile_is_attended_once(tiles_m, heads, together, all_dealt, programs):
    """As ``deal`` and ``place`` find it, from program and turn."""
    dealt = heads if all_dealt else together
    turns = cdiv(dealt * tiles_m, programs)
    found, costs = [], [0] * programs
    for program, turn in itertools.product(range(programs), range(cdiv(heads, dealt) * turns)):
        group, in_round = divmod(turn, turns)
        place = in_round * programs + (programs - 1 - program if in_round % 2 else program)
        if place >= min(dealt, heads - group * dealt) * tiles_m:
            continue
        tile = group * dealt * tiles_m + place
        first = tile // (together * tiles_m) * together
        width = min(together, heads - first)
        rest = tile - first * tiles_m
        found.append((first + rest % width, tiles_m - 1 - rest // width))
        costs[program] += found[-1][1] + 2
    assert sorted(found) == [(head, m) for head in range(heads) for m in range(tiles_m)]
    if dealt == together:
        assert costs == shares(tiles_m, heads, dealt, programs)


ORDERINGS = [
    Ordering((5,), (7,), 3, 128, why="one"),
    Ordering((0, 300, 1, 129, 128, 0, 700), (9, 300, 2000, 129, 0, 0, 700), 4, 128, why="empty-sequences"),
    Ordering(
        (100, 200, 64, 1), (50, 500, 64, 1), 2, 192, seqused_q=(90, 0, 64, 1), seqused_k=(50, 30, 64, 0), why="used"
    ),
    Ordering(tuple(range(150)), tuple((37 * i) % 150 for i in range(150)), 2, 128, why="several-programs"),
    Ordering((64,) * 66, (64,) * 66, 8, 128, together_keys=200, why="ties-and-heads-together"),
]


@pytest.mark.parametrize("case", ORDERINGS, ids=str)
def test_sequences_are_ordered_by_their_keys(case, interpreted):
    """The kernel in Triton's interpreter, against sorting."""
    interpreted(case)
