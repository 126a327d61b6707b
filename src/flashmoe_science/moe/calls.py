"""From a call of ``fused_moe`` to its prepared launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from . import reference
from .plan import MoePlan, workspace_sizes
from .problem import MoeProblem

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001 - what torch.compile's code calls
Call = Callable[[Mapping[str, Tensor]], Tensor]


def prepare_call(plan: MoePlan, device: torch.device) -> Call:
    """Compile and load the kernels of a plan, and return ``call(tensors)``, which gives the output."""
    if plan.kernel == "reference":
        return _reference_call(plan.problem)
    if device.type == "cpu":
        return _interpreter_call(plan)
    return _cuda_call(plan, device)


def _reference_call(problem: MoeProblem) -> Call:
    names = ("activation", "alpha", "limit", "interleaved")
    options: dict[str, Any] = {name: getattr(problem, name) for name in names}

    def call(tensors: Mapping[str, Any]) -> Tensor:
        return reference.fused_moe(**tensors, **options)

    return call


def _allocate(plan: MoePlan, x: Tensor) -> dict[str, Tensor]:
    """Return output, intermediates and workspace, not written yet."""
    problem, device = plan.problem, x.device
    made = {"out": torch.empty(problem.tokens, problem.hidden, dtype=x.dtype, device=device)}
    if not plan.steps:
        return made
    made["h"] = torch.empty(problem.pairs, problem.inter, dtype=x.dtype, device=device)
    if "combine" in plan.steps:
        made["y"] = torch.empty(problem.pairs, problem.hidden, dtype=x.dtype, device=device)
    if problem.shared_experts:
        rows = problem.shared_experts * problem.tokens
        made["shared_h"] = torch.empty(rows, problem.shared_inter, dtype=x.dtype, device=device)
        made["shared_y"] = torch.empty(rows, problem.hidden, dtype=x.dtype, device=device)
    sizes = workspace_sizes(plan)
    if sizes:
        whole = torch.empty(sum(sizes.values()), dtype=torch.int32, device=device)
        parts = torch.split(whole, [*sizes.values()])
        made.update(zip(sizes, parts, strict=True))
    return made


def _interpreter_call(plan: MoePlan) -> Call:
    from .prepare import interpret, prepare_moe_kernels

    if plan.problem.dtype == "bf16":
        raise UnsupportedError(
            "Triton's interpreter multiplies bf16 wrongly", hint="use fp16 or fp32 with TRITON_INTERPRET=1"
        )
    kernels = prepare_moe_kernels(plan)

    def call(tensors: Mapping[str, Tensor]) -> Tensor:
        made = _allocate(plan, tensors["x"])
        for kernel in kernels:
            interpret(kernel, {**tensors, **made})
        return made["out"]

    return call


def _cuda_call(plan: MoePlan, device: torch.device) -> Call:
    """Return the call that allocates and launches."""
    from ..gpu.launch import prepare_launch
    from .prepare import prepare_moe_kernels

    index = device.index
    launches = [
        (
            prepare_launch(kernel.source, plan.arch, index, kernel.grid, kernel.scalars),
            [*kernel.tensors, *[""] * (4 - len(kernel.tensors))],  # a launch takes four addresses at the least
        )
        for kernel in prepare_moe_kernels(plan)
    ]
    stream_of = _raw_stream
    assert stream_of is not None

    def run(tensors: Mapping[str, Tensor]) -> Tensor:
        made = _allocate(plan, tensors["x"])
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        addresses.update({name: tensor.data_ptr() for name, tensor in made.items()})
        addresses[""] = 0
        stream = stream_of(index)
        for launch, names in launches:
            launch(stream, *[addresses[name] for name in names])
        return made["out"]

    if torch.cuda.device_count() == 1:
        return run

    def run_on_device(tensors: Mapping[str, Tensor]) -> Tensor:
        with torch.cuda.device(device):
            return run(tensors)

    return run_on_device
