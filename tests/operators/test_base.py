"""What every operator of ours offers the harness, through ``KernelOperator``."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from flashmoe_science import InputError
from flashmoe_science.errors import CompileError
from flashmoe_science.gpu.specs import find_gpu
from flashmoe_science.operators import MODULES
from flashmoe_science.operators.ranks.over_ranks import RankedProblem
from flashmoe_science.proof.subject.loading import load_operator
from flashmoe_science.proof.subject.operator import Launching, Operator, Planning, Recognising, ours
from flashmoe_science.proof.subject.subject import PACKAGE_FOLDER
from flashmoe_science.proof.subject.suites import list_suites, load_suite, operator_in

SUITES = {name: next(s for s, path in list_suites().items() if operator_in(path) == name) for name in MODULES}
EVERY = pytest.mark.parametrize("name", MODULES)


def operator_and_case(name: str) -> tuple[Any, Any]:
    """Return the operator that records call ``name``, and the first case of a suite of it, of bf16."""
    return load_operator(name), load_suite(SUITES[name]).cases[0].problem


@EVERY
def test_it_fits_the_protocol_and_its_name_is_that_of_records(name):
    operator = load_operator(name)
    assert operator.name == name
    for protocol in (Operator, Recognising, Launching, Planning):
        assert isinstance(operator, protocol), protocol


@EVERY
def test_a_case_comes_back_from_its_table(name):
    operator, case = operator_and_case(name)
    assert operator.parse_case(operator.as_table(case)) == case


@EVERY
def test_a_wrong_case_is_refused_by_its_key(name):
    operator, case = operator_and_case(name)
    table = operator.as_table(case)
    first = operator.required[0]
    for change, message in (
        ({"seqlen": 3}, f"seqlen is not a key of a case of {name}; keys: {', '.join(operator.keys)}"),
        ({first: 2.5}, f"{first}: expected a (valid integer|text|list), got 2.5"),
        ({"dtype": True}, "dtype: expected a text, got True"),
    ):
        with pytest.raises(InputError, match=message):
            operator.parse_case({**table, **change})
    with pytest.raises(InputError, match=f"a case of {name} needs {', '.join(operator.required)}"):
        operator.parse_case({})


@EVERY
def test_entry_points_and_baselines_are_found_by_their_names(name):
    operator = ours(load_operator(name))
    for entry in operator.entry_points().values():
        module, _, attribute = entry.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute))
    assert all(baseline.name == called for called, baseline in operator.baselines().items())
    sources = operator.sources("")
    assert f"operators/{MODULES[name].replace('.', '/')}.py" in sources
    assert all((PACKAGE_FOLDER / path).is_file() for path in sources)


@EVERY
def test_a_cpu_checks_what_an_interpreter_can(name):
    operator, case = operator_and_case(name)
    for subject, kernel in operator.kernels.items():
        refused = operator.cpu_refusal(subject, case)
        if kernel == "auto" and operator.instead is not None:
            assert refused.startswith("on CPU tensors it runs the reference, which would prove nothing")
        elif "gluon" in kernel:
            assert refused == f"{subject} is written in Gluon, which cannot be interpreted: only a GPU can check it"
        else:
            assert refused.startswith("Triton's interpreter multiplies bf16 wrongly")


@EVERY
def test_only_a_gpu_that_is_known_refuses(name):
    operator, case = operator_and_case(name)
    for subject, kernel in operator.kernels.items():
        assert operator.refusal(subject, case, "a GPU of the future") is None
        refused = operator.refusal(subject, case, "L4")
        assert (refused is None) or "sm90" in kernel or kernel in ("forward_short_gluon", "gemv_triton"), refused
        assert not (refused or "").startswith(f"{kernel} does not serve")


@EVERY
def test_launches_are_promised_for_a_gpu_that_is_there(name, monkeypatch):
    operator, case = operator_and_case(name)
    if isinstance(case, RankedProblem):  # NCCL's launches differ by version
        assert operator.promised_launches(next(iter(operator.kernels)), case) == ()
        return
    monkeypatch.setattr("flashmoe_science.operators.base.current_gpu", lambda: None)
    with pytest.raises(CompileError, match="there is none"):
        operator.promised_launches(next(iter(operator.kernels)), case)


@EVERY
@pytest.mark.triton
def test_jobs_are_the_kernels_of_the_launches_each_once(name):
    operator, case = operator_and_case(name)
    subject, gpu = next(iter(operator.kernels)), find_gpu("H200")
    jobs = operator.compile_jobs(subject, [case, case], ["H200", "H100"])
    assert len({job.source for job in jobs}) == len(jobs)
    assert {job.source.name for job in jobs} == {each.source.name for each in operator.launches(subject, case, gpu)}


def test_a_kernel_of_someone_else_is_checked_in_bf16_unless_triton_interprets_it(monkeypatch):
    operator: Any = load_operator("attention")
    problem = operator.parse_case({"batch": 1, "heads": 1, "seqlen_q": 32, "head_dim": 16, "dtype": "bf16"})
    monkeypatch.setitem(sys.modules, "triton", sys)
    assert operator.cpu_refusal("", problem) == "Triton's interpreter multiplies bf16 wrongly"
    monkeypatch.delitem(sys.modules, "triton")
    assert operator.cpu_refusal("", problem) is None
    assert operator.cpu_refusal("forward_triton", problem) == "Triton's interpreter multiplies bf16 wrongly"
