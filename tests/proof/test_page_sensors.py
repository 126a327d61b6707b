"""Tests of what the card reported over a run, in the order of the rounds."""

from __future__ import annotations

from flashmoe_science.proof.report.page_sensors import rounds_in_order, sensor_figure

from .builders import build_record


def with_sensors(record, **columns):
    """Return the record with sensors of its own in the first mode of the first case."""
    case = record.cases[0]
    first = case.rounds[0].model_copy(update=columns)
    cases = [case.model_copy(update={"rounds": [first, *case.rounds[1:]]}), *record.cases[1:]]
    return record.model_copy(update={"cases": cases})


def test_rounds_come_by_process_then_kinds_then_case():
    record = build_record(speedups=[2.0, 2.0], processes=2, rounds=1)
    found = [(each.process, each.kinds, each.case) for each in rounds_in_order(record)]
    together, alone = ("graph", "wall"), ("kernel",)
    one_process = [(together, "case0"), (together, "case1"), (alone, "case0"), (alone, "case1")]
    assert found == [(process, *rest) for process in (0, 1) for rest in one_process]
    figure = sensor_figure(record, "run")
    assert figure is not None
    assert len(figure.plots[0].rules) == 3


def test_a_process_is_summed_up_without_what_was_not_read():
    record = build_record(speedups=[2.0], processes=1, rounds=3, times=("graph",))
    record = with_sensors(record, sm_clock_mhz=[1500, None, 1980], throttle=["", "sw_power_cap", None])
    figure = sensor_figure(record, "run")
    assert figure is not None
    (row,) = figure.table.rows
    assert row[:4] == ("0", "graph", "3", "1500 / 1740 / 1980")
    assert row[-2:] == ("1", "sw_power_cap")
