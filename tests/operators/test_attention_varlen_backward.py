"""Gradients of packed sequences, for the harness: the public function, cases, work, baselines, and the suite."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from flashmoe_science import InputError, UnsupportedError, flash_attention_varlen, flash_attention_varlen_backward
from flashmoe_science.gpu.specs import find_gpu
from flashmoe_science.operators.attention_varlen_backward import OPERATOR
from flashmoe_science.operators.baselines.attention_varlen_backward import BASELINES
from flashmoe_science.proof.subject.suites import load_suite

ROOT = Path(__file__).parents[2]
TABLE = {"lengths": [5, 0, 17, 3], "heads": 4, "heads_kv": 2, "head_dim": 16, "dtype": "fp32"}
TABLES = {
    "full": TABLE,
    "causal": {**TABLE, "causal": True, "softmax_scale": 0.5},
    "more-keys": {**TABLE, "lengths_k": [9, 4, 20, 0], "head_dim_v": 8, "causal": True},
    "window": {**TABLE, "causal": True, "window": [3, -1]},
    "both-sides": {**TABLE, "window": [2, 4]},
}


@pytest.mark.parametrize("name", TABLES)
def test_a_bound_call_gives_the_exact_gradients(name):
    problem = OPERATOR.parse_case(TABLES[name])
    assert OPERATOR.parse_case(OPERATOR.as_table(problem)) == problem
    inputs = OPERATOR.make_inputs(problem, seed=3, device="cpu")
    module, _, attribute = OPERATOR.entry_points()["flash_attention_varlen_backward"].partition(":")
    found = OPERATOR.bind(getattr(importlib.import_module(module), attribute), problem, inputs)()
    exact, low = OPERATOR.exact(problem, inputs), OPERATOR.low_precision(problem, inputs)
    for mine, right, rough in zip(found, exact, low, strict=True):
        assert right.dtype == torch.float64
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rough.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [(-1, -1), (4, 0)])
def test_the_public_function_gives_what_autograd_gives(window):
    make = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(22, heads, 16, generator=make) for heads in (4, 2, 2, 4))
    dlse = torch.randn(4, 22, generator=make)
    starts = torch.tensor([0, 5, 5, 20], dtype=torch.int32)  # two tokens are in no sequence
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    given = (starts, starts, 15, 15)
    o, lse = flash_attention_varlen(*leaves, *given, causal=True, window=window, return_lse=True)  # type: ignore[call-overload] # tensors and lengths
    expected = torch.autograd.grad((o, lse), leaves, (do, dlse))
    found = flash_attention_varlen_backward(
        q, k, v, o.detach(), lse.detach(), do, *given, dlse=dlse, causal=True, window=window
    )
    for mine, right in zip(found, expected, strict=True):
        assert torch.equal(mine, right)
        assert not mine[20:].any()


def test_wrong_arguments_of_the_public_function_are_refused_by_name():
    x, lse = torch.ones(6, 2, 8), torch.ones(2, 6)
    starts = torch.tensor([0, 6], dtype=torch.int32)
    right: dict[str, Any] = {
        "q": x, "k": x, "v": x, "o": x, "lse": lse, "do": x, "cu_seqlens_q": starts, "cu_seqlens_k": starts,
        "max_seqlen_q": 6, "max_seqlen_k": 6,
    }  # fmt: skip
    flash_attention_varlen_backward(**right)
    for change, message in (
        ({"lse": lse.t()}, r"lse must have shape \[H, T\] = \[2, 6\], got \[6, 2\]"),
        ({"do": x[:5]}, r"do must have shape \[T, H, DV\] = \[6, 2, 8\], got \[5, 2, 8\]"),
        ({"q": x[None]}, "q must have 3 dimensions"),
        ({"cu_seqlens_q": starts.long()}, "cu_seqlens_q must be int32, got torch.int64"),
        ({"cu_seqlens_q": [0, 6]}, "cu_seqlens_q must be a torch.Tensor, got list"),
        ({"max_seqlen_q": 5}, "max_seqlen_q must be at least 6"),
        ({"v": x[:5]}, "v must have as many tokens as k, 6, got 5|v must have shape"),
        ({"kernel": "fastest"}, "kernel must be auto or one of"),
        ({"dlse": 1.0}, "dlse must be a torch.Tensor or None, got float"),
    ):
        with pytest.raises(InputError, match=message):
            flash_attention_varlen_backward(**{**right, **change})
    with pytest.raises(UnsupportedError):
        flash_attention_varlen_backward(**right, kernel="backward_gluon_sm90")


def test_work_is_five_products_a_visible_score():
    problem = OPERATOR.parse_case({**TABLES["more-keys"], "dtype": "bf16"})
    work = OPERATOR.work(problem)
    pairs = 5 * 4 + 5 * 6 // 2 + 17 * 3 + 17 * 18 // 2  # the last sequence has no keys
    assert work.flops == 2 * (3 * 16 + 2 * 8) * 4 * pairs
    assert work.bytes == 2 * (25 * 4 + 33 * 2) * 24 * 2 + 4 * 25 * 4
    assert problem.describe().endswith("_causal_backward")


@pytest.mark.parametrize("name", ["fa4", "fa4-deterministic"])
def test_fa4_runs_its_forward_before_and_is_asked_for_packed_gradients(name, monkeypatch):
    seen: dict[str, Any] = {}

    def forward(q, k, v, *, return_lse, **options):
        seen["forward"] = options
        return "o", "lse"

    def backward(q, k, v, o, do, lse, **options):
        seen["backward"] = {**options, "saved": (o, lse)}
        return q, k, v, None

    module = types.SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.setattr(importlib, "import_module", lambda _: module)
    problem = OPERATOR.parse_case({**TABLES["window"], "softmax_scale": 0.5, "dtype": "bf16"})
    inputs = OPERATOR.make_inputs(problem, seed=0, device="cpu")
    assert BASELINES[name].refusal(problem) is None
    call = OPERATOR.bind(BASELINES[name].load(), problem, inputs)
    assert "backward" not in seen
    assert len(call()) == 3
    assert seen["backward"]["saved"] == ("o", "lse")
    assert seen["backward"]["deterministic"] is name.endswith("deterministic")
    for which in ("forward", "backward"):
        assert (seen[which]["max_seqlen_q"], seen[which]["causal"]) == (17, True)
        assert seen[which]["cu_seqlens_k"].tolist() == [0, 5, 5, 22, 25]
        assert (seen[which]["window_size_left"], seen[which]["window_size_right"]) == (3, None)
    assert BASELINES["torch-varlen"].refusal(problem) == "it is not called with a sliding window"


def test_the_suite_is_what_its_seed_draws_and_holds_what_it_says():
    path = ROOT / "src" / "flashmoe_science" / "suites" / "train-packed.toml"
    text = path.read_text(encoding="utf-8")
    command = [sys.executable, str(ROOT / "tools" / "draw_varlen_suite.py"), "train-packed"]
    seed = text.partition("seed ")[2].partition(".\n")[0]
    drawn = subprocess.run([*command, seed], capture_output=True, text=True, check=True)
    assert drawn.stdout == text
    cases: list[Any] = [case.problem for case in load_suite("train-packed").cases]
    assert len(cases) == 18
    assert [case.planned.window for case in cases[-2:]] == [(4095, -1), (127, -1)]
    assert {case.planned.group for case in cases} == {1, 2, 4, 7, 8, 16}
    assert {(case.planned.head_dim, case.planned.head_dim_v) for case in cases} == {
        (64, 64), (128, 128), (192, 128), (256, 256),
    }  # fmt: skip
    assert max(case.longest[0] for case in cases) > 15000
    for case in cases:
        assert 2 * OPERATOR.work(case).bytes < 20e9


@pytest.mark.exhaustive
@pytest.mark.triton
def test_the_suite_passes_gate_build_on_hopper():
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    problems = [case.problem for case in load_suite("train-packed").cases]
    for job in OPERATOR.compile_jobs("flash_attention_varlen_backward", problems, ["H100"]):
        assert job.run().problems == (), job.label


@pytest.mark.triton
def test_hoppers_launches_follow_the_tokens():
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    problem: Any = load_suite("train-packed").cases[4].problem
    for subject in ("flash_attention_varlen_backward", "varlen_backward_gluon_sm90"):
        plan = OPERATOR.plan(subject, problem, find_gpu("H100"))
        assert plan.kernel == "backward_gluon_sm90"
        kernels = OPERATOR.launches(subject, problem, find_gpu("H100"))
        names = [kernel.source.name for kernel in kernels]
        assert names == [launch.pattern for launch in plan.launches]
        assert [kernel.grid for kernel in kernels] == [launch.grid for launch in plan.launches]
        finish = plan.launches[-1].grid[0]
        most = 2 * problem.planned.heads * (problem.tokens[0] // 64 + len(problem.lengths))
        assert names[-1] == "_finish_dq_kernel"
        assert most // 2 <= finish <= most
    other = OPERATOR.plan("varlen_backward_triton", problem, find_gpu("H100"))
    assert [launch.pattern for launch in other.launches] == [kernel.source.name for kernel in OPERATOR.prepare(other)]
