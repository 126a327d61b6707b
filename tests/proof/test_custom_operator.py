"""An operator of a user's own: examples/rms_norm goes through the chain, and what is wrong with one is said."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import scipy.special
import torch

from flashmoe_science.errors import InputError, SubjectError, SuiteError
from flashmoe_science.proof.gates import ProveRequest, chain
from flashmoe_science.proof.gates.run import passed
from flashmoe_science.proof.subject.custom_operator import Baseline, CustomOperator
from flashmoe_science.proof.subject.loading import load_operator, load_subject
from flashmoe_science.proof.subject.suites import load_suite

from .chain import environment_with, gate_of, run_chain, statuses

pytestmark = pytest.mark.usefixtures("own_path")

FOLDER = Path(__file__).parents[2] / "examples" / "rms_norm"


@pytest.fixture
def operator():
    load_subject(str(FOLDER))  # puts its folder on the path
    return load_operator("rms_norm_operator:OPERATOR")


def prove(monkeypatch, folder=FOLDER, **changes):
    monkeypatch.setattr(chain, "_read_environment", lambda: environment_with(None))
    monkeypatch.setitem(chain._GATES, "import", lambda _: passed("left out: it takes seconds"))
    subject = load_subject(str(folder))
    suite = load_suite(str(FOLDER / "suite.toml"))
    suite = replace(suite, cases=suite.cases[2:])  # the small ones
    return run_chain(replace(ProveRequest(subject, suite, ["torch"], command="flashmoe prove"), **changes))


@pytest.mark.triton
def test_the_example_is_compiled_and_right(monkeypatch):
    record = prove(monkeypatch, gpus=["L4"])
    assert statuses(record)["build"] == statuses(record)["correct"] == "passed"
    assert gate_of(record, "build").summary.startswith("2 kernels compiled for 1 GPU: at most ")
    assert gate_of(record, "correct").summary.startswith("2 of 2 cases on the CPU")
    assert [case.name for case in record.cases] == ["rows7_columns1000_fp16", "rows1_columns1_fp16"]
    assert record.cases[0].work.bytes == 2 * (2 * 7000 + 1000)


@pytest.mark.triton
def test_the_example_without_its_mask_is_wrong(monkeypatch, tmp_path):
    code = (FOLDER / "rms_norm.py").read_text()
    assert code.count("/ columns") == 1
    (tmp_path / "rms_norm.py").write_text(code.replace("/ columns", "/ BLOCK"))
    for name in ("rms_norm_operator.py", "kernel.toml"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    monkeypatch.setitem(chain._GATES, "build", lambda _: passed("left out"))
    gate = gate_of(prove(monkeypatch, tmp_path), "correct")
    assert gate.summary.startswith("wrong in 1 of 2 cases; rows7_columns1000_fp16: the first call: error ")


def test_the_page_shows_the_files_as_they_are():
    page = (FOLDER.parents[1] / "docs" / "reference" / "operators.md").read_text()
    for name in ("rms_norm_operator.py", "kernel.toml"):
        assert (FOLDER / name).read_text().strip() in page


def test_a_case_is_read_back_as_it_was(operator):
    problem = operator.parse_case({"rows": 2, "columns": 3, "dtype": "fp16"})
    assert operator.parse_case(operator.as_table(problem)) == problem
    assert CustomOperator.describe(operator, problem) == "rows2_columns3_fp16_eps1e-06"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"rows": 2, "cols": 3}, "cols is not a key of a case; keys: rows, columns, dtype, eps"),
        ({"rows": 2, "columns": 3}, "dtype: missing"),
        ({"rows": "2", "columns": 3, "dtype": "fp16"}, "rows: expected a valid integer, got '2'"),
        ({"rows": 0, "columns": 3, "dtype": "fp16"}, "rows and columns must be above 0"),
    ],
)
def test_a_wrong_case_is_refused(operator, case, message):
    with pytest.raises(InputError, match=message):
        operator.parse_case(case)


def test_an_operator_beside_its_suite_is_found(tmp_path):
    (tmp_path / "lonely_operator.py").write_text("from tests.proof.fake_operator import OPERATOR as MINE\n")
    head = 'name = "x"\noperator = "{}"\ndescription = "Made up."\n[[cases]]\norigin = "made up"\n'
    case = "batch = 1\nheads = 1\nseqlen_q = 4\nhead_dim = 4\n"
    (tmp_path / "suite.toml").write_text(head.format("lonely_operator:MINE") + case)
    assert load_suite(str(tmp_path / "suite.toml")).cases[0].name == "b1_h1_s4_d4_fp16"
    (tmp_path / "suite.toml").write_text(head.format("no_such_operator:MINE") + case)
    with pytest.raises(SuiteError, match="there is no operator called 'no_such_operator:MINE'"):
        load_suite(str(tmp_path / "suite.toml"))


def test_what_an_operator_lacks_is_named(monkeypatch):
    class Half(CustomOperator):
        def work(self, problem):
            raise NotImplementedError

    module = ModuleType("half_an_operator")
    vars(module)["OPERATOR"] = Half()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    expected = r"got Half without make_inputs, exact, low_precision\nhint: .*docs/reference/operators.md"
    with pytest.raises(SubjectError, match=expected):
        load_operator("half_an_operator:OPERATOR")
    with pytest.raises(SubjectError, match=r"must offer an object NOTHING .*, got None"):
        load_operator("half_an_operator:NOTHING")


def test_the_version_of_a_baseline_is_that_of_the_distribution_it_comes_from(operator):
    rms_norm = operator.baselines()["torch"]
    assert rms_norm.version() == ""  # a function of the user's own
    assert Baseline("torch", torch.nn.functional.rms_norm).version() == f"torch {importlib.metadata.version('torch')}"
    assert Baseline("scipy", scipy.special.softmax).version() == f"scipy {scipy.__version__}"
    assert Baseline("partial", functools.partial(torch.relu)).version() == ""  # of no module
