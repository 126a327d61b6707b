"""What docs/reference/features.md calls not served raises by name, and what it recommends instead is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flashmoe_science import InputError, flash_attention, flash_attention_varlen, flash_attention_with_kv_cache

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "features.md"
Q = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(0))


def test_other_numbers_are_refused_by_name():
    fp8: Any = Q.to(torch.float8_e4m3fn)
    with pytest.raises(InputError, match="q must be float16, bfloat16 or float32, got"):
        flash_attention(fp8, fp8, fp8)
    int4 = torch.zeros(1, 8, 2, 16, dtype=torch.uint8)
    with pytest.raises(InputError, match="k_cache must be the dtype of q"):
        flash_attention_with_kv_cache(Q[:, :, :1], int4, int4)


@pytest.mark.parametrize("name", ["score_mod", "out"])
def test_options_that_do_not_exist_have_no_parameter(name):
    given: Any = {name: Q}
    with pytest.raises(TypeError, match=name):
        flash_attention(Q, Q, Q, **given)


def test_lengths_have_to_be_numbers():
    starts, none = torch.tensor([0, 8], dtype=torch.int32), None
    longest: Any = none
    with pytest.raises(InputError, match="max_seqlen_q must be an integer"):
        flash_attention_varlen(Q[0], Q[0], Q[0], starts, starts, longest, longest)


def test_nested_tensors_are_packed_sequences():
    parts = [torch.randn(3, 2, 16), torch.randn(5, 2, 16)]
    x: Any = torch.nested.nested_tensor(parts, layout=torch.jagged)
    with pytest.raises(InputError, match="q must be dense, got a nested tensor"):
        flash_attention(x, x, x)
    starts = x.offsets().int()
    found = flash_attention_varlen(x.values(), x.values(), x.values(), starts, starts, 5, 5, causal=True)
    for part, o in zip(parts, found.split([3, 5]), strict=True):
        alone = part.transpose(0, 1)[None]
        torch.testing.assert_close(o, flash_attention(alone, alone, alone, causal=True)[0].transpose(0, 1))


def test_tables_of_rows_are_padded_and_tokens_are_assigned():
    indptr, indices, last = [0, 2, 3], [4, 1, 3], [2, 4]  # pages of 4: sequences of 6 and 4 tokens
    cache = torch.randn(6, 4, 2, 16)
    table = torch.full((2, 2), -1, dtype=torch.int32)
    for i in range(2):
        table[i, : indptr[i + 1] - indptr[i]] = torch.tensor(indices[indptr[i] : indptr[i + 1]])
    lengths = torch.tensor([6, 4], dtype=torch.int32)
    new = torch.randn(2, 2, 16)
    for i in range(2):
        cache[indices[indptr[i + 1] - 1], last[i] - 1] = new[i]
    q = torch.randn(2, 2, 1, 16)
    found = flash_attention_with_kv_cache(q, cache, cache, cache_seqlens=lengths, page_table=table)
    for i in range(2):
        rows = cache[indices[indptr[i] : indptr[i + 1]]].flatten(0, 1)[: int(lengths[i])].transpose(0, 1)[None]
        torch.testing.assert_close(found[i : i + 1], flash_attention(q[i : i + 1], rows, rows))
        assert torch.equal(rows[0, :, -1], new[i])


def test_every_reason_stands_beside_its_feature():
    section = PAGE.read_text(encoding="utf-8").partition("## Not served, and why")[2]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 12
    assert all(len(cells) == 2 and cells[1].rstrip("| ").endswith((".", "`.")) for cells in rows)
