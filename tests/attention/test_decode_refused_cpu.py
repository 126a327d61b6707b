"""Attention with a K/V cache: what is refused, and that nothing is written then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashmoe_science import (
    InputError,
    explain_with_kv_cache,
    flash_attention_with_kv_cache,
    sparse_mla,
)

from .cache_cases import CACHE_CASES, CacheCase, Tensors, make_tensors
from .cache_checks import assert_cache_right, call, clone


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_what_no_call_can_do_without(name):
    given: dict[str, Any] = {**make_tensors(PLAIN), name: None}
    for function in (flash_attention_with_kv_cache, explain_with_kv_cache):
        with pytest.raises(InputError, match=f"{name} must be a torch.Tensor, got NoneType"):
            function(**given)


Change = Callable[[Tensors], dict[str, Any]]


def changed(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda tensors: {**tensors, name: change(tensors.get(name))}


PAGED = CacheCase("paged", lengths=(37, 5), new=1, page_size=16, rotary_dim=16)


PLAIN = CacheCase("plain", lengths=(37, 5))


BAD: dict[str, tuple[CacheCase, Change, str]] = {
    "rank of q": (PLAIN, changed("q", lambda t: t[0]), r"q must have 4 dimensions .* got shape \[4, 1, 32\]"),
    "dtype of the cache": (
        PLAIN,
        changed("k_cache", torch.Tensor.float),
        r"k_cache must be the dtype of q, torch.float16, got torch.float32",
    ),
    "dtype of q": (PLAIN, changed("q", torch.Tensor.int), r"q must be float16, bfloat16 or float32, got torch.int32"),
    "columns of k_cache": (PLAIN, changed("k_cache", lambda t: t[..., :16]), r"k_cache must have shape .* 32\], got"),
    "positions of v_cache": (PLAIN, changed("v_cache", lambda t: t[:, :9]), r"v_cache must have shape \[pages or B"),
    "rows of the cache": (
        PLAIN,
        lambda t: {**t, "k_cache": t["k_cache"][:1], "v_cache": t["v_cache"][:1]},
        r"k_cache must have one row for each of 2 sequences, got 1(.|\n)*cache_batch_idx",
    ),
    "columns that are apart": (
        PLAIN,
        changed("q", lambda t: torch.cat([t, t], -1)[..., ::2]),
        r"q must be contiguous along its last axis, got strides",
    ),
    "dtype of lengths": (
        PLAIN,
        changed("cache_seqlens", torch.Tensor.long),
        r"cache_seqlens must be int32, got torch.int64",
    ),
    "number of lengths": (
        PLAIN,
        changed("cache_seqlens", lambda t: t[:1]),
        r"cache_seqlens must have shape \[B\] = \[2\], got \[1\]",
    ),
    "page table": (
        PAGED,
        changed("page_table", lambda t: t[0]),
        r"page_table must have shape \[B, P\] = \[2, P\], got \[5\]",
    ),
    "table and rows": (
        PAGED,
        changed("cache_batch_idx", lambda _: torch.zeros(2, dtype=torch.int32)),
        r"cache_batch_idx must be None with a page_table",
    ),
    "k alone": (PAGED, changed("v", lambda _: None), r"k and v must be given both or neither, got k alone"),
    "k nowhere": (
        PAGED,
        changed("cache_seqlens", lambda _: None),
        r"cache_seqlens must say where k and v are appended",
    ),
    "shape of k": (
        PAGED,
        changed("k", lambda t: t[:, :1]),
        r"k must have shape \[B, HK, Sn, D\] = \[2, 2, 1, 32\].*\nhint: caches are \[B or pages, positions, HK, D\]",
    ),
    "cos alone": (PAGED, changed("rotary_sin", lambda _: None), r"rotary_cos and rotary_sin must be given both"),
    "rotation of nothing": (PAGED, lambda t: {**t, "k": None, "v": None}, r"rotary_cos needs new keys k"),
    "too many columns": (
        PAGED,
        changed("rotary_cos", lambda t: t.repeat(1, 3)),
        r"R from 2 to D = 32, got \[71, 24\]",
    ),
    "dtype of cos": (PAGED, changed("rotary_cos", torch.Tensor.bfloat16), r"rotary_cos must have the dtype of q"),
    "sinks": (PLAIN, changed("sinks", lambda _: torch.zeros(3)), r"sinks must have shape \[4\], got \[3\]"),
    "slopes": (
        PLAIN,
        changed("alibi", lambda _: torch.zeros(3)),
        r"alibi must have shape \[4\] or \[2, 4\], got \[3\]",
    ),
    "positions of the bias": (
        PAGED,
        changed("bias", lambda _: torch.zeros(1, 1, 1, 38)),
        r"bias must have shape \[B or 1, H or 1, Sq, positions\] = \[2 or 1, 4 or 1, 1, 80\], got \[1, 1, 1, 38\]",
    ),
    "heads of the bias": (
        PLAIN,
        changed("bias", lambda _: torch.zeros(1, 2, 1, 70)),
        r"bias must have shape .* = \[2 or 1, 4 or 1, 1, 70\], got \[1, 2, 1, 70\]",
    ),
    "dtype of the bias": (
        PLAIN,
        changed("bias", lambda _: torch.ones(1, 1, 1, 70, dtype=torch.bool)),
        r"bias must be float16, bfloat16 or float32, got torch.bool",
    ),
    "device": (PLAIN, changed("k_cache", lambda t: t.to("meta")), r"k_cache must be on the device of q, cpu, got meta"),
    "no tensor": (PLAIN, changed("k_cache", lambda _: [1.0]), r"k_cache must be a torch.Tensor, got list"),
    "written and shared": (
        PAGED,
        lambda t: {**t, "v_cache": t["k_cache"]},
        r"v_cache must have memory of its own, as k and v are written to it, got columns of k_cache",
    ),
    "written and expanded": (
        PAGED,
        changed("k_cache", lambda t: t[:1].expand_as(t)),
        r"k_cache must not be expanded, as k and v are written to it",
    ),
}


OPTIONS: dict[str, tuple[dict[str, object], str]] = {
    "causal": ({"causal": 1}, r"causal must be True or False, got 1"),
    "window": ({"window": (1,)}, r"window must be two integers \(left, right\)"),
    "window below": ({"window": (-2, 0)}, r"window must be two integers .* got \(-2, 0\)"),
    "softcap": ({"softcap": -1.0}, r"softcap must be 0 \(none\) or more, .* got -1.0"),
    "scale": ({"softmax_scale": float("nan")}, r"softmax_scale must be finite"),
    "splits": ({"num_splits": 1000}, r"num_splits must be 0 \(the plan chooses\) to 256, got 1000"),
    "splits of what": ({"num_splits": True}, r"num_splits must be an integer from 0 to 256, got True"),
    "splits of int64": ({"num_splits": 2**31}, r"num_splits must be an integer from 0 to 256, got 2147483648"),
    "kernel of what": ({"kernel": ["decode_triton"]}, r"kernel must be the name of a kernel, got \['decode_triton'\]"),
    "kernel": ({"kernel": "fast"}, r"auto or one of decode_gluon_sm90, decode_triton, reference, got 'fast'"),
}


@pytest.mark.parametrize("why", BAD)
def test_bad_tensors_are_refused_and_nothing_is_written(why):
    case, change, message = BAD[why]
    tensors = make_tensors(case)
    given = change(tensors)
    before = clone(tensors)
    with pytest.raises(InputError, match=message):
        call({name: tensor for name, tensor in given.items() if tensor is not None})
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(tensors[name], before[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("why", OPTIONS)
def test_bad_options_are_refused_and_nothing_is_written(why):
    options, message = OPTIONS[why]
    tensors = make_tensors(PAGED)
    before = clone(tensors)
    with pytest.raises(InputError, match=message):
        call(tensors, **options)
    assert torch.equal(tensors["k_cache"].isnan(), before["k_cache"].isnan())


VALUES: dict[str, tuple[CacheCase, str, tuple[Any, int], str]] = {
    "length": (PAGED, "cache_seqlens", (1, 80), r"cache_seqlens\[1\] must be from 0 to 79 \(80 positions less 1 new"),
    "negative": (PLAIN, "cache_seqlens", (1, -1), r"cache_seqlens\[1\] must be from 0 to .*, got -1"),
    "page": (PAGED, "page_table", ((0, 2), 13), r"page_table\[0, 2\] must be from 0 to 12, got 13"),
    "no page": (PAGED, "page_table", ((1, 0), -1), r"page_table\[1, 0\] must be from 0 to 12, got -1"),
    "padding": (
        dataclasses.replace(PLAIN, padding=(0, 5)), "leftpad_k", (1, 6), r"leftpad_k\[1\] must be .* length 5, got 6",
    ),
    "padding behind new keys": (
        dataclasses.replace(PLAIN, new=2, padding=(0, 7)), "leftpad_k", (1, 8),
        r"leftpad_k\[1\] must be from 0 to the length 7 \(5 keys and 2 new\), got 8",
    ),
    "row": (dataclasses.replace(PLAIN, rows=(0, 1)), "cache_batch_idx", (0, 2), r"cache_batch_idx\[0\] .* to 1, got 2"),
    "one row twice": (
        dataclasses.replace(PLAIN, rows=(0, 1), new=1), "cache_batch_idx", (0, 1), r"a row once .* got \[1, 1\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", VALUES)
def test_values_are_checked_where_the_environment_asks_for_it(why, monkeypatch):
    case, name, (place, value), message = VALUES[why]
    tensors = make_tensors(case)
    monkeypatch.setenv("FLASHMOE_CHECK", "1")
    call(clone(tensors))  # right as it is, with table entries behind the last key that are no pages
    tensors[name][place] = value
    before = clone(tensors)
    with pytest.raises(InputError, match=message):
        call(tensors)
    assert torch.equal(tensors["k_cache"].isnan(), before["k_cache"].isnan()), "nothing was written"


PLACES = ("length", "negative", "page", "no page", "row", "one row twice")


@pytest.mark.parametrize("why", PLACES)
def test_lengths_pages_and_rows_of_cpu_tensors_always_are_checked(why):
    """Torch would take -1 for the last page, and raise for others after it wrote the keys of the sequences before."""
    case, name, (place, value), message = VALUES[why]
    tensors = make_tensors(dataclasses.replace(case, new=1))
    tensors[name][place] = value
    before = clone(tensors)
    with pytest.raises(InputError, match=message):
        call(tensors)
    for cache in ("k_cache", "v_cache"):
        torch.testing.assert_close(tensors[cache], before[cache], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("table", "refused"),
    [
        ([[1, 0], [1, 2]], "position 0 of page 1 twice, the second time for sequence 1"),
        ([[0, 1], [2, 1]], "position 0 of page 1 twice, the second time for sequence 1"),
        ([[0, 0], [2, 1]], "position 0 of page 0 twice, the second time for sequence 0"),
        ([[0, 1], [2, 3]], ""),
    ],
)
def test_no_two_new_keys_have_one_place(table, refused):
    q, k, v = torch.randn(2, 2, 5, 8), torch.randn(2, 1, 5, 8), torch.randn(2, 1, 5, 8)
    caches: dict[str, Any] = {name: torch.zeros(4, 4, 1, 8) for name in ("k_cache", "v_cache")}
    lengths = torch.zeros(2, dtype=torch.int32)
    options: dict[str, Any] = {**caches, "page_table": torch.tensor(table, dtype=torch.int32), "cache_seqlens": lengths}
    if not refused:
        flash_attention_with_kv_cache(q, k=k, v=v, **options)
        return
    with pytest.raises(InputError, match=f"^page_table must give each new key a place of its own, got {refused}$"):
        flash_attention_with_kv_cache(q, k=k, v=v, **options)
    assert not any(cache.any() for cache in caches.values())
    flash_attention_with_kv_cache(q, **options)  # sequences may share pages that they only read


def test_prompts_may_have_padding_before_their_first_key(monkeypatch):
    """A batch of prompts of 8 and 5 tokens, the second padded on its left, into an empty cache."""
    q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
    options: dict[str, Any] = {"cache_seqlens": 0, "causal": True}
    monkeypatch.setenv("FLASHMOE_CHECK", "1")
    padding = torch.tensor([0, 3], dtype=torch.int32)
    caches = torch.zeros(2, 2, 32, 2, 16)
    found = flash_attention_with_kv_cache(q, caches[0], caches[1], k, v, leftpad_k=padding, **options)
    alone = (x[1:, :, 3:] for x in (k, v))
    expected = flash_attention_with_kv_cache(q[1:, :, 3:], *torch.zeros(2, 1, 32, 2, 16), *alone, **options)
    torch.testing.assert_close(found[1:, :, 3:], expected)


@pytest.mark.parametrize("why", ["window-pages-gone", "window-small-pages-gone", "leftpad-paged"])
def test_pages_that_are_not_read_are_not_checked(why, monkeypatch):
    """Those before a window or padding may be gone; the first one that is read may not."""
    case = next(case for case in CACHE_CASES if case.why == why)
    tensors = make_tensors(case)
    monkeypatch.setenv("FLASHMOE_CHECK", "1")
    assert_cache_right(case, clone(tensors))
    first = (case.gone or case.padding)[0] // case.page_size
    assert first > 0
    tensors["page_table"][0, first] = -1
    with pytest.raises(InputError, match=rf"page_table\[0, {first}\] must be from 0 to .*, got -1"):
        call(tensors, **case.options)


def test_the_page_of_a_sequence_that_padding_hides_is_not_checked():
    """It ends inside the page, of which nothing is read."""
    tensors = make_tensors(CacheCase("hidden", lengths=(5,), padding=(5,), page_size=4))
    tensors["page_table"][0, 1] = -1
    o, lse = call(tensors)
    assert not o.any()
    assert (lse == -torch.inf).all()


def test_a_page_table_of_two_to_the_31_positions_is_refused():
    """Kernels count positions in 32 bits: the number would wrap."""
    table = torch.zeros(1, 2**25, dtype=torch.int32)
    q, cache = torch.randn(1, 2, 1, 32), torch.randn(1, 64, 1, 32)
    with pytest.raises(InputError, match=r"caches must have fewer than 2\*\*31 positions a sequence, got 2147483648"):
        flash_attention_with_kv_cache(q, cache, cache, cache_seqlens=5, page_table=table)
    with pytest.raises(InputError, match=r"caches must have fewer than 2\*\*31 positions a sequence, got 2147483648"):
        sparse_mla(q, cache, torch.zeros(1, 1, 4, dtype=torch.int32), head_dim_v=16, page_table=table)


def test_rotary_positions_are_checked(monkeypatch):
    tensors = make_tensors(PAGED)
    tensors["rotary_cos"], tensors["rotary_sin"] = tensors["rotary_cos"][:37], tensors["rotary_sin"][:37]
    monkeypatch.setenv("FLASHMOE_CHECK", "1")
    with pytest.raises(InputError, match="rotary_cos must have a row for position 37 of sequence 0, got 37 rows"):
        call(tensors)


def test_queries_at_one_position_need_one_row_of_rotation(monkeypatch):
    """Those without a causal mask and a window."""
    tensors = make_tensors(CacheCase("one", lengths=(4,), new=1, seqlen_q=4, rotary_dim=32))
    expected = call(clone(tensors))[0]
    tensors["rotary_cos"], tensors["rotary_sin"] = tensors["rotary_cos"][:5], tensors["rotary_sin"][:5]
    monkeypatch.setenv("FLASHMOE_CHECK", "1")
    assert torch.equal(call(clone(tensors))[0], expected)
    for options in ({"causal": True}, {"window": (3, -1)}):
        with pytest.raises(InputError, match="rotary_cos must have a row for position 7 of sequence 0, got 5 rows"):
            call(tensors, **options)


@pytest.mark.parametrize("other", ["k_cache", "v_cache"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_new_keys_lie_in_no_cache(name, other):
    """They would be overwritten before they are read; torch refuses such a copy too."""
    caches: dict[str, Any] = {"k_cache": torch.randn(1, 9, 2, 8), "v_cache": torch.randn(1, 9, 2, 8)}
    before = {each: cache.clone() for each, cache in caches.items()}
    new: dict[str, Any] = {each: torch.randn(1, 2, 3, 8) for each in ("q", "k", "v")}
    new[name] = caches[other][:, 4:7].transpose(1, 2)
    with pytest.raises(InputError, match=f"^{name} must have memory of its own, got some of {other}"):
        flash_attention_with_kv_cache(**caches, **new, cache_seqlens=5)
    assert all(torch.equal(caches[each], before[each]) for each in caches)
    beside = torch.randn(1, 12, 2, 8)  # a buffer that has a cache and what comes next
    caches[other] = beside[:, :9]
    new[name] = beside[:, 9:].transpose(1, 2)
    flash_attention_with_kv_cache(**caches, **new, cache_seqlens=5)


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("first", [0, 4, 16])
def test_written_scales_lie_beside_the_bytes_of_a_cache(first, by_rows):
    """They may lie behind those of each key (``by_rows``) or of each page, in one buffer of bytes."""
    pages, positions, columns = 3, 4, 16
    buffer = torch.zeros(pages, positions * (columns + 4), dtype=torch.uint8)
    if by_rows:
        rows = buffer.view(pages, positions, 1, columns + 4)
        cache, scale = rows[..., :columns], rows[..., first : first + 4].view(torch.float32)[..., 0]
    else:
        cache = buffer[:, : positions * columns].view(pages, positions, 1, columns)
        start = positions * first
        scale = buffer[:, start : start + positions * 4].view(torch.float32).view(pages, positions, 1)
    cache = cache.view(torch.float8_e4m3fn)
    given = cache, torch.zeros_like(cache), *torch.randn(2, pages, 1, 1, columns).half()
    options: dict[str, Any] = {"k_scale": scale, "cache_seqlens": 1}
    q = torch.randn(pages, 2, 1, columns).half()
    if first == columns:
        flash_attention_with_kv_cache(q, *given, **options)
        assert scale[:, 1].all()
        return
    with pytest.raises(InputError, match=r"^k_scale must have memory of its own, got some of k_cache$"):
        flash_attention_with_kv_cache(q, *given, **options)
    assert not buffer.any()


@pytest.mark.parametrize("left", [0, 3])
def test_pages_before_the_window_need_not_be_there(left):
    """One query at position 11 with pages of 4 keys: it sees keys of page 2 alone."""
    q, k, v = torch.randn(1, 2, 1, 8), torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2, 8)
    options: dict[str, Any] = {"cache_seqlens": torch.tensor([12], dtype=torch.int32), "window": (left, -1)}
    gone, all_there = torch.tensor([[-1, 9, 2]], dtype=torch.int32), torch.tensor([[0, 1, 2]], dtype=torch.int32)
    found = flash_attention_with_kv_cache(q, k, v, page_table=gone, **options)
    torch.testing.assert_close(found, flash_attention_with_kv_cache(q, k, v, page_table=all_there, **options))
    with pytest.raises(InputError, match=r"page_table\[0, 1\] must be from 0 to 2, got 9"):
        flash_attention_with_kv_cache(q, k, v, page_table=gone, **{**options, "window": (4, -1)})
