"""Two revisions on a real GPU: a kernel against itself, and against one that does its work twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from flashmoe_science import cli

from .repositories import commit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timing,
    pytest.mark.usefixtures("import_left_out"),
    pytest.mark.skipif(shutil.which("git") is None, reason="compares revisions, which needs git"),
]

COMMON = Path(__file__).parents[1] / "subjects" / "common" / "plain_triton.py"

TOML = """
[subject]
name = "compared"
operator = "attention"
entry_point = "compared:attend"
sources = ["compared.py", "plain_triton.py"]
"""

ONCE = "from plain_triton import attend\n\n__all__ = ['attend']\n"

TWICE = """
import plain_triton


def attend(q, k, v, *, causal=False, softmax_scale=None):
    plain_triton.attend(q, k, v, causal=causal, softmax_scale=softmax_scale)
    return plain_triton.attend(q, k, v, causal=causal, softmax_scale=softmax_scale)
"""

SUITE = """
name = "short"
operator = "attention"
description = "Two cases."
[defaults]
batch = 1
heads = 4
head_dim = 64
dtype = "fp16"
origin = "made for a test"
[[cases]]
seqlen_q = 128
[[cases]]
seqlen_q = 512
"""


def story(document, err):
    """Return what a failing test has to say: why it is decided so, every gate of both revisions, every arm."""
    comparison, record = document["comparison"], document["record"]
    lines = [comparison["reason"], *(f"{case['name']}: {case['effect']}: {case}" for case in comparison["cases"])]
    for label, gates in (("A", record["compared"]["a"]["gates"]), ("B", record["gates"])):
        lines += [f"{label} {gate['name']}: {gate['status']}: {gate['summary']} {gate['details']}" for gate in gates]
    for case in record["cases"]:
        lines += [f"{case['name']}: {arm['name']} {arm['status']} {arm['reason']}" for arm in case["arms"]]
    return "\n".join(["", *lines, err])


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """Make a repository with the revisions ``once`` and ``twice``; return a way to compare two of them."""
    repository = tmp_path / "repository"
    files = {"kernel.toml": TOML, "compared.py": ONCE, "plain_triton.py": COMMON.read_text()}
    commit(repository, files, tag="once")
    commit(repository, {"compared.py": TWICE}, tag="twice")
    (tmp_path / "suite.toml").write_text(SUITE)
    monkeypatch.setenv("FLASHMOE_STORE", str(tmp_path / "runs"))
    monkeypatch.chdir(repository)

    def run(a, b, *more):
        options = ["--subject", "kernels", "--suite", str(tmp_path / "suite.toml"), "--time", "graph", *more, "--json"]
        code = cli.main(["compare", a, b, *options])
        out, err = capsys.readouterr()
        assert out.startswith("{"), (code, out, err)
        document = json.loads(out)
        assert "comparison" in document, (document, err)
        return code, document["comparison"], story(document, err)

    return run


def test_a_kernel_that_works_twice_is_slower_and_the_other_way_round_faster(compare):
    few = ("--processes", "2", "--rounds", "4")  # a factor of two needs no more
    code, comparison, said = compare("once", "twice", *few)
    assert (code, [case["effect"] for case in comparison["cases"]]) == (1, ["slower", "slower"]), said
    assert all(case["ratio"]["estimate"] < 0.9 for case in comparison["cases"]), said
    code, _, said = compare("twice", "once", *few)
    assert code == 0, said


def test_a_revision_against_itself_is_neither_faster_nor_slower(compare):
    code, comparison, said = compare("once", "once")
    assert code in (0, 4), said
    assert [case["ratio"] is not None for case in comparison["cases"]] == [True, True], said  # both were timed
    assert {case["effect"] for case in comparison["cases"]} <= {"same", "undecided"}, said
