"""Tests of what holds for every verb: exit codes, streams, errors, help and documentation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from flashmoe_science.errors import CompileError, TooFewRoundsError

from ..proof.claim_builders import claim_toml
from ..proof.processes import python_path
from .conftest import RUN_ID

ROOT = Path(__file__).resolve().parents[2]
VERBS = (
    *("prove", "diagnose", "compare", "verify", "show", "report", "runs", "import", "export", "explain", "doctor"),
    *(
        "init",
        "suites",
        "baselines",
        "readme",
        "claim new",
        "lint",
        "cost",
        "cost add",
        "cost rates",
        "history",
        "sign",
    ),
)


def run_process(*args, code="import sys; from flashmoe_science.cli import main; sys.exit(main())", **environment):
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT / "src"), **environment}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_has_a_line_and_an_example(run, verb):
    code, out, err = run(*verb.split(), "--help")
    assert (code, err) == (0, "")
    assert re.search(r"Examples?:\n +flashmoe " + verb, out)
    assert "--json" in out


def commands():
    """Return every verb; one below another is called by both words."""
    from flashmoe_science.cli.app import app

    root: Any = typer.main.get_command(app)
    found: dict[str, Any] = {}
    for name in root.list_commands(None):
        command = root.get_command(None, name)
        below = vars(command).get("commands") or {}
        found |= {f"{name} {word}": each for word, each in below.items()}
        if not below or vars(command).get("invoke_without_command"):
            found[name] = command
    return found


def test_every_verb_is_tested_here():
    assert set(commands()) == set(VERBS)


def test_no_arguments_show_the_help(run):
    assert run() == run("--help")
    assert run()[0] == 0


def test_the_version(run):
    assert re.fullmatch(r"flashmoe \d+\.\d+\S*\n", run("--version")[1])


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        (["prov"], "verb must be one of prove, init,", "did you mean prove?"),
        (
            ["baselines", "--operator", "atention"],
            "there is no operator called 'atention'",
            "did you mean attention? ours",
        ),
        (["prove", "--expct", "2"], "No such option: --expct", "flashmoe prove --help shows what it takes"),
        (["show"], "Missing argument 'RUN'", "flashmoe show --help shows what it takes"),
        (["prove", "--rounds", "0"], "rounds must be at least 1, got '0'", "flashmoe prove --help shows what it takes"),
        (["prove", "--expect", "fast"], "expect must be a number, got 'fast'", "flashmoe prove --help"),
        (
            ["prove", "--rounds", "abc"],
            "rounds must be an integer, got 'abc'",
            "flashmoe prove --help shows what it takes",
        ),
        (["show", "20270101"], "there is no run '20270101'", ""),
        (["show", RUN_ID.replace("made", "mead")], "there is no run", f"did you mean {RUN_ID}?"),
        (["suites", "sede"], "suite must be one of", "did you mean seed?"),
        (["explain", "--shape", "1,1,1,8", "--gpu", "H20"], "gpu must be one of", "no other is known"),
        (["prove", "--gpu", "L40S"], "gpu must be one of A100, A10G, L4,", "no other is known"),  # an L40S is no L4
        (["prove", "--gpu", "rtx4090"], "got 'rtx4090'", "did you mean RTX 4090?"),
        (["explain", "--shape", "1,2,3"], "shape must be four integers B,H,S,D, got '1,2,3'", "e.g. --shape"),
    ],
)
def test_wrong_usage_is_an_error_a_hint_and_2(run, args, error, hint):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert error in err
    assert f"hint: {hint}" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("args", [["show", "nothing"], ["prove", "--expct"], ["nosuchverb"]])
def test_an_error_is_one_json_document_too(run, args):
    code, out, err = run(*args, "--json")
    document = json.loads(out)
    assert document["exit_code"] == code == 2
    assert document["error"]["message"] in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TooFewRoundsError("too few", hint="more"), 4),
        (CompileError("spills"), 3),
        (KeyboardInterrupt(), 130),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_verb_raises_decides_the_exit_code(run, monkeypatch, error, code):
    def raise_it(*_):
        raise error

    monkeypatch.setattr("flashmoe_science.cli.show.Archive", raise_it)
    got, out, err = run("runs")
    assert (got, out) == (code, "")
    assert "Traceback" not in err


def test_a_fault_of_ours_is_no_verdict(run, monkeypatch):
    monkeypatch.setattr("flashmoe_science.cli.show.Archive", lambda *_: 1 / 0)
    code, out, err = run("runs", "--json")
    assert code == 70
    assert "Traceback" in err
    assert json.loads(out)["error"]["type"] == "ZeroDivisionError"


@pytest.mark.parametrize("missing", ["typer", "scipy"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(missing):
    blocked = f"import sys; sys.modules['{missing}'] = None; "
    done = run_process("verify", "--json", code=blocked + "from flashmoe_science.cli import main; sys.exit(main())")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: {missing} is not installed",
        "hint: in a clone: pip install -e '.[proof]'",
    ]
    assert json.loads(done.stdout)["exit_code"] == 2


@pytest.mark.parametrize(
    ("args", "stream", "code"),
    [
        (["verify"], "stdout", 1),
        pytest.param(["verify", "--json"], "stdout", 1, marks=pytest.mark.exhaustive),
        (["readme", "--check"], "stderr", 1),
        (["--help"], "stdout", 0),
    ],
)
def test_a_reader_that_goes_away_changes_no_exit_code(repository, args, stream, code):
    (repository / "claims" / "seed.toml").write_text(claim_toml(suite="made_up", factor=2.9))
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "flashmoe_science", *args]
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT / "src", ROOT)}
    out, err = (writer if stream == name else subprocess.PIPE for name in ("stdout", "stderr"))
    done = subprocess.run(command, stdout=out, stderr=err, text=True, check=False, env=environment)
    os.close(writer)
    said = [line for line in (done.stderr or "").splitlines() if not line.startswith("not seen in ")]
    assert (done.returncode, said) == (code, [])


@pytest.mark.parametrize("args", [["verify"], ["show", RUN_ID], ["runs"]])
def test_lines_in_a_pipe_are_not_broken_coloured_or_padded(run, args):
    _, out, _ = run(*args)
    assert "\033[" not in out
    assert all(line == line.rstrip() for line in out.splitlines())


def test_colour_can_be_forced_and_forbidden(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\033[32m" in run("show", RUN_ID)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\033\[[\d;]*3\dm", run("show", RUN_ID)[1])
