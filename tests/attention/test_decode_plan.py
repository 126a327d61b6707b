"""Who serves a call with a cache, how its keys are cut, and what a kernel is told."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from flashmoe_science import InputError, UnsupportedError
from flashmoe_science.attention.decode.config import DecodeConfig
from flashmoe_science.attention.decode.plan import (
    DECODE_TABLES,
    KVSplits,
    MergeConfig,
    even_splits,
    partial_sizes,
    plan_shares,
    plan_with_kv_cache,
)
from flashmoe_science.attention.decode.problem import CacheProblem
from flashmoe_science.gpu.specs import SPECS

H200 = SPECS["H200"]


def make(batch: int, heads: int, heads_kv: int, seqlen_q: int, capacity: int, **others: Any) -> CacheProblem:
    """Return a problem of D 128 and bf16, unless said."""
    options = {"head_dim": 128, "head_dim_v": 128, "dtype": "bf16", **others}
    return CacheProblem(batch, heads, heads_kv, seqlen_q, capacity, **options)


def shares_of(problem: CacheProblem) -> KVSplits:
    shares = plan_with_kv_cache(problem, H200).shares
    assert shares is not None
    return shares


def merges(problems: Iterable[CacheProblem]) -> set[MergeConfig]:
    """Return the tiles of all merges that there are."""
    found = (plan_with_kv_cache(problem, H200).merge for problem in problems)
    return {merge for merge in found if merge is not None}


def test_rows_of_all_heads_of_a_kv_head_share_a_tile():
    for seqlen_q, group, block_m, tiles in (
        (1, 1, 16, 1),
        (1, 16, 16, 1),
        (4, 8, 32, 1),
        (16, 4, 64, 1),
        (16, 16, 64, 4),
    ):
        plan = plan_with_kv_cache(make(1, 2 * group, 2, seqlen_q, 512, has_seqlens=False), H200)
        assert plan.config is not None
        assert plan.shares is not None
        assert plan.config.block_m == block_m
        assert plan.launches[0].grid == (tiles * 2 * plan.shares.programs, 1, 1)


@pytest.mark.parametrize(
    ("problem", "splits"),
    [
        (make(64, 32, 8, 1, 4096, has_seqlens=False), 1),  # 512 programs, 264 are resident
        (make(8, 32, 32, 1, 8192, has_seqlens=False), 1),  # 256 programs, 132 are resident
        (make(16, 32, 8, 1, 8192, has_seqlens=False), 1),
        (make(1, 32, 8, 1, 1024, has_seqlens=False), 16),  # one tile a share
        (make(1, 32, 8, 1, 4096, has_seqlens=False), 32),
        (make(1, 32, 8, 1, 8192, has_seqlens=False), 16),  # one program for each SM
        (make(1, 8, 1, 1, 131072, has_seqlens=False), 128),
        (make(1, 32, 8, 1, 64, has_seqlens=False), 1),
    ],
    ids=lambda value: value.describe() if isinstance(value, CacheProblem) else str(value),
)
def test_keys_are_split_until_the_gpu_is_full(problem, splits):
    shares = shares_of(problem)
    assert (shares.most, shares.programs) == (splits, splits * problem.batch)
    assert len(plan_with_kv_cache(problem, H200).launches) == (1 if splits == 1 else 2)


@given(
    tiles=st.integers(1, 3000),
    units=st.integers(1, 600),
    slots=st.integers(1, 600),
    partial=st.sampled_from((0.0, 0.5, 4.0)),
)
def test_even_splits_leave_no_share_empty_and_waste_little(tiles, units, slots, partial):
    def cost(share: int) -> float:
        count = -(-tiles // share)
        return float(-(-units * count // slots) * (share + (partial if count > 1 else 0)))

    count = even_splits(tiles, units, slots, partial)
    assert 1 <= count <= min(tiles, 256)
    share = -(-tiles // count)
    assert -(-tiles // share) == count, "every share has keys"
    if units < 0.8 * slots:
        assert cost(share) * 0.95 <= min(cost(other) for other in range(max(1, -(-tiles // 256)), tiles + 1))


def counts_on_the_device(shares: KVSplits, tiles: list[int]) -> list[int]:
    """Return how many shares each sequence gets: the arithmetic of decode_triton, with numbers."""
    if shares.schedule == "balanced":
        quota, mean = max(-(-sum(tiles) // shares.splits), shares.least_tiles), sum(tiles) // len(tiles)
        alike = max(tiles) <= mean + mean // 8
        wanted = [shares.uniform if alike else max((each + quota // 2) // quota, 1) for each in tiles]
        cut = [max(-(-each // want), 1) for each, want in zip(tiles, wanted, strict=True)]
    else:
        cut = [max(-(-each // shares.splits), shares.least_tiles) for each in tiles]
    return [max(-(-each // share), 1) for each, share in zip(tiles, cut, strict=True)]


@given(st.data())
def test_the_grid_has_room_for_every_share(data):
    """Whatever the lengths are that the device finds."""
    lengths = data.draw(st.lists(st.integers(0, 5000), min_size=1, max_size=40))
    heads_kv = data.draw(st.sampled_from((1, 8, 64)))
    how = data.draw(st.sampled_from(({}, {"num_splits": 5}, {"num_splits": 256}, {"batch_invariant": True})))
    window = data.draw(st.sampled_from(((-1, -1), (900, -1))))
    problem = make(len(lengths), heads_kv, heads_kv, 1, 5000, window=window, **how)
    config = DecodeConfig(16, 64, 4, 3, 3)
    shares, _ = plan_shares(problem, config, 132)
    tiles = []
    for length in lengths:
        first = max(0, length - 1 - window[0]) if window[0] >= 0 else 0
        tiles.append(-(-length // 64) - first // 64)
    counts = counts_on_the_device(shares, tiles)
    assert max(counts) <= shares.most
    if shares.schedule == "balanced":
        assert sum(counts) <= shares.programs
    else:
        assert max(counts) <= shares.splits
        assert shares.programs == shares.splits * len(lengths)


@given(length=st.integers(0, 200_000), capacities=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)))
def test_batch_invariant_shares_depend_on_the_length_alone(length, capacities):
    config, counts = DecodeConfig(16, 64, 4, 3, 3), set()
    for (batch, heads), more in itertools.product(((1, 8), (200, 8), (3, 32)), capacities):
        problem = make(batch, heads, 8, 1, max(1, length + more), batch_invariant=True)
        shares, _ = plan_shares(problem, config, 132)
        tiles = -(-length // 64)
        counts.add((counts_on_the_device(shares, [tiles])[0], max(-(-tiles // shares.splits), shares.least_tiles)))
    assert len(counts) == 1


@pytest.mark.parametrize("batch", [2, 7, 16, 60])
def test_sequences_of_like_lengths_are_cut_as_if_the_host_knew_them(batch):
    """Lengths on the device, all about the capacity, get the shares of a call without lengths."""
    problem = make(batch, 32, 8, 1, 8192)
    on_device, known = shares_of(problem), shares_of(dataclasses.replace(problem, has_seqlens=False))
    config = plan_with_kv_cache(problem, H200).config
    assert config is not None
    tiles = [8192 // config.block_n - b % 2 for b in range(batch)]
    assert set(counts_on_the_device(on_device, tiles)) <= {known.most, known.most - 1}
    assert sum(counts_on_the_device(on_device, tiles)) <= on_device.programs
    tiles = [8] * (batch - 1) + [64]
    counts = counts_on_the_device(on_device, tiles)
    assert sum(counts) <= on_device.programs
    assert counts[-1] > min(counts), "unlike ones are balanced"


def test_the_tile_follows_what_an_sm_has_to_read():
    """Little: small tiles, many blocks. Much: one block an SM, but for short sequences that come and go."""
    tiles = {
        make(1, 32, 8, 1, 4096): (64, 4, 3, 3),
        make(1, 32, 8, 1, 8192): (64, 4, 3, 1),
        make(16, 32, 8, 1, 8192): (128, 8, 3, 1),
        make(64, 32, 8, 1, 4096, page_size=16): (64, 4, 4, 2),
        make(64, 32, 8, 1, 131072, window=(1023, 0)): (64, 4, 4, 2),
        make(1, 32, 8, 1, 8192, head_dim=256, head_dim_v=256): (64, 8, 3, 1),
        make(16, 32, 8, 1, 8192, head_dim=64, head_dim_v=64): (128, 4, 3, 2),
        make(16, 64, 2, 1, 8192): (64, 4, 3, 2),  # 32 rows
    }
    for problem, expected in tiles.items():
        config = plan_with_kv_cache(problem, H200).config
        assert config is not None
        assert config == DecodeConfig(config.block_m, *expected), problem.describe()


@pytest.mark.parametrize("how", [{"batch_invariant": True}, {"num_splits": 5}], ids=str)
def test_the_tile_of_a_call_that_promises_bits_does_not_follow_the_batch(how):
    plans = [
        plan_with_kv_cache(make(batch, 32, 8, 1, keys, **how), H200) for batch in (1, 64) for keys in (100, 131072)
    ]
    assert len({plan.config for plan in plans}) == 1
    assert all(plan.shares is not None and plan.shares.uniform == 1 for plan in plans)


MLA = {"head_dim": 576, "head_dim_v": 512, "shared_kv": True, "page_size": 64}
PROMISED: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "plain": (32, 8, 1, {}),
    "window": (32, 8, 1, {"window": (1023, 0)}),
    "fp32": (32, 8, 4, {"dtype": "fp32"}),
    "mla-few": (16, 1, 1, MLA),
    "mla": (128, 1, 1, MLA),
    "mla-window": (128, 1, 1, {**MLA, "window": (1023, 0)}),
    "mla-right": (16, 1, 4, {**MLA, "window": (1023, 1)}),
}


PROMISES: tuple[dict[str, Any], ...] = ({"batch_invariant": True}, {"num_splits": 5}, {"num_splits": 200})


@pytest.mark.parametrize("how", PROMISES, ids=str)
@pytest.mark.parametrize("name", PROMISED)
def test_what_decides_bits_follows_neither_the_batch_nor_the_capacity(name, how):
    """The kernel, its tile, whether it has a window, and the tile of the merge, which says how shares are summed."""
    heads, heads_kv, seqlen_q, more = PROMISED[name]
    problems = [
        make(batch, heads, heads_kv, seqlen_q, keys, **how, **more)
        for batch in (1, 6, 30, 200)
        for keys in (320, 1024, 1088, 3008, 131072)
    ]
    plans = [plan_with_kv_cache(problem, H200) for problem in problems]
    assert len({(plan.kernel, plan.config, plan.problem.window) for plan in plans}) == 1
    assert len(merges(problems)) == 1
    plain = [dataclasses.replace(problem, batch_invariant=False, num_splits=0) for problem in problems]
    assert len(merges(plain)) > 1, "these batches and capacities tell nothing"


@pytest.mark.parametrize(("heads", "keys"), [(16, 1024), (16, 8192), (128, 8192)])
def test_partial_outputs_of_mla_cost_less_than_its_keys(heads, keys):
    """Where sequences are many enough to fill the SMs, whatever their number: not a share for each tile."""
    for batch, told in itertools.product(range(17, 132), (True, False)):
        shares = shares_of(make(batch, heads, 1, 1, keys, has_seqlens=told, **MLA))
        count = shares.uniform if shares.schedule == "balanced" else shares.splits
        moved = 2 * 4 * count * heads * 512 if count > 1 else 0
        assert moved < 0.6 * keys * 576 * 2, (batch, count)


MERGES = {
    (64, 16, 4096): MergeConfig(1, 512, 8),
    (64, 8, 4096): MergeConfig(1, 512, 8),
    (16, 16, 8192): MergeConfig(1, 512, 8),
    (128, 16, 1024): MergeConfig(1, 512, 4),
    (16, 128, 8192): MergeConfig(1, 512, 4),
    (64, 128, 4096): MergeConfig(4, 512, 4),
    (1, 16, 8192): MergeConfig(1, 32, 64),  # 128 shares
}


@pytest.mark.parametrize("case", MERGES, ids=str)
def test_few_shares_of_mla_are_merged_in_one_wave(case):
    """Also with fp8, by ``decode_triton``. The cases of ``lab/decode/11_mla_few_heads_h200.txt``."""
    batch, heads, keys = case
    problem = make(batch, heads, 1, 1, keys, **MLA)
    in_fp8 = dataclasses.replace(problem, is_fp8=True)
    for plan in (plan_with_kv_cache(problem, H200), plan_with_kv_cache(in_fp8, H200, "decode_triton")):
        merge = plan.merge
        assert merge == MERGES[case]
        assert plan.launches[-1].grid == (512 // merge.columns * heads // merge.rows, 1, batch)
        assert f"merge   rows {merge.rows}, columns {merge.columns}, block_s {merge.block_s}" in plan.as_text()


def test_the_merge_of_other_caches_is_another():
    """With values of their own, and where bits are promised."""
    own = make(64, 16, 1, 1, 4096, head_dim=512, head_dim_v=512)
    promised = make(64, 16, 1, 1, 4096, batch_invariant=True, **MLA)
    assert max(merge.columns for merge in merges([own, promised])) <= 128


def test_the_name_of_a_call_says_that_bits_are_promised():
    names = [make(16, 32, 8, 1, 8192, page_size=16, **how).describe() for how in ({}, *PROMISES)]
    assert names == [f"b16_h32_8_s1_8192_d128_bf16_page16{end}" for end in ("", "_invariant", "_splits5", "_splits200")]


def test_a_promised_window_as_wide_as_can_be_stays_in_32_bits():
    problem = make(1, 8, 8, 1, 300, window=(2**40, -1), batch_invariant=True)
    assert problem.seen_keys == 300
    assert -(2**31) < 300 - problem.window[0] <= 0


def test_one_long_sequence_among_short_ones_is_split():
    """64 sequences of 1k keys and one of 128k: no program has more than a few times the mean."""
    problem = make(65, 32, 8, 1, 131072, page_size=16)
    shares = shares_of(problem)
    assert shares.schedule == "balanced"
    tiles = [16] * 64 + [2048]
    counts = counts_on_the_device(shares, tiles)
    assert counts[:64] == [1] * 64
    longest = max(each / count for each, count in zip(tiles, counts, strict=True))
    assert longest <= 2 * max(16, sum(tiles) / shares.splits)


@pytest.mark.parametrize("how", [{}, {"batch_invariant": True}], ids=["auto", "invariant"])
def test_queries_of_prompt_size_leave_no_partial_outputs(how):
    plan = plan_with_kv_cache(make(16, 32, 8, 4096, 8192, causal=True, **how), H200)
    assert plan.shares is not None
    assert plan.shares.schedule == "whole"
    assert [launch.pattern for launch in plan.launches] == ["_decode_kernel"]


def test_partial_outputs_stay_small_beside_the_cache():
    """A few queries a sequence: little room beside K and V, and not all of it is written."""
    for batch, seqlen_q, keys in itertools.product((1, 4, 64, 256), (1, 4, 16), (1024, 8192, 131072)):
        for how in ({}, {"batch_invariant": True}):
            problem = make(batch, 32, 8, seqlen_q, keys, page_size=16, **how)
            partials = sum(partial_sizes(plan_with_kv_cache(problem, H200))) * 4
            assert partials <= max(0.3 * problem.kv_bytes, 64e6), problem.describe()


def test_a_window_leaves_the_rest_of_the_cache_alone():
    whole, window = make(1, 8, 8, 1, 131072), make(1, 8, 8, 1, 131072, window=(1023, 0))
    assert window.seen_keys == 1024
    assert shares_of(window).programs <= 17
    assert whole.kv_bytes == 128 * window.kv_bytes


def test_one_form_for_bounds_that_hide_nothing():
    assert make(1, 8, 8, 1, 64, causal=True).window == (-1, -1)
    assert make(1, 8, 8, 4, 64, causal=True).window == (-1, 0)
    assert make(1, 8, 8, 4, 64, window=(63, 3)).window == (-1, -1)
    assert make(1, 8, 8, 4, 64, window=(62, 2)).window == (62, 2)


def test_work_counts_visible_keys():
    problem = make(2, 8, 2, 3, 100, causal=True)
    assert problem.flops == 2 * 2 * 8 * (98 + 99 + 100) * 256
    assert problem.kv_bytes == 2 * 100 * 2 * 256 * 2
    assert make(1, 1, 1, 2, 5, window=(1, -1)).flops == 2 * (3 + 2) * 256


def test_shared_values_are_read_once():
    """MLA, absorbed: 16 heads of 576 columns, of which 512 are values too."""
    problem = make(16, 16, 1, 1, 8192, head_dim=576, head_dim_v=512, shared_kv=True, page_size=64)
    assert problem.kv_bytes == 16 * 8192 * 576 * 2
    assert plan_with_kv_cache(problem, H200, "decode_triton").config == DecodeConfig(16, 64, 8, 3, 1)
    with pytest.raises(
        InputError, match="with shared_kv head_dim_v must be at most D = 576 and seqlen_new 0, got 512 and 1"
    ):
        dataclasses.replace(problem, seqlen_new=1)


def test_appending_and_rotating_is_one_launch():
    append = plan_with_kv_cache(make(3, 8, 2, 1, 64, seqlen_new=1, num_splits=1), H200)
    assert [launch.pattern for launch in append.launches] == ["_append_kernel", "_decode_kernel"]
    assert append.launches[0].grid == (1, 2, 3)
    rotary = plan_with_kv_cache(make(3, 8, 2, 9, 640, seqlen_new=1, rotary_dim=64, num_splits=2), H200)
    assert [launch.pattern for launch in rotary.launches][-1] == "_merge_splits_kernel"
    assert rotary.launches[0].grid == (3, 10, 3)


def test_a_plan_says_why():
    plan = plan_with_kv_cache(make(16, 32, 8, 1, 8192, page_size=16), H200)
    first, second = str(plan).splitlines()[:2]
    assert first == "b16_h32_8_s1_8192_d128_bf16_page16 on H200: decode_triton"
    assert second.endswith(
        "the lengths lie on the device: about 33 shares a head, as equal as can be over all sequences, "
        "or 1 for each where they are alike"
    )
    assert json.loads(json.dumps(plan.as_dict()))["shares"]["schedule"] == "balanced"
    assert "num_splits is 3" in plan_with_kv_cache(make(1, 8, 8, 1, 8192, num_splits=3), H200).reason


def test_what_is_refused():
    with pytest.raises(UnsupportedError, match=r"no kernel serves head dimension 576 with a cache(.|\n)*512"):
        plan_with_kv_cache(make(1, 8, 1, 1, 64, head_dim=576), H200)
    with pytest.raises(UnsupportedError, match=r"D 640 and DV 512 in bf16 with shared values(.|\n)*576 and 512"):
        plan_with_kv_cache(make(1, 8, 1, 1, 64, head_dim=640, head_dim_v=512, shared_kv=True), H200)
    with pytest.raises(InputError, match=r"kernel must be auto or one of .*, got 'fastest'"):
        plan_with_kv_cache(make(1, 8, 2, 1, 100), H200, "fastest")
    with pytest.raises(UnsupportedError, match="the reference reads lengths on the host"):
        plan_with_kv_cache(make(1, 8, 1, 1, 64), H200, "reference")
    with pytest.raises(UnsupportedError, match="kernels need sm_80"):
        plan_with_kv_cache(make(1, 8, 1, 1, 64), dataclasses.replace(H200, arch=75))
    with pytest.raises(UnsupportedError, match=r"grid .* is too large(.|\n)*at most 65535 sequences"):
        plan_with_kv_cache(make(70000, 1, 1, 1, 64, seqlen_new=1), H200)
    with pytest.raises(UnsupportedError, match=r"positions of the cache are too far apart: 33554432 elements"):
        plan_with_kv_cache(make(1, 8, 1, 1, 64, k_strides=(0, 2**25, 128, 1)), H200)
    for change, message in (
        ({"dtype": "fp8"}, "dtype must be one of fp16, bf16, fp32"),
        ({"head_dim": 0}, "head_dim must be at least 1"),
        ({"page_size": -1}, "page_size must not be negative"),
        ({"rotary_dim": 130}, "rotary dimension must be even and at most D = 128, got 130"),
        ({"softcap": 1e-38, "softmax_scale": 10.0}, "softmax_scale / softcap must be at most"),
    ):
        with pytest.raises(InputError, match=message):
            make(1, 8, 8, 1, 64, **change)
    with pytest.raises(InputError, match="heads of q must be a multiple of the 3 of k_cache, got 8"):
        make(1, 8, 3, 1, 64)


def test_every_architecture_and_width_has_a_tile():
    assert {arch for archs in DECODE_TABLES for arch in archs} == {80, 86, 89, 90, 100, 120}
    for table in DECODE_TABLES.values():
        assert set(table) == {*itertools.product((2, 4), (64, 128, 256)), (2, 512)}
        for configs in table.values():
            rows = [config.block_m for config in configs]
            assert rows == sorted(rows)
            assert rows[0] == 16


def test_the_tile_of_8_bit_caches_is_for_rows_that_are_copied_16_bytes_at_a_time():
    """Pieces of 4 bytes need addresses that spill. D 120 is copied 8 bytes at a time."""
    blocks = {
        dim: plan_with_kv_cache(make(16, 32, 8, 1, 8192, head_dim=dim, head_dim_v=dim, is_fp8=True), H200).config
        for dim in (100, 120, 128)
    }
    assert [config.blocks_per_sm for config in blocks.values() if config is not None] == [1, 2, 2]
