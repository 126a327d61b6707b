"""What the harness asks of a baseline: an answer to the values that its inputs have, or had when it was bound."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.moe.operator import OPERATOR
from flashmoe_science.moe.rivals import MoeRival
from flashmoe_science.proof.arms import copy_values


def assert_answers_wholly(rival: MoeRival, table: dict[str, Any], *, follows: bool) -> None:
    """Give the inputs of a bound call other values: no answer may be made of both."""
    case = OPERATOR.parse_case(table)
    old, new = (OPERATOR.make_inputs(case, seed=seed, device="cpu") for seed in (3, 4))
    call = OPERATOR.bind(rival.load(), case, old)
    before, after = call().clone(), OPERATOR.bind(rival.load(), case, new)().clone()
    assert not torch.equal(before, after)
    copy_values(new, old)
    torch.testing.assert_close(call(), after if follows else before)
