"""What the harness asks of a baseline: an answer to the values that its inputs have, or had when it was bound."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.proof.measure.arms import copy_values
from flashmoe_science.proof.subject.outputs import copied


# Any: an operator and its baselines take its own problems alone, which the protocols cannot say.
def assert_answers_wholly(operator: Any, baseline: Any, table: dict[str, Any], *, follows: bool) -> None:
    """Give the inputs of a bound call other values: no answer may be made of both."""
    case = operator.parse_case(table)
    old, new = (operator.make_inputs(case, seed=seed, device="cpu") for seed in (3, 4))
    call = operator.bind(baseline.load(), case, old)
    before, after = (copied(operator.bind(baseline.load(), case, inputs)()) for inputs in (old, new))
    assert isinstance(before, torch.Tensor)
    assert isinstance(after, torch.Tensor)
    assert not torch.equal(before, after)
    copy_values(new, old)
    torch.testing.assert_close(call(), after if follows else before)
