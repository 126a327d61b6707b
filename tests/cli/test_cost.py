"""Tests of the estimate and the bill that prove prints, and of the verb cost. The chain is a stand-in."""

from __future__ import annotations

import json

import pytest

from flashmoe_science.proof.cost.cost import size_of
from flashmoe_science.proof.records.evidence import Gate
from flashmoe_science.proof.records.ledger import GPU_GATES
from flashmoe_science.proof.records.store import Store

from ..proof.builders import H200, build_gates, build_record


@pytest.fixture(autouse=True)
def prices(repository, monkeypatch, tmp_path):
    """Make the H200 cost 36 dollars an hour: a cent a second."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (repository / "rates.toml").write_text('[gpu.H200]\ndollars_per_hour = 36\nsource = "made up"\n')


def gates(*seconds) -> list[Gate]:
    held = dict(zip(GPU_GATES, seconds, strict=False))
    return [
        gate.model_copy(update={"gpu_seconds": held.get(gate.name, 0.0), "seconds": held.get(gate.name, 1.0)})
        for gate in build_gates()
    ]


@pytest.fixture
def prove_with(run, monkeypatch):
    """Run ``flashmoe prove`` with a chain that asks its meter and gives back ``record``."""

    def prove_with(record, *args):
        def chain(request, *, progress, save):
            request.meter.start(record, size_of(record))
            save(record)
            return record

        monkeypatch.setattr("flashmoe_science.proof.gates.prove", chain)
        return run("prove", *args)

    return prove_with


def test_prove_prints_an_estimate_first_and_the_bill_last(prove_with):
    record = build_record(gates=gates(1, 2, 3, 54), speedups=[2.3, 3.0], day=1)
    code, out, err = prove_with(record)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[1].startswith("cost: about $")
    assert lines[1].endswith(", by a rough model: no run of this subject and suite on this GPU is known")
    assert lines[-2].startswith("cost: $0.600 (60 s of NVIDIA H200); estimated $")
    again = record.model_copy(update={"id": record.id + "x"})
    cost = json.loads(prove_with(again, "--json")[1])["cost"]
    assert (cost["gpu"], cost["gpu_seconds"], cost["dollars"], cost["dollars_per_hour"]) == (H200.name, 60, 0.6, 36)
    assert (cost["estimate"]["runs"], cost["estimate"]["dollars"]) == (1, pytest.approx(0.6))


def test_without_a_gpu_there_is_no_cost_and_without_a_rate_there_are_no_dollars(prove_with):
    assert "cost" not in prove_with(build_record(gpu=None, day=1), "--budget", "0")[1]
    gpu = H200.model_copy(update={"name": "NVIDIA Z1"})
    record = build_record(gates=gates(1, 2, 3, 54), gpu=gpu, speedups=[2.3], day=2)
    assert "cost: 60 s of NVIDIA Z1 (no rate for it in rates.toml); estimated " in prove_with(record)[1]
    code, _, err = prove_with(record, "--budget", "1")
    assert (code, "a budget needs a rate, and there is none for NVIDIA Z1\nhint: write its price" in err) == (2, True)


def test_a_store_that_cannot_be_read_costs_the_history_alone(prove_with, repository, monkeypatch):
    monkeypatch.setenv("FLASHMOE_STORE", str(repository / "README.md"))
    code, out, err = prove_with(build_record(gates=gates(1, 2, 3, 54), speedups=[2.3], day=1))
    assert (code, "a rough model" in out) == (0, True)
    assert err.startswith("warning: the store must be a folder")


def test_a_wrong_rates_file_is_an_error_before_anything_runs(run, repository):
    (repository / "rates.toml").write_text("[gpu.H200]\ndollars_per_hour = -1\n")
    for args in (["prove"], ["cost"], ["cost", "rates"]):
        code, out, err = run(*args)
        assert (code, out) == (2, "")
        assert "rates.toml: key gpu.H200.dollars_per_hour: " in err


def test_cost_sums_the_ledger_by_day_subject_and_gate(run):
    Store().save(build_record(gates=gates(1, 2, 3, 54), day=0))
    Store().save(build_record(gates=gates(10), day=1, subject="mine"))
    Store().save(build_record(gpu=None, day=2))
    assert run("cost", "add", "--dollars", "3.2", "--note", "idle", "--date", "2026-01-02")[0] == 0
    code, out, err = run("cost")
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines() if line] == [
        ["day", "GPU", "time", "dollars"],
        ["2026-01-01", "60", "s", "$0.600"],
        ["2026-01-02", "10", "s", "$3.30"],
        ["subject", "GPU", "time", "dollars"],
        ["flash_attention", "60", "s", "$0.600"],
        ["mine", "10", "s", "$0.100"],
        ["entered", "by", "hand", "$3.20"],
        ["gate", "GPU", "time", "dollars"],
        ["launch", "11", "s", "$0.110"],
        ["correct", "2.0", "s", "$0.020"],
        ["quick", "3.0", "s", "$0.030"],
        ["bench", "54", "s", "$0.540"],
        ["entered", "by", "hand", "$3.20"],
        ["total", "70", "s", "$3.90"],
    ]
    document = json.loads(run("cost", "--since", "2026-01-02", "--json")[1])
    assert document["total"] == {"gpu_seconds": 10, "dollars": pytest.approx(3.3), "unpriced_seconds": 0}
    assert list(document["by_day"]) == ["2026-01-02"]


def test_cost_rates_lists_them_with_the_file_that_decides(run):
    _, out, _ = run("cost", "rates")
    lines = out.splitlines()
    assert lines[0] == "rates.toml:"
    assert lines[2].split() == ["H200", "$36.00", "made", "up"]
    assert "of flashmoe:" in lines
    assert "B200" in out
    gpus = json.loads(run("cost", "rates", "--json")[1])["gpus"]
    assert next(rate["dollars_per_hour"] for rate in gpus if rate["name"] == "H200") == 36
