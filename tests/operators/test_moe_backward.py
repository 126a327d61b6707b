"""What the harness asks of the gradients of experts; on CPU tensors our function runs the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashmoe_science import InputError, UnsupportedError
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.moe.backward.api import fused_moe_backward
from flashmoe_science.moe.backward.plan import plan_backward
from flashmoe_science.operators.moe_backward import OPERATOR

TABLE = {"tokens": 12, "experts": 4, "top_k": 2, "hidden": 24, "inter": 16, "dtype": "fp32"}
# The budget is twice the largest error of one run. Of 12 rows with 24 columns that was luck: above it in up to 2 of
# 60 draws of each gradient, up to 1.5 times; of these sizes the share was at most 0.85 in 25 draws.
ROUNDED = {**TABLE, "tokens": 200, "hidden": 96, "inter": 64, "dtype": "bf16"}
CASES = [
    TABLE,
    {**ROUNDED, "routing": "zipf"},
    {**ROUNDED, "activation": "swiglu_clamped", "interleaved": True, "bias_gate_up": True, "bias_down": True},
]  # fmt: skip


@pytest.mark.parametrize("table", CASES, ids=["plain", "bf16", "gpt-oss"])
def test_ours_and_the_baselines_are_within_each_budget(table):
    case = OPERATOR.parse_case(table)
    inputs = OPERATOR.make_inputs(case, seed=1, device="cpu")
    exact, low = OPERATOR.exact(case, inputs), OPERATOR.low_precision(case, inputs)
    names = OPERATOR.outputs(case)
    assert names[:4] == ("dx", "dw_gate_up", "dw_down", "dtopk_weights")
    assert len(names) == len(exact) == len(low) == (6 if table.get("bias_down") else 4)
    entries = {"ours": fused_moe_backward, "eager": OPERATOR.baselines()["transformers-eager"].load()}
    for entry in entries.values():
        found = OPERATOR.bind(entry, case, inputs)()
        assert isinstance(found, tuple)
        for name, mine, right, eager in zip(names, found, exact, low, strict=True):
            factor = 4 if table["dtype"] == "fp32" else 1  # see checks.assert_gradients_right
            budget = factor * OPERATOR.error_budget(right, eager)
            assert (mine.double() - right).abs().max().item() <= budget, name
    wrong = [part.clone() for part in exact]
    wrong[2][0, 0, 0] += 0.1 * exact[2].abs().max()
    assert (wrong[2] - exact[2]).abs().max().item() > OPERATOR.error_budget(exact[2], low[2])


def test_the_product_that_is_given_is_the_one_that_the_forward_keeps():
    """Rows sorted by expert, each the product before the activation."""
    case = OPERATOR.parse_case(TABLE)
    inputs = OPERATOR.make_inputs(case, seed=1, device="cpu")
    order = torch.sort(inputs["topk_ids"].flatten(), stable=True).indices
    for row in (0, 7, 23):
        pair = order[row]
        expert = inputs["topk_ids"].flatten()[pair].long()
        exact = inputs["w_gate_up"][expert].double() @ inputs["x"][pair // 2].double()
        torch.testing.assert_close(inputs["product"][row].double(), exact, rtol=1e-5, atol=1e-5)


def test_work_is_twice_that_of_the_forward():
    case = OPERATOR.parse_case({**TABLE, "tokens": 8192})
    assert OPERATOR.work(case).flops == 12 * 8192 * 2 * 24 * 16
    assert OPERATOR.parse_case(OPERATOR.as_table(case)) == case


def test_subjects_have_plans_and_refusals():
    case = OPERATOR.parse_case({**TABLE, "tokens": 8192, "dtype": "bf16", "hidden": 128, "inter": 128})
    assert OPERATOR.refusal("fused_moe_backward", case, "H200") is None
    assert "it needs Hopper" in (OPERATOR.refusal("moe_backward_gluon_sm90", case, "A100") or "")
    assert plan_backward(case.problem, SPECS["H200"], ("x",), "moe_backward_triton").kernel == "moe_backward_triton"
    assert plan_backward(case.problem, SPECS["H200"], ("x",)).kernel == "moe_backward_gluon_sm90"
    with pytest.raises(InputError, match="kernel must be auto or one of moe_backward_gluon_sm90, moe_backward_triton"):
        plan_backward(case.problem, SPECS["H200"], ("x",), "few_triton")
    with pytest.raises(UnsupportedError, match="it needs Hopper"):
        plan_backward(case.problem, SPECS["A100"], ("x",), "moe_backward_gluon_sm90")


def test_a_case_with_shared_experts_is_refused():
    with pytest.raises(InputError, match="shared_experts is not a key of a case of moe_backward"):
        OPERATOR.parse_case({**TABLE, "shared_experts": 1, "shared_inter": 8})


def test_a_case_without_tokens_is_refused():
    with pytest.raises(InputError, match="tokens must be at least 1, got 0: the gradients of none are zeros"):
        OPERATOR.parse_case({**TABLE, "tokens": 0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "relu"}, "activation must be one of swiglu, .*, got 'relu'"),
        ({"activation": "relu2", "interleaved": True}, "interleaved must be False for relu2, which has no gate"),
    ],
)
def test_without_a_gate_nothing_is_taken_for_what_it_is_not(change, message):
    """Weights of one row for each column fit any name of an activation without a gate."""
    shapes = {"x": (3, 8), "do": (3, 8), "w_gate_up": (4, 6, 8), "w_down": (4, 8, 6), "product": (6, 6)}
    inputs: dict[str, Any] = {name: torch.randn(shape) for name, shape in shapes.items()}
    inputs |= {"topk_weights": torch.rand(3, 2), "topk_ids": torch.tensor([[0, 1]] * 3)}
    fused_moe_backward(**inputs, activation="relu2")
    with pytest.raises(InputError, match=message):
        fused_moe_backward(**inputs, **change)
