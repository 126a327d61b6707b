"""Attention to a cache whose values are columns of its keys, on a Hopper GPU against fp64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from flashmoe_science import explain_with_kv_cache, flash_attention_with_kv_cache
from flashmoe_science.gpu.device import current_gpu

from .cache_cases import CacheCase, make_tensors
from .cache_checks import assert_cache_right, call
from .checks import poison_allocator

pytestmark = pytest.mark.gpu

KERNEL = "decode_gluon_sm90"
LENGTHS = (0, 1, 15, 63, 64, 65, 127, 128, 700, 1024, 2999)


@pytest.fixture(autouse=True)
def _hopper() -> None:
    gpu = current_gpu()
    if gpu is None or gpu.arch != 90:
        pytest.skip("needs a Hopper GPU")


def mla(lengths: tuple[int, ...] = LENGTHS, capacity: int = 3000, **change: Any) -> CacheCase:
    case: dict[str, Any] = {
        "lengths": lengths, "capacity": capacity, "heads": 16, "heads_kv": 1, "head_dim": 576, "head_dim_v": 512,
        "dtype": "bf16", "shared": True,
    }  # fmt: skip
    return CacheCase("mla", **{**case, **change})


def run(case: CacheCase, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = make_tensors(case, "cuda", seed)
    poison_allocator(1 << 22)
    return assert_cache_right(case, tensors, kernel=KERNEL)


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32, 64, 128, 192])
@pytest.mark.parametrize("page_size", [0, 64, 128])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rows_and_pages(dtype, page_size, heads):
    """Lengths around tiles, in one batch, none among them; what is behind a length, and in other pages, is NaN."""
    for seqlen_q, causal in ((1, False), (2, True), (5, True), (5, False)):
        run(mla(heads=heads, seqlen_q=seqlen_q, dtype=dtype, page_size=page_size, options={"causal": causal}))


@pytest.mark.parametrize("page_size", [0, 64])
@pytest.mark.parametrize(
    "options", [{"num_splits": 1}, {"num_splits": 7}, {"num_splits": 64}, {"batch_invariant": True}, {}], ids=str
)
def test_every_way_to_cut_the_keys(options, page_size):
    batches = LENGTHS, (2990, 2999, 3000), (1500,), (3000,)
    for lengths, heads, seqlen_q in itertools.product(batches, (16, 128), (1, 3)):
        run(mla(lengths, heads=heads, seqlen_q=seqlen_q, page_size=page_size, options={"causal": True, **options}))


@pytest.mark.parametrize("capacity", [1, 63, 64, 1000, 4096])
def test_full_caches(capacity):
    """Without lengths on the device; TMA fills what a tile has past the end of a cache with zeros."""
    for batch, heads in ((1, 16), (3, 128)):
        run(mla((capacity,) * batch, capacity, heads=heads, full=True))


def test_one_long_sequence_among_short_ones():
    for heads in (16, 128):
        run(mla((100_000, *range(1, 32)), 100_032, heads=heads, page_size=64))


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("batch", [33, 200, 1024])
def test_many_sequences(batch, heads):
    """Shares are found by a scan over the lengths of all, several warps of them."""
    lengths = tuple(range(batch % 7, 129 * batch, 129))[:batch]
    run(mla(tuple(length % 1000 for length in lengths), 1024, heads=heads, page_size=64))


def test_prompts_over_a_cache():
    run(mla((300, 1000, 0), 2000, heads=16, seqlen_q=300, options={"causal": True}))
    run(mla((300, 1000), 2000, heads=128, seqlen_q=77, page_size=64, options={"causal": True}))


SCALES = ["none", "all", "head", "token"]


@pytest.mark.parametrize("fp8", SCALES)
@pytest.mark.parametrize("page_size", [0, 64, 128])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_caches_of_8_bits(dtype, page_size, fp8):
    """Up to 32 rows of one and of several queries; what is behind a length is NaN."""
    for heads, seqlen_q, causal in ((16, 1, False), (1, 1, True), (4, 3, False), (16, 2, True), (8, 3, True)):
        case = mla(
            heads=heads, seqlen_q=seqlen_q, dtype=dtype, page_size=page_size, fp8=fp8, options={"causal": causal}
        )
        assert explained(case).launches[0].pattern == "_few_rows_fp8_sm90_kernel"
        run(case)


def explained(case: CacheCase) -> Any:
    tensors = make_tensors(case, "cuda")
    return explain_with_kv_cache(**tensors, **case.options, kernel=KERNEL)


@pytest.mark.parametrize(
    "options", [{"num_splits": 1}, {"num_splits": 7}, {"num_splits": 64}, {"batch_invariant": True}, {}], ids=str
)
def test_every_way_to_cut_keys_of_8_bits(options):
    for lengths, page_size in itertools.product((LENGTHS, (2990, 2999, 3000), (1500,)), (0, 64)):
        run(mla(lengths, page_size=page_size, fp8="token", options=options))
    run(mla((100_000, *range(1, 32)), 100_032, page_size=64, fp8="token", options=options))
    run(mla((3000,) * 3, 3000, fp8="head", full=True, options=options))


def test_scales_that_differ_by_far():
    """A tensor's largest values decide the result though other tokens have a thousand times larger scales."""
    case = mla((3000, 2000), 3000, fp8="token")
    tensors = make_tensors(case, "cuda")
    tensors["k_scale"][:, ::3] *= 2.0**-20
    tensors["k_scale"][:, 1::7] = 0
    tensors["k_scale"][:, 5::11] *= 2.0**5
    tensors["q"] *= 0.01
    poison_allocator(1 << 22)
    assert_cache_right(case, tensors, kernel=KERNEL)


def test_the_same_bits_of_8_bits_a_thousand_times():
    tensors = make_tensors(mla((3000, 2000, 64, 700), 3000, page_size=64, fp8="token"), "cuda")
    first, first_lse = call(tensors, kernel=KERNEL)
    for _ in range(1000):
        found, lse = call(tensors, kernel=KERNEL)
        assert torch.equal(found, first)
        assert torch.equal(lse, first_lse)


@pytest.mark.parametrize("kernel", [KERNEL, "decode_triton"])
def test_scores_of_8_bits_that_fp16_could_not_hold(kernel):
    """Of a size at which a score less 14 is rounded: right, as one key has all of the weight."""
    case = mla((700, 64), 800, fp8="all")
    tensors = make_tensors(case, "cuda")
    for exponent in (20, 24, 26, 28):
        assert_cache_right(case, {**tensors, "q": tensors["q"].bfloat16() * 2.0**exponent}, kernel=kernel)


@pytest.mark.parametrize("options", [{"batch_invariant": True}, {"num_splits": 3}], ids=str)
def test_bits_of_8_bits_depend_on_no_batch(options):
    tensors = make_tensors(mla((700, 64, 2999, 1), 3000, heads=16, seqlen_q=2, page_size=64, fp8="token"), "cuda")
    whole, _ = call(tensors, kernel=KERNEL, **options)
    for b in range(4):
        one = {**tensors, **{name: tensors[name][b : b + 1] for name in ("q", "cache_seqlens", "page_table")}}
        found, _ = call(one, kernel=KERNEL, **options)
        assert torch.equal(found[0], whole[b])


@pytest.mark.parametrize("heads", [16, 128])
def test_large_scores(heads):
    """The maximum rises along the keys, and the output so far is scaled down."""
    case = mla((3000, 2000), 3000, heads=heads)
    tensors = make_tensors(case, "cuda")
    tensors["q"] *= 20
    tensors["k_cache"][:, :, :, 512:] *= torch.linspace(0, 3, 3000, device="cuda")[None, :, None, None].bfloat16()
    assert_cache_right(case, tensors, kernel=KERNEL)


@pytest.mark.parametrize(("heads", "fp8"), [(4, ""), (32, ""), (4, "token")])
def test_strides(heads, fp8):
    """Queries ``[B, S, H, D]``; rows of a cache that are apart, and pages of a pool that has more in each."""
    tensors = make_tensors(mla((700, 64), 800, heads=heads, seqlen_q=3, fp8=fp8), "cuda")
    expected, _ = call(tensors, kernel=KERNEL)
    q = tensors["q"].transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.zeros(2, 900, 1, 640, device="cuda", dtype=tensors["k_cache"].dtype)
    cache = wide[:, :800, :, :576]
    cache.copy_(tensors["k_cache"])
    for change in ({"q": q}, {"k_cache": cache, "v_cache": cache[..., :512]}):
        found, _ = call({**tensors, **change}, kernel=KERNEL)
        assert torch.equal(found, expected)
    # TMA does not step by 0: another kernel serves one cache for all sequences.
    one = tensors["k_cache"][:1].expand(2, -1, -1, -1)
    found, _ = call({**tensors, "k_cache": one, "v_cache": one[..., :512]})
    torch.testing.assert_close(found[0], expected[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("heads", [16, 128])
def test_pages_past_two_to_the_31(heads):
    """A pool of 4.5 GB; the last pages are used."""
    pages = 61_000
    pool = torch.zeros(pages, 64, 1, 576, device="cuda", dtype=torch.bfloat16)
    small = make_tensors(mla((200, 130), 256, page_size=64, heads=heads), "cuda")
    table = small["page_table"]
    last = pages - small["k_cache"].shape[0]
    pool[last:] = small["k_cache"]
    moved = {**small, "k_cache": pool, "v_cache": pool[..., :512], "page_table": table + last}
    assert last * 64 * 576 > 2**31
    assert torch.equal(call(moved, kernel=KERNEL)[0], call(small, kernel=KERNEL)[0])


@pytest.mark.parametrize("heads", [8, 16, 128])
def test_the_same_bits_in_every_run(heads):
    case = mla((3000, 17, 2000, 900), 3000, heads=heads, seqlen_q=2, page_size=64, options={"causal": True})
    tensors = make_tensors(case, "cuda")
    first = call(tensors, causal=True, kernel=KERNEL)
    for _ in range(1000):
        poison_allocator(1 << 22)
        again = call(tensors, causal=True, kernel=KERNEL)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(("heads", "seqlen_q"), [(16, 1), (128, 1), (16, 3), (128, 2)])
def test_the_bits_of_a_sequence_do_not_depend_on_its_batch(heads, seqlen_q):
    """By whichever kernel: rows alone choose it."""
    lengths = (2999, 64, 1500, 3000, 1)
    tensors = make_tensors(mla(lengths, heads=heads, seqlen_q=seqlen_q, page_size=64), "cuda")
    window = {"batch_invariant": True, "window": (1023, 0)}
    for options in ({"batch_invariant": True}, {"num_splits": 1}, {"num_splits": 5}, window):
        together = call(tensors, causal=True, **options)
        for b in range(len(lengths)):
            alone = {**tensors, **{name: tensors[name][b : b + 1] for name in ("q", "page_table", "cache_seqlens")}}
            alone["page_table"] = alone["page_table"][:, : max(1, -(-lengths[b] // 64))]  # and of another capacity
            for found, expected in zip(call(alone, causal=True, **options), together, strict=True):
                assert torch.equal(found[0], expected[b])


@pytest.mark.parametrize("heads", [16, 128])
def test_a_captured_graph_follows_the_lengths(heads):
    tensors = make_tensors(mla((3000, 3000, 3000), page_size=64, heads=heads), "cuda")
    tensors["cache_seqlens"].fill_(5)
    call(tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = call(tensors)
    for lengths in ((3000, 1, 64), (0, 0, 0), (5, 2000, 65)):
        tensors["cache_seqlens"].copy_(torch.tensor(lengths))
        graph.replay()
        expected, expected_lse = assert_cache_right(mla(lengths, page_size=64, heads=heads), tensors)
        assert torch.equal(o, expected)
        assert torch.equal(lse, expected_lse)


def test_auto_takes_it():
    tensors = make_tensors(mla(page_size=64, heads=32), "cuda")
    options: dict[str, Any] = {
        name: tensor for name, tensor in tensors.items() if name not in ("q", "k_cache", "v_cache")
    }
    q, k_cache, v_cache = (tensors[name] for name in ("q", "k_cache", "v_cache"))
    assert explain_with_kv_cache(q, k_cache, v_cache, **options).kernel == KERNEL
    o = flash_attention_with_kv_cache(q, k_cache, v_cache, **options)
    assert torch.equal(o, flash_attention_with_kv_cache(q, k_cache, v_cache, **options, kernel=KERNEL))
