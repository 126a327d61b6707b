"""docs/reference/features.md says what the code does."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from flashmoe_science.attention.backward.plan import BACKWARD_KERNELS
from flashmoe_science.attention.decode.plan import CACHE_KERNELS
from flashmoe_science.attention.decode.problem import CacheProblem
from flashmoe_science.attention.forward.plan import KERNELS
from flashmoe_science.attention.problem import AttentionProblem
from flashmoe_science.attention.sparse.plan import SPARSE_KERNELS
from flashmoe_science.attention.sparse.problem import SparseProblem

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "features.md"


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("feature_table", ROOT / "tools" / "feature_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_tables_of_the_code(table):
    """Run ``tools/feature_table.py docs/reference/features.md`` where it does not."""
    page = PAGE.read_text(encoding="utf-8")
    assert table.update(page) == page


def test_the_tables_know_every_kernel_and_every_feature(table):
    assert set(table.LETTERS) == set(KERNELS) - {"reference"}
    assert set(table.CACHE_LETTERS) == set(CACHE_KERNELS) - {"reference"}
    assert set(table.BACKWARD_LETTERS) == set(BACKWARD_KERNELS) - {"reference"}
    assert set(table.SPARSE_LETTERS) == set(SPARSE_KERNELS) - {"reference"}
    words = set()
    for options in table.FEATURES.values():
        sizes = {"batch": 1, "heads": 2, "heads_kv": 2, "seqlen_q": 999, "seqlen_k": 999, "head_dim": 64}
        problem = AttentionProblem(**{**sizes, "head_dim_v": 64, "dtype": "fp16", **options, "heads_kv": 1})
        words |= set(problem.features)
    asked = {"a sliding window", "a softcap", "attention sinks", "ALiBi", "a bias", "packed sequences", "dropout"}
    assert words == asked | {"a page table", "a block mask"}


def test_the_tables_know_every_option_of_a_call_with_a_cache(table):
    """But those that say where things lie, and how long they are."""
    asked = {name for options in table.CACHE_FEATURES.values() for name in options} | set(table._CACHE)
    sizes = {"batch", "seqlen_q", "capacity", "pages", "dtype", "has_seqlens", "softmax_scale", "pointer_alignment"}
    follow = {"rotary_length", "rotary_advance", "alibi_stride"}
    layouts = {field.name for field in dataclasses.fields(CacheProblem) if field.name.endswith(("_strides", "_stride"))}
    assert {field.name for field in dataclasses.fields(CacheProblem)} == asked | sizes | follow | layouts


def test_the_tables_know_every_option_of_a_call_with_indices(table):
    asked = {name for options in table.SPARSE_FEATURES.values() for name in options} | set(table._SPARSE)
    sizes = {"batch", "heads", "seqlen_q", "pages", "dtype", "softmax_scale", "pointer_alignment", "table_stride"}
    layouts = {"q_strides", "kv_strides", "index_strides"}
    # num_splits is served as batch_invariant is.
    assert {field.name for field in dataclasses.fields(SparseProblem)} == asked | sizes | layouts | {"num_splits"}


def test_features_with_equal_rows_share_one(table):
    lines = table.render().splitlines()
    assert any(line.startswith("| sliding window<br>") and "| F T |" in line for line in lines)
    assert any("ALiBi" in line and "F" not in line.partition("|")[2] for line in lines)
    assert any(line.startswith("| D above 512 | –") for line in lines)
    assert any(line.startswith("| D 576, DV 512") and "| M |" in line and line.endswith("| – |") for line in lines)
    rows = [line.split(" | ")[1:] for line in lines if line.startswith("| ")]
    assert len(rows) < 36
