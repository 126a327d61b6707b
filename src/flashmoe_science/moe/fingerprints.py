"""What decides, in one hash, what a GPU runs for a call of the experts, ours or a rival's: see ``gpu/call_code.py``.

Launches show kernels, constants, grids and maps. Besides, a call is told by which tensors each kernel is given, by what
it allocates, and by how its inputs lie: modules that plan and prepare decide these too, and are not followed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode  # what torch.compile traces with

from ..gpu import call_code
from ..gpu.specs import GpuSpec
from .backward_plan import GRADIENTS, BackwardPlan, column_sums, plan_backward
from .calls import allocate, kernels_of
from .inputs import TENSORS, cast_under_autocast, moe_problem_of
from .plan import MoePlan, plan_moe, workspace_sizes
from .problem import MoeProblem, Options

_PACKAGE = __package__.rpartition(".")[0]
NOT_FOLLOWED_OF_GRADIENTS = frozenset(
    f"{_PACKAGE}{module}"
    for module in (
        "", ".errors", ".gpu.device", ".gpu.specs", ".gpu.machine_code",
        *(f".moe.{room}" for room in ("backward_plan", "hopper_plan", "inputs", "plan", "problem", "tiles")),
        *(f".moe.{room}" for room in ("prepare", "prepare_backward", "prepare_sm90", "reference")),
    )
)  # fmt: skip
# Of calls that record nothing, what makes gradients decides nothing.
NOT_FOLLOWED = NOT_FOLLOWED_OF_GRADIENTS | {f"{_PACKAGE}.moe.gradients"}
# Of these the following run at each call, and not only where a call of its kind is prepared: wall time has them in it.
_OF_EACH_CALL = frozenset(f"moe/{name}.py" for name in ("inputs", "plan", "problem"))
RUN_AT_EACH_CALL = _OF_EACH_CALL | {"moe/gradients.py"}
RUN_AT_EACH_CALL_OF_GRADIENTS = _OF_EACH_CALL | {"gpu/refusals.py", "gpu/subclasses.py", "moe/backward_plan.py"}
# Rivals do not call ours, and one of them is the reference.
_NOT_FOLLOWED_OF_RIVALS = (NOT_FOLLOWED | {f"{_PACKAGE}.moe.api"}) - {f"{_PACKAGE}.moe.reference"}
_OF_KERNELS = frozenset(
    f"{_PACKAGE}.moe.{module}"
    for module in (
        "activation_gluon_sm90", "backward_triton", "combine_triton", "gemv_triton", "grouped_gluon_sm90",
        "grouped_triton", "route_triton", "sort_triton", "weights_gluon_sm90",
    )
)  # fmt: skip
# What rivals, and who makes the inputs, read of a problem that is not in its table.
_DERIVED = ("columns_up", "expert_bytes", "features", "gated", "pairs", "shared_bytes")
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_IDS = {"i32": torch.int32, "i64": torch.int64}


def like_inputs(problem: MoeProblem) -> dict[str, Tensor]:
    """Return tensors that lie as the inputs of a problem do; within ``FakeTensorMode`` they have no memory.

    The inputs themselves would have values: a routing is drawn by them.
    """
    p, dtype = problem, _DTYPES[problem.dtype]
    made = {
        "x": torch.empty_strided((p.tokens, p.hidden), p.x_strides, dtype=dtype),
        "w_gate_up": torch.empty_strided((p.experts, p.columns_up, p.hidden), p.gate_up_strides, dtype=dtype),
        "w_down": torch.empty_strided((p.experts, p.hidden, p.inter), p.down_strides, dtype=dtype),
        "topk_weights": torch.empty((p.tokens, p.top_k), dtype=_DTYPES[p.weights_dtype]),
        "topk_ids": torch.empty((p.tokens, p.top_k), dtype=_IDS[p.ids_dtype]),
    }
    if p.bias_gate_up:
        made["bias_gate_up"] = torch.empty((p.experts, p.columns_up), dtype=dtype)
    if p.bias_down:
        made["bias_down"] = torch.empty((p.experts, p.hidden), dtype=dtype)
    if p.shared_experts:
        theirs = like_inputs(p.shared())
        made.update(shared_gate_up=theirs["w_gate_up"], shared_down=theirs["w_down"])
    if p.shared_weights:
        made["shared_weights"] = torch.empty((p.tokens, p.shared_experts), dtype=_DTYPES[p.shared_weights])
    return made


def as_called(problem: MoeProblem, options: Mapping[str, Any]) -> MoeProblem:
    """Return ``problem`` as a call with its inputs and options describes it."""
    with FakeTensorMode():
        given = cast_under_autocast(like_inputs(problem))
        return moe_problem_of(given, Options(**options), keep_product=problem.keep_product)


def _layouts(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: [tensor.shape, tensor.stride(), str(tensor.dtype)] for name, tensor in tensors.items()}


def _told_of(problem: MoeProblem, table: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return of a case what its inputs hold and how they are given."""
    with FakeTensorMode():
        inputs = _layouts(like_inputs(problem))
    return {"case": dict(table), "inputs": inputs, "options": dict(options), "arguments": TENSORS}


def allocated_bytes(plan: MoePlan) -> list[int]:
    """Return the bytes of every tensor that a call makes; parts of one count once."""
    with FakeTensorMode():
        made = allocate(plan, like_inputs(plan.problem))
        storages = [tensor.untyped_storage() for tensor in made.values()]
        return [*{storage._cdata: storage.nbytes() for storage in storages}.values()]  # noqa: SLF001 - parts share one


def subject_code(
    operator: Any, entry: str, plan: MoePlan, table: Mapping[str, Any], options: Mapping[str, Any]
) -> str | None:
    """Return the hash of a call of ours, as ``call_code`` does; None where something cannot be followed.

    Args:
        operator: that makes the inputs and binds the call.
        entry: what is called, ``module:name``.
        plan: for the problem as the call describes it.
        table: the case, as suites have it.
        options: that the call is given.
    """
    from .prepare import prepare_moe_kernels
    from .prepare_backward import prepare_backward_kernels

    kernels = kernels_of(plan)
    with FakeTensorMode():
        made = _layouts(allocate(plan, like_inputs(plan.problem)))
    told = {
        **_told_of(plan.problem, table, options),
        "gradients": GRADIENTS,
        "made": made,
        "tensors": [kernel.tensors for kernel in kernels],
    }
    planned: tuple[Callable[..., Any], ...]
    if isinstance(plan, BackwardPlan):
        not_followed = NOT_FOLLOWED_OF_GRADIENTS
        planned = plan_backward, prepare_backward_kernels, workspace_sizes, column_sums
    else:
        not_followed = NOT_FOLLOWED
        planned = plan_moe, prepare_moe_kernels, workspace_sizes
    return call_code.subject_code(
        operator, entry, plan.arch, kernels, planned, not_followed=not_followed, of_kernels=_OF_KERNELS, told=told
    )


def rival_code(
    operator: Any, rival: Any, problem: MoeProblem, gpu: GpuSpec, table: Mapping[str, Any], options: Mapping[str, Any]
) -> str | None:
    """Return the hash of how a rival is called, as ``call_code`` does; None where something cannot be followed."""
    told = _told_of(problem, table, options) | {name: getattr(problem, name) for name in _DERIVED}
    return call_code.rival_code(operator, rival, told, gpu, not_followed=_NOT_FOLLOWED_OF_RIVALS)
