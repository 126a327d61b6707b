"""What a right kernel may be off in each element: by the formula, by simulated kernels, and by faults."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import sys
from typing import Any

import pytest
import torch

from flashmoe_science.attention import reference
from flashmoe_science.operators import MODULES
from flashmoe_science.operators.attention_scale import forward_scale
from flashmoe_science.operators.error_scale import WIDE, Estimate, Format, coarse_products, independent_terms
from flashmoe_science.proof.measure.allowed_error import Allowed, find_expected, find_shares, judge
from flashmoe_science.proof.subject.loading import load_operator
from flashmoe_science.proof.subject.operator import ErrorScaling
from flashmoe_science.proof.subject.outputs import parts
from tests.docs_blocks import ROOT
from tests.exhaustive import all_but

_SPEC = importlib.util.spec_from_file_location("simulate_error_scale", ROOT / "tools" / "simulate_error_scale.py")
assert _SPEC is not None
assert _SPEC.loader is not None
simulation: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["simulate_error_scale"] = simulation
_SPEC.loader.exec_module(simulation)

SMALL: dict[str, dict[str, Any]] = {
    "attention": {"batch": 2, "heads": 4, "heads_kv": 2, "seqlen_q": 33, "head_dim": 16, "causal": True},
    "attention_backward": {"batch": 1, "heads": 2, "heads_kv": 1, "seqlen_q": 21, "head_dim": 32, "causal": True},
    "attention_cache": {"batch": 2, "heads": 4, "heads_kv": 2, "seqlen_k": 48, "head_dim": 16, "page_size": 16},
    "attention_masked": {"batch": 1, "heads": 2, "seqlen_q": 33, "head_dim": 16, "mask": "documents", "amount": 9},
    "attention_sparse": {
        "batch": 2,
        "heads": 4,
        "seqlen_k": 48,
        "top_k": 20,
        "head_dim": 32,
        "head_dim_v": 16,
        "page_size": 16,
    },
    "attention_mixed": {
        "lengths": [5, 0, 17],
        "lengths_k": [9, 3, 17],
        "heads": 2,
        "head_dim": 16,
        "causal": True,
        "page_size": 8,
    },
    "attention_train": {"batch": 1, "heads": 2, "seqlen_q": 24, "head_dim": 16, "causal": True, "window": [7, 0]},
    "attention_varlen": {"lengths": [5, 0, 17], "heads": 2, "head_dim": 16, "causal": True},
    "attention_varlen_backward": {"lengths": [5, 0, 17], "heads": 2, "head_dim": 16, "causal": True},
    "context_parallel": {"ranks": 2, "lengths": [5, 27], "heads": 4, "heads_kv": 2, "head_dim": 16, "causal": True},
    "expert_parallel": {"ranks": 2, "tokens": 5, "experts": 4, "top_k": 2, "hidden": 64, "inter": 48},
    "moe": {"tokens": 9, "experts": 4, "top_k": 2, "hidden": 64, "inter": 48},
    "moe_backward": {"tokens": 9, "experts": 4, "top_k": 2, "hidden": 64, "inter": 48},
}
MORE: dict[str, list[dict[str, Any]]] = {
    "attention": [
        {"softcap": 5.0, "sinks": "fp32"},
        {"bias": "bf16"},
        {"alibi": "fp32", "window": [8, 0]},
        {"seqlen_q": 1},
        {"head_dim_v": 32, "softmax_scale": 1.0},
    ],
    "attention_cache": [{"page_size": 0, "shared_kv": True}, {"seqlen_q": 3, "causal": True}],
    "attention_sparse": [
        {"page_size": 0, "seqlen_q": 3, "padding": 7},
        {"fp8": True, "head_dim": 576, "head_dim_v": 512},
    ],
    "moe": [
        {"activation": "swiglu_clamped", "interleaved": True, "bias_gate_up": True, "bias_down": True},
        {"activation": "relu2", "shared_experts": 2, "shared_inter": 32, "shared_weights": "fp32"},
    ],
    "moe_backward": [
        {"activation": "swiglu_clamped", "interleaved": True, "bias_gate_up": True, "bias_down": True},
        {"activation": "gelu_tanh"},
    ],
}
# In `make test` bf16, and of one operator of attention and one of experts the other types too.
CASES = [
    pytest.param(
        name,
        {**SMALL[name], **more, "dtype": dtype},
        id=f"{name}-{dtype}-{'-'.join(more) or 'plain'}",
        marks=[] if dtype == "bf16" or (name in ("attention", "moe") and not more) else pytest.mark.exhaustive,
    )
    for name in MODULES
    for more, dtype in itertools.product([{}, *MORE.get(name, [])], ("bf16", "fp16", "fp32"))
]


def shares(name, table, answer=None, seed=1):
    """Return for each output the shares of what is allowed that an answer takes, by default the framework's own."""
    operator: Any = load_operator(name)
    problem = operator.parse_case(table)
    inputs = operator.make_inputs(problem, seed=seed, device="cpu")
    exact = parts(operator.exact(problem, inputs))
    given = parts(operator.low_precision(problem, inputs)) if answer is None else answer(exact)
    scales = operator.error_scale(problem, inputs)
    assert [scale.largest.shape for scale in scales] == [right.shape for right in exact]
    assert [scale.rms.shape for scale in scales] == [(*right.shape[:-1], 1) for right in exact]
    return [find_shares(*each[:2], Allowed(*each[2])).tolist() for each in zip(given, exact, scales, strict=True)]


@pytest.mark.parametrize("name", MODULES)
def test_every_operator_of_ours_knows_the_errors_of_its_elements(name):
    assert isinstance(load_operator(name), ErrorScaling)


@pytest.mark.parametrize(("name", "table"), CASES)
def test_the_frameworks_own_run_is_right_and_what_is_a_tenth_too_large_is_not(name, table):
    for seed in (1, 2):
        for of_element, of_row in shares(name, table, seed=seed):
            assert of_element <= 1.0
            assert of_row <= 1.0
    for of_element, of_row in shares(name, table, lambda exact: [1.1 * right for right in exact]):
        assert max(of_element, of_row) > 1.5


@pytest.mark.parametrize("head_dim", [64, 80])
def test_the_scale_of_attention_is_its_formula(head_dim):
    """With a head of 64 q times the scale is exact, with one of 80 it is rounded."""
    u, keys, is_rounded = 2.0**-8, 50, head_dim == 80
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, keys, head_dim, generator=generator).bfloat16() for _ in range(3))
    found = forward_scale(q, k, v, causal=True, softmax_scale=None)
    q, k, v = (x[0, 1].double() for x in (q, k, v))
    for row in (0, 1, 7, 49):
        products = q[row] * k[: row + 1] * head_dim**-0.5
        s = products.sum(-1)
        p = s.softmax(-1)[:, None]
        size = torch.maximum(s.max() - s, s.abs())[:, None]
        square = size**2 + is_rounded * products.square().sum(-1, keepdim=True)
        square = square + (p**2 * square).sum()
        size = size + is_rounded * q[row].norm() * k[: row + 1].norm(dim=-1, keepdim=True) * head_dim**-0.5
        seen = v[: row + 1]
        o = (p * seen).sum(0)
        bound = o.abs() + (p * (1 + size + (p * size).sum()) * seen.abs()).sum(0)
        deviation = (o**2 / 3 + (p**2 * (1 + square) * seen**2).sum(0) / 3).sqrt()
        wide = 2.0**-24 * (4 + math.sqrt(keys)) * (p * seen.abs()).sum(0)
        expected = u * torch.minimum(bound, 6 * deviation) + wide
        torch.testing.assert_close(found.largest[0, 1, row].double(), expected, rtol=2e-3, atol=0)
        of_keys = p**2 * (1 + square) * seen.square().sum(-1, keepdim=True)
        terms = min(
            (of_keys.sum() ** 2 / of_keys.square().sum()).item(), (deviation**2).sum() ** 2 / (deviation**4).sum()
        )
        rms = u * deviation.square().mean().sqrt() * (1 + 6 / (2 * terms) ** 0.5)
        limit = expected.square().mean().sqrt()
        expected_rms = torch.minimum(rms + wide.square().mean().sqrt(), limit)
        torch.testing.assert_close(found.rms[0, 1, row, 0].double(), expected_rms, rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    ("suite", "draw"),
    [
        *(("seed", 0), ("train-packed", 0), ("decode-fp8", 37), ("moe-train", 571)),
        pytest.param("moe-train", 0, marks=pytest.mark.exhaustive),
    ],
)
def test_the_judge_takes_right_kernels_of_the_smallest_case_of_a_suite(suite, draw):
    """In draw 571 the framework's largest error of dw_down is lucky: a right kernel's is 2.5 times as large.

    In draw 37 of fp8 the framework's run was off in a whole row, while it rounded the caches' scales.
    """
    with torch.no_grad():
        found = simulation.OfSuite(suite).judge(simulation.SEED + draw)
    for of_element, of_row, refused in found.values():
        assert 0.05 < of_element < 1.0
        assert of_row < 1.0
        assert not refused


def test_errors_add_up_as_roundings_do():
    low = Format.of(torch.float16)
    assert low == (2.0**-11, 2.0**-25)
    x = Estimate.exact(torch.tensor([[3.0, -4.0]])).rounded(low)
    r3, r4 = 3 * 2.0**-11 + 2.0**-25, 4 * 2.0**-11 + 2.0**-25
    assert x.bound.tolist() == [[r3, r4]]
    assert torch.allclose(x.variance, torch.tensor([[r3**2 / 3, r4**2 / 3]]))
    y = x.multiplied(torch.tensor([[2.0], [1.0]]))
    assert y.value.item() == 2.0
    assert y.bound.item() == pytest.approx(2 * r3 + r4)
    assert y.variance.item() == pytest.approx((4 * r3**2 + r4**2) / 3)
    assert y.wide.item() == pytest.approx(WIDE * (4 + math.sqrt(2)) * 10)
    again = y.times(-3.0).plus(y)
    assert again.value.item() == -4.0
    assert again.bound.item() == pytest.approx(4 * y.bound.item())
    assert again.variance.item() == pytest.approx(10 * y.variance.item())
    scale = y.scale(1.0)
    assert scale.largest.item() == pytest.approx(min(y.bound.item(), 6 * y.variance.sqrt().item()) + y.wide.item())
    many = Estimate(torch.zeros(1, 64), torch.ones(1, 64), torch.full((1, 64), 1e-4), torch.zeros(1, 64))
    assert many.scale(32.0).largest[0, 0].item() == pytest.approx(0.06)
    assert many.scale(32.0).rms.item() == pytest.approx(0.01 * (1 + 6 / 8))
    assert many.scale(1e9).rms.item() == pytest.approx(0.01 * (1 + 6 / math.sqrt(128)))  # no more than a row has
    many.bound *= 100
    many.variance[0, 0] = 1.0  # a channel of outliers: its own error is nearly all that a row has
    few = 1.0063**2 / (1 + 63e-8)
    assert many.scale(1e9).rms.item() == pytest.approx((1.0063 / 64) ** 0.5 * (1 + 6 / (2 * few) ** 0.5), rel=1e-4)
    assert independent_terms(torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])).tolist() == [[3.0], [1.0]]


@pytest.mark.parametrize("case", simulation.FORWARD[:2] + simulation.FORWARD[-1:], ids=lambda case: case.suite)
def test_no_right_kernel_fails(case):
    found = simulation.forward_shares(case, 400 if case.suite == "seed" else 40, ("fused", "eager"), 1)
    for of_element, of_row in found.values():
        assert float(of_element.max()) < 1.0
        assert float(of_row.max()) < 1.0
    assert 0.2 < float(found["fused"][0].max()) < 0.75  # and no more is allowed than is needed


@pytest.mark.parametrize(
    "name",
    all_but(
        [f"{draw}, {name}" for draw in simulation.STRESS_DRAWS for name in simulation.STRESSED],
        "outliers, attention, bf16",
        "outliers, gradients, fp16",
        "peaked_rows, gradients, bf16",
    ),
)
def test_no_right_kernel_fails_in_a_stress_draw(name):
    """Rows of outliers were at up to 1.5 of what is allowed, one of dk at 1.35, an element of dv at 1.18."""
    draw, _, name = name.partition(", ")
    case = dataclasses.replace(simulation.STRESSED[name], stress=draw)
    shares = simulation.forward_shares if name.startswith("attention") else simulation.backward_shares
    for seed in (2, 22):
        with torch.no_grad():
            found = shares(case, 2, ("fused", "eager"), simulation.SEED + seed)
        for of_element, of_row in found.values():
            assert 0.0 < float(of_element.max()) < 1.0
            assert 0.0 < float(of_row.max()) < 1.0


def test_no_right_gradients_fail():
    for case, draws in ((simulation.BACKWARD[2], 200), (simulation.BACKWARD[1], 1)):
        for of_element, of_row in simulation.backward_shares(case, draws, ("fused", "eager"), 1).values():
            assert 0.2 < float(of_element.max()) < 1.0
            assert float(of_row.max()) < 1.0


@pytest.mark.parametrize("suite", all_but(simulation.EXPERT_CASES, "moe-decode", "moe-train"))
def test_no_right_experts_fail(suite):
    for of_element, of_row in simulation.expert_shares(suite, 2, 1).values():
        assert 0.1 < float(of_element.max()) < 1.0
        assert float(of_row.max()) < 1.0


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", simulation.FORWARD, ids=lambda case: case.suite)
def test_no_right_kernel_fails_in_many_draws(case):
    scores = case.group * case.seqlen_q * case.seqlen_k
    draws, at_once = min(20_000, 2**24 // scores), max(1, 2**21 // scores)
    for first in range(0, draws, at_once):
        for of_element, of_row in simulation.forward_shares(case, at_once, ("fused", "eager"), first).values():
            assert max(float(of_element.max()), float(of_row.max())) <= 1.0


def test_faults_of_late_rows_exceed_what_is_allowed():
    """Elements of the last rows of 16,384 are hundreds of times smaller than those of the first."""
    found = simulation.late_rows("bf16", 64, 16384, 16, 1)
    assert 0.1 < max(found["right"]) < 0.5
    assert min(found["misses keys 0 to 63"]) > 4
    assert min(found["misses keys 0 to 7"]) > 1.5
    assert min(found["last row 10 % too large"]) > 3
    assert min(found["last row 3 % too large"]) > 1


def test_sequences_and_pages_have_the_scale_of_the_same_attention():
    operator: Any = load_operator("attention_varlen")
    problem = operator.parse_case({**SMALL["attention_varlen"], "dtype": "bf16"})
    inputs = operator.make_inputs(problem, seed=1, device="cpu")
    (scale,) = operator.error_scale(problem, inputs)
    q, k, v = (inputs[name][5:].transpose(0, 1)[None] for name in "qkv")
    last = forward_scale(q, k, v, causal=True, softmax_scale=None)
    torch.testing.assert_close(scale.largest[5:], last.largest[0].transpose(0, 1))
    operator = load_operator("attention_cache")
    problem = operator.parse_case({**SMALL["attention_cache"], "dtype": "bf16"})
    inputs = operator.make_inputs(problem, seed=1, device="cpu")
    (scale,) = operator.error_scale(problem, inputs)
    pages = inputs["page_table"][1].tolist()
    k, v = (torch.cat([inputs[f"{n}_cache"][page] for page in pages]).transpose(0, 1)[None] for n in "kv")
    one = forward_scale(inputs["q"][1:], k, v, causal=False, softmax_scale=None)
    torch.testing.assert_close(scale.largest[1:], one.largest)


def test_chunks_of_rows_and_heads_change_nothing(monkeypatch):
    from flashmoe_science.operators.attention_scale import scale as module

    operator: Any = load_operator("attention_train")
    problem = operator.parse_case({**SMALL["attention_train"], "heads_kv": 1, "dtype": "bf16"})
    inputs = operator.make_inputs(problem, seed=1, device="cpu")
    whole = operator.error_scale(problem, inputs)
    monkeypatch.setattr(module, "_CHUNK_SCORES", 7 * 2 * 24)
    monkeypatch.setattr(reference, "_CHUNK_SCORES", 1)
    for one, other in zip(whole, operator.error_scale(problem, inputs), strict=True):
        torch.testing.assert_close(other.largest, one.largest, rtol=1e-2, atol=0)
    (_, dq, *_), (_, dq_by_chunks, *_) = whole, operator.error_scale(problem, inputs)
    torch.testing.assert_close(dq_by_chunks.rms, dq.rms)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("moe", {"shared_experts": 2, "shared_inter": 32, "shared_weights": "fp32"}),
        ("moe_backward", {"bias_gate_up": True, "bias_down": True, "interleaved": True}),
        ("moe_backward", {"activation": "relu2"}),
        ("expert_parallel", {"tokens": 20}),
    ],
)
def test_what_is_right_of_experts_in_parts_of_their_pairs_is_the_same(name, more, monkeypatch):
    """Of the first product of three pairs at a time; what a lower precision gives has the same bits."""
    from flashmoe_science.moe import reference as experts
    from flashmoe_science.operators import base, moe_scale

    operator: Any = load_operator(name)
    problem = operator.parse_case({**SMALL[name], "tokens": 40, "dtype": "bf16", **more})
    inputs = operator.make_inputs(problem, seed=1, device="cpu")
    inputs["topk_ids"][inputs["topk_ids"] == 2] = -1  # an expert without a token

    def answers():
        exact, low = (parts(each(problem, inputs)) for each in (operator.exact, operator.low_precision))
        budgets = [operator.error_budget(*each) for each in zip(exact, low, strict=True)]
        return exact, low, operator.error_scale(problem, inputs), budgets

    whole = answers()
    for module, elements in ((experts, 3 * 96), (moe_scale, 3 * 96), (base, 100)):
        monkeypatch.setattr(module, "_ELEMENTS_AT_ONCE", elements)
    in_parts = answers()
    torch.testing.assert_close(in_parts[0], whole[0], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(in_parts[1], whole[1], rtol=0, atol=0)
    torch.testing.assert_close(in_parts[2], whole[2], rtol=1e-3, atol=0)
    assert in_parts[3] == pytest.approx(whole[3], rel=1e-12)


def test_products_of_experts_are_small_however_many_pairs_they_have(monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    from flashmoe_science.moe import reference as experts
    from flashmoe_science.operators import moe_scale

    rows: set[int] = set()

    class Rows(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == 96:
                rows.add(out.shape[0])
            return out

    for module in (experts, moe_scale):
        monkeypatch.setattr(module, "_ELEMENTS_AT_ONCE", 3 * 96)
    for name in ("moe", "moe_backward"):
        operator: Any = load_operator(name)
        problem = operator.parse_case({**SMALL[name], "tokens": 200, "dtype": "bf16"})
        inputs = operator.make_inputs(problem, seed=1, device="cpu")
        with Rows():
            operator.exact(problem, inputs)
            operator.error_scale(problem, inputs)
    assert max(rows - {64}) == 3  # 64: transposed weights


def test_what_is_below_any_square_in_fp32_is_0_to_a_right_kernel():
    """Beside a sink scores of -120 leave 1e-52, of which fp32 makes 0, and the variance of an error of 1e-20, too."""
    operator: Any = load_operator("attention_backward")
    problem = operator.parse_case({**SMALL["attention_backward"], "dtype": "bf16", "sinks": "fp32"})
    small, inputs = operator.stressed(problem, "large_logits", seed=1, device="cpu")
    expected = find_expected(operator, small, inputs, None)
    tensors = (inputs[name] for name in ("q", "k", "v", "do"))
    found = reference.attention_backward(*tensors, causal=True, sinks=inputs["sinks"], dtype=torch.float32)
    assert expected[0].exact[0, 0, 1].abs().max().item() < 1e-48  # dq of a row whose scores are all low
    for name, wanted in zip("qkv", expected, strict=True):
        accuracy, fault = judge(found[name].bfloat16(), wanted)
        assert accuracy is not None
        assert not fault


def test_a_row_that_sees_no_key_is_exactly_zero():
    q, k, v = (torch.randn(1, 1, size, 16).bfloat16() for size in (4, 2, 2))
    scale = forward_scale(q, k, v, causal=True, softmax_scale=None)
    assert scale.largest[0, 0, :2].max().item() < 1e-38  # the smallest number that bf16 has
    assert scale.largest[0, 0, 2:].min().item() > 0
    empty = forward_scale(q, k[:, :, :0], v[:, :, :0], causal=False, softmax_scale=None)
    assert empty.largest.abs().max().item() == 0.0


def test_an_eager_run_is_right_where_q_times_the_scale_is_rounded():
    """Few keys and a scale that is no power of two: 4 of 100 draws failed, by up to 1.34 times what is allowed."""
    operator: Any = load_operator("attention")
    table = {"batch": 1, "heads": 64, "heads_kv": 1, "seqlen_q": 3, "head_dim": 512, "dtype": "bf16", "causal": True}
    problem = operator.parse_case({**table, "sinks": "bf16"})
    for seed in range(60):
        inputs = operator.make_inputs(problem, seed=seed, device="cpu")
        exact, low = operator.exact(problem, inputs), operator.low_precision(problem, inputs)
        (scale,) = operator.error_scale(problem, inputs)
        assert float(find_shares(low, exact, Allowed(*scale)).max()) < 0.9


def test_products_are_coarse_within_a_scale_alone():
    def fails() -> None:
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        raise ValueError("odd")

    before = torch.backends.cuda.matmul.fp32_precision
    with pytest.raises(ValueError, match="odd"):
        coarse_products(fails)()
    assert torch.backends.cuda.matmul.fp32_precision == before != "tf32"
