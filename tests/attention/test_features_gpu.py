"""Features and packed sequences on a real GPU against fp64."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from flashmoe_science import InputError, explain, explain_varlen, flash_attention, flash_attention_varlen
from flashmoe_science.attention.tiles import ForwardConfig

from .cases import FEATURES, HEAD_DIMS, PAGED, PAIRS, VARLEN, FeatureCase, VarlenCase
from .checks import (
    assert_right,
    assert_varlen_right,
    make_features,
    make_inputs,
    make_packed,
    make_paged,
    poison_allocator,
    synchronisation_is_an_error,
)

pytestmark = pytest.mark.gpu

# One at a time, and what models ask for together: Mistral, Gemma-2, gpt-oss, and all.
ASKED: dict[str, dict[str, Any]] = {
    "window": {"window": (50, 13)},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": "bf16"},
    "alibi": {"alibi": "fp32"},
    "bias": {"bias": "fp32"},
    "bias-16": {"bias": "bf16", "bias_heads": (False, True)},
    "gemma": {"window": (70, 0), "softcap": 50.0},
    "gpt-oss": {"window": (127, 0), "sinks": "bf16"},
    "all": {"window": (90, -1), "softcap": 5.0, "sinks": "fp32", "alibi": "fp32", "alibi_axes": 2, "bias": "fp16"},
    "dropout": {"dropout": 0.3},
    "dropout-window": {"window": (50, 13), "sinks": "bf16", "dropout": 0.1},
}
LONG_PAIRS = ((4096, 4096), (4224, 4224))


def check(case: FeatureCase, kernel: str = "auto", *, lse_again: bool = False) -> None:
    """Run one case on poisoned memory; bits of a second run, without LSE if not asked for, are the same."""
    q, k, v = make_inputs(case, "cuda")
    options = make_features(case, "cuda")
    poison_allocator(q.numel() // max(1, q.shape[-1]) * v.shape[-1] * q.element_size())
    o, lse = flash_attention(q, k, v, **options, return_lse=True, kernel=kernel)
    assert_right(o, q, k, v, lse=lse, name=str(case), **options)
    again = flash_attention(q, k, v, **options, return_lse=lse_again, kernel=kernel)
    assert torch.equal(again[0] if lse_again else again, o)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_small_problems(case, dtype):
    check(case if case.dtype == "fp32" else dataclasses.replace(case, dtype=dtype))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ASKED)
def test_pairs_of_lengths(name, causal):
    """FlashAttention's list of (Sq, Sk), with 9 sequences, 6 heads and 2 KV heads."""
    for seqlen_q, seqlen_k in PAIRS:
        check(FeatureCase(9, 6, 2, seqlen_q, seqlen_k, 64, 64, "bf16", causal, why="pairs", **ASKED[name]))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LONG_PAIRS)
@pytest.mark.parametrize("name", ASKED)
def test_long_pairs(name, seqlen_q, seqlen_k):
    check(FeatureCase(1, 2, 1, seqlen_q, seqlen_k, 128, 128, "bf16", causal=True, why="long", **ASKED[name]))


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", ASKED)
def test_head_dims(name, head_dim, dtype):
    """Every width, with rests; few rows take another tile than many."""
    for seqlen_q, seqlen_k in ((113, 203), (1023, 1024)):
        check(FeatureCase(2, 4, 1, seqlen_q, seqlen_k, head_dim, head_dim, dtype, True, why="dims", **ASKED[name]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ASKED)
def test_split_keys(name, causal):
    """Few rows and many keys: the keys are split, those that a window leaves too."""
    asked = {**ASKED[name], "window": (2000, 13)} if "window" in ASKED[name] else ASKED[name]
    case = FeatureCase(1, 2, 1, 70, 4097, 64, 64, "fp16", causal, why="split", **asked)
    q, k, v = make_inputs(case, "cuda")
    plan = explain(q, k, v, **make_features(case, "cuda"))
    assert isinstance(plan.config, ForwardConfig)
    assert plan.config.num_splits > 1, plan
    check(case)


def test_keys_out_of_a_windows_reach_are_not_read():
    """They are NaN, as far as whole tiles go (128 keys at the most)."""
    q, k, v = (torch.randn(2, 4, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    rows = slice(2048, 2304)
    expected = flash_attention(q[:, :, rows], k[:, :, :2304], v[:, :, :2304], causal=True, window=(500, -1))
    k[:, :, : 2048 - 500 - 128], v[:, :, : 2048 - 500 - 128] = torch.nan, torch.nan
    o = flash_attention(q[:, :, rows], k[:, :, :2304], v[:, :, :2304], causal=True, window=(500, -1))
    assert torch.equal(o, expected)


def test_biases_of_any_strides():
    """Expanded along every axis, transposed, and at addresses that are multiples of 2 bytes only."""
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    bias = torch.randn(2, 4, 300, 300, device="cuda", dtype=torch.float16)
    for axis in range(4):
        one = bias.narrow(axis, 0, 1).expand_as(bias)
        assert_right(flash_attention(q, k, v, bias=one), q, k, v, bias=one)
    turned = bias.transpose(2, 3)
    assert_right(flash_attention(q, k, v, bias=turned), q, k, v, bias=turned)
    shifted = torch.zeros(bias.numel() + 3, device="cuda", dtype=bias.dtype)[3:].view(bias.shape).copy_(bias)
    # Not the bits of an aligned bias: the compiler lays masked tiles out, and so sums them, as the bias was loaded.
    o = flash_attention(q, k, v, bias=shifted)
    assert_right(o, q, k, v, bias=bias)
    assert torch.equal(flash_attention(q, k, v, bias=shifted), o)
    ragged = torch.randn(2, 4, 300, 301, device="cuda", dtype=torch.float16)[..., :300]
    assert_right(flash_attention(q, k, v, bias=ragged), q, k, v, bias=ragged)


def check_varlen(case: VarlenCase, kernel: str = "auto", *, lse_again: bool = False) -> None:
    inputs, options = make_packed(case, "cuda"), make_features(case, "cuda")
    given = make_paged(case, inputs) if case.page_size else inputs
    poison_allocator(inputs["q"].numel() // case.head_dim * case.head_dim_v * inputs["q"].element_size())
    o, lse = flash_attention_varlen(**given, **options, return_lse=True, kernel=kernel)
    assert_varlen_right(o, lse, inputs, options)
    rows = slice(0, sum(case.seqlens_q))
    again = flash_attention_varlen(**given, **options, return_lse=lse_again, kernel=kernel)
    assert torch.equal((again[0] if lse_again else again)[rows], o[rows])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("case", VARLEN, ids=str)
def test_packed_sequences(case, dtype):
    check_varlen(case if case.dtype == "fp32" else dataclasses.replace(case, dtype=dtype))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ASKED)
def test_packed_pairs_of_lengths(name, causal, head_dim):
    """All pairs of FlashAttention's list in one batch."""
    lengths_q, lengths_k = zip(*PAIRS, strict=True)
    check_varlen(VarlenCase(lengths_q, lengths_k, 6, 2, head_dim, head_dim, "bf16", causal, why="pairs", **ASKED[name]))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("case", PAGED, ids=str)
def test_paged_sequences(case, dtype):
    check_varlen(case if case.dtype == "fp32" else dataclasses.replace(case, dtype=dtype))


@pytest.mark.parametrize("head_dim", [64, 111, 128, 256])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("name", ["window", "softcap", "sinks", "alibi", "bias", "bias-16"])
def test_paged_tiles(name, page_size, head_dim):
    """Few rows take another tile than many; pages are less than a tile of keys, whole tiles, and neither."""
    for lengths_q, lengths_k in (((5, 0, 17), (300, 9, 17)), ((700,) * 4 + (1,), (700, 705, 900, 650, 70))):
        case = VarlenCase(
            lengths_q, lengths_k, 8, 2, head_dim, head_dim, "bf16", causal=True, why="paged", **ASKED[name]
        )
        check_varlen(dataclasses.replace(case, page_size=page_size))
        check_varlen(dataclasses.replace(case, page_size=page_size, causal=False))


def test_pages_change_under_a_graph_and_the_host_reads_none(monkeypatch):
    """Captured and replayed with another table and other lengths in the same tensors; asked to, pages are checked."""
    monkeypatch.delenv("FLASHMOE_CHECK", raising=False)
    options: dict[str, Any] = {"causal": True, "window": (200, -1)}

    def draw(*seqlens_k: int) -> tuple[dict[str, Any], dict[str, Any]]:
        case = VarlenCase((64, 1), seqlens_k, 4, 2, 64, 64, "bf16", True, window=(200, -1), page_size=16, why="graph")
        packed = make_packed(case, "cuda")
        return packed, make_paged(case, packed | {"max_seqlen_k": 1024})

    _, inputs = draw(1024, 1024)
    flash_attention_varlen(**inputs, **options)
    with synchronisation_is_an_error():
        flash_attention_varlen(**inputs, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = flash_attention_varlen(**inputs, **options, return_lse=True)
    for lengths in ((1024, 1024), (70, 1000), (64, 1)):
        packed, drawn = draw(*lengths)
        for name, tensor in drawn.items():
            if isinstance(tensor, torch.Tensor):
                inputs[name].copy_(tensor)
        o.fill_(torch.nan)
        graph.replay()
        assert_varlen_right(o, lse, packed, options)
    monkeypatch.setenv("FLASHMOE_CHECK", "1")
    flash_attention_varlen(**inputs, **options)
    inputs["page_table"][1, 0] = 9999
    with pytest.raises(InputError, match=r"page_table\[1, 0\] must be from 0 to .*, got 9999"):
        flash_attention_varlen(**inputs, **options)


def test_a_long_tail_of_lengths():
    """What serving looks like: many short sequences and few long ones, one prompt among single tokens."""
    draw = random.Random(0)
    lengths = tuple(min(6000, int(draw.paretovariate(1.1) * 60)) for _ in range(40))
    check_varlen(VarlenCase(lengths, lengths, 8, 2, 128, 128, "bf16", causal=True, why="tail"))
    mixed_q = (1, 1, 700, 1, 0, 1)
    mixed_k = (900, 17, 700, 1, 33, 4000)
    check_varlen(VarlenCase(mixed_q, mixed_k, 8, 2, 128, 128, "bf16", causal=True, why="mixed", window=(300, -1)))


def test_the_host_reads_nothing(monkeypatch):
    """Torch raises at any synchronisation; asked to check, the lengths are read, and wrong ones refused."""
    monkeypatch.delenv("FLASHMOE_CHECK", raising=False)
    case = VarlenCase((5, 40), (9, 60), 4, 2, 64, 64, "fp16", causal=True, why="sync", seqused_k=(3, 60))
    inputs = make_packed(case, "cuda")
    for bias in (None, torch.zeros(1, 4, 40, 60, device="cuda")):
        flash_attention_varlen(**inputs, causal=True, bias=bias)
        with synchronisation_is_an_error():
            flash_attention_varlen(**inputs, causal=True, bias=bias)
    monkeypatch.setenv("FLASHMOE_CHECK", "1")
    flash_attention_varlen(**inputs, causal=True)
    with pytest.raises(InputError, match="max_seqlen_q must be at least 40, the length of sequence 1, got 39"):
        flash_attention_varlen(**{**inputs, "max_seqlen_q": 39}, causal=True)


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_graph_replays_with_other_lengths(with_bias):
    """Captured with the longest, replayed with others in the same tensors, empty sequences among them."""
    options: dict[str, Any] = {"causal": True, "window": (200, -1), "softcap": 20.0, "return_lse": True}
    if with_bias:
        options["bias"] = torch.randn(4, 1, 512, 1024, device="cuda", dtype=torch.bfloat16)
    case = VarlenCase((512,) * 4, (1024,) * 4, 4, 2, 64, 64, "bf16", causal=True, why="graph", seqused_k=(1024,) * 4)
    inputs = make_packed(case, "cuda")
    flash_attention_varlen(**inputs, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = flash_attention_varlen(**inputs, **options)
    for lengths_q, lengths_k, used in (
        ((512, 512, 512, 512), (1024, 1024, 1024, 1024), (1024, 1, 1000, 0)),
        ((1, 0, 300, 17), (5, 1000, 300, 1024), (5, 7, 299, 1024)),
        ((0, 0, 0, 512), (0, 0, 0, 512), (0, 0, 0, 512)),
    ):
        other = VarlenCase(lengths_q, lengths_k, 4, 2, 64, 64, "bf16", causal=True, why="graph", seqused_k=used)
        drawn = make_packed(other, "cuda")
        for name, tensor in drawn.items():
            if isinstance(tensor, torch.Tensor):
                inputs[name][: tensor.shape[0]].copy_(tensor)
        o.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        rows = sum(lengths_q)
        shown = {name: option for name, option in options.items() if name != "return_lse"}
        assert_varlen_right(o[:rows], lse[:, :rows], drawn, shown)


def test_a_sequence_has_the_same_bits_in_every_batch():
    """As long as the tile is the same, which ``explain_varlen`` shows."""
    lengths = (300, 1, 64, 200)
    case = VarlenCase(lengths, lengths, 8, 2, 128, 128, "bf16", causal=True, why="batch")
    inputs = make_packed(case, "cuda")
    whole = flash_attention_varlen(**inputs, causal=True)
    starts = inputs["cu_seqlens_q"].tolist()
    for b in range(4):
        rows = slice(starts[b], starts[b + 1])
        ends = torch.tensor([0, 0, 0, 0, lengths[b]], dtype=torch.int32, device="cuda")
        alone = {**inputs, **{name: inputs[name][rows] for name in "qkv"}, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
        assert explain_varlen(**alone, causal=True).config == explain_varlen(**inputs, causal=True).config
        assert torch.equal(flash_attention_varlen(**alone, causal=True), whole[rows])


def test_compiled_whole_graphs():
    """Inductor, and a number of tokens that changes, with no graph break."""
    q, k, v = (torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    sinks = torch.randn(4, device="cuda", dtype=torch.bfloat16)

    def attend(a, b, c):
        return flash_attention(a * 2, b, c, causal=True, window=(64, -1), softcap=20.0, sinks=sinks) + 1

    torch.testing.assert_close(torch.compile(attend, fullgraph=True)(q, k, v), attend(q, k, v))
    table = torch.arange(8, dtype=torch.int32, device="cuda").view(1, 8)
    ends_of_one = torch.tensor([0, 200], dtype=torch.int32, device="cuda")

    def attend_paged(a, b, c):
        options: dict[str, Any] = {"causal": True, "page_table": table}
        return flash_attention_varlen(a * 2, b, c, ends_of_one, ends_of_one, 256, 200, **options) + 1

    paged = q[0].transpose(0, 1), *(tensor.reshape(-1, 25, 4, 64) for tensor in (k, v))
    torch.testing.assert_close(torch.compile(attend_paged, fullgraph=True)(*paged), attend_paged(*paged))
    ends = torch.tensor([0, 5, 100, 200], dtype=torch.int32, device="cuda")

    def attend_packed(a, b, c, starts, bias):
        options: dict[str, Any] = {"causal": True, "window": (64, -1), "bias": bias}
        return flash_attention_varlen(a * 2, b, c, starts, starts, 128, 128, **options) + 1

    for bias in (None, torch.randn(3, 4, 128, 128, device="cuda")):
        compiled = torch.compile(attend_packed, fullgraph=True, dynamic=True)
        for tokens in (200, 200, 333):
            a, b, c = (torch.randn(tokens, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            torch.testing.assert_close(compiled(a, b, c, ends, bias)[:200], attend_packed(a, b, c, ends, bias)[:200])
