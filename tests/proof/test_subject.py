"""Subjects: a kernel.toml becomes a Subject, and a wrong one is told apart by file, key and what was expected."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from flashmoe_science.errors import SubjectError
from flashmoe_science.proof.records.evidence import SubjectInfo
from flashmoe_science.proof.subject import loading as subjects
from flashmoe_science.proof.subject.loading import load_entry, load_operator, load_subject, same_entry
from flashmoe_science.proof.subject.operator import framework_kernels, ours
from flashmoe_science.proof.subject.registry import BUILTIN_OPERATORS
from flashmoe_science.proof.subject.subject import KernelPromise, Limits, Subject, expand_sources, hash_sources

OPERATOR = "tests.proof.fake_operator"

GOOD = f"""
[subject]
name = "mine"
operator = "{OPERATOR}"
entry_point = "my_kernel_of_test_subject:attend"
sources = ["my_kernel_of_test_subject.py", "csrc/*.cu"]
expected_speedup = 1.7

[build]
command = "make all"
timeout_s = 60

[launch]
forbidden = ["*gemm*"]

[[launch.kernels]]
pattern = "*attend*"
grid = [4, 1, 1]
block = [384, 1, 1]
shared_memory_bytes = 49152

[[launch.kernels]]
pattern = "*merge*"
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "kernel.toml").write_text(GOOD)
    (tmp_path / "my_kernel_of_test_subject.py").write_text("def attend(): return 7\nversion = 3\n")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "b.cu").write_text("b")
    (tmp_path / "csrc" / "a.cu").write_text("a")
    return tmp_path


@pytest.fixture
def restore_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_kernel_of_test_subject", None)


def test_file_becomes_a_subject(folder):
    subject = load_subject(str(folder / "kernel.toml"))
    assert subject == Subject(
        name="mine",
        operator=OPERATOR,
        entry_point="my_kernel_of_test_subject:attend",
        folder=folder,
        sources=("kernel.toml", "my_kernel_of_test_subject.py", "csrc/*.cu"),
        build_command=("make", "all"),
        build_timeout_s=60,
        kernels=(KernelPromise("*attend*", (4, 1, 1), (384, 1, 1), 49152), KernelPromise("*merge*")),
        forbidden_kernels=("*gemm*",),
        expected_speedup=1.7,
    )
    assert load_subject(str(folder)) == subject


def test_subject_survives_json(folder):
    subject = load_subject(str(folder / "kernel.toml"))
    assert Subject.from_json(json.loads(json.dumps(subject.to_json()))) == subject


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[384, 1, 1]", "[384, 1, 0]", "key launch.kernels.0.block: expected three integers above 0, got [384, 1, 0]"),
        ("[4, 1, 1]", '"4"', "key launch.kernels.0.grid: expected three integers, got '4'"),
        ("block =", "blocks =", "key launch.kernels.0.blocks: unknown key, expected one of pattern, grid, block"),
        ('pattern = "*merge*"', "", "key launch.kernels.1.pattern: missing, expected a pattern on the kernel's name"),
        ("block =", "blok =", "grid, block, shared_memory_bytes; did you mean block?"),
        (
            'sources = ["my_kernel_of_test_subject.py", "csrc/*.cu"]',
            "sources = []",
            "key subject.sources: expected a list of",
        ),
        ("[launch]", "[lunch]", "key lunch: unknown key, expected one of subject, build, launch"),
        ('name = "mine"', 'name = "my kernel"', "key subject.name: expected a name of letters, digits"),
        (
            "expected_speedup = 1.7",
            "expected_speedup = inf",
            "key subject.expected_speedup: expected a finite number, got inf",
        ),
        ("[launch]", "[limits]\nlanch_s = 3\n[launch]", "key limits.lanch_s: unknown key, expected one of import_s"),
        ("expected_speedup = 1.7", "expected_speedup = true", "expected_speedup: expected a valid number, got True"),
        ("[subject]", "[subject]\ndeterministic = 1", "key subject.deterministic: expected true or false, got 1"),
        ("49152", "49152.0", "key launch.kernels.0.shared_memory_bytes: expected a valid integer, got 49152.0"),
        ('"csrc/*.cu"', '"/usr/a.cu"', "key subject.sources.1: expected a path relative to this file, got '/usr/a.cu'"),
        (OPERATOR, "attentoin", "key subject.operator: there is no operator called 'attentoin'"),
        (OPERATOR, "no.such.module", "key subject.operator: there is no operator called 'no.such.module'"),
        ("[subject]", "[subject", "is not valid TOML"),
    ],
)
def test_wrong_file_names_key_and_expectation(folder, old, new, message):
    path = folder / "kernel.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(SubjectError) as error:
        load_subject(str(path))
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_the_name_of_one_of_our_own_subjects_is_refused(folder):
    name = "fused_moe"
    (folder / "kernel.toml").write_text(GOOD.replace('"mine"', f'"{name}"'))
    with pytest.raises(SubjectError, match=rf"kernel\.toml: key subject\.name: expected a name .*, got '{name}'"):
        load_subject(str(folder))


def test_absent_file_and_unknown_name(monkeypatch):
    monkeypatch.setattr(subjects, "BUILTIN_OPERATORS", {OPERATOR: ("fake_attention",)})
    with pytest.raises(SubjectError, match=r"no/kernel\.toml: cannot be read: No such file"):
        load_subject("no/kernel.toml")
    with pytest.raises(SubjectError, match=r"no file or folder 'fake_atention'.*\n.*did you mean fake_attention\?"):
        load_subject("fake_atention")


def test_a_hint_names_the_file_that_lies_beside(folder, monkeypatch):
    monkeypatch.setattr(subjects, "BUILTIN_OPERATORS", {OPERATOR: ("fake_attention",)})
    monkeypatch.chdir(folder)
    (folder / "a_project.toml").write_text("[project]\n")
    for text, said in (
        (
            "mine",
            "there is no file or folder 'mine', and no kernel of ours of that name\nhint: name its file: ./kernel.toml",
        ),
        ("x.py", "x.py: a .py is no subject: name its kernel.toml\nhint: beside it is kernel.toml"),
        ("gone/x.py", "gone/x.py: a .py is no subject: name its kernel.toml\nhint: the format is in"),
        ("kernal.toml", "kernal.toml: cannot be read: No such file or directory\nhint: did you mean "),
        ("y.toml", "y.toml: cannot be read: No such file or directory\nhint: the format is in"),
    ):
        with pytest.raises(SubjectError) as error:
            load_subject(text)
        assert said in str(error.value)


def test_builtin_name_asks_the_operator(monkeypatch):
    monkeypatch.setattr(subjects, "BUILTIN_OPERATORS", {OPERATOR: ("fake_attention",)})
    subject = load_subject("fake_attention")
    assert subject.builtin
    assert subject.operator == OPERATOR
    assert subject.entry_point == f"{OPERATOR}:attend"
    assert (subject.folder / "proof" / "records" / "evidence.py").is_file()
    assert subject.devices == ("cuda", "cpu")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("flashmoe_science.attention.operator:f", "flashmoe_science.operators.attention:f", True),
        ("flashmoe_science.attention.operator:f", "flashmoe_science.operators.attention:g", False),
        ("mine.attention:f", "mine.operators.attention:f", False),
        ("mine:f", "flashmoe_science.operators.attention:f", False),
        ("mine:f", "mine:f", True),
    ],
)
def test_entry_points_of_ours_are_compared_without_their_module(one, other, same):
    assert same_entry(one, other) is same


def test_sources_are_expanded_and_hashed(folder):
    subject = load_subject(str(folder))
    names = ["kernel.toml", "my_kernel_of_test_subject.py", "csrc/a.cu", "csrc/b.cu"]
    assert expand_sources(subject) == (names, [])
    assert [source.path for source in hash_sources(subject)] == names
    before = {source.path: source.sha256 for source in hash_sources(subject)}
    (folder / "csrc" / "a.cu").write_text("other")
    after = {source.path: source.sha256 for source in hash_sources(subject)}
    assert [name for name in names if before[name] != after[name]] == ["csrc/a.cu"]


def test_entry_is_loaded_from_the_folder_of_the_file(folder, restore_path):
    assert load_entry(load_subject(str(folder)))() == 7


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("atend", r"has no attribute 'atend'\nhint: did you mean attend\?"),
        ("version", "must be callable, got int"),
    ],
)
def test_wrong_entry_point_is_explained(folder, restore_path, attribute, message):
    (folder / "kernel.toml").write_text(GOOD.replace(":attend", f":{attribute}"))
    with pytest.raises(SubjectError, match=message):
        load_entry(load_subject(str(folder)))


def test_custom_operator_is_found_beside_the_file(folder, restore_path):
    package = folder / "operators_of_test_subject"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "mine.py").write_text("from tests.proof.fake_operator import OPERATOR\n")
    (folder / "kernel.toml").write_text(GOOD.replace(OPERATOR, "operators_of_test_subject.mine"))
    operator = subjects.operator_of(load_subject(str(folder)))
    assert operator.name == "operators_of_test_subject.mine"  # as the file has it
    assert "sdpa" in operator.baselines()


# The page about it.


def example(page: str) -> str:
    """Return the first TOML block of a page of docs/."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / page).read_text()
    return text.partition("```toml\n")[2].partition("```")[0]


def test_the_example_in_the_docs_is_valid_and_has_every_key(tmp_path):
    (tmp_path / "kernel.toml").write_text(example("kernel-toml.md").replace('"attention"', f'"{OPERATOR}"'))
    assert load_subject(str(tmp_path)).name == "my_attention"
    written = tomllib.loads((tmp_path / "kernel.toml").read_text())
    tables: dict[str, type[BaseModel]] = {
        "subject": subjects._SubjectTable,
        "build": subjects._BuildTable,
        "launch": subjects._LaunchTable,
    }
    for name, table in tables.items():
        assert set(written[name]) == set(table.model_fields)
    assert set(written["launch"]["kernels"][0]) == set(subjects._KernelTable.model_fields)


def test_every_key_is_explained_in_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "kernel-toml.md").read_text()
    explained = page.partition("## `[subject]`")[2]
    tables = (subjects._SubjectTable, subjects._BuildTable, subjects._LaunchTable, subjects._KernelTable)
    for key in {key for table in tables for key in table.model_fields}:
        assert f"`{key}`" in explained or f"[[launch.{key}]]" in explained
    for pattern in framework_kernels(load_operator("attention")):
        assert f"`{pattern}`" in explained


@pytest.mark.parametrize(
    ("command", "fine"),
    [
        ("{pyhton} setup.py", False),
        ("make {target}", False),
        ("{python} setup.py", True),
        ("bash -c '${PYTHON} x.py && { true; }'", True),
        ("cmake -DX={a}", True),
    ],
)
def test_a_misspelt_placeholder_of_a_build_command_is_refused(tmp_path, command, fine):
    (tmp_path / "kernel.toml").write_text(
        '[subject]\nname = "x"\noperator = "attention"\nentry_point = "x:y"\nsources = ["x.py"]\n'
        f"[build]\ncommand = {json.dumps(command)}\n"
    )
    if fine:
        assert load_subject(str(tmp_path)).build_command
        return
    said = "key build.command: expected no word in braces but {python}, the Python that runs the harness"
    with pytest.raises(SubjectError, match=re.escape(said)):
        load_subject(str(tmp_path))


def test_the_limits_of_a_file_and_those_of_the_command_line(folder):
    file = folder / "kernel.toml"
    assert load_subject(str(file)).limits == Limits()
    file.write_text(file.read_text() + "\n[limits]\nlaunch_s = 7\n")
    assert load_subject(str(file)).limits == Limits(launch_s=7.0)
    assert load_subject(str(file), time_limit=9.0).limits == Limits.of_all(9.0)
    assert load_subject("flash_attention", time_limit=9.0).limits.bench_s == 9.0
    # Limits of what holds a GPU: a hang costs minutes, and not the ten that a whole run may take.
    assert max(Limits.launch_s, Limits.correct_s, Limits.quick_s, Limits.bench_s) <= 120


def test_the_names_of_our_subjects_are_those_that_their_operators_have():
    for operator, names in BUILTIN_OPERATORS.items():
        assert tuple(ours(load_operator(operator)).entry_points()) == names


@pytest.mark.parametrize(
    ("changes", "ours"),
    [
        ({}, True),
        ({"entry_point": "flashmoe_science.elsewhere:flash_attention"}, True),  # its file moved
        ({"entry_point": "mine:flash_attention"}, False),
        ({"operator": "moe"}, False),
        ({"name": "mine"}, False),
        ({"folder": "kernels"}, False),
        ({"folder": "src/flashmoe_science"}, True),
    ],
)
def test_a_record_is_of_our_own_subject_by_its_name_operator_and_package(changes, ours):
    given: dict[str, Any] = {"name": "flash_attention", "operator": "attention", "folder": None, "sources": []}
    entry_point = "flashmoe_science.attention.api:flash_attention"
    assert subjects.is_builtin(SubjectInfo(**{**given, "entry_point": entry_point, **changes})) is ours
