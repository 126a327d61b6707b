"""Gradients of attention on a Hopper GPU: right to the rule, the same bits in every run, in any layout and stream."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science import flash_attention
from flashmoe_science.attention.backward.autograd import attention_gradients
from flashmoe_science.attention.inputs import Options

from .cases import PAIRS, Case, FeatureCase
from .checks import (
    assert_gradients_right,
    assert_repeats,
    check_gradients,
    differentiate,
    make_features,
    make_inputs,
)

pytestmark = [
    pytest.mark.triton,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

LENGTHS = (*PAIRS, (128, 128), (300, 700), (700, 300), (1024, 1024), (4096, 4096), (4224, 4224))
DIMS = ((64, 64), (128, 128), (104, 40), (40, 104))
# Query and K/V heads of each: one after another; both of a group together; four of them, or two walks over two; and two
# walks over four, or four over two.
HEADS = {pair: ((6, 2), (4, 2), (8, 2), (8, 1))[number % 4] for number, pair in enumerate(LENGTHS)}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("pair", LENGTHS, ids=str)
def test_gradients(pair, dims, causal):
    """FlashAttention's own list of lengths and odd ones, with grouped heads; rows that see no key have dLSE of NaN."""
    batch = 1 if max(pair) > 2000 else 2
    case = Case(batch, *HEADS[pair], pair[0], pair[1], dims[0], dims[1], "bf16", causal, "lengths")
    check_gradients(case, kernel="backward_gluon_sm90", through_lse=True)


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 8, 1, 500, 700, 128, 128, "bf16", True, "mqa"),
        Case(2, 5, 5, 500, 700, 64, 64, "fp16", True, "mha-fp16"),
        Case(40, 8, 8, 130, 130, 128, 128, "bf16", False, "more-heads-than-programs"),
        Case(3, 20, 20, 384, 384, 64, 64, "bf16", True, "groups-of-heads"),
        Case(1, 2, 2, 999, 1001, 8, 8, "bf16", True, "d8"),
        Case(1, 2, 1, 333, 555, 96, 96, "fp16", False, "d96"),
        # Several key tiles a program: whole walks, walks of one step, and of one step a query head.
        Case(40, 4, 4, 512, 512, 192, 128, "bf16", True, "d192-many-tiles"),
        Case(40, 8, 8, 64, 130, 192, 128, "bf16", False, "d192-one-step"),
        Case(40, 6, 2, 63, 130, 192, 128, "bf16", True, "d192-one-step-a-head"),
        Case(40, 8, 2, 63, 130, 192, 128, "bf16", True, "d192-two-steps-a-walk"),
        Case(2, 8, 1, 500, 700, 128, 128, "fp16", True, "fp16-two-walks"),
        Case(2, 8, 1, 500, 700, 64, 64, "bf16", True, "d64-two-walks"),
        Case(2, 8, 2, 500, 700, 256, 256, "bf16", True, "d256-two-walks"),
        Case(8, 12, 2, 1000, 1100, 64, 64, "bf16", True, "d64-three-walks-many-tiles"),
        Case(8, 12, 2, 1000, 1100, 128, 128, "bf16", True, "d128-three-walks-many-tiles"),
        Case(8, 16, 2, 1000, 1100, 128, 128, "fp16", True, "fp16-two-walks-many-tiles"),
        Case(16, 4, 2, 1000, 1100, 136, 72, "bf16", True, "d136-many-tiles"),
        Case(2, 4, 2, 500, 700, 192, 128, "fp16", True, "d192-fp16"),
    ],
    ids=str,
)
def test_heads_and_dtypes(case):
    check_gradients(case, kernel="backward_gluon_sm90")


WINDOWS = ((0, -1), (5, -1), (127, -1), (128, -1), (1023, -1), (64, 64), (300, 7), (-1, 9))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (104, 40), (256, 256), (192, 128)], ids=str)
@pytest.mark.parametrize(
    "pair", [(1, 1), (239, 1), (1, 700), (300, 700), (700, 300), (1024, 1024), (4096, 4096)], ids=str
)
def test_gradients_of_windows(pair, dims, window):
    """Windows narrower than a tile and wider than a sequence, and keys and rows that see none."""
    causal, batch = window[1] < 0 <= window[0], 1 if max(pair) > 2000 else 2
    case = FeatureCase(batch, 6, 2, pair[0], pair[1], dims[0], dims[1], "bf16", causal, "windows", window=window)
    hidden = 0 <= window[0] < pair[1] - pair[0] - (63 if dims == (256, 256) else 127)
    check_gradients(case, kernel="auto" if hidden else "backward_gluon_sm90", through_lse=True)


@pytest.mark.parametrize("sinks", ["bf16", "fp32"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (104, 40), (256, 256), (192, 128)], ids=str)
@pytest.mark.parametrize("pair", [(1, 1), (1, 700), (300, 700), (1024, 1024), (4096, 4096)], ids=str)
def test_gradients_of_sinks(pair, dims, sinks):
    """Part of the LSE that the kernel reads; their own gradient has a kernel."""
    case = FeatureCase(1, 6, 2, pair[0], pair[1], dims[0], dims[1], "bf16", True, "sinks", sinks=sinks)
    check_gradients(case, kernel="backward_gluon_sm90", through_lse=True)


@pytest.mark.parametrize("softcap", [1.0, 15.0, 50.0])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (104, 40), (256, 256), (192, 128)], ids=str)
@pytest.mark.parametrize("pair", [(1, 1), (1, 700), (300, 700), (700, 300), (1024, 1024), (4096, 4096)], ids=str)
def test_gradients_of_softcap(pair, dims, softcap):
    """P times the derivative of the cap makes dS; hidden keys have none."""
    window = (100, -1) if pair == (1024, 1024) else (-1, -1)
    case = FeatureCase(
        1, 6, 2, pair[0], pair[1], dims[0], dims[1], "bf16", True, "softcap", softcap=softcap, window=window
    )
    check_gradients(case, kernel="backward_gluon_sm90", through_lse=True)


@pytest.mark.parametrize("mask", ["causal", "full", "window", "both-sides"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (104, 40), (256, 256), (192, 128)], ids=str)
@pytest.mark.parametrize("pair", [(1, 1), (1, 700), (300, 700), (700, 300), (1024, 1024), (4096, 4096)], ids=str)
def test_gradients_of_alibi(pair, dims, mask):
    """Keys before and behind the position of a row; slopes of a head, and of a head of each sequence."""
    batch = 1 if max(pair) > 2000 else 2
    masks: dict[str, dict[str, Any]] = {
        "causal": {"alibi": "fp32"},
        "full": {"alibi": "bf16", "alibi_axes": 2},
        "window": {"alibi": "fp32", "alibi_axes": 2, "window": (650, -1)},
        "both-sides": {"alibi": "fp32", "window": (650, 70)},
    }
    causal = mask in ("causal", "window")
    case = FeatureCase(batch, 6, 2, pair[0], pair[1], dims[0], dims[1], "bf16", causal, "alibi", **masks[mask])
    check_gradients(case, kernel="backward_gluon_sm90", through_lse=True)


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_alibi_in_groups(head_dim, group):
    """Heads walked over together have slopes of their own."""
    case = FeatureCase(2, 8, 8 // group, 700, 700, head_dim, head_dim, "fp16", True, "alibi", alibi="fp32")
    check_gradients(case, kernel="backward_gluon_sm90")


@pytest.mark.parametrize("pair", [(300, 700), (1024, 1024)], ids=str)
@pytest.mark.parametrize("dims", [(72, 40), (40, 104), (96, 96), (200, 72), (160, 160)], ids=str)
def test_gradients_of_alibi_at_other_sizes(dims, pair):
    """Columns that TMA fills in, and the wide kernel with values of 128 columns."""
    case = FeatureCase(2, 6, 2, pair[0], pair[1], dims[0], dims[1], "bf16", True, "alibi", alibi="fp32")
    check_gradients(case, kernel="backward_gluon_sm90", through_lse=True)


@pytest.mark.parametrize("asked", ["q", "k", "v", "kv"])
def test_some_of_the_gradients(asked):
    """The kernel makes all three; those that were not asked for are dropped, and the others have the same bits."""
    case = Case(2, 4, 2, 300, 500, 128, 128, "bf16", True, "some")
    inputs = dict(zip("qkv", make_inputs(case, "cuda"), strict=True))
    o, lse = flash_attention(inputs["q"], inputs["k"], inputs["v"], causal=True, return_lse=True)
    given = {**inputs, "o": o, "lse": lse, "do": torch.randn_like(o)}
    options = Options(causal=True, softmax_scale=None, kernel="backward_gluon_sm90")
    whole = attention_gradients(options, given, ["q", "k", "v"])
    wanted = ["k", "v"] if asked in "kv" else [asked]  # k and v come together
    found = attention_gradients(options, given, wanted)
    assert list(found) == wanted
    for name in wanted:
        assert torch.equal(found[name], whole[name])


# Query and K/V heads, shares of a group, heads that are walked over together, and shares in turns.
SHARED = ((14, 2, 7, 1, 4), (32, 2, 4, 4, 16), (12, 2, 3, 2, 3), (4, 2, 2, 1, 16), (16, 1, 16, 1, 32))


@pytest.mark.parametrize(("heads", "heads_kv", "shares", "together", "in_turns"), SHARED)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_shared_groups(share, heads, heads_kv, shares, together, in_turns, dims):
    """Right where programs add dK and dV up one after another; dQ has the bits that it has without."""
    asked: dict[str, Any] = {"kernel": "backward_gluon_sm90", "through_lse": True}
    pairs = ((1, 1), (300, 500), (700, 700), (700, 300), (1300, 1300))
    for (queries, keys), causal in itertools.product(pairs, (True, False)):
        case = Case(2, heads, heads_kv, queries, keys, dims[0], dims[1], "bf16", causal, "shared")
        inputs = dict(zip("qkv", make_inputs(case, "cuda"), strict=True))
        share(1, 1)
        usual, _, _ = differentiate(flash_attention, inputs, {"causal": causal}, **asked)
        share(shares, together, in_turns)
        check_gradients(case, kernel="backward_gluon_sm90", through_lse=True)
        found, _, _ = differentiate(flash_attention, inputs, {"causal": causal}, **asked)
        assert torch.equal(found["q"], usual["q"])


@pytest.mark.parametrize("feature", ["fp16", "window", "softcap", "alibi"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_shared_groups_with_features(share, head_dim, feature):
    options: dict[str, dict[str, Any]] = {
        "window": {"window": (650, -1)},
        "softcap": {"softcap": 15.0},
        "alibi": {"alibi": "fp32"},
    }
    dtype = "fp16" if feature == "fp16" else "bf16"
    case = FeatureCase(
        2, 8, 2, 700, 700, head_dim, head_dim, dtype, True, feature, **options.get(feature, {})
    )  # fmt: skip
    share(2, 2)
    check_gradients(case, kernel="backward_gluon_sm90", through_lse=True)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_a_thousand_repeats_of_shared_groups(share, dims):
    case = Case(4, 14, 2, 1000, 1100, dims[0], dims[1], "bf16", True, "repeats")
    share(7, 1)
    check_gradients(case, kernel="backward_gluon_sm90")
    inputs = dict(zip("qkv", make_inputs(case, "cuda"), strict=True))
    assert_repeats(flash_attention, inputs, {"causal": True}, kernel="backward_gluon_sm90")


def test_low_scores():
    """Keys behind the last, whose score would be 0, weigh nothing."""
    check_gradients(Case(1, 2, 2, 200, 300, 64, 64, "bf16", False, "low"), kernel="backward_gluon_sm90", low=True)


WIDE = ((256, 256), (192, 128), (136, 72), (136, 256), (160, 160))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", WIDE, ids=str)
@pytest.mark.parametrize("pair", LENGTHS, ids=str)
def test_gradients_of_wide_heads(pair, dims, causal):
    batch = 1 if max(pair) > 2000 else 2
    case = Case(batch, *HEADS[pair], pair[0], pair[1], dims[0], dims[1], "bf16", causal, "wide")
    check_gradients(case, kernel="backward_gluon_sm90", through_lse=True)


def differentiate_on(stream, inputs, do, lse, o):
    with torch.cuda.stream(stream):
        given = {**inputs, "do": do, "lse": lse, "o": o}
        options = Options(causal=True, softmax_scale=None, kernel="backward_gluon_sm90")
        return attention_gradients(options, given, ["q", "k", "v"])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (192, 128)], ids=str)
def test_a_thousand_repeats(dims, causal):
    """The same bits, with heads that share K and V, and lengths that end in a tile."""
    case = Case(8, 16, 4, 1000, 1100, dims[0], dims[1], "bf16", causal, "repeats")  # more than two key tiles a program
    check_gradients(case, kernel="backward_gluon_sm90")
    inputs = dict(zip("qkv", make_inputs(case, "cuda"), strict=True))
    assert_repeats(flash_attention, inputs, {"causal": causal}, kernel="backward_gluon_sm90")


@pytest.mark.parametrize("window", [(0, -1), (200, -1), (200, 100)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_a_thousand_repeats_of_windows(dims, window):
    """The same bits where turns at adding to dQ begin and end at the bounds of a window."""
    rows = 1100 if window == (0, -1) else 1000  # a window that narrow hides the first of more keys from all rows
    case = FeatureCase(8, 16, 4, rows, 1100, dims[0], dims[1], "bf16", window[1] < 0, "repeats", window=window)
    check_gradients(case, kernel="backward_gluon_sm90", repeats=1)
    inputs, options = dict(zip("qkv", make_inputs(case, "cuda"), strict=True)), make_features(case, "cuda")
    assert_repeats(flash_attention, inputs, options, kernel="backward_gluon_sm90")


def test_two_streams_at_once():
    """Calls that run beside one another share no counter."""
    case = Case(1, 8, 8, 2048, 2048, 128, 128, "bf16", True, "streams")
    q, k, v = make_inputs(case, "cuda")
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    do = torch.randn_like(o)
    inputs = {"q": q, "k": k, "v": v}
    expected = differentiate_on(torch.cuda.current_stream(), inputs, do, lse, o)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    found = [differentiate_on(streams[i % 2], inputs, do, lse, o) for i in range(40)]
    torch.cuda.synchronize()
    for gradients in found:
        assert all(torch.equal(gradients[name], expected[name]) for name in inputs)


@pytest.mark.unpoisoned
def test_replays_of_a_graph():
    """A graph of one call, replayed a hundred times with other values, beside eager calls on another stream."""
    case = Case(2, 4, 2, 700, 700, 64, 64, "bf16", True, "graph")
    q, k, v = make_inputs(case, "cuda")
    inputs = {"q": q, "k": k, "v": v}
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    do = torch.randn_like(o)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    differentiate_on(side, inputs, do, lse, o)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = differentiate_on(side, inputs, do, lse, o)
    other = torch.cuda.Stream()
    for _ in range(100):
        do.copy_(torch.randn_like(do))
        torch.cuda.synchronize()
        graph.replay()
        beside = differentiate_on(other, inputs, do, lse, o)
        torch.cuda.synchronize()
        assert all(torch.equal(captured[name], beside[name]) for name in inputs)


@pytest.mark.parametrize("how", ["sequence-major", "interleaved", "huge strides"])
def test_layouts(how):
    """The bits do not depend on where rows lie; batch strides beyond 2**31 elements too."""
    case = Case(2, 4, 4, 300, 300, 128, 128, "bf16", True, "layout")
    q, k, v = make_inputs(case, "cuda")
    options = {"causal": True}
    asked: dict[str, Any] = {"kernel": "backward_gluon_sm90", "through_lse": False}
    expected, do, _ = differentiate(flash_attention, {"q": q, "k": k, "v": v}, options, **asked)
    if how == "sequence-major":
        turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    elif how == "interleaved":  # [B, S, 3, H, D], as one product gives them
        turned = [x.transpose(1, 2) for x in torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2).unbind(2)]
    else:
        far, numbers = 2**31 + 64, q[0].numel()
        buffer = torch.empty(far + 3 * numbers, dtype=q.dtype, device="cuda")
        turned = [buffer.as_strided(q.shape, (far, *q.stride()[1:]), i * numbers) for i in range(3)]
        for mine, other in zip(turned, (q, k, v), strict=True):
            mine.copy_(other)
    inputs = dict(zip("qkv", turned, strict=True))
    found, _, _ = differentiate(flash_attention, inputs, options, **asked)
    assert_gradients_right(found, q, k, v, do, causal=True)
    if how == "huge strides":
        assert all(torch.equal(found[name], expected[name]) for name in "qkv")


def test_nan_stays_in_its_head():
    case = Case(2, 4, 4, 300, 400, 64, 64, "bf16", True, "nan")
    q, k, v = make_inputs(case, "cuda")
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    do = torch.randn_like(o)
    here = torch.cuda.current_stream()
    expected = differentiate_on(here, {"q": q, "k": k, "v": v}, do, lse, o)
    do[1, 2, 7] = math.nan
    found = differentiate_on(here, {"q": q, "k": k, "v": v}, do, lse, o)
    for name, gradient in found.items():
        assert gradient[1, 2].isnan().any()
        gradient[1, 2] = expected[name][1, 2]
        assert torch.equal(gradient, expected[name]), name


def test_only_some_gradients():
    """With frozen K and V the gradient of Q is that of a call that asks for all."""
    case = Case(2, 4, 2, 300, 300, 64, 64, "bf16", True, "frozen")
    q, k, v = make_inputs(case, "cuda")
    q.requires_grad_()
    o = flash_attention(q, k, v, causal=True)
    do = torch.randn_like(o)
    (found,) = torch.autograd.grad(o, [q], do)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    both = torch.autograd.grad(flash_attention(*leaves, causal=True), leaves, do)
    torch.testing.assert_close(found, both[0], rtol=2e-2, atol=2e-2)
