"""``forward_features_gluon_sm90`` on a Hopper GPU: features and packed sequences, each forced, against fp64."""

from __future__ import annotations

import dataclasses
import random
import threading
from typing import Any

import pytest
import torch

from flashmoe_science import explain, explain_varlen, flash_attention, flash_attention_varlen
from flashmoe_science.attention.forward.variants_plan import FEATURES_KERNEL

from .cases import PAIRS, FeatureCase, VarlenCase
from .checks import assert_right, make_features, make_inputs, make_packed
from .test_features_gpu import check, check_varlen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="it is for sm_90"
    ),
]

FORCED: dict[str, Any] = {"kernel": FEATURES_KERNEL}
# Without LSE it is another kernel, of which a few tests have enough.
CHECKED: dict[str, Any] = {**FORCED, "lse_again": True}
ALL: dict[str, Any] = {"window": (90, 33), "softcap": 5.0, "sinks": "fp32"}
LENGTHS_Q, LENGTHS_K = zip(*PAIRS, strict=True)


def packed(head_dim, causal, *, lengths=(LENGTHS_Q, LENGTHS_K), dtype="bf16", head_dim_v=0, **more) -> VarlenCase:
    return VarlenCase(
        lengths[0], lengths[1], 6, 2, head_dim, head_dim_v or head_dim, dtype, causal, why="features-sm90", **more
    )  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [128, 64, 256])
def test_packed_pairs_of_lengths(head_dim, causal):
    """All pairs of FlashAttention's list in one batch, of other lengths and in another order, from the same kernel."""
    check_varlen(packed(head_dim, causal, tail=70), **CHECKED)
    empty_and_one = ((0, 1, 63, 64, 65, 0, 129, 1, 300), (5, 1, 64, 63, 300, 0, 1, 1000, 0))
    check_varlen(packed(head_dim, causal, lengths=empty_and_one, spare=500), **CHECKED)
    check_varlen(packed(head_dim, causal, lengths=((0, 0, 3), (0, 1, 0))), **CHECKED)
    check_varlen(packed(head_dim, causal, lengths=((4096, 1), (4224, 2))), **CHECKED)
    random_lengths = tuple(random.Random(head_dim).randrange(400) for _ in range(140))
    check_varlen(packed(head_dim, causal, lengths=(random_lengths, random_lengths[::-1])), **CHECKED)


@pytest.mark.parametrize("head_dim", [128, 64, 256])
def test_packed_sequences_with_all_features(head_dim):
    """Window, softcap, sinks, and lengths in use: what lies behind them is NaN."""
    used_q = tuple(max(0, length - (17 * i) % 90) for i, length in enumerate(LENGTHS_Q))
    used_k = tuple(max(0, length - (29 * i) % 150) for i, length in enumerate(LENGTHS_K))
    check_varlen(packed(head_dim, causal=False, seqused_q=used_q, seqused_k=used_k, **ALL), **CHECKED)
    lengths = ((100, 700, 64, 0, 200), (300, 900, 64, 5, 100))
    used = {"seqused_q": (0, 650, 64, 0, 200), "seqused_k": (300, 1, 0, 5, 63)}
    check_varlen(packed(head_dim, causal=False, lengths=lengths, **used, **ALL), **CHECKED)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "causal", "dtype"),
    [(192, 128, True, "bf16"), (96, 80, False, "fp16"), (40, 64, True, "fp16"), (192, 192, True, "fp16")],
)
def test_packed_widths(head_dim, head_dim_v, causal, dtype):
    check_varlen(packed(head_dim, causal, dtype=dtype, head_dim_v=head_dim_v, tail=5), **CHECKED)


ASKED: dict[str, dict[str, Any]] = {
    "window": {"window": (127, 0)},
    "window-both": {"window": (300, 70)},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": "bf16"},
    "alibi": {"alibi": "fp32", "alibi_axes": 2},
    "alibi-window-sinks": {"alibi": "bf16", "window": (300, 70), "sinks": "fp32"},
    "all": ALL,
}


def hides_nothing(window: tuple[int, int], seqlen_q: int, seqlen_k: int, *, causal: bool) -> bool:
    """Return whether a window hides no key that the mask leaves; with nothing to the right it is the causal mask."""
    left, right = window
    return left >= seqlen_k - 1 and (causal or right == 0 or right >= seqlen_q - 1)


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("causal", [True, False])
def test_pairs_of_lengths(name, causal):
    """FlashAttention's list of (Sq, Sk), and long ones, of which a program attends several row tiles."""
    for seqlen_q, seqlen_k in (*PAIRS, (4096, 4096), (4224, 4224)):
        if name.startswith("window") and hides_nothing(ASKED[name]["window"], seqlen_q, seqlen_k, causal=causal):
            continue  # which is a plain call, and is refused
        heads = (9, 6, 2) if seqlen_q < 4096 else (2, 6, 2)
        check(FeatureCase(*heads, seqlen_q, seqlen_k, 128, 128, "bf16", causal, why="pairs", **ASKED[name]), **CHECKED)


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bf16"), (96, "fp16"), (128, "fp16"), (256, "bf16")])
def test_head_dims(head_dim, dtype):
    for seqlen_q, seqlen_k in ((113, 203), (1023, 1024), (2100, 2023)):
        case = FeatureCase(3, 6, 2, seqlen_q, seqlen_k, head_dim, head_dim, dtype, causal=False, why="dims", **ALL)
        check(case, **CHECKED)
        check(dataclasses.replace(case, window=(-1, -1), causal=True), **CHECKED)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_alibi(head_dim, causal):
    """Of all widths, and packed: rows count from the start of their sequence."""
    for seqlen_q, seqlen_k in ((113, 203), (1023, 1024), (2100, 2023)):
        case = FeatureCase(
            3, 6, 2, seqlen_q, seqlen_k, head_dim, head_dim, "bf16", causal, why="alibi", alibi="fp32", sinks="bf16"
        )
        check(case, **CHECKED)
        check(dataclasses.replace(case, dtype="fp16", window=(200, -1), sinks=""), **CHECKED)
    check_varlen(packed(head_dim, causal, alibi="fp32", tail=70), **CHECKED)


@pytest.mark.parametrize("causal", [True, False])
def test_what_neighbours_hold_does_not_matter(causal):
    """Queries, keys and values of the other sequences are NaN: the bits of a sequence stay."""
    lengths = ((100, 77, 300, 129, 64), (100, 200, 301, 63, 640))
    inputs = make_packed(packed(128, causal, lengths=lengths, seqused_k=(100, 200, 301, 63, 640)), "cuda")
    options: dict[str, Any] = {"causal": causal, "return_lse": True, **FORCED}
    expected, expected_lse = flash_attention_varlen(**inputs, **options)
    for b in range(5):
        poisoned = {name: torch.full_like(inputs[name], torch.nan) for name in "qkv"}
        for name in "qkv":
            starts = inputs["cu_seqlens_q" if name == "q" else "cu_seqlens_k"].tolist()
            mine = slice(starts[b], starts[b + 1])
            poisoned[name][mine] = inputs[name][mine]
        o, lse = flash_attention_varlen(**{**inputs, **poisoned}, **options)
        starts = inputs["cu_seqlens_q"].tolist()
        mine = slice(starts[b], starts[b + 1])
        assert torch.equal(o[mine], expected[mine])
        assert torch.equal(lse[:, mine], expected_lse[:, mine])


def test_rows_in_no_sequence_are_not_written():
    """In front of the first sequence, and behind the last one."""
    inputs = make_packed(packed(128, causal=True, lengths=((100, 30), (100, 30))), "cuda")
    starts = inputs["cu_seqlens_q"] + 7
    shifted = {name: torch.cat([inputs[name][:7], inputs[name], inputs[name][:9]]) for name in "qkv"}
    o = flash_attention_varlen(
        **{**inputs, **shifted, "cu_seqlens_q": starts, "cu_seqlens_k": starts}, causal=True, **FORCED
    )
    expected = flash_attention_varlen(**inputs, causal=True, **FORCED)
    assert torch.equal(o[7:137], expected)
    assert o[:7].isnan().all()  # torch.empty is poisoned
    assert o[137:].isnan().all()


@pytest.mark.parametrize("head_dim", [128, 64, 256])
def test_bits_are_equal_over_repeats(head_dim):
    """1,000 repeats with a long tail of lengths: the order in which tiles are drawn decides nothing."""
    draw = random.Random(1)
    lengths = tuple(min(3000, int(draw.paretovariate(1.1) * 60)) for _ in range(60))
    inputs = make_packed(packed(head_dim, causal=True, lengths=(lengths, lengths)), "cuda")
    options: dict[str, Any] = {"causal": True, "return_lse": True, **FORCED}
    first, first_lse = flash_attention_varlen(**inputs, **options)
    for _ in range(1000):
        o, lse = flash_attention_varlen(**inputs, **options)
        assert torch.equal(o, first)
        assert torch.equal(lse, first_lse)


def test_bits_of_features_are_equal_over_repeats():
    case = FeatureCase(
        4, 24, 6, 900, 1000, 128, 128, "bf16", causal=True, why="repeats", sinks="bf16", window=(300, -1)
    )
    q, k, v = make_inputs(case, "cuda")
    options = {**make_features(case, "cuda"), "return_lse": True, **FORCED}
    first, first_lse = flash_attention(q, k, v, **options)
    for _ in range(1000):
        o, lse = flash_attention(q, k, v, **options)
        assert torch.equal(o, first)
        assert torch.equal(lse, first_lse)


def test_equal_lengths_have_the_bits_of_a_batch():
    """A packed batch with a window, and the same as [B, H, S, D]."""
    q, k, v = (torch.randn(4, 8, 600, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    starts = torch.arange(5, device="cuda", dtype=torch.int32) * 600
    a, b, c = (tensor.transpose(1, 2).reshape(2400, 8, 128) for tensor in (q, k, v))
    options: dict[str, Any] = {"causal": True, "window": (200, -1), **FORCED}
    o = flash_attention_varlen(a, b, c, starts, starts, 600, 600, **options)
    expected = flash_attention(q, k, v, **options)
    assert torch.equal(o.view(4, 600, 8, 128).transpose(1, 2), expected)


def test_numbers_of_tokens_change_from_call_to_call():
    """One prepared call: TMA is told of each number. No keys at all, too."""
    for tokens in (700, 64, 3000, 700, 129):
        check_varlen(packed(128, causal=True, lengths=((tokens, 5), (tokens, 900))), **CHECKED)
    case = packed(128, causal=True, lengths=((20, 300), (0, 0)))
    check_varlen(dataclasses.replace(case, spare=300), **CHECKED)


def test_layouts_of_tokens():
    """q, k and v in one tensor, and heads far apart."""
    starts = torch.tensor([0, 100, 500], dtype=torch.int32, device="cuda")
    together = torch.randn(500, 3, 8, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = together.unbind(1)

    def call(q, k, v):
        return flash_attention_varlen(q, k, v, starts, starts, 400, 400, causal=True, **FORCED)

    expected = call(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(call(q, k, v), expected)
    a, b, c = (part.transpose(0, 1).contiguous().transpose(0, 1) for part in (q, k, v))
    assert torch.equal(call(a, b, c), expected)


def test_streams_and_threads():
    """Calls from eight threads on streams of their own, each with lengths of its own."""
    cases = [packed(128, causal=True, lengths=((50 * i + 1, 300), (50 * i + 1, 300))) for i in range(8)]
    inputs = [make_packed(case, "cuda") for case in cases]
    expected = [flash_attention_varlen(**i, causal=True, **FORCED) for i in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                o = flash_attention_varlen(**inputs[index], causal=True, **FORCED)
                if not torch.equal(o, expected[index]):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_graph_replays_with_other_lengths():
    """Captured with the longest, replayed with others in the same tensors; between replays another call draws tiles."""
    case = packed(128, causal=True, lengths=((512,) * 6, (1024,) * 6), seqused_k=(1024,) * 6)
    inputs = make_packed(case, "cuda")
    options: dict[str, Any] = {"causal": True, "return_lse": True, **FORCED}
    flash_attention_varlen(**inputs, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = flash_attention_varlen(**inputs, **options)
    for lengths_q, lengths_k in (((512,) * 6, (1024,) * 6), ((1, 0, 300, 17, 0, 512), (5, 1000, 300, 1024, 0, 1))):
        other = packed(128, causal=True, lengths=(lengths_q, lengths_k), seqused_k=lengths_k)
        drawn = make_packed(other, "cuda")
        for name, tensor in drawn.items():
            if isinstance(tensor, torch.Tensor):
                inputs[name][: tensor.shape[0]].copy_(tensor)
        o.fill_(torch.nan)
        graph.replay()
        rows = sum(lengths_q)
        expected, expected_lse = flash_attention_varlen(
            **{**drawn, "max_seqlen_q": 512, "max_seqlen_k": 1024}, **options
        )
        assert torch.equal(o[:rows], expected)
        assert torch.equal(lse[:, :rows], expected_lse)


def test_auto_takes_it_for_long_sequences():
    inputs = make_packed(packed(128, causal=True, lengths=((2000,) * 8, (2000,) * 8)), "cuda")
    assert explain_varlen(**inputs, causal=True).kernel == FEATURES_KERNEL
    expected = flash_attention_varlen(**inputs, causal=True, **FORCED)
    assert torch.equal(flash_attention_varlen(**inputs, causal=True), expected)


BIASES: dict[str, dict[str, Any]] = {
    "own": {"bias_heads": (True, True)},
    "of-heads": {"bias_heads": (False, True)},
    "of-sequences": {"bias_heads": (True, False)},
    "one": {"bias_heads": (False, False)},
}


def check_bias(case: FeatureCase, bias: torch.Tensor, kernel: str = FEATURES_KERNEL) -> None:
    """Hold a call with this bias in place of the case's own against fp64, and against itself."""
    q, k, v = make_inputs(case, "cuda")
    options = {**make_features(case, "cuda"), "bias": bias}
    assert explain(q, k, v, **options, kernel=kernel).kernel == kernel
    o, lse = flash_attention(q, k, v, **options, return_lse=True, kernel=kernel)
    assert_right(o, q, k, v, lse=lse, name=str(case), **options)
    again, again_lse = flash_attention(q, k, v, **options, return_lse=True, kernel=kernel)
    assert torch.equal(again, o)
    assert torch.equal(again_lse, lse)


def padded(bias: torch.Tensor) -> torch.Tensor:
    """Return the same bias with rows at multiples of 16 bytes, and NaN between and around them."""
    b, h, rows, columns = bias.shape
    room = torch.full((b, h, rows + 2, -(-columns // 8) * 8 + 16), torch.nan, dtype=bias.dtype, device=bias.device)
    return room[:, :, 1:-1, 8 : 8 + columns].copy_(bias)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("head_dim", [128, 64, 96, 192, 256])
def test_a_bias_of_each_kind(head_dim, name, causal):
    """Every fifth key is hidden by -inf, and one row sees none; what lies around the bias is NaN."""
    for dtype, bias in (("bf16", "bf16"), ("fp16", "fp16"), ("fp16", "bf16"), ("bf16", "fp16")):
        for seqlen_q, seqlen_k in ((1000, 777), (113, 203), (640, 640)) if dtype == bias else ((520, 1032),):
            case = FeatureCase(
                3, 6, 2, seqlen_q, seqlen_k, head_dim, head_dim, dtype, causal, why="bias", bias=bias, **BIASES[name]
            )
            check_bias(case, padded(make_features(case, "cuda")["bias"]))


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_with_windows_and_sinks(name):
    for more in ({"window": (127, 0)}, {"window": (300, 70)}, {"sinks": "fp32"}, {"window": (90, 33), "sinks": "bf16"}):
        for head_dim, head_dim_v in ((128, 128), (192, 128)):
            case = FeatureCase(
                2, 6, 2, 1000, 1203, head_dim, head_dim_v, "bf16", causal=False, why="bias", bias="bf16",
                **BIASES[name], **more,
            )  # fmt: skip
            check_bias(case, padded(make_features(case, "cuda")["bias"]))


def test_a_bias_of_long_calls():
    """A program attends several row tiles, and walks over many tiles of keys."""
    for causal in (True, False):
        for head_dim in (64, 128):
            case = FeatureCase(2, 6, 2, 4224, 4224, head_dim, head_dim, "bf16", causal, why="bias", bias="bf16")
            check(case, **CHECKED)
            check(dataclasses.replace(case, bias_heads=(False, True)), **CHECKED)


def test_views_of_a_bias():
    """Expanded along each axis but keys, sliced, with axes swapped; others are the portable kernel's, and right."""
    case = FeatureCase(4, 6, 2, 1032, 1000, 128, 128, "bf16", causal=False, why="bias", bias="bf16")
    whole = make_features(case, "cuda")["bias"]
    for axis in range(3):
        check_bias(case, whole.narrow(axis, 5 if axis == 2 else 1, 1).expand_as(whole))
    check_bias(case, whole[:1, :1, 7:8].expand_as(whole))  # as of padding
    check_bias(case, whole.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3))
    check_bias(case, torch.randn(4, 6, 2 * 1032, 1016, device="cuda", dtype=torch.bfloat16)[:, :, ::2, 16:])
    q, k, v = make_inputs(case, "cuda")
    for bias in (
        whole.transpose(2, 3).contiguous().transpose(2, 3),
        torch.randn(4, 6, 1032, 1001, device="cuda", dtype=torch.bfloat16)[..., :1000],
        torch.randn(4, 6, 1032, 1008, device="cuda", dtype=torch.bfloat16)[..., 3:1003],
        whole[..., :1].expand_as(whole),
        whole.float(),
    ):
        assert explain(q, k, v, bias=bias).kernel == "forward_triton"
        assert_right(flash_attention(q, k, v, bias=bias), q, k, v, bias=bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lowest_numbers_hide_keys(dtype):
    """They weigh nothing beside others, and all the same alone; -inf weighs nothing, and a row of it is 0."""
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    case = FeatureCase(4, 6, 2, 1000, 1000, 128, 128, name, causal=False, why="lowest", bias=name)
    lowest = torch.finfo(dtype).min
    bias = torch.randn(4, 6, 1000, 1000, device="cuda").to(dtype)
    bias[..., 700:] = lowest  # the first tiles of a walk
    bias[:, :, 100] = lowest
    bias[:, :, 101, :-1] = lowest
    bias[:, :, 102, 1:] = lowest
    bias[:, :, 103] = -torch.inf
    bias[:, :, 104, 300:] = -torch.inf
    bias[:, :, 105, 200:], bias[:, :, 105, :200] = -torch.inf, lowest
    bias[1, :, :, :] = lowest
    bias[2, :, :, 64:] = -torch.inf
    check_bias(case, bias)
    q, k, v = make_inputs(case, "cuda")
    o, lse = flash_attention(q, k, v, bias=bias, return_lse=True, **FORCED)
    if dtype == torch.bfloat16:
        mean = v.float().mean(2, keepdim=True).repeat_interleave(3, 1)
        torch.testing.assert_close(o[1].float(), mean[1].expand(-1, 1000, -1), rtol=0, atol=2e-3)
        assert (lse[1] == lowest).all()
    assert not o[:, :, 103][[0, 2, 3]].any()
    assert (lse[:, :, 103][[0, 2, 3]] == -torch.inf).all()
    other, other_lse = flash_attention(q, k, v, bias=bias, return_lse=True, kernel="forward_triton")
    torch.testing.assert_close(o, other, rtol=0, atol=2e-2)
    torch.testing.assert_close(lse, other_lse, rtol=1e-4, atol=1e-3)


def test_large_numbers_in_a_bias():
    """Of both signs, and rising along the walk, which raises the maximum in each tile."""
    case = FeatureCase(4, 6, 2, 1000, 1000, 128, 128, "bf16", causal=False, why="bias-large", bias="bf16")
    noise = torch.randn(4, 6, 1000, 1000, device="cuda")
    check_bias(case, (1e4 * noise).to(torch.bfloat16))
    steps = 30.0 * torch.arange(1000, device="cuda").flip(0).div(64, rounding_mode="floor")
    check_bias(case, (noise + steps).to(torch.bfloat16))
    check_bias(case, (noise - steps).to(torch.bfloat16))
    highest = noise.to(torch.bfloat16)
    highest[:, :, 5, 3], highest[:, :, 6, -3], highest[:, :, 7, 100:] = (torch.finfo(torch.bfloat16).max,) * 3
    check_bias(case, highest)


def test_a_bias_of_more_than_2_31_elements():
    """Its last heads, against a call with those alone."""
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("the bias takes 5 GB")
    q, k, v = (torch.randn(1, 40, 8192, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    bias = torch.empty(1, 40, 8192, 8192, device="cuda", dtype=torch.bfloat16).normal_()
    assert bias.numel() > 2**31
    o, lse = flash_attention(q, k, v, bias=bias, return_lse=True, **FORCED)
    for heads in (slice(0, 2), slice(31, 33), slice(38, 40)):
        mine = bias[:, heads].clone()
        alone, alone_lse = flash_attention(q[:, heads], k[:, heads], v[:, heads], bias=mine, return_lse=True, **FORCED)
        assert torch.equal(o[:, heads], alone)
        assert torch.equal(lse[:, heads], alone_lse)


def test_bits_of_a_bias_are_equal_over_repeats():
    case = FeatureCase(4, 24, 6, 1000, 1000, 128, 128, "bf16", causal=True, why="repeats", bias="bf16", sinks="bf16")
    q, k, v = make_inputs(case, "cuda")
    options = {**make_features(case, "cuda"), "return_lse": True, **FORCED}
    first, first_lse = flash_attention(q, k, v, **options)
    for _ in range(500):
        o, lse = flash_attention(q, k, v, **options)
        assert torch.equal(o, first)
        assert torch.equal(lse, first_lse)


def test_gradients_through_a_bias():
    """The forward's LSE is what the gradients need; that of ``forward_triton`` gives nearly the same."""
    grads = []
    q, k, v = (torch.randn(4, 8, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    bias, do = torch.randn(1, 8, 1024, 1024, device="cuda", dtype=torch.bfloat16), torch.randn_like(q)
    bias[..., 3::7] = -torch.inf
    bias[:, :, 17] = -torch.inf
    assert explain(q, k, v, bias=bias, return_lse=True).kernel == FEATURES_KERNEL
    for kernel in (FEATURES_KERNEL, "forward_triton"):
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v, bias)]
        o = flash_attention(*leaves[:3], bias=leaves[3], kernel=kernel)
        grads.append(torch.autograd.grad(o, leaves, do))
    for name, ours, theirs in zip(("q", "k", "v", "bias"), *grads, strict=True):
        assert ours.isfinite().all(), name
        scale = theirs.float().abs().max().item()
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0.02 * scale)
