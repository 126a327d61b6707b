"""A change makes exactly those claims of this repository stale whose cases launch it, as profilers saw them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science.attention.backward import gluon_sm90 as backward_gluon_sm90
from flashmoe_science.attention.forward import gluon_sm90 as forward_gluon_sm90
from flashmoe_science.moe import primitives
from flashmoe_science.moe.decode import gemv_triton
from flashmoe_science.proof.judge import staleness as changes
from flashmoe_science.proof.judge.claims import find_evidence, load_claims
from flashmoe_science.proof.judge.staleness import changes_since
from flashmoe_science.proof.judge.verify import read_records
from flashmoe_science.proof.subject.loading import load_operator

pytestmark = [pytest.mark.triton, pytest.mark.one_triton]

ROOT = Path(__file__).resolve().parents[2]
REACH_ROWS_OF_COLUMNS = ("_gemv_gate_up_kernel", "_gate_up_kernel")


@pytest.fixture(scope="module")
def judged() -> list[Any]:
    """Return claims of device time, each with its record, and which of them are stale as it is."""
    claims = [claim for claim in load_claims(ROOT / "claims") if claim.metric in ("kernel", "graph")]
    records = read_records(ROOT)
    pairs = [(claim, record) for claim in claims for record in find_evidence(claim, records).values()]
    return [pairs, stale(pairs)]


def stale(pairs) -> set[str]:
    changes._identities_now.cache_clear()
    try:
        return {claim.id for claim, record in pairs if changes_since(claim, record, ROOT).changed}
    finally:  # a later test must not be told of a launch that was changed here
        changes._identities_now.cache_clear()


def launching(pairs, *kernels: str) -> set[str]:
    """Return the claims in whose cases the subject was seen to launch one of these kernels."""
    return {
        claim.id
        for claim, record in pairs
        for case in claim.cases_of(record)
        for arm in case.arms
        if arm.role == "subject" and any(launch.name in kernels for launch in arm.launches)
    }


@pytest.mark.parametrize(
    "kernel",
    [
        forward_gluon_sm90._forward_sm90_kernel,
        backward_gluon_sm90._backward_sm90_kernel,
        gemv_triton._gemv_down_kernel,
    ],
    ids=lambda kernel: str(kernel.__name__),
)
def test_a_kernel(judged, plant, kernel):
    pairs, before = judged
    plant(kernel)
    affected = launching(pairs, kernel.__name__)
    assert affected
    assert stale(pairs) == before | affected


def test_a_helper(judged, plant):
    pairs, before = judged
    plant(primitives.rows_of_columns)
    assert stale(pairs) == before | launching(pairs, *REACH_ROWS_OF_COLUMNS)


def test_a_grid(judged, monkeypatch):
    pairs, before = judged
    operator = type(load_operator("attention_varlen"))
    launches = operator.launches  # type: ignore[attr-defined]

    def with_another_grid(self, *args):
        return [dataclasses.replace(launch, grid=(1, 1, 1)) for launch in launches(self, *args)]

    monkeypatch.setattr(operator, "launches", with_another_grid)
    affected = {claim.id for claim, _ in pairs if claim.subject == "flash_attention_varlen"}
    assert stale(pairs) == before | affected
