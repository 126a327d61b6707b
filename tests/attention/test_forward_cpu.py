"""What needs no GPU: the contract, the reference on CPU tensors, and the streaming kernel in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit

from flashmoe_science import InputError, UnsupportedError, explain, flash_attention
from flashmoe_science.attention import reference

from ..exhaustive import all_but
from .cases import EMPTY, SMALL, Case
from .checks import DTYPES, assert_right, make_inputs


@pytest.mark.parametrize("case", SMALL + EMPTY, ids=str)
def test_cpu_tensors_run_the_reference(case):
    """Right to fp64, and ``explain`` says who served it."""
    q, k, v = make_inputs(case, "cpu")
    assert explain(q, k, v, causal=case.causal).kernel == "reference"
    o, lse = flash_attention(q, k, v, causal=case.causal, return_lse=True)
    assert_right(o, q, k, v, causal=case.causal, lse=lse)


def test_reference_against_sdpa():
    """An implementation that is not ours agrees, in fp64."""
    q, k, v = (torch.randn(2, 4, 37, 24, dtype=torch.float64) for _ in range(3))
    for causal in (False, True):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
        o, _ = reference.attention(q, k, v, causal=causal, softmax_scale=0.3)
        torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-12)


def test_reference_in_chunks(monkeypatch):
    """Chunks of rows change nothing."""
    q, k, v = (torch.randn(1, 4, 50, 8, dtype=torch.float64) for _ in range(3))
    whole = reference.attention(q, k[:, :2], v[:, :2], causal=True)
    monkeypatch.setattr(reference, "_CHUNK_SCORES", 700)
    parts = reference.attention(q, k[:, :2], v[:, :2], causal=True)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


def test_causal_is_aligned_bottom_right():
    """The last row sees every key; rows before the first visible key give 0 and -inf."""
    q, k, v = make_inputs(Case(1, 1, 1, 5, 3, 8, 8, "fp32", True, why="mask"), "cpu")
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(o[0, 0, :2], torch.zeros(2, 8))
    assert torch.equal(lse[0, 0, :2], torch.full((2,), -math.inf))
    torch.testing.assert_close(o[0, 0, 2], v[0, 0, 0])
    full = flash_attention(q[:, :, 4:], k, v)
    torch.testing.assert_close(o[:, :, 4:], full)


def test_rows_sum_to_one():
    """With V = 1 every row that sees a key is 1: an invariant that needs no reference."""
    q, k, _ = make_inputs(Case(1, 2, 2, 30, 40, 16, 16, "fp32", True, why="invariant"), "cpu")
    o = flash_attention(q, k, torch.ones(1, 2, 40, 16), causal=True)
    torch.testing.assert_close(o, torch.ones_like(o))


BAD = {
    "three dimensions": (
        lambda q, k, v: (q[0], k, v),
        r"q must have 4 dimensions \[B, H, S, D\], got shape \[4, 6, 8\]",
    ),
    "head dim of k": (
        lambda q, k, v: (q, k[..., :4], v),
        r"k must have shape \[B, HK, Sk, D\] = \[2, 4, 6, 8\], got \[2, 4, 6, 4\]",
    ),
    "batch of k": (lambda q, k, v: (q, k[:1], v), r"k must have shape .* = \[2, 4, 6, 8\], got \[1, 4, 6, 8\]"),
    "length of v": (
        lambda q, k, v: (q, k, v[:, :, :5]),
        r"v must have shape \[B, HK, Sk, DV\] = \[2, 4, 6, 8\], got \[2, 4, 5, 8\]",
    ),
    "heads": (lambda q, k, v: (q, k[:, :3], v[:, :3]), r"multiple of the 3 of k, got 4\nhint: q is \[B, H,"),
    "dtype of k": (lambda q, k, v: (q, k.half(), v), r"k must have the dtype of q, torch.float32, got torch.float16"),
    "float64": (
        lambda q, k, v: (q.double(), k.double(), v.double()),
        r"q must be float16, bfloat16 or float32, got torch.float64",
    ),
    "integers": (
        lambda q, k, v: (q.int(), k.int(), v.int()),
        r"q must be float16, bfloat16 or float32, got torch.int32",
    ),
    "a list": (lambda q, k, v: ([1.0], k, v), r"must be .*torch.Tensors?, got list"),
    "device": (lambda q, k, v: (q, k.to("meta"), v), r"k must be on the device of q, cpu, got meta"),
}


@pytest.mark.parametrize("why", BAD)
def test_bad_tensors(why):
    """Each broken rule is named, with what was expected and got."""
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    change, message = BAD[why]
    with pytest.raises(InputError, match=message):
        flash_attention(*change(q, k, v))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": 2}, "causal must be True or False, got 2"),
        ({"causal": 1}, "causal must be True or False, got 1"),
        ({"softmax_scale": math.inf}, r"softmax_scale must be finite in fp32, so at most 2.36e\+38 in size, got inf"),
        ({"softmax_scale": math.nan}, "softmax_scale must be finite in fp32, .* got nan"),
        ({"softmax_scale": 1e60}, r"softmax_scale must be finite in fp32, .* got 1e\+60"),
        # It is finite in fp32 itself, and not when multiplied by log2(e).
        ({"softmax_scale": -2.4e38}, r"softmax_scale must be finite in fp32, .* got -2.4e\+38"),
        ({"softmax_scale": 10**400}, "softmax_scale must be finite in fp32, got an integer beyond fp64"),
        ({"softmax_scale": torch.tensor(1.0)}, "softmax_scale must be a number or None, got Tensor"),
        ({"softmax_scale": "1"}, "softmax_scale must be a number or None, got str"),
        ({"softmax_scale": True}, "softmax_scale must be a number or None, got bool"),
        ({"kernel": "fastest"}, "kernel must be auto or one of .*, got 'fastest'"),
    ],
)
def test_bad_options(options, message):
    """So are options."""
    q, k, v = (torch.randn(1, 1, 2, 8) for _ in range(3))
    flash_attention(q, k, v, causal=True, softmax_scale=1.0)  # what is prepared must not serve what only equals it
    with pytest.raises(InputError, match=message):
        flash_attention(q, k, v, **options)


def test_meta_tensors_are_not_cpu_tensors():
    """A call prepared for CPU tensors does not serve meta tensors of the same shape."""
    q, k, v = (torch.randn(1, 1, 2, 8) for _ in range(3))
    flash_attention(q, k, v)
    with pytest.raises(InputError, match="q must be on a CUDA device or the CPU, got meta"):
        flash_attention(q.to("meta"), k.to("meta"), v.to("meta"))


def test_negative_views_and_tangents_are_refused():
    """What a raw pointer does not show is not dropped in silence."""
    q, k, v = (torch.randn(1, 1, 2, 8) for _ in range(3))
    negative = torch.randn(1, 1, 2, 8, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    flash_attention(torch.randn(1, 1, 2, 16)[..., ::2], k, v)
    with pytest.raises(InputError, match="q must not be a negative view"):
        flash_attention(negative, k, v)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(UnsupportedError, match="forward-mode"):
            flash_attention(dual, k, v)


def test_fake_outputs_have_the_strides_of_real_ones():
    """Also where axes of one element have strides of their own."""
    q = torch.randn(2, 8, 4, 5)[..., ::5].transpose(1, 2)
    k, v = torch.randn(2, 4, 8, 1), torch.randn(2, 4, 8, 8)
    torch.library.opcheck(torch.ops.flashmoe_science.attention_forward, (q, k, v, False, None, "auto"))
    real = flash_attention(q, k, v)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ops.flashmoe_science.attention_forward(q, k, v, False, None, "auto")
    assert fake.stride() == real.stride()


def test_forced_kernels_never_fall_back():
    """A kernel forced on CPU tensors is refused, with what would help."""
    q, k, v = (torch.randn(1, 1, 2, 8) for _ in range(3))
    with pytest.raises(UnsupportedError, match=r"forward_short_gluon needs an NVIDIA GPU, got CPU tensors"):
        flash_attention(q, k, v, kernel="forward_short_gluon")
    with pytest.raises(UnsupportedError, match=r"forward_triton needs an NVIDIA GPU(.|\n)*TRITON_INTERPRET=1"):
        flash_attention(q, k, v, kernel="forward_triton")


def test_output_keeps_the_order_of_axes_of_q():
    """A [B, S, H, D] view gives a [B, S, H, D] output, seen as [B, H, S, D]."""
    q, k, v = (torch.randn(2, 6, 4, 8).transpose(1, 2) for _ in range(3))
    o = flash_attention(q, k, v)
    assert o.stride() == q.stride()
    torch.testing.assert_close(o, flash_attention(q.contiguous(), k, v))


def test_prepared_calls_see_every_change():
    """Equal shapes with another scale, mask, layout, dtype or LSE are other calls."""
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    assert not torch.equal(flash_attention(q, k, v), flash_attention(q, k, v, softmax_scale=2.0))
    assert not torch.equal(flash_attention(q, k, v), flash_attention(q, k, v, causal=True))
    assert isinstance(flash_attention(q, k, v, return_lse=True), tuple)
    assert flash_attention(q.half(), k.half(), v.half()).dtype == torch.float16
    other = k.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(flash_attention(q, other, v), flash_attention(q, k, v))


def test_compile_and_opcheck_on_cpu():
    """The registered operators trace whole graphs, and their fake implementations fit."""
    q, k, v = (torch.randn(1, 4, 6, 8) for _ in range(3))
    compiled = torch.compile(
        lambda a, b, c: flash_attention(a + 1, b, c, causal=True, return_lse=True), fullgraph=True, backend="eager"
    )
    for got, expected in zip(
        compiled(q, k, v), flash_attention(q + 1, k, v, causal=True, return_lse=True), strict=True
    ):
        torch.testing.assert_close(got, expected)
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    for first in (q, strided):
        for operator in (
            torch.ops.flashmoe_science.attention_forward,
            torch.ops.flashmoe_science.attention_forward_lse,
        ):
            torch.library.opcheck(operator, (first, k[:, :2], v[:, :2], True, 0.5, "auto"))


INTERPRETED = [case for case in SMALL if case.head_dim <= 128] + [
    Case(1, 2, 1, 37, 100, 64, 64, "fp16", True, why="several-tiles"),
    Case(1, 1, 1, 70, 65, 32, 32, "fp32", True, why="tiles-and-empty-rows"),
]


# Both masks, 16-bit elements and fp32.
USUAL = (
    "several-tiles", "tiles-and-empty-rows", "story-odd",
    "gqa-d80", "mqa-odd-dim", "dv-smaller", "one-key", "no-keys-causal",
)  # fmt: skip


@pytest.mark.triton
@pytest.mark.parametrize("case", all_but(INTERPRETED + EMPTY, *USUAL), ids=str)
def test_streaming_kernel_interpreted(case, interpreted):
    """The Triton kernel itself, run by Triton's interpreter in a process of its own."""
    interpreted(case)


def test_dtypes_cover_the_contract():
    """The names that plans use are the three dtypes of the contract."""
    assert set(DTYPES) == {"fp16", "bf16", "fp32"}
