"""Tests of what prove says about its cost, and of the verb cost. The chain is a stand-in; nothing was measured."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from flashmoe_science.proof.cost import size_of
from flashmoe_science.proof.evidence import Compared, Gate, Revision, write_record
from flashmoe_science.proof.ledger import GPU_GATES
from flashmoe_science.proof.revisions import Asked
from flashmoe_science.proof.store import Store

from ..proof.builders import H200, build_gates, build_record


@pytest.fixture(autouse=True)
def prices(repository, monkeypatch, tmp_path):
    """Make the H200 cost 36 dollars an hour: a cent a second."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (repository / "rates.toml").write_text('[gpu.H200]\ndollars_per_hour = 36\nsource = "made up"\n')


def gates(*seconds, failed=None) -> list[Gate]:
    held = dict(zip(GPU_GATES, seconds, strict=False))
    return [gate.model_copy(update={"gpu_seconds": held.get(gate.name, 0.0)}) for gate in build_gates(failed)]


@pytest.fixture
def prove_with(run, monkeypatch):
    """Run ``flashmoe prove`` with a chain that asks its meter and gives back ``record``."""

    def prove_with(record, *args):
        def chain(request, *, progress, save):
            request.meter.start(record, size_of(record))
            save(record)
            return record

        monkeypatch.setattr("flashmoe_science.cli.prove.prove", chain)
        return run("prove", *args)

    return prove_with


def test_prove_says_what_it_will_cost_and_what_it_has_cost(prove_with):
    record = build_record(gates=gates(1, 2, 3, 54), speedups=[2.3, 3.0], day=1)
    code, out, err = prove_with(record)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[1].startswith("cost: about $")
    assert lines[1].endswith(", by a rough model: no run of this subject and suite on this GPU is known")
    assert lines[-2].startswith("cost: $0.600 (60 s of NVIDIA H200); estimated $")
    assert lines[-1].startswith("record: ")

    out = prove_with(record.model_copy(update={"id": record.id + "x"}))[1].splitlines()
    assert out[1] == (
        "cost: about $0.600 (60 s of NVIDIA H200 at $36.00 an hour), by 1 run of this subject and suite on this GPU"
    )
    assert out[-2] == "cost: $0.600 (60 s of NVIDIA H200); estimated $0.600"


def test_the_error_of_earlier_estimates_is_shown(prove_with):
    for day, seconds in ((1, 60), (2, 120)):
        Store().save(build_record(gates=gates(*[seconds / 4] * 4), speedups=[2.3, 3.0], day=day))
    out = prove_with(build_record(gates=gates(1, 2, 3, 54), speedups=[2.3, 3.0], day=3))[1]
    assert "by 2 runs of this subject and suite on this GPU; such estimates missed by 100% (median)" in out


def test_the_document_has_the_cost(prove_with):
    record = build_record(gates=gates(1, 2, 3, 54), speedups=[2.3], day=1)
    cost = json.loads(prove_with(record, "--json")[1])["cost"]
    assert (cost["gpu"], cost["gpu_seconds"], cost["dollars"], cost["dollars_per_hour"]) == (H200.name, 60, 0.6, 36)
    assert cost["estimate"]["runs"] == 0
    assert sum(cost["estimate"]["gates"].values()) == pytest.approx(cost["estimate"]["gpu_seconds"])


def test_without_a_gpu_nothing_is_said_of_cost(prove_with):
    code, out, _ = prove_with(build_record(gpu=None, day=1), "--budget", "0")
    assert (code, "cost" in out) == (0, False)
    assert json.loads(prove_with(build_record(gpu=None, day=2), "--json")[1])["cost"] is None


def test_without_a_rate_the_time_is_said(prove_with):
    gpu = H200.model_copy(update={"name": "NVIDIA Z1"})
    record = build_record(gates=gates(1, 2, 3, 54), gpu=gpu, speedups=[2.3], day=1)
    assert "cost: 60 s of NVIDIA Z1 (no rate for it in rates.toml); estimated " in prove_with(record)[1]
    code, _, err = prove_with(record, "--budget", "1")
    assert code == 2
    assert "a budget needs a rate, and there is none for NVIDIA Z1\nhint: write its price to rates.toml" in err


@pytest.mark.parametrize("amount", ["-1", "nan", "inf", "much"])
def test_a_budget_is_a_number_of_dollars(run, amount):
    code, _, err = run("prove", "--budget", amount)
    assert (code, "budget" in err) == (2, True)


def test_a_wrong_rates_file_is_an_error_before_anything_runs(run, repository):
    (repository / "rates.toml").write_text("[gpu.H200]\ndollars_per_hour = -1\n")
    for args in (["prove"], ["cost"], ["cost", "rates"]):
        code, out, err = run(*args)
        assert (code, out) == (2, "")
        assert "rates.toml: key gpu.H200.dollars_per_hour: " in err


def test_a_store_that_cannot_be_read_costs_the_history_alone(prove_with, repository, monkeypatch):
    monkeypatch.setenv("FLASHMOE_STORE", str(repository / "README.md"))
    code, out, err = prove_with(build_record(gates=gates(1, 2, 3, 54), speedups=[2.3], day=1))
    assert (code, "a rough model" in out) == (0, True)
    assert err.startswith("warning: the store must be a folder")


def test_compare_says_what_each_revision_will_cost_and_what_both_have_cost(run, monkeypatch):
    of_a = Revision(label="main", commit="0" * 40, arm="A", gates=gates(20, 20))
    of_b = Revision(label="HEAD", commit="1" * 40, arm="B")
    compared = Compared(a=of_a, b=of_b, tolerance=0.01)
    days = iter((1, 2))

    def prove_revisions(request, *, save, **_):
        record = build_record(gates=gates(1, 2, 3, 54), speedups=[2.3], day=next(days))
        record = record.model_copy(update={"compared": compared})
        request.meter.start(record, replace(size_of(record), gates=("launch", "correct")))
        request.meter.start(record, size_of(record))
        save(record)
        return record

    @contextmanager
    def checked_out(*_):
        yield ()

    stand_ins = {
        "find_toplevel": lambda _: Path(),
        "find_revision": lambda _, label: Asked(label, "0" * 40),
        "has_uncommitted_changes": lambda _: False,
        "checked_out": checked_out,
        "subjects_at": lambda *_: (None, None),
        "prove_revisions": prove_revisions,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(f"flashmoe_science.cli.compare.{name}", stand_in)
    lines = run("compare", "main", "HEAD")[1].splitlines()
    assert [line.startswith("cost: about $") for line in lines[1:3]] == [True, True]
    assert lines[-2].startswith("cost: $1.00 (1 min 40 s of NVIDIA H200); estimated $")
    cost = json.loads(run("compare", "main", "HEAD", "--json")[1])["cost"]
    assert cost["gpu_seconds"] == 100
    assert sum(entry.gpu_seconds for entry in Store().ledger()) == 200


# the verb cost


def test_cost_sums_the_ledger_by_day_subject_and_gate(run):
    Store().save(build_record(gates=gates(1, 2, 3, 54), day=0))
    Store().save(build_record(gates=gates(10), day=1, subject="mine"), dollars_per_hour=72.0)
    Store().save(build_record(gpu=None, day=2))
    assert run("cost", "add", "--dollars", "3.2", "--note", "idle", "--date", "2026-01-02")[0] == 0
    code, out, err = run("cost")
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines() if line] == [
        ["day", "GPU", "time", "dollars"],
        ["2026-01-01", "60", "s", "$0.600"],
        ["2026-01-02", "10", "s", "$3.40"],
        ["subject", "GPU", "time", "dollars"],
        ["flash_attention", "60", "s", "$0.600"],
        ["mine", "10", "s", "$0.200"],
        ["entered", "by", "hand", "$3.20"],
        ["gate", "GPU", "time", "dollars"],
        ["launch", "11", "s", "$0.210"],
        ["correct", "2.0", "s", "$0.020"],
        ["quick", "3.0", "s", "$0.030"],
        ["bench", "54", "s", "$0.540"],
        ["entered", "by", "hand", "$3.20"],
        ["total", "70", "s", "$4.00"],
    ]
    document = json.loads(run("cost", "--since", "2026-01-02", "--json")[1])
    assert document["total"] == {"gpu_seconds": 10, "dollars": pytest.approx(3.4), "unpriced_seconds": 0}
    assert list(document["by_day"]) == ["2026-01-02"]


def test_cost_says_what_early_gates_saved(run):
    Store().save(build_record(gates=gates(8, 4, 8, 82), day=0))
    Store().save(build_record(gates=gates(8, failed="launch"), day=1))
    Store().save(build_record(gates=gates(failed="build"), gpu=None, day=2))
    out = run("cost")[1]
    assert out.splitlines()[-1] == (
        "saved: about $0.940 (94 s) in 1 run that failed at launch: the estimated time of the gates after those"
    )
    (saved,) = json.loads(run("cost", "--json")[1])["saved"]
    assert (saved["gate"], saved["gpu_seconds"]) == ("launch", pytest.approx(94))
    assert saved["source"] == "1 run of this subject and suite on this GPU"  # of the failed one no gate passed on a GPU


def test_time_without_a_rate_is_said_apart(run):
    gpu = H200.model_copy(update={"name": "NVIDIA Z1"})
    Store().save(build_record(gates=gates(60), gpu=gpu, day=0))
    assert run("cost")[1].splitlines()[-1].split() == [
        "total",
        "60",
        "s",
        "$0.00",
        "and",
        "60",
        "s",
        "without",
        "a",
        "rate",
    ]


def test_runs_of_the_evidence_folder_that_the_store_does_not_have_are_counted_and_said(run, repository):
    write_record(build_record(gates=gates(1, 2, 3, 54), day=3), repository / "evidence" / "loose.json")
    write_record(build_record(gates=gates(8, failed="launch"), day=4), repository / "evidence" / "failed.json")
    code, out, err = run("cost")
    assert code == 0
    assert out.splitlines()[-3].split() == ["total", "68", "s", "$0.680"]
    assert out.splitlines()[-1].startswith("saved: about $0.590 (59 s) in 1 run")
    assert err.splitlines() == [
        "2 runs of evidence/ that the store does not have, at the prices of now",
        "hint: flashmoe import evidence/ keeps them there",
    ]
    assert len(json.loads(run("cost", "--json")[1])["not_in_store"]) == 2
    assert json.loads(run("cost", "--since", "2026-01-05", "--json")[1])["total"]["gpu_seconds"] == 8
    assert run("import", "evidence/")[0] == 0
    assert run("cost")[1:] == (out, "")


def test_what_a_run_saved_counts_its_kinds_of_problems(run, monkeypatch):
    Store().save(build_record(gates=gates(8, failed="launch"), day=1))

    def seconds() -> float:
        (saved,) = json.loads(run("cost", "--json")[1])["saved"]
        return float(saved["gpu_seconds"])

    few = seconds()
    monkeypatch.setattr("flashmoe_science.cli.cost.kinds_of", lambda _: 2)
    assert seconds() > few + 1


def test_cost_where_nothing_was_spent(run):
    assert run("cost") == (0, "", "nothing was spent: no run held a GPU, and nothing was entered by hand\n")


def test_cost_add_prints_what_was_entered(run):
    code, out, _ = run("cost", "add", "--dollars", "-3.2", "--note", "a refund", "--gpu", "L4", "--date", "2026-02-03")
    assert (code, out.rpartition(": ")[2]) == (0, "-$3.20 on 2026-02-03, a refund\n")
    assert json.loads(run("cost", "add", "--dollars", "1", "--note", "x", "--json")[1])["entry"]["dollars"] == 1
    code, _, err = run("cost", "add", "--dollars", "nan", "--note", "x")
    assert (code, err) == (2, "error: dollars must be a number, got nan\n")


def test_cost_rates_lists_them_with_the_file_that_decides(run):
    _, out, _ = run("cost", "rates")
    lines = out.splitlines()
    assert lines[0] == "rates.toml:"
    assert lines[2].split() == ["H200", "$36.00", "made", "up"]
    assert "of flashmoe:" in lines
    assert "B200" in out
    gpus = json.loads(run("cost", "rates", "--json")[1])["gpus"]
    assert next(rate["dollars_per_hour"] for rate in gpus if rate["name"] == "H200") == 36
