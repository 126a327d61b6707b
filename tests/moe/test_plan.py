"""Which kernel serves which problem, and what the plan says of it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from flashmoe_science import InputError, UnsupportedError, explain_moe
from flashmoe_science.gpu.specs import SPECS
from flashmoe_science.moe.backward.plan import GRADIENTS, column_sums, plan_backward
from flashmoe_science.moe.grouped import plan_sm90 as hopper_plan
from flashmoe_science.moe.plan import (
    MAX_FEW_PAIRS,
    MAX_PAIRS_SORTED_AT_ONCE,
    NARROW,
    TABLES,
    choose_tile,
    most_tiles,
    plan_moe,
    rows_of_tiles,
    workspace_sizes,
)
from flashmoe_science.moe.problem import MoeProblem
from flashmoe_science.moe.tiles import SMALL_BACKWARD, BackwardConfig, gemv_tiles

from .cases import Case, make_tensors

QWEN3 = MoeProblem(1, 128, 8, 2048, 768, "bf16")


def with_tokens(tokens: int, **change) -> MoeProblem:
    return dataclasses.replace(QWEN3, tokens=tokens, **change)


@pytest.mark.parametrize(
    ("tokens", "kernel", "steps"),
    [
        (1, "gemv_triton", ("gemv_up", "gemv_down")),
        (2, "few_triton", ("up", "down", "combine")),
        (MAX_FEW_PAIRS // 8, "few_triton", ("up", "down", "combine")),
        (MAX_FEW_PAIRS // 8 + 1, "grouped_triton", ("sort", "up", "down", "combine")),
        (MAX_PAIRS_SORTED_AT_ONCE // 8, "grouped_triton", ("sort", "up", "down", "combine")),
        (MAX_PAIRS_SORTED_AT_ONCE // 8 + 1, "grouped_triton", ("count", "sum", "place", "up", "down", "combine")),
    ],
)
def test_tokens_decide(tokens, kernel, steps):
    plan = plan_moe(with_tokens(tokens), SPECS["B200"])  # on Hopper 512 tokens have a kernel of their own
    assert (plan.kernel, plan.steps) == (kernel, steps)
    assert len(plan.launches) == len(steps)


def test_nothing_is_launched_for_no_tokens():
    assert plan_moe(with_tokens(0), SPECS["H200"]).launches == ()


def test_one_tile_serves_any_number_of_tokens_when_batch_invariant():
    plans = [plan_moe(with_tokens(tokens, batch_invariant=True), SPECS["H200"]) for tokens in (1, 5, 64, 4000)]
    assert {(plan.kernel, plan.config) for plan in plans} == {("grouped_triton", plans[0].config)}
    for kernel in ("gemv_triton", "few_triton"):
        with pytest.raises(UnsupportedError, match="a token would get other bits"):
            plan_moe(with_tokens(1, batch_invariant=True), SPECS["H200"], kernel)


def test_a_forced_kernel_that_does_not_serve_is_refused():
    with pytest.raises(UnsupportedError, match=r"gemv_triton does not serve .*: it serves one token, got 2"):
        plan_moe(with_tokens(2), SPECS["H200"], "gemv_triton")
    with pytest.raises(UnsupportedError, match="up to 128 pairs of a token and an expert, got 160"):
        plan_moe(with_tokens(20), SPECS["H200"], "few_triton")
    with pytest.raises(UnsupportedError, match="reads the routing on the host"):
        plan_moe(with_tokens(20), SPECS["H200"], "reference")
    with pytest.raises(UnsupportedError, match="kernels need sm_80 or newer"):
        plan_moe(with_tokens(2), dataclasses.replace(SPECS["A100"], arch=75))


@pytest.mark.parametrize("gpu", ["A100", "L4", "H200", "B200", "RTX 5090"])
def test_tiles_grow_with_the_rows_of_an_expert(gpu):
    tiles = [choose_tile(with_tokens(tokens), SPECS[gpu].arch) for tokens in (32, 300, 600, 1000, 32768)]
    assert [tile.block_m for tile in tiles] == sorted(tile.block_m for tile in tiles)
    assert (tiles[0].block_m, tiles[-1].block_m) == (16, 128)


@pytest.mark.parametrize(("tokens", "rows"), [(31, 16), (32, 32), (63, 32), (64, 64), (128, 64), (129, 128)])
def test_a_tile_has_room_for_an_expert_that_is_twice_as_busy(tokens, rows):
    mixtral = MoeProblem(tokens, 8, 2, 4096, 14336, "bf16")  # pairs / 4 are the average
    assert choose_tile(mixtral, 90).block_m == rows


@pytest.mark.parametrize(
    ("tokens", "sizes", "kernel", "rows"),
    [
        (128, (32, 8, 7168, 2048), "grouped_triton", 64),  # 3.9 tiles for each SM
        (129, (32, 8, 7168, 2048), "grouped_gluon_sm90", 128),  # more than 32 rows an expert
        (128, (8, 2, 4096, 14336), "grouped_gluon_sm90", 128),  # 6.8 tiles for each SM
    ],
)
def test_few_rows_in_few_tiles_are_not_for_tiles_of_128_rows(
    tokens: int, sizes: tuple[int, int, int, int], kernel: str, rows: int
) -> None:
    plan = plan_moe(MoeProblem(tokens, *sizes, "bf16"), SPECS["H200"])
    assert (plan.kernel, rows_of_tiles(plan.config)) == (kernel, rows)


@pytest.mark.parametrize(
    ("tokens", "rows", "programs"),
    [(16, 16, 64), (17, 32, 64), (64, 64, 64), (256, 128, 128), (257, 128, 48), (1024, 128, 128)],
)
def test_shared_experts_have_programs_for_the_sms(tokens, rows, programs):
    deepseek = MoeProblem(tokens, 32, 8, 7168, 2048, "bf16", shared_experts=1, shared_inter=2048)
    plan = plan_moe(deepseek, SPECS["H200"])
    assert plan.shared is not None
    assert plan.shared.block_m == rows
    assert plan.launches[plan.steps.index("shared_up")].grid[0] == programs


def test_rows_that_start_anywhere_have_a_narrow_tile():
    for change in ({"inter": 767}, {"hidden": 2047}, {"pointer_alignment": 2}, {"x_strides": (2049, 1)}):
        sizes: dict[str, Any] = {"experts": 8, "top_k": 2, "hidden": 64, "inter": 64, **change}
        problem = MoeProblem(tokens=600, dtype="bf16", **sizes)
        assert choose_tile(problem, 90) is NARROW
    assert choose_tile(with_tokens(600, gate_up_strides=(2048 * 1536, 1, 1536)), 90) is NARROW
    turned = with_tokens(
        600, gate_up_strides=(2048 * 1536, 1, 1536), interleaved=True, down_strides=(2048 * 768, 1, 2048)
    )
    assert choose_tile(turned, 90) is not NARROW


@pytest.mark.parametrize("counts", [(1, 0, 0), (16, 16, 16), (17, 1, 1), (0, 0, 100), (15, 31, 33)])
def test_the_table_of_tiles_has_room(counts):
    problem = MoeProblem(max(1, sum(counts)), 3, 1, 16, 16, "bf16")
    for block_m in (16, 32, 64, 128):
        assert sum(-(-count // block_m) for count in counts) <= most_tiles(problem, block_m)


def test_the_workspace_grows_with_pairs_alone():
    for tokens, experts in itertools.product((20, 600, 32768), (8, 512)):
        plan = plan_moe(with_tokens(tokens, experts=experts), SPECS["H200"])
        if plan.kernel in ("grouped_triton", "grouped_gluon_sm90"):
            pairs = plan.problem.pairs
            counts = (pairs // 256 + 2) * 2 * (experts + 2)
            assert sum(workspace_sizes(plan).values()) < 3 * pairs + 4 * min(experts, pairs) + 16 + counts
        else:
            assert workspace_sizes(plan) == {}


def test_every_architecture_has_a_table():
    for spec in SPECS.values():
        for dtype in ("fp16", "bf16", "fp32"):
            assert plan_moe(with_tokens(1000, dtype=dtype), spec).config is not None
    assert all(
        config.block_m & (config.block_m - 1) == 0
        for table in TABLES.values()
        for row in table.values()
        for config in row
    )


def test_explain_shows_the_plan():
    tensors = make_tensors(Case("explained"))
    plan = explain_moe(**tensors, activation="swiglu")
    assert plan.kernel == "reference"
    assert "t9_e5_k2_h40_i24_fp32 on CPU: reference" in str(plan)
    text = str(plan_moe(with_tokens(3000, shared_experts=1, shared_inter=768), SPECS["H200"]))
    assert "launch  _gate_up_kernel, grid" in text
    assert "shared up  block_n" in text
    assert plan_moe(with_tokens(3000), SPECS["A100"]).as_dict()["config"]["block_m"] == 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "fp8"}, "dtype must be one of fp16, bf16, fp32, got 'fp8'"),
        ({"tokens": -1}, "tokens must not be negative, got -1"),
        ({"experts": 0}, "experts must be at least 1, got 0"),
        ({"ids_dtype": "i16"}, "ids_dtype must be i32 or i64, got 'i16'"),
        ({"shared_experts": 1}, "shared_experts and shared_inter must both be positive or both 0, got 1 and 0"),
        ({"shared_weights": "fp32"}, "shared_weights must be None without shared experts"),
        ({"tokens": 2**30}, r"tokens \* top_k must be less than 2\*\*31"),
    ],
)
def test_a_problem_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(QWEN3, **change)


def test_work_counts_both_products():
    assert QWEN3.flops == 6 * 8 * 2048 * 768
    assert dataclasses.replace(QWEN3, activation="relu2", gate_up_strides=()).flops == 4 * 8 * 2048 * 768
    assert QWEN3.expert_bytes == 3 * 2048 * 768 * torch.bfloat16.itemsize


HOPPER = with_tokens(8192)


def test_hopper_has_a_kernel_of_its_own_for_many_rows():
    plan = plan_moe(HOPPER, SPECS["H200"])
    assert (plan.kernel, plan.steps[-3:]) == ("grouped_gluon_sm90", ("up_sm90", "down_sm90", "combine"))
    assert "512 rows an expert" in plan.reason
    assert "num_stages 4" in str(plan)
    assert plan.launches[-2].grid == (132, 1, 1)
    assert plan_moe(HOPPER, SPECS["B200"]).kernel == plan_moe(HOPPER, SPECS["L4"]).kernel == "grouped_triton"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": 511}, "fewer than 32 rows an expert, for tiles of 128"),
        ({"dtype": "fp32"}, "it multiplies fp16 and bf16, got fp32"),
        ({"gate_up_strides": (2048 * 1536, 1, 1536)}, "must have stride 1"),
        ({"pointer_alignment": 8}, "multiples of 16 bytes"),
        ({"inter": 764, "gate_up_strides": (), "down_strides": ()}, "multiples of 16 bytes"),
        ({"x_strides": (2052, 1)}, "multiples of 16 bytes"),
        ({"gate_up_strides": (0, 2048, 1)}, "w_gate_up is expanded: TMA does not step by 0"),
        ({"down_strides": (2048 * 768, 0, 1)}, "w_down is expanded: TMA does not step by 0"),
    ],
)
def test_where_hopper_falls_to_triton_the_plan_says_why(change, reason):
    plan = plan_moe(dataclasses.replace(HOPPER, **change), SPECS["H200"])
    assert plan.kernel == "grouped_triton"
    assert reason in plan.reason
    if "tokens" not in change:
        with pytest.raises(UnsupportedError, match=reason):
            plan_moe(dataclasses.replace(HOPPER, **change), SPECS["H200"], "grouped_gluon_sm90")


def test_hopper_serves_what_is_expanded_and_not_stepped_along_by_tma():
    """Rows of x are gathered by their addresses, and one expert has none beside it."""
    one = {"experts": 1, "top_k": 1, "gate_up_strides": (0, 2048, 1), "down_strides": (0, 768, 1)}
    for change in ({"x_strides": (0, 1)}, one):
        assert plan_moe(dataclasses.replace(HOPPER, **change), SPECS["H200"]).kernel == "grouped_gluon_sm90"


def test_the_kernel_for_hopper_is_refused_elsewhere():
    with pytest.raises(UnsupportedError, match="it needs Hopper"):
        plan_moe(HOPPER, SPECS["B200"], "grouped_gluon_sm90")
    with pytest.raises(UnsupportedError, match="one token would be served by another kernel"):
        plan_moe(dataclasses.replace(HOPPER, batch_invariant=True), SPECS["H200"], "grouped_gluon_sm90")


def test_gradients_ask_for_kernels_that_keep_the_product():
    plan = plan_moe(with_tokens(2, keep_product=True), SPECS["H200"])
    assert plan.kernel == "grouped_triton"
    assert "gradients need the first product" in plan.reason
    for kernel in ("gemv_triton", "few_triton"):
        with pytest.raises(UnsupportedError, match="it keeps nothing for gradients"):
            plan_moe(with_tokens(1, keep_product=True), SPECS["H200"], kernel)


def test_the_plan_of_gradients_makes_what_is_wanted():
    kept = with_tokens(8192, keep_product=True)
    plan = plan_backward(kept, SPECS["H200"], ("x", "w_gate_up", "w_down", "topk_weights"))
    sort = ("count", "sum", "place")
    products = ("dx_sm90", "dcombine", "dgate_up_sm90")
    assert plan.steps == (*sort, "dactivation_sm90", "ddown_sm90", "drouting", *products)
    assert "Hopper" in plan.reason
    expanded = dataclasses.replace(kept, down_strides=(0, 768, 1))
    assert "dx_sm90" not in plan_backward(expanded, SPECS["H200"], ("x",)).steps
    of_x = plan_backward(kept, SPECS["A100"], ("x",))
    assert of_x.steps == (*sort, "dactivation", *("dx", "dcombine") * 4)  # nobody lends memory for all rows of dx
    assert of_x.spans[-2:] == ((1536, 512), (1536, 512))
    biases = plan_backward(kept, SPECS["H200"], ("w_gate_up", "bias_gate_up", "w_down"))
    assert biases.steps[-3:] == ("ddown_sm90", "dbias_gate_up", "dgate_up_sm90")
    assert plan_backward(with_tokens(30, keep_product=True), SPECS["H200"], ("x",)).steps[-2:] == ("dx", "dcombine")
    assert plan_backward(dataclasses.replace(kept, inter=767), SPECS["H200"], ("x",)).config == SMALL_BACKWARD


def test_grids_of_gradients_cover_every_tile():
    kept = MoeProblem(700, 8, 2, 4096, 3072, "bf16", keep_product=True)
    plan = plan_backward(kept, SPECS["A100"], GRADIENTS[:4])
    config, grids = plan.config, dict(zip(plan.steps, (launch.grid for launch in plan.launches), strict=True))
    assert isinstance(config, BackwardConfig)
    assert grids["ddown"] == (4096 // config.weights_m * (3072 // config.weights.block_n), 8, 1)
    assert grids["dgate_up"] == (6144 // config.weights_m * (4096 // config.weights.block_n), 8, 1)
    row_tiles = 1400 // config.block_m + 8  # the rows of each expert may fill one more in part
    assert grids["dactivation"] == (row_tiles * 3072 // config.activation.block_n, 1, 1)
    assert grids["dx"] == (row_tiles * 4096 // config.x.block_n, 1, 1)


def test_hopper_makes_the_gradient_of_the_activation_where_it_may(monkeypatch):
    kept = with_tokens(8192, keep_product=True)
    wanted = ("x", "w_down", "topk_weights")
    plan = plan_backward(kept, SPECS["H200"], wanted)
    with monkeypatch.context() as changed:
        changed.setattr(hopper_plan, "activation_unsupported_reason", lambda *_: "to be compared")
        without = plan_backward(kept, SPECS["H200"], wanted)
    assert "dactivation" in without.steps
    assert [step.replace("dactivation_sm90", "dactivation") for step in plan.steps] == [*without.steps]
    assert "that of the activation as well" in plan.reason
    assert isinstance(without.config, BackwardConfig)
    assert isinstance(plan.config, BackwardConfig)
    assert (column_sums(kept, without.config), column_sums(kept, plan.config)) == (6, 3)
    biased = dataclasses.replace(kept, bias_down=True)
    assert column_sums(biased, plan.config) == 4, "the bias has a sum of its own"
    fp16 = plan_backward(dataclasses.replace(kept, dtype="fp16"), SPECS["H200"], wanted)
    assert {"dactivation", "dx_sm90"} <= set(fp16.steps)
    assert "not that of the activation: it rounds dO @ w_down to 16 bits" in fp16.reason
    assert "dactivation" in plan_backward(kept, SPECS["A100"], wanted).steps
    short = plan_backward(
        with_tokens(8192, hidden=256, keep_product=True, x_strides=(), gate_up_strides=(), down_strides=()),
        SPECS["H200"],
        wanted,
    )
    assert {"dactivation", "dx_sm90"} <= set(short.steps)
    assert "it was not measured below HID 512, got 256" in short.reason


def test_every_architecture_has_tiles_for_gradients():
    for spec in SPECS.values():
        for dtype in ("fp16", "bf16", "fp32"):
            assert plan_backward(with_tokens(1000, dtype=dtype), spec, ("x",)).config is not None


def test_rows_decide_what_hopper_serves():
    """32 rows an expert are served on average, less are not; gradients have a bound of their own."""
    assert plan_moe(with_tokens(512), SPECS["H200"]).kernel == "grouped_gluon_sm90"
    assert plan_moe(with_tokens(511), SPECS["H200"]).kernel == "grouped_triton"
    for tokens, kernel in ((768, "moe_backward_gluon_sm90"), (767, "moe_backward_triton")):
        kept = with_tokens(tokens, keep_product=True)
        assert plan_backward(kept, SPECS["H200"], GRADIENTS[1:4]).kernel == kernel


@pytest.mark.parametrize(
    ("hidden", "tile"),
    [
        (64, (4, 1024)), (1024, (4, 1024)), (1025, (2, 2048)), (2048, (2, 2048)), (2880, (1, 4096)), (4096, (1, 4096)),
        (4097, (2, 1024)), (7168, (2, 1024)),
    ],
)  # fmt: skip
def test_a_program_of_one_token_asks_for_whole_rows_at_once_where_they_are_short(hidden, tile):
    up = gemv_tiles(hidden, 2).up
    assert (up.block_n, up.block_k) == tile
    assert gemv_tiles(hidden, 4).up.block_k == 512
