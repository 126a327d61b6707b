"""Context parallel attention gives what one process gives: outputs, gradients, bits where they are promised, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from flashmoe_science.distributed import ContextParallel
from flashmoe_science.distributed.exchange import _parts_without, sum_ranks_into
from flashmoe_science.distributed.layout import zigzag_layout

from .ranks import fake_ranks, run_ranks

_MODULE = "tests.distributed.context_parallel_cases"
_ERRORS = "tests.distributed.context_parallel_errors"


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    ranks: int = request.param
    return run_ranks(
        *((_ERRORS, "with_errors") if ranks == 2 else (_MODULE, "all_cases")),
        ranks,
        tmp_path_factory.mktemp(f"ranks{ranks}"),
    )


def without_errors(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{case: tensors for case, tensors in cases.items() if case != "errors"} for cases in found]


def test_every_strategy_gives_what_one_process_gives(found: list[dict[str, Any]]) -> None:
    for rank, cases in enumerate(without_errors(found)):
        assert len(cases) > 25
        for case, tensors in cases.items():
            worst = {name: error for name, (error, _) in tensors.items() if error > 2e-5}
            assert not worst, f"rank {rank}, {case}: {worst}"


def test_bits_are_those_of_one_process_where_promised(found: list[dict[str, Any]]) -> None:
    for cases in without_errors(found):
        for case, tensors in cases.items():
            if case.startswith("heads"):
                assert all(same for name, (_, same) in tensors.items() if name != "dsinks"), case
            if case.endswith(("unshard", "later plans", "keys travel")):
                assert tensors["x"][1], case


def test_compiled_calls_are_one_graph_with_the_bits_of_eager_ones(tmp_path: Path) -> None:
    for cases in run_ranks(_MODULE, "compiled", 2, tmp_path):
        assert len(cases) == 11
        assert all(cases.values()), cases


@pytest.fixture(scope="module")
def in_two_dimensions(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_ERRORS, "two_dimensions_with_errors", 4, tmp_path_factory.mktemp("two"))


def test_heads_and_gather_give_what_one_process_gives(in_two_dimensions: list[dict[str, Any]]) -> None:
    for rank, cases in enumerate(without_errors(in_two_dimensions)):
        assert len(cases) > 25
        for case, tensors in cases.items():
            worst = {name: error for name, (error, _) in tensors.items() if error > 2e-5}
            assert not worst, f"rank {rank}, {case}: {worst}"
        for case in ("later plans", "unshard", "unshard, packed", "int16, unshard", "no tokens, unshard"):
            assert cases[case]["x"][1], case


def test_heads_and_gather_compiled_are_one_graph_with_the_bits_of_eager_calls(tmp_path: Path) -> None:
    for cases in run_ranks(_MODULE, "compiled_in_two_dimensions", 4, tmp_path):
        assert len(cases) == 10
        assert all(cases.values()), cases


def test_errors_in_two_dimensions_are_raised_on_all_ranks(in_two_dimensions: list[dict[str, Any]]) -> None:
    first, *others = (cases["errors"] for cases in in_two_dimensions)
    assert all(other == first for other in others)
    for at in range(4):
        assert f"rank {at}: v must have the tokens of q, 8, got 5" in first["bad on a rank"][at]
        different = at or 1  # rank 0 is what all others are compared with
        assert "rank 0 has heads+gather: q [1, 4, 8, 16] float32, k" in first["other options"][at]
        assert f"and rank {different} has heads+gather: q" in first["other options"][at]
    expected = {
        "other lengths": "and rank 3 has a plan of 2 documents, 16 tokens",
        "heads": 'heads must be multiples of the 2 ranks for strategy="heads+gather"',
        "alibi": 'alibi needs causal=True with strategy="heads+gather"',
        "window": 'a window of packed documents needs causal=True with strategy="heads+gather"',
        "plan of the other": "the plan is of another strategy than heads+gather",
        "plan of another shape": "members=(0, 1, 2, 3), parts=1), got Place(rank=0, members=(0, 1, 2, 3), parts=2)",
        "tokens": "a multiple of 4, the number of ranks, got 42",
        "lengths": "append a document of padding, to 44 tokens in all",
        "one dimension": 'mesh must have two dimensions for strategy="heads+gather", got 1',
        "no strategy": "mesh must have one dimension, got 2",
        "order": "ranks of a mesh must ascend in all dimensions, got [[0, 3], [2, 1]]",
        "transport": 'transport="symmetric" needs CUDA',
    }
    for name, text in expected.items():
        assert text in first[name], name
    assert first["unlike hosts"] == ["Collectives", 'transport="symmetric" needs GPUs that read one another']
    # Ranks 0 and 1 have the outer chunks of the zigzag, 2 and 3 the inner ones; heads divide each in two.
    assert first["layout"] == [[[0, 4]], [[12, 16]], [[4, 8]], [[8, 12]]]
    for text in (
        "strategy heads+gather, by heads: 2 ranks divide 4 K/V heads",
        "keys are gathered by collectives of the group's backend, gloo",
        "8 of 16 tokens a rank, 4 query heads, 4 K/V heads",
        "by gather: 2 ranks gather K and V",
        "16 of 32 tokens a rank, 2 query heads, 2 K/V heads",
    ):
        assert text in first["explained"], text
    assert "by gather: ranks have whole documents where they can" in first["documents explained"]
    assert first["after all"] == 0


def test_what_differs_between_two_calls_is_said_alone() -> None:
    one = "heads: q [1, 4, 8] float32 with a gradient, k [1, 2, 8] float32, causal=False, window=(-1, -1)"
    other = one.replace("causal=False", "causal=True").replace("k [1, 2, 8]", "k [1, 2, 4]")
    assert _parts_without(one, other) == "k [1, 2, 8] float32, causal=False"
    assert _parts_without(other, one) == "k [1, 2, 4] float32, causal=True"
    assert _parts_without(one, one) == ""


@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (2, 2), (2, 3), (3, 5), (4, 8)])
def test_parts_of_a_zigzag_hold_together_what_one_rank_holds(ranks: int, parts: int) -> None:
    tokens = 2 * ranks * parts * 3
    whole, split = zigzag_layout(tokens, ranks), zigzag_layout(tokens, ranks, parts)
    assert split.ranks == ranks * parts
    held = [[token for span in spans for token in range(*span)] for spans in split.held]
    assert {len(each) for each in held} == {tokens // ranks // parts}
    for rank, spans in enumerate(whole.held):
        together = [token for part in range(parts) for token in held[rank * parts + part]]
        assert together == [token for span in spans for token in range(*span)]


def test_errors_name_the_rank_and_are_raised_on_all(found: list[dict[str, Any]]) -> None:
    if len(found) > 2:
        pytest.skip("two ranks make the calls that are wrong")
    first, second = (cases["errors"] for cases in found)
    assert first == second
    expected = {
        "other options": "all ranks must make the same call, but rank 0 has heads",
        "other shapes": "rank 1 has gather: q [1, 4, 6, 16]",
        "bad on one rank": "rank 0: v must have the tokens of q, 8, got 5",
        "heads": "heads must be multiples of the 2 ranks",
        "sinks": "sinks must be [H] = [4], got [3]",
        "alibi": 'alibi needs causal=True with strategy="gather"',
        "window": "a window of packed documents needs causal=True",
        "plan": "the plan is of 16 tokens and 2 ranks, got 8 and 2",
        "plan of the other": "the plan is of another strategy than heads",
        "plan of the other, too": "the plan is of another strategy than gather",
        "dtypes": "k must have the dtype and device of q",
        "gradient of alibi": "alibi must not require grad",
        "sinks of one rank": "rank 1: sinks must be a torch.Tensor or None, got list",
        "twice": "differentiate twice",
        "tokens": "pad the sequence to 8 tokens",
        "lengths": "append a document of padding, to 18 tokens in all",
        "no length": "rank 1: lengths must be integers above 0",
        "other lengths": "rank 0 has a plan of 1 documents, 8 tokens, digest",
        "groups": "head_groups must be an integer above 0, got 0",
        "heads of groups": "heads must be multiples of the 2 ranks times 3 groups",
        "transport": 'transport must be "auto", "collectives" or "symmetric", got \'ring\'',
        "symmetric": 'transport="symmetric" needs CUDA, and the mesh is of cpu',
        "groups of gather": 'strategy="gather" serves transport="collectives" and head_groups=1 alone',
        "groups of one rank": "1 head_groups, transport collectives and rank 1 has heads",
        "symmetric of one rank": "and rank 1 has transport symmetric",
        "autocast of one rank": "rank 0 has heads: q [1, 4, 8, 16] bfloat16, k",
        "plan of a mesh": "the plan is of another mesh or rank: Place(rank=0, members=(5, 6), parts=1), got ",
        "plan of a rank": "the plan is of another mesh or rank: Place(rank=1, members=(0, 1), parts=1), got ",
        "causal of one rank": "strategy gather and rank 1 has a plan",
        "DTensor of one rank": "rank 1: q is a DTensor, and ContextParallel takes local ones",
        "strategy": 'strategy must be "heads", "gather", "heads+gather" or "auto", got \'ring\'',
        "auto": "heads_kv must be given",
        "unshard with a gradient": "rank 1: x must not require a gradient: unshard records none",
    }
    for name, text in expected.items():
        assert text in first[name], name
    for error, text in zip(
        first["unshard"],
        ("[8, 8] float16", "rank 1 has unshard: x [4, 8]", "dim 1", ", plan ", "dim 0, strategy gather"),
        strict=True,
    ):
        assert error.startswith("all ranks must make the same call, but rank 0 has unshard: x [8, 8]")
        assert text in error
    assert first["chosen"] == ["heads", "gather"]
    assert first["chosen for documents"] == ["gather", "heads", "heads"]
    for error, text in zip(
        first["masks"], ("causal must be", "window must be two integers", "windows must be a"), strict=True
    ):
        assert text in error
    for text in (
        "strategy heads: 2 ranks divide 4 K/V heads",
        "transport collectives: ",
        "gloo",
        "nothing is exchanged while",
    ):
        assert text in first["explained"]
    assert "2 groups of heads, each on its way while the one before attends" in first["groups explained"]
    assert f"strategy {first['plan strategy']}: " in first["documents explained"]
    assert first["gradients of outputs of one rank"] == [True, True]
    for told in first["wrong on rank 0"].values():
        wrong = {
            "batch": "k must have shape [B, HK, Sk, D] = [2, 2, 8, 16], got [1, 2, 8, 16]",
            "heads": "v must have shape [B, HK, Sk, DV] = [2, 2, 8, 16], got [2, 4, 8, 16]",
            "columns": "k must have shape [B, HK, Sk, D] = [2, 2, 8, 16], got [2, 2, 8, 8]",
            "kind": "q must be a tensor [B, H, n, D], got None",
            "integers": "q must be float16, bfloat16 or float32, got torch.int32",
            "causal": "causal must be True or False, got 1",
            "window": "window must be two integers (left, right), -1 for no bound, got (3.0, 0)",
            "three numbers": "window must be two integers (left, right), -1 for no bound, got (3, 0, 0)",
            "no window": "window must be two integers (left, right), -1 for no bound, got None",
            "softcap": "softcap must be a number, 0 for none, got str",
            "return_lse": "return_lse must be True or False, got 1",
            "plan NoneType": "plan must be a PackedPlan, as ContextParallel.plan returns it, got NoneType",
            "plan list": "got list",
            "plan Tensor": "got Tensor",
            "lengths int": "lengths must be a list of integers on the host, got int",
            "lengths Tensor": "got Tensor",
            "lengths str": "got str",
            "lengths list": "lengths must be integers above 0, one or more, got [8.0, 8]",
        }
        for name, text in wrong.items():
            assert told[name].startswith("rank 0: ")
            assert text in told[name], name
    assert "got 4 query heads and 0 K/V heads" in first["wrong on rank 0"]["heads"]["no heads"]
    assert "k must have a head for the 4 heads of q, got 0" in first["wrong on rank 0"]["gather"]["no heads"]
    assert all("mesh must be a DeviceMesh" in error for error in first["mesh"])
    assert "ranks of a mesh must ascend in all dimensions, got [1, 0]" in first["descending mesh"]
    assert "x must be a torch.Tensor, got list" in first["sharded"][0]
    assert "dim must be one of the 4 dimensions of x, got 4" in first["sharded"][1]
    assert "plan must be a PackedPlan" in first["sharded"][2]
    assert all("the number of tokens must be an integer, 0 or more" in error for error in first["sizes of layouts"])
    assert first["copied"]
    assert first["after all"] == 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_over_ranks_are_rounded_once(ranks: int) -> None:
    received, out = torch.randn(ranks, 100, 8), torch.empty(200, 8, dtype=torch.bfloat16)
    sum_ranks_into(out[100:], received)
    total = received[0]
    for part in received[1:]:
        total = total + part
    assert torch.equal(out[100:], total.bfloat16())


def test_autograd_makes_no_zeros_for_packed_outputs() -> None:
    """The gradient of ``o[0]`` would be zeros of the whole, and a copy into them."""
    with fake_ranks(1):
        cp = ContextParallel(init_device_mesh("cpu", (1,)), strategy="gather")
        q = torch.randn(8, 2, 16, requires_grad=True)
        found = cp.attention_packed(q, q, q, cp.plan([5, 3]), causal=True, return_lse=True)
    names, ahead = set(), [x.grad_fn for x in found]
    while ahead:
        if (node := ahead.pop()) is not None:
            names.add(node.name())
            ahead += [more for more, _ in node.next_functions]
    assert "SqueezeBackward1" in names
    assert not names & {"SelectBackward0", "SliceBackward0", "IndexBackward0"}
