"""From a call of ``fused_moe``, or of its gradients, to its prepared launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..gpu.checks import check_storages
from . import reference
from .backward.plan import BackwardPlan, column_sums
from .plan import MoePlan, workspace_sizes
from .prepared import place_of
from .problem import MoeProblem
from .tiles import BackwardConfig

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001 - what torch.compile's code calls
# Takes the tensors of a call, and returns all that it computes, by name.
Run = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
_MAX_PREPARED = 8192


def remember(prepared: dict[object, Run], key: object, run: Run) -> Run:
    """Cache a prepared run under the key of its calls, and return it."""
    if len(prepared) >= _MAX_PREPARED:
        prepared.clear()
    prepared[key] = run
    return run


def prepare_run(plan: MoePlan, device: torch.device) -> Run:
    """Compile and load the kernels of a plan, and return the function that allocates and launches."""
    if plan.kernel == "reference":
        return _reference_run(plan.problem)
    if device.type == "cpu":
        return _interpreter_run(plan)
    return _cuda_run(plan, device)


def reference_options(problem: MoeProblem) -> dict[str, Any]:
    """Return the options of ``reference.fused_moe`` and ``reference.moe_gradients``."""
    return {name: getattr(problem, name) for name in ("activation", "alpha", "limit", "interleaved")}


def _reference_run(problem: MoeProblem) -> Run:
    """Return a run of eager torch. It keeps no product: its gradients recompute everything."""
    options = reference_options(problem)

    def run(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
        check_storages(tensors)
        made = {"out": reference.fused_moe(**tensors, **options)}
        if problem.keep_product:
            x = tensors["x"]
            made.update((name, x.new_empty((0, 0))) for name in ("product", "shared_product"))
        return made

    return run


def allocate(
    plan: MoePlan, tensors: Mapping[str, Tensor], workspace: Mapping[str, int] | None = None
) -> dict[str, Tensor]:
    """Allocate output, intermediates and workspace, uninitialised.

    Args:
        plan: The plan of the call.
        tensors: The tensors of the call, by name.
        workspace: ``workspace_sizes(plan)``, if already computed.
    """
    problem, x = plan.problem, tensors["x"]
    device = x.device
    if isinstance(plan, BackwardPlan):
        made = _allocate_backward(plan, tensors)
    else:
        made = {"out": torch.empty(problem.tokens, problem.hidden, dtype=x.dtype, device=device)}
        if problem.keep_product:
            made.update(_allocate_products(problem, x))
        if not plan.steps:
            return made
        made["h"] = torch.empty(problem.pairs, problem.inter, dtype=x.dtype, device=device)
        if "combine" in plan.steps:
            made["y"] = torch.empty(problem.pairs, problem.hidden, dtype=x.dtype, device=device)
        if problem.shared_experts:
            rows = problem.shared_experts * problem.tokens
            made["shared_h"] = torch.empty(rows, problem.shared_inter, dtype=x.dtype, device=device)
            made["shared_y"] = torch.empty(rows, problem.hidden, dtype=x.dtype, device=device)
    sizes = workspace_sizes(plan) if workspace is None else workspace
    if sizes:
        whole = torch.empty(sum(sizes.values()), dtype=torch.int32, device=device)
        parts = torch.split(whole, [*sizes.values()])
        made.update(zip(sizes, parts, strict=True))
    return made


def _mark_overwritten(tensors: Mapping[str, Tensor]) -> None:
    """Tell autograd that the launches will overwrite the first product.

    This comes after the allocations, which may fail and be retried, and before the first launch: once one has run, a
    second backward pass must be refused.
    """
    if "dproduct" in tensors:
        torch.autograd.graph.increment_version(tensors["dproduct"])


def _allocate_products(problem: MoeProblem, x: Tensor) -> dict[str, Tensor]:
    """Allocate the first products of routed and of shared experts, which gradients need."""
    theirs = problem.shared() if problem.shared_experts else None
    return {
        "product": torch.empty(problem.pairs, problem.columns_up, dtype=x.dtype, device=x.device),
        "shared_product": torch.empty(
            (theirs.pairs, theirs.columns_up) if theirs else (0, 0), dtype=x.dtype, device=x.device
        ),
    }


def _allocate_backward(plan: BackwardPlan, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Allocate gradients and intermediates. The gradient of a bias comes with that of its weight."""
    problem, config, wanted, x = plan.problem, plan.config, plan.wanted, tensors["x"]
    assert isinstance(config, BackwardConfig)
    made: dict[str, Tensor] = {}

    def add(name: str, *shape: int, dtype: torch.dtype = x.dtype) -> None:
        made[name] = torch.empty(shape, dtype=dtype, device=x.device)

    if "dproduct" not in tensors:  # otherwise it overwrites the product
        add("dproduct", problem.pairs, problem.columns_up)
    if "topk_weights" in wanted:
        add("sums", problem.pairs, column_sums(problem, config), dtype=torch.float32)
        kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
        add("d_topk_weights", problem.tokens, problem.top_k, dtype=kinds[problem.weights_dtype])
    if "x" in wanted:
        add("d_x", problem.tokens, problem.hidden)
    if {"dgate_up", "dgate_up_sm90"} & set(plan.steps):
        add("d_w_gate_up", problem.experts, problem.columns_up, problem.hidden)
        add("d_bias_gate_up", problem.experts, problem.columns_up)
    if {"ddown", "ddown_sm90"} & set(plan.steps):
        add("d_w_down", problem.experts, problem.hidden, problem.inter)
        add("d_bias_down", problem.experts, problem.hidden)
    if plan.scratch:
        add("scratch", plan.scratch)
    elif "d_w_gate_up" in made:
        made["scratch"] = made["d_w_gate_up"]
    return made


def kernels_of(plan: MoePlan) -> tuple[Any, ...]:
    """Return the kernels of a plan, in launch order."""
    if isinstance(plan, BackwardPlan):
        from .backward.prepare import prepare_backward_kernels

        return prepare_backward_kernels(plan)
    from .prepare import prepare_moe_kernels

    return prepare_moe_kernels(plan)


def _interpreter_run(plan: MoePlan) -> Run:
    from .prepare import interpret

    if plan.problem.dtype == "bf16":
        raise UnsupportedError(
            "Triton's interpreter multiplies bf16 wrongly", hint="use fp16 or fp32 with TRITON_INTERPRET=1"
        )
    kernels, workspace = kernels_of(plan), workspace_sizes(plan)

    def run(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made = allocate(plan, tensors, workspace)
        _mark_overwritten(tensors)
        for kernel in kernels:
            interpret(kernel, {**tensors, **made})
        return made

    return run


def _cuda_run(plan: MoePlan, device: torch.device) -> Run:
    """Return the function that allocates and launches on a GPU."""
    from ..gpu.launch import prepare_launch

    index = device.index
    launches = [
        (
            prepare_launch(kernel.source, plan.arch, index, kernel.grid, kernel.scalars, kernel.tensor_maps),
            [*kernel.tensors, *[""] * (4 - len(kernel.tensors))],  # a launch takes at least four addresses
        )
        for kernel in kernels_of(plan)
    ]
    workspace = workspace_sizes(plan)
    places = {place for _, names in launches for place in names}
    inside = [(place, *place_of(place)) for place in places if "+" in place]
    stream_of = _raw_stream
    assert stream_of is not None

    def run(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made = allocate(plan, tensors, workspace)
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        addresses.update({name: tensor.data_ptr() for name, tensor in made.items()})
        addresses[""] = 0
        for place, name, offset in inside:
            addresses[place] = addresses[name] + offset
        _mark_overwritten(tensors)
        stream = stream_of(index)
        for launch, names in launches:
            launch(stream, *[addresses[name] for name in names])
        return made

    if torch.cuda.device_count() == 1:
        return run

    def run_on_device(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.cuda.device(device):
            return run(tensors)

    return run_on_device
