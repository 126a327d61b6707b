"""Tests of the table of speeds in a README."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashmoe_science.errors import ProofError
from flashmoe_science.proof.evidence import write_record
from flashmoe_science.proof.judge import judge
from flashmoe_science.proof.readme import BEGIN, END, render_readme, speed_section
from flashmoe_science.proof.verify import verify_claim

from .builders import H200, L4, build_record
from .claim_builders import build_claim, claim_toml, suite_toml

ROOT = Path(__file__).resolve().parents[2]
ID = "20260101T000000Z-made_up-flash_attention-000000"


def judged(record, **changes):
    path = f"evidence/{record.id}.json"
    return judge(build_claim(**changes), record).model_copy(update={"evidence": path})


def section(record, *claims):
    return speed_section([judged(record, **claim) for claim in claims], {f"evidence/{record.id}.json": record})


def test_the_readme_of_this_repository_is_current():
    path = ROOT / "README.md"
    assert path.read_text(encoding="utf-8") == render_readme(path), "run: flashmoe readme"


def test_without_claims_there_is_no_table():
    assert speed_section([], {}) == "No claim has been made yet.\n"


def test_a_claim_stands_with_its_verdict_figure_and_evidence():
    record = build_record(speedups=[2.3, 3.0])
    line = section(record, {}).splitlines()[2]
    assert line == (
        "| It is twice as fast. | **demonstrated** | 2.30x [2.29, 2.31], case0 | 2.628x [0.773, 9.105] "
        f"| [20260101T000000Z](evidence/{record.id}.json) |"
    )


def test_what_a_verdict_should_not_be_read_without_stands_beside_it():
    record = build_record(speedups=[2.3, 3.0])
    environment = record.environment.model_copy(update={"dirty": True})
    record = record.model_copy(update={"environment": environment})
    verdict = judge(build_claim(), record, changed="1 of 3, a.py")
    row = speed_section([verdict], {}).splitlines()[2]
    assert (
        "| **stale** (demonstrated at commit 000000000000, before its sources changed; "
        "the tree that ran, at commit 000000000000, had uncommitted changes) |"
    ) in row


def test_a_claim_for_several_gpus_has_one_row_and_a_table_for_each():
    records = {
        f"evidence/{gpu.name}.json": build_record(speedups=[speedup, 3.0], gpu=gpu, baseline_seconds=2e-4)
        for gpu, speedup in ((H200, 2.3), (L4, 2.2))
    }
    claim = build_claim(gpu=["H200", "L4"])
    verdict = verify_claim(claim, records, ROOT)
    lines = speed_section([verdict], records).splitlines()
    assert lines[2].count("](evidence/") == 2
    assert sum(" on NVIDIA H200" in line or " on NVIDIA L4" in line for line in lines) == 2


def test_a_claim_without_evidence_stands_there_too():
    text = speed_section([judge(build_claim(), None)], {})
    assert text.splitlines()[2:] == ["| It is twice as fast. | **asserted** |  |  | none |"]


def test_a_table_has_only_the_times_that_a_claim_is_about():
    lines = section(build_record(speedups=[2.3, 3.0]), {"id": "b", "metric": "wall"}, {}).splitlines()
    assert lines[5] == "<details>"
    assert lines[6].startswith(
        "<summary>Suite seed against sdpa on NVIDIA H200, driver 580.00, torch 2.11.0, triton 3.6.0, commit 0000"
    )
    assert lines[8] == (
        "| case | flash_attention, graph | sdpa, graph | speedup, graph "
        "| flash_attention, wall | sdpa, wall | speedup, wall |"
    )
    assert lines[9] == "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    assert lines[10].startswith("| case0 | 8.6")
    assert lines[10].count("us") == 4
    assert lines[-2:] == ["", "</details>"]
    assert "kernel" not in "\n".join(lines)


def test_against_several_rivals_the_fastest_of_each_case_is_named():
    record = build_record(speedups=[2.0, 3.0], baselines={"sdpa": 1.0, "sdpa-cudnn": 0.7})
    text = section(record, {"baseline": ["sdpa", "sdpa-cudnn"], "factor": 1.2})
    assert "| case | flash_attention, graph | fastest rival, graph | speedup, graph |" in text
    assert "us (sdpa-cudnn) | 1.40x" in text


def test_claims_about_other_cases_of_one_run_share_a_table():
    record = build_record(speedups=[2.3, 3.0, 4.0])
    lines = section(record, {"cases": ["case0"]}, {"id": "b", "cases": ["case2"]}).splitlines()
    assert sum(line == "<details>" for line in lines) == 1
    assert [line.split(" | ")[0] for line in lines if line.startswith("| case")] == ["| case", "| case0", "| case2"]
    assert "1 of 3 cases are in the record, and no claim is about them." in lines


def test_a_case_that_was_not_measured_says_why():
    record = build_record(speedups=[2.3, 3.0])
    case = record.cases[1].model_copy(update={"rounds": [], "correct": False})
    record = record.model_copy(update={"cases": [record.cases[0], case]})
    assert section(record, {}).splitlines()[-3] == "| case1 |  |  | its correctness was not shown |"


def test_a_bar_in_a_sentence_does_not_end_the_cell():
    assert "| a \\| b |" in speed_section([judge(build_claim(sentence="a | b"), None)], {})


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "seed.toml").write_text(claim_toml(suite="made_up"))
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "made_up.toml").write_text(suite_toml("made_up", "case0", "case1"))
    write_record(build_record(speedups=[2.3, 3.0], suite="made_up"), tmp_path / "evidence" / f"{ID}.json")
    (tmp_path / "README.md").write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nThe end, with no newline")
    return tmp_path


def test_only_what_is_between_the_marks_changes(repository):
    text = render_readme(repository / "README.md")
    before, _, rest = text.partition(BEGIN)
    section_, _, after = rest.partition(END)
    assert (before, after) == ("# Title\n\n", "\n\nThe end, with no newline")
    assert section_.startswith("\n| claim | verdict |")
    assert "old" not in section_
    assert f"[20260101T000000Z](evidence/{ID}.json)" in section_


def test_rendering_twice_gives_the_same_bytes(repository):
    path = repository / "README.md"
    first = render_readme(path)
    path.write_text(first)
    assert render_readme(path) == first


def test_a_readme_without_marks_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("# Title\n")
    with pytest.raises(ProofError, match="expected the lines <!-- speeds:begin --> and <!-- speeds:end -->"):
        render_readme(tmp_path / "README.md")


def test_a_missing_readme_is_named(tmp_path):
    with pytest.raises(ProofError, match=r"README\.md: cannot be read: No such file"):
        render_readme(tmp_path / "README.md")
