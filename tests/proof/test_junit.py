"""Gates and claims become test cases: passed, failed with the reason, or skipped with what is still needed."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from flashmoe_science.errors import EvidenceError
from flashmoe_science.proof.judge.judge import VerdictStatus, judge
from flashmoe_science.proof.records.evidence import Gate, GateStatus
from flashmoe_science.proof.report.junit import junit_xml, outcome, write_junit

from .builders import build_gates, build_record
from .claim_builders import build_claim


def judged(status, **changes):
    record = build_record(speedups=[2.5, 3.0])
    verdict = judge(build_claim(), record)
    return verdict.model_copy(update={"status": status, "reason": "why", **changes})


def cases_of(text):
    return {case.get("name"): case for case in ET.fromstring(text).iter("testcase")}


@pytest.mark.parametrize(
    ("status", "strict", "result"),
    [
        (VerdictStatus.DEMONSTRATED, True, "passed"),
        (VerdictStatus.STALE, False, "passed"),
        (VerdictStatus.STALE, True, "failed"),
        (VerdictStatus.REFUTED, False, "failed"),
        (VerdictStatus.INCONCLUSIVE, False, "skipped"),
        (VerdictStatus.ASSERTED, False, "skipped"),
        (VerdictStatus.INVALID, True, "skipped"),
    ],
)
def test_a_verdict_is_the_result_of_a_test(status, strict, result):
    found, said = outcome(judged(status), strict=strict)
    assert (found, bool(said)) == (result, result != "passed")
    if result != "passed":
        assert said == f"{status.value}: why"


def test_each_gate_and_each_claim_is_a_test_case():
    gates = build_gates("launch")
    gates[1] = Gate(name="build", status=GateStatus.NOT_POSSIBLE, summary="no compiler", hint="get one")
    gates[3] = gates[3].model_copy(update={"hint": "look", "details": ["a < b", "\x1b[0m red"]})
    record = build_record(speedups=[2.5], gates=gates)
    text = junit_xml([judged(VerdictStatus.REFUTED), judged(VerdictStatus.STALE)], [record])
    root = ET.fromstring(text)
    assert {key: root.get(key) for key in ("tests", "failures", "errors", "skipped")} == {
        "tests": "9",
        "failures": "2",
        "errors": "0",
        "skipped": "4",
    }
    assert [suite.get("name") for suite in root] == ["flashmoe.gates.flash_attention", "flashmoe.claims"]
    properties = {entry.get("name"): entry.get("value") for entry in root.iter("property")}
    assert properties["run"] == record.id
    cases = cases_of(text)
    assert list(cases["sources"]) == []
    assert cases["sources"].get("time") == "1.000"
    skipped = cases["build"].find("skipped")
    assert skipped is not None
    assert (skipped.get("message"), skipped.text) == ("not possible here: no compiler", "get one")
    failure = cases["launch"].find("failure")
    assert failure is not None
    assert failure.get("message") == "made up: failed"
    assert failure.text == "a < b\n\ufffd[0m red\nhint: look"


def test_the_file_is_written_and_one_that_cannot_be_is_an_error(tmp_path):
    write_junit(tmp_path / "new" / "junit.xml", junit_xml([judged(VerdictStatus.DEMONSTRATED)]))
    assert ET.parse(tmp_path / "new" / "junit.xml").getroot().get("tests") == "1"
    (tmp_path / "file").write_text("")
    with pytest.raises(EvidenceError, match=r"junit\.xml: cannot be written"):
        write_junit(tmp_path / "file" / "junit.xml", "")
