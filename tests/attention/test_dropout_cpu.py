"""Dropout without a GPU: its random numbers, its meaning, and every way in which a call is trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flashmoe_science import (
    InputError,
    UnsupportedError,
    explain,
    explain_gradients,
    explain_varlen,
    explain_varlen_gradients,
    flash_attention,
    flash_attention_varlen,
)
from flashmoe_science.attention import reference
from flashmoe_science.attention.backward.plan import plan_backward
from flashmoe_science.attention.backward.problem import BackwardProblem
from flashmoe_science.attention.forward.plan import plan_attention
from flashmoe_science.attention.forward.prepare import dropout_last
from flashmoe_science.attention.forward.variants_plan import FEATURES_KERNEL
from flashmoe_science.attention.philox import dropout_keeps, philox4x32
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.gpu.specs import SPECS

from ..exhaustive import all_but

SEED = torch.tensor([-(2**62) + 5, 2**33 - 7])  # a key of which both words count, an offset beyond 32 bits
# Random123's kat_vectors of philox4x32-10: counter, key, numbers.
KNOWN = [
    ("0" * 32, "0" * 16, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("f" * 32, "f" * 16, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a8885a308d313198a2e03707344", "a4093822299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[torch.Tensor, ...]:
    digits = text.replace(" ", "")
    return tuple(torch.tensor(int(digits[place : place + 8], 16)) for place in range(0, len(digits), 8))


@pytest.mark.parametrize(("counter", "key", "numbers"), KNOWN)
def test_known_answers(counter, key, numbers):
    assert philox4x32(words(counter), words(key)) == words(numbers)  # type: ignore[arg-type]


def test_which_number_decides_an_element():
    """That at n % 4 of (m, n // 4, b * H + h, offset) with the seed as key, and from p * 2**32 on it keeps."""
    heads, rows, keys = torch.tensor([0, 5]), torch.tensor([0, 1, 700]), torch.tensor([3, 4, 2**20 + 1, 2**30 + 2])
    low, high = (5, 0xC0000000)  # of 5 - 2**62
    number = torch.empty(2, 3, 4, dtype=torch.int64)
    for place in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(4)).tolist():
        key = keys[place[2]]
        counter = rows[place[1]], key // 4, heads[place[0]], torch.tensor(2**32 - 7)
        number[tuple(place)] = philox4x32(counter, (torch.tensor(low), torch.tensor(high)))[key % 4]
    for element in number.flatten().tolist():
        for limit in (element, element + 1):
            kept = dropout_keeps(SEED, limit / 2**32, heads=heads, rows=rows, keys=keys)
            assert torch.equal(kept, number >= limit)
    none = dropout_keeps(SEED, 1 - 2**-53, heads=heads, rows=rows, keys=keys)
    assert not none.any()


@pytest.mark.parametrize(
    ("dropout_p", "threshold"),
    [(0.5, 2**31), (1e-300, 1), (2**-32, 1), (1.5 * 2**-32, 2), (1 - 2**-32, 2**32 - 1), (1 - 2**-53, 2**32)],
)
def test_kernels_get_the_threshold_less_one(dropout_p, threshold):
    """As bits of 32, whatever the probability."""
    problem = AttentionProblem(1, 1, 1, 4, 4, 8, 8, "fp32", dropout_p=dropout_p)
    assert problem.dropout_threshold == threshold
    assert dropout_last(problem) % 2**32 == threshold - 1
    assert -(2**31) <= dropout_last(problem) < 2**31


@pytest.mark.parametrize("dropout_p", all_but([0.1, 0.5, 0.9], "0.1"))
def test_the_share_that_is_kept(dropout_p):
    """Within 5 standard deviations: of all, of each row, of each column, of each head, and of neighbours together."""
    size: dict[str, Any] = {"heads": torch.arange(8), "rows": torch.arange(512), "keys": torch.arange(512)}
    kept = dropout_keeps(torch.tensor([11, 22]), dropout_p, **size).double()
    keep = 1 - dropout_p
    for axes in ((0, 1, 2), (0, 1), (0, 2), (1, 2)):
        share, count = kept.mean(axes), math.prod(kept.shape[axis] for axis in axes)
        assert ((share - keep).abs() < 5 * (keep * dropout_p / count) ** 0.5).all(), axes
    for axis in range(3):
        both = kept.narrow(axis, 1, kept.shape[axis] - 1) * kept.narrow(axis, 0, kept.shape[axis] - 1)
        assert abs(both.mean().item() - keep**2) < 5 * (keep**2 * (1 - keep**2) / both.numel()) ** 0.5 * 2
    other = dropout_keeps(torch.tensor([11, 23]), dropout_p, **size).double()
    assert abs((kept * other).mean().item() - keep**2) < 5 * (keep**2 * (1 - keep**2) / kept.numel()) ** 0.5


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def inputs_of_all(dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], dict[str, Any]]:
    inputs = leaves((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 16), (4,), (1, 4, 5, 6), dtype=dtype)
    options: dict[str, Any] = {"causal": True, "window": (3, -1), "softcap": 2.0, "dropout_p": 0.4}
    return inputs, {**options, "alibi": torch.rand(4)}


def test_the_meaning():
    """Written out: softmax, then 0 or 1 / (1 - p); LSE and p = 0 as without."""
    q, k, v = (torch.randn(2, 4, 9, 8, dtype=torch.float64) for _ in range(3))
    o, lse = reference.attention(q, k, v, dropout_p=0.3, dropout_seed=SEED)
    sizes: dict[str, Any] = {"heads": torch.arange(8), "rows": torch.arange(9), "keys": torch.arange(9)}
    kept = dropout_keeps(SEED, 0.3, **sizes).view(2, 4, 9, 9)
    assert 0 < kept.sum() < kept.numel()
    weights = torch.softmax(q @ k.mT * 8**-0.5, -1) * kept / 0.7
    torch.testing.assert_close(o, weights @ v)
    plain, plain_lse = reference.attention(q, k, v)
    assert torch.equal(lse, plain_lse)
    again, _ = reference.attention(q, k, v, dropout_p=0.0, dropout_seed=SEED)
    assert torch.equal(again, plain)


@pytest.mark.parametrize("seqlens", [(4, 6), (6, 4)], ids=str)
def test_gradcheck_of_the_reference(seqlens):
    """With all features at once, and through rows that see no key."""
    seqlen_q, seqlen_k = seqlens
    inputs = leaves(
        (2, 2, seqlen_q, 3), (2, 1, seqlen_k, 3), (2, 1, seqlen_k, 4), (2,), (1, 2, seqlen_q, seqlen_k),
        dtype=torch.float64,
    )  # fmt: skip
    options: dict[str, Any] = {"causal": True, "window": (3, -1), "softcap": 2.0, "alibi": torch.rand(2).double()}
    options |= {"dropout_p": 0.4, "dropout_seed": SEED}

    def attend(q, k, v, sinks, bias):
        return reference.attention(q, k, v, sinks=sinks, bias=bias, **options)

    assert torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize("seqlens", [(5, 7), (7, 5)], ids=str)
def test_gradients_of_the_reference_are_autograds(seqlens, monkeypatch):
    """The formulas, in chunks of rows, give what autograd makes of the definition."""
    seqlen_q, seqlen_k = seqlens
    monkeypatch.setattr(reference, "_CHUNK_SCORES", 8 * 2 * 3 * seqlen_k)
    inputs = leaves(
        (2, 4, seqlen_q, 3), (2, 2, seqlen_k, 3), (2, 2, seqlen_k, 4), (4,), (2, 1, seqlen_q, seqlen_k),
        dtype=torch.float64,
    )  # fmt: skip
    options: dict[str, Any] = {"window": (3, 2), "dropout_p": 0.6, "dropout_seed": SEED, "first_sequence": 3}
    names = ("q", "k", "v", "sinks", "bias")
    given: dict[str, Any] = dict(zip(names, inputs, strict=True))
    o, lse = reference.attention(**given, **options)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    expected = torch.autograd.grad((o, lse), inputs, (do, dlse))
    found = reference.attention_backward(**given, do=do, dlse=dlse, **options)
    for name, tensor in zip(names, expected, strict=True):
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-10)


def test_no_probability_is_no_dropout():
    """The bits are those of a call without, and nothing is drawn."""
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    ends = torch.tensor([0, 2], dtype=torch.int32)
    packed: dict[str, Any] = {name: tensor[0] for name, tensor in (("q", q), ("k", k), ("v", v))}
    packed |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 2, "max_seqlen_k": 2}
    before = torch.get_rng_state()
    for dropout_p in (0, 0.0):
        assert torch.equal(flash_attention(q, k, v, dropout_p=dropout_p, dropout_seed=SEED), flash_attention(q, k, v))
        windowed = flash_attention(q, k, v, dropout_p=dropout_p, window=(2, 1))
        assert torch.equal(windowed, flash_attention(q, k, v, window=(2, 1)))
        assert torch.equal(flash_attention_varlen(**packed, dropout_p=dropout_p), flash_attention_varlen(**packed))
    assert explain(q, k, v, dropout_p=0.5).problem.features == ("dropout",)
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds():
    """The same seed gives the same bits, another offset another mask; without one, torch's generator decides."""
    q, k, v = (torch.randn(2, 4, 30, 8) for _ in range(3))

    def attend(*seed: int, dropout_p: float = 0.5) -> torch.Tensor:
        chosen = torch.tensor(seed) if seed else None
        o: torch.Tensor = flash_attention(q, k, v, dropout_p=dropout_p, dropout_seed=chosen)
        return o

    assert torch.equal(attend(1, 2), attend(1, 2))
    assert torch.equal(attend(1, 2), attend(1, 2 + 2**32)), "an offset counts modulo 2**32"
    for other in (attend(1, 3), attend(2, 2), attend(1 + 2**32, 2), attend(1, 2, dropout_p=0.5001)):
        assert not torch.allclose(attend(1, 2), other)
    torch.manual_seed(7)
    first, second = attend(), attend()
    assert not torch.allclose(first, second)
    torch.manual_seed(7)
    assert torch.equal(attend(), first)


def test_a_mask_does_not_depend_on_the_batch():
    """What is decided by sequence, head, row and key alone: packed sequences, and shares of rows and of keys."""
    q, k, v = (torch.randn(3, 4, 8, 8) for _ in range(3))
    options: dict[str, Any] = {"dropout_p": 0.5, "dropout_seed": SEED}
    whole = flash_attention(q, k, v, **options)
    ends = torch.arange(4, dtype=torch.int32) * 8
    a, b, c = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))
    o = flash_attention_varlen(a, b, c, ends, ends, 8, 8, **options)
    torch.testing.assert_close(o.view(3, 8, 4, 8).transpose(1, 2), whole)
    torch.testing.assert_close(flash_attention(q[:2, :, :5], k[:2], v[:2], **options), whole[:2, :, :5])
    seen = flash_attention(q, k[:, :, :3], v[:, :, :3], **options)
    bias = torch.zeros(1, 1, 8, 8).index_fill(3, torch.arange(3, 8), -math.inf)
    torch.testing.assert_close(flash_attention(q, k, v, bias=bias, **options), seen)


HOW = ("eager", "whole graph", "checkpoint", "reentrant checkpoint", "offloaded", "functional", "checkpoint in a graph")


@pytest.mark.parametrize("drawn", [False, True], ids=["given", "drawn"])
@pytest.mark.parametrize("how", HOW)
def test_training(how, drawn):
    """Gradients are those of the mask of the forward, however frameworks run a layer, and whoever draws the seed."""
    inputs, options = inputs_of_all()
    do = torch.randn(2, 4, 5, 16)
    seed = None if drawn else SEED

    def attend(q, k, v, sinks, bias):
        return flash_attention(q * 1.0, k, v, sinks=sinks, bias=bias, dropout_seed=seed, **options)

    def again(*tensors):
        return checkpoint(attend, *tensors, use_reentrant=how.startswith("reentrant"))

    torch.manual_seed(3)
    if how == "functional":
        found = torch.func.grad(lambda *x: (attend(*x) * do).sum(), argnums=(0, 1, 2, 3, 4))(
            *(tensor.detach() for tensor in inputs)
        )
    elif how == "offloaded":
        with torch.autograd.graph.save_on_cpu():
            o = attend(*inputs)
        found = torch.autograd.grad(o, inputs, do)
    elif how == "reentrant checkpoint":
        again(*inputs).backward(do)
        found = tuple(tensor.grad for tensor in inputs)
    else:
        called = again if how.startswith("checkpoint") else attend
        if "graph" in how:
            called = torch.compile(called, fullgraph=True, backend="aot_eager")
        found = torch.autograd.grad(called(*inputs), inputs, do)
    if drawn:
        torch.manual_seed(3)
        seed = torch.randint(2**62, (2,))
    names = ("q", "k", "v", "sinks", "bias")
    plain: dict[str, Any] = {name: tensor.detach() for name, tensor in zip(names, inputs, strict=True)}
    expected = reference.attention_backward(**plain, do=do, dropout_seed=seed, **options)
    for name, gradient in zip(names, found, strict=True):
        torch.testing.assert_close(gradient, expected[name])


def test_a_graph_draws_anew_in_every_call():
    """The seed is no constant of the graph: two calls of it drop otherwise, and each has its own gradients."""
    torch.manual_seed(0)
    q, k, v = leaves((1, 2, 16, 8), (1, 2, 16, 8), (1, 2, 16, 8))
    compiled = torch.compile(
        lambda q, k, v: flash_attention(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert not torch.allclose(first, second)
    # The gradient of v is linear in the probabilities, so o = sum of v times it.
    for o in (first, second):
        (dv,) = torch.autograd.grad(o.sum(), v)
        torch.testing.assert_close((dv * v).sum(), o.sum())


@pytest.mark.parametrize("how", ["eager", "whole graph"])
def test_packed_sequences_in_training(how):
    q, k, v = leaves((11, 4, 8), (14, 2, 8), (14, 2, 16))
    ends_q, ends_k = torch.tensor([0, 3, 3, 9], dtype=torch.int32), torch.tensor([0, 5, 7, 12], dtype=torch.int32)
    options: dict[str, Any] = {"causal": True, "dropout_p": 0.5, "dropout_seed": SEED}

    def attend(q, k, v):
        return flash_attention_varlen(q, k, v, ends_q, ends_k, 6, 5, **options)

    called = torch.compile(attend, fullgraph=True, backend="aot_eager") if how == "whole graph" else attend
    do = torch.randn(11, 4, 16)
    found = torch.autograd.grad(called(q, k, v), (q, k, v), do)
    expected = reference.attention_varlen_backward(
        q.detach(), k.detach(), v.detach(), do, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, **options
    )
    for name, gradient in zip("qkv", found, strict=True):
        torch.testing.assert_close(gradient, expected[name])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "one": ({"dropout_p": 1.0}, "dropout_p must be at least 0 and less than 1, got 1.0"),
    "negative": ({"dropout_p": -0.1}, "dropout_p must be at least 0 and less than 1, got -0.1"),
    "NaN": ({"dropout_p": math.nan}, "dropout_p must be at least 0 and less than 1, got nan"),
    "in words": ({"dropout_p": "0.1"}, "dropout_p must be a number, 0 for no dropout, got str"),
    "None": ({"dropout_p": None}, "dropout_p must be a number, 0 for no dropout, got NoneType"),
    "a number as seed": ({"dropout_seed": 5}, "dropout_seed must be a torch.Tensor or None, got int"),
    "a seed of int32": ({"dropout_seed": SEED.int()}, "dropout_seed must be int64, got torch.int32"),
    "one number": (
        {"dropout_seed": SEED[:1]},
        r"dropout_seed must have shape \[seed, offset\] = \[2\], got \[1\]",
    ),
    "with gaps": (
        {"dropout_seed": torch.arange(4)[::2]},
        r"dropout_seed must be contiguous, got strides \[2\]",
    ),
    "elsewhere": (
        {"dropout_seed": torch.zeros(2, dtype=torch.int64, device="meta")},
        "dropout_seed must be on the device of q, cpu, got meta",
    ),
}


@pytest.mark.parametrize("why", BAD)
def test_bad_input(why):
    """Each broken rule is named, with what was expected and got; ``explain`` and packed sequences say the same."""
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    ends = torch.tensor([0, 2], dtype=torch.int32)
    changes, message = BAD[why]
    options = {"dropout_p": 0.5, **changes}
    dense: tuple[Callable[..., Any], ...] = (flash_attention, explain, explain_gradients)
    for function in dense:
        with pytest.raises(InputError, match=message):
            function(q, k, v, **options)
    packed = [tensor[0].transpose(0, 1) for tensor in (q, k, v)]
    functions: tuple[Callable[..., Any], ...] = (flash_attention_varlen, explain_varlen, explain_varlen_gradients)
    for function in functions:
        with pytest.raises(InputError, match=message):
            function(*packed, ends, ends, 2, 2, **options)


def test_no_seed_is_drawn_for_a_call_that_is_refused():
    q = torch.randn(1, 2, 5, 8)
    state = torch.get_rng_state()
    with pytest.raises(InputError, match="dropout_p must be at least 0 and less than 1"):
        flash_attention(q, q, q, dropout_p=1.5)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_seed_is_not_used_without_dropout():
    q, seed = torch.randn(1, 2, 5, 8), torch.zeros(3)
    assert torch.equal(flash_attention(q, q, q, dropout_seed=seed), flash_attention(q, q, q))
    explain(q, q, q, dropout_seed=seed)


def test_an_operator_draws_no_seed():
    """Its backward pass could not know it."""
    q, ends = torch.randn(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    operators = torch.ops.flashmoe_science
    dense = q.transpose(0, 1)[None]
    message = "dropout_seed must be given to the operator where dropout_p is 0.5, got None"
    with pytest.raises(InputError, match=message):
        operators.attention_features(
            dense, dense, dense, False, None, -1, -1, 0.0, None, None, None, None, 0.5, False, "auto"
        )
    with pytest.raises(InputError, match=message):
        operators.attention_varlen(q, q, q, ends, ends, 4, 4, False, None, -1, -1, 0.0, *[None] * 6, 0.5, False, "auto")


def test_the_plan_says_which_kernels_have_no_dropout():
    """``forward_triton`` and ``backward_triton`` have; forced, the others refuse by name."""
    for window in ((-1, -1), (300, -1)):
        problem = AttentionProblem(
            2, 16, 16, 4096, 4096, 128, 128, "bf16", True, dropout_p=0.1, return_lse=True, window=window
        )
        plan = plan_attention(problem, SPECS["H200"])
        assert plan.kernel == "forward_triton"
        assert "forward_short_gluon is passed over (it does not serve" in plan.reason
        assert f"{FEATURES_KERNEL} too (it does not serve dropout)" in plan.reason
        for kernel in ("forward_short_gluon", "forward_gluon_sm90", FEATURES_KERNEL):
            with pytest.raises(UnsupportedError, match=f"{kernel} does not serve .*dropout"):
                plan_attention(problem, SPECS["H200"], kernel)
        backward = plan_backward(BackwardProblem(problem), SPECS["H200"])
        assert backward.kernel == "backward_triton"
        assert "backward_gluon_sm90 is passed over (it does not serve" in backward.reason
        assert "dropout" in backward.reason
        with pytest.raises(UnsupportedError, match=r"backward_gluon_sm90 does not serve .*dropout"):
            plan_backward(BackwardProblem(problem), SPECS["H200"], "backward_gluon_sm90")
    assert problem.describe() == "b2_h16_s4096_d128_bf16_causal_window300_all_dropout0.1"
    assert problem.extras == ("dropout_seed",)
    q = torch.randn(1, 2, 4, 8)
    assert explain_gradients(q, q, q, dropout_p=0.1).problem.forward.dropout_p == 0.1
