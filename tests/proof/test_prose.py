"""Markdown becomes sentences, each on its line and with the marks that are its own."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from flashmoe_science.proof.prose import Marks, read_sentences


def texts(markdown):
    return [(s.line, " ".join(s.prose.split())) for s in read_sentences(markdown)]


def marks_of(markdown, number=0):
    return read_sentences(markdown)[number].marks


def test_sentences_stand_on_their_lines():
    text = "# A title\n\nOne here. Two\nover lines! Four e.g. 4.5 (i.e. none)? Five\n\n- an item\n  - one below\n"
    assert texts(text) == [
        (1, "A title"),
        (3, "One here."),
        (3, "Two over lines!"),
        (4, "Four e.g. 4.5 (i.e. none)?"),
        (4, "Five"),
        (6, "an item"),
        (7, "one below"),
    ]


def test_a_line_within_a_sentence_is_found():
    (sentence,) = read_sentences("\nIt is\nall one\nsentence.\n")
    assert sentence.line_of(sentence.text.index("sentence")) == 4


@pytest.mark.parametrize(
    "markdown",
    [
        "```\n2x faster\n```\n",
        "    2x faster\n",
        "`2x faster`\n",
        '"2x faster"\n',
        "“2x faster”\n",
        "<!-- 2x faster -->\n",
        "text\n<!-- 2x\nfaster -->\n",
        "| a |\n| --- |\n| `2x faster` |\n",
    ],
)
def test_code_quotations_and_comments_are_no_prose(markdown):
    assert not any("faster" in sentence.prose for sentence in read_sentences(markdown))


@pytest.mark.parametrize(
    "markdown",
    [
        "> 2x faster",
        "- 2x faster",
        "1. **2x** _faster_",
        "<p>2x faster</p>",
        "[2x faster](a.md)",
        "![2x faster](a.png)",
    ],
)
def test_whatever_a_reader_sees_is_prose(markdown):
    assert " ".join(read_sentences(markdown)[0].prose.split()).endswith("2x faster")


def test_a_row_of_a_table_is_one_sentence_with_its_header():
    first = "| case | speedup |\n| --- | --- |\n| a | 2x |\n| b | 3x <!-- claim: c --> |\n"
    rows = read_sentences(f"{first}\n| x |\n| - |\n| y |\n")
    assert [(row.line, row.text.rstrip(), row.context) for row in rows] == [
        (1, "case | speedup", ""),
        (3, "a | 2x", "case | speedup"),
        (4, "b | 3x", "case | speedup"),
        (6, "x", ""),
        (8, "y", "x"),
    ]
    assert [row.marks.claims for row in rows] == [(), (), ("c",), (), ()]


def test_a_comment_marks_the_sentence_before_it():
    one, two, three = read_sentences("One. Two. <!-- claim: a, b --> Three.\n")
    assert (one.marks, two.marks, three.marks) == (Marks(), Marks(claims=("a", "b")), Marks())


def test_a_comment_within_a_sentence_marks_it():
    one, two = read_sentences("One <!-- claim: a --> goes on. Two.\n")
    assert (one.marks.claims, two.marks.claims) == (("a",), ())


def test_a_comment_of_its_own_marks_the_next_block_and_no_other():
    markdown = "<!-- claim: a -->\n\nOne. Two.\n\nThree.\n"
    assert [sentence.marks.claims for sentence in read_sentences(markdown)] == [("a",), ("a",), ()]
    markdown = "<!-- no claim: history -->\n- One.\n- Two.\n\nThree.\n"
    assert [sentence.marks.waiver for sentence in read_sentences(markdown)] == ["history", "history", ""]
    markdown = "<!-- claim: a -->\n| x |\n| - |\n| y |\n\nThree.\n"
    assert [sentence.marks.claims for sentence in read_sentences(markdown)] == [("a",), ("a",), ()]


def test_links_to_claims_and_ids_as_code_are_marks():
    assert marks_of("See [it](../claims/seed.toml#seed-graph).").claims == ("seed-graph",)
    assert marks_of("See [it](claims.md#seed-graph).") == Marks()
    assert marks_of("By claim `seed-graph`, and `x = 2`.").code == ("seed-graph",)


@given(st.text(alphabet='ab .!?\n`"|#*_-<>[]()', max_size=80))
def test_any_text_is_read_and_prose_is_as_long_as_the_text(markdown):
    for sentence in read_sentences(markdown):
        assert len(sentence.prose) == len(sentence.text)
        assert 1 <= sentence.line <= markdown.count("\n") + 1
