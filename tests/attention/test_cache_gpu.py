"""Attention with a K/V cache on a real GPU against fp64."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from typing import Any

import pytest
import torch

from flashmoe_science import UnsupportedError, explain_with_kv_cache, flash_attention, flash_attention_with_kv_cache
from flashmoe_science.attention.decode import plan as decode_plan
from flashmoe_science.attention.decode.config import DecodeConfig
from flashmoe_science.attention.decode.plan import _FEW, _FEW_KEYS, _MORE_TO_READ, _SHORT, DECODE_TABLES

from .cache_cases import CACHE_CASES, EMPTY_CACHE_CASES, CacheCase, Tensors, make_tensors
from .cache_checks import assert_cache_right, call, clone
from .checks import poison_allocator, synchronisation_is_an_error

pytestmark = pytest.mark.gpu

LENGTHS = (0, 1, 15, 16, 63, 64, 65, 700, 1024, 2999)


def run(case: CacheCase, seed: int = 0, **options) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = make_tensors(case, "cuda", seed)
    poison_allocator(1 << 20)
    return assert_cache_right(case, tensors, **options)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("case", CACHE_CASES + EMPTY_CACHE_CASES, ids=str)
def test_every_case_of_the_interpreter(case, dtype):
    run(dataclasses.replace(case, dtype=dtype))


@pytest.mark.parametrize("page_size", [0, 1, 16, 64, 100, 256])
@pytest.mark.parametrize("dim", [(64, 64), (128, 128), (256, 256), (80, 80), (192, 128), (111, 64)], ids=str)
def test_grid(dim, page_size):
    """Lengths around tiles and pages, in one batch; every width; every way to cut the keys; 1 to 16 heads a group."""
    groups = itertools.cycle(((2, 2), (8, 2), (16, 1), (5, 1)))
    ways: tuple[dict[str, Any], ...] = ({}, {"num_splits": 7}, {"batch_invariant": True})
    for seqlen_q, options in itertools.product((1, 4), ways):
        heads, heads_kv = next(groups)
        case = CacheCase(
            "grid", lengths=LENGTHS, capacity=3000, heads=heads, heads_kv=heads_kv, seqlen_q=seqlen_q, head_dim=dim[0],
            head_dim_v=dim[1], dtype="bf16", page_size=page_size, options={"causal": True, **options},
        )  # fmt: skip
        run(case)


@pytest.mark.parametrize("rows", [16, 17, 32, 64, 65, 200])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_row_of_the_table(dim, dtype, rows):
    """As many packed rows as fill each tile, and more."""
    assert all(len(configs) <= 3 for table in DECODE_TABLES.values() for configs in table.values())
    case = CacheCase(
        "rows", lengths=(900, 64), capacity=1000, heads=2 * rows, heads_kv=2, head_dim=dim, dtype=dtype, page_size=16,
    )  # fmt: skip
    run(case)


TILES = [
    (64, (128, 4, 3, 2)), (128, (64, 4, 3, 1)), (128, (128, 8, 3, 1)), (128, (64, 4, 4, 2)), (256, (64, 8, 3, 1)),
    (576, (64, 8, 3, 1)),
]  # fmt: skip


def test_tiles_are_those_for_more_to_read():
    larger = [config for table in _MORE_TO_READ.values() for steps in table.values() for _, config in steps]
    larger += [config for table in _SHORT.values() for config in table.values()]
    assert {DecodeConfig(16, *tile) for _, tile in TILES} == set(larger)


@pytest.mark.parametrize("keys", [1, 64, 65, 500, 512, 1000, _FEW_KEYS])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_few_keys_of_one_sequence(group, keys):
    """L2 is asked for them ahead: also for fewer than it is asked for."""
    run(
        CacheCase(
            "few", lengths=(keys,), capacity=keys, heads=2 * group, heads_kv=2, head_dim=128, dtype="bf16", full=True
        )
    )
    assert all(config.prefetch for table in _FEW.values() for config in table.values())


@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize(("dim", "tile"), TILES, ids=str)
def test_tiles_for_more_to_read(dim, tile, page_size, monkeypatch):
    """Chosen by hand, for calls that they do not serve: unlike lengths and like ones, every way to cut the keys."""
    config = DecodeConfig(16, *tile)
    monkeypatch.setattr(decode_plan, "decode_config", lambda *_: config)
    # A capacity that no other test has: what is prepared for a problem is kept.
    capacity = 3008 + 16 * TILES.index((dim, tile))
    mla: dict[str, Any] = (
        {"head_dim_v": 512, "heads_kv": 1, "heads": 16, "shared": True} if dim == 576 else {"heads": 8}
    )
    ways: tuple[dict[str, Any], ...] = (
        {}, {"num_splits": 7}, {"window": (700, 2), "softcap": 3.0}, {"batch_invariant": True},
    )  # fmt: skip
    for lengths, options in itertools.product((LENGTHS, (2990, 2999, 3000), (1500,)), ways):
        case = CacheCase(
            "tile", lengths=lengths, capacity=capacity, seqlen_q=1 if dim == 576 else 3, head_dim=dim, dtype="bf16",
            page_size=page_size, options={"causal": True, **options}, **mla,
        )  # fmt: skip
        run(case, kernel="decode_triton")
    if not page_size:
        full: dict[str, Any] = {"lengths": (capacity,) * 2, "dtype": "fp16", "full": True, **mla}
        run(CacheCase("full", capacity=capacity, head_dim=dim, **full), kernel="decode_triton")


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize(
    "options",
    [{"window": (100, 0)}, {"window": (0, 0)}, {"window": (1000, 2)}, {"softcap": 3.0}, {"softmax_scale": -0.3}],
    ids=str,
)
def test_features(options, page_size):
    for sinks, alibi in ((False, ""), (True, "heads"), (True, "batch")):
        case = CacheCase(
            "features", lengths=LENGTHS, capacity=3000, seqlen_q=5, head_dim=64, dtype="bf16", page_size=page_size,
            sinks=sinks, alibi=alibi, options=options,
        )  # fmt: skip
        run(case)


@pytest.mark.parametrize("kernel", ["auto", "decode_triton"])
@pytest.mark.parametrize("heads", [16, 40, 128])
@pytest.mark.parametrize("page_size", [0, 1, 64])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_mla(dtype, page_size, heads, kernel):
    """The absorbed form: values are 512 of 576 columns of the keys, and one K/V head."""
    for seqlen_q, options in ((1, {}), (2, {"causal": True, "batch_invariant": True}), (1, {"num_splits": 1})):
        case = CacheCase(
            "mla", lengths=LENGTHS, capacity=3000, heads=heads, heads_kv=1, seqlen_q=seqlen_q, head_dim=576,
            head_dim_v=512, dtype=dtype, page_size=page_size, shared=True, options=options,
        )  # fmt: skip
        run(case, kernel=kernel)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("page_size", [0, 16, 3])
@pytest.mark.parametrize("new", [1, 5, 70])
def test_append_with_rotary(new, page_size, interleaved):
    for rotary_dim in (128, 64, 2):
        case = CacheCase(
            "append", lengths=(0, 1, 700, 1500), padding=(0, 0, 3, 100), capacity=1600, seqlen_q=min(new, 8), new=new,
            head_dim=128, dtype="bf16", page_size=page_size, rotary_dim=rotary_dim,
            options={"causal": True, "rotary_interleaved": interleaved},
        )  # fmt: skip
        run(case)


def test_strides():
    """A cache [B, HK, S, D], one sliced from a larger one, one that is not aligned; and an expanded one, only read."""
    case = CacheCase("strides", lengths=(700, 64), capacity=800, head_dim=64, dtype="fp16", full=True)
    tensors = make_tensors(dataclasses.replace(case, lengths=(800, 800)), "cuda")
    expected, _ = call(tensors)
    for name in ("k_cache", "v_cache"):
        cache = tensors[name]
        head_major = cache.transpose(1, 2).contiguous().transpose(1, 2)
        sliced = torch.cat([cache, cache], -1)[..., :64]
        shifted = torch.zeros(cache.numel() + 3, device="cuda", dtype=cache.dtype)[3:].view(cache.shape).copy_(cache)
        for other in (head_major, sliced, shifted):
            torch.testing.assert_close(call({**tensors, name: other})[0], expected, rtol=2e-3, atol=2e-3)
    one = {name: tensors[name][:1].expand(2, -1, -1, -1) for name in ("k_cache", "v_cache")}
    o, _ = call({**tensors, **one})
    torch.testing.assert_close(o[0], expected[0], rtol=2e-3, atol=2e-3)


def test_against_flash_attention():
    """One query a sequence over full caches is attention."""
    tensors = make_tensors(
        CacheCase("same", lengths=(900, 900), capacity=900, head_dim=128, dtype="bf16", full=True), "cuda"
    )
    o, lse = call(tensors)
    k, v = (tensors[name].transpose(1, 2) for name in ("k_cache", "v_cache"))
    expected, expected_lse = flash_attention(tensors["q"], k, v, return_lse=True)
    torch.testing.assert_close(o, expected, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


def sequence_of(tensors: Tensors, b: int) -> Tensors:
    names = ("q", "cache_seqlens", "page_table")
    return {**tensors, **{name: tensors[name][b : b + 1] for name in names if name in tensors}}


@pytest.mark.parametrize("options", [{"batch_invariant": True}, {"num_splits": 5}], ids=str)
@pytest.mark.parametrize(("dim", "dtype"), [(64, "bf16"), (128, "bf16"), (128, "fp32")])
@pytest.mark.parametrize("others", [0, 40, 160])
def test_a_sequence_has_the_same_bits_alone(others, dim, dtype, options):
    """Alone, in any batch, of few rows or of many, and with a page table that has room for more, or for no more."""
    lengths = (0, 1, 64, 65, 300, 2999, 8000, 17000)
    case = CacheCase(
        "bits", lengths=lengths + (700,) * others, capacity=17008, heads=8, head_dim=dim, dtype=dtype, page_size=16
    )
    tensors = make_tensors(case, "cuda")
    o, lse = call(tensors, **options)
    for b in range(len(lengths)):
        one = sequence_of(tensors, b)
        more = torch.cat([one["page_table"], torch.full((1, 5000), -1, dtype=torch.int32, device="cuda")], 1)
        less = one["page_table"][:, : max(1, -(-lengths[b] // 16))]
        for alone in (one, {**one, "page_table": more}, {**one, "page_table": less}):
            o_alone, lse_alone = call(alone, **options)
            assert torch.equal(o_alone[0], o[b])
            assert torch.equal(lse_alone[0], lse[b])


def test_bits_are_equal_over_repeats():
    """200 repeats of whole, even, balanced and invariant shares give the same bits."""
    case = CacheCase("repeats", lengths=(17, 900, 3000, 0), capacity=3000, heads=8, head_dim=128, dtype="bf16")
    tensors = make_tensors(case, "cuda")
    for options in ({"num_splits": 1}, {"num_splits": 6}, {}, {"batch_invariant": True}):
        first, first_lse = call(tensors, **options)
        for _ in range(200):
            o, lse = call(tensors, **options)
            assert torch.equal(o, first)
            assert torch.equal(lse, first_lse)


@pytest.mark.parametrize("append", [False, True])
def test_cuda_graph_replays_with_other_lengths(append):
    """Captured once; lengths, pages, queries and the cache change between replays."""
    case = CacheCase(
        "graph", lengths=(100, 2000, 7), capacity=3000, head_dim=64, dtype="bf16", page_size=16, new=int(append),
        rotary_dim=64 * int(append),
    )  # fmt: skip
    tensors = make_tensors(case, "cuda")
    call(clone(tensors))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = call(tensors)
    for seed, lengths in enumerate(((2990, 3, 500), (0, 0, 1), (1, 2999, 2999)), start=1):
        fresh = make_tensors(dataclasses.replace(case, lengths=lengths), "cuda", seed)
        expected, expected_lse = call(clone(fresh))
        for name, tensor in tensors.items():
            tensor.copy_(fresh[name])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(o, expected)
        assert torch.equal(lse, expected_lse)


def test_compile_and_opcheck():
    case = CacheCase("compile", lengths=(100, 7), capacity=120, new=1, rotary_dim=32, page_size=16, dtype="fp16")
    tensors = make_tensors(case, "cuda")
    for name in ("k_cache", "v_cache"):
        tensors[name].nan_to_num_()
    expected_tensors, compiled_tensors = clone(tensors), clone(tensors)
    expected = call(expected_tensors)

    def step(given: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        return call({**given, "q": given["q"] * 1.0})

    for got, right in zip(torch.compile(step, fullgraph=True)(compiled_tensors), expected, strict=True):
        assert torch.equal(got, right)
    assert torch.equal(compiled_tensors["k_cache"], expected_tensors["k_cache"])
    names = ("q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "page_table")
    arguments: tuple[Any, ...] = (
        *(tensors[name] for name in names), None, None, tensors["rotary_cos"], tensors["rotary_sin"], False, None, None,
        None, True, -1, -1, 0.0, None, 0, False, "auto",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.flashmoe_science.attention_append_kv_cache, arguments)


@pytest.mark.unpoisoned
def test_nothing_waits_for_the_device():
    """With every synchronisation made an error."""
    case = CacheCase("sync", lengths=(100, 7), capacity=120, new=1, rotary_dim=32, page_size=16)
    tensors = make_tensors(case, "cuda")
    call(clone(tensors))
    with synchronisation_is_an_error():
        call(tensors)


def test_checks_are_refused_in_a_capture(monkeypatch):
    tensors = make_tensors(CacheCase("check", lengths=(10,)), "cuda")
    call(tensors)
    monkeypatch.setenv("FLASHMOE_CHECK", "1")
    call(tensors)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty", UserWarning)  # of the capture that was given up
        with pytest.raises(UnsupportedError, match="capture without"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            call(tensors)


def test_offsets_past_2_31():
    """A cache of more than 2**31 elements, read at its end: contiguous, and by pages whose offsets pass 32 bits."""
    length, heads_kv, dim = 2**17, 8, 128
    cache = torch.empty(20, length, heads_kv, dim, device="cuda", dtype=torch.float16)
    assert cache.numel() > 2**31
    cache[-1].normal_()
    q = torch.randn(1, 8, 1, dim, device="cuda", dtype=torch.float16)
    last = torch.tensor([19], dtype=torch.int32, device="cuda")
    o = flash_attention_with_kv_cache(q, cache, cache, cache_batch_idx=last)
    expected = flash_attention(q, cache[-1:].transpose(1, 2), cache[-1:].transpose(1, 2))
    torch.testing.assert_close(o, expected, rtol=2e-2, atol=1e-3)
    pages = cache.view(-1, 16, heads_kv, dim)
    table = torch.arange(pages.shape[0] - length // 16, pages.shape[0], device="cuda").int()[None]
    lengths = torch.tensor([length], dtype=torch.int32, device="cuda")
    paged = flash_attention_with_kv_cache(q, pages, pages, cache_seqlens=lengths, page_table=table)
    torch.testing.assert_close(paged, expected, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("batch", [1, 3, 300])
def test_many_sequences_and_long_tails(batch):
    """Balanced shares: one long sequence among short ones."""
    lengths = tuple(4000 if b == batch // 2 else 1 + 7 * b % 90 for b in range(batch))
    case = CacheCase(
        "tail", lengths=lengths, capacity=4096, heads=2, heads_kv=1, head_dim=64, dtype="bf16", page_size=16
    )
    tensors = make_tensors(case, "cuda")
    shares = explain_with_kv_cache(**tensors).shares
    assert shares is not None
    assert shares.schedule == ("even" if batch == 1 else "balanced")
    assert_cache_right(case, tensors)
