"""The experts on a real GPU against fp64."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

from flashmoe_science import explain_moe, fused_moe, route
from flashmoe_science.moe import reference
from flashmoe_science.moe.tiles import tile_rows

from ..attention.checks import poison_allocator, synchronisation_is_an_error
from .cases import CASES, EMPTY_CASES, Case, make_tensors, options_of
from .checks import assert_right, run

pytestmark = pytest.mark.gpu

TOKENS = (1, 2, 3, 8, 17, 64, 100, 257, 1000, 4500)
ACTIVATIONS = ("swiglu", "swiglu_clamped", "geglu", "geglu_tanh", "relu2", "silu", "gelu", "gelu_tanh")


def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def check(case: Case) -> torch.Tensor:
    tensors = make_tensors(case, "cuda")
    poison_allocator(1 << 22)
    out = run(case, tensors)
    assert_right(case, out, tensors)
    return out


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("case", CASES + EMPTY_CASES, ids=str)
def test_every_case_of_the_interpreter(case, dtype):
    check(dataclasses.replace(case, dtype=dtype))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("experts", [(8, 2), (128, 8), (32, 1)], ids=str)
def test_tokens(experts, tokens, dtype):
    check(Case("tokens", tokens, experts[0], experts[1], 256, 384, dtype))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 20, 700])
def test_activations(tokens, activation):
    check(Case("activation", tokens, 8, 2, 192, 320, "bf16", activation=activation, bias=True))


@pytest.mark.parametrize("sizes", [(64, 64), (200, 104), (211, 101), (2880, 360), (16, 8), (1, 1)], ids=str)
@pytest.mark.parametrize("tokens", [1, 20, 700])
def test_sizes(tokens, sizes):
    for strided in (False, True):
        check(Case("sizes", tokens, 5, 3, sizes[0], sizes[1], "bf16", strided=strided, bias=True))


@pytest.mark.parametrize("tokens", [1, 20, 700])
def test_shared_experts(tokens):
    check(Case("shared", tokens, 8, 2, 128, 256, "bf16", shared=2, shared_inter=96, weighted=True))
    check(Case("shared", tokens, 8, 2, 128, 256, "bf16", shared=1, shared_inter=512))


HOPPER_SIZES = [(1024, 256, 256), (1000, 192, 320), (999, 2880, 360), (700, 64, 64), (2500, 136, 72)]


@pytest.mark.skipif(not is_hopper(), reason="it needs Hopper")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("sizes", HOPPER_SIZES, ids=str)
def test_the_kernel_for_hopper(sizes, dtype):
    """Tiles that are full, not full, and of one warpgroup; reductions with and without a rest, and of one step."""
    tokens, hidden, inter = sizes
    kernel = "grouped_gluon_sm90"
    for more in ({}, {"activation": "swiglu_clamped", "interleaved": True, "bias": True}, {"activation": "relu2"}):
        check(Case("hopper", tokens, 5, 3, hidden, inter, dtype, kernel=kernel, **more))
    check(Case("hopper", tokens, 5, 3, hidden, inter, dtype, kernel=kernel, ids="none", ids_dtype="i64"))
    check(Case("hopper", tokens, 5, 1, hidden, inter, dtype, kernel=kernel, ids="one", shared=1, shared_inter=64))


def test_every_row_of_the_table():
    """As many rows an expert as each tile is for."""
    for item_bytes, dtype in ((2, "bf16"), (4, "fp32")):
        for config in tile_rows(torch.cuda.get_device_capability()[0] * 10, item_bytes):
            tokens = max(140, 4 * config.block_m)
            check(Case("rows", tokens, 8, 2, 256, 256, dtype, kernel="grouped_triton"))


@pytest.mark.parametrize("tokens", [1, 8, 64, 1000, 5000])
def test_a_thousand_runs_have_the_same_bits(tokens):
    case = Case("bits", tokens, 32, 4, 256, 128, "bf16", shared=1, shared_inter=64)
    tensors = make_tensors(case, "cuda")
    first = run(case, tensors)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        different += (run(case, tensors).view(torch.int16) != first.view(torch.int16)).sum()
    assert different.item() == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_token_has_the_same_bits_in_any_company(dtype):
    case = Case("alone", 300, 16, 4, 256, 192, dtype, shared=1, shared_inter=64, batch_invariant=True)
    tensors = make_tensors(case, "cuda")
    out = run(case, tensors)
    for tokens in (1, 2, 7, 100):
        for start in (0, 31, 200):
            some = {
                name: tensors[name][start : start + tokens].contiguous() for name in ("x", "topk_weights", "topk_ids")
            }
            assert torch.equal(run(case, {**tensors, **some}), out[start : start + tokens])


@pytest.mark.parametrize("tokens", [1, 16, 300, 3000])
def test_a_graph_serves_other_routings(tokens):
    case = Case("graph", tokens, 16, 4, 256, 192, "bf16")
    tensors = make_tensors(case, "cuda")
    run(case, tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(case, tensors)
    for seed in (1, 2):
        for name, tensor in make_tensors(case, "cuda", seed).items():
            tensors[name].copy_(tensor)
        out.fill_(float("nan"))
        graph.replay()
        assert_right(case, out, tensors)


@pytest.mark.parametrize("tokens", [1, 16, 300, 3000])
def test_the_host_never_waits(tokens):
    case = Case("host", tokens, 16, 4, 256, 192, "bf16", shared=1, shared_inter=64)
    tensors, logits = make_tensors(case, "cuda"), torch.randn(tokens, 16, device="cuda")
    run(case, tensors)
    route(logits, 4)
    with synchronisation_is_an_error():
        run(case, tensors)
        route(logits, 4)


@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_torch_compile(tokens):
    case = Case("compiled", tokens, 16, 4, 256, 192, "bf16")
    tensors = make_tensors(case, "cuda")
    compiled = torch.compile(lambda **t: fused_moe(**t, **options_of(case)) + 1, fullgraph=True)
    assert torch.equal(compiled(**tensors), run(case, tensors) + 1)


def test_weights_beyond_32_bits():
    """Elements of the last expert lie beyond 2**31."""
    experts, hidden, inter = 130, 4096, 4096
    up = torch.zeros(experts, inter, hidden, dtype=torch.bfloat16, device="cuda")
    down = torch.zeros(1, 1, 1, dtype=torch.bfloat16, device="cuda").expand(experts, hidden, inter)
    up[-1] = torch.randn(inter, hidden, device="cuda").bfloat16()
    one = torch.ones_like(down[:1, :1, :1])
    for tokens in (1, 3, 200):
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        ids = torch.full((tokens, 1), experts - 1, device="cuda", dtype=torch.int32)
        weights = torch.ones(tokens, 1, device="cuda")
        out = fused_moe(x, up, one.expand(experts, hidden, inter), weights, ids, activation="relu2")
        exact = torch.relu(x.double() @ up[-1].double().t()).square().sum(-1, keepdim=True)
        torch.testing.assert_close(out.double(), exact.expand(tokens, hidden), rtol=2e-2, atol=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 1000])
def test_routing(tokens, dtype):
    for experts, top_k, options, biased in (
        (8, 2, {}, False), (128, 8, {"renormalize": False}, False), (60, 6, {"score": "sigmoid", "scale": 2.5}, True),
        (256, 8, {"score": "sigmoid", "groups": 8, "top_groups": 4}, True),
        (160, 6, {"groups": 8, "top_groups": 3}, False), (1, 1, {}, False), (2000, 16, {}, False),
    ):  # fmt: skip
        logits = torch.randn(tokens, experts, device="cuda").to(dtype)
        bias = torch.randn(experts, device="cuda") * 0.3 if biased else None
        weights, ids = route(logits, top_k, bias=bias, **options)
        exact, exact_ids = reference.route(logits, top_k, bias=bias, dtype=torch.float64, **options)
        if not biased:
            assert torch.equal(ids, exact_ids)
        same = (ids == exact_ids).all(-1)
        assert same.float().mean() > 0.99, "scores that differ by a rounding may change places, and are rare"
        torch.testing.assert_close(weights[same].double(), exact[same], rtol=1e-4, atol=1e-6)


def test_the_plan_is_what_runs():
    case = Case("plan", 16, 16, 2, 128, 128, "bf16")
    tensors = make_tensors(case, "cuda")
    run(case, tensors)
    plan = explain_moe(**tensors)
    with warnings.catch_warnings():
        # Torch says so each time that a recording begins.
        warnings.filterwarnings("ignore", ".*Profiler clears events at the end of each cycle", UserWarning)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run(case, tensors)
            torch.cuda.synchronize()
    ran = [event.name for event in profile.events() if event.name.endswith("_kernel")]
    assert ran == [launch.pattern for launch in plan.launches]
