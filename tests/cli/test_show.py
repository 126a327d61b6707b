"""Tests of the verbs that only look: verify, show, runs, explain, doctor, suites, baselines, readme."""

from __future__ import annotations

import csv
import json
import re
import sys

import pytest

from flashmoe_science.proof.measure.baselines import BaselineStatus
from flashmoe_science.proof.measure.doctor import Check
from flashmoe_science.proof.processes import TaskResult
from flashmoe_science.proof.records.documents import write_record
from flashmoe_science.proof.records.evidence import SourceFile
from flashmoe_science.proof.records.store import Store

from ..proof.builders import build_record
from ..proof.claim_builders import build_claim, claim_toml, suite_toml, worded
from ..proof.own_kernels import write_kernel
from .conftest import RUN_ID, SENTENCE

# verify


def test_a_file_that_is_no_record_is_said_to_be_none(run):
    code, _, err = run("show", "README.md")
    assert (code, err.startswith("error: README.md: is no record of a run: Invalid JSON")) == (2, True)


def test_verify_prints_a_line_for_every_claim_and_the_count(run):
    code, out, err = run("verify")
    lines = out.splitlines()
    assert code == 0
    assert all(line.startswith("not seen in 1 of 1 claim: ") for line in err.splitlines())
    assert lines[0].startswith(
        f"demonstrated  {SENTENCE} (seed-graph) | lowest of 2 cases 2.30x [2.29, 2.31]; " + RUN_ID
    )
    assert lines[-1] == "1 claim: 1 demonstrated"


def test_verify_says_what_the_other_cases_show_of_a_claim_that_selects_some(run, repository):
    speedups = [2.3, *[0.5] * 12]
    write_record(build_record(speedups=speedups, suite="made_up"), repository / "evidence" / f"{RUN_ID}.json.gz")
    names = [f"case{number}" for number in range(13)]
    (repository / "suites" / "made_up.toml").write_text(suite_toml("made_up", *names))
    claim = worded(build_claim(suite="made_up", cases="case0", sentence="made below"), 13)
    (repository / "claims" / "seed.toml").write_text(
        claim_toml(suite="made_up", cases="case0", sentence=claim.sentence)
    )
    code, out, _ = run("verify")
    assert code == 0
    assert "in 1 of 13 cases of suite made_up (`case0`)." in out
    assert "the other 12 cases show 12 slower, lowest 0.499x" in out


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


def test_verify_writes_junit(run, repository):
    assert run("verify", "--junit", "junit.xml")[0] == 0
    assert (
        '<testcase classname="flashmoe.claims.flash_attention" name="seed-graph"'
        in (repository / "junit.xml").read_text()
    )
    code, _, err = run("verify", "--junit", "README.md/junit.xml")
    assert code == 2
    assert err.startswith("error: README.md/junit.xml: cannot be written")


def test_verify_of_a_stale_claim_holds_unless_strict(run, repository):
    record = build_record(speedups=[2.3, 3.0], suite="made_up", sources=[SourceFile(path="k.cu", sha256="0" * 64)])
    subject = record.subject.model_copy(update={"folder": "src/flashmoe_science"})
    write_record(record.model_copy(update={"subject": subject}), repository / "evidence" / f"{RUN_ID}.json.gz")
    code, out, err = run("verify")
    assert code == 0
    assert out.startswith(f"stale         {SENTENCE} (seed-graph) | lowest of 2 cases 2.30x [2.29, 2.31]; ")
    changed = "1 of 1 (1 of them not in this repository), k.cu"
    assert f"files changed: {changed}\n" in out
    assert out.endswith("1 claim: 1 stale\n")
    assert err.startswith("hint: a stale claim holds for the commit that it names")
    assert run("verify", "--strict")[:2] == (4, out)


def test_another_copy_of_the_package_is_the_cause_that_is_named(run, repository):
    """An installation that is a copy cannot tell what runs on a GPU: its verdicts get a hint, and reach no page."""
    record = build_record(speedups=[2.3, 3.0], suite="made_up", sources=[SourceFile(path="k.cu", sha256="0" * 64)])
    subject = record.subject.model_copy(update={"folder": "src/flashmoe_science"})
    write_record(record.model_copy(update={"subject": subject}), repository / "evidence" / f"{RUN_ID}.json.gz")
    (repository / "src" / "flashmoe_science").mkdir(parents=True)
    code, out, err = run("verify")
    assert (code, out.partition(" ")[0]) == (0, "stale")
    assert err.startswith("hint: another copy of the package runs here than the repository's own, so what it runs on a")
    assert err.splitlines()[0].endswith(": pip install -e . takes that one")
    before = (repository / "README.md").read_text()
    for options in ((), ("--check",), ("README.md",)):
        code, _, err = run("readme", *options)
        assert code == 2
        assert "another copy of the package runs here than the repository's own, and cannot say which" in err
    assert (repository / "README.md").read_text() == before


def test_verify_with_a_record_that_cannot_be_read_judges_the_others_and_returns_2(run, repository):
    broken = repository / "evidence" / "broken.json"
    broken.write_text("{")
    code, out, err = run("verify")
    assert code == 2
    assert out.startswith(f"inconclusive  {SENTENCE} (seed-graph) | ")
    assert "evidence/broken.json cannot be read, and may be of a run that decides it" in out
    assert out.endswith("1 record cannot be read, so no claim that may rest on it is demonstrated\n")
    assert err.startswith(f"warning: {broken}: is no record of a run: Invalid JSON")
    assert err.endswith("hint: restore it with git or `flashmoe export`, or take it out of evidence/\n")
    document = json.loads(run("verify", "--json")[1])
    assert (document["exit_code"], len(document["unreadable"])) == (2, 1)


def test_verify_outside_of_a_repository(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = run("verify")
    said = f"error: there is no folder claims/ here: {tmp_path} is in no folder that has one"
    assert (code, err.splitlines()[0]) == (2, said)
    assert "`flashmoe claim new`" in err


def test_verify_without_claims_shows_nothing_and_says_so(run, repository):
    (repository / "claims" / "seed.toml").unlink()
    code, out, err = run("verify")
    assert (code, out) == (4, "0 claims\n")
    assert err.startswith("hint: claims holds none: `flashmoe claim new`")


# show and runs


def test_show_renders_a_run_of_the_evidence_folder(run):
    code, out, err = run("show", "20260101")
    assert (code, err.startswith("hint: these verdicts are as of the run; `flashmoe verify`")) == (0, True)
    for part in (RUN_ID, "NVIDIA H200", "sources  passed", "case1", "sdpa#2 (control)", "2.30x [2.29, 2.31]"):
        assert part in out
    assert out.splitlines()[-1].startswith(f"demonstrated  {SENTENCE}")


def test_show_as_json_is_the_record(run):
    code, out, _ = run("show", RUN_ID, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["record"]["id"] == RUN_ID
    assert document["verdicts"][0]["status"] == "demonstrated"


def test_show_of_a_time_that_was_not_taken(run, repository):
    record = build_record(times=("wall",), day=2)
    Store().save(record)
    code, _, err = run("show", record.id, "--time", "graph")
    assert (code, err) == (2, "error: this run took wall time, not graph time\n")
    assert "speedup, wall" in run("show", record.id)[1]


def test_show_of_memory(run, repository):
    record = build_record(day=2)
    peaks = {"flash_attention": 3 << 20, "sdpa": 4 << 20, "sdpa#2": 5 << 20}
    arms = [arm.model_copy(update={"peak_bytes": peaks[arm.name]}) for arm in record.cases[0].arms]
    Store().save(record.model_copy(update={"cases": [record.cases[0].model_copy(update={"arms": arms})]}))
    _, out, _ = run("show", record.id, "--memory")
    rows = [line.split() for line in out.splitlines() if "MiB" in line]
    assert rows == [
        ["flash_attention", "3.000", "MiB"],
        ["sdpa", "4.000", "MiB", "1.333"],
        ["sdpa#2", "(control)", "5.000", "MiB", "1.250"],
    ]
    assert "speedup" not in out


def test_show_verbose_adds_the_kernels_that_ran(run):
    assert "made_up_kernel" not in run("show", RUN_ID)[1]
    assert "made_up_kernel" in run("show", RUN_ID, "--verbose")[1]


def test_show_writes_csv(run, repository):
    assert run("show", RUN_ID, "--csv", "times.csv")[0] == 0
    with (repository / "times.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2 * 3 * 3


def test_runs_lists_both_places_newest_first(run):
    for day in (1, 2):
        Store().save(build_record(day=day))
    _, out, _ = run("runs")
    assert [line.split()[-1] for line in out.splitlines()[2:]] == ["store", "store", "evidence"]
    code, out, err = run("runs", "--limit", "1")
    assert (code, len(out.splitlines()), err) == (0, 3, "2 more: --limit 0 lists all\n")
    document = json.loads(run("runs", "--suite", "made_up", "--json")[1])
    assert ([r["id"] for r in document["runs"]], document["found"]) == ([RUN_ID], 1)


def test_runs_warns_of_a_broken_file_and_goes_on(run, repository):
    (repository / "evidence" / "broken.json").write_text("{")
    code, out, err = run("runs")
    assert (code, RUN_ID in out) == (0, True)
    assert err.startswith("warning: ")
    assert "broken.json" in err


# explain, doctor, suites, baselines


@pytest.mark.triton
def test_explain_gives_the_plan_and_what_the_compiler_says(run, monkeypatch):
    monkeypatch.setattr("flashmoe_science.gpu.compile.compile_kernel", None)  # another process compiles
    code, out, err = run("explain", "--shape", "1,1,64,64", "--gpu", "L4")
    assert (code, err) == (0, "compiling for L4\n")
    assert out.startswith("b1_h1_s64_d64_fp16 on L4: ")
    assert re.search(
        r"^  compile \w+: \d+ registers a thread, no spills, [\d.]+ KiB of shared memory", out, re.MULTILINE
    )


@pytest.mark.triton
@pytest.mark.parametrize(
    ("call", "kernels"),
    [
        (["--shape", "1,4,16,64", "--backward"], {"_prepare_backward_kernel", "_backward_sm90_kernel"}),
        pytest.param(
            ["--shape", "16,128,1,576", "--cache", "--mla", "--page-size", "64", "--seqlen-k", "8192"],
            {"_decode_sm90_kernel", "_merge_splits_kernel"},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            ["--experts", "4096,16,2,256,128", "--backward"], {"_weights_sm90_kernel"}, marks=pytest.mark.exhaustive
        ),
    ],
)
def test_explain_compiles_every_kind_of_call(run, call, kernels):
    code, out, _ = run("explain", *call, "--dtype", "bf16", "--gpu", "H200", "--json")
    found = json.loads(out)
    assert (code, found["fits"]) == (0, True)
    assert kernels <= {each["kernel"] for each in found["compiled"]}
    assert found["compiled"][0]["registers"] > 0


@pytest.fixture
def plan_of(run, monkeypatch):
    """Return the plan that ``flashmoe explain`` gives; nothing is compiled."""
    answer = TaskResult(ok=True, data={"compiled": []}, reason="", seconds=0.0, output_tail="")
    monkeypatch.setattr("flashmoe_science.proof.worker.run_task", lambda *_, **__: answer)
    return lambda *call: json.loads(run("explain", *call, "--json")[1])["plan"]


def test_explain_says_why_a_kernel_does_not_compile(run, monkeypatch):
    answer = TaskResult(ok=True, data={"error": "no", "hint": "yes"}, reason="", seconds=0.0, output_tail="")
    monkeypatch.setattr("flashmoe_science.proof.worker.run_task", lambda *_, **__: answer)
    code, _, err = run("explain", "--shape", "1,1,64,64", "--gpu", "L4")
    assert (code, err) == (3, "compiling for L4\nerror: no\nhint: yes\n")


def test_explain_takes_every_size(plan_of):
    sizes = ["--kv-heads", "2", "--seqlen-k", "65", "--head-dim-v", "80", "--dtype", "bf16", "--causal"]
    problem = plan_of("--shape", "1,4,16,64", *sizes, "--gpu", "A100")["problem"]
    wanted = {"heads_kv": 2, "seqlen_k": 65, "head_dim_v": 80, "dtype": "bf16", "causal": True}
    assert {key: problem[key] for key in wanted} == wanted


def test_explain_of_a_call_with_a_cache(plan_of):
    call = ("--shape", "16,128,1,576", "--cache", "--mla", "--dtype", "bf16", "--gpu", "H200", "--seqlen-k", "8192")
    found = plan_of(*call, "--page-size", "64")
    assert found["kernel"] == "decode_gluon_sm90"
    problem = found["problem"]
    assert [problem[key] for key in ("heads_kv", "head_dim_v", "capacity", "page_size")] == [1, 512, 8192, 64]
    assert problem["shared_kv"]
    plan = plan_of(*call, "--page-size", "16", "--batch-invariant")
    assert (plan["kernel"], plan["shares"]["schedule"]) == ("decode_triton", "own length")
    plain = ("--shape", "2,8,3,64", "--cache", "--kv-heads", "2", "--seqlen-k", "100", "--causal", "--gpu", "L4")
    problem = plan_of(*plain)["problem"]
    assert (problem["heads_kv"], problem["capacity"], problem["page_size"], problem["shared_kv"]) == (2, 100, 0, False)


def test_explain_of_experts(plan_of):
    sizes = ("--experts", "4096,16,2,256,128", "--dtype", "bf16", "--gpu", "H200")
    plan = plan_of(*sizes, "--activation", "geglu")
    assert (plan["kernel"], plan["problem"]["activation"]) == ("grouped_gluon_sm90", "geglu")
    assert plan_of(*sizes, "--backward")["kernel"] == "moe_backward_gluon_sm90"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --shape or --experts"),
        (("--shape", "1,1,64,64", "--experts", "1,2,1,64,64"), "give --shape or --experts"),
        (("--shape", "1,1,64,64", "--activation", "silu"), "--activation: only with --experts"),
        (("--experts", "1,2,1,64,64", "--causal", "--kv-heads", "2"), "--kv-heads and --causal: only with --shape"),
        (("--experts", "1,2,1,64,64", "--cache"), "--cache: only with --shape"),
        (("--shape", "1,1,64,64", "--mla", "--page-size", "16"), "--page-size and --mla: only with --cache"),
        (("--shape", "1,1,64,64", "--cache", "--backward"), "--backward does not go with --cache"),
        (("--experts", "1,2,3,64,64"), "K must be at most the 2 experts, got 3"),
        (("--experts", "1,2,1,64"), "experts must be five integers T,E,K,H,I, got '1,2,1,64'"),
        (("--experts", "1,2,1,64,64", "--activation", "swigul"), "activation must be one of swiglu"),
    ],
)
def test_explain_of_what_is_not_one_call(run, arguments, message):
    code, _, err = run("explain", *arguments, "--gpu", "L4")
    assert code == 2
    assert message in " ".join(err.split())


def test_explain_of_what_no_kernel_serves(run):
    code, _, err = run("explain", "--shape", "1,1,64,1024", "--gpu", "L4")
    assert code == 2
    assert err.splitlines()[1] == "hint: the nearest that is served: 512"


def test_doctor_prints_a_line_for_every_check_and_its_hint(run, monkeypatch):
    checks = [Check("torch", ok=True, text="2.11"), Check("GPU", ok=None, text="none", hint="buy one")]
    monkeypatch.setattr("flashmoe_science.proof.measure.doctor.examine", lambda: iter(checks))
    monkeypatch.setattr("flashmoe_science.proof.measure.doctor.check_width", lambda: 5)
    code, out, _ = run("doctor")
    assert (code, out) == (0, "torch  ok       2.11\nGPU    none     none\n                hint: buy one\n")
    assert json.loads(run("doctor", "--json")[1])["checks"][1]["ok"] is None


def test_suites_lists_them_and_the_cases_of_one(run):
    assert re.search(r"^seed +attention +13 ", run("suites")[1], re.MULTILINE)
    assert {"name", "operator", "cases", "description"} == set(json.loads(run("suites", "--json")[1])["suites"][0])
    assert all(re.search(r"\w", line) for line in run("suites")[1].splitlines())  # no rule of a sentence's length
    _, out, _ = run("suites", "seed")
    assert re.search(r"^b1_h1_s512_d64_fp16 +\S", out, re.MULTILINE)
    cases = json.loads(run("suites", "seed", "--json")[1])["cases"]
    assert len(cases) == 13
    assert cases[0]["problem"]["head_dim"] == 4


def test_a_suite_of_somebodys_operator_is_listed_once_it_is_trusted(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "rms_norm_operator", raising=False)
    marker = tmp_path / "it ran"
    folder = write_kernel(tmp_path, "mine", lambda code: f"open({str(marker)!r}, 'w').close()\n{code}")
    suite = str(folder / "suite.toml")
    code, _, err = run("suites", suite)
    assert (code, marker.exists()) == (2, False)
    assert "is of operator rms_norm_operator:OPERATOR, code of" in " ".join(err.split())
    assert "hint: --trust lets the code" in err
    code, out, err = run("suites", suite, "--trust")
    assert (code, marker.exists()) == (0, True)
    assert " is trusted: " in err
    assert "made up" in out
    assert run("suites", suite)[0] == 0
    sys.modules.pop("rms_norm_operator")


def test_baselines_says_of_each_whether_it_runs_here(run, monkeypatch):
    found = [
        BaselineStatus("sdpa", available=True, reason="", version="2.11"),
        BaselineStatus("fa3", available=False, reason="no module flash_attn_3", version=""),
    ]
    monkeypatch.setattr("flashmoe_science.proof.measure.baselines.available_baselines", lambda operator: found)
    code, out, _ = run("baselines")
    assert code == 0
    assert [line.split(maxsplit=2) for line in out.splitlines()[1:]] == [
        ["sdpa", "yes", "2.11"],
        ["fa3", "no", "no module flash_attn_3"],
    ]
    assert json.loads(run("baselines", "--json")[1])["baselines"][1]["available"] is False


# readme


def test_readme_writes_every_page_with_marks(run, repository):
    page = repository / "docs" / "speeds.md"
    page.parent.mkdir()
    page.write_text("<!-- cases:begin -->\n<!-- cases:end -->\n")
    code, out, err = run("readme", "--check")
    assert (code, out) == (1, "README.md: out of date\ndocs/speeds.md: out of date\n")
    assert err == "hint: flashmoe readme without --check rewrites what is out of date\n"
    assert run("readme", "README.md")[:2] == (0, "README.md: rewritten\n")
    assert "**demonstrated**" in (repository / "README.md").read_text()
    late = {"path": "docs/speeds.md", "current": False, "rewritten": False}
    assert json.loads(run("readme", "--check", "--json")[1]) == {
        "pages": [{"path": "README.md", "current": True, "rewritten": False}, late],
        "current": False,
    }
    done = json.loads(run("readme", "--json")[1])
    assert [page["rewritten"] for page in done["pages"]] == [False, True]
    assert "\n## Suite made_up: " in page.read_text()
    assert run("readme", "--check")[:2] == (0, "README.md: current\ndocs/speeds.md: current\n")


def test_readme_writes_nothing_where_one_page_is_wrong(run, repository):
    (repository / "page.md").write_text("<!-- cases:begin -->\n")
    before = (repository / "README.md").read_text()
    code, out, err = run("readme", "README.md", "page.md")
    assert (code, out) == (2, "")
    assert err.startswith("error: page.md:1: expected the line <!-- cases:end --> too")
    assert (repository / "README.md").read_text() == before
