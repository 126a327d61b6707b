"""Tests of a user's own operator whose code is broken: it is told with file, line and cause."""

from __future__ import annotations

import itertools
import re
import sys
from dataclasses import replace
from typing import Any

import pytest

from flashmoe_science.errors import FlashmoeError, InputError, OperatorError, SubjectError
from flashmoe_science.proof.gates import chain, launch
from flashmoe_science.proof.measure.tasks import check_correct
from flashmoe_science.proof.subject import user_operator
from flashmoe_science.proof.subject.loading import load_operator, load_subject, operator_of
from flashmoe_science.proof.subject.operator import Operator, Scalable
from flashmoe_science.proof.subject.suites import load_suite
from flashmoe_science.proof.subject.user_operator import raise_blamed
from flashmoe_science.proof.worker import describe_error

from .chain import HONEST, Recorder, gate_of, request_of, run_chain

GOOD = """\
from dataclasses import dataclass
from flashmoe_science.proof.subject.custom_operator import CustomOperator, Work


@dataclass(frozen=True)
class Problem:
    rows: int
    dtype: str = "fp16"


class Mine(CustomOperator):
    problem = Problem

    def work(self, problem):
        return Work(flops=1.0, bytes=2.0, tokens=problem.rows)

    def make_inputs(self, problem, *, seed, device):
        return {}

    def exact(self, problem, inputs):
        pass

    def low_precision(self, problem, inputs):
        pass

    def baselines(self):
        return {}


OPERATOR = Mine()
"""
CASE = {"rows": 3}
NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def restore(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(user_operator, "_guarded", {})


@pytest.fixture
def write(tmp_path):
    """Return what writes a module that no other test has, and returns the operator's name."""

    def write(code):
        name = f"made_up_operator_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(code)
        if str(tmp_path) not in sys.path:
            sys.path.insert(0, str(tmp_path))
        return f"{name}:OPERATOR"

    return write


def changed(before, after):
    assert before in GOOD
    return GOOD.replace(before, after)


BROKEN = [
    ("OPERATOR = Mine()", "raise RuntimeError('boom')", "RuntimeError: boom ({module}.py:30 in <module>)"),
    ("OPERATOR = Mine()", "def f(:", "SyntaxError: invalid syntax ({module}.py:30)"),
    ("OPERATOR = Mine()", "raise SystemExit(3)", "SystemExit: 3 ({module}.py:30 in <module>)"),
    (
        "return {}\n\n\n",
        "return 1 / 0\n\n\n",
        "baselines: ZeroDivisionError: division by zero ({module}.py:27 in baselines)",
    ),
    (
        "return Work(",
        "return dict(",
        "return flops, bytes and tokens, numbers of at least 0, got {{'flops'",
    ),
    (
        "flops=1.0",
        "flops=float('nan')",
        "return flops, bytes and tokens, numbers of at least 0, got Work(flops=nan",
    ),
    (
        "    def work",
        "    def as_table(self, problem):\n        return {1: {2}}\n\n    def work",
        "as_table must return plain JSON values",
    ),
    (
        "return {}\n\n\n",
        "return ['sdpa']\n\n\n",
        "baselines must return a mapping from names to baselines, got ['sdpa']",
    ),
]


@pytest.mark.parametrize(("before", "after", "failure"), BROKEN)
def test_what_is_wrong_with_an_operator_is_said(tmp_path, write, before, after, failure):
    name = write(changed(before, after))
    (tmp_path / "suite.toml").write_text(
        f'name = "x"\noperator = "{name}"\ndescription = "Made up."\n[[cases]]\nrows = 3\norigin = "made up"\n'
    )
    with pytest.raises(FlashmoeError) as caught:  # noqa: PT012 - all that is asked of an operator before a run
        suite = load_suite(str(tmp_path / "suite.toml"))
        operator = load_operator(name)
        operator.baselines()
        for case in suite.cases:
            operator.work(case.problem)
            operator.as_table(case.problem)
    assert failure.format(module=name.partition(":")[0]) in str(caught.value)
    assert caught.value.hint


def test_an_operator_of_good_code_is_what_it_is(write):
    name = write(GOOD)
    operator = load_operator(name)
    assert load_operator(name) is operator
    assert isinstance(operator, Operator)
    assert not isinstance(operator, Scalable)
    assert operator.as_table(operator.parse_case(CASE)) == {"rows": 3, "dtype": "fp16"}
    with pytest.raises(InputError, match="columns is not a key"):
        operator.parse_case({"columns": 3})


def test_the_record_is_kept_where_the_chain_had_begun(monkeypatch):
    def raises(run):
        raise SubjectError("operator m:O: its method work: KeyError: 'x' (m.py:3 in work)", hint="h")

    monkeypatch.setitem(chain._GATES, "build", raises)
    recorder = Recorder()
    with pytest.raises(SubjectError):
        run_chain(request_of(replace(HONEST)), recorder)
    kept = recorder.saved[-1]
    assert kept.incomplete_reason == "operator m:O: its method work: KeyError: 'x' (m.py:3 in work) in gate build"
    assert gate_of(kept, "sources").status.value == "passed"


# What a method does in a worker, where the kernel runs too

WHOLE = """\
import torch
from dataclasses import dataclass
from flashmoe_science.proof.subject.custom_operator import DTYPES, CustomOperator, Work, standard_normal


@dataclass(frozen=True)
class Problem:
    rows: int
    dtype: str = "fp16"


class Mine(CustomOperator):
    problem = Problem

    def work(self, problem):
        return Work(flops=1.0, bytes=2.0, tokens=problem.rows)

    def make_inputs(self, problem, *, seed, device):
        return standard_normal({"x": (problem.rows, 8)}, DTYPES[problem.dtype], seed=seed, device=device)

    def exact(self, problem, inputs):
        return 2 * inputs["x"].double()

    def low_precision(self, problem, inputs):
        return 2 * inputs["x"]


D = Mine()


def double(x):
    return 2 * x
"""

EXACT, LOW = 'return 2 * inputs["x"].double()', 'return 2 * inputs["x"]\n'
INPUTS, END = "return standard_normal(", "D = Mine()"
ZERO = "ZeroDivisionError: division by zero"

IN_WORKER = [
    (EXACT, "raise ValueError('broken')", "its method exact: ValueError: broken ({m}.py:22 in exact)"),
    (EXACT, "return None", "exact of {m}:D must return one tensor, got NoneType"),
    (LOW, "return inputs['y']\n", "its method low_precision: KeyError: 'y' ({m}.py:25 in low_precision)"),
    (LOW, "return inputs['x'][:1]\n", "exact and low_precision must have one shape, got [3, 8] and [1, 8]"),
    (
        INPUTS,
        f"return dict(x=torch.full((3, 8), float(seed)))\n        {INPUTS}",
        "inputs must be random, and all of those of {m}:D are constant",
    ),
    (
        INPUTS,
        f"return [3]\n        {INPUTS}",
        "its method make_inputs must return a mapping from names to tensors",
    ),
    (END, f"Mine.error_budget = lambda *_: None\n{END}", "the error budget must be a number, got None"),
]


def own_subject(tmp_path, write, code):
    module = write(code).partition(":")[0]
    (tmp_path / "kernel.toml").write_text(
        f'[subject]\nname = "mine"\noperator = "{module}:D"\nentry_point = "{module}:double"\n'
        f'sources = ["{module}.py"]\ndevices = ["cuda", "cpu"]\n'
    )
    (tmp_path / "suite.toml").write_text(
        f'name = "x"\noperator = "{module}:D"\ndescription = "Made up."\n[[cases]]\nrows = 3\norigin = "made up"\n'
    )
    return load_subject(str(tmp_path)), module


@pytest.mark.parametrize(("before", "after", "failure"), IN_WORKER)
def test_what_an_operator_does_wrong_beside_the_kernel_is_its_own_error(tmp_path, write, before, after, failure):
    assert before in WHOLE
    subject, module = own_subject(tmp_path, write, WHOLE.replace(before, after))
    payload = {
        "subject": subject.to_json(),
        "cases": [{"name": "a", "problem": CASE}],
        "device": "cpu",
        "seed": 5,
    }
    with pytest.raises(OperatorError) as caught:
        check_correct(payload, lambda _: None)
    assert str(caught.value).startswith(f"operator {module}:D: {failure.format(m=module)}")
    assert caught.value.hint
    with pytest.raises(OperatorError, match=re.escape(str(caught.value).partition("\n")[0])):
        raise_blamed(describe_error(caught.value))


def test_what_a_gpu_raises_within_an_operator_is_not_said_to_be_its_fault(tmp_path, write):
    broken = "raise RuntimeError('CUDA error: an illegal memory access was encountered')"
    subject, _ = own_subject(tmp_path, write, WHOLE.replace(EXACT, broken))
    operator = operator_of(subject)
    with pytest.raises(RuntimeError, match="CUDA error"):
        operator.exact(operator.parse_case(CASE), {})


def test_an_operator_that_fails_in_gate_correct_ends_the_run_and_not_the_kernel(tmp_path, write):
    broken = WHOLE.replace(EXACT, "raise ValueError('broken')")
    subject, module = own_subject(tmp_path, write, broken)
    recorder = Recorder()
    request = request_of(subject, suite=load_suite(str(tmp_path / "suite.toml")), baselines=[])
    with pytest.raises(OperatorError) as caught:
        run_chain(request, recorder)
    said = f"operator {module}:D: its method exact: ValueError: broken ({module}.py:22 in exact)"
    assert str(caught.value).partition("\n")[0] == said
    assert caught.value.hint.startswith("the operator's own code does this")
    kept = recorder.saved[-1]
    assert kept.incomplete_reason == f"{said} in gate correct"
    assert gate_of(kept, "correct").status.value == "not reached"
    assert [(case.correct, case.arms[0].status) for case in kept.cases] == [(None, "not measured")]


def test_gate_launch_tells_an_operator_from_its_kernel():
    arm: dict[str, Any] = {"name": "mine", "status": "failed", "role": "subject", "launches": [], "version": ""}
    arm |= {"identities": [], "host_files": {}}
    reason = (
        "the case cannot be set up: OperatorError: operator m:D: its method make_inputs: KeyError: 'x' (m.py:3 in f)"
    )
    with pytest.raises(OperatorError, match=r"^operator m:D: its method make_inputs: KeyError: 'x' \(m\.py:3 in f\)"):
        launch._record(None, {"name": "a", "arms": [{**arm, "reason": reason}]})  # type: ignore[arg-type]
