"""What a kernel is told about the memory that it reads and writes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science.attention.forward.plan import plan_attention
from flashmoe_science.attention.forward.prepare import prepare_kernels
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.operators.attention import compile_plan

pytestmark = pytest.mark.triton


def constants(problem: AttentionProblem) -> dict[str, Any]:
    (kernel,) = prepare_kernels(plan_attention(problem, SPECS["H200"], "forward_triton"))
    return dict(kernel.source.constants)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("name", ["k_strides", "v_strides"])
@pytest.mark.parametrize("seqlen", [100, 3000])
def test_expanded_tensors_are_served(seqlen, name, axis):
    """In one pass where rows stay contiguous, else streamed: TMA does not step by 0, and the plan says so."""
    problem = AttentionProblem(4, 8, 8, seqlen, seqlen, 64, 64, "fp16")
    strides = [*getattr(problem, name)]
    strides[axis] = 0
    change: dict[str, Any] = {name: tuple(strides)}
    plan = plan_attention(dataclasses.replace(problem, **change), SPECS["H200"])
    if seqlen == 100 and axis < 3:
        assert plan.kernel == "forward_short_gluon"
    else:
        assert plan.kernel == "forward_triton"
        why = f"{name[0]} is expanded: TMA does not step by 0" if axis < 3 else f"rows of {name[0]} are not contiguous"
        assert f"({why})" in plan.reason
    assert all(outcome.problems == () for outcome in compile_plan(plan))


def test_offsets_inside_a_tile_are_64_bit_where_rows_lie_far_apart():
    near = AttentionProblem(1, 70000, 1, 200, 8, 16, 256, "fp16")
    assert constants(near)["TILE"].WIDE is False
    # Rows of q are 1.1 million elements apart, those of the output 17.9 million.
    output = dataclasses.replace(near, q_strides=(200 * 70000 * 16, 16, 70000 * 16, 1))
    assert output.output_strides[2] == 70000 * 256
    assert constants(output)["TILE"].WIDE is True
    for name in ("q_strides", "k_strides", "v_strides"):
        for strides in ((0, 0, 2**24, 1), (0, 0, 1, 2**24)):
            change: dict[str, Any] = {name: strides}
            assert constants(dataclasses.replace(near, **change))["TILE"].WIDE is True
