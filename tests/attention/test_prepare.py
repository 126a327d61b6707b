"""What a kernel is told about the memory that it reads and writes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science.attention.plan import plan_attention
from flashmoe_science.attention.prepare import prepare_kernels
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.gpu.specs import SPECS

pytestmark = pytest.mark.triton


def constants(problem: AttentionProblem) -> dict[str, object]:
    (kernel,) = prepare_kernels(plan_attention(problem, SPECS["H200"], "forward_triton"))
    return dict(kernel.source.constants)


def test_offsets_inside_a_tile_are_64_bit_where_rows_lie_far_apart():
    near = AttentionProblem(1, 70000, 1, 200, 8, 16, 256, "fp16")
    assert constants(near)["WIDE"] is False
    # Rows of q are 1.1 million elements apart, those of the output 17.9 million.
    output = dataclasses.replace(near, q_strides=(200 * 70000 * 16, 16, 70000 * 16, 1))
    assert output.output_strides[2] == 70000 * 256
    assert constants(output)["WIDE"] is True
    for name in ("q_strides", "k_strides", "v_strides"):
        for strides in ((0, 0, 2**24, 1), (0, 0, 1, 2**24)):
            change: dict[str, Any] = {name: strides}
            assert constants(dataclasses.replace(near, **change))["WIDE"] is True
