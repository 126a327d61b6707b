"""Suites that nobody chose: the same seed draws the same shapes, and they cover what they are meant to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashmoe_science.proof.subject.suites import Suite, load_suite

TOOL = Path(__file__).parents[1] / "tools" / "draw_suite.py"


def draw(seed: str, path: Path) -> Suite:
    text = subprocess.run([sys.executable, TOOL, seed], capture_output=True, text=True, check=True).stdout
    path.write_text(text.replace('name = "unseen"', 'name = "drawn"', 1))
    return load_suite(str(path))


@pytest.mark.parametrize("seed", ["a", "0123abc", "2026"])
def test_a_seed_draws_one_suite_that_loads(seed, tmp_path):
    suite = draw(seed, tmp_path / "one.toml")
    assert [case.problem for case in suite.cases] == [case.problem for case in draw(seed, tmp_path / "two.toml").cases]
    assert len({case.problem for case in suite.cases}) == 24
    problems: list[Any] = [case.problem for case in suite.cases]
    assert {(p.head_dim, p.head_dim_v) for p in problems} >= {(80, 80), (96, 96), (192, 192), (192, 128)}
    assert {p.heads // p.heads_kv for p in problems} == {1, 4, 8}
    assert sum(p.causal for p in problems) == 12
    assert any(p.seqlen_q % 2 for p in problems)
    assert any(p.seqlen_q != p.seqlen_k for p in problems)
    assert all(p.seqlen_k >= p.seqlen_q for p in problems)
    assert all(seed in case.origin for case in suite.cases)


def test_another_seed_draws_another_suite(tmp_path):
    assert draw("a", tmp_path / "a.toml").cases != draw("b", tmp_path / "b.toml").cases
