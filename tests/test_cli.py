"""Tests of the command line: exit codes, streams, errors, help and documentation of every verb."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from flashmoe_science import cli
from flashmoe_science.errors import CompileError, TooFewRoundsError
from flashmoe_science.proof.evidence import write_record
from flashmoe_science.proof.readme import BEGIN, END
from flashmoe_science.proof.store import Store

from .proof.builders import build_gates, build_record
from .proof.claim_builders import claim_toml

ROOT = Path(__file__).resolve().parent.parent
VERBS = ("prove", "verify", "show", "runs", "explain", "doctor", "suites", "baselines", "readme")
ID = "20260101T000000Z-made_up-flash_attention-000000"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Make a repository with one claim and one record the current folder, with a store beside it."""
    folder = tmp_path / "repository"
    (folder / "claims").mkdir(parents=True)
    (folder / "claims" / "seed.toml").write_text(claim_toml(suite="made_up"))
    write_record(build_record(speedups=[2.3, 3.0], suite="made_up"), folder / "evidence" / f"{ID}.json")
    (folder / "README.md").write_text(f"# Title\n{BEGIN}\n{END}\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FLASHMOE_STORE", str(tmp_path / "runs.sqlite"))
    monkeypatch.delenv("COLUMNS", raising=False)
    return folder


@pytest.fixture
def run(repository, capsys):
    """Run a command line in ``repository``; return its exit code, stdout and stderr."""

    def run(*args):
        code = cli.main(args)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def run_process(*args, code="import sys; from flashmoe_science.cli import main; sys.exit(main())", **environment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


# What holds for every verb


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_has_a_line_an_example_and_its_exit_codes(run, verb):
    code, out, err = run(verb, "--help")
    assert (code, err) == (0, "")
    assert re.search(r"Examples?:\n +flashmoe " + verb, out)
    assert re.search(r"Exit codes:\n +0 ", out)
    assert "--json" in out


def commands():
    from flashmoe_science.cli.verbs import app

    return typer.main.get_command(app).commands


def test_every_verb_and_option_is_in_the_documentation():
    sections = dict(
        re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", (ROOT / "docs/cli.md").read_text(), re.MULTILINE | re.DOTALL)
    )
    assert set(commands()) == set(VERBS)
    missing = [
        f"{verb} {name}"
        for verb, command in commands().items()
        for parameter in command.params
        for name in (parameter.opts if parameter.param_type_name == "option" else [parameter.metavar])
        if f"`{name}" not in sections[verb] and name not in ("-h", "--help")
    ]
    assert missing == []


def test_no_arguments_show_the_help(run):
    assert run() == run("--help")
    assert run()[0] == 0


def test_the_version(run):
    assert re.fullmatch(r"flashmoe \d+\.\d+\S*\n", run("--version")[1])


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        (["prov"], "No such command 'prov'", "flashmoe --help shows what it takes"),
        (["prove", "--expct", "2"], "No such option: --expct", "flashmoe prove --help shows what it takes"),
        (["show"], "Missing argument 'RUN'", "flashmoe show --help shows what it takes"),
        (["prove", "--rounds", "0"], "Invalid value for '--rounds'", "flashmoe prove --help shows what it takes"),
        (["show", "20270101"], "there is no run '20270101'", ""),
        (["show", ID.replace("made", "mead")], "there is no run", f"did you mean {ID}?"),
        (["suites", "sede"], "suite must be one of seed", "did you mean seed?"),
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
    def raise_it(**_):
        raise error

    monkeypatch.setattr("flashmoe_science.cli.looking.run_runs", raise_it)
    got, out, err = run("runs")
    assert (got, out) == (code, "")
    assert "Traceback" not in err


def test_a_fault_of_ours_is_no_verdict(run, monkeypatch):
    monkeypatch.setattr("flashmoe_science.cli.looking.run_runs", lambda **_: 1 / 0)
    code, out, err = run("runs", "--json")
    assert code == 70
    assert "Traceback" in err
    assert json.loads(out)["error"]["type"] == "ZeroDivisionError"


def test_missing_packages_are_named_with_the_command_that_installs_them():
    blocked = "import sys; sys.modules.update({'typer': None, 'sqlalchemy': None}); "
    done = run_process("verify", "--json", code=blocked + "from flashmoe_science.cli import main; sys.exit(main())")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: flashmoe needs packages that are not installed: sqlalchemy, typer",
        'hint: pip install "flashmoe-science[proof]", or only these: pip install sqlalchemy typer',
    ]
    assert json.loads(done.stdout)["exit_code"] == 2


@pytest.mark.parametrize(
    ("args", "heavy"),
    [
        ([], {"torch", "triton", "rich", "pydantic", "sqlalchemy", "scipy", "numpy"}),
        (["runs"], {"torch", "triton"}),
    ],
    ids=["help", "runs"],
)
def test_quick_verbs_import_nothing_heavy(args, heavy, tmp_path):
    code = f"import sys; from flashmoe_science.cli import main; main(); sys.exit(str({heavy} & set(sys.modules) or ''))"
    done = run_process(*args, code=code, FLASHMOE_STORE=str(tmp_path / "runs.sqlite"))
    assert done.stderr.strip().splitlines()[-1:] in ([], ["no runs yet: flashmoe prove makes the first"])


def test_the_module_is_the_command():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "flashmoe_science", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.startswith("flashmoe ")


@pytest.mark.parametrize("args", [["show", ID], ["show", ID, "--json"], ["runs"], ["--help"]])
def test_a_reader_that_goes_away_is_no_error(repository, args):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "flashmoe_science", *args]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("args", [["verify"], ["show", ID], ["runs"]])
def test_lines_in_a_pipe_are_not_broken_coloured_or_padded(run, args):
    _, out, _ = run(*args)
    assert "\033[" not in out
    assert all(line == line.rstrip() for line in out.splitlines())


def test_colour_can_be_forced_and_forbidden(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\033[32m" in run("show", ID)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\033\[[\d;]*3\dm", run("show", ID)[1])


# verify


def test_verify_prints_a_line_for_every_claim_and_the_count(run):
    code, out, err = run("verify")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].startswith("demonstrated  It is twice as fast. | lowest of 2 cases 2.30x [2.29, 2.31]; " + ID)
    assert lines[-1] == "1 claim: 1 demonstrated"


@pytest.mark.parametrize(
    ("claim", "code", "status"),
    [({"factor": 2.9}, 1, "refuted"), ({"gpu": "B200"}, 4, "asserted"), ({"factor": 2.3}, 4, "inconclusive")],
)
def test_verify_returns_what_the_verdicts_say(run, repository, claim, code, status):
    (repository / "claims" / "seed.toml").write_text(claim_toml(suite="made_up", **claim))
    got, out, _ = run("verify", "--json")
    document = json.loads(out)
    assert got == document["exit_code"] == code
    assert [verdict["status"] for verdict in document["verdicts"]] == [status]
    assert run("verify")[1].startswith(status)


def test_verify_why_gives_the_reason(run):
    assert "every one of 2 cases is at least 2x" in run("verify", "--why")[1]


def test_verify_names_file_and_key_of_a_wrong_claim(run, repository):
    (repository / "claims" / "seed.toml").write_text(claim_toml().replace("factor", "faktor"))
    code, _, err = run("verify")
    assert code == 2
    assert "seed.toml: key claim.0.faktor" in err


def test_verify_outside_of_a_repository(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = run("verify")
    assert (code, err.splitlines()[0]) == (2, "error: there are no claims here")


def test_verify_without_claims_shows_nothing_and_says_so(run, repository):
    (repository / "claims" / "seed.toml").unlink()
    assert run("verify")[:2] == (4, "0 claims\n")


# show and runs


def test_show_renders_a_run_of_the_evidence_folder(run):
    code, out, err = run("show", "20260101")
    assert (code, err) == (0, "")
    for part in (ID, "NVIDIA H200", "sources  passed", "case1", "sdpa#2 (control)", "2.30x [2.29, 2.31]"):
        assert part in out
    assert out.splitlines()[-1].startswith("demonstrated  It is twice as fast.")


def test_show_reads_a_file_and_the_store(run, repository):
    stored = build_record(day=5)
    Store().save(stored)
    assert run("show", "20260106")[1].startswith(f"run       {stored.id}")
    assert run("show", f"evidence/{ID}.json")[1].startswith(f"run       {ID}")


def test_show_as_json_is_the_record(run):
    code, out, _ = run("show", ID, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["record"]["id"] == ID
    assert document["verdicts"][0]["status"] == "demonstrated"


def test_show_of_a_time_that_was_not_taken(run, repository):
    record = build_record(times=("wall",), day=2)
    Store().save(record)
    code, _, err = run("show", record.id, "--time", "graph")
    assert (code, err) == (2, "error: time must be one of wall in this run, got graph\n")
    assert "speedup, wall" in run("show", record.id)[1]


def test_show_verbose_adds_the_kernels_that_ran(run):
    assert "made_up_kernel" not in run("show", ID)[1]
    assert "made_up_kernel" in run("show", ID, "--verbose")[1]


def test_show_writes_csv(run, repository):
    assert run("show", ID, "--csv", "times.csv")[0] == 0
    with (repository / "times.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2 * 3 * 3


def test_csv_that_cannot_be_written_is_an_error(run):
    code, _, err = run("show", ID, "--csv", "no/such/folder.csv")
    assert (code, err) == (2, "error: no/such/folder.csv: cannot be written: No such file or directory\n")


def test_runs_lists_both_places_newest_first(run):
    for day in (1, 2):
        Store().save(build_record(day=day))
    _, out, _ = run("runs")
    assert [line.split()[-1] for line in out.splitlines()[2:]] == ["store", "store", "evidence"]
    code, out, err = run("runs", "--limit", "1")
    assert (code, len(out.splitlines()), err) == (0, 3, "2 more: --limit 0 lists all\n")
    document = json.loads(run("runs", "--suite", "made_up", "--json")[1])
    assert ([r["id"] for r in document["runs"]], document["found"]) == ([ID], 1)


def test_runs_warns_of_a_broken_file_and_goes_on(run, repository):
    (repository / "evidence" / "broken.json").write_text("{")
    code, out, err = run("runs")
    assert (code, ID in out) == (0, True)
    assert err.startswith("warning: ")
    assert "broken.json" in err


def test_runs_where_there_are_none(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run("runs") == (0, "", "no runs yet: flashmoe prove makes the first\n")


# readme


def test_readme_rewrites_the_table_and_check_finds_it_stale(run, repository):
    code, out, err = run("readme", "--check")
    assert (code, out, err) == (1, "README.md: the table of speeds is stale\n", "hint: flashmoe readme rewrites it\n")
    assert "**demonstrated**" not in (repository / "README.md").read_text()
    assert run("readme")[:2] == (0, "README.md: the table of speeds rewritten\n")
    assert "**demonstrated**" in (repository / "README.md").read_text()
    assert run("readme", "--check")[:2] == (0, "README.md: the table of speeds is current\n")
    assert json.loads(run("readme", "--json")[1]) == {"path": "README.md", "current": True, "rewritten": False}


# prove: the chain itself is tested in tests/proof; here a made-up run stands in for it


@pytest.fixture
def prove_with(run, monkeypatch):
    """Run ``flashmoe prove`` with a chain that gives back ``record``."""
    requests = []

    def prove_with(record, *args, interrupt=False):
        def chain(request, *, progress, save):
            requests.append(request)
            for gate in record.gates:
                progress.start(gate.name)
                progress.advance(1, 2, "half")
                progress.finish(gate)
            save(record)
            if interrupt:
                raise KeyboardInterrupt
            return record

        monkeypatch.setattr("flashmoe_science.cli.proving.prove", chain)
        return run("prove", *args)

    prove_with.requests = requests
    return prove_with


def test_prove_prints_gates_table_verdict_and_where_the_record_is(prove_with, repository):
    record = build_record(speedups=[2.3, 3.0], day=1)
    code, out, err = prove_with(record)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == "proving flash_attention on suite seed (13 cases), against sdpa"
    assert [line.split()[0] for line in lines[1:8]] == [gate.name for gate in record.gates]
    assert "case and arm" in out
    assert lines[-3].startswith("demonstrated  flash_attention is at least 1x as fast as sdpa in each case of seed")
    assert lines[-1] == f"record: evidence/{record.id}.json"
    assert (repository / "evidence" / f"{record.id}.json").exists()
    assert Store().load(record.id) == record


def test_prove_is_judged_by_the_claims_of_the_repository(prove_with):
    code, out, _ = prove_with(build_record(speedups=[1.2, 3.0], suite="made_up", day=1))
    assert code == 1
    assert "refuted       It is twice as fast. | lowest of 2 cases 1.20x" in out


def test_prove_passes_on_what_was_asked(prove_with):
    prove_with(
        build_record(),
        *("--suite", "standard", "-b", "sdpa,sdpa-flash", "-b", "sdpa-cudnn", "--gpu", "L4", "--until", "quick"),
        *("--expect", "1.7", "--time", "wall", "--processes", "2", "--rounds", "7", "--seed", "5"),
    )
    request = prove_with.requests[0]
    assert request.suite.name == "standard"
    assert list(request.baselines) == ["sdpa", "sdpa-flash", "sdpa-cudnn"]
    assert (list(request.gpus), request.until, request.expect) == (["L4"], "quick", 1.7)
    settings = request.settings
    assert (settings.times, settings.processes, settings.rounds, settings.seed) == (["wall"], 2, 7, 5)
    assert request.command.startswith("flashmoe prove --suite standard -b sdpa,sdpa-flash")


def test_prove_with_no_gpu_ends_with_the_verdicts_of_verify(prove_with):
    code, out, _ = prove_with(build_record(gpu=None, day=1))
    assert code == 0
    lines = out.splitlines()
    assert "not timed     sources, build, import, correct passed; launch, quick, bench not possible here" in out
    assert lines[-5] == "The claims of this repository, by the evidence that it carries:"
    assert lines[-4].startswith("demonstrated  It is twice as fast.")


def test_prove_with_no_gpu_holds_even_where_a_claim_does_not(prove_with, repository):
    (repository / "claims" / "seed.toml").write_text(claim_toml(suite="made_up", factor=2.9))
    code, out, _ = prove_with(build_record(gpu=None, day=1))
    assert code == 0
    assert "\nrefuted       It is twice as fast." in out


def test_prove_returns_3_for_a_failed_gate_and_says_it_last(prove_with):
    code, out, _ = prove_with(build_record(gates=build_gates("launch"), times=(), day=1))
    assert code == 3
    assert out.splitlines()[-3] == "gate failed   launch: made up: failed"


def test_prove_as_json_has_the_log_on_stderr(prove_with):
    record = build_record(suite="made_up", speedups=[2.3], day=1)
    code, out, err = prove_with(record, "--json", "--csv", "times.csv")
    document = json.loads(out)
    assert document["exit_code"] == code == 0
    assert document["record"]["id"] == record.id
    assert document["path"] == f"evidence/{record.id}.json"
    assert document["verdicts"][0]["claim"]["id"] == "seed-graph"
    assert "launch   passed" in err
    assert Path("times.csv").read_text().count("\n") == 1 + 3 * 3


def test_prove_that_is_interrupted_says_where_the_finished_cases_are(prove_with):
    record = build_record(complete=False, day=1)
    code, out, err = prove_with(record, interrupt=True)
    assert code == 130
    assert f"interrupted: what was finished is in evidence/{record.id}.json" in err
    assert "Traceback" not in out + err


def test_prove_goes_on_when_the_store_cannot_be_written(prove_with, repository, monkeypatch):
    monkeypatch.setenv("FLASHMOE_STORE", str(repository / "README.md" / "runs.sqlite"))
    record = build_record(speedups=[2.3], day=1)
    code, _, err = prove_with(record)
    assert code == 0
    assert err.startswith("warning: run store")
    assert (repository / "evidence" / f"{record.id}.json").exists()


def test_prove_outside_of_a_repository_writes_to_the_current_folder(prove_with, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    record = build_record(speedups=[2.3])
    assert prove_with(record)[0] == 0
    assert (tmp_path / "evidence" / f"{record.id}.json").exists()


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["flash_atention"], "did you mean flash_attention?"),
        (["--suite", "sede"], "did you mean seed?"),
        (["--baseline", "sdap"], "did you mean sdpa?"),
        (["--until", "corect"], "did you mean correct?"),
        (["missing.toml"], "missing.toml: cannot be read"),
    ],
)
def test_prove_suggests_the_nearest_name(run, args, error):
    code, out, err = run("prove", *args)
    assert (code, out) == (2, "")
    assert error in err
