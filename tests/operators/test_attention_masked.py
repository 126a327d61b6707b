"""The operator of block masks: its cases, and that our mask and FlexAttention's function say the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from flashmoe_science import InputError
from flashmoe_science.operators.attention_masked import OPERATOR, flash_attention_masked
from flashmoe_science.operators.mask_kinds import KINDS, count_visible, make_mask
from flashmoe_science.proof.subject.suites import load_suite

# Amount, queries and keys: with blocks that are full, partial and empty.
SIZES = {
    "documents": (50, 300, 300), "prefix": (100, 300, 300), "window": (100, 400, 400), "tree": (0, 20, 300),
    "blocks": (2, 500, 500), "tiles": (0, 2500, 2500),
}  # fmt: skip


def problem_of(kind: str) -> Any:
    amount, seqlen_q, seqlen_k = SIZES[kind]
    sizes = {"batch": 1, "heads": 2, "heads_kv": 1, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": 16}
    return OPERATOR.parse_case({**sizes, "dtype": "fp32", "mask": kind, "amount": amount})


def test_every_kind_is_tried():
    assert set(SIZES) == set(KINDS)
    problems: list[Any] = [case.problem for suite in ("masks", "masks-blocks") for case in load_suite(suite).cases]
    assert {problem.mask for problem in problems} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_is_what_the_function_says(kind):
    problem = problem_of(kind)
    mask, shown = problem.make_mask("cpu")
    dense = mask.to_dense()
    assert torch.equal(dense, create_mask(shown, None, None, dense.shape[2], dense.shape[3], device="cpu"))
    assert problem.visible == dense.sum()
    assert OPERATOR.parse_case(OPERATOR.as_table(problem)) == problem


@pytest.mark.parametrize("kind", ["documents", "tree"])
def test_a_call_is_within_what_is_allowed(kind):
    problem = problem_of(kind)
    inputs = OPERATOR.make_inputs(problem, seed=0, device="cpu")
    exact = OPERATOR.exact(problem, inputs)
    found = OPERATOR.bind(flash_attention_masked, problem, inputs)()
    (allowed,) = OPERATOR.error_scale(problem, inputs)
    assert ((found.double() - exact).abs() <= allowed[0]).all()
    low = OPERATOR.low_precision(problem, inputs)
    assert (found.double() - exact).abs().max() <= OPERATOR.error_budget(exact, low)
    flex, sdpa = (OPERATOR.known_baselines[name] for name in ("flex", "sdpa"))
    torch.testing.assert_close(sdpa.bind(problem, inputs)(), found)
    assert flex.refusal(problem) is None


def test_masks_that_are_none_are_refused_by_name():
    case = {"batch": 1, "heads": 2, "seqlen_q": 20, "head_dim": 16, "dtype": "fp32", "mask": "diagonal"}
    with pytest.raises(InputError, match="mask must be one of documents, prefix"):
        OPERATOR.parse_case(case)
    with pytest.raises(InputError, match="a mask of blocks needs as many queries as keys, got 20 and 30"):
        OPERATOR.parse_case({**case, "mask": "blocks", "seqlen_k": 30})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seqlen", "amount"), [(1, 1), (300, 3), (512, 700), (2176, 2)])
def test_what_is_counted_is_what_a_mask_shows(kind, seqlen, amount):
    seqlen_k = seqlen + 77 if kind == "tree" else seqlen
    mask, _ = make_mask(kind, amount, seqlen, seqlen_k, "cpu")
    assert count_visible(kind, amount, seqlen, seqlen_k) == int(mask.to_dense().sum())
