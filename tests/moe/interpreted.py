"""Child process: read cases from stdin, run them in Triton's interpreter, answer ``right`` or why not."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint

from flashmoe_science.moe import calls, prepare, reference
from flashmoe_science.moe.backward import autograd as gradients, plan as backward_plan
from flashmoe_science.moe.calls import kernels_of
from flashmoe_science.moe.plan import Tile, TileConfig, make_plan, workspace_sizes
from flashmoe_science.moe.prepare import interpret
from flashmoe_science.moe.problem import MoeProblem
from flashmoe_science.moe.routing.api import describe_routing, run_route, run_route_backward
from flashmoe_science.moe.tiles import SMALL_BACKWARD

from .cases import Case, far_apart, make_tensors
from .checks import assert_gradients_right, assert_right, names_of_gradients, run, run_gradients


def fill(tensor: torch.Tensor) -> torch.Tensor:
    """Poison fresh memory: an element that no one wrote shows, and an index that no one wrote leads nowhere."""
    return tensor.fill_(math.nan if tensor.is_floating_point() else 1 << 30)


def check(case: Case) -> None:
    """Compare one call with fp64; a second one must have the same bits."""
    tensors = make_tensors(case)
    out = run(case, tensors)
    assert_right(case, out, tensors)
    if case.tokens < 100:
        assert torch.equal(run(case, tensors), out), "another run gives other bits"


def check_gradients(case: Case) -> None:
    """Compare output and gradients with fp64; a second run must have the same bits."""
    tensors = make_tensors(case)
    do = torch.randn(tensors["x"].shape, generator=torch.Generator().manual_seed(1)).to(tensors["x"].dtype)
    found = run_gradients(case, tensors, do)
    assert_gradients_right(case, found, tensors, do)
    if case.tokens != 20:
        return
    again = run_gradients(case, tensors, do)
    different = [name for name in found if not torch.equal(found[name], again[name])]
    assert not different, f"another run gives other bits: {different}"


@contextlib.contextmanager
def answers_of(name: str) -> Iterator[list[Any]]:
    """Give what a function of ``gradients`` answers, call by call."""
    answers: list[Any] = []
    function = getattr(gradients, name)

    def ask(*given: Any) -> Any:
        answers.append(function(*given))
        return answers[-1]

    with mock.patch.object(gradients, name, ask):
        yield answers


def check_overwriting(case: Case) -> None:
    """Compare the last backward pass, which writes where the products are, with one before it, which must not."""
    tensors = make_tensors(case)
    do = torch.randn(tensors["x"].shape, generator=torch.Generator().manual_seed(1)).to(tensors["x"].dtype)
    names = names_of_gradients(tensors)

    def record(around: Any = contextlib.nullcontext, **options: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        leaves = {name: tensors[name].detach().requires_grad_() for name in names}
        with around():
            return [*leaves.values()], options.get("call", run)(case, {**tensors, **leaves}, kernel="grouped_triton")

    def checkpointed(*given: Any, **options: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(run, *given, **options, use_reentrant=False)

    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, keep)
    leaves, out = record()
    products: Any = out.grad_fn.saved_tensors[-2:]  # type: ignore[union-attr]
    before = [product.clone() for product in products]
    first = torch.autograd.grad(out, leaves, do, retain_graph=True)
    assert all(map(torch.equal, products, before)), "a pass that keeps the graph overwrote what was kept"
    recorded = torch.autograd.grad(out, leaves, do, create_graph=True)
    assert all(map(torch.equal, products, before)), "a pass that is recorded overwrote what was kept"
    versions = [product._version for product in products]
    last = torch.autograd.grad(out, leaves, do)
    changed = [not torch.equal(a, b) for a, b in zip(products, before, strict=True) if a.numel()]
    assert changed
    assert all(changed), "the last pass has a buffer of its own"
    risen = [product._version > version for product, version in zip(products, versions, strict=True) if product.numel()]
    assert all(risen), "autograd does not know"
    with answers_of("_overwrites") as answers:
        more = [record(), record(call=checkpointed), record(lambda: hooks)]
        versions = [tensor._version for tensor in kept]
        others = [torch.autograd.grad(out, leaves, do) for leaves, out in more]
    assert answers == [True, True, False], "that of a checkpoint is overwritten, what other hooks hold is not"
    assert versions == [tensor._version for tensor in kept[: len(versions)]]
    for found in (recorded, last, *others):
        assert all(map(torch.equal, found, first)), "the bits are others"


def record_all(case: Case) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return leaves, output and the gradient of the output, of the same call each time."""
    tensors = make_tensors(case)
    do = torch.randn(tensors["x"].shape, generator=torch.Generator().manual_seed(1)).to(tensors["x"].dtype)
    leaves = {name: tensors[name].detach().requires_grad_() for name in names_of_gradients(tensors)}
    return [*leaves.values()], run(case, {**tensors, **leaves}, kernel="grouped_triton"), do


@contextlib.contextmanager
def failing(module: Any, name: str, at: int) -> Iterator[None]:
    """Let a function fail when it is called so many times, one of kernels when so many weights' gradients are made."""
    function, times = getattr(module, name), itertools.count(1)

    def call(*given: Any) -> Any:
        counts = module is calls or given[0].source.name == "_weight_gradient_kernel"
        if counts and next(times) == at:
            raise MemoryError(name)
        return function(*given)

    # Prepared runs hold the functions that they call.
    with mock.patch.dict(gradients._prepared, clear=True), mock.patch.object(module, name, call):
        yield


def check_failing(case: Case) -> None:
    """Repeat a last backward pass that failed: the same bits if nothing was overwritten, else an error."""
    leaves, out, do = record_all(case)
    expected = torch.autograd.grad(out, leaves, do)
    # Memory of the routed part, then of the shared one; a launch of either, behind that which overwrites.
    for module, name, at in ((calls, "allocate", 1), (calls, "allocate", 2), (prepare, "interpret", 1),
                             (prepare, "interpret", 3)):  # fmt: skip
        leaves, out, do = record_all(case)
        with failing(module, name, at):
            assert_raises(MemoryError, name, torch.autograd.grad, out, leaves, do)
        if (name, at) == ("allocate", 1):
            again = torch.autograd.grad(out, leaves, do)
            assert all(map(torch.equal, again, expected)), "nothing was overwritten"
        else:
            assert_raises(RuntimeError, "modified by an inplace operation", torch.autograd.grad, out, leaves, do)


def check_elsewhere(case: Case) -> None:
    """Make last backward passes in other ways than by one call of ``grad``: the bits must be equal."""
    leaves, out, do = record_all(case)
    expected = torch.autograd.grad(out, leaves, do)
    leaves, out, do = record_all(case)
    with torch.inference_mode():
        found = torch.autograd.grad(out, leaves, do)
    assert all(map(torch.equal, found, expected)), "in inference mode"
    leaves, out, do = record_all(case)
    hook = out.grad_fn.register_hook(lambda *_: 1 / 0)  # type: ignore[union-attr]
    assert_raises(ZeroDivisionError, "division by zero", torch.autograd.grad, out, leaves, do)
    hook.remove()
    assert_raises(RuntimeError, "modified by an inplace operation", torch.autograd.grad, out, leaves, do)
    names = names_of_gradients(make_tensors(case))

    def call(*given: torch.Tensor) -> torch.Tensor:
        return run(case, {**make_tensors(case), **dict(zip(names, given, strict=True))}, kernel="grouped_triton")

    checkpoint = torch.utils.checkpoint.checkpoint
    kept = [torch.ops.flashmoe_science.fused_moe_kept.default]
    contexts = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, kept)
    ways: list[dict[str, Any]] = [
        {"use_reentrant": True}, {"use_reentrant": False}, {"use_reentrant": False, "context_fn": contexts}
    ]  # fmt: skip
    for way in ways:
        out = checkpoint(call, *leaves, **way)
        for retain in (True, False) if "context_fn" not in way else (False,):  # which can be run once
            for leaf in leaves:
                leaf.grad = None
            out.backward(do, retain_graph=retain)
            found = tuple(leaf.grad for leaf in leaves)  # type: ignore[misc]
            assert all(map(torch.equal, found, expected)), way


def assert_raises(kind: type[Exception], words: str, call: Any, *given: Any) -> None:
    try:
        call(*given)
    except kind as error:
        assert words in str(error), error  # noqa: PT017 - this process has no pytest
    else:
        raise AssertionError(f"{kind.__name__} was not raised: {words}")


def check_parts(case: Case) -> None:
    """Compare gradients in parts of few columns with those in one: bits must be equal."""
    tensors = make_tensors(case)
    do = torch.randn(tensors["x"].shape, generator=torch.Generator().manual_seed(1)).to(tensors["x"].dtype)
    names = names_of_gradients(tensors)

    def make(wanted: list[str]) -> tuple[Any, tuple[torch.Tensor, ...]]:
        gradients._prepared.clear()
        leaves = {name: tensors[name].detach().requires_grad_() for name in wanted}
        out = run(case, {**tensors, **leaves}, kernel="grouped_triton")
        with answers_of("plan_backward") as plans:
            return plans, torch.autograd.grad(out, [*leaves.values()], do)

    (plan,), found = make(names)
    expected = dict(zip(names, found, strict=True))
    assert plan.steps.count("dactivation") == plan.steps.count("dx") == 1
    narrow: dict[str, Any] = {
        "SMALL_SCRATCH_BYTES": 0,
        "SCRATCH_OF_KEPT": 1 << 20,
        "FEWEST_COLUMNS": 32,
        "COLUMN_STEP": 32,
    }
    with mock.patch.multiple(backward_plan, **narrow):
        for wanted in (names, [name for name in names if name not in ("w_gate_up", "bias_gate_up")]):
            (plan,), found = make(wanted)
            different = [name for name, a in zip(wanted, found, strict=True) if not torch.equal(a, expected[name])]
            assert not different, f"{different} have other bits in parts"
            parts = [plan.steps.count(step) for step in ("dactivation", "ddown", "dx", "dcombine")]
            assert min(parts) > 1, parts
            assert (plan.scratch == 0) == ("w_gate_up" in wanted), "whose memory it is"
    gradients._prepared.clear()


def check_invariance(case: Case) -> None:
    """Compare each token alone with the same token in the batch: bits must be equal."""
    tensors = make_tensors(case)
    out = run(case, tensors)
    for t in range(0, case.tokens, 3):
        one = {name: tensors[name][t : t + 1].contiguous() for name in ("x", "topk_weights", "topk_ids")}
        assert torch.equal(run(case, {**tensors, **one})[0], out[t]), f"token {t} has other bits alone"


def check_permutation(case: Case) -> None:
    """Compare with the same tokens in another order, to experts that are numbered in another order."""
    tensors = make_tensors(case)
    generator = torch.Generator().manual_seed(7)
    rows = torch.randperm(case.tokens, generator=generator)
    order = torch.randperm(case.experts, generator=generator)
    of_tokens = {"x", "topk_weights", "topk_ids", "shared_weights"} & tensors.keys()
    of_experts = {"w_gate_up", "w_down", "bias_gate_up", "bias_down"} & tensors.keys()
    moved = {name: tensors[name][rows].contiguous() for name in of_tokens}
    moved["topk_ids"] = order.argsort()[moved["topk_ids"].long()].to(tensors["topk_ids"].dtype)
    moved.update({name: tensors[name][order] for name in of_experts})
    do = torch.randn(tensors["x"].shape, generator=generator).to(tensors["x"].dtype)
    if case.gradients:
        found, again = run_gradients(case, tensors, do), run_gradients(case, {**tensors, **moved}, do[rows])
    else:
        found, again = {"out": run(case, tensors)}, {"out": run(case, {**tensors, **moved})}
    for name, value in found.items():
        place = rows if name in of_tokens | {"out"} else order if name in of_experts else slice(None)
        torch.testing.assert_close(again[name], value[place], rtol=1e-5, atol=1e-5, msg=f"{name} differs")


def check_route(logits: torch.Tensor, top_k: int, bias: torch.Tensor | None, **options: Any) -> None:
    """Compare with the reference: experts exactly, weights closely."""
    weights, ids = run_route(describe_routing(logits, top_k, bias=bias, **options), logits, bias)
    exact_weights, exact_ids = reference.route(logits, top_k, bias=bias, **options)
    assert torch.equal(ids, exact_ids), f"{ids} instead of {exact_ids}"
    torch.testing.assert_close(weights, exact_weights, rtol=1e-5, atol=1e-7, equal_nan=True)
    if bias is None or not logits.isnan().any():
        check_route_gradient(logits.nan_to_num(0.0, 0.0, -9.0), top_k, bias, **options)


def check_route_gradient(logits: torch.Tensor, top_k: int, bias: torch.Tensor | None, **options: Any) -> None:
    """Compare the gradient of the logits with that of autograd through the reference, in fp64."""
    leaf = logits.double().requires_grad_()
    exact, ids = reference.route(leaf, top_k, bias=bias, **options, dtype=torch.float64)
    dweights = torch.randn(exact.shape, generator=torch.Generator().manual_seed(4))
    (gradient,) = torch.autograd.grad(exact, leaf, dweights.double(), allow_unused=True)
    routing = describe_routing(logits, top_k, bias=bias, **options)
    found = run_route_backward(routing, logits, ids, dweights)
    named = {name: options[name] for name in ("score", "renormalize", "scale") if name in options}
    of_reference = reference.route_gradient(dweights, logits, ids, **named, dtype=torch.float64)
    torch.testing.assert_close(found.double(), gradient, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of_reference, gradient, rtol=1e-10, atol=1e-12)


def check_routes(seed: int) -> None:
    """Route with every option, ties, NaN and -inf among the logits."""
    g = torch.Generator().manual_seed(seed)
    for tokens, experts, top_k, options, biased in (
        (5, 8, 2, {}, False),
        (17, 128, 8, {"renormalize": False}, False),
        (7, 60, 6, {"score": "sigmoid", "scale": 2.5}, True),
        (9, 32, 4, {"score": "sigmoid", "groups": 8, "top_groups": 3}, True),
        (9, 12, 2, {"groups": 3, "top_groups": 1}, False),
        (1, 5, 5, {"score": "sigmoid", "renormalize": False, "groups": 5, "top_groups": 5}, True),
        (6, 1, 1, {}, False),
        (0, 4, 2, {}, False),
    ):
        logits = torch.randn(tokens, experts, generator=g)
        if tokens > 5 and experts > 5:
            logits[2, :], logits[3, 4], logits[4, :5], logits[5, :] = math.nan, math.nan, -math.inf, 0.0
            logits[5, ::2] = -0.0  # equal to 0.0
        bias = torch.randn(experts, generator=g) * 0.3 if biased else None
        check_route(logits, top_k, bias, **options)
        check_route(logits.t().contiguous().t(), top_k, bias, **options)
    far = far_apart(torch.randn(5, 8, generator=g))
    check_route(far, 2, None)
    check_route_gradient(far, 2, None)


def check_sort(experts: int, pairs: int) -> None:
    """Compare what both passes make with torch's stable sort; most pairs go to one expert, and some to none."""
    ids = torch.randint(-2, experts + 1, (pairs, 1), generator=torch.Generator().manual_seed(pairs), dtype=torch.int32)
    ids[: pairs // 2] = min(2, experts - 1)
    problem = MoeProblem(pairs, experts, 1, 16, 16, "fp32")
    config = TileConfig(16, Tile(16, 16, 4, 1), Tile(16, 16, 4, 1))
    forward = make_plan(problem, "CPU", 0, "grouped_triton", config, None, "a test asked")
    backward = backward_plan.make_backward_plan(problem, "CPU", 0, SMALL_BACKWARD, ("x",), "a test asked")
    assert SMALL_BACKWARD.block_m == 16
    for plan in (forward, backward):
        made = {name: torch.full((size,), -7, dtype=torch.int32) for name, size in workspace_sizes(plan).items()}
        for step, kernel in zip(plan.steps, kernels_of(plan), strict=True):
            if step in ("sort", "count", "sum", "place"):
                interpret(kernel, {"topk_ids": ids, **made})
        assert_sorted(ids.flatten().long(), experts, made)


def assert_sorted(flat: torch.Tensor, experts: int, made: dict[str, torch.Tensor]) -> None:
    """Check order, places, tiles of 16 rows and offsets, if there are some."""
    pairs = len(flat)
    exists = (flat >= 0) & (flat < experts)
    order = torch.sort(torch.where(exists, flat, experts), stable=True).indices[: int(exists.sum())]
    assert torch.equal(made["order_ptr"][: len(order)].long(), order)
    places = torch.full((pairs,), -1)
    places[order] = torch.arange(len(order))
    assert torch.equal(made["positions_ptr"][:pairs].long(), places)
    counts = torch.bincount(flat[exists], minlength=experts).tolist()
    tiles, start = [], 0
    for expert, count in enumerate(counts):
        tiles += [[expert, row, min(row + 16, start + count)] for row in range(start, start + count, 16)]
        start += count
    table = made["tiles_ptr"].view(-1, 4)
    assert table[0, 0] == len(tiles) <= len(table) - 1
    assert table[1 : 1 + len(tiles), :3].tolist() == tiles
    if "offsets_ptr" in made:
        assert made["offsets_ptr"][: experts + 5].tolist() == [0, *itertools.accumulate(counts), 0, 0, 0, 0]


def main() -> None:
    """Serve until stdin ends."""
    empty = torch.empty
    torch.empty = lambda *a, **o: fill(empty(*a, **o))
    for line in sys.stdin:
        try:
            what = eval(line, {"Case": Case})  # the parent's own repr
            if isinstance(what, int):
                check_routes(what)
            elif isinstance(what, tuple):
                check_sort(*what)
            elif what.permuted:
                check_permutation(what)
            elif what.overwritten:
                check_overwriting(what)
            elif what.failing:
                check_failing(what)
                check_elsewhere(what)
            elif what.narrow:
                check_parts(what)
            elif what.gradients:
                check_gradients(what)
            else:
                check_invariance(what) if what.batch_invariant else check(what)
            answer = "right"
        except Exception as error:  # noqa: BLE001 - the parent fails the test with it
            answer = f"{type(error).__name__}: {error}".replace("\n", " | ")
        print(answer, flush=True)


if __name__ == "__main__":
    main()
