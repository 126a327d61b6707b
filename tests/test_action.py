"""The GitHub Action: its inputs are used and documented, and its script does with flashmoe what it says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}

FAKE = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$ASKED"
echo "2 claims: 2 demonstrated"
exit "$CODE"
"""


@pytest.fixture
def script(tmp_path):
    """Run the action's own script with a flashmoe that notes its arguments; return exit code, output and arguments."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "flashmoe").write_text(FAKE)
    (tmp_path / "bin" / "flashmoe").chmod(0o755)

    def script(code=0, **inputs):
        given = {name: spec.get("default", "") for name, spec in ACTION["inputs"].items()} | inputs
        step = STEPS["flashmoe"]
        environment = {
            name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: given[match[1]], value)
            for name, value in step["env"].items()
        }
        environment |= {
            "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
            "CODE": str(code),
            "ASKED": str(tmp_path / "asked"),
        }
        files = {name: str(tmp_path / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        environment |= {**files, "RUNNER_TEMP": str(tmp_path)}
        command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        asked = (tmp_path / "asked").read_text().splitlines() if (tmp_path / "asked").exists() else None
        return done.returncode, done.stdout, asked

    return script


def test_verify_is_the_default_and_its_code_is_the_steps(script, tmp_path):
    assert script() == (0, "2 claims: 2 demonstrated\n", ["verify", "--junit", "flashmoe-junit.xml"])
    assert (tmp_path / "GITHUB_OUTPUT").read_text() == "exit-code=0\n"
    assert "2 claims: 2 demonstrated" in (tmp_path / "GITHUB_STEP_SUMMARY").read_text()
    assert script(code=1)[0] == 1


def test_strict_and_further_arguments_reach_the_command(script):
    assert script(strict="true", args="--why")[2] == ["verify", "--junit", "flashmoe-junit.xml", "--strict", "--why"]
    asked = script(command="prove", strict="true", args="my_kernel.toml  --until correct", junit="a.xml")[2]
    assert asked == ["prove", "--junit", "a.xml", "my_kernel.toml", "--until", "correct"]


def test_arguments_of_several_lines_all_reach_the_command(script):
    args = "my_kernel.toml\n  --until correct\n\n--suite a.toml\n"  # as `args: |` gives them
    asked = script(command="prove", args=args)[2]
    assert asked[3:] == ["my_kernel.toml", "--until", "correct", "--suite", "a.toml"]


@pytest.mark.parametrize(("code", "allowed", "got"), [(4, "true", 0), (4, "false", 4), (1, "true", 1), (3, "true", 3)])
def test_an_open_claim_may_be_let_through_and_nothing_else(script, tmp_path, code, allowed, got):
    assert script(code, **{"allow-open": allowed})[0] == got
    assert (tmp_path / "GITHUB_OUTPUT").read_text() == f"exit-code={code}\n"


@pytest.mark.parametrize("args", ["$(touch gone)", "; touch gone", "`touch gone`"])
def test_no_input_is_read_as_a_command(script, args, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert script(args=args)[2][3:] == args.split()
    assert not (tmp_path / "gone").exists()


def test_another_command_is_refused(script):
    code, out, asked = script(command="rm")
    assert (code, asked) == (2, None)
    assert out == "::error::command must be verify or prove, got 'rm'\n"


def test_every_input_is_used_and_on_the_page():
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "how-to" / "prove-in-ci.md").read_text(encoding="utf-8")
    steps = text.partition("\nruns:")[2]
    for name in ACTION["inputs"]:
        assert re.search(rf"inputs\.{name}\b", steps), name
        assert f"| `{name}` |" in page, name
    assert set(re.findall(r"inputs\.([\w-]+)", steps)) == set(ACTION["inputs"])


def test_evidence_is_kept_whatever_happened():
    keep = STEPS["Keep what it showed"]
    assert keep["if"].startswith("always()")
    assert "/evidence/*.json*" in keep["with"]["path"]
