"""Figures of speed and memory in Markdown are found, and need the id of a claim beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from flashmoe_science.errors import InputError
from flashmoe_science.proof.judge.claims import load_claims
from flashmoe_science.proof.report.prose import check_file, find_figures, markdown_files

from .claim_builders import build_claim

ROOT = Path(__file__).resolve().parents[2]

FIGURES = [
    # multiples
    *(
        "It is 1.7x faster.",
        "1.7 × as fast",
        "`1.7x faster`",
        "**1.7x** SDPA",
        "3 times faster",
        "Ten-fold faster decoding",
    ),
    *(
        "two times as fast as eager",
        "A 2.5x speed-up",
        "speedup: 2.25",
        "A speedup of 1.7.",
        "faster by a factor of three",
    ),
    *(
        "takes 1.7x as long",
        "0.97 of our time",
        "0.50 of its speed",
        "0.92 times the rate of a matrix product",
        "1.8&times;",
    ),
    # parts
    *("doubles tokens/s", "halves latency", "twice the speed", "half the memory", "cuts run time in half"),
    *("a third less memory", "two thirds of the wall time", "an order of magnitude faster"),
    # percentages
    *("95 % more throughput", "30 % less memory", "30% faster", "20 percent lower latency", "60 % of SDPA's time"),
    *("MFU of 75 %", "75 % MFU", "The wall time is reduced by about 20%.", "improves performance by 30 %"),
    # rates, times, bytes
    *("740 TFLOP/s", "1.2 PFLOPS", "3,900 GB/s", "120 tokens per second", "55.7k tokens/s"),
    *("40 us where SDPA needs 80 us", "12 µs", "It takes 8 ms.", "8 ms per call", "12 GB less memory", "saves 12 GB"),
    # comparisons in words
    *("as fast as FlashAttention-3", "faster than cuDNN", "slower than the old sdpa", "outperforms FlashAttention"),
    *("beats cuDNN", "the fastest attention kernel", "less memory than SDPA"),
    # HTML and pictures
    *("<td>1.8x</td>", '<img src="a.png" alt="1.8x faster">', "![1.8x faster](a.png)", "1.8<b>x</b> faster"),
]

NO_FIGURES = [
    *(
        "The kernel is fast.",
        "Shared memory of 160 KB a block",
        "half of shared memory",
        "an H200 with 141 GB of memory",
    ),
    *(
        "at 8k keys, D 128, 32 heads",
        "torch 2.13, Triton 3.9",
        "shape 2x16x4096x128",
        "A grid of 128 x 64 tiles.",
        "4x4",
    ),
    *("waits with a timeout of 8 ms", "`verify` takes 20 seconds", "30 rounds in 3 processes", "an interval of 95 %"),
    *(
        "the interval of a speedup at 95 %",
        "within 2x the error of the eager run",
        "Twice the error that PyTorch makes.",
    ),
    *("the fastest of several baselines", "against the fastest baseline", "faster, slower, same or undecided"),
    *(
        "whether one run is faster than another",
        "Faster than the hardware allows is impossible.",
        "Half of the cases are open.",
    ),
    *(
        "a copy of the weights",
        "Bandwidth bounds it.",
        "a factor of 2 in the error",
        "memory-bound",
        "the first 3 times",
    ),
    *(
        "bf16, fp8 and int4",
        "13 cases on 2 GPUs",
        "[0.956, 0.993]",
        "commit 3f2a91c",
        "https://example.org/1.7x-faster",
        "",
    ),
]


@pytest.mark.parametrize("text", FIGURES)
def test_a_figure_is_found(text):
    assert find_figures(text)


@pytest.mark.parametrize("text", NO_FIGURES)
def test_normal_text_has_no_figure(text):
    assert find_figures(text) == []


@given(
    st.floats(1.01, 999).map(lambda value: f"{value:.3g}"),
    st.sampled_from(["{}x faster", "{} times faster", "a {}x speedup", "{}× as fast", "speedup of {}x", "`{}x`"]),
    st.sampled_from(["", "Our kernel is ", "On an H200, with fp16 inputs, we measured it at ", "up to "]),
    st.sampled_from([".", " than SDPA.", " on every shape", ", on 8 GPUs with 128 heads of size 64"]),
)
def test_a_figure_is_found_whatever_is_around_it(number, words, before, after):
    assert find_figures(f"{before}{words.format(number)}{after}")


@given(st.text(max_size=200))
def test_any_text_is_read(text):
    find_figures(text)


@pytest.fixture
def check(tmp_path):
    """Return the status and reason of each figure of a page, and its line, beside four claims."""
    some = "On H200, it is at least 2 times as fast, in each of 2 of 12 cases of suite seed (`a*`)."
    claims = [build_claim(id="two-x"), build_claim(id="nine-x", factor=9.0), build_claim(id="some", cases="a*")]
    claims.append(build_claim(id="lean", metric="memory"))
    known = {claim.id: claim for claim in claims} | {"some": claims[2].model_copy(update={"sentence": some})}

    def check(text):
        (tmp_path / "page.md").write_text(text, encoding="utf-8")
        return [(found.line, found.status, found.reason) for found in check_file(tmp_path / "page.md", known)]

    return check


@pytest.mark.parametrize(
    "text",
    [
        "It is 2x faster (two-x).",
        "It is 2x faster, by claim `two-x`.",
        "It is 2x faster ([claim](../claims/a.toml#two-x)).",
        "It is 2x faster. <!-- claim: two-x -->",
        "<!-- claim: two-x -->\nIt is 2x faster.",
        "<!-- claim: two-x -->\n| case | speedup |\n| --- | --- |\n| a | 2x |",
        "| case | speedup |\n| --- | --- |\n| a, `two-x` | 1.9 |",
        "<table>\n<tr><td>2x</td><td>two-x</td></tr>\n</table>",
        "- It is 1.5x faster, by `two-x`.",
        "It is 2x faster, in 2 of 12 cases (`some`).",
        "It is 2x faster than SDPA (`some`, `two-x`).",
        "It needs half the memory, `lean`.",
    ],
)
def test_a_figure_with_the_id_of_a_claim_is_backed(check, text):
    assert [status for _, status, _ in check(text)] == ["backed"]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("# It is 2x faster", 1, "it names no claim"),
        ("One.\nIt is 2x faster. Claim `two-x` says another thing.", 2, "it names no claim"),
        ("It is 2x faster. <!-- claim: tow-x -->", 1, "there is no claim 'tow-x' in claims/"),
        ("It is 2.5x faster, by `two-x`.", 1, "claim two-x is of 2x"),
        ("It needs 30 % less memory, by `two-x`.", 1, "claim two-x is about graph time"),
        ("It is 2x faster, by `lean`.", 1, "claim lean is about memory"),
        (
            "The suite is 2x faster, by `some`.",
            1,
            "claim some is about 2 of 12 cases, and the sentence does not say so",
        ),
        ("a\n\n| case | speedup |\n| --- | --- |\n| two-x | fast |\n| b | 2.0 |", 6, "it names no claim"),
        ("It is 2x faster. <!-- no claim: -->", 1, "it names no claim"),
        ("<!-- no claim: old -->\n```\ncode\n```\nIt is 2x faster.", 5, "it names no claim"),
    ],
)
def test_a_figure_that_no_claim_backs_is_asserted(check, text, line, reason):
    assert check(text) == [(line, "asserted", reason)]


def test_a_waiver_has_a_reason_and_counts_for_its_sentence_or_the_block_below(check):
    assert check("It was 9x slower. <!-- no claim: history --> It is 9x faster.") == [
        (1, "waived", "history"),
        (1, "asserted", "it names no claim"),
    ]
    assert check("<!-- no claim: history -->\n- 9x faster\n- 8x faster") == [
        (2, "waived", "history"),
        (3, "waived", "history"),
    ]


def test_code_and_what_is_rendered_are_left_out(check):
    assert (
        check("```text\n9x faster\n```\n<!-- summary:begin -->\n| speedup |\n| --- |\n| 9x |\n<!-- summary:end -->")
        == []
    )
    assert check("<!-- mine:begin -->\n9x faster\n<!-- mine:end -->") == [(2, "asserted", "it names no claim")]
    with pytest.raises(InputError, match=r"page\.md: expected the line <!-- cases:end -->"):
        check("<!-- cases:begin -->\n9x faster")


def test_files_are_found_in_folders_and_a_wrong_path_is_refused(tmp_path):
    (tmp_path / ".hidden").mkdir()
    for name in ("a.md", "b.markdown", "c.txt", ".hidden/d.md"):
        (tmp_path / name).write_text("")
    assert [path.name for path in markdown_files([tmp_path, tmp_path / "a.md"])] == ["a.md", "b.markdown"]
    with pytest.raises(InputError, match=r"nothing\.md: there is no such file or folder"):
        markdown_files([tmp_path / "nothing.md"])
    with pytest.raises(InputError, match="there is no Markdown file in this folder"):
        markdown_files([tmp_path / ".hidden" / ".." / ".hidden", (tmp_path / "empty").mkdir() or tmp_path / "empty"])
    (tmp_path / "zero.md").symlink_to("/dev/zero")
    with pytest.raises(InputError, match=r"zero\.md: cannot be read: it is no file"):
        check_file(tmp_path / "zero.md", {})
    (tmp_path / "a.md").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"a\.md: cannot be read"):
        check_file(tmp_path / "a.md", {})


@pytest.mark.parametrize(
    "path", markdown_files([ROOT / "README.md", ROOT / "docs"]), ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_the_pages_of_this_repository_state_no_figure_without_a_claim(path):
    claims = {claim.id: claim for claim in load_claims(ROOT / "claims")}
    assert [found for found in check_file(path, claims) if found.status == "asserted"] == []
