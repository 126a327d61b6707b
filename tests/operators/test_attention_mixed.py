"""Mixed batches for the harness, without a GPU: suite, inputs, answers, launches, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashmoe_science import InputError, flash_attention_varlen
from flashmoe_science.attention import reference
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.operators.baselines.attention_mixed import keys_in_a_row, pages_of
from flashmoe_science.operators.packed.attention_mixed import OPERATOR
from flashmoe_science.proof.subject.suites import load_suite

SMALL: dict[str, Any] = {
    "lengths": [1, 9, 0, 4], "lengths_k": [30, 9, 3, 20], "heads": 4, "heads_kv": 2, "head_dim": 16, "dtype": "fp16",
    "causal": True, "page_size": 8,
}  # fmt: skip


def test_the_suite_has_twelve_batches_that_ours_serves():
    problems: list[Any] = [case.problem for case in load_suite("mixed").cases]
    assert len(problems) == 12
    assert {problem.planned.page_size for problem in problems} == {16, 64}
    assert {problem.planned.head_dim for problem in problems} == {64, 128}
    for problem in problems:
        for subject in OPERATOR.kernels:
            assert OPERATOR.refusal(subject, problem, "H100") is None
        names = [launch.pattern for launch in OPERATOR.plan("paged_mixed_triton", problem, SPECS["H100"]).launches]
        assert names[0] == "_plan_work_kernel"


def test_answers_are_those_of_keys_in_a_row():
    problem: Any = OPERATOR.parse_case(SMALL)
    inputs = OPERATOR.make_inputs(problem, seed=3, device="cpu")
    assert pages_of(problem) == [4, 2, 1, 3]
    packed = keys_in_a_row(problem, inputs)
    expected = reference.attention_varlen(**packed, causal=True, dtype=torch.float64)[0]
    torch.testing.assert_close(OPERATOR.exact(problem, inputs), expected)
    assert [tuple(expected.shape)] == OPERATOR.answers(problem)
    assert OPERATOR.low_precision(problem, inputs).shape == expected.shape
    torch.testing.assert_close(
        OPERATOR.bind(flash_attention_varlen, problem, inputs)().double(), expected, atol=2e-3, rtol=0
    )
    for draw in OPERATOR.stress_draws:
        assert OPERATOR.stressed(problem, draw, seed=1, device="cpu") is not None


def test_promised_grids_are_those_of_the_queries_of_a_case():
    """Fewer queries than the maxima allow take smaller grids."""
    problem: Any = OPERATOR.parse_case({**SMALL, "lengths": [1] * 30 + [500], "lengths_k": [600] * 31, "head_dim": 64})
    plan = OPERATOR.plan("paged_mixed_triton", problem, SPECS["H100"])
    kernels = OPERATOR.launches("paged_mixed_triton", problem, SPECS["H100"])
    assert [launch.grid for launch in plan.launches] == [kernel.grid for kernel in kernels]
    most = OPERATOR.prepare(plan)
    assert all(own.grid[0] <= kernel.grid[0] for own, kernel in zip(kernels, most, strict=True))
    assert kernels[2].grid[0] < most[2].grid[0]


def test_a_round_trip_and_a_refusal():
    problem: Any = OPERATOR.parse_case({**SMALL, "batch_invariant": True})
    assert OPERATOR.parse_case(OPERATOR.as_table(problem)) == problem
    assert problem.describe().endswith("_page8_invariant")
    with pytest.raises(InputError, match="page_size must be 1 or more, got 0"):
        OPERATOR.parse_case({**SMALL, "page_size": 0})
