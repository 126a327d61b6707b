"""Write the tables of features into a page: ``feature_table.py docs/reference/features.md``.

Each cell names the kernels that the plans choose for problems of several sizes. Features with equal rows share a row,
architectures with equal columns a column. A test compares the page with the plans.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flashmoe_science.attention.backward.plan import plan_backward
from flashmoe_science.attention.backward.problem import BackwardProblem
from flashmoe_science.attention.decode.merge import merge_kernel
from flashmoe_science.attention.decode.plan import plan_with_kv_cache
from flashmoe_science.attention.decode.problem import CacheProblem
from flashmoe_science.attention.forward.plan import plan_attention
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.attention.sparse.plan import plan_sparse_mla
from flashmoe_science.attention.sparse.problem import SparseProblem
from flashmoe_science.errors import UnsupportedError
from flashmoe_science.gpu.planning import refuse_architecture
from flashmoe_science.gpu.specs import SPECS

Letters = Callable[[str, str, dict[str, Any]], str]
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
    "forward_wide_gluon_sm90": "W",
    "forward_triton": "T",
    "forward_masked_triton": "K",
    "forward_masked_gluon_sm90": "N",
    "mixed_triton": "X",
}
CACHE_LETTERS = {"decode_gluon_sm90": "M", "decode_triton": "D"}
BACKWARD_LETTERS = {"backward_gluon_sm90": "G", "backward_triton": "B", "backward_masked_triton": "K"}
SPARSE_LETTERS = {"sparse_mla_gluon_sm90": "Q", "sparse_mla_triton": "R"}
MERGE_LETTERS = {"merge_states_triton": "A"}
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
    "D 512": {"head_dim": 512, "head_dim_v": 512},
    "D above 512": {"head_dim": 513},
    "sliding window": {"window": (100, -1)},
    "softcap": {"softcap": 30.0},
    "attention sinks": {"sinks": "bf16"},
    "ALiBi": {"alibi": "fp32"},
    "bias": {"bias": "bf16", "causal": False},
    "all five together": {"window": (100, -1), "softcap": 30.0, "sinks": "bf16", "alibi": "fp32", "bias": "fp32"},
    "block masks": {"causal": False, "mask_batch": 1, "mask_heads": 1},
    "block masks with a softcap, sinks": {
        "causal": False, "mask_batch": 1, "mask_heads": 1, "softcap": 30.0, "sinks": "bf16",
    },
    "packed sequences": {"packed": True},
    "packed with ALiBi": {
        "packed": True, "window": (100, -1), "softcap": 30.0, "sinks": "bf16", "alibi": "fp32",
    },
    "packed with a window, softcap, sinks": {"packed": True, "window": (100, -1), "softcap": 30.0, "sinks": "bf16"},
    "packed with a bias": {"packed": True, "bias": "fp32"},
    "packed queries over pages of 1": {"packed": True, "page_size": 1},
    "over pages of 16": {"packed": True, "page_size": 16},
    "over pages with `num_splits` or `batch_invariant`": {"packed": True, "page_size": 16, "batch_invariant": True},
    "over pages with a window, softcap, sinks, ALiBi": {
        "packed": True, "page_size": 16, "window": (100, -1), "softcap": 30.0, "sinks": "bf16", "alibi": "fp32",
    },
    "over pages with a bias": {"packed": True, "page_size": 16, "bias": "fp32"},
    "dropout": {"dropout_p": 0.1},
    "dropout with all five": {
        "window": (100, -1), "softcap": 30.0, "sinks": "bf16", "alibi": "fp32", "bias": "fp32", "dropout_p": 0.1,
    },
    "packed with dropout": {"packed": True, "dropout_p": 0.1},
    "packed with dropout and a bias": {"packed": True, "bias": "fp32", "dropout_p": 0.1},
}  # fmt: skip

# Gradients are not recorded over pages.
DIFFERENTIATED = {name: options for name, options in FEATURES.items() if "page_size" not in options}

# Batch, queries, keys: a token each of one sequence and of many, and some tokens of a prompt over a cache.
CACHE_SIZES = ((1, 1, 512), (64, 1, 8192), (4, 300, 4096))
_CACHE: dict[str, Any] = {"heads": 32, "heads_kv": 32, "causal": True, "head_dim": 64, "head_dim_v": 64}
CACHE_FEATURES: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "pages of 1": {"page_size": 1},
    "pages of 16": {"page_size": 16},
    "appending": {"seqlen_new": 1},
    "appending with rotary embedding, halves": {"seqlen_new": 1, "rotary_dim": 64, "rotary_dtype": "fp32"},
    "appending with rotary embedding, interleaved": {
        "seqlen_new": 1, "rotary_dim": 64, "rotary_dtype": "fp32", "rotary_interleaved": True,
    },
    "fp8": {"is_fp8": True},
    "fp8 with a scale for each key": {
        "is_fp8": True, "k_by_token": True, "v_by_token": True, "k_scale_strides": (8192, 8, 1),
        "v_scale_strides": (8192, 8, 1),
    },
    "left padding": {"has_leftpad": True},
    "batch index": {"has_batch_idx": True},
    "`num_splits`": {"num_splits": 4},
    "`batch_invariant`": {"batch_invariant": True},
    "LSE": {"return_lse": True},
    "GQA, MQA": {"heads_kv": 1},
    "D 128": {"head_dim": 128, "head_dim_v": 128},
    "D 256": {"head_dim": 256, "head_dim_v": 256},
    "D 192, DV 128": {"head_dim": 192, "head_dim_v": 128},
    "D 111": {"head_dim": 111, "head_dim_v": 111},
    "D 576, DV 512 in the same memory (MLA)": {
        "heads": 16, "heads_kv": 1, "head_dim": 576, "head_dim_v": 512, "shared_kv": True,
    },
    "D 512": {"head_dim": 512, "head_dim_v": 512},
    "D above 512 otherwise": {"head_dim": 513, "head_dim_v": 513},
    "sliding window": {"window": (100, -1)},
    "softcap": {"softcap": 30.0},
    "attention sinks": {"sinks": "bf16"},
    "ALiBi": {"alibi": "fp32"},
    "bias": {"bias": "fp32"},
}  # fmt: skip

# Batch, heads, queries: a token each of one sequence and of many, and a chunk of a prompt.
SPARSE_SIZES = ((1, 16, 1), (64, 128, 1), (1, 128, 512))
_SPARSE: dict[str, Any] = {"capacity": 8192, "top_k": 2048, "head_dim": 576, "head_dim_v": 512}
SPARSE_FEATURES: dict[str, dict[str, Any]] = {
    "`sparse_mla`, D 576, DV 512": {},
    "`sparse_mla` over pages of 1": {"page_size": 1},
    "`sparse_mla` with sinks, LSE": {"sinks": "bf16", "return_lse": True},
    "`sparse_mla` with `num_splits` or `batch_invariant`": {"batch_invariant": True},
    "`sparse_mla`, fp8": {"page_size": 64, "is_fp8": True},
    "`sparse_mla`, D 512, DV 512": {"head_dim": 512},
    "`sparse_mla`, D 192, DV 128": {"head_dim": 192, "head_dim_v": 128},
}
MERGE_FEATURES: dict[str, dict[str, Any]] = {
    "`merge_attention_states`": {"columns": 128},
    "`merge_attention_states`, D 512": {"columns": 512},
}


def decoded_by(gpu: str, dtype: str, options: dict[str, Any]) -> str:
    """Return the letters of the kernels that serve a feature with a K/V cache, or a dash."""
    problems = [
        CacheProblem(**{**_CACHE, "batch": batch, "seqlen_q": seqlen_q, "capacity": capacity, **options}, dtype=dtype)
        for batch, seqlen_q, capacity in CACHE_SIZES
    ]
    return _letters(CACHE_LETTERS, lambda problem: plan_with_kv_cache(problem, SPECS[gpu]).kernel, problems)


def served_by(gpu: str, dtype: str, options: dict[str, Any]) -> str:
    """Return the letters of the kernels that serve a feature, or a dash."""
    return _letters(LETTERS, lambda problem: plan_attention(problem, SPECS[gpu]).kernel, _problems(dtype, options))


def differentiated_by(gpu: str, dtype: str, options: dict[str, Any]) -> str:
    """Return the letters of the kernels that make the gradients of a call with a feature, or a dash."""

    def kernel(problem: AttentionProblem) -> str:
        bias_sums = (False, False) if problem.bias else None
        has_dlse, wants_sinks = "return_lse" in options, bool(problem.sinks)
        asked = BackwardProblem(problem, has_dlse=has_dlse, wants_sinks=wants_sinks, bias_sums=bias_sums)
        return plan_backward(asked, SPECS[gpu]).kernel

    return _letters(BACKWARD_LETTERS, kernel, _problems(dtype, options))


def named_by(gpu: str, dtype: str, options: dict[str, Any]) -> str:
    """Return the letters of the kernels that serve ``sparse_mla`` or ``merge_attention_states``, or a dash."""
    if "columns" in options:
        shape = 8, 16, 4096, options["columns"]
        layouts = (((1, 1, 1, 1), (1, 1, 1)),) * 3

        def kernel(dtype: str) -> str:
            refuse_architecture(SPECS[gpu].arch)
            merge_kernel(shape, layouts, (dtype,) * 3, aligned=True)
            return "merge_states_triton"

        return _letters(MERGE_LETTERS, kernel, [dtype])
    problems = [
        SparseProblem(**{**_SPARSE, "batch": batch, "heads": heads, "seqlen_q": queries, "dtype": dtype, **options})
        for batch, heads, queries in SPARSE_SIZES
    ]
    return _letters(SPARSE_LETTERS, lambda problem: plan_sparse_mla(problem, SPECS[gpu]).kernel, problems)


def _problems(dtype: str, options: dict[str, Any]) -> list[AttentionProblem]:
    sizes = (
        {"batch": batch, "heads": heads, "heads_kv": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        for batch, heads, seqlen_q, seqlen_k in SIZES
    )
    return [AttentionProblem(**{**_PLAIN, **size, **options}, dtype=dtype) for size in sizes]


def _letters(letters: dict[str, str], kernel: Callable[[Any], str], problems: Iterable[Any]) -> str:
    found = set()
    for problem in problems:
        try:
            found.add(letters[kernel(problem)])
        except UnsupportedError:
            found.add("–")
    return " ".join(sorted(found, key=[*letters.values(), "–"].index))


def _row(features: str, cells: Iterable[str]) -> str:
    return f"| {features} | {' | '.join(cells)} |"


def _cell(letters: Letters, gpu: str, options: dict[str, Any]) -> str:
    """Return the letters of bf16, and those of fp16 where they are others."""
    fp16, bf16 = (letters(gpu, dtype, options) for dtype in ("fp16", "bf16"))
    return bf16 if fp16 == bf16 else f"{bf16}; fp16: {fp16}"


def _table(title: str, letters: Letters, features: dict[str, dict[str, Any]]) -> str:
    """Return a table: a column for architectures that are alike, for fp16 and bf16, and one for fp32.

    Where fp32 is not alike on all that serve a feature, its cell names the architectures that do not serve it.
    """
    columns: dict[str, tuple[str, ...]] = {}
    for arch, gpu in GPUS.items():
        columns[arch] = tuple(_cell(letters, gpu, options) for options in features.values())
    fp32 = []
    for place, options in enumerate(features.values()):
        found = {arch: letters(gpu, "fp32", options) for arch, gpu in GPUS.items() if columns[arch][place] != "–"}
        lacking = [arch for arch, cell in found.items() if cell == "–"]
        (cell,) = {*found.values()} - {"–"} or {"–"}
        fp32.append(f"{cell}; – on {', '.join(lacking)}" if lacking and cell != "–" else cell)
    merged: dict[tuple[str, ...], list[str]] = {}
    for arch, cells in columns.items():
        merged.setdefault(cells, []).append(arch)
    rows: dict[tuple[str, ...], list[str]] = {}
    for place, feature in enumerate(features):
        cells = (*(column[place] for column in merged), fp32[place])
        rows.setdefault(cells, []).append(feature)
    header = [*(", ".join(archs) for archs in merged.values()), "fp32"]
    lines = [_row(title, header), _row("---", ["---"] * len(header))]
    return "\n".join(lines + [_row("<br>".join(names), cells) for cells, names in rows.items()])


def render() -> str:
    """Return the tables: of the forward, of gradients, with a K/V cache, and of functions that have other plans."""
    return "\n\n".join(
        [
            _table("forward", served_by, FEATURES),
            _table("gradients", differentiated_by, DIFFERENTIATED),
            _table("with a K/V cache", decoded_by, CACHE_FEATURES),
            _table("indices and merging", named_by, {**SPARSE_FEATURES, **MERGE_FEATURES}),
        ]
    )


def update(page: str) -> str:
    """Return the page with its tables as they are now."""
    return re.sub(f"{BEGIN}.*{END}", f"{BEGIN}\n{render()}\n{END}", page, flags=re.DOTALL)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
