"""The plugin of pytest: a claim is a test that passes, fails or is skipped, and costs nothing where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashmoe_science.proof.judge import verify
from flashmoe_science.proof.records.documents import write_record
from flashmoe_science.proof.records.evidence import SourceFile
from flashmoe_science.proof.report import junit

from .proof import fake_operator
from .proof.builders import build_record
from .proof.claim_builders import claim_toml, suite_toml
from .proof.processes import python_path

pytest_plugins = ["pytester"]

# pytester forgets what a run imported: what is here already is not imported anew, for seconds, in every one.
IMPORTED = (junit, verify, fake_operator)
SOURCE = Path(__file__).resolve().parents[1] / "src"
# unraisableexception collects garbage five times at the end of a run, which takes seconds where torch is imported.
WITHOUT = ("no:flashmoe", "no:cacheprovider", "no:unraisableexception", "no:hypothesispytest")
ARGS = (*(word for name in WITHOUT for word in ("-p", name)), "-p", "flashmoe_science.pytest_plugin", "-rA")


@pytest.fixture
def repository(pytester):
    """A repository with claims of every kind."""
    root = pytester.path
    (root / "claims").mkdir()
    (root / "suites").mkdir()
    (root / "suites" / "made_up.toml").write_text(suite_toml("made_up", "case0", "case1"))
    factors = {"holds": 2.0, "refuted": 9.0, "open": 2.3}
    tables = [claim_toml(id=name, suite="made_up", factor=factor) for name, factor in factors.items()]
    tables.append(claim_toml(id="asserted", suite="made_up", gpu="B200"))
    (root / "claims" / "a.toml").write_text("\n".join(tables))
    write_record(build_record(speedups=[2.3, 3.0], suite="made_up"), root / "evidence" / "run.json")
    return root


@pytest.fixture
def run(pytester, repository):
    """Run test functions with the plugin; return what pytester saw."""

    def run(text, *args):
        pytester.makepyfile(test_made_up=f"import pytest\n\n{text}")
        return pytester.runpytest_inprocess(*ARGS, *args)

    return run


def marked(*names, body="pass"):
    markers = "\n".join(f'@pytest.mark.flashmoe(claim="{name}")' for name in names)
    return f"{markers}\ndef test_speed():\n    {body}\n"


def test_a_claim_that_holds_passes_and_the_body_runs(run):
    run(marked("holds")).assert_outcomes(passed=1)
    run(marked("holds", body="assert False")).assert_outcomes(failed=1)


def test_a_refuted_claim_fails_and_the_body_does_not_run(run):
    result = run(marked("refuted", body="print('ran')"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*claim refuted: refuted: 2 of 2 cases are below 9x*"])
    result.stdout.no_fnmatch_line("ran")


@pytest.mark.parametrize(
    ("name", "outcomes", "made"),
    [("refuted", {"failed": 1}, 0), ("open", {"skipped": 1}, 0), ("holds", {"passed": 1}, 1)],
)
def test_fixtures_are_made_only_where_the_claim_holds(run, repository, name, outcomes, made):
    fixture = "@pytest.fixture\ndef dear():\n    print('made it')\n\n"
    result = run(fixture + marked(name).replace("test_speed()", "test_speed(dear)"), "--junit-xml=out.xml")
    result.assert_outcomes(**outcomes)
    assert result.stdout.str().count("made it") == made
    assert f'errors="0" failures="{outcomes.get("failed", 0)}"' in (repository / "out.xml").read_text()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("scipy", "scipy is not installed\nhint: in a clone: pip install -e '.[proof]'"),
        ("torch", "torch is not installed\nhint: pip install torch"),
        ("my_operator", "there is no module my_operator\nhint: a suite or a record names an operator that needs it"),
    ],
)
def test_a_module_that_is_not_there_is_named_with_what_to_do(run, monkeypatch, module, message):
    def missing(*_args, **_kwargs):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(verify, "verify_claim", missing)
    result = run(marked("holds"))
    result.assert_outcomes(failed=1)
    assert message in result.stdout.str()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("open", "*claim open: inconclusive, about * rounds more would decide: 1 of 2 cases are inconclusive*"),
        ("asserted", "*claim asserted: asserted: there is no evidence*"),
    ],
)
def test_what_nobody_knows_is_skipped_with_the_reason(run, name, reason):
    result = run(marked(name))
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines([reason])


def test_of_several_claims_the_failure_goes_before_the_skip(run):
    run(marked("asserted", "refuted", "holds")).assert_outcomes(failed=1)
    run(marked("asserted", "holds")).assert_outcomes(skipped=1)
    run('@pytest.mark.flashmoe("holds", "refuted")\ndef test_speed(): ...').assert_outcomes(failed=1)


def test_a_stale_claim_passes_unless_strict(run, repository):
    sources = [SourceFile(path="k.cu", sha256="0" * 64)]
    record = build_record(speedups=[2.3, 3.0], suite="made_up", sources=sources)
    subject = record.subject.model_copy(update={"folder": "src/flashmoe_science"})
    write_record(record.model_copy(update={"subject": subject}), repository / "evidence" / "run.json")
    run(marked("holds")).assert_outcomes(passed=1)
    result = run(marked("holds"), "--flashmoe-strict")
    result.assert_outcomes(failed=1)
    said = "before its sources changed: *files changed: 1 of 1 (1 of them not in this repository), k.cu"
    result.stdout.fnmatch_lines([f"*claim holds: stale: *{said}*"])


def test_the_fixture_returns_the_verdict_where_it_holds(run):
    lines = ["verdict = flashmoe_claim('{}')", "assert verdict.cases[1].interval.low > 2.9"]
    body = "\n    ".join(["def test_speed(flashmoe_claim):", *lines])
    run(body.format("holds")).assert_outcomes(passed=1)
    run(body.format("refuted")).assert_outcomes(failed=1)
    run(body.format("open")).assert_outcomes(skipped=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (marked("hold"), "*there is no claim 'hold'*"),
        (marked("hold"), "*hint: did you mean holds?*"),
        ("@pytest.mark.flashmoe\ndef test_speed(): ...", "*flashmoe expects the id of a claim*"),
        ("@pytest.mark.flashmoe(clam='holds')\ndef test_speed(): ...", "*flashmoe expects the id of a claim*"),
        ("@pytest.mark.flashmoe(claim=3)\ndef test_speed(): ...", "*flashmoe expects the id of a claim*"),
    ],
)
def test_wrong_usage_fails_the_test_and_says_what_is_expected(run, text, message):
    result = run(text)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([message])
    result.stdout.no_fnmatch_line("*During handling of*")


def test_a_wrong_claim_file_fails_the_test_with_its_key(run, repository):
    path = repository / "claims" / "a.toml"
    path.write_text(path.read_text().replace("metric", "metrik", 1))
    result = run(marked("holds"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*a.toml: key claim.0.metrik: unknown key*did you mean metric?"])


def test_collecting_imports_neither_torch_nor_the_harness(repository):
    (repository / "test_made_up.py").write_text(f"import pytest\n\n{marked('holds')}\n\ndef test_other(): ...\n")
    code = """
import sys, pytest
arguments = [*sys.argv[1:], "--collect-only", "-q", "--strict-markers"]
assert pytest.main(arguments) == 0
assert pytest.main([*sys.argv[1:], "-k", "other"]) == 0
heavy = {"torch", "triton", "pydantic", "scipy", "flashmoe_science.proof"} & set(sys.modules)
assert not heavy, heavy
"""
    environment = {**os.environ, "PYTHONPATH": python_path(SOURCE), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plugin = ("-p", "flashmoe_science.pytest_plugin", "-p", "no:cacheprovider")
    command = [sys.executable, "-c", code, *plugin]
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
