"""Suites: what is packaged is what was asked for, and a wrong file is told apart by file, key and what was expected."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashmoe_science.errors import SuiteError
from flashmoe_science.proof.subject.loading import load_operator, load_subject
from flashmoe_science.proof.subject.registry import BUILTIN_OPERATORS
from flashmoe_science.proof.subject.suites import _SuiteFile, list_suites, load_suite, suite_beside

from .fake_operator import Problem

OPERATOR = "tests.proof.fake_operator"

GOOD = f"""
name = "mine"
operator = "{OPERATOR}"
description = "Two shapes."
[defaults]
heads = 2
head_dim = 32
origin = "my model"
[[cases]]
batch = 1
seqlen_q = 7
[[cases]]
name = "long"
batch = 1
seqlen_q = 70
heads = 3
origin = "my other model"
"""


def write(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


def test_user_file_is_read_with_defaults_and_names(tmp_path):
    suite = load_suite(write(tmp_path, GOOD))
    assert (suite.name, suite.operator, suite.description) == ("mine", OPERATOR, "Two shapes.")
    first, second = suite.cases
    assert (first.name, first.origin, first.problem) == ("b1_h2_s7_d32_fp16", "my model", Problem(1, 2, 7, 32))
    assert (second.name, second.origin, second.problem) == ("long", "my other model", Problem(1, 3, 70, 32))
    assert len({case.problem for case in suite.cases}) == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'description = "Two shapes."',
            'descripton = "x"',
            "key descripton: unknown key, expected one of name, operator",
        ),
        ('name = "mine"', 'name = "a/b"', "key name: expected a name of letters, digits, '_', '.' and '-', got 'a/b'"),
        (OPERATOR, "attentoin", "key operator: there is no operator called 'attentoin'"),
        (OPERATOR, "tests.proof.builders", "must offer an object OPERATOR"),
        ('origin = "my model"', "", "key cases.0.origin: expected where this shape comes from, got None"),
        ("seqlen_q = 7\n", "seqlen_q = -7\n", "key cases.0: seqlen_q must be an integer above 0, got -7"),
        ('name = "long"', 'name = "b1_h2_s7_d32_fp16"', "key cases.1: the name 'b1_h2_s7_d32_fp16' is taken"),
        ("[[cases]]", "[cases", "is not valid TOML"),
        ("[defaults]", "[[defaults]]", "key defaults: expected a table of the keys that every case has, got [{"),
    ],
)
def test_wrong_file_names_key_and_expectation(tmp_path, old, new, message):
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(SuiteError) as error:
        load_suite(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\nhint: " in str(error.value)


def test_an_edited_copy_of_a_packaged_suite_needs_a_name_of_its_own(tmp_path):
    text = list_suites()["seed"].read_text(encoding="utf-8")
    assert load_suite(write(tmp_path, text)).cases == load_suite("seed").cases
    fewer = text[: text.rindex("[[cases]]")]
    with pytest.raises(SuiteError, match="key name: a packaged suite of other cases is called 'seed'"):
        load_suite(write(tmp_path, fewer))
    assert len(load_suite(write(tmp_path, fewer.replace('name = "seed"', 'name = "some"', 1))).cases) == 12


def test_unknown_name_lists_what_there_is():
    with pytest.raises(
        SuiteError,
        match=r"one of .*context-parallel, .*decode, .*host, .*moe-decode, .*, varlen or a file, got 'sead'\nhint",
    ):
        load_suite("sead")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("features", 12),
        ("host", 6),
        ("scaling", 20),
        ("seed", 13),
        ("standard", 36),
        ("standard-fp16", 36),
        ("unseen", 24),
    ],
)
def test_packaged_suite_loads_with_an_origin_everywhere(name, count):
    suite = load_suite(name)
    assert (suite.name, suite.operator, len(suite.cases)) == (name, "attention", count)
    assert all(case.origin for case in suite.cases)


# The page about it.

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "suites.md").read_text()


def test_the_example_in_the_docs_is_valid(tmp_path):
    suite = load_suite(write(tmp_path, PAGE.partition("```toml\n")[2].partition("```")[0]))
    assert [case.name for case in suite.cases][1] == "prompt against a long cache"


def test_every_key_of_a_case_is_explained_in_the_docs():
    operators: list[Any] = [load_operator(name) for name in BUILTIN_OPERATORS]
    for key in (*_SuiteFile.model_fields, *(key for operator in operators for key in operator.keys)):
        assert f"`{key}`" in PAGE or f"[{key}]" in PAGE
    for name in list_suites():
        assert f"| `{name}` |" in PAGE


@pytest.mark.parametrize("verb", ["prove", "diagnose"])
def test_a_suite_of_another_operator_is_refused_with_the_one_beside_the_subject(verb, monkeypatch, capsys, tmp_path):
    from flashmoe_science import cli

    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("FLASHMOE_STORE", str(tmp_path / "runs"))
    monkeypatch.setattr("sys.path", list(sys.path))
    assert cli.main([verb, "examples/rms_norm", "--suite", "seed"]) == 2
    assert capsys.readouterr().err.endswith("\nhint: --suite examples/rms_norm/suite.toml\n")


def test_the_suite_beside_a_kernel_is_that_of_its_operator_alone(tmp_path):
    subject = replace(load_subject("flash_attention"), builtin=False, folder=tmp_path)
    assert suite_beside(subject) is None
    path = tmp_path / "suite.toml"
    path.write_text('name = "a"\noperator = "moe"\ndescription = "x"\ncases = []\n')
    assert suite_beside(subject) is None
    path.write_text(path.read_text().replace("moe", "attention"))
    assert suite_beside(subject) == path
    assert suite_beside(replace(subject, builtin=True)) is None
