"""Attention with a cache, for the harness: cases, work, baselines, and the suite."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit

from flashmoe_science import InputError
from flashmoe_science.attention.decode.contract import cache_problem_of
from flashmoe_science.operators.attention_decode import OPERATOR
from flashmoe_science.operators.baselines.attention_decode import BASELINES, FlashAttention
from flashmoe_science.operators.baselines.base import Bound
from flashmoe_science.proof.subject.suites import load_suite

from ..moved import assert_answers_wholly

TABLE = {"batch": 3, "heads": 4, "heads_kv": 2, "seqlen_k": 48, "head_dim": 16, "dtype": "fp32"}
MLA = {"heads_kv": 1, "head_dim": 576, "head_dim_v": 512, "shared_kv": True}
TABLES = [TABLE, {**TABLE, "page_size": 16}, {**TABLE, "seqlen_q": 3, "causal": True, "softmax_scale": 0.5}]
SHARED = {"heads_kv": 1, "head_dim": 24, "head_dim_v": 16, "shared_kv": True}
FP8_TABLES = [
    {**TABLE, "fp8": "all"}, {**TABLE, "fp8": "token", "page_size": 16}, {**TABLE, **SHARED, "fp8": "token"},
]  # fmt: skip


@pytest.mark.parametrize(
    "table", TABLES + FP8_TABLES, ids=["contiguous", "paged", "causal", "fp8", "fp8-token", "fp8-shared"]
)
def test_a_bound_call_gives_the_exact_answer(table):
    problem = OPERATOR.parse_case(table)
    assert OPERATOR.parse_case(OPERATOR.as_table(problem)) == problem
    inputs = OPERATOR.make_inputs(problem, seed=3, device="cpu")
    for name, entry in OPERATOR.entry_points().items():
        if name != "flash_attention_with_kv_cache":  # needs a GPU, or the interpreter
            continue
        module, _, attribute = entry.partition(":")
        function = getattr(__import__(module, fromlist=[attribute]), attribute)
        o = OPERATOR.bind(function, problem, inputs)()
        exact = OPERATOR.exact(problem, inputs)
        assert (o.double() - exact).abs().max() <= OPERATOR.error_budget(exact, OPERATOR.low_precision(problem, inputs))


@pytest.mark.parametrize("table", TABLES[:1] + TABLES[2:], ids=["contiguous", "causal"])
def test_sdpa_is_a_baseline_where_it_can(table):
    problem, baseline = OPERATOR.parse_case(table), BASELINES["sdpa"]
    if problem.causal:
        assert baseline.refusal(problem) == "its causal mask is aligned top-left where lengths differ"
        return
    inputs = OPERATOR.make_inputs(problem, seed=3, device="cpu")
    o = OPERATOR.bind(baseline.load(), problem, inputs)()
    torch.testing.assert_close(o.double(), OPERATOR.exact(problem, inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_sdpa_answers_to_the_values_that_it_was_bound_with(heads_kv):
    assert_answers_wholly(OPERATOR, BASELINES["sdpa"], {**TABLE, "heads_kv": heads_kv}, follows=False)


def _plan(*sizes: Any) -> torch.Tensor:
    """Check what the library plans with: sizes, then the lengths of each sequence."""
    batch, queries, keys, heads, heads_kv, width, width_v, dtype, used, ends_q, ends_k = sizes[:11]
    assert (batch, keys, heads, dtype) == (3, 48, 4, torch.bfloat16)
    assert (heads_kv, width, width_v) in ((2, 16, 16), (1, 64, 512))
    assert used.tolist() == [48] * 3
    assert ends_q.tolist() == [queries * b for b in range(4)]
    assert ends_k.tolist() == [48 * b for b in range(4)]
    assert len(sizes) == 23
    return torch.full((1,), 77)


def _packed_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any) -> list[torch.Tensor]:
    """Answer as the library's function does: packed, sequences of one length, no pages."""
    batch, causal, latent = more[4].numel() - 1, more[21], more[2]
    assert more[26].item() == 77  # the plan
    if latent is not None:  # MLA: the scores are those of both parts
        q, k = torch.cat([latent, q], -1), torch.cat([v, k], -1)
    q, k, v = (t.view(batch, -1, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    mask = mask.tril(k.shape[2] - q.shape[2]) if causal else mask
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=more[20], enable_gqa=True)
    return [o.transpose(1, 2).flatten(0, 1)]


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
def test_flash_attention_3_takes_the_caches_as_they_are_or_copies_all(queries, mla, monkeypatch):
    library = SimpleNamespace(fwd=_packed_attention, get_scheduler_metadata=_plan)
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", library, raising=False)
    monkeypatch.setattr(FlashAttention, "load", lambda baseline: Bound(baseline.bind_library))
    table = {**TABLE, "dtype": "bf16", "seqlen_q": queries, "causal": queries > 1, **(MLA if mla else {})}
    problem = OPERATOR.parse_case(table)
    inputs = OPERATOR.make_inputs(problem, seed=3, device="cpu")
    o, exact = OPERATOR.bind(BASELINES["fa3"].load(), problem, inputs)(), OPERATOR.exact(problem, inputs)
    assert (o.double() - exact).abs().max() <= OPERATOR.error_budget(exact, OPERATOR.low_precision(problem, inputs))
    assert_answers_wholly(OPERATOR, BASELINES["fa3"], table, follows=queries == 1)


def test_baselines_say_what_they_do_not_serve():
    paged = OPERATOR.parse_case({**TABLES[1], "dtype": "bf16"})
    refusals = {name: baseline.refusal(paged) for name, baseline in BASELINES.items()}
    assert refusals["sdpa"] == refusals["flex"] == "it knows no page table"
    assert refusals["fa2"] == "its pages hold multiples of 256 positions"
    assert refusals["fa3"] is refusals["flashinfer"] is None
    shared = OPERATOR.parse_case({**TABLES[1], "dtype": "bf16", **MLA})
    assert BASELINES["fa3"].refusal(shared) is None
    assert BASELINES["fa2"].refusal(shared) == "it is called with keys and values in memory of their own"
    contiguous = OPERATOR.parse_case({**TABLES[0], "dtype": "bf16", **MLA})
    assert BASELINES["flex"].refusal(contiguous) == "it is called with keys and values in memory of their own"
    narrow = OPERATOR.parse_case({**TABLES[1], "dtype": "bf16", **MLA, "head_dim": 80, "head_dim_v": 64})
    assert BASELINES["fa3"].refusal(narrow) == "it is called for MLA of 576 and 512 columns"
    assert BASELINES["flashinfer"].refusal(OPERATOR.parse_case(TABLES[2])) == "it is called for one query a sequence"


@pytest.mark.parametrize("table", FP8_TABLES, ids=["all", "token", "shared"])
def test_fp8_caches(table):
    """The call is the one that is planned for; ours over wide caches is a baseline, and few others are."""
    problem = OPERATOR.parse_case(table)
    inputs = OPERATOR.make_inputs(problem, seed=3, device="cpu")
    positional, options = OPERATOR.arguments(problem, inputs)
    tensors = dict(zip(("q", "k_cache", "v_cache"), positional, strict=True))
    tensors |= {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
    more = {name: value for name, value in options.items() if name in ("causal", "softmax_scale")}
    found = cache_problem_of(tensors, **more)
    assert dataclasses.replace(found, pointer_alignment=16) == problem
    exact = OPERATOR.exact(problem, inputs)
    bound = OPERATOR.bind(BASELINES["wide-cache"].load(), problem, inputs)
    wide = bound()
    torch.testing.assert_close(wide.double(), exact, rtol=1e-4, atol=1e-4)
    assert OPERATOR.error_scale(problem, inputs)
    refusals = {name: baseline.refusal(problem) for name, baseline in BASELINES.items() if name != "copy"}
    assert refusals.pop("wide-cache") is None
    assert refusals.pop("flashinfer") is not None  # fp32 queries
    assert set(refusals.values()) <= {"it is called for caches in the dtype of the queries", refusals["fa3"]}
    OPERATOR.refresh(problem, inputs, seed=4)
    assert not torch.allclose(OPERATOR.exact(problem, inputs), exact)
    assert torch.equal(bound(), wide)  # it answers to the values that it was bound with, all of them


def test_a_wrong_scale_is_refused():
    with pytest.raises(InputError, match="fp8 must be one of '', 'all', 'token', got 'head'"):
        OPERATOR.parse_case({**TABLE, "fp8": "head"})


def test_the_copy_moves_as_many_bytes_as_keys_and_values_have():
    baseline, long = BASELINES["copy"], OPERATOR.parse_case({**TABLES[0], "seqlen_k": 786432 // 2 * 3, "page_size": 16})
    assert baseline.speed_of_light
    assert baseline.refusal(long) is None
    copy: Any = OPERATOR.bind(baseline.load(), long, {"q": torch.empty(1)})
    assert 2 * copy().nbytes == long.kv_bytes
    assert "64 MiB" in (baseline.refusal(OPERATOR.parse_case(TABLES[0])) or "")


def test_work_is_what_has_to_be_read():
    problem = OPERATOR.parse_case({**TABLE, "dtype": "bf16", "page_size": 16})
    work = OPERATOR.work(problem)
    assert work.bytes == 3 * 48 * 2 * 32 * 2 + 3 * 4 * 32 * 2 + 3 * (3 + 1) * 4
    assert work.flops == 4 * 16 * 3 * 4 * 48
    assert work.tokens == 3


def test_a_wrong_case_is_refused():
    with pytest.raises(InputError, match="seqlen_k must be a multiple of page_size = 20, got 48"):
        OPERATOR.parse_case({**TABLE, "page_size": 20})


def test_the_suite_holds_what_it_says_and_fits_a_gpu():
    cases: list[Any] = [case.problem for case in load_suite("decode").cases]
    assert {(case.head_dim, case.group) for case in cases} >= {(d, g) for d in (64, 128, 256) for g in (1, 4, 8, 16)}
    assert {case.batch for case in cases} >= {1, 4, 8, 16, 32, 64, 128, 256}
    assert (min(case.capacity for case in cases), max(case.capacity for case in cases)) == (512, 131072)
    assert {case.page_size for case in cases} == {0, 16, 64}
    # Two sets of inputs, and copies of both in SDPA's layout for the baseline and its control.
    assert max(6 * OPERATOR.work(case).bytes for case in cases) < 75e9
    assert all(OPERATOR.refusal("decode_triton", case, "H200") is None for case in cases)


@pytest.mark.triton
def test_each_kernel_can_be_forced_and_promises_its_instruction():
    problem = OPERATOR.parse_case({**TABLE, "dtype": "bf16", "heads": 64, "page_size": 16, **MLA})
    assert "pages of 16" in (OPERATOR.refusal("decode_gluon_sm90", problem, "H200") or "")
    problem = OPERATOR.parse_case({**TABLE, "dtype": "bf16", "heads": 64, **MLA})
    few = OPERATOR.parse_case({**TABLE, "dtype": "bf16", "heads": 16, **MLA})
    few_fp8 = OPERATOR.parse_case({**TABLE, "dtype": "bf16", "heads": 16, "fp8": "token", **MLA})
    for subject, case, kernel, instruction in (
        ("flash_attention_with_kv_cache", problem, "_decode_sm90_kernel", "*GMMA*"),
        ("decode_gluon_sm90", problem, "_decode_sm90_kernel", "*GMMA*"),
        ("decode_gluon_sm90", few, "_few_rows_sm90_kernel", "*GMMA*"),
        ("decode_gluon_sm90", few_fp8, "_few_rows_fp8_sm90_kernel", "*GMMA*"),
        ("decode_triton", problem, "_decode_kernel", "*MMA*"),
    ):
        job = OPERATOR.compile_jobs(subject, [case], ["H200"])[0]
        assert job.label.startswith(f"{kernel} ")
        assert job.instruction == instruction
        assert job.run().problems == ()


@pytest.mark.triton
def test_jobs_name_every_kernel_once():
    problems = [OPERATOR.parse_case({**TABLE, "dtype": "bf16", "seqlen_k": keys, "heads": 8}) for keys in (512, 8192)]
    jobs = OPERATOR.compile_jobs("flash_attention_with_kv_cache", problems, ["H200"])
    names = [job.label.partition(" ")[0] for job in jobs]
    assert names.count("_decode_kernel") == 1
    outcome = next(job for job in jobs if job.label.startswith("_decode_kernel")).run()
    assert outcome.problems == ()
    assert isinstance(functools.reduce(max, outcome.instructions.values()), int)
