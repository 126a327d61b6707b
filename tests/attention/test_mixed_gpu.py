"""Mixed batches over pages on a real GPU: right to fp64, under graphs with other lengths, the same bits again."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from flashmoe_science import explain_varlen, flash_attention_varlen

from .cases import VarlenCase
from .checks import (
    assert_varlen_right,
    make_features,
    make_packed,
    make_paged,
    poison_allocator,
    synchronisation_is_an_error,
)
from .mixed_cases import KERNEL, MIXED_CASES, Mixed, check_mixed, in_dtype

pytestmark = pytest.mark.gpu

_V = VarlenCase
WAYS: tuple[dict[str, Any], ...] = ({}, {"num_splits": 7}, {"batch_invariant": True})


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("mixed", MIXED_CASES, ids=str)
def test_every_case_of_the_interpreter(mixed, dtype):
    poison_allocator(1 << 22)
    check_mixed(in_dtype(mixed, dtype), "cuda")


@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize("page_size", [8, 16, 64, 128, 256])
@pytest.mark.parametrize("dim", [(64, 64), (128, 128), (64, 128), (128, 64)], ids=str)
def test_prompts_and_tokens_in_one_batch(dim, page_size, way):
    """Lengths around tiles and pages, prompts and tokens in one batch; groups of 1, 3 and 8 heads."""
    heads, heads_kv = ((2, 2), (6, 2), (8, 1))[way]
    queries = (1, 1, 300, 1, 129, 4, 0, 1, 64, 33, 128)
    keys = (2999, 1, 300, 64, 1100, 700, 40, 65, 4000, 34, 0)
    case = _V(queries, keys, heads, heads_kv, dim[0], dim[1], "bf16", True, page_size=page_size, why="grid")
    poison_allocator(1 << 22)
    check_mixed(Mixed(case, **WAYS[way]), "cuda")


@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize("page_size", [1, 16, 100])
@pytest.mark.parametrize("dim", [(256, 256), (80, 80), (192, 128)], ids=str)
def test_grid(dim, page_size, way):
    """Lengths around tiles and pages, prompts and tokens in one batch, 1 to 16 heads a group."""
    heads, heads_kv = ((2, 2), (8, 2), (16, 1))[way]
    queries = (1, 1, 300, 1, 129, 4, 0, 1, 64, 33)
    keys = (2999, 1, 300, 64, 1100, 700, 40, 65, 4000, 34)
    case = _V(queries, keys, heads, heads_kv, dim[0], dim[1], "bf16", True, page_size=page_size, why="grid")
    poison_allocator(1 << 22)
    check_mixed(Mixed(case, **WAYS[way]), "cuda")


@pytest.mark.parametrize("seed", range(4))
def test_random_batches(seed):
    """Any lengths, masks and features."""
    draw = random.Random(seed)
    for _ in range(8):
        count = draw.choice([1, 3, 20])
        queries = tuple(draw.choice([1, 1, 4, draw.randint(0, 400)]) for _ in range(count))
        keys = tuple(draw.choice([n, n + draw.randint(0, 3000)]) for n in queries)
        group, heads_kv = draw.choice([1, 4, 5, 8]), draw.choice([1, 2])
        causal = draw.random() < 0.7
        window = draw.choice([(-1, -1), (300, -1), (100, 50), (-1, 20)])
        more: dict[str, Any] = {"sinks": draw.choice(["", "bf16"]), "softcap": draw.choice([0.0, 10.0])}
        case = _V(
            queries, keys, group * heads_kv, heads_kv, 64, 64, "bf16", causal, window=window, why="random",
            page_size=draw.choice([16, 64]), **more,
        )  # fmt: skip
        poison_allocator(1 << 22)
        check_mixed(Mixed(case, **draw.choice(WAYS)), "cuda")


def test_a_graph_replays_with_other_lengths_and_pages():
    """Tokens of all queries stay; what is whose changes, and the host reads nothing."""
    lengths = [((1, 600, 1, 38), (900, 1500, 64, 38)), ((160, 160, 160, 160), (160, 170, 2000, 1024)),
               ((637, 1, 1, 1), (700, 2000, 1, 5))]  # fmt: skip
    calls = []
    for queries, keys in lengths:
        case = _V(queries, keys, 8, 2, 128, 128, "bf16", True, page_size=16, why="graph", spare=0)
        inputs = make_packed(case, "cuda")
        calls.append((inputs, make_paged(case, inputs)))
    pages = max(given["k"].shape[0] for _, given in calls)
    columns = max(given["page_table"].shape[1] for _, given in calls)
    for _, given in calls:
        for name in "kv":
            room = (0, 0, 0, 0, 0, 0, 0, pages - given[name].shape[0])
            given[name] = torch.nn.functional.pad(given[name], room)
        given["page_table"] = torch.nn.functional.pad(given["page_table"], (0, columns - given["page_table"].shape[1]))
        given["max_seqlen_q"], given["max_seqlen_k"] = 640, 2000
    static: dict[str, Any] = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in calls[0][1].items()
    }

    def run() -> Any:
        return flash_attention_varlen(**static, causal=True, return_lse=True, kernel=KERNEL)

    run()
    with synchronisation_is_an_error():
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = run()
    for inputs, given in calls:
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                static[name].copy_(value)
        o.fill_(torch.nan)
        graph.replay()
        assert_varlen_right(o, lse, inputs, {"causal": True})


def _decoding(batch: int, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a call of prompts and tokens whose first sequence is always the same."""
    draw = random.Random(seed)
    queries = (37, *(draw.choice([1, 1, 200]) for _ in range(batch - 1)))
    keys = (3000, *(draw.randint(n, 4000) for n in queries[1:]))
    case = _V(queries, keys, 8, 2, 128, 128, "bf16", True, page_size=16, why="invariant")
    inputs = make_packed(case, "cuda")
    generator = torch.Generator("cuda").manual_seed(5)
    for name, rows in (("q", 37), ("k", 3000), ("v", 3000)):
        shape = (rows, *inputs[name].shape[1:])
        inputs[name][:rows] = torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)
    return make_paged(case, inputs), make_features(case, "cuda")


def test_batch_invariant_bits():
    """A chunk, and a single token, have the same bits alone and in any batch."""
    for first in (37, 1):
        found = []
        for batch in (1, 2, 9, 40):
            given, options = _decoding(batch, batch)
            if first == 1:  # the last query of the first sequence alone
                starts = given["cu_seqlens_q"].clone()
                given["q"], starts[1:] = given["q"][36:], starts[1:] - 36
                given["cu_seqlens_q"] = starts
            o = flash_attention_varlen(**given, **options, batch_invariant=True, kernel=KERNEL)
            found.append(o[:first])
        for other in found[1:]:
            assert torch.equal(found[0], other)


def test_the_same_bits_in_200_calls():
    given, options = _decoding(30)
    first = flash_attention_varlen(**given, **options, kernel=KERNEL, return_lse=True)
    for _ in range(200):
        again = flash_attention_varlen(**given, **options, kernel=KERNEL, return_lse=True)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_other_numbers_of_tokens_take_other_grids():
    """One prepared call serves them: no more tokens than another needs no other plan."""
    for count in (1, 2, 30, 200, 1999):
        case = _V((count,), (2000,), 4, 1, 64, 64, "bf16", True, page_size=64, why="tokens", spare=0)
        inputs = make_packed(case, "cuda")
        given = {**make_paged(case, inputs), "max_seqlen_q": 2000}
        assert explain_varlen(**given, causal=True, kernel=KERNEL).kernel == KERNEL
        o, lse = flash_attention_varlen(**given, causal=True, kernel=KERNEL, return_lse=True)
        assert_varlen_right(o, lse, inputs, {"causal": True})


def test_compiled_calls_give_the_same():
    given, options = _decoding(6)
    eager = flash_attention_varlen(**given, **options, kernel=KERNEL, num_splits=3)
    compiled = torch.compile(flash_attention_varlen, fullgraph=True)(**given, **options, kernel=KERNEL, num_splits=3)
    assert torch.equal(eager, compiled)


def test_far_pages():
    """Pages that lie more than 2**31 elements apart."""
    case = _V((1, 70), (500, 400), 4, 1, 128, 128, "bf16", True, page_size=16, why="far")
    inputs = make_packed(case, "cuda")
    given = make_paged(case, inputs)
    far = 2**31 // 64 + 64
    for name in "kv":
        pages, *shape = given[name].shape
        wide = torch.empty_strided((pages, *shape), (far, 128, 128, 1), dtype=torch.bfloat16, device="cuda")
        given[name] = wide.copy_(given[name])
    o, lse = flash_attention_varlen(**given, causal=True, kernel=KERNEL, return_lse=True)
    assert_varlen_right(o, lse, inputs, {"causal": True})
