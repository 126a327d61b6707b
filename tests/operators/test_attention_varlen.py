"""Packed sequences, for the harness: cases, work, baselines, and the suite."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from flashmoe_science import InputError
from flashmoe_science.operators.attention_varlen import OPERATOR
from flashmoe_science.operators.baselines.attention_varlen import BASELINES
from flashmoe_science.proof.subject.suites import load_suite

from ..moved import assert_answers_wholly

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
def test_a_bound_call_gives_the_exact_answer(name):
    problem = OPERATOR.parse_case(TABLES[name])
    assert OPERATOR.parse_case(OPERATOR.as_table(problem)) == problem
    inputs = OPERATOR.make_inputs(problem, seed=3, device="cpu")
    module, _, attribute = OPERATOR.entry_points()["flash_attention_varlen"].partition(":")
    o = OPERATOR.bind(getattr(importlib.import_module(module), attribute), problem, inputs)()
    exact = OPERATOR.exact(problem, inputs)
    assert exact.dtype == torch.float64
    assert (o.double() - exact).abs().max() <= OPERATOR.error_budget(exact, OPERATOR.low_precision(problem, inputs))


def test_sdpa_is_a_baseline_where_it_can():
    problem, baseline = OPERATOR.parse_case(TABLES["causal"]), BASELINES["sdpa"]
    inputs = OPERATOR.make_inputs(problem, seed=3, device="cpu")
    o = OPERATOR.bind(baseline.load(), problem, inputs)()
    torch.testing.assert_close(o.double(), OPERATOR.exact(problem, inputs), rtol=1e-5, atol=1e-6)
    other = OPERATOR.parse_case(TABLES["more-keys"])
    assert baseline.refusal(other) == "its causal mask is aligned top-left where lengths differ"
    assert BASELINES["fa3"].refusal(other) == "it serves fp16 and bf16 only"


@pytest.mark.parametrize("heads", [1, 4])
def test_sdpa_answers_to_the_values_that_it_was_bound_with(heads):
    assert_answers_wholly(OPERATOR, BASELINES["sdpa"], {**TABLE, "heads": heads, "heads_kv": 1}, follows=False)


@pytest.mark.parametrize("name", ["fa2", "fa4"])
def test_packages_are_called_with_packed_tensors_and_the_longest_lengths(name, monkeypatch):
    seen: dict[str, Any] = {}

    # FlashAttention-4 has an argument more in the fourth place: qv.
    def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, **options):
        seen.update(options, starts=(cu_seqlens_q.tolist(), cu_seqlens_k.tolist()), shapes=(q.shape, k.shape, v.shape))
        return q, None

    module = types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setattr(importlib, "import_module", lambda _: module)
    problem = OPERATOR.parse_case({**TABLES["more-keys"], "dtype": "bf16"})
    inputs = OPERATOR.make_inputs(problem, seed=0, device="cpu")
    assert OPERATOR.bind(BASELINES[name].load(), problem, inputs)() is inputs["q"]
    assert (seen["max_seqlen_q"], seen["max_seqlen_k"], seen["causal"]) == (17, 20, True)
    assert seen["starts"] == ([0, 5, 5, 22, 25], [0, 9, 13, 33, 33])
    assert seen["shapes"] == ((25, 4, 16), (33, 2, 16), (33, 2, 8))


@pytest.mark.parametrize("options", [("is_causal",), ("window_size", "enable_gqa")])
def test_torchs_own_is_called_as_its_version_wants(options, monkeypatch):
    seen: dict[str, Any] = {}
    known = ", ".join(f"{name}=None" for name in options)
    space: dict[str, Any] = {"seen": seen}
    exec(f"def varlen_attn(q, k, v, a, b, m, n, *, scale=None, {known}): seen.update(locals()); return q", space)
    monkeypatch.setattr(importlib, "import_module", lambda _: types.SimpleNamespace(**space))
    problem = OPERATOR.parse_case({**TABLES["causal"], "dtype": "bf16"})
    OPERATOR.bind(BASELINES["torch-varlen"].load(), problem, OPERATOR.make_inputs(problem, seed=0, device="cpu"))()
    assert (seen["m"], seen["n"], seen["scale"]) == (17, 17, 0.5)
    if "is_causal" in options:
        assert seen["is_causal"] is True
    else:
        assert (seen["window_size"], seen["enable_gqa"]) == ((-1, 0), True)


def test_work_is_what_has_to_be_read():
    work = OPERATOR.work(OPERATOR.parse_case({**TABLES["more-keys"], "dtype": "bf16"}))
    pairs = 5 * 4 + 5 * 6 // 2 + 17 * 3 + 17 * 18 // 2  # the last sequence has no keys
    assert work.flops == 2 * (16 + 8) * 4 * pairs
    assert work.bytes == (25 * 4 + 33 * 2) * 24 * 2 + 8 * 5
    assert work.tokens == 25


def test_a_wrong_case_is_refused():
    for change, message in (
        ({"lengths": [5, 2.0]}, r"lengths must be a list of integers, got \[5, 2.0\]"),
        ({"lengths": []}, r"lengths must be integers from 0 on, one at least, got \[\]"),
        ({"lengths": [3, -1]}, "lengths must be integers from 0 on"),
        ({"lengths_k": [5]}, "lengths_k must have as many as lengths, 4, got 1"),
    ):
        with pytest.raises(InputError, match=message):
            OPERATOR.parse_case({**TABLE, **change})


def test_the_suite_is_what_its_seed_draws():
    path = ROOT / "src" / "flashmoe_science" / "suites" / "varlen.toml"
    text = path.read_text(encoding="utf-8")
    seed = text.partition("seed ")[2].partition(".\n")[0]
    drawn = subprocess.run(
        [sys.executable, ROOT / "tools" / "draw_varlen_suite.py", "varlen", seed],
        capture_output=True,
        text=True,
        check=True,
    )
    assert drawn.stdout == text


def test_the_suite_holds_what_it_says_and_fits_a_gpu():
    cases: list[Any] = [case.problem for case in load_suite("varlen").cases]
    assert {case.planned.head_dim for case in cases} == {64, 128, 256}
    assert {case.planned.group for case in cases} == {1, 4}
    assert sum(case.planned.causal for case in cases) == len(cases) // 2
    for case in cases:
        mean, longest = case.tokens[0] / len(case.lengths), case.longest[0]
        assert 2.2 * sorted(case.lengths)[len(case.lengths) // 2] < longest
        assert 700 < mean < 16000
        assert 2 * OPERATOR.work(case).bytes < 20e9
        assert OPERATOR.refusal("varlen_gluon_sm90", case, "H200") is None
        assert 4 * longest**2 * 6 < 40e9  # scores of one head, and what eager attention makes of them


@pytest.mark.triton
def test_jobs_name_every_kernel_once():
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    problem: Any = load_suite("varlen").cases[2].problem
    jobs = OPERATOR.compile_jobs("flash_attention_varlen", [problem, problem], ["H200"])
    assert [job.label.partition(" ")[0] for job in jobs] == ["_order_sequences_kernel", "_forward_features_sm90_kernel"]
    outcome = jobs[0].run()
    assert outcome.problems == ()
