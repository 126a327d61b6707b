"""Two revisions of real git repositories: checked out, taken through the gates, timed together, and cleaned up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashmoe_science import cli
from flashmoe_science.errors import ProofError, SubjectError
from flashmoe_science.proof.compare.compare import Effect, compare_revisions, exit_code
from flashmoe_science.proof.compare.revisions import checked_out, find_revision, prove_revisions, subjects_at
from flashmoe_science.proof.cost.cost import Estimate
from flashmoe_science.proof.gates import chain, run
from flashmoe_science.proof.gates.run import passed
from flashmoe_science.proof.records.documents import read_record, write_record
from flashmoe_science.proof.records.evidence import GateStatus
from flashmoe_science.proof.records.store import Store
from flashmoe_science.proof.subject.loading import load_entry, load_operator
from flashmoe_science.proof.subject.operator import ours
from flashmoe_science.proof.subject.registry import BUILTIN_OPERATORS
from flashmoe_science.proof.subject.revision_import import at_revision
from flashmoe_science.proof.subject.subject import PACKAGE_FOLDER, hash_sources
from flashmoe_science.proof.subject.suites import list_suites, load_suite

from .chain import FEW, GPU, FakeGpu, Recorder, environment_with, request_of
from .processes import heed_signals, python_path, wait_until_dead
from .repositories import attention_repository, commit, git

ROOT = Path(__file__).parents[2]

A_FASTER = 1.03


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.startswith(("flashmoe_science_a", "flashmoe_science_b"))]:
        del sys.modules[name]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Make a repository with the revisions ``first`` and ``second``, and temporary folders below ``tmp_path``."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return attention_repository(tmp_path / "repository").resolve()


def leftovers(repository):
    trees = git(repository, "worktree", "list", "--porcelain").count("worktree ")
    return trees - 1, [path.name for path in repository.parent.glob("flashmoe-compare-*")]


def asked(repository, *labels):
    return [find_revision(repository, label) for label in labels]


# git


def test_both_revisions_are_there_with_their_own_files_and_gone_in_the_end(repository):
    with checked_out(repository, *asked(repository, "first", "second")) as (a, b):
        texts = [(checkout.root / "kernels" / "helper.py").read_text() for checkout in (a, b)]
        assert texts == ["FACTOR = 1.0  # first\n", "FACTOR = 1.0  # second\n"]
        assert leftovers(repository)[0] == 2
    assert leftovers(repository) == (0, [])


def test_a_checkout_that_fails_names_the_revision_and_leaves_nothing(repository):
    first, second = asked(repository, "first", "second")
    broken = replace(second, commit="0" * 40)
    with (
        pytest.raises(ProofError, match="revision second cannot be checked out: git worktree"),
        checked_out(repository, first, broken),
    ):
        pass
    assert leftovers(repository) == (0, [])


def test_a_hook_of_the_user_is_not_run_and_git_variables_do_not_mislead(repository, tmp_path, monkeypatch):
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    with checked_out(repository, *asked(repository, "first", "second")):
        assert not (tmp_path / "ran").exists()


# Subjects


@pytest.fixture
def checkouts(repository):
    with checked_out(repository, *asked(repository, "first", "second")) as found:
        yield found


def test_a_subject_at_a_revision_has_its_files_its_name_and_its_rival(repository, checkouts):
    path = list(sys.path)
    b, a = subjects_at(str(repository / "kernels"), *checkouts)
    first, second = (git(repository, "rev-parse", tag)[:12] for tag in ("first", "second"))
    assert (a.name, b.name) == (f"doubling@{first}", f"doubling@{second}")
    assert b.baseline == a
    assert b.folder == checkouts[1].root / "kernels"
    assert sys.path == path  # workers inherit it
    assert type(b).from_json(b.to_json()) == b


def test_a_wrong_file_is_refused_with_the_revision_and_no_temporary_folder(repository):
    commit(repository, {"kernel.toml": "[subject]\nname = 3\n"}, tag="third")
    with (
        checked_out(repository, *asked(repository, "second", "third")) as found,
        pytest.raises(SubjectError) as refused,
    ):
        subjects_at(str(repository / "kernels"), *found)
    assert str(refused.value).startswith("revision third: kernels/kernel.toml: key subject.")
    assert "flashmoe-compare" not in str(refused.value)


def with_package(repository, operator=None, tag="packaged"):
    """Commit a copy of our own package, or one with this operator."""
    target = repository / "src" / PACKAGE_FOLDER.name
    shutil.rmtree(target, ignore_errors=True)
    for room in ("attention", "distributed", "gpu", "moe", "operators"):
        shutil.copytree(PACKAGE_FOLDER / room, target / room, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("__init__.py", "errors.py", "flops.py"):
        shutil.copy(PACKAGE_FOLDER / file, target / file)
    if operator is not None:
        (target / "operators" / "attention.py").write_text(operator)
    return commit(repository, {}, tag=tag)


def test_our_own_subject_at_two_revisions_is_that_of_each_checkout(repository):
    first = with_package(repository)
    api = repository / "src" / PACKAGE_FOLDER.name / "attention" / "api.py"
    api.write_text(api.read_text() + "\nREVISION = 2\n")
    commit(repository, {}, tag="changed")
    with checked_out(repository, *asked(repository, "packaged", "changed")) as found:
        b, a = subjects_at("forward_triton", *found)
        assert a.name == f"forward_triton@{first[:12]}"
        assert (a.builtin, a.checkout.package) == (True, "flashmoe_science_a")  # type: ignore[union-attr]
        assert b.entry_point == "flashmoe_science_b.operators.attention:forward_triton"
        hashes = [{source.path: source.sha256 for source in hash_sources(subject)} for subject in (a, b)]
        assert [path for path in hashes[0] if hashes[0][path] != hashes[1][path]] == ["attention/api.py"]
        assert load_entry(b).func.__module__ == "flashmoe_science_b.attention.api"  # type: ignore[attr-defined]
        assert sys.modules["flashmoe_science_b.attention.api"].REVISION == 2
        with pytest.raises(SubjectError, match="no file or folder"):
            subjects_at("forward_tritn", *found)


def test_a_revision_of_our_own_prepares_its_own_kernels(repository):
    with_package(repository)
    with checked_out(repository, *asked(repository, "packaged", "packaged")) as found:
        subject, _ = subjects_at("flash_attention", *found)
        assert subject.checkout is not None
        for name, subjects in BUILTIN_OPERATORS.items():
            if name in ("context_parallel", "expert_parallel"):  # of several ranks
                continue
            harness = ours(load_operator(name))
            suite = next(suite for suite in map(load_suite, list_suites()) if suite.operator == name)
            for one in subjects:
                of_one = replace(subject, checkout=replace(subject.checkout, own_name=one), operator=name)
                jobs = ours(at_revision(harness, of_one)).compile_jobs("", [suite.cases[0].problem], ["H100"])
                assert jobs or harness.refusal(one, suite.cases[0].problem, "H100"), one


@pytest.mark.parametrize(
    ("operator", "reason"), [("1 / 0", "ZeroDivisionError"), ("OPERATOR = 3", "must offer an object OPERATOR")]
)
def test_our_own_package_with_an_operator_that_does_not_fit_is_refused(repository, operator, reason):
    with_package(repository, operator)
    with (
        checked_out(repository, *asked(repository, "packaged", "packaged")) as found,
        pytest.raises(SubjectError) as refused,
    ):
        subjects_at("flash_attention", *found)
    assert str(refused.value).startswith("revision packaged: its operator does not fit this harness: ")
    assert reason in str(refused.value)


def test_an_operator_that_differs_between_the_revisions_is_refused(repository):
    toml = (repository / "kernels" / "kernel.toml").read_text().replace("tests.proof.fake_operator", "meaning.operator")
    (repository / "kernels" / "meaning").mkdir()
    operator = "from tests.proof.fake_operator import OPERATOR\n"
    commit(repository, {"kernel.toml": toml, "meaning/operator.py": operator, "meaning/__init__.py": ""}, tag="third")
    commit(repository, {"meaning/operator.py": operator + "# twice the budget\n"}, tag="fourth")
    with (
        checked_out(repository, *asked(repository, "third", "fourth")) as found,
        pytest.raises(SubjectError) as refused,
    ):
        subjects_at(str(repository / "kernels"), *found)
    sys.modules.pop("meaning.operator"), sys.modules.pop("meaning")
    assert "meaning/operator.py differs between A and B" in str(refused.value)


# The two chains


class Revisions(FakeGpu):
    """A simulated GPU on which B takes ``A_FASTER`` times as long as A, with a little noise that is the same always."""

    def _capture_launches(self, payload, on_event):
        self.subject = payload["subject"]["name"]
        return super()._capture_launches(payload, on_event)

    def _measure(self, payload, on_event):
        subject = payload["subject"]["name"]
        baseline = payload["baselines"][0]
        self.seconds = {subject: 1e-3 * A_FASTER, baseline: 1e-3, f"{baseline}#2": 1e-3}
        roles = {subject: "subject", baseline: "baseline", f"{baseline}#2": "control"}

        def change(payload, case):
            for arm in case["arms"]:
                arm["role"] = roles[arm["name"]]
            for arm, column in case["rounds"]["seconds"]["graph"].items():
                noise = [1 + 1e-3 * ((7 * i + len(roles[arm])) % 5 - 2) / 2 for i in range(len(column))]
                column[:] = [s * n for s, n in zip(column, noise, strict=True)]
            return case

        self.change = change
        return super()._measure(payload, on_event)


@pytest.fixture
def fake(monkeypatch):
    """Take the place of a GPU, and of the workers."""
    gpu = Revisions()
    monkeypatch.setattr(chain, "_read_environment", lambda: environment_with(GPU))
    monkeypatch.setattr(run, "run_task", gpu.run)
    monkeypatch.setitem(chain._GATES, "import", lambda _: passed("left out: it takes seconds"))
    return gpu


def prove_both(repository, a="first", b="second", **changes):
    """Run both chains; return the record, what was saved, and what was announced."""
    recorder = Recorder()
    said: list[str] = []
    with checked_out(repository, *asked(repository, a, b)) as found:
        subject, _ = subjects_at(str(repository / "kernels"), *found)
        settings = FEW.model_copy(update={"times": ["graph"], "rounds": 10, "processes": 3})
        request = replace(request_of(subject), baselines=[], settings=settings, **changes)
        record = prove_revisions(request, tolerance=0.01, progress=recorder, announce=said.append, save=recorder.save)
    return record, recorder, said


def test_b_is_timed_against_a_and_a_second_copy_of_a_after_both_are_right(repository, fake, tmp_path):
    record, recorder, said = prove_both(repository)
    first, second = (git(repository, "rev-parse", tag) for tag in ("first", "second"))
    assert said == [f"A: first ({first[:12]})", f"B: second ({second[:12]})"]
    assert [name for name, _ in fake.calls] == [
        *["capture_launches", "check_correct", "check_answers"] * 2,
        *["measure"] * 4,
    ]
    assert [payload["subject"]["name"] for _, payload in fake.calls[:2]] == [f"doubling@{first[:12]}"] * 2
    assert recorder.started == [
        *(names := ["sources", "build", "import", "launch", "correct"]),
        *names,
        "quick",
        "bench",
    ]

    assert record.compared is not None
    assert (record.compared.a.commit, record.compared.b.commit) == (first, second)
    assert {gate.name: gate.status for gate in record.compared.a.gates}["correct"] is GateStatus.PASSED
    assert record.compared.a.sources != record.compared.b.sources == record.subject.sources
    assert (record.environment.commit, record.environment.dirty) == (second, False)
    assert record.subject.folder == "kernels"
    assert all(saved.compared is not None for saved in recorder.saved)
    assert "flashmoe-compare" not in record.model_dump_json()

    write_record(record, tmp_path / "run.json")
    comparison = compare_revisions(read_record(tmp_path / "run.json"))
    assert (comparison.effect, exit_code(comparison)) == (Effect.SLOWER, 1)
    assert comparison.cases[0].ratio is not None
    assert comparison.cases[0].ratio.estimate == pytest.approx(1 / A_FASTER, rel=1e-3)


@pytest.mark.parametrize(("wrong", "label"), [(0, "first"), (1, "second")])
def test_a_revision_that_is_wrong_is_not_timed(repository, fake, monkeypatch, wrong, label):
    name = f"doubling@{git(repository, 'rev-parse', label)[:12]}"
    right = fake._check_correct

    def check(payload, on_event):
        result = right(payload, lambda _: None)
        for case in result.data["cases"]:
            if payload["subject"]["name"] == name:
                case.update(status="failed", reason="NaN in 1 of 12480 elements")
            on_event({"event": "case", "case": case})
        return result

    monkeypatch.setattr(fake, "_check_correct", check)
    record, _, _ = prove_both(repository)
    comparison = compare_revisions(record)
    assert "measure" not in [task for task, _ in fake.calls]
    assert len([task for task, _ in fake.calls if task == "check_correct"]) == 2  # the other one is looked at too
    assert (comparison.gate_failed, exit_code(comparison)) == ("correct", 3)
    assert comparison.reason.startswith(f"{label} (")
    assert "NaN in 1 of 12480" in comparison.reason


def test_each_revision_is_built_in_its_own_checkout(repository, fake, tmp_path):
    toml = (repository / "kernels" / "kernel.toml").read_text()
    command = f"cat helper.py >> {tmp_path}/built"
    commit(repository, {"kernel.toml": f"{toml}\n[build]\ncommand = ['sh', '-c', '{command}']\n"}, tag="third")
    commit(repository, {"helper.py": "FACTOR = 1.0  # fourth\n"}, tag="fourth")
    prove_both(repository, "third", "fourth")
    assert (tmp_path / "built").read_text() == "FACTOR = 1.0  # second\nFACTOR = 1.0  # fourth\n"
    assert not (repository / "built").exists()


def test_an_interruption_of_a_leaves_and_books_what_a_had_finished(repository, fake, tmp_path, monkeypatch, capsys):
    def interrupted(payload, on_event):
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "_check_correct", interrupted)
    (tmp_path / "suite.toml").write_text(SUITE)
    monkeypatch.setenv("FLASHMOE_STORE", str(tmp_path / "runs"))
    monkeypatch.chdir(repository)
    arguments = ["compare", "first", "second", "--subject", "kernels", "--suite", str(tmp_path / "suite.toml")]
    assert cli.main(arguments) == 130
    (path,) = (repository / "evidence").glob("*.json.gz")
    assert f"what was finished is in evidence/{path.name}" in capsys.readouterr().err
    record = read_record(path)
    assert record.incomplete_reason == "A (first): interrupted in gate correct"
    assert record.compared is not None
    assert {gate.name: gate.status.value for gate in record.compared.a.gates}["launch"] == "passed"
    assert {gate.status.value for gate in record.gates} == {"not reached"}
    booked = {(entry.run, entry.gate) for entry in Store().costs()}
    assert (record.id, "launch") in booked
    assert cli.main(["show", record.id]) == 0
    assert cli.main(["runs"]) == 0


# The command, with real workers and no GPU

SUITE = """
name = "short"
operator = "tests.proof.fake_operator"
description = "One case."
[[cases]]
batch = 1
heads = 2
head_dim = 32
seqlen_q = 64
origin = "made for a test"
"""


def test_the_command_with_a_gpu_times_both_and_says_what_both_cost(repository, fake, tmp_path, monkeypatch, capsys):
    (tmp_path / "suite.toml").write_text(SUITE)
    monkeypatch.setenv("FLASHMOE_STORE", str(tmp_path / "runs"))
    monkeypatch.setattr("flashmoe_science.cli.compare.list_sensors", list)  # there is a GPU
    monkeypatch.chdir(repository)
    arguments = ["compare", "first", "HEAD", "--subject", "kernels", "--suite", str(tmp_path / "suite.toml")]
    assert cli.main(arguments) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert [line for line in out.splitlines() if line.startswith("slower")] == [
        "slower     1 slower: b1_h2_s64_d32_fp16 (graph) 0.971x"
    ]
    assert out.count("cost: about") == 2
    assert "(45 s of NVIDIA H200)" in out  # 2 + 3 for the gates launch and correct of each, and 7 x 5 for the times
    assert cli.main([*arguments, "--json", "--tolerance", "0.1"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cost"]["gpu_seconds"] == 45.0
    assert document["comparison"]["effect"] == "same"
    assert document["record"]["command"].startswith("flashmoe compare first HEAD --subject kernels")
    assert str(tmp_path) not in json.dumps(document)


@pytest.mark.parametrize(
    ("seconds", "stopped"),
    # As the simulated GPU takes them: launch 2 and correct 3 of A, the same of B, then quick 5 and bench 15.
    [(4.9, "A correct"), (6.9, "B launch"), (29.9, "B bench")],
)
def test_a_budget_is_of_both_revisions(repository, fake, tmp_path, monkeypatch, capsys, seconds, stopped):
    expected = {"launch": 2.0, "correct": 3.0, "quick": 5.0, "bench": 15.0}
    monkeypatch.setattr(
        "flashmoe_science.proof.cost.cost.estimate",
        lambda size, _: Estimate({name: s for name, s in expected.items() if name in size.gates}, "made up"),
    )
    (repository / "rates.toml").write_text("[gpu.H200]\ndollars_per_hour = 3600\n")
    (repository / "evidence").mkdir()
    (tmp_path / "suite.toml").write_text(SUITE)
    monkeypatch.setenv("FLASHMOE_STORE", str(tmp_path / "runs"))
    monkeypatch.chdir(repository)
    options = ["--subject", "kernels", "--suite", str(tmp_path / "suite.toml"), "--budget", str(seconds), "--json"]
    assert cli.main(["compare", "first", "second", *options]) == 4
    document = json.loads(capsys.readouterr().out)
    record = document["record"]
    side, gate = stopped.split()
    assert document["cost"]["gpu_seconds"] <= seconds
    assert not record["complete"]
    gates = {each["name"]: each for each in (record["compared"]["a"]["gates"] if side == "A" else record["gates"])}
    assert gates[gate]["status"] == "not reached"
    assert gates[gate]["summary"].startswith("the budget of $")
    assert gates[gate]["hint"].startswith("a comparison cannot be gone on with")
    assert f"stopped before gate {gate}: the budget" in record["incomplete_reason"]
    if side == "A":  # nothing is paid for B
        assert {each["gpu_seconds"] for each in record["gates"]} == {0.0}
    assert "the run is incomplete" in " ".join(document["comparison"]["notes"])


def start(repository, tmp_path, *arguments):
    (tmp_path / "suite.toml").write_text(SUITE)
    variables = {"PYTHONPATH": python_path(ROOT / "src", ROOT), "FLASHMOE_STORE": str(tmp_path / "runs")}
    variables |= {"TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    argv = [sys.executable, "-m", "flashmoe_science", "compare", *arguments, "--subject", "kernels", "--suite"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes["preexec_fn"] = heed_signals
    return subprocess.Popen(
        [*argv, str(tmp_path / "suite.toml")], cwd=repository, env={**os.environ, **variables}, **pipes
    )


def test_the_command_shows_on_a_cpu_that_both_build_and_that_one_is_wrong(tmp_path, monkeypatch, capsys):
    repository = attention_repository(tmp_path / "repository", b="1.5").resolve()
    (tmp_path / "suite.toml").write_text(SUITE)
    monkeypatch.setattr(chain, "_read_environment", lambda: environment_with(None))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("FLASHMOE_STORE", str(tmp_path / "runs"))
    monkeypatch.setenv("PYTHONPATH", python_path(ROOT / "src", ROOT))
    monkeypatch.chdir(repository)
    code = cli.main(["compare", "first", "second", "--subject", "kernels", "--suite", str(tmp_path / "suite.toml")])
    out, err = capsys.readouterr()
    assert code == 3, err
    lines = out.splitlines()
    correct = [line.split()[:2] for line in lines if line.startswith("correct")]
    assert correct == [["correct", "passed"], ["correct", "failed"]], out
    assert any(line.startswith("gate failed  second (") and "wrong in 1 of 1 case" in line for line in lines)
    (path,) = (repository / "evidence").glob("*.json.gz")
    assert compare_revisions(read_record(path)).gate_failed == "correct"
    assert leftovers(repository) == (0, [])
    assert cli.main(["show", path.name[:8], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["comparison"]["gate_failed"] == "correct"


def test_ctrl_c_during_a_build_kills_it_and_removes_the_checkouts(tmp_path):
    build = "\n[build]\ncommand = ['sh', '-c', 'echo $$ > {}; exec sleep 600']\n".format(tmp_path / "pid")
    repository = attention_repository(tmp_path / "repository", more=build).resolve()
    process = start(repository, tmp_path, "first", "second")
    end = time.monotonic() + 120
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert leftovers(repository) == (0, [])
    assert wait_until_dead(int((tmp_path / "pid").read_text()))
