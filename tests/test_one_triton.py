"""Which cases run with the newest Triton alone: marked as asked, and what is left shows every kernel and every way."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flashmoe_science.moe.plan import COMBINE_UNROLL, MAX_PAIRS_SORTED_AT_ONCE
from flashmoe_science.moe.problem import ACTIVATIONS

from .one_triton import all_but, all_but_some_with

TESTS = Path(__file__).parent
SOURCES = TESTS.parent / "src" / "flashmoe_science"


def marked(cases) -> list[bool]:
    return [bool(getattr(case, "marks", ())) for case in cases]


def test_all_but_those_that_are_named_are_marked():
    cases = all_but(["one-row", "one-key", "causal"], "one-key", "causal")
    assert marked(cases) == [True, False, False]
    assert (cases[0].values, cases[1:]) == (("one-row",), ["one-key", "causal"])
    with pytest.raises(AssertionError, match="one-column: no case has this name"):
        all_but(["one-row"], "one-column")


def test_a_name_is_the_whole_name():
    """Neither the end of another one nor its beginning."""
    cases = [SimpleNamespace(why=why) for why in ("dropout", "all-at-once", "dropout-all-at-once")]
    assert marked(all_but(cases, "all-at-once")) == [True, False, True]
    assert marked(all_but(cases, "dropout")) == [False, True, True]
    with pytest.raises(AssertionError, match="all: no case has this name"):
        all_but(cases, "all")


def test_all_but_some_with_every_property_are_marked():
    """Values of several parameters stay apart. A case among the others moves the choice and loses no property."""
    assert marked(all_but_some_with(["a", "ab", "c", "b", "c"], set)) == [True, False, False, True, True]
    assert marked(all_but_some_with(["abc", "a", "ab", "c", "b", "c"], set)) == [False, *[True] * 5]
    assert marked(all_but_some_with(["", ""], set)) == [True, True]
    cases = all_but_some_with([(1, 2), (3, 2), (1, 4)], lambda case: case)
    assert marked(cases) == [False, False, False]
    assert all_but_some_with([(1, 2), (1, 2)], lambda case: case)[1].values == (1, 2)


ALL = frozenset({80, 86, 89, 90, 100, 120})
HOPPER = frozenset({90})
FORWARD, FEATURES, VARLEN, PAGED, BACKWARD, CACHE, ORDER = (
    f"attention/{name}"
    for name in (
        "test_forward_cpu.py::test_streaming_kernel_interpreted",
        "test_features_cpu.py::test_streaming_kernel_interpreted",
        "test_varlen_cpu.py::test_streaming_kernel_interpreted",
        "test_paged_cpu.py::test_streaming_kernel_interpreted",
        "test_backward_cpu.py::test_kernels_interpreted",
        "test_cache_cpu.py::test_kernels_interpreted",
        "test_features_hopper.py::test_sequences_are_ordered_by_their_keys",
    )
)
PASSES = "attention/test_backward_sm90.py::test_what_is_written_in_triton_is_interpreted"
MOE, MOE_BACKWARD = (f"moe/test_{which}_cpu.py::test_every_case" for which in ("forward", "backward"))
ROUTING, SORTING = (f"moe/test_forward_cpu.py::test_{which}" for which in ("routing", "sorting"))
ROWS, FEATURED_ROWS, SHORT_ROWS, MERGE = (
    f"attention/test_tables.py::{name}"
    for name in (
        "test_every_row_of_the_tables_compiles",
        "test_rows_with_features_compile",
        "test_every_tile_of_the_short_kernel_compiles",
        "test_the_merge_compiles",
    )
)
BACKWARD_ROWS = "attention/test_backward_tables.py::test_every_row_of_the_tables_compiles"
DECODE_ROWS = "attention/test_decode_tables.py::test_every_tile_compiles"
DECODE_ENDS = "attention/test_decode_tables.py::test_the_merge_and_the_append_compile"
HOPPER_DECODE = "attention/test_decode_sm90.py::test_it_compiles"
HOPPER_FORWARD = "attention/test_hopper.py::test_table_rows_compile"
HOPPER_FEATURES = "attention/test_features_hopper.py::test_kernels_compile"
HOPPER_BACKWARD = "attention/test_backward_sm90.py::test_kernels_compile"
MOE_ROWS, MOE_BACKWARD_ROWS, MOE_FEW, MOE_ENDS, MOE_HOPPER, MOE_HOPPER_BACKWARD, MOE_HOPPER_ACTIVATION = (
    f"moe/test_tables.py::{name}"
    for name in (
        "test_every_tile_compiles",
        "test_every_tile_of_gradients_compiles",
        "test_few_pairs_and_one_token_compile",
        "test_sorting_and_routing_compile",
        "test_the_products_for_hopper_compile",
        "test_gradients_for_hopper_compile",
        "test_the_gradient_of_the_activation_for_hopper_compiles",
    )
)
# The test that compiles a kernel, for which architectures, and the one that interprets it; Gluon's cannot be.
KERNELS: dict[str, tuple[str, frozenset[int], str]] = {
    "_forward_kernel": (ROWS, ALL, FORWARD),
    "_merge_partials_kernel": (MERGE, ALL, FEATURES),
    "_forward_short_kernel": (SHORT_ROWS, ALL, ""),
    "_forward_sm90_kernel": (HOPPER_FORWARD, HOPPER, ""),
    "_forward_features_sm90_kernel": (HOPPER_FEATURES, HOPPER, ""),
    "_order_sequences_kernel": (HOPPER_FEATURES, HOPPER, ORDER),
    **dict.fromkeys(("_append_kernel", "_merge_splits_kernel"), (DECODE_ENDS, ALL, CACHE)),
    "_decode_kernel": (DECODE_ROWS, ALL, CACHE),
    "_decode_sm90_kernel": (HOPPER_DECODE, HOPPER, ""),
    **dict.fromkeys(
        ("_delta_kernel", "_backward_kv_kernel", "_backward_q_kernel", "_backward_bias_kernel"),
        (BACKWARD_ROWS, ALL, BACKWARD),
    ),
    **dict.fromkeys(
        ("_backward_sm90_kernel", "_backward_192_sm90_kernel", "_backward_wide_sm90_kernel"),
        (HOPPER_BACKWARD, HOPPER, ""),
    ),
    **dict.fromkeys(("_prepare_backward_kernel", "_finish_dq_kernel"), (HOPPER_BACKWARD, HOPPER, PASSES)),
    **dict.fromkeys(("_gate_up_kernel", "_down_kernel"), (MOE_ROWS, ALL, MOE)),
    **dict.fromkeys(("_gemv_gate_up_kernel", "_gemv_down_kernel"), (MOE_FEW, ALL, MOE)),
    **dict.fromkeys(
        ("_sort_few_kernel", "_count_kernel", "_sum_chunks_kernel", "_place_kernel"), (MOE_ENDS, ALL, SORTING)
    ),
    "_combine_kernel": (MOE_ENDS, ALL, MOE),
    **dict.fromkeys(("_route_kernel", "_route_backward_kernel"), (MOE_ENDS, ALL, ROUTING)),
    **dict.fromkeys(
        (
            "_activation_backward_kernel",
            "_bias_gradient_kernel",
            "_routing_gradient_kernel",
            "_weight_gradient_kernel",
        ),
        (MOE_BACKWARD_ROWS, ALL, MOE_BACKWARD),
    ),
    "_grouped_sm90_kernel": (MOE_HOPPER, HOPPER, ""),
    "_weights_sm90_kernel": (MOE_HOPPER_BACKWARD, HOPPER, ""),
    "_activation_sm90_kernel": (MOE_HOPPER_ACTIVATION, HOPPER, ""),
}


def with_and_without(feature: str, *ways: str) -> set[str]:
    return {f"{way}, {word}{feature}" for way in ways for word in ("", "no ")}


BASE = ("full", "causal", "fp16", "fp32")  # the interpreter multiplies bf16 wrongly
FEATURE_NAMES = ("window", "softcap", "sinks", "alibi")
MOE_KERNELS = ("gemv_triton", "few_triton", "grouped_triton")
# Ways that the interpreter must see with every Triton.
WAYS: dict[str, set[str]] = {
    FORWARD: {*BASE, "grouped heads"},
    FEATURES: {
        *BASE, *FEATURE_NAMES, "bias", "full window", "full bias", "grouped heads",
        *with_and_without("dropout", *BASE, "splits", "all"),
    },
    VARLEN: {
        *(f"packed {way}" for way in (*BASE, *FEATURE_NAMES, "bias", "grouped heads")), "packed full window",
        "seqused_q", "seqused_k",
        *with_and_without("dropout", "packed full", "packed causal"),
    },
    PAGED: {*(f"packed {way}" for way in (*BASE, *FEATURE_NAMES, "bias", "grouped heads")), "seqused_q", "seqused_k"},
    BACKWARD: {
        *BASE, *FEATURE_NAMES, "bias", "through_lse", "plain full", "plain causal", "grouped heads",
        *with_and_without("dropout", *BASE, "wide", "all"),
        *(f"packed {way}" for way in (*BASE, *FEATURE_NAMES, "bias", "wide", "grouped heads")), "packed full window",
        "seqused_q", "seqused_k",
        *with_and_without("dropout", "packed full", "packed causal"),
    },
    CACHE: {
        *BASE, "new", "rotary halves", "rotary_interleaved", "padding", "shared", "page_size", "many rows",
        "batch_invariant", "splits alone", *with_and_without("bias", *FEATURE_NAMES),
    },
    MOE: {
        *ACTIVATIONS, "fp16", "fp32", *MOE_KERNELS, *(f"{kernel}, ids of none" for kernel in MOE_KERNELS),
        "interleaved", "bias", "shared", "weighted", "many experts a token",
    },
    MOE_BACKWARD: {*ACTIVATIONS, "fp16", "fp32", "interleaved", "bias", "shared", "weighted", "auto, ids of none"},
}  # fmt: skip


def ways_of_attention(case: Any) -> set[str]:
    """Return what a case asks of a kernel; of packed sequences it is asked of another variant of the kernel."""
    through_lse = {"through_lse"} if getattr(case, "through_lse", False) else set()
    case = getattr(case, "case", case)  # of gradients
    packed = "packed " if hasattr(case, "seqlens_q") else ""
    none = {"window": (-1, -1), "softcap": 0.0, "sinks": "", "alibi": "", "bias": "", "dropout": 0.0}
    features = {name for name, value in none.items() if getattr(case, name, value) != value}
    mask = "causal" if case.causal else "full"
    are_so = {
        "splits": getattr(case, "splits", 1) > 1,
        "wide": max(case.head_dim, case.head_dim_v) > 128,
        "all": features >= {*none} - {"dropout"},
        "grouped heads": case.heads > case.heads_kv,
    }
    kinds = {mask, case.dtype, *(name for name, is_so in are_so.items() if is_so)}
    dropout = "dropout" if "dropout" in features else "no dropout"
    found = {*kinds, *features, *(f"{kind}, {dropout}" for kind in kinds), *(f"{mask} {name}" for name in features)}
    found |= set() if features else {f"plain {mask}"}
    return (
        {packed + way for way in found} | through_lse | {n for n in ("seqused_q", "seqused_k") if getattr(case, n, 0)}
    )


def ways_of_cache(case: Any) -> set[str]:
    """Return the same of a call with a K/V cache; a rotation is of pairs next to one another, or of two halves."""
    given = {
        name for name in ("new", "padding", "shared", "page_size", "sinks", "alibi", "bias") if getattr(case, name)
    }
    asked = {name for name, value in case.options.items() if value not in (False, (-1, -1), 0.0)}
    features = (given | asked) & {*FEATURE_NAMES}
    are_so = {
        "causal": "causal" in asked and case.seqlen_q > 1,
        "rotary halves": case.rotary_dim > 0 and "rotary_interleaved" not in asked,
        "many rows": case.seqlen_q * case.heads // case.heads_kv > 16,
        "splits alone": asked == {"num_splits"} and not given,
    }
    found = {name for name, is_so in are_so.items() if is_so} | ({"full"} if "causal" not in asked else set())
    bias = "bias" if case.bias else "no bias"
    return found | given | (asked - {"causal"}) | {case.dtype, *(f"{name}, {bias}" for name in features)}


def ways_of_experts(case: Any) -> set[str]:
    flags = {name for name in ("interleaved", "bias", "shared", "weighted") if getattr(case, name)}
    many = {"many experts a token"} if case.top_k > COMBINE_UNROLL else set()
    return {case.activation, case.dtype, case.kernel, f"{case.kernel}, ids of {case.ids}"} | flags | many


@pytest.fixture(scope="module")
def left(request) -> dict[str, list[pytest.Function]]:
    """Return, test by test, what runs with the oldest Triton; collected anew, whatever tests were asked for."""
    places = {place for test, _, interpreting in KERNELS.values() for place in (test, interpreting) if place}
    places |= {*WAYS, FEATURED_ROWS}
    found: dict[str, list[pytest.Function]] = {place: [] for place in places}
    for name in sorted({place.partition("::")[0] for place in places}):
        for item in pytest.Module.from_parent(request.session, path=TESTS / name).collect():
            place = f"{name}::{getattr(item, 'originalname', '')}"
            marks = {mark.name for mark in item.iter_markers()}
            if place in found and "triton" in marks and not marks & {"one_triton", "gpu"}:
                assert isinstance(item, pytest.Function)
                found[place].append(item)
    return found


def parameters(item: pytest.Function) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def launched(item: pytest.Function, test: str) -> tuple[int, set[str]] | None:
    """Return architecture and kernels of the plan that a test compiles, where its parameters say it all."""
    given = parameters(item)
    plan: Any = item.module.make_plan(**given) if test == BACKWARD_ROWS else next(iter(given.values()), None)
    plan = plan.plan() if hasattr(plan, "plan") else plan
    return (plan.arch, {launch.pattern for launch in plan.launches}) if hasattr(plan, "launches") else None


def architectures(item: pytest.Function, test: str, kernel: str) -> set[int]:
    planned, given = launched(item, test), parameters(item)
    if planned:
        return {planned[0]} if kernel in planned[1] else set()
    if kernel in ("_backward_sm90_kernel", "_backward_192_sm90_kernel", "_backward_wide_sm90_kernel"):
        widest = "" if max(given["head_dim"], given["head_dim_v"]) <= 128 else "wide_"
        if widest and given["head_dim"] <= 192 and given["head_dim_v"] <= 128:
            widest = "192_"
        return {90} if kernel == f"_backward_{widest}sm90_kernel" else set()
    if kernel == "_order_sequences_kernel":
        return {90} if item.module.COMPILED[given["name"]].get("packed") else set()
    return {given["row"].arch if "row" in given else given.get("arch", 90)}


def test_every_kernel_is_listed():
    sources = [path for folder in ("attention", "moe") for path in sorted((SOURCES / folder).glob("*.py"))]
    kernels: dict[str, Path] = {}
    for path in sources:
        for name in re.findall(
            r"^@(?:triton|gluon)\.jit.*\ndef (\w+_kernel)\(", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            kernels[name] = path
    assert set(kernels) == set(KERNELS)
    assert {name for name, path in kernels.items() if path.stem.endswith("_triton")} == {
        name for name, (_, _, interpreting) in KERNELS.items() if interpreting
    }


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_oldest_triton_compiles_every_kernel_for_every_architecture(kernel, left):
    test, expected, _ = KERNELS[kernel]
    assert {arch for item in left[test] for arch in architectures(item, test, kernel)} == expected


@pytest.mark.parametrize("kernel", [kernel for kernel, (_, _, interpreting) in KERNELS.items() if interpreting])
def test_the_oldest_triton_interprets_every_kernel_in_triton(kernel, left):
    assert left[KERNELS[kernel][2]]


def test_the_oldest_triton_interprets_both_ways_of_sorting(left):
    pairs = [parameters(item)["pairs"] for item in left[SORTING]]
    assert min(pairs) <= MAX_PAIRS_SORTED_AT_ONCE < max(pairs)


@pytest.mark.parametrize("test", WAYS)
def test_the_oldest_triton_interprets_every_way(test, left):
    ways = ways_of_cache if test == CACHE else ways_of_experts if test.startswith("moe/") else ways_of_attention
    found = {way for item in left[test] for case in parameters(item).values() for way in ways(case)}
    assert WAYS[test] - found == set()


def test_the_oldest_triton_compiles_every_feature_and_both_masks(left):
    """Every feature where the newest compiles it; both masks of both widths of elements for every architecture."""
    module = left[FEATURED_ROWS][0].module
    left_plans = [parameters(item)["plan"] for item in left[FEATURED_ROWS]]
    places, expected = (
        {(plan.arch, feature) for plan in plans for feature in plan.problem.features}
        for plans in (left_plans, [*module.FEATURED_PLANS, *module.DROPPING_PLANS])
    )
    assert places == expected
    assert {feature for _, feature in places} == {*module.FEATURES_OF_TABLES, "dropout"}
    masks = {(feature, plan.problem.causal) for plan in left_plans for feature in plan.problem.features}
    assert masks >= set(itertools.product(module.FEATURES_OF_TABLES, (False, True)))
    rows = [parameters(item)["row"] for item in left[ROWS]]
    kinds = {(row.arch, row.dtype, row.plan().problem.causal) for row in rows}
    assert kinds == set(itertools.product(ALL, ("fp16", "fp32"), (False, True)))
    assert {row.arch for row in rows if row.way == "bf16"} == ALL
