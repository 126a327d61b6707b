"""The gradients of attention, for the harness: cases, three outputs, work, baselines, and the suite."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

from flashmoe_science import InputError, flash_attention, flash_attention_backward
from flashmoe_science.attention.reference import attention_backward
from flashmoe_science.operators.attention_backward import OPERATOR, OUTPUTS
from flashmoe_science.operators.baselines.attention_backward import BASELINES, FlashAttention4, Sdpa
from flashmoe_science.proof.measure.arms import load_baseline
from flashmoe_science.proof.measure.correctness import WrongResultError, check_case
from flashmoe_science.proof.subject.suites import load_suite

TABLE = {"batch": 2, "heads": 4, "heads_kv": 2, "seqlen_q": 40, "seqlen_k": 56, "head_dim": 16, "dtype": "fp16"}
FEATURES: list[dict[str, Any]] = [
    {"causal": True, "softcap": 2.0, "sinks": "fp16"},
    {"causal": True, "alibi": "fp32", "window": [20, -1]},
    {"alibi": "bf16", "bias": "fp16"},
]
TABLES = [TABLE, {**TABLE, "causal": True, "head_dim_v": 24, "softmax_scale": 0.3}, {**TABLE, "dtype": "fp32"}]


@pytest.mark.parametrize("table", [*TABLES, *({**TABLE, **more} for more in FEATURES)], ids=str)
def test_an_honest_call_passes_and_each_gradient_is_judged(table):
    operator: Any = OPERATOR
    problem = OPERATOR.parse_case(table)
    assert OPERATOR.parse_case(OPERATOR.as_table(problem)) == problem
    accuracy = check_case(operator, flash_attention_backward, problem, device="cpu", seed=3, deterministic=True)
    assert tuple(accuracy.outputs) == OUTPUTS
    assert 0 < accuracy.share <= 1


@pytest.mark.parametrize("number", range(3), ids=OUTPUTS)
def test_one_wrong_gradient_is_found(number):
    def differentiate(*tensors, **options):
        found = list(flash_attention_backward(*tensors, **options))
        found[number] = found[number] * 1.02
        return tuple(found)

    operator: Any = OPERATOR
    with pytest.raises(WrongResultError, match=f"the first call, {OUTPUTS[number]}: "):
        check_case(operator, differentiate, OPERATOR.parse_case(TABLE), device="cpu", seed=3, deterministic=True)


def test_the_inputs_are_what_a_forward_leaves():
    problem = OPERATOR.parse_case(TABLES[1])
    inputs = OPERATOR.make_inputs(problem, seed=5, device="cpu")
    q, k, v = (inputs[name].double() for name in "qkv")
    o, lse = flash_attention(q.float(), k.float(), v.float(), causal=True, softmax_scale=0.3, return_lse=True)
    torch.testing.assert_close(inputs["o"].float(), o, rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(inputs["lse"], lse)
    assert inputs["o"].dtype == torch.float16
    assert inputs["lse"].dtype == torch.float32
    other = OPERATOR.make_inputs(problem, seed=6, device="cpu")
    assert not any(torch.equal(inputs[name], other[name]) for name in inputs)


def test_the_eager_run_is_that_of_all_heads_at_once():
    problem = OPERATOR.parse_case({**TABLES[1], "dtype": "fp32"})
    inputs = OPERATOR.make_inputs(problem, seed=5, device="cpu")
    with torch.no_grad():
        low = OPERATOR.low_precision(problem, inputs)
    for mine, exact in zip(low, OPERATOR.exact(problem, inputs), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-5)


def test_work_is_two_and_a_half_times_that_of_the_forward():
    problem = OPERATOR.parse_case({**TABLE, "causal": True})
    work = OPERATOR.work(problem)
    assert work.flops == 2.5 * problem.forward.flops
    queries, keys = 2 * 4 * 40 * 16, 2 * 2 * 56 * 16
    assert work.bytes == 2 * (4 * queries + 4 * keys) + 4 * 2 * 4 * 40
    assert work.tokens == 80


def test_who_serves_it_and_why_not():
    problem = OPERATOR.parse_case({**TABLE, "dtype": "bf16"})
    wide = OPERATOR.parse_case({**TABLE, "dtype": "bf16", "head_dim": 256, "head_dim_v": 256})
    for subject in ("flash_attention_backward", "backward_triton"):
        assert OPERATOR.refusal(subject, wide, "L4") is None
    assert OPERATOR.refusal("backward_gluon_sm90", problem, "H200") is None
    assert OPERATOR.refusal("backward_gluon_sm90", problem, "L4") == "it is for sm_90, this GPU is sm_89"
    wider = OPERATOR.parse_case({**TABLE, "dtype": "bf16", "head_dim": 520})
    assert OPERATOR.refusal("backward_gluon_sm90", wide, "H200") is None
    assert OPERATOR.refusal("backward_gluon_sm90", wider, "H200") == "no kernel serves head dimension 520"


@pytest.mark.triton
def test_jobs_name_every_kernel_once(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    tables = ({"seqlen_q": 512}, {"seqlen_q": 1024}, {"seqlen_q": 1024, "head_dim": 256, "head_dim_v": 256})
    problems = [OPERATOR.parse_case({**TABLE, "seqlen_k": 1024, "head_dim": 64, "dtype": "bf16", **t}) for t in tables]
    jobs = OPERATOR.compile_jobs("flash_attention_backward", problems, ["H200"])
    names = [job.label.partition(" ")[0] for job in jobs]
    assert [names.count(f"_backward{wide}_sm90_kernel") for wide in ("", "_wide")] == [1, 1]
    apart = OPERATOR.compile_jobs("backward_triton", problems[2:], ["H200"])  # dK and dV
    assert [job.label.partition(" ")[0] for job in apart].count("_backward_kv_kernel") == 2
    outcome = next(job for job in jobs if job.label.startswith("_backward_sm90_kernel")).run()
    assert outcome.problems == ()
    assert outcome.instructions["HGMMA"] > 0


def test_the_suite_holds_what_it_says():
    cases: list[Any] = [case.problem for case in load_suite("standard-backward").cases]
    kernels: dict[tuple[str, int], set[bool]] = {}
    for case in cases:
        for subject in OPERATOR.entry_points():
            served = OPERATOR.refusal(subject, case, "H200") is None
            kernels.setdefault((subject, case.forward.head_dim), set()).add(served)
    assert kernels == {(subject, dim): {True} for subject in OPERATOR.entry_points() for dim in (64, 128, 256)}
    speed_of_light: Any = BASELINES["matrix-product"]
    long = cases[-1]
    assert speed_of_light.refusal(long) is None
    assert speed_of_light._rows(long) == pytest.approx(long.flops / (2 * 8192**2), abs=64)


def test_features_are_served_and_have_the_call_without_them_beside():
    for case in (*load_suite("backward-features").cases, *load_suite("backward-bias").cases):
        problem: Any = case.problem
        assert problem.forward.features
        assert OPERATOR.refusal("flash_attention_backward", problem, "H100") is None
        assert BASELINES["without-features"].refusal(problem) is None
        assert BASELINES["sdpa-cudnn"].refusal(problem) is not None
    grouped: list[Any] = [case.problem for name in ("grouped", "long") for case in load_suite(f"{name}-backward").cases]
    assert {case.forward.group for case in grouped} == {4, 5, 6, 7, 8, 16}
    assert all(BASELINES["fa4"].refusal(case) is None for case in grouped)
    assert BASELINES["without-features"].refusal(grouped[0]) == "the case has no features"


# Baselines


def flex_in_eager_code(q, k, v, *, score_mod, block_mask, scale, enable_gqa):
    """Attend as FlexAttention means it, whose own gradients are for GPUs."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)) if enable_gqa else (k, v)
    places = [torch.arange(size).view(-1, *[1] * (3 - axis)) for axis, size in enumerate((*q.shape[:3], k.shape[2]))]
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = score_mod(scores, *places) if score_mod else scores
    return torch.softmax(scores.masked_fill(~block_mask(*places), -math.inf) if block_mask else scores, -1) @ v


@pytest.mark.parametrize("more", FEATURES, ids=str)
def test_flex_is_asked_for_the_features_that_it_serves(more, monkeypatch):
    """Against fp64; a sink is none of a score."""
    problem = OPERATOR.parse_case({**TABLE, "dtype": "fp32", **more, **({"sinks": ""} if "sinks" in more else {})})
    inputs = OPERATOR.make_inputs(problem, seed=3, device="cpu")
    module = SimpleNamespace(create_block_mask=lambda mask, *_sizes, device: mask)
    compiler = "flashmoe_science.operators.baselines.attention_backward.compile_flex"
    monkeypatch.setattr(compiler, lambda: (module, flex_in_eager_code))
    flex: Any = BASELINES["flex"]
    assert flex.refusal(problem) is None
    assert flex.refusal(OPERATOR.parse_case({**TABLE, "sinks": "fp16"})) == "it is not called with attention sinks"
    call = OPERATOR.bind(flex.load(), problem, inputs)
    for found, exact in zip(call(), OPERATOR.exact(problem, inputs), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("more", FEATURES, ids=str)
def test_the_call_without_features_has_none(more):
    problem = OPERATOR.parse_case({**TABLE, **more})
    inputs = OPERATOR.make_inputs(problem, seed=3, device="cpu")
    plain = OPERATOR.parse_case({**TABLE, "causal": more.get("causal", False)})
    found = OPERATOR.bind(BASELINES["without-features"].load(), problem, inputs)()
    for mine, exact in zip(found, OPERATOR.exact(plain, inputs), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-2, atol=1e-2)


def test_the_backward_of_sdpa_is_its_node_alone():
    """On a CPU, whose backend is another: one forward, and any number of backwards without autograd's engine."""
    table = {**TABLE, "heads_kv": 4, "seqlen_k": 40, "dtype": "fp32", "causal": True, "softmax_scale": 0.2}
    problem = OPERATOR.parse_case(table)
    inputs = OPERATOR.make_inputs(problem, seed=3, device="cpu")
    baseline = Sdpa("sdpa-cpu", SDPBackend.FLASH_ATTENTION, "FlashAttentionForCpu", ())
    with torch.no_grad(), baseline.context():
        call = OPERATOR.bind(baseline.load(), problem, inputs)
        first, again = call(), call()
    for found, repeated, exact in zip(first, again, OPERATOR.exact(problem, inputs), strict=True):
        assert not found.requires_grad
        assert torch.equal(found, repeated)
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    wrong = Sdpa("sdpa-cudnn", SDPBackend.FLASH_ATTENTION, "CudnnAttention", ())
    with pytest.raises(InputError, match="the backward must be that of CudnnAttention, got"):
        OPERATOR.bind(wrong.load(), problem, inputs)


def test_baselines_say_what_they_do_not_serve_and_what_they_were_asked_for():
    causal = OPERATOR.parse_case({**TABLE, "causal": True})
    assert BASELINES["sdpa-cudnn"].refusal(causal) == "its causal mask is aligned top-left where lengths differ"
    assert BASELINES["fa4"].refusal(causal) is None
    assert BASELINES["fa4"].refusal(OPERATOR.parse_case(TABLES[2])) == "it serves fp16 and bf16 only"
    assert BASELINES["sdpa-cudnn"].version().endswith(", not deterministic")
    assert next(iter(BASELINES)) == "sdpa-cudnn"
    assert load_baseline(BASELINES["fa4"]).status in ("unavailable", "loaded")


@pytest.fixture
def flash_attention_4(monkeypatch):
    """In place of the package: the same functions, of the reference."""
    calls: list[str] = []

    def forward(q, k, v, *, softmax_scale, causal, return_lse):
        calls.append("forward")
        assert return_lse
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o, lse = flash_attention(q, k, v, softmax_scale=softmax_scale, causal=causal, return_lse=True)
        return o.transpose(1, 2), lse, None, None, None

    def backward(q, k, v, o, do, lse, *, softmax_scale, causal, deterministic):
        calls.append(f"backward {deterministic}")
        q, k, v, do = (x.transpose(1, 2) for x in (q, k, v, do))
        assert lse.shape == q.shape[:3]
        assert o.shape == (q.shape[0], q.shape[2], q.shape[1], v.shape[3])
        found = attention_backward(q, k, v, do, softmax_scale=softmax_scale, causal=causal)
        return tuple(found[name].to(q.dtype).transpose(1, 2).contiguous() for name in "qkv")

    module = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    for package in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    return module, calls


@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_attention_4_runs_its_forward_once(flash_attention_4, deterministic):
    _, calls = flash_attention_4
    problem = OPERATOR.parse_case(TABLES[1])
    inputs = OPERATOR.make_inputs(problem, seed=3, device="cpu")
    name = "fa4-deterministic" if deterministic else "fa4"
    call = OPERATOR.bind(BASELINES[name].load(), problem, inputs)
    exact = OPERATOR.exact(problem, inputs)
    inputs["q"].zero_()  # it answers to its copies
    found = call()
    call()
    assert calls == ["forward", *[f"backward {deterministic}"] * 2]
    for mine, right in zip(found, exact, strict=True):
        assert mine.shape == right.shape
        assert (mine.double() - right).abs().max() < 0.02


def test_another_version_of_flash_attention_4_is_unavailable(flash_attention_4):
    module, _ = flash_attention_4
    del module._flash_attn_bwd
    with pytest.raises(ImportError, match="this version is called in another way"):
        FlashAttention4("fa4", deterministic=False).load()


# The public function


def test_the_public_function_is_what_autograd_gives():
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 11, 8), torch.randn(2, 2, 11, 12)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = flash_attention(*leaves, causal=True, softmax_scale=0.3, return_lse=True)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    expected = torch.autograd.grad((o, lse), leaves, (do, dlse))
    q, k, v, o, lse = (x.detach() for x in (q, k, v, o, lse))
    found = flash_attention_backward(q, k, v, o, lse, do, dlse=dlse, causal=True, softmax_scale=0.3)
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"o": torch.zeros(1, 2, 5, 7)}, r"o must have shape \[B, H, Sq, DV\] = \[1, 2, 5, 8\], got \[1, 2, 5, 7\]"),
        ({"lse": torch.zeros(1, 2, 6)}, r"lse must have shape \[B, H, Sq\] = \[1, 2, 5\], got \[1, 2, 6\]"),
        ({"lse": torch.zeros(1, 2, 5).double()}, "lse must be torch.float32 on cpu, got torch.float64"),
        ({"do": torch.zeros(1, 2, 5, 8).half()}, "do must be torch.float32 on cpu, got torch.float16"),
        ({"dlse": torch.zeros(1, 2, 4)}, "dlse must have shape"),
        ({"v": torch.zeros(2, 5, 8)}, "v must have 4 dimensions"),
        ({"q": None}, "q must be a torch.Tensor, got NoneType"),
        ({"v": np.zeros((1, 2, 5, 8))}, "v must be a torch.Tensor, got ndarray"),
        ({"o": None}, "o must be a torch.Tensor, got NoneType"),
        ({"do": np.zeros((1, 2, 5, 8))}, "do must be a torch.Tensor, got ndarray"),
        ({"dlse": 3.0}, "dlse must be a torch.Tensor or None, got float"),
        ({"causal": 1}, "causal must be True or False"),
        ({"kernel": "fastest"}, "kernel must be auto or one of"),
    ],
)
def test_the_public_function_refuses(change, message):
    given: dict[str, Any] = {name: torch.zeros(1, 2, 5, 8) for name in ("q", "k", "v", "o", "do")}
    given |= {"lse": torch.zeros(1, 2, 5), **change}
    with pytest.raises(InputError, match=message):
        flash_attention_backward(**given)


def test_rows_that_see_no_key_have_gradients_of_0():
    q, k, v, do = (torch.randn(1, 1, n, 8) for n in (6, 3, 3, 6))
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    dlse = torch.where(lse == -math.inf, math.nan, 1.0)
    dq, dk, dv = flash_attention_backward(q, k, v, o, lse, do, dlse=dlse, causal=True)
    assert not dq[:, :, :3].any()
    assert all(torch.isfinite(x).all() for x in (dq, dk, dv))
