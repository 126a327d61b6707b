"""Tests of the sweeps: which cases of a run differ in one size alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashmoe_science.proof.judge.scaling import find_sweeps
from flashmoe_science.proof.records.documents import read_record
from flashmoe_science.proof.records.evidence import CaseRecord, Work

EVIDENCE = Path(__file__).resolve().parents[2] / "evidence"


def build_case(name, flops=1.0, **problem):
    return CaseRecord(name=name, problem=problem, origin="made up", work=Work(flops=flops, bytes=1.0, tokens=1))


def lines(cases):
    return [(sweep.keys, sweep.along, dict(sweep.fixed), sweep.sizes) for sweep in find_sweeps(cases)]


def test_one_size_grows_and_keys_that_are_equal_everywhere_are_one_size():
    cases = [build_case(str(s), rows=s, cols=s, kind="a") for s in (256, 64, 128)]
    assert lines(cases) == [(("rows", "cols"), (), {}, [64, 128, 256])]


def test_two_points_are_no_sweep():
    assert find_sweeps([build_case(str(s), rows=s) for s in (64, 128)]) == []
    assert find_sweeps([]) == []


def test_what_else_differs_in_the_run_says_which_sweep_it_is():
    cases = [build_case(f"{s}{c}", rows=s, causal=c, kind="a") for c in (True, False) for s in (1, 2, 4)]
    assert lines(cases) == [
        (("rows",), (), {"causal": True}, [1, 2, 4]),
        (("rows",), (), {"causal": False}, [1, 2, 4]),
    ]


def test_a_grid_is_a_sweep_along_each_side_and_never_across():
    cases = [build_case(f"{b}x{s}", flops=float(b * s), batch=b, rows=s) for b in (1, 2, 4) for s in (8, 16, 32)]
    found = lines(cases)
    assert [keys for keys, *_ in found] == [("batch",)] * 3 + [("rows",)] * 3
    assert all(not along for _, along, *_ in found)


def test_two_sizes_in_step_are_a_sweep_of_the_one_with_which_the_work_grows():
    cases = [build_case(str(s), flops=float(s), batch=64 // s, rows=s) for s in (4, 8, 16)]
    assert lines(cases) == [(("rows",), ("batch",), {}, [4, 8, 16])]
    assert find_sweeps(cases)[0].along_sizes == [16, 8, 4]


def test_two_sizes_in_step_at_constant_work_are_none():
    assert find_sweeps([build_case(str(s), flops=1.0, heads=64 // s, rows=s) for s in (4, 8, 16)]) == []


def test_of_two_cases_of_one_size_the_first_counts():
    cases = [build_case(name, rows=s) for name, s in (("a", 1), ("b", 2), ("again", 2), ("c", 3))]
    assert [case.name for case in find_sweeps(cases)[0].cases] == ["a", "b", "c"]


def test_keys_that_are_equal_along_a_line_alone_are_one_size_there():
    line = [build_case(str(s), flops=float(s), batch=64 // s, rows=s, cols=s) for s in (4, 8, 16)]
    odd = build_case("odd", flops=1.0, batch=16, rows=4, cols=5)
    assert lines([*line, odd]) == [(("rows", "cols"), ("batch",), {}, [4, 8, 16])]
    fixed = [build_case(f"fixed{s}", flops=float(s), batch=1, rows=s, cols=7) for s in (4, 8, 16)]
    assert [keys for keys, *_ in lines([*line, *fixed])] == [("rows",), ("rows", "cols")]


def test_words_and_flags_are_no_sizes():
    cases = [build_case(str(n), dtype=d, flag=f) for n, (d, f) in enumerate([("a", True), ("b", False), ("c", True)])]
    assert find_sweeps(cases) == []


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("20261121T041756Z-seed-flash_attention-cb37b4", [("seqlen_q", "", 7), ("batch", "", 4)]),
        ("20261121T041957Z-standard-forward_triton-4ba04b", [("seqlen_q", "batch", 6)] * 6),
    ],
)
def test_the_sweeps_of_real_records(run, expected):
    found = find_sweeps(read_record(EVIDENCE / f"{run}.json.gz").cases)
    assert [(s.keys[0], "".join(s.along), len(s.cases)) for s in found] == expected
