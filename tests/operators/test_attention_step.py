"""Attention in a step of training, for the harness: four outputs, work, baselines, and the suite."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from flashmoe_science import InputError, flash_attention
from flashmoe_science.attention.reference import attention_backward
from flashmoe_science.operators.attention_step import OPERATOR, attention_step
from flashmoe_science.operators.baselines.attention_backward import STEP_BASELINES, SdpaStep
from flashmoe_science.proof.measure.correctness import WrongResultError, check_case

TABLE = {"batch": 2, "heads": 4, "heads_kv": 2, "seqlen_q": 40, "head_dim": 16, "dtype": "fp16", "causal": True}
WINDOW = {**TABLE, "window": [9, 0], "seqlen_k": 56, "head_dim_v": 24}
OUTPUTS = ("o", "dq", "dk", "dv")


def check(entry, table):
    operator: Any = OPERATOR
    problem = OPERATOR.parse_case(table)
    return check_case(operator, entry, problem, device="cpu", seed=3, deterministic=True)


@pytest.mark.parametrize("table", [TABLE, WINDOW], ids=["causal", "window"])
def test_an_honest_step_passes(table):
    problem = OPERATOR.parse_case(table)
    assert OPERATOR.parse_case(OPERATOR.as_table(problem)) == problem
    accuracy = check(attention_step, table)
    assert tuple(accuracy.outputs) == OUTPUTS
    assert 0 < accuracy.share <= 1


@pytest.mark.parametrize("number", range(4), ids=OUTPUTS)
def test_each_output_is_judged(number):
    def step(*tensors, **options):
        found = list(attention_step(*tensors, **options))
        found[number] = found[number] * 1.02
        return tuple(found)

    with pytest.raises(WrongResultError, match=f"the first call, {OUTPUTS[number]}: "):
        check(step, WINDOW)


def test_a_window_that_is_not_asked_for_shows():
    def without(q, k, v, do, *, causal, softmax_scale, window):
        assert window == (9, -1)
        return attention_step(q, k, v, do, causal=causal, softmax_scale=softmax_scale, window=(-1, -1))

    with pytest.raises(WrongResultError, match="the first call, o: "):
        check(without, WINDOW)


def test_work_is_three_and_a_half_times_that_of_the_forward():
    problem = OPERATOR.parse_case(TABLE)
    work = OPERATOR.work(problem)
    assert work.flops == 3.5 * problem.forward.flops
    queries, keys = 2 * 4 * 40 * 16, 2 * 2 * 40 * 16
    assert work.bytes == 2 * (4 * queries + 4 * keys)


def test_wrong_windows_are_refused():
    for window, message in (([3], "window must be two integers"), (3, "window: expected a list, got 3")):
        with pytest.raises(InputError, match=message):
            OPERATOR.parse_case({**TABLE, "window": window})


@pytest.mark.triton
def test_a_step_launches_the_kernels_of_both_plans():
    from flashmoe_science.gpu.specs import SPECS

    table = {**TABLE, "seqlen_q": 4096, "head_dim": 128, "dtype": "bf16"}
    for change, first, last in (
        ({}, "_forward_sm90_kernel", "_finish_dq_kernel"),
        ({"window": [1023, 0]}, "_forward_features_sm90_kernel", "_finish_dq_kernel"),
        ({"dtype": "fp32"}, "_forward_kernel", "_backward_q_kernel"),
    ):
        problem = OPERATOR.parse_case({**table, **change})
        names = [kernel.source.name for kernel in OPERATOR.launches("attention_step", problem, SPECS["H200"])]
        assert (names[0], names[-1]) == (first, last)
    jobs = OPERATOR.compile_jobs("attention_step", [OPERATOR.parse_case(table)] * 2, ["H200", "H100"])
    names = [job.source.name for job in jobs]
    assert len(names) == len(set(names)) == 4
    with_products = {"_forward_sm90_kernel", "_prepare_backward_kernel", "_backward_sm90_kernel"}
    assert {job.source.name for job in jobs if job.instruction} == with_products


def test_sdpa_runs_both_and_follows_its_inputs():
    """On a CPU, whose backend is another."""
    problem = OPERATOR.parse_case({**TABLE, "heads_kv": 4, "dtype": "fp32", "softmax_scale": 0.2})
    inputs = OPERATOR.make_inputs(problem, seed=3, device="cpu")
    baseline = SdpaStep("sdpa-cpu", SDPBackend.FLASH_ATTENTION, "FlashAttentionForCpu", ())
    with torch.no_grad(), baseline.context():
        call = OPERATOR.bind(baseline.load(), problem, inputs)
        call()
        for name, tensor in OPERATOR.make_inputs(problem, seed=4, device="cpu").items():
            inputs[name].copy_(tensor)
        found = call()
    for mine, exact in zip(found, OPERATOR.exact(problem, inputs), strict=True):
        assert not mine.requires_grad
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-5)
    windowed = OPERATOR.parse_case({**TABLE, "window": [9, 0]})
    assert STEP_BASELINES["sdpa-cudnn"].refusal(windowed) == "it has no sliding window"
    assert STEP_BASELINES["fa4"].refusal(windowed) is None


def test_flash_attention_4_runs_both(monkeypatch):
    def forward(q, k, v, *, softmax_scale, causal, window_size_left, window_size_right, return_lse):
        assert (causal, window_size_left, window_size_right, return_lse) == (True, 9, None, True)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o, lse = flash_attention(q, k, v, causal=True, window=(9, 0), softmax_scale=softmax_scale, return_lse=True)
        return o.transpose(1, 2), lse, None

    def backward(q, k, v, o, do, lse, *, softmax_scale, causal, window_size_left, window_size_right, deterministic):
        assert deterministic
        assert (window_size_left, window_size_right) == (9, None)
        q, k, v, do = (x.transpose(1, 2) for x in (q, k, v, do))
        found = attention_backward(q, k, v, do, softmax_scale=softmax_scale, causal=causal, window=(9, 0))
        return tuple(found[name].to(q.dtype).transpose(1, 2) for name in "qkv")

    module: Any = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    for package in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    problem = OPERATOR.parse_case(WINDOW)
    inputs = OPERATOR.make_inputs(problem, seed=3, device="cpu")
    found = OPERATOR.bind(STEP_BASELINES["fa4-deterministic"].load(), problem, inputs)()
    for mine, exact in zip(found, OPERATOR.exact(problem, inputs), strict=True):
        assert mine.shape == exact.shape
        assert (mine.double() - exact).abs().max() < 0.02
