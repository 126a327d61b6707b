"""Features without a GPU: their meaning, their contract, and the streaming kernel in Triton's interpreter."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit

from flashmoe_science import InputError, UnsupportedError, explain, flash_attention
from flashmoe_science.attention import reference
from flashmoe_science.attention.forward.plan import plan_attention
from flashmoe_science.attention.forward.variants_plan import FEATURES_KERNEL
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.attention.tiles import ForwardConfig
from flashmoe_science.gpu.specs import SPECS

from ..exhaustive import all_but
from .cases import FEATURES, FeatureCase
from .checks import assert_right, make_features, make_inputs


def sees(m: int, n: int, *, seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int]) -> bool:
    """Say it as flash-attn does: keys from i + Sk - Sq - left to i + Sk - Sq + right, both included."""
    middle, (left, right) = m + seqlen_k - seqlen_q, window
    right = 0 if causal else right
    return (left < 0 or n >= middle - left) and (right < 0 or n <= middle + right)


WINDOWS = [(-1, -1), (0, -1), (2, -1), (-1, 0), (-1, 3), (0, 0), (3, 1), (100, 100), (4, 100)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(7, 7), (5, 9), (9, 5), (1, 6), (6, 1)])
def test_windows_and_biases_against_sdpa(seqlen_q, seqlen_k, window):
    """An implementation that is not ours, with the mask written out key by key, agrees in fp64."""
    q = torch.randn(2, 4, seqlen_q, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 2, seqlen_k, 8, dtype=torch.float64) for _ in range(2))
    slopes, bias = torch.rand(2, 4, dtype=torch.float64), torch.randn(1, 4, seqlen_q, seqlen_k, dtype=torch.float64)
    for causal in (False, True):
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "causal": causal, "window": window}
        visible = torch.tensor([[sees(m, n, **sizes) for n in range(seqlen_k)] for m in range(seqlen_q)])
        added = torch.where(visible, 0.0, -math.inf).expand(2, 4, -1, -1) + bias
        for m, n in itertools.product(range(seqlen_q), range(seqlen_k)):
            added[:, :, m, n] -= slopes * abs(m + seqlen_k - seqlen_q - n)
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=0.3, enable_gqa=True)
        o, lse = reference.attention(
            q, k, v, causal=causal, window=window, alibi=slopes, bias=bias, softmax_scale=0.3
        )  # fmt: skip
        torch.testing.assert_close(o, expected.nan_to_num(0.0), rtol=1e-12, atol=1e-12)
        assert torch.equal(lse == -math.inf, (~visible.any(1)).expand(2, 4, -1))
        problem = AttentionProblem(2, 4, 2, seqlen_q, seqlen_k, 8, 8, "fp32", causal=causal, window=window)
        assert problem.visible_scores == visible.sum()


def test_softcap_and_sinks_against_what_models_do():
    """Gemma-2's and gpt-oss's own eager code: softcap before mask; one more logit, dropped after the softmax."""
    q, k, v = (torch.randn(2, 3, 6, 8, dtype=torch.float64) for _ in range(3))
    sinks, bias = torch.randn(3, dtype=torch.float64), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    scores = torch.tanh(q @ k.transpose(2, 3) * 0.5 / 2.0) * 2.0 + bias
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
    combined = torch.cat([scores, sinks[None, :, None, None].expand(2, -1, 6, 1)], -1)
    o, lse = reference.attention(q, k, v, causal=True, softmax_scale=0.5, softcap=2.0, sinks=sinks, bias=bias)
    torch.testing.assert_close(o, torch.softmax(combined, -1)[..., :-1] @ v, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, torch.logsumexp(combined, -1), rtol=1e-12, atol=1e-12)


def test_lse_with_sinks_merges_as_it_says():
    """Two shares of the keys, of which one has the sinks, merge by their LSE to the whole."""
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64) for _ in range(3))
    sinks = torch.randn(2, dtype=torch.float64)
    whole, whole_lse = reference.attention(q, k, v, sinks=sinks)
    parts = [
        reference.attention(q, k[:, :, :4], v[:, :, :4], sinks=sinks),
        reference.attention(q, k[:, :, 4:], v[:, :, 4:]),
    ]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    o = sum(part * torch.exp(part_lse - lse)[..., None] for part, part_lse in parts)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(o, whole, rtol=1e-12, atol=1e-12)


def test_the_most_negative_bias_is_a_mask_and_not_infinity():
    """Rows whose every key has it average their values; no logarithm of their sum is left in fp32 or fp64."""
    q, k, v = (torch.randn(1, 1, 4, 8) for _ in range(3))
    bias = torch.zeros(1, 1, 4, 4)
    bias[:, :, 1], bias[:, :, 2, 1:] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min
    o = flash_attention(q, k, v, bias=bias)
    torch.testing.assert_close(o[:, :, 1], v.mean(2))
    torch.testing.assert_close(o[:, :, 2], v[:, :, 0])


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_cpu_tensors_run_the_reference(case):
    """Right to fp64 in the low-precision budget, bf16 too, and ``explain`` says who served it."""
    q, k, v = make_inputs(case, "cpu")
    options = make_features(case, "cpu")
    assert explain(q, k, v, **options).kernel == "reference"
    for dtype in (q.dtype, torch.bfloat16):
        low = [tensor.to(dtype) for tensor in (q, k, v)]
        o, lse = flash_attention(*low, **options, return_lse=True)
        assert_right(o, *low, lse=lse if dtype == q.dtype else None, **options)


# Every feature, keys split, both masks, 16-bit elements and fp32. Each with dropout and without.
USUAL = (
    "all-at-once", "split-bias-sinks", "window-on-both-sides", "bias-of-sequences",
    "dropout-all-at-once", "split-dropout", "dropout-odd",
    "window-right-rows-without-keys", "sinks-rows-without-keys", "alibi-of-each-sequence", "bias-of-heads",
    "softcap-fp32",
)  # fmt: skip


@pytest.mark.triton
@pytest.mark.parametrize("case", all_but(FEATURES, *USUAL), ids=str)
def test_streaming_kernel_interpreted(case, interpreted):
    """The Triton kernel itself, its keys split too, in a child process. Tiles out of a window's reach are not read."""
    interpreted(case)


def test_some_windows_leave_tiles_out():
    """So that the test above shows that they are not read."""
    reach = [(case.keys_within_reach, case.seqlen_k, case.splits) for case in FEATURES]
    assert any(first > 0 for (first, _), _, splits in reach if splits == 1)
    assert any(first > 0 for (first, _), _, splits in reach if splits > 1)


PROBLEM = AttentionProblem(2, 4, 2, 100, 300, 64, 64, "fp16")


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"window": (299, 99)}, (False, (-1, -1))),  # the last row sees key 0, the first one key 299
        ({"window": (298, 98)}, (False, (298, 98))),
        ({"window": (2**40, 2**40)}, (False, (-1, -1))),
        ({"window": (50, 0)}, (True, (50, -1))),
        ({"window": (-1, 0)}, (True, (-1, -1))),
        ({"window": (50, 20), "causal": True}, (True, (50, -1))),
        ({"window": (50, -1)}, (False, (50, -1))),
    ],
)
def test_equal_windows_are_one_problem(asked, kept):
    """A bound that hides nothing is none, and a right bound of 0 is causal: so the fast kernels serve what they can."""
    problem = AttentionProblem(2, 4, 2, 100, 300, 64, 64, "fp16", **asked)
    assert (problem.causal, problem.window) == kept
    assert bool(problem.features) == (problem.window != (-1, -1))


FEATURE_WORDS: dict[str, dict[str, Any]] = {
    "a sliding window": {"window": (70, -1)},
    "a softcap": {"softcap": 30.0},
    "attention sinks": {"sinks": "bf16"},
    "ALiBi": {"alibi": "fp32"},
    "a bias": {"bias": "bf16"},
    "packed sequences": {"packed": True},
}


@pytest.mark.parametrize("words", FEATURE_WORDS)
def test_the_plan_says_which_kernels_do_not_serve_a_feature(words):
    """``forward_triton`` serves it, or, of long sequences, a kernel of its own; forced, the others refuse."""
    for seqlen in (128, 4096):
        problem = AttentionProblem(2, 16, 16, seqlen, seqlen, 128, 128, "bf16", True, **FEATURE_WORDS[words])
        assert problem.features == (words,)
        plan = plan_attention(problem, SPECS["H200"])
        assert f"forward_short_gluon is passed over (it does not serve {words})" in plan.reason
        if seqlen == 128:
            assert plan.kernel == "forward_triton"
            assert f"{FEATURES_KERNEL} too (its 32 row tiles do not fill 132 SMs" in plan.reason
        else:
            assert plan.kernel == FEATURES_KERNEL
        for kernel in ("forward_short_gluon", "forward_gluon_sm90"):
            with pytest.raises(UnsupportedError, match=f"{kernel} does not serve .*: it does not serve {words}"):
                plan_attention(problem, SPECS["H200"], kernel)


def test_several_features_are_named_together():
    problem = AttentionProblem(1, 4, 4, 128, 128, 64, 64, "fp16", softcap=2.0, sinks="fp32", bias="fp32")
    assert "(it does not serve a softcap, attention sinks and a bias)" in plan_attention(problem, SPECS["L4"]).reason
    assert problem.describe() == "b1_h4_s128_d64_fp16_softcap2_sinks_bias"
    windowed = AttentionProblem(1, 4, 4, 128, 128, 64, 64, "fp16", causal=True, window=(9, -1), alibi="fp32")
    assert windowed.describe() == "b1_h4_s128_d64_fp16_causal_window9_all_alibi"


def test_a_window_is_split_by_the_keys_that_it_leaves():
    """Shares of all keys would leave most programs without any."""

    def splits(window: tuple[int, int]) -> int:
        problem = AttentionProblem(1, 2, 2, 16, 2**17, 64, 64, "fp16", causal=True, window=window)
        config = plan_attention(problem, SPECS["H200"]).config
        assert isinstance(config, ForwardConfig)
        return config.num_splits

    assert splits((-1, -1)) == 32
    assert splits((1023, -1)) in (3, 4)
    assert splits((127, -1)) == 1


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "window of three": ({"window": (1, 2, 3)}, r"window must be two integers \(left, right\), .* got \(1, 2, 3\)"),
    "window of floats": ({"window": (1.0, 2)}, r"window must be two integers .* got \(1.0, 2\)"),
    "window of booleans": ({"window": (True, 2)}, r"window must be two integers .* got \(True, 2\)"),
    "a number": ({"window": 5}, "window must be two integers .* got 5"),
    "negative window": ({"window": (-2, 0)}, r"window must be two integers .* -1 for no bound, got \(-2, 0\)"),
    "negative softcap": ({"softcap": -1.0}, r"softcap must be 0 \(none\) or more, at most 2.36e\+38, got -1.0"),
    "infinite softcap": ({"softcap": math.inf}, "softcap must be 0 .* got inf"),
    "NaN as softcap": ({"softcap": math.nan}, "softcap must be 0 .* got nan"),
    "softcap in words": ({"softcap": "30"}, "softcap must be a number, 0 for none, got str"),
    "no softcap": ({"softcap": None}, "softcap must be a number, 0 for none, got NoneType"),
    "tiny softcap": (
        {"softcap": 1e-40},
        r"softmax_scale / softcap must be at most 1.18e\+38 in size, got 0.354 / 1e-40",
    ),
    "sinks of each sequence": ({"sinks": torch.ones(2, 4)}, r"sinks must have shape \[H\] = \[4\], got \[2, 4\]"),
    "sinks in fp64": (
        {"sinks": torch.ones(4).double()},
        "sinks must be float16, bfloat16 or float32, got torch.float64",
    ),
    "a list of sinks": ({"sinks": [1.0] * 4}, "sinks must be a torch.Tensor or None, got list"),
    "sinks elsewhere": ({"sinks": torch.ones(4, device="meta")}, "sinks must be on the device of q, cpu, got meta"),
    "sinks with gaps": ({"sinks": torch.ones(8)[::2]}, "sinks must be contiguous along its last axis, got stride 2"),
    "too few slopes": (
        {"alibi": torch.ones(3)},
        r"alibi must have shape \[H\] = \[4\] or \[B, H\] = \[2, 4\], got \[3\]",
    ),
    "slopes of more sequences": ({"alibi": torch.ones(3, 4)}, r"alibi must have shape .* got \[3, 4\]"),
    "slopes with gaps": ({"alibi": torch.ones(4, 2).t()}, "alibi must be contiguous along its last axis, got stride 2"),
    "a bias of keys": (
        {"bias": torch.ones(6)},
        r"bias must have shape \[B or 1, H or 1, Sq, Sk\] = \[2 or 1, 4 or 1, 5, 6\], got \[6\]",
    ),
    "a bias of one row": ({"bias": torch.ones(2, 4, 1, 6)}, r"bias must have shape .* got \[2, 4, 1, 6\]"),
    "a bias of the KV heads": ({"bias": torch.ones(1, 2, 5, 6)}, r"bias must have shape .* got \[1, 2, 5, 6\]"),
    "a mask": ({"bias": torch.ones(1, 1, 5, 6).bool()}, "bias must be float16, bfloat16 or float32, got torch.bool"),
}


@pytest.mark.parametrize("why", BAD)
def test_bad_features(why):
    """Each broken rule is named, with what was expected and got; ``explain`` says the same."""
    q = torch.randn(2, 4, 5, 8)
    k, v = torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    options, message = BAD[why]
    for function in (flash_attention, explain):
        with pytest.raises(InputError, match=message):
            function(q, k, v, **options)


def test_negative_views_are_refused_and_parameters_served():
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    negative = torch.randn(2, dtype=torch.complex64).conj().imag
    with pytest.raises(InputError, match="sinks must not be a negative view"):
        flash_attention(q, k, v, sinks=negative)
    sinks = torch.nn.Parameter(torch.randn(2))
    with torch.no_grad():
        torch.testing.assert_close(
            flash_attention(q, k, v, sinks=sinks), flash_attention(q, k, v, sinks=sinks.detach())
        )


def test_prepared_calls_see_every_change():
    """Values of tensors are read at each call; anything else that changes is another call."""
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    sinks = torch.zeros(2)
    first = flash_attention(q, k, v, sinks=sinks)
    sinks += 1
    assert not torch.equal(flash_attention(q, k, v, sinks=sinks), first)
    results = [
        flash_attention(q, k, v, **options)
        for options in (
            {}, {"window": (2, -1)}, {"window": (2, 1)}, {"softcap": 0.5}, {"softcap": 0.6}, {"sinks": sinks},
            {"alibi": sinks}, {"bias": torch.randn(1, 1, 6, 6)}, {"window": (2, 1), "causal": True},
        )
    ]  # fmt: skip
    for one, other in itertools.combinations(results, 2):
        assert not torch.equal(one, other)


def test_a_window_that_hides_nothing_is_plain_attention():
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    assert torch.equal(flash_attention(q, k, v, window=(5, 5)), flash_attention(q, k, v))
    assert torch.equal(flash_attention(q, k, v, window=(-1, 0)), flash_attention(q, k, v, causal=True))


def test_compile_and_opcheck_on_cpu():
    """The operator traces whole graphs, and its fake implementation fits."""
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 16)
    sinks, alibi, bias = torch.randn(4), torch.rand(2, 4), torch.randn(1, 4, 5, 6)
    seed = torch.tensor([3, 4])

    def attend(a, b, c, d, e, f):
        options = {"window": (3, 2), "softcap": 2.0, "sinks": d, "alibi": e, "bias": f, "dropout_p": 0.25}
        options["dropout_seed"] = seed
        return flash_attention(a + 1, b, c, return_lse=True, **options), flash_attention(a, b, c, sinks=d)

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v, sinks, alibi, bias), attend(q, k, v, sinks, alibi, bias))
    operator = torch.ops.flashmoe_science.attention_features
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    for first, return_lse in ((q, True), (strided, False)):
        options = (True, 0.5, 3, -1, 2.0, sinks, alibi, bias, seed, 0.25, return_lse, "auto")
        torch.library.opcheck(operator, (first, k, v, *options))
        real = operator(first, k, v, *options)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            fake = operator(first, k, v, *options)
        assert [(tensor.shape, tensor.stride()) for tensor in fake] == [
            (tensor.shape, tensor.stride()) for tensor in real
        ]


def test_every_feature_is_interpreted():
    """Alone and together with others, with each dtype of its tensor."""
    plain = FeatureCase(1, 1, 1, 1, 1, 1, 1, "fp16", causal=False, why="none")
    for name in ("window", "softcap", "sinks", "alibi", "bias", "dropout"):
        using = [case for case in FEATURES if getattr(case, name) != getattr(plain, name)]
        assert len(using) >= 3
        if name in ("sinks", "bias"):
            assert {getattr(case, name) for case in using} == {"fp16", "bf16", "fp32"}
