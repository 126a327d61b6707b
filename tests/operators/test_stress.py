"""Stress draws: what they change, that every operator has them, and that what is right stays right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashmoe_science.operators import MODULES
from flashmoe_science.operators.stress import halved, laid_out, stress_attention
from flashmoe_science.proof.measure.allowed_error import Allowed, find_shares
from flashmoe_science.proof.subject.loading import load_operator
from flashmoe_science.proof.subject.operator import Stressing
from flashmoe_science.proof.subject.outputs import parts

from .test_error_scale import SMALL

TABLES = {**SMALL, "attention_varlen": {**SMALL["attention_varlen"], "lengths": [5, 3, 17]}}


@pytest.mark.parametrize("name", [name for name, module in MODULES.items() if not module.startswith("ranks.")])
def test_the_frameworks_own_run_is_right_in_every_stress_draw(name):
    assert isinstance(load_operator(name), Stressing)
    operator: Any = load_operator(name)
    problem = operator.parse_case({**TABLES[name], "dtype": "fp16"})
    applies = []
    for draw in operator.stress_draws:
        found = operator.stressed(problem, draw, seed=1, device="cpu")
        if found is None:
            continue
        applies.append(draw)
        small, inputs = found
        answers = [parts(answer(small, inputs)) for answer in (operator.low_precision, operator.exact)]
        for low, exact, scale in zip(*answers, operator.error_scale(small, inputs), strict=True):
            assert float(find_shares(low, exact, Allowed(*scale)).max()) <= 1.0, draw
            assert bool(torch.isfinite(exact).all())
    assert {*operator.stress_draws} - {*applies} <= {"neighbours", "expanded"}  # of one sequence there is neither
    assert len(applies) >= 6


def test_draws_have_in_them_what_they_say():
    def normal():
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(2, 2, 32, 64, generator=generator) for _ in range(3)]

    def scores(draw):
        q, k, v = normal()
        stress_attention(draw, q, k, v, 0.125, [0])
        return q @ k.mT * 0.125, q, k, v

    sink, *_, v = scores("sink_key")
    assert float(sink.softmax(-1)[..., 0].median()) > 0.8
    assert float(v[..., 0, :].abs().max()) < 0.5
    large, *_ = scores("large_logits")
    assert float(large[..., 0::2, :].min()) > 100  # exp overflows in fp32 from 88.7 on
    assert float(large[..., 1::2, :].max()) < -104  # and is 0 below -103.9
    peaked, *_ = scores("peaked_rows")
    assert float(peaked[..., 1::4, :].abs().max()) == 0.0
    assert float(peaked[..., 0::4, :].softmax(-1).amax(-1).median()) > 0.8
    repeated, q, *_ = scores("repeated_rows")
    assert torch.equal(q[..., 1::2, :], q[..., ::2, :])
    assert torch.equal(repeated[..., 1::2], repeated[..., ::2])
    outliers, *_, v = scores("outliers")
    assert float(outliers.abs().max()) > 3 * float((normal()[0] @ normal()[1].mT * 0.125).abs().max())
    assert float(v[..., -1].std()) > 32 * float(v[..., 0].std())


def test_layouts_keep_values_and_change_strides_and_addresses():
    tensors = {"q": torch.randn(2, 3, 5, 8), "k": torch.randn(2, 3, 5, 8), "n": torch.arange(3)}
    strided = laid_out("strided", tensors, ("q", "k"), ("k",))
    assert strided is not None
    assert strided["q"].stride() == (13 * 11 * 16, 16, 11 * 16, 1)
    odd = laid_out("odd_offset", tensors, ("q", "k"), ("k",))
    assert odd is not None
    assert odd["k"].data_ptr() % 16 == 4
    assert odd["k"].is_contiguous()
    for x in (strided["k"], odd["k"]):
        memory = torch.empty(0).set_(x.untyped_storage(), 0, (x.untyped_storage().nbytes() // 4,), (1,))
        assert int((~memory.isnan()).sum()) == x.numel()
        assert bool(memory[-1].isnan())
    for found in (strided, odd):
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        assert found["n"] is tensors["n"]
    expanded = laid_out("expanded", tensors, ("q", "k"), ("k", "q"))
    assert expanded is not None
    assert expanded["k"].stride()[:2] == (0, 40)
    assert expanded["q"].stride()[:2] == (120, 0)
    assert torch.equal(expanded["k"][1], tensors["k"][0])
    assert torch.equal(expanded["q"][:, 2], tensors["q"][:, 0])
    assert laid_out("expanded", {"k": torch.randn(1, 1, 5, 8)}, (), ("k",)) is None


def test_sizes_are_halved_until_they_fit():
    assert halved(16384, 1024, lambda n: n <= 5000) == 4096
    assert halved(16384, 1024, lambda _: False) == 1024
    assert halved(65, 64, lambda _: False) == 64
    assert halved(7, 64, lambda _: False) == 7


def test_a_smaller_problem_is_of_the_same_kind():
    operator: Any = load_operator("attention")
    table = {"batch": 32, "heads": 32, "heads_kv": 8, "seqlen_q": 16384, "head_dim": 64, "dtype": "bf16"}
    problem = operator.parse_case({**table, "causal": True, "window": [127, 0], "sinks": "fp32"})
    small = operator.smaller(problem, "cpu")
    assert (small.batch, small.heads, small.heads_kv, small.seqlen_q, small.seqlen_k) == (2, 2, 1, 64, 64)
    assert (small.causal, small.sinks, small.head_dim, small.dtype) == (True, "fp32", 64, "bf16")
    on_gpu = operator.smaller(problem, "cuda")
    assert (on_gpu.batch, on_gpu.heads, on_gpu.heads_kv, on_gpu.seqlen_q) == (2, 8, 2, 4096)
    decoding = operator.smaller(operator.parse_case({**table, "seqlen_q": 1, "seqlen_k": 512}), "cpu")
    assert (decoding.seqlen_q, decoding.seqlen_k) == (1, 64)
