"""Gates and claims as JUnit XML, the format of test results that continuous integration reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree as ET

from ...errors import EvidenceError
from ..judge.judge import Verdict, VerdictStatus, holds
from ..records.evidence import Gate, GateStatus, Record
from ..records.files import write_atomically
from ..text import foreign

Outcome = Literal["passed", "failed", "skipped"]


def outcome(verdict: Verdict, *, strict: bool = False) -> tuple[Outcome, str]:
    """Return a claim as the result of a test, and what to say of it.

    Passed where it holds. Failed where it is refuted, a gate failed, or, under ``strict``, it is stale. Else skipped:
    nobody knows; with the rounds that would tell, where rounds would.
    """
    if holds(verdict, strict=strict):
        return "passed", ""
    said = f"{verdict.status.value}: {verdict.reason}"
    if verdict.status in (VerdictStatus.REFUTED, VerdictStatus.STALE) or verdict.gate_failed:
        return "failed", said
    if verdict.rounds_needed is not None:
        said = f"{verdict.status.value}, about {verdict.rounds_needed} rounds more would decide: {verdict.reason}"
    return "skipped", said


def junit_xml(
    verdicts: Sequence[Verdict],
    records: Iterable[Record] = (),
    *,
    errors: Mapping[str, str] | None = None,
    strict: bool = False,
) -> str:
    """Return a document with a test case for each gate of ``records``, for each claim and for each machine's error.

    ``strict``: a stale claim fails.
    """
    root = ET.Element("testsuites", name="flashmoe")
    for record in records:
        name = f"gates.{record.subject.name}"
        suite = _suite(root, name, (_gate_case(gate, f"flashmoe.{name}") for gate in record.gates))
        suite.set("timestamp", record.created_at.isoformat(timespec="seconds"))
        properties = ET.Element("properties")
        about = {"run": record.id, "subject": record.subject.name, "suite": record.suite, "command": record.command}
        for name, value in about.items():
            ET.SubElement(properties, "property", name=name, value=value)
        suite.insert(0, properties)
    _suite(root, "claims", (_claim_case(verdict, strict=strict) for verdict in verdicts))
    if errors:
        _suite(root, "machines", (_error_case(name, said) for name, said in errors.items()))
    for count in ("tests", "failures", "errors", "skipped"):
        root.set(count, str(sum(int(suite.get(count, "0")) for suite in root)))
    for element in root.iter():
        element.text = foreign(element.text, "xml") if element.text else None
        for key, value in element.attrib.items():
            element.set(key, foreign(value, "xml"))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=False) + "\n"


def write_junit(path: Path, text: str) -> None:
    """Write the text of ``junit_xml`` to ``path``. Raises ``EvidenceError`` where that cannot be."""
    try:
        write_atomically(path, f'<?xml version="1.0" encoding="utf-8"?>\n{text}')
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be written: {error.strerror}") from error


def _suite(root: ET.Element, name: str, cases: Iterable[ET.Element]) -> ET.Element:
    suite = ET.SubElement(root, "testsuite", name=f"flashmoe.{name}")
    suite.extend(cases)
    tags = ("failure", "error", "skipped")
    failures, errors, skipped = (sum(case.find(tag) is not None for case in suite) for tag in tags)
    seconds = sum(float(case.get("time", "0")) for case in suite)
    counts = {"tests": len(suite), "failures": failures, "errors": errors, "skipped": skipped}
    for key, count in counts.items():
        suite.set(key, str(count))
    suite.set("time", f"{seconds:.3f}")
    return suite


def _gate_case(gate: Gate, group: str) -> ET.Element:
    case = ET.Element("testcase", classname=group, name=gate.name, time=f"{gate.seconds:.3f}")
    if gate.status is GateStatus.FAILED:
        _result(case, "failure", gate.summary, [*gate.details, *([f"hint: {gate.hint}"] if gate.hint else [])])
    elif gate.status is not GateStatus.PASSED:
        said = f"{gate.status.value}: {gate.summary}" if gate.summary else gate.status.value
        _result(case, "skipped", said, [gate.hint] if gate.hint else [])
    return case


def _claim_case(verdict: Verdict, *, strict: bool) -> ET.Element:
    group = f"flashmoe.claims.{verdict.claim.subject}"
    case = ET.Element("testcase", classname=group, name=verdict.claim.id, time="0.000")
    result, said = outcome(verdict, strict=strict)
    if result != "passed":
        details = [verdict.claim.sentence, *(f"{part.claim.gpu[0]}: {part.reason}" for part in verdict.by_gpu)]
        _result(case, "failure" if result == "failed" else "skipped", said, details)
    elif verdict.status is VerdictStatus.STALE:
        ET.SubElement(case, "system-out").text = f"{verdict.status.value}: {verdict.reason}"
    return case


def _error_case(name: str, said: str) -> ET.Element:
    case = ET.Element("testcase", classname="flashmoe.machines", name=name, time="0.000")
    message, *details = said.split("\n")
    _result(case, "error", message, details)
    return case


def _result(case: ET.Element, tag: str, message: str, details: Sequence[str]) -> None:
    result = ET.SubElement(case, tag, message=message)
    result.text = "\n".join(details) or None
