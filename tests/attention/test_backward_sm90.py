"""The backward kernel for Hopper: when plans choose it, how it splits the work, and what compiling it shows."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science import UnsupportedError
from flashmoe_science.attention.backward.calls import prepare_backward
from flashmoe_science.attention.backward.plan import BackwardConfig, BackwardPlan, plan_backward
from flashmoe_science.attention.backward.plan_sm90 import HopperBackwardConfig
from flashmoe_science.attention.backward.prepare import prepare_backward_kernels
from flashmoe_science.attention.backward.prepare_sm90 import prepare_hopper_backward, scratch_sizes
from flashmoe_science.attention.backward.problem import BackwardProblem
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.gpu.specs import SPECS

from .gluon_in_python import Int32, span_of

pytestmark = pytest.mark.triton

H200 = SPECS["H200"]
SIZES: dict[str, Any] = {
    "batch": 2, "heads": 8, "heads_kv": 4, "seqlen_q": 1000, "seqlen_k": 1100, "head_dim": 128, "head_dim_v": 128,
    "dtype": "bf16", "causal": True,
}  # fmt: skip


def plan_of(
    *, gpu: str = "H200", kernel: str = "auto", asked: dict[str, Any] | None = None, **change: Any
) -> BackwardPlan:
    problem = BackwardProblem(AttentionProblem(**{**SIZES, **change}), **(asked or {}))
    return plan_backward(problem, SPECS[gpu], kernel)


SERVED: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "fp16": {"dtype": "fp16"},
    "d64": {"head_dim": 64, "head_dim_v": 64},
    "d104-dv40": {"head_dim": 104, "head_dim_v": 40},
    "d8": {"head_dim": 8, "head_dim_v": 8},
    "mqa": {"heads_kv": 1},
    "one-row": {"seqlen_q": 1},
    "one-key": {"seqlen_k": 1},
    "window": {"window": (9, -1)},
    "window-on-both-sides": {"causal": False, "window": (100, 7)},
    "dlse": {"asked": {"has_dlse": True}},
    "only-q": {"asked": {"wants_kv": False}},
    "only-kv": {"asked": {"wants_q": False}},
    "softcap": {"softcap": 9.0, "window": (9, -1)},
    "alibi": {"alibi": "fp32", "window": (9, -1)},
    "alibi-full": {"alibi": "bf16", "causal": False, "sinks": "bf16"},
    "constant-sinks": {"sinks": "bf16", "window": (128, -1)},
    "sequence-major": {"q_strides": (8 * 1000 * 128, 128, 8 * 128, 1)},
    "huge-strides": {"k_strides": (2**38, 2**34, 2**20, 1)},
}
NOT_SERVED: dict[str, tuple[dict[str, Any], str]] = {
    "fp32": ({"dtype": "fp32"}, "it serves fp16 and bf16 only"),
    "d60": ({"head_dim": 60}, "it serves head dimensions that are multiples of 8"),
    "bias": ({"bias": "fp32", "window": (9, -1)}, "it does not serve a bias"),
    "alibi-softcap": ({"alibi": "fp32", "softcap": 9.0}, "it does not serve ALiBi with a softcap"),
    "alibi-gradient-of-sinks": (
        {"alibi": "fp32", "sinks": "fp32", "asked": {"wants_sinks": True}},
        "it does not serve the gradient of sinks with ALiBi",
    ),
    "softcap-fp16": (
        {"dtype": "fp16", "softcap": 9.0},
        "with a softcap its probabilities are not exact enough in fp16",
    ),
    "keys-that-none-sees": ({"seqlen_k": 1228, "window": (100, -1)}, "hides the first 128 keys from all queries"),
    "two": ({"dropout_p": 0.1, "sinks": "bf16", "bias": "bf16"}, "it does not serve a bias and dropout"),
    "packed-alibi": (
        {"packed": True, "alibi": "fp32", "alibi_stride": 8},
        "packed, it serves slopes that all sequences share",
    ),
    "packed-expanded": ({"packed": True, "k_strides": (0, 0, 128, 1)}, "k is expanded"),
    "negative-scale": ({"softmax_scale": -1.0}, "it needs a positive softmax_scale"),
    "only-sinks": (
        {"sinks": "fp32", "asked": {"wants_q": False, "wants_kv": False, "wants_sinks": True}},
        "none of them is asked for",
    ),
    "alignment": ({"pointer_alignment": 8}, "TMA reads tensors that start at multiples of 16 bytes"),
    "expanded": ({"k_strides": (1100 * 128, 0, 128, 1)}, "k is expanded"),
    "columns": ({"v_strides": (4 * 1100 * 128, 1100 * 128, 1, 1100)}, "rows of v are not contiguous"),
    "odd-rows": ({"q_strides": (8 * 1000 * 132, 1000 * 132, 132, 1)}, "rows of q do not start at multiples"),
    "o": ({"asked": {"o_strides": (8 * 1000 * 132, 1000 * 132, 132, 1)}}, "rows of o do not start at multiples"),
    "do": ({"asked": {"do_strides": (0, 1000 * 128, 128, 1)}}, "the gradient of o is expanded"),
    "far": ({"k_strides": (2**40, 2**34, 2**20, 1)}, "rows of k are too far apart"),
    "rows": ({"batch": 2**14, "heads": 2**8, "heads_kv": 2**8}, "it counts query tiles up to"),
    "positions": ({"seqlen_k": 2**29}, "it counts positions up to"),
}


@pytest.mark.parametrize("name", SERVED)
def test_it_is_chosen_where_it_serves(name):
    plan = plan_of(**SERVED[name])
    assert plan.kernel == "backward_gluon_sm90"
    assert isinstance(plan.config, HopperBackwardConfig)
    assert [launch.pattern for launch in plan.launches] == [
        "_prepare_backward_kernel", "_backward_sm90_kernel", "_finish_dq_kernel",
    ]  # fmt: skip
    for kernel, launch in zip(prepare_backward_kernels(plan), plan.launches, strict=True):
        assert kernel.grid == launch.grid
        assert kernel.source.name == launch.pattern
    assert plan_of(**SERVED[name], kernel="backward_triton").kernel == "backward_triton"


@pytest.mark.parametrize(
    "change", [{"packed": True}, {"causal": False}, {"causal": False, "window": (300, 9)}], ids=str
)
@pytest.mark.parametrize("dims", [(64, 64), (104, 40), (128, 128), (192, 128), (256, 256)], ids=str)
def test_alibi_is_served(dims, change):
    assert plan_of(head_dim=dims[0], head_dim_v=dims[1], alibi="fp32", **change).kernel == "backward_gluon_sm90"


@pytest.mark.parametrize(
    ("length", "head_dim", "heads_per_group"), [(32768, 128, 16), (65536, 128, 4), (32768, 256, 16), (65536, 256, 16)]
)
def test_long_walks_take_fewer_heads_in_turns(length, head_dim, heads_per_group):
    """With eight, what they read left L2 at 128k keys."""
    sizes = {"seqlen_q": length, "seqlen_k": length, "head_dim": head_dim, "head_dim_v": head_dim}
    config = plan_of(**sizes, heads=32, heads_kv=8).config
    assert isinstance(config, HopperBackwardConfig)
    assert config.heads_per_group == heads_per_group


@pytest.mark.parametrize(
    ("length", "change", "heads_per_group"),
    [(16384, {}, 16), (32768, {}, 2), (65536, {}, 1), (131072, {}, 1), (32768, {"window": (4095, 9)}, 16)],
    ids=str,
)
def test_long_walks_without_a_mask_take_fewer_heads_in_turns(length, change, heads_per_group):
    sizes = {"seqlen_q": length, "seqlen_k": length, "head_dim": 128, "head_dim_v": 128, "causal": False}
    config = plan_of(**sizes, **change, heads=32, heads_kv=8).config
    assert isinstance(config, HopperBackwardConfig)
    assert config.heads_per_group == heads_per_group


@pytest.mark.parametrize(
    ("length", "heads", "expected"),
    [(16384, 32, (4, 32)), (16384, 64, (8, 4)), (32768, 32, (4, 4)), (32768, 8, (1, 32))],
)
def test_long_causal_walks_of_64_columns_take_a_group_together(length, heads, expected):
    sizes = {"seqlen_q": length, "seqlen_k": length, "head_dim": 64, "head_dim_v": 64}
    config = plan_of(**sizes, heads=heads, heads_kv=8).config
    assert isinstance(config, HopperBackwardConfig)
    assert (config.heads_together, config.heads_per_group) == expected


@pytest.mark.parametrize("packed", [False, True])
def test_the_gradient_of_sinks_has_a_launch(packed):
    plan = plan_of(sinks="bf16", packed=packed, asked={"wants_sinks": True})
    assert plan.launches[-1].pattern == "_sinks_gradient_kernel"
    assert plan.launches[-1].grid == (8, 1, 1)  # one program a head
    kernels = prepare_backward_kernels(plan)
    assert [kernel.source.name for kernel in kernels] == [launch.pattern for launch in plan.launches]


@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_it_does_not_serve_says_why(name):
    change, reason = NOT_SERVED[name]
    plan = plan_of(**change)
    assert plan.kernel == "backward_triton"
    assert isinstance(plan.config, BackwardConfig)
    assert f"backward_gluon_sm90 is passed over ({reason}" in plan.reason or reason in plan.reason
    assert reason in str(plan)
    with pytest.raises(UnsupportedError, match="backward_gluon_sm90 does not serve") as error:
        plan_of(**change, kernel="backward_gluon_sm90")
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("dims", "name", "keys"),
    [
        ((256, 256), "_backward_wide_sm90_kernel", 64),
        ((192, 136), "_backward_wide_sm90_kernel", 64),
        ((200, 128), "_backward_wide_sm90_kernel", 64),
        ((136, 256), "_backward_wide_sm90_kernel", 64),
        ((8, 136), "_backward_wide_sm90_kernel", 64),
        ((192, 128), "_backward_192_sm90_kernel", 128),
        ((136, 8), "_backward_192_sm90_kernel", 128),
    ],
    ids=str,
)
def test_wide_heads_have_kernels_of_their_own(dims, name, keys):
    change = {"head_dim": dims[0], "head_dim_v": dims[1]}
    plan = plan_of(**change)
    assert plan.kernel == "backward_gluon_sm90"
    assert isinstance(plan.config, HopperBackwardConfig)
    assert (plan.config.keys, plan.config.writers) == (keys, 128 // keys)
    assert [launch.pattern for launch in plan.launches][1] == name
    assert plan.reason == f"it is the one for Hopper, where {name} serves heads of this width"
    assert plan_of(**change, seqlen_k=4096).launches[1].grid == (132, 1, 1)
    assert plan_of(**change, seqlen_k=130, batch=1).launches[1].grid == (4 * -(-130 // keys), 1, 1)
    for kernel, launch in zip(prepare_backward_kernels(plan), plan.launches, strict=True):
        assert kernel.grid == launch.grid
        assert kernel.source.name == launch.pattern


@pytest.mark.parametrize(
    ("dims", "columns", "boxes", "dq"),
    [
        ((192, 128), 192, [(128, 64)] * 3, [(256, 128), 192]),
        ((136, 8), 192, [(128, 64)] * 3, [(256, 128), 192]),
        ((192, 192), 192, [(128, 64)] * 3, [(256,), 256]),
        ((8, 136), 192, [(128, 64)] * 3, [(256,), 256]),
        ((200, 128), 256, [(256,)] * 3, [(256,), 256]),
        ((256, 256), 256, [(256,)] * 3, [(256,), 256]),
    ],
    ids=str,
)
def test_wide_heads_are_copied_without_the_columns_behind_192(dims, columns, boxes, dq):
    """Q, K, dK and dQ in one part or two, both of one tensor; dQ as wide in memory as its parts."""
    plan = plan_of(head_dim=dims[0], head_dim_v=dims[1])
    assert isinstance(plan.config, HopperBackwardConfig)
    tiles = 2 * 8 * 16
    assert scratch_sizes(plan.problem, plan.config)["acc"] == tiles * 64 * dq[1]
    assert plan.launches[2].grid == (tiles * dq[1] // 64, 1, 1)
    _, main, after = prepare_backward_kernels(plan)
    if main.source.name == "_backward_192_sm90_kernel":
        assert columns == 192
    else:
        assert dict(main.source.constants)["COLUMNS"] == columns
    assert dict(after.source.constants)["PARTS"] == dq[1] // 64
    described = [(name, kind) for name, kind in main.source.signature if kind.startswith("tensordesc")]
    block = {name: [int(size) for size in re.findall(r"\[([\d, ]+)\]", kind)[0].split(",")] for name, kind in described}
    maps = dict(zip(block, main.tensor_maps, strict=True))
    names = list(block)

    def parts(name: str, axis: int) -> tuple[int, ...]:
        more = name.replace("_desc", "_more_desc")
        if more not in block:
            return (block[name][axis],)
        assert names[maps[more].of or 0] == name
        assert (maps[more].shape, maps[more].strides) == (maps[name].shape, maps[name].strides)
        return block[name][axis], block[more][axis]

    assert [parts(name, 3) for name in ("q_desc", "k_desc", "dk_desc")] == boxes
    assert parts("dq_desc", 0) == dq[0]


def test_other_gpus_and_empty_calls():
    problem = BackwardProblem(AttentionProblem(**SIZES))
    for gpu in ("A100", "L4", "B200", "RTX 5090"):
        plan = plan_backward(problem, SPECS[gpu])
        assert plan.kernel == "backward_triton"
        assert f"it is for sm_90, this GPU is sm_{SPECS[gpu].arch}" in plan.reason
    assert plan_of(seqlen_k=0).launches == ()
    assert plan_of(seqlen_k=0, kernel="backward_gluon_sm90").kernel == "backward_gluon_sm90"
    with pytest.raises(UnsupportedError, match="backward_gluon_sm90 needs an NVIDIA GPU"):
        plan_backward(problem, None, "backward_gluon_sm90")


@pytest.mark.parametrize(("block_m", "keys"), [(64, 128), (128, 128), (64, 64)])
def test_spans_are_what_the_window_shows(block_m, keys):
    """Key tiles and query tiles by the kernels' own arithmetic, against every pair of a row and a key."""
    for seqlen_q, seqlen_k, left, right in itertools.product(
        (1, 130, 400), (1, 129, 500), (-1, 0, 5, 127, 128, 300), (-1, 0, 7, 200)
    ):
        rows, columns = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :]
        ahead = columns - rows - (seqlen_k - seqlen_q)
        seen = (ahead <= (right if right >= 0 else seqlen_q + seqlen_k)) & (
            ahead >= -(left if left >= 0 else seqlen_q + seqlen_k)
        )
        tiles_m, tiles_n = -(-seqlen_q // block_m), -(-seqlen_k // keys)
        if not seen[:, :keys].any():
            continue  # plans refuse it
        span = span_of(seqlen_q, seqlen_k, left, right, block_m, keys)
        visits: dict[int, list[int]] = {m: [] for m in range(tiles_m)}
        for n in range(tiles_n):
            for m in range(span.first(Int32(n)), span.end(Int32(n))):
                visits[m].append(n)
        for m, n in itertools.product(range(tiles_m), range(tiles_n)):
            tile = seen[m * block_m : (m + 1) * block_m, n * keys : (n + 1) * keys]
            assert n in visits[m] or not tile.any(), "a key tile passes over a query tile that sees it"
        for m, visitors in visits.items():
            first = span.first_key_tile(Int32(m))
            assert visitors == [*range(first, first + len(visitors))], "turns have gaps"
        for n, half in itertools.product(range(tiles_n), range(0, keys, 64)):
            key, first, end = Int32(n * keys + half), span.first(Int32(n)), span.end(Int32(n))
            edge = span.edge(key, first, end)
            for m in range(first, end):
                tile = seen[m * block_m : (m + 1) * block_m, key : key + 64]
                whole = key + 64 <= seqlen_k and bool(tile.all())
                if left >= 0:  # what is whole but for rows behind the last may be masked as well
                    full_tile = (m + 1) * block_m <= seqlen_q
                    assert span.is_whole(key, Int32(m * block_m)) == whole or (whole and not full_tile)
                if left < 0:
                    assert (edge <= m) == whole


def test_programs_are_no_more_than_key_tiles():
    sizes: dict[str, Any] = {"batch": 1, "heads": 2, "heads_kv": 1, "seqlen_k": 300}
    assert plan_of(**sizes, causal=False).launches[1].grid == (3, 1, 1)
    assert plan_of(**sizes).launches[1].grid == (2 * 3, 1, 1)  # two programs share the heads
    assert plan_of(causal=False).launches[1].grid == (2 * 4 * 9, 1, 1)
    assert plan_of(seqlen_k=8192).launches[1].grid == (132, 1, 1)


def test_short_causal_steps_take_more_heads_in_turns():
    found = {}
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            config = plan_of(batch=64, head_dim=head_dim, head_dim_v=head_dim, causal=causal).config
            assert isinstance(config, HopperBackwardConfig)
            found[head_dim, causal] = config.heads_per_group
    assert found == {key: 32 if key == (64, True) else 16 for key in found}


@pytest.mark.parametrize(
    ("change", "together"),
    [
        ({}, 2),
        ({"heads_kv": 2}, 4),
        ({"heads_kv": 1}, 8),
        ({"heads_kv": 1, "seqlen_q": 2049, "seqlen_k": 2049}, 4),
        ({"heads": 28, "heads_kv": 4}, 7),
        ({"heads_kv": 2, "seqlen_q": 2048, "seqlen_k": 2048, "gpu": "H100"}, 2),
        ({"heads_kv": 2, "seqlen_k": 1024, "gpu": "H100"}, 4),
        ({"heads": 28, "heads_kv": 4, "seqlen_q": 4096, "seqlen_k": 4096}, 7),
        ({"heads": 28, "heads_kv": 4, "seqlen_q": 4096, "seqlen_k": 4096, "gpu": "H100"}, 1),
        ({"heads": 28, "heads_kv": 4, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 64, "head_dim_v": 64}, 7),
        ({"heads_kv": 1, "head_dim": 64, "head_dim_v": 64}, 4),
        ({"heads_kv": 1, "seqlen_q": 16384, "seqlen_k": 16384}, 4),
        ({"heads_kv": 1, "seqlen_q": 16384, "seqlen_k": 16385}, 1),
        ({"heads_kv": 1, "seqlen_q": 1000, "seqlen_k": 2000}, 8),
        ({"heads_kv": 1, "seqlen_q": 1000, "seqlen_k": 2001}, 1),
        ({"heads": 6, "heads_kv": 2}, 3),
        ({"heads_kv": 8}, 1),
        ({"causal": False}, 1),
        ({"window": (100, -1)}, 1),
        ({"head_dim": 256, "head_dim_v": 256, "heads_kv": 2}, 2),
        ({"head_dim": 192, "heads_kv": 1}, 2),
    ],
    ids=str,
)
def test_heads_of_a_group_are_walked_over_together(change, together):
    """Where walks over a head are unlike in length, as many as the group is a multiple of; and a kernel is told so."""
    plan = plan_of(**{"batch": 64, **change})
    assert isinstance(plan.config, HopperBackwardConfig)
    assert (plan.config.heads_together, plan.config.shares) == (together, 1)
    assert plan.problem.forward.group % together == 0
    call = dict(prepare_backward_kernels(plan)[1].source.constants)["CALL"]
    assert together == call.TOGETHER


# Query and K/V heads, tokens, head size; shares, heads together and shares in turns on an H200, and on an H100.
SHARED: dict[tuple[int, int, int, int], tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    (28, 4, 4096, 128): ((7, 1, 4), (7, 1, 4)),
    (28, 4, 8192, 128): ((1, 7, 8), (1, 1, 16)),
    (40, 8, 4096, 128): ((1, 5, 8), (1, 1, 16)),
    (20, 4, 4096, 128): ((5, 1, 4), (5, 1, 4)),
    (24, 4, 4096, 128): ((2, 3, 8), (2, 3, 8)),
    (24, 4, 8192, 64): ((2, 3, 8), (1, 2, 32)),
    (64, 8, 4096, 128): ((2, 4, 8), (1, 2, 16)),
    (64, 8, 8192, 128): ((1, 4, 16), (1, 2, 16)),
    (32, 2, 4096, 128): ((4, 4, 8), (4, 4, 8)),
    (32, 2, 16384, 128): ((4, 4, 8), (1, 2, 16)),
    (32, 2, 32768, 128): ((1, 1, 16), (1, 1, 16)),
    (16, 1, 8192, 128): ((4, 4, 8), (4, 4, 8)),
    (32, 8, 2048, 128): ((2, 2, 8), (2, 2, 8)),
    (71, 1, 16384, 64): ((71, 1, 4), (71, 1, 4)),
    (71, 1, 16384, 256): ((1, 1, 16), (1, 1, 16)),
}


@pytest.mark.parametrize("gpu", ["H200", "H100"])
@pytest.mark.parametrize("sizes", [sizes for sizes in SHARED if sizes[1] % 2 == 0], ids=str)
def test_a_part_of_the_heads_is_summed_in_the_order_of_the_whole(sizes, gpu):
    """Ranks that have some heads each give the bits of one GPU, which has more key tiles."""
    heads, heads_kv, seqlen, head_dim = sizes
    orders = []
    for parts in (1, 2):
        change = {
            "batch": 1,
            "heads": heads // parts,
            "heads_kv": heads_kv // parts,
            "seqlen_q": seqlen,
            "seqlen_k": seqlen,
        }
        plan = plan_of(gpu=gpu, **change, head_dim=head_dim, head_dim_v=head_dim, asked={"head_parts": parts})
        assert isinstance(plan.config, HopperBackwardConfig)
        orders.append((plan.config.shares, plan.config.heads_together))
    assert orders[0] == orders[1]


@pytest.mark.parametrize("sizes", SHARED, ids=str)
def test_programs_share_groups_where_key_tiles_are_few(sizes):
    """Kernels are told so; there is room for the sums and for a semaphore of each key tile."""
    heads, heads_kv, seqlen, head_dim = sizes
    change = {"batch": 1, "heads": heads, "heads_kv": heads_kv, "seqlen_q": seqlen, "seqlen_k": seqlen}
    for gpu, expected in zip(("H200", "H100"), SHARED[sizes], strict=True):
        plan = plan_of(gpu=gpu, **change, head_dim=head_dim, head_dim_v=head_dim)
        config = plan.config
        assert isinstance(config, HopperBackwardConfig)
        assert (config.shares, config.heads_together, config.heads_per_group) == expected
        scratch = scratch_sizes(plan.problem, config)
        key_tiles, query_tiles = heads_kv * -(-seqlen // config.keys), heads * -(-seqlen // config.block_m)
        before, main, _ = prepare_backward_kernels(plan)
        call = dict(main.source.constants)["CALL"]
        assert (heads // heads_kv // config.shares, config.heads_together) == (call.GROUP, call.TOGETHER)
        assert ("share" in plan.reason) == (config.shares > 1)
        if config.shares > 1:
            assert dict(main.source.constants)["shares.COUNT"] == config.shares
            assert dict(before.source.constants)["WRITERS"] == 2
            assert scratch["dq_semaphore"] == 2 * query_tiles + 1
            assert scratch["shares"] == key_tiles * config.keys * 2 * head_dim
            assert key_tiles <= query_tiles
        elif head_dim <= 128:
            assert "shares" not in scratch
            assert scratch["dq_semaphore"] == query_tiles + 1


@pytest.mark.parametrize(
    "change",
    [
        {"causal": False}, {"window": (100, -1)}, {"softcap": 9.0}, {"alibi": "fp32"}, {"packed": True},
        {"heads_kv": 8}, {"seqlen_k": 2001},
    ],
    ids=str,
)  # fmt: skip
def test_other_calls_share_no_groups(change):
    """No run showed that it gains there."""
    config = plan_of(**change).config
    assert isinstance(config, HopperBackwardConfig)
    assert config.shares == 1
    assert plan_of().config.shares == 2  # type: ignore[union-attr]


def test_slower_memory_takes_fewer_heads_together():
    """Where the walk over several reads more of it."""
    found = {}
    for gpu, dim, heads_kv in itertools.product(("H100", "H200"), (64, 128, 192, 256), (1, 4)):
        columns_v = 128 if dim == 192 else dim
        config = plan_of(gpu=gpu, batch=64, heads_kv=heads_kv, head_dim=dim, head_dim_v=columns_v).config
        assert isinstance(config, HopperBackwardConfig)
        found[gpu, dim, 8 // heads_kv] = config.heads_together
    assert found == {
        ("H100", 64, 8): 4, ("H100", 128, 8): 8, ("H100", 192, 8): 1, ("H100", 256, 8): 1,
        ("H100", 64, 2): 2, ("H100", 128, 2): 2, ("H100", 192, 2): 2, ("H100", 256, 2): 2,
        ("H200", 64, 8): 4, ("H200", 128, 8): 8, ("H200", 192, 8): 2, ("H200", 256, 8): 2,
        ("H200", 64, 2): 2, ("H200", 128, 2): 2, ("H200", 192, 2): 2, ("H200", 256, 2): 2,
    }  # fmt: skip


class Launches:
    """In place of compiled kernels: what a call hands them."""

    def __init__(self):
        self.names: list[str] = []
        self.given: list[tuple[int, ...]] = []

    def prepare(self, source, arch, device, grid, scalars, maps=()):
        assert (arch, device) == (90, 0)
        assert len(scalars) == sum(not kind.startswith(("*", "tensordesc")) for _, kind in source.signature)
        assert len(maps) == sum(kind.startswith("tensordesc") for _, kind in source.signature)
        self.names.append(source.name)

        def launch(stream, *addresses):
            assert stream == 7
            self.given.append(addresses)

        return launch


@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("alibi", ["", "fp32"])
def test_launches_take_addresses_first(dims, packed, alibi):
    plan = plan_of(head_dim=dims[0], head_dim_v=dims[1], packed=packed, alibi=alibi, asked={"has_dlse": True})
    for kernel in prepare_backward_kernels(plan):
        are_tensors = [kind.startswith(("*", "tensordesc")) for _, kind in kernel.source.signature]
        assert are_tensors == sorted(are_tensors, reverse=True), kernel.source.name


def test_each_call_has_counters_and_sums_of_its_own(monkeypatch):
    """Three launches on the current stream; what they hand on is allocated by the call."""
    launches = Launches()
    monkeypatch.setattr("flashmoe_science.gpu.launch.prepare_launch", launches.prepare)
    monkeypatch.setattr("flashmoe_science.attention.backward.calls._raw_stream", lambda index: 7 + index)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    plan = plan_of(seqlen_q=70, seqlen_k=60, batch=1, asked={"has_dlse": True})
    p = plan.problem.forward

    call = prepare_backward(plan, torch.device("cuda:0"))
    shapes = {"q": (1, p.heads, 70, 128), "k": (1, 4, 60, 128), "v": (1, 4, 60, 128), "o": (1, p.heads, 70, 128)}
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    tensors |= {"do": tensors["o"].clone(), "lse": torch.zeros(1, 8, 70), "dlse": torch.zeros(1, 70, 8).mT}
    made = []
    empty = torch.empty

    def keep(*args, **kwargs):
        made.append(empty(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(torch, "empty", keep)
    found = call(tensors)
    assert launches.names == [launch.pattern for launch in plan.launches]
    order = [
        [name.rpartition(".")[2].removesuffix("_ptr") for name in kernel.tensors]
        for kernel in prepare_backward_kernels(plan)
    ]
    named = [dict(zip(names, given, strict=False)) for names, given in zip(order, launches.given, strict=True)]
    before, main, after = named
    for name in ("q", "k", "v", "do"):
        assert main[name] == tensors[name].data_ptr()
    assert {before["lse"], before["o"]} == {tensors["lse"].data_ptr(), tensors["o"].data_ptr()}
    assert before["dlse"] != tensors["dlse"].data_ptr(), "it is not contiguous"
    assert [main["dk"], main["dv"], after["dq"]] == [found[name].data_ptr() for name in "kvq"]
    assert before["stats"] == main["stats"]
    assert main["acc"] == after["acc"]
    assert before["dq_semaphore"] == main["dq_semaphore"] == after["dq_semaphore"]
    assert isinstance(plan.config, HopperBackwardConfig)
    sizes = scratch_sizes(plan.problem, plan.config)
    by_address = {tensor.data_ptr(): tensor for tensor in made}
    for name, size in sizes.items():
        assert by_address[main[name]].numel() == size
        assert by_address[main[name]].dtype == (torch.int32 if name == "dq_semaphore" else torch.float32)
    launches.given.clear()
    call(tensors)  # while the memory of the first is in use
    again = dict(zip(order[1], launches.given[1], strict=True))
    assert [name for name in sizes if again[name] == main[name]] == []


def test_packed_calls_prepare_kernels_for_their_tokens(monkeypatch):
    """Once for each number; without tokens nothing is launched."""
    launches = Launches()
    monkeypatch.setattr("flashmoe_science.gpu.launch.prepare_launch", launches.prepare)
    monkeypatch.setattr("flashmoe_science.attention.backward.calls._raw_stream", lambda index: 7 + index)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("flashmoe_science.attention.backward.calls._scratch", scratch_on_cpu)
    plan = plan_of(packed=True, batch=2)
    call = prepare_backward(plan, torch.device("cuda:0"))
    starts = torch.tensor([0, 30, 70], dtype=torch.int32)
    q, k = torch.zeros(70, 8, 128, dtype=torch.bfloat16), torch.zeros(90, 4, 128, dtype=torch.bfloat16)
    tensors = {"q": q, "k": k, "v": k.clone(), "o": q.clone(), "do": q.clone(), "lse": torch.zeros(70, 8).t()}
    tensors |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    found = call(tensors)
    assert launches.names == [launch.pattern for launch in plan.launches]
    kernels = prepare_hopper_backward(plan, (70, 90))
    order, clear, _, main, after = (
        dict(zip((name.removesuffix("_ptr") for name in kernel.tensors), given, strict=False))
        for kernel, given in zip(kernels, launches.given, strict=True)
    )
    made = {**tensors, **{f"d{name}": gradient for name, gradient in found.items()}}
    for name in ("q", "k", "v", "do", "dk", "dv"):
        assert main[name] == made[name].data_ptr()
    assert after["dq"] == clear["dq"] == found["q"].data_ptr()
    assert order["sequences"] == main["sequences"]
    call(tensors)
    assert len(launches.names) == 5, "the same tokens need no other kernels"
    empty = {**tensors, "k": k[:0], "v": k[:0]}
    assert not any(gradient.any() for gradient in call(empty).values())
    assert len(launches.given) == 10


def scratch_on_cpu(sizes, _device):
    return {name: torch.empty(size) for name, size in sizes.items()}


def test_what_is_written_in_triton_is_interpreted():
    """What comes before and after it, and the sums of fp32 that other kernels make, in one other process."""
    names = ("interpreted_passes", "interpreted_packed_passes", "interpreted_sums")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    run = f"import runpy\nfor name in {names}: runpy.run_module(f'tests.attention.{{name}}', run_name='__main__')"
    command = [sys.executable, "-c", run]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert found.stdout.split() == ["right"] * len(names), found.stderr
