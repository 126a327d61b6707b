"""The page about caches says what is."""

from __future__ import annotations

from pathlib import Path

from flashmoe_science.attention.decode.plan import plan_with_kv_cache
from flashmoe_science.attention.decode.problem import CacheProblem
from flashmoe_science.gpu.specs import SPECS


def read_page() -> str:
    return (Path(__file__).parents[2] / "docs" / "how-to" / "kv-cache.md").read_text(encoding="utf-8")


def test_every_schedule_is_explained():
    problems = [
        CacheProblem(64, 32, 8, 1, 4096, 128, 128, "bf16", has_seqlens=False),
        CacheProblem(1, 32, 8, 1, 4096, 128, 128, "bf16"),
        CacheProblem(2, 32, 8, 1, 4096, 128, 128, "bf16"),
        CacheProblem(2, 32, 8, 1, 4096, 128, 128, "bf16", batch_invariant=True),
    ]
    found = [plan_with_kv_cache(problem, SPECS["H200"]).shares for problem in problems]
    schedules = [shares.schedule for shares in found if shares is not None]
    assert schedules == ["whole", "even", "balanced", "own length"]
    page = read_page()
    assert all(f"| `{schedule}` |" in page for schedule in schedules)
