"""Gradients of packed sequences on a Hopper GPU: right to the rule, equal bits, no neighbour's numbers, no wait."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science import explain_varlen_gradients, flash_attention, flash_attention_varlen
from flashmoe_science.attention.backward.autograd import attention_gradients

from .cases import VarlenCase
from .checks import (
    ask_for_gradients,
    assert_repeats,
    assert_varlen_gradients_right,
    differentiate,
    make_features,
    make_packed,
    poison_allocator,
    synchronisation_is_an_error,
)

pytestmark = [
    pytest.mark.triton,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

DRAW = random.Random(0)
_MANY = tuple(DRAW.randint(1, 260) for _ in range(70))
# Queries and keys of each sequence.
LENGTHS = {
    "tile-edges": ((64, 128, 129, 127, 1, 256, 63), (64, 128, 129, 127, 1, 256, 63)),
    "unlike": ((300, 5, 130, 700), (70, 400, 131, 1)),
    "empty": ((0, 40, 0, 3, 0, 200), (7, 0, 0, 500, 129, 1)),
    "one-row-each": ((1,) * 50, (3,) * 50),
    "long-tail": ((20, 1500, 77, 4100, 3), (20, 1500, 77, 4100, 3)),
    "many": (_MANY, _MANY),
}
DIMS = ((64, 64), (128, 128), (72, 40), (192, 128), (256, 256))
MASKS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (70, -1)},
    "narrow": {"causal": True, "window": (0, -1)},
    "both-sides": {"causal": False, "window": (100, 30)},
}


def check(case: VarlenCase, *, through_lse: bool = False) -> None:
    """Compare with fp64, memory that nobody wrote being NaN; three more runs give equal bits."""
    inputs, options = make_packed(case, "cuda"), make_features(case, "cuda")
    asked: dict[str, Any] = {"kernel": "backward_gluon_sm90", "through_lse": through_lse}
    poison_allocator(4 * max(inputs["q"].numel(), 1))
    found, do, dlse = differentiate(flash_attention_varlen, inputs, options, **asked)
    assert_varlen_gradients_right(found, inputs, options, do, dlse)
    for _ in range(3):
        poison_allocator(4 * max(inputs["q"].numel(), 1))
        again, _, _ = differentiate(flash_attention_varlen, inputs, options, **asked)
        for name, gradient in found.items():
            assert torch.equal(again[name], gradient), f"d{name} has other bits in another run"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", LENGTHS)
def test_gradients(name, dims, mask):
    case = VarlenCase(
        LENGTHS[name][0], LENGTHS[name][1], 6, 2, dims[0], dims[1], "bf16", why=name, tail=9, **MASKS[mask]
    )
    check(case, through_lse=mask != "full")


@pytest.mark.parametrize("heads", [(5, 5), (4, 1), (7, 1), (14, 2), (16, 1), (40, 40)], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, "bf16"), (128, "bf16"), (128, "fp16"), (96, "fp16"), (160, "fp16")]
)
def test_groups_of_heads(head_dim, dtype, heads):
    """Walked over together, in several walks, and more K/V heads than share an order."""
    case = VarlenCase(
        (300, 7, 500, 64), (310, 7, 500, 20), heads[0], heads[1], head_dim, head_dim, dtype, causal=True, why="heads"
    )
    check(case)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_lengths_in_use(dims):
    """Tokens behind them are NaN, and have gradients of 0."""
    check(
        VarlenCase(
            (300, 40, 200, 5), (300, 50, 700, 9), 4, 2, dims[0], dims[1], "bf16", causal=True, why="used", tail=5,
            spare=300, seqused_q=(300, 0, 130, 1), seqused_k=(129, 50, 0, 9),
        )
    )  # fmt: skip


def test_queries_alone_where_sequences_share_keys():
    """Keys of one's own are asked for where dK and dV are."""
    q, k, v = (torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    starts_q, starts_k, used = (
        torch.tensor(numbers, device="cuda", dtype=torch.int32) for numbers in ([0, 200, 300], [0, 50, 300], [250, 250])
    )
    q.requires_grad_()
    o = flash_attention_varlen(q, k, v, starts_q, starts_k, 200, 250, seqused_k=used)
    (dq,) = torch.autograd.grad(o.sum(), q)
    assert dq.isfinite().all()


def test_sinks_without_keys():
    """The LSE of each row is its sink."""
    q = torch.randn(5, 2, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.empty(0, 2, 64, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, 5], device="cuda", dtype=torch.int32)
    sinks = torch.randn(2, device="cuda").requires_grad_()
    _, lse = flash_attention_varlen(q, k, k, starts, starts * 0, 5, 1, sinks=sinks, return_lse=True)
    (dsinks,) = torch.autograd.grad(lse.sum(), sinks)
    assert dsinks.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", ["unlike", "empty", "long-tail"])
def test_softcap(name, dims):
    case = VarlenCase(
        LENGTHS[name][0], LENGTHS[name][1], 6, 2, dims[0], dims[1], "bf16", causal=True, why="softcap", tail=9,
        softcap=15.0,
    )  # fmt: skip
    check(case, through_lse=True)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", ["unlike", "empty", "long-tail", "many"])
def test_alibi(name, dims, causal):
    case = VarlenCase(
        LENGTHS[name][0], LENGTHS[name][1], 6, 2, dims[0], dims[1], "bf16", causal, why="alibi", tail=9, alibi="fp32"
    )
    check(case, through_lse=True)


@pytest.mark.parametrize("sinks", ["bf16", "fp32"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", ["unlike", "empty", "long-tail"])
def test_sinks(name, dims, sinks):
    """Part of the LSE that the kernels read; their gradient has a kernel of its own."""
    case = VarlenCase(
        LENGTHS[name][0], LENGTHS[name][1], 6, 2, dims[0], dims[1], "bf16", causal=True, why="sinks", tail=9,
        window=(70, -1), sinks=sinks,
    )  # fmt: skip
    check(case, through_lse=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_what_neighbours_hold_does_not_matter(dims, causal):
    """All that belongs to the other sequences is NaN: the bits of a sequence stay."""
    lengths = ((100, 77, 300, 129, 64), (100, 200, 301, 63, 640))
    check_neighbours(VarlenCase(lengths[0], lengths[1], 4, 2, dims[0], dims[1], "bf16", causal, why="neighbours"))


def check_neighbours(case: VarlenCase) -> None:
    """Compare each of five sequences with a call in which all else is NaN."""
    inputs, options = make_packed(case, "cuda"), make_features(case, "cuda")
    asked, _, _ = ask_for_gradients(
        flash_attention_varlen, inputs, options, kernel="backward_gluon_sm90", through_lse=False
    )
    settings, given, wanted = asked
    expected = attention_gradients(settings, given, wanted)
    starts = {side: inputs[f"cu_seqlens_{side}"].tolist() for side in "qk"}
    for b in range(5):
        mine = {side: slice(starts[side][b], starts[side][b + 1]) for side in "qk"}
        poisoned = dict(given)
        for name, side in (("q", "q"), ("o", "q"), ("do", "q"), ("k", "k"), ("v", "k")):
            poisoned[name] = torch.full_like(given[name], torch.nan)
            poisoned[name][mine[side]] = given[name][mine[side]]
        found = attention_gradients(settings, poisoned, wanted)
        for name, gradient in found.items():
            rows = mine["q" if name == "q" else "k"]
            assert torch.equal(gradient[rows], expected[name][rows]), f"d{name} of sequence {b}"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_equal_lengths_have_the_bits_of_a_batch(head_dim):
    """A packed batch, and the same as [B, H, S, D]."""
    q, k, v, do = (torch.randn(4, 8, 600, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    starts = torch.arange(5, device="cuda", dtype=torch.int32) * 600
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = flash_attention(leaves[0], leaves[1], leaves[2])
    expected = torch.autograd.grad(o, leaves, do)
    packed = [x.detach().transpose(1, 2).reshape(2400, 8, head_dim).requires_grad_() for x in (q, k, v)]
    o = flash_attention_varlen(packed[0], packed[1], packed[2], starts, starts, 600, 600)
    found = torch.autograd.grad(o, packed, do.transpose(1, 2).reshape(2400, 8, head_dim))
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.view(4, 600, 8, head_dim).transpose(1, 2), other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_a_thousand_repeats(dims, causal):
    """The same bits with a long tail of lengths: which program fetches which key tile decides nothing."""
    draw = random.Random(1)
    lengths = tuple(min(3000, int(draw.paretovariate(1.1) * 60)) for _ in range(60))
    case = VarlenCase(lengths, lengths, 8, 2, dims[0], dims[1], "bf16", causal, why="repeats")
    assert_repeats(
        flash_attention_varlen, make_packed(case, "cuda"), make_features(case, "cuda"), kernel="backward_gluon_sm90"
    )


@pytest.mark.unpoisoned
@pytest.mark.parametrize(("heads", "shares"), [(4, 1), (16, 4)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_graph_replays_with_other_lengths(share, head_dim, heads, shares):
    """Captured with the longest, replayed with others in the same tensors, empty sequences among them."""
    tokens = 2048
    share(shares, 2, 2)
    asked: dict[str, Any] = {"kernel": "backward_gluon_sm90", "through_lse": False}

    def drawn(*lengths: int) -> tuple[Any, Any, Any, Any]:
        case = VarlenCase(lengths, lengths, heads, 2, head_dim, head_dim, "bf16", causal=True, why="graph")
        case = dataclasses.replace(case, tail=tokens - sum(lengths), spare=tokens - max(lengths))
        inputs, options = make_packed(case, "cuda"), make_features(case, "cuda")
        given, do, _ = ask_for_gradients(flash_attention_varlen, inputs, options, **asked)
        return given, inputs, options, do

    (settings, static, wanted), _, _, _ = drawn(512, 512, 512, 512)
    attention_gradients(settings, static, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention_gradients(settings, static, wanted)
    for lengths in ((512, 512, 512, 512), (2048, 0, 0, 0), (1, 0, 300, 17), (129, 1000, 64, 700), (0, 0, 0, 0)):
        (_, given, _), inputs, options, do = drawn(*lengths)
        for name, tensor in given.items():
            static[name].copy_(tensor)
        for gradient in captured.values():
            gradient.fill_(torch.nan)
        graph.replay()
        assert_varlen_gradients_right(captured, inputs, options, do)


def test_the_host_waits_for_nothing():
    case = VarlenCase((300, 7), (300, 7), 4, 2, 64, 64, "bf16", causal=True, why="sync")
    inputs, options = make_packed(case, "cuda"), make_features(case, "cuda")
    asked, _, _ = ask_for_gradients(
        flash_attention_varlen, inputs, options, kernel="backward_gluon_sm90", through_lse=False
    )
    attention_gradients(*asked)
    with synchronisation_is_an_error():
        attention_gradients(*asked)


def test_numbers_of_tokens_change_from_call_to_call():
    """One prepared call; kernels are prepared for each number. No queries, or no keys, too."""
    for tokens in (700, 64, 3000, 700, 129):
        check(VarlenCase((tokens, 5), (tokens, 900), 4, 2, 128, 128, "bf16", causal=True, why="tokens", spare=99))
    for lengths in (((0, 0), (20, 300)), ((20, 300), (0, 0))):
        check(VarlenCase(lengths[0], lengths[1], 4, 2, 128, 128, "bf16", causal=True, why="none", spare=99))


def test_strides():
    """q, k and v side by side in one tensor, as one product gives them."""
    case = VarlenCase((300, 77), (300, 77), 4, 4, 64, 64, "bf16", causal=True, why="strides")
    inputs, options = make_packed(case, "cuda"), make_features(case, "cuda")
    asked: dict[str, Any] = {"kernel": "backward_gluon_sm90", "through_lse": False}
    expected, _, _ = differentiate(flash_attention_varlen, inputs, options, **asked)
    beside = torch.stack([inputs[name] for name in "qkv"], 1)
    turned = {**inputs, **dict(zip("qkv", beside.unbind(1), strict=True))}
    found, _, _ = differentiate(flash_attention_varlen, turned, options, **asked)
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name])


# Query and K/V heads, shares of a group, heads that are walked over together, and shares in turns.
SHARED = ((16, 1, 4, 4, 2), (16, 2, 2, 2, 4), (7, 1, 7, 1, 16), (12, 3, 4, 1, 1), (32, 2, 2, 8, 2))
# Query tiles are fewer than key tiles, so each has several counters.
FEW_QUERIES = {"few-queries": ((5, 1, 0, 130), (4000, 2500, 900, 1300))}


@pytest.mark.parametrize(("heads", "heads_kv", "shares", "together", "in_turns"), SHARED)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (72, 40)], ids=str)
@pytest.mark.parametrize("name", [*LENGTHS, *FEW_QUERIES])
def test_shared_groups(share, name, dims, heads, heads_kv, shares, together, in_turns):
    """Right where programs add dK and dV up one after another; dQ has the bits that it has without."""
    queries, keys = {**LENGTHS, **FEW_QUERIES}[name]
    asked: dict[str, Any] = {"kernel": "backward_gluon_sm90", "through_lse": True}
    for causal in (True, False):
        case = VarlenCase(queries, keys, heads, heads_kv, dims[0], dims[1], "bf16", causal, why=name, tail=9)
        inputs, options = make_packed(case, "cuda"), make_features(case, "cuda")
        share(1, 1)
        usual, _, _ = differentiate(flash_attention_varlen, inputs, options, **asked)
        share(shares, together, in_turns)
        check(case, through_lse=True)
        found, _, _ = differentiate(flash_attention_varlen, inputs, options, **asked)
        assert torch.equal(found["q"], usual["q"])


@pytest.mark.parametrize("feature", ["fp16", "window", "softcap", "alibi", "used", "sinks"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_shared_groups_with_features(share, head_dim, feature):
    options: dict[str, dict[str, Any]] = {
        "window": {"window": (100, -1)},
        "softcap": {"softcap": 15.0},
        "alibi": {"alibi": "fp32"},
        "used": {"seqused_q": (300, 0, 130, 700), "seqused_k": (129, 50, 0, 650), "spare": 300},
        "sinks": {"sinks": "fp32"},
    }
    dtype = "fp16" if feature == "fp16" else "bf16"
    lengths = (300, 40, 200, 700), (300, 50, 700, 700)
    case = VarlenCase(*lengths, 16, 2, head_dim, head_dim, dtype, True, why=feature, tail=5, **options.get(feature, {}))
    share(2, 4, 2)
    check(case)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_neighbours_of_shared_groups_hold_does_not_matter(share, head_dim, causal):
    share(4, 1, 2)
    lengths = ((100, 77, 300, 129, 64), (100, 200, 301, 63, 640))
    check_neighbours(VarlenCase(*lengths, 8, 2, head_dim, head_dim, "bf16", causal, why="shared-neighbours"))


@pytest.mark.parametrize(("heads", "shares", "together"), [(7, 7, 1), (16, 4, 4)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_thousand_repeats_of_shared_groups(share, head_dim, heads, shares, together):
    draw = random.Random(2)
    lengths = tuple(min(3000, int(draw.paretovariate(1.1) * 60)) for _ in range(40))
    case = VarlenCase(lengths, lengths, heads, 1, head_dim, head_dim, "bf16", causal=True, why="shared-repeats")
    share(shares, together, 2)
    assert_repeats(
        flash_attention_varlen, make_packed(case, "cuda"), make_features(case, "cuda"), kernel="backward_gluon_sm90"
    )


@pytest.mark.parametrize(("heads", "shares"), [(16, 8), (8, 4), (12, 6)])
def test_plans_share_groups(heads, shares):
    """As they are made for few K/V heads and long documents."""
    lengths = (4096, 1000, 2500, 70, 1700)
    case = VarlenCase(lengths, lengths, heads, 1, 128, 128, "bf16", causal=True, why="planned")
    inputs = make_packed(case, "cuda")
    starts = inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]
    plan = explain_varlen_gradients(inputs["q"], inputs["k"], inputs["v"], *starts, 4096, 4096, causal=True)
    assert f"{shares} programs share the heads" in plan.reason
    check(case)
