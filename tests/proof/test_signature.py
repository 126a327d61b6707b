"""An entry point's signature is found wherever it stands: in Python, or in the schema of an operator of torch's."""

from __future__ import annotations

import pytest
import torch

from flashmoe_science.errors import SubjectError
from flashmoe_science.proof.measure.tasks import check_signature

from .fake_operator import OPERATOR, Problem

PROBLEM = Problem(1, 1, 4, 4)


@pytest.fixture(scope="module")
def operators():
    library = torch.library.Library("flashmoe_test_signature", "DEF")
    library.define("fits(Tensor q, Tensor k, Tensor v, *, bool causal=False, float? softmax_scale=None) -> Tensor")
    library.define("changed(Tensor q, Tensor k, Tensor v, float scale, bool is_causal) -> Tensor")
    yield torch.ops.flashmoe_test_signature
    library._destroy()


def test_an_operator_of_torch_that_takes_the_arguments_is_accepted(operators):
    for entry in (operators.fits, operators.fits.default):
        (note,) = check_signature(OPERATOR, entry, PROBLEM)
        assert note == "signature (q, k, v, *, causal=False, softmax_scale=None)"


def test_an_operator_of_torch_with_other_arguments_is_refused(operators):
    with pytest.raises(SubjectError, match=r"it takes \(q, k, v, scale, is_causal\), and the harness passes"):
        check_signature(OPERATOR, operators.changed, PROBLEM)


def test_a_function_that_does_not_tell_is_left_to_its_first_call():
    assert check_signature(OPERATOR, type, PROBLEM) == [
        "the entry point does not tell its signature: its first call will"
    ]
