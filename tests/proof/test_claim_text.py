"""A claim's sentence is made from its fields, and no other sentence is accepted."""

from __future__ import annotations

from functools import partial

import pytest

from flashmoe_science.proof.judge.claims import claim_sentence, sentence_fault
from flashmoe_science.proof.judge.judge import VerdictStatus, judge
from flashmoe_science.proof.judge.verify import verify_claims
from flashmoe_science.proof.records.documents import write_record

from .builders import build_record
from .claim_builders import build_claim, claim_toml, suite_toml

FACTOR = "On H200, flash_attention is at least 2 times as fast as sdpa in a CUDA graph"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, f"{FACTOR}, in each of the 2 cases of suite seed."),
        ({"scope": "geometric mean"}, f"{FACTOR}, in the geometric mean over the 2 cases of suite seed."),
        ({"cases": "case0"}, f"{FACTOR}, in 1 of 2 cases of suite seed (`case0`)."),
        ({"cases": ["*0", "*1"]}, f"{FACTOR}, in each of 2 of 2 cases of suite seed (`*0` or `*1`)."),
        (
            {"cases": "*0", "scope": "geometric mean"},
            f"{FACTOR}, in the geometric mean over 1 of 2 cases of suite seed (`*0`).",
        ),
        (
            {"baseline": ["fa3", "fa4", "sdpa"], "metric": "kernel", "factor": 1.0},
            (
                "On H200, flash_attention is at least as fast as the fastest of fa3, fa4 and sdpa in kernel time, "
                "in each of the 2 cases of suite seed."
            ),
        ),
        (
            {"gpu": ["H200", "L4"], "metric": "wall", "factor": 0.98, "versions": {"torch": ">=2.9"}},
            (
                "On H200 and L4, flash_attention is at least 0.98 times as fast as sdpa in wall time, "
                "in each of the 2 cases of suite seed, with torch >=2.9."
            ),
        ),
        (
            {"metric": "memory", "factor": 1.5},
            (
                "On H200, flash_attention needs at most 67 % of the peak memory of sdpa, "
                "in each of the 2 cases of suite seed."
            ),
        ),
        (
            {"metric": "memory", "factor": 1.0, "baseline": ["sdpa", "fa3"]},
            (
                "On H200, flash_attention needs no more than the peak memory of the thriftiest of sdpa and fa3, "
                "in each of the 2 cases of suite seed."
            ),
        ),
    ],
)
def test_the_sentence_says_every_field(changes, sentence):
    claim = build_claim(**changes)
    record = build_record(speedups=[2.3, 3.0])
    assert claim_sentence(claim, record) == sentence
    assert sentence_fault(claim.model_copy(update={"sentence": sentence.replace(", ", ",\n", 1)}), record) == ""


made_up = partial(build_claim, suite="made_up")


@pytest.mark.parametrize(
    "sentence",
    [
        "flash_attention is 50x faster than FlashAttention-3 on every GPU.",
        made_up(factor=2.1).sentence,
        made_up(gpu="L4").sentence,
        made_up(baseline="fa3").sentence,
        made_up(suite="standard").sentence,
        made_up(scope="geometric mean").sentence,
        made_up(metric="wall").sentence,
        made_up(cases="case0").sentence,
    ],
)
def test_a_claim_with_another_sentence_is_not_demonstrated(tmp_path, sentence):
    (tmp_path / "claims").mkdir()
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "made_up.toml").write_text(suite_toml("made_up", "case0", "case1"))
    write_record(build_record(suite="made_up", speedups=[2.3, 3.0]), tmp_path / "evidence" / "run.json")
    (tmp_path / "claims" / "a.toml").write_text(claim_toml(suite="made_up", sentence=sentence))
    (verdict,) = verify_claims(tmp_path)
    assert verdict.status is VerdictStatus.INCONCLUSIVE
    assert verdict.reason.startswith("key sentence must be as `flashmoe claim new` words it: expected 'On H200, flash_")
    (tmp_path / "claims" / "a.toml").write_text(claim_toml(suite="made_up"))
    (verdict,) = verify_claims(tmp_path)
    assert verdict.status is VerdictStatus.DEMONSTRATED


def test_a_claim_that_selects_cases_says_what_the_others_show():
    record = build_record(speedups=[2.3, 0.8, 1.0, 1.2])
    verdict = judge(build_claim(cases="case0"), record)
    assert verdict.status is VerdictStatus.DEMONSTRATED
    assert verdict.others == "the other 3 cases show 1 slower, 1 inconclusive, 1 faster, lowest 0.800x"
    assert verdict.others in verdict.notes
    assert verdict.reason.endswith(verdict.others)
    assert judge(build_claim(), record).others == ""
