"""Packed sequences without a GPU: their contract, the reference, and the kernel in Triton's interpreter."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from flashmoe_science import InputError, UnsupportedError, explain_varlen, flash_attention, flash_attention_varlen
from flashmoe_science.attention import packed
from flashmoe_science.attention.forward import calls
from flashmoe_science.attention.forward.plan import plan_attention
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.attention.tiles import ForwardConfig
from flashmoe_science.gpu.specs import SPECS

from ..exhaustive import all_but
from .cases import VARLEN
from .checks import assert_varlen_right, make_features, make_packed


@pytest.mark.parametrize("case", VARLEN, ids=str)
def test_cpu_tensors_run_the_reference(case):
    """Every sequence right to fp64; rows in no sequence are 0."""
    inputs, options = make_packed(case, "cpu"), make_features(case, "cpu")
    assert explain_varlen(**inputs, **options).kernel == "reference"
    o, lse = flash_attention_varlen(**inputs, **options, return_lse=True)
    assert_varlen_right(o, lse, inputs, options)
    tail = slice(sum(case.seqlens_q), None)
    assert torch.equal(o[tail], torch.zeros_like(o[tail]))


# Both masks, 16-bit elements and fp32, features, and fewer tokens in use than there are.
USUAL = (
    "window-sinks", "window-softcap", "alibi", "seqused-both", "dropout", "dropout-used", "bias-of-sequences-used",
    "empty-sequences", "no-keys", "bias-shared",
)  # fmt: skip


@pytest.mark.triton
@pytest.mark.parametrize("case", all_but(VARLEN, *USUAL), ids=str)
def test_streaming_kernel_interpreted(case, interpreted):
    """The Triton kernel itself. Keys behind the length of a sequence are NaN: they must not be read."""
    interpreted(case)


def test_equal_lengths_are_a_batch():
    """An invariant that needs no reference."""
    q, k, v = torch.randn(3, 5, 4, 8), torch.randn(3, 7, 2, 8), torch.randn(3, 7, 2, 16)
    starts_q, starts_k = (torch.arange(4, dtype=torch.int32) * length for length in (5, 7))
    options: dict[str, Any] = {"causal": True, "window": (3, -1), "return_lse": True}
    packed_q, packed_k, packed_v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    o, lse = flash_attention_varlen(packed_q, packed_k, packed_v, starts_q, starts_k, 5, 7, **options)
    batch_q, batch_k, batch_v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    expected, expected_lse = flash_attention(batch_q, batch_k, batch_v, **options)
    torch.testing.assert_close(o.view(3, 5, 4, 16), expected.transpose(1, 2))
    torch.testing.assert_close(lse.reshape(4, 3, 5), expected_lse.transpose(0, 1))


def packed_call(**changes: Any) -> dict[str, Any]:
    call = {
        "q": torch.randn(9, 4, 8),
        "k": torch.randn(12, 2, 8),
        "v": torch.randn(12, 2, 8),
        "cu_seqlens_q": torch.tensor([0, 4, 9], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 5, 12], dtype=torch.int32),
        "max_seqlen_q": 5,
        "max_seqlen_k": 7,
    }
    return {**call, **changes}


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a batch": (
        {"q": torch.randn(1, 9, 4, 8)},
        r"q must have 3 dimensions \[T, H, D\], got shape \[1, 9, 4, 8\]",
    ),
    "a list": ({"q": [1.0]}, "q must be a torch.Tensor, got list"),
    "starts in a list": ({"cu_seqlens_k": [0, 5, 12]}, "cu_seqlens_k must be a torch.Tensor, got list"),
    "dtype of v": ({"v": torch.randn(12, 2, 8).half()}, "v must have the dtype of q, torch.float32, got torch.float16"),
    "head dim of k": (
        {"k": torch.randn(12, 2, 4)},
        r"k must have shape \[Tk, HK, D\] = \[12, 2, 8\], got \[12, 2, 4\]",
    ),
    "heads of v": ({"v": torch.randn(12, 1, 8)}, r"v must have shape \[Tk, HK, DV\] = \[12, 2, 8\], got \[12, 1, 8\]"),
    "tokens of v": ({"v": torch.randn(11, 2, 8)}, "v must have .*12"),
    "heads": (
        {"k": torch.randn(12, 3, 8), "v": torch.randn(12, 3, 8)},
        "heads of q must be a multiple of the 3 of k, got 4",
    ),
    "64-bit starts": ({"cu_seqlens_q": torch.tensor([0, 4, 9])}, "cu_seqlens_q must be int32, got torch.int64"),
    "starts of two axes": (
        {"cu_seqlens_q": ints(0, 4, 9)[None]},
        r"cu_seqlens_q must have 1 dimension and be contiguous, got shape \[1, 3\]",
    ),
    "starts with gaps": (
        {"cu_seqlens_k": ints(0, 0, 5, 5, 12, 12)[::2]},
        r"cu_seqlens_k must have 1 dimension and be contiguous, got shape \[3\], strides \[2\]",
    ),
    "no starts": (
        {"cu_seqlens_q": ints()},
        r"cu_seqlens_q must have shape \[B \+ 1\], so at least one element, got \[\]",
    ),
    "more starts of keys": (
        {"cu_seqlens_k": ints(0, 5, 12, 12)},
        r"cu_seqlens_k must have shape \[B \+ 1\] = \[3\], got \[4\]",
    ),
    "lengths of three": ({"seqused_k": ints(1, 2, 3)}, r"seqused_k must have shape \[B\] = \[2\], got \[3\]"),
    "lengths in fp32": ({"seqused_q": torch.ones(2)}, "seqused_q must be int32, got torch.float32"),
    "lengths elsewhere": (
        {"seqused_q": torch.ones(2, dtype=torch.int32, device="meta")},
        "seqused_q must be on the device of q, cpu, got meta",
    ),
    "a tensor as maximum": (
        {"max_seqlen_q": torch.tensor(5)},
        r"max_seqlen_q must be an integer from 0 .* got tensor\(5\)",
    ),
    "negative maximum": ({"max_seqlen_k": -1}, r"max_seqlen_k must be an integer from 0 to 2\*\*31 - 1, got -1"),
    "slopes of three sequences": (
        {"alibi": torch.ones(3, 4)},
        r"alibi must have shape .*\[B, H\] = \[2, 4\], got \[3, 4\]",
    ),
    "sinks of KV heads": ({"sinks": torch.ones(2)}, r"sinks must have shape \[H\] = \[4\], got \[2\]"),
    "a bias of fewer rows": (
        {"bias": torch.ones(2, 4, 4, 7)},
        r"bias must have at least max_seqlen_q = 5 rows and max_seqlen_k = 7 columns, got shape \[2, 4, 4, 7\]",
    ),
    "a bias of fewer columns": (
        {"bias": torch.ones(1, 1, 5, 7), "max_seqlen_k": 8},
        r"bias must have at least .* max_seqlen_k = 8 columns, got shape \[1, 1, 5, 7\]",
    ),
    "a bias of the KV heads": (
        {"bias": torch.ones(1, 2, 5, 7)},
        r"bias must have shape \[B or 1, H or 1, rows, columns\] = \[2 or 1, 4 or 1, 5, 7\], got \[1, 2, 5, 7\]",
    ),
    "a bias of one sequence": (
        {"bias": torch.ones(4, 5, 7)},
        r"bias must have 4 dimensions \[B or 1, H or 1, rows, columns\], got shape \[4, 5, 7\]",
    ),
    "a bias of too many rows": (
        {"bias": torch.ones(1, 1, 1, 7).expand(-1, -1, 2**31, -1)},
        r"bias must have fewer than 2\*\*31 rows and columns, got shape \[1, 1, 2147483648, 7\]",
    ),
    "a mask": ({"bias": torch.ones(1, 1, 5, 7).bool()}, "bias must be float16, bfloat16 or float32, got torch.bool"),
    "a bias elsewhere": (
        {"bias": torch.ones(1, 1, 5, 7, device="meta")},
        "bias must be on the device of q, cpu, got meta",
    ),
    "window": ({"window": 3}, r"window must be two integers \(left, right\)"),
    "causal": ({"causal": 1}, "causal must be True or False, got 1"),
}
LENGTHS: dict[str, tuple[dict[str, Any], str]] = {
    "beyond the tokens": (
        {"cu_seqlens_q": ints(0, 4, 10)},
        "cu_seqlens_q must be from 0 to 9, the tokens of q, got 0 to 10",
    ),
    "before the tokens": ({"cu_seqlens_k": ints(-1, 5, 12)}, "cu_seqlens_k must be from 0 to 12, .* got -1 to 12"),
    "backwards": ({"cu_seqlens_k": ints(0, 7, 6)}, "cu_seqlens_k must not decrease, got 7 and then 6 at index 2"),
    "longer than the maximum": (
        {"max_seqlen_q": 4},
        "max_seqlen_q must be at least 5, the length of sequence 1, got 4",
    ),
    "more keys than the maximum": (
        {"max_seqlen_k": 6},
        "max_seqlen_k must be at least 7, the length of sequence 1, got 6",
    ),
    "used beyond its place": ({"seqused_q": ints(5, 5)}, "seqused_q must be from 0 to 4 at index 0, got 5"),
    "keys used beyond the tokens": (
        {"cu_seqlens_k": ints(6, 0, 0), "seqused_k": ints(7, 5)},
        "seqused_k must be from 0 to 6 at index 0, got 7",
    ),
    "used before the tokens": (
        {"cu_seqlens_k": ints(0, -1, 12), "seqused_k": ints(5, 5)},
        "cu_seqlens_k must be from 0 to 12, the tokens of k, got -1 at index 1",
    ),
    "more used than the maximum": (
        {"max_seqlen_k": 6, "cu_seqlens_k": ints(2, 0, 0), "seqused_k": ints(7, 5)},
        "max_seqlen_k must be at least 7, the length of sequence 0, got 6",
    ),
    "negative use of keys": ({"seqused_k": ints(5, -1)}, "seqused_k must be from 0 to 7 at index 1, got -1"),
    "negative use": ({"seqused_q": ints(4, -1)}, "seqused_q must be from 0 to 5 at index 1, got -1"),
}


@pytest.mark.parametrize("why", [*BAD, *LENGTHS])
def test_bad_input(why):
    """Each broken rule is named, with what was expected and got. Lengths on a CPU are always read."""
    changes, message = {**BAD, **LENGTHS}[why]
    # What is prepared must not serve what only looks like it.
    flash_attention_varlen(**packed_call())
    flash_attention_varlen(**packed_call(bias=torch.ones(1, 1, 5, 7)))
    with pytest.raises(InputError, match=message):
        flash_attention_varlen(**packed_call(**changes))


def test_a_length_in_use_may_be_shorter_than_its_place():
    """The maximum counts the keys in use, not their place: a cache may have more room."""
    flash_attention_varlen(**packed_call(max_seqlen_k=4, seqused_k=ints(4, 3)))


SHARED = {"overlapping": (ints(0, 3, 12), ints(5, 7)), "out of order": (ints(7, 0, 12), ints(5, 7))}


@pytest.mark.parametrize("why", SHARED)
def test_keys_that_are_shared_or_in_any_order(why):
    """The forward serves them; gradients of k and v would be overwritten, those of q are right."""
    starts, used = SHARED[why]
    given = packed_call(cu_seqlens_k=starts, seqused_k=used)
    o = flash_attention_varlen(**given, causal=True)
    places = [torch.arange(start, start + length) for start, length in zip(starts[:2], used, strict=True)]
    index, own = torch.cat(places), {"cu_seqlens_k": ints(0, *used.cumsum(0).tolist())}
    copied = {**given, **own, "k": given["k"][index], "v": given["v"][index]}
    torch.testing.assert_close(o, flash_attention_varlen(**copied, causal=True))
    given["q"].requires_grad_()
    (dq,) = torch.autograd.grad(flash_attention_varlen(**given).sum(), given["q"])
    torch.testing.assert_close(dq, torch.autograd.grad(flash_attention_varlen(**copied).sum(), given["q"])[0])
    for name in ("k", "v"):
        one = {**given, name: given[name].clone().requires_grad_()}
        message = (
            f"cu_seqlens_k must be at least {starts[0] + 5} at index 1 for gradients of k and v, as sequence 0 uses"
        )
        with pytest.raises(InputError, match=f"^{message} 5 keys from {starts[0]}, got {starts[1]}"):
            flash_attention_varlen(**one).sum().backward()


@pytest.mark.parametrize("why", [*SHARED, "own"])
def test_gradients_of_shared_keys_are_nan_where_lengths_are_not_read(why):
    starts, used = {**SHARED, "own": (ints(0, 5, 12), ints(5, 7))}[why]
    lse = packed.mark_shared_keys(torch.zeros(9, 4), {"cu_seqlens_k": starts, "seqused_k": used})
    assert lse.isnan().all() if why in SHARED else torch.equal(lse, torch.zeros(9, 4))


def test_lengths_on_a_gpu_are_read_only_when_asked(monkeypatch):
    """Reading waits for the GPU, which a capture does not allow."""
    gpu, capturing = torch.device("cuda"), False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.delenv("FLASHMOE_CHECK", raising=False)
    assert not packed.reads_lengths(gpu)
    monkeypatch.setenv("FLASHMOE_CHECK", "1")
    assert packed.reads_lengths(gpu)
    capturing = True
    assert not packed.reads_lengths(gpu)


def test_prepared_calls_serve_any_number_of_tokens_and_see_every_other_change():
    calls._prepared.clear()
    first = flash_attention_varlen(**packed_call())
    longer = packed_call(q=torch.randn(20, 4, 8), cu_seqlens_q=ints(0, 4, 8))
    assert flash_attention_varlen(**longer).shape == (20, 4, 8)
    assert first.shape == (9, 4, 8)
    assert len(calls._prepared) == 1
    call, bias = packed_call(), torch.randn(2, 4, 5, 7)
    results = [
        flash_attention_varlen(**{**call, **changes})
        for changes in (
            {}, {"causal": True}, {"window": (2, -1)}, {"softcap": 0.5}, {"sinks": torch.ones(4)},
            {"alibi": torch.ones(4)}, {"softmax_scale": 1.0}, {"seqused_k": ints(3, 3)}, {"seqused_q": ints(3, 3)},
            {"cu_seqlens_k": ints(0, 6, 12)}, {"bias": bias}, {"bias": bias[:1]}, {"bias": bias.half()},
            {"bias": bias.as_strided(bias.shape, (0, 0, 7, 1))}, {"bias": bias.as_strided(bias.shape, (7, 0, 1, 1))},
        )
    ]  # fmt: skip
    for one, other in itertools.combinations(results, 2):
        assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("length", "planned_q", "planned_k"),
    [(0, 0, 0), (1, 1, 1), (3, 4, 4), (64, 64, 64), (65, 128, 128), (129, 256, 256), (700, 768, 1024)],
)
def test_few_plans_serve_all_batches(length, planned_q, planned_k):
    """Maxima are rounded up in plans, and ``explain_varlen`` shows to what."""
    call = packed_call(max_seqlen_q=length, max_seqlen_k=length)
    problem = explain_varlen(**call).problem
    assert (problem.seqlen_q, problem.seqlen_k) == (planned_q, planned_k)
    assert (problem.packed, problem.q_strides) == (True, (0, 8, 32, 1))


def test_with_a_bias_its_sizes_are_planned_for():
    """Rows and columns, whatever the maxima; the plan says who serves it, and who does not."""
    bias = torch.zeros(1, 1, 129, 131)
    problem = explain_varlen(**packed_call(max_seqlen_q=120, max_seqlen_k=131, bias=bias.expand(2, 4, -1, -1))).problem
    assert (problem.seqlen_q, problem.seqlen_k) == (129, 131)
    assert (problem.bias, problem.bias_strides) == ("fp32", (0, 0, 131, 1))
    assert problem.extras == ("bias", "cu_seqlens_q", "cu_seqlens_k")
    assert problem.describe() == "b2_h4_2_s129_131_d8_fp32_bias_packed"
    large = AttentionProblem(8, 16, 16, 4096, 4096, 128, 128, "bf16", causal=True, packed=True, bias="bf16")
    assert large.bias_strides == (16 * 4096**2, 4096**2, 4096, 1)
    plan = plan_attention(large, SPECS["H200"])
    assert plan.kernel == "forward_triton"
    assert "forward_features_gluon_sm90 too (it does not serve packed sequences with a bias)" in plan.reason


def test_biases_that_are_padded_to_one_size_share_a_plan():
    """What is behind the maxima decides nothing; other sizes, also of the same plan without a bias, are other calls."""
    calls._prepared.clear()
    call, bias = packed_call(), torch.randn(2, 4, 5, 7)
    padded = torch.full((2, 4, 8, 16), math.nan)
    padded[:, :, :5, :7] = bias
    expected = flash_attention_varlen(**call, bias=bias)
    for longest_q, longest_k in ((5, 7), (6, 7), (5, 9)):
        changed = {**call, "max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
        assert torch.equal(flash_attention_varlen(**changed, bias=padded), expected)
    assert len(calls._prepared) == 2
    assert torch.equal(flash_attention_varlen(**call, bias=padded[:, :, :6, :8].contiguous()), expected)
    assert len(calls._prepared) == 3


def test_a_tangent_of_a_bias_is_refused():
    with torch.autograd.forward_ad.dual_level():
        bias = torch.autograd.forward_ad.make_dual(torch.zeros(1, 1, 5, 7), torch.ones(1, 1, 5, 7))
        with pytest.raises(UnsupportedError, match="an input has a forward-mode tangent"):
            flash_attention_varlen(**packed_call(bias=bias))


@pytest.mark.parametrize("own", [*itertools.product((1, 3), (1, 4))], ids=str)
def test_equal_lengths_with_a_bias_are_a_batch(own):
    """An invariant that needs no reference: one bias serves all sequences, or all heads, or none but its own."""
    q, k, v = torch.randn(3, 5, 4, 8), torch.randn(3, 7, 2, 8), torch.randn(3, 7, 2, 16)
    bias = torch.randn(*own, 5, 7)
    starts_q, starts_k = (torch.arange(4, dtype=torch.int32) * length for length in (5, 7))
    a, b, c = (tensor.flatten(0, 1) for tensor in (q, k, v))
    o = flash_attention_varlen(a, b, c, starts_q, starts_k, 5, 7, causal=True, bias=bias)
    a, b, c = (tensor.transpose(1, 2) for tensor in (q, k, v))
    expected = flash_attention(a, b, c, causal=True, bias=bias)
    torch.testing.assert_close(o.view(3, 5, 4, 16), expected.transpose(1, 2))


def test_a_plan_for_packed_sequences():
    """One program for each row tile of the longest sequence, of every sequence and head; keys are not split."""
    problem = AttentionProblem(3, 4, 2, 64, 2**17, 64, 64, "fp16", packed=True, seqused="k")
    plan = plan_attention(problem, SPECS["H200"])
    assert plan.kernel == "forward_triton"
    assert plan.reason.endswith("do not fill 132 SMs, and the keys of packed sequences are not split")
    assert isinstance(plan.config, ForwardConfig)
    assert (plan.config.block_m, plan.config.num_splits) == (16, 1)  # the smallest tile: nothing else fills the GPU
    assert problem.describe() == "b3_h4_2_s64_131072_d64_fp16_packed"
    assert problem.extras == ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
    with pytest.raises(InputError, match="seqused must be q, k or qk, and the sequences packed, got 'k'"):
        AttentionProblem(3, 4, 2, 256, 256, 64, 64, "fp16", seqused="k")


def test_compile_and_opcheck_on_cpu():
    """The operator traces whole graphs, also with a number of tokens that changes, and its fake fits."""
    bias = torch.randn(1, 4, 5, 7)
    call = packed_call(sinks=torch.randn(4), alibi=torch.rand(2, 4), bias=bias, seqused_k=ints(3, 7))

    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, *more):
        sinks, alibi, bias, seqused_k = more
        options: dict[str, Any] = {"causal": True, "window": (3, -1), "softcap": 2.0, "return_lse": True}
        return flash_attention_varlen(
            q + 1, k, v, cu_seqlens_q, cu_seqlens_k, 5, 7, sinks=sinks, alibi=alibi, bias=bias, seqused_k=seqused_k,
            **options,
        )  # fmt: skip

    tensors = [value for value in call.values() if isinstance(value, torch.Tensor)]
    compiled = torch.compile(attend, fullgraph=True, backend="eager", dynamic=True)
    torch.testing.assert_close(compiled(*tensors), attend(*tensors))
    tensors[0] = torch.randn(30, 4, 8)
    torch.testing.assert_close(compiled(*tensors), attend(*tensors))
    operator = torch.ops.flashmoe_science.attention_varlen
    positional = [*packed_call().values()]
    for return_lse in (False, True):
        given = call["sinks"], call["alibi"], call["bias"], None, call["seqused_k"], ints(3, 4).long()
        options = (True, 0.5, 3, -1, 2.0, *given, 0.25, return_lse, "auto")
        torch.library.opcheck(operator, (*positional, *options))
        real = operator(*positional, *options)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            fake = operator(*positional, *options)
        assert [(t.shape, t.stride()) for t in fake] == [(t.shape, t.stride()) for t in real]
