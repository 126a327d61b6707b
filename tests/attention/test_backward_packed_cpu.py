"""Gradients of packed sequences without a GPU: those that each sequence has alone, as operators and exported."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashmoe_science import (
    flash_attention_varlen,
)
from flashmoe_science.attention import reference
from flashmoe_science.attention.backward import autograd as gradients_module

from .test_backward_cpu import ALL, leaves


@pytest.mark.parametrize("dynamic", [None, True], ids=["as it comes", "any length"])
def test_a_compiled_call_of_packed_sequences_takes_any_longest_length(dynamic):
    """Gradients through a graph in which the longest lengths are symbols."""
    starts = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 5, 12], dtype=torch.int32)

    def attend(q, k, v, like):
        return flash_attention_varlen(q, k, v, *starts, like.shape[0], like.shape[1], causal=True)

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for longest in ((5, 7), (6, 9), (8, 12)):
        q, k, v = inputs = leaves((9, 4, 8), (12, 2, 8), (12, 2, 8))
        like, do = torch.empty(longest), torch.randn(9, 4, 8)
        found = torch.autograd.grad(compiled(q, k, v, like), inputs, do)
        for mine, other in zip(found, torch.autograd.grad(attend(q, k, v, like), inputs, do), strict=True):
            assert torch.equal(mine, other)


def test_autocast_rounds_the_inputs_of_packed_sequences_and_nothing_else():
    inputs, _ = varlen_inputs()
    given = [inputs.pop(name).detach() for name in ("q", "k", "v")]
    expected, expected_lse = flash_attention_varlen(*(x.bfloat16() for x in given), **inputs, return_lse=True)
    with torch.autocast("cpu", torch.bfloat16):
        o, lse = flash_attention_varlen(*given, **inputs, return_lse=True)
    assert torch.equal(o, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize("wanted", [[0, 1, 2, 3], [3], [0]], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_operator_of_gradients_of_packed_sequences(dropout_p, wanted):
    """Sequences that end before their place does, one without queries, and an LSE with a gradient."""
    inputs, sinks = varlen_inputs()
    q, k, v = (inputs[name].detach() for name in "qkv")
    starts_q, starts_k, used = (inputs[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"))
    sinks, seed = sinks.detach(), torch.tensor([3, 4]) if dropout_p else None
    o, lse = flash_attention_varlen(
        **{**inputs, "q": q, "k": k, "v": v}, sinks=sinks, dropout_p=dropout_p, dropout_seed=seed, return_lse=True
    )
    lengths = starts_q, starts_k, None, used
    tensors = q, k, v, sinks, None, None, *lengths, seed, o, lse, torch.randn_like(o), torch.randn_like(lse)
    arguments = (*tensors, 6, 5, True, None, -1, -1, 0.0, dropout_p, wanted, "auto")
    torch.library.opcheck(torch.ops.flashmoe_science.attention_backward, arguments)
    found = torch.ops.flashmoe_science.attention_backward(*arguments)
    assert [tensor.numel() > 0 for tensor in found] == [number in wanted for number in range(5)]


@pytest.mark.parametrize("own", [(1, 1), (1, 4), (3, 1), (3, 4)], ids=str)
def test_gradients_of_a_bias_of_packed_sequences(own):
    """Those of autograd through the definition, which is right itself; elements behind the ends are NaN and have 0."""
    q, k, v, bias = leaves((11, 4, 3), (14, 2, 3), (14, 2, 4), (*own, 6, 5), dtype=torch.float64)
    lengths = {name: tensor for name, tensor in varlen_inputs()[0].items() if name.startswith(("cu_seq", "seqused"))}
    options = {**ALL, **lengths, "alibi": torch.rand(3, 4).double()}
    in_use = torch.zeros(bias.shape, dtype=torch.bool)
    for b, (rows, keys) in enumerate(((3, 4), (0, 2), (6, 5))):
        in_use[b if own[0] > 1 else 0, :, :rows, :keys] = True
    with torch.no_grad():
        bias[~in_use] = math.nan
        bias[:, :, 1, 1] = -math.inf  # a key that it hides
        bias[:, :, 2] = -math.inf  # and a row that sees none

    def attend(q, k, v, bias):
        o, lse = reference.attention_varlen(q, k, v, **options, bias=bias)
        return o, lse.clamp(min=-1e9)

    do, dlse = torch.randn(11, 4, 4).double(), torch.randn(4, 11).double()
    o, lse = attend(q, k, v, bias)
    expected = torch.autograd.grad((o, lse), (q, k, v, bias), (do, dlse * (lse > -1e9)))
    named: dict[str, Any] = {"q": q, "k": k, "v": v, "bias": bias}
    found = reference.attention_varlen_backward(
        **{n: t.detach() for n, t in named.items()}, do=do, dlse=dlse, **options
    )
    for name, gradient in zip(named, expected, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-10)
    assert not found["bias"][~in_use].any()
    finite = torch.where(bias.isfinite(), bias, 0.5).detach().requires_grad_()
    assert torch.autograd.gradcheck(attend, (q, k, v, finite))

    single: dict[str, Any] = {name: t.float() if name == "alibi" else t for name, t in options.items()}
    single |= {"max_seqlen_q": 6, "max_seqlen_k": 5, "return_lse": True}
    for wanted in (("q", "k", "v", "bias"), ("bias",)):
        given: dict[str, Any] = {n: t.detach().float().requires_grad_(n in wanted) for n, t in named.items()}
        outputs = flash_attention_varlen(**given, **single)
        assert type(outputs[0].grad_fn).__name__ == "_AttentionBackward"
        seen = do.float(), (dlse * (lse > -1e9)).float()
        gradients = torch.autograd.grad(outputs, [given[name] for name in wanted], seen)
        for one, other in zip(gradients, expected[-len(wanted) :], strict=True):
            torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-5)
        assert not gradients[-1][~in_use].any()


def varlen_inputs() -> tuple[dict[str, Any], torch.Tensor]:
    q, k, v, sinks = leaves((11, 4, 8), (14, 2, 8), (14, 2, 16), (4,))
    starts = torch.tensor([0, 3, 3, 9], dtype=torch.int32), torch.tensor([0, 5, 7, 12], dtype=torch.int32)
    lengths = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "max_seqlen_q": 6, "max_seqlen_k": 5}
    return {"q": q, "k": k, "v": v, **lengths, "seqused_k": torch.tensor([4, 2, 5], dtype=torch.int32)}, sinks


@pytest.mark.parametrize("how", ["eager", "whole graph"])
def test_packed_sequences(how):
    """Gradients of each sequence are those that it has alone; tokens in none have 0."""
    inputs, sinks = varlen_inputs()
    (bias,) = leaves((1, 4, 6, 5))

    def attend(q, k, v, sinks, bias):
        changed = {**inputs, "q": q, "k": k, "v": v, "sinks": sinks, "bias": bias}
        return flash_attention_varlen(**changed, causal=True, return_lse=True)

    q, k, v = (inputs[name] for name in "qkv")
    called = torch.compile(attend, fullgraph=True, backend="aot_eager") if how == "whole graph" else attend
    o, lse = called(q, k, v, sinks, bias)
    do, dlse = torch.randn(11, 4, 16), torch.randn(4, 11)
    torch.autograd.backward((o, lse), (do, dlse))
    total, of_bias = torch.zeros(4), torch.zeros(1, 4, 6, 5)
    for rows, keys in ((slice(0, 3), slice(0, 4)), (slice(3, 9), slice(7, 12))):
        places = ((q, rows), (k, keys), (v, keys))
        one_q, one_k, one_v = (tensor.detach()[place].transpose(0, 1)[None] for tensor, place in places)
        its = (..., slice(rows.stop - rows.start), slice(keys.stop - keys.start))
        alone = reference.attention_backward(
            one_q, one_k, one_v, do[rows].transpose(0, 1)[None], dlse[None, :, rows], causal=True, sinks=sinks.detach(),
            bias=bias.detach()[its],
        )  # fmt: skip
        torch.testing.assert_close(q.grad[rows], alone["q"][0].transpose(0, 1))
        torch.testing.assert_close(k.grad[keys], alone["k"][0].transpose(0, 1))
        torch.testing.assert_close(v.grad[keys], alone["v"][0].transpose(0, 1))
        total += alone["sinks"]
        of_bias[its] += alone["bias"]
    torch.testing.assert_close(bias.grad, of_bias)
    torch.testing.assert_close(sinks.grad, total)
    assert not q.grad[9:].any()
    assert not k.grad[[4, 5, 6, 12, 13]].any()


def test_packed_operator():
    inputs, sinks = varlen_inputs()
    q, k, v, starts_q, starts_k, *_, used = inputs.values()
    (bias,) = leaves((3, 1, 6, 5))
    more = sinks, None, bias
    torch.library.opcheck(
        torch.ops.flashmoe_science.attention_varlen,
        (q, k, v, starts_q, starts_k, 6, 5, True, None, -1, -1, 0.0, *more, None, used, None, 0.0, True, "auto"),
    )
    o, lse = flash_attention_varlen(**inputs, return_lse=True)
    inner = tuple(tensor.detach() for tensor in (q, k, v)), (o.detach(), lse.detach())
    given = None, None, bias.detach(), starts_q, starts_k, None, used, None
    for wanted in ([0, 1, 2, 4], [4]):
        torch.library.opcheck(
            torch.ops.flashmoe_science.attention_backward,
            (*inner[0], *given, *inner[1], inner[1][0], None, 6, 5, False, None, -1, -1, 0.0, 0.0, wanted, "auto"),
        )


class PackedAttention(torch.nn.Module):
    """Attention of packed sequences with a learnt bias, as a model has it."""

    def __init__(self, bias: torch.Tensor) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(bias)

    def forward(self, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k):
        return flash_attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, 6, 5, bias=self.bias, seqused_k=seqused_k)


def test_gradients_of_packed_sequences_go_round_the_python_function():
    """The operator alone, and an exported graph, which holds nothing else, give those of q and of the bias too."""
    inputs, _ = varlen_inputs()
    q, k, v, starts_q, starts_k, *_, used = inputs.values()
    (bias,) = leaves((1, 4, 6, 5))
    starts, module = (starts_q, starts_k), PackedAttention(bias.detach())
    exported: Any = torch.export.export(module, (q.detach(), k.detach(), v.detach(), *starts, used)).module()
    do = torch.randn(11, 4, 16)

    def attend(q, k, v, bias):
        return flash_attention_varlen(q, k, v, *starts, 6, 5, bias=bias, seqused_k=used)

    def call_operator(q, k, v, bias):
        options = None, None, bias, None, used, None, 0.0, True, "auto"
        operator = torch.ops.flashmoe_science.attention_varlen
        return operator(q, k, v, *starts, 6, 5, False, None, -1, -1, 0.0, *options)[0]

    def gradients_of(call, bias):
        leaf = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
        o = call(*leaf, bias)
        return o.detach(), torch.autograd.grad(o, (*leaf, bias), do)

    expected = gradients_of(attend, bias)
    without = gradients_of(lambda q, k, v, bias: attend(q, k, v, None) + bias.sum(), bias)
    assert not torch.allclose(expected[1][0], without[1][0], atol=1e-2)  # the bias tells
    ways: tuple[tuple[Any, torch.Tensor], ...] = (
        (call_operator, bias), (lambda q, k, v, _: exported(q, k, v, *starts, used), exported.bias),
    )  # fmt: skip
    for way, parameter in ways:
        o, found = gradients_of(way, parameter)
        torch.testing.assert_close(o, expected[0])
        for one, other in zip(found, expected[1], strict=True):
            torch.testing.assert_close(one, other)


def test_longest_lengths_that_are_planned_for_alike_share_prepared_gradients():
    """As in the forward, also in a graph in which they are symbols; with a bias its sizes are planned for."""
    inputs, _ = varlen_inputs()
    q, k, v, starts_q, starts_k, *_, used = inputs.values()
    o, lse = flash_attention_varlen(**inputs, return_lse=True)
    kept = [tensor.detach() for tensor in (q, k, v)], [o.detach(), lse.detach(), o.detach(), None]
    for bias, sizes in ((None, ((6, 5), (7, 8), (8, 6))), (torch.zeros(1, 1, 9, 9), ((6, 5), (9, 9)))):
        gradients_module._prepared.clear()
        for longest in sizes:
            torch.ops.flashmoe_science.attention_backward(
                *kept[0], None, None, bias, starts_q, starts_k, None, used, None, *kept[1], *longest, False, None,
                -1, -1, 0.0, 0.0, [0, 1, 2], "auto",
            )  # fmt: skip
        assert len(gradients_module._prepared) == 1
