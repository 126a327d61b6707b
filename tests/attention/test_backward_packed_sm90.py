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
        ({"window": (100, -1)}, (1, 16)),
        ({"head_dim": 64, "head_dim_v": 64}, (2, 32)),
        ({"head_dim": 192}, (2, 16)),
    ],
    ids=str,
)
def test_packed_sequences_take_whole_groups(change, found):
    """Of up to eight heads, however long the longest is; and of 128 columns, two K/V heads at a time when causal."""
    config = plan_of(packed=True, **change).config
    assert isinstance(config, HopperBackwardConfig)
    assert (config.heads_together, config.heads_per_group) == found


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
