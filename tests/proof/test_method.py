"""How times are taken has one hash: of all that takes them, and of nothing else."""

from __future__ import annotations

import pytest

from flashmoe_science.errors import EvidenceError
from flashmoe_science.gpu import dependencies
from flashmoe_science.proof.evidence import parse_record, record_text
from flashmoe_science.proof.method import ALIKE, UNRECORDED, method_code, takes_alike

from .builders import build_record
from .chain import request_of, run_chain


@pytest.fixture
def edited(monkeypatch):
    """Return the hash with some text of a module in the place of another."""
    read = dependencies.read_source

    def forget():
        for cached in (dependencies.trace, dependencies._load, method_code):
            cached.cache_clear()

    def edited(module, old, new):
        def read_edited(name):
            text, package = read(name)
            if name == f"flashmoe_science.{module}":
                assert old in text, old
                text = text.replace(old, new)
            return text, package

        monkeypatch.setattr(dependencies, "read_source", read_edited)
        forget()
        return method_code()

    yield edited
    forget()


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("proof.measure", "self._flush.fill_(2)", "pass"),
        ("proof.measure", "TRIAL_CALLS = 20", "TRIAL_CALLS = 2"),
        ("proof.schedule", "math.ceil(2 * l2_bytes", "math.ceil(l2_bytes"),
        ("proof.rounds", "gc.disable()", "gc.enable()"),
        ("proof.arms", "nullcontext() if self.rival is None else self.rival.context()", "nullcontext()"),
        ("proof.check", "NAN_BYTE = ", "NAN_BYTE = 1 + "),
        ("proof.launches", "def union_ns(", "def union_ns(_more: int = 0, *, "),
        ("proof.gates.speed", "range(processes, 2 * processes)", "range(processes, 3 * processes)"),
        ("proof.gates.resume", "> math.log1p(width)", "> 2 * math.log1p(width)"),
        ("proof.gates.speed", "[*values, *new.seconds[kind][arm]]", "[*values, *new.seconds[kind][arm][1:]]"),
        ("gpu.device", "properties.multi_processor_count", "properties.multi_processor_count // 2"),
    ],
)
def test_an_edit_of_what_takes_times_counts(edited, module, old, new):
    before = method_code()
    assert edited(module, old, new) not in (before, "")


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("proof.measure", '"""Take times:', '"""Take all times:'),
        ("proof.measure", "  # 20 ms at 2 GHz: far longer than the host needs to enqueue a call", ""),
        ("proof.gpu_tasks", "_CAPTURED_CALLS = 2", "_CAPTURED_CALLS = 3"),
        ("proof.gpu_tasks", '{"event": "round",', '{"event": "rounds",'),  # what a process tells of its progress
        ("proof.evidence", "processes: int = 3", "processes: int = 4"),  # a record has the settings of its run
        ("proof.judge", "FEWEST_ROUNDS = 30", "FEWEST_ROUNDS = 40"),  # verdicts are made anew
    ],
)
def test_an_edit_of_what_takes_no_times_does_not_count(edited, module, old, new):
    before = method_code()
    assert edited(module, old, new) == before


def test_what_cannot_be_followed_has_no_hash(edited):
    assert edited("proof.schedule", "import math\n", "import math\nfrom .words import *\n") == ""


def test_a_run_records_it():
    assert run_chain(request_of()).method == method_code()
    assert len(method_code()) == len(UNRECORDED) == 64


def test_a_record_of_before_it_was_recorded_is_read():
    text = record_text(build_record())
    assert '"method":"",' in text
    assert parse_record(text.replace('"method":"",', ""), "old") == build_record()
    with pytest.raises(EvidenceError, match=r"old: key method"):
        parse_record(text.replace('"method":"",', '"method":"none",'), "old")


def test_the_method_is_listed():
    assert list(ALIKE)[-1] == method_code(), "what takes times was edited: proof/method.py says what to do"


def test_methods_that_are_listed_take_the_same_times(monkeypatch):
    assert takes_alike("")
    assert all(takes_alike(listed) for listed in ALIKE)
    assert not takes_alike("a" * 64)
    monkeypatch.setattr("flashmoe_science.proof.method.method_code", lambda: "b" * 64)
    assert takes_alike("b" * 64)
    assert not any(takes_alike(listed) for listed in ALIKE)
