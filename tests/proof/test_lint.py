"""What a sentence asserts is held against the claims that it names: the figure, the verdict, the unit."""

from __future__ import annotations

import pytest

from flashmoe_science.errors import InputError
from flashmoe_science.proof.evidence import SourceFile, write_record
from flashmoe_science.proof.lint import Backing, lint_file, markdown_files
from flashmoe_science.proof.readme import BEGIN, END, render_readme

from .builders import build_record
from .claim_builders import claim_toml, suite_toml

SENTENCE = "In each case of the suite it is twice as fast as SDPA."


@pytest.fixture
def repository(tmp_path):
    """A repository with a claim of 2.0x that is demonstrated, and one that is refuted."""
    (tmp_path / "claims").mkdir()
    good = claim_toml(id="good", suite="made_up", sentence=SENTENCE)
    (tmp_path / "claims" / "a.toml").write_text(good + claim_toml(id="bad", suite="made_up", factor=9.0))
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "made_up.toml").write_text(suite_toml("made_up", "case0", "case1"))
    write_record(build_record(speedups=[2.3, 3.0], suite="made_up"), tmp_path / "evidence" / "run.json")
    return tmp_path


def lint(repository, text, *, strict=False):
    path = repository / "page.md"
    path.write_text(text)
    return lint_file(path, Backing(repository, strict=strict))


def one(repository, text, **how):
    (finding,) = lint(repository, text, **how)
    return finding.status, finding.reason


NO_SPEEDUP = "claim good: metric is graph, at least 2 times, not"
BACKED = ("backed", "claim good, demonstrated")


@pytest.mark.parametrize(
    "text",
    [
        "It is 2x faster. <!-- claim: good -->",
        "It is 1.5x faster <!-- claim: good -->.",
        "<!-- claim: good -->\nIt is 100 % faster.",
        "It is 2x faster ([claim](claims/a.toml#good)).",
        "It is 2x faster, by claim `good`.",
        SENTENCE,
        f"We say: {SENTENCE.lower()}",
        "It outperforms SDPA. <!-- claim: good -->",
        "It is 2x faster. <!-- claim: bad, good -->",
        "On an H200 it is 2x faster. <!-- claim: good -->",
        "It is 2x faster than SDPA. <!-- claim: good -->",
        "It is 2x faster than PyTorch's `scaled_dot_product_attention`. <!-- claim: good -->",
        "It is 2x faster, in a flash. <!-- claim: good -->",
        "| shape | speedup |\n| --- | --- |\n| all | 2x <!-- claim: good --> |",
    ],
)
def test_a_sentence_that_names_a_claim_is_backed(repository, text):
    assert one(repository, text) == BACKED


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("It is 2x faster.", "it names no claim"),
        ("It is 2x faster. Good. <!-- claim: good -->", "it names no claim"),
        ("It is 2x faster than cuDNN. <!-- claim: good -->", "claim good: baseline is sdpa, not 'sdpa-cudnn'"),
        (
            "It is 2x faster than SDPA with cuDNN. <!-- claim: good -->",
            "claim good: baseline is sdpa, not 'sdpa-cudnn'",
        ),
        ("It beats FlashAttention-3 by 2x. <!-- claim: good -->", "claim good: baseline is sdpa, not 'fa3'"),
        ("It is 2x faster than SDPA and fa2. <!-- claim: good -->", "claim good: baseline is sdpa, not 'fa2'"),
        ("It is 2.1x faster. <!-- claim: good -->", "claim good: factor is 2, not '2.1x faster'"),
        ("It takes 60 % less time. <!-- claim: good -->", "claim good: factor is 2, not '60 % less time'"),
        ("It is 2x faster. <!-- claim: bad -->", "claim bad is refuted"),
        ("On an L4 it is 2x faster. <!-- claim: good -->", "claim good: gpu is H200, not 'L4'"),
        ("On H200 and B200 it is 2x faster. <!-- claim: good -->", "claim good: gpu is H200, not 'B200'"),
        ("It is 2x faster. <!-- claim: god -->", "there is no claim 'god' in claims/, did you mean good?"),
        ("It needs 30 % less memory. <!-- claim: good -->", f"{NO_SPEEDUP} '30 % less memory'"),
        ("It is 2x slower. <!-- claim: good -->", f"{NO_SPEEDUP} '2x slower'"),
        ("It is slower than SDPA. <!-- claim: good -->", f"{NO_SPEEDUP} 'is slower than'"),
    ],
)
def test_a_sentence_beyond_its_claim_is_asserted(repository, text, reason):
    status, why = one(repository, text)
    assert status == "asserted"
    assert why.split("; baseline")[0] == reason  # of a rival, its name here comes first, and then the words


def test_every_figure_of_a_sentence_is_judged(repository):
    findings = lint(repository, "It is 2x faster here, and 3x faster there. <!-- claim: good -->")
    assert [(finding.words, finding.status) for finding in findings] == [
        ("2x faster", "backed"),
        ("3x faster", "asserted"),
    ]


def test_a_rate_is_backed_by_the_subject_own_highest(repository):
    record = build_record(speedups=[2.3, 3.0], suite="made_up")
    rates = {(arm.role, arm.rates["graph"].tflops) for case in record.cases for arm in case.arms}
    most = max(rate for role, rate in rates if role == "subject")
    assert one(repository, f"It reaches {most * 0.99:.2f} TFLOP/s. <!-- claim: good -->") == BACKED
    words = f"{most * 1.01:.2f} TFLOP/s"
    status, reason = one(repository, f"It reaches {words}. <!-- claim: good -->")
    assert status == "asserted"
    assert reason == f"claim good: flash_attention reaches {most:.4g} TFLOP/s in its runs, not {words!r}"


def test_a_rival_rate_is_not_the_subject_own(repository):
    (repository / "claims" / "a.toml").write_text(claim_toml(id="good", suite="made_up", factor=0.4))
    record = build_record(speedups=[0.5, 0.5], suite="made_up")  # the baseline has twice the rate
    write_record(record, repository / "evidence" / "run.json")
    rates = {arm.role: arm.rates["graph"].tflops for arm in record.cases[0].arms}
    assert rates["baseline"] > 1.9 * rates["subject"]
    said = f"flash_attention reaches {rates['baseline'] * 0.9:.2f} TFLOP/s. <!-- claim: good -->"
    assert one(repository, said)[0] == "asserted"


def test_a_rate_in_each_case_is_the_lowest(repository):
    record = build_record(speedups=[2.3, 3.0], suite="made_up")
    low, high = sorted(arm.rates["graph"].tflops for c in record.cases for arm in c.arms if arm.role == "subject")
    middle = (low + high) / 2
    assert one(repository, f"It reaches {middle:.2f} TFLOP/s. <!-- claim: good -->") == BACKED
    assert one(repository, f"In each case it reaches {middle:.2f} TFLOP/s. <!-- claim: good -->")[0] == "asserted"


def test_a_reason_waives_a_sentence_and_is_said(repository):
    assert one(repository, "It ran 2x slower. <!-- no claim: history of another kernel -->") == (
        "waived",
        "history of another kernel",
    )


def test_a_stale_claim_backs_unless_that_is_refused(repository):
    record = build_record(speedups=[2.3, 3.0], suite="made_up", sources=[SourceFile(path="k.cu", sha256="0" * 64)])
    subject = record.subject.model_copy(update={"folder": "src/flashmoe_science"})
    write_record(record.model_copy(update={"subject": subject}), repository / "evidence" / "run.json")
    text = "It is 2x faster. <!-- claim: good -->"
    assert one(repository, text) == ("backed", "claim good, stale")
    assert one(repository, text, strict=True) == ("asserted", "claim good is stale")


def test_the_table_of_speeds_is_backed_while_it_is_as_rendered(repository):
    path = repository / "README.md"
    path.write_text(f"# Title\n\n{BEGIN}\n{END}\n\nIt is 9x faster.\n")
    path.write_text(render_readme(path))
    table, asserted = lint_file(path, Backing(repository))
    assert (table.status, table.words, table.line) == ("backed", "the table of claims", 3)
    assert asserted.status == "asserted"
    path.write_text(path.read_text().replace("2.30x [", "9.30x ["))
    first, second = (each for each in lint_file(path, Backing(repository)) if each.status == "asserted")
    assert (first.words, "9.30x [" in first.sentence) == ("the table of claims", True)
    assert path.read_text().split("\n")[first.line - 1] == first.sentence
    assert second.words == asserted.words


def test_a_rendered_section_of_any_page_is_backed_while_it_is_as_rendered(repository):
    path = repository / "docs" / "speeds.md"
    path.parent.mkdir()
    pairs = "".join(f"<!-- {kind}:begin -->\n<!-- {kind}:end -->\n\n" for kind in ("verdicts", "cases"))
    path.write_text(f"# Title\n\n{pairs}It is 9x faster.\n")
    path.write_text(render_readme(path))
    text = path.read_text()
    backing = Backing(repository)
    claims, cases, asserted = lint_file(path, backing)
    assert (claims.status, claims.words, claims.line) == ("backed", "the table of claims", 3)
    assert (cases.status, cases.words) == ("backed", "the tables of cases")
    assert text.split("\n")[cases.line - 1] == "<!-- cases:begin -->"
    assert (asserted.status, asserted.words) == ("asserted", "9x faster")
    before, mark, tables = text.partition("<!-- cases:begin -->")
    path.write_text(before + mark + tables.replace("3.00x [", "3.90x ["))
    findings = lint_file(path, backing)
    # One finding, at the line that differs; the other section is as it should be.
    assert [(finding.status, finding.words) for finding in findings if finding.words != "9x faster"] == [
        ("backed", "the table of claims"),
        ("asserted", "the tables of cases"),
    ]
    assert "3.90x [" in findings[1].sentence


def test_tables_between_marks_that_are_not_in_pairs_are_backed_by_nothing(repository):
    path = repository / "README.md"
    path.write_text(f"{BEGIN}\n{END}\n")
    path.write_text(render_readme(path).replace(END, ""))
    assert "asserted" in [finding.status for finding in lint_file(path, Backing(repository))]


def test_a_page_of_another_repository_is_held_against_its_own_claims(repository, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "claims").mkdir()
    more = claim_toml(id="more", suite="made_up", sentence="On every GPU it is 50x faster than SDPA.")
    (other / "claims" / "a.toml").write_text(more)
    path = repository / "README.md"
    path.write_text(f"{BEGIN}\n{END}\n")
    path.write_text(render_readme(path))
    (table,) = lint_file(path, Backing(other))
    assert (table.status, table.words) == ("backed", "the table of claims")


def test_a_claim_of_the_table_whose_sentence_says_more_than_its_keys_is_asserted(repository):
    path = repository / "README.md"
    path.write_text(f"# Title\n\n{BEGIN}\n{END}\n")
    more = "On every GPU it is 50x faster than SDPA."
    (repository / "claims" / "b.toml").write_text(claim_toml(id="more", suite="made_up", sentence=more))
    path.write_text(render_readme(path))
    table, asserted = lint_file(path, Backing(repository))
    assert table.status == "backed"
    assert (asserted.status, asserted.words) == ("asserted", more)
    assert "factor is 2, not '50x faster'; gpu is H200, not 'every GPU'" in asserted.reason
    assert path.read_text().splitlines()[asserted.line - 1].startswith(f"| `more` | {more}")


def test_outside_of_a_repository_everything_is_asserted(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("It is 2x faster. <!-- claim: good -->")
    (finding,) = lint_file(path, Backing(None))
    assert (finding.status, finding.reason) == ("asserted", "there is no claim 'good' in claims/")


def test_folders_are_walked_and_hidden_ones_left_out(tmp_path):
    for name in ("a.md", "b.txt", "sub/c.markdown", ".venv/d.md", "sub/.hidden.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = markdown_files([tmp_path, tmp_path / "b.txt", tmp_path / "a.md"])
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["a.md", "sub/c.markdown", "b.txt"]


@pytest.mark.parametrize(("name", "message"), [("gone.md", "no such file or folder"), ("empty", "no Markdown file")])
def test_what_is_not_there_is_an_error(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=message):
        markdown_files([tmp_path / name])


def test_a_file_that_is_no_text_is_an_error(tmp_path):
    (tmp_path / "a.md").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"a\.md: cannot be read"):
        lint_file(tmp_path / "a.md", Backing(None))


def test_a_backend_of_a_rival_is_named_with_the_rival_itself(tmp_path):
    (tmp_path / "claims").mkdir()
    claim = claim_toml(id="good", suite="made_up", baseline="sdpa-cudnn")
    (tmp_path / "claims" / "a.toml").write_text(claim)
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "made_up.toml").write_text(suite_toml("made_up", "case0", "case1"))
    record = build_record(speedups=[2.3, 3.0], suite="made_up", baselines={"sdpa-cudnn": 1.0})
    write_record(record, tmp_path / "evidence" / "run.json")
    assert one(tmp_path, "It is 2x faster than SDPA with its cuDNN backend. <!-- claim: good -->") == BACKED
    status, reason = one(tmp_path, "It is 2x faster than SDPA. <!-- claim: good -->")
    assert (status, reason) == (
        "asserted",
        "claim good: baseline is sdpa-cudnn, not 'sdpa'; baseline is sdpa-cudnn, not 'SDPA'",
    )
