"""Gradients without a GPU: their meaning, their contract, and the kernels in Triton's interpreter."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch.utils.checkpoint import checkpoint

from flashmoe_science import (
    InputError,
    UnsupportedError,
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    flash_attention_varlen_backward,
)
from flashmoe_science.attention import reference
from flashmoe_science.attention.backward import autograd as gradients_module
from flashmoe_science.attention.backward.autograd import attention_gradients
from flashmoe_science.attention.backward.calls import prepare_backward
from flashmoe_science.attention.inputs import Options

from ..exhaustive import all_but
from .cases import GRADIENTS, FeatureCase, Gradients

ALL: dict[str, Any] = {"causal": True, "window": (3, -1), "softcap": 2.0, "softmax_scale": 0.4}


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


# dK and dV in one launch and apart, features, packed sequences; both masks, 16-bit elements and fp32, and dropout.
USUAL = (
    "several-tiles", "whole-tiles", "tiles-and-empty-rows", "d192-dv128", "all-at-once", "apart", "seqused-both",
    "window-softcap", "alibi", "window-sinks", "dropout-all-at-once", "dropout-odd", "dropout-apart", "dropout",
    "dropout-used", "bias-of-sequences-used", "bias-shared",
    "layout", "low-scores", "causal-rows-without-keys", "mqa-odd-dim", "no-keys", "window-on-both-sides",
    "sinks-rows-without-keys", "bias", "bias-far", "empty-sequences",
)  # fmt: skip


@pytest.mark.triton
@pytest.mark.parametrize("gradients", all_but(GRADIENTS, *USUAL), ids=str)
def test_kernels_interpreted(gradients, interpreted):
    """The Triton kernels themselves, run by Triton's interpreter in a process of its own."""
    interpreted(gradients)


def test_every_feature_is_interpreted():
    cases = [gradients.case for gradients in GRADIENTS if isinstance(gradients.case, FeatureCase)]
    for name in ("window", "softcap", "sinks", "alibi", "bias", "dropout"):
        plain = getattr(FeatureCase(1, 1, 1, 1, 1, 1, 1, "fp16", causal=False, why="none"), name)
        assert sum(getattr(case, name) != plain for case in cases) >= 2, name
    biased = {case.bias_heads for case in cases if case.bias}
    assert biased == set(itertools.product((True, False), repeat=2))
    assert any(gradients.through_lse for gradients in GRADIENTS)
    assert any(gradients.turned for gradients in GRADIENTS)
    assert Gradients(cases[0], through_lse=True) != Gradients(cases[0])


@pytest.mark.parametrize("seqlens", [(4, 6), (6, 4)], ids=str)
def test_gradcheck_of_the_reference(seqlens):
    """Autograd goes through the definition, with all features at once, and through rows that see no key."""
    seqlen_q, seqlen_k = seqlens
    q, k, v, sinks, bias = leaves(
        (2, 2, seqlen_q, 3), (2, 1, seqlen_k, 3), (2, 1, seqlen_k, 4), (2,), (1, 2, seqlen_q, seqlen_k),
        dtype=torch.float64,
    )  # fmt: skip
    with torch.no_grad():
        bias[:, :, 0, 1] = -math.inf  # a key that it hides
    slopes = torch.rand(2, dtype=torch.float64)

    def attend(q, k, v, sinks, bias):
        o, lse = reference.attention(q, k, v, **ALL, sinks=sinks, alibi=slopes, bias=bias)
        return o, lse

    assert torch.autograd.gradcheck(attend, (q, k, v, sinks, bias))

    def attend_without_sinks(q, k, v):
        o, lse = reference.attention(q, k, v, causal=True)
        return o, torch.where(lse == -math.inf, 0.0, lse)

    assert torch.autograd.gradcheck(attend_without_sinks, (q, k, v))


@pytest.mark.parametrize("own", [(1, 1), (1, 4), (2, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("seqlens", [(5, 7), (7, 5)], ids=str)
def test_gradients_of_the_reference_are_autograds(seqlens, own, monkeypatch):
    """The formulas, in chunks of rows, give what autograd makes of the definition."""
    seqlen_q, seqlen_k = seqlens
    monkeypatch.setattr(reference, "_CHUNK_SCORES", 8 * 2 * 3 * seqlen_k)
    q, k, v, sinks, bias = leaves(
        (2, 4, seqlen_q, 3), (2, 2, seqlen_k, 3), (2, 2, seqlen_k, 4), (4,), (*own, seqlen_q, seqlen_k),
        dtype=torch.float64,
    )  # fmt: skip
    do, dlse = torch.randn(2, 4, seqlen_q, 4).double(), torch.randn(2, 4, seqlen_q).double()
    for options in (
        {"causal": True},
        {**ALL, "sinks": sinks, "alibi": torch.rand(2, 4).double(), "bias": bias},
        {"sinks": sinks, "window": (1, 0)},
    ):
        o, lse = reference.attention(q, k, v, **options)
        seen = dlse * (lse != -math.inf)
        given = {name: tensor for name, tensor in {"q": q, "k": k, "v": v, **options}.items() if name in GIVEN}
        expected = torch.autograd.grad((o, lse.clamp(min=-1e9)), [*given.values()], (do, seen))
        found = reference.attention_backward(q, k, v, do, torch.where(lse == -math.inf, math.nan, dlse), **options)
        assert set(found) == set(given)
        for name, tensor in zip(given, expected, strict=True):
            torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-10)


GIVEN = ("q", "k", "v", "sinks", "bias")


def test_gradients_against_sdpa():
    """An implementation that is not ours agrees."""
    q, k, v = leaves((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8))
    do = torch.randn(2, 4, 9, 8)
    ours = torch.autograd.grad(flash_attention(q, k, v, causal=True), (q, k, v), do)
    theirs = torch.autograd.grad(
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), (q, k, v), do
    )
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def all_features(dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], dict[str, Any]]:
    q, k, v, sinks, bias = leaves((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 16), (4,), (1, 4, 5, 6), dtype=dtype)
    return [q, k, v], {**ALL, "sinks": torch.nn.Parameter(sinks.detach()), "bias": bias, "alibi": torch.rand(4)}


def expected_of(inputs, options, do, dlse=None):
    plain: dict[str, Any] = {}
    plain |= {name: option.detach() if isinstance(option, torch.Tensor) else option for name, option in options.items()}
    q, k, v = (tensor.detach() for tensor in inputs)
    return reference.attention_backward(q, k, v, do, dlse, **plain)


def compare(inputs, options, expected):
    for name, tensor in zip(GIVEN, (*inputs, options["sinks"], options["bias"]), strict=True):
        torch.testing.assert_close(tensor.grad, expected[name].to(tensor.dtype))
        tensor.grad = None


@pytest.mark.parametrize("how", ["eager", "whole graph", "checkpoint", "reentrant checkpoint", "offloaded"])
def test_training(how):
    """Gradients of all inputs, of o and of the LSE, in each way in which frameworks run a layer."""
    inputs, options = all_features()
    do, dlse = torch.randn(2, 4, 5, 16), torch.randn(2, 4, 5)

    def attend(q, k, v, sinks, bias):
        return flash_attention(q * 1.0, k, v, **{**options, "sinks": sinks, "bias": bias}, return_lse=True)

    arguments = (*inputs, options["sinks"], options["bias"])
    if how == "whole graph":
        o, lse = torch.compile(attend, fullgraph=True, backend="aot_eager")(*arguments)
    elif how.endswith("checkpoint"):
        o, lse = checkpoint(attend, *arguments, use_reentrant=how.startswith("reentrant"))
    elif how == "offloaded":  # saved tensors come back contiguous
        with torch.autograd.graph.save_on_cpu():
            o, lse = attend(*arguments)
    else:
        o, lse = attend(*arguments)
    torch.autograd.backward((o, lse), (do, dlse))
    compare(inputs, options, expected_of(inputs, options, do, dlse))


def test_only_what_is_asked_for():
    """Gradients of some inputs, of one output, and of a scalar sum, whose gradient has strides of 0."""
    inputs, options = all_features()
    o, lse = flash_attention(*inputs, **options, return_lse=True)
    expected = expected_of(inputs, options, torch.ones_like(o))
    (dq,) = torch.autograd.grad(o.sum(), inputs[0], retain_graph=True)
    torch.testing.assert_close(dq, expected["q"])
    dv, dsinks = torch.autograd.grad(o.sum(), (inputs[2], options["sinks"]), retain_graph=True)
    torch.testing.assert_close(dv, expected["v"])
    torch.testing.assert_close(dsinks, expected["sinks"])
    of_lse = expected_of(inputs, options, torch.zeros_like(o), torch.ones_like(lse))
    (dk,) = torch.autograd.grad(lse.sum(), inputs[1])
    torch.testing.assert_close(dk, of_lse["k"])


def test_nothing_is_recorded_where_nothing_needs_gradients():
    inputs, options = all_features()
    with torch.no_grad():
        assert not flash_attention(*inputs, **options).requires_grad
    frozen = [tensor.detach() for tensor in inputs]
    plain = {**options, "sinks": options["sinks"].detach(), "bias": options["bias"].detach()}
    assert not flash_attention(*frozen, **plain).requires_grad
    node: Any = flash_attention(*inputs).grad_fn
    kept = [tensor for tensor in node.saved_tensors if tensor is not None]
    assert sorted(tuple(tensor.shape) for tensor in kept) == sorted(
        [*(tuple(tensor.shape) for tensor in inputs), (2, 4, 5, 16), (2, 4, 5)]
    )


def test_second_order_gradients_are_refused():
    """Not a wrong number; gradients that may be differentiated again are right as long as nobody does."""
    q, k, v = leaves((1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    o = flash_attention(q, k, v)
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    torch.testing.assert_close(dq, expected_of((q, k, v), {}, torch.ones_like(o))["q"])
    with pytest.raises(UnsupportedError, match="no second-order gradients"):
        torch.autograd.grad(dq.sum(), k)
    arguments = (q, k, v, *[None] * 8, o.detach(), o[..., 0].detach(), torch.ones_like(o))
    (dq, *_) = torch.ops.flashmoe_science.attention_backward(
        *arguments, None, 0, 0, False, None, -1, -1, 0.0, 0.0, [0], "auto"
    )
    with pytest.raises(UnsupportedError, match="no second-order gradients"):
        dq.sum().backward()


def test_functional_gradients():
    """torch.func.grad gives what autograd gives; of itself, it is a second-order gradient."""
    q, k, v = (tensor.detach() for tensor in leaves((1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8)))
    differentiate = torch.func.grad(lambda *inputs: flash_attention(*inputs, causal=True).sum(), argnums=(0, 1, 2))
    expected = expected_of((q, k, v), {"causal": True}, torch.ones(1, 2, 5, 8))
    for name, gradient in zip("qkv", differentiate(q, k, v), strict=True):
        torch.testing.assert_close(gradient, expected[name])
    with pytest.raises(UnsupportedError, match="no second-order gradients"):
        torch.func.grad(lambda q: differentiate(q, k, v)[0].sum())(q)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "any length"])
def test_a_compiled_layer_in_autocast(dynamic):
    """Gradients of fp32 leaves through a graph of lower precision, with lengths that change."""

    def attend(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return flash_attention(q, k, v, causal=True)

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen in (5, 7, 9):
        inputs = leaves((1, 2, seqlen, 8), (1, 2, seqlen, 8), (1, 2, seqlen, 8))
        o = compiled(*inputs)
        assert o.dtype == torch.bfloat16
        do = torch.randn(o.shape).bfloat16()
        found = torch.autograd.grad(o, inputs, do)
        for mine, other in zip(found, torch.autograd.grad(attend(*inputs), inputs, do), strict=True):
            assert mine.dtype == torch.float32
            assert torch.equal(mine, other)


def test_slopes_have_no_gradient():
    q, k, v, slopes = leaves((1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8), (2,))
    with pytest.raises(UnsupportedError, match=r"alibi must not require grad(.|\n)*detached"):
        flash_attention(q, k, v, alibi=slopes)
    with torch.no_grad():
        flash_attention(q, k, v, alibi=slopes)
    with pytest.raises(UnsupportedError, match="forward-mode"), torch.autograd.forward_ad.dual_level():
        flash_attention(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)), k, v)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_autocast(training, with_bias):
    """Inputs of fp32 are cast, whether or not gradients are recorded; outside of the region they are not."""
    q, k, v, bias = leaves((1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8), (1, 1, 5, 6))
    options: dict[str, Any] = {"bias": bias} if with_bias else {}
    with torch.set_grad_enabled(training):
        assert flash_attention(q, k, v, **options).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            o = flash_attention(q, k, v.bfloat16(), **options)
            assert flash_attention(q, k, v, **options).dtype == torch.bfloat16
        assert o.dtype == torch.bfloat16
        assert flash_attention(q, k, v, **options).dtype == torch.float32
    if training:
        o.float().square().sum().backward()
        assert q.grad is not None
        assert q.grad.dtype == torch.float32
        assert v.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "features", [{}, {"causal": True, "window": (3, -1), "softcap": 2.0}], ids=["plain", "features"]
)
def test_autocast_rounds_the_inputs_and_nothing_else(features, dtype):
    """Bits of output, LSE and gradients are those of the call with 16-bit inputs outside of the region."""
    given = leaves((2, 2, 50, 16), (2, 2, 60, 16), (2, 2, 60, 24), dtype=dtype)
    low = [tensor.detach().bfloat16().requires_grad_() for tensor in given]
    expected, expected_lse = flash_attention(*low, **features, return_lse=True)
    expected_gradients = torch.autograd.grad(expected.float().square().sum() + expected_lse.sum(), low)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            assert torch.equal(flash_attention(*given, **features), expected)
        o, lse = flash_attention(*given, **features, return_lse=True)
        gradients = torch.autograd.grad(o.float().square().sum() + lse.sum(), given)
    assert torch.equal(o, expected)
    assert torch.equal(lse, expected_lse)
    for found, exact in zip(gradients, expected_gradients, strict=True):
        assert torch.equal(found.bfloat16(), exact)


def test_operators():
    """The registered operators: schema, fake implementation, gradients."""
    inputs, options = all_features()
    arguments = (*inputs, True, 0.4, 3, -1, 2.0, options["sinks"], options["alibi"], options["bias"])
    seed = torch.tensor([3, 4])
    for dropout in ((None, 0.0), (seed, 0.25)):
        torch.library.opcheck(torch.ops.flashmoe_science.attention_features, (*arguments, *dropout, True, "auto"))
    q, k, v = (tensor.detach() for tensor in inputs)
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    o, lse = flash_attention(q, k, v, return_lse=True)
    for first, wanted, dropout_p in ((q, [0, 1, 2], 0.25), (strided, [0], 0.0), (q, [1], 0.25)):
        torch.library.opcheck(
            torch.ops.flashmoe_science.attention_backward,
            (first, k, v, *[None] * 7, seed, o, lse, o, lse, 0, 0, False, None, -1, -1, 0.0, dropout_p, wanted, "auto"),
        )


@pytest.mark.parametrize("wanted", [[0, 1, 2, 3, 4], [3, 4], [0, 3], [1, 2, 4]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operator_of_gradients_with_features(dtype, wanted):
    """Sinks and a bias, also as all that has gradients; in dtypes that are not that of q, the bias transposed."""
    inputs, options = all_features(dtype)
    q, k, v = (tensor.detach() for tensor in inputs)
    bias = options["bias"].detach().half().mT.contiguous().mT
    sinks, alibi = options["sinks"].detach().float(), options["alibi"]
    o, lse = flash_attention(q, k, v, **ALL, sinks=sinks, alibi=alibi, bias=bias, return_lse=True)
    tensors = q, k, v, sinks, alibi, bias, *[None] * 5, o, lse, torch.randn_like(o), None
    arguments = (*tensors, 0, 0, True, 0.4, 3, -1, 2.0, 0.0, wanted, "auto")
    torch.library.opcheck(torch.ops.flashmoe_science.attention_backward, arguments)
    found = torch.ops.flashmoe_science.attention_backward(*arguments)
    given = (q, k, v, sinks, bias)
    assert [tensor.numel() > 0 for tensor in found] == [number in wanted for number in range(5)]
    for number in wanted:
        assert found[number].shape == given[number].shape
        assert found[number].dtype == given[number].dtype


def test_an_operator_that_kept_no_lse_says_so():
    (q, k, v), _ = all_features()
    o, _ = torch.ops.flashmoe_science.attention_features(
        q, k, v, True, None, -1, -1, 0.0, None, None, None, None, 0.0, False, "auto"
    )
    with pytest.raises(UnsupportedError, match="kept no LSE"):
        o.sum().backward()


def test_prepared_gradients_see_every_change(monkeypatch):
    """Equal shapes with another mask, scale or layout are other calls; equal calls are prepared once."""
    q, k, v = leaves((1, 2, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    do = torch.randn(1, 2, 6, 8)
    made = []

    def prepare(plan, device):
        made.append(plan)
        return prepare_backward(plan, device)

    monkeypatch.setattr(gradients_module, "_prepared", {})
    monkeypatch.setattr(gradients_module, "prepare_backward", prepare)
    asked: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"softmax_scale": 2.0},
        {"window": (1, 1)},
        {"softcap": 0.5},
        {},
    ]
    results = [torch.autograd.grad(flash_attention(q, k, v, **options), q, do)[0] for options in asked]
    assert len(made) == 5
    assert torch.equal(results[0], results[-1])
    for one, other in itertools.combinations(results[:-1], 2):
        assert not torch.equal(one, other)


def test_the_reference_follows_itself():
    """Heads that no kernel serves have gradients where the reference is asked for; a name that is none is refused."""
    q, k, v = leaves((1, 1, 3, 300), (1, 1, 3, 300), (1, 1, 3, 300))
    flash_attention(q, k, v, kernel="reference").sum().backward()
    torch.testing.assert_close(q.grad, expected_of((q, k, v), {}, torch.ones(1, 1, 3, 300))["q"])
    given = {name: torch.zeros(1, 1, 3, 4) for name in ("q", "k", "v", "o", "do")} | {"lse": torch.zeros(1, 1, 3)}
    with pytest.raises(InputError, match=r"kernel must be auto or one of .*reference, got 'fastest'"):
        attention_gradients(Options(causal=False, softmax_scale=None, kernel="fastest"), given, ["q"])


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_keys_are_summed_over_chunks_of_queries(compiled):
    """Two chunks of queries, whose gradients of k and v are added to fp32 tensors, in batches and packed."""
    q, k, v = (torch.randn(1, heads, 12, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    do = torch.randn_like(o)
    _, dk, dv = flash_attention_backward(q.float(), k.float(), v.float(), o.float(), lse, do.float(), causal=True)
    sums = torch.zeros(1, 2, 12, 8), torch.zeros(1, 2, 12, 8)
    packed_sums = torch.zeros(12, 2, 8), torch.zeros(12, 2, 8)

    def add(rows: slice) -> None:
        n = rows.stop
        names = ("q", "k", "v", "o", "lse", "do")
        parts = (q[:, :, rows], k[:, :, :n], v[:, :, :n], o[:, :, rows], lse[:, :, rows], do[:, :, rows])
        given: dict[str, Any] = dict(zip(names, parts, strict=True))
        into = sums[0][:, :, :n], sums[1][:, :, :n]
        found = flash_attention_backward(**given, causal=True, accumulate_into=into)
        assert [x.dtype for x in found] == [torch.bfloat16, torch.float32, torch.float32]
        given = {name: x[0] if name == "lse" else x[0].transpose(0, 1) for name, x in given.items()}
        starts_q, starts_k = (torch.tensor([0, length], dtype=torch.int32) for length in (n - rows.start, n))
        into = packed_sums[0][:n], packed_sums[1][:n]
        flash_attention_varlen_backward(
            **given, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=12, max_seqlen_k=12, causal=True,
            accumulate_into=into,
        )  # fmt: skip

    for rows in (slice(0, 5), slice(5, 12)):
        (torch.compile(add, backend="eager") if compiled else add)(rows)
    for expected, total, packed in zip((dk, dv), sums, packed_sums, strict=True):
        torch.testing.assert_close(total, expected, atol=0.05, rtol=0.05)
        torch.testing.assert_close(packed.transpose(0, 1)[None], total, atol=2e-2 * compiled, rtol=2e-2 * compiled)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_keys_come_unrounded_where_others_add_to_them(packed):
    """In fp32 as they are, which is what zeros become that they are added to."""
    q, k, v, do = (torch.randn(1, heads, 12, 8, dtype=torch.bfloat16) for heads in (4, 2, 2, 4))
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    given = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do}
    options = Options(causal=True, softmax_scale=None)
    if packed:
        given = {name: x[0] if name == "lse" else x[0].transpose(0, 1) for name, x in given.items()}
        given |= {name: torch.tensor([0, 12], dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        options = options._replace(max_seqlens=(12, 12))
    rounded = attention_gradients(options, given, ["q", "k", "v"])
    found = attention_gradients(options, given, ["q", "k", "v"], unrounded=True)
    zeros = {f"d{name}": torch.zeros_like(given[name], dtype=torch.float32) for name in "kv"}
    added = attention_gradients(options, {**given, **zeros}, ["q", "k", "v"])
    assert torch.equal(found["q"], rounded["q"])
    for name in "kv":
        assert torch.equal(found[name], added[name])
        assert not torch.equal(found[name], rounded[name].float())
        assert torch.equal(found[name].bfloat16(), rounded[name])


def test_gradients_without_autograd_are_those_of_autograd_with_every_feature():
    """In batches and packed."""
    q, k, v = leaves((1, 4, 9, 8), (1, 2, 11, 8), (1, 2, 11, 8))
    more: dict[str, Any] = {**ALL, "sinks": torch.randn(4), "alibi": torch.rand(4), "bias": torch.randn(1, 4, 9, 11)}
    o, lse = flash_attention(q, k, v, **more, return_lse=True)
    do = torch.randn_like(o)
    expected = torch.autograd.grad(o, (q, k, v), do)
    saved = [x.detach() for x in (q, k, v, o, lse, do)]
    for found, exact in zip(flash_attention_backward(*saved, **more), expected, strict=True):
        torch.testing.assert_close(found, exact)
    names = ("q", "k", "v", "o", "lse", "do")
    given: dict[str, Any] = {
        name: x[0] if name == "lse" else x[0].transpose(0, 1) for name, x in zip(names, saved, strict=True)
    }
    starts_q, starts_k = (torch.tensor([0, length], dtype=torch.int32) for length in (9, 11))
    packed = flash_attention_varlen_backward(
        **given, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=9, max_seqlen_k=11, **more
    )
    for found, exact in zip(packed, expected, strict=True):
        torch.testing.assert_close(found.transpose(0, 1)[None], exact)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_without_autograd_of_sinks_bias_and_dropout(compiled):
    q, k, v, sinks, bias = leaves((2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 8), (4,), (1, 4, 9, 11))
    more: dict[str, Any] = {"causal": True, "dropout_p": 0.3, "dropout_seed": torch.tensor([5, 7])}
    o, lse = flash_attention(q, k, v, sinks=sinks, bias=bias, **more, return_lse=True)
    do = torch.randn_like(o)
    tensors = {"q": q, "k": k, "v": v, "sinks": sinks, "bias": bias}
    expected = dict(zip(tensors, torch.autograd.grad(o, [*tensors.values()], do), strict=True))
    saved = {name: x.detach() for name, x in {**tensors, "o": o, "lse": lse, "do": do}.items()}

    def call(wanted: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
        return flash_attention_backward(**saved, **more, wanted=wanted)

    for wanted in (("bias", "q", "sinks"), ("v",), ("q", "k", "v", "sinks", "bias")):
        found = (torch.compile(call, backend="eager") if compiled else call)(wanted)
        for name, gradient in zip(wanted, found, strict=True):
            torch.testing.assert_close(gradient, expected[name])


def test_packed_gradients_without_autograd_of_used_lengths_and_dropout():
    q, k, v, sinks = leaves((12, 4, 8), (14, 2, 8), (14, 2, 8), (4,))
    lengths = {
        "cu_seqlens_q": [0, 5, 12], "cu_seqlens_k": [0, 6, 14], "seqused_q": [4, 7], "seqused_k": [6, 5],
    }  # fmt: skip
    tensors: dict[str, Any] = {name: torch.tensor(x, dtype=torch.int32) for name, x in lengths.items()}
    tensors |= {"max_seqlen_q": 7, "max_seqlen_k": 8, "causal": True, "sinks": sinks}
    tensors |= {"dropout_p": 0.3, "dropout_seed": torch.tensor([5, 7])}
    o, lse = flash_attention_varlen(q, k, v, **tensors, return_lse=True)
    do = torch.randn_like(o)
    expected = torch.autograd.grad(o, (sinks, q, v), do)
    saved: Any = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do}
    saved = {name: x.detach() for name, x in saved.items()}
    dq = torch.full((12, 4, 8), torch.nan)
    found = flash_attention_varlen_backward(**saved, **tensors, wanted=("sinks", "q", "v"), out={"q": dq})
    assert found[1] is dq
    for gradient, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, exact)


def test_gradients_are_written_where_the_caller_asks_for_them():
    q, k, v = leaves((1, 4, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8))
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    saved = [x.detach() for x in (q, k, v, o, lse, torch.randn_like(o))]
    expected = flash_attention_backward(*saved, causal=True)
    both = torch.full((1, 9, 4, 16), torch.nan)
    out = {"k": both[..., :8].transpose(1, 2)[:, :2], "v": both[..., 8:].transpose(1, 2)[:, 2:]}
    dq, dk, dv = flash_attention_backward(*saved, causal=True, out=out)
    assert dk is out["k"]
    assert dv is out["v"]
    for gradient, exact in zip((dq, dk, dv), expected, strict=True):
        assert torch.equal(gradient, exact)
    assert both.isnan().sum() == both.numel() // 2  # nothing else was written


def test_gradients_are_written_and_added_in_one_graph():
    q, k, v = leaves((1, 4, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8))
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    saved = [x.detach() for x in (q, k, v, o, lse, torch.randn_like(o))]
    dq, sums = torch.zeros_like(saved[0]), (torch.zeros_like(saved[1]), torch.ones_like(saved[2]))

    def call() -> tuple[torch.Tensor, ...]:
        return flash_attention_backward(*saved, causal=True, out={"q": dq}, accumulate_into=sums)

    torch.compile(call, backend="eager", fullgraph=True)()
    for gradient, exact in zip((dq, sums[0], sums[1] - 1), flash_attention_backward(*saved, causal=True), strict=True):
        torch.testing.assert_close(gradient, exact)
