"""The page about caches says what is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashmoe_science.attention.cache_problem import CacheProblem
from flashmoe_science.attention.decode_plan import plan_with_kv_cache
from flashmoe_science.gpu.specs import SPECS


def read_page() -> str:
    return (Path(__file__).parents[2] / "docs" / "kv-cache.md").read_text(encoding="utf-8")


def test_the_examples_run():
    space: dict[str, Any] = {}
    examples = [part.partition("```")[0] for part in read_page().split("```python\n")[1:]]
    for example in examples:
        exec(example, space)  # they assert, and those behind use what those before have made
    assert len(examples) == 3


def test_the_plan_is_the_real_one():
    problem = CacheProblem(16, 32, 8, 1, 8192, 128, 128, "bf16", page_size=16, seqlen_new=1)
    assert str(plan_with_kv_cache(problem, SPECS["H200"])) in read_page()


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
