"""Gradients of the experts on a real GPU against fp64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashmoe_science import fused_moe, route
from flashmoe_science.moe import reference
from flashmoe_science.moe.backward import autograd as gradients, plan as backward_plan
from flashmoe_science.moe.grouped import plan_sm90 as hopper_plan

from ..attention.checks import poison_allocator
from .cases import GRADIENT_CASES, Case, make_tensors
from .checks import assert_gradients_right, names_of_gradients, run, run_gradients

pytestmark = pytest.mark.gpu


def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.fixture
def activation_on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """See that Hopper's kernel makes the activation's gradient; a list of the plans that are made."""
    if not is_hopper():
        pytest.skip("it needs Hopper")
    plans = []
    plan = backward_plan.plan_backward

    def remember(*given: Any) -> Any:
        plans.append(plan(*given))
        return plans[-1]

    monkeypatch.setattr(hopper_plan, "ACTIVATION_FEWEST_HIDDEN", 0)
    monkeypatch.setattr(gradients, "plan_backward", remember)
    gradients._prepared.clear()
    yield plans
    gradients._prepared.clear()
    assert all("dactivation_sm90" in each.steps for each in plans)


def check(case: Case) -> dict[str, torch.Tensor]:
    tensors = make_tensors(case, "cuda")
    do = torch.randn(tensors["x"].shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    do = do.to(tensors["x"].dtype)
    poison_allocator(1 << 22)
    found = run_gradients(case, tensors, do)
    assert_gradients_right(case, found, tensors, do)
    return found


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("case", GRADIENT_CASES, ids=str)
def test_every_case_of_the_interpreter(case, dtype):
    check(dataclasses.replace(case, dtype=dtype))


@pytest.mark.parametrize("tokens", [1, 30, 300, 1500])
@pytest.mark.parametrize("sizes", [(256, 384), (200, 104)], ids=str)
def test_tokens_and_sizes(tokens, sizes):
    hidden, inter = sizes
    check(Case("sizes", tokens, 8, 2, hidden, inter, "bf16"))
    check(
        Case("gpt-oss", tokens, 8, 2, hidden, inter, "bf16", activation="swiglu_clamped", interleaved=True, bias=True)
    )


@pytest.mark.skipif(not is_hopper(), reason="it needs Hopper")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("sizes", [(1024, 256, 256), (999, 200, 104), (700, 64, 320), (600, 320, 576)], ids=str)
def test_the_kernels_for_hopper(sizes, dtype):
    """Experts with and without rows, tiles that are not full, reductions with a rest."""
    tokens, hidden, inter = sizes
    for more in ({}, {"activation": "swiglu_clamped", "interleaved": True}, {"activation": "relu2"}):
        case = Case("hopper", tokens, 5, 3, hidden, inter, dtype, kernel="grouped_gluon_sm90", **more)
        check(case)
    check(Case("hopper", tokens, 5, 1, hidden, inter, dtype, kernel="grouped_gluon_sm90", ids="one"))
    check(Case("hopper", tokens, 5, 2, hidden, inter, dtype, kernel="grouped_gluon_sm90", ids="none", bias=True))


SIZES = [(1024, 256, 256), (999, 200, 104), (700, 64, 320), (600, 320, 576)]
ACTIVATIONS: list[dict[str, Any]] = [
    {"interleaved": True}, {"activation": "swiglu_clamped", "interleaved": True, "bias": True},
    {"activation": "geglu", "bias": True}, {"activation": "relu2", "weights_dtype": "bf16"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "more"), [*((sizes, {}) for sizes in SIZES), *((SIZES[1], more) for more in ACTIVATIONS)], ids=str
)
def test_the_activation_on_hopper(sizes, more, activation_on_hopper):
    """Experts with and without rows, all rows on one, tiles that are not full, reductions with a rest."""
    tokens, hidden, inter = sizes
    case = Case("activation", tokens, 5, 3, hidden, inter, "bf16", kernel="grouped_gluon_sm90", **more)
    for ids in ("distinct", "one", "none"):
        check(dataclasses.replace(case, ids=ids))
    assert len(activation_on_hopper) == 1


@pytest.mark.parametrize("hidden", [40, 192])
def test_the_activation_of_few_steps_on_hopper(hidden, activation_on_hopper):
    """Tiles of one warpgroup or both, of fewer steps than the ring has; many of them by each program."""
    for tokens in (97, 128, 129, 193):
        check(Case("few steps", tokens, 2, 1, hidden, 520, "bf16", kernel="grouped_gluon_sm90", bias=True))
        check(Case("many tiles", 40 * tokens, 64, 1, hidden, 776, "bf16", kernel="grouped_gluon_sm90"))
    assert len(activation_on_hopper) == 8


def assert_near(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Compare with what rounds elsewhere. A kernel that is wrong in few places may lie within the budget."""
    size = expected.float().abs()
    assert ((found.float() - expected.float()).abs() <= size / 64 + 0.1 * size.mean()).all(), name


def test_the_activation_on_hopper_has_the_same_bits(activation_on_hopper):
    """In a thousand runs; and nearly where some gradients are not asked for."""
    case = Case("bits", 3000, 16, 4, 256, 640, "bf16", kernel="grouped_gluon_sm90")
    tensors = make_tensors(case, "cuda")
    do = torch.randn(tensors["x"].shape, device="cuda").bfloat16()
    first = run_gradients(case, tensors, do)
    for _ in range(1000):
        poison_allocator(1 << 24)
        again = run_gradients(case, tensors, do)
        assert all(torch.equal(again[name], first[name]) for name in first)
    for name in ("x", "w_down", "topk_weights"):
        leaf = tensors[name].detach().requires_grad_()
        (found,) = torch.autograd.grad(run(case, {**tensors, name: leaf}), leaf, do)
        assert_near(found, first[name], name)  # other constants: multiply and add may be fused elsewhere
    assert len(activation_on_hopper) == 4


def test_the_activation_on_hopper_is_near_to_that_of_triton(activation_on_hopper, monkeypatch):
    case = Case("near", 2000, 8, 2, 1024, 768, "bf16", kernel="grouped_gluon_sm90")
    tensors = make_tensors(case, "cuda")
    do = torch.randn(tensors["x"].shape, device="cuda").bfloat16()
    found = run_gradients(case, tensors, do)
    assert len(activation_on_hopper) == 1
    monkeypatch.setattr(hopper_plan, "activation_unsupported_reason", lambda *_: "to be compared")
    gradients._prepared.clear()
    expected = run_gradients(case, tensors, do)
    assert "dactivation" in activation_on_hopper.pop().steps
    for name, gradient in found.items():
        assert_near(gradient, expected[name], name)


def test_a_thousand_runs_have_the_same_bits():
    case = Case("bits", 1200, 16, 4, 256, 128, "bf16", shared=1, shared_inter=64, bias=True)
    tensors = make_tensors(case, "cuda")
    do = torch.randn(tensors["x"].shape, device="cuda").bfloat16()
    first = run_gradients(case, tensors, do)
    for _ in range(1000):
        again = run_gradients(case, tensors, do)
        assert all(torch.equal(again[name], first[name]) for name in first)


# Parts of some columns, where none are worth it: their sizes are small, and the first columns of each are another's.
NARROW: dict[str, Any] = {
    "SMALL_SCRATCH_BYTES": 0, "SCRATCH_OF_KEPT": 1 << 20, "FEWEST_COLUMNS": 256, "COLUMN_STEP": 256
}  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kernel", ["grouped_gluon_sm90", "grouped_triton"])
def test_gradients_in_parts_have_the_same_bits(kernel, bias, monkeypatch):
    check_parts(kernel, bias, monkeypatch)


@pytest.mark.parametrize("bias", [False, True])
def test_parts_of_the_activation_on_hopper_have_the_same_bits(bias, monkeypatch, activation_on_hopper):
    check_parts("grouped_gluon_sm90", bias, monkeypatch)
    assert activation_on_hopper[-1].steps.count("dactivation_sm90") > 1


def check_parts(kernel: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "grouped_gluon_sm90" and not is_hopper():
        pytest.skip("it needs Hopper")
    strided = kernel == "grouped_triton"  # whose weights are none for TMA
    case = Case("parts", 9000, 2, 1, 1000, 1288, "bf16", kernel=kernel, bias=bias, strided=strided)
    tensors = make_tensors(case, "cuda")
    do = torch.randn(tensors["x"].shape, device="cuda").bfloat16()
    names = names_of_gradients(tensors)
    expected = run_gradients(case, tensors, do)
    plans = []
    plan = vars(gradients)["plan_backward"]  # it may be remembered already

    def remember(*given: Any) -> Any:
        plans.append(plan(*given))
        return plans[-1]

    monkeypatch.setattr(gradients, "plan_backward", remember)
    for name, value in NARROW.items():
        monkeypatch.setattr(backward_plan, name, value)
    for without in ((), ("w_gate_up", "bias_gate_up")):
        gradients._prepared.clear()
        leaves = {name: tensors[name].detach().requires_grad_() for name in names if name not in without}
        poison_allocator(1 << 26)
        found = torch.autograd.grad(run(case, {**tensors, **leaves}), [*leaves.values()], do)
        hopper = "_sm90" if kernel == "grouped_gluon_sm90" else ""
        assert plans[-1].steps.count(f"dx{hopper}") > 1
        assert plans[-1].steps.count(f"ddown{hopper}") > 1
        assert (plans[-1].scratch == 0) == (not without)
        for name, gradient in zip(leaves, found, strict=True):
            assert torch.equal(gradient, expected[name]), name
    gradients._prepared.clear()


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_clamped", "relu2"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_last_backward_pass_writes_where_the_product_is(dtype, activation):
    """A hundred times: who stores an element of the gradient is not always who loaded that of the product."""
    check_last(dtype, activation)


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_clamped", "relu2"])
def test_the_last_activation_on_hopper_writes_where_the_product_is(activation, activation_on_hopper):
    check_last("bf16", activation)
    assert activation_on_hopper


def check_last(dtype: str, activation: str) -> None:
    interleaved = activation == "swiglu_clamped"
    case = Case("last", 3000, 8, 2, 256, 640, dtype, activation=activation, interleaved=interleaved, bias=True)
    tensors = make_tensors(case, "cuda")
    do = torch.randn(tensors["x"].shape, device="cuda").to(tensors["x"].dtype)
    leaves = {name: tensors[name].detach().requires_grad_() for name in names_of_gradients(tensors)}
    out = run(case, {**tensors, **leaves})
    expected = torch.autograd.grad(out, [*leaves.values()], do, retain_graph=True)
    for _ in range(100):
        out = run(case, {**tensors, **leaves})
        product = out.grad_fn.saved_tensors[-2]  # type: ignore[union-attr]
        before = product.clone()
        found = torch.autograd.grad(out, [*leaves.values()], do)
        assert not torch.equal(product, before)
        assert all(map(torch.equal, found, expected))


MEMORY = {
    "Mixtral": (8192, 8, 2, 4096, 14336),
    "Qwen3-30B": (8192, 128, 8, 2048, 768),
    "gpt-oss": (4096, 128, 4, 2880, 2880),
}


@pytest.mark.skipif(not is_hopper(), reason="what is counted is the plan for Hopper")
@pytest.mark.parametrize("model", MEMORY)
def test_the_memory_of_a_backward_pass(model):
    """At its peak at most 1.1 times what is kept, beyond inputs, outputs and gradients: measured, and as counted."""
    tokens, experts, top_k, hidden, inter = MEMORY[model]
    case = Case(model, tokens, experts, top_k, hidden, inter, "bf16", interleaved=model == "gpt-oss")
    tensors = make_tensors(case, "cuda")
    leaves = {name: tensors[name].requires_grad_() for name in names_of_gradients(tensors)}
    kept = 2 * tokens * top_k * 2 * inter
    peaks = []
    for retain in (True, False):  # the first compiles
        out = run(case, {**tensors, **leaves})
        do = torch.ones_like(out)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = torch.autograd.grad(out, [*leaves.values()], do, retain_graph=retain)
        torch.cuda.synchronize()
        beyond = torch.cuda.max_memory_allocated() - before - sum(gradient.nbytes for gradient in found)
        peaks.append(1 + beyond / kept)
        del out, do, found
    assert peaks[1] <= 1.1
    assert peaks[0] == pytest.approx(1 + peaks[1], abs=0.01), "a pass that keeps the graph has a buffer more"


def test_a_layer_is_captured_and_learns_through_routing():
    """Forward, backward and routing in one graph: nothing waits for the host."""
    tensors = make_tensors(Case("graph", 400, 8, 2, 128, 128, "bf16"), "cuda")
    logits = torch.randn(400, 8, device="cuda", requires_grad=True)
    names = ("x", "w_gate_up", "w_down")
    leaves: dict[str, Any] = {name: tensors[name].requires_grad_() for name in names}

    def step() -> tuple[torch.Tensor, ...]:
        weights, ids = route(logits, 2)
        out = fused_moe(**leaves, topk_weights=weights, topk_ids=ids)
        return torch.autograd.grad(out.float().square().sum(), [*leaves.values(), logits])

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = [gradient.clone() for gradient in step()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for gradient in captured:
        gradient.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.parametrize("forward_too", [False, True], ids=["alone", "with its forward pass"])
def test_a_captured_backward_pass_is_replayed_twice(forward_too, monkeypatch):
    """It overwrites what is kept only where each replay makes that anew."""
    answers = []
    ask = gradients._overwrites

    def remember(*given: Any) -> bool:
        answers.append(ask(*given))
        return answers[-1]

    monkeypatch.setattr(gradients, "_overwrites", remember)
    case = Case("replayed", 400, 8, 2, 128, 128, "bf16", shared=1, shared_inter=64)
    tensors = make_tensors(case, "cuda")
    leaves = {name: tensors[name].requires_grad_() for name in names_of_gradients(tensors)}
    do = torch.randn(tensors["x"].shape, device="cuda").bfloat16()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        expected = torch.autograd.grad(run(case, {**tensors, **leaves}), [*leaves.values()], do)
        out = run(case, {**tensors, **leaves})
        kept = out.grad_fn.saved_tensors  # type: ignore[union-attr] # else autograd frees what replays read
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        if forward_too:
            out = run(case, {**tensors, **leaves})
        captured = torch.autograd.grad(out, [*leaves.values()], do)
    assert answers == [True, forward_too]
    for _ in range(2):
        for gradient in captured:
            gradient.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, expected))
    del kept


@pytest.mark.parametrize("hidden", [128, 512], ids=["kernels of Triton", "kernels of Hopper"])
def test_a_captured_step_serves_other_routings(hidden):
    """Forward and backward in one graph; as many rows of each expert are seen by no host."""
    case = Case("routings", 700, 8, 2, hidden, 256, "bf16", bias=True)
    tensors = make_tensors(case, "cuda")
    do = torch.randn(tensors["x"].shape, device="cuda").bfloat16()
    leaves = {name: tensors[name].requires_grad_() for name in names_of_gradients(tensors)}

    def step() -> tuple[torch.Tensor, ...]:
        out = run(case, {**tensors, **leaves})
        return out.detach(), *torch.autograd.grad(out, [*leaves.values()], do)

    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for seed, ids in ((1, "distinct"), (2, "one"), (3, "none")):
        with torch.no_grad():
            for name, tensor in make_tensors(dataclasses.replace(case, ids=ids), "cuda", seed).items():
                tensors[name].copy_(tensor)
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        found = dict(zip(("out", *leaves), captured, strict=True))
        assert_gradients_right(case, found, {name: t.detach() for name, t in tensors.items()}, do)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("hidden", [128, 512])
def test_permuting_tokens_permutes_outputs_and_their_gradients(hidden, dtype):
    """Those of weights are sums in another order."""
    case = Case("permuted", 900, 8, 3, hidden, 256, dtype, bias=True, shared=1, shared_inter=64, weighted=True)
    tensors = make_tensors(case, "cuda")
    do = torch.randn(tensors["x"].shape, device="cuda").to(tensors["x"].dtype)
    order = torch.randperm(case.tokens, device="cuda")
    of_tokens = ("x", "topk_weights", "topk_ids", "shared_weights")
    moved = {**tensors, **{name: tensors[name][order].contiguous() for name in of_tokens}}
    found, again = run_gradients(case, tensors, do), run_gradients(case, moved, do[order])
    for name, gradient in found.items():
        expected = gradient[order] if name in ("out", *of_tokens) else gradient
        assert_near(again[name], expected, name)
    assert_gradients_right(case, again, moved, do[order])


@pytest.mark.parametrize("hidden", [128, 512])
def test_operators_pass_opcheck(hidden):
    """Their products have other shapes than on a CPU, where none is kept."""
    tensors = make_tensors(Case("opcheck", 300, 8, 2, hidden, 256, "bf16", shared=1, shared_inter=64), "cuda")
    names = ("x", "w_gate_up", "w_down", "topk_weights", "topk_ids")
    shared = tensors["shared_gate_up"], tensors["shared_down"], None
    options = "swiglu", None, None, False, False, "auto"
    arguments = (*(tensors[name] for name in names), None, None, *shared, *options)
    with torch.no_grad():
        out, *products = torch.ops.flashmoe_science.fused_moe_kept(*arguments)
    backward = torch.randn_like(out), *products, *arguments, [0, 1, 2, 3, 6, 7]
    torch.library.opcheck(torch.ops.flashmoe_science.fused_moe_backward.default, backward)
    for name in ("x", "w_gate_up", "w_down", "topk_weights"):
        tensors[name].requires_grad_()
    torch.library.opcheck(torch.ops.flashmoe_science.fused_moe_kept.default, arguments)
    torch.library.opcheck(torch.ops.flashmoe_science.fused_moe.default, tuple(
        a.detach() if isinstance(a, torch.Tensor) else a for a in arguments
    ))  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"score": "sigmoid", "scale": 2.5}, {"renormalize": False}], ids=str)
def test_the_gradient_of_routing(options):
    logits = torch.randn(777, 60, device="cuda", requires_grad=True)
    weights, ids = route(logits, 6, **options)
    dweights = torch.randn_like(weights)
    (found,) = torch.autograd.grad(weights, logits, dweights)
    exact = reference.route_gradient(dweights, logits.detach(), ids, **options, dtype=torch.float64)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


def test_torch_compile_with_gradients():
    tensors = make_tensors(Case("compiled", 300, 8, 2, 128, 128, "bf16", bias=True), "cuda")
    leaf = tensors["w_down"].requires_grad_()

    def step() -> torch.Tensor:
        return fused_moe(**tensors).float().square().sum()

    (expected,) = torch.autograd.grad(step(), leaf)
    (found,) = torch.autograd.grad(torch.compile(step, fullgraph=True)(), leaf)
    torch.testing.assert_close(found, expected)
