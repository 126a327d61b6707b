"""Tests of the cost of a run: model, estimate, budget, ledger and prices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashmoe_science.errors import ProofError, RatesError
from flashmoe_science.proof.cost.cost import (
    Bill,
    Budget,
    Estimate,
    Meter,
    PastRun,
    Rates,
    RunSize,
    Sum,
    add_up,
    estimate,
    load_rates,
    model_seconds,
    past_run,
    past_runs,
    size_of,
    spent_seconds,
)
from flashmoe_science.proof.records.documents import documents_in, read_record
from flashmoe_science.proof.records.evidence import Arm, Compared, Resumed, Revision
from flashmoe_science.proof.records.ledger import GPU_GATES, Entry
from flashmoe_science.proof.records.store import Archive, Store

from .builders import FIRST_DAY, H200, L4, build_gates, build_record

EVIDENCE = Path(__file__).parents[2] / "evidence"
SEED = RunSize(cases=13, arms=3, rounds=10, workers=6, cells=78)


def spending(*seconds: float, **changes):
    """Return a record whose gates launch, correct, quick and bench held a GPU for ``seconds``."""
    held = dict(zip(GPU_GATES, seconds, strict=False))
    gates = [gate.model_copy(update={"gpu_seconds": held.get(gate.name, 0.0)}) for gate in build_gates()]
    return build_record(gates=gates, **changes)


def past(factor: float, size: RunSize = SEED) -> PastRun:
    """Return a run that took ``factor`` times the rough model."""
    return PastRun(size, {gate: factor * model_seconds(gate, size) for gate in GPU_GATES})


def test_the_rough_model_is_within_three_times_what_was_measured():
    off = []
    for path in documents_in(EVIDENCE):
        record = read_record(path)
        run = past_run(record.model_copy(update={"settings": record.settings.model_copy(update={"width": None})}))
        if run is None:
            assert record.resumed or record.environment.gpu is None  # it took a part of a whole run, or no GPU
            continue
        took = sum(run.gpu_seconds.values())
        modelled = sum(model_seconds(gate, run.size) for gate in run.gpu_seconds)
        off += [(path.name, modelled / took)] if not 1 / 3 < modelled / took < 3 else []
    assert off == []


def test_the_size_of_a_record():
    record = build_record(baselines={"sdpa": 1.0, "other": 1.0}, processes=2, rounds=7)
    assert size_of(record) == RunSize(cases=3, arms=4, rounds=7, workers=4, cells=12)
    assert size_of(build_record(times=("graph", "wall"))).workers == 3
    large = record.cases[0].model_copy(update={"work": record.cases[0].work.model_copy(update={"flops": 1e11})})
    assert size_of(record.model_copy(update={"cases": [large, *record.cases[1:]]})).large == pytest.approx(1 / 3)
    arm = Arm(name="flash_attention", role="subject", status="refused")
    case = record.cases[0].model_copy(update={"arms": [arm], "rounds": []})
    assert size_of(record.model_copy(update={"cases": [case, *record.cases[1:]]})).cases == 2


def test_history_scales_the_model_by_the_median():
    model = estimate(SEED, [])
    assert (model.gpu_seconds, model.runs) == ({gate: model_seconds(gate, SEED) for gate in GPU_GATES}, 0)
    found = estimate(SEED, [past(1.0), past(3.0), past(2.0, replace(SEED, rounds=5, workers=2, cells=26))])
    assert found.total == pytest.approx(2 * model.total)
    assert (found.runs, found.source) == (3, "3 runs of this subject and suite on this GPU")
    early = PastRun(SEED, {"launch": 2 * model_seconds("launch", SEED)})
    assert estimate(SEED, [early]).gpu_seconds["bench"] == pytest.approx(2 * model_seconds("bench", SEED))


def test_a_run_without_a_gpu_or_of_a_part_is_no_history():
    record = spending(8, 4, 8, 82)
    assert past_run(record) is not None
    assert past_run(build_record(gpu=None)) is None
    assert past_run(build_record()) is None  # no gate has GPU seconds
    resumed = Resumed(run=record.id, created_at=FIRST_DAY)
    assert past_run(record.model_copy(update={"resumed": [resumed]})) is None


def test_history_is_of_the_same_subject_suite_and_gpu(tmp_path):
    store = Store(tmp_path / "runs")
    alike = [spending(8, 4, 8, seconds, day=day) for day, seconds in ((1, 80), (3, 90))]
    longer_name = H200.model_copy(update={"name": f"{H200.name} NVL"})
    others = [spending(1, subject="mine"), spending(1, suite="standard"), spending(1, gpu=L4, day=9)]
    for record in (*alike, *others, spending(1, gpu=longer_name, day=8)):
        store.save(record)
    archive = Archive(store, None)
    assert [run.gpu_seconds["bench"] for run in past_runs(archive, build_record(day=5))] == [90, 80]
    assert past_runs(archive, build_record(gpu=None)) == []


@pytest.mark.parametrize(
    ("gate", "spent", "refused"),
    [("sources", 1e9, False), ("bench", 0.0, True), ("launch", 350.0, False), ("launch", 351.0, True)],
)
def test_a_budget_stops_before_the_gate_that_would_exceed_it(gate, spent, refused):
    budget = Budget(1.0, 10.0, Estimate({"launch": 10.0, "bench": 400.0}, "made up"))  # one dollar is 360 s
    assert bool(budget.refusal(gate, spent)) == refused


def test_a_budget_without_a_price_is_refused_before_anything_runs():
    meter = Meter(Rates(), lambda _: [], budget=0.5)
    with pytest.raises(ProofError, match="a budget needs a rate, and there is none for NVIDIA H200\nhint: write its"):
        meter.start(build_record(), SEED)


def test_the_bill_of_a_comparison_is_of_both_revisions():
    bills: list[Bill] = []
    meter = Meter(Rates(), lambda _: [], announce=bills.append)
    meter.start(build_record(), replace(SEED, gates=("launch", "correct")))
    meter.start(build_record(), SEED)
    bill = meter.bill(spending(8, 4, 8, 82))
    assert bill is not None
    assert bill.estimate is not None
    model = {gate: model_seconds(gate, SEED) for gate in GPU_GATES}
    assert bill.estimate.gpu_seconds == {**model, "launch": 2 * model["launch"], "correct": 2 * model["correct"]}
    assert [set(one.estimate.gpu_seconds) for one in bills if one.estimate] == [{"launch", "correct"}, set(GPU_GATES)]


def test_a_comparison_is_booked_with_the_gates_of_both_revisions(tmp_path):
    sides = [Revision(label=label, commit="0" * 40, arm=label, gates=spending(3, 2).gates) for label in ("A", "B")]
    record = spending(8, 4, 8, 82)
    record = record.model_copy(update={"compared": Compared(a=sides[0], b=sides[1], tolerance=0.01)})
    assert spent_seconds(record) == 8 + 4 + 8 + 82 + 3 + 2
    store = Store(tmp_path / "runs")
    store.save(record)
    sums = add_up(store.costs(), lambda row: row.gate, lambda _: None)
    assert {gate: total.gpu_seconds for gate, total in sums.items()} == dict(
        zip(GPU_GATES, (11, 6, 8, 82), strict=True)
    )


def test_rows_are_summed_at_the_price_that_was_booked_or_else_at_the_current_one():
    row = Entry("2026-01-01", "r", "bench", "s", "x", "G", 3600.0)
    rows = [replace(row, dollars_per_hour=2.0), replace(row, gpu_seconds=1800.0), replace(row, gpu="unknown")]
    rows.append(replace(row, gpu_seconds=0.0, dollars=3.2))
    sums = add_up(rows, lambda row: row.gpu, {"G": 4.0}.get)
    assert sums == {"G": Sum(5400.0, 2.0 + 2.0 + 3.2, 0.0), "unknown": Sum(3600.0, 0.0, 3600.0)}
    free = add_up([replace(row, dollars_per_hour=0.0)], lambda _: "", lambda _: 9.0)
    assert free == {"": Sum(3600.0, 0.0, 0.0)}  # nothing is a price


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Return the folder of a user's configuration."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config" / "flashmoe").mkdir(parents=True)
    return tmp_path / "config" / "flashmoe"


@pytest.mark.usefixtures("config")
def test_a_price_is_found_by_the_words_of_the_name():
    (packaged,) = load_rates(None).files.values()
    assert all(rate.source and rate.date for rate in packaged.gpu.values())
    price = load_rates(None).dollars_per_hour
    assert price("NVIDIA H100 80GB HBM3") == packaged.gpu["H100"].dollars_per_hour
    assert price("NVIDIA H100 NVL") == packaged.gpu["H100 NVL"].dollars_per_hour
    assert price("NVIDIA L40S") is None


def test_the_repository_comes_before_the_user_and_both_before_the_package(config, tmp_path):
    (config / "rates.toml").write_text("[gpu.H200]\ndollars_per_hour = 2\n[gpu.L4]\ndollars_per_hour = 0.5\n")
    assert load_rates(tmp_path).dollars_per_hour("NVIDIA H200") == 2.0
    (tmp_path / "rates.toml").write_text("[gpu.H200]\ndollars_per_hour = 3\n")
    price = load_rates(tmp_path).dollars_per_hour
    assert [price(gpu) for gpu in ("NVIDIA H200", "NVIDIA L4")] == [3.0, 0.5]


def test_other_rates_are_added(config, tmp_path):
    (config / "rates.toml").write_text("[other.disk]\ndollars_per_hour = 0.25\n[other.host]\ndollars_per_hour = 0.5\n")
    (tmp_path / "rates.toml").write_text("[gpu.L4]\ndollars_per_hour = 1\n[other.host]\ndollars_per_hour = 2\n")
    assert load_rates(tmp_path).dollars_per_hour("NVIDIA L4") == 1 + 0.25 + 2


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[gpu.L4]\ndollars_per_hour = -1", "key gpu.L4.dollars_per_hour: .*greater than or equal to 0.*, got -1"),
        ("[gpu.L4]\ndollars = 1", "key gpu.L4.dollars: unknown key, expected one of dollars_per_hour, source, date"),
        ("[gpu.L4", "is not valid TOML"),
    ],
)
def test_a_wrong_file_names_file_key_and_what_was_expected(config, text, error):
    (config / "rates.toml").write_text(text)
    with pytest.raises(RatesError, match=f"rates.toml: {error}"):
        load_rates(None)
