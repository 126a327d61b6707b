"""Claim files are read or refused with file, key, expected and got; evidence is found by what it is about."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashmoe_science.errors import ClaimError
from flashmoe_science.proof.judge.claims import Claim, find_evidence, load_claims, why_not
from flashmoe_science.proof.records.documents import record_text
from flashmoe_science.proof.records.evidence import Record

from .builders import ENTRY_POINT, L4, build_record

GOOD = """
[[claim]]
id = "seed-graph"
sentence = "At least twice as fast as SDPA in each case."
subject = "flash_attention"
baseline = "sdpa"
suite = "seed"
metric = "graph"
factor = 2.0
gpu = "H200"
scope = "each case"
"""


def _write(folder, text, name="speed.toml"):
    (folder / name).write_text(text)
    return folder


def _claim(tmp_path, text=GOOD) -> Claim:
    return load_claims(_write(tmp_path, text))[0]


def test_a_list_of_baselines_means_the_fastest_of_them(tmp_path):
    claim = _claim(tmp_path, GOOD.replace('"sdpa"', '["cudnn", "fa3"]'))
    assert claim.baseline == ("cudnn", "fa3")


def test_claims_come_by_file_and_then_in_their_order(tmp_path):
    _write(tmp_path, GOOD.replace("seed-graph", "z") + GOOD.replace("seed-graph", "y"), "b.toml")
    _write(tmp_path, GOOD, "a.toml")
    _write(tmp_path, "not a claim", "readme.md")
    assert [claim.id for claim in load_claims(tmp_path)] == ["seed-graph", "z", "y"]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('gpu = "H200"\n', "", "key claim.0.gpu: missing, expected words of the GPU's name"),
        ('"H200"', '"-"', "key claim.0.gpu: expected words of the GPU's name, or a list of such names, got '-'"),
        ('"H200"', "[]", "key claim.0.gpu: expected a name or a list of different names, got []"),
        ('"each case"', '"each case"\nmax_age_days = 0', "key claim.0.max_age_days: expected greater than 0, got 0"),
        (
            '"each case"',
            '"each case"\nversions = {torch = "new"}',
            "key claim.0.versions.torch: expected versions such",
        ),
        ('"each case"', '"each case"\ncases = [3]', "key claim.0.cases: expected a name or a list of different names"),
        ("factor = 2.0", "factor = -1", "key claim.0.factor: expected greater than 0, got -1"),
        ("factor = 2.0", 'factor = "2"', "key claim.0.factor: expected a valid number, got '2'"),
        ("factor = 2.0", "factor = nan", "key claim.0.factor: expected a finite number, got nan"),
        ('"graph"', '"cuda"', "key claim.0.metric: expected 'kernel', 'graph', 'wall' or 'memory', got 'cuda'"),
        ('"each case"', '"mean"', "key claim.0.scope: expected 'each case' or 'geometric mean', got 'mean'"),
        ('"sdpa"', "[]", "key claim.0.baseline: expected a name or a list of different names, got []"),
        ('"sdpa"', '["a", "a"]', "key claim.0.baseline: expected different names, got ['a', 'a']"),
        ('"sdpa"', "3", "key claim.0.baseline: expected a name or a list of different names, got 3"),
        ("suite =", "suit =", "key claim.0.suit: unknown key, expected one of id, sentence"),
        ('"seed-graph"', '"Seed graph"', "key claim.0.id: expected an id of lower-case letters"),
        ("[[claim]]", "[claim]", "key claim: expected tables [[claim]], with two brackets"),
        ("[[claim]]", "[[claims]]", "key claim: missing, expected one table [[claim]] or more"),
        ('"seed-graph"', '"seed-graph', "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_file_key_expected_and_got(tmp_path, before, after, message):
    with pytest.raises(ClaimError) as caught:
        load_claims(_write(tmp_path, GOOD.replace(before, after)))
    assert f"{tmp_path / 'speed.toml'}: {message}" in str(caught.value)
    assert "docs/reference/claims.md" in caught.value.hint


def test_the_nearest_key_is_suggested(tmp_path):
    with pytest.raises(ClaimError, match=r"key claim\.0\.metrics: unknown key, .*; did you mean metric\?"):
        load_claims(_write(tmp_path, GOOD.replace("metric =", "metrics =")))


def test_two_claims_with_one_id_are_refused_and_both_files_named(tmp_path):
    _write(tmp_path, GOOD, "a.toml")
    with pytest.raises(ClaimError, match=r"b\.toml: key claim\.id: .* got 'seed-graph', as in .*a\.toml"):
        load_claims(_write(tmp_path, GOOD, "b.toml"))


def test_the_page_shows_a_claim_that_is_read_and_documents_every_key(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "reference" / "claims.md").read_text(encoding="utf-8")
    example = re.search(r"```toml\n(.*?)```", page, re.DOTALL)
    assert example is not None
    assert _claim(tmp_path, example[1]).factor == 2.0
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(Claim.model_fields)


def test_a_claim_for_several_gpus_is_also_one_for_each(tmp_path):
    claim = _claim(tmp_path, GOOD.replace('"H200"', '["H100", "H200"]'))
    assert claim.on_gpu("NVIDIA H200").gpu == ("H200",)


# Evidence


@pytest.mark.parametrize(
    ("versions", "got"),
    [
        ('torch = ">=2.9"', None),
        ('torch = "==2.11.0"', None),  # the build after the + is no other version
        ('torch = ">=2.9", triton = ">=3.6,<3.10"', None),
        ('driver = ">=570"', None),
        ('torch = "<2.11"', "the record is of torch 2.11.0+cu130, the claim of torch <2.11"),
        ('cudnn = ">=9"', "the record names no version of cudnn, the claim is of cudnn >=9"),
        ('strange = ">=9"', "the record's version of strange, 'a build', cannot be compared with >=9"),
    ],
)
def test_a_record_of_other_versions_is_no_evidence(tmp_path, versions, got):
    record = build_record()
    ran = {"torch": "2.11.0+cu130", "triton": "3.6.0", "strange": "a build"}
    record = record.model_copy(update={"environment": record.environment.model_copy(update={"versions": ran})})
    assert why_not(_claim(tmp_path, f"{GOOD}versions = {{{versions}}}\n"), record) == got


def test_the_newest_record_of_the_versions_claimed_is_the_evidence(tmp_path):
    records = {"evidence/old.json": build_record(day=1), "evidence/new.json": build_record(day=2)}
    new = records["evidence/new.json"]
    environment = new.environment.model_copy(update={"versions": {"torch": "2.12.0"}})
    records["evidence/new.json"] = new.model_copy(update={"environment": environment})
    assert list(find_evidence(_claim(tmp_path, GOOD + 'versions = {torch = "<2.12"}\n'), records)) == [
        "evidence/old.json"
    ]


def test_the_newest_complete_record_is_the_evidence(tmp_path):
    records = {
        "evidence/old.json": build_record(day=1),
        "evidence/new.json": build_record(day=2),
        "evidence/newest.json": build_record(day=3, complete=False),
    }
    assert list(find_evidence(_claim(tmp_path), records)) == ["evidence/new.json"]


def test_a_record_that_names_no_time_zone_is_of_utc(tmp_path):
    old, new = build_record(day=1), build_record(day=2, seed=1)
    read = Record.model_validate_json(record_text(new).replace("T00:00:00Z", "T00:00:00"))
    assert '"created_at":"2026-01-03T00:00:00"' in record_text(new).replace("T00:00:00Z", "T00:00:00")
    assert read == new
    assert list(find_evidence(_claim(tmp_path), {"old": old, "new": read})) == ["new"]


def test_without_a_complete_record_the_newest_incomplete_one_is_the_evidence(tmp_path):
    records = {name: build_record(day=day, complete=False) for day, name in enumerate(["a", "b"])}
    assert list(find_evidence(_claim(tmp_path), records)) == ["b"]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"subject": "other"}, "of subject other"),
        ({"suite": "standard"}, "of suite standard"),
        ({"gpu": L4}, "of NVIDIA L4, the claim of H200"),
        ({"gpu": None}, "a machine with no GPU"),
        ({"times": ("kernel",)}, "no graph times"),
        ({"baselines": {"fa2": 1.0}}, "not asked for baseline sdpa"),
    ],
)
def test_a_record_about_something_else_is_no_evidence(tmp_path, other, reason):
    claim, record = _claim(tmp_path), build_record(**other)
    assert reason in (why_not(claim, record) or "")
    assert find_evidence(claim, {"evidence/a.json": record}) == {}


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"entry_point": "mine:fast"}, "mine:fast, the claim of our own flash_attention"),
        ({"folder": "mine"}, f"{ENTRY_POINT} in mine, the claim of our own flash_attention"),
        ({"operator": "mine.operator"}, f"{ENTRY_POINT}, the claim of our own flash_attention"),
    ],
)
def test_another_subject_under_the_name_of_ours_is_no_evidence(tmp_path, changes, got):
    record = build_record()
    record = record.model_copy(update={"subject": record.subject.model_copy(update=changes)})
    assert why_not(_claim(tmp_path), record) == f"the record is of {got}"


def test_our_own_subject_may_run_from_a_repository_or_installed(tmp_path):
    record = build_record()
    for folder in (None, "src/flashmoe_science"):
        ran = record.model_copy(update={"subject": record.subject.model_copy(update={"folder": folder})})
        assert why_not(_claim(tmp_path), ran) is None


def test_a_gpu_is_matched_by_words_of_its_name_in_any_case(tmp_path):
    claim = _claim(tmp_path, GOOD.replace("H200", "nvidia h200"))
    assert why_not(claim, build_record()) is None


@pytest.mark.parametrize(
    ("claimed", "name", "fits"),
    [
        ("L4", "NVIDIA L4", True),
        ("L4", "NVIDIA L40S", False),
        ("H200", "NVIDIA GH200 480GB", False),
        ("A100", "NVIDIA A100X", False),
        ("A100", "NVIDIA A100-SXM4-80GB", True),
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("H100", "NVIDIA H100 NVL", False),
        ("H100 NVL", "NVIDIA H100 80GB HBM3", False),
        ("L40S", "NVIDIA L40S", True),  # not in the table of models
        ("NVIDIA L40S", "NVIDIA L40S", True),
        ("NVIDIA", "NVIDIA L40S", True),
    ],
)
def test_a_claim_fits_a_gpu_by_whole_words(tmp_path, claimed, name, fits):
    assert _claim(tmp_path, GOOD.replace('"H200"', f'"{claimed}"')).fits_gpu(name) is fits


@pytest.mark.parametrize("key", ["path", "id"])
def test_a_pinned_record_is_the_evidence_however_old(tmp_path, key):
    records = {"evidence/old.json": build_record(day=1), "evidence/new.json": build_record(day=2)}
    pin = "evidence/old.json" if key == "path" else records["evidence/old.json"].id
    assert list(find_evidence(_claim(tmp_path, f'{GOOD}evidence = ["{pin}"]\n'), records)) == ["evidence/old.json"]


def test_a_pinned_record_that_is_not_there_is_an_error(tmp_path):
    claim = _claim(tmp_path, GOOD + 'evidence = "evidence/gone.json"\n')
    with pytest.raises(ClaimError, match=r"claim seed-graph: key evidence: .* got 'evidence/gone\.json'"):
        find_evidence(claim, {"evidence/a.json": build_record()})
