"""The forward kernels on a real GPU against fp64."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import threading
from typing import Any

import pytest
import torch

from flashmoe_science import UnsupportedError, explain, flash_attention
from flashmoe_science.attention import reference
from flashmoe_science.attention.forward.plan_sm90 import HOPPER_TABLE
from flashmoe_science.attention.tiles import ForwardConfig, HopperConfig
from flashmoe_science.operators.attention import OPERATOR

from .cases import EMPTY, HEAD_DIMS, PAIRS, SMALL, Case
from .checks import assert_right, make_inputs, poison_allocator

pytestmark = pytest.mark.gpu

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper_only = pytest.mark.skipif(not ON_HOPPER, reason="forward_gluon_sm90 needs an sm_90 GPU")
HOPPER = pytest.param("forward_gluon_sm90", marks=hopper_only)
SHORT = [
    case
    for case in SMALL
    if case.dtype != "fp32"
    and max(case.head_dim, case.head_dim_v) <= 128
    and case.head_dim % 8 in (0, 4)
    and case.head_dim != 1
]
HOPPER_SMALL = [case for case in SMALL if case.dtype != "fp32" and case.head_dim % 8 == 0 and case.head_dim_v % 8 == 0]
PAIRS_OF_KERNELS = [
    *[pytest.param(kernel, dim, id=f"{kernel}-{dim}") for kernel in ("auto", "forward_triton") for dim in HEAD_DIMS],
    *[
        pytest.param("forward_gluon_sm90", dim, id=f"forward_gluon_sm90-{dim}", marks=hopper_only)
        for dim in (8, 16, *HEAD_DIMS)
        if dim % 8 == 0
    ],
]
TABLE_ROWS = [
    (*widths, causal, min(keys, 8192)) for (*widths, causal), rows in HOPPER_TABLE.items() for keys, _ in rows
]


def run(q, k, v, **options):
    """Call it on poisoned memory, with its LSE."""
    poison_allocator(q.numel() // max(1, q.shape[-1]) * v.shape[-1] * q.element_size())
    return flash_attention(q, k, v, return_lse=True, **options)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("case", SMALL + EMPTY, ids=str)
@pytest.mark.parametrize("kernel", ["auto", "forward_triton"])
def test_small_problems(case, kernel, dtype):
    """Every small case, by the kernel of choice and by the streaming kernel."""
    case = case if case.dtype == "fp32" else dataclasses.replace(case, dtype=dtype)
    q, k, v = make_inputs(case, "cuda")
    o, lse = run(q, k, v, causal=case.causal, kernel=kernel)
    assert_right(o, q, k, v, causal=case.causal, lse=lse)


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_short_kernel(case):
    """The one-pass kernel, forced."""
    q, k, v = make_inputs(case, "cuda")
    o, lse = run(q, k, v, causal=case.causal, kernel="forward_short_gluon")
    assert_right(o, q, k, v, causal=case.causal, lse=lse)


@hopper_only
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("case", HOPPER_SMALL, ids=str)
def test_hopper_kernel(case, dtype):
    """The kernel for Hopper, forced."""
    q, k, v = make_inputs(dataclasses.replace(case, dtype=dtype), "cuda")
    o, lse = run(q, k, v, causal=case.causal, kernel="forward_gluon_sm90")
    assert_right(o, q, k, v, causal=case.causal, lse=lse)


@hopper_only
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("head_dim", "head_dim_v", "causal", "keys"), TABLE_ROWS)
def test_hopper_table_rows(head_dim, head_dim_v, causal, keys, dtype, aligned):
    """Every row of the table, with several row tiles a program and GQA."""
    seqlen_q, seqlen_k = (384, keys) if aligned else (400, keys - 37)
    case = Case(2, 56, 8, seqlen_q, seqlen_k, head_dim, head_dim_v, dtype, causal, why="table")
    q, k, v = make_inputs(case, "cuda")
    o, lse = run(q, k, v, causal=causal, kernel="forward_gluon_sm90")
    for b in range(2):
        one = slice(b, b + 1)
        assert_right(o[one], q[one], k[one], v[one], causal=causal, lse=lse[one])


PACKED = (
    (1, 40, 4, 129, 333), (1, 40, 8, 70, 1000), (1, 140, 64, 1, 200), (1, 70, 16, 17, 100), (1, 40, 4, 270, 250),
    (3, 14, 12, 129, 1500), (1, 40, 8, 70, 2500), (2, 20, 4, 129, 2177), (1, 9, 128, 20, 2100),
)  # fmt: skip


@hopper_only
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize(
    ("batch", "heads_kv", "group", "seqlen_q", "seqlen_k", "causal"),
    [
        *((*sizes, causal) for sizes in PACKED for causal in (False, True)),
        # Several tiles of two heads: causal, packing has to save more of them.
        *((1, 40, 6, 437, 437, False), (1, 40, 6, 187, 187, True)),
    ],
)
def test_hopper_packs_heads(batch, heads_kv, group, seqlen_q, seqlen_k, head_dim, causal, dtype):
    """Rows of several heads in a tile, their outputs and their LSE; one has rows that see no key."""
    case = Case(batch, heads_kv * group, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim, dtype, causal, why="packed")
    q, k, v = make_inputs(case, "cuda")
    if dtype == "fp16":  # sequence-major, as projections leave it
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    plan = explain(q, k, v, causal=causal, kernel="forward_gluon_sm90")
    assert isinstance(plan.config, HopperConfig)
    assert plan.config.pack > 1
    o, lse = run(q, k, v, causal=causal, kernel="forward_gluon_sm90")
    for first in range(0, heads_kv, 10):
        kv, heads = slice(first, first + 10), slice(first * group, (first + 10) * group)
        assert_right(o[:, heads], q[:, heads], k[:, kv], v[:, kv], causal=causal, lse=lse[:, heads])


@hopper_only
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hopper_keeps_nan_where_it_belongs(head_dim, causal):
    """A NaN in a row of Q spoils that row alone, one in a key the rows that see it."""
    case = Case(1, 2, 2, 700, 900, head_dim, head_dim, "bf16", causal, why="NaN")
    q, k, v = make_inputs(case, "cuda")
    q[0, 0, 77, 3] = math.nan
    k[0, 1, 600, 0] = math.nan
    o, lse = run(q, k, v, causal=causal, kernel="forward_gluon_sm90")
    expected = torch.zeros(2, 700, dtype=torch.bool, device="cuda")
    expected[0, 77] = True
    expected[1, 400 if causal else 0 :] = True  # row r sees the keys up to r + 200
    assert torch.equal(o[0].isnan().any(-1), expected)
    assert torch.equal(o[0].isnan().all(-1), expected)
    assert torch.equal(lse[0].isnan(), expected)


@hopper_only
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "head_dim"),
    [(2112, 2048, 256), (4096, 2048, 256), (2688, 2176, 64), (2200, 1100, 128), (2048, 1900, 96)],
)
def test_hopper_rows_without_keys(seqlen_q, seqlen_k, head_dim):
    """Fewer keys than rows: the diagonal starts in front of the keys."""
    case = Case(1, 8, 4, seqlen_q, seqlen_k, head_dim, head_dim, "bf16", causal=True, why="fewer keys than rows")
    q, k, v = make_inputs(case, "cuda")
    o, lse = run(q, k, v, causal=True, kernel="forward_gluon_sm90")
    assert_right(o, q, k, v, causal=True, lse=lse)


@hopper_only
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("growth", ["slow", "fast", "last key", "right half", "wide"])
def test_hopper_scores_that_grow(growth, head_dim, causal, dtype):
    """The walk goes from the last key to the first, and the maximum is looked at again only when a sum is too large."""
    case = Case(2, 6, 3, 1000, 1100, head_dim, head_dim, dtype, causal, why="growth")
    q, k, v = make_inputs(case, "cuda")
    if growth in ("last key", "right half"):  # one that all rows attend to, as to the first token of a text
        k[:, :, 0 if growth == "last key" else 100] = 8 * q[:, ::2].mean(2)
    elif growth == "wide":
        q = q * 30
    else:
        steps = torch.linspace(12 if growth == "fast" else 2, 0.1, case.seqlen_k, device="cuda", dtype=k.dtype)
        k = k * steps[:, None]
    o, lse = run(q, k, v, causal=causal, kernel="forward_gluon_sm90")
    assert_right(o, q, k, v, causal=causal, lse=lse)


@hopper_only
@pytest.mark.parametrize("head_dim", [64, 128])
def test_hopper_bits_of_a_row_are_its_own(head_dim):
    """Row 70 sees scores that grow; its neighbours in the warp keep their bits."""
    case = Case(1, 2, 2, 512, 1024, head_dim, head_dim, "bf16", causal=False, why="neighbours")
    q, k, v = make_inputs(case, "cuda")
    k = k * torch.linspace(3, 0.1, case.seqlen_k, device="cuda", dtype=k.dtype)[:, None]
    before = flash_attention(q, k, v, kernel="forward_gluon_sm90")
    q[:, :, 70] *= 30
    after = flash_attention(q, k, v, kernel="forward_gluon_sm90")
    others = [row for row in range(case.seqlen_q) if row != 70]
    assert torch.equal(after[:, :, others], before[:, :, others])
    assert not torch.equal(after[:, :, 70], before[:, :, 70])


@hopper_only
def test_hopper_on_streams_of_others():
    """Streams that torch did not make, whose handles may come again."""
    case = Case(1, 24, 24, 1500, 1500, 64, 64, "bf16", causal=True, why="streams")
    q, k, v = make_inputs(case, "cuda")
    expected = flash_attention(q, k, v, causal=True, kernel="forward_gluon_sm90")
    torch.cuda.synchronize()
    driver = ctypes.CDLL("libcuda.so.1")
    for _ in range(20):
        outputs = []
        for _ in range(3):
            handle = ctypes.c_void_p()
            assert driver.cuStreamCreate(ctypes.byref(handle), 1) == 0
            with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
                outputs.append(flash_attention(q, k, v, causal=True, kernel="forward_gluon_sm90"))
            assert driver.cuStreamDestroy_v2(handle) == 0  # while its work runs
        torch.cuda.synchronize()
        assert all(torch.equal(o, expected) for o in outputs)


@hopper_only
def test_hopper_graphs_beside_each_other():
    """Replayed at once on many streams, beside calls on the current one: each captured call has its own counter."""
    case = Case(1, 24, 24, 1500, 1500, 64, 64, "bf16", causal=True, why="counters")
    inputs = [make_inputs(case, "cuda", seed=seed) for seed in range(4)]
    options: dict[str, Any] = {"causal": True, "kernel": "forward_gluon_sm90"}
    expected = [flash_attention(*each, **options) for each in inputs]
    graphs: list[torch.cuda.CUDAGraph] = []
    outputs: list[list[torch.Tensor]] = []
    streams: list[torch.cuda.Stream] = []
    for each in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs.append([flash_attention(*each, **options) for _ in range(5)])
        graphs.append(graph)
        streams.append(torch.cuda.Stream())
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.replay()
        beside = flash_attention(*inputs[0], **options)
        torch.cuda.synchronize()
        assert torch.equal(beside, expected[0])
        for right, found in zip(expected, outputs, strict=True):
            assert all(torch.equal(o, right) for o in found)
            for o in found:
                o.fill_(float("nan"))


@hopper_only
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (128, 64), (64, 128), (64, 256), (256, 8), (8, 24)])
def test_hopper_unequal_widths(head_dim, head_dim_v, causal):
    """O in tiles narrower, wider and as wide as Q's."""
    case = Case(3, 60, 20, 300, 333, head_dim, head_dim_v, "bf16", causal, why="widths")
    q, k, v = make_inputs(case, "cuda")
    o, lse = run(q, k, v, causal=causal, kernel="forward_gluon_sm90")
    assert_right(o, q, k, v, causal=causal, lse=lse)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_k", [16, 31, 32, 64, 65, 100, 128, 192, 255, 256, 300, 512])
@pytest.mark.parametrize("head_dim", [64, 128, 32])
@pytest.mark.parametrize("batch", [1, 12])
def test_short_kernel_lengths(batch, head_dim, seqlen_k, causal):
    """Every tile of the one-pass kernel, with and without a rest of rows and keys."""
    case = Case(batch, 4, 4, seqlen_k - 3, seqlen_k, head_dim, head_dim, "bf16", causal, why="lengths")
    q, k, v = make_inputs(case, "cuda")
    try:
        o, lse = run(q, k, v, causal=causal, kernel="forward_short_gluon")
    except UnsupportedError as error:
        if "shared memory" not in str(error):
            raise
        pytest.skip(str(error).splitlines()[0])
    assert_right(o, q, k, v, causal=causal, lse=lse)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("kernel", "head_dim"), PAIRS_OF_KERNELS)
def test_pairs_of_lengths(kernel, head_dim, causal):
    """FlashAttention's list of (Sq, Sk), with 9 sequences, 6 heads and 2 KV heads; of long ones with fewer."""
    for seqlen_q, seqlen_k in (*PAIRS, (4096, 4096), (4224, 4224)):
        heads = (9, 6, 2) if seqlen_q < 4096 else (1, 2, 1)
        case = Case(*heads, seqlen_q, seqlen_k, head_dim, head_dim, "bf16", causal, why="pairs")
        q, k, v = make_inputs(case, "cuda", seed=seqlen_q)
        o, lse = run(q, k, v, causal=causal, kernel=kernel)
        assert_right(o, q, k, v, causal=causal, lse=lse, name=str(case))


@pytest.mark.parametrize("seqlen_k", [2048, 4097, 8192])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_split_keys(seqlen_k, causal, dtype):
    """Few rows and many keys: the keys are split, and merged."""
    case = Case(1, 2, 1, 70, seqlen_k, 64, 64, dtype, causal, why="split")
    q, k, v = make_inputs(case, "cuda")
    plan = explain(q, k, v, causal=causal)
    assert isinstance(plan.config, ForwardConfig)
    assert plan.config.num_splits > 1, plan
    o, lse = run(q, k, v, causal=causal)
    assert_right(o, q, k, v, causal=causal, lse=lse)


def test_split_keys_rows_without_keys():
    """Causal with more rows than keys, split: rows without keys in every share, and in some."""
    case = Case(1, 1, 1, 2500, 2048, 64, 64, "fp16", True, why="split-empty-rows")
    q, k, v = make_inputs(case, "cuda")
    o, lse = run(q, k, v, causal=True)
    assert_right(o, q, k, v, causal=True, lse=lse)


@pytest.mark.parametrize("kernel", ["auto", "forward_triton"])
@pytest.mark.parametrize("seqlen", [48, 700])
def test_strides(kernel, seqlen):
    """[B, S, H, D] views, transposed rows, expanded heads, sliced and shifted storage: same numbers."""
    case = Case(2, 4, 4, seqlen, seqlen, 64, 64, "fp16", True, why="strides")
    q, k, v = make_inputs(case, "cuda")
    expected = flash_attention(q, k, v, causal=True, kernel=kernel)
    sequence_major = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    o = flash_attention(*sequence_major, causal=True, kernel=kernel)
    assert torch.equal(o, expected)
    assert o.stride() == sequence_major[0].stride()
    transposed = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k, v)]
    assert_right(flash_attention(*transposed, causal=True, kernel=kernel), q, k, v, causal=True)
    shifted = []
    for t in (q, k, v):
        storage = torch.zeros(t.numel() + 3, device="cuda", dtype=t.dtype)
        shifted.append(storage[3:].view(t.shape).copy_(t))
    assert_right(flash_attention(*shifted, causal=True, kernel=kernel), q, k, v, causal=True)
    sliced = [torch.cat([t, t], -1)[..., 64:] for t in (q, k, v)]
    assert_right(flash_attention(*sliced, causal=True, kernel=kernel), q, k, v, causal=True)
    for axis in range(4):
        one_k, one_v = (t.narrow(axis, 0, 1).expand_as(t) for t in (k, v))
        assert_right(flash_attention(q, one_k, v, causal=True, kernel=kernel), q, one_k, v, causal=True)
        assert_right(flash_attention(q, k, one_v, causal=True, kernel=kernel), q, k, one_v, causal=True)


@hopper_only
@pytest.mark.parametrize("causal", [False, True])
def test_hopper_strides(causal):
    """What TMA steps through gives the same numbers, the rest is refused, and served by ``auto``."""
    hopper = {"causal": causal, "kernel": "forward_gluon_sm90"}
    q, k, v = make_inputs(Case(2, 4, 4, 700, 700, 64, 64, "fp16", causal, why="strides"), "cuda")
    expected = flash_attention(q, k, v, **hopper)
    sequence_major = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    o = flash_attention(*sequence_major, **hopper)
    assert torch.equal(o, expected)
    assert o.stride() == sequence_major[0].stride()
    packed = torch.stack([t.transpose(1, 2) for t in (q, k, v)], dim=2)  # [B, S, 3, H, D]
    assert torch.equal(flash_attention(*(packed[:, :, i].transpose(1, 2) for i in range(3)), **hopper), expected)
    sliced = [torch.cat([t, t], -1)[..., 64:] for t in (q, k, v)]
    assert torch.equal(flash_attention(*sliced, **hopper), expected)
    shifted = torch.zeros(q.numel() + 8, device="cuda", dtype=q.dtype)[8:].view(q.shape).copy_(q)  # by 16 bytes
    assert torch.equal(flash_attention(shifted, k, v, **hopper), expected)
    unaligned = torch.zeros(q.numel() + 3, device="cuda", dtype=q.dtype)[3:].view(q.shape).copy_(q)
    transposed = q.transpose(2, 3).contiguous().transpose(2, 3)
    for other, why in ((unaligned, "multiples of 16 bytes"), (transposed, "rows of q are not contiguous")):
        with pytest.raises(UnsupportedError, match=why):
            flash_attention(other, k, v, **hopper)
        assert_right(flash_attention(other, k, v, causal=causal), q, k, v, causal=causal)
    expanded = k[:, :1].expand(-1, 4, -1, -1)
    with pytest.raises(UnsupportedError, match="k is expanded"):
        flash_attention(q, expanded, v, **hopper)
    assert_right(flash_attention(q, expanded, v, causal=causal), q, expanded, v, causal=causal)


@hopper_only
@pytest.mark.parametrize("causal", [False, True])
def test_hopper_reads_the_tensors_of_this_call(causal):
    """One prepared call, other addresses: each tensor replaced alone, and memory that was freed and given again."""
    case = Case(2, 8, 8, 600, 600, 128, 128, "bf16", causal, why="addresses")

    def call(tensors):
        return flash_attention(*tensors, causal=causal, kernel="forward_gluon_sm90")

    first, second = make_inputs(case, "cuda"), make_inputs(case, "cuda", seed=1)
    before = call(first)
    kept = before.clone()
    for index in range(3):
        mixed = [*first]
        mixed[index] = second[index]
        o = call(mixed)
        assert_right(o, *mixed, causal=causal)
        assert not torch.equal(o, kept)
        assert o.data_ptr() != before.data_ptr()
    assert torch.equal(before, kept)
    assert torch.equal(call(first), kept)
    held = []
    for seed in range(2, 12):
        tensors = make_inputs(case, "cuda", seed=seed)
        assert_right(call(tensors), *tensors, causal=causal)
        if seed % 3 == 0:
            held.append(tensors[seed % 2])  # so that the next tensors lie elsewhere
        del tensors
        if seed % 4 == 0:
            torch.cuda.empty_cache()
    assert torch.equal(before, kept)


@pytest.mark.parametrize("seqlen", [60, 3000])
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_scale(seqlen, causal):
    """Scales that are small, zero and negative, and those that are so in fp32 only."""
    q, k, v = make_inputs(Case(4, 16, 16, seqlen, seqlen, 64, 64, "fp16", causal, why="scale"), "cuda")
    for scale in (0.3, 1e-30, 1.3e-38, 1e-38, 1e-42, 1e-60, 0.0, -0.2):
        o, lse = flash_attention(q, k, v, causal=causal, softmax_scale=scale, return_lse=True)
        assert_right(o, q, k, v, causal=causal, softmax_scale=scale, lse=lse)


def test_bits_are_equal_over_repeats():
    """1,000 repeats of one-pass, streaming and split problems give the same bits."""
    for case in (
        Case(2, 4, 4, 128, 128, 64, 64, "fp16", False, why="one-pass"),
        Case(2, 4, 4, 600, 600, 64, 64, "bf16", True, why="streaming"),
        Case(1, 1, 1, 16, 4096, 128, 128, "bf16", False, why="split"),
    ):
        q, k, v = make_inputs(case, "cuda")
        first = flash_attention(q, k, v, causal=case.causal)
        for _ in range(1000):
            assert torch.equal(flash_attention(q, k, v, causal=case.causal), first), case


@hopper_only
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hopper_bits_are_equal_over_repeats(head_dim, causal):
    """1,000 repeats, with several row tiles a program, give the same bits in O and LSE."""
    case = Case(4, 24, 6, 900, 1000, head_dim, head_dim, "bf16", causal, why="repeats")
    q, k, v = make_inputs(case, "cuda")
    options = {"causal": causal, "kernel": "forward_gluon_sm90", "return_lse": True}
    first, first_lse = flash_attention(q, k, v, **options)
    for _ in range(1000):
        o, lse = flash_attention(q, k, v, **options)
        assert torch.equal(o, first)
        assert torch.equal(lse, first_lse)


@pytest.mark.parametrize("kernel", ["auto", HOPPER])
def test_offsets_past_2_31(kernel):
    """Tensors of more than 2**31 elements, at both ends; and rows further apart than 2**31 / 128 elements."""
    heads, seqlen, dim = 9, 2**20, 256
    q = torch.empty(1, heads, 64, dim, device="cuda", dtype=torch.float16).normal_()
    k = torch.empty(1, heads, seqlen, dim, device="cuda", dtype=torch.float16)
    assert k.numel() > 2**31
    for h in range(heads):
        k[:, h].normal_()
    v = k.flip(2)
    o = flash_attention(q, k, v, kernel=kernel)
    last = heads - 1
    assert_right(o[:, last:], q[:, last:], k[:, last:], v[:, last:])
    del k, v
    wide = torch.empty(130, 2**24 + 8, device="cuda", dtype=torch.float16)
    rows = wide[:, :64].normal_()[None, None]  # [1, 1, 130, 64], rows 2**24 + 8 elements apart
    assert_right(flash_attention(rows, rows, rows, causal=True, kernel=kernel), rows, rows, rows, causal=True)


@pytest.mark.parametrize("kernel", ["auto", HOPPER])
def test_many_heads(kernel):
    """More heads and sequences than a grid axis of 65,535 holds."""
    q, k, v = make_inputs(Case(70000, 1, 1, 3, 5, 16, 16, "fp16", False, why="many"), "cuda")
    o = flash_attention(q, k, v, kernel=kernel)
    # The reference goes from sequence to sequence; here all of them at once, as they hide no key.
    exact = torch.softmax(q.double() @ k.double().transpose(2, 3) / 4, -1) @ v.double()
    low = reference.attention_low_precision(q, k, v)
    assert (o.double() - exact).abs().max().item() <= OPERATOR.error_budget(exact, low)
    assert_right(o[65534:65538], q[65534:65538], k[65534:65538], v[65534:65538])


@pytest.mark.parametrize("kernel", ["auto", HOPPER])
@pytest.mark.parametrize("case", [SMALL[1], Case(1, 1, 1, 16, 4096, 64, 64, "fp16", False, why="split")], ids=str)
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.unpoisoned
def test_allocates_its_outputs_and_partials_only(case, return_lse, kernel):
    """The memory that one call asks for, byte for byte."""
    q, k, v = make_inputs(case, "cuda")
    plan = explain(q, k, v, return_lse=return_lse, kernel=kernel)
    flash_attention(q, k, v, return_lse=return_lse, kernel=kernel)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    requested = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
    out = flash_attention(q, k, v, return_lse=return_lse, kernel=kernel)
    requested = torch.cuda.memory_stats()["requested_bytes.all.allocated"] - requested
    rows = plan.problem.rows
    expected = rows * case.head_dim_v * 2 + (4 * rows if return_lse else 0)
    splits = getattr(plan.config, "num_splits", 1)
    if splits > 1:
        expected += 4 * splits * rows * (case.head_dim_v + 1)
    assert requested == expected
    del out


@pytest.mark.parametrize("kernel", ["auto", HOPPER])
def test_cuda_graph(kernel):
    """A captured call reads new values at the same addresses."""
    case = Case(2, 4, 4, 128, 128, 64, 64, "fp16", False, why="graph")
    q, k, v = make_inputs(case, "cuda")
    flash_attention(q, k, v, kernel=kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = flash_attention(q, k, v, kernel=kernel)
    fresh = make_inputs(case, "cuda", seed=7)
    for old, new in zip((q, k, v), fresh, strict=True):
        old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert_right(o, *fresh)


def test_compile_fullgraph():
    """``torch.compile(fullgraph=True)`` keeps the call as one operator, and recompiles for no new values."""

    def layer(q, k, v):
        o, lse = flash_attention(q * 1.0, k, v, causal=True, return_lse=True)
        return o + 1, lse, flash_attention(q, k, v)

    q, k, v = make_inputs(Case(2, 4, 2, 100, 100, 64, 64, "fp16", True, why="compile"), "cuda")
    o, lse, full = torch.compile(layer, fullgraph=True)(q, k, v)
    expected, expected_lse = flash_attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(o, expected + 1)
    assert torch.equal(lse, expected_lse)
    assert torch.equal(full, flash_attention(q, k, v))


def test_opcheck():
    """PyTorch's own checks of the operator's schema and fake implementation."""
    q, k, v = make_inputs(Case(2, 4, 2, 33, 40, 64, 64, "fp16", True, why="opcheck"), "cuda")
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    for first in (q, strided):
        torch.library.opcheck(torch.ops.flashmoe_science.attention_forward, (first, k, v, True, None, "auto"))
        torch.library.opcheck(torch.ops.flashmoe_science.attention_forward_lse, (first, k, v, True, None, "auto"))


@pytest.mark.parametrize("kernel", ["auto", HOPPER])
def test_streams_and_threads(kernel):
    """Calls on a side stream and from eight threads at once are right, also from a thread that never used CUDA."""
    case = Case(2, 4, 4, 128, 128, 64, 64, "fp16", False, why="threads")
    inputs = [make_inputs(case, "cuda", seed=seed) for seed in range(8)]
    expected = [flash_attention(*i, kernel=kernel) for i in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            outputs = (flash_attention(*inputs[index], kernel=kernel) for _ in range(200))
            wrong.extend(index for o in outputs if not torch.equal(o, expected[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("kernel", ["auto", HOPPER])
def test_first_use_in_a_thread(kernel):
    """A thread whose first CUDA call is ours."""
    q, k, v = make_inputs(SMALL[1], "cuda")
    expected, out = flash_attention(q, k, v, kernel=kernel), []
    thread = threading.Thread(target=lambda: out.append(flash_attention(q, k, v, kernel=kernel)))
    thread.start()
    thread.join()
    assert torch.equal(out[0], expected)


@pytest.mark.parametrize("kernel", ["auto", HOPPER])
def test_a_new_shape_in_a_thread_that_never_used_cuda(kernel):
    """Its tensor maps are made there too, by the driver, which needs a context."""
    q, k, v = make_inputs(Case(1, 3, 3, 77, 91, 128, 128, "fp16", False, why="thread"), "cuda")
    out: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: out.append(flash_attention(q, k, v, kernel=kernel)))
    thread.start()
    thread.join()
    assert torch.equal(out[0], flash_attention(q, k, v, kernel=kernel))
