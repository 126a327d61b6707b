"""Claims about kernels with an operator and a suite of their own: judged from the folder that the record names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flashmoe_science.errors import ProofError, SuiteError
from flashmoe_science.proof.judge.judge import VerdictStatus
from flashmoe_science.proof.judge.verify import suite_now, verify_claims
from flashmoe_science.proof.processes import TaskResult
from flashmoe_science.proof.subject import user_suite as own_suite
from flashmoe_science.proof.subject.loading import python_folders
from flashmoe_science.proof.subject.suites import suite_text
from flashmoe_science.proof.subject.trust import is_trusted, trust
from flashmoe_science.proof.subject.user_suite import read_suite, read_user_suite

from .own_kernels import EXAMPLE, OPERATOR, record_of, write_claim, write_kernel

MODULE = OPERATOR.partition(":")[0]


@pytest.fixture(autouse=True)
def restore(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    trust(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    own_suite._ask.cache_clear()
    yield
    sys.modules.pop(MODULE, None)


@pytest.fixture
def in_process(monkeypatch):
    """Let the task of the worker run here: what it says is the same, without a start."""

    def run_task(_, payload, **__):
        path = list(sys.path)
        sys.modules.pop(MODULE, None)
        data = read_suite(payload, lambda _: None)
        sys.modules.pop(MODULE, None)
        sys.path[:] = path
        return TaskResult(ok=True, data=data, reason="", seconds=0.0, output_tail="")

    monkeypatch.setattr(own_suite, "run_task", run_task)


def put(root, name, change=lambda code: code):
    write_kernel(root, name, change)
    write_claim(root, name)
    return record_of(root, name)


def test_claims_about_kernels_whose_modules_have_one_name_are_all_judged_and_none_hides_another(tmp_path):
    put(tmp_path, "good")
    put(tmp_path, "other", lambda code: code.replace('"eps"', '"epsilon"').replace("eps:", "epsilon:"))
    put(tmp_path, "crashes", lambda code: f"import os; os.kill(os.getpid(), 11)\n{code}")
    found = {verdict.claim.id: verdict for verdict in verify_claims(tmp_path)}
    assert found["good"].status is VerdictStatus.DEMONSTRATED
    assert found["other"].status is VerdictStatus.INCONCLUSIVE
    assert "the suite has cases that the record lacks or has other problems for" in found["other"].reason
    assert found["crashes"].status is VerdictStatus.INCONCLUSIVE
    said = "suite crashes-suite cannot be read, so nobody compared its cases: kernels/crashes/suite.toml: the process"
    assert found["crashes"].reason.startswith(f"{said} that read it: killed by SIGSEGV")
    assert MODULE not in sys.modules  # nothing of it ran here


@pytest.mark.usefixtures("in_process")
def test_a_suite_in_suites_comes_first_and_its_operator_lies_beside_the_kernel(tmp_path):
    record = put(tmp_path, "mine")
    beside = tmp_path / "kernels" / "mine" / "suite.toml"
    assert suite_text(record, tmp_path) == str(beside)
    (tmp_path / "suites").mkdir()
    kept = tmp_path / "suites" / "mine-suite.toml"
    beside.rename(kept)
    assert suite_text(record, tmp_path) == str(kept)
    assert [verdict.status for verdict in verify_claims(tmp_path)] == [VerdictStatus.DEMONSTRATED]
    kept.unlink()
    (verdict,) = verify_claims(tmp_path)
    assert verdict.reason.startswith("suite mine-suite is not known here")
    mend = "its file belongs beside the kernel.toml, or into suites/ as mine-suite.toml"
    assert suite_now(record, tmp_path).mend == mend


def test_a_suite_is_asked_for_again_when_its_operator_has_changed(tmp_path, monkeypatch):
    asked = []

    def run_task(_, payload, **__):
        asked.append(payload)
        return TaskResult(ok=True, data={"problems": {}}, reason="", seconds=0.0, output_tail="")

    monkeypatch.setattr(own_suite, "run_task", run_task)
    folder = write_kernel(tmp_path, "mine")
    for _ in range(2):
        read_user_suite(folder / "suite.toml", OPERATOR, [folder])
    assert len(asked) == 1
    file = folder / "rms_norm_operator.py"
    file.write_text(file.read_text() + "# changed\n")
    read_user_suite(folder / "suite.toml", OPERATOR, [folder])
    assert len(asked) == 2


@pytest.mark.usefixtures("in_process")
def test_what_is_wrong_is_said_and_not_raised_as_it_came(tmp_path):
    folder = write_kernel(tmp_path, "mine", lambda code: f"1 / 0\n{code}")
    with pytest.raises(
        SuiteError, match=r"ZeroDivisionError: division by zero \(rms_norm_operator\.py:1 in <module>\)"
    ):
        read_user_suite(folder / "suite.toml", OPERATOR, [folder])
    file = folder / "rms_norm_operator.py"
    file.write_text("import no_such_thing\n")
    with pytest.raises(SuiteError, match=r"No module named 'no_such_thing' \(rms_norm_operator\.py:1 in <module>\)"):
        read_user_suite(folder / "suite.toml", OPERATOR, [folder])


def test_what_this_process_has_loaded_is_read_here(tmp_path, monkeypatch):
    monkeypatch.setattr(own_suite, "run_task", lambda *_, **__: pytest.fail("a worker was started"))
    monkeypatch.syspath_prepend(str(EXAMPLE))
    __import__(MODULE)
    assert read_user_suite(EXAMPLE / "suite.toml", OPERATOR, [EXAMPLE])
    elsewhere = write_kernel(Path(tmp_path), "mine")
    with pytest.raises(pytest.fail.Exception, match="a worker was started"):
        read_user_suite(elsewhere / "suite.toml", OPERATOR, [elsewhere])


def test_a_repository_that_nobody_trusts_is_read_and_its_code_does_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another config"))
    marker = tmp_path / "it ran"
    put(tmp_path, "mine", lambda code: f"open({str(marker)!r}, 'w').close()\n{code}")
    (verdict,) = verify_claims(tmp_path)
    assert not marker.exists()
    assert verdict.status is VerdictStatus.INCONCLUSIVE
    assert f"suite mine-suite is of operator {OPERATOR}, the code of kernels/mine/suite.toml" in verdict.reason
    assert "`flashmoe verify --trust`" in verdict.reason
    trust(tmp_path)
    assert [verdict.status for verdict in verify_claims(tmp_path)] == [VerdictStatus.DEMONSTRATED]
    assert marker.exists()
    (tmp_path / "another config" / "flashmoe" / "trusted.json").write_text("[")
    with pytest.raises(ProofError, match=r"trusted.json: cannot be read"):
        is_trusted(tmp_path)


def test_a_kernel_file_sends_nobody_to_code_outside_of_the_repository(tmp_path):
    record = put(tmp_path / "repository", "mine")
    file = tmp_path / "repository" / "kernels" / "mine" / "kernel.toml"
    file.write_text(file.read_text().replace("[subject]", '[subject]\npython_path = [".", "../../../elsewhere"]', 1))
    assert python_folders(record, tmp_path / "repository") == [file.parent]
    (tmp_path / "repository" / "link").symlink_to(tmp_path)
    outside = record.model_copy(update={"subject": record.subject.model_copy(update={"folder": "link"})})
    assert python_folders(outside, tmp_path / "repository") == []
