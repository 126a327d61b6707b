"""A case's problem is the one that a call with its inputs describes: records go stale by its launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from flashmoe_science.attention.backward.problem import backward_problem_of
from flashmoe_science.attention.decode.contract import cache_problem_of
from flashmoe_science.attention.forward.calls import allocate_lse, allocate_output
from flashmoe_science.attention.inputs import Options, check_options, check_window, problem_of
from flashmoe_science.operators import attention, attention_backward, attention_decode, attention_step
from flashmoe_science.operators.attention_backward import draw
from flashmoe_science.proof.subject.suites import list_suites, load_suite

OPERATORS = (attention.OPERATOR, attention_backward.OPERATOR, attention_step.OPERATOR, attention_decode.OPERATOR)
SUITES = [suite for name in list_suites() if (suite := load_suite(name)).operator in {one.name for one in OPERATORS}]


def described(operator, problem):
    """Return the problem that a call describes, of tensors without memory."""
    if operator in (attention.OPERATOR, attention_decode.OPERATOR):
        arguments, options = operator.arguments(problem, operator.make_inputs(problem, seed=0, device="cpu"))
        if operator is attention.OPERATOR:
            return problem_of(*arguments, return_lse=False, **options)
        called = cache_problem_of(dict(zip(("q", "k_cache", "v_cache"), arguments, strict=True)) | {
            name: options.pop(name) for name in ("page_table", "cache_seqlens", "k_scale", "v_scale") if name in options
        }, **options)  # fmt: skip
        return replace(called, shared_kv=problem.shared_kv)  # without memory nothing is shared
    p, tensors = problem.forward, draw(problem, seed=0, device="cpu")
    asked = attention.options_of(p, tensors)
    forward = problem_of(*(tensors[name] for name in "qkv"), return_lse=True, **asked)
    left = {"o": allocate_output(forward, tensors["q"]), "lse": allocate_lse(forward, tensors["q"])}
    options = Options(p.causal, check_options(p.causal, p.softmax_scale), check_window(p.window), p.softcap)
    return backward_problem_of(options, tensors | left, ["q", "k", "v"])


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_problem_of_a_case_is_that_of_its_call(suite):
    operator = next(one for one in OPERATORS if one.name == suite.operator)
    for case in suite.cases:
        with FakeTensorMode():
            assert described(operator, case.problem) == case.problem, case.name
