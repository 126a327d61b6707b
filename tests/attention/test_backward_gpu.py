"""Gradients on a GPU: right to the rule of the field, the same bits in every run, and in every way of training."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch.utils.checkpoint import checkpoint

from flashmoe_science import flash_attention, flash_attention_varlen
from flashmoe_science.attention.backward.autograd import attention_gradients

from .cases import GRADIENTS, HEAD_DIMS, PAIRS, Case, FeatureCase, Gradients, VarlenCase
from .checks import (
    ask_for_gradients,
    assert_gradients_right,
    assert_repeats,
    assert_varlen_gradients_right,
    check_gradients,
    differentiate,
    far_apart,
    make_features,
    make_inputs,
    make_packed,
    poison_allocator,
    synchronisation_is_an_error,
)

pytestmark = pytest.mark.gpu

LONG = (*PAIRS, (4096, 4096), (4224, 4224))
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("pair", LONG, ids=str)
def test_lengths(pair, dims, causal):
    """FlashAttention's own list of lengths, at the head dimensions in use, with grouped heads.

    Of ``backward_triton``, which plans choose for some of them; test_backward_sm90_gpu.py has them for Hopper's.
    """
    case = Case(1 if max(pair) > 2000 else 2, 4, 2, pair[0], pair[1], dims[0], dims[1], "bf16", causal, "lengths")
    check_gradients(case, kernel="backward_triton")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kernel", ["auto", "backward_triton"])
def test_lengths_of_every_head_dim(kernel, head_dim, causal):
    """The same list, 9 sequences of 6 heads on 2 K/V heads, by the kernel of choice and by that of Triton."""
    for seqlen_q, seqlen_k in LONG:
        batch, heads, heads_kv = (9, 6, 2) if seqlen_q < 4096 else (1, 2, 1)
        case = Case(batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim, "bf16", causal, "every-dim")
        check_gradients(case, kernel=kernel, repeats=1)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim, dtype):
    check_gradients(Case(2, 6, 2, 113, 203, head_dim, head_dim, dtype, True, why="dims"), through_lse=True)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_sums_of_fp32(head_dim, causal):
    """Products of fp32 are not added one by one to a sum of thousands."""
    check_gradients(Case(1, 2, 1, 2048, 4096, head_dim, head_dim, "fp32", causal, "fp32"), repeats=1)


@pytest.mark.parametrize("kernel", ["auto", "backward_triton"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("dims", [*DIMS, (24, 24), (104, 40)], ids=str)
@pytest.mark.parametrize("rows", [1, 239, 5000])
def test_one_key(rows, dims, dtype, kernel):
    """Rows that see one key give it all their weight: the gradients of its scores are 0, and not a rest of rounding."""
    case = Case(2, 4, 2, rows, 1, dims[0], dims[1], dtype, False, "one key")
    q, k, v = make_inputs(case, "cuda")
    options = {"causal": False}
    found, do, _ = differentiate(flash_attention, {"q": q, "k": k, "v": v}, options, kernel=kernel, through_lse=False)
    assert not found["q"].any()
    assert not found["k"].any()
    assert_gradients_right(found, q, k, v, do, **options)


@pytest.mark.parametrize("gradients", GRADIENTS, ids=str)
def test_cases(gradients):
    """What the interpreter runs on CPUs: features, rests and empty tensors, and other memory layouts."""
    case = gradients.case
    if isinstance(case, VarlenCase):
        through_lse = gradients.through_lse
        assert gradients == Gradients(case, through_lse=through_lse)  # nothing else, which is only of batches
        inputs, options = make_packed(case, "cuda"), make_features(case, "cuda")
        poison_allocator(1 << 22)
        asked: dict[str, Any] = {"kernel": "auto", "through_lse": through_lse}
        found, do, dlse = differentiate(flash_attention_varlen, inputs, options, **asked)
        assert_varlen_gradients_right(found, inputs, options, do, dlse)
        return
    check_gradients(case, through_lse=gradients.through_lse, low=gradients.low)
    if gradients.far or gradients.turned:
        for kernel in ("auto", "backward_triton"):
            check_layouts(gradients, kernel)


def check_layouts(gradients: Gradients, kernel: str) -> None:
    """Hold the bits of the gradients in another memory layout to those in the plain one.

    Both are of one o and LSE: which kernel a forward takes may depend on the layout.
    """
    case = gradients.case
    assert isinstance(case, Case)
    inputs = dict(zip("qkv", make_inputs(case, "cuda"), strict=True))
    features = make_features(case, "cuda") if isinstance(case, FeatureCase) else {"causal": case.causal}
    asked, _, _ = ask_for_gradients(flash_attention, inputs, features, kernel=kernel, through_lse=gradients.through_lse)
    options, given, wanted = asked
    expected = attention_gradients(options, given, wanted)
    bias = given.get("bias")
    if gradients.far:
        assert bias is not None
        found = attention_gradients(options, {**given, "bias": far_apart(bias)}, wanted)
        for name, gradient in found.items():
            assert torch.equal(gradient, expected[name]), f"keys of a bias far apart give other bits in d{name}"
    if gradients.turned:
        turned = {name: tensor.transpose(1, 2).contiguous().transpose(1, 2) for name, tensor in inputs.items()}
        biases = {} if bias is None else {"bias": bias.transpose(2, 3).contiguous().transpose(2, 3)}
        found = attention_gradients(options, {**given, **turned, **biases}, wanted)
        for name, gradient in found.items():
            assert torch.equal(gradient, expected[name]), f"another memory layout gives other bits in d{name}"
            if name in turned:
                assert gradient.stride() == turned[name].stride(), f"d{name} lies in memory as {gradient.stride()}"


_LARGE: dict[str, dict[str, Any]] = {
    "window": {"window": (100, -1)},
    "window on both sides": {"window": (100, 70)},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": "bf16"},
    "alibi": {"alibi": "fp32", "alibi_axes": 2},
    "bias": {"bias": "bf16", "bias_heads": (False, True)},
    "all": {"window": (200, -1), "softcap": 20.0, "sinks": "fp32", "alibi": "fp32", "bias": "fp32"},
    "dropout": {"dropout": 0.3},
    "dropout with all": {
        "window": (200, -1),
        "softcap": 20.0,
        "sinks": "fp32",
        "alibi": "fp32",
        "bias": "fp32",
        "dropout": 0.1,
    },
}


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("name", _LARGE)
def test_features(name, dims):
    """At sizes of many tiles, with the tiles that plans choose."""
    causal = name != "window on both sides"
    check_gradients(
        FeatureCase(2, 4, 2, 500, 640, dims[0], dims[1], "bf16", causal, name, **_LARGE[name]),
        through_lse=name == "sinks",
    )


@pytest.mark.parametrize("own", [(True, True), (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("name", [name for name in _LARGE if "bias" in _LARGE[name]])
def test_biases_of_packed_sequences(name, dims, own):
    """Sequences of many tiles, of less than one and of none; the same bits in another run."""
    asked: dict[str, Any] = {**_LARGE[name], "bias_heads": own}
    case = VarlenCase(
        (500, 0, 70, 301), (640, 50, 9, 301), 4, 2, dims[0], dims[1], "bf16", True, name,
        seqused_q=(500, 0, 70, 260), seqused_k=(600, 50, 9, 301), tail=3, spare=40, **asked,
    )  # fmt: skip
    inputs, options = make_packed(case, "cuda"), make_features(case, "cuda")
    poison_allocator(4 * options["bias"].numel())
    found, do, _ = differentiate(flash_attention_varlen, inputs, options, kernel="auto", through_lse=False)
    assert_varlen_gradients_right(found, inputs, options, do)
    poison_allocator(4 * options["bias"].numel())
    again, _, _ = differentiate(flash_attention_varlen, inputs, options, kernel="auto", through_lse=False)
    for what, gradient in found.items():
        assert torch.equal(again[what], gradient), f"d{what} has other bits in another run"


def test_a_mask_with_lengths_of_128():
    """Where cuDNN's backward gave NaN: a mask that hides whole rows, S a multiple of 128."""
    q, k, v = make_inputs(Case(2, 4, 4, 256, 256, 64, 64, "bf16", False, why="mask"), "cuda")
    bias = torch.zeros(2, 1, 256, 256, device="cuda", dtype=torch.bfloat16)
    bias[:, :, :, 128:] = -math.inf
    bias[1] = -math.inf
    options = {"causal": False, "bias": bias}
    found, do, _ = differentiate(flash_attention, {"q": q, "k": k, "v": v}, options, kernel="auto", through_lse=False)
    assert_gradients_right(found, q, k, v, do, **options)
    assert not found["q"][1].any()


def leaves(*shape: int, dtype: torch.dtype = torch.bfloat16, number: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    made = [torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(number)]
    return [tensor.requires_grad_() for tensor in made]


def gradients_of(attend, inputs, do) -> tuple[torch.Tensor, ...]:
    found: tuple[torch.Tensor, ...] = torch.autograd.grad(attend(*inputs), inputs, do)
    return found


@pytest.mark.parametrize("how", ["whole graph", "checkpoint", "expanded", "sequence-major"])
def test_training(how):
    """The same bits as the eager call, however the layer is run."""
    inputs = leaves(2, 8, 640, 64)
    do = torch.randn(2, 8, 640, 64, device="cuda", dtype=torch.bfloat16)

    def attend(q, k, v):
        return flash_attention(q, k, v, causal=True)

    expected = gradients_of(attend, inputs, do)
    if how == "whole graph":
        found = gradients_of(torch.compile(attend, fullgraph=True), inputs, do)
    elif how == "checkpoint":
        found = gradients_of(lambda *x: checkpoint(attend, *x, use_reentrant=False), inputs, do)
    elif how == "expanded":
        expected = gradients_of(attend, inputs, torch.ones_like(do))
        found = torch.autograd.grad(attend(*inputs).sum(), inputs)
    else:
        turned = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in inputs]
        found = gradients_of(attend, turned, do)
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("how", ["eager", "whole graph", "checkpoint"])
def test_training_with_dropout(how):
    """The gradients are those of the mask of the forward, drawn on the GPU without waiting for it."""
    inputs = leaves(2, 4, 300, 64)
    do = torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16)

    def attend(q, k, v):
        return flash_attention(q, k, v, causal=True, dropout_p=0.4)

    def again(q, k, v):
        return checkpoint(attend, q, k, v, use_reentrant=False)

    called = {"eager": attend, "whole graph": torch.compile(attend, fullgraph=True), "checkpoint": again}[how]
    gradients_of(called, inputs, do)
    torch.manual_seed(3)
    found = gradients_of(called, inputs, do)
    if how == "whole graph":  # Inductor draws otherwise: o of the same draw shows the mask
        o = called(*inputs)
        (dv,) = torch.autograd.grad(o, inputs[2], do)
        torch.testing.assert_close((dv.double() * inputs[2]).sum(), (do.double() * o).sum(), rtol=0.02, atol=2.0)
        return
    torch.manual_seed(3)
    seed = torch.randint(2**62, (2,), device="cuda")
    q, k, v = (tensor.detach() for tensor in inputs)
    named = dict(zip("qkv", found, strict=True))
    assert_gradients_right(named, q, k, v, do, causal=True, dropout_p=0.4, dropout_seed=seed)
    if how == "eager":
        with synchronisation_is_an_error():
            gradients_of(called, inputs, do)


@pytest.mark.unpoisoned
def test_a_graph_with_dropout_draws_in_every_replay():
    """The mask is another one each time; with a seed in a tensor, it is that of the seed that the tensor then has."""
    q, k, v = (tensor.detach() for tensor in leaves(2, 4, 300, 64))
    seed = torch.tensor([1, 2], device="cuda")

    def attend():
        drawn = flash_attention(q, k, v, causal=True, dropout_p=0.5)
        return drawn, flash_attention(q, k, v, causal=True, dropout_p=0.5, dropout_seed=seed)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attend()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn, given = attend()
    graph.replay()
    first, first_given = drawn.clone(), given.clone()
    seed[1] = 3
    graph.replay()
    assert not torch.equal(drawn, first)
    assert not torch.equal(given, first_given)
    assert torch.equal(given, flash_attention(q, k, v, causal=True, dropout_p=0.5, dropout_seed=seed))


@pytest.mark.unpoisoned
def test_a_step_in_a_cuda_graph():
    """Forward and backward, captured and replayed with other values in the same memory."""
    inputs = leaves(2, 4, 300, 64)
    do = torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16)

    def step():
        return gradients_of(lambda *x: flash_attention(*x, causal=True), inputs, do)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for tensor in (*inputs, do):
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    for mine, other in zip(captured, step(), strict=True):
        assert torch.equal(mine, other)


def test_autocast():
    inputs = leaves(2, 4, 300, 64, dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        o = flash_attention(*inputs, causal=True)
        with torch.no_grad():
            assert torch.equal(flash_attention(*inputs, causal=True), o)
    assert o.dtype == torch.bfloat16
    o.float().square().sum().backward()
    assert all(tensor.grad is not None and tensor.grad.dtype == torch.float32 for tensor in inputs)


def test_many_repeats():
    """1,000 runs of one step have the same bits."""
    inputs = leaves(2, 8, 1000, 128)
    do = torch.randn(2, 8, 1000, 128, device="cuda", dtype=torch.bfloat16)
    o, lse = flash_attention(*inputs, causal=True, return_lse=True)
    expected = torch.autograd.grad(o, inputs, do, retain_graph=True)
    differ = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        found = torch.autograd.grad(o, inputs, do, retain_graph=True)
        for mine, other in zip(found, expected, strict=True):
            differ |= (mine != other).any()
    assert not differ.item()
    assert lse.requires_grad


_EVERY_FEATURE = _LARGE["dropout with all"]
REPEATED: dict[str, Case | VarlenCase] = {
    "plain": Case(2, 4, 2, 1023, 1024, 64, 64, "bf16", True, "repeats"),
    "plain, full": Case(2, 4, 2, 1023, 1024, 128, 128, "bf16", False, "repeats"),
    "plain, dK and dV apart": Case(2, 4, 2, 1023, 1024, 256, 256, "bf16", True, "repeats"),
    "every feature, D 64": FeatureCase(2, 4, 2, 500, 640, 64, 64, "bf16", True, "repeats", **_EVERY_FEATURE),
    "every feature, D 128": FeatureCase(2, 4, 2, 500, 640, 128, 128, "bf16", True, "repeats", **_EVERY_FEATURE),
    "every feature, one bias": FeatureCase(
        2, 4, 2, 500, 640, 64, 64, "fp16", True, "repeats", **{**_EVERY_FEATURE, "bias_heads": (False, False)}
    ),
    "packed, dropout": VarlenCase(
        (300, 0, 77, 500), (300, 40, 200, 431), 4, 2, 64, 64, "bf16", True, "repeats", dropout=0.2, tail=3
    ),
    "packed, dropout and features": VarlenCase(
        (300, 0, 77, 500), (300, 40, 200, 431), 4, 2, 128, 128, "bf16", True, "repeats", window=(100, -1), softcap=20.0,
        sinks="fp32", alibi="fp32", alibi_axes=2, seqused_k=(290, 40, 100, 431), dropout=0.2,
    ),
    "fp32": Case(2, 6, 2, 203, 211, 64, 64, "fp32", True, "repeats"),
    "fp32, D 128": Case(2, 6, 2, 203, 211, 128, 128, "fp32", False, "repeats"),
    "fp32, every feature": FeatureCase(2, 4, 2, 203, 211, 64, 64, "fp32", True, "repeats", **_EVERY_FEATURE),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATED)
def test_a_thousand_repeats(name):
    """Of ``backward_triton``, which plans choose for features, packed sequences and fp32: the same bits each time."""
    case = REPEATED[name]
    if isinstance(case, VarlenCase):
        packed, features = make_packed(case, "cuda"), make_features(case, "cuda")
        assert_repeats(flash_attention_varlen, packed, features, kernel="backward_triton")
        return
    inputs = dict(zip("qkv", make_inputs(case, "cuda"), strict=True))
    options = make_features(case, "cuda") if isinstance(case, FeatureCase) else {"causal": case.causal}
    assert_repeats(flash_attention, inputs, options, kernel="backward_triton")


def peak_of_step(attend, seqlen: int) -> int:
    inputs = leaves(1, 1, seqlen, 64)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attend(*inputs).sum().backward()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.unpoisoned
def test_memory_is_linear_in_the_length():
    """From 8k to 64k keys, peak memory of a step grows eightfold: no scores are kept. An eager step keeps them."""

    def eager(q, k, v):
        return torch.softmax(q @ k.mT / 8, -1) @ v

    ours = [peak_of_step(lambda *x: flash_attention(*x, causal=True), seqlen) for seqlen in (8192, 65536)]
    assert ours[1] < 9 * ours[0]
    peak_of_step(eager, 128)  # the first takes workspaces besides, which stay
    theirs = [peak_of_step(eager, seqlen) for seqlen in (8192, 32768)]
    assert theirs[1] > 15 * theirs[0]
    scores = 2 * 65536**2  # of one head in bf16: what an eager step of 64k keys keeps at the least
    assert ours[1] < scores / 50


def test_against_sdpa():
    """An implementation that is not ours, within what bf16 allows."""
    inputs = leaves(2, 8, 512, 128)
    do = torch.randn(2, 8, 512, 128, device="cuda", dtype=torch.bfloat16)
    ours = gradients_of(lambda *x: flash_attention(*x, causal=True), inputs, do)
    theirs = gradients_of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), inputs, do)
    for mine, other in itertools.zip_longest(ours, theirs):
        torch.testing.assert_close(mine, other, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("starts", "is_shared"), [((0, 300, 900), False), ((0, 250, 900), True), ((550, 0, 900), True)]
)
def test_gradients_of_keys_that_sequences_share_are_nan(starts, is_shared, monkeypatch):
    """Nobody reads the lengths; where they are read, the call raises."""
    monkeypatch.delenv("FLASHMOE_CHECK", raising=False)
    q, k, v = (torch.randn(900, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    starts_q, starts_k, used = (
        torch.tensor(numbers, device="cuda", dtype=torch.int32) for numbers in ((0, 400, 900), starts, (300, 550))
    )
    o = flash_attention_varlen(q, k, v, starts_q, starts_k, 500, 600, seqused_k=used)
    assert not o.isnan().any()
    gradients = torch.autograd.grad(o, (q, k, v), o)
    assert [gradient.isnan().any().item() for gradient in gradients] == [is_shared] * 3
