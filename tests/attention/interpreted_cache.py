"""Child process: run calls with a K/V cache in Triton's interpreter, answer ``right`` or why not."""

from __future__ import annotations

import math
import sys
from unittest import mock

import torch

from flashmoe_science.attention.decode.contract import cache_problem_of
from flashmoe_science.attention.decode.reference import attention_with_kv_cache

from .cache_cases import CacheCase, Tensors, make_tensors
from .cache_checks import assert_cache_right, call, clone


def check(case: CacheCase) -> None:
    """Compare one case with fp64."""
    tensors = make_tensors(case)
    o, lse = assert_cache_right(case, tensors, kernel="decode_triton")
    if case.shared:  # the same shapes and strides in memory of its own are another call
        values = tensors["v_cache"]
        ones = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype).fill_(1.0)
        of_ones, _ = call({**tensors, "v_cache": ones}, **case.options, kernel="decode_triton")
        has_keys = (lse != -math.inf)[..., None].expand_as(o)
        torch.testing.assert_close(of_ones, has_keys.to(o.dtype), rtol=1e-3, atol=1e-3)


def check_unread(case: CacheCase) -> None:
    """Compare a case whose lengths are refused where they are read: on a GPU they are not."""
    with mock.patch("flashmoe_science.attention.decode.api.check_contents"):
        check(case)


def check_bits(case: CacheCase) -> None:
    """Compare each sequence alone, in a larger cache too, with the same sequence in the batch: bits must be equal."""
    tensors = make_tensors(case)
    o, lse = call(tensors, **case.options, kernel="decode_triton")
    for b, length in enumerate(case.lengths):
        one: Tensors = {
            name: tensors[name][b : b + 1] for name in ("q", "cache_seqlens", "page_table") if name in tensors
        }
        for name in {"k_cache", "v_cache", "k_scale", "v_scale"} & {*tensors}:
            one[name] = tensors[name] if case.page_size else tensors[name][b : b + 1]
        larger = dict(one)
        if case.page_size:
            larger["page_table"] = torch.cat([one["page_table"], torch.full((1, 40), -1, dtype=torch.int32)], 1)
        for alone in (one, larger):
            o_alone, lse_alone = call(alone, **case.options, kernel="decode_triton")
            assert torch.equal(o_alone[0], o[b]), f"sequence {b} of {length} keys has other bits alone"
            assert torch.equal(lse_alone[0], lse[b])


def check_bias_that_is_not_finite(case: CacheCase) -> None:
    """NaN and infinity are no numbers that hide a key: rows that see them are NaN, as by the reference."""
    tensors = make_tensors(case)
    bias = tensors["bias"]
    bias[0, :, 0, 3], bias[0, :, 1, 2], bias[0, :, 2, 1] = math.nan, math.inf, torch.finfo(bias.dtype).max
    o, _ = call(tensors, **case.options, kernel="decode_triton")
    expected, _ = call(tensors, **case.options)
    assert expected[0, :, :2].isnan().all(), "the reference should make NaN of them"
    assert not expected[0, :, 2].isnan().any()
    assert not expected[1].isnan().any()
    torch.testing.assert_close(o, expected, rtol=1e-3, atol=1e-3, equal_nan=True)


def check_huge_scores(case: CacheCase) -> None:
    """Compare scores that fp16 cannot hold with fp64: no budget is known, as eager torch makes NaN of them."""
    tensors = make_tensors(case)
    problem = cache_problem_of(tensors, **case.options)
    expected, expected_lse = attention_with_kv_cache(problem, clone(tensors), dtype=torch.float64)
    largest = expected_lse * math.log2(math.e)
    assert ((largest > 2**26) & (largest < 2**28)).any(), "there a maximum less 14 is rounded to one less 16"
    o, lse = call(tensors, **case.options, kernel="decode_triton")
    torch.testing.assert_close(o.double(), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-3, atol=0)


CHECKS = {
    "append-too-much": check_unread,
    "bits": check_bits,
    "huge-scores": check_huge_scores,
    "not-finite": check_bias_that_is_not_finite,
}  # by how a case's name begins


def main() -> None:
    """Serve until stdin ends."""
    empty = torch.empty
    torch.empty = lambda *a, **o: fill(empty(*a, **o))
    for line in sys.stdin:
        try:
            case = eval(line, {"CacheCase": CacheCase})  # the parent's own repr
            next((CHECKS[name] for name in CHECKS if case.why.startswith(name)), check)(case)
            answer = "right"
        except Exception as error:  # noqa: BLE001 - the parent fails the test with it
            answer = f"{type(error).__name__}: {error}".replace("\n", " | ")
        print(answer, flush=True)


def fill(tensor: torch.Tensor) -> torch.Tensor:
    """Poison fresh memory: an element that no one wrote shows."""
    return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor


if __name__ == "__main__":
    main()
