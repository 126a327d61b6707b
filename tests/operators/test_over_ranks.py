"""Operators over ranks: each entry point's answer is this rank's part of the truth of the whole problem."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import flashmoe_science
from flashmoe_science.errors import InputError
from flashmoe_science.operators.ranks.context_parallel import OPERATOR as ATTENTION
from flashmoe_science.operators.ranks.expert_parallel import OPERATOR as EXPERTS
from flashmoe_science.proof.subject.suites import load_suite
from tests.distributed.ranks import run_ranks

from .over_ranks_cases import CASES

_MODULE = "tests.operators.over_ranks_cases"


def test_every_entry_point_and_baseline_is_right_on_both_ranks_and_follows_new_values(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(_MODULE, "run", 2, tmp_path)):
        assert {name: fault for name, fault in found.items() if fault} == {}, rank
        entries = {case.split()[1] for case in found}
        assert entries == {
            *("context_parallel", "context_parallel_gather", "ulysses", "one-gpu"),
            *("expert_parallel", "all-to-all", "replicated-experts"),
        }


def test_ranks_work_out_together_what_one_of_them_does_alone(tmp_path: Path) -> None:
    largest = {"exact": 1e-12, "low_precision": 2e-3, "error_scale": 1e-3}
    for found in run_ranks(_MODULE, "truths", 2, tmp_path):
        assert len(found) == 3 * len(CASES)
        for name, off in found.items():
            assert off <= largest[name.split()[1]], name


@pytest.mark.exhaustive
def test_the_part_of_another_rank_is_wrong(tmp_path: Path) -> None:
    for found in run_ranks(_MODULE, "wrong_part", 2, tmp_path):
        assert all(found["faults"])


@pytest.mark.parametrize(("operator", "table"), CASES)
def test_parts_of_all_ranks_make_the_whole(operator, table):
    problem = operator.parse_case(table)
    assert operator.parse_case(operator.as_table(problem)) == problem
    tensor = torch.arange(sum(problem.whole.lengths) if operator is ATTENTION else 48)[:, None]
    for layout in ("straight", *(["chunks", "auto"] if operator is ATTENTION else [])):
        both = torch.cat([operator.shard(problem, layout, rank, "o", tensor) for rank in range(2)])
        assert torch.equal(both.sort(0).values, tensor)
    work = operator.work(problem)
    assert work.tokens == (64 if operator is ATTENTION else 24)


@pytest.mark.parametrize(
    ("operator", "changes", "message"),
    [
        (ATTENTION, {"ranks": 1}, "ranks must be at least 2, got 1"),
        (ATTENTION, {"ranks": 4}, "heads_kv must be a multiple of the 4 ranks, got 2"),
        (ATTENTION, {"lengths": [129]}, "lengths must sum up to a multiple of 4, got 129"),
        (EXPERTS, {"ranks": 3}, "experts must be a multiple of the 3 ranks, got 4"),
    ],
)
def test_what_cannot_be_split_is_refused(operator, changes, message):
    table = next(table for each, table in CASES if each is operator)
    with pytest.raises(InputError, match=message):
        operator.parse_case({**table, **changes})


def test_gather_runs_a_call_for_each_chunk_on_the_keys_that_it_sees():
    problem = ATTENTION.parse_case({**CASES[0][1], "lengths": [256], "gradients": False})
    passes = ATTENTION.passes("context_parallel_gather", problem)
    assert [(part.seqlen_q, part.seqlen_k) for _, _, part in passes] == [(64, 64), (64, 256), (128, 192)]
    assert {name for _, name, _ in passes} == {"flash_attention"}


def test_suites_over_ranks_compile_what_each_rank_runs():
    suites: list[tuple[str, Any]] = [("context-parallel", ATTENTION), ("expert-parallel", EXPERTS)]
    for name, operator in suites:
        subject = next(iter(operator.kernels))
        for case in load_suite(name).cases:
            assert operator.refusal(subject, case.problem, "H100") is None
            assert operator.refusal(subject, case.problem, "H200") is None
    assert ATTENTION.compile_jobs("context_parallel", [ATTENTION.parse_case(CASES[1][1])], ["H100"])


def test_our_own_baselines_have_our_version_also_where_the_package_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", mock.Mock(side_effect=importlib.metadata.PackageNotFoundError))
    for operator in (ATTENTION, EXPERTS):
        assert operator.baselines()["one-gpu"].version() == f"flashmoe_science {flashmoe_science.__version__}"
