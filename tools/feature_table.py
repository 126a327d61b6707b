"""Write the table of what is served into docs/features.md: ``feature_table.py docs/features.md``.

Each cell names the kernels that ``plan_attention`` chooses for problems of several sizes, so the table is what the code
does. A test compares the page with it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from flashmoe_science.attention.backward_plan import plan_backward
from flashmoe_science.attention.backward_problem import BackwardProblem
from flashmoe_science.attention.plan import plan_attention
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.errors import UnsupportedError
from flashmoe_science.gpu.specs import SPECS

BEGIN, END = "<!-- features:begin -->", "<!-- features:end -->"
# One GPU of each architecture that has tables of its own.
GPUS = {
    "sm_80": "A100",
    "sm_86": "A10G",
    "sm_89": "L4",
    "sm_90": "H200",
    "sm_100": "B200",
    "sm_120": "RTX 5090",
}
LETTERS = {
    "forward_short_gluon": "S",
    "forward_gluon_sm90": "H",
    "forward_features_gluon_sm90": "F",
    "forward_triton": "T",
}
BACKWARD_LETTERS = {"backward_gluon_sm90": "G", "backward_triton": "B"}
# Batch, heads, queries, keys: few and many, of each enough to want another kernel.
SIZES = ((1, 4, 128, 128), (64, 16, 256, 256), (8, 16, 4096, 4096), (1, 2, 16, 8192))
_PLAIN: dict[str, Any] = {"causal": True, "head_dim": 64, "head_dim_v": 64}
FEATURES: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "causal": {},
    "LSE": {"return_lse": True},
    "GQA, MQA": {"heads_kv": 1},
    "D 128": {"head_dim": 128, "head_dim_v": 128},
    "D 256": {"head_dim": 256, "head_dim_v": 256},
    "D 192, DV 128": {"head_dim": 192, "head_dim_v": 128},
    "D 111": {"head_dim": 111, "head_dim_v": 111},
    "D above 256": {"head_dim": 257},
    "sliding window": {"window": (100, -1)},
    "softcap": {"softcap": 30.0},
    "attention sinks": {"sinks": "bf16"},
    "ALiBi": {"alibi": "fp32"},
    "bias": {"bias": "fp32", "causal": False},
    "all of these five": {"window": (100, -1), "softcap": 30.0, "sinks": "bf16", "alibi": "fp32", "bias": "fp32"},
    "packed sequences": {"packed": True},
    "packed, with a window, softcap, sinks, ALiBi": {
        "packed": True, "window": (100, -1), "softcap": 30.0, "sinks": "bf16", "alibi": "fp32",
    },
}  # fmt: skip


def served_by(gpu: str, dtype: str, options: dict[str, Any]) -> str:
    """Return the letters of the kernels that serve a feature, or a dash."""
    found = set()
    for batch, heads, seqlen_q, seqlen_k in SIZES:
        sizes = {"batch": batch, "heads": heads, "heads_kv": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        problem = AttentionProblem(**{**_PLAIN, **sizes, **options}, dtype=dtype)
        try:
            found.add(LETTERS[plan_attention(problem, SPECS[gpu]).kernel])
        except UnsupportedError:
            found.add("–")
    return " ".join(sorted(found, key="SHFT–".index))


def differentiated_by(gpu: str, dtype: str, options: dict[str, Any]) -> str:
    """Return the letters of the kernels that make the gradients of a call with a feature, or a dash."""
    found = set()
    for batch, heads, seqlen_q, seqlen_k in SIZES:
        sizes = {"batch": batch, "heads": heads, "heads_kv": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        problem = AttentionProblem(**{**_PLAIN, **sizes, **options}, dtype=dtype)
        asked = BackwardProblem(
            problem,
            has_dlse="return_lse" in options,
            wants_sinks=bool(problem.sinks),
            bias_sums=(False, False) if problem.bias else None,
        )
        try:
            found.add(BACKWARD_LETTERS[plan_backward(asked, SPECS[gpu]).kernel])
        except UnsupportedError:
            found.add("–")
    return " ".join(sorted(found, key="GB–".index))


def render() -> str:
    """Return the tables, one for each size of element, of the forward and of gradients."""
    sixteen, all32 = ("fp16", "bf16"), ("fp32",)
    tables = (
        ("fp16 and bf16", sixteen, served_by),
        ("fp32", all32, served_by),
        ("gradients, fp16 and bf16", sixteen, differentiated_by),
        ("gradients, fp32", all32, differentiated_by),
    )
    parts = []
    for title, dtypes, letters in tables:
        lines = [f"| {title} | {' | '.join(GPUS)} |", f"| --- |{' --- |' * len(GPUS)}"]
        for feature, options in FEATURES.items():
            cells: list[str] = []
            for gpu in GPUS.values():
                kinds = {letters(gpu, dtype, options) for dtype in dtypes}
                assert len(kinds) == 1, (feature, gpu, kinds)
                cells += kinds
            lines.append(f"| {feature} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def update(page: str) -> str:
    """Return the page with its tables as they are now."""
    return re.sub(f"{BEGIN}.*{END}", f"{BEGIN}\n{render()}\n{END}", page, flags=re.DOTALL)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
