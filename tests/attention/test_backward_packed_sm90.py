"""Packed sequences in Hopper's backward kernels: launches, tensor maps, room, and heads walked over together."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science.attention.backward.plan_sm90 import HopperBackwardConfig
from flashmoe_science.attention.backward.prepare import prepare_backward_kernels
from flashmoe_science.attention.backward.prepare_sm90 import prepare_hopper_backward, scratch_sizes
from flashmoe_science.attention.backward.primitives_sm90 import FAR
from flashmoe_science.gpu.launch import descriptor_rank

from .test_backward_sm90 import plan_of

pytestmark = pytest.mark.triton

PACKED: dict[str, dict[str, Any]] = {
    "causal": {},
    "d64": {"head_dim": 64, "head_dim_v": 64},
    "d192": {"head_dim": 192},
    "d256": {"head_dim": 256, "head_dim_v": 256},
    "lengths-in-use": {"seqused": "qk"},
    "window-that-hides-keys": {"seqlen_k": 1228, "window": (100, -1)},
    "many-long": {"batch": 2**14, "heads": 2**8, "heads_kv": 2**8},
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_are_ordered_first(name):
    """And what no other kernel writes is set to 0, here or, with lengths in use, by the call."""
    plan = plan_of(packed=True, **PACKED[name])
    assert plan.kernel == "backward_gluon_sm90"
    *first, before, _, after = [launch.pattern for launch in plan.launches]
    used = plan.problem.forward.seqused
    assert first == (["_order_key_tiles_kernel"] if used else ["_order_key_tiles_kernel", "_clear_kernel"])
    assert (before, after) == ("_prepare_backward_kernel", "_finish_dq_kernel")
    for kernel, launch in zip(prepare_backward_kernels(plan), plan.launches, strict=True):
        assert kernel.grid == launch.grid
        assert kernel.source.name == launch.pattern


@pytest.mark.parametrize("name", PACKED)
def test_maps_are_what_a_launch_takes(name):
    """Boxes have the axes of their tensors; maps of the tensor of another map come last, as no address is given."""
    for kernel in prepare_backward_kernels(plan_of(packed=True, **PACKED[name])):
        maps = iter(kernel.tensor_maps)
        kinds = [kind for _, kind in kernel.source.signature if kind.startswith(("*", "tensordesc"))]
        repeated = [kind.startswith("tensordesc") and next(maps).of is not None for kind in kinds]
        assert repeated == sorted(repeated)
        described = [kind for kind in kinds if kind.startswith("tensordesc")]
        assert [descriptor_rank(kind) for kind in described] == [len(at.shape) for at in kernel.tensor_maps]


def test_packed_sequences_take_room_for_their_tokens():
    """Not for the longest: a tile more for each sequence, as the last one of each may not be full."""
    plan = plan_of(packed=True, batch=5)
    assert isinstance(plan.config, HopperBackwardConfig)
    tokens = 700, 900
    sizes = scratch_sizes(plan.problem, plan.config, tokens)
    tiles = (700 // 64 + 5) * 8
    assert sizes == {
        "stats": 2 * 64 * tiles, "acc": 64 * 128 * tiles, "dq_semaphore": tiles + 1, "sequences": 7 * 5,
    }  # fmt: skip
    kernels = {kernel.source.name: kernel for kernel in prepare_hopper_backward(plan, tokens)}
    assert kernels["_prepare_backward_kernel"].grid == (tiles, 1, 1)
    assert kernels["_finish_dq_kernel"].grid == (2 * tiles, 1, 1)
    assert kernels["_clear_kernel"].grid == (8, 1, 1)


def test_maps_of_packed_sequences_end_where_a_sequence_does():
    """By the arithmetic of a tensor map: a box from the first row of a sequence on reads its rows, and then zeros."""
    plan = plan_of(packed=True, heads_kv=1, q_strides=(0, 256, 8 * 256, 1))
    main = {kernel.source.name: kernel for kernel in prepare_backward_kernels(plan)}["_backward_sm90_kernel"]
    maps = dict(zip(main.tensors, main.tensor_maps, strict=False))
    for name, heads, row_stride, head_stride in (("q", 8, 8 * 256, 256), ("k", 1, 128, 128), ("dv", 1, 128, 128)):
        shape, step = maps[name].shape, maps[name].strides
        assert max(shape) < 2**31
        assert max(2 * stride for stride in step) < 2**40
        for start, length, row in itertools.product((0, 7, 2**20), (0, 5, 40), (0, 4, 39, 40, 63)):
            place = FAR.value, start + length, heads - 1, FAR.value - length + row
            assert all(0 <= at < size for at, size in zip(place[:3], shape, strict=False))
            assert (place[3] < shape[3]) == (row < length)
            address = 2 * sum(at * stride for at, stride in zip(place, step, strict=False))
            assert address % 2**64 == 2 * ((start + row) * row_stride + (heads - 1) * head_stride)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, (2, 2)),
        ({"heads": 28}, (7, 2)),
        ({"heads": 24}, (6, 2)),
        ({"heads": 64}, (8, 2)),
        ({"heads": 36, "seqlen_q": 32768, "seqlen_k": 32768}, (3, 2)),
        ({"causal": False}, (1, 16)),
        ({"window": (100, -1)}, (2, 16)),
        ({"window": (100, -1), "head_dim": 64, "head_dim_v": 64}, (2, 8)),
        ({"window": (100, 100), "causal": False}, (1, 16)),
        ({"head_dim": 256, "head_dim_v": 256, "heads": 128}, (16, 16)),
        ({"head_dim": 64, "head_dim_v": 64}, (2, 32)),
        ({"head_dim": 192}, (2, 16)),
    ],
    ids=str,
)
def test_packed_sequences_take_whole_groups(change, found):
    """Of up to eight heads, however long the longest is; and of 128 columns, two K/V heads at a time when causal."""
    config = plan_of(**{"packed": True, "batch": 64, **change}).config
    assert isinstance(config, HopperBackwardConfig)
    assert (config.heads_together, config.heads_per_group) == found


# Query and K/V heads, sequences, the longest, head size; shares and heads together, causal. The first nine are the
# fastest that were measured (lab/hopper/backward/20_packed_shares_h200.txt), or equal to them.
SHARED: dict[tuple[int, int, int, int, int], tuple[int, int]] = {
    (16, 1, 27, 4096, 128): (2, 8),
    (16, 1, 10, 16384, 128): (4, 4),
    (16, 1, 27, 4096, 64): (2, 8),
    (8, 1, 132, 1280, 128): (2, 4),
    (8, 1, 7, 4096, 128): (4, 2),
    (8, 1, 108, 4096, 128): (1, 8),
    (7, 1, 27, 4096, 128): (1, 7),
    (32, 2, 27, 4096, 128): (2, 8),
    (96, 8, 27, 4096, 128): (2, 6),
    (16, 1, 27, 100, 128): (1, 8),
    (16, 1, 2, 4096, 128): (8, 2),
    (4, 1, 27, 4096, 128): (1, 4),
    (4, 1, 4, 4096, 128): (2, 2),
    (32, 8, 4, 4096, 128): (1, 4),
    (22, 1, 3, 1024, 128): (1, 2),
    (16, 2, 27, 4096, 128): (1, 8),
    (11, 1, 64, 4096, 128): (1, 1),
}


@pytest.mark.parametrize("sizes", SHARED, ids=str)
def test_programs_share_groups_of_packed_sequences(sizes):
    """Where one K/V head has few key tiles, and where a group is walked over twice; kernels are told so."""
    heads, heads_kv, batch, longest, head_dim = sizes
    change = {"heads": heads, "heads_kv": heads_kv, "batch": batch, "seqlen_q": longest, "seqlen_k": longest}
    for gpu in ("H200", "H100"):
        plan = plan_of(packed=True, gpu=gpu, **change, head_dim=head_dim, head_dim_v=head_dim)
        config = plan.config
        assert isinstance(config, HopperBackwardConfig)
        assert (config.shares, config.heads_together) == SHARED[sizes]
        assert ("share the heads" in plan.reason) == (config.shares > 1)
        tokens = 9999, 9999
        kernels = {kernel.source.name: kernel for kernel in prepare_hopper_backward(plan, tokens)}
        order, main = kernels["_order_key_tiles_kernel"], kernels["_backward_sm90_kernel"]
        constants = dict(main.source.constants)
        assert heads // heads_kv // config.shares == constants["CALL"].GROUP
        assert constants["shares.COUNT"] == config.shares
        assert scalars_of(order)["heads_kv"] == scalars_of(main)["sizes.heads_total"] == heads_kv * config.shares
        assert scalars_of(main)["sizes.heads_kv"] == heads_kv * config.shares
        sizes_of = scratch_sizes(plan.problem, config, tokens)
        query_tiles = heads * (tokens[0] // config.block_m + batch)
        key_tiles = heads_kv * (tokens[1] // config.keys + batch)
        if config.shares > 1:
            assert sizes_of["shares"] == key_tiles * config.keys * 2 * head_dim
            assert sizes_of["dq_semaphore"] == 2 * query_tiles + 1 > query_tiles + key_tiles
        else:
            assert "shares" not in sizes_of
            assert sizes_of["dq_semaphore"] == query_tiles + 1


def scalars_of(kernel: Any) -> dict[str, int]:
    """Return the numbers that a kernel is given, by name."""
    names = [name for name, kind in kernel.source.signature if not kind.startswith(("*", "tensordesc"))]
    return dict(zip(names, kernel.scalars, strict=True))


@pytest.mark.parametrize("tokens", [(9999, 9999), (100, 90_000), (1, 900_000)], ids=str)
def test_shares_of_packed_sequences_have_counters_of_their_own(tokens):
    """One of each key tile, behind those of query tiles, also where there are many more keys than queries."""
    plan = plan_of(packed=True, heads=16, heads_kv=1, batch=3, seqlen_q=4096, seqlen_k=4096)
    assert isinstance(plan.config, HopperBackwardConfig)
    assert plan.config.shares > 1
    sizes = scratch_sizes(plan.problem, plan.config, tokens)
    before = next(k for k in prepare_hopper_backward(plan, tokens) if k.source.name == "_prepare_backward_kernel")
    query_tiles, key_tiles = 16 * (tokens[0] // 64 + 3), tokens[1] // 128 + 3
    each = dict(before.source.constants)["WRITERS"]
    assert before.grid == (query_tiles, 1, 1)
    assert sizes["dq_semaphore"] == each * query_tiles + 1 >= query_tiles + 1 + key_tiles
    assert each & (each - 1) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"window": (100, -1)}, {"softcap": 9.0}, {"alibi": "fp32"}, {"seqused": "k"},
        {"seqlen_k": 8193}, {"head_dim": 192}, {"heads": 1},
    ],
    ids=str,
)  # fmt: skip
def test_other_packed_calls_share_no_groups(change):
    """Nobody measured shares there, or key tiles are not bounded by tokens."""
    usual: dict[str, Any] = {
        "packed": True, "heads": 16, "heads_kv": 1, "batch": 27, "seqlen_q": 4096, "seqlen_k": 4096
    }  # fmt: skip
    config = plan_of(**{**usual, **change}).config
    assert isinstance(config, HopperBackwardConfig)
    assert config.shares == 1
    assert plan_of(**usual).config.shares == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("heads", [(28, 4), (20, 4), (24, 4), (32, 2), (32, 8), (8, 8)], ids=str)
@pytest.mark.parametrize("longest", [2048, 4096, 16384])
def test_one_packed_sequence_is_planned_as_a_batch_of_one(longest, heads):
    """It has the same order of key tiles, and times of these were measured."""
    orders = []
    for packed in (False, True):
        sizes = {"seqlen_q": longest, "seqlen_k": longest, "heads": heads[0], "heads_kv": heads[1]}
        config = plan_of(packed=packed, batch=1, **sizes).config
        assert isinstance(config, HopperBackwardConfig)
        orders.append((config.shares, config.heads_together, config.heads_per_group))
    assert orders[0] == orders[1]
    assert plan_of(packed=True, batch=1, heads=28, heads_kv=4, seqused="k").config.shares == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(("sequences", "shares"), [(7, 4), (27, 1)])
def test_walks_without_a_mask_are_shared_where_there_are_few(sequences, shares):
    """Four shares were 2.25 times as fast with 7 documents on an H200."""
    lengths = {"batch": sequences, "seqlen_q": 4096, "seqlen_k": 4096}
    config = plan_of(packed=True, heads=16, heads_kv=1, causal=False, **lengths).config
    assert isinstance(config, HopperBackwardConfig)
    assert (config.shares, config.heads_together, config.heads_per_group) == (shares, 1, 16)


@pytest.mark.parametrize("sizes", [(16, 2, 14, 4096), (32, 2, 8, 2048), (48, 4, 8, 4096)], ids=str)
def test_a_part_of_the_heads_of_packed_sequences_is_summed_in_the_order_of_the_whole(sizes):
    heads, heads_kv, batch, longest = sizes
    orders = []
    for parts in (1, 2):
        change = {"heads": heads // parts, "heads_kv": heads_kv // parts, "seqlen_q": longest, "seqlen_k": longest}
        config = plan_of(packed=True, batch=batch, **change, asked={"head_parts": parts}).config
        assert isinstance(config, HopperBackwardConfig)
        orders.append((config.shares, config.heads_together))
    assert orders[0] == orders[1]
    assert orders[0][0] > 1


@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({"seqlen_q": 32}, "backward_triton"),
        ({"seqlen_q": 33}, "backward_gluon_sm90"),
        ({"seqlen_q": 64, "head_dim": 64, "head_dim_v": 64}, "backward_triton"),
        ({"seqlen_q": 65, "head_dim": 64, "head_dim_v": 64}, "backward_gluon_sm90"),
        ({"seqlen_q": 32, "kernel": "backward_gluon_sm90"}, "backward_gluon_sm90"),
        ({"seqlen_q": 32, "packed": False}, "backward_gluon_sm90"),
    ],
    ids=str,
)
def test_short_packed_sequences_are_left_to_the_portable_kernel(change, kernel):
    """Their tiles would take more memory than all that the call is given."""
    plan = plan_of(**{"packed": True, "seqlen_k": 512, **change})
    assert plan.kernel == kernel
    if kernel == "backward_triton":
        assert "fill half of its tiles" in plan.reason
