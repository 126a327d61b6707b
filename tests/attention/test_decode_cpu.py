"""Attention with a K/V cache where no GPU is needed: the contract, the reference, the kernels in the interpreter."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from flashmoe_science import (
    InputError,
    UnsupportedError,
    explain_with_kv_cache,
    flash_attention,
    flash_attention_with_kv_cache,
)
from flashmoe_science.attention import reference
from flashmoe_science.attention.decode import reference as cache_reference

from ..exhaustive import all_but
from .cache_cases import CACHE_CASES, EMPTY_CACHE_CASES, CacheCase, Tensors, make_tensors
from .cache_checks import assert_cache_right, call, clone
from .test_decode_refused_cpu import PLAIN

TOO_MUCH = "append-too-much"  # is refused by who reads lengths; kernels keep to the cache
SERVED = [case for case in CACHE_CASES if case.why != TOO_MUCH]


@pytest.mark.parametrize("case", SERVED + EMPTY_CACHE_CASES, ids=str)
def test_cpu_tensors_run_the_reference(case):
    tensors = make_tensors(case)
    assert explain_with_kv_cache(**tensors, **case.options).kernel == "reference"
    assert_cache_right(case, tensors)


def gathered(tensors: Tensors, b: int, first: int, end: int) -> list[torch.Tensor]:
    """Return K and V of one sequence as ``[1, HK, S, D]``, key by key."""
    length = tensors["k_cache"].shape[1]
    out = []
    for name in ("k_cache", "v_cache"):
        cache, keys = tensors[name], []
        for n in range(first, end):
            page, inside = b, n
            if "page_table" in tensors:
                page, inside = int(tensors["page_table"][b, n // length]), n % length
            elif "cache_batch_idx" in tensors:
                page = int(tensors["cache_batch_idx"][b])
            keys.append(cache[page, inside])
        out.append(torch.stack(keys, 1)[None])
    return out


@pytest.mark.parametrize("why", ["page-3", "batch-idx", "leftpad-paged", "append-paged", "append-rows", "many-rows"])
def test_the_reference_is_attention_over_what_lies_in_the_cache(why):
    """Against ``reference.attention`` over keys gathered one by one, after the call wrote the new ones."""
    case = next(case for case in CACHE_CASES if case.why == why)
    tensors = make_tensors(dataclasses.replace(case, dtype="fp32"))
    o, lse = call(tensors, **case.options)
    for b, length in enumerate(case.lengths):
        k, v = gathered(tensors, b, case.padding[b] if case.padding else 0, length + case.new)
        expected, expected_lse = reference.attention(tensors["q"][b : b + 1], k, v, **case.options)
        torch.testing.assert_close(o[b : b + 1], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse[b : b + 1], expected_lse, rtol=1e-5, atol=1e-6)


def test_rotation_is_a_product_of_complex_numbers():
    x, angles = torch.randn(2, 5, 10, dtype=torch.float64), torch.randn(20, 3, dtype=torch.float64)
    positions = torch.tensor([3, 0, 19, 7, 7])
    turn = torch.polar(torch.ones_like(angles), angles)[positions]
    pairs = cache_reference.rotate(x, angles.cos(), angles.sin(), positions, interleaved=True)
    expected = torch.view_as_real(torch.view_as_complex(x[..., :6].reshape(2, 5, 3, 2)) * turn).reshape(2, 5, 6)
    torch.testing.assert_close(pairs, torch.cat([expected, x[..., 6:]], -1))
    halves = cache_reference.rotate(x, angles.cos(), angles.sin(), positions, interleaved=False)
    both = torch.complex(x[..., :3], x[..., 3:6]) * turn
    torch.testing.assert_close(halves, torch.cat([both.real, both.imag, x[..., 6:]], -1))
    behind = cache_reference.rotate(x, angles.cos(), angles.sin(), positions + 1, interleaved=False)
    assert torch.isnan(behind[:, 2, :6]).all(), "a position behind the table shows"
    assert not torch.isnan(behind[:, 3]).any()


def test_one_length_for_all():
    case = CacheCase("number", lengths=(37, 37))
    tensors = make_tensors(case)
    expected = call(tensors)
    del tensors["cache_seqlens"]
    for got, right in zip(call(tensors, cache_seqlens=37), expected, strict=True):
        assert torch.equal(got, right)
    with pytest.raises(InputError, match=r"cache_seqlens must be from 0 to 2\*\*31 - 1, got -1"):
        call(tensors, cache_seqlens=-1)


@pytest.mark.parametrize(("page_size", "most"), [(0, 69), (16, 79)])
def test_one_length_for_all_leaves_room_for_what_is_appended(page_size, most):
    """The host knows it, so nothing has to be asked for: the cache is not written where it contradicts."""
    tensors = make_tensors(CacheCase("number", lengths=(69, 69), new=1, page_size=page_size))
    del tensors["cache_seqlens"]
    before = clone(tensors)
    room = rf"from 0 to {most} \({most + 1} positions less 1 new ones\)"
    functions = (call, lambda given, **options: explain_with_kv_cache(**given, **options), torch.compile(call))
    for function in functions:
        with pytest.raises(InputError, match=rf"cache_seqlens must be {room}, got {most + 1}"):
            function(tensors, cache_seqlens=most + 1)
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(tensors[name], before[name], rtol=0, atol=0, equal_nan=True)
    assert call(tensors, cache_seqlens=69)[0].shape == (2, 4, 1, 32)


def test_numbers_of_numpy_and_windows_in_lists():
    """What ``flash_attention`` takes is taken here."""
    tensors = make_tensors(PLAIN)
    expected, _ = call(tensors, softmax_scale=0.25, softcap=3.0, window=(7, 0))
    found, _ = call(tensors, softmax_scale=np.float64(0.25), softcap=np.float64(3), window=[7, 0])
    assert torch.equal(found, expected)
    assert explain_with_kv_cache(**tensors, window=[7, 0]).problem.window == (7, -1)


def test_new_keys_are_written_where_no_window_reaches():
    """So their pages are checked."""
    tensors = make_tensors(CacheCase("new", lengths=(37,), new=20, page_size=4))
    tensors["page_table"][0, 37 // 4] = -1
    with pytest.raises(InputError, match=rf"page_table\[0, {37 // 4}\] must be"):
        call(tensors, window=(3, -1))


def test_more_queries_than_new_keys_need_rows_for_their_positions(monkeypatch):
    tensors = make_tensors(CacheCase("rows", lengths=(30,), padding=(7,), new=1, seqlen_q=4, rotary_dim=32))
    tensors["rotary_cos"], tensors["rotary_sin"] = tensors["rotary_cos"][:33], tensors["rotary_sin"][:33]
    monkeypatch.setenv("FLASHMOE_CHECK", "1")
    with pytest.raises(InputError, match="rotary_cos must have a row for position 33 of sequence 0, got 33 rows"):
        call(tensors, causal=True)


@pytest.mark.parametrize(
    ("options", "steps"), [({"causal": True}, 1), ({"window": (9, -1)}, 1), ({"window": (9, 9)}, 1), ({}, 0)], ids=str
)
@pytest.mark.parametrize("padding", [0, 2])
def test_queries_are_rotated_by_their_positions_unless_all_see_all_keys(options, steps, padding):
    """As FlashAttention does, which counts left padding; by complex numbers, which the reference does not use."""
    q, new, cache = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 1, 8), torch.randn(1, 9, 2, 8)
    angles = torch.rand(9, 4)

    def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        product = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(1, 4), angles[positions])
        return torch.cat((product.real, product.imag), -1)

    k_cache, v_cache = cache.clone(), cache.clone()
    k_cache[0, 5], v_cache[0, 5] = turned(new, torch.tensor([5]))[0, :, 0], new[0, :, 0]
    by_hand = turned(q, 5 + steps * torch.arange(3))
    options = {**options, "leftpad_k": torch.tensor([padding], dtype=torch.int32)}
    expected = flash_attention_with_kv_cache(by_hand, k_cache, v_cache, cache_seqlens=6, **options)
    tables: dict[str, Any] = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    lengths = torch.tensor([5], dtype=torch.int32)
    found = flash_attention_with_kv_cache(q, cache, cache.clone(), new, new, cache_seqlens=lengths, **tables, **options)
    torch.testing.assert_close(found, expected)


def test_keys_are_appended_to_an_axis_of_one_that_has_no_stride():
    """Such an axis is never stepped along; an expanded one would be written more than once, and is refused."""
    q, new, cache = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8), torch.randn(9, 2, 8)
    lengths = torch.tensor([5], dtype=torch.int32)
    k_cache, v_cache = (cache.clone().as_strided((1, 9, 2, 8), (0, 16, 8, 1)) for _ in range(2))
    found = flash_attention_with_kv_cache(q, k_cache, v_cache, new, new, cache_seqlens=lengths)
    assert torch.equal(k_cache[0, 5], new[0, :, 0])
    plain = cache[None].clone(), cache[None].clone()
    assert torch.equal(found, flash_attention_with_kv_cache(q, *plain, new, new, cache_seqlens=lengths))


def test_an_empty_cache_is_a_length_of_0():
    q, new, cache = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8), torch.full((1, 9, 2, 8), torch.nan)
    found = flash_attention_with_kv_cache(q, cache, cache.clone(), new, new, cache_seqlens=0)
    torch.testing.assert_close(found, new)


def test_forced_kernels_never_fall_back():
    tensors = make_tensors(PLAIN)
    with pytest.raises(UnsupportedError, match=r"decode_triton needs an NVIDIA GPU(.|\n)*TRITON_INTERPRET=1"):
        call(tensors, kernel="decode_triton")


def test_requires_grad_is_refused():
    tensors = make_tensors(PLAIN)
    tensors["q"].requires_grad_()
    with pytest.raises(UnsupportedError, match="there is no backward with a cache, and gradients are required of q"):
        call(tensors)
    with torch.no_grad():
        assert call(tensors)[0].shape == (2, 4, 1, 32)


def test_parameters_are_tensors(monkeypatch):
    """Sinks of models are some: the call takes no way that others do not."""
    tensors = make_tensors(CacheCase("sinks", lengths=(37, 5), sinks=True))
    expected, _ = call(tensors)
    monkeypatch.setattr("flashmoe_science.attention.decode.api._call_operator", None)
    tensors["sinks"] = torch.nn.Parameter(tensors["sinks"])
    with torch.no_grad():
        assert torch.equal(call(tensors)[0], expected)


def test_output_keeps_the_order_of_axes_of_q():
    tensors = make_tensors(CacheCase("order", lengths=(37, 5), seqlen_q=3, options={}))
    expected, _ = call(tensors)
    tensors["q"] = tensors["q"].transpose(1, 2).contiguous().transpose(1, 2)
    o, _ = call(tensors)
    assert o.stride() == tensors["q"].stride()
    assert torch.equal(o, expected)


def test_values_that_are_columns_of_the_keys_are_known_by_their_memory():
    """And not by their shape: the same call with a copy is another one."""
    case = CacheCase("shared", lengths=(37,), heads_kv=1, head_dim=48, head_dim_v=32, shared=True)
    tensors = make_tensors(case)
    copy = {**tensors, "v_cache": torch.empty_strided(tensors["v_cache"].shape, tensors["v_cache"].stride()).half()}
    copy["v_cache"].copy_(tensors["v_cache"])
    assert explain_with_kv_cache(**tensors).problem.shared_kv
    assert not explain_with_kv_cache(**copy).problem.shared_kv
    parameter = torch.nn.Parameter(tensors["k_cache"], requires_grad=False)
    assert explain_with_kv_cache(tensors["q"], parameter, parameter[..., :32]).problem.shared_kv
    expected, _ = call(tensors)
    assert torch.equal(call(copy)[0], expected)
    copy["v_cache"].fill_(1.0)
    torch.testing.assert_close(call(copy)[0], torch.ones_like(expected))


def test_a_bias_is_that_of_attention():
    """The most negative number hides a key behind all others; where all have it, they are equal."""
    case = CacheCase("bias", lengths=(40, 40), capacity=40, heads=4, heads_kv=4, seqlen_q=2, dtype="fp32", full=True)
    tensors = make_tensors(case)
    bias = torch.randn(2, 1, 2, 40)
    bias[0, :, :, 3:] = torch.finfo(torch.float32).min
    bias[1, :, 1] = torch.finfo(torch.float32).min
    found, found_lse = call({**tensors, "bias": bias})
    k, v = (tensors[name].transpose(1, 2) for name in ("k_cache", "v_cache"))
    expected, expected_lse = flash_attention(tensors["q"], k, v, bias=bias, return_lse=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_lse, expected_lse)
    torch.testing.assert_close(found[1, :, 1], v[1].mean(1))
    for changed_bias in (bias + torch.arange(40), bias.half().float()):
        assert not torch.equal(call({**tensors, "bias": changed_bias})[0], found)


def test_what_only_a_forward_pass_in_one_dtype_does():
    """Autocast rounds no product of fp32, and tangents, which no kernel carries on, are refused."""
    tensors = make_tensors(dataclasses.replace(PLAIN, dtype="fp32"))
    expected, _ = call(tensors)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = call(tensors)
    assert torch.equal(found, expected)
    with torch.autograd.forward_ad.dual_level():
        tensors["q"] = torch.autograd.forward_ad.make_dual(tensors["q"], torch.ones_like(tensors["q"]))
        with pytest.raises(UnsupportedError, match="an input has a forward-mode tangent"):
            call(tensors)


def test_prepared_calls_see_every_change():
    """Equal shapes with other options are other calls; other lengths at the same address are the same one."""
    tensors = make_tensors(dataclasses.replace(PLAIN, seqlen_q=2))
    o, _ = call(tensors)
    for options in ({"causal": True}, {"window": (3, -1)}, {"softcap": 1.0}, {"softmax_scale": 2.0}):
        assert not torch.equal(call(tensors, **options)[0], o)
    given: dict[str, Any] = dict(tensors)
    assert flash_attention_with_kv_cache(**given).shape == o.shape
    tensors["cache_seqlens"][0] = 5
    assert not torch.equal(call(tensors)[0], o)


@pytest.mark.parametrize("why", ["append-paged", "features", "rotary", "bias", "bias-shared", "fp8-token", "fp8-head"])
def test_compile_and_opcheck(why):
    """The registered operators trace whole graphs, declare what they write, and their fake implementations fit."""
    case = next(case for case in CACHE_CASES if case.why == why)
    tensors = make_tensors(dataclasses.replace(case, dtype="fp32"))
    # opcheck compares caches before and after, and NaN is unlike itself.
    for name in {"k_cache", "v_cache", "bias", "k_scale", "v_scale"} & set(tensors):
        whole = tensors[name].float().nan_to_num(neginf=-torch.inf)
        tensors[name].copy_(whole)
    expected_tensors = clone(tensors)
    expected = call(expected_tensors, **case.options)
    compiled_tensors = clone(tensors)
    compiled = torch.compile(lambda given: call(given, **case.options), fullgraph=True, backend="eager")
    for got, right in zip(compiled(compiled_tensors), expected, strict=True):
        torch.testing.assert_close(got, right)
    for name in {"k_cache", "v_cache", "k_scale", "v_scale"} & set(tensors):
        assert torch.equal(compiled_tensors[name].float(), expected_tensors[name].float())
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not case.fp8:  # torch compares no fp8 tensors before and after
        checks.append("test_schema")
    window = case.options.get("window", (-1, -1))
    tail = (
        *(tensors.get(name) for name in ("sinks", "alibi", "bias", "k_scale", "v_scale")),
        case.options.get("causal", False), *window, case.options.get("softcap", 0.0), None, 0, False, "auto",
    )  # fmt: skip
    optional = [tensors.get(name) for name in ("page_table", "cache_batch_idx", "leftpad_k")]
    head = [tensors[name] for name in ("q", "k_cache", "v_cache")]
    if case.new:
        arguments = (
            *head, tensors["k"], tensors["v"], tensors["cache_seqlens"], *optional, tensors.get("rotary_cos"),
            tensors.get("rotary_sin"), False, *tail,
        )  # fmt: skip
        operator = torch.ops.flashmoe_science.attention_append_kv_cache
        torch.library.opcheck(operator, arguments, test_utils=tuple(checks))
    else:
        arguments = (*head, tensors["cache_seqlens"], *optional, *tail)
        torch.library.opcheck(torch.ops.flashmoe_science.attention_with_kv_cache, arguments, test_utils=tuple(checks))


@pytest.mark.parametrize("splits", [(2, False), (0, True)], ids=["num-splits", "batch-invariant"])
@pytest.mark.parametrize("why", ["features", "fp8-token"])
def test_opcheck_of_calls_that_promise_bits(why, splits):
    case = next(case for case in CACHE_CASES if case.why == why)
    tensors = make_tensors(dataclasses.replace(case, new=0, rotary_dim=0))
    for name in {"k_cache", "v_cache", "k_scale", "v_scale"} & set(tensors):
        tensors[name].copy_(tensors[name].float().nan_to_num())
    arguments = (
        *(tensors[name] for name in ("q", "k_cache", "v_cache", "cache_seqlens")),
        *(tensors.get(name) for name in ("page_table", "cache_batch_idx", "leftpad_k")),
        *(tensors.get(name) for name in ("sinks", "alibi", "bias", "k_scale", "v_scale")),
        True, -1, -1, 0.0, None, *splits, "auto",
    )  # fmt: skip
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not case.fp8:  # torch compares no fp8 tensors before and after
        checks.append("test_schema")
    torch.library.opcheck(torch.ops.flashmoe_science.attention_with_kv_cache, arguments, test_utils=tuple(checks))


BITS = [
    CacheCase("bits-invariant", lengths=(300, 20, 0), capacity=320, page_size=16, options={"batch_invariant": True}),
    CacheCase("bits-splits", lengths=(60, 20), page_size=4, options={"num_splits": 3}),
    CacheCase(
        "bits-fp8", lengths=(300, 20), capacity=320, page_size=16, fp8="token", options={"batch_invariant": True}
    ),
    CacheCase("bits-fp8-splits", lengths=(90, 20), capacity=96, page_size=8, fp8="head", options={"num_splits": 3}),
    CacheCase(
        "bits-d512",
        lengths=(150, 20),
        capacity=160,
        page_size=16,
        heads_kv=1,
        head_dim=512,
        options={"batch_invariant": True},
    ),
]
# A maximum between 2**26 and 2**28 is a multiple of 8 or 16: less the headroom of P, 14, it would be rounded.
HUGE = [
    CacheCase("huge-scores", lengths=(37, 9), seqlen_q=2, q_size=3e3, fp8="all", options={"softmax_scale": 2.0**12})
]
NOT_FINITE = [
    CacheCase(f"not-finite-bias-{dtype}", lengths=(50, 11), seqlen_q=3, bias=dtype, options={"num_splits": splits})
    for dtype, splits in (("fp32", 2), ("bf16", 1))
]


# Keys appended and rotated, features, a bias, fp32, keys split and merged, many rows of a page, values in the keys.
USUAL = (
    "append-paged", "rotary", "rotary-pairs", "features", "bias-across", "fp32-unequal-widths", "splits",
    "many-rows-paged", "shared", "bits-invariant",
    "lengths", "page-3", "batch-idx", "leftpad-paged", "append-rows", "append-too-much", "window",
    "more-rows-than-keys", "sinks-no-keys", "merge-in-steps", "many-sequences", "no-capacity",
    "fp8-head", "fp8-token-rows", "fp8-odd-columns", "fp8-large-queries", "fp8-small-queries", "huge-scores",
    "fp8-shared-token", "bits-fp8", "bits-d512",
)  # fmt: skip


@pytest.mark.triton
@pytest.mark.parametrize("case", all_but(CACHE_CASES + EMPTY_CACHE_CASES + BITS + HUGE + NOT_FINITE, *USUAL), ids=str)
def test_kernels_interpreted(case, interpreted):
    """The Triton kernels themselves, run by Triton's interpreter in a process of its own."""
    interpreted(case)


@pytest.fixture(scope="module")
def interpreted():
    """Return a check of one case in a child process, which Triton's interpreter needs (it is chosen at import)."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "tests.attention.interpreted_cache"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip

    def check(case: CacheCase) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(repr(case) + "\n")
        child.stdin.flush()
        answer = child.stdout.readline().strip()
        assert answer == "right", answer

    yield check
    child.communicate(timeout=30)
