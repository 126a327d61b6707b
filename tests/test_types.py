"""What type checkers see of public functions: mypy reads this file, and a test runs mypy on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import assert_type

from flashmoe_science import (
    explain,
    explain_varlen,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kv_cache,
)
from flashmoe_science.attention.tiles import Plan
from flashmoe_science.integrations import flash_attn

ROOT = Path(__file__).parents[1]
Pair = tuple[Tensor, Tensor]
Three = tuple[Tensor, Tensor, Tensor]


def test_outputs_have_the_types_that_flags_ask_for():
    q, kv, starts = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 2, 8), torch.tensor([0, 5], dtype=torch.int32)
    a, cache, flag = q.transpose(1, 2), torch.randn(1, 9, 2, 8), bool(q.numel())
    assert_type(flash_attention(a, a, a, causal=True), Tensor)
    assert_type(flash_attention(a, a, a, return_lse=True), Pair)
    assert_type(flash_attention(a, a, a, return_lse=flag), Any)
    assert_type(explain(a, a, a, return_lse=True, causal=True), Plan)
    lengths = (starts, starts, 5, 5)
    assert_type(flash_attention_varlen(q[0], q[0], q[0], *lengths, seqused_k=starts[1:]), Tensor)
    assert_type(flash_attention_varlen(q[0], q[0], q[0], *lengths, return_lse=True), Pair)
    assert_type(explain_varlen(q[0], q[0], q[0], *lengths, return_lse=True, seqused_k=starts[1:]), Plan)
    assert_type(flash_attention_with_kv_cache(a, cache, cache, cache_seqlens=3), Tensor)
    assert_type(flash_attention_with_kv_cache(a, cache, cache, return_lse=True), Pair)
    fa = flash_attn
    assert_type(fa.flash_attn_func(q, q, q, causal=True), Tensor)
    assert_type(fa.flash_attn_func(q, q, q, return_attn_probs=True), Three)
    assert_type(fa.flash_attn_func(q, q, q, 0.0, None, True), Any)  # options by place, so perhaps the flag too
    assert_type(fa.flash_attn_kvpacked_func(q, kv), Tensor)
    assert_type(fa.flash_attn_kvpacked_func(q, kv, return_attn_probs=True), Three)
    qkv = torch.stack([q, q, q], 2)
    assert_type(fa.flash_attn_qkvpacked_func(qkv), Tensor)
    assert_type(fa.flash_attn_qkvpacked_func(qkv, return_attn_probs=True), Three)
    assert_type(fa.flash_attn_varlen_func(q[0], q[0], q[0], *lengths), Tensor)
    assert_type(fa.flash_attn_varlen_func(q[0], q[0], q[0], *lengths, return_attn_probs=True), Three)
    assert_type(fa.flash_attn_varlen_kvpacked_func(q[0], kv[0], *lengths), Tensor)
    assert_type(fa.flash_attn_varlen_kvpacked_func(q[0], kv[0], *lengths, return_attn_probs=True), Three)
    assert_type(fa.flash_attn_varlen_qkvpacked_func(qkv[0], starts, 5), Tensor)
    assert_type(fa.flash_attn_varlen_qkvpacked_func(qkv[0], starts, 5, return_attn_probs=True), Three)
    assert_type(fa.flash_attn_with_kvcache(q, cache, cache), Tensor)
    assert_type(fa.flash_attn_with_kvcache(q, cache, cache, return_softmax_lse=True), Pair)


# What callers get wrong: mypy has to see each, so an ``ignore`` that it does not need fails.
def _wrong(q: Tensor, cache: Tensor) -> None:
    flash_attention(q, q, q, casual=True)  # type: ignore[call-overload]
    explain(q, q, q, casual=True)  # type: ignore[call-arg]
    flash_attention(q, q, q, window=3)  # type: ignore[call-overload]
    flash_attention_with_kv_cache(q, cache, cache, num_splits="two")  # type: ignore[call-overload]
    flash_attn.flash_attn_func(q, q, q, softcap="x")  # type: ignore[call-overload]


@pytest.mark.exhaustive  # `make types` looks at this file too
def test_mypy_agrees():
    pytest.importorskip("mypy", reason="mypy is not installed")
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "tests/test_types.py"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
