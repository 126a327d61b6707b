"""Tests of the tables of speeds in a README and on other pages."""

from __future__ import annotations

import functools
import re
import runpy
from pathlib import Path

import pytest

from flashmoe_science.errors import ProofError
from flashmoe_science.proof.judge.judge import check_control, judge
from flashmoe_science.proof.judge.limits import refusal_today, rule_of
from flashmoe_science.proof.judge.rows import KINDS, arm_rows, format_ratio
from flashmoe_science.proof.judge.verify import verify_claim
from flashmoe_science.proof.records.documents import write_record
from flashmoe_science.proof.records.evidence import Accuracy
from flashmoe_science.proof.report.html import render_html
from flashmoe_science.proof.report.markdown import render_markdown
from flashmoe_science.proof.report.page import Judged, build_page
from flashmoe_science.proof.report.readme import (
    BEGIN,
    END,
    Section,
    case_section,
    claim_section,
    default_pages,
    find_sections,
    judge_repository,
    render_readme,
    rule_section,
    slower_section,
    summary_section,
)

from .builders import H200, L4, build_record
from .claim_builders import build_claim, claim_toml, suite_toml

ROOT = Path(__file__).resolve().parents[2]
ID = "20260101T000000Z-made_up-flash_attention-000000"
VERDICTS = ("<!-- verdicts:begin -->", "<!-- verdicts:end -->")
CASES = ("<!-- cases:begin -->", "<!-- cases:end -->")

judged_once = functools.cache(judge_repository)  # takes seconds, and two tests ask for it


def judged(record, **changes):
    path = f"evidence/{record.id}.json"
    return judge(build_claim(**changes), record).model_copy(update={"evidence": path})


def section(record, *claims, render=claim_section, **where):
    verdicts = [judged(record, **claim) for claim in claims]
    return render(verdicts, {f"evidence/{record.id}.json": record}, **where)


def test_the_readme_of_this_repository_is_current():
    path = ROOT / "README.md"
    assert path.read_text(encoding="utf-8") == render_readme(path, judged_once), "run: flashmoe readme"


def test_the_pictures_of_the_readme_are_current(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import readme_pictures

    for name, text in readme_pictures.pictures(judged_once(ROOT)):
        there = (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8")
        assert texts_of(there) == texts_of(text), "run: make readme"
        if name.startswith("speedups"):  # the drawing of the terminal is rich's, and differs by its version
            assert there == text, "run: make readme"


def test_the_readme_names_the_run_of_its_picture():
    (named,) = re.findall(r"picture shows .*`flashmoe show (\w+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    drawn = (ROOT / "docs" / "pictures" / "verdict-light.svg").read_text(encoding="utf-8")
    assert f"{named}-host-flash_attention" in "".join(texts_of(drawn)), "name the run that the picture shows"


def texts_of(picture):
    return re.findall(r"<text [^>]*>([^<]*)<", picture)


def test_the_pages_of_speeds_have_every_claim_and_link_nothing_outside_of_the_site():
    speed_pages = runpy.run_path(str(ROOT / "tools" / "speed_pages.py"))
    made = judged_once(ROOT)
    pages = speed_pages["render"](made)
    ids = [verdict.claim.id for verdict in made.verdicts]
    assert [name for name in ids if f"| `{name}` |" not in pages["speeds.md"]] == []
    assert "of suite features (`*_sinks`)." in pages["speeds.md"]  # a pattern of cases is code
    links = {link for page in pages.values() for link in re.findall(r"\]\(([^)#]+)", page)}
    assert links == {"speeds-cases.md", "explanation/measuring.md"}


def test_the_table_of_rules_counts_claims_that_could_be_made_today_and_those_that_could_not():
    records = {f"evidence/{n}.json": build_record(speedups=[2.3, 3.0], processes=n) for n in (3, 5)}
    found = []
    for record in records.values():
        for factor in (1.5, 9.0):
            claim = build_claim(factor=factor)
            verdict = judge(claim, record)
            refused = refusal_today(claim, record, verdict.status)
            found.append(verdict.model_copy(update={"rule": rule_of(claim, record), "refused_today": refused}))
    lines = rule_section([*found, found[2]], records).splitlines()
    said = [line.split(" | ") for line in lines[2:]]
    assert [(cells[0].strip("| "), cells[2].rstrip(" |")) for cells in said] == [
        ("2", "accepted"),
        ("1", "refused: 5 processes are asked for"),
        ("1", "refused: it is refuted"),
        ("1", "refused: it is refuted"),
    ]
    new = records["evidence/5.json"]
    assert rule_of(build_claim(), new).endswith("one bound for all errors, values that repeat")
    bounded = Accuracy(max_error=1e-4, budget=1e-3, low_precision_error=5e-4, element_share=0.5)
    arms = [arm.model_copy(update={"accuracy": bounded}) for arm in new.cases[0].arms]
    case = new.cases[0].model_copy(update={"arms": arms})
    changes = {"cases": [case], "settings": new.settings.model_copy(update={"method": 2})}
    last = rule_of(build_claim(), new.model_copy(update=changes))
    assert last.endswith("a bound for each error, values that are new in each call")


def test_a_claim_for_several_gpus_has_one_row_and_a_table_for_each():
    records = {
        f"evidence/{gpu.name}.json": build_record(speedups=[speedup, 3.0], gpu=gpu, baseline_seconds=2e-4)
        for gpu, speedup in ((H200, 2.3), (L4, 2.2))
    }
    claim = build_claim(gpu=["H200", "L4"])
    verdict = verify_claim(claim, records, ROOT)
    assert claim_section([verdict], records).splitlines()[2].count("](evidence/") == 2
    headings = [line for line in case_section([verdict], records).splitlines() if line.startswith("## ")]
    assert ["H200" in line for line in headings].count(True) == ["L4" in line for line in headings].count(True) == 1


def test_the_row_of_a_run_has_the_claim_with_the_most_baselines_and_cases_and_counts_all():
    record = build_record(speedups=[2.3, *[3.0] * 6], baselines={"sdpa": 1.0, "sdpa-cudnn": 0.7})
    both = {"baseline": ["sdpa", "sdpa-cudnn"], "factor": 1.2}
    few = {**both, "id": "few", "cases": ["case2"]}
    lines = section(record, {}, few, {**both, "id": "both"}, {"id": "high", "factor": 9.0}, render=summary_section)
    (line,) = lines.splitlines()[2:]
    assert line == (
        "| seed | flash_attention | sdpa, sdpa-cudnn | graph | 7 | 0, 0, 7 | 1.61x [1.60, 1.62] | 2.02x [1.82, 2.13] "
        f"| 3 demonstrated, 1 refuted | [20260101T000000Z](evidence/{record.id}.json) |"
    )


def changed_arms(record, name, **changes):
    """Return a record whose arms of a name are changed."""
    cases = [
        case.model_copy(update={"arms": [
            arm.model_copy(update=changes) if arm.name == name else arm for arm in case.arms
        ]}) for case in record.cases
    ]  # fmt: skip
    return record.model_copy(update={"cases": cases})


def test_a_speed_of_light_has_a_row_of_its_own():
    """It does other work: the row of the baselines must not show its figures."""
    record = build_record(speedups=[2.3, 3.0], baselines={"sdpa": 1.0, "copy": 0.5})
    lines = section(
        record, {}, {"id": "copied", "baseline": "copy", "factor": 1.1}, render=summary_section
    ).splitlines()[2:]
    assert [line.split(" | ")[2] for line in lines] == ["sdpa", "copy"]


def test_a_case_that_is_slower_than_one_baseline_is_counted_whatever_claims_are_about():
    record = build_record(speedups=[0.9, 1.0, 3.0], baselines={"sdpa": 1.0, "fa3": 0.7})
    text = section(record, {"cases": ["case2"], "metric": "kernel"}, render=slower_section)
    (line,) = text.splitlines()[2:]
    assert line.startswith("| seed | 3 | 2 | 0 | `case0` | 0.63")
    assert line.endswith("| fa3 | `20260101T000000Z` |")


def test_a_baseline_counts_though_its_answers_were_compared_in_no_process():
    """An exact answer that takes long is worked out in one process; only an arm that does other work is left out."""
    record = build_record(speedups=[0.9, 3.0], baselines={"sdpa": 1.0, "product": 0.5})
    record = changed_arms(record, "sdpa", accuracy=None)
    for said, decides in ((None, "product"), (False, "product"), (True, "sdpa")):
        told = changed_arms(record, "product", speed_of_light=said)
        (line,) = section(told, {"metric": "kernel"}, render=slower_section).splitlines()[2:]
        assert line.startswith("| seed | 2 | 1 |")
        assert line.endswith(f"| {decides} | `20260101T000000Z` |")


def test_a_run_of_graphs_and_one_that_is_never_slower_have_no_row_among_slower_cases():
    slow = build_record(speedups=[0.9, 3.0])
    fast = build_record(speedups=[2.3, 3.0])
    for record, metric in ((slow, "graph"), (fast, "kernel")):
        text = section(record, {"metric": metric}, render=slower_section)
        assert text == "No case is slower than a baseline.\n"


def test_each_interval_of_a_page_is_that_of_one_baseline():
    """Both are as fast, and one spreads: the lower end of it and the upper end of the other make no interval."""
    record = build_record(speedups=[2.5], baselines={"steady": 1.0, "spread": 1.0})
    rounds = []
    for old in record.cases[0].rounds:
        spread = {kind: list(arms["spread"]) for kind, arms in old.seconds.items()}
        moved = {kind: [s * (0.8 if i % 3 else 1.6) for i, s in enumerate(column)] for kind, column in spread.items()}
        seconds = {kind: {**arms, "spread": moved[kind]} for kind, arms in old.seconds.items()}
        rounds.append(old.model_copy(update={"seconds": seconds}))
    record = record.model_copy(update={"cases": [record.cases[0].model_copy(update={"rounds": rounds})]})
    names = ["steady", "spread"]
    alone = [
        judged(record, baseline=[name], scope=scope) for name in names for scope in ("each case", "geometric mean")
    ]
    known = {format_ratio(case.interval) for one in alone for case in one.cases}
    known |= {format_ratio(one.geometric_mean) for one in alone}
    known |= {format_ratio(row.ratio) for kind in KINDS for row in arm_rows(record, kind)}
    both = [judged(record, id=f"c{n}", baseline=names, factor=f) for n, f in enumerate((0.5, 1.0, 2.0, 2.5, 3.5))]
    sections = [
        render(both, {f"evidence/{record.id}.json": record})
        for render in (claim_section, case_section, summary_section, slower_section)
    ]
    page = build_page([Judged(record, both)])
    for text in [*sections, render_html(page), render_markdown(page)]:
        found = set(re.findall(r"\d+\.\d+x \[\d+\.\d+, \d+\.\d+\]", text.replace("\\", "")))
        assert found or text.startswith("No case is slower")
        assert found <= known | {format_ratio(ratio) for ratio in check_control(record, "graph").ratios.values()}


def test_the_tables_of_cases_have_headings_with_run_and_verdicts():
    record = build_record(speedups=[2.3, 3.0])
    text = section(record, {}, {"id": "b", "factor": 9.0}, render=case_section, up="../")
    lines = text.split("\n")
    assert lines[1] == "## Suite seed: flash_attention against sdpa on NVIDIA H200, graph"
    assert lines[3].startswith(f"Run [{record.id}](../evidence/{record.id}.json) on NVIDIA H200, driver 580.00, torch")
    assert lines[3].endswith(". Medians of one call; speedups with 95 % intervals.")
    assert re.fullmatch(r"Claims: `\S+` \*\*demonstrated\*\*, `b` \*\*refuted\*\*\.", lines[4])
    assert lines[6].startswith("| case | flash_attention, graph |")
    assert "| claim | verdict |" not in text


def test_the_tables_of_cases_work_out_the_rates_that_a_record_lacks():
    record = build_record(speedups=[2.3, 3.0])
    arms = [[arm.model_copy(update={"rates": {}}) for arm in case.arms] for case in record.cases]
    cases = [case.model_copy(update={"arms": own}) for case, own in zip(record.cases, arms, strict=True)]
    lacking = section(record.model_copy(update={"cases": cases}), {}, render=case_section, up="../")
    assert lacking == section(record, {}, render=case_section, up="../")


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "seed.toml").write_text(claim_toml(suite="made_up"))
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "made_up.toml").write_text(suite_toml("made_up", "case0", "case1"))
    write_record(build_record(speedups=[2.3, 3.0], suite="made_up"), tmp_path / "evidence" / f"{ID}.json")
    (tmp_path / "README.md").write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nThe end, with no newline")
    return tmp_path


def page_of(repository, text, name="docs/speeds.md"):
    path = repository / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_page_links_evidence_from_its_own_folder(repository):
    path = page_of(repository, "\n".join([*VERDICTS, "between", *CASES]), "docs/of/speeds.md")
    text = render_readme(path)
    claims, _, cases = text.partition("between")
    assert "| **demonstrated** |" in claims
    assert "\n## Suite made_up: " in cases
    links = re.findall(r"\]\((.+?)\)", text)
    assert links == [f"../../evidence/{ID}.json"] * 2
    assert (path.parent / links[0]).is_file()


def test_every_section_of_a_page_is_rendered_and_the_rest_stays(repository):
    marked = ("# Title", VERDICTS[0], "old", VERDICTS[1], "between", f"  {CASES[0]}", "old", f"  {CASES[1]} ", "end")
    path = page_of(repository, "\n".join(marked))
    text = render_readme(path)
    kept = [line for line in text.split("\n") if line in marked]
    assert kept == [line for line in marked if line != "old"]
    path.write_text(text)
    assert render_readme(path) == text


def test_marks_in_a_block_of_code_or_in_a_line_mark_nothing(repository):
    shown = f"```text\n{CASES[0]}\n{CASES[1]}\n```\n\nBetween `{BEGIN}` and `{END}`.\n\n    {BEGIN}\n    {END}\n\n"
    path = page_of(repository, f"{shown}{VERDICTS[0]}\n{VERDICTS[1]}\n")
    assert find_sections(path, path.read_text()) == [Section("verdicts", 11, 12)]
    assert render_readme(path).startswith(f"{shown}{VERDICTS[0]}\n| id | claim |")


def test_the_default_pages_are_the_readme_and_what_has_marks_in_docs(repository):
    page_of(repository, f"{CASES[0]}\n{CASES[1]}\n", "docs/b.md")
    page_of(repository, f"{CASES[1]}\n", "docs/a/lone-end.md")  # wrong, which rendering it says
    page_of(repository, f"It stands between `{CASES[0]}` and `{CASES[1]}`.\n", "docs/about.md")
    page_of(repository, f"{CASES[0]}\n{CASES[1]}\n", "docs/.hidden/c.md")
    page_of(repository, f"{CASES[0]}\n{CASES[1]}\n", "other/d.md")
    (repository / "docs" / "old.md").write_bytes("ein Märchen\n".encode("latin-1"))  # no mark: no page of ours
    found = [path.relative_to(repository).as_posix() for path in default_pages(repository)]
    assert found == ["README.md", "docs/a/lone-end.md", "docs/b.md"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["x", CASES[0], "old"],
            r"md:2: expected the line <!-- cases:end --> too",
        ),
        ([CASES[0], VERDICTS[1]], r"md:2: expected the line <!-- cases:end -->, got <!-- verdicts:end -->"),
        (["# Title"], r"md: expected marks such as <!-- summary:begin -->, got none"),
    ],
)
def test_marks_that_are_not_in_pairs_are_refused_with_their_line(repository, lines, message):
    path = page_of(repository, "\n".join([*lines, ""]))
    with pytest.raises(ProofError, match=message) as caught:
        render_readme(path)
    assert caught.value.hint.startswith("a rendered table goes between two marks")
