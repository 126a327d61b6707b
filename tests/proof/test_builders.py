"""The made-up records follow the model that they are said to follow."""

from __future__ import annotations

import numpy as np
import pytest

from flashmoe_science.proof.records.documents import read_record, write_record
from flashmoe_science.proof.records.evidence import GateStatus, Record

from .builders import build_record


def _log_ratios(record, kind, above, below):
    columns = [next(r.seconds[kind] for r in case.rounds if kind in r.seconds) for case in record.cases]
    return np.array([np.log(np.array(c[above]) / np.array(c[below])) for c in columns])


def test_a_built_record_survives_writing_and_reading(tmp_path):
    record = build_record()
    write_record(record, tmp_path / "record.json")
    assert read_record(tmp_path / "record.json") == record


def test_speedup_spread_and_control_bias_are_those_asked_for():
    record = build_record(speedups=[2.0] * 40, spread=0.02, control_bias=0.01, rounds=20)
    ratios = _log_ratios(record, "graph", "sdpa", "flash_attention")
    assert np.exp(ratios.mean()) == pytest.approx(2.0, rel=2e-3)
    assert ratios.std() == pytest.approx(0.02, rel=0.05)
    assert _log_ratios(record, "wall", "sdpa#2", "sdpa").mean() == pytest.approx(0.01, abs=2e-3)


def test_processes_have_offsets_of_their_own_only_when_asked():
    def spread_of_process_means(process_spread):
        record = build_record(speedups=[2.0] * 60, spread=0.01, process_spread=process_spread)
        means = _log_ratios(record, "graph", "sdpa", "flash_attention").reshape(60, 3, 10).mean(axis=2)
        return means.std(axis=1, ddof=1).mean()

    assert spread_of_process_means(0.0) < 0.004
    assert spread_of_process_means(0.02) > 0.014


def test_without_a_gpu_there_are_no_times():
    record = build_record(gpu=None)
    assert isinstance(record, Record)
    assert not any(case.rounds for case in record.cases)
    assert {gate.name: gate.status for gate in record.gates}["bench"] is GateStatus.NOT_POSSIBLE
